# SPDX-License-Identifier: Apache-2.0
"""Plain formulas of operations, whose derivatives a backward pass takes."""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.pallas_kernels.rope.rotation import angles_of_keys, angles_of_queries
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


def plain_rms_norm(x, gain, eps: float):
    """The formula of `rms_norm`, rows of x with a gain each."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps) * gain).astype(x.dtype)


def plain_swiglu(gate_up, clamp: SwigluClamp | None = None):
    """The formula of `swiglu`. Clamps have derivative 1 up to their limits, and 0 past them."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    if clamp is None:
        return (jax.nn.silu(gate) * up).astype(gate_up.dtype)
    limit = jnp.float32(clamp.limit)
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return (gate * jax.nn.sigmoid(clamp.alpha * gate) * (up + 1)).astype(gate_up.dtype)


def plain_geglu(gate_up):
    """The formula of `geglu`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.gelu(gate, approximate=True) * up).astype(gate_up.dtype)


def plain_rope(x, cos, sin):
    """Rotate [T, H, C] by tables [T, half]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def rotated_heads(qkv, cos, sin, gains, *, num_heads: int, eps: float):
    """Normalise, if there are gains, and rotate queries and keys of heads [T, H + 2 K, C].

    Gains are [C], or one for each head of each token.
    """
    num_kv = (qkv.shape[1] - num_heads) // 2
    q, k, v = jnp.split(qkv, [num_heads, num_heads + num_kv], axis=1)
    if gains is not None:
        q, k = (
            plain_rms_norm(x, jnp.broadcast_to(gain, x.shape), eps)
            for x, gain in zip((q, k), gains, strict=True)
        )
    of_queries, of_keys = (
        [of(rows, qkv.shape[2]) for rows in (cos, sin)]
        for of in (angles_of_queries, angles_of_keys)
    )
    return jnp.concatenate([plain_rope(q, *of_queries), plain_rope(k, *of_keys), v], axis=1)


def softcap_slopes(capped, cap: float):
    """The derivatives of `softcap`, from its results; that of -inf, which has no token, is 1."""
    tangents = jnp.where(jnp.isfinite(capped), capped, 0.0) * jnp.float32(1 / cap)
    return 1.0 - tangents * tangents


def plain_attention(heads, sinks, *, num_heads: int, window: int | None, softcap: float | None):
    """Causal self-attention of one sequence: rotated heads [T, H + 2 K, C] to [T, H, C].

    Sinks are [H], or None.
    """
    length, num_all, channels = heads.shape
    num_kv = (num_all - num_heads) // 2
    q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv], axis=1)
    q = q.reshape(length, num_kv, -1, channels)
    scores = jnp.einsum(
        "TKGC,SKC->KGTS", q, k, precision="highest", preferred_element_type=jnp.float32
    )
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    is_seen = (back >= 0) & (back < (window or length))
    scores = scores * channels**-0.5
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    scores = jnp.where(is_seen[None, None], scores, -jnp.inf)
    if sinks is not None:
        of_rows = jnp.broadcast_to(sinks.reshape(num_kv, -1, 1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, of_rows], axis=3)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    out = jnp.einsum(
        "KGTS,SKC->TKGC",
        weights.astype(v.dtype),
        v,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return out.astype(heads.dtype).reshape(length, num_heads, channels)
