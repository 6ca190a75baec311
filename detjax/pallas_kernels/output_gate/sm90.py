# SPDX-License-Identifier: Apache-2.0
"""Gates of attention on Hopper: the pass of SwiGLU over pieces of a row."""

import functools

import jax

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.swiglu.sm90 import gate_columns, over_decay


def gated(gate, heads, math: rows.Arithmetic):
    """`1 / (1 + exp(-gate)) * heads` in float32: SwiGLU's quotient, then a rounded product."""
    return math.mul(over_decay(math.full(gate.shape, 1.0), gate, math), heads)


@functools.partial(jax.jit, static_argnames=("interpret",))
def sigmoid_gate(heads, gate, *, interpret: bool = False) -> jax.Array:
    """See `api.sigmoid_gate`.

    Raises:
        ValueError: If there are under 128 channels, or no multiple of 4.

    Numerics:
        Elementwise in float32; exp and the quotient as in `swiglu`.
        # ROUND: once, to the dtype.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return gate_columns(gate, heads, gated, name="detjax_sigmoid_gate", interpret=interpret)
