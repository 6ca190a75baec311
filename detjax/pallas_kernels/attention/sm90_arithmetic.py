# SPDX-License-Identifier: Apache-2.0
"""The steps of attention that fix a bit, shared by every sm90 kernel.

Mosaic GPU lets ptxas fuse a multiply and an add, and may do so in one kernel and not in its twin.
So each float operation here names its instruction. The kernels differ in who runs a step and when.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK = 128  # keys of one online-softmax step, and of one page
ROWS = 64  # query rows of one warpgroup: the M of a wgmma instruction
EMPTY_MAX = -1e30
"""The running maximum before any key. Finite, so that subtracting it from itself is 0, not NaN."""

LOG2_E = 1.4426950408889634


def score_scale(channels: int) -> float:
    """Multiply scores by this, then take exp2."""
    return float(np.float32(LOG2_E * channels**-0.5))


@functools.cache
def swizzled() -> tuple:
    """Shared-memory layout of a 16-bit operand of wgmma."""
    return (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@functools.cache
def swizzled_f32() -> tuple:
    """Shared-memory layout of a float32 tile in the layout of an accumulator."""
    return (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def _instruction(op: str, *constants: float):
    def emit(*values):
        lift = mgpu.FragmentedArray._lift_fast_instr(op)
        return lift(*values, *(mgpu.c(x, values[0].type) for x in constants))

    return emit


def _chain(*steps):
    def emit(*values):
        for step in steps:
            values = (step(*values),)
        return values[0]

    return emit


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Float operations on registers laid out as a wgmma accumulator, one instruction each.

    Attributes:
        layout: Layout of a [rows, columns] tile.
        row_layout: Layout of one value a row.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    layout: object
    row_layout: object
    is_interpreted: bool

    def _apply(self, emit, plain, args):
        if self.is_interpreted:
            return plain(*args)
        shape = args[0].shape
        layout = self.layout if len(shape) == 2 else self.row_layout

        @plgpu.inline_mgpu(
            arg_types=(layout,) * len(args),
            return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
        )
        def op(ctx, first, *rest):
            return first._pointwise(emit, *rest)

        return op(*args)

    def mul(self, a, b):
        """A product, rounded: never fused with a later sum."""
        return self._apply(_instruction("mul.rn.f32"), lambda x, y: x * y, (a, b))

    def add(self, a, b):
        """A sum, rounded."""
        return self._apply(_instruction("add.rn.f32"), lambda x, y: x + y, (a, b))

    def fma(self, a, b, c):
        """`a * b + c`, rounded once."""
        return self._apply(_instruction("fma.rn.f32"), lambda x, y, z: x * y + z, (a, b, c))

    def exp2_difference(self, a, b):
        """`exp2(a - b)`: a rounded difference, then ex2.approx.ftz."""

        def emit(x, y):
            ex2 = mgpu.FragmentedArray._lift_fast_instr("ex2.approx.ftz.f32")
            return ex2(mgpu.FragmentedArray._lift_fast_instr("sub.rn.f32")(x, y))

        return self._apply(emit, lambda x, y: jnp.exp2(x - y), (a, b))

    def exp2_scaled(self, scores, negative_max, scale: float):
        """`exp2(scores * scale + negative_max)`: one fma, then ex2.approx.ftz."""

        def emit(s, m):
            fma = mgpu.FragmentedArray._lift_fast_instr("fma.rn.f32")
            ex2 = mgpu.FragmentedArray._lift_fast_instr("ex2.approx.ftz.f32")
            return ex2(fma(s, mgpu.c(scale, s.type), m))

        return self._apply(emit, lambda s, m: jnp.exp2(s * scale + m), (scores, negative_max))

    def reciprocal(self, a):
        """`1 / a`, correctly rounded."""
        return self._apply(_instruction("rcp.rn.f32"), lambda x: 1.0 / x, (a,))

    def full(self, shape, value):
        """A constant in the layout of this arithmetic."""
        layout = self.layout if len(shape) == 2 else self.row_layout
        return self.cast(jnp.full(shape, value, jnp.float32), layout)

    def cast(self, x, layout):
        """Fix the layout of `x`."""
        return x if self.is_interpreted else plgpu.layout_cast(x, layout)

    def over_columns(self, row, shape):
        """Repeat one value a row over the columns."""
        return lax.broadcast_in_dim(row, shape, [0])

    def choose(self, scalar, if_true, if_false):
        """`if_true` where a scalar flag is set, else `if_false`, of one value a row."""
        flags = self.cast(jnp.full(if_true.shape, scalar), self.row_layout)
        return jnp.where(flags, if_true, if_false)

    def key_mask(self, row_positions, first_key):
        """Which of the block's keys each row sees: [rows, BLOCK]."""
        shape = (row_positions.shape[0], BLOCK)
        if self.is_interpreted:
            keys = lax.broadcasted_iota(jnp.int32, shape, 1)
        else:
            keys = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.layout)
        return lax.broadcast_in_dim(row_positions - first_key, shape, [0]) >= keys

    def softmax_step(self, scores, m, weight_sum, scale: float):
        """Fold one block's scores into the running (max, sum) of a split.

        Returns the new max and sum, the decay of what was there, and the block's weights.

        # ORDER: the sum over a block's 128 keys is Mosaic's reduction of a [64, 128] tile in the
        # wgmma layout: 8 partial sums a thread, their tree, then two exchanges in a quad.
        # A masked score is -inf: its weight is exactly 0, and a fully masked block has decay 1.
        """
        block_max = self.mul(jnp.max(scores, axis=1), self.full(m.shape, scale))
        new_m = jnp.maximum(m, block_max)
        decay = self.exp2_difference(m, new_m)
        weights = self.exp2_scaled(scores, self.over_columns(-new_m, scores.shape), scale)
        return new_m, self.fma(weight_sum, decay, jnp.sum(weights, axis=1)), decay, weights

    def merge_scales(self, m, weight_sum, other_m, other_sum):
        """Fold a split's (max, sum) into the state, and say how to scale both outputs.

        # ORDER: splits are folded left to right: `sum = fma(sum, a, other_sum * b)`.
        # An empty split has b * 0 to add and a = 1: the state keeps its bits.
        """
        new_m = jnp.maximum(m, other_m)
        a, b = self.exp2_difference(m, new_m), self.exp2_difference(other_m, new_m)
        return new_m, self.fma(weight_sum, a, self.mul(other_sum, b)), a, b

    def merge_outputs(self, out, a, other_out, b):
        """`fma(out, a, other_out * b)`, with one scale a row."""
        a, b = self.over_columns(a, out.shape), self.over_columns(b, out.shape)
        return self.fma(out, a, self.mul(other_out, b))

    def finish(self, out, weight_sum, is_row, dtype):
        """Divide by the sum, clear padded rows, make every zero +0, round once."""
        inverse = self.over_columns(self.reciprocal(weight_sum), out.shape)
        out = self.mul(out, inverse)
        is_row = lax.broadcast_in_dim(is_row, out.shape, [0])
        out = jnp.where(is_row & (out != 0.0), out, jnp.zeros_like(out))
        # ROUND: the only rounding of the output to the compute dtype.
        return out.astype(dtype)


def accumulator_arithmetic(is_interpreted: bool) -> Arithmetic:
    """The arithmetic on wgmma accumulators."""
    return Arithmetic(
        layout=plgpu.Layout.WGMMA,
        row_layout=plgpu.Layout.WGMMA.reduce(1),
        is_interpreted=is_interpreted,
    )


def product(a, b, columns: int):
    """`a @ b` from zero: K in order, 16 at a time, on the tensor core."""

    def issue(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(issue, plgpu.ACC((ROWS, columns), jnp.float32))


def operand(weights, dtype, p_smem):
    """Weights as the first operand of wgmma; through `p_smem` where interpreted."""
    # ROUND: weights to the compute dtype for the product; their sum is not rounded.
    weights = weights.astype(dtype)
    if p_smem is None:
        return weights
    p_smem[...] = weights
    plgpu.commit_smem()
    return p_smem


def chained_product(arithmetic: Arithmetic, out, decay, weights, v, meanwhile=lambda: None):
    """`out * decay + weights @ v`, added up on the tensor core's accumulator.

    # ORDER: within a split, `out` is scaled and then takes the products of the block's 128 keys in
    # order, 16 at a time.
    """
    out = arithmetic.mul(out, arithmetic.over_columns(decay, out.shape))
    if arithmetic.is_interpreted:
        return out + product(weights, v, out.shape[1]), meanwhile()
    result = []

    def issue(acc):
        plgpu.wgmma(acc, weights, v)
        result.append(meanwhile())

    out = pl.run_state(issue)(plgpu.ACC.init(out))
    return out, result[0]


def clear_unwritten(v_smem, first_key, last, arithmetic: Arithmetic) -> None:
    """Zero the values of keys after position `last`: 0 times what a freed page holds may be NaN."""
    channels = v_smem.shape[1]
    for half in range(BLOCK // ROWS):
        part = v_smem.at[pl.ds(half * ROWS, ROWS), :]
        if arithmetic.is_interpreted:
            v, keys = part[...], lax.broadcasted_iota(jnp.int32, (ROWS, channels), 0)
        else:
            v = plgpu.load(part, layout=arithmetic.layout)
            keys = plgpu.broadcasted_iota(jnp.int32, (ROWS, channels), 0, layout=arithmetic.layout)
        is_written = keys + (first_key + half * ROWS) <= last
        part[...] = jnp.where(is_written, v, jnp.zeros_like(v))
    plgpu.commit_smem()


def drain(freed, num_used) -> None:
    """Wait until every slot of a ring that was used has been freed for the last time."""
    for slot in range(freed.shape[0]):

        @pl.when(num_used > slot)
        def _wait(slot=slot):
            plgpu.barrier_wait(freed.at[slot])


def page_rows(pages: jax.Array) -> jax.Array:
    """View the cache as [L*N*2*K, P, C]; a bitcast."""
    return pages.reshape(-1, *pages.shape[4:])
