# SPDX-License-Identifier: Apache-2.0
"""Logits and log-sum-exp as arrays: the bits and the gradient of the trainer's own operation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.models.layers import ForwardContext
from detjax.testing import assert_bitwise_equal
from detjax.training import operations as ops
from detjax.training.gradients import XlaSums
from detjax.training.logits import logits_lse, token_logits


@pytest.mark.invariance
@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_logit_less_the_lse_is_the_log_probability(cap, model_named):
    """In any program; the control is XLA's own log-softmax of the same logits."""
    model = model_named("tied")
    config = dataclasses.replace(model.config, logits_softcap=cap)
    ctx = ForwardContext(config=config, profile=model.profile, backend=model.backend, tp=1)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((21, 64)) * 2, jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((320, 64)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 320, 21), jnp.int32)
    weights = jnp.asarray(rng.standard_normal(21), jnp.float32)

    def of_operation(hidden, head):
        logprobs = ops.token_logprobs(ctx, XlaSums(), hidden, head, targets)[0]
        return jnp.sum(weights * logprobs), logprobs

    def of_arrays(hidden, head):
        logits = token_logits(ctx, hidden, head)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        logprobs = chosen - logits_lse(ctx, logits)
        return jnp.sum(weights * logprobs), logprobs

    wanted, found = (
        jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
        for loss in (of_operation, of_arrays)
    )
    assert_bitwise_equal(found[1], wanted[1], claim="the log-probabilities are the operation's")
    for a, b in zip(found[0], wanted[0], strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) < 2.0**-8 * np.linalg.norm(b)  # one rounding to bfloat16
    logits = jax.jit(token_logits, static_argnums=0)(ctx, hidden, head)
    control = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    assert (np.asarray(control) != np.asarray(wanted[1])).any(), "vacuous"
