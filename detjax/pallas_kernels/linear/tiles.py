# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the sm90 linear kernels: speed only, no bit depends on them.

Nothing here can reach a reduction: `MatmulTiles` says how outputs are cut and how many CTAs share
the leaves of a tree, and every power-of-two share of a perfect binary tree's leaves is a subtree of
it. The leaves themselves come from `numerics.Reduction`.
"""

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
