# SPDX-License-Identifier: Apache-2.0
"""The forward pass of training: the decoder of serving, with gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32
from detjax.models.layers import ForwardContext
from detjax.models.params import TENSORS_OF, join
from detjax.models.transformer import Stream, run_layers
from detjax.training import operations as ops
from detjax.training.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOps:
    """The operations of `training.operations` on whole sequences, without a cache.

    Attributes:
        ctx: The model, with tp = 1.
        batch: Rows and their places in sequences.
        positions: Of each place, [B, T]; -1 behind a sequence's end.
        cos: Cosines of positions 0 to T - 1.
        sin: Likewise.
    """

    ctx: ForwardContext
    batch: Batch
    positions: Any
    cos: Any
    sin: Any

    def embed(self, table, ids, gain) -> Stream:
        """Look up rows and normalise them."""
        residual = ops.embed(self.ctx, table, ids)
        return Stream(residual, ops.rms_norm(self.ctx, residual, gain))

    def attend(self, layer_idx: int, weights: dict, stream: Stream, cache):
        """Attend within each sequence; `cache` is None."""
        ctx, config, positions, slots = self.ctx, self.ctx.config, self.positions, self.batch.slots
        qkv_weights = _joined(weights, "qkv")
        bias = _joined(weights, "qkv_bias") if config.qkv_bias else None
        qkv = ops.linear(ctx, stream.x, qkv_weights, bias)
        qkv = ops.to_sequences(qkv, slots, positions.size)
        out = ops.self_attention(
            ctx,
            qkv.reshape(*positions.shape, -1, config.head_dim),
            (weights["q_norm"], weights["k_norm"]) if config.qk_norm else None,
            self.cos,
            self.sin,
            positions,
            window=config.sliding_windows[layer_idx],
        )
        return cache, ops.to_rows(out.reshape(positions.size, -1), slots), stream

    def gate(self, weights: dict, stream: Stream) -> jax.Array:
        """A product, then its gates: the bits of both in one launch."""
        return ops.swiglu(self.ctx, ops.linear(self.ctx, stream.x, _joined(weights, "gate_up")))

    def add_norm(self, x, w, bias, gain, stream: Stream) -> Stream:
        """One operation, as on one rank of a server."""
        return Stream(*ops.linear_add_rms_norm(self.ctx, x, w, stream.residual, bias, gain))


def _joined(weights: dict[str, Any], name: str) -> jax.Array:
    """A parameter of a layer, from the masters of its tensors."""
    return join([weights[tensor] for tensor in TENSORS_OF[name]], tp=1)


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
    hidden = final_hidden(ctx, params, rope_tables, batch, remat=remat)
    return ops.token_logprobs(ctx, hidden, output_head(ctx, params), batch.targets)


def output_head(ctx: ForwardContext, params: dict[str, Any]) -> Float32[Array, "V D"]:
    """The master of the matrix that makes logits."""
    return params["embed"] if ctx.config.tie_word_embeddings else params["lm_head"]


def final_hidden(
    ctx: ForwardContext,
    params: dict[str, Any],
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    batch: Batch,
    *,
    remat: bool,
) -> Activation[Array, "M D"]:
    """The hidden state of each row after the last norm, as `token_logprobs` takes and claims it."""
    if ctx.tp != 1:
        raise ValueError(f"{ctx.tp=} must be 1: training spreads sequences over devices")
    if batch.length > rope_tables[0].shape[0]:
        raise ValueError(
            f"sequences of {batch.length} rows are longer than the model's context of "
            f"{rope_tables[0].shape[0]}"
        )
    cos, sin = (table[: batch.length] for table in rope_tables)
    positions = jnp.arange(batch.length, dtype=jnp.int32)[None, :]
    positions = jnp.where(positions < batch.lengths[:, None], positions, -1)

    own = TrainingOps(ctx=ctx, batch=batch, positions=positions, cos=cos, sin=sin)
    _, stream = run_layers(own, params, batch.ids, None, remat=remat)
    return stream.x
