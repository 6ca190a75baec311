# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit activations and weights in blocks of 16 rows and 64 columns."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, round_to, run_blocks
from detjax.pallas_kernels.linear.portable import COLS, leaf_sum
from detjax.pallas_kernels.linear.quantized import (
    LARGEST,
    QuantizedRows,
    RowCoding,
    RowsToQuantize,
    W8A8Matrix,
    quantized_rows,
)
from detjax.pallas_kernels.rms_norm.portable import rms_norm
from detjax.pallas_kernels.swiglu.portable import swiglu


@jax.jit
def quantize_rows(x, coding: RowCoding) -> QuantizedRows:
    """See `w8a8.quantize_rows`."""
    (num_rows, width), dtype, group_len = x.shape, coding.dtype, coding.group_len
    x = pad_axis(x, 0, ROWS)
    groups = (ROWS, width // group_len if group_len else 1, group_len or width)

    def body(x_ref, *refs):
        *given, values_ref, scales_ref = refs
        v = x_ref[pl.ds(pl.program_id(0) * ROWS, ROWS), :].astype(jnp.float32).reshape(groups)
        if given:
            scale = lax.optimization_barrier(jnp.full((ROWS, 1, 1), given[0][0, 0]))
            values_ref[...] = _narrow(v * (1.0 / scale), dtype).reshape(ROWS, width)
            scales_ref[...] = scale[:, :, 0]
            return
        peak = jnp.max(jnp.abs(v), axis=2, keepdims=True)
        if coding.bound:
            peak = jnp.minimum(peak, coding.bound)
        # WHY: a CPU's maximum may pass over NaN.
        peak = jnp.where(jnp.any(jnp.isnan(v), axis=2, keepdims=True), jnp.nan, peak)
        # WHY: XLA divides by a constant, or on several devices by any scalar, by multiplying with
        # its reciprocal.
        largest = lax.optimization_barrier(jnp.full_like(peak, LARGEST[dtype.name]))
        inverse = largest / peak
        # WHY: zero times infinity is NaN.
        inverse = jnp.where(jnp.isinf(inverse), 0.0, inverse)
        values_ref[...] = _narrow(v * inverse, dtype).reshape(ROWS, width)
        scales_ref[...] = (peak / largest)[:, :, 0]

    values, scales = run_blocks(
        body,
        x,
        *([] if coding.scale is None else [coding.scale.reshape(1, 1)]),
        name="quantize_rows",
        grid=(x.shape[0] // ROWS,),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct((x.shape[0], groups[1]), jnp.float32),
        ],
        out_specs=[
            pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
            pl.BlockSpec((ROWS, groups[1]), lambda m: (m, 0)),
        ],
    )
    scales = scales[:num_rows].T if group_len else scales[:num_rows, 0]
    return QuantizedRows(values=values[:num_rows], scales=scales)


def _narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 as 8-bit values: to nearest, ties to even, saturated; NaN is 0 as an integer."""
    if dtype != jnp.int8:
        most = LARGEST[dtype.name]
        return jnp.clip(x, -most, most).astype(dtype)
    whole = jnp.clip(jnp.round(x), -128, 127)
    return jnp.where(jnp.isnan(whole), 0, whole).astype(dtype)


def w8a8_swiglu(
    x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_swiglu`."""
    return swiglu(w8a8_product(x, w, None, None, out_dtype=out_dtype))


def w8a8_product(
    x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, bias, residual, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_product`."""
    x = quantized_rows(x, quantize_rows=quantize_rows, rms_norm=rms_norm)
    return _product(x, w, bias, residual, out_dtype=out_dtype)


@partial(jax.jit, static_argnames=("out_dtype",))
def _product(x: QuantizedRows, w: W8A8Matrix, bias, residual, *, out_dtype: jnp.dtype) -> jax.Array:
    num_rows, k_len = x.shape
    num_cols = w.shape[0]
    x_scales = x.scales.T.reshape(num_rows, -1)  # a column a group
    operands = [pad_axis(x.values, 0, ROWS), pad_axis(x_scales, 0, ROWS)]
    operands += [pad_axis(w.values, 0, COLS), pad_axis(w.row_scales(), 0, COLS)]
    if bias is not None:
        operands.append(pad_axis(bias, 0, COLS))
    if residual is not None:
        operands.append(pad_axis(pad_axis(residual, 0, ROWS), 1, COLS))

    def body(x_ref, x_scales_ref, w_ref, w_scales_ref, *refs):
        *rest, out_ref = refs
        rows, cols = pl.ds(pl.program_id(1) * ROWS, ROWS), pl.ds(pl.program_id(0) * COLS, COLS)
        scales = (x_scales_ref, w_scales_ref)
        total = scaled_sum(x_ref, w_ref, *scales, rows, cols, k_len, group_len=w.group_len)
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


def scaled_sum(
    x_ref, w_ref, x_scales_ref, w_scales_ref, rows, cols, k_len: int, *, group_len: int
) -> jax.Array:
    """The scaled sum of one block, float32; scales are [M, G] and [N, G], G = 1 without groups."""

    def scales_of(group) -> tuple[jax.Array, jax.Array]:
        here = pl.ds(group, 1)
        return x_scales_ref[rows, here], w_scales_ref[cols, here].reshape(1, -1)

    if not group_len:
        # ORDER: of integers free, as their sums are exact; of float8 that of `leaf_sum`.
        dtype = jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32
        total = leaf_sum(x_ref, w_ref, rows, cols, 0, k_len, dtype=dtype)
        of_rows, of_weights = scales_of(0)
        return total.astype(jnp.float32) * of_weights * of_rows

    def add_group(group, total):
        # ORDER: groups left to right. ROUND: one fused multiply-add, where there is one.
        chunk = leaf_sum(x_ref, w_ref, rows, cols, group * group_len, group_len)
        of_rows, of_weights = scales_of(group)
        return chunk * (of_rows * of_weights) + total

    return lax.fori_loop(0, k_len // group_len, add_group, jnp.zeros((ROWS, COLS), jnp.float32))
