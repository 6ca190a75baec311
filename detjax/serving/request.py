# SPDX-License-Identifier: Apache-2.0
"""What a user asks for and what comes back, as plain data."""

import dataclasses
import enum
import hashlib
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
"""Range of a temperature that is not 0: it and its float32 reciprocal are normal numbers, and a
logit below 1e8 stays finite when it is multiplied by either."""

MAX_SEQUENCES = 1024
"""Most sequences of a request: they enter the scheduler in one step."""

MAX_TOP_LOGPROBS = 64
"""Most of the most likely tokens that a request may ask for at each position."""

MAX_PRIORITY = 100
"""Farthest that a priority may be from 0: beyond it, others would wait for days."""


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # `max_tokens`, or the end of the model's context
    CANCELLED = "cancelled"  # `Engine.cancel`
    ERROR = "error"  # this request alone failed; its output says why


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen from canonical logits.

    Attributes:
        max_tokens: Most tokens to generate; at least 1, or 0 to score the prompt alone, which needs
            `num_prompt_logprobs`.
        temperature: Divides the logits, from 1e-30 to 1e30; 0 takes the first maximum (greedy).
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens with this probability; in (0, 1].
        min_p: Drop tokens less likely than this fraction of the most likely one; in [0, 1).
        seed: 0 to 2**64 - 1. Same seed, same noise: see `docs/numerics.md`.
        n: Sequences a prompt, at most 1024.
        noise_stream: Sequence i draws noise stream `noise_stream + i` of the seed, at most
            2**32 - 1. So one of several sequences can be asked for alone.
        stop_token_ids: Tokens that end a completion (the model's own end tokens are added).
        stop: Texts that end a completion; the text ends before them, and the tokens that complete
            them stay in `token_ids` and in the digest. For what knows the tokenizer
            (`detjax.LLM`, the command); the engine, which does not, refuses them. A single text
            is taken for a tuple of one.
        num_top_logprobs: How many of the most likely tokens to report at each position.
        num_prompt_logprobs: Report the logprob and the rank of each token of the prompt after the
            first, with so many of the most likely tokens at its position; None reports nothing of
            the prompt.

    NumPy's integers and floats are taken for Python's.

    Raises:
        ValueError: If a value has another type or is outside its range; the message names it.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    noise_stream: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_top_logprobs: int = 0
    num_prompt_logprobs: int | None = None

    def __post_init__(self):
        """Check every type, then every range."""
        for name in ("max_tokens", "top_k", "seed", "n", "noise_stream", "num_top_logprobs"):
            _replace(self, name, _integer(name, getattr(self, name)))
        if self.num_prompt_logprobs is not None:
            wanted = _integer("num_prompt_logprobs", self.num_prompt_logprobs)
            _replace(self, "num_prompt_logprobs", wanted)
        for name in ("temperature", "top_p", "min_p"):
            _replace(self, name, _number(name, getattr(self, name)))
        _replace(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _replace(self, "stop", _texts("stop", self.stop))
        least, most = MIN_TEMPERATURE, MAX_TEMPERATURE
        checks = (
            (
                self.max_tokens >= (self.num_prompt_logprobs is None),
                f"{self.max_tokens=} must be at least 1, or 0 with num_prompt_logprobs, which "
                "scores the prompt alone",
            ),
            (
                self.max_tokens > 0 or self.n == 1,
                f"{self.n=} must be 1 where max_tokens=0: there is nothing to sample",
            ),
            (
                self.temperature == 0 or least <= self.temperature <= most,
                f"{self.temperature=} must be 0 or from {least:g} to {most:g}",
            ),
            (self.top_k >= 0, f"{self.top_k=} must be at least 0 (0 keeps all tokens)"),
            (0 < self.top_p <= 1, f"{self.top_p=} must be in (0, 1]"),
            (0 <= self.min_p < 1, f"{self.min_p=} must be in [0, 1)"),
            (0 <= self.seed < 2**64, f"{self.seed=} must be in [0, 2**64)"),
            (
                1 <= self.n <= MAX_SEQUENCES,
                f"{self.n=} must be in [1, {MAX_SEQUENCES}]; ask again with another seed for more",
            ),
            (
                0 <= self.noise_stream <= 2**32 - self.n,
                f"{self.noise_stream=} must be in [0, 2**32 - n], with n={self.n}",
            ),
            (
                0 <= self.num_top_logprobs <= MAX_TOP_LOGPROBS,
                f"{self.num_top_logprobs=} must be in [0, {MAX_TOP_LOGPROBS}]",
            ),
            (
                0 <= (self.num_prompt_logprobs or 0) <= MAX_TOP_LOGPROBS,
                f"{self.num_prompt_logprobs=} must be None or in [0, {MAX_TOP_LOGPROBS}]",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message.replace("self.", ""))

    def as_dict(self) -> dict[str, Any]:
        """Return every field as JSON can hold it."""
        values = dataclasses.asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Return what `as_dict` made the values of.

        Raises:
            ValueError: If a field is not known, or its value is out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{unknown[0]}={values[unknown[0]]!r} is no sampling parameter")
        return cls(**{name: _from_json(name, value) for name, value in values.items()})

    @property
    def is_filtered(self) -> bool:
        """Whether any token may be excluded before sampling; greedy never looks."""
        narrows = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature > 0 and narrows


def _from_json(name: str, value: Any) -> Any:
    """A field's value: JSON has no tuples, and may write a whole number for a float."""
    if isinstance(value, list):
        return tuple(value)
    is_whole = type(value) is int and name in ("temperature", "top_p", "min_p")
    return float(value) if is_whole else value


def _replace(frozen: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass, in its `__post_init__`."""
    object.__setattr__(frozen, name, value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    return int(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    return float(value)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    """Token ids as Python's integers. Long prompts come here: no Python loop where all is well."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a sequence of integers")
    ids = tuple(values)
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(_integer(f"{name}[{i}]", value) for i, value in enumerate(ids))


def _texts(name: str, values: Any) -> tuple[str, ...]:
    texts = (values,) if isinstance(values, str) else values
    if not isinstance(texts, Iterable):
        raise ValueError(f"{name}={values!r} must be a sequence of texts")
    texts = tuple(texts)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{name}={values!r} must be texts, and {text!r} is none")
        if not text:
            raise ValueError(
                f"{name}={values!r} has an empty text; it would end every completion before it "
                "begins"
            )
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt, as token ids, and how to continue it.

    Attributes:
        prompt_token_ids: At least one.
        sampling: How each next token is chosen.
        is_deterministic: Whether the answer must be the canonical one. Where every step is
            canonical (`invariant`) it is, asked for or not.
        priority: Higher goes first, from -100 to 100; a level is worth
            `EngineConfig.ageing_steps` steps of waiting.
        cache_salt: Prefixes are shared among requests of the same salt alone, so nobody learns from
            the time of an answer what another tenant has asked. It changes no bit.
        predicted_token_ids: Tokens that the answer may begin with. An engine with
            `has_prompt_lookup` verifies them in windows, as drafts, which is quicker than decoding
            where they are right. They change no bit.

    Raises:
        ValueError: If a value has another type or is outside its range; the message names it.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    is_deterministic: bool = True
    priority: int = 0
    cache_salt: str = ""
    predicted_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        """Check every type, and the range of the priority."""
        for name in ("prompt_token_ids", "predicted_token_ids"):
            _replace(self, name, _token_ids(name, getattr(self, name)))
        _replace(self, "priority", _integer("priority", self.priority))
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(
                f"priority={self.priority} must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"
            )
        for name, kind in (
            ("sampling", SamplingParams), ("is_deterministic", bool), ("cache_salt", str),
        ):  # fmt: skip
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a {kind.__name__}")


TopLogprobs = tuple[tuple[int, np.float32], ...]
"""(token id, logprob) of the most likely tokens of one position, most likely first."""


class PromptLogprob(NamedTuple):
    """What the model thinks of a token of the prompt, given those before it.

    Attributes:
        logprob: float32, at temperature 1, unfiltered: the bits that the token would have had, had
            it been sampled there.
        rank: 1 for the most likely token of the vocabulary. Equal logits rank in order of their
            token ids.
        top_logprobs: Of the position, as many as were asked for.
    """

    logprob: np.float32
    rank: int
    top_logprobs: TopLogprobs

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have chosen this token."""
        return self.rank == 1


PromptLogprobs = tuple[PromptLogprob, ...]
"""Of the second token of a prompt, and so on; the first follows nothing and has no logprob."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One generated token. `logprob` is of the token at temperature 1, unfiltered."""

    request_idx: int
    sequence_idx: int
    token_id: int
    logprob: np.float32
    top_logprobs: TopLogprobs


class WindowCounts(NamedTuple):
    """Windows of drafts of one sequence, from its begin; all 0 where nothing is drafted.

    Attributes:
        num_windows: Verified.
        num_rollbacks: Of these, windows in which a draft was wrong.
        num_drafts: Tokens drafted and verified.
        num_rolled_back: Of these, tokens that were not committed.
    """

    num_windows: int = 0
    num_rollbacks: int = 0
    num_drafts: int = 0
    num_rolled_back: int = 0

    def add(self, *, num_drafts: int, num_accepted: int) -> "WindowCounts":
        """With one more window."""
        return WindowCounts(
            self.num_windows + 1,
            self.num_rollbacks + (num_accepted < num_drafts),
            self.num_drafts + num_drafts,
            self.num_rolled_back + num_drafts - num_accepted,
        )


NO_WINDOWS = WindowCounts()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What one step of the engine released of one sequence: final, never taken back.

    Attributes:
        request_id: From `Engine.add_request`.
        sequence_idx: Which of the request's `n` sequences.
        token_ids: New tokens; none where only the end is told.
        logprobs: Of each new token, float32.
        top_logprobs: Of each new token, as many as were asked for.
        finish_reason: Why the sequence ended; None while it goes on.
        exception: What went wrong where `finish_reason` is ERROR, one of `detjax.serving.errors`;
            else None.
        weight_version: Of the weights that computed it: see `Engine.load_weights`.
        windows: Of drafts, of the sequence so far.
        prompt_logprobs: Where they were asked for, with the first output of sequence 0 that has a
            token, or ends it without one; None elsewhere.
    """

    request_id: int
    sequence_idx: int
    token_ids: tuple[int, ...]
    logprobs: tuple[np.float32, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: FinishReason | None
    exception: Exception | None
    weight_version: int
    windows: WindowCounts = NO_WINDOWS
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def error(self) -> str:
        """What went wrong, in words; empty where nothing did."""
        return "" if self.exception is None else str(self.exception)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished sequence of a request.

    `token_ids` holds every generated token, the one that ended it included. `logprobs[i]` is the
    canonical float32 log-probability of `token_ids[i]` at temperature 1 before any filter.
    `weight_version` is 0 for the weights that the model was loaded with. `prompt_logprobs` is None
    where they were not asked for.
    """

    request_idx: int
    sequence_idx: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[np.float32, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: FinishReason
    weight_version: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    def digest(self) -> str:
        """Sha256 over the token ids (int32) and the logprobs (float32), little-endian."""
        hasher = hashlib.sha256()
        hasher.update(np.asarray(self.token_ids, "<i4").tobytes())
        hasher.update(np.asarray(self.logprobs, "<f4").tobytes())
        return hasher.hexdigest()
