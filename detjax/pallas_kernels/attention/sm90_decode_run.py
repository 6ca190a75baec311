# SPDX-License-Identifier: Apache-2.0
"""What the schedules of decode share: a CTA's turn at a run of blocks, and the list of runs.

One warpgroup computes and another copies its queries, keys and values to shared memory. A CTA may
have two such pairs, each with runs and a ring of its own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_job import (
    DecodeConfig,
    DecodeWork,
    Job,
    Memory,
    Run,
)
from detjax.pallas_kernels.attention.sm90_float8_pages import AT_ONCE, Widening, nothing_asked
from detjax.pallas_kernels.sm90_registers import RegisterShares

REGISTERS = {
    False: RegisterShares(computing=232, loading=24, num_computing=2, num_loading=2),
    True: RegisterShares(computing=224, loading=32, num_computing=2, num_loading=2),
}
"""Where two warpgroups compute and two load, by whether these widen pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A turn of the computing warpgroup: its run, a block at a time.

    Attributes:
        work: Of the CTA.
        index: Which turn of the CTA.
        run: The run.
        base: Blocks that its warpgroup has taken before.
        row_pos: Position of each row's query.
        q: The queries, an operand of wgmma.
        q_slot: Which slot that is; None for a new token.
        new_page: Page of the one new token; None of several, or if there is none.
        new_offset: Its place there.
    """

    work: DecodeWork
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
        return self.work.memory.slots.kept.at[self.work.owner(self.index)]

    def free_queries(self) -> None:
        """Let the loading warpgroup fill the slot of the queries again."""
        if self.q_slot is not None:
            plgpu.barrier_arrive(self.work.memory.barriers.q_free.at[self.q_slot])

    def empty(self):
        """The state before any block: output, maximum and sum."""
        math = self.work.job.math
        return (
            math.full(self.work.job.out_shape, 0.0),
            math.full((bits.ROWS,), bits.EMPTY_MAX),
            math.full((bits.ROWS,), 0.0),
        )

    def _page_of_new(self, j):
        """The page of a block that may have new tokens, read before the wait for its content."""
        return self.new_page if self.run.first_new is None else self.run.page(j)

    def _put_new(self, j, half, page, page_smem) -> None:
        """Put the keys or values of new tokens in their page, once that has been loaded."""
        work, new_token = self.work, self.work.job.new_token
        if new_token is None:
            return
        page_gmem = work.memory.pages.at[work.page_row(self.run, page, half)]
        if self.run.first_new is None:

            @pl.when(j == self.run.full)
            def _put():
                new_token.put(self._kept, half, page_smem, page_gmem, self.new_offset)
                plgpu.commit_smem()

            return
        first_key = (self.run.first_block + j) * bits.BLOCK
        offset, stop = self.run.first_new - first_key, self.run.last + 1 - first_key
        new_token.put(self._kept, half, page_smem, page_gmem, offset, stop)
        plgpu.commit_smem()

    def _scores_of(self, j, may_be_new, meanwhile=lambda: None):
        """The scores of a block, and what `meanwhile` gives."""
        memory = self.work.memory
        slot = self.work.slot(self.index, 0, self.base + j)
        page = self._page_of_new(j) if may_be_new else None
        plgpu.barrier_wait(memory.barriers.filled.at[slot])
        if may_be_new:
            self._put_new(j, 0, page, memory.slots.ring.at[slot])
        scores, result = bits.scores_during(
            self.work.job.math, self.q, memory.slots.ring.at[slot], meanwhile
        )
        plgpu.barrier_arrive(memory.barriers.free.at[slot])
        return scores, result

    def _softmax(self, j, scores, m, weight_sum, is_masked):
        """The new maximum and sum, what the output decays by, and the weights as an operand."""
        job, math = self.work.job, self.work.job.math
        capped, scale = math.scaling(job.channels, job.config.softcap)
        scores = capped(scores)
        if is_masked:
            first_key = (self.run.first_block + j) * bits.BLOCK
            scores = math.mask(scores, self.row_pos, first_key, None)
        m, weight_sum, decay, weights = math.softmax_step(scores, m, weight_sum, scale)
        return (
            m,
            weight_sum,
            decay,
            bits.operand(weights, job.dtype, self.work.memory.slots.weights),
        )

    def _add_values(self, j, out, decay, operand, is_masked):
        """The output with a block's values."""
        job, memory, run = self.work.job, self.work.memory, self.run
        slot = self.work.slot(self.index, 1, self.base + j)
        page = self._page_of_new(j) if is_masked else None
        plgpu.barrier_wait(memory.barriers.filled.at[slot])
        v = memory.slots.ring.at[slot]
        if is_masked:
            first_key = (run.first_block + j) * bits.BLOCK

            @pl.when(first_key + (bits.BLOCK - 1) > run.last)
            def _clear():
                bits.clear_unwritten(v, first_key, run.last, job.math)

            self._put_new(j, 1, page, v)
        out, _ = bits.chained_product(job.math, out, decay, operand, v)
        plgpu.barrier_arrive(memory.barriers.free.at[slot])
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


def start_turn(work: DecodeWork, turn, base, row_pos=None) -> Turn:
    """Take a run, and its queries where they are rows; `prepare_new_token` makes others.

    `row_pos` are the positions of a window's rows, if they were read before.
    """
    job, memory, math = work.job, work.memory, work.job.math
    run = work.run_at(turn)
    if job.query_len == 1:
        row_pos = math.cast(jnp.full((bits.ROWS,), run.last), math.row_layout)
    elif row_pos is None:
        row_pos = math.load(memory.positions.at[run.seq])
    q_slot = page = offset = None
    if job.new_token is None:
        q_slot = lax.rem(turn, jnp.int32(job.query_slots))
        q = memory.slots.q.at[q_slot]
        plgpu.barrier_wait(memory.barriers.q_filled.at[q_slot])
    else:
        q = memory.slots.q.at[work.owner(turn)]
        if job.query_len == 1:
            offset = lax.rem(run.last, jnp.int32(bits.BLOCK))
            # Read now, used when the page has been loaded.
            page = run.page(jnp.minimum(run.full, run.blocks - 1))
    return Turn(
        work=work, index=turn, run=run, base=base, row_pos=row_pos, q=q, q_slot=q_slot,
        new_page=page, new_offset=offset,
    )  # fmt: skip


def share_turns(work: DecodeWork, one_turn: Callable[[Turn], None]) -> None:
    """All warpgroups of a CTA: the i-th that computes takes every `num_compute`-th turn from i.

    As many load, each for one of them.

    Args:
        work: Of the CTA.
        one_turn: What a computing warpgroup does in a turn.
    """
    wg, count = lax.axis_index("wg"), work.job.config.num_compute

    def my_turn(index, base):
        turn = start_turn(work, index * count + wg if count > 1 else index, base)
        one_turn(turn)
        return base + turn.run.blocks

    shares = REGISTERS[work.job.config.reads_float8]

    def compute():
        if count > 1:
            shares.take()
        lax.fori_loop(0, work.turns_of(wg), my_turn, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def load():
        if count > 1:
            shares.give()
        load_runs(work, wg - count)

    pl.when(wg < count)(compute)
    pl.when(wg >= count)(load)


def load_runs(
    work: DecodeWork, owner, first_page: Callable = lambda turn, run: run.page(0)
) -> None:
    """What a loading warpgroup does: the queries and the pages of each run.

    Args:
        work: Of the CTA.
        owner: Which computing warpgroup takes the runs.
        first_page: Gives the first page of a turn's run, if it was read before.
    """
    job, memory = work.job, work.memory
    count, reads_float8 = job.config.num_compute, job.config.reads_float8
    widening = _widening(work, owner) if reads_float8 else None

    def one_run(index, carry):
        base, asked = carry
        turn = index * count + owner if count > 1 else index
        run = work.run_at(turn)
        q_slot = lax.rem(turn, jnp.int32(job.query_slots))
        if job.new_token is None:
            first_row = (run.seq * job.kv_heads + run.kv_head) * job.rows_apart
            if widening is not None:  # the queries are free once the pages of older runs are used
                asked = widening.widen_all(2 * base, asked)

            @pl.when(turn >= job.query_slots)
            def _q_is_free():
                plgpu.barrier_wait(memory.barriers.q_free.at[q_slot])

            rows = pl.ds(lax.div(first_row, jnp.int32(8)) * 8, job.padded_rows)
            plgpu.copy_gmem_to_smem(
                memory.queries[0].at[rows],
                memory.slots.q.at[q_slot, pl.ds(0, job.padded_rows)],
                memory.barriers.q_filled.at[q_slot],
            )

        def one_page(j, carry):
            page, asked = carry
            next_page = run.page(jnp.minimum(j + 1, run.blocks - 1))
            index = base + j
            num_written = run.last + 1 - (run.first_block + j) * bits.BLOCK
            if widening is not None:

                def one_half(half, asked):  # WHY: a loop, as twice the code compiles twice as long
                    page_gmem = memory.pages.at[work.page_row(run, page, half)]
                    return widening.ask(2 * index + half, asked, page_gmem, num_written)

                return next_page, lax.fori_loop(0, 2, one_half, asked)
            for half in range(2):
                page_gmem = memory.pages.at[work.page_row(run, page, half)]
                slot = work.slot(turn, half, index)

                @pl.when(2 * index + half >= job.num_slots)
                def _is_free(slot=slot):
                    plgpu.barrier_wait(memory.barriers.free.at[slot])

                load_written(
                    num_written, page_gmem, memory.slots.ring.at[slot],
                    memory.barriers.filled.at[slot], at_once=job.config.keys_at_once,
                )  # fmt: skip
            return next_page, asked

        # Read with BLOCKS, not after it, and each next page ahead.
        _, asked = lax.fori_loop(0, run.blocks, one_page, (first_page(turn, run), asked))
        return base + run.blocks, asked

    turns = work.turns_of(owner)
    total, asked = lax.fori_loop(0, turns, one_run, (jnp.int32(0), nothing_asked()))
    pl.when(owner == 0)(memory.ask_ahead)
    if widening is not None:
        widening.widen_all(2 * total, asked)
    rings = [(memory.barriers.free, job.num_slots, 2 * total)]
    if job.new_token is None:
        rings.append((memory.barriers.q_free, job.query_slots // count, turns))
    for free, num_slots, num_used in rings:
        bits.drain(free, num_used, owner * num_slots, num_slots)


def _widening(work: DecodeWork, owner) -> Widening:
    """How a loading warpgroup widens the pages of a computing one."""
    job, memory = work.job, work.memory
    barriers = memory.barriers

    def with_page(number, fill):
        slot = owner * job.num_slots + lax.rem(number, jnp.int32(job.num_slots))

        def claim():
            pl.when(number >= job.num_slots)(lambda: plgpu.barrier_wait(barriers.free.at[slot]))

        fill(memory.slots.ring.at[slot], barriers.filled.at[slot], claim)

    return Widening(
        codes=memory.slots.codes, filled=barriers.codes_filled, first=owner * job.num_coded,
        num_slots=job.num_coded, load=functools.partial(load_written, at_once=AT_ONCE),
        with_page=with_page, is_interpreted=job.is_interpreted,
    )  # fmt: skip


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


SEQ, FIRST_BLOCK, BLOCKS, FULL_BLOCKS, LAST, PAGES = range(6)
"""Columns of the list of runs; a run's pages are the last columns."""


def run_list(
    positions: jax.Array, page_table: jax.Array, config: DecodeConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The runs of all sequences in one list, with integer operations alone.

    A run is what a CTA takes: a split, or a sequence, which then has one even if it is padding.
    The same for every layer, so XLA computes it once a step.

    Returns:
        The list [W, PAGES + pages of a run]; each sequence's first entry and number of runs [B, 2];
        the list's length [1].
    """
    batch, num_pages = page_table.shape
    per_run = config.blocks_per_split
    last = positions.max(axis=1)
    first = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max).min(axis=1)
    blocks = last // bits.BLOCK + 1
    # Those before the first new token's own, which it may have to be put in (see `NewToken`).
    full = jnp.where(last < 0, 0, first // bits.BLOCK)
    if config.whole_sequences:
        return _one_run_each(page_table, blocks, full, last)
    runs = -(-blocks // per_run)
    ends = jnp.cumsum(runs)
    index = jnp.arange(batch * -(-num_pages // per_run), dtype=jnp.int32)
    seq = (index[:, None] >= ends[None, :]).astype(jnp.int32).sum(axis=1)
    seq = jnp.minimum(seq, batch - 1)
    first_block = (index - (ends - runs)[seq]) * per_run
    num_blocks = jnp.clip(blocks[seq] - first_block, 0, per_run)
    num_full = jnp.clip(full[seq] - first_block, 0, num_blocks)
    block = jnp.clip(first_block[:, None] + jnp.arange(per_run)[None], 0, num_pages - 1)
    columns = jnp.stack([seq, first_block, num_blocks, num_full, last[seq]], axis=1)
    table = jnp.concatenate([columns, page_table[seq[:, None], block]], axis=1)
    limits = jnp.stack([ends - runs, runs], axis=1)
    return table.astype(jnp.int32), limits.astype(jnp.int32), ends[-1:].astype(jnp.int32)


def _one_run_each(page_table, blocks, full, last) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`run_list` where sequence i has run i: no place to look for."""
    batch, num_pages = page_table.shape
    seq = jnp.arange(batch, dtype=jnp.int32)
    blocks = jnp.clip(blocks, 0, num_pages)
    columns = [seq, jnp.zeros_like(seq), blocks, jnp.clip(full, 0, blocks), last]
    table = jnp.concatenate([jnp.stack(columns, axis=1), page_table], axis=1)
    limits = jnp.stack([seq, jnp.ones_like(seq)], axis=1)
    return table.astype(jnp.int32), limits.astype(jnp.int32), jnp.full((1,), batch, jnp.int32)


def _listed_run(job: Job, table_ref, item) -> Run:
    """An item of `run_list`: an entry and a key/value head."""
    entry = lax.div(item, jnp.int32(job.kv_heads))
    first_block, blocks, full, last = (
        table_ref[entry, i] for i in (FIRST_BLOCK, BLOCKS, FULL_BLOCKS, LAST)
    )
    return Run(
        seq=entry if job.config.whole_sequences else table_ref[entry, SEQ],
        kv_head=lax.rem(item, jnp.int32(job.kv_heads)),
        partial=item, first_block=first_block, blocks=blocks, full=full, last=last,
        page=lambda j: table_ref[entry, PAGES + j],
    )  # fmt: skip


def listed_work(job: Job, memory: Memory, cta, *, num_items, num_ctas: int) -> DecodeWork:
    """Every `num_ctas`-th item of the list of runs, from the `cta`-th."""
    return DecodeWork(
        job=job,
        memory=memory,
        num_turns=lax.div(num_items - cta + (num_ctas - 1), jnp.int32(num_ctas)),
        run_at=lambda turn: _listed_run(job, memory.table, turn * num_ctas + cta),
        layer=lambda: memory.layer[0],
    )
