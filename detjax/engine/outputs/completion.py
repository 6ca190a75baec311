# SPDX-License-Identifier: Apache-2.0
"""A finished sequence: its tokens, and its text where a tokenizer is known."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from detjax.engine.outputs.request_output import (
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    RequestOutput,
    TokenEvent,
    TopLogprobs,
)
from detjax.engine.requests.sampling_params import SamplingParams


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedTokens:
    """The tokens of one sequence so far, with what is reported of each; all lists are as long.

    Every `Completion` of an engine, a record or a receipt is made here.

    Attributes:
        token_ids: In order.
        logprobs: Of each token, float32.
        top_logprobs: Of each token's position.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.float32] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def push(self, event: TokenEvent) -> None:
        """Append one token."""
        self.token_ids.append(event.token_id)
        self.logprobs.append(event.logprob)
        self.top_logprobs.append(event.top_logprobs)

    def extend(self, output: RequestOutput) -> None:
        """Append the new tokens of an output."""
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.top_logprobs.extend(output.top_logprobs)

    def completion(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_idx: int,
        sequence_idx: int,
        finish_reason: FinishReason,
        weight_version: int = 0,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Completion:
        """Return the completion that these tokens are, of a sequence that has ended."""
        return Completion(
            request_idx=request_idx,
            sequence_idx=sequence_idx,
            prompt_token_ids=tuple(prompt_token_ids),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs),
            finish_reason=finish_reason,
            weight_version=weight_version,
            prompt_logprobs=prompt_logprobs,
        )


def best(completions: Sequence[Completion], sampling: SamplingParams) -> list[Completion]:
    """Return the `n` best of a request's completions, best first; all, where there are no more.

    The sum of a completion's logprobs decides, as float64, first token first; of equal ones the
    lower sequence comes first.
    """
    if sampling.num_sequences == sampling.n:
        return list(completions)
    # ORDER: Python's floats, from the left: one rounded addition a token.
    return sorted(completions, key=lambda c: (-_sum(c.logprobs), c.sequence_idx))[: sampling.n]


def _sum(logprobs: Sequence[np.float32]) -> float:
    total = 0.0
    for logprob in logprobs:
        total += float(logprob)
    return total


TEXT_SHOWN, DIGEST_SHOWN = 60, 16
"""Characters of a text and of a digest in the `repr` of an output."""


def shortened(text: str) -> str:
    """Return the text, cut to `TEXT_SHOWN` characters, the last three of which then are dots."""
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN - 3]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """A finished sequence and its text.

    Attributes:
        completion: Token ids, float32 logprobs and the reason of its end, as the engine has them.
        text: Of the tokens, up to the first stop string; special tokens are not shown unless
            `sampling` says so.
        fingerprint: Of numerics, build and hardware: equal for every model. `detjax.proof` says
            which model it was.
        sampling: As it was used, `max_tokens` being no more than fitted.
        is_deterministic: Whether the answer is the canonical one.
        adapter: Hash of the adapter that answered; "" is the model alone.
    """

    completion: Completion
    text: str
    fingerprint: str
    sampling: SamplingParams
    is_deterministic: bool
    adapter: str = ""

    def __repr__(self) -> str:
        """One short line, for notebooks; `as_dict` has every field."""
        return (
            f"CompletionOutput(index={self.index}, text={shortened(self.text)!r}, "
            f"num_tokens={len(self.token_ids)}, finish_reason={self.finish_reason.value!r}, "
            f"digest={self.digest()[:DIGEST_SHOWN]!r})"
        )

    @property
    def index(self) -> int:
        """Which of the prompt's `n` sequences."""
        return self.completion.sequence_idx

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every generated token, those that ended it included."""
        return self.completion.token_ids

    @property
    def logprobs(self) -> tuple[np.float32, ...]:
        """Of each token, at temperature 1 and before any filter."""
        return self.completion.logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...]:
        """Of each token's position, as many as were asked for."""
        return self.completion.top_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.completion.finish_reason

    def digest(self) -> str:
        """Sha256 over the token ids (int32) and the logprobs (float32), little-endian."""
        return self.completion.digest()

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, losing no bit.

        A logprob is a float whose float32 is the logprob: round it, and its bits are back.
        """
        done = self.completion
        entry = {
            "index": done.request_idx,
            "sequence": done.sequence_idx,
            "prompt_token_ids": list(done.prompt_token_ids),
            "token_ids": list(done.token_ids),
            "text": self.text,
            "finish_reason": done.finish_reason.value,
            "sampling": self.sampling.as_dict(),
            "is_deterministic": self.is_deterministic,
            # ROUND: none; float32 to float64 is exact, and JSON's decimal names that float64.
            "logprobs": [float(logprob) for logprob in done.logprobs],
        }
        if self.adapter:
            entry["adapter"] = self.adapter
        if any(done.top_logprobs):
            entry["top_logprobs"] = [
                [[token_id, float(logprob)] for token_id, logprob in top]
                for top in done.top_logprobs
            ]
        if done.prompt_logprobs is not None:
            entry["prompt_logprobs"] = [
                [float(one.logprob), one.rank, [[i, float(p)] for i, p in one.top_logprobs]]
                for one in done.prompt_logprobs
            ]
        return {**entry, "digest": done.digest(), "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "CompletionOutput":
        """Return what `as_dict` made the entry of; other keys of it are not read.

        Raises:
            KeyError: If a key is missing.
            ValueError: If the digest is not that of the token ids and logprobs.
        """
        none = [[] for _ in entry["token_ids"]]
        tokens = CollectedTokens(
            token_ids=entry["token_ids"],
            logprobs=list(map(np.float32, entry["logprobs"])),
            top_logprobs=[
                tuple((token_id, np.float32(logprob)) for token_id, logprob in top)
                for top in entry.get("top_logprobs", none)
            ],
        )
        completion = tokens.completion(
            entry["prompt_token_ids"],
            request_idx=entry["index"],
            sequence_idx=entry["sequence"],
            finish_reason=FinishReason(entry["finish_reason"]),
            prompt_logprobs=_prompt_logprobs(entry.get("prompt_logprobs")),
        )
        if completion.digest() != entry["digest"]:
            raise ValueError(
                f"digest {entry['digest']!r} is not that of the token ids and logprobs beside it, "
                f"{completion.digest()}; the record was changed"
            )
        return cls(
            completion=completion,
            text=entry["text"],
            fingerprint=entry["fingerprint"],
            sampling=SamplingParams.from_dict(entry["sampling"]),
            is_deterministic=entry["is_deterministic"],
            adapter=entry.get("adapter", ""),
        )


def _prompt_logprobs(entry: Sequence[Any] | None) -> PromptLogprobs | None:
    """What `CompletionOutput.as_dict` made an entry of."""
    if entry is None:
        return None
    return tuple(
        PromptLogprob(np.float32(logprob), rank, tuple((i, np.float32(p)) for i, p in top))
        for logprob, rank, top in entry
    )
