# SPDX-License-Identifier: Apache-2.0
"""How every portable kernel is launched: one body of one fixed shape, over and over.

XLA:CPU picks vector widths, unrolling and fused multiply-adds by the shapes and the neighbours of
an operation, so the same formula on 1 row and on 17 rows has different bits. Here each program of
the grid runs the same body on blocks of the same shape, whatever the number of rows, columns or
ranks. The grid is a loop whose bound the compiler cannot see, so a grid of one is not inlined into
its surroundings and fused with them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

ROWS = 16
"""Rows of a block that feeds a matrix product, and of every other block too."""

COLS = 128
"""Columns of an elementwise block; a multiple of every vector width."""


def num_blocks(size: int, block: int) -> int:
    """How many blocks cover `size`."""
    return -(-size // block)


def pad_axis(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Append zeros until `axis` is a multiple of `block`."""
    size = x.shape[axis]
    extra = num_blocks(size, block) * block - size
    if extra == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, extra)
    return jnp.pad(x, widths)


def run_blocks(
    body: Callable[..., None],
    *operands: jax.Array,
    name: str,
    grid: Sequence[int | jax.Array],
    out_shape: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    out_specs: pl.BlockSpec | Sequence[pl.BlockSpec],
) -> Any:
    """Run `body` once for each point of `grid`, last axis fastest.

    Callers are jitted, so a kernel that a model calls once a layer is traced and lowered once.

    The body gets every operand whole and reads its own blocks with `pl.ds`: a block handed in by
    the interpreter would be written back each time, which copies weights and cache.

    The first size of `grid` may be traced; blocks of the output that no program writes are
    undefined.

    Returns:
        An array, or one array for each of several `out_shape`s.
    """
    # SHAPE: the bound is hidden from the compiler, see the module's docstring.
    hidden = lax.optimization_barrier(jnp.int32(grid[0]))
    return pl.pallas_call(
        body,
        name=f"portable_{name}",
        grid=(hidden, *grid[1:]),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=True,
    )(*operands)


def add_leaves(leaves: jax.Array) -> jax.Array:
    """Add a power of two of float32 leaves, [L, M, N] to [M, N], as a perfect binary tree."""
    _, num_rows, width = leaves.shape
    leaves = pad_axis(leaves, 1, ROWS)

    def body(leaves_ref, out_ref):
        totals = leaves_ref[:, pl.ds(pl.program_id(0) * ROWS, ROWS), :]
        # ORDER: ((l0 + l1) + (l2 + l3)) + ..., additions only, so nothing can fuse.
        while totals.shape[0] > 1:
            totals = totals[0::2] + totals[1::2]
        out_ref[...] = totals[0]

    out = run_blocks(
        body,
        leaves,
        name="add_leaves",
        grid=(leaves.shape[1] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(leaves.shape[1:], jnp.float32),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return out[:num_rows]


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round float32 to `dtype`'s precision and keep it float32.

    # ROUND: `reduce_precision`, since XLA may drop a pair of converts.
    """
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x
