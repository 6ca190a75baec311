# SPDX-License-Identifier: Apache-2.0
"""Decode by whole sequences: a CTA takes all splits of one and folds them in registers.

There is no merge. A sequence is spread over no more CTAs than it has key/value heads. Two
warpgroups take sequences, each its own, so that the pages of one stream in while the other begins,
ends or computes.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_job import Job, Memory, Operands, Run, launch
from detjax.pallas_kernels.attention.sm90_decode_list import listed_work, run_list
from detjax.pallas_kernels.attention.sm90_decode_run import Turn, share_turns


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
            kept = memory.kept_results[0].at[work.owner(turn.index)]
            _write_rows(job, kept, memory.results[0], out, turn.run)

        share_turns(work, one_turn)

    shape = (job.batch * job.query_len, job.kv_heads * job.group, job.channels)
    (out,) = launch(
        job, operands, body, table=table, num_entries=num_entries,
        schedule="sequences", num_ctas=num_ctas,
        results=[jax.ShapeDtypeStruct(shape, job.dtype)],
        kept_results=[
            plgpu.SMEM((num_compute, job.channels // span, bits.ROWS, span), job.dtype), None
        ],
    )  # fmt: skip
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
