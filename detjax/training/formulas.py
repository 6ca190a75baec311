# SPDX-License-Identifier: Apache-2.0
"""Plain formulas of operations, whose derivatives a backward pass takes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from detjax.pallas_kernels.delta_rule.portable import NORM_EPS
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.fixed_blocks import pad_axis, round_to
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


def plain_sigmoid_gate(rows, gate):
    """The formula of `sigmoid_gate`; a gate is of each channel, or of the row."""
    wide = jax.nn.sigmoid(gate.astype(jnp.float32)) * rows.astype(jnp.float32)
    return wide.astype(rows.dtype)


def plain_gated_rms_norm(x, z, gain, eps: float):
    """The formula of `gated_rms_norm`, heads of x with a gate and a gain each channel."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    normed = x * lax.rsqrt(mean_square + eps) * gain
    return (normed * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 of `dtype`'s precision; the derivative is 1."""
    with_slope = jax.custom_jvp(lambda x: round_to(x, dtype))
    with_slope.defjvp(lambda primals, tangents: (with_slope(*primals), tangents[0]))
    return with_slope(x)


class DeltaInputs(NamedTuple):
    """What the recurrence of `delta_rule` reads of each token, float32.

    Attributes:
        q: [..., K, c], normalised and scaled.
        k: [..., K, c], normalised.
        v: [..., K, G, C].
        decay: [..., K, G].
        beta: [..., K, G].
    """

    q: Any
    k: Any
    v: Any
    decay: Any
    beta: Any


def plain_delta_inputs(windows, b, a, filters, decay, step, *, key_dim: int, dtype: jnp.dtype):
    """The formula of `delta_rule` up to its recurrence, of each token.

    Windows are the rows that the convolution of a token reads, [T, W, K, O], the oldest first. b
    and a are [T, K, G], filters [K, W, O], decay and step [K, G].
    """
    mixed = jnp.zeros_like(windows[:, 0])
    for i in range(windows.shape[1]):
        mixed = mixed + filters[None, :, i] * windows[:, i]
    mixed = rounded(jax.nn.silu(mixed), dtype)
    q, k, v = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
    q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS) for x in (q, k))
    return DeltaInputs(
        q=q * key_dim**-0.5,
        k=k,
        v=v.reshape(*b.shape, -1),
        decay=jnp.exp(-jnp.exp(decay)[None] * jax.nn.softplus(a + step[None])),
        beta=jax.nn.sigmoid(b),
    )


def plain_delta_rule(inputs: DeltaInputs):
    """The recurrence of `delta_rule` of one sequence, to [T, K, G, C].

    A backward pass keeps a state each `STATE_BLOCK` tokens and computes the others again.
    """

    def token(state, given: DeltaInputs):
        q, k = (x[:, None, :, None] for x in (given.q, given.k))
        state = state * given.decay[..., None, None]
        found = jnp.sum(state * k, axis=2)
        state = state + k * ((given.v - found) * given.beta[..., None])[:, :, None]
        return state, jnp.sum(state * q, axis=2)

    @jax.checkpoint
    def block(state, given):
        return lax.scan(token, state, given)

    length = len(inputs.q)
    padded = jax.tree.map(lambda x: pad_axis(x, 0, STATE_BLOCK), inputs)
    blocks = jax.tree.map(lambda x: x.reshape(-1, STATE_BLOCK, *x.shape[1:]), padded)
    num_keys, group, value_dim = inputs.v.shape[1:]
    state = jnp.zeros((num_keys, group, inputs.k.shape[-1], value_dim), inputs.v.dtype)
    _, out = lax.scan(block, state, blocks)
    return out.reshape(-1, *out.shape[2:])[:length]


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
