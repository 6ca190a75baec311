# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the sm90 linear kernels: speed only, no bit depends on them.

Nothing here can reach a reduction: tiles say how outputs are cut and how many CTAs share
the leaves of a tree, and every power-of-two share of a perfect binary tree's leaves is a subtree of
it. The leaves themselves come from `numerics.Reduction`.
"""

import dataclasses
import enum
from dataclasses import dataclass

import jax.numpy as jnp

from detjax.pallas_kernels.linear.quantized import BLOCK, FLOAT8_CHUNK, Coding
from detjax.pallas_kernels.sm90_hardware import NUM_SMS, SMEM_BYTES

MAX_NORM_ROWS = 8
"""Up to here a product normalises its own input and saves a launch; 8 is most, 0 turns it off."""

QUANTIZED_VALUES, NORMED_VALUES = 32_768, 20_480
"""Most values of all rows, 8 rows at most, that a product quantises itself; and that it normalises
and quantises. 0 turns it off.

One row of the 8B shape in int8, us, with a launch that quantises and without: q, k, v 10.4 and 8.6,
`o` 8.0 and 6.4, gates and ups 30.3 and 29.3, `down` 19.3 and 16.6. Eight rows: 10.5 and 11.4, 8.1
and 7.7, 30.6 and 32.4, 19.5 and 19.3 (one H200, 2026-11).
"""

EARLY_STAGES = 2
"""Stages of weights that such a product asks for before warpgroups have read its rows.

Rows that are asked for behind a whole ring come behind it. A layer of the 8B shape without its
attention, one row, an H100: 161.3 us, 161.8 with the whole ring.
"""

QUANTIZED_EARLY_STAGES = 6
"""The same of a product that quantises its rows, whose stages are half as large.

Decode steps of the 8B shape in int8, one H200: 1 and 4 rows 2.44 and 2.69 ms, 2.46 and 2.78 with 2
stages.
"""

CODED_EARLY_BYTES = 65_536
"""The same of codes whose product adds up its rows, in bytes: two stages of bfloat16."""

COPIED_ROWS = 5
"""From here TMA brings such rows, asked for before any weights.

Loads of 8 rows by the warpgroups of 96 CTAs had come after 4 us. Decode steps of the 8B shape, one
H200: 8 rows 4.21 ms, 4.26 by loads; 4 and 1 rows 4.10 and 3.96, 4.09 and 3.92 by loads.
"""

MAX_RANKS_ROWS = 64
"""Up to here ranks add one another's tiles in the epilogue of their product; 64 is most."""

CODED_COLS = 128
"""Most activations of a tile whose weights are quantised: its sums and weights fit in registers."""

FLOAT8_COLS = 128
"""Most columns of a tile of float8 for 64 rows of a warpgroup."""

NARROW_OUT = 576
"""Outputs of a product, as a router's, that few tiles of 64 weights would make: those of 512
experts and a gate."""

NARROW_TILE, MOST_NARROW = 16, 128
"""Weights of a tile of such a product of more than 8 rows, in whole eights, of which a tile has 8;
and its most rows. 0 turns it off."""

HALF_ROWS = 8
"""Up to so many rows, if another launch quantises them, a product of 8 bits has tiles of 32 weights
where those of 64 would leave half of the multiprocessors idle; 0 turns it off.

`down` of 8 rows of the 8B shape: 18.6 us, and 19.5 by tiles of 64 (one H200, 2026-11).
"""

NARROW_ROWS = 8
"""Weights of a tile of such a product: 8, 16 or 32, so that more CTAs load them; 0 for all 64."""

WG_ROWS = 64
"""Rows of a tall tile that one warpgroup multiplies."""

ADDED_COLS = 128
"""Most columns of a tile of 128 rows where adapters are added: 192 and 256 spill registers."""

ADDED_K = 128
"""Most depth of a stage where adapters of rows are added, in whole stages."""

SLOT_COLS, SLOT_K = 128, 64
"""Columns and depth of a tall tile whose bf16 output is as large as a stage."""


def _check_wgmma(cols: int, k: int) -> None:
    """Refuse sizes that wgmma or TMA cannot multiply or copy."""
    if cols % 8 or not 8 <= cols <= 256:
        raise ValueError(f"{cols=} must be a multiple of 8 in 8..256")
    if k not in (16, 32, 64, 128, 256):
        raise ValueError(f"{k=} must be 16, 32, 64, 128 or 256")


class OperandType(enum.Enum):
    """What activations and weights of a product are, by dtype; codes become bfloat16."""

    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FLOAT8 = "float8_e4m3fn"  # chunks of K are added outside of accumulators
    FLOAT8_BLOCKS = "float8_e4m3fn by blocks"  # the like, each chunk with scales

    @property
    def scale_bytes(self) -> int:
        """Of the scales of an activation's chunk."""
        return 4 if self is OperandType.FLOAT8_BLOCKS else 0

    @property
    def dtype(self) -> jnp.dtype:
        """Of activations, and of weights that are no codes."""
        return jnp.dtype(self.value.split()[0])

    @property
    def is_float8(self) -> bool:
        """Whether chunks of K are added outside of accumulators."""
        return self in (OperandType.FLOAT8, OperandType.FLOAT8_BLOCKS)

    @property
    def num_bytes(self) -> int:
        """Of an activation, and of a weight that is no code."""
        return 2 if self is OperandType.BFLOAT16 else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRows:
    """Up to 8 activations that a CTA normalises or quantises, and holds whole in shared memory.

    Attributes:
        channels: K, the length of a row.
        dtype: Of what is held.
        helpers: Warpgroups that only help to normalise.
        copies_rows: Whether TMA brings the rows; else the warpgroups that normalise them load them,
            as they must where rows are sums of terms.
        early_stages: Stages of weights that are requested before the rows have been read; 0 for as
            many as the ring has.
    """

    channels: int
    dtype: jnp.dtype = jnp.dtype(jnp.bfloat16)
    helpers: int = 0
    copies_rows: bool = False
    early_stages: int = 0

    def __post_init__(self):
        """Refuse stages that wait for rows that no warpgroup loads."""
        if self.early_stages and self.copies_rows:
            raise ValueError(f"{self.early_stages=} are before rows that warpgroups load, not TMA")

    @property
    def smem_bytes(self) -> int:
        """Shared memory of 8 rows, what their sums need, barriers and alignment."""
        of_row = self.dtype.itemsize * self.channels
        if self.dtype == jnp.float8_e4m3fn:
            of_row += 4 * (self.channels // FLOAT8_CHUNK)  # scales of chunks, if they have some
        in_rows = 8 * (of_row + 16 * (self.channels // held_chunk(self.channels)))
        return in_rows + (1024 if self.dtype == jnp.bfloat16 else 3072)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatTiles:
    """How a product of few activations is cut into CTAs. Free: no field changes the order of a sum.

    Weights are the 64-row operand of wgmma and activations its N. The products of a stage still run
    when those of the next are issued.

    Attributes:
        cols: Activations of a CTA: the N of wgmma, a multiple of 8.
        num_wgs: Compute warpgroups of a CTA, each with weights of its own; one more loads.
        k: Depth of one pipeline stage; divides a leaf.
        stages: Pipeline stages in shared memory.
        groups: CTAs that share the leaves of one output tile; each writes a float32 subtree.
        ctas_per_sm: CTAs an SM holds at a time.
        out_span: Bytes of a row that lie together in a staged output, 32, 64 or 128.
        is_gated: Whether half of the weights are gates and half their ups: the first and the last
            64 rows of a warpgroup's 128.
        held: The activations, if the CTA normalises them and holds them in shared memory; None if
            they stream through the ring beside the weights.
        live_rows: Weights that a warpgroup loads and stores, of its 64 rows; the others multiply
            what lies there. 0 for all of them.
        coding: How the weights are quantised; None if they are bfloat16.
    """

    cols: int
    num_wgs: int = 1
    k: int = 64
    stages: int
    groups: int = 1
    ctas_per_sm: int = 1
    out_span: int = 128
    is_gated: bool = False
    held: HeldRows | None = None
    live_rows: int = 0
    coding: Coding | None = None

    def __post_init__(self):
        """Refuse what wgmma or TMA cannot do."""
        _check_wgmma(self.cols, self.k)
        if self.num_wgs not in (1, 2):
            raise ValueError(f"{self.num_wgs=} must be 1 or 2")
        if self.coding and (self.live_rows or self.k < BLOCK):
            raise ValueError(f"codes are read by whole blocks of {BLOCK}, not by {self}")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2: the products of one still run")
        if self.live_rows and (
            self.is_gated or self.num_wgs > 1 or self.live_rows not in (8, 16, 32)
        ):
            raise ValueError(f"{self.live_rows=} must be 8, 16 or 32 of 64 rows, not gated: {self}")
        if self.held is None:
            return
        if self.cols != 8 or self.k < 64 or self.groups > 1:
            raise ValueError(f"rows are held by tiles of 8 columns that are not split, not {self}")
        if self.held.early_stages >= self.stages:
            raise ValueError(f"{self.held.early_stages=} must be less than {self.stages=}")

    @property
    def rows(self) -> int:
        """Weights of a warpgroup, the rows of its accumulator."""
        return 2 * WG_ROWS if self.is_gated else WG_ROWS

    @property
    def out_rows(self) -> int:
        """Outputs of a warpgroup for each activation."""
        return self.live_rows or WG_ROWS

    @property
    def scale_cols(self) -> int:
        """Scales of a chunk in shared memory: TMA fills places that 128 bytes divide."""
        return -(-self.cols // 32) * 32

    def stage_bytes(self, operands: OperandType = OperandType.BFLOAT16) -> int:
        """Shared memory of one stage of the operands that stream."""
        num_rows = self.rows * self.num_wgs
        weights = operands.num_bytes * self.k * num_rows
        if self.coding:
            weights = self.coding.stage_bytes(num_rows, self.k)
        if self.held:
            return weights
        scales = operands.scale_bytes * (self.k // FLOAT8_CHUNK) * self.scale_cols
        return weights + operands.num_bytes * self.k * self.cols + scales

    def other_bytes(self, *, out_bytes: int, has_residual: bool) -> int:
        """Shared memory beside the ring: held rows, the staged output, barriers and alignment.

        Args:
            out_bytes: Of an output element.
            has_residual: Of no account: a residual waits where its output will.
        """
        del has_residual
        staged = self.num_wgs * self.cols * WG_ROWS * out_bytes
        return staged + (self.held.smem_bytes if self.held else 3072)


@dataclass(frozen=True, kw_only=True, slots=True)
class TallTiles:
    """How a product of many activations is cut into CTAs. Free: no field changes a sum's order.

    Activations are the 64-row operand of wgmma and weights its N.

    Attributes:
        cols: Weights of a CTA: the N of wgmma, a multiple of 8.
        num_wgs: Compute warpgroups of a CTA, each with 64 activations; one more loads.
        k: Depth of one pipeline stage; divides a leaf.
        stages: Pipeline stages in shared memory.
        cluster: CTAs, one above the other, that share weights by multicast, and CTAs side by side
            that share activations.
        groups: CTAs that share the leaves of one output tile; each writes a float32 subtree.
        smem_levels: Levels of the tree whose pending sum waits in shared memory, from the top.
        is_paired: Whether leaves are summed two by two in two accumulators.
        lag: Steps by which the second warpgroup starts behind the first; 0 for none.
        out_span: Bytes of a row of the output that are stored at once, 64 or 128.
        is_gated: Whether half of the weights are gates and half their ups: the first and the last
            half of the columns.
        shares_slot: Whether a residual comes, and its output leaves, through a stage of the ring,
            which makes room for products of one stage that still run when the next is issued.
    """

    cols: int
    num_wgs: int = 2
    k: int = 64
    stages: int
    cluster: tuple[int, int] = (1, 1)
    groups: int = 1
    smem_levels: int = 0
    is_paired: bool = False
    lag: int = 0
    out_span: int = 128
    is_gated: bool = False
    shares_slot: bool = False

    def __post_init__(self):
        """Refuse what wgmma or TMA cannot do."""
        _check_wgmma(self.cols, self.k)
        if self.num_wgs not in (1, 2, 3):
            raise ValueError(f"{self.num_wgs=} must be 1, 2 or 3")
        if self.lag and (self.num_wgs != 2 or self.lag >= self.stages):
            raise ValueError(f"{self.lag=} needs two warpgroups and less than {self.stages=}")
        if self.is_gated and self.cols % 16:
            raise ValueError(f"gated tiles need columns in sixteens, not {self.cols=}")
        if self.shares_slot and (not self.fits_slot or self.stages < 2):
            raise ValueError(
                f"an output of a slot's size needs two stages of {SLOT_COLS=} and {SLOT_K=}, "
                f"not {self}"
            )

    @property
    def fits_slot(self) -> bool:
        """Whether the bf16 output is as large as a stage."""
        return (self.cols, self.k) == (SLOT_COLS, SLOT_K)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs an SM holds at a time."""
        return 1

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA's tile."""
        return WG_ROWS * self.num_wgs

    @property
    def out_cols(self) -> int:
        """Output columns of a CTA."""
        return self.cols // 2 if self.is_gated else self.cols

    def stage_bytes(self, operands: OperandType = OperandType.BFLOAT16) -> int:
        """Shared memory of one stage."""
        scales = operands.scale_bytes * (self.k // FLOAT8_CHUNK) * self.cta_rows
        return operands.num_bytes * self.k * (self.cta_rows + self.cols) + scales

    def out_chunk(self, out_bytes: int) -> int:
        """Columns of one store of the output."""
        chunk = self.out_span // out_bytes
        while self.out_cols % chunk:
            chunk //= 2
        return chunk

    def num_chunks(self, out_bytes: int) -> int:
        """Stores of the output of a warpgroup."""
        return self.out_cols // self.out_chunk(out_bytes)

    def num_staged(self, out_bytes: int, *, has_residual: bool) -> int:
        """Chunks of the output that wait in shared memory: all, if a residual comes to each."""
        num_chunks = self.num_chunks(out_bytes)
        return num_chunks if has_residual else min(2, num_chunks)

    def other_bytes(self, *, out_bytes: int, has_residual: bool) -> int:
        """Shared memory beside the ring: staged output, pending sums, barriers and alignment."""
        staged = 0
        if not self.shares_slot:
            chunks = self.num_staged(out_bytes, has_residual=has_residual)
            staged = self.cta_rows * self.out_chunk(out_bytes) * chunks * out_bytes
        return staged + self.smem_levels * self.cta_rows * self.cols * 4 + 3072


MatmulTiles = FlatTiles | TallTiles


def held_chunk(width: int) -> int:
    """Channels of a row that a warpgroup takes at once: `rms_norm.sm90.row_sum`'s chunk."""
    return _largest_divisor(width, 1024)


def smem_bytes(
    tiles: MatmulTiles, *, out_bytes: int, has_residual: bool = False,
    operands: OperandType = OperandType.BFLOAT16,
) -> int:  # fmt: skip
    """Shared memory of a CTA."""
    other = tiles.other_bytes(out_bytes=out_bytes, has_residual=has_residual)
    return tiles.stages * tiles.stage_bytes(operands) + other


def fill_stages[Tiles: MatmulTiles](
    tiles: Tiles, *, out_bytes: int, has_residual: bool = False,
    operands: OperandType = OperandType.BFLOAT16, most: int = 12,
) -> Tiles:  # fmt: skip
    """As many stages as fit beside the rest."""
    room = SMEM_BYTES // tiles.ctas_per_sm
    room -= tiles.other_bytes(out_bytes=out_bytes, has_residual=has_residual)
    return dataclasses.replace(tiles, stages=min(most, room // tiles.stage_bytes(operands)))


class Added(enum.Enum):
    """What is added to the sums of a product, in its epilogue or beside it."""

    NOTHING = "nothing"
    RANKS = "ranks"  # those of the same tile of other ranks
    ADAPTERS = "adapters"  # those of rows


class Rows(enum.Enum):
    """What a product's rows of activations are."""

    GIVEN = "given"
    PARTS = "parts"  # of float32 activations; no bias, no residual, no gate
    NORMALISED = "normalised"  # by the product: `MAX_NORM_ROWS` at most, one leaf
    SUMMED = "summed"  # the like, and sums of terms, so that no copy brings them
    QUANTIZED = "quantized"  # by the product, normalised or not


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """What the tiles of a product depend on.

    Attributes:
        num_rows: M. Allowed here, and only here, because no tile changes a bit.
        num_out: Rows of the weights: N, or twice the outputs if gated.
        num_leaves: Leaves of this rank; 1 for a one-leaf product.
        leaf_len: Their length.
        out_bytes: Bytes of an output element: 2 or 4.
        has_bias: A bias is loaded by whole tiles, so they must divide N.
        has_residual: A residual is staged whole, unless CTAs share a tile's leaves.
        is_gated: The weights are gates, then ups; one leaf, no bias.
        rows: What its activations are.
        added: What is added to sums. Where ranks are, no CTAs share a tree, and `MAX_RANKS_ROWS`
            are most. Columns of adapters are whole blocks of `ADDED_K`.
        coding: How the weights are quantised; few rows then, and they stream.
        operands: What activations and weights are. Sums of 8-bit ones are scaled; one leaf.
    """

    num_rows: int
    num_out: int
    num_leaves: int
    leaf_len: int
    out_bytes: int
    has_bias: bool = False
    has_residual: bool = False
    is_gated: bool = False
    rows: Rows = Rows.GIVEN
    added: Added = Added.NOTHING
    coding: Coding | None = None
    operands: OperandType = OperandType.BFLOAT16

    @property
    def is_w8a8(self) -> bool:
        """Whether operands have 8 bits."""
        return self.operands is not OperandType.BFLOAT16

    @property
    def needs_whole_tiles(self) -> bool:
        """Whether tiles must divide N: a bias or scales are loaded by whole tiles."""
        return self.has_bias or self.is_w8a8


def choose_tiles(product: Product) -> MatmulTiles:
    """Tiles for a product, by rules found by measuring."""
    p = product
    tiles = _cut(p)
    if p.is_gated and p.num_out % 128:
        tiles = dataclasses.replace(tiles, out_span=64)
    if p.added is Added.ADAPTERS:
        tiles = dataclasses.replace(tiles, k=min(tiles.k, ADDED_K))
    elif isinstance(tiles, FlatTiles):
        tiles = _narrow(tiles, p)
        if p.rows in (Rows.NORMALISED, Rows.SUMMED, Rows.QUANTIZED):
            tiles = _hold_rows(tiles, p)
    is_flat = isinstance(tiles, FlatTiles)
    is_partial = p.num_leaves > 1 and (tiles.groups > 1 or is_flat and not p.has_residual)
    tiles = fill_stages(
        tiles,
        out_bytes=4 if is_partial else p.out_bytes,
        has_residual=p.has_residual and not is_partial,
        operands=p.operands,
    )
    if isinstance(tiles, TallTiles) or not tiles.held or tiles.held.copies_rows:
        return tiles
    early = QUANTIZED_EARLY_STAGES if p.rows is Rows.QUANTIZED else EARLY_STAGES
    if p.coding and p.rows is Rows.SUMMED:
        early = CODED_EARLY_BYTES // tiles.stage_bytes()
    early = min(early, tiles.stages - 1)
    return dataclasses.replace(tiles, held=dataclasses.replace(tiles.held, early_stages=early))


def _cut(p: Product) -> MatmulTiles:
    """Which operand has 64 rows, and how large a tile is; stages come later."""
    # Of a wave of tiles of 64 weights, or of 128 gates and ups.
    widest = (128 if p.is_gated else 64) * NUM_SMS
    if p.coding:
        return _stream_codes(p, p.coding)
    if p.added is Added.RANKS:
        return _stream_weights(p, is_whole=True)
    if p.is_w8a8:
        return _w8a8_tiles(p)
    # Rows that are no whole eights are staged as no part of a tile could be stored.
    has_eights = 8 < p.num_rows <= MOST_NARROW and p.num_rows % 8 == 0
    if _is_router(p) and has_eights and p.rows is Rows.GIVEN and p.added is Added.NOTHING:
        return FlatTiles(
            cols=8, k=_largest_divisor(p.leaf_len, 256), stages=2,
            live_rows=NARROW_TILE, out_span=4 * NARROW_TILE,
        )  # fmt: skip
    if p.rows is Rows.PARTS and 128 < p.num_rows <= 192:
        return _three_row_blocks(p.num_out, p.num_leaves, p.leaf_len)
    if p.num_rows <= 32 or (p.num_rows <= 64 and (p.num_leaves > 1 or p.num_out <= widest)):
        return _stream_weights(p)
    if p.num_leaves > 1:
        tiles = _tree_tiles(p)
        # WHY: a fifth stage, and products in flight over a step: 1 to 3 % from 512 rows.
        shares_slot = p.has_residual and p.out_bytes == 2 and tiles.fits_slot and tiles.groups == 1
        return dataclasses.replace(tiles, shares_slot=shares_slot)
    if p.num_rows <= 128 and p.num_out > 64 * NUM_SMS and not (p.has_bias and p.num_out % 128):
        return _one_wave_tiles(p.num_rows, p.num_out, p.leaf_len, p.is_gated)
    return _one_leaf_tiles(p)


def _is_router(p: Product) -> bool:
    """Whether a product is as a router's, in float32: no GPU has run narrow tiles of others."""
    is_plain = p.num_leaves == 1 and p.out_bytes == 4 and p.num_out <= NARROW_OUT
    return is_plain and not (p.is_gated or p.has_bias or p.has_residual or p.is_w8a8)


def _narrow(tiles: FlatTiles, p: Product) -> FlatTiles:
    """Narrow tiles for a router's product of up to 8 rows."""
    if not (_is_router(p) and p.num_rows <= 8 and NARROW_ROWS):
        return tiles
    return dataclasses.replace(tiles, live_rows=NARROW_ROWS, out_span=NARROW_ROWS * p.out_bytes)


def _hold_rows(tiles: FlatTiles, p: Product) -> FlatTiles:
    """Tiles that stream weights, with the activations held and normalised in shared memory."""
    num_rows, k_len = p.num_rows, p.leaf_len
    copies_rows = num_rows >= COPIED_ROWS and p.rows is Rows.NORMALISED
    # Five warpgroups have 96 registers a thread, too few for the values of wider rows.
    num_wgs, most = (tiles.num_wgs, 4) if k_len <= 5120 else (1, 1)
    if copies_rows:
        # WHY: read again from shared memory, values need no registers; and with five warpgroups
        # gates and ups of 8 rows take 56.6 us instead of 56.2 (H200).
        most = 2
    elif p.coding:
        # WHY: codes of two steps take 160 registers. Of four or five warpgroups a thread has fewer,
        # and ptxas puts the products one after the other.
        most = min(most, 2)
    rows_each = -(-num_rows // most)
    sharers = -(-num_rows // rows_each)
    # Deep steps leave too few of them in flight beside wider rows.
    if p.rows is Rows.QUANTIZED:
        k = _largest_divisor(k_len, 128 if tiles.is_gated else 256)
    else:
        k = 64 if tiles.is_gated else _largest_divisor(k_len, 256 if k_len <= 4096 else 128)
    return dataclasses.replace(
        tiles,
        num_wgs=num_wgs,
        held=HeldRows(
            channels=k_len,
            dtype=p.operands.dtype,
            helpers=max(0, sharers - num_wgs),
            copies_rows=copies_rows,
        ),
        k=tiles.k if p.coding else k,
        ctas_per_sm=1,
    )


def _largest_divisor(leaf_len: int, most: int) -> int:
    while leaf_len % most:
        most //= 2
    return most


def _stream_weights(p: Product, *, is_whole: bool = False) -> FlatTiles:
    """Few activations, so the copy of the weights is all; `is_whole`: CTAs share no tree."""
    num_rows, num_out, num_leaves, is_gated = p.num_rows, p.num_out, p.num_leaves, p.is_gated
    rows = 128 if is_gated else 64
    blocks = num_out // rows
    cols = -(-num_rows // 8) * 8
    groups = 1
    if num_leaves > 1 and not is_whole:
        wanted = 64 if cols <= 32 or num_leaves * p.leaf_len < 4096 else 128
        while groups < num_leaves and blocks * groups < wanted:
            groups *= 2
    # WHY, gated: 256 weights a CTA 56.2 us at 8 rows, two CTAs an SM 57.1. Tiles of 128, in a wave
    # and a bit, take 55.0 or 60.7 at one row, 57.2 or 62.7 at eight, by where the weights lie;
    # those of 256, in one wave, 55.5 and 56.9 both times. Where tiles of 128 are one wave, as on
    # each of two ranks, a step of eight rows takes 2.85 ms with them and 3.00 with tiles of 256.
    is_one_wave = num_out // 256 <= NUM_SMS
    is_wide = is_gated and num_out % 512 == 0 and blocks > NUM_SMS and (num_rows > 1 or is_one_wave)
    # WHY, whole: CTAs that wait for those of other ranks must all be resident.
    ctas_per_sm = 2 if blocks > NUM_SMS and not is_gated and not is_whole else 1
    is_deep = (cols == 8 or (cols == 16 and ctas_per_sm == 1)) and not is_gated
    return FlatTiles(
        cols=cols,
        num_wgs=2 if is_wide else 1,
        k=_largest_divisor(p.leaf_len, 256 if is_deep else 128),
        stages=2,
        groups=groups,
        ctas_per_sm=ctas_per_sm,
        is_gated=is_gated,
    )


def _stream_codes(p: Product, coding: Coding) -> FlatTiles:
    """The like for quantised weights, of which widening is a part of the time.

    Times of the 8B shape with int4, one H200, 2026-11. One row: gates and ups take 19.7 us, 25.7
    with deeper steps and 23.7 with two CTAs an SM; `o` 5.2 us, 7.7 without groups. 64 rows: `o`
    8.0 us in two groups, 9.2 in four. 256 rows: `o` 18.1 us, 23.7 with 64 activations a tile.
    """
    parts = -(-p.num_rows // CODED_COLS)
    cols = -(-p.num_rows // (8 * parts)) * 8
    blocks = p.num_out // (2 * BLOCK if p.is_gated else BLOCK)
    is_few = cols <= 16
    # A CTA adds two leaves at most if the sums of a tile fill its registers.
    least = p.num_leaves // 2 if cols > BLOCK else 1
    wanted = 2 * NUM_SMS - BLOCK if is_few else NUM_SMS - BLOCK // 2
    groups = 1
    while groups < p.num_leaves and (blocks * groups < wanted or groups < least):
        groups *= 2
    groups = 1 if p.added is Added.RANKS else groups
    is_wide = p.is_gated and p.num_out % (4 * BLOCK) == 0
    return FlatTiles(
        cols=cols,
        num_wgs=2 if is_wide else 1,
        k=_largest_divisor(
            p.leaf_len, 256 if is_few and p.num_leaves == 1 and not p.is_gated else 128
        ),
        stages=2,
        groups=groups,
        ctas_per_sm=2 if is_few and groups > 1 else 1,
        is_gated=p.is_gated,
        coding=coding,
    )


def _w8a8_cols(num_rows: int) -> int:
    """Activations of a tile: wgmma of int8 has an N of 8, 16, 24, or a multiple of 16."""
    unit = 8 if num_rows <= 24 else 16
    return -(-num_rows // unit) * unit


def _w8a8_tiles(p: Product) -> MatmulTiles:
    """OperandType of 8 bits: whole sums in one CTA, as it scales them.

    Times of the 8B shape, one H200, 2026-11. Gates and ups take 28.7 us at one row with these
    tiles, 31.1 with steps of 128; at 64 rows 30.9, and 32.1 with two warpgroups. `down` takes 19.1
    us at 128 rows, 24.2 by tall tiles; at 256 rows 24.2 and 25.9.
    """
    if p.is_gated:
        if p.num_rows > BLOCK:
            return _one_leaf_tiles(p)
        cols = _w8a8_cols(p.num_rows)
        is_few = p.num_rows <= BLOCK // 2 and p.num_out % (4 * BLOCK) == 0
        return FlatTiles(
            cols=cols,
            num_wgs=2 if is_few else 1,
            k=_largest_divisor(p.leaf_len, 256 if is_few else 128),
            stages=2,
            ctas_per_sm=1 if is_few else 2,
            is_gated=True,
        )
    blocks = p.num_out // BLOCK
    is_few = p.num_rows <= HALF_ROWS and p.rows is Rows.GIVEN
    if is_few and 2 * blocks <= NUM_SMS and not p.has_bias:
        half = BLOCK // 2
        return FlatTiles(
            cols=_w8a8_cols(p.num_rows), k=_largest_divisor(p.leaf_len, 256), stages=2,
            live_rows=half, out_span=half * p.out_bytes,
        )  # fmt: skip
    parts = max(1, min(NUM_SMS // blocks, -(-p.num_rows // 32)))
    cols = _w8a8_cols(-(-p.num_rows // parts))
    if cols > CODED_COLS:
        return _one_leaf_tiles(p)
    return FlatTiles(
        cols=cols,
        k=_largest_divisor(p.leaf_len, 256 if cols <= BLOCK else 128),
        stages=2,
        ctas_per_sm=2 if blocks > NUM_SMS else 1,
    )


def _one_wave_tiles(num_rows: int, num_out: int, leaf_len: int, is_gated: bool) -> TallTiles:
    """Up to 128 activations, all in every CTA; 224 weights each if that wastes less of a wave."""
    cols = (
        224
        if num_out % 224 == 0 and _waves(num_out, 224) * 224 < _waves(num_out, 128) * 128
        else 128
    )
    return TallTiles(
        cols=cols,
        num_wgs=1 if num_rows <= 64 else 2,
        k=_largest_divisor(leaf_len, 128 if is_gated or num_rows > 64 and cols == 128 else 64),
        stages=2,
        out_span=64 if cols == 224 else 128,
        is_gated=is_gated,
    )


def _waves(num_out: int, cols: int) -> int:
    """Waves of CTAs that take so many columns each."""
    return -(-num_out // (cols * NUM_SMS))


_TALL_COLS = ((256, 0.98), (224, 0.96), (192, 0.94), (128, 0.92), (96, 0.85), (64, 0.70))
"""Columns of a tile and the share of the tensor core's rate it reached, measured 2026-11."""


def _one_leaf_tiles(p: Product) -> MatmulTiles:
    """The tile with the least waves times area over rate."""
    num_rows, num_out, out_bytes, is_gated = p.num_rows, p.num_out, p.out_bytes, p.is_gated
    k = _largest_divisor(p.leaf_len, 128 // p.operands.num_bytes)

    def waves(num_tiles):
        return -(-num_tiles // NUM_SMS)

    def cost(option):
        cols, rate = option
        return waves(-(-num_rows // 128) * -(-num_out // cols)) * cols / rate

    # WHY: the chunks of float8 are in registers beside their sum.
    most_cols = FLOAT8_COLS if p.operands.is_float8 else _TALL_COLS[0][0]
    has_adapters = p.added is Added.ADAPTERS
    most_cols = ADDED_COLS if has_adapters else most_cols
    options = [it for it in _TALL_COLS if it[0] <= most_cols]
    if p.operands is OperandType.FLOAT8_BLOCKS:
        options = [it for it in options if it[0] % BLOCK == 0]  # whole blocks have one scale
    options = [it for it in options if not (p.needs_whole_tiles and num_out % it[0])]
    cols, _ = best = min(options, key=cost)
    rows, most_cols = (128, most_cols // 2) if is_gated else (64, most_cols)
    parts = -(-num_rows // most_cols)
    flat_cols = -(-num_rows // (8 * parts)) * 8
    if p.is_w8a8:
        flat_cols = _w8a8_cols(-(-num_rows // parts))
    flat_cost = waves(-(-num_out // (2 * rows)) * parts) * flat_cols * (rows // 64) / 0.8
    # WHY: of an output of one box's width TMA's index is dropped, so a second warpgroup's zeros
    # would land in it.
    is_whole = num_out % (2 * rows) == 0 if p.is_w8a8 else num_out > rows
    is_whole = is_whole and not has_adapters
    if out_bytes == 2 and num_rows % 128 and flat_cost < cost(best) and is_whole:
        return FlatTiles(cols=flat_cols, num_wgs=2, k=k, stages=2, is_gated=is_gated)
    if is_gated and num_rows >= 2048 and not (p.needs_whole_tiles or has_adapters):
        # WHY: less area past the end at 4000 rows: 1401 us against 1439 to 1481, gate_up.
        big = waves(-(-num_rows // 192) * -(-num_out // 192)) * 192 * 1.5 / 0.975
        if big < cost(best):
            return TallTiles(
                cols=192, num_wgs=3, k=k, stages=2, cluster=(1, 2), out_span=64, is_gated=True
            )
    return TallTiles(
        cols=cols,
        k=k,
        stages=2,
        cluster=(2, 1) if cols == 256 and num_rows >= 2048 else (1, 1),
        out_span=64 if cols in (192, 224) or (cols == 256 and out_bytes == 4) else 128,
        is_gated=is_gated,
    )


def _three_row_blocks(num_out: int, num_leaves: int, leaf_len: int) -> TallTiles:
    """Three blocks of 64 rows, and none that TMA fills with zeros: 0.63 us a row of 14336."""
    k = _largest_divisor(leaf_len, 64)
    if num_leaves > 1:
        # WHY: 50 us at 192 rows of down where two blocks of 128 took 92, 65 at 136 where they took
        # 125 (2026-11).
        levels = num_leaves.bit_length() - 1
        return TallTiles(
            cols=128, num_wgs=1, k=k, stages=2, is_paired=True,
            smem_levels=1 if levels > 2 else 0,
        )  # fmt: skip

    def cost(option):
        cols, rate = option
        return -(-num_out // (cols * NUM_SMS)) * cols / rate

    # Beside a loading warpgroup three have 128 registers, and wgmma of 224 columns needs 138.
    cols, _ = min((option for option in _TALL_COLS if option[0] <= 192), key=cost)
    return TallTiles(
        cols=cols, num_wgs=3, k=k, stages=2,
        out_span=64 if cols == 192 else 128,
    )  # fmt: skip


def _tree_tiles(p: Product) -> TallTiles:
    """64 rows by 128 columns a warpgroup, as eight leaves' sums then fit in registers.

    By 64 columns where 128 do not divide the outputs, of which each has a bias.
    """
    num_rows, num_out, num_leaves, leaf_len = p.num_rows, p.num_out, p.num_leaves, p.leaf_len
    levels = num_leaves.bit_length() - 1
    row_tiles = -(-num_rows // 128)
    cols, groups = 64 if p.has_bias and num_out % 128 else 128, 1
    if num_rows <= 256:
        cols = 64
        while groups < min(2, num_leaves) and row_tiles * (num_out // cols) * groups < 128:
            groups *= 2
        levels -= groups.bit_length() - 1
    is_deep = cols == 128 and levels > 2
    k = _largest_divisor(leaf_len, 64 if cols == 128 else 128)
    return TallTiles(
        cols=cols,
        k=k,
        stages=2,
        groups=groups,
        smem_levels=1 if is_deep else 0,
        is_paired=cols == 128 and levels > 0,
        lag=1 if cols == 128 else 0,
    )
