# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in the bits of the Hopper kernel, on the CPU."""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.rms_norm.reference import rms_norm
from detjax.pallas_kernels.rope.portable import rotated_heads, write_pages
from detjax.pallas_kernels.rope.rotation import Rotation


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
    qkv, rotation: Rotation, place: CachePlace, *, num_heads: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.rope_into_cache`."""
    counts = num_heads, place.pages.shape[3]
    q, k, v = rotated_heads(rope, rms_norm, qkv, rotation, counts=counts, eps=eps)
    # WHY: XLA would compute the positions of a step anew in each layer's write.
    positions, page_table = lax.optimization_barrier((place.positions, place.page_table))
    return q, write_pages(place._replace(positions=positions, page_table=page_table), k, v)
