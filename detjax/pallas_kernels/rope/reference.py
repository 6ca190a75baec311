# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in the bits of the Hopper kernel, on the CPU."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.rms_norm.reference import rms_norm
from detjax.pallas_kernels.rope.portable import rotated_heads, write_pages


def rope(x, cos, sin) -> jax.Array:
    """See `api.rope`.

    Raises:
        NotImplementedError: If heads are neither bfloat16 nor float32.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"the reference backend rotates bfloat16 or float32, not {x.dtype}; use portable"
        )
    return call("rope", jax.ShapeDtypeStruct(x.shape, x.dtype), x, cos, sin)


def rope_into_cache(
    qkv, cos, sin, gains, pages, page_table, positions, layer: int, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.rope_into_cache`."""
    q, k, v = rotated_heads(
        rope, rms_norm, qkv, cos, sin, gains, num_kv_heads=pages.shape[3], eps=eps
    )
    return q, write_pages(pages, k, v, page_table, positions, layer)
