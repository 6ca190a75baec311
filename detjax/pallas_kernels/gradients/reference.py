# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens in the bits of Hopper's tensor cores, by the products of the forward pass."""

import jax

from detjax.pallas_kernels.gradients import composed
from detjax.pallas_kernels.linear.reference import add_partials, linear, linear_partial
from detjax.pallas_kernels.log_softmax.reference import block_stats, log_sum_exp

REFERENCE_FORWARD = composed.ForwardKernels(
    linear=linear,
    linear_partial=linear_partial,
    add_partials=add_partials,
    block_stats=block_stats,
    log_sum_exp=log_sum_exp,
)


def token_sum(a, b, lengths) -> jax.Array:
    """See `api.token_sum`."""
    return composed.token_sum(REFERENCE_FORWARD, a, b, lengths)


def expert_token_sum(a, b, experts, places, *, num_experts: int, num_places: int) -> jax.Array:
    """See `api.expert_token_sum`."""
    return composed.expert_token_sum(
        REFERENCE_FORWARD, a, b, experts, places, num_experts=num_experts, num_places=num_places
    )


def attention_gradient(
    q, k, v, out, of_out, lengths,
    *, window: int | None, softcap: float | None = None, sinks=None,
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    """See `api.attention_gradient`."""
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    return composed.attention_gradient(REFERENCE_FORWARD, q, k, v, out, of_out, lengths, **options)
