# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts on Hopper: not there yet, so such a model is refused by name."""

import jax

_MISSING = "sm90 has no kernels for mixtures of experts; use --backend portable"


def route(logits, *, top_k: int, renormalise: bool) -> tuple[jax.Array, jax.Array]:
    """See `api.route`.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(_MISSING)


def expert_mlp(x, expert_ids, w_gate_up, w_down, *, first_expert) -> jax.Array:
    """See `api.expert_mlp`.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(_MISSING)


def combine_experts_add_rms_norm(
    y, weights, residual, gain, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.combine_experts_add_rms_norm`.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(_MISSING)
