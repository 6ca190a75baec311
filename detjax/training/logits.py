# SPDX-License-Identifier: Apache-2.0
"""Canonical logits and their log-sum-exp as arrays with gradients, for losses of users.

detjax's own trainer never holds the logits of more than `gradients.XLA_ROWS` tokens. These
functions hold those of all tokens.
"""

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.linear.api import linear as linear_kernel
from detjax.pallas_kernels.log_softmax.api import block_stats, log_sum_exp
from detjax.pallas_kernels.softcap.api import softcap
from detjax.training.formulas import softcap_slopes
from detjax.training.gradients import XlaSums, linear_gradients, with_gradient


def token_logits(
    ctx: ForwardContext, hidden: Activation[Array, "M D"], head: Float32[Array, "V D"]
) -> Float32[Array, "M V"]:
    """Logits of every token of the vocabulary.

    Args:
        ctx: The model and the numerics.
        hidden: Of the last norm.
        head: The master of the output matrix.

    Numerics:
        The bits of the engine's logits. Claims: run-, batch-invariant and path-consistent. The
        gradient is that of the plain product, summed by XLA.
    """
    num_tokens, dtype = head.shape[0], ctx.profile.param_dtype
    cap = ctx.config.logits_softcap

    def padded(head):
        extra = -num_tokens % ctx.profile.vocab_block
        return jnp.pad(head.astype(dtype), ((0, extra), (0, 0)))

    def kernel(hidden, head):
        logits = linear_kernel(
            hidden, padded(head), out_dtype=jnp.dtype(jnp.float32), backend=ctx.backend
        )
        if cap is not None:
            logits = softcap(logits, cap=cap, backend=ctx.backend)
        return logits[:, :num_tokens]

    def gradient(args, logits, cotangent):
        hidden, head = args
        if cap is not None:
            cotangent = cotangent * softcap_slopes(logits, cap)
        return linear_gradients(XlaSums(), hidden, head, cotangent.astype(hidden.dtype), dtype)

    return with_gradient(kernel, gradient)(hidden, head)


def logits_lse(ctx: ForwardContext, logits: Float32[Array, "M V"]) -> Float32[Array, " M"]:
    """Log-sum-exp of each row: a logit less it is the log-probability that the engine reports.

    Args:
        ctx: The model and the numerics.
        logits: Of `token_logits`.

    Numerics:
        The blocks and the tree of `log_softmax.api`. Claims: run-, batch-invariant and
        path-consistent. The gradient is `exp(logits - lse)`.
    """
    block = ctx.profile.vocab_block

    def kernel(logits):
        extra = -logits.shape[1] % block
        whole = jnp.pad(logits, ((0, 0), (0, extra)), constant_values=-jnp.inf)
        stats = block_stats(whole, vocab_block=block, backend=ctx.backend)
        return log_sum_exp(*stats, backend=ctx.backend)

    def gradient(args, lse, cotangent):
        (logits,) = args
        return (jnp.exp(logits - lse[:, None]) * cotangent[:, None],)

    return with_gradient(kernel, gradient)(logits)
