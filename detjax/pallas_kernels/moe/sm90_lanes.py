# SPDX-License-Identifier: Apache-2.0
"""Integers of a warpgroup, one or a few a thread: what the lists of experts are made with.

`scatter` and `gather` move float32 as well.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows


def padded(size: int) -> int:
    """`size`, or the next multiple of a warpgroup's threads."""
    return -(-size // rows.LANES) * rows.LANES


def integers(size: int, is_interpreted: bool) -> rows.Arithmetic:
    """The layout of `size` integers: thread t holds neighbours from `t * size / LANES`."""
    return rows.strided(size, size // rows.LANES, is_interpreted)


def _joined(scalars: list, like) -> mgpu.FragmentedArray:
    """An array of the layout of `like`, one register, from the scalars of a thread."""
    kind = ir.VectorType.get((len(scalars),), scalars[0].type)
    registers = like.registers.copy()
    registers[...] = vector.from_elements(kind, scalars)
    is_signed = True if isinstance(kind.element_type, ir.IntegerType) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=is_signed)


def scatter(ref, index, values, math: rows.Arithmetic) -> None:
    """`ref[index] = values`, element by element, where the index is inside `ref`."""
    size = ref.shape[0]
    if math.is_interpreted:

        def one(i, _):  # One by one, as CTAs may write side by side.
            @pl.when((index[i] >= 0) & (index[i] < size))
            def _():
                ref[index[i]] = values[i]

            return ()

        lax.fori_loop(0, index.shape[0], one, ())
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), math.layout, math.layout))
    def emit(ctx, memory, index, values):
        for i, value in zip(ptx.scalars_of(index), ptx.scalars_of(values), strict=True):
            is_inside = arith.cmpi(arith.CmpIPredicate.ult, i, mgpu.c(size, i.type))
            with mgpu.utils.when(is_inside):
                memref.store(value, memory, [arith.index_cast(ir.IndexType.get(), i)])

    emit(ref, index, values)


def add_one(ref, index, math: rows.Arithmetic) -> None:
    """`ref[index] += 1`, element by element, where the index is inside `ref`, in shared memory.

    Threads add side by side, by atomic instructions: a sum of integers has no order.
    """
    size = ref.shape[0]
    if math.is_interpreted:
        is_here = index[:, None] == lax.broadcasted_iota(jnp.int32, (1, size), 1)
        ref[...] += jnp.sum(is_here.astype(jnp.int32), axis=0)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), math.layout))
    def emit(ctx, memory, index):
        base = ptx.address(memory)
        for i in ptx.scalars_of(index):
            with mgpu.utils.when(ptx.below(i, mgpu.c(size, i.type))):
                where = arith.addi(base, arith.muli(i, ptx.i32(4)))
                ptx.asm("red.shared.add.u32 [$0], $1;", [where, ptx.i32(1)])

    emit(ref, index)


def gather(ref, index, math: rows.Arithmetic):
    """`ref[index]`, element by element; every index is inside `ref`."""
    if math.is_interpreted:
        return ref[...][index]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), math.layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=math.layout),
    )
    def emit(ctx, memory, index):
        where = [arith.index_cast(ir.IndexType.get(), i) for i in ptx.scalars_of(index)]
        return _joined([memref.load(memory, [i]) for i in where], index)

    return emit(ref, index)


def load_from(ref, first, fill: int, size: int, math: rows.Arithmetic):
    """`size` elements of a vector in device memory from `first`, and `fill` past its end."""
    index = math.iota((size,), 0) + math.full((size,), first, jnp.int32)
    last = math.full((size,), ref.shape[0] - 1, jnp.int32)
    values = gather(ref, jnp.minimum(index, last), math)
    return jnp.where(index <= last, values, math.full((size,), fill, jnp.int32))


def copy(source, target, *, is_interpreted: bool) -> None:
    """Copy a vector of integers of any length."""
    math = integers(rows.LANES, is_interpreted)
    shape = (rows.LANES,)
    for start in range(0, source.shape[0], rows.LANES):
        index = math.iota(shape, 0) + math.full(shape, start, jnp.int32)
        last = math.full(shape, source.shape[0] - 1, jnp.int32)
        scatter(target, index, gather(source, jnp.minimum(index, last), math), math)


def sums_before(x, scratch, math: rows.Arithmetic):
    """Sum of all elements before each one; `scratch` is 4 integers in shared memory."""
    if math.is_interpreted:
        return jnp.cumsum(x) - x

    @plgpu.inline_mgpu(
        arg_types=(math.layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=math.layout),
    )
    def emit(ctx, x, memory):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        zero = mgpu.c(0, i32)
        thread = ptx.thread()
        lane, warp = arith.remui(thread, ptx.i32(ptx.WARP)), arith.divui(thread, ptx.i32(ptx.WARP))
        sums = [zero]
        for value in ptx.scalars_of(x):
            sums.append(arith.addi(sums[-1], value))
        total, before = sums.pop(), zero
        for distance in (1, 2, 4, 8, 16):
            other = mgpu.utils.shfl_bfly(total, distance)
            bit = arith.andi(lane, mgpu.c(distance, i32))
            is_second = arith.cmpi(arith.CmpIPredicate.ne, bit, zero)
            before = arith.select(is_second, arith.addi(before, other), before)
            total = arith.addi(total, other)
        # A warp's lanes write the same value to the same place.
        memref.store(total, memory, [arith.index_cast(index, warp)])
        mgpu.utils.warpgroup_barrier()
        for i in range(3):
            is_before = arith.cmpi(arith.CmpIPredicate.ugt, warp, mgpu.c(i, i32))
            other = memref.load(memory, [mgpu.c(i, index)])
            before = arith.addi(before, arith.select(is_before, other, zero))
        return _joined([arith.addi(before, s) for s in sums], x)

    return emit(x, scratch)


def greatest(x, scratch, math: rows.Arithmetic):
    """The greatest element, a scalar; `scratch` is 4 integers in shared memory."""
    if math.is_interpreted:
        return jnp.max(x)

    @plgpu.inline_mgpu(
        arg_types=(math.layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=ptx.SCALAR),
    )
    def emit(ctx, x, memory):
        index, warp = ir.IndexType.get(), ptx.warp()
        best = functools.reduce(arith.maxsi, ptx.scalars_of(x))
        for distance in (1, 2, 4, 8, 16):
            best = arith.maxsi(best, mgpu.utils.shfl_bfly(best, distance))
        # A warp's lanes write the same value to the same place.
        memref.store(best, memory, [arith.index_cast(index, warp)])
        mgpu.utils.warpgroup_barrier()
        found = [memref.load(memory, [mgpu.c(i, index)]) for i in range(4)]
        return mgpu.FragmentedArray.splat(functools.reduce(arith.maxsi, found), (), is_signed=True)

    return emit(x, scratch)


UNROLL = 8
"""Integers that a loop over shared memory reads at a time, to hide its latency."""


def over(ref, count: int, step, carry):
    """Fold `step(carry, ref[i], i)` over the first `count` integers of shared memory, in order.

    `count` is a multiple of `UNROLL`.
    """

    def some(turn, carry):
        first = turn * UNROLL
        values = [ref[first + i] for i in range(UNROLL)]
        for i, value in enumerate(values):
            carry = step(carry, value, first + i)
        return carry

    return lax.fori_loop(0, count // UNROLL, some, carry)
