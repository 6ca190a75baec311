# SPDX-License-Identifier: Apache-2.0
"""The forward pass of training: the decoder of serving, with gradients."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32
from detjax.models.layers import ForwardContext, angles_of
from detjax.models.linear_attention import filters_of, gates_of, projected_rows
from detjax.models.params import join, tensors_in
from detjax.models.transformer import Stream, run_layers
from detjax.training import expert_operations as expert_ops
from detjax.training import linear_attention as linear_ops
from detjax.training import operations as ops
from detjax.training.batch import Batch
from detjax.training.gradients import Backward, GradientSums, sums_of
from detjax.training.rounding import by_use
from detjax.training.sharing import why_layers_not_shared


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOps:
    """The operations of `training.operations` on whole sequences, without a cache.

    Attributes:
        ctx: The model, and the ranks that share its layers.
        sums: Of the backward pass.
        batch: Rows and their places in sequences.
        positions: Of each place, [B, T]; -1 behind a sequence's end.
        cos: Cosines of positions 0 to T - 1.
        sin: Likewise.
    """

    ctx: ForwardContext
    sums: GradientSums
    batch: Batch
    positions: Any
    cos: Any
    sin: Any

    def embed(self, table, ids, gain) -> Stream:
        """Look up rows and normalise them, unless the first product reads them as they are."""
        residual = ops.embed(self.ctx, self.sums, table, ids)
        if gain is None:
            return Stream(residual, residual)
        return Stream(residual, ops.rms_norm(self.ctx, self.sums, residual, gain))

    def attend(self, layer_idx: int, weights: dict, stream: Stream, cache):
        """Attend within each sequence, or read its states; `cache` is None."""
        if "linear_q" in weights:
            return cache, self._attend_linearly(weights, stream), stream
        ctx, sums, config = self.ctx, self.sums, self.ctx.config
        positions, places = self.positions, self.batch.places
        qkv_weights = _joined(weights, "qkv")
        bias = _joined(weights, "qkv_bias") if config.qkv_bias else None
        qkv = ops.linear(ctx, sums, stream.x, qkv_weights, bias, widths=_widths(weights, "qkv"))
        if config.is_qk_norm_whole:
            qkv = _normalise_all_heads(ctx, sums, weights, qkv)
        gate = None
        if config.has_output_gate:
            first_gate = qkv.shape[1] - config.num_heads * config.head_dim
            qkv, gate = qkv[:, :first_gate], qkv[:, first_gate:]
        qkv = ops.to_sequences(qkv, places, positions.size)
        out = ops.self_attention(
            ctx,
            sums,
            qkv.reshape(*positions.shape, -1, config.head_dim),
            (weights["q_norm"], weights["k_norm"]) if config.qk_norm else None,
            angles_of(config, self.cos, layer_idx),
            angles_of(config, self.sin, layer_idx),
            positions,
            weights.get("sinks"),
            window=config.sliding_windows[layer_idx],
        )
        heads = ops.to_rows(out.reshape(positions.size, -1), places)
        if gate is not None:
            heads = ops.sigmoid_gate(ctx, sums, heads, gate)
        return cache, heads, stream

    def _attend_linearly(self, weights: dict, stream: Stream) -> jax.Array:
        """The heads of a layer of gated DeltaNet, normalised and gated."""
        ctx, sums, positions, places = self.ctx, self.sums, self.positions, self.batch.places
        sizes = ctx.config.linear_attention
        assert sizes is not None  # whoever has such a layer
        w, widths = _joined(weights, "linear_in"), _widths(weights, "linear_in")
        projected = ops.linear(ctx, sums, stream.x, w, widths=widths)
        found = projected_rows(sizes, projected, ctx.tp)
        rows, z = found.arranged(), found.output_gates()
        in_places = ops.to_sequences(rows.reshape(len(rows), -1), places, positions.size)
        out = linear_ops.delta_rule(
            ctx,
            sums,
            in_places.reshape(*positions.shape, *rows.shape[1:]),
            filters_of(weights).arranged(rows.shape[1]),
            gates_of(sizes, weights),
            positions,
        )
        heads = ops.to_rows(out.reshape(positions.size, -1), places).reshape(z.shape)
        normed = linear_ops.gated_rms_norm(ctx, sums, heads, z, weights["linear_norm"])
        return normed.reshape(len(rows), -1)

    def gate(self, weights: dict, stream: Stream) -> tuple[jax.Array, Stream]:
        """Multiply, then gate: the bits of both operations in one launch."""
        channels = ops.gated(
            self.ctx,
            self.sums,
            ops.linear(
                self.ctx,
                self.sums,
                stream.x,
                _joined(weights, "gate_up"),
                widths=_widths(weights, "gate_up"),
            ),
        )
        return channels, stream

    def add_norm(self, x, w, bias, gain, stream: Stream) -> Stream:
        """Run one operation, as on one rank of a server."""
        return Stream(
            *ops.linear_add_rms_norm(self.ctx, self.sums, x, w, stream.residual, bias, gain)
        )

    def norm_add(self, x, w, bias, gains, stream: Stream) -> Stream:
        """Run two operations, as on one rank of a server."""
        return Stream(*ops.norm_add(self.ctx, self.sums, x, w, stream.residual, bias, gains))

    def mix_experts(self, weights: dict, gain, stream: Stream, cache):
        """Run the operations of a server's one rank; `cache` counts for the balance."""
        ctx, sums, x = self.ctx, self.sums, stream.x
        router_bias = weights.get("router_bias")
        logits = expert_ops.router_logits(ctx, sums, x, weights["router"], router_bias)
        correction = weights.get("router_correction")
        expert_ids, expert_weights = expert_ops.route(ctx, sums, logits, correction)
        joined = _joined(weights, "expert_gate_up"), _joined(weights, "expert_down")
        biases = None
        if ctx.config.has_clamped_experts:
            biases = weights["expert_gate_up_bias"], weights["expert_down_bias"]
        y = expert_ops.expert_mlp(ctx, sums, x, expert_ids, *joined, biases)
        if ctx.config.has_shared_expert:
            y = jnp.concatenate([y, self._shared_expert(weights, x)[:, None]], axis=1)
            ones = jnp.ones((len(y), 1), jnp.float32)
            expert_weights = jnp.concatenate([expert_weights, ones], axis=1)
        added = expert_ops.combine_experts_add_rms_norm(
            ctx, sums, y, expert_weights, stream.residual, gain
        )
        if cache is not None:
            cache = _counted(cache, logits, expert_ids, self.batch.places < self.positions.size)
        return cache, Stream(*added)

    def _shared_expert(self, weights: dict, x: jax.Array) -> jax.Array:
        """What the expert of every row gives."""
        ctx, sums = self.ctx, self.sums
        gate_up, down = (_joined(weights, f"shared_{name}") for name in ("gate_up", "down"))
        own = ops.linear(ctx, sums, x, gate_up, widths=_widths(weights, "shared_gate_up"))
        out = ops.linear(ctx, sums, ops.gated(ctx, sums, own), down, widths=(len(down),))
        if "shared_gate" not in weights:
            return out
        gate = expert_ops.router_logits(ctx, sums, x, weights["shared_gate"], out_dtype=x.dtype)
        return ops.sigmoid_gate(ctx, sums, out, gate)


def _normalise_all_heads(
    ctx: ForwardContext, sums: GradientSums, weights: dict[str, Any], qkv: jax.Array
) -> jax.Array:
    """The norms of q and of k over all their heads; v stays."""
    sizes = [n * ctx.config.head_dim for n in (ctx.config.num_heads, ctx.config.num_kv_heads)]
    q, k, v = jnp.split(qkv, [sizes[0], sum(sizes)], axis=1)
    q = ops.rms_norm(ctx, sums, q, weights["q_norm_whole"])
    return jnp.concatenate([q, ops.rms_norm(ctx, sums, k, weights["k_norm_whole"]), v], axis=1)


class Balance(NamedTuple):
    """What the routers of all layers assigned to each expert.

    Attributes:
        num_rows: Real rows that chose it, float32 [U].
        probabilities: The sum of its softmax over real rows, float32 [U].
        rows: Real rows, each once a layer, float32.
    """

    num_rows: Any
    probabilities: Any
    rows: Any


def _counted(balance: Balance, logits, expert_ids, is_real) -> Balance:
    """With another layer."""
    num_experts = logits.shape[1]
    real = is_real.astype(jnp.float32)[:, None]
    is_chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.float32).sum(axis=1)
    probabilities = jax.nn.softmax(logits, axis=1)
    return Balance(
        balance.num_rows + jnp.sum(is_chosen * real, axis=0),
        balance.probabilities + jnp.sum(probabilities * real, axis=0),
        balance.rows + jnp.sum(real),
    )


def _joined(weights: dict[str, Any], name: str) -> Any:
    """A parameter of a layer, from the masters of its tensors; with its adapter, if it has one."""
    if name in weights:
        return weights[name]
    return join([weights[tensor] for tensor in tensors_in(weights, name)], tp=1)


def _widths(weights: dict[str, Any], name: str) -> tuple[int, ...]:
    """Rows of each tensor of a parameter; empty where an adapter has them."""
    return () if name in weights else tuple(len(weights[one]) for one in tensors_in(weights, name))


def token_logprobs(
    ctx: ForwardContext,
    params: dict[str, Any],
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    batch: Batch,
    *,
    remat: bool,
    backward: Backward = Backward.CANONICAL,
) -> tuple[Float32[Array, " M"], Float32[Array, " M"]]:
    """Return the log-probability of each row's target, and the entropy of its distribution.

    Args:
        ctx: The model. With a tp of 2 or more, inside `shard_map`, ranks share its layers.
        params: Float32 masters, as `weights.master_params` gives them, or by use; of ranks as
            `sharing` says.
        rope_tables: Of the model.
        batch: Rows.
        remat: Keep one activation a layer for the backward pass and compute the rest again.
        backward: The order of sums of the backward pass.

    Raises:
        ValueError: If ranks cannot share the layers, or a sequence is longer than the model's
            context.
        NotImplementedError: In a canonical backward pass through experts, where the backend
            withholds it.

    Numerics:
        Log-probabilities are canonical: the bits of the engine's, in any batch and layout, with
        rematerialisation or without, and, as the engine's are mesh-invariant, for any tp of it.
        Gradients: docs/training.md.
    """
    params = by_use(params, ctx.config, ctx.profile.param_dtype)
    hidden = final_hidden(ctx, params, rope_tables, batch, remat=remat, backward=backward)
    sums = _sums(ctx, batch, backward)
    return ops.token_logprobs(ctx, sums, hidden, params["lm_head"], batch.targets)


def _sums(ctx: ForwardContext, batch: Batch, backward: Backward) -> GradientSums:
    return sums_of(backward, batch, profile=ctx.profile, backend=ctx.backend, tp=ctx.tp)


def token_logprobs_and_balance(
    ctx: ForwardContext,
    params: dict[str, Any],
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    batch: Batch,
    *,
    remat: bool,
) -> tuple[tuple[Float32[Array, " M"], Float32[Array, " M"]], Float32[Array, ""]]:
    """Return `token_logprobs` and how unevenly the routers use their experts.

    `balance = U * sum_e(num_rows[e] / rows * probabilities[e] / rows)`, over real rows of all
    layers that have experts; top_k where all experts are used alike.

    Args: As `token_logprobs`; the backward pass is XLA's.

    Raises:
        ValueError: As `token_logprobs`, or if the model has no mixtures of experts.

    Numerics:
        Log-probabilities as `token_logprobs`, the same bits. The balance is plain JAX: it is
        run-invariant, and depends on which rows share the batch.

    Reference:
        Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, as in transformers'
        `load_balancing_loss_func`. Counts have no gradient.
    """
    if ctx.config.experts is None:
        raise ValueError("the model has no mixtures of experts, so there is no balance of them")
    params = by_use(params, ctx.config, ctx.profile.param_dtype)
    zeros = jnp.zeros(ctx.config.experts.num_experts, jnp.float32)
    counted, hidden = _run(
        ctx, params, rope_tables, batch, Balance(zeros, zeros, jnp.float32(0)),
        remat=remat, backward=Backward.XLA,
    )  # fmt: skip
    assert counted is not None  # it was given one
    share = lax.stop_gradient(counted.num_rows) / counted.rows
    balance = zeros.size * jnp.sum(share * counted.probabilities / counted.rows)
    sums, head = _sums(ctx, batch, Backward.XLA), params["lm_head"]
    return ops.token_logprobs(ctx, sums, hidden, head, batch.targets), balance


def final_hidden(
    ctx: ForwardContext,
    params: dict[str, Any],
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    batch: Batch,
    *,
    remat: bool,
    backward: Backward = Backward.CANONICAL,
) -> Activation[Array, "M D"]:
    """The hidden state of each row after the last norm, as `token_logprobs` takes and claims it."""
    return _run(ctx, params, rope_tables, batch, None, remat=remat, backward=backward)[1]


def _run(
    ctx: ForwardContext,
    params: dict[str, Any],
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    batch: Batch,
    balance: Balance | None,
    *,
    remat: bool,
    backward: Backward,
) -> tuple[Balance | None, Activation[Array, "M D"]]:
    """`final_hidden`, and what routers gave to their experts, counted from `balance` on."""
    if why := why_layers_not_shared(ctx.config, ctx.profile, ctx.tp, backward):
        raise ValueError(why)
    if batch.length > rope_tables[0].shape[0]:
        raise ValueError(
            f"sequences of {batch.length} rows are longer than the model's context of "
            f"{rope_tables[0].shape[0]}"
        )
    cos, sin = (table[: batch.length] for table in rope_tables)
    positions = jnp.arange(batch.length, dtype=jnp.int32)[None, :]
    positions = jnp.where(positions < batch.lengths[:, None], positions, -1)

    sums = _sums(ctx, batch, backward)
    own = TrainingOps(ctx=ctx, sums=sums, batch=batch, positions=positions, cos=cos, sin=sin)
    params = by_use(params, ctx.config, ctx.profile.param_dtype)
    balance, stream = run_layers(own, params, batch.ids, balance, remat=remat)
    return balance, stream.x
