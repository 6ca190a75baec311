# SPDX-License-Identifier: Apache-2.0
"""SwiGLU on Hopper: one pass over pieces of a row, 16-byte accesses."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp

Gating = Callable[[Any, Any, rows.Arithmetic], Any]
"""Of gates and ups, float32 values in registers."""


def gated(gate, up, math: rows.Arithmetic):
    """`gate / (1 + exp(-gate)) * up` in float32; for an epilogue that has both in registers.

    # ORDER: libdevice's exp, a rounded sum, div.full (within 2 ulp), a rounded product. The sum
    # says `.rn`, so exp's last multiply cannot fuse with it.
    """
    return math.mul(over_decay(gate, gate, math), up)


def over_decay(gate, exponent, math: rows.Arithmetic):
    """`gate / (1 + exp(-exponent))` in float32."""
    one = math.full(gate.shape, 1.0)
    decay = math.add(jnp.exp(-exponent), one)
    return math.apply(
        lambda x, y: rows.instruction("div.full.f32")(x, y), lambda x, y: x / y, gate, decay
    )


def clamped(gate, up, math: rows.Arithmetic, clamp: SwigluClamp):
    """`gated` of a clamped gate and up: `gate / (1 + exp(-(alpha * gate))) * (up + 1)`.

    # ORDER: alpha times the gate, and up + 1, each rounded; then as `gated`. A NaN stays one.
    """
    alpha, limit, lowest, one = (
        math.full(gate.shape, value) for value in (clamp.alpha, clamp.limit, -clamp.limit, 1.0)
    )
    gate, up = jnp.minimum(gate, limit), jnp.minimum(jnp.maximum(up, lowest), limit)
    return math.mul(over_decay(gate, math.mul(gate, alpha), math), math.add(up, one))


def _round_pair(register):
    """Two float32 to bfloat16 and back; a bfloat16 is the upper half of its float32."""
    i32 = ir.IntegerType.get_signless(32)
    halves = arith.truncf(ir.VectorType.get((2,), ir.BF16Type.get()), register)
    packed = vector.extract(
        vector.bitcast(ir.VectorType.get((1,), i32), halves),
        dynamic_position=[],
        static_position=ir.DenseI64ArrayAttr.get([0]),
    )
    low = arith.shli(packed, mgpu.c(16, i32))
    high = arith.andi(packed, mgpu.c(-(1 << 16), i32))
    values = [arith.bitcast(ir.F32Type.get(), bits) for bits in (low, high)]
    return vector.from_elements(register.type, values)


def gated_bf16(gate, up, math: rows.Arithmetic, clamp: SwigluClamp | None = None):
    """`gated` of float32 values that a kernel of its own would read as bfloat16.

    # ROUND: gate and up to bfloat16, as if they had been written.
    # WHY: two at a time. A plain cast there and back becomes one conversion a value, on the pipe
    # of exp and of the reciprocal.
    """

    def plain(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    gate, up = (math.apply(_round_pair, plain, x) for x in (gate, up))
    return gated(gate, up, math) if clamp is None else clamped(gate, up, math, clamp)


def _piece(width: int) -> tuple[int, int]:
    """Columns of a piece and neighbouring columns of one thread, for 16-byte accesses if they fit.

    Raises:
        ValueError: If the width has no aligned pieces.
    """
    if width < rows.LANES or width % 4:
        raise ValueError(f"sm90 swiglu needs a multiple of 4 columns from 128 up, not {width}")
    vec_len = 8 if width % 8 == 0 else 4
    while rows.LANES * vec_len > width:
        vec_len //= 2
    size = rows.LANES * vec_len
    return (size * 2 if width % (size * 2) == 0 else size), vec_len


@functools.partial(jax.jit, static_argnames=("clamp", "interpret"))
def swiglu(
    gate_up, up=None, *, clamp: SwigluClamp | None = None, interpret: bool = False
) -> jax.Array:
    """See `api.swiglu`; with `up`, the first argument is the gates alone, [M, F].

    Raises:
        ValueError: If F is under 128 or no multiple of 4.

    Numerics:
        Elementwise in float32: exp of libdevice, `1 + e` rounded, div.full (2 ulp), times `up`.
        With a clamp, as `clamped` says.
        # ROUND: once, to the dtype. The fused form has the same bits: it only reads elsewhere.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if clamp is None:
        return gate_columns(gate_up, up, gated, name="detjax_swiglu", interpret=interpret)
    gating = functools.partial(clamped, clamp=clamp)
    return gate_columns(gate_up, up, gating, name="detjax_clamped_swiglu", interpret=interpret)


def gate_columns(gate_up, up, gating: Gating, *, name: str, interpret: bool) -> jax.Array:
    """`gating(gates, ups)` in float32, rounded once: one pass over pieces of a row.

    Args:
        gate_up: Gates, then ups, [M, 2 F]; with `up` the gates are its last F columns.
        up: Ups, [M, F], or None.
        gating: Of float32 values in registers.
        name: Of the kernel.
        interpret: Run in interpret mode.

    Raises:
        ValueError: If F is under 128 or no multiple of 4, or gates do not begin at a multiple of 8.
    """
    width = gate_up.shape[1] // 2 if up is None else up.shape[1]
    gate_start = 0 if up is None else gate_up.shape[1] - width
    if up is None and gate_up.shape[1] % 2:
        raise ValueError(f"a fused gate and up must have an even width, not {gate_up.shape[1]}")
    if gate_start % 8:
        raise ValueError(f"gates must begin at a multiple of 8 columns, not {gate_start}")

    def load(refs, row, first, size, math: rows.Arithmetic):
        gate_gmem, *up_gmem = refs
        g = math.load(gate_gmem.at[row, pl.ds(gate_start + first, size)])
        if up_gmem:
            return g, math.load(up_gmem[0].at[row, pl.ds(first, size)])
        return g, math.load(gate_gmem.at[row, pl.ds(width + first, size)])

    operands = (gate_up,) if up is None else (gate_up, up)
    return _over_pieces(operands, width, load, gating, name=name, interpret=interpret)


def map_columns(x, function: Callable, *, name: str, interpret: bool) -> jax.Array:
    """`function(x, math)` in float32, rounded once to the dtype of `x` [M, F]: the same pass.

    Raises:
        ValueError: If F is under 128 or no multiple of 4.
    """

    def load(refs, row, first, size, math: rows.Arithmetic):
        return (math.load(refs[0].at[row, pl.ds(first, size)]),)

    return _over_pieces((x,), x.shape[1], load, function, name=name, interpret=interpret)


def _over_pieces(
    operands: tuple, width: int, load: Callable, function: Callable, *, name: str, interpret: bool
) -> jax.Array:
    num_rows, dtype = operands[0].shape[0], operands[0].dtype
    size, vec_len = _piece(width)
    math = rows.strided(size, vec_len, interpret)

    def body(*refs):
        *in_gmem, out_gmem = refs
        row = lax.axis_index("row")
        # The last piece starts early instead of ending late: some columns are written twice, alike.
        first = jnp.minimum(lax.axis_index("piece") * size, width - size)
        first = pl.multiple_of(first, 8 if width % 8 == 0 else 4)
        loaded = load(in_gmem, row, first, size, math)
        out = function(*(x.astype(jnp.float32) for x in loaded), math)
        out_gmem[row, pl.ds(first, size)] = out.astype(dtype)

    return rows.run_kernel(
        body,
        operands,
        out=jax.ShapeDtypeStruct((num_rows, width), dtype),
        grid={"piece": pl.cdiv(width, size), "row": num_rows},
        name=name,
        is_interpreted=interpret,
    )
