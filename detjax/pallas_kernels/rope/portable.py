# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding on blocks of 16 rows, a row a (token, head)."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, run_blocks


@jax.jit
def rope(x, cos, sin) -> jax.Array:
    """See `api.rope`."""
    num_rows, num_heads, channels = x.shape
    half = channels // 2
    flat = pad_axis(x.reshape(num_rows * num_heads, channels), 0, ROWS)
    cos = pad_axis(jnp.repeat(cos, num_heads, axis=0), 0, ROWS)
    sin = pad_axis(jnp.repeat(sin, num_heads, axis=0), 0, ROWS)

    def body(x_ref, cos_ref, sin_ref, out_ref):
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        first = x_ref[rows, pl.ds(0, half)].astype(jnp.float32)
        second = x_ref[rows, pl.ds(half, half)].astype(jnp.float32)
        c, s = cos_ref[rows, :], sin_ref[rows, :]
        # ORDER: one product and one fused or unfused multiply-add a channel, as the compiler
        # contracts this one body; it is the same body at every call.
        out_ref[:, pl.ds(0, half)] = (first * c - second * s).astype(out_ref.dtype)
        out_ref[:, pl.ds(half, half)] = (second * c + first * s).astype(out_ref.dtype)

    out = run_blocks(
        body,
        flat,
        cos,
        sin,
        name="rope",
        grid=(flat.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
        out_specs=pl.BlockSpec((ROWS, channels), lambda m: (m, 0)),
    )
    return out[: num_rows * num_heads].reshape(x.shape)
