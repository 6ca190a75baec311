# SPDX-License-Identifier: Apache-2.0
"""What every product on Hopper is made of: leaves in accumulators, their trees, blocks for TMA."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.sm90_rows import Arithmetic

TILE_SNAKE = 8
"""Width of the snake in which CTAs visit the tiles of a product's output."""

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=False,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    # A thread reads back only what it wrote itself, in one layout; TMA has its own fences.
    unsafe_no_auto_barriers=True,
)
"""Of kernels that multiply."""


def tiled(minor: int, dtype, *, sublanes: int = 8):
    """Transforms of a shared-memory block whose minor axis is one swizzle span."""
    swizzle = minor * jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((sublanes, minor)), plgpu.SwizzleTransform(swizzle))


def ragged(shape, minor, dtype, is_ragged):
    """A block to multiply or fill, and the same memory as TMA must see it.

    # WHY: a TMA block tiled by 8 rows needs less than 8 rows or a multiple of 8. One swizzle span
    # wide, the block has the same bytes when tiled by 1 row, and then any row count will do.
    """
    block = plgpu.SMEM(shape, dtype, transforms=tiled(minor, dtype))
    if not is_ragged:
        return block
    seen = plgpu.SMEM(shape, dtype, transforms=tiled(minor, dtype, sublanes=1))
    return plgpu.RefUnion(block, seen)


def views(ref, is_ragged):
    """A block of `ragged` twice: as to multiply or fill, and as TMA must see it."""
    return tuple(ref) if is_ragged else (ref, ref)


def leaf_sum(
    shape,
    num_steps: int,
    *,
    take,
    multiply,
    give,
    in_flight: int,
    after=None,
    by_twos: bool = False,
    dtype=jnp.float32,
):
    """Accumulate one leaf in a fresh accumulator of `shape`: what every product is made of.

    Args:
        shape: Of the accumulator.
        num_steps: Pipeline stages of the leaf.
        take: Waits until the operands of step i are in shared memory.
        multiply: Issues the products of step i.
        give: Hands the memory of step i's operands back to who loads.
        in_flight: Products that may still run when a step is given back: those of the next, or 0.
        after: Called at the end of step i.
        by_twos: Whether two steps stand one after the other in the code, so that operands in
            registers have other registers in the next step than those that products still read.
        dtype: Of the accumulator.
    """

    def scope(acc):
        def step(i, _):
            take(i)
            multiply(i, acc)
            plgpu.wgmma_wait(in_flight)
            if after is not None:
                after(i)
            if not in_flight:
                give(i)
                return ()

            @pl.when(i > 0)
            def _():
                give(i - 1)

            return ()

        if by_twos:
            lax.fori_loop(0, num_steps // 2, lambda i, _: step(2 * i + 1, step(2 * i, ())), ())
            if num_steps % 2:
                step(jnp.int32(num_steps - 1), ())
        else:
            lax.fori_loop(0, num_steps, step, ())
        total = acc[...]
        if in_flight:
            give(num_steps - 1)
        return total

    return pl.run_scoped(scope, plgpu.ACC(shape, dtype))


def chunked_sum(shape, num_steps: int, *, take, multiply, give, num_chunks: int, scales=None):
    """Add chunks of K, each the sum of an accumulator of its own that starts at zero.

    WHY: the tensor core adds float8 products with 13 fraction bits, which float32 has 23 of.

    Args:
        shape: Of the sum.
        num_steps: Pipeline stages.
        take: Waits until the operands of step i are in shared memory.
        multiply: Issues the products of step i and chunk j.
        give: Hands the memory of step i's operands back to who loads.
        num_chunks: Of a step.
        scales: What a chunk is multiplied by; None for 1.

    Returns:
        The sum; with scales in its `ChunkScales.pieces`.

    # ORDER: ((c_0 + c_1) + c_2) + ..., f32, from 0 + c_0; with scales fma(c, scale, total) from 0.
    """

    def chunk(i, j):
        def scope(acc):
            multiply(i, j, acc)
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32))

    def of_weights(i) -> list:
        return [scales.of_weights(i, j) for j in range(num_chunks)]

    def step(i, totals):
        # WHY: what is in device memory is on its way while the operands of the step are.
        weights = of_weights(i) if scales and not scales.is_late else []
        take(i)
        weights = of_weights(i) if scales and scales.is_late else weights
        rows = [scales.of_rows(i, j) for j in range(num_chunks)] if scales else []
        for j in range(num_chunks):
            if scales:
                totals = scales.added(totals, chunk(i, j), rows[j], weights[j])
            else:
                totals = (totals[0] + chunk(i, j),)
        give(i)
        return totals

    def zeros(shape):
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    shapes = [shape] if scales is None else [scales.piece_shape] * len(scales.pieces)
    totals = lax.fori_loop(0, num_steps, step, tuple(map(zeros, shapes)))
    return totals if scales else totals[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkScales:
    """Scales of the chunks of a product, whose weights share one in blocks of output channels.

    Attributes:
        of_weights: `of_weights(i, j)` loads those of step i and chunk j, a scalar a piece.
        of_rows: `of_rows(i, j)` loads those of activations, a vector along `axis`.
        axis: Of the accumulator, along which activations lie.
        pieces: Parts of the accumulator with one scale of weights each.
        piece_shape: Of each piece.
        math: Arithmetic on the accumulator's layout.
        is_late: Whether scales of weights are known only when a step's operands are there.
    """

    of_weights: Callable
    of_rows: Callable
    axis: int
    pieces: tuple
    piece_shape: tuple[int, int]
    math: Arithmetic
    is_late: bool = False

    def added(self, totals: tuple, chunk, of_rows, of_weights: list) -> tuple:
        """Each piece's `fma(chunk, of_rows * of_weights, total)`."""
        of_axis = Arithmetic(
            layout=plgpu.Layout.WGMMA.reduce(1 - self.axis), is_interpreted=self.math.is_interpreted
        )
        found = []
        for total, piece, weight in zip(totals, self.pieces, of_weights, strict=True):
            scale = of_axis.mul(of_rows, of_axis.full(of_rows.shape, weight))
            scale = self.math.cast(lax.broadcast_in_dim(scale, self.piece_shape, (self.axis,)))
            found.append(self.math.fma(chunk[piece], scale, total))
        return tuple(found)


def load_vector(ref, axis: int, *, is_interpreted: bool):
    """Values in memory as they lie along an axis of an accumulator."""
    if is_interpreted:
        return ref[...]
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def tree_sum(shape, levels: int, leaf_steps: int, leaf, first, *, pending=(), is_paired=False):
    """Add 2**levels leaves, the first of which starts at step `first`; `leaf` sums one.

    The sums of the left halves of the top levels wait in `pending`, shared memory, one a level.

    # ORDER: the perfect binary tree, left + right or (0 + left) + right.
    """
    if levels == 0:
        return leaf(first)
    half = leaf_steps << (levels - 1)
    below = functools.partial(
        tree_sum, shape, levels - 1, leaf_steps, leaf, pending=pending[1:], is_paired=is_paired
    )
    if pending:
        pending[0][...] = below(first)
        right = below(first + half)
        return plgpu.load(pending[0], layout=plgpu.Layout.WGMMA) + right
    if levels == 1 and is_paired:
        left = leaf(first)
        return left + leaf(first + half)
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, 2, lambda i, left: left + below(first + i * half), zeros)


def add_bias(total, bias_gmem, start, axis: int):
    """Add the biases from output `start` to an accumulator whose outputs lie along `axis`."""
    values = plgpu.load(
        bias_gmem.at[pl.ds(start, total.shape[axis])],
        layout=plgpu.Layout.WGMMA.reduce(1 - axis),
        optimized=False,
    )
    return total + lax.broadcast_in_dim(values.astype(jnp.float32), total.shape, (axis,))


def load_from_any(
    ref, first, size: int, axis: int, *, last: int | None = None, is_interpreted: bool
):
    """`load_vector` of `size` float32 from element `first` on, which may be any.

    Element `last` stands for all behind it, if there is one.

    # WHY: `load_vector` reads two neighbours along rows at once, which must lie at an even place.
    """
    if is_interpreted:
        if last is None:
            return ref[pl.ds(first, size)]
        return ref[...][jnp.minimum(first + jnp.arange(size), last)]
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.SCALAR),
        return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout),
    )
    def emit(ctx, memory, first):
        start = first.registers.item()
        places = mgpu.FragmentedArray.broadcasted_iota(
            ptx.int_type(), (size,), 0, layout.to_mgpu(), is_signed=True
        )
        registers = np.empty(places.registers.shape, object)
        for at, register in np.ndenumerate(places.registers):
            count = ir.VectorType(register.type).shape[0]
            where = [arith.addi(start, ptx.element(register, i)) for i in range(count)]
            if last is not None:
                where = [arith.minui(it, ptx.i32(last)) for it in where]
            index = ir.IndexType.get()
            values = [memref.load(memory, [arith.index_cast(index, it)]) for it in where]
            kind = ir.VectorType.get((count,), ir.F32Type.get())
            registers[at] = vector.from_elements(kind, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=places.layout, _is_signed=None)

    return emit(ref, jnp.int32(first))


def scaled(total, scales: list, math: Arithmetic):
    """Sums of 8-bit values times their scales.

    Args:
        total: int32 or float32 accumulator.
        scales: float32 as `load_vector` gives them, and the axis that they lie along, in the order
            of the products.
        math: Arithmetic on the accumulator's layout.

    # ROUND: a sum of integers to float32, then each product.
    """
    total = total.astype(jnp.float32)
    for values, axis in scales:
        total = math.mul(total, math.cast(lax.broadcast_in_dim(values, total.shape, (axis,))))
    return total


def put_transposed(out, block, kept_block=None) -> None:
    """Add what is in `kept_block`, round to the dtype of `block`, and put there, transposed."""
    if kept_block is not None:
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        kept = plgpu.load(kept_block.T, layout=plgpu.Layout.WGMMA_TRANSPOSED)
        out = kept.astype(jnp.float32) + out
    block.T[...] = plgpu.layout_cast(
        out.astype(block.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )  # ROUND: once, to the output's dtype
    plgpu.commit_smem()


def put_column(values, column, target, math: Arithmetic) -> None:
    """Store one column of an accumulator's shape in device memory, from registers.

    Args:
        values: [rows, columns], of the dtype of `target`.
        column: Which, an int32 scalar.
        target: [rows].
        math: Arithmetic on the layout of `values`.
    """
    if math.is_interpreted:
        target[...] = lax.dynamic_index_in_dim(values, column, axis=1, keepdims=False)
        return

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(), ptx.SCALAR))
    def emit(ctx, values, memory, column):
        rows, columns = (
            mgpu.FragmentedArray.broadcasted_iota(
                ptx.int_type(), values.shape, axis, math.layout.to_mgpu(), is_signed=True
            )
            for axis in (0, 1)
        )
        places = (ptx.scalars_of(it) for it in (values, rows, columns))
        for value, row, at in zip(*places, strict=True):
            with mgpu.utils.when(ptx.equals(at, column.registers.item())):
                memref.store(value, memory, [arith.index_cast(ir.IndexType.get(), row)])

    emit(values, target, column)
