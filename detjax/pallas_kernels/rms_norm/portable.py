# SPDX-License-Identifier: Apache-2.0
"""RMSNorm on blocks of 16 whole rows."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import ROWS, add_leaves, pad_axis, round_to, run_blocks


def _normalise(v: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Scale float32 rows to unit root mean square.

    # ORDER: one fixed-shape row sum; rsqrt, not 1/sqrt.
    """
    mean_square = jnp.sum(v * v, axis=1, keepdims=True) / v.shape[1]
    return v * lax.rsqrt(mean_square + eps) * gain.astype(jnp.float32)[None, :]


@partial(jax.jit, static_argnames=("eps",))
def rms_norm(x, gain, *, eps: float) -> jax.Array:
    """See `api.rms_norm`."""
    num_rows, width = x.shape
    x = pad_axis(x, 0, ROWS)

    def body(x_ref, gain_ref, out_ref):
        v = x_ref[pl.ds(pl.program_id(0) * ROWS, ROWS), :].astype(jnp.float32)
        out_ref[...] = _normalise(v, gain_ref[...], eps).astype(out_ref.dtype)

    out = run_blocks(
        body,
        x,
        gain,
        name="rms_norm",
        grid=(x.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return out[:num_rows]


@partial(jax.jit, static_argnames=("eps",))
def add_rms_norm(partial, residual, bias, gain, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`."""
    num_rows, width = residual.shape
    dtype = residual.dtype
    partial, residual = pad_axis(partial, 0, ROWS), pad_axis(residual, 0, ROWS)
    biases = () if bias is None else (bias,)

    def body(partial_ref, residual_ref, gain_ref, *refs):
        *bias_refs, sum_ref, out_ref = refs
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        total = partial_ref[rows, :]
        for bias_ref in bias_refs:
            total = total + bias_ref[...].astype(jnp.float32)[None, :]
        # ROUND: the residual stream, once.
        v = round_to(residual_ref[rows, :].astype(jnp.float32) + total, dtype)
        sum_ref[...] = v.astype(dtype)
        out_ref[...] = _normalise(v, gain_ref[...], eps).astype(dtype)

    shape = jax.ShapeDtypeStruct(residual.shape, dtype)
    spec = pl.BlockSpec((ROWS, width), lambda m: (m, 0))
    total, out = run_blocks(
        body,
        partial,
        residual,
        gain,
        *biases,
        name="add_rms_norm",
        grid=(residual.shape[0] // ROWS,),
        out_shape=[shape, shape],
        out_specs=[spec, spec],
    )
    return total[:num_rows], out[:num_rows]


def combine_add_rms_norm(
    leaf_sums, residual, bias, gain, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.combine_add_rms_norm`."""
    return add_rms_norm(add_leaves(leaf_sums), residual, bias, gain, eps=eps)
