# SPDX-License-Identifier: Apache-2.0
"""Attention of many query rows over the paged cache: two compute warpgroups and one that loads."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits

WARPGROUPS = 2  # that compute; a third one loads


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """How the work is scheduled. Only `blocks_per_split` decides a bit; it comes of the profile.

    Attributes:
        num_stages: Pages of keys, and of values, in flight.
        query_buffers: Query tiles in shared memory; 2 lets the next one load during this one.
        num_ctas: Most CTAs; each then takes several tiles in turn. 0 for a CTA a tile.
        blocks_per_split: Blocks of 128 keys in a split.
    """

    num_stages: int = 2
    query_buffers: int = 1
    num_ctas: int = 0
    blocks_per_split: int = 4


def tile_shape(query_len: int, group: int) -> tuple[int, int]:
    """Tokens and heads in the 64 rows of a warpgroup. A choice for speed alone."""
    heads = 1
    while heads < 8 and group % (2 * heads) == 0 and query_len <= bits.ROWS // heads:
        heads *= 2
    return bits.ROWS // heads, heads


def _tile_positions(positions: jax.Array, tokens: int, heads: int) -> jax.Array:
    """Positions of each warpgroup's rows, [B, tiles, 2, 64], -1 where there is none."""
    batch, query_len = positions.shape
    span = WARPGROUPS * tokens
    tiles = -(-query_len // span)
    padded = jnp.pad(
        positions, ((0, 0), (0, tiles * span - query_len)), constant_values=-1
    ).reshape(batch, tiles, WARPGROUPS, 1, tokens)
    return jnp.broadcast_to(padded, (batch, tiles, WARPGROUPS, heads, tokens)).reshape(
        batch, tiles, WARPGROUPS, bits.ROWS
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


@functools.partial(jax.jit, static_argnames=("window", "config", "is_interpreted"))
def prefill(
    q, pages, page_table, positions, layer, *, window, config: PrefillConfig, is_interpreted: bool
) -> jax.Array:
    """See `sm90.attention`."""
    batch, query_len, num_heads, channels = q.shape
    _, num_pages, _, kv_heads, _, _ = pages.shape
    group = num_heads // kv_heads
    tokens, heads = tile_shape(query_len, group)
    # A copy may not be longer than its axis, and the axis must be whole rows of 8.
    pad = max(tokens, -(-query_len // 8) * 8) - query_len
    if pad:
        q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
        positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    row_positions = _tile_positions(positions, tokens, heads)
    limits = _tile_limits(row_positions, window)
    tiles, head_groups = limits.shape[1], num_heads // heads
    num_items = tiles * batch * head_groups
    num_ctas = min(config.num_ctas or num_items, num_items)
    scale = bits.score_scale(channels)
    stages, per_split = config.num_stages, config.blocks_per_split
    math = bits.accumulator_arithmetic(is_interpreted)
    dtype = q.dtype
    rows = (bits.ROWS,)
    out_shape = (bits.ROWS, channels)

    def work(item):
        # Longest tiles first, so that short ones fill the end.
        tile = tiles - 1 - item // (batch * head_groups)
        rest = item % (batch * head_groups)
        return tile, rest // head_groups, rest % head_groups

    def item_of(turn):
        # Back and forth, so that each CTA's lengths even out.
        cta = lax.axis_index("cta")
        return turn * num_ctas + jnp.where(turn % 2 == 1, num_ctas - 1 - cta, cta)

    def num_turns():
        full_turns, rest = divmod(num_items, num_ctas)
        cta = lax.axis_index("cta")
        index = num_ctas - 1 - cta if full_turns % 2 else cta
        return full_turns + (index < rest).astype(jnp.int32)

    def body(
        q_ref, pages_ref, table_ref, pos_ref, limits_ref, layer_ref, out_ref,
        q_smem, k_smem, v_smem, p_smem2,
        q_bar, k_bar, v_bar, q_free, k_free, v_free, turn_bar,
    ):  # fmt: skip
        wg = lax.axis_index("wg")

        def exchange():
            """Meet the other warpgroup: one multiplies while the other computes weights."""
            plgpu.barrier_arrive(turn_bar)
            plgpu.barrier_wait(turn_bar)

        def compute():
            if not is_interpreted:
                plgpu.set_max_registers(240, action="increase")

            def one_tile(turn, base):
                tile, seq, head_group = work(item_of(turn))
                first_token = tile * (WARPGROUPS * tokens) + wg * tokens
                first, full, tail, end, last = (limits_ref[seq, tile, i] for i in range(5))
                row_pos = plgpu.load(
                    pos_ref.at[seq, tile, wg], layout=math.row_layout, optimized=False
                )
                buffer = lax.rem(turn, jnp.int32(config.query_buffers))
                query = q_smem.at[buffer, wg]
                plgpu.barrier_wait(q_bar.at[buffer * WARPGROUPS + wg])

                def slot_of(j):
                    return lax.rem(base + j - first, jnp.int32(stages))

                def one_block(j, state, outer, *, is_masked):
                    out, m, weight_sum = state
                    slot = slot_of(j)

                    def issue(acc):
                        plgpu.wgmma(acc, query, k_smem.at[slot].T)
                        plgpu.barrier_arrive(turn_bar)
                        # WHY: here the other warpgroup has the tensor cores; folding before this
                        # block's scores were issued took 0.901 ms against 0.876, 8192 tokens.
                        is_next_split = (lax.rem(j, jnp.int32(per_split)) == 0) & (j > first)
                        new = lax.cond(is_next_split, fold, lambda outer, _: outer, outer, state)
                        plgpu.barrier_wait(turn_bar)
                        return acc[...], new

                    scores, outer = pl.run_scoped(
                        issue, plgpu.ACC((bits.ROWS, bits.BLOCK), jnp.float32)
                    )
                    plgpu.barrier_arrive(k_free.at[slot])
                    if is_masked:
                        scores = math.mask(scores, row_pos, j * bits.BLOCK, window)
                    # A new split starts empty: its first decay is 0, which clears the output.
                    starts = lax.rem(j, jnp.int32(per_split)) == 0
                    m = math.choose(starts, math.full(rows, bits.EMPTY_MAX), m)
                    weight_sum = math.choose(starts, math.full(rows, 0.0), weight_sum)
                    m, weight_sum, decay, weights = math.softmax_step(scores, m, weight_sum, scale)
                    p_smem = p_smem2.at[wg] if is_interpreted else None
                    weights = bits.operand(weights, dtype, p_smem)
                    plgpu.barrier_arrive(turn_bar)
                    plgpu.barrier_wait(v_bar.at[slot])
                    if is_masked:

                        @pl.when((j + 1) * bits.BLOCK - 1 > last)
                        def _clear():
                            bits.clear_unwritten(v_smem.at[slot], j * bits.BLOCK, last, math)

                    plgpu.barrier_wait(turn_bar)

                    def wait_for_next():
                        @pl.when(j + 1 < end)
                        def _next():
                            plgpu.barrier_wait(k_bar.at[slot_of(j + 1)])

                    out, _ = bits.chained_product(
                        math, out, decay, weights, v_smem.at[slot], wait_for_next
                    )
                    plgpu.barrier_arrive(v_free.at[slot])
                    return (out, m, weight_sum), outer

                def fold(outer, state):
                    m, weight_sum, a, b = math.merge_scales(*outer[1:], *state[1:])
                    return math.merge_outputs(outer[0], a, state[0], b), m, weight_sum

                empty = (
                    math.full(out_shape, 0.0),
                    math.full(rows, bits.EMPTY_MAX),
                    math.full(rows, 0.0),
                )

                plgpu.barrier_wait(k_bar.at[slot_of(first)])
                pl.when(wg == 1)(exchange)
                carry = (empty, empty)
                ranges = [(first, full, True), (full, tail, False), (tail, end, True)]
                for start, stop, is_masked in ranges if window is not None else ranges[1:]:
                    step = functools.partial(one_block, is_masked=is_masked)
                    carry = lax.fori_loop(start, stop, lambda j, c, f=step: f(j, *c), carry)
                state, outer = carry
                outer = fold(outer, state)
                pl.when(wg == 0)(exchange)

                out, _, weight_sum = outer
                query[...] = math.finish(out, weight_sum, row_pos >= 0, dtype)
                plgpu.commit_smem()
                for h in range(heads):
                    plgpu.copy_smem_to_gmem(
                        query.at[pl.ds(h * tokens, tokens)],
                        out_ref.at[seq, pl.ds(first_token, tokens), head_group * heads + h],
                    )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[buffer])
                return base + (end - first)

            lax.fori_loop(0, num_turns(), one_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def load():
            if not is_interpreted:
                plgpu.set_max_registers(24, action="decrease")
            first_page = layer_ref[0] * num_pages

            def one_tile(turn, base):
                tile, seq, head_group = work(item_of(turn))
                kv_head = lax.div(head_group * heads, jnp.int32(group))
                buffer = lax.rem(turn, jnp.int32(config.query_buffers))

                @pl.when(turn >= config.query_buffers)
                def _q_is_free():
                    plgpu.barrier_wait(q_free.at[buffer])

                for w in range(WARPGROUPS):
                    first_token = tile * (WARPGROUPS * tokens) + w * tokens
                    for h in range(heads):
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[seq, pl.ds(first_token, tokens), head_group * heads + h],
                            q_smem.at[buffer, w, pl.ds(h * tokens, tokens)],
                            q_bar.at[buffer * WARPGROUPS + w],
                        )

                first, end = limits_ref[seq, tile, FIRST], limits_ref[seq, tile, END]

                def one_page(j, _):
                    index = base + j - first
                    slot = lax.rem(index, jnp.int32(stages))
                    page = first_page + table_ref[seq, j]
                    for half, (smem, filled, free) in enumerate(
                        ((k_smem, k_bar, k_free), (v_smem, v_bar, v_free))
                    ):

                        @pl.when(index >= stages)
                        def _is_free(free=free):
                            plgpu.barrier_wait(free.at[slot])

                        plgpu.copy_gmem_to_smem(
                            pages_ref.at[(page * 2 + half) * kv_heads + kv_head],
                            smem.at[slot],
                            filled.at[slot],
                        )
                    return 0

                lax.fori_loop(first, end, one_page, 0)
                return base + (end - first)

            total = lax.fori_loop(0, num_turns(), one_tile, jnp.int32(0))
            for free, used in ((q_free, num_turns()), (k_free, total), (v_free, total)):
                bits.drain(free, used)

        pl.when(wg < WARPGROUPS)(compute)
        pl.when(wg == WARPGROUPS)(load)

    weights = None
    if is_interpreted:
        weights = plgpu.SMEM((WARPGROUPS, bits.ROWS, bits.BLOCK), dtype)
    swizzled = bits.swizzled(bits.channel_span(channels))
    kv = plgpu.SMEM((stages, bits.BLOCK, channels), dtype, transforms=swizzled)
    buffers = config.query_buffers
    filled = plgpu.Barrier(num_barriers=stages)
    freed = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[
            plgpu.SMEM((buffers, WARPGROUPS, *out_shape), dtype, transforms=swizzled),
            kv,
            kv,
            weights,
            plgpu.Barrier(num_arrivals=heads, num_barriers=WARPGROUPS * buffers),
            filled,
            filled,
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=buffers),
            freed,
            freed,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="attention_prefill_sm90",
        compiler_params=bits.COMPILER_PARAMS,
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
    )(q, bits.page_rows(pages), page_table, row_positions, limits, layer.reshape(1))
    return out[:, :query_len]
