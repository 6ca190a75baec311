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
    """How the work is scheduled. Not one of these can change a bit, except in the controls.

    Attributes:
        is_overlapped: Issue the next block's scores before this block's product with V is done.
        num_stages: Pages of keys, and of values, in flight.
        num_ctas: Most CTAs; each then takes several tiles in turn. 0 for a CTA a tile.
        compute_registers: What a computing warpgroup asks for.
    """

    is_overlapped: bool = True
    has_turns: bool = True
    num_stages: int = 2
    num_ctas: int = 0
    compute_registers: int = 240
    blocks_per_split: int = 4
    has_splits: bool = True


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


def _tile_limits(tile_positions: jax.Array) -> jax.Array:
    """For each tile: blocks, blocks that every row sees whole, last position. [B, tiles, 3]."""
    last = tile_positions.max(axis=(2, 3))
    is_row = tile_positions >= 0
    first = jnp.where(is_row, tile_positions, jnp.iinfo(jnp.int32).max).min(axis=(2, 3))
    blocks = jnp.maximum(last // bits.BLOCK + 1, 1)  # a tile of padding loads one and sees none
    full = jnp.where(last < 0, 0, jnp.minimum((first + 1) // bits.BLOCK, blocks))
    return jnp.stack([blocks, full, last], axis=-1)


@functools.partial(jax.jit, static_argnames=("layer", "config", "is_interpreted"))
def prefill(
    q, pages, page_table, positions, *, layer: int, config: PrefillConfig, is_interpreted: bool
) -> jax.Array:
    """See `sm90.attention`."""
    batch, query_len, num_heads, channels = q.shape
    _, num_pages, _, kv_heads, _, _ = pages.shape
    group = num_heads // kv_heads
    tokens, heads = tile_shape(query_len, group)
    if query_len < tokens:  # a copy may not be longer than the axis
        pad = tokens - query_len
        q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
        positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    row_positions = _tile_positions(positions, tokens, heads)
    limits = _tile_limits(row_positions)
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
        q_ref, pages_ref, table_ref, pos_ref, limits_ref, out_ref,
        q_smem2, k_smem, v_smem, outer_smem2, p_smem2,
        q_bar, k_bar, v_bar, k_free, v_free, turn_bar,
    ):  # fmt: skip
        wg = lax.axis_index("wg")

        def compute():
            if not is_interpreted:
                plgpu.set_max_registers(config.compute_registers, action="increase")
            q_smem = q_smem2.at[wg]
            outer_smem = outer_smem2.at[wg] if config.has_splits else None
            if config.has_turns and config.is_overlapped:

                @pl.when(wg == 1)
                def _first_turn():
                    plgpu.barrier_arrive(turn_bar.at[0])

            def take_turn():
                if config.has_turns:
                    plgpu.barrier_wait(turn_bar.at[wg])

            def pass_turn():
                if config.has_turns:
                    plgpu.barrier_arrive(turn_bar.at[1 - wg])

            def operand(weights):
                """Weights as wgmma's first operand."""
                # ROUND: weights to the compute dtype for the product; their sum is not rounded.
                weights = weights.astype(dtype)
                if not is_interpreted:
                    return weights
                p_smem2[wg] = weights
                plgpu.commit_smem()
                return p_smem2.at[wg]

            def one_tile(turn, base):
                tile, seq, head_group = work(item_of(turn))
                first_token = tile * (WARPGROUPS * tokens) + wg * tokens
                for h in range(heads):
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[seq, pl.ds(first_token, tokens), head_group * heads + h],
                        q_smem.at[pl.ds(h * tokens, tokens)],
                        q_bar.at[wg],
                    )
                blocks, full, last = (limits_ref[seq, tile, i] for i in range(3))
                row_pos = plgpu.load(
                    pos_ref.at[seq, tile, wg], layout=math.row_layout, optimized=False
                )
                if config.has_splits:
                    outer_smem[...] = math.full(out_shape, 0.0)
                plgpu.barrier_wait(q_bar.at[wg])

                def slot_of(j):
                    return lax.rem(base + j, jnp.int32(stages))

                def softmax(j, scores, m, weight_sum, is_masked):
                    if is_masked:
                        seen = math.key_mask(row_pos, j * bits.BLOCK)
                        scores = jnp.where(seen, scores, -jnp.inf)
                    if config.has_splits:
                        is_first = lax.rem(j, jnp.int32(per_split)) == 0
                        m = math.choose(is_first, math.full(rows, bits.EMPTY_MAX), m)
                        weight_sum = math.choose(is_first, math.full(rows, 0.0), weight_sum)
                    return math.softmax_step(scores, m, weight_sum, scale)

                def merge_if_first(j, out, m, weight_sum, outer):
                    """Before block j of a new split: fold the finished split into the state."""
                    if not config.has_splits:
                        return outer
                    is_first = lax.rem(j, jnp.int32(per_split)) == 0
                    new_m, new_sum, a, b = math.merge_scales(*outer, m, weight_sum)

                    @pl.when(is_first)
                    def _merge():
                        outer_smem[...] = math.merge_outputs(outer_smem[...], a, out, b)

                    return (
                        math.choose(is_first, new_m, outer[0]),
                        math.choose(is_first, new_sum, outer[1]),
                    )

                def scores_only(j):
                    def issue(acc):
                        plgpu.wgmma(acc, q_smem, k_smem.at[slot_of(j)].T)
                        return acc[...]

                    return pl.run_scoped(issue, plgpu.ACC((bits.ROWS, bits.BLOCK), jnp.float32))

                def product(out, decay, weights, v, meanwhile=lambda: None):
                    """`out * decay + weights @ v`, chained on the tensor core's accumulator."""
                    out = math.mul(out, math.over_columns(decay, out.shape))
                    if is_interpreted:

                        def issue(acc):
                            plgpu.wgmma(acc, weights, v)
                            return acc[...]

                        return out + pl.run_scoped(issue, plgpu.ACC(out_shape, jnp.float32)), meanwhile()

                    result = []

                    def issue(acc):
                        plgpu.wgmma(acc, weights, v)
                        result.append(meanwhile())

                    out = pl.run_state(issue)(plgpu.ACC.init(out))
                    return out, result[0]

                def overlapped_step(j, carry, is_masked):
                    out, m, weight_sum, decay, weights, outer = carry
                    slot, old_slot = slot_of(j), slot_of(j - 1)
                    plgpu.barrier_wait(k_bar.at[slot])
                    out = math.mul(out, math.over_columns(decay, out.shape))
                    take_turn()

                    def issue(refs):
                        acc_ref, box = refs

                        def with_scores(acc_s):
                            plgpu.wgmma(acc_s, q_smem, k_smem.at[slot].T)
                            plgpu.barrier_wait(v_bar.at[old_slot])
                            plgpu.wgmma(acc_ref, operand_ref(weights), v_smem.at[old_slot])
                            pass_turn()
                            scores = plgpu.wgmma_accumulator_load(acc_s, wait_n=1)
                            plgpu.barrier_arrive(k_free.at[slot])
                            return softmax(j, scores, m, weight_sum, is_masked)

                        return pl.run_scoped(
                            with_scores, plgpu.ACC((bits.ROWS, bits.BLOCK), jnp.float32)
                        )

                    def operand_ref(w):
                        return w

                    def scoped(acc_ref):
                        acc_ref[...] = out
                        new = issue((acc_ref, None))
                        return new, acc_ref[...]

                    (new_m, new_sum, new_decay, new_weights), out = pl.run_scoped(
                        scoped, plgpu.ACC(out_shape, jnp.float32)
                    )
                    plgpu.barrier_arrive(v_free.at[old_slot])
                    outer = merge_if_first(j, out, m, weight_sum, outer)
                    return out, new_m, new_sum, new_decay, operand(new_weights), outer

                empty = (math.full(rows, bits.EMPTY_MAX), math.full(rows, 0.0))

                def run_overlapped():
                    plgpu.barrier_wait(k_bar.at[slot_of(0)])
                    take_turn()
                    scores = scores_only(0)
                    pass_turn()
                    plgpu.barrier_arrive(k_free.at[slot_of(0)])
                    m, weight_sum, decay, weights = softmax(0, scores, *empty, True)
                    carry = (
                        math.full(out_shape, 0.0), m, weight_sum, decay, operand(weights), empty,
                    )  # fmt: skip
                    start = jnp.maximum(full, 1)
                    carry = lax.fori_loop(
                        1, full, functools.partial(overlapped_step, is_masked=False), carry
                    )
                    carry = lax.fori_loop(
                        start, blocks, functools.partial(overlapped_step, is_masked=True), carry
                    )
                    out, m, weight_sum, decay, weights, outer = carry
                    slot = slot_of(blocks - 1)
                    plgpu.barrier_wait(v_bar.at[slot])
                    clear_last(blocks - 1)
                    take_turn()
                    out, _ = product(out, decay, weights, v_smem.at[slot])
                    pass_turn()
                    plgpu.barrier_arrive(v_free.at[slot])
                    return out, m, weight_sum, outer

                def clear_last(j):
                    @pl.when((j + 1) * bits.BLOCK - 1 > last)
                    def _clear():
                        bits.clear_unwritten(v_smem.at[slot_of(j)], j * bits.BLOCK, last, math)

                def exchange():
                    if config.has_turns:
                        plgpu.barrier_arrive(turn_bar.at[0])
                        plgpu.barrier_wait(turn_bar.at[0])

                def plain_step(j, carry, is_masked):
                    out, m, weight_sum, outer = carry
                    slot = slot_of(j)

                    def issue(acc):
                        plgpu.wgmma(acc, q_smem, k_smem.at[slot].T)
                        if config.has_turns:
                            plgpu.barrier_arrive(turn_bar.at[0])
                        new = merge_if_first(j, out, m, weight_sum, outer)
                        if config.has_turns:
                            plgpu.barrier_wait(turn_bar.at[0])
                        return acc[...], new

                    scores, outer = pl.run_scoped(
                        issue, plgpu.ACC((bits.ROWS, bits.BLOCK), jnp.float32)
                    )
                    plgpu.barrier_arrive(k_free.at[slot])
                    m, weight_sum, decay, weights = softmax(j, scores, m, weight_sum, is_masked)
                    weights = operand(weights)
                    if config.has_turns:
                        plgpu.barrier_arrive(turn_bar.at[0])
                    plgpu.barrier_wait(v_bar.at[slot])
                    if is_masked:
                        clear_last(j)
                    if config.has_turns:
                        plgpu.barrier_wait(turn_bar.at[0])

                    def wait_for_next():
                        @pl.when(j + 1 < blocks)
                        def _next():
                            plgpu.barrier_wait(k_bar.at[slot_of(j + 1)])

                    out, _ = product(out, decay, weights, v_smem.at[slot], wait_for_next)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return out, m, weight_sum, outer

                def run_plain():
                    plgpu.barrier_wait(k_bar.at[slot_of(0)])

                    @pl.when(wg == 1)
                    def _second():
                        exchange()

                    carry = (math.full(out_shape, 0.0), *empty, empty)
                    carry = lax.fori_loop(
                        0, full, functools.partial(plain_step, is_masked=False), carry
                    )
                    carry = lax.fori_loop(
                        full, blocks, functools.partial(plain_step, is_masked=True), carry
                    )

                    @pl.when(wg == 0)
                    def _first():
                        exchange()

                    return carry

                out, m, weight_sum, outer = (
                    run_overlapped() if config.is_overlapped else run_plain()
                )
                if config.has_splits:
                    _, weight_sum, a, b = math.merge_scales(*outer, m, weight_sum)
                    out = math.merge_outputs(outer_smem[...], a, out, b)
                q_smem[...] = math.finish(out, weight_sum, row_pos >= 0, dtype)
                plgpu.commit_smem()
                for h in range(heads):
                    plgpu.copy_smem_to_gmem(
                        q_smem.at[pl.ds(h * tokens, tokens)],
                        out_ref.at[seq, pl.ds(first_token, tokens), head_group * heads + h],
                    )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                return base + blocks

            lax.fori_loop(0, num_turns(), one_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def load():
            if not is_interpreted:
                plgpu.set_max_registers(24, action="decrease")

            def one_tile(turn, base):
                tile, seq, head_group = work(item_of(turn))
                kv_head = (head_group * heads) // group

                def one_page(j, _):
                    index = base + j
                    slot = lax.rem(index, jnp.int32(stages))
                    page = layer * num_pages + table_ref[seq, j]
                    k_row = (page * 2) * kv_heads + kv_head

                    @pl.when(index >= stages)
                    def _k_is_free():
                        plgpu.barrier_wait(k_free.at[slot])

                    plgpu.copy_gmem_to_smem(
                        pages_ref.at[k_row], k_smem.at[slot], k_bar.at[slot]
                    )

                    @pl.when(index >= stages)
                    def _v_is_free():
                        plgpu.barrier_wait(v_free.at[slot])

                    plgpu.copy_gmem_to_smem(
                        pages_ref.at[k_row + kv_heads], v_smem.at[slot], v_bar.at[slot]
                    )
                    return 0

                blocks = limits_ref[seq, tile, 0]
                lax.fori_loop(0, blocks, one_page, 0)
                return base + blocks

            lax.fori_loop(0, num_turns(), one_tile, jnp.int32(0))

        pl.when(wg < WARPGROUPS)(compute)
        pl.when(wg == WARPGROUPS)(load)

    outer = weights = None
    if config.has_splits:
        outer = plgpu.SMEM(
            (WARPGROUPS, *out_shape), jnp.float32, transforms=bits.swizzled_f32()
        )
    if is_interpreted:
        weights = plgpu.SMEM(
            (WARPGROUPS, bits.ROWS, bits.BLOCK), dtype, transforms=bits.swizzled()
        )
    kv = plgpu.SMEM((stages, bits.BLOCK, channels), dtype, transforms=bits.swizzled())
    filled = plgpu.Barrier(num_barriers=stages)
    freed = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, *out_shape), dtype, transforms=bits.swizzled()),
            kv,
            kv,
            outer,
            weights,
            plgpu.Barrier(num_arrivals=heads, num_barriers=WARPGROUPS),
            filled,
            filled,
            freed,
            freed,
            plgpu.Barrier(
                num_arrivals=1 if config.is_overlapped else WARPGROUPS, num_barriers=WARPGROUPS
            ),
        ],
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="attention_prefill_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
    )(q, bits.page_rows(pages), page_table, row_positions, limits)
    return out[:, :query_len]
