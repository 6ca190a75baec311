# SPDX-License-Identifier: Apache-2.0
"""Matrix products in the bits of a tensor core of Hopper, on the CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from detjax.numerics import Reduction
from detjax.pallas_kernels.hopper_sums import NUM_PARTS
from detjax.pallas_kernels.linear.quantized import (
    LARGEST,
    QuantizedRows,
    RowCoding,
    RowsToQuantize,
    W8A8Matrix,
    expanded,
    quantized_rows,
)
from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.rms_norm.reference import (
    check_dtypes,
    combine_add_rms_norm,
    join,
    rms_norm,
)
from detjax.pallas_kernels.swiglu.reference import swiglu


def _product(x, w, leaf_len: int) -> jax.Array:
    """The tree of the leaves' sums, float32 [M, N]; [3, M, N] of float32 rows, cut into parts.

    Raises:
        NotImplementedError: For other dtypes, or a leaf that is no multiple of 16.
    """
    w = expanded(w)
    check_dtypes(x, w)
    if leaf_len % 16:
        raise NotImplementedError(
            "the reference backend needs leaves of a multiple of 16, the depth of one wgmma, not "
            f"{leaf_len}; use portable"
        )
    num_rows, k_len = x.shape
    has_parts = x.dtype == jnp.float32
    if has_parts:
        parts = jax.ShapeDtypeStruct((NUM_PARTS, num_rows, k_len), jnp.bfloat16)
        x = call("split_rows", parts, x).reshape(-1, k_len)
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    total = call("product", out, x, w, leaf_len=leaf_len)
    return total.reshape(NUM_PARTS, num_rows, -1) if has_parts else total


def _product_of_wide(x, w) -> jax.Array:
    """Bfloat16 rows by each part of float32 weights: float32 [3, M, N]."""
    num_out, k_len = w.shape
    parts = jax.ShapeDtypeStruct((NUM_PARTS, num_out, k_len), jnp.bfloat16)
    total = _product(x, call("split_rows", parts, w).reshape(-1, k_len), k_len)
    return jnp.swapaxes(total.reshape(-1, NUM_PARTS, num_out), 0, 1)


def linear(x, w, bias, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.linear`."""
    is_wide = x.dtype == jnp.bfloat16 and w.dtype == jnp.float32
    total = _product_of_wide(x, w) if is_wide else _product(x, w, x.shape[1])
    if bias is None and out_dtype == jnp.float32 and total.ndim == 2:
        return total
    return join(total, None, bias, out_dtype)


def linear_swiglu(x, w_gate_up) -> jax.Array:
    """See `api.linear_swiglu`."""
    return swiglu(linear(x, w_gate_up, None, out_dtype=x.dtype))


def norm_linear(x, gain, w, bias, *, eps: float, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.norm_linear`."""
    return linear(rms_norm(x, gain, eps=eps), w, bias, out_dtype=out_dtype)


def norm_linear_swiglu(x, gain, w_gate_up, *, eps: float) -> jax.Array:
    """See `api.norm_linear_swiglu`."""
    return linear_swiglu(rms_norm(x, gain, eps=eps), w_gate_up)


def linear_partial(x, w, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_partial`."""
    return _product(x, w, reduction.leaf_len)


def linear_leaf_sums(x, w, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_leaf_sums`: the whole subtree, as one part."""
    return linear_partial(x, w, reduction=reduction)[None]


def add_partials(a, b) -> jax.Array:
    """See `api.add_partials`."""
    return call("add_leaves", jax.ShapeDtypeStruct(a.shape, a.dtype), jnp.stack([a, b]))


def combine_norm_linear(
    leaf_sums, residual, gain, w, bias, *, eps: float, out_dtype: jnp.dtype, is_gated: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.combine_norm_linear`: the two operations, one after the other."""
    if leaf_sums is None:
        total, x = residual, rms_norm(residual, gain, eps=eps)
    else:
        total, x = combine_add_rms_norm(leaf_sums, residual, None, gain, eps=eps)
    out = linear_swiglu(x, w) if is_gated else linear(x, w, bias, out_dtype=out_dtype)
    return out, total, x


def linear_add(x, w, residual, bias, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_add`."""
    return join(linear_partial(x, w, reduction=reduction), residual, bias, residual.dtype)


def linear_add_rms_norm(
    x, w, residual, bias, gain, *, reduction: Reduction, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.linear_add_rms_norm`."""
    total = linear_add(x, w, residual, bias, reduction=reduction)
    return total, rms_norm(total, gain, eps=eps)


def quantize_rows(x, coding: RowCoding) -> QuantizedRows:
    """See `w8a8.quantize_rows`.

    Raises:
        NotImplementedError: If rows are not bfloat16.
    """
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"the reference backend quantises bfloat16, not {x.dtype}; use portable"
        )
    num_rows, width = x.shape
    groups = (width // coding.group_len,) if coding.group_len else ()
    out = [
        jax.ShapeDtypeStruct(x.shape, coding.dtype),
        jax.ShapeDtypeStruct((*groups, num_rows), jnp.float32),
    ]
    given = jnp.zeros((0,)) if coding.scale is None else coding.scale.reshape(1)
    values, scales = call(
        "quantize_rows", out, x, given, largest=np.float32(LARGEST[coding.dtype.name]),
        bound=np.float32(coding.bound), group_len=coding.group_len,
    )  # fmt: skip
    return QuantizedRows(values=values, scales=scales)


def scaled_sums(x: QuantizedRows, w: W8A8Matrix, ids, bias=None) -> jax.Array:
    """Products of 8-bit values with their scales, and a bias: float32 [S, N].

    Args:
        x: Rows, [R, K]; each is that of S / R slots.
        w: Of several experts, [E, N, K].
        ids: int32 [S], the expert of each slot. One that is not there gives zeros.
        bias: Added last, [E, N].
    """
    out = jax.ShapeDtypeStruct((ids.size, w.shape[1]), jnp.float32)
    bias = jnp.zeros((0,), jnp.bfloat16) if bias is None else bias
    return call("w8a8_product", out, x.values, x.scales, w.values, w.scales, bias, ids)


def w8a8_product(
    x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, bias, residual, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_product`."""
    x = quantized_rows(x, quantize_rows=quantize_rows, rms_norm=rms_norm)
    as_experts = dataclasses.replace(w, values=w.values[None], scales=w.scales[None])
    total = scaled_sums(x, as_experts, jnp.zeros(x.shape[0], jnp.int32))
    if bias is None and residual is None and out_dtype == jnp.float32:
        return total
    return join(total, residual, bias, out_dtype)


def w8a8_swiglu(
    x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_swiglu`: the two operations, one after the other."""
    return swiglu(w8a8_product(x, w, None, None, out_dtype=out_dtype))
