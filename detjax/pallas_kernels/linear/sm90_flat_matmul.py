# SPDX-License-Identifier: Apache-2.0
"""A product of few activations on Hopper: 64 rows of weights meet 8 to 256 activations.

The weights are all the traffic. A persistent grid of CTAs streams them through a ring of shared
memory, filled by one warpgroup and multiplied by the others. The weights may be codes of 4 or 8
bits, which become bfloat16 on their way to the tensor core (`sm90_widen`). Up to 8 activations may
be normalised first, in the same launch, and held whole in shared memory. The sums of the leaves of
K are added as a tree in registers. The epilogue adds the subtrees of other ranks, the bias, the
product of rows' adapters and the residual stream, or gates, and stores the transposed tile.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.joined import JoinedMatrix
from detjax.pallas_kernels.linear.quantized import (
    BLOCK,
    FLOAT8_CHUNK,
    WORDS_PER_LINE,
    Coding,
    QuantizedMatrix,
    RowCoding,
    block_rows_of,
    operands_of,
)
from detjax.pallas_kernels.linear.sm90_held_rows import (
    copy_rows,
    held_block,
    num_copies,
)
from detjax.pallas_kernels.linear.sm90_quantize_rows import WideSums, quantize_wide_rows
from detjax.pallas_kernels.linear.sm90_sums import (
    COMPILER_PARAMS,
    TILE_SNAKE,
    ChunkScales,
    add_bias,
    chunked_sum,
    leaf_sum,
    load_from_any,
    load_vector,
    put_transposed,
    ragged,
    scaled,
    tree_sum,
    views,
)
from detjax.pallas_kernels.linear.sm90_widen import ROW_LAYOUT, widen, words_layout
from detjax.pallas_kernels.linear.tiles import WG_ROWS, FlatTiles, held_chunk
from detjax.pallas_kernels.lora.adapted import LowRankRows
from detjax.pallas_kernels.rms_norm.sm90 import WideRows, normalise_wide_rows
from detjax.pallas_kernels.sm90_cache_hints import evict_first
from detjax.pallas_kernels.sm90_hardware import NUM_SMS
from detjax.pallas_kernels.sm90_registers import RegisterShares
from detjax.pallas_kernels.sm90_ring import Ring
from detjax.pallas_kernels.swiglu.sm90 import gated_bf16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class InputNorm:
    """What a product does to its activations first, by the instructions of `rms_norm`.

    Attributes:
        gain: [K], of the norm; None for rows that are only quantised.
        terms: Arrays to add to the activations before they are normalised.
        coding: How they are quantised then; None if they are not.
        eps: Added to the mean square.
        read_row: `read_row(x_gmem, terms_gmem, row, columns, math)` gives channels of the sum,
            rounded; None without terms.
        keeps_rows: Whether the normalised rows are a result of the product too.
    """

    gain: Any
    terms: tuple = ()
    coding: RowCoding | None = None
    eps: float = field(metadata={"static": True})
    read_row: Callable | None = field(default=None, metadata={"static": True})
    keeps_rows: bool = field(default=False, metadata={"static": True})

    def __post_init__(self):
        """Refuse terms that nothing reads, and rows that nothing keeps."""
        if (self.read_row is None) != (not self.terms):
            raise ValueError("terms are added to rows that are normalised, by `read_row`")
        if self.coding is not None and self.keeps_rows:
            raise ValueError("rows that are quantised are not kept")


@runtime_checkable
class Ranks(Protocol):
    """Adds what other ranks have of a tile's sum, before its bias. Hashed by what it does."""

    def begin(self, memory: tuple, tile) -> tuple:
        """Read what `add` needs of `memory`, early; a tile is a number."""
        ...

    def add(self, total, memory: tuple, tile, begun: tuple, *, num_cols: int) -> Any:
        """The ranks' sum of a warpgroup's float32 accumulator [64, n].

        The first `num_cols` columns count. The order of additions is the caller's affair.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class RanksSum:
    """The ranks whose subtrees a product adds to its own.

    Attributes:
        memory: Arrays that `ranks` reads and writes.
        ranks: Adds them.
    """

    memory: tuple
    ranks: Ranks = field(metadata={"static": True})


type Fused = InputNorm | RanksSum | LowRankRows
"""What a product does beside multiplying; one of them at most."""


class _Operands(NamedTuple):
    """Arrays in device memory; None where the product has none."""

    x: Any  # [M, K] bf16 or of 8 bits
    w: Any  # [N, K] bf16, of 8 bits or codes; [2 F, K] if gated, F rows of gates and F of ups
    bias: Any  # [N]
    residual: Any  # [M, N], of the output's dtype
    norm: InputNorm | None
    peers: RanksSum | None
    adapters: LowRankRows | None = None
    x_scales: Any = None  # [> M] f32, of 8-bit activations; [K / 128, >= M] with blocks
    w_scales: Any = None  # [N] f32, of 8-bit weights; [N / block_rows, K / 128] of blocks
    w_below: Any = None  # [O, K] bf16: the rows below those of `w`


class _Results(NamedTuple):
    """Arrays in device memory."""

    out: Any  # [M, N], or [groups, M, N] where CTAs share a tile's leaves
    total: Any  # [M, K] bf16, the activations with their terms; else None
    normed: Any  # [M, K] bf16, the same normalised; else None


class _CodedStages(NamedTuple):
    """Shared memory of quantised weights, a block of 64 rows after the other."""

    codes: Any  # [stages, blocks, k / 64, lines, 256] int32
    scales: Any  # [stages, blocks, groups, 64]
    zeros: Any  # the like, bf16; None without zero points
    widened: Any  # [num_wgs, blocks of a warpgroup, 64, 64] bf16, for interpretation; else None


class _Memory(NamedTuple):
    """Shared memory of a CTA, and its barriers; None where the product has none."""

    x: Any  # [stages, slabs, cols, span] bf16 or of 8 bits; held: [steps, slabs, 8, span]
    x_scales: Any  # [stages, slabs, scale_cols] f32, of chunks; held: [chunks, 8], or [8] of rows
    w: Any  # [stages, num_wgs * rows, k] bf16 or of 8 bits, or _CodedStages
    out: Any  # [num_wgs, cols, out_rows], of the output's dtype
    squares: Any  # [sharers, rows_each, chunks, 4] f32
    peaks: Any  # [sharers, rows_each, 1, 4] f32, of rows that are quantised
    full: Any  # [stages]
    empty: Any  # [stages]
    arrived: Any  # [num_wgs]: the residual is there
    held: Any  # the activations are normalised
    rows_read: Any  # the activations are there


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The numbers of a launch.

    Attributes:
        tiles: How it is cut.
        num_rows: M.
        num_out: N, with `num_below` all of them.
        num_below: Outputs whose weights are in an array of their own, the last; 0 without.
        k_len: K.
        leaf_len: Of a leaf of K.
        operand_dtype: Of activations: bfloat16, int8 or float8_e4m3fn.
        out_dtype: Of the output.
        has_residual: Whether the residual stream is added.
        block_rows: Outputs that share a scale, if blocks of 8-bit weights do; else 0.
        low_rank: Columns of the adapters of rows; 0 without.
        is_interpreted: Whether a CPU interprets the kernel.
    """

    tiles: FlatTiles
    num_rows: int
    num_out: int
    num_below: int
    k_len: int
    leaf_len: int
    operand_dtype: jnp.dtype
    out_dtype: jnp.dtype
    has_residual: bool
    block_rows: int
    low_rank: int
    is_interpreted: bool

    @property
    def num_leaves(self) -> int:
        """Leaves of a tile: a CTA's share of the tree's."""
        return self.k_len // self.leaf_len // self.tiles.groups

    @property
    def num_low_rank_pieces(self) -> int:
        """Parts of a warpgroup's outputs whose adapters lie in columns of their own."""
        return 2 if self.tiles.is_gated else 1

    @property
    def low_rank_steps(self) -> int:
        """Steps of the ring with the adapters of a piece."""
        return self.low_rank // self.num_low_rank_pieces // self.tiles.k

    @property
    def adds_apart(self) -> bool:
        """Whether the adapters' product is a tile of its own, as CTAs share a tile's leaves."""
        return self.low_rank > 0 and self.tiles.groups > 1

    @property
    def num_terms(self) -> int:
        """Sums of each output that CTAs leave."""
        return self.tiles.groups + self.adds_apart

    @property
    def leaf_steps(self) -> int:
        """Steps of the ring in a leaf."""
        return self.leaf_len // self.tiles.k

    @property
    def steps(self) -> int:
        """Steps of the ring in a tile."""
        return self.leaf_steps * self.num_leaves

    @property
    def span(self) -> int:
        """Columns of a slab: one swizzle span of activations."""
        return min(128 // self.operand_dtype.itemsize, self.tiles.k)

    @property
    def slabs(self) -> int:
        """Slabs of a step."""
        return self.tiles.k // self.span

    @property
    def cta_out_rows(self) -> int:
        """Outputs of a CTA for each activation."""
        return self.tiles.out_rows * self.tiles.num_wgs

    @property
    def row_tiles(self) -> int:
        """Tiles of weights."""
        return pl.cdiv(self.num_out, self.cta_out_rows)

    @property
    def col_tiles(self) -> int:
        """Tiles of activations."""
        return pl.cdiv(self.num_rows, self.tiles.cols)

    @property
    def num_products(self) -> int:
        """Tiles of the product, each as often as CTAs share its leaves."""
        return self.row_tiles * self.col_tiles * self.tiles.groups

    @property
    def num_items(self) -> int:
        """Tiles of all CTAs: those of the product, then those of adapters alone."""
        return self.row_tiles * self.col_tiles * self.num_terms

    @property
    def is_ragged(self) -> bool:
        """Whether TMA must see blocks of activations tiled by 1 row (`ragged`)."""
        return self.num_rows > 8 and self.num_rows % 8 != 0

    @property
    def is_out_tiled(self) -> bool:
        """Whether the staged output is tiled and swizzled."""
        return self.out_dtype == jnp.bfloat16 or not self.is_ragged

    @property
    def is_one_box(self) -> bool:
        """Whether TMA brings all held rows at once; interpretation has no two views of memory."""
        held = self.tiles.held
        return held is not None and held.copies_rows and not self.is_interpreted

    @property
    def num_sharers(self) -> int:
        """Warpgroups that normalise rows."""
        return self.tiles.num_wgs + (self.tiles.held.helpers if self.tiles.held else 0)

    @property
    def rows_each(self) -> int:
        """Rows that each of them normalises."""
        return pl.cdiv(self.num_rows, self.num_sharers)

    @property
    def has_register_shares(self) -> bool:
        """Whether registers move from the warpgroup that loads to those that multiply."""
        return self.tiles.ctas_per_sm == 1 and self.tiles.num_wgs > 1 and not self.tiles.held

    @property
    def registers(self) -> RegisterShares:
        """How many each has then."""
        return RegisterShares(computing=240, loading=24, num_computing=self.tiles.num_wgs)

    @property
    def weight_pieces(self) -> list[tuple[int, int, int]]:
        """Rows of a stage of weights, how many, and where they lie from the tile's first weight."""
        t = self.tiles
        if not t.is_gated:
            return [(0, t.live_rows or t.rows * t.num_wgs, 0)]
        return [
            (2 * start + i * t.out_rows, t.out_rows, start + i * self.num_out)
            for start in range(0, t.out_rows * t.num_wgs, t.out_rows)
            for i in range(2)
        ]

    @property
    def code_blocks(self) -> list[tuple[int, int]]:
        """Blocks of 64 rows of quantised weights: their number in a stage, and as the pieces."""
        return [
            ((start + row) // BLOCK, offset + row)
            for start, size, offset in self.weight_pieces
            for row in range(0, size, BLOCK)
        ]

    @property
    def weight_copies(self) -> int:
        """Copies that bring a stage of weights."""
        if self.tiles.coding is None:
            return len(self.weight_pieces)
        return len(self.code_blocks) * (3 if self.tiles.coding.has_zeros else 2)

    @property
    def is_w8a8(self) -> bool:
        """Whether operands have 8 bits, and their sums are scaled."""
        return self.operand_dtype.itemsize == 1

    @property
    def pieces(self) -> tuple:
        """Parts of a warpgroup's accumulator with 64 weights each."""
        return tuple(slice(at, at + WG_ROWS) for at in range(0, self.tiles.rows, WG_ROWS))

    def check(self, bias, norm: InputNorm | None, peers: RanksSum | None) -> None:
        """Refuse operands that these tiles do not take."""
        t = self.tiles
        channels = t.held.channels if t.held else 0
        if bias is not None and self.num_out % t.rows:
            raise ValueError(f"{t=} must divide N={self.num_out}, because there is a bias")
        if self.has_residual and t.groups > 1:
            raise ValueError("a residual is added in the epilogue of unsplit tiles only")
        if self.low_rank and (t.held or t.coding or self.is_w8a8 or self.has_residual or peers):
            raise ValueError(f"adapters are added to plain sums of rows that stream, not by {t=}")
        if self.low_rank % (self.num_low_rank_pieces * t.k):
            raise ValueError(f"{t.k=} must divide the adapters' columns, {self.low_rank}")
        if channels != (0 if norm is None else self.k_len):
            raise ValueError(f"held {channels=} must be K={self.k_len} with a gain, else 0")
        if norm is not None and self.num_rows > 8:
            raise ValueError(f"a product normalises at most 8 rows, not {self.num_rows}")
        if t.held is not None and t.held.copies_rows:
            if norm is not None and (norm.terms or norm.keeps_rows):
                raise ValueError("rows that are copied are not sums of terms, and are not kept")
            if self.num_sharers * self.rows_each > 8:
                raise ValueError(
                    f"{self.num_sharers=} of {self.rows_each=} would take more than the 8 rows held"
                )
        if t.held is not None and t.held.dtype != self.operand_dtype:
            raise ValueError(f"{t.held.dtype} rows are held, and {self.operand_dtype} multiplied")
        if self.operand_dtype == jnp.float8_e4m3fn and self.span != FLOAT8_CHUNK:
            raise ValueError(f"float8 is added by chunks of {FLOAT8_CHUNK}, so {t.k=} must be more")
        if self.is_w8a8 and (self.num_leaves * t.groups > 1 or self.num_out % self.cta_out_rows):
            raise ValueError(f"{t} must take all of K, and divide N={self.num_out}")
        if t.num_wgs > 1 and self.num_out <= t.out_rows:
            raise ValueError(f"N={self.num_out} leaves the second warpgroup of {t} without outputs")
        num_above = self.num_out - self.num_below
        if self.num_below and (t.is_gated or t.coding or num_above % self.cta_out_rows):
            raise ValueError(f"{num_above} weights above others must be whole tiles of {t}")
        is_whole = t.num_wgs == 1 and t.groups == 1 and self.col_tiles == 1 and not t.is_gated
        if peers is not None and not is_whole:
            raise ValueError(f"ranks add tiles that one CTA has, with all rows, not {t=}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cta:
    """What the warpgroups of a CTA do."""

    plan: _Plan
    operands: _Operands
    results: _Results
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
        return views(self.memory.x, self.plan.is_ragged or self.plan.is_one_box)

    @property
    def out_views(self) -> tuple:
        """The staged output as threads and as TMA see it."""
        return views(self.memory.out, self.plan.is_ragged and self.plan.is_out_tiled)

    def locate(self, item):
        """First weight and first activation of a tile, and its group of leaves or term."""
        plan, t = self.plan, self.plan.tiles
        group = jnp.int32(0)
        if t.groups > 1:
            behind = item - plan.num_products
            group, item = lax.rem(item, t.groups), lax.div(item, t.groups)
            if plan.adds_apart:
                group = jnp.where(behind < 0, group, t.groups)
                item = jnp.where(behind < 0, item, behind)
        row, col = item, jnp.int32(0)
        if plan.col_tiles > 1:
            row, col = plgpu.planar_snake(item, (plan.row_tiles, plan.col_tiles), 1, TILE_SNAKE)
        return row * (t.out_rows * t.num_wgs), col * t.cols, group

    def run(self) -> None:
        """All warpgroups; which one it is decides what it does."""
        t = self.plan.tiles
        if self.plan.col_tiles == 1:
            w = self.operands.w
            weights = w.codes if isinstance(w, QuantizedMatrix) else w
            evict_first(weights, is_interpreted=self.plan.is_interpreted)
        if t.held:
            pl.when(self.wg != t.num_wgs)(self.normalise)
        pl.when(self.wg < t.num_wgs)(self.compute)
        pl.when(self.wg == t.num_wgs)(self.load)

    # ------------------------------------------------------------------ the warpgroup that loads

    def load(self) -> None:
        """Fill the ring with the steps of all tiles."""
        plan, t = self.plan, self.plan.tiles
        if plan.has_register_shares:
            plan.registers.give()
        if t.held and t.held.copies_rows:
            # WHY: before any weights, behind which they would come.
            copy_rows(
                self.operands.x, self.x_views[1], self.memory.rows_read, as_one_box=plan.is_one_box
            )

        @plgpu.nd_loop((plan.num_items,), collective_axes="cta", init_carry=jnp.int32(0))
        def steps_done(info, carry):
            place = self.locate(info.index[0])
            num_steps, num_added = self.steps_of(info.index[0])
            begin = self.first_step(info, carry)

            def step(i, _):
                self.load_step(begin, i, *place)
                return ()

            lax.fori_loop(0, num_steps, step, ())
            for piece in range(plan.num_low_rank_pieces if plan.low_rank else 0):
                first = begin + num_steps + piece * num_added

                def added_step(i, _, first=first, piece=piece):
                    self.load_adapters(first, i, piece, *place[:2])
                    return ()

                lax.fori_loop(0, num_added, added_step, ())
            return carry + num_steps + plan.num_low_rank_pieces * num_added

        self.ring.drain(steps_done)

    def first_step(self, info, steps_done):
        """The ring's step with which a tile begins; tiles have as many, if none is apart."""
        plan = self.plan
        if plan.adds_apart:
            return steps_done
        return info.local_index * (plan.steps + plan.num_low_rank_pieces * plan.low_rank_steps)

    def steps_of(self, item) -> tuple:
        """Steps of the ring of a tile: those of its product, and of its adapters for each piece."""
        plan = self.plan
        num_added = plan.low_rank_steps if plan.low_rank else 0
        if not plan.adds_apart:
            return plan.steps, num_added
        is_product = item < plan.num_products
        return jnp.where(is_product, plan.steps, 0), jnp.where(is_product, 0, num_added)

    def load_adapters(self, first, i, piece: int, w_row, x_row) -> None:
        """Copy step `i` of a piece's adapters, whose first step is the ring's step `first`."""
        plan, t, adapters = self.plan, self.plan.tiles, self.operands.adapters
        assert adapters is not None
        slot = self.ring.claim(first + i)
        full = self.memory.full.at[slot]
        k = (piece * plan.low_rank_steps + i) * t.k
        places = plan.weight_pieces[piece :: plan.num_low_rank_pieces]
        for start, size, offset in places:
            plgpu.copy_gmem_to_smem(
                adapters.b.at[pl.ds(w_row + offset, size), pl.ds(k, t.k)],
                self.memory.w.at[slot, pl.ds(start, size)],
                full,
            )
        for s in range(plan.slabs):
            plgpu.copy_gmem_to_smem(
                adapters.h.at[pl.ds(x_row, t.cols), pl.ds(k + s * plan.span, plan.span)],
                self.x_views[1].at[slot, s],
                full,
            )
        for _ in range(len(plan.weight_pieces) - len(places)):
            plgpu.barrier_arrive(full)  # for each copy that a step of the product has beside

    def load_step(self, first, i, w_row, x_row, group) -> None:
        """Copy step `i` of a tile, whose first step is the ring's step `first`."""
        plan, t = self.plan, self.plan.tiles
        if t.held and t.held.early_stages:
            # WHY: rows that were asked for behind a whole ring come behind it.
            pl.when(first + i == t.held.early_stages)(
                lambda: plgpu.barrier_wait(self.memory.rows_read)
            )
        slot = self.ring.claim(first + i)
        full = self.memory.full.at[slot]
        k = (group * plan.steps + i) * t.k
        if t.coding:
            self.load_codes(t.coding, slot, k, w_row, full)

        def load_weights(w, row) -> None:
            for start, size, offset in plan.weight_pieces:
                plgpu.copy_gmem_to_smem(
                    w.at[pl.ds(row + offset, size), pl.ds(k, t.k)],
                    self.memory.w.at[slot, pl.ds(start, size)],
                    full,
                )

        if plan.num_below:
            below = w_row - (plan.num_out - plan.num_below)
            pl.when(below < 0)(lambda: load_weights(self.operands.w, w_row))
            pl.when(below >= 0)(lambda: load_weights(self.operands.w_below, below))
        elif not t.coding:
            load_weights(self.operands.w, w_row)
        for s in range(0 if t.held else plan.slabs):
            plgpu.copy_gmem_to_smem(
                self.operands.x.at[pl.ds(x_row, t.cols), pl.ds(k + s * plan.span, plan.span)],
                self.x_views[1].at[slot, s],
                full,
            )
        if plan.block_rows and not t.held:
            groups = pl.ds(lax.div(k, FLOAT8_CHUNK), plan.slabs)
            plgpu.copy_gmem_to_smem(
                self.operands.x_scales.at[groups, pl.ds(x_row, t.scale_cols)],
                self.memory.x_scales.at[slot],
                full,
            )

    def load_codes(self, coding: Coding, slot, k, w_row, full) -> None:
        """Copy codes from column `k` and row `w_row` on, with their scales and zero points."""
        w, stages, depth = self.operands.w, self.memory.w, self.plan.tiles.k
        group = lax.div(k, coding.group_len) if coding.group_len else 0
        groups = pl.ds(group, coding.groups_of(depth))
        for block, offset in self.plan.code_blocks:
            row = w_row + offset
            blocks = (lax.div(row, BLOCK), pl.ds(lax.div(k, BLOCK), depth // BLOCK))
            plgpu.copy_gmem_to_smem(w.codes.at[blocks], stages.codes.at[slot, block], full)
            of_rows = (groups, pl.ds(row, BLOCK))
            plgpu.copy_gmem_to_smem(w.scales.at[of_rows], stages.scales.at[slot, block], full)
            if coding.has_zeros:
                plgpu.copy_gmem_to_smem(w.zeros.at[of_rows], stages.zeros.at[slot, block], full)

    # ------------------------------------------------------------- the warpgroups that normalise

    def normalise(self) -> None:
        """Put this warpgroup's share of the normalised activations into shared memory.

        Meanwhile the weights stream in. Of 8 rows those past M hold whatever was there: they are
        columns of the product that are never stored.
        """
        plan, norm, memory = self.plan, self.operands.norm, self.memory
        assert plan.tiles.held is not None and norm is not None
        share = self.wg - (self.wg > plan.tiles.num_wgs).astype(jnp.int32)
        # WHY: in place a row has one warpgroup, as another would read what is normalised already.
        first = share * plan.rows_each
        last = 7 if plan.tiles.held.copies_rows else plan.num_rows - 1
        # Shares that do not divide M end with its last row, written more than once, alike.
        row_ids = [jnp.minimum(first + i, last) for i in range(plan.rows_each)]
        squares = memory.squares.at[share]
        if norm.coding is not None:
            quantize_wide_rows(
                self.wide_rows(norm),
                norm.gain,
                norm.coding,
                row_ids,
                WideSums(
                    squares=squares,
                    peaks=memory.peaks.at[share] if memory.peaks is not None else None,
                    scales=memory.x_scales,
                ),
                eps=norm.eps,
                is_interpreted=plan.is_interpreted,
            )
        else:
            normalise_wide_rows(
                self.wide_rows(norm),
                norm.gain,
                row_ids,
                squares,
                eps=norm.eps,
                num_registers=min(255, 65536 // (sm90_rows.LANES * (plan.num_sharers + 1))),
                is_interpreted=plan.is_interpreted,
            )
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.held)

    def wide_rows(self, norm: InputNorm) -> WideRows:
        """Where a warpgroup reads the activations, and where it puts them."""
        x_gmem, x_smem, held = self.operands.x, self.x_views[0], self.plan.tiles.held
        assert held is not None

        def read(row, columns, math):
            if held.copies_rows:
                return sm90_rows.load_from_slabs(x_smem, row, columns.start, columns.size, math)
            if norm.read_row is not None:
                return norm.read_row(x_gmem, norm.terms, row, columns, math)
            return math.load(x_gmem.at[row, columns])

        def keep(array, values, row, start):
            @pl.when(lax.axis_index("cta") == 0)
            def _():
                array[row, pl.ds(start, values.shape[0])] = values

        def keep_sum(values, row, start, math):
            if norm.terms:
                keep(self.results.total, values, row, start)

        def store(values, row, start, math):
            sm90_rows.store_in_slabs(x_smem, values, row, start, math)
            if norm.keeps_rows:
                keep(self.results.normed, values, row, start)

        def ready():
            if held.copies_rows:
                plgpu.barrier_wait(self.memory.rows_read)

        def arrived():
            if held.early_stages:
                plgpu.barrier_arrive(self.memory.rows_read)

        return WideRows(
            width=self.plan.k_len, dtype=x_gmem.dtype, read=read, store=store, keep=keep_sum,
            ready=ready, arrived=arrived, is_read_again=held.copies_rows,
        )  # fmt: skip

    # -------------------------------------------------------------- the warpgroups that multiply

    def compute(self) -> None:
        """Multiply, add and store this warpgroup's outputs of all tiles."""
        plan, t = self.plan, self.plan.tiles
        if plan.has_register_shares:
            plan.registers.take()
        if t.held:
            plgpu.barrier_wait(self.memory.held)
        wg_rows = pl.ds(self.wg * t.rows, t.rows)

        @plgpu.nd_loop((plan.num_items,), collective_axes="cta", init_carry=jnp.int32(0))
        def _tiles(info, carry):
            first = self.first_step(info, carry)
            row, col, group = self.locate(info.index[0])
            row = row + self.wg * t.out_rows
            num_steps, num_added = self.steps_of(info.index[0])

            def product():
                if plan.has_residual:
                    self.fetch_residual(row, col)
                peers = self.operands.peers
                begun = peers.ranks.begin(peers.memory, info.index[0]) if peers else ()
                total = tree_sum(
                    (t.rows, t.cols),
                    plan.num_leaves.bit_length() - 1,
                    plan.leaf_steps,
                    functools.partial(self.leaf, wg_rows=wg_rows, row=row),
                    first,
                )
                if peers:
                    total = peers.ranks.add(
                        total, peers.memory, info.index[0], begun, num_cols=plan.num_rows
                    )
                pieces = self.pieces(total, row, col)
                if self.operands.bias is not None:
                    pieces[0] = add_bias(pieces[0], self.operands.bias, row, 0)
                if plan.low_rank and not plan.adds_apart:
                    pieces = [
                        sm90_rows.add_unless_zero(
                            it, self.added(first + num_steps + i * num_added, i), self.math
                        )
                        for i, it in enumerate(pieces)
                    ]
                self.store(pieces, row, col, group)

            if plan.adds_apart:
                pl.when(num_added > 0)(lambda: self.store([self.added(first, 0)], row, col, group))
                pl.when(num_steps > 0)(product)
            else:
                product()
            return carry + num_steps + plan.num_low_rank_pieces * num_added

        plgpu.wait_smem_to_gmem(0)

    def added(self, first, piece: int):
        """What adapters add to a piece [64, cols], whose first step is the ring's step `first`."""
        plan, t, ring = self.plan, self.plan.tiles, self.ring
        rows = pl.ds(self.wg * t.rows + piece * WG_ROWS, WG_ROWS)

        def multiply(i, acc):
            slot = ring.slot(first + i)
            for s in range(plan.slabs):
                weights = self.memory.w.at[slot, rows, pl.ds(s * plan.span, plan.span)]
                plgpu.wgmma(acc, weights, self.x_views[0].at[slot, s].T)

        return leaf_sum(
            (WG_ROWS, t.cols),
            plan.low_rank_steps,
            take=lambda i: ring.wait(first + i),
            multiply=multiply,
            give=lambda i: ring.release(first + i),
            in_flight=plan.slabs,
        )

    def leaf(self, first, *, wg_rows, row):
        """The sum of a leaf, [rows, cols] f32, whose first step is the ring's step `first`.

        Of blocks of 8-bit weights it is a tuple, of `_Plan.pieces`. `row`: the first output.
        """
        plan, ring, x_smem = self.plan, self.ring, self.x_views[0]

        def multiply(i, acc):
            slot = ring.slot(first + i)
            if plan.tiles.coding:
                self.multiply_codes(plan.tiles.coding, acc, slot, i)
                return
            for s in range(plan.slabs):
                weights = self.memory.w.at[slot, wg_rows, pl.ds(s * plan.span, plan.span)]
                plgpu.wgmma(acc, weights, x_smem.at[i if plan.tiles.held else slot, s].T)

        def give(i):
            if (plan.tiles.coding or plan.block_rows) and plan.is_interpreted:
                # WHY: interpretation asks for a fence between what threads have read and what TMA
                # will write. On a GPU the barrier orders them, as values are in registers.
                plgpu.commit_smem()
            ring.release(first + i)

        def multiply_chunk(i, chunk, acc):
            slot = ring.slot(first + i)
            weights = self.memory.w.at[slot, wg_rows, pl.ds(chunk * plan.span, plan.span)]
            plgpu.wgmma(acc, weights, x_smem.at[i if plan.tiles.held else slot, chunk].T)

        if plan.operand_dtype == jnp.float8_e4m3fn:
            return chunked_sum(
                (plan.tiles.rows, plan.tiles.cols),
                plan.leaf_steps,
                take=lambda i: ring.wait(first + i),
                multiply=multiply_chunk,
                give=give,
                num_chunks=plan.slabs,
                scales=self.chunk_scales(first, row) if plan.block_rows else None,
            )
        return leaf_sum(
            (plan.tiles.rows, plan.tiles.cols),
            plan.leaf_steps,
            take=lambda i: ring.wait(first + i),
            multiply=multiply,
            give=give,
            in_flight=plan.slabs * (plan.tiles.rows // BLOCK if plan.tiles.coding else 1),
            by_twos=plan.tiles.coding is not None,
            dtype=jnp.int32 if plan.is_w8a8 else jnp.float32,
        )

    def chunk_scales(self, first, row) -> ChunkScales:
        """Scales of a tile from output `row` on, whose first step is the ring's step `first`."""
        plan, t = self.plan, self.plan.tiles

        def of_weights(i, j):
            blocks = [lax.div(it, plan.block_rows) for it in self.first_weights(row)]
            return [self.operands.w_scales[block, i * plan.slabs + j] for block in blocks]

        def of_rows(i, j):
            if t.held:
                chunk = self.memory.x_scales.at[i * plan.slabs + j]
            else:
                chunk = self.memory.x_scales.at[self.ring.slot(first + i), j, pl.ds(0, t.cols)]
            return load_vector(chunk, 1, is_interpreted=plan.is_interpreted)

        return ChunkScales(
            of_weights=of_weights, of_rows=of_rows, axis=1, pieces=plan.pieces,
            piece_shape=(WG_ROWS, t.cols), math=self.math,
        )  # fmt: skip

    def first_weights(self, row) -> tuple:
        """The first weight of outputs from `row` on: of a gate and its up, if gated."""
        return (row, row + self.plan.num_out) if self.plan.tiles.is_gated else (row,)

    def multiply_codes(self, coding: Coding, acc, slot, step) -> None:
        """Widen the codes of a step and multiply, 64 rows and columns after the other."""
        plan, blocks = self.plan, self.plan.tiles.rows // BLOCK
        # WHY: all loads first, as none may pass the fence of a product.
        places = [(s, i) for s in range(plan.slabs) for i in range(blocks)]
        loaded = [self.load_block(coding, slot, self.wg * blocks + i, s) for s, i in places]
        for (s, i), parts in zip(places, loaded, strict=True):
            weights = widen(*parts, coding, is_interpreted=plan.is_interpreted)
            if plan.is_interpreted:  # there wgmma reads memory only
                widened = self.memory.w.widened.at[self.wg, i]
                widened[...] = weights
                weights = widened
            rows = acc if blocks == 1 else acc.at[pl.ds(i * BLOCK, BLOCK)]
            plgpu.wgmma(rows, weights, self.x_views[0].at[step if plan.tiles.held else slot, s].T)

    def load_block(self, coding: Coding, slot, block, slab: int) -> tuple:
        """A block's codes, scales and zero points in registers."""
        stages = self.memory.w
        first = slab * BLOCK // coding.group_len if coding.group_len else 0

        def load_groups(ref):
            return [
                plgpu.load(ref.at[slot, block, first + i], layout=ROW_LAYOUT, optimized=False)
                for i in range(coding.groups_of(BLOCK))
            ]

        layout = words_layout(coding.code_type)
        words = plgpu.load(stages.codes.at[slot, block, slab], layout=layout, optimized=False)
        return (
            words,
            load_groups(stages.scales),
            load_groups(stages.zeros) if coding.has_zeros else [],
        )

    def pieces(self, total, row, col) -> list:
        """A sum [rows, cols] as float32: its outputs, or gates and ups."""
        plan, t = self.plan, self.plan.tiles
        if plan.block_rows:
            return list(total)
        # WHY: a router has fewer outputs than an accumulator has rows, which cannot be cut there.
        parts = [total[: t.out_rows], total[t.out_rows :]] if t.is_gated else [total]
        if not plan.is_w8a8:
            return parts
        x_scales = self.memory.x_scales if t.held else self.operands.x_scales.at[pl.ds(col, t.cols)]
        of_rows = load_vector(x_scales, 1, is_interpreted=plan.is_interpreted)
        return [
            scaled(part, [(self.weight_scales(first), 0), (of_rows, 1)], self.math)
            for part, first in zip(parts, self.first_weights(row), strict=True)
        ]

    def weight_scales(self, first):
        """Scales of a piece's 64 weights from `first` on; any for those that are not live."""
        plan, scales = self.plan, self.operands.w_scales
        if not plan.tiles.live_rows:
            here = scales.at[pl.ds(first, WG_ROWS)]
            return load_vector(here, 0, is_interpreted=plan.is_interpreted)
        return load_from_any(
            scales, first, WG_ROWS, 0, last=plan.num_out - 1, is_interpreted=plan.is_interpreted
        )

    @property
    def live_outputs(self) -> tuple:
        """This warpgroup's part of the staged output, without what is never stored."""
        live_rows = self.plan.tiles.live_rows
        return (self.wg, slice(None), pl.ds(0, live_rows)) if live_rows else (self.wg,)

    @property
    def math(self) -> sm90_rows.Arithmetic:
        """On accumulators."""
        return sm90_rows.Arithmetic(
            layout=plgpu.Layout.WGMMA, is_interpreted=self.plan.is_interpreted
        )

    def fetch_residual(self, row, col) -> None:
        """Ask for the residual stream of a tile, to where its output will be staged."""
        t = self.plan.tiles
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        window = (pl.ds(col, t.cols), pl.ds(row, t.out_rows))
        plgpu.copy_gmem_to_smem(
            self.operands.residual.at[window],
            self.out_views[1].at[self.live_outputs],
            self.memory.arrived.at[self.wg],
        )

    def store(self, pieces: list, row, col, group) -> None:
        """Add the residual stream to outputs, or gate them, round them and store them."""
        t, has_residual = self.plan.tiles, self.plan.has_residual
        out_smem, out_tma = self.out_views
        total, *ups = pieces
        if has_residual:
            plgpu.barrier_wait(self.memory.arrived.at[self.wg])
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if t.is_gated:
            total = gated_bf16(total, *ups, self.math)
        staged = out_smem.at[self.wg]
        put_transposed(total, staged, staged if has_residual else None)
        window = (pl.ds(col, t.cols), pl.ds(row, t.out_rows))
        if self.plan.num_terms > 1:
            window = (group, *window)
        plgpu.copy_smem_to_gmem(out_tma.at[self.live_outputs], self.results.out.at[window])


def _weight_types(plan: _Plan, scale_dtype) -> Any:
    """Shared memory of a ring of weights."""
    t, coding = plan.tiles, plan.tiles.coding
    if coding is None:
        return ragged((t.stages, t.rows * t.num_wgs, t.k), plan.span, plan.operand_dtype, False)
    stages = (t.stages, len(plan.code_blocks))
    lines = coding.code_type.block_words // WORDS_PER_LINE
    groups = (*stages, coding.groups_of(t.k), BLOCK)
    widened = (t.num_wgs, t.rows // BLOCK, BLOCK, BLOCK)
    return _CodedStages(
        codes=plgpu.SMEM((*stages, t.k // BLOCK, lines, WORDS_PER_LINE), jnp.int32),
        scales=plgpu.SMEM(groups, scale_dtype),
        zeros=plgpu.SMEM(groups, jnp.bfloat16) if coding.has_zeros else None,
        widened=plgpu.SMEM(widened, jnp.bfloat16) if plan.is_interpreted else None,
    )


def _memory_types(plan: _Plan, scale_dtype) -> _Memory:
    t = plan.tiles
    out_bytes = plan.out_dtype.itemsize
    out_shape = (t.num_wgs, t.cols, 64)
    if plan.is_out_tiled:
        out = ragged(out_shape, t.out_span // out_bytes, plan.out_dtype, plan.is_ragged)
    else:
        out = plgpu.SMEM(out_shape, plan.out_dtype)
    if t.held:
        x = held_block(plan.steps, plan.slabs, plan.operand_dtype, as_one_box=plan.is_one_box)
        squares = (plan.num_sharers, plan.rows_each, plan.k_len // held_chunk(plan.k_len), 4)
        readers = plan.num_sharers
        if t.held.copies_rows:
            readers = num_copies(plan.k_len, as_one_box=plan.is_one_box)
        reads_rows = t.held.copies_rows or t.held.early_stages > 0
    else:
        x_shape = (t.stages, plan.slabs, t.cols, plan.span)
        x = ragged(x_shape, plan.span, plan.operand_dtype, plan.is_ragged)
        squares, readers, reads_rows = None, 0, False
    copies = plan.weight_copies + (0 if t.held else plan.slabs + bool(plan.block_rows))
    x_scales = peaks = None
    if plan.block_rows and t.held:
        x_scales = plgpu.SMEM((plan.k_len // FLOAT8_CHUNK, 8), jnp.float32)
    elif plan.block_rows:
        x_scales = plgpu.SMEM((t.stages, plan.slabs, t.scale_cols), jnp.float32)
    elif t.held and plan.is_w8a8:
        x_scales = plgpu.SMEM((8,), jnp.float32)
        peaks = plgpu.SMEM((plan.num_sharers, plan.rows_each, 1, 4), jnp.float32)
    return _Memory(
        x=x,
        x_scales=x_scales,
        w=_weight_types(plan, scale_dtype),
        out=out,
        squares=plgpu.SMEM(squares, jnp.float32) if squares else None,
        peaks=peaks,
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=t.stages),
        empty=plgpu.Barrier(num_arrivals=t.num_wgs, num_barriers=t.stages),
        arrived=plgpu.Barrier(num_barriers=t.num_wgs) if plan.has_residual else None,
        held=plgpu.Barrier(num_arrivals=plan.num_sharers) if t.held else None,
        rows_read=plgpu.Barrier(num_arrivals=readers) if reads_rows else None,
    )


def flat_matmul(
    x, w, bias, residual, fused: Fused | None, *,
    leaf_len: int, out_dtype, tiles: FlatTiles, interpret,
):  # fmt: skip
    """See `sm90_matmul.matmul`."""
    norm = fused if isinstance(fused, InputNorm) else None
    peers = fused if isinstance(fused, RanksSum) else None
    adapters = fused if isinstance(fused, LowRankRows) else None
    below = None
    if isinstance(w, JoinedMatrix):
        w, below = w.first, w.second
    block_rows = block_rows_of(w)
    operand_dtype = x.dtype
    x, w, x_scales, w_scales = operands_of(x, w)
    num_rows, k_len = x.shape
    coding = w.coding if isinstance(w, QuantizedMatrix) else None
    if coding != tiles.coding:
        raise ValueError(f"weights with {coding=} need tiles of the same, not {tiles.coding}")
    num_below = 0 if below is None else below.shape[0]
    plan = _Plan(
        tiles=tiles, num_rows=num_rows,
        num_out=(w.shape[0] + num_below) // (2 if tiles.is_gated else 1), num_below=num_below,
        k_len=k_len, leaf_len=leaf_len, operand_dtype=operand_dtype, out_dtype=jnp.dtype(out_dtype),
        has_residual=residual is not None, block_rows=block_rows,
        low_rank=adapters.h.shape[1] if adapters else 0, is_interpreted=interpret is not None,
    )  # fmt: skip
    plan.check(bias, norm, peers)

    def body(operands: _Operands, results: _Results, memory: _Memory):
        cta = _Cta(
            plan=plan, operands=operands, results=results, memory=memory, wg=lax.axis_index("wg")
        )
        cta.run()

    shape = (num_rows, plan.num_out)
    out_shape = (plan.num_terms, *shape) if plan.num_terms > 1 else shape
    out = jax.ShapeDtypeStruct(out_shape, out_dtype)
    rows = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total = rows if norm and norm.terms else None
    normed = rows if norm and norm.keeps_rows else None
    [results] = plgpu.kernel(
        body,
        out_type=[_Results(out=out, total=total, normed=normed)],
        scratch_types=[_memory_types(plan, w.scales.dtype if tiles.coding else None)],
        grid=(min(plan.num_items, NUM_SMS * tiles.ctas_per_sm),),
        grid_names=("cta",),
        num_threads=plan.num_sharers + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        kernel_name="detjax_linear_swiglu" if tiles.is_gated else "detjax_linear",
        interpret=interpret,
    )(
        _Operands(
            x=x, w=w, bias=bias, residual=residual, norm=norm, peers=peers, adapters=adapters,
            x_scales=x_scales, w_scales=w_scales, w_below=below,
        )
    )  # fmt: skip
    found = tuple(result for result in results if result is not None)
    return found if len(found) > 1 else results.out
