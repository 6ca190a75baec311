# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the sm90 linear kernels: speed only, no bit depends on them.

Nothing here can reach a reduction: `MatmulTiles` says how outputs are cut and how many CTAs share
the leaves of a tree, and every power-of-two share of a perfect binary tree's leaves is a subtree of
it. The leaves themselves come from `numerics.Reduction`.
"""

import dataclasses
from dataclasses import dataclass

NUM_SMS = 132
"""Streaming multiprocessors of an H100 or H200 SXM: the CTAs of a persistent grid."""

SMEM_BYTES = 232448
"""Shared memory one CTA may have on sm_90."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulTiles:
    """How one product is cut into CTAs. Free: no field changes the order of a sum.

    Attributes:
        is_swapped: Whether weights are the 64-row wgmma operand, so that activations may be few.
        rows: Output rows (columns if swapped) of one warpgroup: 64 or 128.
        cols: Output columns (rows if swapped) of a CTA: the N of wgmma, a multiple of 8.
        num_wgs: Compute warpgroups of a CTA, stacked along `rows`; one more loads.
        k: Depth of one pipeline stage; divides a leaf.
        stages: Pipeline stages in shared memory.
        cluster_rows: CTAs, one above the other, that share the `cols` operand by multicast.
        cluster_cols: CTAs side by side that share the `rows` operand by multicast.
        groups: CTAs that share the leaves of one output tile; each writes a float32 subtree.
        smem_levels: Levels of the tree whose pending sum waits in shared memory, from the top.
        delay: Pipeline stages whose products may still run when the next is issued.
        snake: Width of the snake in which output tiles are visited.
        ctas_per_sm: CTAs an SM holds at a time.
        is_paired: Whether leaves are summed two by two in two accumulators.
        lag: Steps by which the second warpgroup starts behind the first; 0 for none.
        out_span: Bytes of a row that one store of an unswapped tile takes: 32, 64 or 128.
    """

    is_swapped: bool
    rows: int = 64
    cols: int
    num_wgs: int = 2
    k: int = 64
    stages: int
    cluster_rows: int = 1
    cluster_cols: int = 1
    groups: int = 1
    smem_levels: int = 0
    delay: int = 0
    snake: int = 8
    ctas_per_sm: int = 1
    is_paired: bool = False
    lag: int = 0
    out_span: int = 128

    def __post_init__(self):
        """Refuse what wgmma or TMA cannot do."""
        if self.rows not in (64, 128):
            raise ValueError(f"{self.rows=} must be 64 or 128")
        if self.cols % 8 or not 8 <= self.cols <= 256:
            raise ValueError(f"{self.cols=} must be a multiple of 8 in 8..256")
        if self.num_wgs not in (1, 2, 3):
            raise ValueError(f"{self.num_wgs=} must be 1, 2 or 3")
        if self.k not in (16, 32, 64, 128, 256):
            raise ValueError(f"{self.k=} must be 16, 32, 64, 128 or 256")
        if self.lag and (self.num_wgs != 2 or self.lag >= self.stages):
            raise ValueError(f"{self.lag=} needs two warpgroups and less than {self.stages=}")
        if self.delay not in (0, 1) or self.delay >= self.stages:
            raise ValueError(f"{self.delay=} must be 0 or 1 and less than {self.stages=}")

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA's tile."""
        return self.rows * self.num_wgs

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of both operands, bf16."""
        return 2 * self.k * (self.cta_rows + self.cols)


def smem_bytes(tiles: MatmulTiles, *, out_bytes: int, has_residual: bool = False) -> int:
    """Shared memory of a CTA: the ring, the staged output, pending sums, barriers."""
    if tiles.is_swapped:
        staged = tiles.cols * tiles.rows
    else:
        chunk = output_chunk(tiles, out_bytes)
        num_chunks = (tiles.rows // 64) * (tiles.cols // chunk)
        staged = 64 * chunk * (num_chunks if has_residual else min(2, num_chunks))
    pending = tiles.smem_levels * tiles.rows * tiles.cols * 4
    return (
        tiles.stages * tiles.stage_bytes
        + tiles.num_wgs * (staged * out_bytes + pending)
        + _SMEM_RESERVED
    )


_SMEM_RESERVED = 3072  # a placeholder of 1 KiB for pending sums, barriers, alignment


def output_chunk(tiles: MatmulTiles, out_bytes: int) -> int:
    """Columns of one store of an unswapped tile."""
    chunk = tiles.out_span // out_bytes
    while tiles.cols % chunk:
        chunk //= 2
    return chunk


def fill_stages(
    tiles: MatmulTiles, *, out_bytes: int, has_residual: bool = False, most: int = 12
) -> MatmulTiles:
    """As many stages as fit beside the rest."""
    room = SMEM_BYTES // tiles.ctas_per_sm
    rest = smem_bytes(
        dataclasses.replace(tiles, stages=2), out_bytes=out_bytes, has_residual=has_residual
    )
    extra = (room - rest) // tiles.stage_bytes
    return dataclasses.replace(tiles, stages=min(most, 2 + extra))


def choose_tiles(
    *,
    num_rows: int,
    num_out: int,
    num_leaves: int,
    leaf_len: int,
    out_bytes: int,
    has_bias: bool = False,
    has_residual: bool = False,
) -> MatmulTiles:
    """Tiles for a product of `num_rows` activations, by rules found by measuring.

    Args:
        num_rows: M. Allowed here, and only here, because no tile changes a bit.
        num_out: N.
        num_leaves: Leaves of this rank; 1 for a one-leaf product.
        leaf_len: Their length.
        out_bytes: Bytes of an output element: 2 or 4.
        has_bias: A bias is loaded by whole tiles, so they must divide N.
        has_residual: A residual is staged whole, and read by unswapped tiles only.
    """
    fit = {"out_bytes": out_bytes, "has_residual": has_residual}
    if num_rows <= 32 or (num_rows <= 64 and (num_leaves > 1 or num_out <= 64 * NUM_SMS)):
        tiles = _stream_weights(num_rows, num_out, num_leaves, leaf_len)
        fit["out_bytes"] = 4 if num_leaves > 1 else out_bytes
        return fill_stages(tiles, **{**fit, "has_residual": False})
    k = _largest_divisor(leaf_len, 64)
    if num_leaves > 1:
        tiles = _tree_tiles(num_rows, num_out, num_leaves, leaf_len)
        fit["out_bytes"] = 4 if tiles.groups > 1 else out_bytes
        fit["has_residual"] = has_residual and tiles.groups == 1
        return fill_stages(tiles, **fit)
    if num_rows <= 128 and num_out > 64 * NUM_SMS:
        is_one_wave = num_out % 224 == 0 and num_out <= 224 * NUM_SMS
        tiles = MatmulTiles(
            is_swapped=False,
            cols=224 if is_one_wave else 128,
            num_wgs=1 if num_rows <= 64 else 2,
            k=k if is_one_wave or num_rows <= 64 else _largest_divisor(leaf_len, 128),
            stages=2,
            out_span=64 if is_one_wave else 128,
        )
        if not (has_bias and num_out % tiles.cols):
            return fill_stages(tiles, **fit)
    return fill_stages(_one_leaf_tiles(num_rows, num_out, k, out_bytes, has_bias), **fit)


def _largest_divisor(leaf_len: int, most: int) -> int:
    while leaf_len % most:
        most //= 2
    return most


def _stream_weights(num_rows: int, num_out: int, num_leaves: int, leaf_len: int) -> MatmulTiles:
    """Weights as the 64-row operand: few activations, so the copy of the weights is all."""
    blocks = num_out // 64
    cols = -(-num_rows // 8) * 8
    groups = 1
    if num_leaves > 1:
        wanted = 64 if cols <= 32 or num_leaves * leaf_len < 8192 else 128
        while groups < num_leaves and blocks * groups < wanted:
            groups *= 2
    ctas_per_sm = 2 if blocks > NUM_SMS else 1
    is_deep = cols == 8 or (cols == 16 and ctas_per_sm == 1)
    k = _largest_divisor(leaf_len, 256 if is_deep else 128)
    return MatmulTiles(
        is_swapped=True,
        cols=cols,
        num_wgs=1,
        k=k,
        stages=2,
        groups=groups,
        delay=1,
        ctas_per_sm=ctas_per_sm,
    )


_TALL_COLS = ((256, 0.98), (224, 0.96), (192, 0.94), (128, 0.92), (96, 0.85), (64, 0.70))
"""Columns of a tile and the share of the tensor core's rate it reached, measured 2026-11."""


def _one_leaf_tiles(
    num_rows: int, num_out: int, k: int, out_bytes: int, has_bias: bool
) -> MatmulTiles:
    """The tile with the least waves times columns over rate."""

    def cost(option):
        cols, rate, rows = option
        tiles = -(-rows // 128) * -(-num_out // cols)
        return -(-tiles // NUM_SMS) * cols / rate

    options = [
        (cols, rate, num_rows) for cols, rate in _TALL_COLS if not (has_bias and num_out % cols)
    ]
    cols, rate, _ = min(options, key=cost)
    tall_cost = cost((cols, rate, num_rows))
    parts = -(-num_rows // 256)
    flat_cols = -(-num_rows // (8 * parts)) * 8
    flat_waves = -(-(-(-num_out // 128) * parts) // NUM_SMS)
    if out_bytes == 2 and num_rows % 128 and flat_waves * flat_cols / 0.8 < tall_cost:
        return MatmulTiles(is_swapped=True, cols=flat_cols, k=k, stages=2, delay=1)
    return MatmulTiles(
        is_swapped=False,
        cols=cols,
        k=k,
        stages=2,
        cluster_rows=2 if cols == 256 and num_rows >= 2048 else 1,
        out_span=64 if cols in (192, 224) or (cols == 256 and out_bytes == 4) else 128,
    )


def _tree_tiles(num_rows: int, num_out: int, num_leaves: int, leaf_len: int) -> MatmulTiles:
    """64 rows by 128 columns a warpgroup, as eight leaves' sums then fit in registers."""
    levels = num_leaves.bit_length() - 1
    row_tiles = -(-num_rows // 128)
    cols, groups = 128, 1
    if num_rows <= 256:
        cols = 64
        while groups < min(2, num_leaves) and row_tiles * (num_out // cols) * groups < 128:
            groups *= 2
        levels -= groups.bit_length() - 1
    is_deep = cols == 128 and levels > 2
    k = _largest_divisor(leaf_len, 64 if cols == 128 else 128)
    return MatmulTiles(
        is_swapped=False,
        cols=cols,
        k=k,
        stages=2,
        groups=groups,
        smem_levels=1 if is_deep else 0,
        is_paired=cols == 128 and levels > 0,
        lag=1 if cols == 128 else 0,
    )
