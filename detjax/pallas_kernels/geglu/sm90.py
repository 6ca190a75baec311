# SPDX-License-Identifier: Apache-2.0
"""GeGLU on Hopper: the pass of SwiGLU over pieces of a row, with another exponent."""

import functools

import jax

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.geglu.portable import CUBIC, LINEAR
from detjax.pallas_kernels.swiglu.sm90 import gate_columns, over_decay


def _gated(gate, up, math: rows.Arithmetic):
    """`gate / (1 + exp(-exponent)) * up`, `exponent = gate * (gate * gate * b + a)`, in float32.

    # ORDER: the square, two products and a sum, each rounded, then as `swiglu.sm90.gated`.
    """
    linear, cubic = (math.full(gate.shape, value) for value in (LINEAR, CUBIC))
    slope = math.add(math.mul(math.mul(gate, gate), cubic), linear)
    return math.mul(over_decay(gate, math.mul(gate, slope), math), up)


@functools.partial(jax.jit, static_argnames=("interpret",))
def geglu(gate_up, *, interpret: bool = False) -> jax.Array:
    """See `api.geglu`.

    Raises:
        ValueError: If F is under 128 or no multiple of 4.

    Numerics:
        Elementwise in float32, each product and sum rounded; exp and the quotient as in `swiglu`.
        # ROUND: once, to the dtype.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return gate_columns(gate_up, None, _gated, name="detjax_geglu", interpret=interpret)
