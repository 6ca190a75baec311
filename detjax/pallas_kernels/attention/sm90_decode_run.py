# SPDX-License-Identifier: Apache-2.0
"""What the schedules of decode share: a CTA's turn at a run of blocks, and the launch.

One warpgroup of a CTA copies queries, keys and values to shared memory; the others compute.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_new_token import NewToken

COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24
"""Of a thread, where two warpgroups compute and one loads: 504 of the 512 that a CTA has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How the work is scheduled. Only `blocks_per_split` decides a bit; it comes of the profile.

    Attributes:
        key_stages: Pages of keys in flight.
        value_stages: Pages of values in flight.
        num_ctas: CTAs; each takes splits in turn.
        merge_unroll: How many splits' partials the merge loads at once, as long as there are as
            many; and after that.
        whole_sequences: Let a CTA take all splits of a sequence and fold them in registers. Nothing
            is left to merge, but a sequence is spread over no more CTAs than it has kv heads.
        num_compute: Warpgroups of a CTA that compute, each a run in turn: one begins and ends its
            run while the other computes. Not with `cluster`; with `whole_sequences` of new tokens
            alone.
        cluster: CTAs that share the splits of a sequence and a kv head and merge them in shared
            memory. Of one query a sequence alone. 0 leaves the merge to a second kernel.
        scores_ahead: Compute the scores of a block while the one before it takes its softmax. Of
            one query a sequence alone, and not with `whole_sequences`.
        spread: A cluster's CTAs share each split, one a block; `cluster` counts them all. Of new
            tokens alone.
        keys_at_once: Of a sequence's last page so many keys are loaded as are written, rounded up
            to a multiple of this: 32, 64, or 128 for whole pages.
        prefetched: Bytes of the next product's weights that `spread` asks into the L2 cache.
        blocks_per_split: Blocks of 128 keys in a split.
    """

    key_stages: int = 3
    value_stages: int = 2
    num_ctas: int = 132
    merge_unroll: tuple[int, int] = (16, 2)
    whole_sequences: bool = False
    num_compute: int = 1
    cluster: int = 0
    scores_ahead: bool = False
    spread: bool = False
    keys_at_once: int = bits.BLOCK
    prefetched: int = 0
    blocks_per_split: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one launch attends to: static.

    Attributes:
        batch: Sequences.
        query_len: New tokens of each.
        kv_heads: Key/value heads.
        group: Query heads of a key/value head.
        channels: Of a head, 64 or 128.
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
    def math(self) -> bits.Arithmetic:
        """The arithmetic on accumulators."""
        return bits.accumulator_arithmetic(self.is_interpreted)

    @property
    def out_shape(self) -> tuple[int, int]:
        """Shape of the output of a tile."""
        return bits.ROWS, self.channels

    @property
    def num_slots(self) -> tuple[int, int]:
        """Pages of keys and of values in flight."""
        return self.config.key_stages, self.config.value_stages


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
    """

    seq: Any
    kv_head: Any
    partial: Any
    first_block: Any
    blocks: Any
    full: Any
    last: Any
    page: Callable


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
        results: What the schedule writes.
        q: Slots of queries, in shared memory; one a computing warpgroup, of new tokens.
        k: The ring of keys.
        v: The ring of values.
        kept_results: What the schedule keeps there.
        weights: For interpretation, where they do not stay in registers.
        kept: The new token's key and value, of each computing warpgroup.
        q_filled: Barriers of slots that are filled.
        k_filled: Likewise, of each computing warpgroup.
        v_filled: Likewise.
        q_free: Barriers of slots that are free again.
        k_free: Likewise.
        v_free: Likewise.
        barrier: The schedule's own, or None.
    """

    queries: list
    pages: Any
    positions: Any
    table: Any
    num_entries: Any
    layer: Any
    results: list
    q: Any
    k: Any
    v: Any
    kept_results: list
    weights: Any
    kept: Any
    q_filled: Any
    k_filled: Any
    v_filled: Any
    q_free: Any
    k_free: Any
    v_free: Any
    barrier: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What both warpgroups of a CTA know of its turns.

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

    def filled(self, barriers, turn, half: int, slot):
        """The barrier of a slot that is filled for a turn.

        # WHY: a warpgroup must see every phase of a barrier that it waits for, so each has its own.
        """
        return barriers.at[self.owner(turn) * self.job.num_slots[half] + slot]

    def owner(self, turn):
        """Which computing warpgroup takes a turn."""
        count = self.job.config.num_compute
        return lax.rem(turn, jnp.int32(count)) if count > 1 else jnp.int32(0)

    def page_row(self, run: Run, page, half):
        """Where the page's keys (half 0) or values (half 1) lie among the rows of pages."""
        job = self.job
        return ((self.layer() * job.num_pages + page) * 2 + half) * job.kv_heads + run.kv_head


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A turn of the computing warpgroup: its run, a block at a time.

    Attributes:
        work: Of the CTA.
        index: Which turn of the CTA.
        run: The run.
        base: Blocks that the CTA has taken before.
        row_pos: Position of each row's query.
        q: The queries, an operand of wgmma.
        q_slot: Which slot that is; None for a new token.
        new_page: Page of the new token, if any.
        new_offset: Its place there.
    """

    work: Work
    index: Any
    run: Run
    base: Any
    row_pos: Any
    q: Any
    q_slot: Any
    new_page: Any
    new_offset: Any

    def prepare_new_token(self) -> None:
        """Make the queries of a new token, if it is one."""
        new_token, memory = self.work.job.new_token, self.work.memory
        if new_token is not None:
            here = self.run.seq, self.run.kv_head
            new_token.prepare(memory.queries, *here, self.q, self._kept)

    @property
    def _kept(self):
        """Where this warpgroup keeps a new token's key and value."""
        return self.work.memory.kept.at[self.work.owner(self.index)]

    def free_queries(self) -> None:
        """Let the loading warpgroup fill the slot of the queries again."""
        if self.q_slot is not None:
            plgpu.barrier_arrive(self.work.memory.q_free.at[self.q_slot])

    def empty(self):
        """The state before any block: output, maximum and sum."""
        math = self.work.job.math
        return (
            math.full(self.work.job.out_shape, 0.0),
            math.full((bits.ROWS,), bits.EMPTY_MAX),
            math.full((bits.ROWS,), 0.0),
        )

    def _put_new(self, j, half, page_smem) -> None:
        """Put the new token's key or value in its page, once that has been loaded."""
        work = self.work
        if work.job.new_token is not None:

            @pl.when(j == self.run.full)
            def _put():
                page_gmem = work.memory.pages.at[work.page_row(self.run, self.new_page, half)]
                work.job.new_token.put(self._kept, half, page_smem, page_gmem, self.new_offset)

    def _scores_of(self, j, may_be_new, meanwhile=lambda: None):
        """The scores of a block, and what `meanwhile` gives."""
        job, memory = self.work.job, self.work.memory
        k_slot = lax.rem(self.base + j, jnp.int32(job.num_slots[0]))
        plgpu.barrier_wait(self.work.filled(memory.k_filled, self.index, 0, k_slot))
        if may_be_new:
            self._put_new(j, 0, memory.k.at[k_slot])
        scores, result = bits.product_during(
            job.math, self.q, memory.k.at[k_slot].T, (bits.ROWS, bits.BLOCK), meanwhile
        )
        plgpu.barrier_arrive(memory.k_free.at[k_slot])
        return scores, result

    def _softmax(self, j, scores, m, weight_sum, is_masked):
        """The new maximum and sum, what the output decays by, and the weights as an operand."""
        job, math = self.work.job, self.work.job.math
        if is_masked:
            first_key = (self.run.first_block + j) * bits.BLOCK
            scores = math.mask(scores, self.row_pos, first_key, None)
        scale = bits.score_scale(job.channels)
        m, weight_sum, decay, weights = math.softmax_step(scores, m, weight_sum, scale)
        return m, weight_sum, decay, bits.operand(weights, job.dtype, self.work.memory.weights)

    def _add_values(self, j, out, decay, operand, is_masked):
        """The output with a block's values."""
        job, memory, run = self.work.job, self.work.memory, self.run
        v_slot = lax.rem(self.base + j, jnp.int32(job.num_slots[1]))
        plgpu.barrier_wait(self.work.filled(memory.v_filled, self.index, 1, v_slot))
        v = memory.v.at[v_slot]
        if is_masked:
            first_key = (run.first_block + j) * bits.BLOCK

            @pl.when(first_key + (bits.BLOCK - 1) > run.last)
            def _clear():
                bits.clear_unwritten(v, first_key, run.last, job.math)

            self._put_new(j, 1, v)
        out, _ = bits.chained_product(job.math, out, decay, operand, v)
        plgpu.barrier_arrive(memory.v_free.at[v_slot])
        return out

    def one_block(self, j, carry, is_masked):
        """The state after the j-th block."""
        out, m, weight_sum = carry
        scores, _ = self._scores_of(j, is_masked)
        m, weight_sum, decay, operand = self._softmax(j, scores, m, weight_sum, is_masked)
        return self._add_values(j, out, decay, operand, is_masked), m, weight_sum

    def over_blocks(self, step: Callable, carry):
        """All blocks in order by `step(j, carry, is_masked=)`; the first need no mask."""
        run = self.run
        for start, stop, is_masked in ((0, run.full, False), (run.full, run.blocks, True)):
            carry = lax.fori_loop(start, stop, functools.partial(step, is_masked=is_masked), carry)
        return carry

    def split(self):
        """The state after all blocks, if they are one split."""
        if self.work.job.config.scores_ahead:
            return self._split_ahead()
        return self.over_blocks(self.one_block, self.empty())

    def _split_ahead(self):
        """`split` of one query, each block's scores under the softmax of the one before."""

        def one_block(j, carry):
            scores, out, m, weight_sum = carry
            scores, (m, weight_sum, decay, operand) = self._scores_of(
                j + 1, True, lambda: self._softmax(j, scores, m, weight_sum, is_masked=False)
            )
            return scores, self._add_values(j, out, decay, operand, False), m, weight_sum

        empty = self.empty()
        # One query: only the block of its own key need be masked, the last if any.
        stop = self.run.blocks - 1
        scores, _ = self._scores_of(jnp.int32(0), True)
        carry = lax.fori_loop(0, stop, one_block, (scores, *empty))
        scores, out, m, weight_sum = carry
        m, weight_sum, decay, operand = self._softmax(stop, scores, m, weight_sum, True)
        return self._add_values(stop, out, decay, operand, True), m, weight_sum


def start_turn(work: Work, turn, base) -> Turn:
    """Take a run, and its queries where they are rows; `prepare_new_token` makes others."""
    job, memory, math = work.job, work.memory, work.job.math
    run = work.run_at(turn)
    if job.query_len == 1:
        row_pos = math.cast(jnp.full((bits.ROWS,), run.last), math.row_layout)
    else:
        row_pos = math.load(memory.positions.at[run.seq])
    q_slot = page = offset = None
    if job.new_token is None:
        q_slot = lax.rem(turn, jnp.int32(2))
        q = memory.q.at[q_slot]
        plgpu.barrier_wait(memory.q_filled.at[q_slot])
    else:
        q = memory.q.at[work.owner(turn)]
        offset = lax.rem(run.last, jnp.int32(bits.BLOCK))
        # Read now, used when the page has been loaded.
        page = run.page(jnp.minimum(run.full, run.blocks - 1))
    return Turn(
        work=work, index=turn, run=run, base=base, row_pos=row_pos, q=q, q_slot=q_slot,
        new_page=page, new_offset=offset,
    )  # fmt: skip


def share_turns(work: Work, one_turn: Callable[[Turn], None]) -> None:
    """All warpgroups of a CTA: the computing ones take its turns one after the other, one loads.

    Args:
        work: Of the CTA.
        one_turn: What a computing warpgroup does in a turn.
    """
    wg, count = lax.axis_index("wg"), work.job.config.num_compute

    def blocks_at(turn):
        return work.run_at(jnp.clip(turn, 0, jnp.maximum(work.num_turns - 1, 0))).blocks

    def my_turn(index, base):
        turn = start_turn(work, index * count + wg if count > 1 else index, base)
        one_turn(turn)
        base += turn.run.blocks
        for others in range(1, count):
            base += blocks_at(turn.index + others)
        return base

    def compute():
        if count > 1:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        base = jnp.int32(0)
        for before in range(count - 1):
            base += jnp.where(wg > before, blocks_at(before), 0)
        turns = lax.div(work.num_turns - wg + (count - 1), jnp.int32(count))
        lax.fori_loop(0, turns, my_turn, base)
        plgpu.wait_smem_to_gmem(0)

    def load():
        if count > 1:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        load_runs(work)

    pl.when(wg < count)(compute)
    pl.when(wg == count)(load)


def load_runs(work: Work, first_page: Callable = lambda turn, run: run.page(0)) -> None:
    """What the loading warpgroup does: the queries and the pages of each run.

    Args:
        work: Of the CTA.
        first_page: Gives the first page of a turn's run, if it was read before.
    """
    job, memory = work.job, work.memory

    def one_run(turn, base):
        run = work.run_at(turn)
        q_slot = lax.rem(turn, jnp.int32(2))
        if job.new_token is None:
            first_row = (run.seq * job.kv_heads + run.kv_head) * job.rows_apart

            @pl.when(turn >= 2)
            def _q_is_free():
                plgpu.barrier_wait(memory.q_free.at[q_slot])

            rows = pl.ds(lax.div(first_row, jnp.int32(8)) * 8, job.padded_rows)
            plgpu.copy_gmem_to_smem(
                memory.queries[0].at[rows],
                memory.q.at[q_slot, pl.ds(0, job.padded_rows)],
                memory.q_filled.at[q_slot],
            )

        def one_page(j, page):
            next_page = run.page(jnp.minimum(j + 1, run.blocks - 1))
            index = base + j
            rings = (
                (memory.k, memory.k_filled, memory.k_free),
                (memory.v, memory.v_filled, memory.v_free),
            )
            for half, (smem, filled, free) in enumerate(rings):
                slot = lax.rem(index, jnp.int32(job.num_slots[half]))

                @pl.when(index >= job.num_slots[half])
                def _is_free(slot=slot, free=free):
                    plgpu.barrier_wait(free.at[slot])

                load_written(
                    run.last + 1 - (run.first_block + j) * bits.BLOCK,
                    memory.pages.at[work.page_row(run, page, half)],
                    smem.at[slot],
                    work.filled(filled, turn, half, slot),
                    at_once=job.config.keys_at_once,
                )
            return next_page

        # Read with BLOCKS, not after it, and each next page ahead.
        lax.fori_loop(0, run.blocks, one_page, first_page(turn, run))
        return base + run.blocks

    total = lax.fori_loop(0, work.num_turns, one_run, jnp.int32(0))
    used = [(memory.k_free, total), (memory.v_free, total)]
    if job.new_token is None:
        used.append((memory.q_free, work.num_turns))
    for free, count in used:
        bits.drain(free, count)


def load_written(num_written, page_gmem, page_smem, filled, *, at_once: int) -> None:
    """Load the first keys or values of a page: those that are written, and those up to a multiple.

    What is behind them in shared memory is older. It decides no bit: its keys are masked, and its
    values are cleared (`clear_unwritten`), as those of a freed page are.

    Args:
        num_written: Keys of the page that are written, the new token's included; 128 or more if
            the page is full.
        page_gmem: The page.
        page_smem: A slot.
        filled: Its barrier.
        at_once: The multiple.
    """

    def load(num_keys: int) -> None:
        keys = pl.ds(0, num_keys)
        plgpu.copy_gmem_to_smem(page_gmem.at[keys], page_smem.at[keys], filled)

    if at_once == bits.BLOCK:
        load(bits.BLOCK)
        return
    is_whole = num_written > bits.BLOCK - at_once
    pl.when(is_whole)(functools.partial(load, bits.BLOCK))

    @pl.when(jnp.logical_not(is_whole))
    def _load_part():
        num_loaded = lax.div(num_written + (at_once - 1), jnp.int32(at_once)) * at_once
        for num_keys in range(at_once, bits.BLOCK, at_once):
            pl.when(num_loaded == num_keys)(functools.partial(load, num_keys))


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
        prefetch: Weights that `spread` asks into the L2 cache, or None.
    """

    queries: tuple
    page_rows: Any
    row_positions: jax.Array
    page_table: jax.Array
    positions: jax.Array
    layer: jax.Array
    prefetch: Any = None


def launch(
    job: Job,
    operands: Operands,
    body: Callable[[Memory], None],
    *,
    table: jax.Array,
    num_entries: jax.Array,
    schedule: str,
    num_ctas: int,
    results: Sequence[jax.ShapeDtypeStruct],
    kept_results: Sequence,
    cluster: int = 1,
    barrier=None,
) -> list[jax.Array]:
    """Run `body` on the warpgroups of each CTA.

    Args:
        job: What is attended to.
        operands: Of attention.
        body: Gets the references.
        table: Of pages, or the list of runs.
        num_entries: Of that list, [1].
        schedule: Part of the kernel's name.
        num_ctas: CTAs, or clusters of them.
        results: Shapes of what the schedule writes.
        kept_results: What the schedule keeps in shared memory: two things or None. With several
            computing warpgroups the first lies where the queries lie, which must be done with.
        cluster: CTAs of a cluster.
        barrier: One of the schedule's own.

    Returns:
        The results.
    """
    queries, dtype, channels = operands.queries, job.dtype, job.channels
    swizzled = bits.swizzled(bits.channel_span(channels))

    def whole_body(*refs):
        refs = list(refs)

        def take(count: int) -> list:
            return [refs.pop(0) for _ in range(count)]

        query_refs, (pages, positions, table, num_entries, layer) = take(len(queries)), take(5)
        result_refs, (q, k, v), kept_refs = take(len(results)), take(3), take(2)
        weights, kept, q_filled, k_filled, v_filled, q_free, k_free, v_free, own = refs
        if shares_memory:
            q, kept_refs[0] = q
        if weights is not None:
            weights = weights.at[lax.rem(lax.axis_index("wg"), jnp.int32(num_compute))]
        body(
            Memory(
                queries=query_refs,
                pages=pages,
                positions=positions,
                table=table,
                num_entries=num_entries,
                layer=layer,
                results=result_refs,
                q=q,
                k=k,
                v=v,
                kept_results=kept_refs,
                weights=weights,
                kept=kept,
                q_filled=q_filled,
                k_filled=k_filled,
                v_filled=v_filled,
                q_free=q_free,
                k_free=k_free,
                v_free=v_free,
                barrier=own,
            )  # fmt: skip
        )

    grid = {"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}
    num_compute = job.config.num_compute
    q_copies = 2 if job.new_token is None else num_compute
    q = plgpu.SMEM((q_copies, *job.out_shape), dtype, transforms=swizzled)
    shares_memory = num_compute > 1 and kept_results[0] is not None
    if shares_memory:
        q, kept_results = plgpu.RefUnion(q, kept_results[0]), [None, *kept_results[1:]]
    kept = None
    if job.new_token is not None:
        kept = plgpu.SMEM((num_compute, *job.new_token.kept_shape), dtype)
    return plgpu.kernel(
        whole_body,
        out_type=list(results),
        scratch_types=[
            q,
            *(
                plgpu.SMEM((n, bits.BLOCK, channels), dtype, transforms=swizzled)
                for n in job.num_slots
            ),
            *kept_results,
            plgpu.SMEM((num_compute, bits.ROWS, bits.BLOCK), dtype) if job.is_interpreted else None,
            kept,
            plgpu.Barrier(num_barriers=2),
            *(plgpu.Barrier(num_barriers=n * num_compute) for n in job.num_slots),
            *(plgpu.Barrier(num_barriers=n) for n in (2, *job.num_slots)),
            barrier,
        ],
        grid=(num_ctas,),
        grid_names=("cta",),
        **grid,
        num_threads=num_compute + 1,
        thread_name="wg",
        kernel_name=f"attention_{schedule}_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
        interpret=plgpu.InterpretGPUParams() if job.is_interpreted else None,
    )(
        *queries, operands.page_rows, operands.row_positions, table, num_entries,
        operands.layer.reshape(1),
    )  # fmt: skip
