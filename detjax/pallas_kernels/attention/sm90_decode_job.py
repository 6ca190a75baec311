# SPDX-License-Identifier: Apache-2.0
"""What a launch of decode is made of: the job, its memory, a CTA's work, and the launch itself."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_float8_pages import pages_that_fit
from detjax.pallas_kernels.attention.sm90_new_token import NewToken
from detjax.pallas_kernels.sm90_cache_hints import evict_first
from detjax.pallas_kernels.sm90_prefetch import ask_for

STAGES = {1: 5, 2: 3}
"""Pages of keys or values in flight, for each of so many warpgroups of a CTA that compute."""
WIDE_STAGES = 3
"""Likewise, of wide heads, whose pages are twice as large: one warpgroup computes."""
WIDENED_STAGES = {1: 3, 2: 2}
"""Pages that are widened from float8, for each warpgroup that computes."""
CODE_BYTES = {1: 64 << 10, 2: 32 << 10}
"""Bytes of float8 in flight, likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How the work is scheduled, and what decides bits: the last two.

    Attributes:
        stages: Pages of keys or values in flight, for each warpgroup that computes; 0 for those of
            `STAGES`.
        num_ctas: Most CTAs; each takes splits in turn.
        merge_unroll: How many splits' partials the merge loads at once, as long as there are as
            many; and after that.
        whole_sequences: Let a CTA take all splits of a sequence and fold them in registers. Nothing
            is left to merge, but a sequence is spread over no more CTAs than it has kv heads.
        num_compute: Warpgroups of a CTA that compute, each its own runs: one begins and ends a run,
            or computes, while the pages of the other stream in. Not with `cluster`; with
            `whole_sequences` of new tokens alone.
        cluster: CTAs that share the splits of a sequence and a kv head and merge them, in shared
            memory, or those of a window in device memory if they do not fit. Of several tokens that
            are not new, never. 0 leaves the merge to a second kernel.
        scores_ahead: Compute the scores of a block while the one before it takes its softmax. Of
            one query a sequence alone, and not with `whole_sequences`.
        spread: A cluster's CTAs share each split, one a block; `cluster` counts them all. Of new
            tokens alone.
        keys_at_once: Of a sequence's last page so many keys are loaded as are written, rounded up
            to a multiple of this: 32, 64, or 128 for whole pages.
        prefetched: Bytes of the next product's weights that CTAs ask into the L2 cache, once they
            have asked for their last page. Of new tokens alone.
        reads_float8: Whether pages are float8, which loading warpgroups widen.
        blocks_per_split: Blocks of 128 keys in a split; the profile's.
        softcap: Of scores; the model's. Not of new tokens.
    """

    stages: int = 0
    num_ctas: int = 132
    merge_unroll: tuple[int, int] = (16, 2)
    whole_sequences: bool = False
    num_compute: int = 1
    cluster: int = 0
    scores_ahead: bool = False
    spread: bool = False
    keys_at_once: int = bits.BLOCK
    prefetched: int = 0
    reads_float8: bool = False
    blocks_per_split: int = 4
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one launch attends to: static.

    Attributes:
        batch: Sequences.
        query_len: New tokens of each.
        kv_heads: Key/value heads.
        group: Query heads of a key/value head.
        channels: Of a head: 64, 128 or 256.
        num_pages: Of a layer of the cache.
        padded_rows: Rows of queries that are copied for a sequence and a kv head.
        rows_apart: How far apart the rows of two such pairs begin.
        dtype: Of queries, keys, values and output.
        new_token: Makes the queries of new tokens in the kernel; None where they are rows already.
        config: The schedule.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    batch: int
    query_len: int
    kv_heads: int
    group: int
    channels: int
    num_pages: int
    padded_rows: int
    rows_apart: int
    dtype: Any
    new_token: NewToken | None
    config: DecodeConfig
    is_interpreted: bool

    @property
    def math(self) -> bits.AttentionArithmetic:
        """The arithmetic on accumulators."""
        return bits.accumulator_arithmetic(self.is_interpreted)

    @property
    def out_shape(self) -> tuple[int, int]:
        """Shape of the output of a tile."""
        return bits.ROWS, self.channels

    @property
    def num_slots(self) -> int:
        """Pages of keys or values in flight, for each warpgroup that computes."""
        by_computing = WIDENED_STAGES if self.config.reads_float8 else STAGES
        stages = WIDE_STAGES if self.is_wide else by_computing[self.config.num_compute]
        return self.config.stages or stages

    @property
    def is_wide(self) -> bool:
        """Whether a warpgroup has no registers for more than the output of one split."""
        return self.channels > bits.SPAN_CHANNELS

    @property
    def query_slots(self) -> int:
        """Turns whose rows of queries are in flight; wide heads leave no memory for two."""
        return 1 if self.is_wide else 2

    @property
    def num_coded(self) -> int:
        """Pages of float8 in flight, for each warpgroup that computes; 0 of other pages."""
        if not self.config.reads_float8:
            return 0
        return pages_that_fit(CODE_BYTES[self.config.num_compute], self.channels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a CTA takes in a turn, inside the kernel: scalars.

    Attributes:
        seq: Which sequence.
        kv_head: Which key/value head.
        partial: Where its partial result goes, if it has one.
        first_block: Its first block of the sequence.
        blocks: How many.
        full: How many of them no row need be masked in.
        last: Position of the sequence's last token; -1 for padding.
        page: Which page of the cache holds its j-th block.
        first_new: Position of the first new token where a sequence has several.
    """

    seq: Any
    kv_head: Any
    partial: Any
    first_block: Any
    blocks: Any
    full: Any
    last: Any
    page: Callable
    first_new: Any = None


class RunSlots(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [slots, ROWS, C]; with several computing warpgroups the first kept result too
    ring: Any  # [slots, BLOCK, C], for the pages of each computing warpgroup in turn
    kept_results: list  # what the schedule keeps there
    weights: Any  # [num_compute, ROWS, BLOCK], if interpreted
    kept: Any  # [num_compute, 2 T, C], of new tokens
    codes: Any  # [coded, BLOCK, C] uint8, of pages of float8


class RunBarriers(NamedTuple):
    """Barriers of a CTA's slots."""

    q_filled: Any  # [1 or 2], of queries
    filled: Any  # [slots], of the ring
    q_free: Any  # [1 or 2]
    free: Any  # [slots]
    own: Any  # the schedule's own, or None
    codes_filled: Any  # [coded]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The references of a kernel.

    Attributes:
        queries: Rows [., C], or the operands of `NewToken`, in device memory.
        pages: Pages of all layers as rows, likewise.
        positions: Of the rows of a tile.
        table: Of pages, or the list of runs.
        num_entries: Of that list.
        layer: Which layer's pages.
        gates: Of the output, or None.
        results: What the schedule writes.
        slots: Shared memory.
        barriers: Of the slots.
        ask_ahead: Asks for this CTA's share of the next product's weights, by all threads of a
            warpgroup.
    """

    queries: list
    pages: Any
    positions: Any
    table: Any
    num_entries: Any
    layer: Any
    gates: Any
    results: list
    slots: RunSlots
    barriers: RunBarriers
    ask_ahead: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWork:
    """What all warpgroups of a CTA know of its turns.

    Attributes:
        job: What the launch attends to.
        memory: Its references.
        num_turns: How many runs the CTA takes.
        run_at: Which run it takes in a turn.
        layer: Reads the layer's number.
    """

    job: Job
    memory: Memory
    num_turns: Any
    run_at: Callable[[Any], Run]
    layer: Callable

    def slot(self, turn, half: int, block):
        """Where the keys (half 0) or values (half 1) of a computing warpgroup's block lie.

        They take turns in its slots.

        # WHY: a warpgroup must see every phase of a barrier that it waits for, so each has slots of
        its own.

        Args:
            turn: Of the warpgroup.
            half: Keys or values.
            block: How many blocks the warpgroup has taken before.
        """
        num_slots = self.job.num_slots
        return self.owner(turn) * num_slots + lax.rem(2 * block + half, jnp.int32(num_slots))

    def turns_of(self, owner):
        """How many of the turns a computing warpgroup takes."""
        count = self.job.config.num_compute
        if count == 1:
            return self.num_turns
        return lax.div(self.num_turns - owner + (count - 1), jnp.int32(count))

    def owner(self, turn):
        """Which computing warpgroup takes a turn."""
        count = self.job.config.num_compute
        return lax.rem(turn, jnp.int32(count)) if count > 1 else jnp.int32(0)

    def page_row(self, run: Run, page, half):
        """Where the page's keys (half 0) or values (half 1) lie among the rows of pages."""
        job = self.job
        return ((self.layer() * job.num_pages + page) * 2 + half) * job.kv_heads + run.kv_head


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """Operands of attention: `queries` are rows [., C], or those of `NewToken`.

    Attributes:
        queries: Of which heads; see above.
        page_rows: The cache as rows of pages; a reference if there is a new token.
        row_positions: Of the rows of a tile, a sequence a row.
        page_table: As in `api.attention`.
        positions: Likewise.
        layer: Which layer's pages.
        prefetch: Weights that CTAs ask into the L2 cache, or None.
        sinks: Of the query heads, [H], or None; `merge_splits` alone takes them.
        gates: Rows whose last columns are gates of the output, or None; for clusters.
    """

    queries: tuple
    page_rows: Any
    row_positions: jax.Array
    page_table: jax.Array
    positions: jax.Array
    layer: jax.Array
    prefetch: Any = None
    sinks: Any = None
    gates: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSchedule:
    """What a schedule of decode adds to a launch.

    Attributes:
        name: Part of the kernel's name.
        num_ctas: CTAs, or clusters of them.
        table: Of pages, or the list of runs.
        num_entries: Of that list, [1].
        results: Shapes of what it writes.
        kept_results: What it keeps in shared memory: two things or None. With several computing
            warpgroups the first lies where the queries lie, which must be done with.
        cluster: CTAs of a cluster.
        barrier: One of its own, or None.
    """

    name: str
    num_ctas: int
    table: jax.Array
    num_entries: jax.Array
    results: list[jax.ShapeDtypeStruct]
    kept_results: list
    cluster: int = 1
    barrier: Any = None


class _Arrays(NamedTuple):
    """Operands of the kernel, in device memory."""

    queries: tuple  # rows [., C], or the operands of `NewToken`
    pages: Any  # [L N 2 K, P, C]
    positions: Any  # [B, ROWS] int32, or [B, 1] in clusters of one query
    table: Any  # int32
    num_entries: Any  # [1] int32
    layer: Any  # [1] int32
    prefetch: Any  # weights, or None
    gates: Any  # [B T, .], or None


class _Shared(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    slots: RunSlots
    barriers: RunBarriers


def _shared_types(job: Job, schedule: DecodeSchedule) -> _Shared:
    num_compute = job.config.num_compute
    num_slots = num_compute * job.num_slots
    swizzled = bits.swizzled(bits.channel_span(job.channels))
    q_copies = job.query_slots if job.new_token is None else num_compute
    q = plgpu.SMEM((q_copies, *job.out_shape), job.dtype, transforms=swizzled)
    kept_results, kept = schedule.kept_results, None
    if _shares_queries(job, schedule):
        q, kept_results = plgpu.RefUnion(q, kept_results[0]), [None, *kept_results[1:]]
    if job.new_token is not None:
        kept = plgpu.SMEM((num_compute, *job.new_token.kept_shape), job.dtype)
    weights = plgpu.SMEM((num_compute, bits.ROWS, bits.BLOCK), job.dtype)
    ring = plgpu.SMEM((num_slots, bits.BLOCK, job.channels), job.dtype, transforms=swizzled)
    of_queries, of_ring = (plgpu.Barrier(num_barriers=n) for n in (job.query_slots, num_slots))
    weights = weights if job.is_interpreted else None
    codes = codes_filled = None
    if num_coded := num_compute * job.num_coded:
        codes = plgpu.SMEM((num_coded, bits.BLOCK, job.channels), jnp.uint8)
        codes_filled = plgpu.Barrier(num_barriers=num_coded)
    return _Shared(
        RunSlots(
            q=q, ring=ring, kept_results=kept_results, weights=weights, kept=kept, codes=codes
        ),
        RunBarriers(
            q_filled=of_queries, filled=of_ring, q_free=of_queries, free=of_ring,
            own=schedule.barrier, codes_filled=codes_filled,
        ),
    )  # fmt: skip


def _shares_queries(job: Job, schedule: DecodeSchedule) -> bool:
    """Whether the first kept result lies where the queries lie."""
    return job.config.num_compute > 1 and schedule.kept_results[0] is not None


def launch(
    job: Job, operands: Operands, schedule: DecodeSchedule, body: Callable[[Memory], None]
) -> list[jax.Array]:
    """Run `body` on the warpgroups of each CTA, and return the schedule's results."""

    def ask_ahead(weights) -> None:
        if weights is None:
            return
        share = lax.axis_index("cta")
        if schedule.cluster > 1:
            share = share * schedule.cluster + lax.axis_index("rank")
        num_shares = schedule.num_ctas * schedule.cluster
        ask_for(weights, share, num_shares, num_bytes=job.config.prefetched)

    def whole_body(arrays: _Arrays, results: list, shared: _Shared):
        evict_first(arrays.pages, is_interpreted=job.is_interpreted)
        q, kept_results = shared.slots.q, list(shared.slots.kept_results)
        weights = shared.slots.weights
        if _shares_queries(job, schedule):
            q, kept_results[0] = q
        if weights is not None:
            weights = weights.at[lax.rem(lax.axis_index("wg"), jnp.int32(job.config.num_compute))]
        memory = Memory(
            queries=list(arrays.queries), pages=arrays.pages, positions=arrays.positions,
            table=arrays.table, num_entries=arrays.num_entries, layer=arrays.layer,
            gates=arrays.gates, results=results, barriers=shared.barriers,
            slots=shared.slots._replace(q=q, kept_results=kept_results, weights=weights),
            ask_ahead=functools.partial(ask_ahead, arrays.prefetch),
        )  # fmt: skip
        body(memory)

    arrays = _Arrays(
        queries=operands.queries, pages=operands.page_rows, positions=operands.row_positions,
        table=schedule.table, num_entries=schedule.num_entries, layer=operands.layer.reshape(1),
        prefetch=operands.prefetch, gates=operands.gates,
    )  # fmt: skip
    is_clustered = schedule.cluster > 1
    [results] = plgpu.kernel(
        whole_body,
        out_type=[schedule.results],
        scratch_types=[_shared_types(job, schedule)],
        grid=(schedule.num_ctas,),
        grid_names=("cta",),
        cluster=(schedule.cluster,) if is_clustered else (),
        cluster_names=("rank",) if is_clustered else (),
        num_threads=2 * job.config.num_compute,
        thread_name="wg",
        kernel_name=f"attention_{schedule.name}_sm90",
        compiler_params=bits.COMPILER_PARAMS,
        interpret=plgpu.InterpretGPUParams() if job.is_interpreted else None,
    )(arrays)
    return results
