# SPDX-License-Identifier: Apache-2.0
"""From this rank's logits to the next token and its log-probabilities, on the device."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from detjax.array_types import Array, Bool, Float32, Int32
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.logits_processors import ProcessedLogits
from detjax.models.layers import ForwardContext
from detjax.models.taps import Share
from detjax.pallas_kernels.log_softmax.api import block_stats, log_probs, log_sum_exp
from detjax.pallas_kernels.sampling import noise
from detjax.pallas_kernels.sampling.api import (
    adjust_logits,
    choose_token,
    gumbel_scores,
    nucleus_sums,
    stats_and_choice,
)
from detjax.parallel.collectives import gather_columns
from detjax.parallel.exchange import Exchange, exchange_choose_token, exchanges_choice
from detjax.parallel.mesh import TP_AXIS

NO_TOKEN_LOGPROB = np.float32(np.inf)
"""The logprob of a choice where no token was possible, which no token can have."""

IDLE_ROW: tuple[SamplingParams, int] = (SamplingParams(), 0)
"""The sampling of a row without a sequence, and its sequence's index."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Sampling parameters of each row; a row's touch no other row's bits.

    Attributes:
        temperature: float32 [B]; 0 is greedy.
        top_k: int32 [B]; 0 keeps all.
        top_p: float32 [B].
        min_p: float32 [B].
        seed_low: uint32 [B].
        seed_high: uint32 [B].
        sequence_idx: uint32 [B].
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed_low: Any
    seed_high: Any
    sequence_idx: Any

    @classmethod
    def pack(cls, rows: list[tuple[SamplingParams, int]]) -> "SamplingRows":
        """Lay out (parameters, sequence index) of each row as host arrays.

        Raises:
            ValueError: If a row's noise is of a prompt: `SamplingParams.for_prompt` says which.
        """
        for params, _ in rows:
            if params.temperature > 0 and params.noise != "common":
                raise ValueError(
                    f"noise={params.noise!r} needs the prompt; pack params.for_prompt(token_ids)"
                )
        columns = {
            "temperature": ([p.temperature for p, _ in rows], np.float32),
            "top_k": ([min(p.top_k, 2**31 - 1) for p, _ in rows], np.int32),
            "top_p": ([p.top_p for p, _ in rows], np.float32),
            "min_p": ([p.min_p for p, _ in rows], np.float32),
            "seed_low": ([(p.seed or 0) & 0xFFFFFFFF for p, _ in rows], np.uint32),
            "seed_high": ([(p.seed or 0) >> 32 for p, _ in rows], np.uint32),
            "sequence_idx": ([p.noise_stream + i for p, i in rows], np.uint32),
        }
        return cls(**{name: np.asarray(values, dtype) for name, (values, dtype) in columns.items()})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen for each row.

    Attributes:
        token_ids: int32 [B].
        logprobs: float32 [B], of the chosen token.
        top_ids: int32 [B, n], the most likely tokens, most likely first.
        top_logprobs: float32 [B, n].
    """

    token_ids: Any
    logprobs: Any
    top_ids: Any
    top_logprobs: Any


def sorted_logits(
    logits: Float32[Array, "B V"],
) -> tuple[Float32[Array, "B V"], Int32[Array, "B V"]]:
    """Logits from the largest to the smallest, and their columns; equal ones in order of column.

    Zeros of both signs are equal. Where NaN is, is unspecified.
    """
    # WHY: as integers of the same order. XLA sorts floats by a comparison of its own, and gathers
    # the values behind it: 1.67 ms for 64 x 128256 on an H100, this 1.04 (2026-11).
    # A logit of -0 becomes +0.
    bits = lax.bitcast_convert_type(jnp.where(logits == 0.0, 0.0, logits), jnp.uint32)
    is_negative, sign = bits >> 31 == 1, jnp.uint32(1 << 31)
    # Ascending keys are descending logits.
    keys = jnp.where(is_negative, bits, ~(bits | sign))
    columns = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.int32), logits.shape)
    keys, columns = lax.sort((keys, columns), dimension=1, num_keys=1, is_stable=True)
    bits = jnp.where(keys >> 31 == 1, keys, ~keys & ~sign)
    return lax.bitcast_convert_type(bits, jnp.float32), columns


def _kept_tokens(
    ctx: ForwardContext, logits: Float32[Array, "B v"], rows: SamplingRows
) -> Bool[Array, "B v"]:
    """Which of this rank's tokens top-k, top-p and min-p keep, in that order of definition."""
    vocab_size, width = ctx.config.vocab_size, logits.shape[1]
    whole = gather_columns(logits, TP_AXIS)
    ranked, order = sorted_logits(whole[:, :vocab_size])
    top_k = jnp.where(rows.top_k == 0, vocab_size, jnp.minimum(rows.top_k, vocab_size))
    weight, before, limit = nucleus_sums(
        ranked, rows.temperature, top_k, rows.top_p, backend=ctx.backend
    )
    rank = jnp.arange(vocab_size, dtype=jnp.int32)[None, :]
    in_nucleus = (before < limit[:, None]) | (rows.top_p >= 1)[:, None]
    kept = (rank < top_k[:, None]) & in_nucleus & (weight >= rows.min_p[:, None])
    kept = kept | (rank == 0)
    row_ids = jnp.arange(logits.shape[0])[:, None]
    by_token = jnp.zeros(whole.shape, bool).at[row_ids, order].set(kept, unique_indices=True)
    start = lax.axis_index(TP_AXIS) * width
    return lax.dynamic_slice_in_dim(by_token, start, width, axis=1)


def _reported(processed: ProcessedLogits, logits, rows: SamplingRows, kept, *, backend):
    """What logprobs are of: the model's logits, or those that a row is sampled from."""
    ones = jnp.ones(logits.shape, jnp.int32)
    factor, none = processed.inverse_temperature, jnp.zeros(len(logits), jnp.float32)
    # ROUND: one product with the rounded reciprocal of the temperature.
    scaled = adjust_logits(
        processed.logits,
        jnp.zeros(logits.shape, jnp.float32),
        ones,
        (factor, factor),
        (none, none),
        backend=backend,
    )
    if kept is not None:
        # WHY: a greedy row never looks at its filters, whatever its neighbours do.
        is_kept = kept | (rows.temperature == 0.0)[:, None]
        scaled = jnp.where(is_kept, scaled, -jnp.inf)
    return jnp.where(processed.is_processed[:, None], scaled, logits)


def _best_over_ranks(values, ids):
    """The largest of the ranks' values and its id; the lowest rank wins a tie."""
    if lax.axis_size(TP_AXIS) == 1:
        return ids
    all_values = gather_columns(values[:, None], TP_AXIS)
    all_ids = gather_columns(ids[:, None], TP_AXIS)
    winner = jnp.argmax(all_values, axis=1)[:, None]
    return jnp.take_along_axis(all_ids, winner, axis=1)[:, 0]


def _of_tokens(logits, token_ids, first):
    """The logit of each row's token, on the rank that has it: [B, 1]."""
    local = token_ids - first
    owned = jnp.take_along_axis(logits, jnp.clip(local, 0, logits.shape[1] - 1)[:, None], axis=1)
    if lax.axis_size(TP_AXIS) == 1:
        return owned
    owner = token_ids // logits.shape[1]
    return jnp.take_along_axis(gather_columns(owned, TP_AXIS), owner[:, None], axis=1)


def most_likely(logits, first, count: int):
    """The largest logits of all ranks and their token ids; equal ones in order of id.

    Where the vocabulary has fewer than `count` tokens, padding follows: -inf, and any id.
    """
    if count == 0:
        return logits[:, :0], jnp.zeros((logits.shape[0], 0), jnp.int32)
    values, ids = lax.top_k(logits, min(count, logits.shape[1]))
    values, ids = gather_columns(values, TP_AXIS), gather_columns(first + ids, TP_AXIS)
    missing = ((0, 0), (0, max(0, count - values.shape[1])))
    values, ids = jnp.pad(values, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)
    values, picks = lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, picks, axis=1).astype(jnp.int32)


def choose_plain(
    ctx: ForwardContext,
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    positions: Int32[Array, " B"],
) -> Choice:
    """`choose` with the noise and the temperature alone, on a rank that has all logits."""
    key = noise.row_key(rows.seed_low, rows.seed_high, rows.sequence_idx, positions)
    return _choose_token(ctx, logits, rows, key, None)


def choose_among(
    token_ids: Int32[Array, " X"],
    logits: Float32[Array, "B X"],
    rows: SamplingRows,
    positions: Int32[Array, " B"],
) -> Choice:
    """`choose_plain` among a few tokens, by XLA and without a claim; their logprobs are left 0."""
    key = noise.row_key(rows.seed_low, rows.seed_high, rows.sequence_idx, positions)
    bits = noise.token_bits((key[0][:, None], key[1][:, None]), token_ids[None])
    heat = rows.temperature[:, None]
    scores = logits / jnp.where(heat == 0, 1, heat) + jnp.where(heat == 0, 0, noise.gumbel(bits))
    chosen = jnp.take(token_ids, jnp.argmax(scores, axis=1))
    return _only(chosen, jnp.zeros_like(rows.temperature))


def _choose_token(
    ctx: ForwardContext, logits, rows: SamplingRows, key, exchange: Exchange | None
) -> Choice:
    """`choose` where no row asks for more than its token, in a launch behind one pass."""
    kernel = choose_token if exchange is None else partial(exchange_choose_token, exchange)
    token_ids, logprobs, lse = kernel(
        logits, rows.temperature, key, vocab_block=ctx.profile.vocab_block, backend=ctx.backend
    )
    ctx.taps.see("token_id", token_ids)
    ctx.taps.see("log_sum_exp", lse)
    ctx.taps.see("logprob", logprobs)
    return _only(token_ids, logprobs)


def _only(token_ids: Int32[Array, " B"], logprobs: Float32[Array, " B"]) -> Choice:
    """A choice without others that were likely."""
    none = token_ids[:, None][:, :0]
    return Choice(
        token_ids=token_ids,
        logprobs=logprobs,
        top_ids=none,
        top_logprobs=none.astype(jnp.float32),
    )


def _reported_and_scored(
    ctx: ForwardContext,
    logits,
    rows: SamplingRows,
    key,
    *,
    processed: ProcessedLogits | None,
    with_filters: bool,
):
    """The logits that are reported, and the noisy scores of which the greatest is chosen."""
    backend, first = ctx.backend, lax.axis_index(TP_AXIS) * logits.shape[1]
    adjusted = logits if processed is None else processed.logits
    kept = _kept_tokens(ctx, adjusted, rows) if with_filters else None
    if processed is not None:
        logits = _reported(processed, logits, rows, kept, backend=backend)
    scores = gumbel_scores(adjusted, rows.temperature, key, first_token_id=first, backend=backend)
    if kept is not None:
        ctx.taps.see("kept_tokens", kept, Share.COLUMNS)
        scores = jnp.where(kept, scores, -jnp.inf)
    return logits, scores


def choose(
    ctx: ForwardContext,
    logits: Float32[Array, "B v"],
    rows: SamplingRows,
    positions: Int32[Array, " B"],
    *,
    num_top: int,
    with_filters: bool,
    processed: ProcessedLogits | None = None,
    exchange: Exchange | None = None,
) -> Choice:
    """Choose the token at `positions` of each row, inside `shard_map`.

    Args:
        ctx: The model, the profile and the mesh.
        logits: This rank's share; -inf past the vocabulary.
        rows: Sampling parameters.
        positions: Absolute position of the token being chosen.
        num_top: How many of the most likely tokens to report.
        with_filters: Whether some row has a top-k, top-p or min-p. Rows without one have the same
            bits either way.
        processed: What to sample from, where some row has adjustments. Rows without have the same
            bits either way.
        exchange: Of ranks that choose through peer memory; the bits are the same without.

    Numerics:
        Log-probabilities are of the logits as they are, at temperature 1, before any filter; of a
        row whose `is_processed` is set, of what it is sampled from. Where no token is possible the
        logprob is `NO_TOKEN_LOGPROB`. Kernels do the arithmetic; gathers, comparisons, sorts and
        argmax are exact.
    """
    backend = ctx.backend
    first = lax.axis_index(TP_AXIS) * logits.shape[1]
    key = noise.row_key(rows.seed_low, rows.seed_high, rows.sequence_idx, positions)
    ctx.taps.see("logits", logits, Share.COLUMNS)
    ctx.taps.see("noise_key_0", key[0])
    ctx.taps.see("noise_key_1", key[1])
    vocab_block = ctx.profile.vocab_block
    is_plain = not with_filters and processed is None
    if is_plain and num_top == 0:
        if lax.axis_size(TP_AXIS) == 1:
            return _choose_token(ctx, logits, rows, key, None)
        if exchanges_choice(exchange, len(logits)):
            return _choose_token(ctx, logits, rows, key, exchange)
    if is_plain:
        maxima, sums, best, best_id = stats_and_choice(
            logits,
            rows.temperature,
            key,
            first_token_id=first,
            vocab_block=vocab_block,
            backend=backend,
        )
    else:
        logits, scores = _reported_and_scored(
            ctx, logits, rows, key, processed=processed, with_filters=with_filters
        )
        maxima, sums = block_stats(logits, vocab_block=vocab_block, backend=backend)
        best, best_id = jnp.max(scores, axis=1), first + jnp.argmax(scores, axis=1)
    token_ids = _best_over_ranks(best, best_id.astype(jnp.int32))
    ctx.taps.see("token_id", token_ids)
    lse = log_sum_exp(
        gather_columns(maxima, TP_AXIS), gather_columns(sums, TP_AXIS), backend=backend
    )
    ctx.taps.see("log_sum_exp", lse)
    chosen = _of_tokens(logits, token_ids, first)
    top_values, top_ids = most_likely(logits, first, num_top)
    logprobs = log_probs(jnp.concatenate([chosen, top_values], axis=1), lse, backend=backend)
    chosen_logprobs = logprobs[:, 0]
    if processed is not None:
        is_none = jnp.max(gather_columns(best[:, None], TP_AXIS), axis=1) == -jnp.inf
        chosen_logprobs = jnp.where(is_none, NO_TOKEN_LOGPROB, chosen_logprobs)
    ctx.taps.see("logprob", chosen_logprobs)
    return Choice(
        token_ids=token_ids,
        logprobs=chosen_logprobs,
        top_ids=top_ids,
        top_logprobs=logprobs[:, 1:],
    )
