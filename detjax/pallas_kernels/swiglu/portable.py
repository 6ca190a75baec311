# SPDX-License-Identifier: Apache-2.0
"""SwiGLU on blocks of 16 rows and 128 columns."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import COLS, ROWS, pad_axis, run_blocks


def _silu(g: jax.Array) -> jax.Array:
    return g / (1.0 + jnp.exp(-g))


@jax.jit
def swiglu(gate_up) -> jax.Array:
    """See `api.swiglu`."""
    return gate_columns(gate_up, _silu, name="swiglu")


def gate_columns(gate_up, gating: Callable[[jax.Array], jax.Array], *, name: str) -> jax.Array:
    """`round(gating(g) * u)` of the first half of the columns and the second, in float32."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    halves = gate_up[:, :width], gate_up[:, width:]
    gate, up = (pad_axis(pad_axis(x, 0, ROWS), 1, COLS) for x in halves)

    def body(gate_ref, up_ref, out_ref):
        block = pl.ds(pl.program_id(0) * ROWS, ROWS), pl.ds(pl.program_id(1) * COLS, COLS)
        g = gate_ref[block].astype(jnp.float32)
        u = up_ref[block].astype(jnp.float32)
        out_ref[...] = (gating(g) * u).astype(out_ref.dtype)  # ROUND: once

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
