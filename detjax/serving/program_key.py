# SPDX-License-Identifier: Apache-2.0
"""Which programs there are: the name of one, and all that a configuration can need."""

import itertools
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from detjax.models.paths import Kernels
from detjax.serving.config import ReplicaConfig

ProgramKind = Literal["prefill", "decode", "verify"]

NUM_TOP_SIZES = (0, 4, 16, 64)
"""Numbers of top logprobs that a program may report. Few, so that few programs are compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """Which program a launch runs.

    Attributes:
        kind: What it does.
        rows: Of each replica.
        length: Tokens a row: a prefill's chunk, a verification's window, or those that a row may
            decode in one launch.
        mode: Which kernels.
        table_len: Pages of the longest sequence that it takes. Changes how work is spread, and no
            bit.
        weights: "full", or the name of the 8-bit dtype that a `fast` step's weights have.
        num_top: How many of the most likely tokens it reports.
        with_filters: Whether a row has a top-k, top-p or min-p.
        num_prompt_top: Of a prefill that reports logprobs of the prompt: how many of the most
            likely tokens at each position. None reports nothing of the prompt.
    """

    kind: ProgramKind
    rows: int
    length: int
    table_len: int
    mode: Kernels
    weights: str
    num_top: int
    with_filters: bool
    num_prompt_top: int | None = None

    @property
    def name(self) -> str:
        """For people and traces."""
        how = f" {self.mode}" + ("" if self.weights == "full" else f" {self.weights}")
        name = f"{self.kind}{how} {self.rows}x{self.length}"
        name += "" if self.num_prompt_top is None else " with prompt logprobs"
        return name if self.kind == "prefill" else f"{name} to {self.table_len} pages"


def round_num_top(num_top: int) -> int:
    """Round a number of top logprobs, at most 64, up to one that programs report."""
    return next(size for size in NUM_TOP_SIZES if size >= num_top)


def table_lens(kind: ProgramKind, config: ReplicaConfig) -> tuple[int, ...]:
    """Widths of the page table for which a kind of step is compiled, ascending.

    Rows of a prefill are few, and its speed does not depend on the table's width.
    """
    return (config.table_len,) if kind == "prefill" else config.table_lens


def program_keys(
    config: ReplicaConfig,
    *,
    num_tops: abc.Sequence[int] = (0,),
    filters: abc.Sequence[bool] = (False,),
    num_prompt_tops: abc.Sequence[int | None] = (None,),
) -> list[ProgramKey]:
    """The programs that requests can need, in the order of their first use.

    Args:
        config: Of each replica.
        num_tops: Numbers of top logprobs, of `NUM_TOP_SIZES`.
        filters: Whether a row has a top-k, top-p or min-p: both, if some requests have.
        num_prompt_tops: As `ProgramKey` has it, of prefills.
    """
    return [
        ProgramKey(
            kind=kind,
            rows=rows,
            length=length,
            table_len=table_len,
            mode=mode,
            weights=weights,
            num_top=num_top,
            with_filters=with_filters,
            num_prompt_top=num_prompt_top,
        )
        for with_filters, num_top in itertools.product(filters, num_tops)
        for kind, rows, length, mode, weights in _steps(config)
        for num_prompt_top in (num_prompt_tops if kind == "prefill" else (None,))
        for table_len in table_lens(kind, config)
    ]


def _steps(config: ReplicaConfig) -> Iterator[tuple[ProgramKind, int, int, Kernels, str]]:
    """(kind, rows, length, kernels, weights) of every step that a configuration can take."""
    mode, share = config.mode, config.max_draft_fraction
    for rows, length in config.prefill_shapes:
        yield "prefill", rows, length, "fast" if mode == "fast" else "invariant", "full"
    for rows, length in itertools.product(config.decode_sizes, sorted({1, config.decode_steps})):
        if mode == "invariant" or mode == "dvr" and share < 1:
            yield "decode", rows, length, "invariant", "full"
        if mode != "invariant":
            yield "decode", rows, length, "fast", "full"
        if config.draft_weights != "full":
            yield "decode", rows, length, "fast", config.draft_weights
    if mode == "dvr" and share > 0 or config.has_prompt_lookup:
        for rows in config.verify_sizes:
            yield "verify", rows, config.verify_window, "invariant", "full"
