# SPDX-License-Identifier: Apache-2.0
"""From this rank's logits to those that are sampled from: masks, biases, penalties.

The order is in docs/numerics.md. Everything here but one kernel is integers and selections, and a
row is a function of its request, its text so far and its logits alone.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from detjax.array_types import Array, Bool, Float32, Int32
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.sampling.api import adjust_logits
from detjax.parallel.mesh import TP_AXIS
from detjax.serving.adjustments import Adjustments


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSoFar:
    """The texts behind which tokens are chosen: T places in each of B of them.

    Attributes:
        token_ids: int32 [B, L], by position.
        last: int32 [B, T]: position of the last token before each choice. Those of a row follow one
            another; -1 is padding.
    """

    token_ids: Any
    last: Any

    def after(self, offset: int):
        """Tokens `offset` positions before the last, and those positions: both int32 [B, T]."""
        position = self.last - offset
        at = jnp.clip(position, 0, self.token_ids.shape[1] - 1)
        return jnp.take_along_axis(self.token_ids, at, axis=1), position


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedLogits:
    """What is sampled from, and what is reported.

    Attributes:
        logits: float32 [B * T, v], -inf where a token is not possible.
        inverse_temperature: float32 [B * T].
        is_processed: bool [B * T]: logprobs are of these, not of the model's logits.
    """

    logits: Any
    inverse_temperature: Any
    is_processed: Any


def process_logits(
    ctx: ForwardContext,
    logits: Float32[Array, "M v"],
    text: TextSoFar,
    adjustments: Adjustments,
    grammar_banned: Int32[Array, "B n"] | None = None,
) -> ProcessedLogits:
    """Adjust logits, inside `shard_map`.

    Args:
        ctx: The model, the profile and the mesh.
        logits: This rank's share, M = B * T rows; -inf past the vocabulary.
        text: Behind which each row chooses.
        adjustments: Of each of the B texts.
        grammar_banned: Bits of tokens that a grammar forbids, where T is 1.
    """
    num_texts, num_places = text.last.shape
    width = logits.shape[1]
    rank = _Rank(first=lax.axis_index(TP_AXIS) * width, width=width)

    def rows(x):
        """One value a text, for each of its places."""
        return jnp.repeat(x, num_places, axis=0)

    bias = jnp.zeros((num_texts, width), jnp.float32)
    here = rank.columns(adjustments.bias_ids - 1)
    bias = bias.at[_index(here), here].set(adjustments.biases, mode="drop")
    adjusted = adjust_logits(
        logits,
        rows(bias),
        _uses(text, adjustments.prompt_len, rank).reshape(-1, width),
        (rows(adjustments.above), rows(adjustments.below)),
        (rows(adjustments.frequency), rows(adjustments.presence)),
        backend=ctx.backend,
    )
    banned = rank.unpack(adjustments.banned, ctx.tp)
    if grammar_banned is not None:
        banned = banned | rank.unpack(grammar_banned, ctx.tp)
    is_early = text.last + 1 < adjustments.end_position[:, None]
    ends = rank.columns(adjustments.end_ids - 1)
    is_end = jnp.zeros((num_texts, width), bool).at[_index(ends), ends].set(True, mode="drop")
    banned = banned[:, None] | (is_early[:, :, None] & is_end[:, None])
    banned = banned | _completed_bad_words(text, adjustments, rank)
    return ProcessedLogits(
        logits=jnp.where(banned.reshape(-1, width), -jnp.inf, adjusted),
        inverse_temperature=rows(adjustments.inverse_temperature),
        is_processed=rows(adjustments.is_processed),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """Which columns of the vocabulary a rank has."""

    first: Any
    width: int

    def columns(self, token_ids):
        """This rank's columns of tokens; `width`, which is dropped, for those of others."""
        column = token_ids - self.first
        is_here = (token_ids >= 0) & (column >= 0) & (column < self.width)
        return jnp.where(is_here, column, self.width)

    def unpack(self, words: Int32[Array, "B n"], num_ranks: int) -> Bool[Array, "B v"]:
        """This rank's bits of all tokens'."""
        missing = self.width * num_ranks // 32 - words.shape[1]
        words = jnp.pad(words, ((0, 0), (0, missing)))
        words = lax.dynamic_slice_in_dim(words, self.first // 32, self.width // 32, axis=1)
        bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
        return bits.reshape(len(words), self.width) > 0


def _index(columns):
    """The first index of each column, for a scatter."""
    return jnp.arange(len(columns))[:, None]


def _uses(text: TextSoFar, prompt_len, rank: _Rank) -> Int32[Array, "B T v"]:
    """0 where the text does not have a token; else 1 and how often the completion has it."""
    (num_texts, length), num_places = text.token_ids.shape, text.last.shape[1]
    position = jnp.arange(length, dtype=jnp.int32)[None, :]
    is_known = position <= text.last[:, :1]
    column = rank.columns(jnp.where(is_known, text.token_ids, -1))
    is_output = (position >= prompt_len[:, None]).astype(jnp.int32)
    # ORDER: integers, so none.
    # WHY: one update of one array; of two, XLA would copy the zeros.
    counts = jnp.zeros((2, num_texts, rank.width), jnp.int32)
    counts = counts.at[is_output, _index(column), column].add(1, mode="drop")
    count = counts[1]
    is_seen = jnp.minimum(counts[0] + count, 1)
    if num_places == 1:
        return (is_seen + count)[:, None]
    # The tokens at the places after the first are of the completion.
    ids, at = text.after(0)
    column = rank.columns(jnp.where((at > text.last[:, :1]), ids, -1))
    more = jnp.zeros((num_texts, num_places, rank.width), jnp.int32)
    texts, places = jnp.indices(column.shape)
    more = jnp.cumsum(more.at[texts, places, column].add(1, mode="drop"), axis=1)
    return jnp.maximum(is_seen[:, None], jnp.minimum(more, 1)) + count[:, None] + more


def _completed_bad_words(
    text: TextSoFar, adjustments: Adjustments, rank: _Rank
) -> Bool[Array, "B T v"]:
    """Tokens that would complete a banned sequence whose others the completion ends with."""
    words = adjustments.bad_words
    num_before = words.shape[-1] - 1
    is_match = words[:, None, :, -1] > 0
    for i in range(num_before):
        ids, position = text.after(num_before - 1 - i)
        in_completion = position >= adjustments.prompt_len[:, None]
        before = jnp.where(in_completion, ids + 1, 0)[:, :, None]
        wanted = words[:, None, :, i]
        is_match = is_match & ((wanted == 0) | (wanted == before))
    last = jnp.where(is_match, words[:, None, :, -1] - 1, -1)
    column = rank.columns(last)
    shape = *text.last.shape, rank.width
    texts, places, _ = jnp.indices(column.shape)
    return jnp.zeros(shape, bool).at[texts, places, column].set(True, mode="drop")
