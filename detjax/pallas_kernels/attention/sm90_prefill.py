# SPDX-License-Identifier: Apache-2.0
"""Attention of many query rows over the paged cache: two compute warpgroups and one that loads.

A computing warpgroup has 64 rows of queries. Of heads of more than 128 channels two share them:
each computes all scores and has half of the channels of the output, as no warpgroup has registers
for all of them.
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
from detjax.pallas_kernels.attention.sm90_float8_pages import (
    Widening,
    nothing_asked,
    pages_that_fit,
)
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.sm90_registers import RegisterShares
from detjax.pallas_kernels.sm90_ring import Ring

WARPGROUPS = 2  # that compute; a third one loads
REGISTERS = {
    False: RegisterShares(computing=240, loading=24, num_computing=WARPGROUPS),
    True: RegisterShares(computing=232, loading=40, num_computing=WARPGROUPS),
}
"""By whether the warpgroup that loads widens pages."""
CODE_BYTES = 64 << 10  # of float8 in flight


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How the work is scheduled, and what decides bits: the last two.

    Attributes:
        num_stages: Pages of keys, and of values, in flight; of wide heads two and one are.
        query_buffers: Query tiles in shared memory; 2 lets the next one load during this one.
        num_ctas: Most CTAs; each then takes several tiles in turn. 0 for a CTA a tile.
        reads_float8: Whether pages are float8, which the loading warpgroup widens.
        blocks_per_split: Blocks of 128 keys in a split; the profile's.
        softcap: Of scores; the model's.
    """

    num_stages: int = 2
    query_buffers: int = 1
    num_ctas: int = 0
    reads_float8: bool = False
    blocks_per_split: int = 4
    softcap: float | None = None


def tile_shape(query_len: int, group: int) -> tuple[int, int]:
    """Tokens and heads in the 64 rows of a warpgroup. A choice for speed alone."""
    heads = 1
    while heads < 8 and group % (2 * heads) == 0 and query_len <= bits.ROWS // heads:
        heads *= 2
    return bits.ROWS // heads, heads


def _tile_positions(positions: jax.Array, tokens: int, heads: int, parts: int) -> jax.Array:
    """Positions of each part's rows, [B, tiles, parts, 64], -1 where there is none."""
    batch, query_len = positions.shape
    span = parts * tokens
    tiles = -(-query_len // span)
    padded = jnp.pad(
        positions, ((0, 0), (0, tiles * span - query_len)), constant_values=-1
    ).reshape(batch, tiles, parts, 1, tokens)
    return jnp.broadcast_to(padded, (batch, tiles, parts, heads, tokens)).reshape(
        batch, tiles, parts, bits.ROWS
    )


FIRST, FULL, TAIL, END, LAST = range(5)
"""What is known of a tile: the first block that a row sees, the first and the one after the last of
those that all rows see whole, the one after the last that a row sees, the last position."""


def _tile_limits(tile_positions: jax.Array, window: int | None) -> jax.Array:
    """The limits of each tile, [B, tiles, 5]."""
    last = tile_positions.max(axis=(2, 3))
    is_row = tile_positions >= 0
    earliest = jnp.where(is_row, tile_positions, jnp.iinfo(jnp.int32).max).min(axis=(2, 3))
    end = jnp.maximum(last // bits.BLOCK + 1, 1)  # a tile of padding loads one and sees none
    first, full = jnp.zeros_like(end), jnp.zeros_like(end)
    if window is not None:
        first = jnp.minimum(jnp.maximum(earliest - (window - 1), 0) // bits.BLOCK, end - 1)
        full = jnp.clip(-(-(last - (window - 1)) // bits.BLOCK), first, end)
    tail = jnp.clip((jnp.minimum(earliest, last) + 1) // bits.BLOCK, full, end)
    return jnp.stack([first, full, tail, end, last], axis=-1)


class _Arrays(NamedTuple):
    """Operands of the kernel, in device memory."""

    q: Any  # [B, T, H, C]
    pages: Any  # [L N 2 K, P, C]
    table: Any  # [B, n] int32
    positions: Any  # [B, tiles, parts, ROWS] int32
    limits: Any  # [B, tiles, 5] int32
    layer: Any  # [1] int32
    sinks: Any  # [K * group / heads, ROWS] f32, or None


class _Shared(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    q: Any  # [query_buffers, WARPGROUPS, ROWS, C]; one, not WARPGROUPS, of wide heads
    out: Any  # [query_buffers, WARPGROUPS, ROWS, C / 2] of wide heads, where queries lie; else None
    k: Any  # [stages, BLOCK, C]
    v: Any  # [stages, BLOCK, C]
    weights: Any  # [WARPGROUPS, ROWS, BLOCK], if interpreted: else weights stay in registers
    q_filled: Any  # [query_buffers * WARPGROUPS], or [query_buffers]
    q_free: Any  # [query_buffers]
    k_barriers: tuple  # filled [stages], free [stages]
    v_barriers: tuple  # filled [stages], free [stages]
    turn: Any  # whose turn at the tensor core it is
    codes: Any  # [coded, BLOCK, C] uint8 of pages of float8, and their barriers [coded]; or None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The numbers of a launch.

    Attributes:
        batch: Sequences.
        kv_heads: Key/value heads.
        group: Query heads of each.
        channels: Of a head.
        tokens: In the 64 rows of a warpgroup.
        heads: In those rows.
        tiles: Of a sequence and `heads` heads.
        num_pages: Of a layer of the cache.
        window: How many tokens back a query sees, or None.
        dtype: Of queries, keys, values and output.
        config: The schedule.
        is_interpreted: Whether a CPU interprets the kernel.
    """

    batch: int
    kv_heads: int
    group: int
    channels: int
    tokens: int
    heads: int
    tiles: int
    num_pages: int
    window: int | None
    dtype: jnp.dtype
    config: PrefillConfig
    is_interpreted: bool

    @property
    def is_wide(self) -> bool:
        """Whether the warpgroups of a CTA share rows, and each has half of the channels."""
        return self.channels > bits.SPAN_CHANNELS

    @property
    def parts(self) -> int:
        """Sets of 64 rows of a tile."""
        return 1 if self.is_wide else WARPGROUPS

    @property
    def out_channels(self) -> int:
        """Channels of the output of a warpgroup."""
        return self.channels // WARPGROUPS if self.is_wide else self.channels

    @property
    def stages(self) -> tuple[int, int]:
        """Pages of keys and of values in flight."""
        return (2, 1) if self.is_wide else (self.config.num_stages,) * 2

    @property
    def head_groups(self) -> int:
        """Groups of query heads that share a tile."""
        return self.kv_heads * self.group // self.heads

    @property
    def num_items(self) -> int:
        """Tiles of all sequences and heads."""
        return self.tiles * self.batch * self.head_groups

    @property
    def num_ctas(self) -> int:
        """CTAs, each with one tile or several in turn."""
        return min(self.config.num_ctas or self.num_items, self.num_items)

    @property
    def math(self) -> bits.AttentionArithmetic:
        """The arithmetic on accumulators."""
        return bits.accumulator_arithmetic(self.is_interpreted)

    def locate(self, turn) -> tuple:
        """Tile, sequence and group of heads of a CTA's turn; longest tiles first."""
        cta, num_ctas = lax.axis_index("cta"), self.num_ctas
        # Back and forth, so that each CTA's lengths even out.
        item = turn * num_ctas + jnp.where(turn % 2 == 1, num_ctas - 1 - cta, cta)
        of_tile = self.batch * self.head_groups
        # Longest tiles first, so that short ones fill the end.
        tile = self.tiles - 1 - item // of_tile
        rest = item % of_tile
        return tile, rest // self.head_groups, rest % self.head_groups

    def num_turns(self):
        """Tiles that a CTA takes."""
        full_turns, rest = divmod(self.num_items, self.num_ctas)
        cta = lax.axis_index("cta")
        index = self.num_ctas - 1 - cta if full_turns % 2 else cta
        return full_turns + (index < rest).astype(jnp.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cta:
    """What the warpgroups of a CTA do."""

    plan: _Plan
    arrays: _Arrays
    out_gmem: Any  # [B, T, H, C]
    shared: _Shared
    wg: Any

    @property
    def keys(self) -> Ring:
        """Who may touch the slots of keys."""
        filled, free = self.shared.k_barriers
        return Ring(full=filled, empty=free, num_slots=self.plan.stages[0])

    @property
    def values(self) -> Ring:
        """Who may touch the slots of values."""
        filled, free = self.shared.v_barriers
        return Ring(full=filled, empty=free, num_slots=self.plan.stages[1])

    @property
    def part(self):
        """Which of the tile's sets of rows this warpgroup has."""
        return 0 if self.plan.is_wide else self.wg

    @property
    def channels(self):
        """Which channels of the output this warpgroup has."""
        first = self.wg * self.plan.out_channels if self.plan.is_wide else 0
        return pl.ds(first, self.plan.out_channels)

    def run(self) -> None:
        """All warpgroups; which one it is decides what it does."""
        pl.when(self.wg < WARPGROUPS)(self.compute)
        pl.when(self.wg == WARPGROUPS)(self.load)

    def wait_for_turn(self) -> None:
        """Meet the other warpgroup: one multiplies while the other computes weights."""
        plgpu.barrier_arrive(self.shared.turn)
        plgpu.barrier_wait(self.shared.turn)

    # ------------------------------------------------------------------ the warpgroup that loads

    def load(self) -> None:
        """Queries, keys and values of all turns."""
        plan, shared = self.plan, self.shared
        if not plan.is_interpreted:
            REGISTERS[plan.config.reads_float8].give()
        first_page = self.arrays.layer[0] * plan.num_pages
        widening = self.widening() if plan.config.reads_float8 else None

        def one_tile(turn, carry):
            base, asked = carry
            tile, seq, head_group = plan.locate(turn)
            kv_head = lax.div(head_group * plan.heads, jnp.int32(plan.group))
            if widening is not None and plan.num_ctas < plan.num_items:
                # The queries are free once the pages of older tiles are used.
                asked = widening.widen_all(2 * base, asked)
            self.load_queries(turn, tile, seq, head_group)
            first, end = (self.arrays.limits[seq, tile, i] for i in (FIRST, END))

            def one_page(j, asked):
                step, page = base + j - first, first_page + self.arrays.table[seq, j]

                def page_of(half):
                    return self.arrays.pages.at[(page * 2 + half) * plan.kv_heads + kv_head]

                if widening is None:
                    self.load_page(step, [page_of(half) for half in range(2)])
                    return asked

                def one_half(half, asked):  # WHY: a loop, as twice the code compiles twice as long
                    return widening.ask(2 * step + half, asked, page_of(half), bits.BLOCK)

                return lax.fori_loop(0, 2, one_half, asked)

            asked = lax.fori_loop(first, end, one_page, asked)
            return base + (end - first), asked

        start = jnp.int32(0), nothing_asked()
        total, asked = lax.fori_loop(0, plan.num_turns(), one_tile, start)
        if widening is not None:
            widening.widen_all(2 * total, asked)
        used = (
            (shared.q_free, plan.num_turns()), (self.keys.empty, total), (self.values.empty, total)
        )  # fmt: skip
        for free, num_used in used:
            bits.drain(free, num_used)

    def load_queries(self, turn, tile, seq, head_group) -> None:
        """The rows of both warpgroups of a tile."""
        plan, shared = self.plan, self.shared
        buffer = lax.rem(turn, jnp.int32(plan.config.query_buffers))

        @pl.when(turn >= plan.config.query_buffers)
        def _q_is_free():
            plgpu.barrier_wait(shared.q_free.at[buffer])

        for w in range(plan.parts):
            first_token = (tile * plan.parts + w) * plan.tokens
            for h in range(plan.heads):
                head = head_group * plan.heads + h
                plgpu.copy_gmem_to_smem(
                    self.arrays.q.at[seq, pl.ds(first_token, plan.tokens), head],
                    shared.q.at[buffer, w, pl.ds(h * plan.tokens, plan.tokens)],
                    shared.q_filled.at[buffer * plan.parts + w],
                )

    @property
    def halves(self) -> tuple:
        """The rings of keys and of values, and their slots."""
        return (self.keys, self.shared.k), (self.values, self.shared.v)

    def load_page(self, step, pages_gmem: list) -> None:
        """A page of keys and one of values, those of the `step`-th block of the CTA."""
        for page_gmem, (ring, smem) in zip(pages_gmem, self.halves, strict=True):
            slot = ring.claim(step)
            plgpu.copy_gmem_to_smem(page_gmem, smem.at[slot], ring.full.at[slot])

    def widening(self) -> Widening:
        """How pages of float8 become those that `load_page` loads."""
        plan, shared = self.plan, self.shared

        def with_page(number, fill):
            step = lax.div(number, jnp.int32(2))
            for half, (ring, smem) in enumerate(self.halves):

                @pl.when(lax.rem(number, jnp.int32(2)) == half)
                def _fill(ring=ring, smem=smem):
                    def claim():
                        ring.claim(step)

                    slot = ring.slot(step)
                    fill(smem.at[slot], ring.full.at[slot], claim)

        return Widening(
            codes=shared.codes[0], filled=shared.codes[1], first=jnp.int32(0),
            num_slots=pages_that_fit(CODE_BYTES, plan.channels),
            load=lambda _, page, smem, filled: plgpu.copy_gmem_to_smem(page, smem, filled),
            with_page=with_page,
            is_interpreted=plan.is_interpreted,
        )  # fmt: skip

    # -------------------------------------------------------------- the warpgroups that compute

    def compute(self) -> None:
        """The rows of this warpgroup in all turns."""
        if not self.plan.is_interpreted:
            REGISTERS[self.plan.config.reads_float8].take()
        lax.fori_loop(0, self.plan.num_turns(), self.one_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def one_tile(self, turn, base):
        """The tile of a turn; `base` blocks came before it, and so many have come after it."""
        plan, shared, math = self.plan, self.shared, self.plan.math
        tile, seq, head_group = plan.locate(turn)
        first_token = (tile * plan.parts + self.part) * plan.tokens
        limits = tuple(self.arrays.limits[seq, tile, i] for i in range(5))
        row_pos = plgpu.load(
            self.arrays.positions.at[seq, tile, self.part], layout=math.row_layout, optimized=False
        )
        buffer = lax.rem(turn, jnp.int32(plan.config.query_buffers))
        query = shared.q.at[buffer, self.part]
        plgpu.barrier_wait(shared.q_filled.at[buffer * plan.parts + self.part])
        out, m, weight_sum = _Tile(
            cta=self, base=base, limits=limits, row_pos=row_pos, query=query
        ).attend()
        if self.arrays.sinks is not None:
            sinks = plgpu.load(
                self.arrays.sinks.at[head_group], layout=math.row_layout, optimized=False
            )
            out, weight_sum = math.merge_sinks(out, m, weight_sum, sinks)
        # WHY: no warpgroup of wide heads still reads the queries: the last turn at the tensor core
        # was for values, and came when the other one had its last scores.
        kept = shared.out.at[buffer, self.wg] if plan.is_wide else query
        kept[...] = math.finish(out, weight_sum, row_pos >= 0, plan.dtype)
        plgpu.commit_smem()

        # WHY: TMA leaves out what is behind the end of an axis, but not where the axis is one tile
        # of 8 rows: Mosaic drops axes of one tile, with the index. There the warpgroup without
        # tokens overwrote the results of the other with zeros (8 heads a tile).
        @pl.when(first_token < self.out_gmem.shape[1])
        def _store():
            for h in range(plan.heads):
                head = head_group * plan.heads + h
                plgpu.copy_smem_to_gmem(
                    kept.at[pl.ds(h * plan.tokens, plan.tokens)],
                    self.out_gmem.at[seq, pl.ds(first_token, plan.tokens), head, self.channels],
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(shared.q_free.at[buffer])
        return base + (limits[END] - limits[FIRST])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    """The rows of a warpgroup in a turn, a block at a time.

    A state is output, maximum and sum of a split; the outer state is that of the splits before.

    Attributes:
        cta: Where it is.
        base: Blocks that the CTA has taken before.
        limits: See `FIRST`.
        row_pos: Position of each row's query.
        query: The rows, an operand of wgmma.
    """

    cta: _Cta
    base: Any
    limits: tuple
    row_pos: Any
    query: Any

    def step(self, j):
        """The step of the rings that has block `j`."""
        return self.base + j - self.limits[FIRST]

    def fold(self, outer, state):
        """The outer state with a split."""
        math = self.cta.plan.math
        m, weight_sum, a, b = math.merge_scales(*outer[1:], *state[1:])
        return math.merge_outputs(outer[0], a, state[0], b), m, weight_sum

    def attend(self):
        """The state of all splits."""
        plan, math = self.cta.plan, self.cta.plan.math
        empty = (
            math.full((bits.ROWS, plan.out_channels), 0.0),
            math.full((bits.ROWS,), bits.EMPTY_MAX),
            math.full((bits.ROWS,), 0.0),
        )
        first, full, tail, end, _ = self.limits
        self.cta.keys.wait(self.step(first))
        pl.when(self.cta.wg == 1)(self.cta.wait_for_turn)
        carry = (empty, empty)
        ranges = [(first, full, True), (full, tail, False), (tail, end, True)]
        for start, stop, is_masked in ranges if plan.window is not None else ranges[1:]:
            one_block = functools.partial(self.one_block, is_masked=is_masked)
            carry = lax.fori_loop(start, stop, lambda j, c, f=one_block: f(j, *c), carry)
        state, outer = carry
        outer = self.fold(outer, state)
        pl.when(self.cta.wg == 0)(self.cta.wait_for_turn)
        return outer

    def one_block(self, j, state, outer, *, is_masked: bool):
        """The state with block `j`, and the outer state."""
        cta, math = self.cta, self.cta.plan.math
        per_split = jnp.int32(cta.plan.config.blocks_per_split)
        step = self.step(j)
        scores, outer = self.scores(j, step, state, outer)
        cta.keys.release(step)
        capped, scale = math.scaling(cta.plan.channels, cta.plan.config.softcap)
        scores = capped(scores)
        if is_masked:
            scores = math.mask(scores, self.row_pos, j * bits.BLOCK, cta.plan.window)
        out, m, weight_sum = state
        # A new split starts empty: its first decay is 0, which clears the output.
        starts = lax.rem(j, per_split) == 0
        m = math.choose(starts, math.full((bits.ROWS,), bits.EMPTY_MAX), m)
        weight_sum = math.choose(starts, math.full((bits.ROWS,), 0.0), weight_sum)
        m, weight_sum, decay, weights = math.softmax_step(scores, m, weight_sum, scale)
        weights_smem = cta.shared.weights.at[cta.wg] if cta.plan.is_interpreted else None
        weights = bits.operand(weights, cta.plan.dtype, weights_smem)
        plgpu.barrier_arrive(cta.shared.turn)
        out = self.add_values(j, step, out, decay, weights, is_masked=is_masked)
        return (out, m, weight_sum), outer

    def scores(self, j, step, state, outer):
        """Scores of a block [ROWS, BLOCK], and the outer state with the split before, if any."""
        shared, slot = self.cta.shared, self.cta.keys.slot(step)
        per_split = jnp.int32(self.cta.plan.config.blocks_per_split)

        def issue(acc):
            bits.multiply_keys(acc, self.query, shared.k.at[slot])
            plgpu.barrier_arrive(shared.turn)
            # WHY: here the other warpgroup has the tensor cores; folding before this block's scores
            # were issued took 0.901 ms against 0.876, 8192 tokens.
            is_next_split = (lax.rem(j, per_split) == 0) & (j > self.limits[FIRST])
            new = lax.cond(is_next_split, self.fold, lambda outer, _: outer, outer, state)
            plgpu.barrier_wait(shared.turn)
            return acc[...], new

        return pl.run_scoped(issue, plgpu.ACC((bits.ROWS, bits.BLOCK), jnp.float32))

    def add_values(self, j, step, out, decay, weights, *, is_masked: bool):
        """The output of a split with the values of a block."""
        cta, math, last = self.cta, self.cta.plan.math, self.limits[LAST]
        page = cta.shared.v.at[cta.values.wait(step)]
        v = page.at[:, cta.channels] if cta.plan.is_wide else page
        if is_masked:

            @pl.when((j + 1) * bits.BLOCK - 1 > last)
            def _clear():
                bits.clear_unwritten(page, j * bits.BLOCK, last, math)

        plgpu.barrier_wait(cta.shared.turn)

        def wait_for_next():
            @pl.when(j + 1 < self.limits[END])
            def _():
                cta.keys.wait(self.step(j + 1))

        out, _ = bits.chained_product(math, out, decay, weights, v, wait_for_next)
        cta.values.release(step)
        return out


def _shared_types(plan: _Plan) -> _Shared:
    config, rows_shape = plan.config, (bits.ROWS, plan.channels)
    swizzled = bits.swizzled(bits.channel_span(plan.channels))

    def pages(num_slots: int):
        shape = (num_slots, bits.BLOCK, plan.channels)
        return plgpu.SMEM(shape, plan.dtype, transforms=swizzled)

    def freed(num_slots: int):
        return plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=num_slots)

    buffers, (of_keys, of_values) = config.query_buffers, plan.stages
    weights = plgpu.SMEM((WARPGROUPS, bits.ROWS, bits.BLOCK), plan.dtype)
    q = plgpu.SMEM((buffers, plan.parts, *rows_shape), plan.dtype, transforms=swizzled)
    if plan.is_wide:
        kept = (buffers, WARPGROUPS, bits.ROWS, plan.out_channels)
        q = plgpu.RefUnion(q, plgpu.SMEM(kept, plan.dtype, transforms=swizzled))
    codes = None
    if config.reads_float8:
        num_coded = pages_that_fit(CODE_BYTES, plan.channels)
        slots = plgpu.SMEM((num_coded, bits.BLOCK, plan.channels), jnp.uint8)
        codes = slots, plgpu.Barrier(num_barriers=num_coded)
    return _Shared(
        q=q,
        out=None,
        k=pages(of_keys),
        v=pages(of_values),
        weights=weights if plan.is_interpreted else None,
        q_filled=plgpu.Barrier(num_arrivals=plan.heads, num_barriers=plan.parts * buffers),
        q_free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=buffers),
        k_barriers=(plgpu.Barrier(num_barriers=of_keys), freed(of_keys)),
        v_barriers=(plgpu.Barrier(num_barriers=of_values), freed(of_values)),
        turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
        codes=codes,
    )


@functools.partial(jax.jit, static_argnames=("window", "config", "is_interpreted"))
def prefill(
    q, place: CachePlace, sinks=None, *, window, config: PrefillConfig, is_interpreted: bool
) -> jax.Array:
    """See `sm90.attention`."""
    pages, page_table, positions, layer = place
    batch, query_len, num_heads, channels = q.shape
    kv_heads = pages.shape[3]
    tokens, heads = tile_shape(query_len, num_heads // kv_heads)
    # A copy may not be longer than its axis, and the axis must be whole rows of 8.
    pad = max(tokens, -(-query_len // 8) * 8) - query_len
    if pad:
        q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
        positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    is_wide = channels > bits.SPAN_CHANNELS
    row_positions = _tile_positions(positions, tokens, heads, 1 if is_wide else WARPGROUPS)
    limits = _tile_limits(row_positions, window)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(-1, heads), tokens, axis=1)
    plan = _Plan(
        batch=batch, kv_heads=kv_heads, group=num_heads // kv_heads, channels=channels,
        tokens=tokens, heads=heads, tiles=limits.shape[1], num_pages=pages.shape[1],
        window=window, dtype=q.dtype, config=config, is_interpreted=is_interpreted,
    )  # fmt: skip

    def body(arrays: _Arrays, out_gmem, shared: _Shared):
        if is_wide:
            q, kept = shared.q
            shared = shared._replace(q=q, out=kept)
        cta = _Cta(
            plan=plan, arrays=arrays, out_gmem=out_gmem, shared=shared, wg=lax.axis_index("wg")
        )
        cta.run()

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[_shared_types(plan)],
        grid=(plan.num_ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="attention_prefill_sm90",
        compiler_params=bits.COMPILER_PARAMS,
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
    )(
        _Arrays(
            q=q, pages=bits.page_rows(pages), table=page_table, positions=row_positions,
            limits=limits, layer=layer.reshape(1), sinks=sinks,
        )
    )  # fmt: skip
    return out[:, :query_len]
