# SPDX-License-Identifier: Apache-2.0
"""Log-softmax in the bits of the Hopper kernels, on the CPU."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.hopper_sums import LOGIT_BLOCK
from detjax.pallas_kernels.reference_library import call


def block_stats(logits, *, vocab_block: int) -> tuple[jax.Array, jax.Array]:
    """See `api.block_stats`.

    Raises:
        ValueError: If a block is not 128 logits.
    """
    if vocab_block != LOGIT_BLOCK:
        raise ValueError(
            f"the reference backend has blocks of {LOGIT_BLOCK} logits, not {vocab_block}"
        )
    out = jax.ShapeDtypeStruct((logits.shape[0], logits.shape[1] // LOGIT_BLOCK), jnp.float32)
    maxima, sums = call("block_stats", (out, out), logits)
    return maxima, sums


def log_sum_exp(maxima, sums) -> jax.Array:
    """See `api.log_sum_exp`."""
    return call("log_sum_exp", jax.ShapeDtypeStruct(maxima.shape[:1], jnp.float32), maxima, sums)


def log_probs(logits, lse) -> jax.Array:
    """See `api.log_probs`."""
    return call("log_probs", jax.ShapeDtypeStruct(logits.shape, jnp.float32), logits, lse)
