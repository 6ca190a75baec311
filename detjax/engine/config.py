# SPDX-License-Identifier: Apache-2.0
"""What an engine is told at its start: sizes and policies, none of which can change a bit."""

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from detjax.defaults import HEADS
from detjax.engine.requests.limits import flag, integer, number

MODES = ("invariant", "dvr", "fast")
DRAFT_MODEL = "draft_model"
DRAFTS_OF_OTHERS = (DRAFT_MODEL, *HEADS)
"""Draft weights that are no form of the model's own."""
OWN_DRAFT_WEIGHTS = ("full", "int8", "float8_e4m3fn")
DRAFT_WEIGHTS = (*OWN_DRAFT_WEIGHTS, *DRAFTS_OF_OTHERS)
MOST_STEPS_AHEAD = 2
"""Steps in flight when results are read, where `steps_ahead` is None."""
SELF_CHECKS = ("off", "start", "always")

AGEING_STEPS = 200
"""Steps of waiting that one level of priority is worth."""

MOSTLY_USEFUL = 0.75
"""Share of a prefill's tokens that are no padding, from which it is as good as one without any.

A step of 512 tokens takes some 30 % of the time of one of 2048 (8B shapes, H200, 2026-11).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and policies of an engine. None of them changes a bit of a deterministic answer.

    The defaults are for a small model on a CPU; `detjax.LLM` chooses sizes by the hardware.

    Attributes:
        batch_size: Sequences that run at once, over all replicas; a multiple of dp.
        prefill_chunk: Prompt tokens of one sequence in one prefill step.
        max_len: Longest prompt plus completion, in tokens.
        mode: `invariant`: every step uses canonical kernels. `dvr`: fast steps draft, canonical
            ones verify; requests that are not deterministic keep what the fast steps gave. `fast`:
            no claim, and deterministic requests are refused.
        num_pages: Cache pages over all replicas, a multiple of dp; 0 is enough for `batch_size`
            sequences of `max_len`.
        num_local_pages: The same of local layers: those with a sliding window or with linear
            attention, in a model that has others as well. Such a layer reads a bounded number of
            tokens back, so it needs fewer pages; what it keeps beyond those of running sequences
            serves prefixes. At least `ReplicaConfig.least_local_pages`; 0 gives these layers
            the pages of the others.
        decode_batches: Further batch sizes, below `batch_size` and over all replicas, for which a
            decode step is compiled; the smallest that holds the rows runs.
        decode_lens: Further lengths, in tokens, for which decode and verify steps are compiled; the
            shortest that holds the longest sequence of a launch runs, `max_len` if none does. So
            speed follows the lengths that there are, not `max_len`. Those of `max_len` or more are
            not compiled.

            # WHY: at batch 1 and 1024 tokens a table of 4096 tokens takes 4.35 ms a step where one
            # of 1024 takes 4.25 (H200, 2026-11): CTAs of a cluster without a split of their own.
            # To 4096 tokens a batch of 64 needs no merge.
        prefill_shapes: Further (sequences, tokens of each) of a replica's prefill step, beside
            (1, `prefill_chunk`); the one that wastes least runs.
        max_tokens_per_step: Most tokens of a replica's step, padding included; 0 sets no limit.
        max_prefill_streak: Steps in a row that decoding waits while there are prompts to prefill.
            For offline work, where one decode step of many sequences costs less than many of a few.
        verify_rows: Most windows of one verification on a replica (G); no more than it has slots.
        verify_batches: Further numbers of windows, below `verify_rows`, for which it is compiled.
        verify_window: Tokens of a window (W): the last committed one and W - 1 drafts.
        verify_patience: Most steps that a full window waits for another that will be full by then.
        verify_deadline: Steps after which a window is verified though it is not full.
        max_draft_fraction: In `dvr`, drafts are made while deterministic sequences are at most this
            share of those that decode. Above it the decode step is canonical, which needs no
            verification: cheaper where canonical kernels are about as fast as others. None: 0 for
            full weights on `sm90`, whose canonical steps are the quicker ones
            (docs/kernels.md), else 1.
        max_draft_batch: Most sequences that decode at once while drafts of a draft model or of the
            prompt are made. More decode without drafts, as a window of a large batch costs more
            than its drafts save. 0 sets no limit.
        adapts_drafts: With drafts of a draft model, of a head or of the prompt: how many a window
            has, or none, by what was quickest at this load (docs/speculation.md). Not in a job of
            several processes, whose clocks differ.
        decode_steps: Steps of the model in one launch, while all who run decode: the host
            launches once for all of them, which pays where a step takes the host longer than
            the device. `LLM`, the server and the command take 8 for models so small, or 4 windows;
            in an `EngineConfig` of your own it is 1. A step is a token of each sequence, or a
            window of a draft model or head. Tokens are released together, what comes behind an end
            is computed for nothing, and a request that arrives waits for the launch. In `dvr` up to
            `verify_window` - 1, the drafts of a window.
        steps_ahead: Steps that are launched ahead of the one whose results are read. With 1 a small
            model waits for its results: reading them takes the host a fraction of a millisecond.
            With 2 that is hidden; a sequence whose end nobody foresaw computes 2 tokens for nothing
            instead of 1, and a request that arrives waits for a step more. None: 2 on a GPU where
            a step takes less than 0.8 ms by the model's size, else 1.
        draft_weights: What drafts are computed with. In `dvr` the weights as they are, or 8-bit
            ones, which take half as much memory again. In `dvr` and `invariant` also
            "draft_model": the weights of a smaller model, which `Engine` is given. It fills a
            window in one launch. Likewise "eagle3" and "mtp": a head.
        has_prompt_lookup: In `invariant`, verify what followed the same tokens earlier in the
            text, or what the request predicts, many tokens a step.
        has_prefix_cache: Share full canonical pages between requests that begin alike.
        max_waiting: Most sequences that wait for a slot; requests beyond it are refused.
        self_check: `start`: each canonical program is compared with prefill once, when it has been
            compiled, at its real sizes. `always`: a server also checks some of its answers again by
            prefill while it has nothing else to do. After a difference no deterministic answer is
            made. `off`: neither.

    Raises:
        ValueError: If a value is out of range or does not go with another.
    """

    batch_size: int = 8
    prefill_chunk: int = 64
    max_len: int = 1024
    mode: str = "invariant"
    num_pages: int = 0
    num_local_pages: int = 0
    decode_batches: tuple[int, ...] = ()
    decode_lens: tuple[int, ...] = (2048, 4096)
    prefill_shapes: tuple[tuple[int, int], ...] = ()
    max_tokens_per_step: int = 0
    max_prefill_streak: int = 0
    verify_rows: int = 8
    verify_batches: tuple[int, ...] = ()
    verify_window: int = 32
    verify_patience: int = 4
    verify_deadline: int = 64
    max_draft_fraction: float | None = None
    max_draft_batch: int = 0
    adapts_drafts: bool = False
    decode_steps: int = 1
    steps_ahead: int | None = None
    draft_weights: str = "full"
    has_prompt_lookup: bool = False
    has_prefix_cache: bool = True
    max_waiting: int = 65_536
    self_check: str = "always"

    def __post_init__(self):
        """Check every type and range."""
        check_types({name: getattr(self, name) for name in self.__dataclass_fields__})
        sizes = "batch_size", "prefill_chunk", "max_len", "verify_rows", "verify_window"
        for name in (*sizes, "decode_steps", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "num_pages",
            "num_local_pages",
            "max_tokens_per_step",
            "max_prefill_streak",
            "verify_patience",
            "max_draft_batch",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.steps_ahead is not None and self.steps_ahead < 1:
            raise ValueError(f"steps_ahead={self.steps_ahead} must be at least 1, or None")
        if self.verify_deadline < 1:
            raise ValueError(f"verify_deadline={self.verify_deadline} must be at least 1")
        for name, choices in (
            ("mode", MODES), ("draft_weights", DRAFT_WEIGHTS), ("self_check", SELF_CHECKS),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {choices}")
        if self.max_len * self.verify_window >= 2**31:
            raise ValueError(
                f"max_len={self.max_len} times verify_window={self.verify_window} must be below "
                "2**31: a slot keeps a position and its number of drafts in one int32"
            )
        self._check_drafts()
        for batch in self.decode_batches:
            if batch < 1:
                raise ValueError(f"{batch} of decode_batches must be at least 1")
            if batch >= self.batch_size:
                raise ValueError(
                    f"{batch} of decode_batches must be below batch_size={self.batch_size}"
                )
        for length in self.decode_lens:
            if length < 1:
                raise ValueError(f"{length} of decode_lens must be at least 1 token")
        for batch in self.verify_batches:
            if not 1 <= batch < self.verify_rows:
                raise ValueError(
                    f"{batch} of verify_batches must be at least 1 and below "
                    f"verify_rows={self.verify_rows}"
                )
        for shape in self.prefill_shapes:
            if len(shape) != 2 or min(shape) < 1:
                raise ValueError(f"{shape} of prefill_shapes must be (sequences, tokens of each)")

    def _check_drafts(self) -> None:
        """Check what drafts go with."""
        by_model = self.draft_weights in DRAFTS_OF_OTHERS
        modes = ("dvr", "invariant") if by_model else ("dvr",)
        if self.draft_weights != "full" and self.mode not in modes:
            needed = " or ".join(map(repr, modes))
            raise ValueError(
                f"draft_weights={self.draft_weights!r} needs mode={needed}, not {self.mode!r}"
            )
        if self.mode == "dvr" and self.decode_steps > max(1, self.verify_window - 1):
            raise ValueError(
                f"decode_steps={self.decode_steps} must be at most verify_window - 1 = "
                f"{self.verify_window - 1} in dvr, the drafts of a window"
            )
        if self.has_prompt_lookup and self.decode_steps > 1:
            raise ValueError(
                f"decode_steps={self.decode_steps} does not go with has_prompt_lookup, which the "
                "speculative methods ngram and suffix set: every token is read before the next is "
                "proposed"
            )
        if self.has_prompt_lookup and self.mode != "invariant":
            raise ValueError(
                "has_prompt_lookup, which the speculative methods ngram and suffix set, needs "
                f"mode='invariant', not {self.mode!r}"
            )
        if by_model and (self.verify_window < 2 or self.has_prompt_lookup):
            raise ValueError(
                f"draft_weights={self.draft_weights!r} needs verify_window={self.verify_window} "
                "above 1, a token and its drafts, and has_prompt_lookup="
                f"{self.has_prompt_lookup} off"
            )
        if self.adapts_drafts and not (by_model or self.has_prompt_lookup):
            raise ValueError(
                f"adapts_drafts=True needs has_prompt_lookup, or draft_weights of "
                f"{DRAFTS_OF_OTHERS}, not {self.draft_weights!r}"
            )
        if self.max_draft_fraction is not None and not 0 <= self.max_draft_fraction <= 1:
            raise ValueError(f"max_draft_fraction={self.max_draft_fraction} must be from 0 to 1")


class ProgramSizes(TypedDict):
    """What programs are compiled for, besides the model, over all replicas: `ReplicaConfig`."""

    num_pages: int
    num_local_pages: int
    num_slots: int
    window_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """What follows from a configuration for each replica: all that the engine's parts read.

    Attributes:
        mode: As `EngineConfig` has it, like every field that is not described here.
        num_replicas: Replicas, each with its own slots and pages.
        num_slots: Sequences that run at once on a replica.
        num_pages: Cache pages of a replica.
        page_len: Tokens of a page.
        table_lens: Pages for which a decode or verify step is compiled, ascending; the last are
            those of the longest sequence.
        prefill_shapes: (sequences, tokens of each) that a prefill may have.
        decode_sizes: Rows that a decode step may have, ascending.
        verify_sizes: Windows that a verification may have, ascending.
        max_tokens_per_step: Most tokens of a step, padding included.
        max_draft_fraction: Most share of drafted sequences among those that decode, at which they
            draft; above it the decode step is canonical and needs no verification.
        draft_lens: Drafts of a window that can be made, ascending; one where nothing is chosen.
        ageing_steps: Steps of waiting that one level of priority is worth.
        has_prompt_lookup: Sequences that are not drafted wait for each result, so that the host can
            propose drafts from it.

        num_local_pages: Pages of local layers of a replica; 0 where they have those of the others.
        local_reach: Tokens back that local layers read, the token itself included.
        has_adapters: Whether the model has room for adapters, so that steps of rows without any
            have programs of their own.
        windows: Windows of a draft model or head that one launch drafts and verifies: at most
            `decode_steps`, and those that fit on a page; one where ranks share layers, as kernels
            that exchange write behind the back of XLA, and a loop may copy what they write.

    Raises:
        ValueError: If no prefill would fit into a step beside everything else.
    """

    mode: str
    num_replicas: int
    num_slots: int
    num_pages: int
    page_len: int
    table_lens: tuple[int, ...]
    prefill_shapes: tuple[tuple[int, int], ...]
    decode_sizes: tuple[int, ...]
    verify_sizes: tuple[int, ...]
    verify_window: int
    verify_patience: int
    verify_deadline: int
    max_tokens_per_step: int
    max_prefill_streak: int
    max_draft_fraction: float
    max_draft_batch: int
    adapts_drafts: bool
    draft_lens: tuple[int, ...]
    decode_steps: int
    draft_weights: str
    ageing_steps: int
    has_prefix_cache: bool
    has_prompt_lookup: bool
    self_check: str
    num_local_pages: int = 0
    local_reach: int = 0
    has_adapters: bool = False
    windows: int = 1

    def __post_init__(self):
        """Check that a prefill always fits."""
        least = min(rows * length for rows, length in self.prefill_shapes)
        least += self.num_slots + self.verify_rows * self.verify_window
        if self.max_tokens_per_step < least:
            raise ValueError(
                f"max_tokens_per_step={self.max_tokens_per_step} must be at least {least}: every "
                "slot, a verification and the smallest prefill; raise it or lower those"
            )

    @property
    def table_len(self) -> int:
        """Pages of the longest sequence."""
        return self.table_lens[-1]

    @property
    def verify_rows(self) -> int:
        """Most windows of one verification."""
        return self.verify_sizes[-1]

    @property
    def num_tables(self) -> int:
        """Page tables of a launch."""
        return 2 if self.num_local_pages else 1

    @property
    def program_sizes(self) -> ProgramSizes:
        """What programs are compiled for."""
        return ProgramSizes(
            num_pages=self.num_replicas * self.num_pages,
            num_local_pages=self.num_replicas * self.num_local_pages,
            num_slots=self.num_replicas * self.num_slots,
            window_len=self.verify_window,
        )

    def least_local_pages(self, steps_ahead: int | None) -> int:
        """Pages of local layers with which no sequence ever waits for one.

        Each slot has what the next token reads and what is in flight, each prefill its tokens as
        well. One more of each is for an answer that is checked again.

        Args:
            steps_ahead: As `EngineConfig` has it.
        """
        num_launches = (steps_ahead or MOST_STEPS_AHEAD) + 3  # two more, and drafts
        in_flight = num_launches * max(self.windows * self.verify_window, self.decode_steps)
        a_sequence = -(-(self.local_reach + in_flight) // self.page_len) + 1
        a_chunk = -(-max(length for _, length in self.prefill_shapes) // self.page_len) + 1
        num_prefills = min(self.num_slots, max(rows for rows, _ in self.prefill_shapes)) + 1
        a_sequence, a_chunk = min(self.table_len, a_sequence), min(self.table_len, a_chunk)
        return (self.num_slots + 1) * a_sequence + num_prefills * a_chunk

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        dp: int,
        page_len: int,
        steps_beat_xla: bool,
        tp: int = 1,
        local_reach: int = 0,
        has_adapters: bool = False,
    ) -> "ReplicaConfig":
        """Divide a configuration that `check_config` has passed over `dp` replicas.

        Args:
            config: Of the engine.
            dp: Replicas.
            page_len: Tokens of a page.
            steps_beat_xla: As `KernelSet` has it, of the kernels that run.
            tp: Ranks that share layers.
            local_reach: As `ReplicaConfig` has it; 0 where no layers are local.
            has_adapters: As `ReplicaConfig` has it.
        """
        num_slots = config.batch_size // dp
        table_len = -(-config.max_len // page_len)
        shorter = {min(-(-length // page_len), table_len) for length in config.decode_lens}
        shapes = dict.fromkeys(((1, config.prefill_chunk), *config.prefill_shapes))
        verify_rows = min(config.verify_rows, num_slots)
        no_limit = (
            num_slots
            + verify_rows * config.verify_window
            + max(rows * length for rows, length in shapes)
        )
        fewer = (batch for batch in config.verify_batches if batch < verify_rows)
        # WHY: a check of programs has room for their tokens on a page, beside other rows.
        most_windows = min(config.max_len, page_len - 1) // config.verify_window
        has_windows = config.draft_weights in DRAFTS_OF_OTHERS and tp == 1
        return cls(
            mode=config.mode,
            num_replicas=dp,
            num_slots=num_slots,
            num_pages=(config.num_pages or config.batch_size * table_len) // dp,
            page_len=page_len,
            table_lens=tuple(sorted({*shorter, table_len})),
            prefill_shapes=tuple(shapes),
            decode_sizes=tuple(sorted({*(b // dp for b in config.decode_batches), num_slots})),
            verify_sizes=tuple(sorted({*fewer, verify_rows})),
            verify_window=config.verify_window,
            verify_patience=config.verify_patience,
            verify_deadline=config.verify_deadline,
            max_tokens_per_step=config.max_tokens_per_step or no_limit,
            max_prefill_streak=config.max_prefill_streak,
            max_draft_fraction=max_draft_fraction(config, steps_beat_xla=steps_beat_xla),
            max_draft_batch=config.max_draft_batch,
            adapts_drafts=config.adapts_drafts,
            draft_lens=_draft_lens(config),
            decode_steps=config.decode_steps,
            draft_weights=config.draft_weights,
            ageing_steps=AGEING_STEPS,
            has_prefix_cache=config.has_prefix_cache,
            has_prompt_lookup=config.has_prompt_lookup,
            self_check=config.self_check,
            num_local_pages=config.num_local_pages // dp,
            local_reach=local_reach,
            has_adapters=has_adapters,
            windows=max(1, min(config.decode_steps, most_windows)) if has_windows else 1,
        )


def _draft_lens(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of drafts among which is chosen: half of a window where fewer cost less."""
    most = config.verify_window - 1
    costs_by_draft = config.adapts_drafts and config.draft_weights in DRAFTS_OF_OTHERS
    return tuple(sorted({max(1, most // 2), most})) if costs_by_draft else (most,)


def check_adapter_mode(mode: str, *, has_adapters: bool) -> None:
    """Refuse steps without claims where rows may have adapters.

    Raises:
        ValueError: If they do not go together.
    """
    if has_adapters and mode != "invariant":
        raise ValueError(
            f"adapters with mode={mode!r} are not supported; use mode='invariant', or leave "
            "enable_lora and adapters out"
        )


def check_config(config: EngineConfig, dp: int, context: int) -> None:
    """Refuse what does not go with the mesh or the model."""
    for name in ("batch_size", "num_pages", "num_local_pages"):
        if getattr(config, name) % dp:
            raise ValueError(
                f"{name}={getattr(config, name)} must be a multiple of dp={dp}, so that each "
                "replica has as many"
            )
    for batch in config.decode_batches:
        if batch % dp:
            raise ValueError(f"{batch} of decode_batches must be a multiple of dp={dp}")
    check_context(config, context)


def check_context(config: EngineConfig, context: int) -> None:
    """Refuse a `max_len` that the model has no positions for."""
    if config.max_len > context:
        raise ValueError(
            f"max_len={config.max_len} is longer than the model's context of {context} tokens"
        )


def max_draft_fraction(config: EngineConfig, *, steps_beat_xla: bool) -> float:
    """The share asked for, or the one that is quickest as far as was measured.

    Args:
        config: Of the engine.
        steps_beat_xla: As `KernelSet` has it, of the kernels that run.
    """
    if config.max_draft_fraction is not None:
        return config.max_draft_fraction
    return 0.0 if steps_beat_xla and config.draft_weights == "full" else 1.0


@functools.cache
def _field_types() -> dict[str, Any]:
    return typing.get_type_hints(EngineConfig)


def check_types(given: Mapping[str, Any]) -> None:
    """Refuse values of fields of `EngineConfig` that are of another type.

    Raises:
        ValueError: Naming the field and its value.
    """
    for name, value in given.items():
        _check_type(name, value, _field_types()[name])


def _check_type(name: str, value: Any, kind: Any) -> None:
    if isinstance(kind, types.UnionType):
        if value is None:
            return
        kind = next(one for one in typing.get_args(kind) if one is not types.NoneType)
    if kind is int:
        integer(name, value)
    elif kind is float:
        number(name, value)
    elif kind is bool:
        flag(name, value)
    elif kind is str and not isinstance(value, str):
        raise ValueError(f"{name}={value!r} must be a text")
    elif typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, tuple | list):
            what = "integers" if item is int else "pairs of integers"
            raise ValueError(f"{name}={value!r} must be a tuple of {what}")
        for i, one in enumerate(value):
            _check_type(f"{name}[{i}]", one, item)
