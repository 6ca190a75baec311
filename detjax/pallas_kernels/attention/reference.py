# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache in the bits of the Hopper kernels, on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.float8_cache import holds_float8, widened_pages
from detjax.pallas_kernels.hopper_sums import KEY_BLOCK, score_cap_factors, score_scale
from detjax.pallas_kernels.output_gate.reference import sigmoid_gate
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.rope.reference import rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation, num_gated_heads


def attention(
    q, place: CachePlace,
    *, window: int | None, profile: NumericsProfile, softcap: float | None = None, sinks=None,
) -> jax.Array:  # fmt: skip
    """See `api.attention`.

    Raises:
        NotImplementedError: For other dtypes than bfloat16 or float32 of all, channels that are no
            multiple of 16, another block than 128, or sinks or a soft cap of float32 activations.
    """
    if (sinks is not None or softcap is not None) and q.dtype != jnp.bfloat16:
        raise NotImplementedError(
            "attention of the reference backend has sinks and soft caps in bfloat16 alone, as "
            "sm90; use portable"
        )
    if holds_float8(place.pages):
        place = widened_pages(place, q.dtype)
    pages, page_table, positions, layer = place
    channels = q.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or pages.dtype != q.dtype:
        raise NotImplementedError(
            "attention of the reference backend is of bfloat16 or float32, not of "
            f"{q.dtype} with {pages.dtype}; use portable"
        )
    if channels % 16 or profile.attention_block != KEY_BLOCK:
        raise NotImplementedError(
            f"attention of the reference backend has a multiple of 16 {channels=} and "
            f"{profile.attention_block=} of {KEY_BLOCK}; use portable"
        )
    layer_operand = jnp.asarray(layer, jnp.int32).reshape(1)
    of_heads = jnp.zeros((0,)) if sinks is None else sinks
    scale, exponent, cap = score_scale(channels), 0.0, 0.0
    if softcap is not None:
        scale, (exponent, cap) = 1.0, score_cap_factors(channels, softcap)
    return call(
        "attention", jax.ShapeDtypeStruct(q.shape, q.dtype),
        q, pages, page_table, positions, layer_operand, of_heads.astype(jnp.float32),
        window=window or 0, blocks_per_split=profile.attention_split // KEY_BLOCK,
        scale=np.float32(scale), cap_exponent=np.float32(exponent), cap=np.float32(cap),
    )  # fmt: skip


def rope_attention(
    qkv, rotation: Rotation, place: CachePlace,
    *, window: int | None, eps: float, profile: NumericsProfile, prefetch=None, sinks=None,
    is_gated: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.rope_attention`."""
    del prefetch
    num_heads = num_gated_heads(qkv, place.pages, is_gated)
    q, pages = rope_into_cache(qkv, rotation, place, num_heads=num_heads, eps=eps)
    q = q.reshape(*place.positions.shape, *q.shape[1:])
    place = place._replace(pages=pages)
    out = attention(q, place, window=window, profile=profile, sinks=sinks)
    if is_gated:
        rows = sigmoid_gate(out.reshape(len(qkv), -1), qkv.reshape(len(qkv), -1))
        out = rows.reshape(out.shape)
    return out, pages
