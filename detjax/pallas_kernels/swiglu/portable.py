# SPDX-License-Identifier: Apache-2.0
"""SwiGLU on blocks of 16 rows and 128 columns."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import COLS, ROWS, pad_axis, run_blocks
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


def _silu(g: jax.Array) -> jax.Array:
    return g / (1.0 + jnp.exp(-g))


@partial(jax.jit, static_argnames=("clamp",))
def swiglu(gate_up, *, clamp: SwigluClamp | None = None) -> jax.Array:
    """See `api.swiglu`."""
    if clamp is None:
        return gate_columns(gate_up, _silu, name="swiglu")
    alpha, limit = float(np.float32(clamp.alpha)), float(np.float32(clamp.limit))

    def clamped_silu(g: jax.Array) -> jax.Array:
        g = jnp.minimum(g, limit)
        return g / (1.0 + jnp.exp(-(alpha * g)))

    def clamped(u: jax.Array) -> jax.Array:
        return jnp.minimum(jnp.maximum(u, -limit), limit) + 1.0

    return gate_columns(gate_up, clamped_silu, clamped, name="clamped_swiglu")


def _as_it_is(u: jax.Array) -> jax.Array:
    return u


def gate_columns(
    gate_up,
    gating: Callable[[jax.Array], jax.Array],
    gated: Callable[[jax.Array], jax.Array] = _as_it_is,
    *,
    name: str,
) -> jax.Array:
    """`round(gating(g) * gated(u))` of the first half of the columns and the second, in float32."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    halves = gate_up[:, :width], gate_up[:, width:]
    gate, up = (pad_axis(pad_axis(x, 0, ROWS), 1, COLS) for x in halves)

    def body(gate_ref, up_ref, out_ref):
        block = pl.ds(pl.program_id(0) * ROWS, ROWS), pl.ds(pl.program_id(1) * COLS, COLS)
        g = gate_ref[block].astype(jnp.float32)
        u = up_ref[block].astype(jnp.float32)
        out_ref[...] = (gating(g) * gated(u)).astype(out_ref.dtype)  # ROUND: once

    out = run_blocks(
        body,
        gate,
        up,
        name=name,
        grid=(gate.shape[0] // ROWS, gate.shape[1] // COLS),
        out_shape=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda m, f: (m, f)),
    )
    return out[:num_rows, :width]
