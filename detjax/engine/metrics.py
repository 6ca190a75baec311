# SPDX-License-Identifier: Apache-2.0
"""What an engine counts about itself, in the process."""

import bisect
import dataclasses
from dataclasses import dataclass, field

LOG_BOUNDS = tuple(1e-6 * 2 ** (i / 4) for i in range(140))
"""From 1 microsecond to 8 hours, 19 % apart."""

FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
END_TO_END_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Seconds of the buckets of vLLM's metrics."""

_BOUNDS = tuple(
    sorted({*LOG_BOUNDS, *FIRST_TOKEN_BOUNDS, *BETWEEN_TOKENS_BOUNDS, *END_TO_END_BOUNDS})
)
"""Edges of a histogram's buckets: all of these, so that it counts exactly up to any of them."""


@dataclass(kw_only=True, slots=True)
class Histogram:
    """Positive numbers in buckets up to 19 % wide: a quantile is right to that. Constant size."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    count: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a number."""
        self.counts[bisect.bisect_left(_BOUNDS, value)] += times
        self.count += times
        self.total += value * times
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        """0 where nothing was counted."""
        return self.total / self.count if self.count else 0.0

    def up_to(self, edge: float) -> int:
        """How many were no greater than an edge of a bucket."""
        index = bisect.bisect_left(_BOUNDS, edge)
        assert _BOUNDS[index] == edge, f"{edge} is no edge"
        return sum(self.counts[: index + 1])

    def quantile(self, share: float) -> float:
        """The upper edge of the bucket that holds it, but at most the largest; 0 without any."""
        left = share * self.count
        for edge, count in zip((*_BOUNDS, self.largest), self.counts, strict=True):
            left -= count
            if count and left <= 0:
                return min(edge, self.largest)
        return self.largest


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCounts:
    """Windows of one source of drafts.

    Attributes:
        num_windows: Verified.
        draft_tokens: Drafts verified.
        accepted_tokens: Drafts committed.
    """

    num_windows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance(self) -> float:
        """Share of verified drafts that were committed."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_window(self) -> float:
        """Tokens that a window has committed: its accepted drafts, and the one behind them."""
        return 1 + self.accepted_tokens / self.num_windows if self.num_windows else 0.0

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """What has come to earlier counts of the same source."""
        return DraftCounts(
            num_windows=self.num_windows - before.num_windows,
            draft_tokens=self.draft_tokens - before.draft_tokens,
            accepted_tokens=self.accepted_tokens - before.accepted_tokens,
        )


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Counters since the engine was made, and how things stand now. The engine adds to it.

    Attributes:
        compile_s: Compiling.
        compiling: The program that is being compiled while requests wait; empty while none is.
        num_compiled: Programs.
        num_steps: Calls of `step` that launched something.
        num_launches: Programs launched; a step has up to four.
        num_requests: Asked for; the sequences of one count as one.
        num_finished: Sequences that ended by themselves.
        num_cut: Of these, sequences that ended at their greatest length.
        num_failed: Sequences that ended with an error.
        num_cancelled: Sequences that were cancelled.
        num_waiting: Sequences in the queue, now.
        num_running: Sequences with a slot, now.
        num_pages: Pages of the cache.
        num_pages_held: Pages that sequences, and a check of an answer, hold, now.
        num_pages_cached: Pages kept for their content alone, now.
        num_pages_evicted: Such pages that were given out again.
        num_local_pages: Pages of local layers, where they have fewer than the others.
        num_local_pages_held: Of these, what sequences and a check of an answer hold, now.
        num_adapters: Adapters that requests may name, now.
        num_adapters_evicted: Adapters that lost their slot on the devices to another.
        num_preempted: Times a sequence lost its pages to another.
        prompt_tokens: Of all sequences.
        prefix_tokens: Of these, found in the prefix cache.
        prefill_tokens: Computed by prefill; those of preempted sequences again.
        decode_tokens: Committed, by whatever step.
        surplus_tokens: Computed for a sequence that had ended one or two steps before.
        decode_transfers: Decode steps whose rows the host sent, as they did not follow from those
            that were on the devices.
        verify_launches: Verifications; a launch of several windows has as many.
        num_windows: Windows verified.
        draft_tokens: Drafts verified.
        accepted_tokens: Drafts committed.
        num_rollbacks: Windows in which a draft was wrong.
        drafts: The same by the source of drafts: the name of a `Drafter`, or `draft_weights`.
        plan_s: Host: deciding what to run.
        launch_s: Host: laying out rows and handing programs over.
        wait_s: Host: waiting for results. Near zero, the engine's own Python is what limits.
        dispatch_s: Calling programs and starting the copies of their results, in a thread beside
            all these. Near the time of all steps, this is what limits.
        commit_s: Host: reading results and telling consumers.
        self_check_s: Host: checking programs, as far as it took longer than to compile them.
        num_self_checked: Programs that were.
        num_self_unchecked: Canonical programs that run and were not, as no page was idle.
        recheck_s: Host: checking answers again by prefill, while there was nothing else to do.
        num_rechecked: Tokens of answers that were, each with all that comes before it.
        num_rechecks_given_up: Begun, and given up as a request came.
        num_self_check_differences: Bits that differed: see `Engine.self_check_error`.
        step_s: Time of a step.
        first_token_s: From a sequence's arrival to its first token, whatever it waited for.
        between_tokens_s: Between two releases of a sequence.
        end_to_end_s: From a sequence's arrival to its end.
    """

    compile_s: float = 0.0
    compiling: str = ""
    num_compiled: int = 0
    num_steps: int = 0
    num_launches: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_cut: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_pages_held: int = 0
    num_pages_cached: int = 0
    num_pages_evicted: int = 0
    num_local_pages: int = 0
    num_local_pages_held: int = 0
    num_adapters: int = 0
    num_adapters_evicted: int = 0
    num_preempted: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    surplus_tokens: int = 0
    decode_transfers: int = 0
    verify_launches: int = 0
    num_windows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_rollbacks: int = 0
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    plan_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    dispatch_s: float = 0.0
    commit_s: float = 0.0
    self_check_s: float = 0.0
    num_self_checked: int = 0
    num_self_unchecked: int = 0
    recheck_s: float = 0.0
    num_rechecked: int = 0
    num_rechecks_given_up: int = 0
    num_self_check_differences: int = 0
    step_s: Histogram = field(default_factory=Histogram)
    first_token_s: Histogram = field(default_factory=Histogram)
    between_tokens_s: Histogram = field(default_factory=Histogram)
    end_to_end_s: Histogram = field(default_factory=Histogram)

    @property
    def acceptance(self) -> float:
        """Share of verified drafts that were committed."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def windows_per_verify(self) -> float:
        """Rows of a verification that were no padding."""
        return self.num_windows / self.verify_launches if self.verify_launches else 0.0

    def note_drafts(self, source: str, num_drafts: int, num_accepted: int) -> None:
        """Count a verified window of a source of drafts."""
        before = self.drafts.get(source, DraftCounts())
        self.drafts[source] = DraftCounts(
            num_windows=before.num_windows + 1,
            draft_tokens=before.draft_tokens + num_drafts,
            accepted_tokens=before.accepted_tokens + num_accepted,
        )

    def numbers(self) -> dict[str, int | float]:
        """All counters, and mean and quantiles of the histograms, as flat JSON."""
        flat = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Histogram):
                stem = entry.name.removesuffix("_s")
                flat[f"{stem}_mean_s"] = value.mean
                for share in (50, 90, 99):
                    flat[f"{stem}_p{share}_s"] = value.quantile(share / 100)
            elif isinstance(value, dict):
                for source, counts in value.items():
                    flat[f"acceptance_{source}"] = counts.acceptance
                    flat[f"tokens_per_window_{source}"] = counts.tokens_per_window
            elif not isinstance(value, str):
                flat[entry.name] = value
        return flat | {
            "acceptance": self.acceptance,
            "windows_per_verify": self.windows_per_verify,
        }
