# SPDX-License-Identifier: Apache-2.0
"""Penalties, Gumbel-max scores and nucleus sums in the bits of the Hopper kernels, on the CPU."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.hopper_sums import LOGIT_BLOCK, first_operand
from detjax.pallas_kernels.log_softmax.reference import (
    block_stats,
    log_probs,
    log_sum_exp,
)
from detjax.pallas_kernels.reference_library import call


def adjust_logits(logits, bias, uses, factors, penalties) -> jax.Array:
    """See `api.adjust_logits`."""
    out = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    return call("adjust_logits", out, logits, bias, uses, *factors, *penalties)


def gumbel_scores(logits, temperature, key, *, first_token_id) -> jax.Array:
    """See `api.gumbel_scores`."""
    out = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    first = first_operand(first_token_id)
    return call("gumbel_scores", out, logits, temperature, *key, first)


def stats_and_choice(
    logits, temperature, key, *, first_token_id, vocab_block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `api.stats_and_choice`."""
    maxima, sums = block_stats(logits, vocab_block=vocab_block)
    scores = gumbel_scores(logits, temperature, key, first_token_id=first_token_id)
    out = [jax.ShapeDtypeStruct(logits.shape[:1], dtype) for dtype in (jnp.float32, jnp.int32)]
    best, token = call("first_maximum", out, scores, first_operand(first_token_id))
    return maxima, sums, best, token


def choose_token(
    logits, temperature, key, *, vocab_block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.choose_token`."""
    maxima, sums, _, token = stats_and_choice(
        logits, temperature, key, first_token_id=0, vocab_block=vocab_block
    )
    lse = log_sum_exp(maxima, sums)
    # No token is chosen of a row of NaN.
    place = jnp.minimum(token, logits.shape[1] - 1)
    chosen = jnp.take_along_axis(logits, place[:, None], axis=1)
    return token, log_probs(chosen, lse)[:, 0], lse


def nucleus_sums(sorted_logits, temperature, top_k, top_p):
    """See `api.nucleus_sums`; ranks up to a whole block of 128 weigh 0."""
    num_rows, width = sorted_logits.shape
    ranked = jnp.pad(sorted_logits, ((0, 0), (0, -width % LOGIT_BLOCK)), constant_values=-jnp.inf)
    wide = jax.ShapeDtypeStruct(ranked.shape, jnp.float32)
    out = (wide, wide, jax.ShapeDtypeStruct((num_rows,), jnp.float32))
    weight, before, limit = call("nucleus_sums", out, ranked, temperature, top_k, top_p)
    return weight[:, :width], before[:, :width], limit
