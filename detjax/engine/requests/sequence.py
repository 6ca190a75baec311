# SPDX-License-Identifier: Apache-2.0
"""A sequence of a request, the rows in which a step runs it, and the batch of a step's rows."""

import enum
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from detjax.engine.errors import OutOfPagesError
from detjax.engine.outputs.request_output import (
    NO_WINDOWS,
    FinishReason,
    PromptLogprob,
    TokenEvent,
    WindowCounts,
)
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.guides import GuidesTokens
from detjax.models.adapters.low_rank import Adapter

OnToken = Callable[[TokenEvent], bool]
"""Told each token as it is released; True ends the sequence.

It may call `add_request` and `cancel`, and must not call `step`, `drain`, `generate` or `reset`.
"""


def ignore_token(event: TokenEvent) -> bool:
    """Let the sequence go on."""
    return False


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


class HeldPages(NamedTuple):
    """Which pages of a sequence local layers have, one after the other (`scheduling.local_pages`).

    Attributes:
        first: Which page of the sequence is the first of them.
        local_pages: For each, the page of the cache of local layers.
    """

    first: int = 0
    local_pages: tuple[int, ...] = ()


NOTHING_HELD = HeldPages()


@dataclass(kw_only=True, slots=True, eq=False)
class Listener:
    """The consumer of a sequence's tokens. `OutputProcessor` alone changes it.

    Attributes:
        on_token: Told every token.
        request_idx: What its events call the request.
        arrived_s: When the request was made, of `time.perf_counter`.
        num_emitted: Of the sequence's tokens, the prompt's included, those that `on_token` knows.
        released_s: When tokens were last released; 0 before the first.
    """

    on_token: OnToken = ignore_token
    request_idx: int = 0
    arrived_s: float = 0.0
    num_emitted: int = 0
    released_s: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One sequence of a request. The scheduler and its parts alone change it, but `listener`.

    Attributes:
        request_id: Of the request.
        sequence_idx: Which of the request's sequences.
        request: What was asked.
        sampling: Of the request, for its prompt: the noise that its rows draw.
        is_drafted: Tokens may be proposed by drafts and committed by verification.
        is_canonical: What is committed was computed canonically, so its pages may be shared.
        max_len: Length at which it ends.
        end_token_ids: Tokens that end it.
        listener: The consumer of its tokens.
        adapter: With which the model answers; None is the model alone.
        guide: Its grammar, which looks at every token before the next; None where it has none.
        tokens: The prompt and what has been committed.
        is_filtered: Whether it has a top-k, top-p or min-p.
        is_adjusted: Whether it has biases, masks, penalties or processed logprobs.
        needs_choice: Whether it asks for more than a temperature, so that a choice program chooses.
        wants_scores: Whether logprobs of the prompt are wanted. Sequence 0 has them for all of a
            request.
        num_to_score: Tokens of the prompt whose logprobs are wanted: all but the first, or none.
        prompt_logprobs: Those that are known, from the second token on.
        service_order: Order of service; the lowest is never preempted by another.
        state: Waiting, running or done.
        replica: Where it runs.
        slot: Its slot there.
        adapter_slot: Slot of its adapter on the devices while it runs; -1 where it has none.
        num_preemptions: How often it was preempted. Results of rows from before are dropped.
        pages: Its pages, in order.
        page_keys: Of its leading full pages.
        num_registered: How many leading pages the prefix cache knows.
        held: Which of its pages are there for local layers.
        num_to_prefill: Tokens that prefill computes, before decoding goes on.
        num_prefilled: How many of them have been launched.
        num_cached: Tokens of the prompt that the prefix cache had when it first ran.
        num_in_flight: Most tokens that results not read yet may commit.
        drafter_len: Leading tokens that a draft model has run, where it has missed later ones in
            steps without drafts; None where it has missed none. Of a head, what it has missed
            stays missed.
        num_drafts: Drafts launched in the open window.
        window_idx: Of the open window: how many were before it.
        opened_step: When the open window got its first draft.
        closed_step: When the open window was found full; None before.
        windows: Of drafts, those that were verified.
    """

    request_id: int
    sequence_idx: int
    request: Request
    sampling: SamplingParams
    is_drafted: bool
    is_canonical: bool
    max_len: int
    end_token_ids: frozenset[int] = frozenset()
    listener: Listener = field(default_factory=Listener)
    guide: GuidesTokens | None = None
    adapter: Adapter | None = None
    tokens: list[int] = field(init=False)
    is_filtered: bool = field(init=False)
    is_adjusted: bool = field(init=False)
    needs_choice: bool = field(init=False)
    wants_scores: bool = field(init=False)
    num_to_score: int = field(init=False)
    prompt_logprobs: list[PromptLogprob] = field(init=False, default_factory=list)
    service_order: tuple[int, int] = (0, 0)
    state: SequenceState = SequenceState.WAITING
    replica: int = 0
    slot: int = 0
    adapter_slot: int = -1
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    held: HeldPages = NOTHING_HELD
    num_to_prefill: int = 0
    num_prefilled: int = 0
    num_cached: int = 0
    num_in_flight: int = 0
    drafter_len: int | None = None
    num_drafts: int = 0
    window_idx: int = 0
    opened_step: int = 0
    closed_step: int | None = None
    windows: WindowCounts = NO_WINDOWS

    def __post_init__(self):
        """Begin with the prompt."""
        self.tokens = list(self.request.prompt_token_ids)
        self.is_filtered = self.request.sampling.is_filtered
        self.is_adjusted = self.request.sampling.is_adjusted
        reports = self.request.sampling.logprobs > 0
        self.needs_choice = self.is_filtered or self.is_adjusted or reports
        is_wanted = self.request.sampling.prompt_logprobs is not None
        self.wants_scores = is_wanted and self.sequence_idx == 0
        self.num_to_score = len(self.tokens) - 1 if self.wants_scores else 0
        self.listener.num_emitted = len(self.tokens)

    @property
    def name(self) -> str:
        """For traces: request and sequence."""
        return f"{self.request_id}.{self.sequence_idx}"

    @property
    def held_pages(self) -> list[int]:
        """Those of its pages that local layers have for it."""
        return self.pages[self.held.first : self.held.first + len(self.held.local_pages)]

    @property
    def num_outputs(self) -> int:
        """Tokens committed so far."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def output_ids(self) -> list[int]:
        """Tokens committed so far."""
        return self.tokens[len(self.request.prompt_token_ids) :]

    @property
    def len_bound(self) -> int:
        """Longest that `tokens` can be once all results are read."""
        return len(self.tokens) + self.num_in_flight

    @property
    def is_prefilled(self) -> bool:
        """Whether its prompt has been launched to the end."""
        return self.num_prefilled == self.num_to_prefill

    @property
    def is_scored(self) -> bool:
        """Whether the logprobs of the prompt are known, as far as they are wanted."""
        return len(self.prompt_logprobs) == self.num_to_score

    @property
    def end_reason(self) -> FinishReason | None:
        """Why it ends with what it has committed, if it does, whatever its listener says."""
        if self.num_outputs and self.tokens[-1] in self.end_token_ids:
            return FinishReason.STOP
        is_full = len(self.tokens) >= self.max_len and self.is_scored
        return FinishReason.LENGTH if is_full else None


class SequenceError(Exception):
    """Scheduling or laying out a row raised for this sequence alone; the cause says what."""

    def __init__(self, seq: Sequence):
        super().__init__(f"request {seq.request_id}, sequence {seq.sequence_idx}")
        self.seq = seq


@contextmanager
def attributing_errors(seq: Sequence) -> Iterator[None]:
    """Say whose fault it is."""
    try:
        yield
    except Exception as error:
        raise SequenceError(seq) from error


# --------------------------------------------------------------------------------- rows of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRow:
    """Tokens `start` onwards of a sequence; the last row of a prompt chooses a token.

    Where it `is_scored`, the logprobs of the tokens that follow them are wanted too.
    """

    seq: Sequence
    num_preemptions: int
    start: int
    token_ids: abc.Sequence[int]
    is_last: bool
    is_scored: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """`num_tokens` that are committed at once, or as many drafts behind those of a window.

    Before a draft model drafts, it runs the tokens from `missed_from` to the last but one, if any.
    """

    seq: Sequence
    num_preemptions: int
    num_tokens: int
    is_draft: bool
    window_idx: int
    missed_from: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyRow:
    """A window of `num_drafts` drafts of a `source`: those on the device, or `given` by the host.

    The source is the name of a `Drafter`, or the `draft_weights` of drafts on the device.
    """

    seq: Sequence
    num_preemptions: int
    num_drafts: int
    given: tuple[int, ...] | None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsRow:
    """Windows that one launch drafts and verifies, one after the other.

    Each has `num_drafts` drafts, or those that there is room for before the sequence's end.
    Together they commit `most_tokens` at most. The source is the `draft_weights`.
    """

    seq: Sequence
    num_preemptions: int
    num_windows: int
    num_drafts: int
    most_tokens: int
    source: str


Row = PrefillRow | DecodeRow | VerifyRow | WindowsRow


def max_committed(row: Row) -> int:
    """Most tokens that the result of a row can commit."""
    match row:
        case PrefillRow():
            return int(row.is_last and len(row.seq.tokens) < row.seq.max_len)
        case DecodeRow():
            return 0 if row.is_draft else row.num_tokens
        case VerifyRow():
            return row.num_drafts + 1
        case WindowsRow():
            return row.most_tokens


@dataclass(kw_only=True, slots=True)
class ScheduledBatch:
    """Rows of one step, by replica. They run in this order: verify, windows, prefill, decode.

    Attributes:
        verifies: Windows to verify.
        windows: Windows to draft and verify.
        prefill_shape: (rows, tokens a row); None where there is no prefill.
        prefills: Pieces of prompts.
        decodes: Tokens to commit, or drafts.
        failed: Sequences that end here, each with the reason.
    """

    verifies: list[list[VerifyRow]]
    windows: list[list[WindowsRow]]
    prefill_shape: tuple[int, int] | None
    prefills: list[list[PrefillRow]]
    decodes: list[list[DecodeRow]]
    failed: list[tuple[Sequence, OutOfPagesError]]

    @classmethod
    def empty(cls, num_replicas: int) -> "ScheduledBatch":
        """No row yet."""
        return cls(
            verifies=[[] for _ in range(num_replicas)],
            windows=[[] for _ in range(num_replicas)],
            prefill_shape=None,
            prefills=[[] for _ in range(num_replicas)],
            decodes=[[] for _ in range(num_replicas)],
            failed=[],
        )
