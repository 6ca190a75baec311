# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens on Hopper, by the matrix-product kernel of the forward pass."""

from functools import partial

import jax

from detjax.pallas_kernels.gradients import composed
from detjax.pallas_kernels.linear.sm90 import add_partials, linear, linear_partial
from detjax.pallas_kernels.log_softmax.sm90 import block_stats, log_sum_exp

SM90_FORWARD = composed.ForwardKernels(
    linear=linear,
    linear_partial=linear_partial,
    add_partials=add_partials,
    block_stats=block_stats,
    log_sum_exp=log_sum_exp,
    each=lambda product, *operands: jax.vmap(product)(*operands),
    at_once=composed.AT_ONCE,
)

token_sum = partial(composed.token_sum, SM90_FORWARD)
expert_token_sum = partial(composed.expert_token_sum, SM90_FORWARD)
attention_gradient = partial(composed.attention_gradient, SM90_FORWARD)
