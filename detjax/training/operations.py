# SPDX-License-Identifier: Apache-2.0
"""The operations of a forward pass with gradients: kernels forward, named sums backward.

An operation here has the bits of the kernel of the same name. Its derivative is that of the plain
formula at the same inputs, where a rounding has derivative 1. Weights are float32 masters: kernels
see them rounded to the profile's dtype, and their gradients are float32.

Numerics:
    Values are the kernels', with their claims. In gradients, cotangents of activations have the
    activations' dtype, and every sum is one of `gradients.GradientSums`: docs/training.md has the
    order of the canonical ones.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.config import Gating
from detjax.models.layers import ForwardContext
from detjax.models.transformer import AfterGains
from detjax.numerics import tree_reduction
from detjax.pallas_kernels.attention.api import attention as attention_kernel
from detjax.pallas_kernels.embedding.api import embed as embed_kernel
from detjax.pallas_kernels.geglu.api import geglu as geglu_kernel
from detjax.pallas_kernels.linear.api import linear as linear_kernel
from detjax.pallas_kernels.linear.api import linear_add_rms_norm as linear_add_rms_norm_kernel
from detjax.pallas_kernels.linear.api import linear_partial
from detjax.pallas_kernels.log_softmax.api import block_stats, log_probs, log_sum_exp
from detjax.pallas_kernels.output_gate.api import sigmoid_gate as sigmoid_gate_kernel
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import add_rms_norm as add_rms_norm_kernel
from detjax.pallas_kernels.rms_norm.api import rms_norm as rms_norm_kernel
from detjax.pallas_kernels.rope.api import rope as rope_kernel
from detjax.pallas_kernels.rope.portable import rotated_heads, write_pages
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.softcap.api import softcap as softcap_kernel
from detjax.pallas_kernels.swiglu.api import swiglu as swiglu_kernel
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.mesh import TP_AXIS
from detjax.training import adapter_operations
from detjax.training.attention_gradient import SelfAttention, attention_gradients
from detjax.training.formulas import (
    plain_geglu,
    plain_rms_norm,
    plain_sigmoid_gate,
    plain_swiglu,
    softcap_slopes,
)
from detjax.training.gradients import (
    XLA_ROWS,
    GradientSums,
    in_chunks,
    linear_gradients,
    with_gradient,
)
from detjax.training.lora import AdaptedMaster
from detjax.training.rounding import stored_gain


def embed(
    ctx: ForwardContext, sums: GradientSums, table: Float32[Array, "V D"], ids: Int32[Array, " M"]
) -> Activation[Array, "M D"]:
    """Look up one row a token: `embedding.api.embed`. The table is by use."""
    profile = ctx.profile

    def kernel(table, ids):
        stored = table.astype(profile.param_dtype)
        return embed_kernel(stored, ids, out_dtype=profile.activation_dtype, backend=ctx.backend)

    def gradient(args, _, cotangent):
        table, ids = args
        # WHY: a product, since a scatter-add has no order.
        is_token = jax.nn.one_hot(ids, table.shape[0], dtype=cotangent.dtype)
        return sums.of_weights(is_token, cotangent), None

    return with_gradient(kernel, gradient)(table, ids)


def rms_norm(
    ctx: ForwardContext, sums: GradientSums, x: Activation[Array, "M D"], gain: Float32[Array, " D"]
) -> Activation[Array, "M D"]:
    """Divide each row by its root mean square: `rms_norm.api.rms_norm`."""
    eps = ctx.config.rms_norm_eps

    def kernel(x, gain):
        stored = stored_gain(gain, ctx.config, ctx.profile.param_dtype)
        return rms_norm_kernel(x, stored, eps=eps, backend=ctx.backend)

    def formula(x, gain):
        return plain_rms_norm(x, gain[None], eps)

    def gradient(args, _, cotangent):
        (of_x,), (of_gain,) = sums.of_formula(formula, args[:1], args[1:], cotangent)
        return of_x, of_gain

    return with_gradient(kernel, gradient)(x, gain)


def norm_gradients(sums: GradientSums, eps: float, total, gain, cotangents):
    """Cotangents of a stream that is handed on and normalised, and of the gain."""

    def formula(total, gain):
        return total, plain_rms_norm(total, gain[None], eps)

    (of_total,), (of_gain,) = sums.of_formula(formula, (total,), (gain,), cotangents)
    return of_total, of_gain


def bias_gradient(sums: GradientSums, bias, cotangent):
    """The cotangent of what is added to all rows; None of none."""
    if bias is None:
        return None

    def formula(rows, bias):
        return rows.astype(jnp.float32) + bias[None]

    wide = cotangent.astype(jnp.float32)
    return sums.of_formula(formula, (cotangent,), (bias,), wide)[1][0]


def linear(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Activation[Array, "M I"],
    w: Float32[Array, "O I"] | AdaptedMaster,
    bias: Float32[Array, " O"] | None = None,
    *,
    widths: tuple[int, ...],
) -> Activation[Array, "M O"]:
    """Multiply by a weight matrix: `linear.api.linear`. O is this rank's share of several tensors.

    `widths` are the rows of each tensor.
    """
    if isinstance(w, AdaptedMaster):
        return adapter_operations.linear(ctx, sums, x, w, bias)
    dtype = ctx.profile.param_dtype

    def kernel(x, w, bias):
        bias = None if bias is None else bias.astype(dtype)
        return linear_kernel(x, w.astype(dtype), bias, out_dtype=x.dtype, backend=ctx.backend)

    def gradient(args, _, cotangent):
        x, w, bias = args
        of_bias = bias_gradient(sums, bias, cotangent)
        of_x, of_w = linear_gradients(sums, x, w, cotangent, dtype, widths=widths, is_split=True)
        return of_x, of_w, of_bias

    return with_gradient(kernel, gradient)(x, w, bias)


def linear_add_rms_norm(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Activation[Array, "M I"],
    w: Float32[Array, "D I"] | AdaptedMaster,
    residual: Activation[Array, "M D"],
    bias: Float32[Array, " D"] | None,
    gain: Float32[Array, " D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Multiply, add to the residual stream, normalise: `linear.api.linear_add_rms_norm`."""
    if isinstance(w, AdaptedMaster):
        return adapter_operations.linear_add_rms_norm(ctx, sums, x, w, residual, bias, gain)
    dtype, eps = ctx.profile.param_dtype, ctx.config.rms_norm_eps
    reduction = tree_reduction(x.shape[1] * ctx.tp, ctx.profile)
    on = {"eps": eps, "backend": ctx.backend}

    def kernel(x, w, residual, bias, gain):
        bias = None if bias is None else bias.astype(dtype)
        w, gain = w.astype(dtype), stored_gain(gain, ctx.config, dtype)
        if ctx.tp == 1:
            return linear_add_rms_norm_kernel(x, w, residual, bias, gain, reduction=reduction, **on)
        partial = linear_partial(x, w, reduction=reduction, backend=ctx.backend)
        total = butterfly_sum(partial, TP_AXIS, ctx.tp, backend=ctx.backend)
        return add_rms_norm_kernel(total, residual, bias, gain, **on)

    def gradient(args, out, cotangents):
        x, w, _, bias, gain = args
        of_total, of_gain = norm_gradients(sums, eps, out[0], gain, cotangents)
        of_x, of_w = linear_gradients(sums, x, w, of_total, dtype)
        return of_x, of_w, of_total, bias_gradient(sums, bias, of_total), of_gain

    return with_gradient(kernel, gradient)(x, w, residual, bias, gain)


def norm_add(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Activation[Array, "M I"],
    w: Float32[Array, "D I"] | AdaptedMaster,
    residual: Activation[Array, "M D"],
    bias: Float32[Array, " D"] | None,
    gains: AfterGains,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Multiply, normalise, add, normalise: `layers.row_parallel_norm_add` on one rank.

    Returns the new residual stream, and what the next operation reads of it.
    """
    zeros = jnp.zeros_like(residual)
    _, normed = linear_add_rms_norm(ctx, sums, x, w, zeros, bias, gains.after)
    before = gains.after if gains.before is None else gains.before
    total, out = add_rms_norm(ctx, sums, normed, residual, before)
    return total, total if gains.before is None else out


def add_rms_norm(
    ctx: ForwardContext,
    sums: GradientSums,
    added: Activation[Array, "M D"],
    residual: Activation[Array, "M D"],
    gain: Float32[Array, " D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add rows to the residual stream and normalise it: `rms_norm.api.add_rms_norm`."""
    eps = ctx.config.rms_norm_eps

    def kernel(added, residual, gain):
        stored = stored_gain(gain, ctx.config, ctx.profile.param_dtype)
        wide = added.astype(jnp.float32)
        return add_rms_norm_kernel(wide, residual, None, stored, eps=eps, backend=ctx.backend)

    def gradient(args, out, cotangents):
        of_total, of_gain = norm_gradients(sums, eps, out[0], args[2], cotangents)
        return of_total, of_total, of_gain

    return with_gradient(kernel, gradient)(added, residual, gain)


def gated(
    ctx: ForwardContext, sums: GradientSums, gate_up: Activation[Array, "M E"]
) -> Activation[Array, "M F"]:
    """Gate the second half of the columns by the first: `swiglu.api.swiglu`, `geglu.api.geglu`."""
    if ctx.config.gating is Gating.GEGLU:
        run, formula = geglu_kernel, plain_geglu
    else:
        run, formula = swiglu_kernel, plain_swiglu

    def kernel(gate_up):
        return run(gate_up, backend=ctx.backend)

    def gradient(args, _, cotangent):
        return sums.of_formula(formula, args, (), cotangent)[0]

    return with_gradient(kernel, gradient)(gate_up)


def sigmoid_gate(
    ctx: ForwardContext,
    sums: GradientSums,
    rows: Activation[Array, "M X"],
    gate: Activation[Array, "M Y"],
) -> Activation[Array, "M X"]:
    """Multiply by sigmoids: `output_gate.api.sigmoid_gate`. Y is X, or 1 for one of each row."""

    def kernel(rows, gate):
        return sigmoid_gate_kernel(rows, jnp.broadcast_to(gate, rows.shape), backend=ctx.backend)

    def gradient(args, _, cotangent):
        return sums.of_formula(plain_sigmoid_gate, args, (), cotangent)[0]

    return with_gradient(kernel, gradient)(rows, gate)


def self_attention(
    ctx: ForwardContext,
    sums: GradientSums,
    qkv: Activation[Array, "B T J C"],
    gains: tuple[Float32[Array, " C"], Float32[Array, " C"]] | None,
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    positions: Int32[Array, "B T"],
    sinks: Float32[Array, " H"] | None = None,
    *,
    window: int | None,
) -> Activation[Array, "B T H C"]:
    """Attend within whole sequences: the parts of `rope_into_cache`, then `attention`.

    Args:
        ctx: The model and the numerics.
        sums: Of the backward pass.
        qkv: Heads of queries, then keys, then values: J = H + 2 K.
        gains: Of the norms of queries and keys; None for models without.
        cos: Rows of the host's table for positions 0 to T - 1.
        sin: Likewise.
        positions: `t` for token t of a sequence, -1 from its end on.
        sinks: Scores of heads, which have no value; None for models without.
        window: How many tokens back a query sees, itself included; None sees all.
    """
    profile, config = ctx.profile, ctx.config
    batch, length, num_all, channels = qkv.shape
    num_heads, eps = config.num_heads // ctx.tp, config.rms_norm_eps
    num_kv = (num_all - num_heads) // 2

    def kernel(qkv, gains, cos, sin, positions, sinks):
        sinks = None if sinks is None else sinks.astype(profile.param_dtype)
        if gains is not None:
            of_q, of_k = (stored_gain(gain, config, profile.param_dtype) for gain in gains)
            gains = of_q, of_k
        num_blocks = -(-length // profile.attention_block)
        page = (2, num_kv, profile.attention_block, channels)
        pages = jnp.zeros((1, batch * num_blocks, *page), qkv.dtype)
        table = jnp.arange(batch * num_blocks, dtype=jnp.int32).reshape(batch, num_blocks)
        # WHY: not `rope_into_cache`, which writes a reference on sm90. Where a layer is computed
        # again JAX drops the write, and attention saw zeros (jax 0.11.2).
        q, k, v = rotated_heads(
            partial(rope_kernel, backend=ctx.backend),
            partial(rms_norm_kernel, backend=ctx.backend),
            qkv.reshape(-1, num_all, channels),
            Rotation(jnp.tile(cos, (batch, 1)), jnp.tile(sin, (batch, 1)), gains),
            counts=(num_heads, num_kv),
            eps=eps,
        )
        place = CachePlace(pages, table, positions, layer=0)
        return attention_kernel(
            q.reshape(batch, length, num_heads, channels),
            place._replace(pages=write_pages(place, k, v)),
            window=window,
            softcap=config.attention_softcap,
            sinks=sinks,
            profile=profile,
            backend=ctx.backend,
        )

    def gradient(args, out, cotangent):
        of_qkv, of_gains, of_sinks = attention_gradients(
            ctx, sums, SelfAttention(*args), out, cotangent, window=window
        )
        return of_qkv, of_gains, None, None, None, of_sinks

    return with_gradient(kernel, gradient)(qkv, gains, cos, sin, positions, sinks)


def token_logprobs(
    ctx: ForwardContext,
    sums: GradientSums,
    hidden: Activation[Array, "M D"],
    head: Float32[Array, "V D"],
    targets: Int32[Array, " M"],
) -> tuple[Float32[Array, " M"], Float32[Array, " M"]]:
    """Log-probability of each target, and the entropy of its distribution.

    The log-probability has the bits of sampling. The entropy, in nats, is for reading: plain JAX
    computes it, without a claim or a gradient.
    """
    profile, backend, cap = ctx.profile, ctx.backend, ctx.config.logits_softcap
    num_rows, vocab_size = hidden.shape[0], head.shape[0]

    def rounded_head(head):
        extra = -vocab_size % profile.vocab_block
        return jnp.pad(head.astype(profile.param_dtype), ((0, extra), (0, 0)))

    def logits_and_lse(hidden, rounded):
        logits = linear_kernel(hidden, rounded, out_dtype=jnp.dtype(jnp.float32), backend=backend)
        if cap is not None:
            logits = softcap_kernel(logits, cap=cap, backend=backend)
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

        chunks = tuple(in_chunks(x, min(XLA_ROWS, num_rows)) for x in (hidden, targets))
        logprobs, entropy = lax.map(chunk, chunks)
        return logprobs.reshape(-1)[:num_rows], entropy.reshape(-1)[:num_rows]

    def gradient(args, _, cotangents):
        hidden, head, targets = args
        rounded = rounded_head(head)

        def of_logits(hidden, targets, cotangent):
            logits, lse = logits_and_lse(hidden, rounded)
            is_target = jax.nn.one_hot(targets, logits.shape[1], dtype=jnp.float32)
            of_logits = (is_target - jnp.exp(logits - lse[:, None])) * cotangent[:, None]
            if cap is not None:
                of_logits = of_logits * softcap_slopes(logits, cap)
            return of_logits.astype(hidden.dtype)

        rows = sums.map_rows(of_logits, (hidden, targets, cotangents[0]))
        of_hidden, of_head = linear_gradients(sums, hidden, rounded, rows, rounded.dtype)
        return of_hidden, of_head[:vocab_size], None

    logprobs, entropy = with_gradient(kernel, gradient)(hidden, head, targets)
    return logprobs, lax.stop_gradient(entropy)


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
