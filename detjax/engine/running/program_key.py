# SPDX-License-Identifier: Apache-2.0
"""Which programs there are: the name of one, and all that a configuration can need.

What a request asks for is an operand of a program, so the number of programs follows from sizes and
modes alone. A step runs a forward program, which also chooses tokens for rows that ask for no more
than a temperature. Where a row asks for more, a choice program follows and chooses for all rows.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from detjax.defaults import HEADS
from detjax.engine.config import DRAFTS_OF_OTHERS, ReplicaConfig
from detjax.engine.requests.request import Request
from detjax.models.forward_paths import KernelMode

ProgramKind = Literal["prefill", "decode", "verify", "windows"]

MAX_TOP = 64
"""Top logprobs that a choice program reports, if it reports any."""

SCORE_TOPS = (4, MAX_TOP)
"""Top logprobs that programs report of a prompt. Four of each row cost a twentieth of 64."""

_CHOICE_RATIO = 4
"""A choice program has at most so many times the rows of the step that it follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """Which forward program a launch runs.

    Attributes:
        kind: What it does.
        rows: Of each replica.
        length: Tokens a row: a prefill's chunk, those of a window, or those that a row may decode
            in one launch.
        mode: Which kernels.
        table_len: Pages of the longest sequence that it takes. Changes how work is spread, and no
            bit.
        weights: "full", the name of the 8-bit dtype that a `fast` step's weights have, or
            "draft_model", "eagle3" or "mtp": those of another model, with a cache of its own.
        logit_rows: Rows of the array in which it leaves logits for a choice program, at least
            `rows` (`rows` times `length` of a verification); 0 leaves none.
        leaves_hidden: Whether a prefill leaves the hidden states of all its tokens, for the
            logprobs of a prompt.
        leaves_features: Whether it leaves hidden states of some layers, for a head.
        has_adapters: Whether its rows may have adapters. Where none has one, the step costs what it
            costs without room for them.
        windows: That are drafted and verified one after the other, of kind "windows".
    """

    kind: ProgramKind
    rows: int
    length: int
    table_len: int
    mode: KernelMode
    weights: str
    logit_rows: int = 0
    leaves_hidden: bool = False
    leaves_features: bool = False
    has_adapters: bool = False
    windows: int = 1

    @property
    def name(self) -> str:
        """For people and traces."""
        how = f" {self.mode}" + ("" if self.weights == "full" else f" {self.weights}")
        name = f"{self.kind}{how} {self.rows}x{self.length}"
        name += f"x{self.windows}" if self.kind == "windows" else ""
        name += " with hidden states" if self.leaves_hidden else ""
        name += " with features" if self.leaves_features else ""
        name += " with adapters" if self.has_adapters else ""
        return name if self.kind == "prefill" else f"{name} to {self.table_len} pages"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceKey:
    """Which program chooses tokens by all sampling parameters.

    Attributes:
        rows: Of each replica, at least as many as the forward program's.
        length: Choices of each row: those of a verified window, else 1.
        with_filters: Whether it looks at top-k, top-p and min-p, for which it sorts the vocabulary.
        num_top: How many of the most likely tokens it reports: 0 or `MAX_TOP`.
    """

    rows: int
    length: int
    with_filters: bool
    num_top: int

    @property
    def name(self) -> str:
        """For people and traces."""
        extras = [" filtered"] * self.with_filters + [f" top {self.num_top}"] * (self.num_top > 0)
        return f"choice {self.rows}x{self.length}{''.join(extras)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallKey:
    """The program that installs the adjustments of `rows` sequences of each replica."""

    rows: int

    @property
    def name(self) -> str:
        """For people and traces."""
        return f"install {self.rows}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreKey:
    """Which program computes logprobs of prompts.

    Attributes:
        rows: Of the prefill before it.
        length: Tokens of a row.
        mode: Which kernels.
        num_top: How many of the most likely tokens it reports of each, one of `SCORE_TOPS`.
    """

    rows: int
    length: int
    mode: KernelMode
    num_top: int

    @property
    def name(self) -> str:
        """For people and traces."""
        return f"score {self.rows}x{self.length} top {self.num_top}"


AnyKey = ProgramKey | ChoiceKey | InstallKey | ScoreKey

CHOICES = ((False, 0), (True, 0), (True, MAX_TOP))
"""`with_filters` and `num_top` of the choice programs of one size, from cheap to dear."""


def choice_of(*, is_filtered: bool, num_top: int) -> tuple[bool, int]:
    """The cheapest of `CHOICES` that does what some rows want."""
    return next(
        (with_filters, most)
        for with_filters, most in CHOICES
        if with_filters >= is_filtered and most >= num_top
    )


def score_top_of(num_top: int) -> int:
    """The smallest of `SCORE_TOPS` that reports so many."""
    return next(size for size in SCORE_TOPS if size >= num_top)


def table_lens(kind: ProgramKind, config: ReplicaConfig) -> tuple[int, ...]:
    """Widths of the page table for which a kind of step is compiled, ascending.

    Rows of a prefill are few, and its speed does not depend on the table's width.
    """
    return (config.table_len,) if kind == "prefill" else config.table_lens


def choice_sizes(config: ReplicaConfig) -> tuple[int, ...]:
    """Rows of the choice programs of decode steps and prefills, ascending.

    Few, so that few programs are compiled: a step with fewer rows leaves the others empty.
    """
    sizes = sorted({*config.decode_sizes, *(rows for rows, _ in config.prefill_shapes)})
    kept = [sizes[-1]]
    for size in reversed(sizes):
        if size * _CHOICE_RATIO <= kept[-1]:
            kept.append(size)
    return tuple(reversed(kept))


def logit_rows(
    config: ReplicaConfig, kind: ProgramKind, rows: int, length: int, weights: str
) -> int:
    """`ProgramKey.logit_rows` of an engine's program."""
    if weights in DRAFTS_OF_OTHERS:
        return 0  # no choice program follows drafts that are verified by one
    if kind == "verify":
        return rows * length
    if kind == "windows" or (kind == "decode" and length > 1):
        return 0  # each token decides the next, inside one launch
    return next(size for size in choice_sizes(config) if size >= rows)


def leaves_features(config: ReplicaConfig, kind: ProgramKind, weights: str) -> bool:
    """`ProgramKey.leaves_features` of an engine's program.

    A step that decodes leaves none: a head drafts again behind a verification.
    """
    return config.draft_weights in HEADS and weights == "full" and kind != "decode"


def draft_sizes(config: ReplicaConfig) -> tuple[int, ...]:
    """Rows of the steps of a draft model: those of decode steps, as far as so many draft."""
    most = config.max_draft_batch or config.num_slots
    return tuple(size for size in config.decode_sizes if _holds(config.decode_sizes, size, most))


def install_rows(config: ReplicaConfig) -> int:
    """Rows of the program that installs adjustments: those of the largest prefill."""
    return max(rows for rows, _ in config.prefill_shapes)


def program_keys(config: ReplicaConfig) -> list[ProgramKey]:
    """The forward programs that requests can need, in the order of their first use."""
    return [
        ProgramKey(
            kind=kind,
            rows=rows,
            length=length,
            table_len=table_len,
            mode=mode,
            weights=weights,
            logit_rows=logit_rows(config, kind, rows, length, weights),
            leaves_hidden=leaves_hidden,
            leaves_features=leaves_features(config, kind, weights),
            has_adapters=has_adapters,
            windows=config.windows if kind == "windows" else 1,
        )
        for leaves_hidden in (False, True)
        for has_adapters in (False, True)
        for kind, rows, length, mode, weights in _steps(config)
        if (kind == "prefill" and weights == "full") or not leaves_hidden
        if (config.has_adapters and weights == "full") or not has_adapters
        for table_len in table_lens(kind, config)
    ]


def choice_keys(config: ReplicaConfig) -> list[AnyKey]:
    """The programs that follow forward programs, in the order of their first use."""
    shapes = [(rows, 1) for rows in choice_sizes(config)]
    if _verifies(config):
        shapes += [(rows, config.verify_window) for rows in config.verify_sizes]
    return [
        InstallKey(rows=install_rows(config)),
        *(
            ChoiceKey(rows=rows, length=length, with_filters=with_filters, num_top=num_top)
            for with_filters, num_top in CHOICES
            for rows, length in shapes
        ),
        *(
            ScoreKey(rows=rows, length=length, mode=prefill_mode(config), num_top=num_top)
            for rows, length in config.prefill_shapes
            for num_top in SCORE_TOPS
        ),
    ]


def keys_of_requests(
    config: ReplicaConfig, keys: Sequence[AnyKey], requests: Sequence[Request]
) -> list[AnyKey]:
    """Those of an engine's programs that these requests can need, if nothing else is asked.

    Args:
        config: Of a replica.
        keys: All programs of the engine.
        requests: All that are asked, at least one.
    """
    samplings = [request.sampling for request in requests]
    forward = [
        key for key in keys if isinstance(key, ProgramKey) and _runs_for(config, key, requests)
    ]
    choices = {
        choice_of(is_filtered=s.is_filtered, num_top=s.logprobs)
        for s in samplings
        if s.is_filtered or s.is_adjusted or s.logprobs
    }
    widths = {(key, key.length if key.kind == "verify" else 1) for key in forward}
    shapes = {(key.logit_rows // length, length) for key, length in widths}

    def is_needed(key: AnyKey) -> bool:
        match key:
            case ChoiceKey():
                is_asked = (key.with_filters, key.num_top) in choices
                return is_asked and (key.rows, key.length) in shapes
            case InstallKey():
                return any(s.is_adjusted for s in samplings)
            case ScoreKey():
                return any(s.prompt_logprobs is not None for s in samplings)
            case ProgramKey():
                return key in forward

    return [key for key in keys if is_needed(key)]


def _runs_for(config: ReplicaConfig, key: ProgramKey, requests: Sequence[Request]) -> bool:
    """Whether a step of these requests can run a forward program."""
    if config.has_adapters and key.weights == "full":
        if key.has_adapters not in {bool(request.adapter) for request in requests}:
            return False
    samplings = [request.sampling for request in requests]
    num_rows = min(sum(s.num_sequences for s in samplings), config.num_slots)
    if key.kind == "prefill":
        is_scored = any(s.prompt_logprobs is not None for s in samplings)
        return key.rows <= num_rows and (is_scored or not key.leaves_hidden)
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    sizes = config.decode_sizes if key.kind == "decode" else config.verify_sizes
    if not (
        _holds(sizes, key.rows, num_rows)
        and _holds(table_lens(key.kind, config), key.table_len, -(-longest // config.page_len))
    ):
        return False
    is_draft = key.mode == "fast" and key.weights == config.draft_weights
    return key.kind in ("verify", "windows") or is_draft or not _drafts_all(config, requests)


def _drafts_all(config: ReplicaConfig, requests: Sequence[Request]) -> bool:
    """Whether all sequences of these requests are drafted on the device as long as they run."""
    if config.mode != "dvr" and config.draft_weights not in DRAFTS_OF_OTHERS:
        return False
    num_asked = sum(r.sampling.num_sequences for r in requests)
    num_running = min(num_asked, config.num_replicas * config.num_slots)
    is_small = not config.max_draft_batch or num_running <= config.max_draft_batch
    # A sequence with a form is never drafted.
    are_drafted = all(
        (r.is_deterministic or config.mode == "invariant") and r.sampling.structured_output is None
        for r in requests
    )
    may_stop = config.max_draft_fraction < 1 or config.adapts_drafts
    return not may_stop and is_small and are_drafted


def _holds(sizes: Sequence[int], size: int, most: int) -> bool:
    """Whether a size is used for counts up to `most`: the smallest that holds a count is."""
    return size <= next((one for one in sizes if one >= most), sizes[-1])


def _verifies(config: ReplicaConfig) -> bool:
    drafts = config.mode == "dvr" and config.max_draft_fraction > 0
    return drafts or config.has_prompt_lookup or config.draft_weights in DRAFTS_OF_OTHERS


def prefill_mode(config: ReplicaConfig) -> KernelMode:
    """Which kernels prefill: canonical ones wherever an answer may be."""
    return "fast" if config.mode == "fast" else "invariant"


def _steps(config: ReplicaConfig) -> Iterator[tuple[ProgramKind, int, int, KernelMode, str]]:
    """(kind, rows, length, kernels, weights) of every step that a configuration can take."""
    mode, share = config.mode, config.max_draft_fraction
    has_model = config.draft_weights in DRAFTS_OF_OTHERS
    may_stop = share < 1 or config.max_draft_batch > 0 or config.adapts_drafts
    for rows, length in config.prefill_shapes:
        yield "prefill", rows, length, prefill_mode(config), "full"
    for rows, length in itertools.product(config.decode_sizes, sorted({1, config.decode_steps})):
        # A sequence with a form is never drafted, and decodes one token a launch.
        if mode == "invariant" or mode == "dvr" and (may_stop or length == 1):
            yield "decode", rows, length, "invariant", "full"
        if mode != "invariant":
            yield "decode", rows, length, "fast", "full"
        if config.draft_weights != "full" and not has_model:
            yield "decode", rows, length, "fast", config.draft_weights
    if has_model:
        for rows, length in config.prefill_shapes:
            yield "prefill", rows, length, "fast", config.draft_weights
        for rows, length in itertools.product(draft_sizes(config), config.draft_lens):
            yield "decode", rows, length, "fast", config.draft_weights
    if _verifies(config):
        for rows in config.verify_sizes:
            yield "verify", rows, config.verify_window, "invariant", "full"
    if config.windows > 1:
        for rows, drafts in itertools.product(config.verify_sizes, config.draft_lens):
            yield "windows", rows, 1 + drafts, "invariant", "full"
