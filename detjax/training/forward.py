# SPDX-License-Identifier: Apache-2.0
"""The forward pass of training: the operations of `models.decoder`, with gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32
from detjax.models.layers import ForwardContext
from detjax.training import operations as ops
from detjax.training.batch import Batch


def token_logprobs(
    ctx: ForwardContext,
    params: dict[str, Any],
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    batch: Batch,
    *,
    remat: bool,
) -> tuple[Float32[Array, " M"], Float32[Array, " M"]]:
    """Log-probability of each row's target, and the entropy of each row's distribution.

    Args:
        ctx: The model, with tp = 1: a device holds all of it while it computes.
        params: Float32 masters, as `weights.master_params` gives them.
        rope_tables: Of the model.
        batch: Rows.
        remat: Keep one activation a layer for the backward pass and compute the rest again.

    Raises:
        ValueError: If `ctx.tp` is not 1, or a sequence is longer than the model's context.

    Numerics:
        Log-probabilities are canonical: the bits of the engine's, in any batch and layout, with
        rematerialisation or without, and, as the engine's are mesh-invariant, for any tp of it.
        Gradients: see `operations`.
    """
    if ctx.tp != 1:
        raise ValueError(f"{ctx.tp=} must be 1: training spreads sequences over devices")
    config = ctx.config
    if batch.length > rope_tables[0].shape[0]:
        raise ValueError(
            f"sequences of {batch.length} rows are longer than the model's context of "
            f"{rope_tables[0].shape[0]}"
        )
    cos, sin = (table[: batch.length] for table in rope_tables)
    positions = jnp.arange(batch.length, dtype=jnp.int32)[None, :]
    positions = jnp.where(positions < batch.lengths[:, None], positions, -1)

    def layer_pass(index: int, weights: dict, next_gain, residual, x):
        qkv_weights = jnp.concatenate([weights[name] for name in "qkv"])
        bias = None
        if config.qkv_bias:
            bias = jnp.concatenate([weights[f"{name}_bias"] for name in "qkv"])
        qkv = ops.linear(ctx, x, qkv_weights, bias)
        qkv = ops.to_sequences(qkv, batch.slots, positions.size)
        out = ops.self_attention(
            ctx,
            qkv.reshape(*positions.shape, -1, config.head_dim),
            (weights["q_norm"], weights["k_norm"]) if config.qk_norm else None,
            cos,
            sin,
            positions,
            window=config.sliding_windows[index],
        )
        out = ops.to_rows(out.reshape(positions.size, -1), batch.slots)
        residual, x = ops.linear_add_rms_norm(
            ctx, out, weights["o"], residual, weights.get("o_bias"), weights["mlp_norm"]
        )
        gate_up = jnp.concatenate([weights["gate"], weights["up"]])
        x = ops.swiglu(ctx, ops.linear(ctx, x, gate_up))
        return ops.linear_add_rms_norm(ctx, x, weights["down"], residual, None, next_gain)

    if remat:
        layer_pass = jax.checkpoint(layer_pass, static_argnums=0)
    layers = params["layers"]
    gains = [weights["attn_norm"] for weights in layers] + [params["final_norm"]]
    residual: Activation[Array, "M D"] = ops.embed(ctx, params["embed"], batch.ids)
    x = ops.rms_norm(ctx, residual, gains[0])
    for index, weights in enumerate(layers):
        residual, x = layer_pass(index, weights, gains[index + 1], residual, x)
    head = params["embed"] if config.tie_word_embeddings else params["lm_head"]
    return ops.token_logprobs(ctx, x, head, batch.targets)
