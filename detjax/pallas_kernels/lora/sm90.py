# SPDX-License-Identifier: Apache-2.0
"""Adapters on Hopper: the products are those of linear layers, the rest is elementwise."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.linear.sm90 import linear


def lora_hidden(leaf_sums, slots, scales, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_hidden`.

    Numerics:
        # ORDER: ((t0 + t1) + (t2 + t3)) + ..., f32, as `linear_partial` continues the tree.
        # ROUND: the product with the scale, then h. No addition follows a product, so XLA has
        nothing to fuse into one rounding.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    terms = list(leaf_sums)
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[0::2], terms[1::2], strict=True)]
    num_parts, num_slots = scales.shape
    rank = leaf_sums.shape[-1] // scales.size
    slot_of = jnp.tile(jnp.repeat(jnp.arange(num_slots, dtype=jnp.int32), rank), num_parts)
    h = terms[0] * jnp.repeat(scales.reshape(-1), rank)[None, :]
    return jnp.where(slot_of[None, :] == slots[:, None], h, 0.0).astype(out_dtype)


def lora_add(base, h, b, slots, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_add`.

    Numerics:
        # ORDER: k16 block by k16 block of ranks in one f32 wgmma accumulator, then one addition.
        # ROUND: once, to `out_dtype`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    added = linear(h, b, None, out_dtype=jnp.dtype(jnp.float32))
    return jnp.where((slots >= 0)[:, None], base + added, base).astype(out_dtype)
