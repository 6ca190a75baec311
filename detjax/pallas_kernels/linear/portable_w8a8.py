# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit activations and weights in blocks of 16 rows and 64 columns."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, round_to, run_blocks
from detjax.pallas_kernels.linear.portable import COLS, leaf_sum
from detjax.pallas_kernels.linear.quantized import LARGEST, QuantizedRows, W8A8Matrix
from detjax.pallas_kernels.rms_norm.portable import rms_norm
from detjax.pallas_kernels.swiglu.portable import swiglu


@partial(jax.jit, static_argnames=("dtype",))
def quantize_rows(x, *, dtype: jnp.dtype) -> QuantizedRows:
    """See `w8a8.quantize_rows`."""
    num_rows, width = x.shape
    x = pad_axis(x, 0, ROWS)

    def body(x_ref, values_ref, scales_ref):
        v = x_ref[pl.ds(pl.program_id(0) * ROWS, ROWS), :].astype(jnp.float32)
        peak = jnp.max(jnp.abs(v), axis=1, keepdims=True)
        # WHY: a CPU's maximum may pass over NaN.
        peak = jnp.where(jnp.any(jnp.isnan(v), axis=1, keepdims=True), jnp.nan, peak)
        # WHY: XLA divides by a constant, or on several devices by any scalar, by multiplying with
        # its reciprocal.
        largest = lax.optimization_barrier(jnp.full_like(peak, LARGEST[dtype.name]))
        inverse = jnp.where(peak == 0, 0.0, largest / peak)
        values_ref[...] = _narrow(v * inverse, dtype)
        scales_ref[...] = peak / largest

    values, scales = run_blocks(
        body,
        x,
        name="quantize_rows",
        grid=(x.shape[0] // ROWS,),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32),
        ],
        out_specs=[
            pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
            pl.BlockSpec((ROWS, 1), lambda m: (m, 0)),
        ],
    )
    return QuantizedRows(values=values[:num_rows], scales=scales[:num_rows, 0])


def _narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 as 8-bit values: to nearest, ties to even, saturated; NaN is 0 as an integer."""
    if dtype != jnp.int8:
        most = LARGEST[dtype.name]
        return jnp.clip(x, -most, most).astype(dtype)
    whole = jnp.clip(jnp.round(x), -128, 127)
    return jnp.where(jnp.isnan(whole), 0, whole).astype(dtype)


def rms_norm_quantize(x, gain, *, eps: float, dtype: jnp.dtype) -> QuantizedRows:
    """See `w8a8.rms_norm_quantize`."""
    return quantize_rows(rms_norm(x, gain, eps=eps), dtype=dtype)


def w8a8_swiglu(x: QuantizedRows, w: W8A8Matrix, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `w8a8.w8a8_swiglu`."""
    return swiglu(w8a8_product(x, w, None, None, out_dtype=out_dtype))


@partial(jax.jit, static_argnames=("out_dtype",))
def w8a8_product(
    x: QuantizedRows, w: W8A8Matrix, bias, residual, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_product`."""
    num_rows, k_len = x.shape
    num_cols = w.shape[0]
    sum_dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    operands = [pad_axis(x.values, 0, ROWS), pad_axis(x.scales, 0, ROWS)]
    operands += [pad_axis(w.values, 0, COLS), pad_axis(w.scales, 0, COLS)]
    if bias is not None:
        operands.append(pad_axis(bias, 0, COLS))
    if residual is not None:
        operands.append(pad_axis(pad_axis(residual, 0, ROWS), 1, COLS))

    def body(x_ref, x_scales_ref, w_ref, w_scales_ref, *refs):
        *rest, out_ref = refs
        rows, cols = pl.ds(pl.program_id(1) * ROWS, ROWS), pl.ds(pl.program_id(0) * COLS, COLS)
        # ORDER: of integers free, as their sums are exact; of float8 that of `leaf_sum`.
        total = leaf_sum(x_ref, w_ref, rows, cols, 0, k_len, dtype=sum_dtype)
        total = total.astype(jnp.float32) * w_scales_ref[cols][None, :]
        total = total * x_scales_ref[rows][:, None]
        if bias is not None:
            total = total + rest[0][cols].astype(jnp.float32)[None, :]
        if residual is not None:
            total = rest[-1][rows, cols].astype(jnp.float32) + total
        out_ref[...] = round_to(total, out_dtype).astype(out_dtype)  # ROUND: once

    padded_rows, padded_cols = operands[0].shape[0], operands[2].shape[0]
    out = run_blocks(
        body,
        *operands,
        name="w8a8_product",
        grid=(padded_cols // COLS, padded_rows // ROWS),
        out_shape=jax.ShapeDtypeStruct((padded_rows, padded_cols), out_dtype),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda n, m: (m, n)),
    )
    return out[:num_rows, :num_cols]
