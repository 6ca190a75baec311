# SPDX-License-Identifier: Apache-2.0
"""Decode by clusters whose CTAs share each split: for so few rows that a CTA's time is latency.

A CTA of the cluster takes the scores of one block of a split. All CTAs of the split exchange the
maxima of their blocks, so that each knows the running maximum of every block, and then the weights.
Each then adds up the values of all blocks, in order, for its share of the channels. So a CTA waits
for a fourth of the bytes, and computes a fourth of the scores.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_cluster import merge_splits
from detjax.pallas_kernels.attention.sm90_decode_exchange import (
    SENT_ROWS,
    SPREAD,
    ClusterExchange,
    read_weights,
)
from detjax.pallas_kernels.attention.sm90_decode_job import Job, Operands
from detjax.pallas_kernels.attention.sm90_decode_run import load_written
from detjax.pallas_kernels.attention.sm90_float8_pages import AT_ONCE, widen_page
from detjax.pallas_kernels.attention.sm90_new_token import NewToken
from detjax.pallas_kernels.hopper_sums import score_scale
from detjax.pallas_kernels.sm90_cache_hints import evict_first
from detjax.pallas_kernels.sm90_prefetch import ask_for
from detjax.pallas_kernels.sm90_ptx import read_now

SPREAD_CHANNELS = (128, 256)
"""Of a head."""
RING = 2
"""Turns whose keys and values are in flight; those of float8 are widened one at a time.

Of wide heads one: a page of keys is 64 KiB, and a share of the values of four blocks as much.
"""


class _Arrays(NamedTuple):
    """Operands of the kernel, in device memory."""

    new: tuple  # the operands of `NewToken`
    pages: Any  # [L N 2 K, P, C]
    positions: Any  # [B, 1] int32
    table: Any  # [B, n] int32
    layer: Any  # [1] int32
    prefetch: Any  # weights, or None
    gates: Any  # [B, .], or None


class _Sent(NamedTuple):
    """What the CTAs of a cluster send each other: in shared memory; interpreted, in device memory.

    Interpretation knows no other CTA's shared memory.
    """

    outs: Any  # [splits, padded_rows C] f32, to the first CTA
    scales: Any  # [splits, 2, padded_rows] f32, maxima and sums, to the first CTA
    maxima: Any  # [at_once, 2, SPREAD, ROWS] f32, of blocks
    sums: Any  # [at_once, SPREAD, ROWS] f32, of blocks
    weights: Any  # [at_once, SPREAD, ROWS, BLOCK]; words of a warp's lanes if not interpreted


class _Barriers(NamedTuple):
    """Barriers of a CTA's slots, and those at which a cluster meets."""

    k_filled: Any  # [RING]
    v_filled: Any  # [RING * SPREAD]
    k_free: Any  # [RING]
    v_free: Any  # [RING]
    meeting: Any  # [3], if interpreted
    k_asked: Any  # [RING], of float8
    v_asked: Any  # [RING * SPREAD]


class _Shared(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    q: Any  # [ROWS, C]
    k: Any  # [RING, BLOCK, C]
    v: Any  # [RING * SPREAD, BLOCK, share]
    kept: Any  # [2, C], the new token's key and value
    k_codes: Any  # [RING, BLOCK, C] uint8, keys of float8
    v_codes: Any  # [RING * SPREAD, BLOCK, share] uint8
    sent: Any  # `_Sent`, unless interpreted
    flags: Any  # [8] int32, barriers of `ClusterExchange`, unless interpreted
    weights: Any  # [ROWS, BLOCK], if interpreted
    wide: Any  # [BLOCK, C], if interpreted
    barriers: _Barriers


class _Place(NamedTuple):
    """Which share of the work a CTA has."""

    cta: Any  # the pair of a sequence and a kv head
    rank: Any  # of the cluster
    here: tuple  # the sequence and the kv head
    part: Any  # which block of a split
    group: Any  # which of the splits of a turn
    slices: Any  # channels of the output


class _Turns(NamedTuple):
    """What a CTA reads of its sequence before its first turn."""

    last: Any  # position of the new token
    layer: Any  # which layer's pages
    first_pages: tuple  # of the first turn; see `_pages_of`
    all_blocks: Any  # of the sequence
    num_splits: Any  # of the sequence
    num: Any  # turns of the cluster
    new_page: Any  # page of the new token


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cta:
    """What the warpgroups of a CTA do: one computes, and one loads.

    Attributes:
        job: What the launch attends to.
        arrays: Its operands.
        out: The output.
        shared: Shared memory.
        sent: What CTAs send each other.
        exchange: How.
        wg: Which warpgroup.
        place: Which share it has.
        turns: How many there are, and where their pages lie.
    """

    job: Job
    arrays: _Arrays
    out: Any
    shared: _Shared
    sent: _Sent
    exchange: ClusterExchange
    wg: Any
    place: _Place
    turns: _Turns

    @property
    def new_token(self) -> NewToken:
        """Makes queries, key and value."""
        assert self.job.new_token is not None
        return self.job.new_token

    @property
    def at_once(self) -> int:
        """Splits of a turn."""
        return self.job.config.cluster // SPREAD

    @property
    def ring(self) -> int:
        """Turns whose keys and values in bfloat16 are in shared memory."""
        return _ring(self.job)

    @property
    def share(self) -> int:
        """Channels of the output that a CTA adds up."""
        return self.job.channels // SPREAD

    def blocks_of(self, turn) -> tuple:
        """The split of a turn: its first block, and how many it has."""
        first = (turn * self.at_once + self.place.group) * SPREAD
        return first, jnp.clip(self.turns.all_blocks - first, 0, SPREAD)

    def page_row(self, page, half: int):
        """Where the page's keys (half 0) or values (half 1) lie among the rows of pages."""
        job, (_, kv_head) = self.job, self.place.here
        return ((self.turns.layer * job.num_pages + page) * 2 + half) * job.kv_heads + kv_head

    def run(self) -> None:
        """Both warpgroups; which one it is decides what it does."""
        pl.when(self.wg == 0)(self.compute)
        pl.when(self.wg == 1)(self.load)
        pl.when(self.wg == 0)(self.merge)
        if not self.job.is_interpreted:
            self.exchange.end(self.wg)

    # ------------------------------------------------------------------ the warpgroup that loads

    def load(self) -> None:
        """Keys of a block and a share of the values of its split, turn by turn."""
        reads_float8 = self.job.config.reads_float8

        def ask(turn, found):
            self.load_turn(turn, found)
            if self.arrays.prefetch is not None:
                pl.when(turn == 0)(self.ask_ahead)
            return lax.cond(
                turn + 1 < self.turns.num, lambda: self.pages_of(turn + 1), lambda: found
            )

        def ask_and_widen(turn, found):
            found = lax.cond(turn < self.turns.num, lambda: ask(turn, found), lambda: found)
            pl.when(turn > 0)(lambda: self.widen_turn(turn - 1))
            return found

        if reads_float8:  # a turn while the next one is on its way
            stop = self.turns.num + (self.turns.num > 0).astype(jnp.int32)
            lax.fori_loop(0, stop, ask_and_widen, self.turns.first_pages)
        else:
            lax.fori_loop(0, self.turns.num, ask, self.turns.first_pages)
        for free in (self.shared.barriers.k_free, self.shared.barriers.v_free):
            bits.drain(free, self.turns.num)

    def pages_of(self, turn) -> tuple:
        """See `_pages_of`."""
        split = turn * self.at_once + self.place.group
        return _pages_of(self.job, self.arrays.table, self.place.here[0], self.place.part, split)

    def load_turn(self, turn, pages: tuple) -> None:
        """Copy the blocks of a turn that are there; `pages` are theirs."""
        shared, part, barriers = self.shared, self.place.part, self.shared.barriers
        first, blocks = self.blocks_of(turn)
        reads_float8 = self.job.config.reads_float8
        slot = lax.rem(turn, jnp.int32(RING if reads_float8 else self.ring))
        if reads_float8:
            keys, k_filled = shared.k_codes, barriers.k_asked
            values, v_filled = shared.v_codes, barriers.v_asked
        else:
            keys, k_filled = shared.k, barriers.k_filled
            values, v_filled = shared.v, barriers.v_filled
            self.wait_until_free(turn, barriers.k_free)

        def copy(block, source, smem, filled):
            num_written = self.turns.last + 1 - block * bits.BLOCK
            load_written(num_written, source, smem, filled, at_once=self.job.config.keys_at_once)

        @pl.when(part < blocks)
        def _keys():
            block, source = first + part, self.arrays.pages.at[self.page_row(pages[0], 0)]
            copy(block, source, keys.at[slot], k_filled.at[slot])

        if not reads_float8:
            self.wait_until_free(turn, barriers.v_free)
        for j in range(SPREAD):

            @pl.when(j < blocks)
            def _values(j=j):
                place = slot * SPREAD + j
                source = self.arrays.pages.at[self.page_row(pages[1 + j], 1), :, self.place.slices]
                copy(first + j, source, values.at[place], v_filled.at[place])

    def wait_until_free(self, turn, free) -> None:
        """Wait until the keys, or the values, of a turn may be written to shared memory."""
        slot = lax.rem(turn, jnp.int32(self.ring))
        pl.when(turn >= self.ring)(lambda: plgpu.barrier_wait(free.at[slot]))

    def widen_turn(self, turn) -> None:
        """Widen the keys and values of a turn, which `load_turn` has asked for."""
        shared, barriers = self.shared, self.shared.barriers
        first, blocks = self.blocks_of(turn)
        asked, slot = lax.rem(turn, jnp.int32(RING)), lax.rem(turn, jnp.int32(self.ring))
        self.wait_until_free(turn, barriers.k_free)
        self.wait_until_free(turn, barriers.v_free)

        def widen(block, codes, is_here, page, is_filled):
            plgpu.barrier_wait(is_here)
            num_written = jnp.clip(self.turns.last + 1 - block * bits.BLOCK, 1, bits.BLOCK)
            last_group = lax.div(num_written - 1, jnp.int32(AT_ONCE))
            widen_page(codes, page, last_group, self.job.is_interpreted)
            plgpu.barrier_arrive(is_filled)

        @pl.when(self.place.part < blocks)
        def _keys():
            widen(
                first + self.place.part, shared.k_codes.at[asked], barriers.k_asked.at[asked],
                shared.k.at[slot], barriers.k_filled.at[slot],
            )  # fmt: skip

        def one_slice(j, _):
            come, place = asked * SPREAD + j, slot * SPREAD + j
            widen(
                first + j, shared.v_codes.at[come], barriers.v_asked.at[come],
                shared.v.at[place], barriers.v_filled.at[place],
            )  # fmt: skip

        lax.fori_loop(0, blocks, one_slice, None)

    def ask_ahead(self) -> None:
        """Ask for this CTA's share of the next product's weights."""
        config = self.job.config
        share = self.place.cta * config.cluster + self.place.rank
        num_shares = self.job.batch * self.job.kv_heads * config.cluster
        ask_for(self.arrays.prefetch, share, num_shares, num_bytes=config.prefetched)

    # --------------------------------------------------------------- the warpgroup that computes

    def compute(self) -> None:
        """The new token, then the turns."""
        self.new_token.prepare(
            list(self.arrays.new), *self.place.here, self.shared.q, self.shared.kept
        )
        self.exchange.started()

        def one_turn(turn, carry):
            self.one_turn(turn)
            return carry

        lax.fori_loop(0, self.turns.num, one_turn, jnp.int32(0))

    def one_turn(self, turn) -> None:
        """A split: scores and weights of one of its blocks, outputs of a share of the channels."""
        shared, math = self.shared, self.job.math
        first, blocks = self.blocks_of(turn)
        slot = lax.rem(turn, jnp.int32(self.ring))
        maxima = self.sent.maxima.at[self.place.group, lax.rem(turn, jnp.int32(2))]
        block, last_block = first + self.place.part, self.turns.all_blocks - 1

        @pl.when(self.place.part < blocks)
        def _wait_for_keys():
            plgpu.barrier_wait(shared.barriers.k_filled.at[slot])

        offset = lax.rem(jnp.maximum(self.turns.last, 0), jnp.int32(bits.BLOCK))
        has_last = (blocks > 0) & (last_block < first + SPREAD)

        @pl.when(block == last_block)
        def _put_key():
            page = self.arrays.pages.at[self.page_row(self.turns.new_page, 0)]
            self.new_token.put(shared.kept, 0, shared.k.at[slot], page, offset)
            plgpu.commit_smem()

        scores = self.scores(slot, block)
        scale = score_scale(self.job.channels)
        block_max = math.mul(jnp.max(scores, axis=1), math.full((bits.ROWS,), scale))
        self.exchange.send_rows(block_max, maxima, self.place.part, self.place.group, 0, math)
        self.exchange.meet(0, turn, SPREAD * SENT_ROWS * 4)
        self.send_weights(scores, self.running_max(maxima), scale)
        for j in range(SPREAD):

            @pl.when(j < blocks)
            def _wait_for_values(j=j):
                plgpu.barrier_wait(shared.barriers.v_filled.at[slot * SPREAD + j])

        @pl.when(has_last)
        def _put_value():
            self.put_value(shared.v.at[slot * SPREAD + last_block - first], offset)

        self.exchange.meet(1, turn, SPREAD * SENT_ROWS * (bits.BLOCK * 2 + 4))
        out, m, weight_sum = self.add_blocks(slot, blocks, maxima)
        plgpu.barrier_arrive(shared.barriers.v_free.at[slot])
        split = turn * self.at_once + self.place.group
        pl.when(blocks > 0)(functools.partial(self.send_partial, split, out, m, weight_sum))

    def scores(self, slot, block):
        """The scores of this CTA's block, [ROWS, BLOCK]."""
        shared, math = self.shared, self.job.math
        # A block that is not there is masked whole: its maximum is no one's.
        scores, _ = bits.scores_during(math, shared.q, shared.k.at[slot], lambda: None)
        plgpu.barrier_arrive(shared.barriers.k_free.at[slot])
        scores = math.first_half(scores)
        row_pos = math.cast(jnp.full((bits.ROWS,), self.turns.last), math.row_layout)
        return math.mask(scores, row_pos, block * bits.BLOCK, None)

    def running_max(self, maxima):
        """The running maximum with this CTA's block."""
        math = self.job.math
        m = math.full((bits.ROWS,), bits.EMPTY_MAX)
        for j in range(SPREAD):
            is_before = j < self.place.part + 1
            m = math.choose(is_before, jnp.maximum(m, math.load(maxima.at[j])), m)
        return math.first_half(m)

    def send_weights(self, scores, new_m, scale: float) -> None:
        """The weights of this CTA's block, and their sum, to all CTAs of the split."""
        math, part, group = self.job.math, self.place.part, self.place.group
        weights = math.exp2_scaled(scores, math.spread(-new_m, scores.shape), scale)
        row_sum = math.row_sum(weights)
        # ROUND: weights to the compute dtype for the product; their sum is not rounded.
        weights = weights.astype(self.job.dtype)
        self.exchange.send_weights(weights, self.sent.weights.at[group], part, group, 1)
        self.exchange.send_rows(row_sum, self.sent.sums.at[group], part, group, 1, math)

    def put_value(self, v_smem, offset) -> None:
        """Put the new token's value in row `offset` of the last block, here and in the cache."""
        value = self.new_token.kept(self.shared.kept, 1).at[self.place.slices]
        _put_value_share(v_smem, value, offset, self.job.math)
        row = self.arrays.pages.at[self.page_row(self.turns.new_page, 1), offset, self.place.slices]
        self.new_token.put_row(value, row)

    def add_blocks(self, slot, blocks, maxima):
        """The state of the split, of a share of the channels."""
        math, sums = self.job.math, self.sent.sums

        def one_block(j, carry):
            out, m, weight_sum = carry
            other = jnp.maximum(m, math.load(maxima.at[j]))
            decay = math.exp2_difference(m, other)
            weight_sum = math.fma(weight_sum, decay, math.load(sums.at[self.place.group, j]))
            return self.add_values(slot, j, out, decay), other, weight_sum

        empty = (
            math.full((bits.ROWS, self.share), 0.0),
            math.full((bits.ROWS,), bits.EMPTY_MAX),
            math.full((bits.ROWS,), 0.0),
        )
        return lax.fori_loop(0, blocks, one_block, empty)

    def add_values(self, slot, j, out, decay):
        """The output with the values of a block."""
        job, shared, weights = self.job, self.shared, self.sent.weights
        values = shared.v.at[slot * SPREAD + j]
        if not job.is_interpreted:
            operand = read_weights(weights.at[self.place.group, j], job.math, job.dtype)
            out, _ = bits.chained_product(job.math, out, decay, operand, values)
            return out
        # A processor's product of other columns may add up otherwise.
        shared.weights[...], shared.wide[:, self.place.slices] = (
            weights[self.place.group, j],
            values[...],
        )
        wide = bits.product(shared.weights, shared.wide, (bits.ROWS, job.channels))
        wide = lax.dynamic_slice_in_dim(wide, self.place.part * self.share, self.share, 1)
        return out * lax.broadcast_in_dim(decay, out.shape, [0]) + wide

    def send_partial(self, split, out, m, weight_sum) -> None:
        """The state of a split to the first CTA, which merges them."""
        job, scales = self.job, self.sent.scales
        first_channel = self.place.part * self.share
        self.exchange.send_out(
            out, self.sent.outs, split, first_channel, job.padded_rows, job.channels
        )

        @pl.when(self.place.part == 0)
        def _scales():
            self.exchange.send_to_leader(m, scales.at[split, 0])
            self.exchange.send_to_leader(weight_sum, scales.at[split, 1])

    def merge(self) -> None:
        """Fold the splits, in the first CTA."""
        job, is_interpreted = self.job, self.job.is_interpreted
        if is_interpreted:
            self.exchange.meet(2, 0, 0)

        @pl.when(self.place.rank == 0)
        def _merge():
            if not is_interpreted:
                a_split = SENT_ROWS * (job.channels + 2) * 4
                self.exchange.meet(2, 0, self.turns.num_splits * a_split)
            merge_splits(
                job, (self.sent.outs, self.sent.scales), self.out, self.place.here,
                self.turns.last, 0, self.turns.num_splits, row=0, gates=self.arrays.gates,
            )  # fmt: skip


def _pages_of(job: Job, table, seq, part, split) -> tuple:
    """The page of a CTA's keys, and those of its split's values."""
    first, last_entry = split * SPREAD, table.shape[1] - 1
    blocks = [first + part, *(first + j for j in range(SPREAD))]
    return tuple(
        read_now(table, seq, jnp.minimum(b, last_entry), is_interpreted=job.is_interpreted)
        for b in blocks
    )


def _start(job: Job, arrays: _Arrays, sent: _Sent | None, out, shared: _Shared) -> _Cta:
    """What a CTA begins with: its place, and what it reads of device memory at once."""
    evict_first(arrays.pages, is_interpreted=job.is_interpreted)
    wg, cta, rank = (lax.axis_index(name) for name in ("wg", "cta", "rank"))
    seq, kv_head = lax.div(cta, jnp.int32(job.kv_heads)), lax.rem(cta, jnp.int32(job.kv_heads))
    part, group = lax.rem(rank, jnp.int32(SPREAD)), lax.div(rank, jnp.int32(SPREAD))
    slices = pl.ds(part * (job.channels // SPREAD), job.channels // SPREAD)
    sent = shared.sent if sent is None else _Sent(*(ref.at[cta] for ref in sent))
    exchange = ClusterExchange(
        is_interpreted=job.is_interpreted, meeting=shared.barriers.meeting, flags=shared.flags
    )
    exchange.start(wg)

    def now(ref, *index):
        return read_now(ref, *index, is_interpreted=job.is_interpreted)

    at_once = job.config.cluster // SPREAD
    last = now(arrays.positions, seq, 0)
    first_pages = _pages_of(job, arrays.table, seq, part, group)
    layer = now(arrays.layer, 0)
    all_blocks = lax.div(last + bits.BLOCK, jnp.int32(bits.BLOCK))
    num_splits = lax.div(all_blocks + (SPREAD - 1), jnp.int32(SPREAD))
    num_turns = lax.div(num_splits + (at_once - 1), jnp.int32(at_once))
    new_entry = jnp.clip(all_blocks - 1, 0, arrays.table.shape[1] - 1)
    return _Cta(
        job=job, arrays=arrays, out=out, shared=shared, sent=sent, exchange=exchange,
        wg=wg, place=_Place(cta, rank, (seq, kv_head), part, group, slices),
        turns=_Turns(
            last=last, layer=layer, first_pages=first_pages, all_blocks=all_blocks,
            num_splits=num_splits, num=num_turns, new_page=now(arrays.table, seq, new_entry),
        ),
    )  # fmt: skip


def _check(job: Job) -> None:
    """Refuse what is not spread over the CTAs of a cluster."""
    config, new_token = job.config, job.new_token
    if new_token is None or job.group > SENT_ROWS or config.blocks_per_split != SPREAD:
        raise ValueError(
            f"a split is spread over {SPREAD} CTAs for new tokens alone, of at most {SENT_ROWS} "
            f"heads a kv head and splits of {SPREAD} blocks: {new_token=}, {job.group=}, {config=}"
        )
    if job.channels not in SPREAD_CHANNELS or job.is_wide and config.reads_float8:
        raise ValueError(
            f"{job.channels=} must be one of {SPREAD_CHANNELS} to spread a split, and of pages of "
            f"float8 {SPREAD_CHANNELS[0]}: {config=}"
        )
    if not config.cluster or config.cluster % SPREAD:
        raise ValueError(f"{config.cluster=} must be a multiple of {SPREAD} CTAs a split")


def _sent_shapes(job: Job, table_len: int) -> _Sent:
    """Shapes of what the CTAs of a cluster send each other."""
    at_once, most_splits = job.config.cluster // SPREAD, -(-table_len // SPREAD)
    f32 = jnp.float32
    return _Sent(
        outs=jax.ShapeDtypeStruct((most_splits, job.padded_rows * job.channels), f32),
        scales=jax.ShapeDtypeStruct((most_splits, 2, job.padded_rows), f32),
        maxima=jax.ShapeDtypeStruct((at_once, 2, SPREAD, bits.ROWS), f32),
        sums=jax.ShapeDtypeStruct((at_once, SPREAD, bits.ROWS), f32),
        weights=jax.ShapeDtypeStruct((at_once, SPREAD, bits.ROWS, bits.BLOCK), job.dtype),
    )


def _ring(job: Job) -> int:
    """Turns whose keys and values in bfloat16 are in shared memory."""
    return 1 if job.config.reads_float8 or job.is_wide else RING


def _shared_types(job: Job, shapes: _Sent) -> _Shared:
    dtype, channels, share = job.dtype, job.channels, job.channels // SPREAD
    assert job.new_token is not None
    whole, part = (bits.swizzled(bits.channel_span(c)) for c in (channels, share))
    sent = flags = weights = wide = meeting = None
    if job.is_interpreted:
        weights = plgpu.SMEM((bits.ROWS, bits.BLOCK), dtype)
        wide = plgpu.SMEM((bits.BLOCK, channels), dtype)
        meeting = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=3)
    else:
        words = jax.ShapeDtypeStruct(
            (*shapes.weights.shape[:2], SENT_ROWS * bits.BLOCK // 2), jnp.int32
        )
        sent = _Sent(*(plgpu.SMEM(s.shape, s.dtype) for s in shapes._replace(weights=words)))
        flags = plgpu.SMEM((8,), jnp.int32)
    ring = _ring(job)
    k_filled, v_filled, k_free, v_free = (
        plgpu.Barrier(num_barriers=n) for n in (ring, ring * SPREAD, ring, ring)
    )
    k_codes = v_codes = k_asked = v_asked = None
    if job.config.reads_float8:
        k_codes = plgpu.SMEM((RING, bits.BLOCK, channels), jnp.uint8)
        v_codes = plgpu.SMEM((RING * SPREAD, bits.BLOCK, share), jnp.uint8)
        k_asked, v_asked = (plgpu.Barrier(num_barriers=n) for n in (RING, RING * SPREAD))
    return _Shared(
        q=plgpu.SMEM(job.out_shape, dtype, transforms=whole),
        k=plgpu.SMEM((ring, bits.BLOCK, channels), dtype, transforms=whole),
        v=plgpu.SMEM((ring * SPREAD, bits.BLOCK, share), dtype, transforms=part),
        kept=plgpu.SMEM(job.new_token.kept_shape, dtype),
        k_codes=k_codes, v_codes=v_codes,
        sent=sent, flags=flags, weights=weights, wide=wide,
        barriers=_Barriers(k_filled, v_filled, k_free, v_free, meeting, k_asked, v_asked),
    )  # fmt: skip


def attend_spread(job: Job, operands: Operands) -> jax.Array:
    """The output of all sequences, [B H C]."""
    _check(job)
    pairs = job.batch * job.kv_heads
    shapes = _sent_shapes(job, operands.page_table.shape[1])
    of_all = None
    if job.is_interpreted:
        of_all = _Sent(*(jax.ShapeDtypeStruct((pairs, *s.shape), s.dtype) for s in shapes))

    def body(arrays: _Arrays, sent: _Sent | None, out, shared: _Shared):
        _start(job, arrays, sent, out, shared).run()

    _, out = plgpu.kernel(
        body,
        out_type=[of_all, jax.ShapeDtypeStruct((pairs * job.group * job.channels,), job.dtype)],
        scratch_types=[_shared_types(job, shapes)],
        grid=(pairs,),
        grid_names=("cta",),
        cluster=(job.config.cluster,),
        cluster_names=("rank",),
        num_threads=2,
        thread_name="wg",
        kernel_name="attention_spread_sm90",
        compiler_params=bits.COMPILER_PARAMS,
        interpret=plgpu.InterpretGPUParams() if job.is_interpreted else None,
    )(
        _Arrays(
            new=operands.queries, pages=operands.page_rows, positions=operands.row_positions,
            table=operands.page_table, layer=operands.layer.reshape(1),
            prefetch=operands.prefetch, gates=operands.gates,
        )
    )  # fmt: skip
    return out


def _put_value_share(v_smem, value, offset, math: bits.AttentionArithmetic) -> None:
    """Put the new token's value in row `offset` of the last page, and zeros behind it."""
    share = v_smem.shape[1]
    for half in range(bits.BLOCK // bits.ROWS):
        rows = v_smem.at[pl.ds(half * bits.ROWS, bits.ROWS), :]
        if math.is_interpreted:
            v, new = rows[...], value[...]
            keys = lax.broadcasted_iota(jnp.int32, (bits.ROWS, share), 0)
        else:
            layout = plgpu.Layout.WGMMA
            v = plgpu.load(rows, layout=layout)
            new = plgpu.load(value, layout=layout.reduce(0), optimized=False)
            keys = plgpu.broadcasted_iota(jnp.int32, (bits.ROWS, share), 0, layout=layout)
        new = lax.broadcast_in_dim(new, v.shape, [1])
        keys = keys + half * bits.ROWS
        v = jnp.where(keys < offset, v, jnp.zeros_like(v))
        rows[...] = jnp.where(keys == offset, new, v)
    plgpu.commit_smem()
