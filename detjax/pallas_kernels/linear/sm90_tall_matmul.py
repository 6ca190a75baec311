# SPDX-License-Identifier: Apache-2.0
"""A product of many activations on Hopper: 64 rows of them a warpgroup meet 8 to 256 weights.

A persistent grid of CTAs: one warpgroup loads both operands through a ring of shared memory that
runs on from one output tile to the next, up to three multiply. CTAs of a cluster share loads by
multicast. The sums of the leaves of K are added as a tree in registers and shared memory. The
epilogue adds the bias, the product of rows' adapters and the residual stream, or gates a tile of
gates and their ups.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.quantized import (
    BLOCK,
    FLOAT8_CHUNK,
    block_rows_of,
    operands_of,
)
from detjax.pallas_kernels.linear.sm90_sums import (
    COMPILER_PARAMS,
    TILE_SNAKE,
    ChunkScales,
    add_bias,
    chunked_sum,
    leaf_sum,
    load_vector,
    ragged,
    scaled,
    tiled,
    tree_sum,
    views,
)
from detjax.pallas_kernels.linear.tiles import WG_ROWS, TallTiles
from detjax.pallas_kernels.lora.adapted import LowRankRows
from detjax.pallas_kernels.sm90_cache_hints import evict_first
from detjax.pallas_kernels.sm90_hardware import NUM_SMS
from detjax.pallas_kernels.sm90_registers import RegisterShares
from detjax.pallas_kernels.sm90_ring import Ring
from detjax.pallas_kernels.swiglu.sm90 import gated_bf16

_ROWS_AXIS, _COLS_AXIS = "cluster_rows", "cluster_cols"

PIECE_COLS = 64
"""Most columns of a warpgroup's sum of adapters, which is in registers beside the tile's."""


REGISTERS = {
    2: RegisterShares(computing=240, loading=24, num_computing=2),
    3: RegisterShares(computing=160, loading=24, num_computing=3),
}
"""By the number of warpgroups that multiply; one needs none of the other's."""


class _Operands(NamedTuple):
    """Arrays in device memory; None where the product has none."""

    x: Any  # [M, K] bf16 or of 8 bits
    w: Any  # [N, K] bf16 or of 8 bits; [2 F, K] if gated, F rows of gates and F of ups
    bias: Any  # [N]
    residual: Any  # [M, N], of the output's dtype
    adapters: LowRankRows | None
    x_scales: Any  # [> M] f32, of 8-bit activations; [K / 128, >= M] with blocks
    w_scales: Any  # [N] f32, of 8-bit weights; [N / block_rows, K / 128] of blocks


class _Memory(NamedTuple):
    """Shared memory of a CTA, and its barriers; None where the product has none."""

    x: Any  # [stages, slabs, cta_rows, span] bf16 or of 8 bits
    x_scales: Any  # [stages, slabs, cta_rows] f32, of chunks of 8-bit activations
    w: Any  # [stages, cols, k] bf16 or of 8 bits
    out: Any  # [num_wgs, staged, 64, chunk], of the output's dtype
    pending: Any  # [smem_levels, num_wgs, 64, cols] f32
    full: Any  # [stages]
    empty: Any  # [stages]
    arrived: Any  # [num_wgs]: the residual is there
    started: Any  # the first warpgroup is `lag` steps ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The numbers of a launch.

    Attributes:
        tiles: How it is cut.
        num_rows: M.
        num_out: N.
        k_len: K.
        leaf_len: Of a leaf of K.
        operand_dtype: Of activations and weights: bfloat16, int8 or float8_e4m3fn.
        out_dtype: Of the output.
        has_residual: Whether the residual stream is added.
        block_rows: Outputs that share a scale, if blocks of 8-bit weights do; else 0.
        low_rank: Columns of the adapters of rows; 0 without.
        is_interpreted: Whether a CPU interprets the kernel.
    """

    tiles: TallTiles
    num_rows: int
    num_out: int
    k_len: int
    leaf_len: int
    operand_dtype: jnp.dtype
    out_dtype: jnp.dtype
    has_residual: bool
    block_rows: int
    low_rank: int
    is_interpreted: bool

    @property
    def is_w8a8(self) -> bool:
        """Whether operands have 8 bits, and their sums are scaled."""
        return self.operand_dtype.itemsize == 1

    @property
    def num_leaves(self) -> int:
        """Leaves of a tile: a CTA's share of the tree's."""
        return self.k_len // self.leaf_len // self.tiles.groups

    @property
    def leaf_steps(self) -> int:
        """Steps of the ring in a leaf."""
        return self.leaf_len // self.tiles.k

    @property
    def product_steps(self) -> int:
        """Steps of the ring with operands of a tile."""
        return self.leaf_steps * self.num_leaves

    @property
    def steps(self) -> int:
        """Steps of the ring in a tile: the last may be for its residual and output."""
        added = self.low_rank_steps * len(self.low_rank_pieces)
        return self.product_steps + added + (1 if self.tiles.shares_slot else 0)

    @property
    def low_rank_pieces(self) -> list[tuple[int, int]]:
        """Columns of an accumulator to which adapters are added at once: the first, and how many.

        # WHY: their product is in registers beside the sum.
        """
        if not self.low_rank:
            return []
        ends = [self.tiles.out_cols, self.tiles.cols] if self.tiles.is_gated else [self.tiles.cols]
        return [
            (at, min(PIECE_COLS, end - at))
            for begin, end in zip([0, *ends], ends, strict=False)
            for at in range(begin, end, PIECE_COLS)
        ]

    @property
    def low_rank_steps(self) -> int:
        """Steps of the ring with the adapters of a piece: of gates or of ups a half."""
        return self.low_rank // (2 if self.tiles.is_gated else 1) // self.tiles.k

    @property
    def span(self) -> int:
        """Columns of a slab: one swizzle span of activations."""
        return min(128 // self.operand_dtype.itemsize, self.tiles.k)

    @property
    def slabs(self) -> int:
        """Slabs of a step."""
        return self.tiles.k // self.span

    @property
    def clusters(self) -> tuple[int, int]:
        """Rows and columns of the grid of clusters that covers the output."""
        rows, cols = self.tiles.cluster
        return (
            pl.cdiv(self.num_rows, self.tiles.cta_rows * rows),
            pl.cdiv(self.num_out, self.tiles.out_cols * cols),
        )

    @property
    def num_items(self) -> int:
        """Tiles of all clusters, each as often as CTAs share its leaves."""
        return math.prod(self.clusters) * self.tiles.groups

    @property
    def is_ragged(self) -> bool:
        """Whether TMA must see blocks of rows tiled by 1 row (`ragged`)."""
        return self.num_rows > 8 and self.num_rows % 8 != 0

    @property
    def out_bytes(self) -> int:
        """Of an output element."""
        return self.out_dtype.itemsize

    @property
    def chunk(self) -> int:
        """Columns of one store."""
        return self.tiles.out_chunk(self.out_bytes)

    @property
    def staged(self) -> int:
        """Chunks of the output in shared memory."""
        return self.tiles.num_staged(self.out_bytes, has_residual=self.has_residual)

    @property
    def weight_pieces(self) -> list[tuple[int, int, int]]:
        """Rows of a stage of weights, how many, and where they lie from the tile's first weight."""
        t = self.tiles
        if not t.is_gated:
            return [(0, t.cols, 0)]
        return [(i * t.out_cols, t.out_cols, i * self.num_out) for i in range(2)]

    @property
    def piece_cols(self) -> int:
        """Columns of an accumulator that share a scale of blocks of weights."""
        return min(BLOCK, self.tiles.out_cols)

    def check(self, bias) -> None:
        """Refuse operands that these tiles do not take."""
        t = self.tiles
        if bias is not None and self.num_out % t.cols:
            raise ValueError(f"{t=} must divide N={self.num_out}, because there is a bias")
        if self.operand_dtype == jnp.float8_e4m3fn and self.span != FLOAT8_CHUNK:
            raise ValueError(f"float8 is added by chunks of {FLOAT8_CHUNK}, so {t.k=} must be more")
        if self.is_w8a8 and (
            self.num_leaves * t.groups > 1 or self.num_out % (t.out_cols * t.cluster[1])
        ):
            raise ValueError(f"{t} must take all of K, and divide N={self.num_out}")
        if self.block_rows and (t.out_cols % self.piece_cols or BLOCK % self.piece_cols):
            raise ValueError(f"{t=} must have whole blocks of {BLOCK} outputs, or parts of one")
        if self.has_residual and t.groups > 1:
            raise ValueError("a residual is added in the epilogue of unsplit tiles only")
        if self.low_rank and (
            self.num_leaves * t.groups > 1 or self.is_w8a8 or self.has_residual or t.lag
        ):
            raise ValueError(f"adapters are added to a plain sum of one leaf, not by {t=}")
        if self.low_rank % ((2 if t.is_gated else 1) * t.k):
            raise ValueError(f"{t.k=} must divide the adapters' columns, {self.low_rank}")
        if t.shares_slot and not (self.has_residual and self.out_dtype == jnp.bfloat16):
            raise ValueError("a slot of the ring is shared by a residual and a bfloat16 output")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cta:
    """What the warpgroups of a CTA do."""

    plan: _Plan
    operands: _Operands
    out_gmem: Any  # [M, N], or [groups, M, N] where CTAs share a tile's leaves
    memory: _Memory
    wg: Any

    @property
    def ring(self) -> Ring:
        return Ring(
            full=self.memory.full, empty=self.memory.empty, num_slots=self.plan.tiles.stages
        )

    @property
    def x_views(self) -> tuple:
        """The activations in shared memory as wgmma and as TMA see them."""
        return views(self.memory.x, self.plan.is_ragged)

    @property
    def w_views(self) -> tuple:
        """The weights likewise; TMA sees rows there if an output leaves through their slot."""
        return views(self.memory.w, self.plan.is_ragged and self.plan.tiles.shares_slot)

    @property
    def out_views(self) -> tuple:
        """The staged output as threads and as TMA see it."""
        return views(self.memory.out, self.plan.is_ragged and not self.plan.tiles.shares_slot)

    def locate(self, item):
        """First row and column of this CTA's tile, and its group of leaves."""
        plan, t = self.plan, self.plan.tiles
        group = jnp.int32(0)
        if t.groups > 1:
            group, item = lax.rem(item, t.groups), lax.div(item, t.groups)
        row, col = item, jnp.int32(0)
        if plan.clusters[1] > 1:
            row, col = plgpu.planar_snake(item, plan.clusters, 1, TILE_SNAKE)
        if t.cluster[0] > 1:
            row = row * t.cluster[0] + lax.axis_index(_ROWS_AXIS)
        if t.cluster[1] > 1:
            col = col * t.cluster[1] + lax.axis_index(_COLS_AXIS)
        return row * t.cta_rows, col * t.out_cols, group

    def run(self) -> None:
        """All warpgroups; which one it is decides what it does."""
        num_wgs = self.plan.tiles.num_wgs
        if self.plan.clusters[0] == 1:
            evict_first(self.operands.w, is_interpreted=self.plan.is_interpreted)
        pl.when(self.wg < num_wgs)(self.compute)
        pl.when(self.wg == num_wgs)(self.load)

    # ------------------------------------------------------------------ the warpgroup that loads

    def load(self) -> None:
        """Fill the ring with the steps of all tiles."""
        plan, t = self.plan, self.plan.tiles
        if t.num_wgs > 1:
            REGISTERS[t.num_wgs].give()

        @plgpu.nd_loop((plan.num_items,), collective_axes="cta", init_carry=jnp.int32(0))
        def steps_done(info, carry):
            row, col, group = self.locate(info.index[0])
            first = info.local_index * plan.steps

            def step(i, _):
                self.load_step(first, i, row, col, group)
                return ()

            lax.fori_loop(0, plan.product_steps, step, ())
            for piece in range(len(plan.low_rank_pieces)):
                self.load_adapters(first + plan.product_steps, piece, row, col)
            if t.shares_slot:
                self.load_residual(first + plan.product_steps, row, col)
            return carry + plan.steps

        self.ring.drain(steps_done)

    def load_step(self, first, i, row, col, group) -> None:
        """Copy step `i` of a tile, whose first step is the ring's step `first`."""
        plan, t = self.plan, self.plan.tiles
        w_share = _ROWS_AXIS if t.cluster[0] > 1 else None
        x_share = _COLS_AXIS if t.cluster[1] > 1 else None
        slot = self.ring.claim(first + i)
        full = self.memory.full.at[slot]
        k = (group * plan.product_steps + i) * t.k
        for start, size, offset in plan.weight_pieces:
            plgpu.copy_gmem_to_smem(
                self.operands.w.at[pl.ds(col + offset, size), pl.ds(k, t.k)],
                self.w_views[1].at[slot, pl.ds(start, size)],
                full,
                collective_axes=w_share,
            )
        for s in range(plan.slabs):
            columns = pl.ds(k + s * plan.span, plan.span)
            plgpu.copy_gmem_to_smem(
                self.operands.x.at[pl.ds(row, t.cta_rows), columns],
                self.x_views[1].at[slot, s],
                full,
                collective_axes=x_share,
            )
        if plan.block_rows:
            groups = pl.ds(lax.div(k, FLOAT8_CHUNK), plan.slabs)
            plgpu.copy_gmem_to_smem(
                self.operands.x_scales.at[groups, pl.ds(row, t.cta_rows)],
                self.memory.x_scales.at[slot],
                full,
                collective_axes=x_share,
            )

    def load_adapters(self, first, piece: int, row, col) -> None:
        """Copy a piece's adapters. Those of a tile begin with the ring's step `first`."""
        plan, t, adapters = self.plan, self.plan.tiles, self.operands.adapters
        assert adapters is not None
        start, size = plan.low_rank_pieces[piece]
        is_up = t.is_gated and start >= t.out_cols
        offset = plan.num_out - t.out_cols if is_up else 0
        w_share = _ROWS_AXIS if t.cluster[0] > 1 else None
        x_share = _COLS_AXIS if t.cluster[1] > 1 else None

        def step(i, _):
            slot = self.ring.claim(first + piece * plan.low_rank_steps + i)
            full = self.memory.full.at[slot]
            k = (i + (plan.low_rank_steps if is_up else 0)) * t.k
            plgpu.copy_gmem_to_smem(
                adapters.b.at[pl.ds(col + start + offset, size), pl.ds(k, t.k)],
                self.w_views[1].at[slot, pl.ds(start, size)],
                full,
                collective_axes=w_share,
            )
            for s in range(plan.slabs):
                plgpu.copy_gmem_to_smem(
                    adapters.h.at[pl.ds(row, t.cta_rows), pl.ds(k + s * plan.span, plan.span)],
                    self.x_views[1].at[slot, s],
                    full,
                    collective_axes=x_share,
                )
            for _ in range(len(plan.weight_pieces) - 1):
                plgpu.barrier_arrive(full)  # for each copy that a step of the product has beside
            return ()

        lax.fori_loop(0, plan.low_rank_steps, step, ())

    def load_residual(self, step, row, col) -> None:
        """Copy the residual stream of a tile into a slot of the ring, half as `x`, half as `w`."""
        plan = self.plan
        slot = self.ring.claim(step)
        halves = self.x_views[1].at[slot, 0], self.w_views[1].at[slot]
        for i, half in enumerate(halves):
            columns = pl.ds(col + i * plan.span, plan.span)
            plgpu.copy_gmem_to_smem(
                self.operands.residual.at[pl.ds(row, plan.tiles.cta_rows), columns],
                half,
                self.memory.full.at[slot],
            )

    # -------------------------------------------------------------- the warpgroups that multiply

    def compute(self) -> None:
        """Multiply, add and store this warpgroup's rows of all tiles."""
        plan, t, ring = self.plan, self.plan.tiles, self.ring
        if t.num_wgs > 1:
            REGISTERS[t.num_wgs].take()
        wg_rows = pl.ds(self.wg * WG_ROWS, WG_ROWS)
        if t.lag:
            # WHY: in step, both warpgroups would end a leaf or a tile at once and leave the
            # tensor core idle; the second starts `lag` steps late and stays behind.
            pl.when(self.wg == 1)(lambda: plgpu.barrier_wait(self.memory.started))

        @plgpu.nd_loop((plan.num_items,), collective_axes="cta", init_carry=jnp.int32(0))
        def steps_done(info, carry):
            row, col, group = self.locate(info.index[0])
            row = row + self.wg * WG_ROWS
            first = info.local_index * plan.steps
            if plan.has_residual and not t.shares_slot:
                self.fetch_residual(row, col)
            levels = plan.num_leaves.bit_length() - 1
            total = tree_sum(
                (WG_ROWS, t.cols),
                levels,
                plan.leaf_steps,
                functools.partial(self.leaf, wg_rows=wg_rows, col=col),
                first,
                pending=[
                    self.memory.pending.at[i, self.wg] for i in range(min(t.smem_levels, levels))
                ],
                is_paired=t.is_paired,
            )
            if self.operands.bias is not None and not plan.is_w8a8:
                total = add_bias(total, self.operands.bias, col, 1)
            if plan.low_rank:
                total = self.with_adapters(total, first + plan.product_steps, wg_rows)
            self.store(total, (row, col, group), first + plan.product_steps, wg_rows)
            return carry + plan.steps

        plgpu.wait_smem_to_gmem(0)
        if t.shares_slot:
            ring.release(steps_done - 1)

    def leaf(self, first, *, wg_rows, col):
        """The sum of a leaf, [64, cols] f32, whose first step is the ring's step `first`.

        Of blocks of 8-bit weights it is a tuple of columns. `col`: the first output.
        """
        plan, t, ring = self.plan, self.plan.tiles, self.ring
        x_smem, w_smem = self.x_views[0], self.w_views[0]

        def multiply(i, acc):
            slot = ring.slot(first + i)
            for s in range(plan.slabs):
                weights = w_smem.at[slot, :, pl.ds(s * plan.span, plan.span)]
                plgpu.wgmma(acc, x_smem.at[slot, s, wg_rows], weights.T)

        def multiply_chunk(i, chunk, acc):
            slot = ring.slot(first + i)
            weights = w_smem.at[slot, :, pl.ds(chunk * plan.span, plan.span)]
            plgpu.wgmma(acc, x_smem.at[slot, chunk, wg_rows], weights.T)

        def give(i):
            if plan.block_rows and plan.is_interpreted:
                # WHY: as in `sm90_flat_matmul`.
                plgpu.commit_smem()
            ring.release(first + i)

        if plan.operand_dtype == jnp.float8_e4m3fn:
            return chunked_sum(
                (WG_ROWS, t.cols),
                plan.leaf_steps,
                take=lambda i: ring.wait(first + i),
                multiply=multiply_chunk,
                give=give,
                num_chunks=plan.slabs,
                scales=self.chunk_scales(first, wg_rows, col) if plan.block_rows else None,
            )
        return leaf_sum(
            (WG_ROWS, t.cols),
            plan.leaf_steps,
            take=lambda i: ring.wait(first + i),
            multiply=multiply,
            give=give,
            in_flight=plan.slabs if t.shares_slot else 0,
            after=lambda i: self.after_step(first, i),
            dtype=jnp.int32 if plan.is_w8a8 else jnp.float32,
        )

    def with_adapters(self, total, first, wg_rows) -> list:
        """Add adapters to a sum [64, cols], from the ring's step `first` on; in pieces."""
        plan, ring = self.plan, self.ring
        found = []
        for start, size in plan.low_rank_pieces:

            def multiply(i, acc, first=first, start=start, size=size):
                slot = ring.slot(first + i)
                for s in range(plan.slabs):
                    columns = pl.ds(s * plan.span, plan.span)
                    weights = self.w_views[0].at[slot, pl.ds(start, size), columns]
                    plgpu.wgmma(acc, self.x_views[0].at[slot, s, wg_rows], weights.T)

            added = leaf_sum(
                (WG_ROWS, size),
                plan.low_rank_steps,
                take=lambda i, first=first: ring.wait(first + i),
                multiply=multiply,
                give=lambda i, first=first: ring.release(first + i),
                in_flight=0,
            )
            own = total[:, start : start + size]
            found.append(sm90_rows.add_unless_zero(own, added, self.math))
            first = first + plan.low_rank_steps
        return found

    def chunk_scales(self, first, wg_rows, col) -> ChunkScales:
        """Scales of a tile from output `col` on, whose first step is the ring's step `first`."""
        plan, t, width = self.plan, self.plan.tiles, self.plan.piece_cols
        # Of gates, and behind them of their ups.
        firsts = [
            offset + at for _, size, offset in plan.weight_pieces for at in range(0, size, width)
        ]

        def of_weights(i, j):
            blocks = [lax.div(col + it, plan.block_rows) for it in firsts]
            return [self.operands.w_scales[block, i * plan.slabs + j] for block in blocks]

        def of_rows(i, j):
            chunk = self.memory.x_scales.at[self.ring.slot(first + i), j, wg_rows]
            return load_vector(chunk, 0, is_interpreted=plan.is_interpreted)

        pieces = tuple((slice(None), slice(at, at + width)) for at in range(0, t.cols, width))
        return ChunkScales(
            of_weights=of_weights, of_rows=of_rows, axis=0, pieces=pieces,
            piece_shape=(WG_ROWS, width), math=self.math,
        )  # fmt: skip

    def after_step(self, first, i) -> None:
        """Start the second warpgroup; give back the slot through which the last tile left."""
        plan, t, step = self.plan, self.plan.tiles, first + i
        if t.lag:

            @pl.when((step == t.lag - 1) & (self.wg == 0))
            def _():
                plgpu.barrier_arrive(self.memory.started)

        if t.shares_slot:
            # The store of the last tile has read its slot by now: nobody waits for it.
            @pl.when((step > plan.steps) & (lax.rem(step, plan.steps) == 1))
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.ring.release(first + (i - 2))

    def fetch_residual(self, row, col) -> None:
        """Ask for the residual stream of 64 rows, to where their output will be staged."""
        chunk = self.plan.chunk
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, c in enumerate(range(0, self.plan.tiles.out_cols, chunk)):
            plgpu.copy_gmem_to_smem(
                self.operands.residual.at[pl.ds(row, WG_ROWS), pl.ds(col + c, chunk)],
                self.out_views[1].at[self.wg, i],
                self.memory.arrived.at[self.wg],
            )

    def store(self, total, place: tuple, last_step, wg_rows) -> None:
        """Add the residual stream to a sum [64, cols], or gate it, round it and store it.

        Args:
            total: The sum, float32.
            place: First row, first column and group of the output.
            last_step: The step of the ring whose slot the output may share.
            wg_rows: This warpgroup's rows of a CTA's.
        """
        plan, t = self.plan, self.plan.tiles
        row, col, group = place
        slot = self.ring.slot(last_step)
        if t.shares_slot:
            plgpu.barrier_wait(self.memory.full.at[slot])
        elif plan.has_residual:
            plgpu.barrier_wait(self.memory.arrived.at[self.wg])
        for i, c in enumerate(range(0, t.out_cols, plan.chunk)):
            reg, tma = self.staging(i, slot, wg_rows)
            block = self.outputs(total, c, row, col)
            if plan.has_residual:
                kept = plgpu.load(reg, layout=plgpu.Layout.WGMMA)
                block = kept.astype(jnp.float32) + block
            else:
                plgpu.wait_smem_to_gmem(plan.staged - 1, wait_read_only=True)
            reg[...] = block.astype(plan.out_dtype)  # ROUND: once, to the output's dtype
            plgpu.commit_smem()
            window = (pl.ds(row, WG_ROWS), pl.ds(col + c, plan.chunk))
            if t.groups > 1:
                window = (group, *window)
            plgpu.copy_smem_to_gmem(tma, self.out_gmem.at[window])

    def outputs(self, total, column: int, row, col):
        """A chunk of the outputs of an accumulator, gated if half of it are ups.

        Args:
            total: The accumulator [64, cols].
            column: Where the chunk begins in the accumulator.
            row: First row of the accumulator.
            col: First output of the accumulator.
        """
        t = self.plan.tiles
        block = self.piece(self.columns(total, column), row, col + column)
        if not t.is_gated:
            return block
        ups = self.columns(total, t.out_cols + column)
        ups = self.piece(ups, row, self.plan.num_out + col + column)
        return gated_bf16(block, ups, self.math)

    def columns(self, total, column: int):
        """A chunk of a sum, which is in pieces if blocks have scales or rows adapters."""
        if self.plan.block_rows:
            number, column = divmod(column, self.plan.piece_cols)
            total = total[number]
        if self.plan.low_rank:
            starts = [start for start, _ in self.plan.low_rank_pieces if start <= column]
            total, column = total[len(starts) - 1], column - starts[-1]
        return total[:, column : column + self.plan.chunk]

    def piece(self, sums, row, weight):
        """Sums [64, chunk] as float32; those of 8 bits scaled, from row `row` and `weight` on."""
        if not self.plan.is_w8a8:
            return sums
        operands, chunk = self.operands, self.plan.chunk
        if not self.plan.block_rows:
            w_scales = operands.w_scales.at[pl.ds(weight, chunk)]
            x_scales = operands.x_scales.at[pl.ds(row, WG_ROWS)]
            load = functools.partial(load_vector, is_interpreted=self.plan.is_interpreted)
            sums = scaled(sums, [(load(w_scales, 1), 1), (load(x_scales, 0), 0)], self.math)
        return sums if operands.bias is None else add_bias(sums, operands.bias, weight, 1)

    @property
    def math(self) -> sm90_rows.Arithmetic:
        """On accumulators."""
        return sm90_rows.Arithmetic(
            layout=plgpu.Layout.WGMMA, is_interpreted=self.plan.is_interpreted
        )

    def staging(self, i: int, slot, wg_rows) -> tuple:
        """Where chunk `i` of a tile waits for its store, as threads and as TMA see it."""
        if not self.plan.tiles.shares_slot:
            reg, tma = (view.at[self.wg, i % self.plan.staged] for view in self.out_views)
        elif i == 0:
            reg, tma = (view.at[slot, 0, wg_rows] for view in self.x_views)
        else:
            reg, tma = (view.at[slot, wg_rows] for view in self.w_views)
        return reg, tma


def _memory_types(plan: _Plan) -> _Memory:
    t = plan.tiles
    axes = tuple(
        axis for axis, size in zip((_ROWS_AXIS, _COLS_AXIS), t.cluster, strict=True) if size > 1
    )
    barriers = {"num_arrivals": t.num_wgs, "num_barriers": t.stages}
    shares, dtype = t.shares_slot, plan.operand_dtype
    out_shape = (t.num_wgs, plan.staged, WG_ROWS, plan.chunk)
    pending = plgpu.SMEM(
        (t.smem_levels, t.num_wgs, WG_ROWS, t.cols), jnp.float32, transforms=tiled(32, jnp.float32)
    )
    return _Memory(
        x=ragged(
            (t.stages, plan.slabs, t.cta_rows, plan.span), plan.span, dtype, plan.is_ragged
        ),
        x_scales=plgpu.SMEM((t.stages, plan.slabs, t.cta_rows), jnp.float32)
        if plan.block_rows else None,
        w=ragged((t.stages, t.cols, t.k), plan.span, dtype, plan.is_ragged and shares),
        out=plgpu.SMEM((8, plan.chunk), plan.out_dtype) if shares
        else ragged(out_shape, plan.chunk, plan.out_dtype, plan.is_ragged),
        pending=pending if t.smem_levels else None,
        full=plgpu.Barrier(
            num_arrivals=len(plan.weight_pieces) + plan.slabs + bool(plan.block_rows),
            num_barriers=t.stages,
        ),
        empty=plgpu.ClusterBarrier(collective_axes=axes, **barriers) if axes
        else plgpu.Barrier(**barriers),
        arrived=plgpu.Barrier(
            num_arrivals=t.num_chunks(plan.out_bytes), num_barriers=t.num_wgs
        ) if plan.has_residual and not shares else None,
        started=plgpu.Barrier() if t.lag else None,
    )  # fmt: skip


def tall_matmul(
    x, w, bias, residual, adapters: LowRankRows | None, *,
    leaf_len: int, out_dtype, tiles: TallTiles, interpret,
) -> jax.Array:  # fmt: skip
    """See `sm90_matmul.matmul`."""
    block_rows = block_rows_of(w)
    x, w, x_scales, w_scales = operands_of(x, w)
    num_rows, k_len = x.shape
    plan = _Plan(
        tiles=tiles, num_rows=num_rows, num_out=w.shape[0] // (2 if tiles.is_gated else 1),
        k_len=k_len, leaf_len=leaf_len, operand_dtype=x.dtype, out_dtype=jnp.dtype(out_dtype),
        has_residual=residual is not None, block_rows=block_rows,
        low_rank=adapters.h.shape[1] if adapters else 0, is_interpreted=interpret is not None,
    )  # fmt: skip
    plan.check(bias)

    def body(operands: _Operands, out_gmem, memory: _Memory):
        cta = _Cta(
            plan=plan, operands=operands, out_gmem=out_gmem, memory=memory,
            wg=lax.axis_index("wg"),
        )  # fmt: skip
        cta.run()

    shape = (num_rows, plan.num_out)
    cluster_size = math.prod(tiles.cluster)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (tiles.groups, *shape) if tiles.groups > 1 else shape, out_dtype
        ),
        scratch_types=[_memory_types(plan)],
        grid=(min(plan.num_items, NUM_SMS // cluster_size),),
        grid_names=("cta",),
        cluster=tiles.cluster if cluster_size > 1 else (),
        cluster_names=(_ROWS_AXIS, _COLS_AXIS) if cluster_size > 1 else (),
        num_threads=tiles.num_wgs + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        kernel_name="detjax_linear_swiglu" if tiles.is_gated else "detjax_linear",
        interpret=interpret,
    )(
        _Operands(
            x=x, w=w, bias=bias, residual=residual, adapters=adapters, x_scales=x_scales,
            w_scales=w_scales,
        )
    )  # fmt: skip
