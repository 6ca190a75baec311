# SPDX-License-Identifier: Apache-2.0
"""The operations of a mixture of experts with gradients: canonical, or by XLA's ragged products.

A pair of a row and one of its experts is a slot: slot `row * top_k + rank`.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.layers import ForwardContext, adapted_expert_linear, adapted_expert_mlp
from detjax.models.params import padded_router_size
from detjax.pallas_kernels.fixed_blocks import pad_axis
from detjax.pallas_kernels.gradients.composed import row_sums
from detjax.pallas_kernels.linear.api import linear as linear_kernel
from detjax.pallas_kernels.moe.api import combine_experts_add_rms_norm as combine_experts_kernel
from detjax.pallas_kernels.moe.api import expert_mlp as expert_mlp_kernel
from detjax.pallas_kernels.moe.api import route as route_kernel
from detjax.pallas_kernels.moe.api import route_by_sigmoid as route_by_sigmoid_kernel
from detjax.pallas_kernels.moe.expert_weights import ClampedExperts, ExpertWeights
from detjax.training.adapter_operations import Products, adapter_gradients, served
from detjax.training.expert_slots import FLOAT32, ExpertSlots, slots_of
from detjax.training.gradients import (
    OUT_BLOCK,
    CanonicalSums,
    GradientSums,
    linear_gradients,
    with_gradient,
)
from detjax.training.lora import AdaptedMaster
from detjax.training.operations import bias_gradient, norm_gradients
from detjax.training.rounding import stored_gain


def router_logits(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Activation[Array, "M D"],
    w: Float32[Array, "U D"],
    bias: Float32[Array, " U"] | None = None,
    *,
    out_dtype: jnp.dtype = FLOAT32,
) -> Activation[Array, "M U"]:
    """Multiply by a router as it is stored, or by the gate of a shared expert: `linear.api.linear`.

    A canonical gradient rounds the cotangents of logits to the activations' dtype, as those of the
    log-softmax are. A router of sigmoids is float32, and its row's cotangent is `linear` of these
    and the float32 weights.
    """
    is_wide = ctx.config.has_sigmoid_router and out_dtype == FLOAT32
    dtype = FLOAT32 if is_wide else ctx.profile.param_dtype
    num_experts = w.shape[0]
    num_zeros = padded_router_size(num_experts) - num_experts

    def kernel(x, w, bias):
        stored = jnp.pad(w.astype(dtype), ((0, num_zeros), (0, 0)))
        if bias is not None:
            bias = jnp.pad(bias.astype(dtype), (0, num_zeros))
        logits = linear_kernel(x, stored, bias, out_dtype=out_dtype, backend=ctx.backend)
        return logits[:, :num_experts]

    def gradient(args, _, cotangent):
        x, w, bias = args
        if isinstance(sums, CanonicalSums):
            rounded, back = cotangent.astype(x.dtype), w.astype(dtype).T
            if is_wide:  # ORDER: no rank has a share of it, so it is one leaf, as in serving
                back = pad_axis(pad_axis(back, 1, OUT_BLOCK), 0, OUT_BLOCK)
                of_x = linear_kernel(
                    pad_axis(rounded, 1, OUT_BLOCK), back, out_dtype=FLOAT32, backend=ctx.backend
                )[:, : x.shape[1]]
            else:
                of_x = sums.rows_times(rounded, back)
            of_w, of_bias = sums.of_weights(rounded, x), bias_gradient(sums, bias, rounded)
            return of_x.astype(x.dtype), of_w, of_bias
        wide = cotangent.astype(FLOAT32)
        of_x, of_w = linear_gradients(sums, x.astype(FLOAT32), w, wide, dtype)
        return of_x.astype(x.dtype), of_w, bias_gradient(sums, bias, wide)

    return with_gradient(kernel, gradient)(x, w, bias)


def route(
    ctx: ForwardContext,
    sums: GradientSums,
    logits: Float32[Array, "M U"],
    correction: Float32[Array, " U"] | None = None,
) -> tuple[Int32[Array, "M Q"], Float32[Array, "M Q"]]:
    """Choose each row's experts and weigh them: `moe.api.route`, or `route_by_sigmoid`.

    The latter has a correction. The choice has no gradient, and so the correction has none.
    """
    config = ctx.config.experts
    assert config is not None  # whoever has a router
    options: dict = {
        "num_experts": config.num_experts, "top_k": config.top_k,
        "renormalise": config.renormalise, "backend": ctx.backend,
    }  # fmt: skip

    def kernel(logits, correction):
        if correction is None:
            return route_kernel(logits, **options)
        return route_by_sigmoid_kernel(logits, correction, scale=config.sigmoid_scale, **options)

    def gradient(args, out, cotangents):
        (logits, correction), (expert_ids, weights_of) = args, out
        if correction is None:
            of_rows = functools.partial(_of_logits, renormalise=config.renormalise)
        else:
            of_rows = functools.partial(
                _of_sigmoids, renormalise=config.renormalise, scale=config.sigmoid_scale
            )
        if isinstance(sums, CanonicalSums):
            rows = logits, expert_ids, weights_of, cotangents[1]
            return sums.map_rows(of_rows, rows), None
        # WHY: a product, since a scatter-add on a GPU has no order.
        is_chosen = jax.nn.one_hot(expert_ids, logits.shape[1], dtype=jnp.float32)

        def weights(logits):
            by_sigmoid = correction is not None
            powers = jax.nn.sigmoid(logits) if by_sigmoid else jax.nn.softmax(logits, axis=1)
            chosen = jnp.sum(is_chosen * powers[:, None, :], axis=2)
            if config.renormalise:
                chosen = chosen / jnp.sum(chosen, axis=1, keepdims=True)
            return chosen * config.sigmoid_scale if by_sigmoid else chosen

        (of_logits,) = jax.vjp(weights, logits)[1](cotangents[1])
        return of_logits, None

    return with_gradient(kernel, gradient)(logits, correction)


def _ordered_mean(weights, of_weights) -> jax.Array:
    """# ORDER: ((w0 g0 + w1 g1) + w2 g2) + ..., g = a weight's cotangent, in order of rank."""
    # ROUND: products before their sums, which thus fuse with none of them.
    products = lax.optimization_barrier(weights * of_weights)
    return functools.reduce(operator.add, jnp.split(products, weights.shape[1], axis=1))


def _of_sigmoids(
    logits, expert_ids, weights, of_weights, *, renormalise: bool, scale: float
) -> jax.Array:
    """Cotangents of a leaf's logits: `w (g - mean / scale) (1 - sigmoid(logit))` of those chosen.

    The mean is 0 without `renormalise`.
    """
    mean = _ordered_mean(weights, of_weights) / scale if renormalise else 0.0
    rows = jnp.arange(logits.shape[0])[:, None]
    rest = 1.0 / (1.0 + jnp.exp(logits[rows, expert_ids]))
    out = jnp.zeros_like(logits)
    return out.at[rows, expert_ids].set(weights * (of_weights - mean) * rest)


def _of_logits(logits, expert_ids, weights, of_weights, *, renormalise: bool) -> jax.Array:
    """Cotangents of a leaf's logits, from those of its experts' weights.

    # ORDER: without `renormalise` the probabilities of all experts by the tree of `route`.
    """
    mean = _ordered_mean(weights, of_weights)
    out = jnp.zeros_like(logits)
    if not renormalise:
        powers = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
        out = -(powers / row_sums(powers)) * mean
    rows = jnp.arange(logits.shape[0])[:, None]
    return out.at[rows, expert_ids].set(weights * (of_weights - mean))


def expert_mlp(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Activation[Array, "M D"],
    expert_ids: Int32[Array, "M Q"],
    w_gate_up: Float32[Array, "U E D"] | AdaptedMaster,
    w_down: Float32[Array, "U D F"] | AdaptedMaster,
    biases: tuple[Float32[Array, "U E"], Float32[Array, "U D"]] | None = None,
) -> Activation[Array, "M Q D"]:
    """Run each row through its experts: `moe.api.expert_mlp`. Those with biases have a clamp.

    Both matrices have an adapter, or none: then `models.layers.adapted_expert_mlp`.

    Numerics:
        Gradients are canonical (docs/training.md), or ragged products of the slots sorted by
        expert, and a row's gradient is added over its experts in float32.
    """
    dtype, config = ctx.profile.param_dtype, ctx.config.experts
    assert config is not None  # whoever has experts
    clamp = config.clamp

    def kernel(x, expert_ids, w_gate_up, w_down, biases):
        if isinstance(w_gate_up, AdaptedMaster):
            adapted = served(w_gate_up, dtype), served(w_down, dtype)
            return adapted_expert_mlp(ctx, x, expert_ids, *adapted)
        extras = None
        if biases is not None:
            assert clamp is not None  # of experts with biases
            of_gate_up, of_down = (bias.astype(dtype) for bias in biases)
            extras = ClampedExperts(gate_up_bias=of_gate_up, down_bias=of_down, clamp=clamp)
        return expert_mlp_kernel(
            x,
            expert_ids,
            ExpertWeights(w_gate_up.astype(dtype), w_down.astype(dtype), extras),
            first_expert=0,
            backend=ctx.backend,
        )

    def gradient(args, _, cotangent):
        x, expert_ids, *matrices, biases = args
        own = (None, None) if biases is None else [bias.astype(dtype) for bias in biases]
        gate_up, down = (
            ExpertProduct(ctx=ctx, w=w, bias=bias) for w, bias in zip(matrices, own, strict=True)
        )
        slots = slots_of(sums, expert_ids, config.num_experts)
        rows, of_y = slots.rows(x), slots.of_ranks(cotangent)
        before = gate_up.of(slots, rows)
        of_gated, *of_down = down.gradients(slots, slots.gated(before, clamp), of_y, x.dtype)
        of_before = slots.of_gates(before, of_gated, clamp)
        # ROUND: canonical each slot, and their sum, to the activations' dtype.
        slot_dtype = x.dtype if isinstance(sums, CanonicalSums) else FLOAT32
        of_rows, *of_gate_up = gate_up.gradients(slots, rows, of_before, slot_dtype)
        of_matrices, of_biases = zip(of_gate_up, of_down, strict=True)
        of_x = slots.over_ranks(of_rows).astype(x.dtype)
        return of_x, None, *of_matrices, None if biases is None else of_biases

    return with_gradient(kernel, gradient)(x, expert_ids, w_gate_up, w_down, biases)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertProduct:
    """A matrix of each expert in a backward pass.

    Attributes:
        ctx: The model.
        w: float32, as masters are, or with an adapter.
        bias: As kernels see it, or None.
    """

    ctx: ForwardContext
    w: Any
    bias: Any

    def of(self, slots: ExpertSlots, rows: Activation[Array, "S I"]) -> Activation[Array, "S O"]:
        """The product as the forward pass has it, of an adapter in its bits."""
        dtype = self.ctx.profile.param_dtype
        if isinstance(self.w, AdaptedMaster):
            return adapted_expert_linear(self.ctx, rows, slots.experts, served(self.w, dtype))
        return slots.times(rows, self.w.astype(dtype), self.bias, out_dtype=rows.dtype)

    def gradients(
        self,
        slots: ExpertSlots,
        rows: Activation[Array, "S I"],
        cotangent: Activation[Array, "S O"],
        out_dtype: jnp.dtype,
    ) -> tuple[Activation[Array, "S I"], Any, Float32[Array, "U O"] | None]:
        """Cotangents of rows, of the matrices or their adapter, and of biases."""
        dtype = self.ctx.profile.param_dtype
        if isinstance(self.w, AdaptedMaster):
            wide = functools.partial(slots.times, out_dtype=FLOAT32)
            products = Products(
                by_a=wide,
                by_outputs=lambda rows, w, _: wide(rows, w, is_back=True),
                by_ranks=functools.partial(wide, is_back=True),
                of_weights=slots.of_experts,
            )
            of_rows, of_w = adapter_gradients(products, rows, self.w, cotangent, dtype)
            return of_rows.astype(out_dtype), of_w, None
        of_rows = slots.times(cotangent, self.w.astype(dtype), is_back=True, out_dtype=out_dtype)
        if self.bias is None:
            return of_rows, slots.of_experts(cotangent, rows), None
        # A bias multiplies ones.
        ones = jnp.ones((len(rows), 1), rows.dtype)
        joined = slots.of_experts(cotangent, jnp.concatenate([rows, ones], axis=1))
        return of_rows, joined[..., :-1], joined[..., -1]


def combine_experts_add_rms_norm(
    ctx: ForwardContext,
    sums: GradientSums,
    y: Activation[Array, "M Q D"],
    weights: Float32[Array, "M Q"],
    residual: Activation[Array, "M D"],
    gain: Float32[Array, " D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add a row's experts to the residual stream, normalise: the operation of `moe.api`."""
    dtype, eps = ctx.profile.param_dtype, ctx.config.rms_norm_eps

    def kernel(y, weights, residual, gain):
        return combine_experts_kernel(
            y, weights, residual, stored_gain(gain, ctx.config, dtype), eps=eps, backend=ctx.backend
        )

    def of_weights(of_total, y):
        """# ORDER: a perfect binary tree over channels."""
        # ROUND: products before their sums, which thus fuse with none of them.
        products = lax.optimization_barrier(
            of_total.astype(jnp.float32)[:, None, :] * y.astype(jnp.float32)
        )
        return row_sums(products.reshape(-1, y.shape[2])).reshape(y.shape[:2])

    def gradient(args, out, cotangents):
        y, weights, _, gain = args
        of_total, of_gain = norm_gradients(sums, eps, out[0], gain, cotangents)
        wide = of_total.astype(jnp.float32)[:, None, :]
        of_y = (wide * weights[:, :, None]).astype(y.dtype)
        if isinstance(sums, CanonicalSums):
            return of_y, sums.map_rows(of_weights, (of_total, y)), of_total, of_gain
        return of_y, jnp.sum(wide * y.astype(jnp.float32), axis=2), of_total, of_gain

    return with_gradient(kernel, gradient)(y, weights, residual, gain)
