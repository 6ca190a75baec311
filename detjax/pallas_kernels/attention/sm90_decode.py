# SPDX-License-Identifier: Apache-2.0
"""Attention of up to 64 query rows a key/value head: one pass over the cache.

A CTA takes a split, whose partial result a second kernel merges, or all splits of a sequence.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits

F32_SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
MERGE_LANES = 128  # elements of a CTA of the merge, one a thread


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
        blocks_per_split: Blocks of 128 keys in a split.
    """

    key_stages: int = 3
    value_stages: int = 2
    num_ctas: int = 132
    merge_unroll: tuple[int, int] = (16, 2)
    whole_sequences: bool = False
    blocks_per_split: int = 4


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
    per_run = num_pages if config.whole_sequences else config.blocks_per_split
    last = positions.max(axis=1)
    first = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max).min(axis=1)
    blocks = last // bits.BLOCK + 1
    runs = jnp.ones_like(blocks) if config.whole_sequences else -(-blocks // per_run)
    full = jnp.where(last < 0, 0, (first + 1) // bits.BLOCK)
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


@functools.partial(jax.jit, static_argnames=("config", "is_interpreted"))
def decode(
    q, pages, page_table, positions, layer, *, config: DecodeConfig, is_interpreted: bool
) -> jax.Array:
    """See `sm90.attention`."""
    batch, query_len, num_heads, channels = q.shape
    kv_heads = pages.shape[3]
    group = num_heads // kv_heads
    num_rows = query_len * group
    padded_rows = -(-num_rows // 8) * 8
    row_positions = jnp.pad(
        jnp.repeat(positions, group, axis=1),
        ((0, 0), (0, bits.ROWS - num_rows)),
        constant_values=-1,
    )
    # A CTA of the merge writes whole rows of the output if it does not cross a token.
    in_place = group % max(1, MERGE_LANES // channels) == 0
    if query_len == 1 and in_place:
        # The heads as they lie: a copy starts at a multiple of 8 rows, so that it may hold rows of
        # other heads, whose results nothing reads.
        rows = q.reshape(batch * num_heads, channels)
        rows_apart = group
        if 8 % group and group % 8:
            padded_rows = -(-(group + 7) // 8) * 8
        row_positions = jnp.broadcast_to(positions, row_positions.shape)
    else:
        rows = q.reshape(batch, query_len, kv_heads, group, channels).transpose(0, 2, 1, 3, 4)
        rows = rows.reshape(batch * kv_heads, num_rows, channels)
        rows = jnp.pad(rows, ((0, 0), (0, padded_rows - num_rows), (0, 0)))
        rows = rows.reshape(-1, channels)
        rows_apart = padded_rows
    if rows.shape[0] < padded_rows:
        rows = jnp.pad(rows, ((0, padded_rows - rows.shape[0]), (0, 0)))
    table, limits, num_entries = run_list(positions, page_table, config)
    o, ml, out = _attend(
        rows, pages, row_positions, table, num_entries, layer,
        config=config, is_interpreted=is_interpreted,
        padded_rows=padded_rows, rows_apart=rows_apart,
        query_len=query_len, group=group,
    )  # fmt: skip
    if config.whole_sequences:
        return out.reshape(q.shape)
    options = {"config": config, "is_interpreted": is_interpreted, "rows_apart": rows_apart}
    if in_place:
        shape = (batch, query_len, kv_heads, group, channels)
        return _merge(o, ml, limits, row_positions, shape=shape, **options).reshape(q.shape)
    shape = (batch, 1, kv_heads, padded_rows, channels)
    out = _merge(o, ml, limits, row_positions, shape=shape, **options).reshape(shape)
    out = out[:, 0, :, :num_rows].reshape(batch, kv_heads, query_len, group, channels)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _attend(
    rows, pages, row_positions, table, num_entries, layer,
    *, config, is_interpreted, padded_rows, rows_apart, query_len, group,
):  # fmt: skip
    """Write each split's unnormalised output, maximum and sum, in float32; or the whole output."""
    _, num_pages, _, kv_heads, _, channels = pages.shape
    scale = bits.score_scale(channels)
    num_slots, per_split = (config.key_stages, config.value_stages), config.blocks_per_split
    math = bits.accumulator_arithmetic(is_interpreted)
    dtype = rows.dtype
    vec_shape = (bits.ROWS,)
    out_shape, scores_shape = (bits.ROWS, channels), (bits.ROWS, bits.BLOCK)
    swizzled = bits.swizzled(bits.channel_span(channels))
    # WHY: few channels side by side in shared memory take few registers for addresses; the rows
    # that TMA copies to a head's output must begin at a multiple of 128 bytes.
    out_span = 32 if group % 2 == 0 else 64
    entries = table.shape[0] * kv_heads
    num_ctas = min(config.num_ctas, entries)

    def body(
        q_ref, pages_ref, pos_ref, table_ref, entries_ref, layer_ref,
        o_ref, ml_ref, out_ref,
        q_smem2, k_smem, v_smem, o_smem, ml_smem, p_smem,
        q_bar, k_bar, v_bar, q_free, k_free, v_free,
    ):  # fmt: skip
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        num_items = entries if config.whole_sequences else entries_ref[0] * kv_heads
        num_turns = lax.div(num_items - cta + (num_ctas - 1), jnp.int32(num_ctas))

        def work(turn):
            item = turn * num_ctas + cta
            entry = lax.div(item, jnp.int32(kv_heads))
            kv_head = lax.rem(item, jnp.int32(kv_heads))
            seq = entry if config.whole_sequences else table_ref[entry, SEQ]
            return entry, kv_head, seq, table_ref[entry, BLOCKS]

        def write_partial(state, item):
            o_smem[...], ml_smem[0, :], ml_smem[1, :] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, padded_rows)], o_ref.at[item])
            plgpu.copy_smem_to_gmem(ml_smem, ml_ref.at[item])

        def write_rows(out, seq, kv_head):
            for i in range(channels // out_span):
                o_smem[i] = out[:, i * out_span : (i + 1) * out_span]
            plgpu.commit_smem()
            first_row = lax.rem((seq * kv_heads + kv_head) * rows_apart, jnp.int32(8))

            def one_token(token, _):
                for i in range(channels // out_span):
                    plgpu.copy_smem_to_gmem(
                        o_smem.at[i, pl.ds(first_row + token * group, group)],
                        out_ref.at[
                            seq * query_len + token,
                            pl.ds(kv_head * group, group),
                            pl.ds(i * out_span, out_span),
                        ],
                    )
                return 0

            lax.fori_loop(0, query_len, one_token, 0)

        def compute():
            def one_run(turn, base):
                entry, kv_head, seq, blocks = work(turn)
                first_block, full, last = (
                    table_ref[entry, i] for i in (FIRST_BLOCK, FULL_BLOCKS, LAST)
                )
                q_slot = lax.rem(turn, jnp.int32(2))
                q_smem = q_smem2.at[q_slot]
                row_pos = plgpu.load(pos_ref.at[seq], layout=math.row_layout, optimized=False)
                plgpu.barrier_wait(q_bar.at[q_slot])

                def one_block(j, carry, is_masked):
                    out, m, weight_sum = carry
                    k_slot = lax.rem(base + j, jnp.int32(num_slots[0]))
                    v_slot = lax.rem(base + j, jnp.int32(num_slots[1]))
                    first_key = (first_block + j) * bits.BLOCK
                    plgpu.barrier_wait(k_bar.at[k_slot])
                    scores = bits.product(q_smem, k_smem.at[k_slot].T, scores_shape)
                    plgpu.barrier_arrive(k_free.at[k_slot])
                    if is_masked:
                        scores = math.mask(scores, row_pos, first_key, None)
                    m, weight_sum, decay, weights = math.softmax_step(scores, m, weight_sum, scale)
                    operand = bits.operand(weights, dtype, p_smem)
                    plgpu.barrier_wait(v_bar.at[v_slot])
                    v = v_smem.at[v_slot]
                    if is_masked:

                        @pl.when(first_key + (bits.BLOCK - 1) > last)
                        def _clear():
                            bits.clear_unwritten(v, first_key, last, math)

                    out, _ = bits.chained_product(math, out, decay, operand, v)
                    plgpu.barrier_arrive(v_free.at[v_slot])
                    return out, m, weight_sum

                empty = (
                    math.full(out_shape, 0.0),
                    math.full(vec_shape, bits.EMPTY_MAX),
                    math.full(vec_shape, 0.0),
                )

                def fold(outer, state):
                    m, weight_sum, a, b = math.merge_scales(*outer[1:], *state[1:])
                    return math.merge_outputs(outer[0], a, state[0], b), m, weight_sum

                def one_block_of_any_split(j, carry, is_masked):
                    outer, (out, m, weight_sum) = carry
                    starts = lax.rem(j, jnp.int32(per_split)) == 0
                    outer = lax.cond(starts & (j > 0), fold, lambda x, _: x, outer, carry[1])
                    # A new split starts empty: its first decay is 0, which clears the output.
                    m = math.choose(starts, empty[1], m)
                    weight_sum = math.choose(starts, empty[2], weight_sum)
                    return outer, one_block(j, (out, m, weight_sum), is_masked)

                step, carry = one_block, empty
                if config.whole_sequences:
                    step, carry = one_block_of_any_split, (empty, empty)
                for start, stop, is_masked in ((0, full, False), (full, blocks, True)):
                    some = functools.partial(step, is_masked=is_masked)
                    carry = lax.fori_loop(start, stop, some, carry)
                plgpu.barrier_arrive(q_free.at[q_slot])
                if config.whole_sequences:
                    out, _, weight_sum = fold(*carry)
                    out = math.finish(out, weight_sum, row_pos >= 0, dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    write_rows(out, seq, kv_head)
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    write_partial(carry, entry * kv_heads + kv_head)
                return base + blocks

            lax.fori_loop(0, num_turns, one_run, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def load():
            first_page = layer_ref[0] * num_pages

            def one_run(turn, base):
                entry, kv_head, seq, blocks = work(turn)
                q_slot = lax.rem(turn, jnp.int32(2))

                first_row = (seq * kv_heads + kv_head) * rows_apart

                @pl.when(turn >= 2)
                def _q_is_free():
                    plgpu.barrier_wait(q_free.at[q_slot])

                plgpu.copy_gmem_to_smem(
                    q_ref.at[pl.ds(lax.div(first_row, jnp.int32(8)) * 8, padded_rows)],
                    q_smem2.at[q_slot, pl.ds(0, padded_rows)],
                    q_bar.at[q_slot],
                )

                def one_page(j, page):
                    next_page = table_ref[entry, PAGES + jnp.minimum(j + 1, blocks - 1)]
                    index = base + j
                    rings = ((k_smem, k_bar, k_free), (v_smem, v_bar, v_free))
                    for half, (smem, filled, free) in enumerate(rings):
                        slot = lax.rem(index, jnp.int32(num_slots[half]))

                        @pl.when(index >= num_slots[half])
                        def _is_free(slot=slot, free=free):
                            plgpu.barrier_wait(free.at[slot])

                        plgpu.copy_gmem_to_smem(
                            pages_ref.at[((first_page + page) * 2 + half) * kv_heads + kv_head],
                            smem.at[slot],
                            filled.at[slot],
                        )
                    return next_page

                # Read with BLOCKS, not after it, and each next page ahead.
                lax.fori_loop(0, blocks, one_page, table_ref[entry, PAGES])
                return base + blocks

            total = lax.fori_loop(0, num_turns, one_run, jnp.int32(0))
            for free, used in ((q_free, num_turns), (k_free, total), (v_free, total)):
                bits.drain(free, used)

        pl.when(wg == 0)(compute)
        pl.when(wg == 1)(load)

    weights = None
    if is_interpreted:
        weights = plgpu.SMEM(scores_shape, dtype)
    o = jax.ShapeDtypeStruct((entries, padded_rows, channels), jnp.float32)
    ml = jax.ShapeDtypeStruct((entries, 2, bits.ROWS), jnp.float32)
    o_smem = plgpu.SMEM(out_shape, jnp.float32, transforms=F32_SWIZZLED)
    out_type, out_smem = [o, ml, None], [o_smem, plgpu.SMEM((2, *vec_shape), jnp.float32)]
    if config.whole_sequences:
        out = jax.ShapeDtypeStruct((table.shape[0] * query_len, kv_heads * group, channels), dtype)
        out_type = [None, None, out]
        out_smem = [plgpu.SMEM((channels // out_span, bits.ROWS, out_span), dtype), None]
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((2, *out_shape), dtype, transforms=swizzled),
            *(plgpu.SMEM((n, bits.BLOCK, channels), dtype, transforms=swizzled) for n in num_slots),
            *out_smem,
            weights,
            *(plgpu.Barrier(num_barriers=n) for n in (2, *num_slots)),
            *(plgpu.Barrier(num_barriers=n) for n in (2, *num_slots)),
        ],
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        kernel_name=f"attention_{'sequences' if config.whole_sequences else 'splits'}_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
    )(rows, bits.page_rows(pages), row_positions, table, num_entries, layer.reshape(1))


def _merge(o, ml, limits, row_positions, *, shape, config, is_interpreted, rows_apart):
    """Fold the splits left to right: `out[b, t, k, g]`, one CTA for each 128 channels of a row."""
    batch, query_len, kv_heads, group, channels = shape
    lanes = MERGE_LANES
    per_cta = lanes // channels
    padded_rows = o.shape[1]
    layout = plgpu.Layout.WG_STRIDED((lanes,), vec_size=1)
    math = bits.Arithmetic(layout=None, row_layout=layout, is_interpreted=is_interpreted)
    dtype = jnp.bfloat16
    ctas_in_seq = query_len * kv_heads * group // per_cta

    def body(o_ref, ml_ref, limits_ref, pos_ref, out_ref):
        cta = lax.axis_index("cta")
        seq, index = lax.div(cta, jnp.int32(ctas_in_seq)), lax.rem(cta, jnp.int32(ctas_in_seq))
        first_row = index * per_cta  # in [query_len, kv_heads, group]
        kv_head = lax.rem(lax.div(first_row, jnp.int32(group)), jnp.int32(kv_heads))
        token = lax.div(first_row, jnp.int32(group * kv_heads))
        row = token * group + lax.rem(first_row, jnp.int32(group))
        row += lax.rem((seq * kv_heads + kv_head) * rows_apart, jnp.int32(8))
        start, count = limits_ref[seq, 0], limits_ref[seq, 1]
        if is_interpreted:
            lane = lax.broadcasted_iota(jnp.int32, (lanes,), 0)
        else:
            lane = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout)

        def spread(read):
            """One scalar a row, over its channels."""
            value = math.cast(jnp.full((lanes,), read(row)), layout)
            for i in range(1, per_cta):
                other = math.cast(jnp.full((lanes,), read(row + i)), layout)
                value = jnp.where(lane < i * channels, value, other)
            return value

        def some_splits(step, state, *, first, unroll):
            parts = []
            for i in range(unroll):
                split = first + step * unroll + i
                is_split = split < count
                entry = (start + jnp.minimum(split, count - 1)) * kv_heads + kv_head
                m = spread(
                    lambda r, e=entry, s=is_split: jnp.where(s, ml_ref[e, 0, r], bits.EMPTY_MAX)
                )
                weight_sum = spread(lambda r, e=entry: ml_ref[e, 1, r])
                part = plgpu.load(
                    o_ref.at[entry, pl.ds(row * channels, lanes)], layout=layout, optimized=False
                )
                parts.append((m, weight_sum, part))
            m, weight_sum, out = state
            for other_m, other_sum, other_out in parts:
                new = math.merge_scales(m, weight_sum, other_m, other_sum)
                m, weight_sum, a, b = new
                out = math.fma(out, a, math.mul(other_out, b))
            return m, weight_sum, out

        zero = math.full((lanes,), 0.0)
        state = (math.full((lanes,), bits.EMPTY_MAX), zero, zero)
        many, few = config.merge_unroll
        steps = lax.div(count, jnp.int32(many))
        state = lax.fori_loop(0, steps, functools.partial(some_splits, first=0, unroll=many), state)
        done = steps * many
        steps = lax.div(count - done + (few - 1), jnp.int32(few))
        _, weight_sum, out = lax.fori_loop(
            0, steps, functools.partial(some_splits, first=done, unroll=few), state
        )
        is_row = spread(lambda r: pos_ref[seq, r]) >= 0
        out = math.mul(out, math.reciprocal(weight_sum))
        out = jnp.where(is_row & (out != 0.0), out, zero)
        # ROUND: the only rounding of the output to the compute dtype.
        out_ref[pl.ds(cta * lanes, lanes)] = out.astype(dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * ctas_in_seq * lanes,), dtype),
        grid=(batch * ctas_in_seq,),
        grid_names=("cta",),
        kernel_name="attention_merge_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
    )(o.reshape(o.shape[0], padded_rows * channels), ml, limits, row_positions)
