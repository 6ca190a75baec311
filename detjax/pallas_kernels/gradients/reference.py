# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens in the bits of Hopper's tensor cores, by the products of the forward pass."""

from functools import partial

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

token_sum = partial(composed.token_sum, REFERENCE_FORWARD)
expert_token_sum = partial(composed.expert_token_sum, REFERENCE_FORWARD)
attention_gradient = partial(composed.attention_gradient, REFERENCE_FORWARD)
