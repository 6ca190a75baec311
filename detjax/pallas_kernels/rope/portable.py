# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding on blocks of 16 rows, a row a (token, head)."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, run_blocks
from detjax.pallas_kernels.float8_cache import holds_float8, narrow_rows
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.portable import rms_norm
from detjax.pallas_kernels.rope.rotation import Rotation, angles_of_keys, angles_of_queries


@jax.jit
def rope(x, cos, sin) -> jax.Array:
    """See `api.rope`."""
    num_rows, num_heads, channels = x.shape
    half = channels // 2
    flat = pad_axis(x.reshape(num_rows * num_heads, channels), 0, ROWS)
    cos = pad_axis(jnp.repeat(cos, num_heads, axis=0), 0, ROWS)
    sin = pad_axis(jnp.repeat(sin, num_heads, axis=0), 0, ROWS)

    def body(x_ref, cos_ref, sin_ref, out_ref):
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        first = x_ref[rows, pl.ds(0, half)].astype(jnp.float32)
        second = x_ref[rows, pl.ds(half, half)].astype(jnp.float32)
        c, s = cos_ref[rows, :], sin_ref[rows, :]
        # ORDER: one product and one fused or unfused multiply-add a channel, as the compiler
        # contracts this one body; it is the same body at every call.
        out_ref[:, pl.ds(0, half)] = (first * c - second * s).astype(out_ref.dtype)
        out_ref[:, pl.ds(half, half)] = (second * c + first * s).astype(out_ref.dtype)

    out = run_blocks(
        body,
        flat,
        cos,
        sin,
        name="rope",
        grid=(flat.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
        out_specs=pl.BlockSpec((ROWS, channels), lambda m: (m, 0)),
    )
    return out[: num_rows * num_heads].reshape(x.shape)


def split_heads(qkv, counts: tuple[int, int]) -> list[jax.Array]:
    """Queries, keys and values of fused heads [M, J, C]; `counts` are H and K."""
    num_heads, num_kv = counts
    ends = num_heads, num_heads + num_kv, num_heads + 2 * num_kv
    return [qkv[:, start:end] for start, end in itertools.pairwise((0, *ends))]


def write_pages(place: CachePlace, k, v) -> jax.Array:
    """Put keys and values [M, K, C] of new tokens in their pages; padding is dropped."""
    pages, page_table, positions, layer = place
    # WHY: `//`, `%` and indices that may be negative are dozens of instructions a layer, which
    # XLA compiles, keeps and reads again for each.
    page_len = np.int32(pages.shape[4])
    known = jnp.maximum(positions, 0)
    blocks, offsets = lax.div(known, page_len), lax.rem(known, page_len)
    is_token = (positions >= 0) & (blocks < page_table.shape[1])
    page_ids = jnp.take_along_axis(page_table, blocks, axis=1, mode="clip")
    page_ids = jnp.where(is_token, page_ids, pages.shape[1]).reshape(-1)
    offsets = offsets.reshape(-1)
    kv = jnp.stack([k, v], axis=1)
    if holds_float8(pages):
        kv = narrow_rows(kv)
    return pages.at[layer, page_ids, :, :, offsets].set(kv, mode="drop")


def rope_into_cache(
    qkv, rotation: Rotation, place: CachePlace, *, num_heads: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.rope_into_cache`."""
    counts = num_heads, place.pages.shape[3]
    q, k, v = rotated_heads(rope, rms_norm, qkv, rotation, counts=counts, eps=eps)
    return q, write_pages(place, k, v)


def rotated_heads(
    rope: Callable,
    rms_norm: Callable,
    qkv,
    rotation: Rotation,
    *,
    counts: tuple[int, int],
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, normalised if there are gains and rotated by a backend's own operations.

    Args:
        rope: `api.rope` of the backend.
        rms_norm: `api.rms_norm` of the backend.
        qkv: As `api.rope_into_cache` has it.
        rotation: Likewise.
        counts: Heads of queries, and of keys.
        eps: Of the norm.

    Returns:
        Queries, keys and values.
    """
    q, k, v = split_heads(qkv, counts)
    if rotation.gains is not None:
        q, k = (
            rms_norm(x.reshape(-1, x.shape[2]), gain, eps=eps).reshape(x.shape)
            for x, gain in zip((q, k), rotation.gains, strict=True)
        )
    cos, sin, channels = rotation.cos, rotation.sin, qkv.shape[2]
    q = rope(q, angles_of_queries(cos, channels), angles_of_queries(sin, channels))
    k = rope(k, angles_of_keys(cos, channels), angles_of_keys(sin, channels))
    return q, k, v
