# SPDX-License-Identifier: Apache-2.0
"""The one matrix-product kernel of the sm90 backend: TMA, wgmma, a tree of leaves in registers.

A persistent grid of CTAs. One warpgroup loads both operands through a ring of shared-memory stages
that runs on from one output tile to the next; the others multiply. Operands may be swapped, so that
64 rows of weights meet 8 to 256 activations, and clusters share loads by multicast. A tile of gates
and their ups gates them before they leave the registers.
"""

import functools
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.sm90_held_rows import (
    copy_rows,
    held_block,
    hold_rows,
    num_copies,
)
from detjax.pallas_kernels.linear.sm90_sums import (
    add_bias,
    leaf_sum,
    put_transposed,
    ragged,
    tiled,
    tree_sum,
    views,
)
from detjax.pallas_kernels.linear.tiles import NUM_SMS, MatmulTiles, held_chunk, output_chunk
from detjax.pallas_kernels.sm90_cache_hints import evict_first
from detjax.pallas_kernels.swiglu.sm90 import gated_bf16

_ROWS_AXIS, _COLS_AXIS = "cluster_rows", "cluster_cols"


@runtime_checkable
class Ranks(Protocol):
    """Adds what other ranks have of a tile's sum, before its bias. Hashed by what it does."""

    def begin(self, memory: list, tile) -> tuple:
        """Read what `add` needs of `memory`, early; a tile is a number."""
        ...

    def add(self, total, memory: list, tile, begun: tuple, *, num_cols: int) -> Any:
        """The ranks' sum of a warpgroup's float32 accumulator [64, n].

        The first `num_cols` columns count. The order of additions is the caller's affair.
        """
        ...


_STATIC = ("leaf_len", "out_dtype", "tiles", "eps", "read_row", "ranks", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def matmul(
    x,
    w,
    bias,
    residual,
    gain=None,
    terms=(),
    memory=(),
    *,
    leaf_len: int,
    out_dtype,
    tiles: MatmulTiles,
    eps: float = 0.0,
    read_row=None,
    ranks: Ranks | None = None,
    interpret=None,
):
    """Multiply and reduce: [M, N], or [groups, M, N] where CTAs share a tile's leaves.

    With gated tiles `w` is F rows of gates, then F of ups, and the output is [M, F]. With a gain
    each CTA normalises the rows of `x` first, as `rms_norm` does, into shared memory. With `terms`,
    arrays, it adds them to `x` before: `read_row(x_gmem, terms_gmem, row, columns, math)` gives
    channels of the sum, rounded. Returned are the product, the sum and its normalised rows then.
    With `ranks`, whose `memory` are arrays, a tile's sum is that of all ranks.

    # ORDER: inside a leaf, k16 block by k16 block in one f32 wgmma accumulator that starts at zero.
    # ORDER: leaves as the perfect binary tree ((l0 + l1) + (l2 + l3)) + ..., f32; each node is
    # left + right or (0 + left) + right, the same bits because wgmma's sums are never -0.
    """
    num_rows_x, k_len = x.shape
    num_out = w.shape[0] // (2 if tiles.is_gated else 1)
    num_leaves = k_len // leaf_len
    if num_leaves & (num_leaves - 1):
        raise ValueError(f"{num_leaves} leaves must be a power of two")
    if num_leaves % tiles.groups:
        raise ValueError(f"{tiles.groups=} must divide the leaves, {num_leaves}")
    if leaf_len % tiles.k:
        raise ValueError(f"{tiles.k=} must divide {leaf_len=}")
    levels = (num_leaves // tiles.groups).bit_length() - 1
    leaf_steps = leaf_len // tiles.k
    item_steps = leaf_steps * (num_leaves // tiles.groups)
    item_slots = item_steps + (1 if tiles.shares_slot else 0)
    span = min(64, tiles.k)
    slabs = tiles.k // span
    stages = tiles.stages
    is_ragged = num_rows_x > 8 and num_rows_x % 8 != 0
    is_out_tiled = not tiles.is_swapped or out_dtype == jnp.bfloat16 or not is_ragged
    is_out_ragged = is_ragged and is_out_tiled and not tiles.shares_slot
    is_clustered = tiles.cluster_rows * tiles.cluster_cols > 1
    total_rows, total_cols = (num_out, num_rows_x) if tiles.is_swapped else (num_rows_x, num_out)
    cta_out_rows = tiles.out_rows * tiles.num_wgs
    row_clusters = pl.cdiv(total_rows, cta_out_rows * tiles.cluster_rows)
    col_clusters = pl.cdiv(total_cols, tiles.out_cols * tiles.cluster_cols)
    items = row_clusters * col_clusters * tiles.groups
    if bias is not None and num_out % (tiles.rows if tiles.is_swapped else tiles.cols):
        raise ValueError(f"{tiles=} must divide N={num_out}, because there is a bias")
    if residual is not None and tiles.groups > 1:
        raise ValueError("a residual is added in the epilogue of unsplit tiles only")
    if tiles.held_channels != (0 if gain is None else k_len):
        raise ValueError(f"{tiles.held_channels=} must be K={k_len} with a gain, else 0")
    if gain is not None and num_rows_x > 8:
        raise ValueError(f"a product normalises at most 8 rows, not {num_rows_x}")
    if tiles.copies_rows and terms:
        raise ValueError("rows that are copied are not sums of terms")
    if (read_row is None) != (not terms) or (terms and gain is None):
        raise ValueError("terms are added to rows that are normalised, by `read_row`")
    is_whole = tiles.is_swapped and tiles.num_wgs == 1 and tiles.groups == 1 and not is_clustered
    if ranks is not None and not (is_whole and col_clusters == 1 and not tiles.is_gated):
        raise ValueError(f"ranks add swapped tiles that one CTA has, with all rows, not {tiles=}")
    if tiles.is_gated and (num_leaves > 1 or bias is not None or residual is not None):
        raise ValueError("gated tiles take one leaf, no bias and no residual")
    if tiles.shares_slot and (residual is None or out_dtype != jnp.bfloat16):
        raise ValueError("a slot of the ring is shared by a residual and a bfloat16 output")
    out_bytes = jnp.dtype(out_dtype).itemsize
    chunk = output_chunk(tiles, out_bytes)
    chunks = [(r, c) for r in range(0, tiles.rows, 64) for c in range(0, tiles.out_cols, chunk)]
    num_chunks = 1 if tiles.is_swapped else len(chunks)
    slots = num_chunks if residual is not None else min(2, num_chunks)

    x_rows = tiles.cols if tiles.is_swapped else tiles.cta_rows
    w_rows = tiles.cta_rows if tiles.is_swapped else tiles.cols
    # Rows of a stage of weights, how many, and where they lie from the tile's first weight.
    w_pieces = [(0, tiles.live_rows or w_rows, 0)]
    if tiles.is_gated:
        half = tiles.out_rows if tiles.is_swapped else tiles.out_cols
        w_pieces = [
            (2 * start + i * half, half, start + i * num_out)
            for start in range(0, w_rows // 2, half)
            for i in range(2)
        ]
    num_sharers = tiles.num_wgs + tiles.helpers
    early = tiles.early_stages
    # Interpretation knows no two views of one memory.
    is_one_box = tiles.copies_rows and interpret is None
    num_readers = num_copies(k_len, as_one_box=is_one_box) if tiles.copies_rows else num_sharers
    reads_weights_once = (col_clusters if tiles.is_swapped else row_clusters) == 1
    num_threads = num_sharers + 1
    rows_of_wg = pl.cdiv(num_rows_x, num_sharers)
    if tiles.copies_rows and num_sharers * rows_of_wg > 8:
        raise ValueError(f"{num_sharers=} of {rows_of_wg=} would take more than the 8 rows held")
    has_register_shares = tiles.ctas_per_sm == 1 and tiles.num_wgs > 1 and not tiles.held_channels
    arithmetic = sm90_rows.Arithmetic(
        layout=plgpu.Layout.WGMMA, is_interpreted=interpret is not None
    )
    tile_shape = (tiles.rows, tiles.cols)

    def body(*refs):
        refs = list(refs)
        x_gmem, w_gmem = refs.pop(0), refs.pop(0)
        bias_gmem = refs.pop(0) if bias is not None else None
        residual_gmem = refs.pop(0) if residual is not None else None
        gain_gmem = refs.pop(0) if gain is not None else None
        terms_gmem = [refs.pop(0) for _ in terms]
        memory_gmem = [refs.pop(0) for _ in memory]
        out_gmem = refs.pop(0)
        sums_gmem = [refs.pop(0) for _ in range(2 if terms else 0)]
        x_smem, w_smem, out_smem, pending_smem, squares_smem, *barriers = refs
        full, empty, arrived, started, held, rows_read = barriers
        x_mma, x_tma = views(x_smem, is_ragged or is_one_box)
        w_mma, w_tma = views(w_smem, is_ragged and tiles.shares_slot)
        out_reg, out_tma = views(out_smem, is_out_ragged)
        wg = lax.axis_index("wg")
        if reads_weights_once:
            evict_first(w_gmem, is_interpreted=interpret is not None)

        def locate(lin):
            """First row and column of this CTA's tile, and its group of leaves."""
            if tiles.groups > 1:
                group, lin = lax.rem(lin, tiles.groups), lax.div(lin, tiles.groups)
            else:
                group = jnp.int32(0)
            row, col = lin, jnp.int32(0)
            if col_clusters > 1:
                row, col = plgpu.planar_snake(lin, (row_clusters, col_clusters), 1, tiles.snake)
            if tiles.cluster_rows > 1:
                row = row * tiles.cluster_rows + lax.axis_index(_ROWS_AXIS)
            if tiles.cluster_cols > 1:
                col = col * tiles.cluster_cols + lax.axis_index(_COLS_AXIS)
            return row * cta_out_rows, col * tiles.out_cols, group

        def hold_my_rows():
            share = wg - (wg > tiles.num_wgs).astype(jnp.int32)

            def read(row, columns, math):
                if tiles.copies_rows:
                    start, width = columns.start, columns.size
                    return sm90_rows.load_from_slabs(x_mma, row, start, width, math)
                assert read_row is not None
                return read_row(x_gmem, terms_gmem, row, columns, math)

            def keep(i, values, row, start):
                @pl.when(lax.axis_index("cta") == 0)
                def _():
                    sums_gmem[i][row, pl.ds(start, values.shape[0])] = values

            hold_rows(
                x_gmem, gain_gmem, x_mma, squares_smem, share, rows_of_wg,
                eps=eps, num_threads=num_threads, is_interpreted=interpret is not None,
                is_in_place=tiles.copies_rows,
                ready=functools.partial(plgpu.barrier_wait, rows_read)
                if tiles.copies_rows else None,
                read=read if terms or tiles.copies_rows else None, keep=keep if terms else None,
                arrived=functools.partial(plgpu.barrier_arrive, rows_read)
                if early and not tiles.copies_rows else None,
            )  # fmt: skip
            plgpu.barrier_arrive(held)

        def multiply(slot, x_slot, acc, wg_rows):
            for s in range(slabs):
                k = pl.ds(s * span, span)
                if tiles.is_swapped:
                    plgpu.wgmma(acc, w_mma.at[slot, wg_rows, k], x_mma.at[x_slot, s].T)
                else:
                    plgpu.wgmma(acc, x_mma.at[slot, s, wg_rows], w_mma.at[slot, :, k].T)

        def one_leaf(first, wg_rows):
            """Accumulate one leaf, whose first step is the ring's step `first`."""

            def slot_of(i):
                return lax.rem(first + i, stages)

            def take(i):
                plgpu.barrier_wait(full.at[slot_of(i)])

            def multiply_step(i, acc):
                slot = slot_of(i)
                multiply(slot, i if tiles.held_channels else slot, acc, wg_rows)

            def after(i):
                if tiles.lag:

                    @pl.when((first + i == tiles.lag - 1) & (wg == 0))
                    def _():
                        plgpu.barrier_arrive(started)

                if tiles.shares_slot:
                    # The store of the last tile has read its slot by now: nobody waits for it.
                    @pl.when((first + i > item_slots) & (lax.rem(first + i, item_slots) == 1))
                    def _():
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.barrier_arrive(empty.at[slot_of(i - 2)])

            def give(i):
                plgpu.barrier_arrive(empty.at[slot_of(i)])

            return leaf_sum(
                tile_shape, leaf_steps, take=take, multiply=multiply_step, give=give,
                in_flight=tiles.delay * slabs, after=after,
            )  # fmt: skip

        def outputs(total, r, c, num_cols):
            """Outputs of 64 rows of the accumulator from `r`; gated if half of it are ups."""
            block = total[r : r + 64, c : c + num_cols]
            if not tiles.is_gated:
                return block
            up = total[64:] if tiles.is_swapped else total[r : r + 64, tiles.out_cols + c :]
            return gated_bf16(block, up[:, :num_cols], arithmetic)

        def staging(i, slot, wg_rows):
            """Where chunk `i` of a tile waits for its store, as threads and as TMA see it."""
            if not tiles.shares_slot:
                return out_reg.at[wg, i % slots], out_tma.at[wg, i % slots]
            if i == 0:
                return x_mma.at[slot, 0, wg_rows], x_tma.at[slot, 0, wg_rows]
            return w_mma.at[slot, wg_rows], w_tma.at[slot, wg_rows]

        def store(total, row, col, group, slot, wg_rows):
            if tiles.is_swapped:
                if residual is None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out = outputs(total, 0, 0, tiles.cols) if tiles.is_gated else total
                put_transposed(out, out_reg.at[wg], None if residual is None else out_reg.at[wg])
                window = (pl.ds(col, tiles.cols), pl.ds(row, tiles.out_rows))
                window = (group, *window) if tiles.groups > 1 else window
                staged = out_tma.at[wg]
                if tiles.live_rows:
                    staged = out_tma.at[wg, :, pl.ds(0, tiles.live_rows)]
                plgpu.copy_smem_to_gmem(staged, out_gmem.at[window])
                return
            for i, (r, c) in enumerate(chunks):
                reg, tma = staging(i, slot, wg_rows)
                block = outputs(total, r, c, chunk)
                if residual is None:
                    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                else:
                    kept = plgpu.load(reg, layout=plgpu.Layout.WGMMA)
                    block = kept.astype(jnp.float32) + block
                reg[...] = block.astype(out_dtype)  # ROUND: once, to the output's dtype
                plgpu.commit_smem()
                window = (pl.ds(row + r, 64), pl.ds(col + c, chunk))
                window = (group, *window) if tiles.groups > 1 else window
                plgpu.copy_smem_to_gmem(tma, out_gmem.at[window])

        def fetch_residual(row, col):
            assert residual_gmem is not None
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if tiles.is_swapped:
                window = (pl.ds(col, tiles.cols), pl.ds(row, tiles.out_rows))
                plgpu.copy_gmem_to_smem(residual_gmem.at[window], out_tma.at[wg], arrived.at[wg])
                return
            for i, (r, c) in enumerate(chunks):
                plgpu.copy_gmem_to_smem(
                    residual_gmem.at[pl.ds(row + r, 64), pl.ds(col + c, chunk)],
                    out_tma.at[wg, i],
                    arrived.at[wg],
                )

        if tiles.held_channels:
            pl.when(wg != tiles.num_wgs)(hold_my_rows)

        @pl.when(wg < tiles.num_wgs)
        def compute():
            if has_register_shares:
                plgpu.set_max_registers(240 if tiles.num_wgs == 2 else 160, action="increase")
            if tiles.held_channels:
                plgpu.barrier_wait(held)
            wg_rows = pl.ds(wg * tiles.rows, tiles.rows)
            if tiles.lag:
                # WHY: in step, both warpgroups would end a leaf or a tile at once and leave the
                # tensor core idle; the second starts `lag` steps late and stays behind.
                @pl.when(wg == 1)
                def _():
                    plgpu.barrier_wait(started)

            @plgpu.nd_loop((items,), collective_axes="cta", init_carry=jnp.int32(0))
            def slots_used(info, carry):
                row, col, group = locate(info.index[0])
                row = row + wg * tiles.out_rows
                first = info.local_index * item_slots
                if residual is not None and not tiles.shares_slot:
                    fetch_residual(row, col)
                begun = () if ranks is None else ranks.begin(memory_gmem, info.index[0])
                total = tree_sum(
                    tile_shape, levels, leaf_steps, lambda step: one_leaf(step, wg_rows), first,
                    pending=[pending_smem.at[i, wg] for i in range(min(tiles.smem_levels, levels))],
                    is_paired=tiles.is_paired,
                )  # fmt: skip
                if ranks is not None:
                    total = ranks.add(total, memory_gmem, info.index[0], begun, num_cols=num_rows_x)
                if bias is not None:
                    start, axis = (row, 0) if tiles.is_swapped else (col, 1)
                    total = add_bias(total, bias_gmem, start, axis)
                last_slot = lax.rem(first + item_steps, stages)
                if tiles.shares_slot:
                    plgpu.barrier_wait(full.at[last_slot])
                elif residual is not None:
                    plgpu.barrier_wait(arrived.at[wg])
                store(total, row, col, group, last_slot, wg_rows)
                return carry + item_slots

            plgpu.wait_smem_to_gmem(0)
            if tiles.shares_slot:
                plgpu.barrier_arrive(empty.at[lax.rem(slots_used - 1, stages)])

        @pl.when(wg == tiles.num_wgs)
        def load():
            if has_register_shares:
                plgpu.set_max_registers(24, action="decrease")
            row_share = _COLS_AXIS if tiles.cluster_cols > 1 else None
            col_share = _ROWS_AXIS if tiles.cluster_rows > 1 else None
            x_share, w_share = row_share, col_share
            if tiles.is_swapped:
                x_share, w_share = col_share, row_share

            if tiles.copies_rows:
                # WHY: before any weights, behind which they would come.
                copy_rows(x_gmem, x_tma, rows_read, as_one_box=is_one_box)

            def free_slot(n):
                """The slot of the ring's step `n`, once it has been read."""
                slot = lax.rem(n, stages)

                @pl.when(n >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                return slot

            @plgpu.nd_loop((items,), collective_axes="cta", init_carry=jnp.int32(0))
            def slots_used(info, carry):
                row, col, group = locate(info.index[0])
                x_row, w_row = (col, row) if tiles.is_swapped else (row, col)
                first = info.local_index * item_slots

                def step(i, _):
                    if early:
                        # WHY: rows that were asked for behind a whole ring come behind it.
                        pl.when(first + i == early)(lambda: plgpu.barrier_wait(rows_read))
                    slot = free_slot(first + i)
                    k = (group * item_steps + i) * tiles.k
                    for start, size, offset in w_pieces:
                        plgpu.copy_gmem_to_smem(
                            w_gmem.at[pl.ds(w_row + offset, size), pl.ds(k, tiles.k)],
                            w_tma.at[slot, pl.ds(start, size)],
                            full.at[slot],
                            collective_axes=w_share,
                        )
                    for s in range(0 if tiles.held_channels else slabs):
                        plgpu.copy_gmem_to_smem(
                            x_gmem.at[pl.ds(x_row, x_rows), pl.ds(k + s * span, span)],
                            x_tma.at[slot, s],
                            full.at[slot],
                            collective_axes=x_share,
                        )
                    return ()

                lax.fori_loop(0, item_steps, step, ())
                if tiles.shares_slot:
                    slot = free_slot(first + item_steps)
                    for i, ref in enumerate((x_tma.at[slot, 0], w_tma.at[slot])):
                        plgpu.copy_gmem_to_smem(
                            residual_gmem.at[pl.ds(row, x_rows), pl.ds(col + i * span, span)],
                            ref,
                            full.at[slot],
                        )
                return carry + item_slots

            # No CTA may leave while another of its cluster still writes to its memory.
            used = lax.min(slots_used, jnp.int32(stages))

            def drain(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(slots_used - used + i, stages)])
                return ()

            lax.fori_loop(0, used, drain, ())

    if tiles.held_channels:
        x_block = held_block(item_steps, slabs, as_one_box=is_one_box)
    else:
        x_block = ragged((stages, slabs, x_rows, span), span, jnp.bfloat16, is_ragged)
    pending_shape = (tiles.smem_levels, tiles.num_wgs, tiles.rows, tiles.cols)
    pending = plgpu.SMEM(pending_shape, jnp.float32, transforms=tiled(32, jnp.float32))
    sums_shape = (num_sharers, rows_of_wg, k_len // held_chunk(k_len), 4)
    if tiles.shares_slot:
        out_block = plgpu.SMEM((8, chunk), out_dtype)
    elif tiles.is_swapped and not is_out_tiled:
        out_block = plgpu.SMEM((tiles.num_wgs, tiles.cols, tiles.out_rows), out_dtype)
    elif tiles.is_swapped:
        staged_rows = tiles.rows if tiles.live_rows else tiles.out_rows
        out_block = ragged(
            (tiles.num_wgs, tiles.cols, staged_rows),
            tiles.out_span // out_bytes,
            out_dtype,
            is_ragged,
        )
    else:
        out_block = ragged((tiles.num_wgs, slots, 64, chunk), chunk, out_dtype, is_ragged)
    if is_clustered:
        axes = tuple(
            axis
            for axis, size in ((_ROWS_AXIS, tiles.cluster_rows), (_COLS_AXIS, tiles.cluster_cols))
            if size > 1
        )
        empty_type = plgpu.ClusterBarrier(
            collective_axes=axes, num_arrivals=tiles.num_wgs, num_barriers=stages
        )
        cluster = (tiles.cluster_rows, tiles.cluster_cols)
        cluster_names = (_ROWS_AXIS, _COLS_AXIS)
    else:
        empty_type = plgpu.Barrier(num_arrivals=tiles.num_wgs, num_barriers=stages)
        cluster, cluster_names = (), ()
    out_shape = (num_rows_x, num_out)
    out_shape = (tiles.groups, *out_shape) if tiles.groups > 1 else out_shape
    out_struct = jax.ShapeDtypeStruct(out_shape, out_dtype)
    x_struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    cluster_size = math.prod(cluster)
    operands = [v for v in (x, w, bias, residual, gain, *terms, *memory) if v is not None]
    num_clusters = min(items, NUM_SMS * tiles.ctas_per_sm // cluster_size)
    kernel = plgpu.kernel(
        body,
        out_type=[out_struct, x_struct, x_struct] if terms else out_struct,
        scratch_types=(
            x_block,
            ragged((stages, w_rows, tiles.k), span, jnp.bfloat16, is_ragged and tiles.shares_slot),
            out_block,
            pending if tiles.smem_levels else None,
            plgpu.SMEM(sums_shape, jnp.float32) if tiles.held_channels else None,
            plgpu.Barrier(
                num_arrivals=len(w_pieces) + (0 if tiles.held_channels else slabs),
                num_barriers=stages,
            ),
            empty_type,
            plgpu.Barrier(num_arrivals=num_chunks, num_barriers=tiles.num_wgs),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=num_sharers),
            plgpu.Barrier(num_arrivals=num_readers) if early or tiles.copies_rows else None,
        ),
        grid=(num_clusters,),
        grid_names=("cta",),
        cluster=cluster,
        cluster_names=cluster_names,
        num_threads=num_threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=False,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # A thread reads back only what it wrote itself, in one layout; TMA has its own fences.
            unsafe_no_auto_barriers=True,
        ),
        kernel_name="detjax_linear_swiglu" if tiles.is_gated else "detjax_linear",
        interpret=interpret,
    )
    return kernel(*operands)
