# SPDX-License-Identifier: Apache-2.0
"""Adapters in the bits of Hopper's kernels, on the CPU."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.linear.reference import linear
from detjax.pallas_kernels.lora.adapted import columns_of
from detjax.pallas_kernels.reference_library import call


def lora_hidden(leaf_sums, slots, scales, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_hidden`."""
    shape = leaf_sums.shape[1:]
    sums = call("add_leaves", jax.ShapeDtypeStruct(shape, jnp.float32), leaf_sums)
    out = jax.ShapeDtypeStruct(shape, out_dtype)
    return call("lora_hidden", out, sums, slots, *columns_of(scales, shape[1]))


def lora_add(base, h, b, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_add`: k16 block by k16 block of ranks in one accumulator, then one addition."""
    added = linear(h, b, None, out_dtype=jnp.dtype(jnp.float32))
    return call("add_where_not_zero", jax.ShapeDtypeStruct(base.shape, out_dtype), base, added)
