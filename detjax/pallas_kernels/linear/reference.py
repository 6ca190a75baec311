# SPDX-License-Identifier: Apache-2.0
"""Matrix products in the bits of a tensor core of Hopper, on the CPU."""

from typing import NoReturn

import jax
import jax.numpy as jnp

from detjax.numerics import Reduction
from detjax.pallas_kernels.linear.quantized import RowCoding, expanded
from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.rms_norm.reference import (
    combine_add_rms_norm,
    join,
    rms_norm,
)
from detjax.pallas_kernels.swiglu.reference import swiglu


def _product(x, w, leaf_len: int) -> jax.Array:
    """The tree of the leaves' sums, float32 [M, N].

    Raises:
        NotImplementedError: For another dtype than bfloat16, or a leaf that is no multiple of 16.
    """
    w = expanded(w)
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"the reference backend takes bfloat16, not {x.dtype} with {w.dtype}; use portable"
        )
    if leaf_len % 16:
        raise NotImplementedError(
            "the reference backend needs leaves of a multiple of 16, the depth of one wgmma, not "
            f"{leaf_len}; use portable"
        )
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    return call("product", out, x, w, leaf_len=leaf_len)


def linear(x, w, bias, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.linear`."""
    total = _product(x, w, x.shape[1])
    if bias is None and out_dtype == jnp.float32:
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
    leaf_sums, residual, gain, w, *, eps: float, out_dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.combine_norm_linear`: the two operations, one after the other."""
    total, x = combine_add_rms_norm(leaf_sums, residual, None, gain, eps=eps)
    return linear(x, w, None, out_dtype=out_dtype), total, x


def linear_add(x, w, residual, bias, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_add`."""
    return join(linear_partial(x, w, reduction=reduction), residual, bias, residual.dtype)


def linear_add_rms_norm(
    x, w, residual, bias, gain, *, reduction: Reduction, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.linear_add_rms_norm`."""
    total = linear_add(x, w, residual, bias, reduction=reduction)
    return total, rms_norm(total, gain, eps=eps)


def _refuse_8_bits() -> NoReturn:
    raise NotImplementedError(
        "the reference backend has no products of 8-bit activations; use portable or sm90"
    )


def quantize_rows(x, coding: RowCoding):
    """Refuse: see `w8a8.quantize_rows`."""
    _refuse_8_bits()


def rms_norm_quantize(x, gain, coding: RowCoding, *, eps: float):
    """Refuse: see `w8a8.rms_norm_quantize`."""
    _refuse_8_bits()


def w8a8_product(x, w, bias, residual, *, out_dtype: jnp.dtype):
    """Refuse: see `w8a8.w8a8_product`."""
    _refuse_8_bits()


def w8a8_swiglu(x, w, *, out_dtype: jnp.dtype):
    """Refuse: see `w8a8.w8a8_swiglu`."""
    _refuse_8_bits()
