# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in the bits of the Hopper kernels, on the CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from detjax.pallas_kernels.linear.quantized import RowsToQuantize, W8A8Matrix
from detjax.pallas_kernels.linear.reference import linear, quantize_rows, scaled_sums, w8a8_product
from detjax.pallas_kernels.moe.expert_weights import (
    ExpertWeights,
    SharedExpert,
    SharedRows,
    with_shared,
)
from detjax.pallas_kernels.moe.portable import defers_experts as defers_experts
from detjax.pallas_kernels.moe.sigmoid_router import SMALLEST_SUM
from detjax.pallas_kernels.output_gate.reference import sigmoid_gate
from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.rms_norm.reference import add_rms_norm, join
from detjax.pallas_kernels.swiglu.reference import swiglu


def route(
    logits, *, num_experts: int, top_k: int, renormalise: bool
) -> tuple[jax.Array, jax.Array]:
    """See `api.route`."""
    shape = (logits.shape[0], top_k)
    out = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    ids, weights = call("route", out, logits, num_experts=num_experts, renormalise=renormalise)
    return ids, weights


def route_by_sigmoid(
    logits, correction, *, num_experts: int, top_k: int, renormalise: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.route_by_sigmoid`."""
    shape = (logits.shape[0], top_k)
    out = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    ids, weights = call(
        "route_by_sigmoid", out, logits, correction, num_experts=num_experts,
        renormalise=renormalise, scale=np.float32(scale), smallest=np.float32(SMALLEST_SUM),
    )  # fmt: skip
    return ids, weights


def expert_mlp(
    x, expert_ids, experts: ExpertWeights, *, first_expert, num_ranks: int = 1
) -> jax.Array:
    """See `api.expert_mlp`.

    Raises:
        NotImplementedError: For another dtype than bfloat16 or 8 bits, or widths that are no
            multiple of 16, or of 128 in float8.
    """
    del num_ranks  # changes no bit
    w_gate_up, w_down, extras = experts
    _check_operands(x, w_gate_up, w_down)
    ids = (expert_ids - first_expert).reshape(-1).astype(jnp.int32)
    if extras is None:
        biases, clamp = (None, None), None
    else:
        biases, clamp = (extras.gate_up_bias, extras.down_bias), extras.clamp
    multiply = partial(_products_of_experts, out_dtype=x.dtype)
    hidden = multiply(x, ids, w_gate_up, biases[0])
    y = multiply(swiglu(hidden, clamp=clamp), ids, w_down, biases[1])
    return y.reshape(*expert_ids.shape, x.shape[1])


def _check_operands(x, *weights) -> None:
    if {x.dtype, *(w.dtype for w in weights)} != {jnp.dtype(jnp.bfloat16)}:
        raise NotImplementedError(
            "experts of the reference backend multiply bfloat16 by bfloat16, not "
            f"{x.dtype} by {' and '.join(str(w.dtype) for w in weights)}; use portable"
        )
    if any(w.shape[2] % 16 for w in weights):
        raise NotImplementedError(
            "experts of the reference backend need widths of a multiple of 16, the depth of one "
            f"wgmma, not {' and '.join(str(w.shape[2]) for w in weights)}; use portable"
        )


def expert_linear(x, experts, w, bias=None, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.expert_linear`.

    Raises:
        NotImplementedError: For another dtype than bfloat16, or a width that is no multiple of 16.
    """
    _check_operands(x, w)
    return _products_of_experts(x, experts, w, bias, out_dtype)


def _products_of_experts(rows, ids, w, bias, out_dtype: jnp.dtype) -> jax.Array:
    """Rows, each of as many slots as there are for it, by the expert of each slot."""
    if isinstance(w, W8A8Matrix):
        total = scaled_sums(quantize_rows(rows, w.row_coding), w, ids, bias)
        return join(total, None, None, out_dtype)  # ROUND: once
    out = jax.ShapeDtypeStruct((ids.size, w.shape[1]), out_dtype)
    bias = jnp.zeros((0,), jnp.bfloat16) if bias is None else bias
    return call("expert_product", out, rows, ids, w, bias)


def combine_experts_add_rms_norm(
    y, weights, residual, gain, *, eps: float, shared: SharedRows | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `api.combine_experts_add_rms_norm`."""
    y, weights = with_shared(y, weights, shared, sigmoid_gate)
    total = call("add_experts", jax.ShapeDtypeStruct(residual.shape, jnp.float32), y, weights)
    return add_rms_norm(total, residual, None, gain, eps=eps)


def route_mlp(
    x, logits, experts: ExpertWeights, *,
    top_k: int, renormalise: bool, shared: SharedExpert | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.route_mlp`: the two operations, one after the other."""
    assert shared is None  # `joins_experts` says so
    expert_ids, weights = route(
        logits, num_experts=experts.gate_up.shape[0], top_k=top_k, renormalise=renormalise
    )
    return expert_mlp(x, expert_ids, experts, first_expert=0), weights


def combine_experts_norm_linear(
    y, weights, residual, gain, w, bias, *,
    eps: float, out_dtype: jnp.dtype, shared: SharedRows | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.combine_experts_norm_linear`: the two operations, one after the other."""
    total, x = combine_experts_add_rms_norm(y, weights, residual, gain, eps=eps, shared=shared)
    if isinstance(w, W8A8Matrix):
        rows = RowsToQuantize(values=x, coding=w.row_coding)
        return w8a8_product(rows, w, bias, None, out_dtype=out_dtype), total
    return linear(x, w, bias, out_dtype=out_dtype), total


def route_mlp_add_rms_norm(
    x, logits, experts: ExpertWeights, residual, gain, *,
    top_k: int, renormalise: bool, eps: float, shared: SharedRows | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.route_mlp_add_rms_norm`: the operations, one after the other."""
    y, weights = route_mlp(x, logits, experts, top_k=top_k, renormalise=renormalise)
    return combine_experts_add_rms_norm(y, weights, residual, gain, eps=eps, shared=shared)
