# SPDX-License-Identifier: Apache-2.0
"""Grouped products on Hopper: tiles of one expert's rows, from a list made on the device.

The ring, the sum of a leaf and the gated epilogue are those of `linear`. A persistent grid of CTAs
walks tiles of rows and of weights. Few rows are the N operand of wgmma beside 64 weights, many are
the 64-row one. A tile that is not full multiplies its neighbours' rows too and never stores them.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.quantized import (
    FLOAT8_CHUNK,
    RowsToQuantize,
    W8A8Matrix,
    block_rows_of,
    operands_of,
)
from detjax.pallas_kernels.linear.sm90_held_rows import held_block
from detjax.pallas_kernels.linear.sm90_quantize_rows import WideSums, quantize_wide_rows
from detjax.pallas_kernels.linear.sm90_sums import (
    COMPILER_PARAMS,
    ChunkScales,
    add_bias,
    chunked_sum,
    leaf_sum,
    load_from_any,
    load_vector,
    put_column,
    put_transposed,
    scaled,
    tiled,
    views,
)
from detjax.pallas_kernels.linear.tiles import OperandType
from detjax.pallas_kernels.moe import sm90_lanes as lanes
from detjax.pallas_kernels.moe.sm90_route import find_experts, route_rows
from detjax.pallas_kernels.moe.sm90_schedule import (
    COUNT,
    EXPERT,
    START,
    GroupedWork,
    few_memory,
    local_ids,
    schedule_few,
    work_shapes,
)
from detjax.pallas_kernels.moe.sm90_tiles import SCALE_ALIGNMENT, GroupedTiles
from detjax.pallas_kernels.rms_norm.sm90 import WideRows
from detjax.pallas_kernels.sm90_hardware import NUM_SMS, SPAN
from detjax.pallas_kernels.sm90_ptx import read_now
from detjax.pallas_kernels.sm90_registers import RegisterShares
from detjax.pallas_kernels.sm90_ring import Ring
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.pallas_kernels.swiglu.sm90 import gated_bf16


@dataclass(frozen=True, kw_only=True, slots=True)
class Few:
    """How a product of few rows lists its tiles.

    Attributes:
        top_k: Experts of a row.
        routes: Whether it is given the router's logits, else ids and the first expert here.
        renormalise: See `api.route`.
        has_shared: Whether one row has an expert more, the last, as every row has it.
    """

    top_k: int
    routes: bool = False
    renormalise: bool = False
    has_shared: bool = False


def _rows_block(shape, is_interpreted: bool, dtype=jnp.bfloat16):
    """Rows of a swizzle span to multiply or fill, and the same memory as TMA must see it.

    # WHY: a TMA block tiled by 8 rows begins at a multiple of 8 rows. One swizzle span wide, it has
    the same bytes tiled by 1 row, and then it may begin at any row and have any number.
    """
    if is_interpreted:  # There the two of a union are apart.
        return plgpu.SMEM(shape, dtype)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=tiled(shape[-1], dtype)),
        plgpu.SMEM(shape, dtype, transforms=tiled(shape[-1], dtype, sublanes=1)),
    )


def _store_rows(staged, block, out_gmem, start, count, most: int, cols) -> None:
    """Store the first `count` of at most `most` rows, by powers of two, as boxes are static."""
    done, size = 0, 1 << (most.bit_length() - 1)
    while size:
        is_stored = (count & size) != 0 if size < most else count >= size

        @pl.when(is_stored)
        def _(done=done, size=size):
            plgpu.copy_smem_to_gmem(
                staged.at[*block, pl.ds(done, size)],
                out_gmem.at[pl.ds(start + done, size), cols],
                commit_group=False,
            )

        done = done + jnp.where(is_stored, jnp.int32(size), jnp.int32(0))
        size //= 2
    plgpu.commit_smem_to_gmem_group()


class _Operands(NamedTuple):
    """Arrays in device memory; None where the product has none."""

    x: Any  # [S, K] bf16 or of 8 bits, sorted; [M, K] where every CTA makes the list of tiles
    w: Any  # [e, N, K], likewise; [e, 2 F, K] if gated, F rows of gates and F of ups
    x_scales: Any = None  # [> S] f32, of 8 bits; [K / 128, >= S] with blocks
    w_scales: Any = None  # [e, N] f32, of 8 bits; [e, N / block_rows, K / 128] of blocks
    work: Any = None  # `GroupedWork`: the list of tiles
    logits: Any = None  # [M, e] f32, of the router
    ids: Any = None  # [S] int32, the expert of each slot
    first_expert: Any = None  # [1] int32
    bias: Any = None  # [e, N], or [e, 2 F] if gated
    coding: Any = None  # `RowCoding` of rows that every CTA quantises
    shared: Any = None  # [N, K], or [2 F, K] if gated: of the expert that every row has
    shared_scales: Any = None  # as `w_scales`, of that one


class _Results(NamedTuple):
    """Arrays in device memory; None where the product makes none."""

    out: Any  # [S, N] bf16
    work: Any = None  # `GroupedWork`: the list of tiles
    ids: Any = None  # [M, k] int32
    weights: Any = None  # [M, k] f32


class _Memory(NamedTuple):
    """Shared memory of a CTA, and its barriers; None where the product has none."""

    x: Any  # [stages, slabs, tile_rows, span] bf16 or of 8 bits; held: [steps, slabs, 8, span]
    x_scales: Any  # [stages, slabs, scale_rows] f32, of blocks; held: [K / 128, 8], or [8] of rows
    peaks: Any  # [rows, 1, 4] f32, of rows that are held with one scale each
    w: Any  # [stages, cta_weights, k] bf16 or of 8 bits
    out: Any  # [num_wgs, cols, wg_out] bf16 if swapped, else [num_wgs, 2, 64, SPAN]; not of one row
    zeros: Any  # [256] bf16
    work: Any  # `GroupedWork`: the list of tiles
    experts: Any  # [k] int32, of one row
    few: Any  # of `schedule_few`
    full: Any  # [stages]
    empty: Any  # [stages]
    listed: Any  # the list of tiles is made


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The numbers of a launch.

    Attributes:
        tiles: How it is cut.
        num_rows: Rows of `x`.
        num_local: Experts here.
        num_out: N.
        k_len: K.
        few: How the kernel makes the list of its tiles; None if it is given one.
        num_ranks: Of one row, whose list is the shared expert if there is one, then each rank:
            rank r is slot r, and the shared expert has the last one. 0 for other lists.
        by_slot: Whether the output's rows lie in order of slot.
        writes_zeros: Whether slots of experts that are not here get zeros.
        block_rows: Outputs that share a scale, if blocks of 8-bit weights do; else 0.
        is_interpreted: Whether a CPU interprets the kernel.
        clamp: Of the gated epilogue, or None.
    """

    tiles: GroupedTiles
    num_rows: int
    num_local: int
    num_out: int
    k_len: int
    few: Few | None
    num_ranks: int
    by_slot: bool
    writes_zeros: bool
    block_rows: int
    is_interpreted: bool
    clamp: SwigluClamp | None

    @property
    def operand_dtype(self) -> jnp.dtype:
        """Of rows and weights."""
        return self.tiles.operands.dtype

    @property
    def is_w8a8(self) -> bool:
        """Whether operands have 8 bits, and their sums are scaled."""
        return self.operand_dtype.itemsize == 1

    @property
    def routes_row(self) -> bool:
        """Whether the experts of one row are chosen here."""
        return self.num_ranks > 0 and self.few is not None

    @property
    def makes_list(self) -> bool:
        """Whether every CTA makes the list of tiles, which it then reads in shared memory."""
        return self.few is not None and not self.num_ranks

    @property
    def num_slots(self) -> int:
        """Rows of the output."""
        return self.num_rows * (self.few.top_k + self.few.has_shared if self.few else 1)

    @property
    def places_rows(self) -> bool:
        """Whether rows of a tile are stored one by one, each to its place."""
        return self.makes_list or self.by_slot

    @property
    def steps(self) -> int:
        """Steps of the ring in a tile."""
        return self.k_len // self.tiles.k

    @property
    def slabs(self) -> int:
        """Slabs of a swizzle span in a step."""
        return self.tiles.k // self.tiles.span

    @property
    def col_tiles(self) -> int:
        """Tiles of the outputs of a row."""
        return self.num_out // self.tiles.out_cols

    @property
    def wg_out(self) -> int:
        """Outputs of a warpgroup."""
        t = self.tiles
        return t.out_cols // t.num_wgs if t.is_swapped else t.out_cols

    @property
    def work_shapes(self) -> GroupedWork:
        """Shapes of the list of tiles."""
        return work_shapes(self.num_slots, self.num_local, self.tiles.tile_rows)

    @property
    def num_shared(self) -> int:
        """1 if the first entry of one row's list is the shared expert, else 0."""
        return int(0 < self.num_ranks < self.num_slots)

    @property
    def num_ctas(self) -> int:
        """CTAs of the persistent grid."""
        entries = self.num_shared + self.num_ranks or self.work_shapes.tiles.shape[1]
        return min(NUM_SMS, entries * self.col_tiles)

    @property
    def holds_turns(self) -> bool:
        """Whether a CTA holds a row for each of its turns; else all rows, if any."""
        return self.tiles.held > 0 and self.num_ranks > 0 and self.few is None

    @property
    def num_held(self) -> int:
        """Rows that a CTA holds, where it holds any."""
        if not self.holds_turns:
            return self.num_rows
        return one_row_turns(self.num_shared + self.num_ranks, self.col_tiles)

    @property
    def has_register_shares(self) -> bool:
        """Whether registers move from the warpgroup that loads to those that multiply."""
        return self.tiles.num_wgs > 1 and self.few is None

    @property
    def registers(self) -> RegisterShares:
        """How many each has then."""
        return RegisterShares(computing=232, loading=40, num_computing=self.tiles.num_wgs)

    @property
    def weight_pieces(self) -> list[tuple[int, int, int]]:
        """Rows of a stage of weights, how many, and where they lie from the tile's first weight."""
        t, half = self.tiles, self.wg_out
        if not t.is_gated:
            return [(0, t.cta_weights, 0)]
        return [
            (2 * start + i * half, half, start + i * self.num_out)
            for start in range(0, t.out_cols, half)
            for i in range(2)
        ]

    @property
    def pieces(self) -> tuple:
        """Parts of an accumulator with 64 weights each: gates first, their ups behind them."""
        t = self.tiles
        if t.is_swapped:
            return tuple(slice(at, at + SPAN) for at in range(0, t.wg_rows, SPAN))
        return tuple((slice(None), slice(at, at + SPAN)) for at in range(0, t.cols, SPAN))

    @property
    def piece_weights(self) -> list[int]:
        """The first weight of each, from the first output of a warpgroup on."""
        t = self.tiles
        firsts = range(0, self.wg_out, SPAN)
        return [it + i * self.num_out for i in range(2 if t.is_gated else 1) for it in firsts]

    def check(self, dtype: jnp.dtype) -> None:
        """Refuse products of a dtype that these tiles do not divide, or do not place."""
        t = self.tiles
        if (self.block_rows > 0) != (t.operands is OperandType.FLOAT8_BLOCKS):
            raise ValueError(f"{t.operands=} do not go with {self.block_rows=}")
        if dtype != self.operand_dtype:
            raise ValueError(f"{t.operands=} do not go with {dtype=}")
        if t.held not in (0, self.k_len):
            raise ValueError(f"{t.held=} must be K={self.k_len}, or 0")
        if t.held and (self.num_held > 8 or not (self.few or self.num_ranks)):
            raise ValueError(f"all rows of a CTA are held, 8 at most, not {self.num_held}")
        if self.block_rows % SPAN:
            raise ValueError(f"{self.block_rows=} must be a multiple of {SPAN}")
        if self.k_len % t.k:
            raise ValueError(f"{t.k=} must divide K={self.k_len}")
        if self.num_out % t.out_cols:
            raise ValueError(f"{t.out_cols=} must divide N={self.num_out}")
        if self.routes_row and self.num_rows != 1:
            raise ValueError(f"{self.num_rows=} must be one row")
        if self.num_ranks and not (t.is_swapped and t.num_wgs == 1):
            raise ValueError(f"one warpgroup multiplies one row, not {t.num_wgs=}, {t.is_swapped=}")
        if self.places_rows and not t.is_swapped:
            raise ValueError("rows are placed one by one only by swapped tiles")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cta:
    """What the warpgroups of a CTA do."""

    plan: _Plan
    operands: _Operands
    results: _Results
    memory: _Memory
    wg: Any
    cta: Any

    @property
    def ring(self) -> Ring:
        return Ring(
            full=self.memory.full,
            empty=self.memory.empty,
            num_slots=self.plan.tiles.stages,
        )

    @property
    def x_views(self) -> tuple:
        """The rows in shared memory as wgmma and as TMA see them."""
        return views(self.memory.x, not (self.plan.is_interpreted or self.plan.tiles.held))

    @property
    def out_views(self) -> tuple:
        """The staged output as threads and as TMA see it."""
        return views(self.memory.out, not self.plan.is_interpreted)

    @property
    def work(self) -> GroupedWork:
        """The list of tiles."""
        return self.memory.work if self.plan.makes_list else self.operands.work

    @property
    def experts(self):
        """The expert of each rank of one row."""
        return self.memory.experts if self.plan.few else self.operands.ids

    def num_turns(self):
        """Tiles that this CTA takes."""
        plan = self.plan
        if plan.num_ranks:
            num_tiles = jnp.int32(plan.num_shared + plan.num_ranks)
        else:
            num_tiles = self.work.num_tiles[0]
        items = num_tiles * plan.col_tiles
        return lax.div(items - self.cta + (plan.num_ctas - 1), jnp.int32(plan.num_ctas))

    def locate(self, turn):
        """The entry of the list, and the first output of the tile."""
        item, col_tiles = (
            turn * self.plan.num_ctas + self.cta,
            jnp.int32(self.plan.col_tiles),
        )
        entry = lax.div(item, col_tiles)
        return entry, lax.rem(item, col_tiles) * self.plan.tiles.out_cols

    def expert_of(self, entry):
        """The expert of a tile; of the shared one the number of those here."""
        if not self.plan.num_ranks:
            return self.work.tiles[EXPERT, entry]
        if not self.plan.num_shared:
            return self.experts[entry]
        own = self.experts[jnp.maximum(entry - 1, 0)]
        return jnp.where(entry == 0, self.plan.num_local, own)

    def rows_of(self, entry):
        """First sorted row of a tile, and how many."""
        num_shared, num_ranks = self.plan.num_shared, self.plan.num_ranks
        if num_ranks:
            rank = entry - num_shared
            return jnp.where(rank < 0, num_ranks, rank), jnp.int32(1)
        return self.work.tiles[START, entry], self.work.tiles[COUNT, entry]

    def run(self) -> None:
        """All warpgroups; which one it is decides what it does."""
        num_wgs = self.plan.tiles.num_wgs
        pl.when(self.wg < num_wgs)(self.compute)
        pl.when(self.wg == num_wgs)(self.load)

    # -------------------------------------------------------------- the warpgroups that multiply

    def compute(self) -> None:
        """Multiply and store the tiles of this CTA."""
        if self.plan.has_register_shares:
            self.plan.registers.take()
        if self.plan.tiles.held:
            self.quantize()
        if self.plan.routes_row:
            # WHY, here: this warpgroup has nothing to multiply yet, and the other one loads.
            pl.when(self.cta == self.plan.num_ctas - 1)(self.route_into)
        if self.plan.makes_list:
            plgpu.barrier_wait(self.memory.listed)
        one_tile = self.flat_tile if self.plan.tiles.is_swapped else self.tall_tile

        def one_turn(turn, _):
            entry, col = self.locate(turn)
            start, count = self.rows_of(entry)
            one_tile(turn, start, count, col, entry)
            return ()

        lax.fori_loop(0, self.num_turns(), one_turn, ())
        plgpu.wait_smem_to_gmem(0)

    def quantize(self) -> None:
        """Put its rows as 8-bit values into shared memory, while the weights stream in."""
        plan, memory = self.plan, self.memory
        sources = list(range(plan.num_held))
        if plan.holds_turns:
            slots = [self.rows_of(self.locate(turn)[0])[0] for turn in sources]
            sources = [jnp.minimum(slot, plan.num_rows - 1) for slot in slots]

        def read(row, columns, math):
            return math.load(self.operands.x.at[sources[row], columns])

        def store(values, row, start, math):
            sm90_rows.store_in_slabs(memory.x, values, row, start, math)

        source = WideRows(
            width=plan.k_len, dtype=self.operands.x.dtype, read=read, store=store,
            keep=lambda *_: None, ready=lambda: None, arrived=lambda: None, is_read_again=False,
        )  # fmt: skip
        sums = WideSums(squares=None, peaks=memory.peaks, scales=memory.x_scales)
        quantize_wide_rows(
            source, None, self.operands.coding, list(range(plan.num_held)), sums,
            eps=0.0, is_interpreted=plan.is_interpreted,
        )  # fmt: skip
        plgpu.commit_smem()

    def flat_tile(self, turn, start, count, col, entry) -> None:
        """A tile whose rows are the N operand."""
        slots, row = self.slots_of(start), jnp.int32(0) if self.plan.few else start
        total = self.product(turn * self.plan.steps, entry, row, col)
        pieces = self.with_biases(list(total), entry, lambda: self.first_output(col), 0)
        out = self.gated(*pieces) if self.plan.tiles.is_gated else pieces[0]
        if self.plan.num_ranks:
            self.store_one(out, turn, start, col)
        else:
            self.store_flat(out, start, count, col, slots)

    def tall_tile(self, turn, start, count, col, entry) -> None:
        """A tile of 64 rows a warpgroup; one without rows gives back its steps of the ring."""
        mine, first = jnp.clip(count - self.wg * 64, 0, 64), turn * self.plan.steps

        @pl.when(mine > 0)
        def _():
            total = self.product(first, entry, start, col)
            self.store_tall(total, start + self.wg * 64, mine, col, entry)

        @pl.when(mine == 0)
        def _():
            def pass_over(i, _):
                self.ring.wait(first + i)
                self.ring.release(first + i)
                return ()

            lax.fori_loop(0, self.plan.steps, pass_over, ())

    def product(self, first, entry, row, col) -> tuple:
        """The accumulator of a tile, [wg_rows, cols] f32, in `_Plan.pieces`.

        Args:
            first: Its first step of the ring.
            entry: Of the list.
            row: The first of its rows in `x`.
            col: Its first output.
        """
        plan, t, ring = self.plan, self.plan.tiles, self.ring
        x_smem, w_smem = self.x_views[0], self.memory.w

        def multiply_slab(i, s, acc):
            slot = ring.slot(first + i)
            wg_rows = pl.ds(self.wg * t.wg_rows, t.wg_rows)
            k = pl.ds(s * t.span, t.span)
            if t.is_swapped:
                rows = x_smem.at[i if t.held else slot, s]
                plgpu.wgmma(acc, w_smem.at[slot, wg_rows, k], rows.T)
            else:
                plgpu.wgmma(acc, x_smem.at[slot, s, wg_rows], w_smem.at[slot, :, k].T)

        def multiply(i, acc):
            for s in range(plan.slabs):
                multiply_slab(i, s, acc)

        def give(i):
            if plan.block_rows and plan.is_interpreted:
                # WHY: as in `linear.sm90_flat_matmul`.
                plgpu.commit_smem()
            ring.release(first + i)

        row_scales = self.row_scales(row)
        shape, take = (t.wg_rows, t.cols), lambda i: ring.wait(first + i)
        if plan.operand_dtype == jnp.float8_e4m3fn:
            total = chunked_sum(
                shape, plan.steps, take=take, multiply=multiply_slab, give=give,
                num_chunks=plan.slabs,
                scales=self.chunk_scales(first, entry, row, col) if plan.block_rows else None,
            )  # fmt: skip
        else:
            total = leaf_sum(
                shape, plan.steps, take=take, multiply=multiply, give=give,
                in_flight=t.delay * plan.slabs,
                dtype=jnp.int32 if plan.is_w8a8 else jnp.float32,
            )  # fmt: skip
        if plan.block_rows:
            return total
        pieces = tuple(total[piece] for piece in plan.pieces)
        return self.scaled(pieces, row_scales, entry, col) if plan.is_w8a8 else pieces

    @property
    def math(self) -> sm90_rows.Arithmetic:
        """On accumulators."""
        return sm90_rows.Arithmetic(
            layout=plgpu.Layout.WGMMA, is_interpreted=self.plan.is_interpreted
        )

    @property
    def row_axis(self) -> int:
        """The axis of an accumulator along which rows lie."""
        return 1 if self.plan.tiles.is_swapped else 0

    @property
    def wg_first(self):
        """A warpgroup's first row of a tile, and how many it has."""
        t = self.plan.tiles
        return (0, t.cols) if t.is_swapped else (self.wg * t.wg_rows, t.wg_rows)

    def first_output(self, col):
        """A warpgroup's first output of a tile from output `col` on."""
        return col + self.wg * self.plan.wg_out if self.plan.tiles.is_swapped else col

    def row_scales(self, row):
        """Scales of a warpgroup's rows, read ahead of their product; None if chunks have them."""
        plan, (first, size) = self.plan, self.wg_first
        if not plan.is_w8a8 or plan.block_rows:
            return None
        if plan.tiles.held:
            return load_vector(
                self.memory.x_scales, self.row_axis, is_interpreted=plan.is_interpreted
            )
        return load_from_any(
            self.operands.x_scales, row + first, size, self.row_axis,
            is_interpreted=plan.is_interpreted,
        )  # fmt: skip

    def scaled(self, pieces: tuple, row_scales, entry, col) -> tuple:
        """Sums of 8-bit values times the scales of weights, then those of rows.

        # WHY, behind the product: as in `with_biases`.
        """
        axis, col, found = 1 - self.row_axis, self.first_output(col), []
        for piece, weight in zip(pieces, self.plan.piece_weights, strict=True):
            scales = self.weight_scales(self.expert_of(entry), pl.ds(col + weight, SPAN), axis)
            found.append(scaled(piece, [(scales, axis), (row_scales, self.row_axis)], self.math))
        return tuple(found)

    def weight_scales(self, expert, outputs, axis: int):
        """Scales of a tile's weights, of its expert or of the shared one."""
        load = functools.partial(load_vector, axis=axis, is_interpreted=self.plan.is_interpreted)
        if self.operands.shared is None:
            return load(self.operands.w_scales.at[expert, outputs])
        last = self.plan.num_local - 1
        own = load(self.operands.w_scales.at[jnp.minimum(expert, last), outputs])
        # Exact: one of the factors is 1, and the other 0.
        is_shared = (expert > last).astype(jnp.float32)
        return own * (1.0 - is_shared) + load(self.operands.shared_scales.at[outputs]) * is_shared

    def block_scale(self, expert, block, chunk):
        """The scale of a block of weights and a chunk of K, likewise."""
        if self.operands.shared is None:
            return self.operands.w_scales[expert, block, chunk]
        last = self.plan.num_local - 1
        own = self.operands.w_scales[jnp.minimum(expert, last), block, chunk]
        return jnp.where(expert > last, self.operands.shared_scales[block, chunk], own)

    def chunk_scales(self, first, entry, row, col) -> ChunkScales:
        """Scales of a tile: what the arguments are says `product`.

        # WHY, late: as in `with_biases`.
        """
        plan, t, axis = self.plan, self.plan.tiles, self.row_axis
        col, (wg_row, num_rows) = self.first_output(col), self.wg_first
        place = wg_row + lax.rem(row, jnp.int32(SCALE_ALIGNMENT))

        def of_weights(i, j):
            expert = self.expert_of(entry)
            blocks = [lax.div(col + it, plan.block_rows) for it in plan.piece_weights]
            return [self.block_scale(expert, b, i * plan.slabs + j) for b in blocks]

        def of_rows(i, j):
            if t.held:
                chunk = self.memory.x_scales.at[i * plan.slabs + j]
                return load_vector(chunk, axis, is_interpreted=plan.is_interpreted)
            chunk = self.memory.x_scales.at[self.ring.slot(first + i), j]
            return load_from_any(chunk, place, num_rows, axis, is_interpreted=plan.is_interpreted)

        return ChunkScales(
            of_weights=of_weights, of_rows=of_rows, axis=axis, pieces=plan.pieces,
            piece_shape=(SPAN, t.cols) if t.is_swapped else (t.wg_rows, SPAN), math=self.math,
            is_late=plan.routes_row,
        )  # fmt: skip

    def slots_of(self, start) -> list:
        """Slots of a tile's rows, read ahead of its product, as each would wait for memory."""
        plan = self.plan
        if not plan.places_rows:
            return []
        places = [jnp.minimum(start + i, plan.num_slots - 1) for i in range(plan.tiles.cols)]
        if plan.makes_list:
            return [self.work.order[place] for place in places]
        return [read_now(self.work.order, p, is_interpreted=plan.is_interpreted) for p in places]

    def with_biases(self, pieces: list, entry, first: Callable[[], Any], axis: int) -> list:
        """A sum, or gates and ups, with the biases of a tile's expert, if it has any.

        Outputs from `first()` lie along `axis`.

        # WHY: behind the product. Where the warpgroup that loads chose a row's experts, the barrier
        # of their first step is what makes its choice seen.
        """
        bias = self.operands.bias
        if bias is None:
            return pieces
        own, start = bias.at[self.expert_of(entry)], first()
        return [
            add_bias(piece, own, start + i * self.plan.num_out, axis)
            for i, piece in enumerate(pieces)
        ]

    def gated(self, gates, ups):
        """SwiGLU of two accumulators, in bfloat16."""
        return gated_bf16(gates, ups, self.math, self.plan.clamp)

    def store_one(self, out, turn, slot, col) -> None:
        """Store outputs of one row from registers."""
        plan = self.plan
        column = turn if plan.holds_turns else jnp.int32(0)
        target = self.results.out.at[slot, pl.ds(col, plan.wg_out)]
        put_column(out.astype(target.dtype), column, target, self.math)  # ROUND: once

    def store_flat(self, out, start, count, col, slots: list) -> None:
        """Store a transposed accumulator: its rows in sorted order, or each at its place."""
        plan, t, (out_smem, out_tma) = self.plan, self.plan.tiles, self.out_views
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        put_transposed(out, out_smem.at[self.wg])
        cols = pl.ds(col + self.wg * plan.wg_out, plan.wg_out)
        if not plan.places_rows:
            _store_rows(out_tma, (self.wg,), self.results.out, start, count, t.cols, cols)
            return
        for i, slot in enumerate(slots):
            if plan.few is None:
                source, row = i, slot
            else:
                source, row = lax.div(slot, jnp.int32(plan.few.top_k)), start + i

            @pl.when(i < count)
            def _(source=source, row=row):
                plgpu.copy_smem_to_gmem(
                    out_tma.at[self.wg, pl.ds(source, 1)],
                    self.results.out.at[pl.ds(row, 1), cols],
                    commit_group=False,
                )

        plgpu.commit_smem_to_gmem_group()

    def store_tall(self, total, start, count, col, entry) -> None:
        """Store the first `count` rows of an accumulator."""
        t, (out_smem, out_tma) = self.plan.tiles, self.out_views
        for i, c in enumerate(range(0, t.out_cols, SPAN)):
            pieces = [total[i]]
            if t.is_gated:
                pieces.append(total[len(total) // 2 + i])
            pieces = self.with_biases(pieces, entry, lambda c=c: col + c, 1)
            block = self.gated(*pieces) if t.is_gated else pieces[0]
            staged = (self.wg, i % 2)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            out_smem.at[*staged][...] = block.astype(jnp.bfloat16)  # ROUND: once
            plgpu.commit_smem()
            _store_rows(
                out_tma,
                staged,
                self.results.out,
                start,
                count,
                64,
                pl.ds(col + c, SPAN),
            )

    # ------------------------------------------------------------------ the warpgroup that loads

    def load(self) -> None:
        """Make the list of tiles if none is given, then fill the ring with their steps."""
        plan = self.plan
        if plan.has_register_shares:
            plan.registers.give()
        if plan.makes_list:
            self.make_list()

        turns, early = self.num_turns(), jnp.int32(0)
        if plan.routes_row:
            last = self.locate(turns - 1)[0] - plan.num_shared  # The last rank of this CTA.
            if plan.num_shared:
                # The ring fills with the shared expert's weights before the others are chosen.
                is_shared = self.locate(0)[0] == 0
                early = jnp.where(is_shared, min(plan.steps, plan.tiles.stages), 0)
                self.load_tile(0, 0, early)
            find_experts(
                self.operands.logits, last, self.memory.experts,
                num_experts=plan.num_local, is_interpreted=plan.is_interpreted,
            )  # fmt: skip

        def one_turn(turn, _):
            self.load_tile(turn, jnp.where(turn == 0, early, 0), plan.steps)
            return ()

        lax.fori_loop(0, turns, one_turn, ())
        if plan.writes_zeros:
            self.write_zeros()
        if plan.makes_list:
            pl.when(self.cta == 0)(self.write_list)
        self.ring.drain(turns * plan.steps)

    def load_tile(self, turn, start, stop) -> None:
        """Copy steps `start` to `stop` of a tile."""
        entry, col = self.locate(turn)
        expert = self.expert_of(entry)
        row = jnp.int32(0) if self.plan.few else self.rows_of(entry)[0]
        first = turn * self.plan.steps

        def step(i, _):
            self.load_step(first, i, expert, row, col)
            return ()

        lax.fori_loop(start, stop, step, ())

    def load_step(self, first, i, expert, row, col) -> None:
        """Copy step `i` of a tile, whose first step is the ring's step `first`."""
        plan, k_step = self.plan, self.plan.tiles.k
        slot = self.ring.claim(first + i)
        full = self.memory.full.at[slot]

        def load_weights(w) -> None:
            for piece, size, offset in plan.weight_pieces:
                plgpu.copy_gmem_to_smem(
                    w.at[pl.ds(col + offset, size), pl.ds(i * k_step, k_step)],
                    self.memory.w.at[slot, pl.ds(piece, size)],
                    full,
                )

        if plan.num_shared:
            is_shared = expert == plan.num_local
            pl.when(is_shared)(lambda: load_weights(self.operands.shared))
            pl.when(~is_shared)(lambda: load_weights(self.operands.w.at[expert]))
        else:
            load_weights(self.operands.w.at[expert])
        for s in range(0 if plan.tiles.held else plan.slabs):
            plgpu.copy_gmem_to_smem(
                self.operands.x.at[
                    pl.ds(row, plan.tiles.tile_rows),
                    pl.ds(i * k_step + s * plan.tiles.span, plan.tiles.span),
                ],
                self.x_views[1].at[slot, s],
                full,
            )
        if plan.block_rows and not plan.tiles.held:
            # WHY: TMA reads from a multiple of 16 bytes on, also with a tensor's coordinates.
            begin = row - lax.rem(row, jnp.int32(SCALE_ALIGNMENT))
            groups = pl.ds(i * plan.slabs, plan.slabs)
            plgpu.copy_gmem_to_smem(
                self.operands.x_scales.at[groups, pl.ds(begin, plan.tiles.scale_rows)],
                self.memory.x_scales.at[slot],
                full,
            )

    def make_list(self) -> None:
        """List the tiles of few rows in shared memory."""
        plan = self.plan
        schedule_few(
            self.put_ids, plan.num_slots, self.work, self.memory.few,
            tile_rows=plan.tiles.tile_rows, is_interpreted=plan.is_interpreted,
        )  # fmt: skip
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.listed)

    def put_ids(self, ids_smem, math) -> None:
        """The experts of all slots, in shared memory."""
        operands, plan = self.operands, self.plan
        assert plan.few is not None
        if not plan.few.routes:
            ids_smem[...] = local_ids(
                operands.ids, 0, operands.first_expert[0], plan.num_local, math
            )
            return
        ids_smem[...] = math.full((sm90_rows.LANES,), -1, jnp.int32)
        plgpu.commit_smem()
        self.route_into(ids_smem)

    def route_into(self, ids_smem=None) -> None:
        """Choose the experts of all rows; one CTA keeps them and their weights."""
        plan, few = self.plan, self.plan.few
        assert few is not None
        route_rows(
            self.operands.logits, 0, (self.results.ids, self.results.weights), ids_smem,
            num_rows=plan.num_rows, is_kept=None if plan.routes_row else self.cta == 0,
            num_experts=plan.num_local, top_k=few.top_k, renormalise=few.renormalise,
            is_interpreted=plan.is_interpreted,
        )  # fmt: skip

    def write_list(self) -> None:
        """Copy the list of tiles to device memory, for launches to come."""
        copy = functools.partial(lanes.copy, is_interpreted=self.plan.is_interpreted)
        for i in range(3):
            copy(self.work.tiles.at[i], self.results.work.tiles.at[i])
        copy(self.work.num_tiles, self.results.work.num_tiles)
        copy(self.work.order, self.results.work.order)

    def write_zeros(self) -> None:
        """Zeros for the slots of experts that are not here."""
        plan, zeros_smem = self.plan, self.memory.zeros
        first_expert = self.operands.first_expert[0]
        span = next(s for s in (256, 128, 64) if plan.num_out % s == 0)
        zeros_smem[...] = jnp.zeros(zeros_smem.shape, zeros_smem.dtype)
        plgpu.commit_smem()

        def one_slot(turn, _):
            slot = turn * plan.num_ctas + self.cta
            expert = self.operands.ids[slot] - first_expert

            @pl.when((expert < 0) | (expert >= plan.num_local))
            def _():
                for c in range(0, plan.num_out, span):
                    plgpu.copy_smem_to_gmem(
                        zeros_smem.at[pl.ds(0, span)],
                        self.results.out.at[slot, pl.ds(c, span)],
                    )

            return ()

        turns = lax.div(plan.num_slots - self.cta + (plan.num_ctas - 1), jnp.int32(plan.num_ctas))
        lax.fori_loop(0, turns, one_slot, ())
        plgpu.wait_smem_to_gmem(0)


def _memory_types(plan: _Plan) -> _Memory:
    t = plan.tiles
    dtype = plan.operand_dtype
    out_shape = (t.num_wgs, t.cols, plan.wg_out) if t.is_swapped else (t.num_wgs, 2, 64, SPAN)
    x_shape = (t.stages, plan.slabs, t.tile_rows, t.span)
    work = jax.tree.map(lambda s: plgpu.SMEM(s.shape, s.dtype), plan.work_shapes)
    copies = len(plan.weight_pieces) + (0 if t.held else plan.slabs + bool(plan.block_rows))
    if t.held:
        x = held_block(plan.steps, plan.slabs, dtype, as_one_box=False)
        scales = (plan.k_len // FLOAT8_CHUNK, 8) if plan.block_rows else (8,)
    else:
        x = _rows_block(x_shape, plan.is_interpreted, dtype)
        scales = (t.stages, plan.slabs, t.scale_rows) if plan.block_rows else None
    has_peaks = t.held and not plan.block_rows
    return _Memory(
        x=x,
        x_scales=plgpu.SMEM(scales, jnp.float32) if scales else None,
        peaks=plgpu.SMEM((plan.num_held, 1, 4), jnp.float32) if has_peaks else None,
        w=plgpu.SMEM((t.stages, t.cta_weights, t.k), dtype, transforms=tiled(t.span, dtype)),
        out=None if plan.num_ranks else _rows_block(out_shape, plan.is_interpreted),
        zeros=plgpu.SMEM((256,), jnp.bfloat16) if plan.writes_zeros else None,
        work=work if plan.makes_list else None,
        experts=plgpu.SMEM((plan.num_ranks,), jnp.int32) if plan.routes_row else None,
        few=few_memory(plan.num_local) if plan.makes_list else None,
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=t.stages),
        empty=plgpu.Barrier(num_arrivals=t.num_wgs, num_barriers=t.stages),
        listed=plgpu.Barrier() if plan.makes_list else None,
    )


def _grouped(
    operands: _Operands, *, tiles: GroupedTiles, by_slot: bool = False, few: Few | None = None,
    num_ranks: int = 0, clamp: SwigluClamp | None = None, interpret,
) -> _Results:  # fmt: skip
    """Launch the kernel; what the arguments are says `_Plan`."""
    block_rows = block_rows_of(operands.w)
    dtype, coding = operands.x.dtype, None
    if isinstance(operands.x, RowsToQuantize):
        coding = operands.x.coding
        if coding.scale is not None:
            coding = dataclasses.replace(coding, scale=coding.scale.reshape(1))
    x, w, x_scales, w_scales = operands_of(operands.x, operands.w)
    shared, shared_scales = operands.shared, None
    if isinstance(shared, W8A8Matrix):
        shared, shared_scales = shared.values, shared.scales
    operands = operands._replace(
        x=x, w=w, x_scales=x_scales, w_scales=w_scales, coding=coding, shared=shared,
        shared_scales=shared_scales,
    )  # fmt: skip
    num_rows, k_len = operands.x.shape
    num_local, num_weights, _ = operands.w.shape
    plan = _Plan(
        tiles=tiles, num_rows=num_rows, num_local=num_local,
        num_out=num_weights // (2 if tiles.is_gated else 1), k_len=k_len, few=few,
        num_ranks=num_ranks, by_slot=by_slot,
        writes_zeros=by_slot and operands.first_expert is not None, block_rows=block_rows,
        is_interpreted=interpret is not None, clamp=clamp,
    )  # fmt: skip
    plan.check(dtype)
    if operands.shared is not None and not num_ranks:
        raise ValueError("only one row meets a shared expert beside its own")

    def body(operands: _Operands, results: _Results, memory: _Memory):
        cta = _Cta(
            plan=plan, operands=operands, results=results, memory=memory,
            wg=lax.axis_index("wg"), cta=lax.axis_index("cta"),
        )  # fmt: skip
        cta.run()

    results = _Results(
        out=jax.ShapeDtypeStruct((plan.num_slots, plan.num_out), jnp.bfloat16),
        work=plan.work_shapes if plan.makes_list else None,
    )
    if few is not None and few.routes:
        results = results._replace(
            ids=jax.ShapeDtypeStruct((num_rows, few.top_k), jnp.int32),
            weights=jax.ShapeDtypeStruct((num_rows, few.top_k), jnp.float32),
        )
    [made] = plgpu.kernel(
        body,
        out_type=[results],
        scratch_types=[_memory_types(plan)],
        grid=(plan.num_ctas,),
        grid_names=("cta",),
        num_threads=tiles.num_wgs + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        kernel_name="detjax_experts_gate_up" if tiles.is_gated else "detjax_experts_down",
        interpret=interpret,
    )(operands)
    return made


@functools.partial(jax.jit, static_argnames=("tiles", "by_slot", "clamp", "interpret"))
def grouped_matmul(
    x, w, work: GroupedWork, ids=None, first_expert=None, bias=None, *,
    tiles: GroupedTiles, by_slot: bool, clamp: SwigluClamp | None = None, interpret=None,
) -> jax.Array:  # fmt: skip
    """Multiply each expert's sorted rows with its weights: `round(x W^T)`, gated if tiles are.

    Args:
        x: Sorted rows, [S, K], bfloat16 or `QuantizedRows`.
        w: [e, N, K], or [e, 2 F, K]: F rows of gates, then F of ups; of quantised rows a
            `W8A8Matrix` of blocks.
        work: Of `sort_rows`, for tiles of `tiles.tile_rows`.
        ids: int32 [S], the expert of each slot; None if every expert is here.
        first_expert: int32 [1], the first expert here; with ids.
        bias: [e, N] or [e, 2 F], added last; None adds none.
        tiles: How to cut it; changes no bit.
        by_slot: Whether the output's rows lie in order of slot, and those of experts that are not
            here are zeros. Else in sorted order.
        clamp: Of the gates and ups, if so.
        interpret: How to interpret it, if so.

    Numerics:
        # ORDER: k16 block by k16 block in one f32 wgmma accumulator that starts at zero; of float8
        as `sm90_w8a8.w8a8_product`.
        # ROUND: as `linear`, or as `linear_swiglu`.
    """
    operands = _Operands(x=x, w=w, work=work, ids=ids, first_expert=first_expert, bias=bias)
    return _grouped(operands, tiles=tiles, by_slot=by_slot, clamp=clamp, interpret=interpret).out


def one_row_turns(num_entries: int, col_tiles: int) -> int:
    """Most tiles of a CTA of `one_row_matmul`, of so many experts."""
    return -(-num_entries * col_tiles // NUM_SMS)


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def one_row_matmul(
    x, w, ids, bias=None, shared=None, *, tiles: GroupedTiles, interpret=None
) -> jax.Array:
    """`grouped_matmul` of a row's experts, in order of rank: row r of `x` by expert `ids[r]`.

    Args:
        x: A row an expert, [k, K]; one more with `shared`.
        w: As for `grouped_matmul`, of every expert.
        ids: int32 [k], all different.
        bias: As for `grouped_matmul`.
        shared: [N, K] as a matrix of `w`, which the last row meets; None if there is no such row.
        tiles: Swapped, with 8 columns.
        interpret: How to interpret it, if so.
    """
    operands = _Operands(x=x, w=w, ids=ids, bias=bias, shared=shared)
    return _grouped(operands, tiles=tiles, num_ranks=len(ids), interpret=interpret).out


@functools.partial(jax.jit, static_argnames=("top_k", "renormalise", "tiles", "clamp", "interpret"))
def routed_matmul_one(
    x,
    w,
    logits,
    bias=None,
    shared=None,
    *,
    top_k: int,
    renormalise: bool,
    tiles: GroupedTiles,
    clamp: SwigluClamp | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`routed_matmul_few` of one row, in order of rank: no list is made, as none is needed.

    Args:
        x: A row, [1, K].
        w: As for `grouped_matmul`, of every expert.
        logits: float32 [1, e], or wider: what is behind the experts' is not read.
        bias: As for `grouped_matmul`.
        shared: [2 F, K] as a matrix of `w`, of the expert that every row has; None without one.
        top_k: Experts of the row.
        renormalise: Whether its weights add up to 1.
        tiles: Swapped, with 8 columns.
        clamp: As for `grouped_matmul`.
        interpret: How to interpret it, if so.

    Returns:
        The rows of outputs, [k, N], with `shared` one more, and the ids and weights of `route`,
        [1, k].
    """
    has_shared = shared is not None
    few = Few(top_k=top_k, routes=True, renormalise=renormalise, has_shared=has_shared)
    operands = _Operands(x=x, w=w, logits=logits, bias=bias, shared=shared)
    made = _grouped(
        operands, tiles=tiles, few=few, num_ranks=top_k, clamp=clamp, interpret=interpret
    )
    return made.out, made.ids, made.weights


@functools.partial(jax.jit, static_argnames=("tiles", "clamp", "interpret"))
def grouped_matmul_few(
    x,
    w,
    expert_ids,
    first_expert,
    bias=None,
    *,
    tiles: GroupedTiles,
    clamp: SwigluClamp | None = None,
    interpret=None,
) -> tuple[jax.Array, GroupedWork]:
    """`sort_rows` and `grouped_matmul` of at most 8 rows and LANES slots in one launch.

    Every CTA lists the tiles itself. Every row is multiplied with every expert that has any, as
    the N operand has 8 rows in any case, and only the pairs that were asked for are stored.

    Args:
        x: Rows, [M, K].
        w: As for `grouped_matmul`.
        expert_ids: int32 [M, k].
        first_expert: int32 [1].
        bias: As for `grouped_matmul`.
        tiles: Swapped, with 8 columns.
        clamp: Likewise.
        interpret: How to interpret it, if so.

    Returns:
        The sorted rows of outputs, and the list.
    """
    ids = expert_ids.reshape(-1)
    operands = _Operands(x=x, w=w, ids=ids, first_expert=first_expert, bias=bias)
    few = Few(top_k=expert_ids.shape[1])
    made = _grouped(operands, tiles=tiles, few=few, clamp=clamp, interpret=interpret)
    return made.out, made.work


@functools.partial(jax.jit, static_argnames=("top_k", "renormalise", "tiles", "clamp", "interpret"))
def routed_matmul_few(
    x,
    w,
    logits,
    bias=None,
    *,
    top_k: int,
    renormalise: bool,
    tiles: GroupedTiles,
    clamp: SwigluClamp | None = None,
    interpret=None,
) -> tuple[jax.Array, GroupedWork, jax.Array, jax.Array]:
    """`grouped_matmul_few` of all experts, and `route` before it in the same launch.

    Args:
        x: Rows, [M, K].
        w: As for `grouped_matmul`, of every expert.
        logits: float32 [M, e], or wider: columns behind the experts' are not read.
        bias: As for `grouped_matmul`.
        top_k: Experts of a row.
        renormalise: Whether its weights add up to 1.
        tiles: Swapped, with 8 columns.
        clamp: As for `grouped_matmul`.
        interpret: How to interpret it, if so.

    Returns:
        The sorted rows of outputs, the list, and the ids and weights of `route`.

    Numerics:
        The instructions of `route` in every CTA, so its bits.
    """
    few = Few(top_k=top_k, routes=True, renormalise=renormalise)
    operands = _Operands(x=x, w=w, logits=logits, bias=bias)
    made = _grouped(operands, tiles=tiles, few=few, clamp=clamp, interpret=interpret)
    return made.out, made.work, made.ids, made.weights
