# SPDX-License-Identifier: Apache-2.0
"""The operations of a forward pass with gradients: kernels forward, plain JAX backward.

An operation here has the bits of the kernel of the same name. Its derivative is that of the plain
formula at the same inputs, where a rounding has derivative 1. Weights are float32 masters: kernels
see them rounded to the profile's dtype, and their gradients are float32.

Numerics:
    Values are the kernels', with their claims. In gradients, cotangents of activations have the
    activations' dtype; products are exact and summed in float32 by XLA, in an order it may choose
    by the shape. A gradient is therefore only run-invariant: its sums over tokens are not
    batch-invariant.
"""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.layers import ForwardContext
from detjax.models.transformer import AfterGains
from detjax.numerics import tree_reduction
from detjax.pallas_kernels.attention.api import attention as attention_kernel
from detjax.pallas_kernels.embedding.api import embed as embed_kernel
from detjax.pallas_kernels.linear.api import linear as linear_kernel
from detjax.pallas_kernels.linear.api import linear_add_rms_norm as linear_add_rms_norm_kernel
from detjax.pallas_kernels.log_softmax.api import block_stats, log_probs, log_sum_exp
from detjax.pallas_kernels.rms_norm.api import add_rms_norm as add_rms_norm_kernel
from detjax.pallas_kernels.rms_norm.api import rms_norm as rms_norm_kernel
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.swiglu.api import swiglu as swiglu_kernel
from detjax.training import adapter_operations
from detjax.training.gradients import (
    ROW_AXIS,
    gradient_of,
    linear_gradients,
    product,
    with_gradient,
)
from detjax.training.lora import AdaptedMaster

HEAD_ROWS = 1024
"""Tokens whose logits exist at the same time."""

MAX_SCORES = 2**26
"""Attention scores that exist at the same time in a backward pass, or those of one sequence."""


def embed(
    ctx: ForwardContext, table: Float32[Array, "V D"], ids: Int32[Array, " M"]
) -> Activation[Array, "M D"]:
    """Look up one row a token: `embedding.api.embed`."""
    profile = ctx.profile

    def kernel(table, ids):
        rounded = table.astype(profile.param_dtype)
        return embed_kernel(rounded, ids, out_dtype=profile.activation_dtype, backend=ctx.backend)

    def gradient(args, _, cotangent):
        table, ids = args
        # WHY: a product, since a scatter-add on a GPU has no order.
        is_token = jax.nn.one_hot(ids, table.shape[0], dtype=cotangent.dtype)
        return product(is_token, cotangent, ROW_AXIS, ROW_AXIS), None

    return with_gradient(kernel, gradient)(table, ids)


def plain_rms_norm(x, gain, eps: float):
    """The formula of `rms_norm`, rows of x with a gain each."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps) * gain).astype(x.dtype)


def rms_norm(
    ctx: ForwardContext, x: Activation[Array, "M D"], gain: Float32[Array, " D"]
) -> Activation[Array, "M D"]:
    """Divide each row by its root mean square: `rms_norm.api.rms_norm`."""
    eps = ctx.config.rms_norm_eps

    def kernel(x, gain):
        rounded = gain.astype(ctx.profile.param_dtype)
        return rms_norm_kernel(x, rounded, eps=eps, backend=ctx.backend)

    def formula(x, gain):
        return plain_rms_norm(x, gain[None], eps)

    return with_gradient(kernel, gradient_of(formula))(x, gain)


def _bias_gradient(bias, cotangent):
    return None if bias is None else jnp.sum(cotangent.astype(jnp.float32), axis=0)


def linear(
    ctx: ForwardContext,
    x: Activation[Array, "M I"],
    w: Float32[Array, "O I"] | AdaptedMaster,
    bias: Float32[Array, " O"] | None = None,
) -> Activation[Array, "M O"]:
    """Multiply by a weight matrix: `linear.api.linear`."""
    if isinstance(w, AdaptedMaster):
        return adapter_operations.linear(ctx, x, w, bias)
    dtype = ctx.profile.param_dtype

    def kernel(x, w, bias):
        bias = None if bias is None else bias.astype(dtype)
        return linear_kernel(x, w.astype(dtype), bias, out_dtype=x.dtype, backend=ctx.backend)

    def gradient(args, _, cotangent):
        x, w, bias = args
        return *linear_gradients(x, w, cotangent, dtype), _bias_gradient(bias, cotangent)

    return with_gradient(kernel, gradient)(x, w, bias)


def linear_add_rms_norm(
    ctx: ForwardContext,
    x: Activation[Array, "M I"],
    w: Float32[Array, "D I"] | AdaptedMaster,
    residual: Activation[Array, "M D"],
    bias: Float32[Array, " D"] | None,
    gain: Float32[Array, " D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Multiply, add to the residual stream, normalise: `linear.api.linear_add_rms_norm`."""
    if isinstance(w, AdaptedMaster):
        return adapter_operations.linear_add_rms_norm(
            ctx, x, w, residual, bias, gain, plain_rms_norm
        )
    dtype, eps = ctx.profile.param_dtype, ctx.config.rms_norm_eps
    reduction = tree_reduction(x.shape[1], ctx.profile)

    def kernel(x, w, residual, bias, gain):
        bias = None if bias is None else bias.astype(dtype)
        return linear_add_rms_norm_kernel(
            x,
            w.astype(dtype),
            residual,
            bias,
            gain.astype(dtype),
            reduction=reduction,
            eps=eps,
            backend=ctx.backend,
        )

    def formula(total, gain):
        return total, plain_rms_norm(total, gain[None], eps)

    def gradient(args, out, cotangents):
        x, w, _, bias, gain = args
        of_total, of_gain = jax.vjp(formula, out[0], gain)[1](cotangents)
        of_x, of_w = linear_gradients(x, w, of_total, dtype)
        return of_x, of_w, of_total, _bias_gradient(bias, of_total), of_gain

    return with_gradient(kernel, gradient)(x, w, residual, bias, gain)


def norm_add(
    ctx: ForwardContext,
    x: Activation[Array, "M I"],
    w: Float32[Array, "D I"],
    residual: Activation[Array, "M D"],
    bias: Float32[Array, " D"] | None,
    gains: AfterGains,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Multiply, normalise, add, normalise: `layers.row_parallel_norm_add` on one rank.

    Returns the new residual stream, and what the next operation reads of it.
    """
    zeros = jnp.zeros_like(residual)
    _, normed = linear_add_rms_norm(ctx, x, w, zeros, bias, gains.after)
    before = gains.after if gains.before is None else gains.before
    total, out = add_rms_norm(ctx, normed, residual, before)
    return total, total if gains.before is None else out


def add_rms_norm(
    ctx: ForwardContext,
    added: Activation[Array, "M D"],
    residual: Activation[Array, "M D"],
    gain: Float32[Array, " D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add rows to the residual stream and normalise it: `rms_norm.api.add_rms_norm`."""
    eps = ctx.config.rms_norm_eps

    def kernel(added, residual, gain):
        rounded = gain.astype(ctx.profile.param_dtype)
        wide = added.astype(jnp.float32)
        return add_rms_norm_kernel(wide, residual, None, rounded, eps=eps, backend=ctx.backend)

    def formula(total, gain):
        return total, plain_rms_norm(total, gain[None], eps)

    def gradient(args, out, cotangents):
        of_total, of_gain = jax.vjp(formula, out[0], args[2])[1](cotangents)
        return of_total, of_total, of_gain

    return with_gradient(kernel, gradient)(added, residual, gain)


def swiglu(ctx: ForwardContext, gate_up: Activation[Array, "M E"]) -> Activation[Array, "M F"]:
    """Gate the second half of the columns by the SiLU of the first: `swiglu.api.swiglu`."""

    def kernel(gate_up):
        return swiglu_kernel(gate_up, backend=ctx.backend)

    return with_gradient(kernel, gradient_of(plain_swiglu))(gate_up)


def plain_swiglu(gate_up):
    """The formula of `swiglu`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _plain_rope(x, cos, sin):
    """Rotate [T, H, C] by tables [T, half]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _plain_attention(qkv, gains, cos, sin, *, num_heads: int, window: int | None, eps: float):
    """Causal self-attention of one sequence: heads [T, H + 2 K, C] to [T, H, C]."""
    length, _, channels = qkv.shape
    num_kv = (qkv.shape[1] - num_heads) // 2
    q, k, v = jnp.split(qkv, [num_heads, num_heads + num_kv], axis=1)
    if gains is not None:
        q, k = (plain_rms_norm(x, g[None, None], eps) for x, g in zip((q, k), gains, strict=True))
    q, k = _plain_rope(q, cos, sin), _plain_rope(k, cos, sin)
    q = q.reshape(length, num_kv, -1, channels)
    scores = jnp.einsum(
        "TKGC,SKC->KGTS", q, k, precision="highest", preferred_element_type=jnp.float32
    )
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    is_seen = (back >= 0) & (back < (window or length))
    weights = jax.nn.softmax(
        jnp.where(is_seen[None, None], scores * channels**-0.5, -jnp.inf), axis=-1
    )
    out = jnp.einsum(
        "KGTS,SKC->TKGC",
        weights.astype(v.dtype),
        v,
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return out.astype(qkv.dtype).reshape(length, num_heads, channels)


def self_attention(
    ctx: ForwardContext,
    qkv: Activation[Array, "B T J C"],
    gains: tuple[Float32[Array, " C"], Float32[Array, " C"]] | None,
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    positions: Int32[Array, "B T"],
    *,
    window: int | None,
) -> Activation[Array, "B T H C"]:
    """Attend within whole sequences: `rope_into_cache` on an empty cache, then `attention`.

    Args:
        ctx: The model and the numerics.
        qkv: Heads of queries, then keys, then values: J = H + 2 K.
        gains: Of the norms of queries and keys; None for models without.
        cos: Rows of the host's table for positions 0 to T - 1.
        sin: Likewise.
        positions: `t` for token t of a sequence, -1 from its end on.
        window: How many tokens back a query sees, itself included; None sees all.
    """
    profile, config = ctx.profile, ctx.config
    batch, length, num_all, channels = qkv.shape
    num_heads, eps = config.num_heads, config.rms_norm_eps
    num_kv = (num_all - num_heads) // 2

    def kernel(qkv, gains, cos, sin, positions):
        if gains is not None:
            gains = tuple(gain.astype(profile.param_dtype) for gain in gains)
        num_blocks = -(-length // profile.attention_block)
        page = (2, num_kv, profile.attention_block, channels)
        pages = jnp.zeros((1, batch * num_blocks, *page), qkv.dtype)
        table = jnp.arange(batch * num_blocks, dtype=jnp.int32).reshape(batch, num_blocks)
        q, pages = rope_into_cache(
            qkv.reshape(-1, num_all, channels),
            jnp.tile(cos, (batch, 1)),
            jnp.tile(sin, (batch, 1)),
            gains,
            pages,
            table,
            positions,
            layer=0,
            eps=eps,
            backend=ctx.backend,
        )
        return attention_kernel(
            q.reshape(batch, length, num_heads, channels),
            pages,
            table,
            positions,
            layer=0,
            window=window,
            profile=profile,
            backend=ctx.backend,
        )

    def formula(qkv, gains, cos, sin, positions):
        # Padding comes after its sequence, so no token before it sees it.
        del positions

        @jax.checkpoint
        def one(qkv):
            return _plain_attention(
                qkv, gains, cos, sin, num_heads=num_heads, window=window, eps=eps
            )

        at_once = max(MAX_SCORES // (num_heads * length**2), 1)
        return lax.map(one, qkv, batch_size=min(at_once, batch))

    op = with_gradient(kernel, gradient_of(formula))
    return op(qkv, gains, cos, sin, positions)


def token_logprobs(
    ctx: ForwardContext,
    hidden: Activation[Array, "M D"],
    head: Float32[Array, "V D"],
    targets: Int32[Array, " M"],
) -> tuple[Float32[Array, " M"], Float32[Array, " M"]]:
    """Log-probability of each target, and the entropy of its distribution.

    The log-probability has the bits of sampling. The entropy, in nats, is for reading: plain JAX
    computes it, without a claim or a gradient.
    """
    profile, backend = ctx.profile, ctx.backend
    num_rows, vocab_size = hidden.shape[0], head.shape[0]

    def rounded_head(head):
        extra = -vocab_size % profile.vocab_block
        return jnp.pad(head.astype(profile.param_dtype), ((0, extra), (0, 0)))

    def logits_and_lse(hidden, rounded):
        logits = linear_kernel(hidden, rounded, out_dtype=jnp.dtype(jnp.float32), backend=backend)
        is_token = jnp.arange(logits.shape[1]) < vocab_size
        logits = jnp.where(is_token[None], logits, -jnp.inf)
        stats = block_stats(logits, vocab_block=profile.vocab_block, backend=backend)
        return logits, log_sum_exp(*stats, backend=backend)

    def kernel(hidden, head, targets):
        rounded = rounded_head(head)

        def chunk(part):
            hidden, targets = part
            logits, lse = logits_and_lse(hidden, rounded)
            chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)
            logprobs = log_probs(chosen, lse, backend=backend)[:, 0]
            surprise = jnp.where(jnp.isfinite(logits), lse[:, None] - logits, 0.0)
            entropy = jnp.sum(jnp.exp(-surprise) * surprise, axis=1)
            return logprobs, entropy

        logprobs, entropy = lax.map(chunk, (_chunks(hidden), _chunks(targets)))
        return logprobs.reshape(-1)[:num_rows], entropy.reshape(-1)[:num_rows]

    def gradient(args, _, cotangents):
        hidden, head, targets = args
        rounded = rounded_head(head)

        def chunk(of_head, part):
            hidden, targets, cotangent = part
            logits, lse = logits_and_lse(hidden, rounded)
            is_target = jax.nn.one_hot(targets, logits.shape[1], dtype=jnp.float32)
            of_logits = (is_target - jnp.exp(logits - lse[:, None])) * cotangent[:, None]
            of_logits = of_logits.astype(hidden.dtype)
            of_hidden, of_rows = linear_gradients(hidden, rounded, of_logits, rounded.dtype)
            return of_head + of_rows, of_hidden

        parts = tuple(_chunks(x) for x in (hidden, targets, cotangents[0]))
        zeros = jnp.zeros(rounded.shape, jnp.float32)
        of_head, of_hidden = lax.scan(chunk, zeros, parts)
        return of_hidden.reshape(-1, hidden.shape[1])[:num_rows], of_head[:vocab_size], None

    logprobs, entropy = with_gradient(kernel, gradient)(hidden, head, targets)
    return logprobs, lax.stop_gradient(entropy)


def _chunks(x: jax.Array) -> jax.Array:
    """Rows in chunks of at most `HEAD_ROWS`, zeros after the last."""
    rows = min(HEAD_ROWS, x.shape[0])
    padded = jnp.pad(x, [(0, -x.shape[0] % rows)] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(-1, rows, *x.shape[1:])


def to_sequences(
    rows: Activation[Array, "M X"], places: Int32[Array, " M"], num_places: int
) -> Activation[Array, "Y X"]:
    """Put each row in its place, zeros elsewhere. Copies only, in both directions."""

    def kernel(rows, places):
        out = jnp.zeros((num_places, rows.shape[1]), rows.dtype)
        return out.at[places].set(rows, mode="drop", unique_indices=True)

    def gradient(args, _, cotangent):
        return _take_rows(cotangent, args[1]), None

    return with_gradient(kernel, gradient)(rows, places)


def to_rows(
    sequences: Activation[Array, "Y X"], places: Int32[Array, " M"]
) -> Activation[Array, "M X"]:
    """The inverse of `to_sequences`; zeros for rows of padding."""

    def gradient(args, _, cotangent):
        out = jnp.zeros(args[0].shape, cotangent.dtype)
        return out.at[args[1]].set(cotangent, mode="drop", unique_indices=True), None

    return with_gradient(_take_rows, gradient)(sequences, places)


def _take_rows(sequences, places):
    return jnp.take(sequences, places, axis=0, mode="fill", fill_value=0)
