# SPDX-License-Identifier: Apache-2.0
"""What a step knows of a request beside its logits: one record of integers a slot.

The host packs a record once, with the last piece of a prompt; the device keeps it with the tokens
of the text and unpacks it by name. A record of zeros changes nothing, so a row without adjustments
reads zeros, whatever its slot holds.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from detjax.serving.limits import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_END_TOKENS,
    MAX_LOGIT_BIASES,
)
from detjax.serving.request import SamplingParams

_NUM_NUMBERS = 8
_BAD = MAX_BAD_WORDS * MAX_BAD_WORD_LEN


def num_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for each token."""
    return -(-vocab_size // 32)


def record_len(vocab_size: int) -> int:
    """Integers of a record."""
    return _NUM_NUMBERS + MAX_END_TOKENS + 2 * MAX_LOGIT_BIASES + _BAD + num_words(vocab_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustedSlots:
    """What the device keeps of sequences with adjustments.

    Attributes:
        record: int32 [S, R], as `pack_record` has it.
        token_ids: int32 [S, L], the text so far by position; what lies behind it means nothing.
    """

    record: Any
    token_ids: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdjustOperands:
    """What the host gives a step for rows with adjustments.

    Attributes:
        slot: int32 [B]; out of range for rows without, and where no token is wanted.
        banned: int32 [B, n]: bits of tokens that a grammar forbids, of this step's one token. None
            for a verify step, where nobody has a grammar.
        record: int32 [B, R], of a prefill alone.
        token_ids: int32 [B, L], the text as the host knows it, of a prefill alone.
    """

    slot: Any
    banned: Any = None
    record: Any = None
    token_ids: Any = None


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
    integers = prompt_len, prompt_len + sampling.min_tokens, sampling.logprobs_mode == "processed"
    floats = (
        reciprocal(sampling.repetition_penalty),
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        reciprocal(sampling.temperature),
    )
    record[:3] = integers
    record[3:_NUM_NUMBERS] = np.asarray(floats, np.float32).view(np.int32)
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
        prompt_len, end_position: int32 [B]: tokens of the prompt, and the first position at which
            an end token is possible.
        is_processed: bool [B]: reported logprobs are of what is sampled from.
        above, below: float32 [B]: factors of logits above 0, and of others.
        frequency, presence: float32 [B].
        inverse_temperature: float32 [B].
        end_ids: int32 [B, E].
        bias_ids, biases: int32 and float32 [B, n].
        bad_words: int32 [B, W, K]: the last token in the last column, zeros in front.
        banned: int32 [B, n], bits of tokens that are never possible.
    """

    prompt_len: Any
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
        prompt_len, end_position, is_processed = record[:, :3].T
        floats = lax.bitcast_convert_type(record[:, 3:_NUM_NUMBERS], jnp.float32).T
        above, below, frequency, presence, inverse_temperature = floats
        parts = _parts(record)
        shape = len(record), MAX_BAD_WORDS, MAX_BAD_WORD_LEN
        return cls(
            prompt_len=prompt_len,
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
