# SPDX-License-Identifier: Apache-2.0
"""Adapters in the bits of Hopper's kernels, on the CPU."""

from functools import partial

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.reference import linear
from detjax.pallas_kernels.lora import composed
from detjax.pallas_kernels.lora.adapted import columns_of
from detjax.pallas_kernels.moe.reference import expert_linear
from detjax.pallas_kernels.reference_library import call


def lora_hidden(leaf_sums, slots, scales, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_hidden`."""
    shape = leaf_sums.shape[1:]
    sums = call("add_leaves", jax.ShapeDtypeStruct(shape, jnp.float32), leaf_sums)
    out = jax.ShapeDtypeStruct(shape, out_dtype)
    return call("lora_hidden", out, sums, slots, *columns_of(scales, shape[1]))


def lora_add(base, h, b, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_add`: k16 block by k16 block of ranks in one accumulator, then one addition."""
    return _add(base, linear(h, b, None, out_dtype=jnp.dtype(jnp.float32)), out_dtype)


def expert_lora_add(base, h, experts, b, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.expert_lora_add`: as `lora_add`, with the B of each row's expert."""
    added = expert_linear(h, experts, b, out_dtype=jnp.dtype(jnp.float32))
    return _add(base, added, out_dtype)


def _add(base, added, out_dtype: jnp.dtype) -> jax.Array:
    """`round(base + added)`, and `round(base)` where `added` is zero."""
    return call("add_where_not_zero", jax.ShapeDtypeStruct(base.shape, out_dtype), base, added)


lora_project = partial(composed.lora_project, KERNELS[Backend.REFERENCE])
lora_linear = partial(composed.lora_linear, KERNELS[Backend.REFERENCE])
lora_linear_swiglu = partial(composed.lora_linear_swiglu, KERNELS[Backend.REFERENCE])
lora_linear_add_rms_norm = partial(composed.lora_linear_add_rms_norm, KERNELS[Backend.REFERENCE])
