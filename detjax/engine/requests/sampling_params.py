# SPDX-License-Identifier: Apache-2.0
"""How the next token is chosen: the sampling parameters of a request, checked, as plain data."""

import dataclasses
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.engine.requests.limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKENS,
    bad_words_of,
    biases_of,
    check_integers,
    integer,
    number,
    replace_field,
    texts_of,
    token_ids_of,
)
from detjax.engine.sampling.structured_output import StructuredOutput

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
"""Range of a temperature that is not 0: it and its float32 reciprocal are normal numbers, and a
logit below 1e8 stays finite when it is multiplied by either."""

MAX_SEQUENCES = 1024
"""Most sequences of a request: they enter the scheduler in one step."""

MAX_TOP_LOGPROBS = 64
"""Most of the most likely tokens that a request may ask for at each position."""

LOGPROBS_MODES = ("raw", "processed")
"""What reported logprobs are of: the model's logits, or those that were sampled from."""

NOISES = ("per_prompt", "common")
"""What noise is a function of beside seed, sequence, position and token: the prompt, or nothing."""


def _lists(value: Any) -> Any:
    """The value with lists for tuples."""
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _of_json(old: Any, new: Any) -> Any:
    """A field's value: JSON has no tuples, and may write a whole number for a float."""
    if isinstance(new, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in new)
    return _float(new) if isinstance(old, float) else new


def _float(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _biases(pairs: Any) -> tuple[tuple[Any, Any], ...]:
    """The biases of a list of pairs, as `as_dict` writes them."""
    if not isinstance(pairs, tuple) or any(
        not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs
    ):
        raise ValueError(f"logit_bias={pairs!r:.200} must have a number for each of some token ids")
    return tuple((token_id, _float(bias)) for token_id, bias in pairs)


def draw_seed() -> int:
    """Return a random seed, below 2**53 so that every reader of JSON has it exactly."""
    return secrets.randbits(53)


def _seed_of_prompt(seed: int, prompt_token_ids: Iterable[int]) -> int:
    """The seed that a prompt draws its noise by, to the bit as `docs/numerics.md` says."""
    ids = np.asarray(tuple(prompt_token_ids), "<i4").tobytes()
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + ids, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _token_id(key: Any) -> int:
    if not (isinstance(key, int) or key.isascii() and key.isdigit()):
        raise ValueError(f"logit_bias[{key!r}] must be of a token id")
    return int(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen from canonical logits.

    Attributes:
        max_tokens: Most tokens to generate; at least 1, or 0 to score the prompt alone, which needs
            `prompt_logprobs`.
        temperature: Divides the logits, from 1e-30 to 1e30; 0 takes the first maximum (greedy).
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens with this probability; in (0, 1].
        min_p: Drop tokens less likely than this fraction of the most likely one; in [0, 1).
        seed: 0 to 2**64 - 1. Same seed and prompt, same noise: see `docs/numerics.md`. None: where
            tokens are sampled the library, the command and the server draw one, and say it in the
            output's sampling; an engine, whose outputs have no sampling, takes 0.
        n: Sequences a prompt, at most 1024.
        noise_stream: Sequence i draws noise stream `noise_stream + i` of the seed, at most
            2**32 - 1. So one of several sequences can be asked for alone.
        noise: "per_prompt": the prompt's token ids have part in the noise, so answers to different
            prompts are independent. "common": they have none (common random numbers), so prompts
            of one length draw the same noise for each token, and means over prompts vary more.
        stop_token_ids: Tokens that end a completion, at most 1,024 (the model's own end tokens are
            added).
        stop: Texts that end a completion; the text ends before them, and the tokens that complete
            them stay in `token_ids` and in the digest. For what knows the tokenizer
            (`detjax.LLM`, the command); the engine, which does not, refuses them. A single text
            is taken for a tuple of one. At most 64, of 1,024 characters each and 8,192 together.
        logprobs: How many of the most likely tokens to report at each position.
        best_of: Sequences that are made, of which the n with the greatest sum of logprobs are
            returned, best first; 0 makes n. The sum is in float64, first token first; of equal
            ones the lower sequence comes first.
        logit_bias: (token id, finite bias) pairs or a mapping; at most 1024, added to the logits.
        allowed_token_ids: No other token is possible; none allows all.
        bad_words: Texts that a completion must not have, as tokens, alone and after a space. For
            what knows the tokenizer, like `stop`. At most 1,024, as long as those.
        bad_words_token_ids: Token sequences that a completion must not have: the last token of one
            is impossible behind the others. At most 256 of several tokens, of up to 16 each.
        ignore_eos: The model's own end tokens end nothing.
        min_tokens: No end token is possible before so many tokens, and no stop text counts.
        repetition_penalty: Divides logits above 0, and multiplies others, of tokens that prompt or
            completion have; from 0.01 to 100, and 1 changes nothing.
        presence_penalty: Subtracted from logits of tokens that the completion has; from -2 to 2.
        frequency_penalty: Subtracted once for each time that it has them; from -2 to 2.
        logprobs_mode: "raw": of the model's logits, at temperature 1. "processed": of what is
            sampled from, with biases, penalties, masks, temperature and filters; where the
            temperature is 0 that of 1, without filters.
        include_stop_str_in_output: The text ends behind a stop text, not before it.
        skip_special_tokens: Special tokens are not shown in the text. Else they are, but for the
            one that ends it, which is with `include_stop_str_in_output`.
        spaces_between_special_tokens: As vLLM has it. It is of tokenizers without a tokenizer.json,
            which detjax does not read: there is no space between shown tokens either way.
        truncate_prompt_tokens: Take only the last so many tokens of a prompt; -1 takes as many as
            leave room for `max_tokens`, and for one at least. For what knows the context's length,
            like `stop`. None takes all, and refuses a prompt that is too long.
        structured_output: What form the text must have; None leaves it free.
        prompt_logprobs: Report the logprob and the rank of each token of the prompt after the
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
    seed: int | None = None
    n: int = 1
    noise_stream: int = 0
    noise: str = "per_prompt"
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    best_of: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs_mode: str = "raw"
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_output: StructuredOutput | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        """Check every type, then every range."""
        self._check_types()
        for holds, message in (*self._choice_checks(), *self._adjustment_checks()):
            if not holds:
                raise ValueError(message.replace("self.", ""))

    def _check_types(self) -> None:
        """Take values of other types for Python's own, or refuse them."""
        counts = (
            "max_tokens", "top_k", "n", "noise_stream", "logprobs", "best_of", "min_tokens",
        )  # fmt: skip
        optional = "seed", "prompt_logprobs", "truncate_prompt_tokens"
        for name in (*counts, *(n for n in optional if getattr(self, n) is not None)):
            replace_field(self, name, integer(name, getattr(self, name)))
            if name != "seed":  # receipts have it as text
                check_integers(name, (getattr(self, name),))
        penalties = "repetition_penalty", "presence_penalty", "frequency_penalty"
        for name in ("temperature", "top_p", "min_p", *penalties):
            replace_field(self, name, number(name, getattr(self, name)))
        stops = token_ids_of("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        check_integers("stop_token_ids", stops)
        replace_field(self, "stop_token_ids", stops)
        replace_field(self, "stop", texts_of("stop", self.stop))
        replace_field(self, "bad_words", texts_of("bad_words", self.bad_words))
        replace_field(self, "logit_bias", biases_of(self.logit_bias))
        allowed = token_ids_of("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
        replace_field(self, "allowed_token_ids", allowed)
        replace_field(self, "bad_words_token_ids", bad_words_of(self.bad_words_token_ids))
        for name in (
            "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
            "spaces_between_special_tokens",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.structured_output, StructuredOutput | None):
            raise ValueError(
                f"structured_output={self.structured_output!r} must be a StructuredOutput"
            )

    def _choice_checks(self) -> tuple[tuple[bool, str], ...]:
        """Whether fields of the choice and of the noise are in their ranges, with the errors."""
        least, most = MIN_TEMPERATURE, MAX_TEMPERATURE
        return (
            (
                self.max_tokens >= (self.prompt_logprobs is None),
                f"{self.max_tokens=} must be at least 1, or 0 with prompt_logprobs, which "
                "scores the prompt alone",
            ),
            (
                self.max_tokens > 0 or self.num_sequences == 1,
                f"{self.n=} must be 1 where max_tokens=0: there is nothing to sample",
            ),
            (
                self.temperature == 0 or least <= self.temperature <= most,
                f"{self.temperature=} must be 0 or from {least:g} to {most:g}",
            ),
            (self.top_k >= 0, f"{self.top_k=} must be at least 0 (0 keeps all tokens)"),
            (0 < self.top_p <= 1, f"{self.top_p=} must be in (0, 1]"),
            (0 <= self.min_p < 1, f"{self.min_p=} must be in [0, 1)"),
            (0 <= (self.seed or 0) < 2**64, f"{self.seed=} must be in [0, 2**64)"),
            (
                1 <= self.n <= MAX_SEQUENCES,
                f"{self.n=} must be in [1, {MAX_SEQUENCES}]; ask again with another seed for more",
            ),
            (
                0 <= self.noise_stream <= 2**32 - self.n,
                f"{self.noise_stream=} must be in [0, 2**32 - n], with n={self.n}",
            ),
            (self.noise in NOISES, f"{self.noise=} must be one of {NOISES}"),
        )

    def _adjustment_checks(self) -> tuple[tuple[bool, str], ...]:
        """Whether fields of reports, adjustments and forms are in their ranges, with the errors."""
        return (
            (
                0 <= self.logprobs <= MAX_TOP_LOGPROBS,
                f"{self.logprobs=} must be in [0, {MAX_TOP_LOGPROBS}]",
            ),
            (
                self.best_of == 0 or self.n <= self.best_of <= MAX_SEQUENCES,
                f"{self.best_of=} must be 0 or from {self.n=} to {MAX_SEQUENCES}",
            ),
            (
                len(self.logit_bias) <= MAX_LOGIT_BIASES,
                f"logit_bias={len(self.logit_bias)} entries are more than {MAX_LOGIT_BIASES}",
            ),
            (
                sum(len(word) > 1 for word in self.bad_words_token_ids) <= MAX_BAD_WORDS,
                f"bad_words_token_ids={len(self.bad_words_token_ids)} sequences are more than "
                f"{MAX_BAD_WORDS} of several tokens",
            ),
            (
                max(map(len, self.bad_words_token_ids), default=0) <= MAX_BAD_WORD_LEN,
                f"bad_words_token_ids={self.bad_words_token_ids!r:.60} has a sequence of more than "
                f"{MAX_BAD_WORD_LEN} tokens",
            ),
            (
                0 <= self.min_tokens <= self.max_tokens,
                f"{self.min_tokens=} must be from 0 to {self.max_tokens=}",
            ),
            (
                0.01 <= self.repetition_penalty <= 100,
                f"{self.repetition_penalty=} must be from 0.01 to 100 (1 changes nothing)",
            ),
            *(
                (-2 <= getattr(self, name) <= 2, f"{name}={getattr(self, name)} must be in [-2, 2]")
                for name in ("presence_penalty", "frequency_penalty")
            ),
            (
                self.logprobs_mode in LOGPROBS_MODES,
                f"{self.logprobs_mode=} must be one of {LOGPROBS_MODES}",
            ),
            (
                self.structured_output is None or not self.ignore_eos,
                "ignore_eos=True does not go with structured_output, which ends where its form is "
                "complete",
            ),
            (
                0 <= (self.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS,
                f"{self.prompt_logprobs=} must be None or in [0, {MAX_TOP_LOGPROBS}]",
            ),
            (
                self.truncate_prompt_tokens in (None, -1) or self.truncate_prompt_tokens > 0,
                f"{self.truncate_prompt_tokens=} must be None, -1 or at least 1",
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return every field as JSON can hold it, and the library that computes masks of a form."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if (form := self.structured_output) is not None:
            values["structured_output"] = dataclasses.asdict(form) | {"library": form.library}
        return {name: _lists(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Return what `as_dict` made the values of; fields that are left out have their defaults.

        Raises:
            ValueError: If a field is not known, its value is out of range, or masks would come of
                another library than they did.
        """
        return cls().with_fields(values)

    def with_fields(self, values: Mapping[str, Any]) -> "SamplingParams":
        """Return the parameters with other values of some fields, as JSON has them.

        Raises:
            ValueError: As `from_dict` says.
        """
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{unknown[0]}={values[unknown[0]]!r} is no sampling parameter")
        changes = {name: _of_json(getattr(self, name), value) for name, value in values.items()}
        if isinstance(biases := changes.get("logit_bias"), Mapping):
            changes["logit_bias"] = tuple((_token_id(k), _float(v)) for k, v in biases.items())
        elif biases is not None:
            changes["logit_bias"] = _biases(biases)
        if isinstance(form := changes.get("structured_output"), Mapping):
            changes["structured_output"] = StructuredOutput.from_dict(form)
        return dataclasses.replace(self, **changes)

    def seed_or(self, seed: int) -> int:
        """Return the seed; where there is none, the given one, or 0 if greedy."""
        if self.seed is not None:
            return self.seed
        return seed if self.temperature > 0 else 0

    def seeded(self, seed: int) -> "SamplingParams":
        """Return the parameters with the seed of `seed_or`."""
        if self.seed is not None:
            return self
        return dataclasses.replace(self, seed=self.seed_or(seed))

    def for_prompt(self, prompt_token_ids: Iterable[int]) -> "SamplingParams":
        """Return the parameters with the noise of a prompt, for any prompt: its seed, and "common".

        Behind the prompt and a part of its answer they draw the rest of that answer. Greedy
        parameters, and those with common noise, are returned as they are.
        """
        if self.temperature == 0 or self.noise == "common":
            return self
        seed = _seed_of_prompt(self.seed or 0, prompt_token_ids)
        return dataclasses.replace(self, seed=seed, noise="common")

    @property
    def is_filtered(self) -> bool:
        """Whether any token may be excluded before sampling; greedy never looks."""
        narrows = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.temperature > 0 and narrows

    @property
    def is_adjusted(self) -> bool:
        """Whether a step must look beyond the logits: at biases, masks, or the text so far."""
        return self.has_penalties or any(
            (
                self.logit_bias,
                self.allowed_token_ids,
                self.bad_words_token_ids,
                self.min_tokens,
                self.logprobs_mode == "processed",
                self.structured_output is not None,
            )
        )

    @property
    def has_penalties(self) -> bool:
        """Whether tokens of the text are penalised."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def num_sequences(self) -> int:
        """Sequences that are made."""
        return self.best_of or self.n

    def end_token_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end a sequence, of a model whose own are `eos_token_ids`."""
        eos = () if self.ignore_eos else eos_token_ids
        return frozenset((*eos, *self.stop_token_ids))


def last_tokens(
    token_ids: tuple[int, ...], most: int | None, *, max_tokens: int, max_len: int
) -> tuple[int, ...]:
    """Return the end of a prompt that `SamplingParams.truncate_prompt_tokens` takes.

    Args:
        token_ids: The prompt.
        most: Tokens of it; -1 is as many as leave room for `max_tokens`; None is all.
        max_tokens: Of the answer.
        max_len: Tokens of the context.

    Raises:
        ValueError: If more are wanted than the context has.
    """
    if most is None:
        return token_ids
    if most > max_len:
        raise ValueError(
            f"truncate_prompt_tokens={most} is more than the context has, {max_len}; lower it, or "
            "give -1 for as many as fit"
        )
    return token_ids[-(max(max_len - max_tokens, 1) if most == -1 else most) :]


NO_TEXT = SamplingParams()
TEXT_FIELDS = (
    "stop", "bad_words", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip
"""Fields of the sampling that are of text: an engine, which knows tokens, has them as `NO_TEXT`."""
