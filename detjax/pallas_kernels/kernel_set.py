# SPDX-License-Identifier: Apache-2.0
"""What a backend is: an implementation of every operation, and what else callers ask of it."""

from typing import Protocol

import jax
import jax.numpy as jnp

from detjax.numerics import NumericsProfile, Reduction
from detjax.pallas_kernels.delta_rule.operands import OutputNorm
from detjax.pallas_kernels.linear.quantized import (
    QuantizedRows,
    RowCoding,
    RowsToQuantize,
    W8A8Matrix,
)
from detjax.pallas_kernels.lora.adapted import LowRankRows
from detjax.pallas_kernels.moe.expert_weights import ExpertWeights, SharedExpert, SharedRows
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


class KernelSet(Protocol):
    """Every operation under one name, with the operands, results and claims of its `api`.

    A module is one: `detjax.pallas_kernels.portable`, `detjax.pallas_kernels.sm90`. Only an `api`
    calls an implementation: it has checked the shapes, and the implementation refuses the rest.

    Attributes:
        takes_every_model: Whether it refuses no model, so that none need be tried.
        attention_beats_xla: Whether the path without claims takes its attention too, as nothing
            that was measured is quicker.
        steps_beat_xla: Whether its steps are quicker with full weights than those without claims,
            so that such drafts gain nothing.
        reads_codes: Whether its products read quantised weights as they lie, on one device a
            replica; others expand them for each product.
        adapted_dtypes: Of activations whose products may have adapters.
        why_no_expert_adapters: Why products of experts may have none; "" if they may.
    """

    takes_every_model: bool
    attention_beats_xla: bool
    steps_beat_xla: bool
    reads_codes: bool
    adapted_dtypes: tuple[str, ...]
    why_no_expert_adapters: str

    def why_not_here(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        ...

    def what_to_install(self) -> str | None:
        """What this machine lacks and can be given, or None. Nobody goes on to another backend.

        Which backend is chosen, and so every bit, must not depend on what is installed.
        """
        ...

    def where_it_runs(self) -> str:
        """On what, for the user to read; asked where it can."""
        ...

    def embed(self, table, token_ids, *, out_dtype: jnp.dtype) -> jax.Array:
        """See `embedding.api.embed`."""
        ...

    def linear(self, x, w, bias, *, out_dtype: jnp.dtype) -> jax.Array:
        """See `linear.api.linear`."""
        ...

    def linear_swiglu(self, x, w_gate_up) -> jax.Array:
        """See `linear.api.linear_swiglu`."""
        ...

    def norm_linear(self, x, gain, w, bias, *, eps: float, out_dtype: jnp.dtype) -> jax.Array:
        """See `linear.api.norm_linear`."""
        ...

    def norm_linear_swiglu(self, x, gain, w_gate_up, *, eps: float) -> jax.Array:
        """See `linear.api.norm_linear_swiglu`."""
        ...

    def linear_leaf_sums(self, x, w, *, reduction: Reduction) -> jax.Array:
        """See `linear.api.linear_leaf_sums`."""
        ...

    def linear_partial(self, x, w, *, reduction: Reduction) -> jax.Array:
        """See `linear.api.linear_partial`."""
        ...

    def add_partials(self, a, b) -> jax.Array:
        """See `linear.api.add_partials`."""
        ...

    def defers_norm(self, x, w, *, reduction: Reduction) -> bool:
        """See `linear.api.defers_norm`."""
        ...

    def joins_matrices(self, x, first, second, *, out_dtype: jnp.dtype) -> bool:
        """See `linear.api.joins_matrices`."""
        ...

    def defers_sum(self, x, w, *, reduction: Reduction) -> bool:
        """See `linear.api.defers_sum`."""
        ...

    def combine_norm_linear(
        self, leaf_sums, residual, gain, w, bias, *,
        eps: float, out_dtype: jnp.dtype, is_gated: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """See `linear.api.combine_norm_linear`."""
        ...

    def linear_add(self, x, w, residual, bias, *, reduction: Reduction) -> jax.Array:
        """See `linear.api.linear_add`."""
        ...

    def linear_add_rms_norm(
        self, x, w, residual, bias, gain, *, reduction: Reduction, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """See `linear.api.linear_add_rms_norm`."""
        ...

    def quantize_rows(self, x, coding: RowCoding) -> QuantizedRows:
        """See `linear.w8a8.quantize_rows`."""
        ...

    def w8a8_product(
        self,
        x: QuantizedRows | RowsToQuantize,
        w: W8A8Matrix,
        bias,
        residual,
        *,
        out_dtype: jnp.dtype,
    ) -> jax.Array:
        """See `linear.w8a8.w8a8_product`."""
        ...

    def w8a8_swiglu(
        self, x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, *, out_dtype: jnp.dtype
    ) -> jax.Array:
        """See `linear.w8a8.w8a8_swiglu`."""
        ...

    def lora_hidden(self, leaf_sums, slots, scales, *, out_dtype: jnp.dtype) -> jax.Array:
        """See `lora.api.lora_hidden`."""
        ...

    def lora_add(self, base, h, b, *, out_dtype: jnp.dtype) -> jax.Array:
        """See `lora.api.lora_add`."""
        ...

    def lora_project(
        self, x, a, slots, scales, *, reduction: Reduction, out_dtype: jnp.dtype
    ) -> jax.Array:
        """See `lora.api.lora_project`."""
        ...

    def lora_linear(self, x, w, bias, adapters: LowRankRows, *, out_dtype: jnp.dtype) -> jax.Array:
        """See `lora.api.lora_linear`."""
        ...

    def lora_linear_swiglu(self, x, w_gate_up, adapters: LowRankRows) -> jax.Array:
        """See `lora.api.lora_linear_swiglu`."""
        ...

    def lora_linear_add_rms_norm(
        self,
        x,
        w,
        adapters: LowRankRows,
        residual,
        bias,
        gain,
        *,
        reduction: Reduction,
        eps: float,
    ) -> tuple[jax.Array, jax.Array]:
        """See `lora.api.lora_linear_add_rms_norm`."""
        ...

    def expert_lora_add(self, base, h, experts, b, *, out_dtype: jnp.dtype) -> jax.Array:
        """See `lora.api.expert_lora_add`."""
        ...

    def rms_norm(self, x, gain, *, eps: float) -> jax.Array:
        """See `rms_norm.api.rms_norm`."""
        ...

    def add_rms_norm(
        self, partial, residual, bias, gain, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """See `rms_norm.api.add_rms_norm`."""
        ...

    def combine_add_rms_norm(
        self, leaf_sums, residual, bias, gain, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """See `rms_norm.api.combine_add_rms_norm`."""
        ...

    def rope(self, x, cos, sin) -> jax.Array:
        """See `rope.api.rope`."""
        ...

    def rope_into_cache(
        self, qkv, rotation: Rotation, place: CachePlace, *, num_heads: int, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """See `rope.api.rope_into_cache`."""
        ...

    def attention(
        self, q, place: CachePlace,
        *, window: int | None, profile: NumericsProfile, softcap: float | None = None, sinks=None,
    ) -> jax.Array:  # fmt: skip
        """See `attention.api.attention`."""
        ...

    def rope_attention(
        self, qkv, rotation: Rotation, place: CachePlace,
        *, window: int | None, eps: float, profile: NumericsProfile, prefetch=None, sinks=None,
        is_gated: bool = False,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """See `attention.api.rope_attention`."""
        ...

    def token_sum(self, a, b, lengths) -> jax.Array:
        """See `gradients.api.token_sum`."""
        ...

    def expert_token_sum(
        self, a, b, experts, places, *, num_experts: int, num_places: int
    ) -> jax.Array:
        """See `gradients.api.expert_token_sum`."""
        ...

    def attention_gradient(
        self, q, k, v, out, of_out, lengths,
        *, window: int | None, softcap: float | None = None, sinks=None,
    ) -> tuple:  # fmt: skip
        """See `gradients.api.attention_gradient`; keys and values once for each query head."""
        ...

    def swiglu(self, gate_up, *, clamp: SwigluClamp | None = None) -> jax.Array:
        """See `swiglu.api.swiglu`."""
        ...

    def geglu(self, gate_up) -> jax.Array:
        """See `geglu.api.geglu`."""
        ...

    def sigmoid_gate(self, heads, gate) -> jax.Array:
        """See `output_gate.api.sigmoid_gate`."""
        ...

    def delta_rule(
        self, rows, filters, gates, row_pages, state_pages, page_table, positions, layer: int,
        norm: OutputNorm | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """See `delta_rule.api.delta_rule`."""
        ...

    def delta_rule_gradient(
        self, q, k, v, decay, beta, of_out, lengths
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """See `delta_rule.api.delta_rule_gradient`."""
        ...

    def gated_rms_norm(self, x, z, gain, *, eps: float) -> jax.Array:
        """See `delta_rule.api.gated_rms_norm`."""
        ...

    def softcap(self, logits, *, cap: float) -> jax.Array:
        """See `softcap.api.softcap`."""
        ...

    def route(
        self, logits, *, num_experts: int, top_k: int, renormalise: bool
    ) -> tuple[jax.Array, jax.Array]:
        """See `moe.api.route`."""
        ...

    def route_by_sigmoid(
        self, logits, correction,
        *, num_experts: int, top_k: int, renormalise: bool, scale: float,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """See `moe.api.route_by_sigmoid`."""
        ...

    def expert_mlp(
        self, x, expert_ids, experts: ExpertWeights, *, first_expert, num_ranks: int
    ) -> jax.Array:
        """See `moe.api.expert_mlp`."""
        ...

    def expert_linear(self, x, experts, w, bias=None, *, out_dtype: jnp.dtype) -> jax.Array:
        """See `moe.api.expert_linear`."""
        ...

    def combine_experts_add_rms_norm(
        self, y, weights, residual, gain, *, eps: float, shared: SharedRows | None
    ) -> tuple[jax.Array, jax.Array]:
        """See `moe.api.combine_experts_add_rms_norm`."""
        ...

    def route_mlp(
        self, x, logits, experts: ExpertWeights,
        *, top_k: int, renormalise: bool, shared: SharedExpert | None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """See `moe.api.route_mlp`."""
        ...

    def joins_experts(self, num_rows: int, experts: ExpertWeights, shared: SharedExpert) -> bool:
        """See `moe.api.joins_experts`."""
        ...

    def defers_experts(self, num_rows: int, width: int) -> bool:
        """See `moe.api.defers_experts`."""
        ...

    def combine_experts_norm_linear(
        self, y, weights, residual, gain, w, bias,
        *, eps: float, out_dtype: jnp.dtype, shared: SharedRows | None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """See `moe.api.combine_experts_norm_linear`."""
        ...

    def route_mlp_add_rms_norm(
        self, x, logits, experts: ExpertWeights, residual, gain,
        *, top_k: int, renormalise: bool, eps: float, shared: SharedRows | None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """See `moe.api.route_mlp_add_rms_norm`."""
        ...

    def block_stats(self, logits, *, vocab_block: int) -> tuple[jax.Array, jax.Array]:
        """See `log_softmax.api.block_stats`."""
        ...

    def log_sum_exp(self, maxima, sums) -> jax.Array:
        """See `log_softmax.api.log_sum_exp`."""
        ...

    def log_probs(self, logits, lse) -> jax.Array:
        """See `log_softmax.api.log_probs`."""
        ...

    def adjust_logits(self, logits, bias, uses, factors, penalties) -> jax.Array:
        """See `sampling.api.adjust_logits`."""
        ...

    def gumbel_scores(self, logits, temperature, key, *, first_token_id) -> jax.Array:
        """See `sampling.api.gumbel_scores`."""
        ...

    def stats_and_choice(
        self, logits, temperature, key, *, first_token_id, vocab_block: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """See `sampling.api.stats_and_choice`."""
        ...

    def choose_token(
        self, logits, temperature, key, *, vocab_block: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `sampling.api.choose_token`."""
        ...

    def nucleus_sums(
        self, sorted_logits, temperature, top_k, top_p
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `sampling.api.nucleus_sums`."""
        ...
