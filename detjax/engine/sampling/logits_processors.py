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
from detjax.engine.sampling.adjustments import NO_TOKEN, Adjustments
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.sampling.api import adjust_logits
from detjax.parallel.mesh import TP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSoFar:
    """The texts behind which tokens are chosen: T places in each of B of them.

    Attributes:
        uses: int32 [B, v], this rank's columns of `AdjustedSlots.uses`.
        recent: int32 [B, K], as `AdjustedSlots` has it.
        drafts: int32 [B, D], tokens that are not committed yet, in order.
        num_drafts: int32 [B, T], how many of the drafts lie before each choice.
        position: int32 [B, T], of each choice.
    """

    uses: Any
    recent: Any
    drafts: Any
    num_drafts: Any
    position: Any

    def before(self, offset: int) -> Int32[Array, "B T"]:
        """The token `offset` places before the last one; `NO_TOKEN` where there is none."""
        texts = jnp.concatenate([self.recent, self.drafts], axis=1)
        at = self.recent.shape[1] - 1 - offset + self.num_drafts
        return jnp.take_along_axis(texts, at, axis=1)


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
    num_texts, num_places = text.position.shape
    width = logits.shape[1]
    rank = Rank.of(width)

    def rows(x):
        """One value a text, for each of its places."""
        return jnp.repeat(x, num_places, axis=0)

    bias = jnp.zeros((num_texts, width), jnp.float32)
    here = rank.columns(adjustments.bias_ids - 1)
    bias = bias.at[_index(here), here].set(adjustments.biases, mode="drop")
    adjusted = adjust_logits(
        logits,
        rows(bias),
        _uses(text, rank).reshape(-1, width),
        (rows(adjustments.above), rows(adjustments.below)),
        (rows(adjustments.frequency), rows(adjustments.presence)),
        backend=ctx.backend,
    )
    banned = rank.unpack(adjustments.banned, ctx.tp)
    if grammar_banned is not None:
        banned = banned | rank.unpack(grammar_banned, ctx.tp)
    is_early = text.position < adjustments.end_position[:, None]
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
class Rank:
    """Which columns of the vocabulary a rank has."""

    first: Any
    width: int

    @classmethod
    def of(cls, width: int) -> "Rank":
        """This rank, inside `shard_map`, with so many columns."""
        return cls(first=lax.axis_index(TP_AXIS) * width, width=width)

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


def _uses(text: TextSoFar, rank: Rank) -> Int32[Array, "B T v"]:
    """0 where the text does not have a token; else 1 and how often the completion has it."""
    # ORDER: integers, so none.
    is_seen, count = jnp.minimum(text.uses, 1), text.uses >> 1
    if not text.drafts.shape[1]:
        return jnp.broadcast_to((is_seen + count)[:, None], (*text.position.shape, rank.width))
    place = jnp.arange(text.drafts.shape[1], dtype=jnp.int32)[None, :]
    column = rank.columns(jnp.where(place < text.num_drafts[:, -1:], text.drafts, NO_TOKEN))
    if text.position.shape[1] == 1:
        # WHY: no scatter, for which XLA copies an array of zeros as large as the logits.
        columns = jnp.arange(rank.width, dtype=jnp.int32)[None, None, :]
        more = jnp.sum(column[:, :, None] == columns, axis=1, keepdims=True, dtype=jnp.int32)
    else:  # the choice at place t follows t drafts
        more = jnp.zeros((*text.position.shape, rank.width), jnp.int32)
        texts, places = jnp.indices(column.shape)
        more = jnp.cumsum(more.at[texts, places + 1, column].add(1, mode="drop"), axis=1)
    return jnp.maximum(is_seen[:, None], jnp.minimum(more, 1)) + count[:, None] + more


def _completed_bad_words(
    text: TextSoFar, adjustments: Adjustments, rank: Rank
) -> Bool[Array, "B T v"]:
    """Tokens that would complete a banned sequence whose others the completion ends with."""
    words = adjustments.bad_words
    num_before = words.shape[-1] - 1
    is_match = words[:, None, :, -1] > 0
    for i in range(num_before):
        before = text.before(num_before - 1 - i)[:, :, None] + 1
        wanted = words[:, None, :, i]
        is_match = is_match & ((wanted == 0) | (wanted == before))
    last = jnp.where(is_match, words[:, None, :, -1] - 1, -1)
    column = rank.columns(last)
    shape = *text.position.shape, rank.width
    texts, places, _ = jnp.indices(column.shape)
    return jnp.zeros(shape, bool).at[texts, places, column].set(True, mode="drop")
