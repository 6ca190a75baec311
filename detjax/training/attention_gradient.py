# SPDX-License-Identifier: Apache-2.0
"""The backward pass of attention with rotary embedding and the norms of queries and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.gradients.api import attention_gradient
from detjax.pallas_kernels.gradients.leaves import TOKEN_LEAF
from detjax.training.formulas import plain_attention, rotated_heads
from detjax.training.gradients import CanonicalSums, GradientSums

MAX_SCORES = 2**26
"""Scores that exist at the same time in XLA's backward pass, or those of one sequence."""

Gains = tuple[Float32[Array, " C"], Float32[Array, " C"]] | None


class SelfAttention(NamedTuple):
    """The arguments of `operations.self_attention`.

    Attributes:
        qkv: Heads, [B, T, J, C].
        gains: Of the norms of queries and keys, or None.
        cos: [T, half].
        sin: [T, half].
        positions: int32 [B, T]; -1 from a sequence's end on.
        sinks: Masters, [H], or None.
    """

    qkv: Any
    gains: Any
    cos: Any
    sin: Any
    positions: Any
    sinks: Any


def attention_gradients(
    ctx: ForwardContext,
    sums: GradientSums,
    given: SelfAttention,
    out: Activation[Array, "B T H C"],
    of_out: Activation[Array, "B T H C"],
    *,
    window: int | None,
) -> tuple[Activation[Array, "B T J C"], Gains, Float32[Array, " H"] | None]:
    """Cotangents of heads, of gains and of sinks."""
    qkv, gains, cos, sin, positions, sinks = given
    if sinks is not None:
        sinks = sinks.astype(ctx.profile.param_dtype).astype(jnp.float32)
    num_heads = ctx.config.num_heads // ctx.tp
    rotate = partial(rotated_heads, num_heads=num_heads, eps=ctx.config.rms_norm_eps)
    if isinstance(sums, CanonicalSums):
        given = given._replace(sinks=sinks)
        return _canonical(ctx, sums, rotate, given, out, of_out, window)

    batch, length = positions.shape
    options = {"window": window, "softcap": ctx.config.attention_softcap}

    def formula(qkv, gains, sinks):
        # Padding comes after its sequence, so no token before it sees it.
        @jax.checkpoint
        def one(qkv):
            heads = rotate(qkv, cos, sin, gains)
            return plain_attention(heads, sinks, num_heads=num_heads, **options)

        at_once = max(MAX_SCORES // (num_heads * length**2), 1)
        return lax.map(one, qkv, batch_size=min(at_once, batch))

    return jax.vjp(formula, qkv, gains, sinks)[1](of_out)


def _canonical(
    ctx: ForwardContext,
    sums: CanonicalSums,
    rotate: Callable,
    given: SelfAttention,
    out: jax.Array,
    of_out: jax.Array,
    window: int | None,
) -> tuple[jax.Array, Gains, jax.Array | None]:
    """Rotate again, in leaves; then each sequence and head by itself; then rotate back."""
    (qkv, gains, cos, sin, _, sinks), own = given, sums.leaves
    batch, length = qkv.shape[:2]
    num_heads = ctx.config.num_heads // ctx.tp
    num_kv = (qkv.shape[2] - num_heads) // 2

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(own.batch, own.length, *x.shape[-2:]).swapaxes(1, 2)

    # The angles of a leaf are rows of it, whose cotangents nobody reads.
    angles = [jnp.broadcast_to(x, (batch, *x.shape)) for x in (cos, sin)]
    rows = tuple(own.cut_padded(own.padded(x)) for x in (qkv, *angles))
    heads = by_head(sums.by_leaf(lambda *rows: rotate(*rows, gains), *rows))
    q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv], axis=1)
    *of_heads, of_sinks = attention_gradient(
        q, k, v, by_head(own.padded(out)), by_head(own.padded(of_out)), own.lengths,
        window=window, softcap=ctx.config.attention_softcap, sinks=sinks, backend=sums.backend,
    )  # fmt: skip
    if of_sinks is not None:
        of_sinks = sums.of_places(jnp.moveaxis(of_sinks, 1, 2).reshape(-1, num_heads))
    # ROUND: once, to the activations' dtype.
    of_heads = jnp.concatenate(of_heads, axis=1).astype(qkv.dtype).swapaxes(1, 2)
    cotangent = own.cut_padded(of_heads)

    def turn_back(qkv, cos, sin, cotangent):
        """Of heads, and of the gain of each token's heads."""
        counts = num_heads, num_kv
        own = gains and tuple(
            jnp.broadcast_to(gain, (TOKEN_LEAF, count, *gain.shape))
            for gain, count in zip(gains, counts, strict=True)
        )
        _, pull = jax.vjp(lambda qkv, own: rotate(qkv, cos, sin, own), qkv, own)
        return pull(cotangent)

    of_leaves, of_gains = sums.by_leaf(turn_back, *rows, cotangent)
    of_qkv = of_leaves.reshape(own.batch, own.length, *qkv.shape[2:])[:batch, :length]
    if gains is None:
        return of_qkv, None, of_sinks
    of_q_gain, of_k_gain = map(sums.of_heads, of_gains)
    return of_qkv, (of_q_gain, of_k_gain), of_sinks
