# SPDX-License-Identifier: Apache-2.0
"""Rows that a product normalises itself, and holds whole in shared memory."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.sm90_sums import tiled
from detjax.pallas_kernels.rms_norm.sm90 import normalise_wide_rows
from detjax.pallas_kernels.sm90_rows import SLAB


def hold_rows(
    x_gmem, gain_gmem, held_smem, sums_smem, share, rows_each: int, *,
    eps: float, num_threads: int, is_interpreted: bool, is_in_place: bool = False, ready=None,
    read=None, keep=None, arrived=None,
) -> None:  # fmt: skip
    """Put a warpgroup's share of the normalised rows into shared memory, blocks [., ., 8, 64].

    Meanwhile the weights stream in. Of 8 rows those past M hold whatever was there: they are
    columns of the product that are never stored. `ready`, `read`, `keep` and `arrived` are those of
    `normalise_wide_rows`, but `keep(0, ...)` gets channels as read, `keep(1, ...)` normalised ones.
    With `is_in_place`, `read` reads that shared memory.
    """
    put = functools.partial(sm90_rows.store_in_slabs, held_smem)

    def store(values, row, start, math):
        put(values, row, start, math)
        if keep is not None:
            keep(1, values, row, start)

    def keep_read(values, row, start, math):
        keep(0, values, row, start)

    # WHY: in place a row has one warpgroup, as another would read what is normalised already.
    first, last = share * rows_each, (7 if is_in_place else x_gmem.shape[0] - 1)
    normalise_wide_rows(
        x_gmem,
        gain_gmem,
        # Shares that do not divide M end with its last row, written more than once, alike.
        [jnp.minimum(first + i, last) for i in range(rows_each)],
        sums_smem.at[share],
        put if keep is None else store,
        eps=eps,
        num_registers=min(255, 65536 // (sm90_rows.LANES * num_threads)),
        is_interpreted=is_interpreted,
        ready=ready,
        read=read,
        keep=None if keep is None else keep_read,
        arrived=arrived,
        is_read_again=is_in_place,
    )
    plgpu.commit_smem()


def held_block(num_steps: int, slabs: int, *, as_one_box: bool):
    """Shared memory of 8 rows, blocks [num_steps, slabs, 8, 64] in order of column.

    With `as_one_box` it has a second view, [8, K]: the same bytes in the same order, for TMA.
    """
    shapes = (num_steps, slabs, 8, SLAB), (8, num_steps * slabs * SLAB)
    transforms = tiled(SLAB, jnp.bfloat16)
    blocks, one_box = (plgpu.SMEM(s, jnp.bfloat16, transforms=transforms) for s in shapes)
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
