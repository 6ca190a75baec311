# SPDX-License-Identifier: Apache-2.0
"""Decode by a list of runs, splits or whole sequences, which persistent CTAs take in turn.

Splits: a CTA writes a split's unnormalised output, maximum and sum in float32, and a second kernel
merges them. Whole sequences: a CTA folds all splits of one in registers, so there is no merge, but
a sequence is spread over no more CTAs than it has key/value heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_arithmetic import MergeLanes
from detjax.pallas_kernels.attention.sm90_decode_job import (
    DecodeSchedule,
    Job,
    Memory,
    Operands,
    Run,
    launch,
)
from detjax.pallas_kernels.attention.sm90_decode_run import (
    Turn,
    listed_work,
    run_list,
    share_turns,
)
from detjax.pallas_kernels.sm90_hardware import LANES


def rows_lie_in_place(group: int, channels: int) -> bool:
    """Whether LANES elements of the output are whole rows that do not cross a token."""
    return group % max(1, LANES // channels) == 0


def attend_splits(job: Job, operands: Operands) -> jax.Array:
    """The output of all sequences, [B T, H, C] or as many elements."""
    table, limits, num_entries = run_list(operands.positions, operands.page_table, job.config)
    o, ml = _partials(job, operands, table, num_entries)
    parts = (job, o, ml, limits, operands.row_positions)
    sinks = operands.sinks
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    if rows_lie_in_place(job.group, job.channels):
        return merge_splits(*parts, sinks, query_len=job.query_len, group=job.group)
    if sinks is not None:
        of_token = sinks.reshape(job.kv_heads, 1, job.group)
        rows = jnp.broadcast_to(of_token, (job.kv_heads, job.query_len, job.group))
        rows = rows.reshape(job.kv_heads, -1)
        sinks = jnp.pad(rows, ((0, 0), (0, job.padded_rows - rows.shape[1]))).reshape(-1)
    out = merge_splits(*parts, sinks, query_len=1, group=job.padded_rows)
    out = out.reshape(job.batch, 1, job.kv_heads, job.padded_rows, job.channels)
    shape = (job.batch, job.kv_heads, job.query_len, job.group, job.channels)
    return out[:, 0, :, : job.query_len * job.group].reshape(shape).transpose(0, 2, 1, 3, 4)


def _partials(job: Job, operands: Operands, table, num_entries) -> list[jax.Array]:
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
    schedule = DecodeSchedule(
        name="splits", num_ctas=num_ctas, table=table, num_entries=num_entries,
        results=[
            jax.ShapeDtypeStruct((entries, job.padded_rows, job.channels), f32),
            jax.ShapeDtypeStruct((entries, 2, bits.ROWS), f32),
        ],
        kept_results=[None, None],
    )  # fmt: skip
    return launch(job, operands, schedule, body)


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
    job: Job, o, ml, limits, row_positions, sinks=None, *, query_len: int, group: int
) -> jax.Array:
    """Fold the splits left to right: `out[b, t, k, g]`, one CTA for each LANES elements.

    `sinks` are those of `[k, g]`, float32, or None.
    """
    kv_heads, padded_rows = job.kv_heads, job.padded_rows
    lanes = MergeLanes(channels=job.channels, is_interpreted=job.is_interpreted)
    ctas_in_seq = query_len * kv_heads * group * lanes.parts // lanes.rows

    def body(o_ref, ml_ref, limits_ref, pos_ref, sinks_ref, out_ref):
        cta = lax.axis_index("cta")
        seq, index = lax.div(cta, jnp.int32(ctas_in_seq)), lax.rem(cta, jnp.int32(ctas_in_seq))
        first_channel, first_row = 0, index * lanes.rows  # in [query_len, kv_heads, group]
        if lanes.parts > 1:
            first_channel = lax.rem(index, jnp.int32(lanes.parts)) * LANES
            first_row = lax.div(index, jnp.int32(lanes.parts))
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
                here = pl.ds(row * job.channels + first_channel, LANES)
                part = lanes.math.load(o_ref.at[entry, here])
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
        if sinks is not None:
            first_sink = kv_head * group + lax.rem(first_row, jnp.int32(group))
            state = lanes.fold_sinks(state, lanes.spread(lambda r: sinks_ref[r], first_sink))
        is_row = lanes.spread(lambda r: pos_ref[seq, r], row) >= 0
        out_ref[pl.ds(cta * LANES, LANES)] = lanes.finish(state, is_row, job.dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((job.batch * ctas_in_seq * LANES,), job.dtype),
        grid=(job.batch * ctas_in_seq,),
        grid_names=("cta",),
        kernel_name="attention_merge_sm90",
        compiler_params=bits.COMPILER_PARAMS,
        interpret=plgpu.InterpretGPUParams() if job.is_interpreted else None,
    )(o.reshape(o.shape[0], padded_rows * job.channels), ml, limits, row_positions, sinks)


def attend_sequences(job: Job, operands: Operands) -> jax.Array:
    """The output of all sequences, [B T, H, C]."""
    table, _, num_entries = run_list(operands.positions, operands.page_table, job.config)
    num_items = table.shape[0] * job.kv_heads
    # As few CTAs as take no more turns: each has more of the bandwidth.
    num_ctas = -(-num_items // -(-num_items // job.config.num_ctas))
    span, num_compute = _out_span(job), job.config.num_compute

    def body(memory: Memory):
        cta = lax.axis_index("cta")
        work = listed_work(job, memory, cta, num_items=num_items, num_ctas=num_ctas)

        def one_turn(turn: Turn):
            # The last output has left the memory that it shares with these queries.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            turn.prepare_new_token()
            out, _, weight_sum = _fold_splits(turn)
            out = job.math.finish(out, weight_sum, turn.row_pos >= 0, job.dtype)
            kept = memory.slots.kept_results[0].at[work.owner(turn.index)]
            _write_rows(job, kept, memory.results[0], out, turn.run)

        share_turns(work, one_turn)

    shape = (job.batch * job.query_len, job.kv_heads * job.group, job.channels)
    schedule = DecodeSchedule(
        name="sequences", num_ctas=num_ctas, table=table, num_entries=num_entries,
        results=[jax.ShapeDtypeStruct(shape, job.dtype)],
        kept_results=[
            plgpu.SMEM((num_compute, job.channels // span, bits.ROWS, span), job.dtype), None
        ],
    )  # fmt: skip
    [out] = launch(job, operands, schedule, body)
    return out


def _fold_splits(turn: Turn):
    """The state after all splits of a sequence, each from an empty one, folded left to right.

    Frees the queries.
    """
    job, math = turn.work.job, turn.work.job.math
    empty = turn.empty()

    def fold(outer, state):
        m, weight_sum, a, b = math.merge_scales(*outer[1:], *state[1:])
        return math.merge_outputs(outer[0], a, state[0], b), m, weight_sum

    def one_block(j, carry, is_masked):
        outer, (out, m, weight_sum) = carry
        starts = lax.rem(j, jnp.int32(job.config.blocks_per_split)) == 0
        outer = lax.cond(starts & (j > 0), fold, lambda x, _: x, outer, carry[1])
        # A new split starts empty: its first decay is 0, which clears the output.
        m = math.choose(starts, empty[1], m)
        weight_sum = math.choose(starts, empty[2], weight_sum)
        return outer, turn.one_block(j, (out, m, weight_sum), is_masked)

    state = turn.over_blocks(one_block, (empty, empty))
    turn.free_queries()
    return fold(*state)


def _out_span(job: Job) -> int:
    """Channels side by side in shared memory.

    WHY: few take few registers for addresses; the rows that TMA copies to a head's output must
    begin at a multiple of 128 bytes.
    """
    return 32 if job.group % 2 == 0 else 64


def _write_rows(job: Job, out_smem, out_gmem, out, run: Run) -> None:
    """Write the heads of a sequence's tokens to their places."""
    span, group = _out_span(job), job.group
    for i in range(job.channels // span):
        out_smem[i] = out[:, i * span : (i + 1) * span]
    plgpu.commit_smem()
    first_row = lax.rem((run.seq * job.kv_heads + run.kv_head) * job.rows_apart, jnp.int32(8))

    def one_token(token, _):
        for i in range(job.channels // span):
            plgpu.copy_smem_to_gmem(
                out_smem.at[i, pl.ds(first_row + token * group, group)],
                out_gmem.at[
                    run.seq * job.query_len + token,
                    pl.ds(run.kv_head * group, group),
                    pl.ds(i * span, span),
                ],
            )
        return 0

    lax.fori_loop(0, job.query_len, one_token, 0)
