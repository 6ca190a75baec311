# SPDX-License-Identifier: Apache-2.0
"""Decode by splits: those of all sequences are one list, which CTAs take in turn.

A CTA writes a split's unnormalised output, maximum and sum in float32; a second kernel merges them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_job import Job, Memory, Operands, Run, launch
from detjax.pallas_kernels.attention.sm90_decode_list import listed_work, run_list
from detjax.pallas_kernels.attention.sm90_decode_merge import LANES, MergeLanes
from detjax.pallas_kernels.attention.sm90_decode_run import Turn, share_turns


def rows_lie_in_place(group: int, channels: int) -> bool:
    """Whether LANES elements of the output are whole rows that do not cross a token."""
    return group % max(1, LANES // channels) == 0


def attend_splits(job: Job, operands: Operands) -> jax.Array:
    """The output of all sequences, [B T, H, C] or as many elements."""
    table, limits, num_entries = run_list(operands.positions, operands.page_table, job.config)
    o, ml = _attend(job, operands, table, num_entries)
    parts = (job, o, ml, limits, operands.row_positions)
    if rows_lie_in_place(job.group, job.channels):
        return merge_splits(*parts, query_len=job.query_len, group=job.group)
    out = merge_splits(*parts, query_len=1, group=job.padded_rows)
    out = out.reshape(job.batch, 1, job.kv_heads, job.padded_rows, job.channels)
    shape = (job.batch, job.kv_heads, job.query_len, job.group, job.channels)
    return out[:, 0, :, : job.query_len * job.group].reshape(shape).transpose(0, 2, 1, 3, 4)


def _attend(job: Job, operands: Operands, table, num_entries) -> list[jax.Array]:
    """Write each split's unnormalised output, maximum and sum."""
    entries = table.shape[0] * job.kv_heads
    num_ctas = min(job.config.num_ctas, entries)

    def body(memory: Memory):
        cta = lax.axis_index("cta")
        num_items = memory.num_entries[0] * job.kv_heads
        work = listed_work(job, memory, cta, num_items=num_items, num_ctas=num_ctas)

        def one_turn(turn: Turn):
            turn.prepare_new_token()
            state = turn.split()
            turn.free_queries()
            _write_partial(job, memory, state, turn.run)

        share_turns(work, one_turn)

    f32 = jnp.float32
    return launch(
        job, operands, body, table=table, num_entries=num_entries,
        schedule="splits", num_ctas=num_ctas,
        results=[
            jax.ShapeDtypeStruct((entries, job.padded_rows, job.channels), f32),
            jax.ShapeDtypeStruct((entries, 2, bits.ROWS), f32),
        ],
        kept_results=[None, None],
    )  # fmt: skip


def _write_partial(job: Job, memory: Memory, state, run: Run) -> None:
    """Write a split's state where `merge_splits` reads it, straight from registers."""
    (o_gmem, ml_gmem), (out, m, weight_sum) = memory.results, state
    rows = job.padded_rows
    here = o_gmem.at[run.partial], ml_gmem.at[run.partial, 0], ml_gmem.at[run.partial, 1]
    if job.is_interpreted:
        here[0][...] = out[:rows]
        here[1][pl.ds(0, rows)], here[2][pl.ds(0, rows)] = m[:rows], weight_sum[:rows]
        return
    layouts = job.math.layout, job.math.row_layout, job.math.row_layout

    @plgpu.inline_mgpu(arg_types=(*layouts, *[plgpu.RefType()] * 3))
    def emit(ctx, out, m, weight_sum, *refs):
        for x, ref in zip((out, m, weight_sum), refs, strict=True):
            bits.store_rows(x, mgpu.utils.memref_ptr(ref), rows)

    emit(*state, *here)


def merge_splits(
    job: Job, o, ml, limits, row_positions, *, query_len: int, group: int
) -> jax.Array:
    """Fold the splits left to right: `out[b, t, k, g]`, one CTA for each 128 channels of a row."""
    kv_heads, padded_rows = job.kv_heads, job.padded_rows
    lanes = MergeLanes(channels=job.channels, is_interpreted=job.is_interpreted)
    ctas_in_seq = query_len * kv_heads * group // lanes.rows

    def body(o_ref, ml_ref, limits_ref, pos_ref, out_ref):
        cta = lax.axis_index("cta")
        seq, index = lax.div(cta, jnp.int32(ctas_in_seq)), lax.rem(cta, jnp.int32(ctas_in_seq))
        first_row = index * lanes.rows  # in [query_len, kv_heads, group]
        kv_head = lax.rem(lax.div(first_row, jnp.int32(group)), jnp.int32(kv_heads))
        token = lax.div(first_row, jnp.int32(group * kv_heads))
        row = token * group + lax.rem(first_row, jnp.int32(group))
        row += lax.rem((seq * kv_heads + kv_head) * job.rows_apart, jnp.int32(8))
        start, count = limits_ref[seq, 0], limits_ref[seq, 1]

        def some_splits(step, state, *, first, unroll):
            parts = []
            for i in range(unroll):
                split = first + step * unroll + i
                is_split = split < count
                entry = (start + jnp.minimum(split, count - 1)) * kv_heads + kv_head
                m = lanes.spread(
                    lambda r, e=entry, s=is_split: jnp.where(s, ml_ref[e, 0, r], bits.EMPTY_MAX),
                    row,
                )
                weight_sum = lanes.spread(lambda r, e=entry: ml_ref[e, 1, r], row)
                part = lanes.math.load(o_ref.at[entry, pl.ds(row * job.channels, LANES)])
                parts.append((m, weight_sum, part))
            for part in parts:
                state = lanes.fold(state, *part)
            return state

        state = lanes.empty()
        many, few = job.config.merge_unroll
        steps = lax.div(count, jnp.int32(many))
        state = lax.fori_loop(0, steps, functools.partial(some_splits, first=0, unroll=many), state)
        done = steps * many
        steps = lax.div(count - done + (few - 1), jnp.int32(few))
        state = lax.fori_loop(
            0, steps, functools.partial(some_splits, first=done, unroll=few), state
        )
        is_row = lanes.spread(lambda r: pos_ref[seq, r], row) >= 0
        out_ref[pl.ds(cta * LANES, LANES)] = lanes.finish(state, is_row, job.dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((job.batch * ctas_in_seq * LANES,), job.dtype),
        grid=(job.batch * ctas_in_seq,),
        grid_names=("cta",),
        kernel_name="attention_merge_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
        interpret=plgpu.InterpretGPUParams() if job.is_interpreted else None,
    )(o.reshape(o.shape[0], padded_rows * job.channels), ml, limits, row_positions)
