# SPDX-License-Identifier: Apache-2.0
"""Attention of up to 64 query rows a key/value head: one pass over the cache.

A CTA takes a split, whose partial result a second kernel merges, or all splits of a sequence; or a
cluster of CTAs takes a sequence and merges its splits in shared memory.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_new_token import NewToken

F32_SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
LANES = 128  # elements of the output that a warpgroup merges at once, one a thread


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
        cluster: CTAs that share the splits of a sequence and a kv head and merge them in shared
            memory. Of one query a sequence alone. 0 leaves the merge to a second kernel.
        scores_ahead: Compute the scores of a block while the one before it takes its softmax. Of
            one query a sequence alone, and not with `whole_sequences`.
        blocks_per_split: Blocks of 128 keys in a split.
    """

    key_stages: int = 3
    value_stages: int = 2
    num_ctas: int = 132
    merge_unroll: tuple[int, int] = (16, 2)
    whole_sequences: bool = False
    cluster: int = 0
    scores_ahead: bool = False
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
    # Those before the first new token's own, which it may have to be put in (see `NewToken`).
    full = jnp.where(last < 0, 0, first // bits.BLOCK)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a CTA takes in a turn, inside the kernel: scalars.

    Attributes:
        seq: Which sequence.
        kv_head: Which key/value head.
        partial: Where its partial result goes, if it has one.
        first_block: Its first block of the sequence.
        blocks: How many.
        full: How many of them no row need be masked in.
        last: Position of the sequence's last token; -1 for padding.
        page: Which page of the cache holds its j-th block.
    """

    seq: Any
    kv_head: Any
    partial: Any
    first_block: Any
    blocks: Any
    full: Any
    last: Any
    page: Callable


def _in_place(group: int, channels: int) -> bool:
    """Whether LANES elements of the output are whole rows that do not cross a token."""
    return group % max(1, LANES // channels) == 0


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
    if query_len == 1 and _in_place(group, channels):
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
    missing = max(padded_rows - rows.shape[0], -rows.shape[0] % 8)
    if missing:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
    return _attend_and_merge(
        (rows,), bits.page_rows(pages), row_positions, page_table, positions, layer,
        shape=(batch, query_len, kv_heads, group, channels), num_pages=pages.shape[1],
        padded_rows=padded_rows, rows_apart=rows_apart, new_token=None,
        config=config, is_interpreted=is_interpreted,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("eps", "config", "is_interpreted"))
def decode_new_token(
    qkv, cos, sin, gains, pages, page_table, positions, layer,
    *, eps: float, config: DecodeConfig, is_interpreted: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Normalise and rotate inside the attention kernel; see `api.rope_attention`, with T = 1.

    The CTA of a sequence's last split puts the key and the value in the cache.
    """
    kv_heads, _, channels = pages.shape[3:]
    batch, num_heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    group = num_heads // kv_heads
    padded_rows = -(-group // 8) * 8
    row_positions = positions
    if not config.cluster:
        row_positions = jnp.broadcast_to(positions, (batch, bits.ROWS))
    pages_ref = jax.new_ref(bits.page_rows(pages))
    out = _attend_and_merge(
        (qkv, cos, sin, *(gains or ())), pages_ref, row_positions, page_table, positions, layer,
        shape=(batch, 1, kv_heads, group, channels), num_pages=pages.shape[1],
        padded_rows=padded_rows, rows_apart=padded_rows,
        new_token=NewToken(
            kv_heads=kv_heads, group=group, channels=channels, eps=eps,
            is_interpreted=is_interpreted,
        ),
        config=config, is_interpreted=is_interpreted,
    )  # fmt: skip
    return out, jax.freeze(pages_ref).reshape(pages.shape)


def _attend_and_merge(
    queries, page_rows, row_positions, page_table, positions, layer,
    *, shape, num_pages, padded_rows, rows_apart, new_token, config, is_interpreted,
):  # fmt: skip
    """The whole of decode from queries as rows, or from new tokens."""
    batch, query_len, kv_heads, group, channels = shape
    if config.cluster or config.scores_ahead:
        if query_len != 1 or config.whole_sequences:
            raise ValueError(f"{config=} needs {query_len=} to be 1, and no whole sequences")
    if config.cluster:
        if group * channels < LANES:
            raise ValueError(f"a cluster merges {LANES} elements at once: {group=}, {channels=}")
        table, num_entries = page_table, jnp.zeros((1,), jnp.int32)
    else:
        table, limits, num_entries = run_list(positions, page_table, config)
    options = {"config": config, "is_interpreted": is_interpreted, "rows_apart": rows_apart}
    o, ml, out = _attend(
        queries, page_rows, row_positions, table, num_entries, layer,
        shape=shape, num_pages=num_pages, padded_rows=padded_rows, new_token=new_token, **options,
    )  # fmt: skip
    whole = (batch, query_len, kv_heads * group, channels)
    if config.whole_sequences or config.cluster:
        return out.reshape(whole)
    if _in_place(group, channels):
        return _merge(o, ml, limits, row_positions, shape=shape, **options).reshape(whole)
    padded = (batch, 1, kv_heads, padded_rows, channels)
    out = _merge(o, ml, limits, row_positions, shape=padded, **options).reshape(padded)
    out = out[:, 0, :, : query_len * group].reshape(batch, kv_heads, query_len, group, channels)
    return out.transpose(0, 2, 1, 3, 4).reshape(whole)


def _attend(
    queries, page_rows, row_positions, table, num_entries, layer,
    *, shape, num_pages, config, is_interpreted, padded_rows, rows_apart,
    new_token: NewToken | None,
):  # fmt: skip
    """Write each split's unnormalised output, maximum and sum, in float32; or the whole output.

    `queries` are rows [., C], or the operands of `NewToken`; then `page_rows` is a reference.
    """
    batch, query_len, kv_heads, group, channels = shape
    scale = bits.score_scale(channels)
    num_slots, per_split = (config.key_stages, config.value_stages), config.blocks_per_split
    math = bits.accumulator_arithmetic(is_interpreted)
    dtype = queries[0].dtype
    vec_shape = (bits.ROWS,)
    out_shape, scores_shape = (bits.ROWS, channels), (bits.ROWS, bits.BLOCK)
    swizzled = bits.swizzled(bits.channel_span(channels))
    # WHY: few channels side by side in shared memory take few registers for addresses; the rows
    # that TMA copies to a head's output must begin at a multiple of 128 bytes.
    out_span = 32 if group % 2 == 0 else 64
    in_cluster = config.cluster > 0
    is_alone = config.cluster == 1  # the only CTA of its cluster
    entries = table.shape[0] * kv_heads
    num_ctas = entries if in_cluster else min(config.num_ctas, entries)
    most_splits = -(-table.shape[1] // per_split)  # in_cluster

    def body(*refs):
        refs = list(refs)
        query_refs = [refs.pop(0) for _ in queries]
        (
            pages_ref, pos_ref, table_ref, entries_ref, layer_ref,
            o_ref, ml_ref, out_ref,
            q_smem2, k_smem, v_smem, o_smem, ml_smem, p_smem, kept_smem,
            q_bar, k_bar, v_bar, q_free, k_free, v_free, merge_bar,
        ) = refs  # fmt: skip
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        rank = lax.axis_index("rank") if config.cluster > 1 else 0
        if in_cluster:
            # The same sequence and kv head in every turn.
            here = lax.div(cta, jnp.int32(kv_heads)), lax.rem(cta, jnp.int32(kv_heads))
            # WHY: the first page's number does not wait for the position, nor the layer for either.
            now = functools.partial(_read_now, is_interpreted=is_interpreted)
            first_block = jnp.minimum(rank * per_split, table.shape[1] - 1)
            last_here, first_page = now(pos_ref, here[0], 0), now(table_ref, here[0], first_block)
            layer_here = now(layer_ref, 0)
            all_blocks = lax.div(last_here + bits.BLOCK, jnp.int32(bits.BLOCK))
            num_splits = lax.div(all_blocks + (per_split - 1), jnp.int32(per_split))
            num_turns = lax.div(num_splits - rank + (config.cluster - 1), jnp.int32(config.cluster))
        else:
            num_items = entries if config.whole_sequences else entries_ref[0] * kv_heads
            num_turns = lax.div(num_items - cta + (num_ctas - 1), jnp.int32(num_ctas))

        def run_at(turn) -> Run:
            if in_cluster:
                split = turn * config.cluster + rank
                first_block = split * per_split
                blocks = jnp.minimum(all_blocks - first_block, per_split)
                full = lax.div(last_here, jnp.int32(bits.BLOCK)) - first_block
                seq, kv_head = here
                return Run(
                    seq=seq, kv_head=kv_head, first_block=first_block, blocks=blocks,
                    partial=cta * most_splits + split if is_interpreted else split,
                    full=jnp.minimum(full, blocks), last=last_here,
                    page=lambda j: table_ref[seq, first_block + j],
                )  # fmt: skip
            item = turn * num_ctas + cta
            entry = lax.div(item, jnp.int32(kv_heads))
            first_block, blocks, full, last = (
                table_ref[entry, i] for i in (FIRST_BLOCK, BLOCKS, FULL_BLOCKS, LAST)
            )
            return Run(
                seq=entry if config.whole_sequences else table_ref[entry, SEQ],
                kv_head=lax.rem(item, jnp.int32(kv_heads)),
                partial=item, first_block=first_block, blocks=blocks, full=full, last=last,
                page=lambda j: table_ref[entry, PAGES + j],
            )  # fmt: skip

        def page_row(run: Run, page, half):
            """Where the page's keys (half 0) or values (half 1) lie among `page_rows`."""
            layer = layer_here if in_cluster else layer_ref[0]
            return ((layer * num_pages + page) * 2 + half) * kv_heads + run.kv_head

        def write_partial(state, run: Run):
            o_smem[...], ml_smem[0, :], ml_smem[1, :] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, padded_rows)], o_ref.at[run.partial])
            plgpu.copy_smem_to_gmem(ml_smem, ml_ref.at[run.partial])

        def write_rows(out, run: Run):
            for i in range(channels // out_span):
                o_smem[i] = out[:, i * out_span : (i + 1) * out_span]
            plgpu.commit_smem()
            first_row = lax.rem((run.seq * kv_heads + run.kv_head) * rows_apart, jnp.int32(8))

            def one_token(token, _):
                for i in range(channels // out_span):
                    plgpu.copy_smem_to_gmem(
                        o_smem.at[i, pl.ds(first_row + token * group, group)],
                        out_ref.at[
                            run.seq * query_len + token,
                            pl.ds(run.kv_head * group, group),
                            pl.ds(i * out_span, out_span),
                        ],
                    )
                return 0

            lax.fori_loop(0, query_len, one_token, 0)

        def compute():
            def one_run(turn, base):
                run = run_at(turn)
                if query_len == 1:
                    row_pos = math.cast(jnp.full(vec_shape, run.last), math.row_layout)
                else:
                    row_pos = math.load(pos_ref.at[run.seq])
                if new_token is None:
                    q_slot = lax.rem(turn, jnp.int32(2))
                    q_smem = q_smem2.at[q_slot]
                    plgpu.barrier_wait(q_bar.at[q_slot])
                else:
                    q_smem = q_smem2.at[0]
                    offset = lax.rem(run.last, jnp.int32(bits.BLOCK))
                    # Read now, used in `put_new`.
                    page = run.page(jnp.minimum(run.full, run.blocks - 1))
                    if not in_cluster:
                        new_token.prepare(query_refs, run.seq, run.kv_head, q_smem, kept_smem)

                def put_new(j, half, page_smem):
                    """Put the new token's key or value in its page, once that has been loaded."""
                    if new_token is not None:

                        @pl.when(j == run.full)
                        def _put():
                            page_gmem = pages_ref.at[page_row(run, page, half)]
                            new_token.put(kept_smem, half, page_smem, page_gmem, offset)

                def scores_of(j, may_be_new, meanwhile=lambda: None):
                    k_slot = lax.rem(base + j, jnp.int32(num_slots[0]))
                    plgpu.barrier_wait(k_bar.at[k_slot])
                    if may_be_new:
                        put_new(j, 0, k_smem.at[k_slot])
                    scores, result = bits.product_during(
                        math, q_smem, k_smem.at[k_slot].T, scores_shape, meanwhile
                    )
                    plgpu.barrier_arrive(k_free.at[k_slot])
                    return scores, result

                def softmax(j, scores, m, weight_sum, is_masked):
                    if is_masked:
                        first_key = (run.first_block + j) * bits.BLOCK
                        scores = math.mask(scores, row_pos, first_key, None)
                    m, weight_sum, decay, weights = math.softmax_step(scores, m, weight_sum, scale)
                    return m, weight_sum, decay, bits.operand(weights, dtype, p_smem)

                def add_values(j, out, decay, operand, is_masked):
                    v_slot = lax.rem(base + j, jnp.int32(num_slots[1]))
                    plgpu.barrier_wait(v_bar.at[v_slot])
                    v = v_smem.at[v_slot]
                    if is_masked:
                        first_key = (run.first_block + j) * bits.BLOCK

                        @pl.when(first_key + (bits.BLOCK - 1) > run.last)
                        def _clear():
                            bits.clear_unwritten(v, first_key, run.last, math)

                        put_new(j, 1, v)
                    out, _ = bits.chained_product(math, out, decay, operand, v)
                    plgpu.barrier_arrive(v_free.at[v_slot])
                    return out

                def one_block(j, carry, is_masked):
                    out, m, weight_sum = carry
                    scores, _ = scores_of(j, is_masked)
                    m, weight_sum, decay, operand = softmax(j, scores, m, weight_sum, is_masked)
                    return add_values(j, out, decay, operand, is_masked), m, weight_sum

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

                def one_block_ahead(j, carry):
                    scores, out, m, weight_sum = carry
                    scores, (m, weight_sum, decay, operand) = scores_of(
                        j + 1, True, lambda: softmax(j, scores, m, weight_sum, is_masked=False)
                    )
                    return scores, add_values(j, out, decay, operand, False), m, weight_sum

                if config.scores_ahead:
                    # One query: only the block of its own key need be masked, the last if any.
                    stop = run.blocks - 1
                    scores, _ = scores_of(jnp.int32(0), True)
                    carry = lax.fori_loop(0, stop, one_block_ahead, (scores, *empty))
                    scores, out, m, weight_sum = carry
                    m, weight_sum, decay, operand = softmax(stop, scores, m, weight_sum, True)
                    carry = add_values(stop, out, decay, operand, True), m, weight_sum
                else:
                    step, carry = one_block, empty
                    if config.whole_sequences:
                        step, carry = one_block_of_any_split, (empty, empty)
                    for start, stop, is_masked in (
                        (0, run.full, False),
                        (run.full, run.blocks, True),
                    ):
                        some = functools.partial(step, is_masked=is_masked)
                        carry = lax.fori_loop(start, stop, some, carry)
                if new_token is None:
                    plgpu.barrier_arrive(q_free.at[q_slot])
                if in_cluster:
                    _send_to_leader(
                        *carry, *((o_ref, ml_ref) if is_interpreted else (o_smem, ml_smem)),
                        run.partial, padded_rows, math, is_alone,
                    )  # fmt: skip
                elif config.whole_sequences:
                    out, _, weight_sum = fold(*carry)
                    out = math.finish(out, weight_sum, row_pos >= 0, dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    write_rows(out, run)
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    write_partial(carry, run)
                return base + run.blocks

            if in_cluster and new_token is not None:
                new_token.prepare(query_refs, *here, q_smem2.at[0], kept_smem)
            lax.fori_loop(0, num_turns, one_run, jnp.int32(0))
            if not in_cluster:
                plgpu.wait_smem_to_gmem(0)

        def load():
            def one_run(turn, base):
                run = run_at(turn)
                q_slot = lax.rem(turn, jnp.int32(2))
                if new_token is None:
                    first_row = (run.seq * kv_heads + run.kv_head) * rows_apart

                    @pl.when(turn >= 2)
                    def _q_is_free():
                        plgpu.barrier_wait(q_free.at[q_slot])

                    plgpu.copy_gmem_to_smem(
                        query_refs[0].at[pl.ds(lax.div(first_row, jnp.int32(8)) * 8, padded_rows)],
                        q_smem2.at[q_slot, pl.ds(0, padded_rows)],
                        q_bar.at[q_slot],
                    )

                def one_page(j, page):
                    next_page = run.page(jnp.minimum(j + 1, run.blocks - 1))
                    index = base + j
                    rings = ((k_smem, k_bar, k_free), (v_smem, v_bar, v_free))
                    for half, (smem, filled, free) in enumerate(rings):
                        slot = lax.rem(index, jnp.int32(num_slots[half]))

                        @pl.when(index >= num_slots[half])
                        def _is_free(slot=slot, free=free):
                            plgpu.barrier_wait(free.at[slot])

                        plgpu.copy_gmem_to_smem(
                            pages_ref.at[page_row(run, page, half)], smem.at[slot], filled.at[slot]
                        )
                    return next_page

                # Read with BLOCKS, not after it, and each next page ahead.
                if in_cluster:
                    page = lax.cond(turn == 0, lambda: first_page, lambda: run.page(0))
                else:
                    page = run.page(0)
                lax.fori_loop(0, run.blocks, one_page, page)
                return base + run.blocks

            total = lax.fori_loop(0, num_turns, one_run, jnp.int32(0))
            used = [(k_free, total), (v_free, total)]
            if new_token is None:
                used.append((q_free, num_turns))
            for free, count in used:
                bits.drain(free, count)

        def merge_in_cluster():
            first = cta * most_splits if is_interpreted else 0
            part_ref, scales_ref = (o_ref, ml_ref) if is_interpreted else (o_smem, ml_smem)
            lanes = MergeLanes(channels=channels, is_interpreted=is_interpreted)
            seq, kv_head = here
            pair = seq * kv_heads + kv_head
            rows = [min(r, group - lanes.rows) for r in range(0, group, lanes.rows)]
            shift = lax.rem(pair * rows_apart, jnp.int32(8))

            def one_split(split, states):
                return tuple(
                    lanes.fold(
                        state,
                        lanes.spread(lambda r: scales_ref[first + split, 0, r], shift + row),
                        lanes.spread(lambda r: scales_ref[first + split, 1, r], shift + row),
                        lanes.math.load(
                            part_ref.at[first + split, pl.ds((shift + row) * channels, LANES)]
                        ),
                    )
                    for row, state in zip(rows, states, strict=True)
                )

            states = lax.fori_loop(0, num_splits, one_split, (lanes.empty(),) * len(rows))
            for row, state in zip(rows, states, strict=True):
                is_row = lanes.spread(lambda r: last_here, 0) >= 0
                out_ref[pl.ds((pair * group + row) * channels, LANES)] = lanes.finish(
                    state, is_row, dtype
                )

        pl.when(wg == 0)(compute)
        pl.when(wg == 1)(load)
        if config.cluster > 1 and not is_interpreted:
            _meet_cluster()
        if in_cluster:

            @pl.when(wg == 0)
            def _merge_here():
                if merge_bar is not None:
                    plgpu.barrier_arrive(merge_bar)
                    plgpu.barrier_wait(merge_bar)
                if is_alone:
                    plgpu.commit_smem()
                pl.when(rank == 0)(merge_in_cluster)

    weights = plgpu.SMEM(scores_shape, dtype) if is_interpreted else None
    f32 = jnp.float32
    o = jax.ShapeDtypeStruct((entries, padded_rows, channels), f32)
    ml = jax.ShapeDtypeStruct((entries, 2, bits.ROWS), f32)
    out_type = [o, ml, None]
    out_smem = [
        plgpu.SMEM(out_shape, f32, transforms=F32_SWIZZLED), plgpu.SMEM((2, *vec_shape), f32)
    ]  # fmt: skip
    if config.whole_sequences:
        out = jax.ShapeDtypeStruct((batch * query_len, kv_heads * group, channels), dtype)
        out_type = [None, None, out]
        out_smem = [plgpu.SMEM((channels // out_span, bits.ROWS, out_span), dtype), None]
    if in_cluster:
        out = jax.ShapeDtypeStruct((batch * kv_heads * group * channels,), dtype)
        partials = (most_splits, padded_rows * channels), (most_splits, 2, padded_rows)
        out_type, out_smem = [None, None, out], [plgpu.SMEM(shape, f32) for shape in partials]
        if is_interpreted:
            # Interpretation knows no other CTA's shared memory: through device memory instead.
            out_smem = [None, None]
            out_type[:2] = [
                jax.ShapeDtypeStruct((entries * shape[0], *shape[1:]), f32) for shape in partials
            ]
    q_copies = 2 if new_token is None else 1
    grid = {"cluster": (config.cluster,), "cluster_names": ("rank",)} if config.cluster > 1 else {}
    merge_bar = None
    if config.cluster > 1 and is_interpreted:
        merge_bar = plgpu.ClusterBarrier(collective_axes=("rank",))
    kind = "cluster" if in_cluster else "sequences" if config.whole_sequences else "splits"
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((q_copies, *out_shape), dtype, transforms=swizzled),
            *(plgpu.SMEM((n, bits.BLOCK, channels), dtype, transforms=swizzled) for n in num_slots),
            *out_smem,
            weights,
            plgpu.SMEM(new_token.kept_shape, dtype) if new_token is not None else None,
            *(plgpu.Barrier(num_barriers=n) for n in (2, *num_slots)),
            *(plgpu.Barrier(num_barriers=n) for n in (2, *num_slots)),
            merge_bar,
        ],
        grid=(num_ctas,),
        grid_names=("cta",),
        **grid,
        num_threads=2,
        thread_name="wg",
        kernel_name=f"attention_{kind}_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
    )(*queries, page_rows, row_positions, table, num_entries, layer.reshape(1))


def _read_now(ref, *index, is_interpreted):
    """An int32 of device memory, whose load the compiler may not put off to where it is used."""
    if is_interpreted:
        return ref[index]
    scalar: Any = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(scalar for _ in index)),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar),
    )
    def emit(ctx, memory, *index):
        i32 = ir.IntegerType.get_signless(32)
        strides, _ = ir.MemRefType(memory.type).get_strides_and_offset()
        offset = mgpu.c(0, i32)
        for i, stride in zip(index, strides, strict=True):
            offset = arith.addi(offset, arith.muli(i.registers.item(), mgpu.c(stride, i32)))
        where = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [offset], i32)
        value = llvm.inline_asm(i32, [where], "ld.b32 $0, [$1];", "=r,l", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return emit(ref, *(jnp.int32(i) for i in index))


def _send_to_leader(
    out, m, weight_sum, part_ref, scales_ref, split, num_rows, math, is_alone
) -> None:
    """Write a split's partial result where the first CTA of the cluster merges it.

    # WHY: plain stores to the leader's shared memory, a fresh place for each split, and plain loads
    there after `_meet_cluster`, which orders them: one proxy, one scope, no flag and no counter.
    """
    if math.is_interpreted:
        part_ref[split] = out[:num_rows].reshape(-1)
        scales_ref[split, 0] = m[:num_rows]
        scales_ref[split, 1] = weight_sum[:num_rows]
        return
    channels = out.shape[1]
    memory = plgpu.RefType()

    @plgpu.inline_mgpu(
        arg_types=(math.layout, math.row_layout, math.row_layout, memory, memory, memory)
    )
    def emit(ctx, out, m, weight_sum, *refs):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()

        def send(x, ref, stride):
            leader = mgpu.utils.memref_ptr(ref)
            if not is_alone:
                leader = mgpu.utils.get_cluster_ptr(leader, mgpu.c(0, i32))
            for at, register in zip(x.layout.thread_idxs(x.shape), x.registers.flat, strict=True):
                row, col = at if len(at) == 2 else (*at, mgpu.c(0, index))
                is_row = arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(num_rows, index))
                with mgpu.utils.when(is_row):
                    offset = arith.addi(arith.muli(row, mgpu.c(stride, index)), col)
                    offset = arith.index_cast(i32, offset)
                    where = mgpu.utils.getelementptr(leader, [offset], ir.F32Type.get())
                    llvm.store(register, where)

        for x, ref, stride in zip((out, m, weight_sum), refs, (channels, 1, 1), strict=True):
            send(x, ref, stride)

    emit(out, m, weight_sum, part_ref.at[split], scales_ref.at[split, 0], scales_ref.at[split, 1])


def _meet_cluster() -> None:
    """Wait for all threads of the cluster; what they wrote to shared memory is visible then."""

    @plgpu.inline_mgpu()
    def emit(ctx):
        for step in ("arrive.release", "wait.acquire"):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [], f"barrier.cluster.{step};", "~{memory}",
                has_side_effects=True,
            )  # fmt: skip

    emit()


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeLanes:
    """Merge of splits for LANES neighbouring elements of the output, one a thread: whole rows.

    Attributes:
        channels: Of a row.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    channels: int
    is_interpreted: bool

    @property
    def rows(self) -> int:
        """Rows side by side."""
        return LANES // self.channels

    @property
    def layout(self):
        """A thread an element."""
        return plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    @property
    def math(self) -> bits.Arithmetic:
        """The arithmetic on such vectors."""
        return bits.Arithmetic(
            layout=None, row_layout=self.layout, is_interpreted=self.is_interpreted
        )

    def empty(self):
        """The state before any split: maximum, sum and output."""
        zero = self.math.full((LANES,), 0.0)
        return self.math.full((LANES,), bits.EMPTY_MAX), zero, zero

    def spread(self, read, first_row):
        """One scalar a row, `read(row)`, over its channels."""
        if self.is_interpreted:
            lane = lax.broadcasted_iota(jnp.int32, (LANES,), 0)
        else:
            lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=self.layout)
        value = self.math.cast(jnp.full((LANES,), read(first_row)), self.layout)
        for i in range(1, self.rows):
            other = self.math.cast(jnp.full((LANES,), read(first_row + i)), self.layout)
            value = jnp.where(lane < i * self.channels, value, other)
        return value

    def fold(self, state, other_m, other_sum, other_out):
        """Fold a split into the state, as `merge_scales` and `merge_outputs` do."""
        m, weight_sum, out = state
        m, weight_sum, a, b = self.math.merge_scales(m, weight_sum, other_m, other_sum)
        return m, weight_sum, self.math.fma(out, a, self.math.mul(other_out, b))

    def finish(self, state, is_row, dtype):
        """Divide by the sum, clear padded rows, make every zero +0, round once."""
        _, weight_sum, out = state
        out = self.math.mul(out, self.math.reciprocal(weight_sum))
        out = jnp.where(is_row & (out != 0.0), out, self.math.full((LANES,), 0.0))
        # ROUND: the only rounding of the output to the compute dtype.
        return out.astype(dtype)


def _merge(o, ml, limits, row_positions, *, shape, config, is_interpreted, rows_apart):
    """Fold the splits left to right: `out[b, t, k, g]`, one CTA for each 128 channels of a row."""
    batch, query_len, kv_heads, group, channels = shape
    padded_rows = o.shape[1]
    lanes = MergeLanes(channels=channels, is_interpreted=is_interpreted)
    dtype = jnp.bfloat16
    ctas_in_seq = query_len * kv_heads * group // lanes.rows

    def body(o_ref, ml_ref, limits_ref, pos_ref, out_ref):
        cta = lax.axis_index("cta")
        seq, index = lax.div(cta, jnp.int32(ctas_in_seq)), lax.rem(cta, jnp.int32(ctas_in_seq))
        first_row = index * lanes.rows  # in [query_len, kv_heads, group]
        kv_head = lax.rem(lax.div(first_row, jnp.int32(group)), jnp.int32(kv_heads))
        token = lax.div(first_row, jnp.int32(group * kv_heads))
        row = token * group + lax.rem(first_row, jnp.int32(group))
        row += lax.rem((seq * kv_heads + kv_head) * rows_apart, jnp.int32(8))
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
                part = lanes.math.load(o_ref.at[entry, pl.ds(row * channels, LANES)])
                parts.append((m, weight_sum, part))
            for part in parts:
                state = lanes.fold(state, *part)
            return state

        state = lanes.empty()
        many, few = config.merge_unroll
        steps = lax.div(count, jnp.int32(many))
        state = lax.fori_loop(0, steps, functools.partial(some_splits, first=0, unroll=many), state)
        done = steps * many
        steps = lax.div(count - done + (few - 1), jnp.int32(few))
        state = lax.fori_loop(
            0, steps, functools.partial(some_splits, first=done, unroll=few), state
        )
        is_row = lanes.spread(lambda r: pos_ref[seq, r], row) >= 0
        out_ref[pl.ds(cta * LANES, LANES)] = lanes.finish(state, is_row, dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch * ctas_in_seq * LANES,), dtype),
        grid=(batch * ctas_in_seq,),
        grid_names=("cta",),
        kernel_name="attention_merge_sm90",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
    )(o.reshape(o.shape[0], padded_rows * channels), ml, limits, row_positions)
