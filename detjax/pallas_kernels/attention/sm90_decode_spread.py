# SPDX-License-Identifier: Apache-2.0
"""Decode by clusters whose CTAs share each split: for so few rows that a CTA's time is latency.

A CTA of the cluster takes the scores of one block of a split. All CTAs of the split exchange the
maxima of their blocks, so that each knows the running maximum of every block, and then the weights.
Each then adds up the values of all blocks, in order, for its share of the channels. So a CTA waits
for a fourth of the bytes, and computes a fourth of the scores.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_cluster import merge_splits
from detjax.pallas_kernels.attention.sm90_decode_exchange import (
    SENT_ROWS,
    SPREAD,
    Exchange,
    read_weights,
)
from detjax.pallas_kernels.attention.sm90_decode_job import Job, Operands
from detjax.pallas_kernels.attention.sm90_decode_run import load_written
from detjax.pallas_kernels.sm90_cache_hints import evict_first
from detjax.pallas_kernels.sm90_prefetch import ask_for
from detjax.pallas_kernels.sm90_ptx import read_now

SPREAD_CHANNELS = 128
"""Of a head."""
RING = 2
"""Turns whose keys and values are in flight."""


def attend_spread(job: Job, operands: Operands) -> jax.Array:
    """The output of all sequences, [B H C]."""
    config, new_token, math = job.config, job.new_token, job.math
    if new_token is None or job.group > SENT_ROWS or config.blocks_per_split != SPREAD:
        raise ValueError(
            f"a split is spread over {SPREAD} CTAs for new tokens alone, of at most {SENT_ROWS} "
            f"heads a kv head and splits of {SPREAD} blocks: {new_token=}, {job.group=}, {config=}"
        )
    if job.channels != SPREAD_CHANNELS:
        raise ValueError(f"{job.channels=} must be {SPREAD_CHANNELS} to spread a split")
    if not config.cluster or config.cluster % SPREAD:
        raise ValueError(f"{config.cluster=} must be a multiple of {SPREAD} CTAs a split")
    is_interpreted, table = job.is_interpreted, operands.page_table
    at_once, pairs = config.cluster // SPREAD, job.batch * job.kv_heads
    table_len = table.shape[1]
    most_splits = -(-table_len // SPREAD)
    share = job.channels // SPREAD
    shapes = {
        "outs": ((most_splits, job.padded_rows * job.channels), jnp.float32),
        "scales": ((most_splits, 2, job.padded_rows), jnp.float32),
        "maxima": ((at_once, 2, SPREAD, bits.ROWS), jnp.float32),
        "sums": ((at_once, SPREAD, bits.ROWS), jnp.float32),
        "weights": ((at_once, SPREAD, bits.ROWS, bits.BLOCK), job.dtype),
    }

    def body(*refs):
        refs = list(refs)
        new = [refs.pop(0) for _ in operands.queries]
        pages, positions, table_ref, layer_ref, *refs = refs
        evict_first(pages, is_interpreted=is_interpreted)
        prefetch = None if operands.prefetch is None else refs.pop(0)
        wg, cta, rank = (lax.axis_index(name) for name in ("wg", "cta", "rank"))
        seq, kv_head = lax.div(cta, jnp.int32(job.kv_heads)), lax.rem(cta, jnp.int32(job.kv_heads))
        part, group = lax.rem(rank, jnp.int32(SPREAD)), lax.div(rank, jnp.int32(SPREAD))
        if is_interpreted:
            shared, (out_ref, q, k, v, kept, p_smem, wide_smem, *barriers, meeting) = (
                refs[:5],
                refs[5:],
            )
            shared = [ref.at[cta] for ref in shared]
        else:
            (out_ref, q, k, v, kept), shared, (flags, *barriers) = refs[:5], refs[5:10], refs[10:]
            meeting = p_smem = wide_smem = None
        k_filled, v_filled, k_free, v_free = barriers
        outs, scales, maxima, sums, weights_ref = shared
        slices = pl.ds(part * share, share)
        exchange = Exchange(
            is_interpreted=is_interpreted, meeting=meeting,
            flags=None if is_interpreted else flags,
        )  # fmt: skip
        exchange.start(wg)

        def now(ref, *index):
            return read_now(ref, *index, is_interpreted=is_interpreted)

        def pages_of(turn):
            """The page of this CTA's keys, and those of the split's values."""
            first = (turn * at_once + group) * SPREAD
            blocks = [first + part, *(first + j for j in range(SPREAD))]
            return tuple(now(table_ref, seq, jnp.minimum(b, table_len - 1)) for b in blocks)

        last, first_pages, layer = now(positions, seq, 0), pages_of(0), now(layer_ref, 0)
        all_blocks = lax.div(last + bits.BLOCK, jnp.int32(bits.BLOCK))
        num_splits = lax.div(all_blocks + (SPREAD - 1), jnp.int32(SPREAD))
        num_turns = lax.div(num_splits + (at_once - 1), jnp.int32(at_once))
        new_page = now(table_ref, seq, jnp.clip(all_blocks - 1, 0, table_len - 1))

        def blocks_of(turn):
            """The split of a turn: its first block, and how many it has."""
            first = (turn * at_once + group) * SPREAD
            return first, jnp.clip(all_blocks - first, 0, SPREAD)

        def page_row(page, half):
            return ((layer * job.num_pages + page) * 2 + half) * job.kv_heads + kv_head

        def load():
            def one_turn(turn, found):
                first, blocks = blocks_of(turn)
                slot = lax.rem(turn, jnp.int32(RING))

                @pl.when(turn >= RING)
                def _is_free():
                    plgpu.barrier_wait(k_free.at[slot])
                    plgpu.barrier_wait(v_free.at[slot])

                def copy(block, source, smem, filled):
                    load_written(
                        last + 1 - block * bits.BLOCK, source, smem, filled,
                        at_once=config.keys_at_once,
                    )  # fmt: skip

                @pl.when(part < blocks)
                def _keys():
                    copy(
                        first + part, pages.at[page_row(found[0], 0)], k.at[slot], k_filled.at[slot]
                    )

                for j in range(SPREAD):

                    @pl.when(j < blocks)
                    def _values(j=j):
                        place = slot * SPREAD + j
                        source = pages.at[page_row(found[1 + j], 1), :, slices]
                        copy(first + j, source, v.at[place], v_filled.at[place])

                if prefetch is not None:

                    @pl.when(turn == 0)
                    def _next_weights():
                        share, num_shares = cta * config.cluster + rank, pairs * config.cluster
                        ask_for(prefetch, share, num_shares, num_bytes=config.prefetched)

                return lax.cond(turn + 1 < num_turns, lambda: pages_of(turn + 1), lambda: found)

            lax.fori_loop(0, num_turns, one_turn, first_pages)
            for free in (k_free, v_free):
                bits.drain(free, num_turns)

        def one_turn(turn, carry):
            first, blocks = blocks_of(turn)
            slot = lax.rem(turn, jnp.int32(RING))
            parity = lax.rem(turn, jnp.int32(2))
            block, last_block = first + part, all_blocks - 1

            @pl.when(part < blocks)
            def _wait_for_keys():
                plgpu.barrier_wait(k_filled.at[slot])

            offset = lax.rem(jnp.maximum(last, 0), jnp.int32(bits.BLOCK))
            has_last = (blocks > 0) & (last_block < first + SPREAD)

            @pl.when(block == last_block)
            def _put_key():
                new_token.put(kept, 0, k.at[slot], pages.at[page_row(new_page, 0)], offset)

            # A block that is not there is masked whole: its maximum is no one's.
            scores = bits.product(q, k.at[slot].T, (bits.ROWS, bits.BLOCK))
            plgpu.barrier_arrive(k_free.at[slot])
            scores = math.first_half(scores)
            row_pos = math.cast(jnp.full((bits.ROWS,), last), math.row_layout)
            scores = math.mask(scores, row_pos, block * bits.BLOCK, None)
            scale = bits.score_scale(job.channels)
            row_shape = (bits.ROWS,)
            block_max = math.mul(jnp.max(scores, axis=1), math.full(row_shape, scale))
            here = maxima.at[group, parity]
            exchange.send_rows(block_max, here, part, group, 0, math)
            exchange.meet(0, turn, SPREAD * SENT_ROWS * 4)

            def running(stop):
                """The running maximum before a block."""
                m = math.full(row_shape, bits.EMPTY_MAX)
                for j in range(SPREAD):
                    is_before = j < stop
                    m = math.choose(is_before, jnp.maximum(m, math.load(here.at[j])), m)
                return math.first_half(m)

            new_m = running(part + 1)
            weights = math.exp2_scaled(scores, math.spread(-new_m, scores.shape), scale)
            row_sum = math.row_sum(weights)
            # ROUND: weights to the compute dtype for the product; their sum is not rounded.
            exchange.send_weights(weights.astype(job.dtype), weights_ref.at[group], part, group, 1)
            exchange.send_rows(row_sum, sums.at[group], part, group, 1, math)

            for j in range(SPREAD):

                @pl.when(j < blocks)
                def _wait_for_values(j=j):
                    plgpu.barrier_wait(v_filled.at[slot * SPREAD + j])

            @pl.when(has_last)
            def _put_value():
                place = v.at[slot * SPREAD + last_block - first]
                value = new_token.kept(kept, 1).at[slices]
                _put_value_share(place, value, offset, math)
                row = pages.at[page_row(new_page, 1), offset, slices]
                _write_row(value, row, share, is_interpreted)

            exchange.meet(1, turn, SPREAD * SENT_ROWS * (bits.BLOCK * 2 + 4))

            def one_block(j, carry):
                out, m, weight_sum = carry
                other = jnp.maximum(m, math.load(here.at[j]))
                decay = math.exp2_difference(m, other)
                weight_sum = math.fma(weight_sum, decay, math.load(sums.at[group, j]))
                values = v.at[slot * SPREAD + j]
                if is_interpreted:
                    # A processor's product of other columns may add up otherwise.
                    p_smem[...], wide_smem[:, slices] = weights_ref[group, j], values[...]
                    wide = bits.product(p_smem, wide_smem, (bits.ROWS, job.channels))
                    wide = lax.dynamic_slice_in_dim(wide, part * share, share, 1)
                    out = out * lax.broadcast_in_dim(decay, out.shape, [0]) + wide
                else:
                    operand = read_weights(weights_ref.at[group, j], math, job.dtype)
                    out, _ = bits.chained_product(math, out, decay, operand, values)
                return out, other, weight_sum

            empty = (
                math.full((bits.ROWS, share), 0.0),
                math.full(row_shape, bits.EMPTY_MAX),
                math.full(row_shape, 0.0),
            )
            out, m, weight_sum = lax.fori_loop(0, blocks, one_block, empty)
            plgpu.barrier_arrive(v_free.at[slot])
            split = turn * at_once + group

            @pl.when(blocks > 0)
            def _send():
                rows = job.padded_rows
                exchange.send_out(out, outs, split, part * share, rows, job.channels)

                @pl.when(part == 0)
                def _scales():
                    exchange.send_to_leader(m, scales.at[split, 0])
                    exchange.send_to_leader(weight_sum, scales.at[split, 1])

            return carry

        def compute():
            new_token.prepare(new, seq, kv_head, q, kept)
            exchange.started()
            lax.fori_loop(0, num_turns, one_turn, jnp.int32(0))

        pl.when(wg == 0)(compute)
        pl.when(wg == 1)(load)

        @pl.when(wg == 0)
        def _merge_here():
            if is_interpreted:
                exchange.meet(2, 0, 0)

            @pl.when(rank == 0)
            def _merge():
                if not is_interpreted:
                    a_split = SENT_ROWS * (job.channels + 2) * 4
                    exchange.meet(2, 0, num_splits * a_split)
                merge_splits(job, outs, scales, out_ref, (seq, kv_head), last, 0, num_splits)

        if not is_interpreted:
            exchange.end(wg)

    return _launch(job, operands, body, pairs=pairs, shapes=shapes, share=share, table=table)


def _launch(job: Job, operands: Operands, body, *, pairs, shapes, share, table):
    dtype, channels, new_token = job.dtype, job.channels, job.new_token
    assert new_token is not None
    out = jax.ShapeDtypeStruct((pairs * job.group * channels,), dtype)
    scratch = [
        plgpu.SMEM(job.out_shape, dtype, transforms=bits.swizzled(bits.channel_span(channels))),
        plgpu.SMEM((RING, bits.BLOCK, channels), dtype,
                   transforms=bits.swizzled(bits.channel_span(channels))),
        plgpu.SMEM((RING * SPREAD, bits.BLOCK, share), dtype,
                   transforms=bits.swizzled(bits.channel_span(share))),
        plgpu.SMEM(new_token.kept_shape, dtype),
    ]  # fmt: skip
    barriers = [plgpu.Barrier(num_barriers=n) for n in (RING, RING * SPREAD, RING, RING)]
    results = [out]
    if job.is_interpreted:
        # Interpretation knows no other CTA's shared memory: through device memory instead.
        results = [
            *(jax.ShapeDtypeStruct((pairs, *shape), kind) for shape, kind in shapes.values()), out
        ]  # fmt: skip
        scratch += [
            plgpu.SMEM((bits.ROWS, bits.BLOCK), dtype), plgpu.SMEM((bits.BLOCK, channels), dtype),
            *barriers,
            plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=3),
        ]  # fmt: skip
    else:
        *rows, (of_weights, _) = shapes.values()
        scratch += [plgpu.SMEM(shape, kind) for shape, kind in rows]
        sent = SENT_ROWS * bits.BLOCK // 2
        scratch += [plgpu.SMEM((*of_weights[:2], sent), jnp.int32), plgpu.SMEM((8,), jnp.int32)]
        scratch += barriers
    return plgpu.kernel(
        body,
        out_type=results,
        scratch_types=scratch,
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
        *operands.queries, operands.page_rows, operands.row_positions, table,
        operands.layer.reshape(1), *([] if operands.prefetch is None else [operands.prefetch]),
    )[-1]  # fmt: skip


def _put_value_share(v_smem, value, offset, math: bits.Arithmetic) -> None:
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


def _write_row(value, row, share: int, is_interpreted: bool) -> None:
    """Write the new token's value to the cache."""
    if is_interpreted:
        row[...] = value[...]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def emit(ctx, value, row):
        index = ir.IndexType.get()
        thread = arith.index_cast(index, mgpu.thread_idx())
        channel = arith.remui(thread, mgpu.c(share, index))
        memref.store(memref.load(value, [channel]), row, [channel])

    emit(value, row)
