# SPDX-License-Identifier: Apache-2.0
"""What a step knows of a request beside its logits: one record of integers a slot.

The host packs a record once, with the last piece of a prompt; the device keeps it, with counts of
the text's tokens, and unpacks it by name. A record of zeros changes nothing, so a row without
adjustments reads zeros, whatever its slot holds.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from detjax.engine.requests.limits import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_END_TOKENS,
    MAX_LOGIT_BIASES,
)
from detjax.engine.requests.sampling_params import SamplingParams

_NUM_NUMBERS = 7
_BAD = MAX_BAD_WORDS * MAX_BAD_WORD_LEN


def num_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for each token."""
    return -(-vocab_size // 32)


def record_len(vocab_size: int) -> int:
    """Integers of a record."""
    return _NUM_NUMBERS + MAX_END_TOKENS + 2 * MAX_LOGIT_BIASES + _BAD + num_words(vocab_size)


RECENT_LEN = MAX_BAD_WORD_LEN - 1
"""Tokens before the next one that decide which banned sequences it would complete."""

NO_TOKEN = -1
"""In `AdjustedSlots.recent`: the completion has no token there."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustedSlots:
    """What the device keeps of sequences with adjustments. Its size does not depend on `max_len`.

    Attributes:
        record: int32 [S, R], as `pack_record` has it.
        recent: int32 [S, K], the last tokens of the completion, the newest last; `NO_TOKEN` where
            it has none.
        uses: int32 [S, V] over the padded vocabulary, as `count_uses` has it.
    """

    record: Any
    recent: Any
    uses: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustedRows:
    """What the host installs in `AdjustedSlots` when the last piece of a prompt is prefilled.

    Attributes:
        slot: int32 [B]; out of range for padding.
        slots: The values, a row each.
    """

    slot: Any
    slots: AdjustedSlots


def count_uses(prompt_ids, output_ids, width: int) -> np.ndarray:
    """Count tokens of a text: int32 [width].

    1 where the prompt has a token, plus 2 for each use in the completion.

    Raises:
        ValueError: If a token is negative.
    """
    uses = np.minimum(np.bincount(np.asarray(prompt_ids, np.int64), minlength=width), 1)
    if len(output_ids):
        uses = uses + 2 * np.bincount(np.asarray(output_ids, np.int64), minlength=width)
    return uses[:width].astype(np.int32)


def recent_tokens(output_ids) -> np.ndarray:
    """The last tokens of a completion: int32 [K], the newest last."""
    recent = np.full(RECENT_LEN, NO_TOKEN, np.int32)
    last = list(output_ids[-RECENT_LEN:])
    if last:
        recent[-len(last) :] = last
    return recent


def bits_of(token_ids, vocab_size: int) -> np.ndarray:
    """Set the bits of some tokens: int32 [n], bit i mod 32 of word i div 32 for token i."""
    flags = np.zeros(num_words(vocab_size) * 32, np.uint8)
    flags[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def reciprocal(value: float) -> np.float32:
    """The rounded reciprocal of a rounded value; 1 for 0."""
    # ROUND: both to float32, to nearest, ties to even.
    return np.float32(1) / np.float32(value or 1.0)


def pack_record(
    sampling: SamplingParams, *, prompt_len: int, end_token_ids, vocab_size: int
) -> np.ndarray:
    """Lay out what of a request's sampling does not change from token to token: int32 [R].

    Args:
        sampling: Of the request.
        prompt_len: Tokens of the prompt.
        end_token_ids: What ends it, which `min_tokens` forbids at first.
        vocab_size: Of the model.
    """
    record = np.zeros(record_len(vocab_size), np.int32)
    integers = prompt_len + sampling.min_tokens, sampling.logprobs_mode == "processed"
    floats = (
        reciprocal(sampling.repetition_penalty),
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        reciprocal(sampling.temperature),
    )
    record[:2] = integers
    record[2:_NUM_NUMBERS] = np.asarray(floats, np.float32).view(np.int32)
    parts = _parts(record)
    if sampling.min_tokens:
        ends = sorted(end_token_ids)
        parts["end_ids"][: len(ends)] = np.asarray(ends, np.int32) + 1
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        parts["bias_ids"][: len(ids)] = np.asarray(ids, np.int32) + 1
        parts["biases"][: len(ids)] = np.asarray(values, np.float32).view(np.int32)
    words = [word for word in sampling.bad_words_token_ids if len(word) > 1]
    bad = parts["bad_words"].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_LEN)
    for row, word in zip(bad, words, strict=False):
        row[MAX_BAD_WORD_LEN - len(word) :] = np.asarray(word, np.int32) + 1
    banned = bits_of([w[0] for w in sampling.bad_words_token_ids if len(w) == 1], vocab_size)
    if sampling.allowed_token_ids:
        banned |= ~bits_of(sampling.allowed_token_ids, vocab_size)
    parts["banned"][:] = banned
    return record


def _parts(record) -> dict[str, Any]:
    """Views of the lists of a record, of its last axis."""
    sizes = {
        "end_ids": MAX_END_TOKENS,
        "bias_ids": MAX_LOGIT_BIASES,
        "biases": MAX_LOGIT_BIASES,
        "bad_words": _BAD,
    }
    parts, at = {}, _NUM_NUMBERS
    for name, size in sizes.items():
        parts[name] = record[..., at : at + size]
        at += size
    parts["banned"] = record[..., at:]
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Adjustments:
    """Records on the device, by name. Token ids are one more than they are, so that 0 is none.

    Attributes:
        end_position: int32 [B], the first position at which an end token is possible.
        is_processed: bool [B]: reported logprobs are of what is sampled from.
        above, below: float32 [B]: factors of logits above 0, and of others.
        frequency, presence: float32 [B].
        inverse_temperature: float32 [B].
        end_ids: int32 [B, E].
        bias_ids, biases: int32 and float32 [B, n].
        bad_words: int32 [B, W, K]: the last token in the last column, zeros in front.
        banned: int32 [B, n], bits of tokens that are never possible.
    """

    end_position: Any
    is_processed: Any
    above: Any
    below: Any
    frequency: Any
    presence: Any
    inverse_temperature: Any
    end_ids: Any
    bias_ids: Any
    biases: Any
    bad_words: Any
    banned: Any

    @classmethod
    def unpack(cls, record) -> "Adjustments":
        """Read records, int32 [B, R], on the device."""
        end_position, is_processed = record[:, :2].T
        floats = lax.bitcast_convert_type(record[:, 2:_NUM_NUMBERS], jnp.float32).T
        above, below, frequency, presence, inverse_temperature = floats
        parts = _parts(record)
        shape = len(record), MAX_BAD_WORDS, MAX_BAD_WORD_LEN
        return cls(
            end_position=end_position,
            is_processed=is_processed > 0,
            above=_one_for_none(above),
            below=_one_for_none(below),
            frequency=frequency,
            presence=presence,
            inverse_temperature=_one_for_none(inverse_temperature),
            end_ids=parts["end_ids"],
            bias_ids=parts["bias_ids"],
            biases=lax.bitcast_convert_type(parts["biases"], jnp.float32),
            bad_words=parts["bad_words"].reshape(shape),
            banned=parts["banned"],
        )


def _one_for_none(factor):
    return jnp.where(factor == 0.0, jnp.float32(1), factor)
