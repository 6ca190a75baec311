# SPDX-License-Identifier: Apache-2.0
"""The steps of attention that fix a bit, shared by every sm90 kernel.

Mosaic GPU lets ptxas fuse a multiply and an add, and may do so in one kernel and not in its twin.
So each float operation here names its instruction. The kernels differ in who runs a step and when.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from detjax.numerics import LOG2_E
from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.hopper_sums import KEY_BLOCK, score_cap_factors, score_scale
from detjax.pallas_kernels.output_gate.sm90 import gated
from detjax.pallas_kernels.sm90_hardware import LANES

BLOCK = KEY_BLOCK  # keys of one online-softmax step, and of one page
ROWS = 64  # query rows of one warpgroup: the M of a wgmma instruction
SPAN_CHANNELS = 128
"""Channels of a head whose split, and those before, a warpgroup holds; wider heads are `wide`."""
EMPTY_MAX = -1e30
"""The running maximum before any key. Finite, so that subtracting it from itself is 0, not NaN."""

COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256)
"""Of the kernels of attention."""


def channel_span(channels: int) -> int:
    """Channels of one swizzle span: the most of 64, 32 and 16 that divides the head."""
    return math.gcd(channels, 64)


def swizzled(span: int) -> tuple:
    """Shared-memory layout of a 16-bit operand of wgmma, `span` columns to a swizzle span."""
    return (plgpu.TilingTransform((8, span)), plgpu.SwizzleTransform(2 * span))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionArithmetic:
    """Float operations of attention on a tile and on one value a row, one instruction each.

    A row is a query of one head: it has one maximum and one sum of weights.

    Attributes:
        layout: Layout of a tile.
        row_layout: Layout of one value a row.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    layout: object
    row_layout: object
    is_interpreted: bool

    def _of(self, shape) -> sm90_rows.Arithmetic:
        """The arithmetic of a tile, or of one value a row."""
        layout = self.layout if len(shape) == 2 else self.row_layout
        return sm90_rows.Arithmetic(layout=layout, is_interpreted=self.is_interpreted)

    def mul(self, a, b):
        """A product, rounded: never fused with a later sum."""
        return self._of(a.shape).mul(a, b)

    def fma(self, a, b, c):
        """`a * b + c`, rounded once."""
        return self._of(a.shape).fma(a, b, c)

    def exp2_difference(self, a, b):
        """`exp2(a - b)`: a rounded difference, then ex2.approx.ftz."""
        return self._of(a.shape).exp2_difference(a, b)

    def exp2_scaled(self, scores, negative_max, scale: float):
        """`exp2(scores * scale + negative_max)`: one fma, then ex2.approx.ftz."""
        return self._of(scores.shape).exp2_scaled(scores, negative_max, scale)

    def reciprocal(self, a):
        """`1 / a`, correctly rounded."""
        return self._of(a.shape).reciprocal(a)

    def full(self, shape, value):
        """A constant in the layout of this arithmetic."""
        return self._of(shape).full(shape, value)

    def cast(self, x, layout):
        """Fix the layout of `x`."""
        return x if self.is_interpreted else plgpu.layout_cast(x, layout)

    def load(self, ref):
        """Read a tile, or one value a row, from memory."""
        return self._of(ref.shape).load(ref)

    def spread(self, row, shape):
        """Repeat one value a row over its tile."""
        return self.cast(lax.broadcast_in_dim(row, shape, [0]), self.layout)

    def choose(self, scalar, if_true, if_false):
        """`if_true` where a scalar flag is set, else `if_false`, of one value a row."""
        flags = self.cast(jnp.full(if_true.shape, scalar), self.row_layout)
        return jnp.where(flags, if_true, if_false)

    def row_sum(self, weights):
        """Sum each row of a [rows, 128] tile of scores.

        # ORDER: key 8 i + 2 q + e of a block is element e of pair i of thread q, of the four that
        # hold a row of a wgmma accumulator. Its pairs of even i are added left to right, and those
        # of odd i; then the two; then e = 0 and 1; then q across distance 1, then 2.
        """
        if self.is_interpreted:
            return jnp.sum(weights, axis=1)

        @plgpu.inline_mgpu(
            arg_types=(self.layout,),
            return_type=plgpu.ShapeDtypeStruct(
                weights.shape[:1], jnp.float32, layout=self.row_layout
            ),
        )
        def op(ctx, x):
            return x.reduce(sm90_rows.instruction("add.rn.f32"), 1, acc_ilp=8)

        return op(weights)

    def mask(self, scores, row_positions, first_key, window: int | None):
        """Minus infinity for the keys that a row of a [rows, 128] tile does not see."""
        if self.is_interpreted:
            keys = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        else:
            keys = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=self.layout)
        last = lax.broadcast_in_dim(row_positions - first_key, scores.shape, [0])
        scores = jnp.where(last >= keys, scores, -jnp.inf)
        if window is not None:
            scores = jnp.where(keys > last - window, scores, -jnp.inf)
        return scores

    def first_half(self, x):
        """Repeat rows 0 to 7 of each 16 in the next 8, whose results nobody reads.

        A thread has both in registers, so it computes what follows once. `x` is a tile or has one
        value a row.
        """
        if self.is_interpreted:
            return x
        layout = self.layout if len(x.shape) == 2 else self.row_layout

        @plgpu.inline_mgpu(
            arg_types=(layout,),
            return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
        )
        def op(ctx, x):
            axis = HALVES_AXIS[len(x.shape)]
            return with_first_half(np.take(x.registers, [0], axis), x.layout, axis)

        return op(x)

    def scaling(self, channels: int, softcap: float | None) -> tuple:
        """What is done to products of queries and keys, and what multiplies the result for exp2."""
        if softcap is None:
            return (lambda scores: scores), score_scale(channels)
        exponent, cap = score_cap_factors(channels, softcap)
        return (lambda scores: self._of(scores.shape).soft_cap(scores, exponent, cap)), 1.0

    def softmax_step(self, scores, m, weight_sum, scale: float):
        """Fold one block's scores into the running (max, sum) of a split.

        Returns the new max and sum, the decay of what was there, and the block's weights. A masked
        score is -inf: its weight is exactly 0, and a fully masked block has decay 1.
        """
        block_max = self.mul(jnp.max(scores, axis=1), self.full(m.shape, scale))
        new_m = jnp.maximum(m, block_max)
        decay = self.exp2_difference(m, new_m)
        weights = self.exp2_scaled(scores, self.spread(-new_m, scores.shape), scale)
        return new_m, self.fma(weight_sum, decay, self.row_sum(weights)), decay, weights

    def merge_scales(self, m, weight_sum, other_m, other_sum):
        """Fold a split's (max, sum) into the state, and say how to scale both outputs.

        # ORDER: splits are folded left to right: `sum = fma(sum, a, other_sum * b)`.
        # An empty split has b * 0 to add and a = 1: the state keeps its bits. An empty state has
        # a = 0 and b = 1: it takes the split's.
        """
        new_m = jnp.maximum(m, other_m)
        a, b = self.exp2_difference(m, new_m), self.exp2_difference(other_m, new_m)
        return new_m, self.fma(weight_sum, a, self.mul(other_sum, b)), a, b

    def merge_sinks(self, out, m, weight_sum, sinks):
        """Fold the sink of each row into the state: a split of that score alone, without a value.

        Returns the output and the sum.
        """
        score = self.mul(sinks, self.full(sinks.shape, LOG2_E))
        ones = self.full(sinks.shape, 1.0)
        _, weight_sum, a, _ = self.merge_scales(m, weight_sum, score, ones)
        return self.mul(out, self.spread(a, out.shape)), weight_sum

    def merge_outputs(self, out, a, other_out, b):
        """`fma(out, a, other_out * b)`, with one scale a row."""
        a, b = self.spread(a, out.shape), self.spread(b, out.shape)
        return self.fma(out, a, self.mul(other_out, b))

    def finish(self, out, weight_sum, is_row, dtype):
        """Divide by the sum, clear padded rows, make every zero +0, round once."""
        out = self.mul(out, self.spread(self.reciprocal(weight_sum), out.shape))
        is_row = lax.broadcast_in_dim(is_row, out.shape, [0])
        out = jnp.where(is_row & (out != 0.0), out, jnp.zeros_like(out))
        # ROUND: the only rounding of the output to the compute dtype.
        return out.astype(dtype)


def store_rows(x, start, num_rows: int, place: Callable | None = None) -> None:
    """Write the first rows of a float32 tile, or of one value a row, from registers; MLIR.

    Args:
        x: In the layout of an accumulator or of its rows.
        start: Pointer to where they lie one after the other, in device or shared memory.
        num_rows: How many.
        place: Gives another pointer, and the row there, for each row.
    """
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    stride = x.shape[1] if len(x.shape) == 2 else 1
    for at, register in zip(x.layout.thread_idxs(x.shape), x.registers.flat, strict=True):
        row, col = at if len(at) == 2 else (*at, mgpu.c(0, index))
        is_row = ptx.below(row, mgpu.c(num_rows, index))
        with mgpu.utils.when(is_row):
            first, row = (start, row) if place is None else place(row)
            offset = arith.addi(arith.muli(row, mgpu.c(stride, index)), col)
            offset = arith.index_cast(i32, offset)
            where = mgpu.utils.getelementptr(first, [offset], ir.F32Type.get())
            llvm.store(register, where)


HALVES_AXIS = {1: 2, 2: 4}
"""Which axis of the registers of an accumulator's rows, or tile, has rows 0 to 7 and 8 to 15."""


def with_first_half(registers, layout, axis: int):
    """An array in a layout of accumulators from the registers of rows 0 to 7 of each 16."""
    registers = np.concatenate([registers, registers], axis=axis)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def accumulator_arithmetic(is_interpreted: bool) -> AttentionArithmetic:
    """The arithmetic on wgmma accumulators."""
    return AttentionArithmetic(
        layout=plgpu.Layout.WGMMA,
        row_layout=plgpu.Layout.WGMMA.reduce(1),
        is_interpreted=is_interpreted,
    )


def operand(weights, dtype, p_smem):
    """Weights as the first operand of wgmma; through `p_smem` where interpreted."""
    # ROUND: weights to the compute dtype for the product; their sum is not rounded.
    weights = weights.astype(dtype)
    if p_smem is None:
        return weights
    p_smem[...] = weights
    return p_smem


def multiply_keys(acc, q, keys) -> None:
    """Add `q @ keys.T` to an accumulator: channels in order, 16 at a time.

    # WHY: a loop over wide heads; unrolled, prefill kept an address for each step and spilled.
    """
    channels = q.shape[-1]
    if channels <= SPAN_CHANNELS:
        plgpu.wgmma(acc, q, keys.T)
        return

    def some(i, _):
        columns = pl.ds(i * SPAN_CHANNELS, SPAN_CHANNELS)
        plgpu.wgmma(acc, q.at[:, columns], keys.at[:, columns].T)
        return ()

    lax.fori_loop(0, channels // SPAN_CHANNELS, some, ())


def product(a, b, shape):
    """`a @ b` from zero: K in order, 16 at a time, on the tensor core."""

    def issue(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(issue, plgpu.ACC(shape, jnp.float32))


def scores_during(arithmetic: AttentionArithmetic, q, keys, meanwhile):
    """The scores of a block, [ROWS, BLOCK], and what `meanwhile` gives.

    The tensor core may work while that runs.
    """

    def issue(acc):
        multiply_keys(acc, q, keys)
        # Interpreted it may give a reference, which must not leave this scope.
        result = None if arithmetic.is_interpreted else meanwhile()
        return acc[...], result

    scores, result = pl.run_scoped(issue, plgpu.ACC((ROWS, BLOCK), jnp.float32))
    return scores, meanwhile() if arithmetic.is_interpreted else result


def chained_product(
    arithmetic: AttentionArithmetic, out, decay, weights, v, meanwhile=lambda: None
):
    """`out * decay + weights @ v`, added up on the tensor core's accumulator.

    # ORDER: within a split, `out` is scaled and then takes the products of the block's 128 keys in
    # order, 16 at a time.
    """
    out = arithmetic.mul(out, arithmetic.spread(decay, out.shape))
    if arithmetic.is_interpreted:
        return out + product(weights, v, out.shape), meanwhile()
    result = []

    def issue(acc):
        plgpu.wgmma(acc, weights, v)
        result.append(meanwhile())

    out = pl.run_state(issue)(plgpu.ACC.init(out))
    return out, result[0]


def clear_unwritten(v_smem, first_key, last, arithmetic: AttentionArithmetic) -> None:
    """Zero the values of keys after position `last`: 0 times what a freed page holds may be NaN.

    Called by one warpgroup.

    Args:
        v_smem: The values of a block, an operand of wgmma, [128, C].
        first_key: Position of its first key.
        last: Of the last token.
        arithmetic: Says whether this is interpreted.
    """
    if arithmetic.is_interpreted:
        keys = lax.broadcasted_iota(jnp.int32, v_smem.shape, 0)
        v = v_smem[...]
        v_smem[...] = jnp.where(keys + first_key <= last, v, jnp.zeros_like(v))
        return

    # WHY: stores of zeros alone. To load the block and choose took registers, and prefill spilled.
    at_once = ptx.LANES * 8 // v_smem.shape[1]
    first_row = jnp.clip(last + 1 - first_key, 0, BLOCK)

    def store(turn, _):
        _store_zeros(v_smem, first_row + turn * at_once, at_once)
        return ()

    lax.fori_loop(0, lax.div(BLOCK - first_row + (at_once - 1), jnp.int32(at_once)), store, ())
    plgpu.commit_smem()


def _store_zeros(v_smem, first_row, num_rows: int) -> None:
    """Zero rows of an operand of wgmma, 16 bytes a thread, but those behind its last.

    Tiles have 8 rows and one swizzle span. A swizzle moves 16 bytes within such a row, so it does
    not matter here.
    """
    transforms = swizzled(channel_span(v_smem.shape[1]))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), ptx.SCALAR))
    def emit(ctx, values, first_row):
        kind, const = ir.MemRefType(values.type), ptx.i32
        num_tiles, num_spans, tile_rows, span = kind.shape
        strides, _ = kind.get_strides_and_offset()

        def split(index, size):
            return arith.divui(index, const(size)), arith.remui(index, const(size))

        row, chunk = split(ptx.thread(), num_spans * span // 8)
        is_busy = ptx.below(row, const(num_rows))
        row = arith.addi(row, first_row.registers.item())
        is_row = ptx.below(row, const(num_tiles * tile_rows))
        with mgpu.utils.when(arith.andi(is_busy, is_row)):
            indices = *split(row, tile_rows), *split(chunk, span // 8)
            address = ptx.address(values)
            for index, i in zip(indices, (0, 2, 1, 3), strict=True):
                stride = 2 * strides[i] * (8 if i == 3 else 1)
                address = arith.addi(address, arith.muli(index, const(stride)))
            ptx.asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [address, *[const(0)] * 4])

    emit(v_smem, first_row)


def drain(freed, num_used, first=0, num_slots: int = 0) -> None:
    """Wait until every slot of a ring that was used has been freed for the last time.

    Args:
        freed: Barriers.
        num_used: How often a slot was filled, in turn.
        first: Where the ring's barriers begin.
        num_slots: Of the ring; all barriers if 0.
    """
    for slot in range(num_slots or freed.shape[0]):

        @pl.when(num_used > slot)
        def _wait(slot=slot):
            plgpu.barrier_wait(freed.at[first + slot])


def page_rows(pages: jax.Array) -> jax.Array:
    """View the cache as [L*N*2*K, P, C]; a bitcast."""
    return pages.reshape(-1, *pages.shape[4:])


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeLanes:
    """Merge of splits for LANES neighbouring elements of the output, one a thread.

    They are whole rows, or a part of one.

    Attributes:
        channels: Of a row.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    channels: int
    is_interpreted: bool

    @property
    def rows(self) -> int:
        """Rows side by side, of which there is at least a part."""
        return max(1, LANES // self.channels)

    @property
    def parts(self) -> int:
        """Sets of LANES elements of a row that is wider."""
        return max(1, self.channels // LANES)

    @property
    def layout(self):
        """A thread an element."""
        return plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    @property
    def math(self) -> AttentionArithmetic:
        """The arithmetic on such vectors."""
        return AttentionArithmetic(
            layout=None, row_layout=self.layout, is_interpreted=self.is_interpreted
        )

    def empty(self):
        """The state before any split: maximum, sum and output."""
        zero = self.math.full((LANES,), 0.0)
        return self.math.full((LANES,), EMPTY_MAX), zero, zero

    def spread(self, read, first_row):
        """One scalar a row, `read(row)`, over its channels."""
        if self.is_interpreted:
            lane = lax.broadcasted_iota(jnp.int32, (LANES,), 0)
        else:
            lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=self.layout)
        value = self.math.cast(jnp.full((LANES,), read(first_row)), self.layout)
        for i in range(1, self.rows):
            other = self.math.cast(jnp.full((LANES,), read(first_row + i)), self.layout)
            value = jnp.where(lane < i * self.channels, value, other)
        return value

    def fold(self, state, other_m, other_sum, other_out):
        """Fold a split into the state, as `merge_scales` and `merge_outputs` do."""
        m, weight_sum, out = state
        m, weight_sum, a, b = self.math.merge_scales(m, weight_sum, other_m, other_sum)
        return m, weight_sum, self.math.fma(out, a, self.math.mul(other_out, b))

    def fold_sinks(self, state, sinks):
        """Fold the sink of each row into the state, as `Arithmetic.merge_sinks` does."""
        full = functools.partial(self.math.full, (LANES,))
        score = self.math.mul(sinks, full(LOG2_E))
        return self.fold(state, score, full(1.0), full(0.0))

    def finish(self, state, is_row, dtype):
        """Divide by the sum, clear padded rows, make every zero +0, round once."""
        _, weight_sum, out = state
        out = self.math.mul(out, self.math.reciprocal(weight_sum))
        out = jnp.where(is_row & (out != 0.0), out, self.math.full((LANES,), 0.0))
        # ROUND: the only rounding of the output to the compute dtype.
        return out.astype(dtype)

    def gated(self, gate, out):
        """The output by the sigmoids of its gates, as `output_gate.sm90` computes it.

        # ROUND: to the compute dtype a second time; the output has been rounded, as if written.
        """
        math = sm90_rows.Arithmetic(layout=self.layout, is_interpreted=self.is_interpreted)
        product = gated(gate.astype(jnp.float32), out.astype(jnp.float32), math)
        return product.astype(out.dtype)
