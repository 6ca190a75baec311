# SPDX-License-Identifier: Apache-2.0
"""What the sm90 kernels of rows share: layouts, exact instructions, reductions, the launch.

A row's sum has one structure, given by its width. How many rows or warpgroups a CTA takes is chosen
for speed and changes no bit.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.hopper_sums import NUM_PARTS
from detjax.pallas_kernels.sm90_hardware import LANES, WARP


def instruction(op: str):
    """A PTX instruction on scalars or vectors of float32; ptxas cannot fuse one that says `.rn`."""
    return mgpu.FragmentedArray._lift_fast_instr(op)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Float32 operations on arrays of one layout, one named instruction each.

    Attributes:
        layout: Layout of every operand and result.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    layout: object
    is_interpreted: bool

    def apply(self, emit: Callable, plain: Callable, *args, dtype=jnp.float32):
        """Run `emit` register by register, or `plain` where interpreted."""
        if self.is_interpreted:
            return plain(*args)

        @plgpu.inline_mgpu(
            arg_types=(self.layout,) * len(args),
            return_type=plgpu.ShapeDtypeStruct(args[0].shape, dtype, layout=self.layout),
        )
        def op(ctx, first, *rest):
            return first._pointwise(emit, *rest)

        return op(*args)

    def mul(self, a, b):
        """A product, rounded: never fused with a later sum."""
        return self.apply(lambda x, y: instruction("mul.rn.f32")(x, y), lambda x, y: x * y, a, b)

    def add(self, a, b):
        """A sum, rounded."""
        return self.apply(lambda x, y: instruction("add.rn.f32")(x, y), lambda x, y: x + y, a, b)

    def sub(self, a, b):
        """A difference, rounded."""
        return self.apply(lambda x, y: instruction("sub.rn.f32")(x, y), lambda x, y: x - y, a, b)

    def fma(self, a, b, c):
        """`a * b + c`, rounded once."""
        emit = lambda x, y, z: instruction("fma.rn.f32")(x, y, z)  # noqa: E731
        return self.apply(emit, lambda x, y, z: x * y + z, a, b, c)

    def divide(self, a, b):
        """`a / b`, correctly rounded."""
        return self.apply(lambda x, y: instruction("div.rn.f32")(x, y), lambda x, y: x / y, a, b)

    def reciprocal(self, a):
        """`1 / a`, correctly rounded."""
        return self.apply(lambda x: instruction("rcp.rn.f32")(x), lambda x: 1.0 / x, a)

    def exp2_difference(self, a, b):
        """`exp2(a - b)`: a rounded difference, then ex2.approx.ftz."""

        def emit(x, y):
            return instruction("ex2.approx.ftz.f32")(instruction("sub.rn.f32")(x, y))

        return self.apply(emit, lambda x, y: jnp.exp2(x - y), a, b)

    def exp2_scaled(self, scores, negative_max, scale: float):
        """`exp2(scores * scale + negative_max)`: one fma, then ex2.approx.ftz."""

        def emit(s, m):
            scaled = instruction("fma.rn.f32")(s, mgpu.c(scale, s.type), m)
            return instruction("ex2.approx.ftz.f32")(scaled)

        return self.apply(emit, lambda s, m: jnp.exp2(s * scale + m), scores, negative_max)

    def soft_cap(self, x, exponent: float, cap: float):
        """`cap * tanh(...)`: see `hopper_sums.cap_factors`.

        A rounded product, ex2.approx.ftz, a rounded sum, rcp.approx.ftz, one fma. Where exp2 is
        infinite, the reciprocal is 0 and the result `cap`.
        """

        def emit(x):
            number = functools.partial(mgpu.c, ty=x.type)
            power = instruction("mul.rn.f32")(x, number(exponent))
            power = instruction("ex2.approx.ftz.f32")(power)
            share = instruction("add.rn.f32")(power, number(1.0))
            share = instruction("rcp.approx.ftz.f32")(share)
            return instruction("fma.rn.f32")(share, number(-2 * cap), number(cap))

        def plain(x):
            return cap - 2 * cap / (jnp.exp2(x * exponent) + 1.0)

        return self.apply(emit, plain, x)

    def reciprocal_root(self, a):
        """`1 / sqrt(a)` by rsqrt.approx, within 2 ulp."""
        emit = lambda x: instruction("rsqrt.approx.f32")(x)  # noqa: E731
        return self.apply(emit, lax.rsqrt, a)

    def full(self, shape, value, dtype=jnp.float32):
        """A constant or a scalar in this layout."""
        return self.cast(jnp.full(shape, value, dtype))

    def cast(self, x):
        """Fix the layout of `x`."""
        return x if self.is_interpreted else plgpu.layout_cast(x, self.layout)

    def load(self, ref):
        """Read a block of global or shared memory."""
        if self.is_interpreted:
            return ref[...]
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def iota(self, shape, axis: int):
        """Indices along `axis`."""
        if self.is_interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=self.layout)


def add_unless_zero(base, added, math: Arithmetic):
    """`base + added`, and `base` where `added` is zero, so that -0 stays."""
    return jnp.where(added == math.full(added.shape, 0.0), base, math.add(base, added))


def strided(size: int, vec_len: int, is_interpreted: bool) -> Arithmetic:
    """Arithmetic on a vector: thread t holds runs of `vec_len` elements from `t * vec_len`."""
    return Arithmetic(
        layout=plgpu.Layout.WG_STRIDED((size,), vec_size=vec_len), is_interpreted=is_interpreted
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Rows side by side in a warpgroup, `lanes` threads to a row.

    What a row's threads do does not depend on `rows`: with fewer rows, more threads do the same.

    Attributes:
        rows: Rows of the tile, a power of two.
        whole: Arithmetic on [rows, columns].
        per_row: Arithmetic on one value a row.
        per_col: Arithmetic on one value a column.
    """

    rows: int
    whole: Arithmetic
    per_row: Arithmetic
    per_col: Arithmetic

    def sum_columns(self, x):
        """Sum of each row: [rows].

        # ORDER: a thread's elements left to right, then a row's lanes across distance 1, 2, 4, ....
        # WHY: add.rn, since ptxas may fuse an unmarked add with the last multiply of exp, and may
        # do so in one kernel and not in its twin.
        """
        if self.whole.is_interpreted:
            return jnp.sum(x, axis=1)

        @plgpu.inline_mgpu(
            arg_types=(self.whole.layout,),
            return_type=plgpu.ShapeDtypeStruct(
                x.shape[:1], jnp.float32, layout=self.per_row.layout
            ),
        )
        def emit(ctx, v):
            return v.reduce(lambda a, b: instruction("add.rn.f32")(a, b), 1)

        return emit(x)

    def over_columns(self, row_values, shape):
        """Repeat one value a row."""
        return self.whole.cast(lax.broadcast_in_dim(row_values, shape, [0]))

    def over_rows(self, col_values, shape):
        """Repeat one value a column; values of a shape of their own stay."""
        if col_values.shape == shape:
            return col_values
        return self.whole.cast(lax.broadcast_in_dim(col_values, shape, [1]))


@functools.cache
def tile_of_rows(rows: int, *, lanes: int, vec_len: int, is_interpreted: bool) -> Tile:
    """Lay out `rows` rows, `lanes` threads to each, a thread holding runs of `vec_len` columns."""
    rows_in_warp = 32 // lanes
    most = 4 * rows_in_warp
    if rows & (rows - 1):
        raise ValueError(f"{rows=} must be a power of two")
    held = min(rows, most)
    warps = min(held, 4)
    in_lanes = held // warps
    span = lanes * vec_len
    tiling = fragmented_array.Tiling(((held, span), (in_lanes, span), (1, vec_len)))
    # Axes of a tile, from the last: vec_len, 1, lanes, in_lanes, 1, warps.
    warp_dims = tuple(
        dim
        for dim, size in (
            (fragmented_array.Replicated(4 // warps), 4 // warps),
            (-6, warps),
        )
        if size > 1
    )
    copies = rows_in_warp // in_lanes
    lane_dims = tuple(
        dim
        for dim, size in (
            (fragmented_array.Replicated(copies), copies),
            (-4, in_lanes),
            (-3, lanes),
        )
        if size > 1
    )
    layout = mgpu.TiledLayout(tiling, warp_dims, lane_dims, -1, _check_canonical=False)
    layout = layout.canonicalize()
    whole = plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
    make = functools.partial(Arithmetic, is_interpreted=is_interpreted)
    return Tile(
        rows=rows,
        whole=make(layout=whole),
        per_row=make(layout=whole.reduce(1)),
        per_col=make(layout=whole.reduce(0)),
    )


def most_rows(limit: int, count: int) -> int:
    """The largest power of two that is at most `limit` and at most `count`."""
    rows = 1
    while rows * 2 <= min(limit, count):
        rows *= 2
    return rows


def pairwise(terms: list, add: Callable):
    """Add a list in pairs, and the pairs in pairs; an odd one out waits for the next round."""
    while len(terms) > 1:
        pairs = [add(a, b) for a, b in zip(terms[0::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0]


def one_a_thread(value) -> mgpu.FragmentedArray:
    """An array of LANES values, one a thread."""
    register = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    return mgpu.FragmentedArray(
        _registers=np.array([register], dtype=object),
        _layout=mgpu.WGStridedFragLayout((LANES,), 1),
        _is_signed=True if isinstance(value.type, ir.IntegerType) else None,
    )


def reduce_warps(
    x, math: Arithmetic, *, first: Callable, fold: Callable, plain: tuple, lanes: int = WARP
):
    """Reduce what each warp holds of a vector: [LANES], the same value in a warp's lanes.

    `first` makes a thread's scalars one; then lanes exchange across distance 1, 2, 4, 8, 16. With
    fewer `lanes`, a power of two, so many neighbours exchange among themselves.
    """
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    if math.is_interpreted:
        plain_first, plain_op = plain
        value = plain_first(x.reshape(LANES, -1)).reshape(-1, lanes)
        while value.shape[1] > 1:
            value = plain_op(value[:, 0::2], value[:, 1::2])
        return jnp.broadcast_to(value, (LANES // lanes, lanes)).reshape(LANES)

    @plgpu.inline_mgpu(
        arg_types=(math.layout,),
        return_type=plgpu.ShapeDtypeStruct((LANES,), x.dtype, layout=layout),
    )
    def emit(ctx, v):
        value = first(ptx.scalars_of(v))
        distance = 1
        while distance < lanes:
            value = fold(value, mgpu.utils.shfl_bfly(value, distance))
            distance *= 2
        return one_a_thread(value)

    return emit(x)


def square_sums(x, math: Arithmetic):
    """Sum of squares of what each warp holds of a vector: [LANES], one value a warp.

    # ORDER: a thread's elements left to right, `total = fma(x, x, total)` from `x0 * x0`; then
    # lanes across distance 1, 2, 4, 8, 16.
    """

    def first(scalars):
        total = instruction("mul.rn.f32")(scalars[0], scalars[0])
        for s in scalars[1:]:
            total = instruction("fma.rn.f32")(s, s, total)
        return total

    def plain_first(rows):
        total = rows[:, 0] * rows[:, 0]
        for i in range(1, rows.shape[1]):
            total = rows[:, i] * rows[:, i] + total
        return total

    return reduce_warps(
        x,
        math,
        first=first,
        fold=lambda a, b: instruction("add.rn.f32")(a, b),
        plain=(plain_first, lambda a, b: a + b),
    )


def load_padded(ref, count: int, math: Arithmetic, *, size: int, fill) -> jax.Array:
    """Read `count` elements of a vector in memory and fill up to `size` elements."""
    if math.is_interpreted:
        return jnp.pad(ref[...], (0, size - count), constant_values=fill)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((size,), ref.dtype, layout=math.layout),
    )
    def emit(ctx, memory):
        index = ir.IndexType.get()
        layout = math.layout.to_mgpu()
        element = ir.MemRefType(memory.type).element_type
        registers = []
        for start in layout.linear_thread_idxs():
            values = []
            for i in range(layout.vec_size):
                at = arith.addi(start, mgpu.c(i, index))
                is_inside = arith.cmpi(arith.CmpIPredicate.ult, at, mgpu.c(count, index))
                value = memref.load(memory, [arith.minui(at, mgpu.c(count - 1, index))])
                values.append(arith.select(is_inside, value, mgpu.c(fill, element)))
            kind = ir.VectorType.get((layout.vec_size,), element)
            registers.append(vector.from_elements(kind, values))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object),
            _layout=layout,
            _is_signed=True if isinstance(element, ir.IntegerType) else None,
        )

    return emit(ref)


def keep_warp_values(values, ref, math: Arithmetic) -> None:
    """Put what `reduce_warps` left, one value a warp, into four elements of shared memory."""
    if math.is_interpreted:
        ref[...] = values[::32]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_STRIDED((LANES,), vec_size=1), plgpu.RefType()))
    def emit(ctx, values, memory):
        (value,) = ptx.scalars_of(values)
        # A warp's lanes write the same value to the same place.
        memref.store(value, memory, [arith.index_cast(ir.IndexType.get(), ptx.warp())])

    emit(values, ref)


def split_bf16(x, math: Arithmetic) -> list:
    """Cut float32 into `NUM_PARTS` bfloat16 values that add up to it, the greatest first.

    # ROUND: x1 = bf16(x), x2 = bf16(x - x1), x3 = bf16((x - x1) - x2), each to nearest, ties to
    even. Both differences are exact, and so is x3 if abs(x) >= 2**-103 (below, what is lost is
    under 2**-126). From 2**128 - 2**119 up, x1 is infinite and the rest NaN.
    """
    parts = []
    for i in range(NUM_PARTS):
        part = x.astype(jnp.bfloat16)
        parts.append(part)
        if i < NUM_PARTS - 1:
            kept = part.astype(jnp.float32)
            if math.is_interpreted:  # XLA may drop a pair of converts
                kept = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
            x = math.sub(x, kept)
    return parts


def sum_parts(parts: list, add: Callable):
    """Add what the parts of `split_bf16` gave: one value, or three of a float32.

    # ORDER: the smallest first, (p3 + p2) + p1.
    """
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = add(total, part)
    return total


SLAB_BYTES = 128
"""Of a row of a block that is one swizzle span wide."""

SLAB = SLAB_BYTES // 2
"""Columns of such a block of bfloat16."""


def slab_of(dtype) -> int:
    """Columns of a block that is one swizzle span wide."""
    return SLAB_BYTES // jnp.dtype(dtype).itemsize


def _slab_transforms(dtype) -> tuple:
    return plgpu.TilingTransform((8, slab_of(dtype))), plgpu.SwizzleTransform(SLAB_BYTES)


def store_in_slabs(ref, values, row, start: int, math: Arithmetic) -> None:
    """Put columns of one row where wgmma reads them: blocks of 8 rows, swizzled by 128 bytes.

    Args:
        ref: Shared memory of blocks, [steps, slabs, 8, columns] in order of column.
        values: [n], of the dtype of `ref`, the columns from `start`; whole blocks.
        row: Which of the 8 rows, an int32 scalar.
        start: First column.
        math: Arithmetic of a `strided` layout with one run a thread.
    """
    width = slab_of(ref.dtype)
    if math.is_interpreted:
        for i in range(values.shape[0] // width):
            at = divmod(start // width + i, ref.shape[-3])
            ref[*at, row, :] = values[i * width : (i + 1) * width]
        return

    memory_type = plgpu.RefType(_slab_transforms(ref.dtype))

    @plgpu.inline_mgpu(arg_types=(math.layout, memory_type, ptx.SCALAR))
    def emit(ctx, values, memory, row):
        (register,) = values.registers.flat
        [vec_len] = ir.VectorType(register.type).shape
        vector.store(register, memory, _place_in_slabs(ref, row, start, vec_len))

    emit(values, ref, row)


def load_from_slabs(ref, row, start: int, width: int, math: Arithmetic):
    """Read what `store_in_slabs` puts, or what TMA has put there: `width` columns from `start`."""
    of_slab = slab_of(ref.dtype)
    if math.is_interpreted:
        slabs = range(start // of_slab, (start + width) // of_slab)
        parts = [ref[*divmod(slab, ref.shape[-3]), row, :] for slab in slabs]
        return jnp.concatenate(parts)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_slab_transforms(ref.dtype)), ptx.SCALAR),
        return_type=plgpu.ShapeDtypeStruct((width,), ref.dtype, layout=math.layout),
    )
    def emit(ctx, memory, row):
        vec_len = width // LANES
        kind = ir.VectorType.get((vec_len,), mgpu.utils.dtype_to_ir_type(ref.dtype))
        register = vector.load(kind, memory, _place_in_slabs(ref, row, start, vec_len))
        registers = np.array([register], dtype=object)
        layout = mgpu.WGStridedFragLayout(shape=(width,), vec_size=vec_len)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape((width,))),
            _layout=layout, _is_signed=None,
        )  # fmt: skip

    return emit(ref, row)


def _place_in_slabs(ref, row, start: int, vec_len: int) -> list:
    """Where a thread's `vec_len` columns of a row lie, as indices of `ref` as Mosaic tiles it."""
    row, i32 = row.registers.item(), ptx.i32
    width = slab_of(ref.dtype)
    column = arith.muli(ptx.thread(), i32(vec_len))
    slab = arith.addi(arith.divui(column, i32(width)), i32(start // width))
    step, slab = (op(slab, i32(ref.shape[1])) for op in (arith.divui, arith.remui))
    # The swizzle: in row r the 16 bytes of place p are those of place p ^ r.
    unit = arith.muli(row, i32(width // 8))
    place = arith.xori(arith.remui(column, i32(width)), unit)
    index = ir.IndexType.get()
    return [arith.index_cast(index, i) for i in (step, slab, i32(0), i32(0), row, place)]


def first_of_warps(ref) -> list:
    """The scalars of a [LANES] vector in memory that a warp-wide result left: one a warp."""
    return [ref[32 * warp] for warp in range(4)]


def _compiler_params() -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        approx_math=False,
        unsafe_no_auto_barriers=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def run_kernel(body, operands, *, out, grid: dict, name: str, is_interpreted: bool, **options):
    """Launch a kernel of row operations; `grid` is {axis name: size}, the longest axis last."""
    return plgpu.kernel(
        body,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=_compiler_params(),
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
        **options,
    )(*operands)
