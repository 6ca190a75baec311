# SPDX-License-Identifier: Apache-2.0
"""Checks of what a request may say: types, and limits of what a step has room for."""

import math
import numbers
from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np

MAX_LOGIT_BIASES = 1024
"""Tokens that a request may bias."""

MAX_BAD_WORDS = 256
"""Banned sequences of several tokens; of one token there may be any number."""

MAX_BAD_WORD_LEN = 16
"""Tokens of a banned sequence."""

MAX_END_TOKENS = 64
"""End tokens of a request with `min_tokens`."""

MAX_TEXTS = {"stop": 64, "bad_words": 1024}
"""Texts of a field."""

MAX_TEXT_LEN, MAX_TEXTS_LEN = 2**10, 2**13
"""Characters of one of them, and of all of a field: each token is compared with all `stop`, and
cutting all `bad_words` into tokens takes milliseconds."""

MAX_STOP_TOKENS = 1024
"""Stop tokens of a request."""

MAX_ALLOWED_TOKENS = 2**20
"""Allowed tokens of a request; no vocabulary has as many."""

MAX_INTEGER = 2**53 - 1
"""Farthest that an integer of a request may be from 0: receipts are JSON, which is exact so far."""

MAX_BIAS = 1e8
"""Farthest that a bias may be from 0, so that sums stay finite."""


def replace_field(frozen: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass, in its `__post_init__`."""
    object.__setattr__(frozen, name, value)


def integer(name: str, value: Any) -> int:
    """An integer as Python's own; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    return int(value)


def check_integers(name: str, values: Iterable[int]) -> None:
    """Refuse integers that a receipt could not hold."""
    for value in values:
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"{name}={value} must be at most 2**53 - 1 from 0")


def number(name: str, value: Any) -> float:
    """A real number as Python's float; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """A bool, also NumPy's, as Python's own."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)


def token_ids_of(name: str, values: Any, most: int | None = None) -> tuple[int, ...]:
    """Token ids as Python's integers, at most so many where a number is given.

    Long prompts come here: no Python loop where all is well.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r:.80} must be a sequence of integers")
    ids = tuple(values)
    if most is not None and len(ids) > most:
        raise ValueError(f"{name}={ids[:3]}... has {len(ids)} tokens, more than {most}")
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(ids))


def texts_of(name: str, values: Any) -> tuple[str, ...]:
    """Texts, none of them empty or beyond the limits; a single one is taken for a tuple of one."""
    texts = (values,) if isinstance(values, str) else values
    if not isinstance(texts, Iterable):
        raise ValueError(f"{name}={values!r} must be a sequence of texts")
    texts = tuple(texts)
    if len(texts) > MAX_TEXTS[name]:
        raise ValueError(f"{name}=... has {len(texts)} texts, more than {MAX_TEXTS[name]}")
    lengths = [len(text) for text in texts if isinstance(text, str)]
    if max(lengths, default=0) > MAX_TEXT_LEN or sum(lengths) > MAX_TEXTS_LEN:
        raise ValueError(
            f"{name}=... has {sum(lengths)} characters, {max(lengths)} in the longest text, more "
            f"than {MAX_TEXTS_LEN} or {MAX_TEXT_LEN}"
        )
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{name}={values!r} must be texts, and {text!r} is none")
        if not text:
            raise ValueError(
                f"{name}={values!r} has an empty text; every completion would have it before it "
                "begins"
            )
    return texts


def biases_of(values: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs in order of id, from pairs or a mapping."""
    pairs = values.items() if isinstance(values, Mapping) else values
    biases = {}
    if isinstance(values, Sized) and len(values) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias={len(values)} entries are more than {MAX_LOGIT_BIASES}")
    try:
        pairs = [(key, value) for key, value in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"logit_bias={values!r:.60} must be a mapping of token ids to numbers"
        ) from error
    for key, value in pairs:
        token_id, bias = integer("logit_bias", key), number(f"logit_bias[{key}]", value)
        if not math.isfinite(bias) or abs(bias) > MAX_BIAS:
            raise ValueError(f"logit_bias[{key}]={value} must be from -1e8 to 1e8")
        if token_id in biases:
            raise ValueError(f"logit_bias={token_id} is given twice")
        biases[token_id] = bias
    return tuple(sorted(biases.items()))


def bad_words_of(values: Any) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, none of them empty."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"bad_words_token_ids={values!r} must be a sequence of token sequences")
    words = tuple(token_ids_of(f"bad_words_token_ids[{i}]", v) for i, v in enumerate(values))
    if not all(words):
        raise ValueError("bad_words_token_ids=... has an empty sequence, which bans everything")
    return tuple(dict.fromkeys(words))
