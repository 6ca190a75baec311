# SPDX-License-Identifier: Apache-2.0
"""Decode by clusters: the CTAs of one share the splits of a sequence and a key/value head.

One launch. Of one query a sequence, each sends its partial results to the first one's shared
memory, which merges them. Of a window of new tokens each CTA merges some, and gets their rows. If
these are too many for shared memory, they go through device memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_arithmetic import MergeLanes
from detjax.pallas_kernels.attention.sm90_decode_job import (
    DecodeSchedule,
    DecodeWork,
    Job,
    Memory,
    Operands,
    Run,
    launch,
)
from detjax.pallas_kernels.attention.sm90_decode_run import load_runs, start_turn
from detjax.pallas_kernels.sm90_hardware import LANES

PARTIAL_BYTES = 32 << 10
"""Of shared memory for the partial results that a CTA merges."""


def attend_clusters(job: Job, operands: Operands) -> jax.Array:
    """The output of all sequences, [B H C]."""
    cluster, per_split = job.config.cluster, job.config.blocks_per_split
    is_window = job.query_len > 1
    table, pairs = operands.page_table, job.batch * job.kv_heads
    most_splits = -(-table.shape[1] // per_split)
    # Interpretation knows no other CTA's shared memory.
    in_memory = job.is_interpreted or merges_in_memory(
        query_len=job.query_len, group=job.group, channels=job.channels, splits=most_splits,
        cluster=cluster,
    )  # fmt: skip

    def body(memory: Memory):
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        rank = lax.axis_index("rank") if cluster > 1 else 0
        # The same sequence and kv head in every turn.
        here = lax.div(cta, jnp.int32(job.kv_heads)), lax.rem(cta, jnp.int32(job.kv_heads))
        seq, kv_head = here

        def now(ref, *index):
            return ptx.read_now(ref, *index, is_interpreted=job.is_interpreted)

        # WHY: the first page's number does not wait for the position, nor the layer for either.
        first_block = jnp.minimum(rank * per_split, table.shape[1] - 1)
        tokens = [now(memory.positions, seq, t * job.group) for t in range(job.query_len)]
        first_page, layer = now(memory.table, seq, first_block), now(memory.layer, 0)
        last = functools.reduce(jnp.maximum, tokens)
        all_blocks = lax.div(last + bits.BLOCK, jnp.int32(bits.BLOCK))
        num_splits = lax.div(all_blocks + (per_split - 1), jnp.int32(per_split))

        def run_at(turn) -> Run:
            split = turn * cluster + rank
            first_block = split * per_split
            blocks = jnp.minimum(all_blocks - first_block, per_split)
            full = lax.div(tokens[0], jnp.int32(bits.BLOCK)) - first_block
            full = jnp.minimum(full, blocks)
            return Run(
                seq=seq, kv_head=kv_head, first_block=first_block, blocks=blocks,
                partial=cta * most_splits + split if in_memory else split,
                full=jnp.maximum(full, 0) if is_window else full, last=last,
                page=lambda j: memory.table[seq, first_block + j],
                first_new=tokens[0] if is_window else None,
            )  # fmt: skip

        work = DecodeWork(
            job=job,
            memory=memory,
            num_turns=lax.div(num_splits - rank + (cluster - 1), jnp.int32(cluster)),
            run_at=run_at,
            layer=lambda: layer,
        )
        parts = memory.results[:2] if in_memory else memory.slots.kept_results

        def one_run(index, base, row_pos):
            turn = start_turn(work, index, base, row_pos)
            state = turn.split()
            turn.free_queries()
            _send_partial(job, state, parts, turn.run.partial, in_memory=in_memory)
            return base + turn.run.blocks

        def compute():
            # WHY: read before the new tokens are made, so that no score waits for it.
            row_pos = job.math.load(memory.positions.at[seq]) if is_window else None
            if job.new_token is not None:
                prepare = functools.partial(
                    job.new_token.prepare, memory.queries, *here, memory.slots.q.at[0],
                    memory.slots.kept.at[0],
                )  # fmt: skip
                # A window's CTA may be there to merge alone.
                pl.when(work.num_turns > 0)(prepare) if is_window else prepare()
            run = functools.partial(one_run, row_pos=row_pos)
            lax.fori_loop(0, work.num_turns, run, jnp.int32(0))

        def load():
            load_runs(
                work,
                0,
                lambda turn, run: lax.cond(turn == 0, lambda: first_page, lambda: run.page(0)),
            )

        pl.when(wg == 0)(compute)
        pl.when(wg == 1)(load)
        if cluster > 1 and not job.is_interpreted:
            ptx.meet_cluster()

        @pl.when(wg == 0)
        def _merge_here():
            if memory.barriers.own is not None:
                plgpu.barrier_arrive(memory.barriers.own)
                plgpu.barrier_wait(memory.barriers.own)
            if cluster == 1:
                plgpu.commit_smem()
            first = cta * most_splits if in_memory else 0

            def merge(token, position, row):
                out = memory.results[-1]
                merge_splits(
                    job, parts, out, here, position, first, num_splits, token=token, row=row,
                    gates=memory.gates,
                )  # fmt: skip

            if not is_window:
                pl.when(rank == 0)(lambda: merge(0, last, first_row(job, *here)))
                return

            def one_token(turn, _):
                token = turn * cluster + rank
                position = tokens[0]
                for t in range(1, job.query_len):
                    position = jnp.where(token == t, tokens[t], position)
                merge(token, position, (token if in_memory else turn) * job.group)
                return 0

            mine = lax.div(job.query_len - rank + (cluster - 1), jnp.int32(cluster))
            lax.fori_loop(0, mine, one_token, 0)

    f32 = jnp.float32
    num_rows = job.padded_rows if in_memory else _rows_merged(job)
    shapes = (most_splits, num_rows * job.channels), (most_splits, 2, num_rows)
    num_out = pairs * job.query_len * job.group * job.channels
    results = [jax.ShapeDtypeStruct((num_out,), job.dtype)]
    kept, barrier = [plgpu.SMEM(shape, f32) for shape in shapes], None
    if in_memory:
        # Interpretation knows no other CTA's shared memory either.
        kept = [None, None]
        of_all = [jax.ShapeDtypeStruct((pairs * n, *shape), f32) for n, *shape in shapes]
        results = [*of_all, *results]
    if job.is_interpreted and cluster > 1:
        barrier = plgpu.ClusterBarrier(collective_axes=("rank",))
    schedule = DecodeSchedule(
        name="window" if is_window else "cluster", num_ctas=pairs, table=table,
        num_entries=jnp.zeros((1,), jnp.int32),
        results=results, kept_results=kept, cluster=cluster, barrier=barrier,
    )  # fmt: skip
    return launch(job, operands, schedule, body)[-1]


def _rows_merged(job: Job) -> int:
    """Rows of a split that a CTA merges: all of one query, or those of its tokens of a window."""
    if job.query_len == 1:
        return job.padded_rows
    return pl.cdiv(job.query_len, job.config.cluster) * job.group


def merges_in_memory(
    *, query_len: int, group: int, channels: int, splits: int, cluster: int
) -> bool:
    """Whether partial results go through device memory: a window's that shared memory cannot hold.

    Those of one query fit, as `decode_config` gives it no cluster otherwise.
    """
    num_bytes = splits * pl.cdiv(query_len, cluster) * group * channels * 4
    return query_len > 1 and num_bytes > PARTIAL_BYTES


def first_row(job: Job, seq, kv_head):
    """Where the rows of the only token of a pair lie among those of its tile."""
    return lax.rem((seq * job.kv_heads + kv_head) * job.rows_apart, jnp.int32(8))


def merge_splits(
    job: Job, parts, out_ref, here, position, first, num_splits,
    *, row, token=0, gates=None,
) -> None:  # fmt: skip
    """Fold the splits left to right and write the output of a token and a kv head, gated if it is.

    Args:
        job: What the launch attends to.
        parts: Unnormalised outputs of splits; their maxima and sums.
        out_ref: Of all sequences.
        here: The sequence and the kv head.
        position: Of the token; -1 for padding.
        first: Where the first split lies.
        num_splits: How many there are.
        row: Where the token's rows begin among those of a split.
        token: Which of the sequence's tokens.
        gates: Rows of tokens, whose last columns are gates of all query heads, or None.
    """
    lanes = MergeLanes(channels=job.channels, is_interpreted=job.is_interpreted)
    (part_ref, scales_ref), (seq, kv_head) = parts, here
    rows = [min(r, job.group - lanes.rows) for r in range(0, job.group, lanes.rows)]
    places = [(head, channel) for head in rows for channel in range(0, job.channels, LANES)]
    of_gates = [None] * len(places)
    if gates is not None:  # loaded before the sums that need no gate
        first_gate = gates.shape[1] - (job.kv_heads - kv_head) * job.group * job.channels
        of_gates = [
            lanes.math.load(
                gates.at[
                    seq * job.query_len + token,
                    pl.ds(first_gate + head * job.channels + channel, LANES),
                ]
            )
            for head, channel in places
        ]

    def one_split(split, states):
        return tuple(
            lanes.fold(
                state,
                lanes.spread(lambda r: scales_ref[first + split, 0, r], row + head),
                lanes.spread(lambda r: scales_ref[first + split, 1, r], row + head),
                lanes.math.load(
                    part_ref.at[first + split, pl.ds((row + head) * job.channels + channel, LANES)]
                ),
            )
            for (head, channel), state in zip(places, states, strict=True)
        )

    states = lax.fori_loop(0, num_splits, one_split, (lanes.empty(),) * len(places))
    first_head = (seq * job.query_len + token) * job.kv_heads * job.group + kv_head * job.group
    for (head, channel), state, gate in zip(places, states, of_gates, strict=True):
        is_row = lanes.spread(lambda r: position, 0) >= 0
        out = lanes.finish(state, is_row, job.dtype)
        if gate is not None:
            out = lanes.gated(gate, out)
        out_ref[pl.ds((first_head + head) * job.channels + channel, LANES)] = out


def _send_partial(job: Job, state, parts, split, *, in_memory: bool) -> None:
    """Write a split's partial result where it is merged.

    That is in device memory, or in the shared memory of the CTA that merges the row: the cluster's
    first one of one query, and of a window the one that has the token.

    # WHY: plain stores, a fresh place for each split, and plain loads after `ptx.meet_cluster`,
    which orders them: one proxy, one scope, no flag and no counter.
    """
    math, num_rows = job.math, job.padded_rows
    out, m, weight_sum = state
    part_ref, scales_ref = parts
    if math.is_interpreted:
        part_ref[split] = out[:num_rows].reshape(-1)
        scales_ref[split, 0] = m[:num_rows]
        scales_ref[split, 1] = weight_sum[:num_rows]
        return
    memory, cluster = plgpu.RefType(), job.config.cluster
    if job.query_len > 1 and not in_memory:
        num_rows = job.query_len * job.group

    def place_of_token(start, row):
        """The token's CTA and its row there."""
        index = ir.IndexType.get()
        token, head = (op(row, mgpu.c(job.group, index)) for op in (arith.divui, arith.remui))
        rank, turn = (op(token, mgpu.c(cluster, index)) for op in (arith.remui, arith.divui))
        rank = arith.index_cast(ptx.int_type(), rank)
        row = arith.addi(arith.muli(turn, mgpu.c(job.group, index)), head)
        return mgpu.utils.get_cluster_ptr(start, rank), row

    @plgpu.inline_mgpu(
        arg_types=(math.layout, math.row_layout, math.row_layout, memory, memory, memory)
    )
    def emit(ctx, out, m, weight_sum, *refs):
        for x, ref in zip((out, m, weight_sum), refs, strict=True):
            start, place = mgpu.utils.memref_ptr(ref), None
            if cluster > 1 and not in_memory:
                if job.query_len == 1:
                    start = mgpu.utils.get_cluster_ptr(start, ptx.i32(0))
                else:
                    place = functools.partial(place_of_token, start)
            bits.store_rows(x, start, num_rows, place)

    emit(out, m, weight_sum, part_ref.at[split], scales_ref.at[split, 0], scales_ref.at[split, 1])
