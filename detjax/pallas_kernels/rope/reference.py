# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in the bits of the Hopper kernel, on the CPU."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.rms_norm.reference import rms_norm
from detjax.pallas_kernels.rope.portable import split_heads, write_pages


def rope(x, cos, sin) -> jax.Array:
    """See `api.rope`.

    Raises:
        NotImplementedError: If heads are not bfloat16.
    """
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"the reference backend rotates bfloat16, not {x.dtype}; use portable"
        )
    return call("rope", jax.ShapeDtypeStruct(x.shape, x.dtype), x, cos, sin)


def rope_into_cache(
    qkv, cos, sin, gains, pages, page_table, positions, layer: int, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.rope_into_cache`."""
    q, k, v = split_heads(qkv, qkv.shape[1] - 2 * pages.shape[3])
    if gains is not None:
        q, k = (
            rms_norm(x.reshape(-1, x.shape[2]), gain, eps=eps).reshape(x.shape)
            for x, gain in zip((q, k), gains, strict=True)
        )
    q, k = (rope(x, cos, sin) for x in (q, k))
    return q, write_pages(pages, k, v, page_table, positions, layer)
