# SPDX-License-Identifier: Apache-2.0
"""The shared memory of rows that a product normalises or quantises itself."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.linear.sm90_sums import tiled
from detjax.pallas_kernels.sm90_rows import SLAB, slab_of


def held_block(num_steps: int, slabs: int, dtype: jnp.dtype, *, as_one_box: bool):
    """Shared memory of 8 rows, blocks [num_steps, slabs, 8, columns] in order of column.

    With `as_one_box` it has a second view, [8, K]: the same bytes in the same order, for TMA.
    """
    columns = slab_of(dtype)
    shapes = (num_steps, slabs, 8, columns), (8, num_steps * slabs * columns)
    blocks, one_box = (plgpu.SMEM(s, dtype, transforms=tiled(columns, dtype)) for s in shapes)
    return plgpu.RefUnion(blocks, one_box) if as_one_box else blocks


def num_copies(k_len: int, *, as_one_box: bool) -> int:
    """Arrivals at the barrier of `copy_rows`."""
    return 1 if as_one_box else k_len // SLAB


def copy_rows(x_gmem, held_smem, copied, *, as_one_box: bool) -> None:
    """Ask TMA for all rows; `held_smem` is the view [8, K] with `as_one_box`, else the blocks."""
    rows = pl.ds(jnp.int32(0), 8)
    if as_one_box:
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], held_smem, copied)
        return
    _, slabs, _, span = held_smem.shape
    for i in range(x_gmem.shape[1] // span):
        place = held_smem.at[*divmod(i, slabs)]
        plgpu.copy_gmem_to_smem(x_gmem.at[rows, pl.ds(i * span, span)], place, copied)
