# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts are not among the reference kernels: each operation says so."""

from typing import NoReturn

import jax.numpy as jnp


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "the reference backend has no mixtures of experts; use portable or sm90"
    )


def route(logits, *, num_experts: int, top_k: int, renormalise: bool):
    """Refuse: see `api.route`."""
    _refuse()


def expert_mlp(x, expert_ids, w_gate_up, w_down, *, first_expert, num_ranks: int, extras=None):
    """Refuse: see `api.expert_mlp`."""
    _refuse()


def combine_experts_add_rms_norm(y, weights, residual, gain, *, eps: float):
    """Refuse: see `api.combine_experts_add_rms_norm`."""
    _refuse()


def route_mlp(x, logits, w_gate_up, w_down, *, top_k: int, renormalise: bool, extras=None):
    """Refuse: see `api.route_mlp`."""
    _refuse()


def defers_experts(num_rows: int, width: int) -> bool:
    """See `api.defers_experts`: no."""
    return False


def combine_experts_norm_linear(
    y, weights, residual, gain, w, bias, *, eps: float, out_dtype: jnp.dtype
):
    """Refuse: see `api.combine_experts_norm_linear`."""
    _refuse()


def route_mlp_add_rms_norm(
    x, logits, w_gate_up, w_down, residual, gain, *,
    top_k: int, renormalise: bool, eps: float, extras=None,
):  # fmt: skip
    """Refuse: see `api.route_mlp_add_rms_norm`."""
    _refuse()
