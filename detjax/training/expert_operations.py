# SPDX-License-Identifier: Apache-2.0
"""The operations of a mixture of experts with gradients.

Their sums are XLA's, so a backward pass through them is run-invariant alone.
"""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.layers import ForwardContext
from detjax.models.params import padded_router_size
from detjax.pallas_kernels.linear.api import linear as linear_kernel
from detjax.pallas_kernels.moe.api import combine_experts_add_rms_norm as combine_experts_kernel
from detjax.pallas_kernels.moe.api import expert_mlp as expert_mlp_kernel
from detjax.pallas_kernels.moe.api import route as route_kernel
from detjax.pallas_kernels.moe.expert_weights import ExpertWeights
from detjax.training.formulas import plain_rms_norm, plain_swiglu
from detjax.training.gradients import (
    COLUMN_AXIS,
    ROW_AXIS,
    XlaSums,
    linear_gradients,
    with_gradient,
)


def router_logits(
    ctx: ForwardContext, x: Activation[Array, "M D"], w: Float32[Array, "U D"]
) -> Float32[Array, "M U"]:
    """Multiply by a router as it is stored, and keep float32: `linear.api.linear`."""
    dtype, f32 = ctx.profile.param_dtype, jnp.dtype(jnp.float32)
    num_experts = w.shape[0]
    num_zeros = padded_router_size(num_experts) - num_experts

    def kernel(x, w):
        stored = (
            jnp.pad(w.astype(dtype), ((0, num_zeros), (0, 0))) if num_zeros else w.astype(dtype)
        )
        logits = linear_kernel(x, stored, out_dtype=f32, backend=ctx.backend)
        return logits[:, :num_experts]

    def gradient(args, _, cotangent):
        x, w = args
        of_x, of_w = linear_gradients(XlaSums(), x.astype(f32), w, cotangent, dtype)
        return of_x.astype(x.dtype), of_w

    return with_gradient(kernel, gradient)(x, w)


def route(
    ctx: ForwardContext, logits: Float32[Array, "M U"]
) -> tuple[Int32[Array, "M Q"], Float32[Array, "M Q"]]:
    """Choose each row's experts and weigh them: `moe.api.route`. The choice has no gradient."""
    config = ctx.config.experts
    assert config is not None  # whoever has a router

    def kernel(logits):
        return route_kernel(
            logits,
            num_experts=config.num_experts,
            top_k=config.top_k,
            renormalise=config.renormalise,
            backend=ctx.backend,
        )

    def gradient(args, out, cotangents):
        (logits,), (expert_ids, _) = args, out
        # WHY: a product, since a scatter-add on a GPU has no order.
        is_chosen = jax.nn.one_hot(expert_ids, logits.shape[1], dtype=jnp.float32)

        def weights(logits):
            probabilities = jax.nn.softmax(logits, axis=1)
            chosen = jnp.sum(is_chosen * probabilities[:, None, :], axis=2)
            return chosen / jnp.sum(chosen, axis=1, keepdims=True) if config.renormalise else chosen

        return jax.vjp(weights, logits)[1](cotangents[1])

    return with_gradient(kernel, gradient)(logits)


def expert_mlp(
    ctx: ForwardContext,
    x: Activation[Array, "M D"],
    expert_ids: Int32[Array, "M Q"],
    w_gate_up: Float32[Array, "U E D"],
    w_down: Float32[Array, "U D F"],
) -> Activation[Array, "M Q D"]:
    """Run each row through its experts: `moe.api.expert_mlp`.

    Numerics:
        Gradients are ragged products of the pairs of row and expert, sorted by expert. A row's
        gradient is added over its experts in float32.
    """
    dtype = ctx.profile.param_dtype

    def kernel(x, expert_ids, w_gate_up, w_down):
        return expert_mlp_kernel(
            x,
            expert_ids,
            ExpertWeights(w_gate_up.astype(dtype), w_down.astype(dtype)),
            first_expert=0,
            backend=ctx.backend,
        )

    def gradient(args, _, cotangent):
        x, expert_ids, w_gate_up, w_down = args
        top_k = expert_ids.shape[1]
        experts = expert_ids.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=w_down.shape[0]).astype(jnp.int32)
        rows = jnp.take(x, order // top_k, axis=0)
        of_y = jnp.take(cotangent.reshape(-1, cotangent.shape[2]), order, axis=0)
        w_gate_up, w_down = (w.astype(dtype).astype(x.dtype) for w in (w_gate_up, w_down))
        gate_up = _ragged(rows, w_gate_up, sizes, COLUMN_AXIS).astype(x.dtype)
        gated, of_gate_up = jax.vjp(plain_swiglu, gate_up)
        of_gated = _ragged(of_y, w_down, sizes, ROW_AXIS).astype(x.dtype)
        (of_gate_up,) = of_gate_up(of_gated)
        of_rows = jnp.take(
            _ragged(of_gate_up, w_gate_up, sizes, ROW_AXIS), jnp.argsort(order), axis=0
        )
        of_x = jnp.sum(of_rows.reshape(-1, top_k, x.shape[1]), axis=1).astype(x.dtype)
        return of_x, None, _of_groups(of_gate_up, rows, sizes), _of_groups(of_y, gated, sizes)

    return with_gradient(kernel, gradient)(x, expert_ids, w_gate_up, w_down)


def _ragged(x, w, sizes, w_axis: int) -> Float32[Array, "X Y"]:
    """Contract the columns of each group of rows with an axis of its matrix."""
    return lax.ragged_dot_general(
        x,
        w,
        sizes,
        lax.RaggedDotDimensionNumbers((((1,), (1 + w_axis,)), ((), ())), [0], [0]),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _of_groups(a, b, sizes) -> Float32[Array, "U X Y"]:
    """Contract the rows of each group."""
    return lax.ragged_dot_general(
        a,
        b,
        sizes,
        lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def combine_experts_add_rms_norm(
    ctx: ForwardContext,
    y: Activation[Array, "M Q D"],
    weights: Float32[Array, "M Q"],
    residual: Activation[Array, "M D"],
    gain: Float32[Array, " D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add a row's experts to the residual stream, normalise: the operation of `moe.api`."""
    dtype, eps = ctx.profile.param_dtype, ctx.config.rms_norm_eps

    def kernel(y, weights, residual, gain):
        return combine_experts_kernel(
            y, weights, residual, gain.astype(dtype), eps=eps, backend=ctx.backend
        )

    def formula(total, gain):
        return total, plain_rms_norm(total, gain[None], eps)

    def gradient(args, out, cotangents):
        y, weights, _, gain = args
        of_total, of_gain = jax.vjp(formula, out[0], gain)[1](cotangents)
        wide = of_total.astype(jnp.float32)[:, None, :]
        of_y = (wide * weights[:, :, None]).astype(y.dtype)
        of_weights = jnp.sum(wide * y.astype(jnp.float32), axis=2)
        return of_y, of_weights, of_total, of_gain

    return with_gradient(kernel, gradient)(y, weights, residual, gain)
