# SPDX-License-Identifier: Apache-2.0
"""Requests of a server on one engine: who may ask, what an answer is made of, and when it ends."""

import asyncio
import collections
import contextlib
import dataclasses
import enum
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from detjax.models.tokenizer import Tokenizer
from detjax.serve.protocol import RefusedError
from detjax.serving.async_engine import AsyncEngine
from detjax.serving.engine import Engine
from detjax.serving.errors import EngineFullError, EngineStoppedError, SelfCheckError
from detjax.serving.metrics import EngineStats
from detjax.serving.request import Completion, FinishReason, SamplingParams, TokenEvent
from detjax.serving.text import TextStream


class ServiceState(enum.Enum):
    """What `/health` says."""

    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model and what is told of it.

    Attributes:
        name: That clients ask for.
        engine: Nothing else may step it.
        tokenizer: Of the model.
        vocab_size: Of the model.
        max_len: Most tokens of a prompt and its answer.
        mode: `invariant`, `dvr` or `fast`.
        fingerprint: Of everything that decides a bit; the same at every mesh, batch and mode.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    vocab_size: int
    max_len: int
    mode: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a server takes.

    Attributes:
        body_bytes: Of a request.
        requests_per_key: At once, of one API key; 0 sets no limit.
        request_s: Seconds an answer may take; 0 sets no limit.
    """

    body_bytes: int = 8 << 20
    requests_per_key: int = 0
    request_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is new of one sequence: final, never taken back.

    Attributes:
        sequence_idx: Which of the request's `n`.
        text: New text; often none.
        tokens: New tokens, each with the text that it released.
        finish_reason: None while it goes on.
        error: What went wrong where `finish_reason` is ERROR.
        completion: All of it, with the last piece.
    """

    sequence_idx: int
    text: str
    tokens: tuple[tuple[TokenEvent, str], ...]
    finish_reason: FinishReason | None
    error: str
    completion: Completion | None


class _Sequence:
    """One sequence while it is made. The engine's thread pushes; the stream takes what was told."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt_ids: Sequence[int]):
        self._stream = TextStream(tokenizer, stops, prompt_ids=prompt_ids)
        self._tokens: list[tuple[TokenEvent, str]] = []
        self._num_taken = 0

    def push(self, event: TokenEvent) -> bool:
        """Take a token; True if a stop string is complete."""
        delta = self._stream.push(event.token_id)
        self._tokens.append((event, delta.text))
        return delta.is_stopped

    def take(self, count: int) -> tuple[tuple[TokenEvent, str], ...]:
        """The next `count` tokens, which the engine has released."""
        begin, self._num_taken = self._num_taken, self._num_taken + count
        return tuple(self._tokens[begin : self._num_taken])

    def finish(self) -> str:
        """The text that was held back; nothing is pushed any more."""
        return self._stream.finish()

    def completion(
        self, prompt_ids: tuple[int, ...], sequence_idx: int, reason: FinishReason, version: int
    ) -> Completion:
        events = [event for event, _ in self._tokens]
        return Completion(
            request_idx=0,
            sequence_idx=sequence_idx,
            prompt_token_ids=prompt_ids,
            token_ids=tuple(event.token_id for event in events),
            logprobs=tuple(np.float32(event.logprob) for event in events),
            top_logprobs=tuple(event.top_logprobs for event in events),
            finish_reason=reason,
            weight_version=version,
        )


class Service:
    """Answers requests on one engine, and knows whether it may."""

    def __init__(self, model: ServedModel, limits: Limits):
        """Take over an engine."""
        self.model, self.limits = model, limits
        self.state = ServiceState.READY
        self.why_failed = ""
        self.num_open = 0
        self._engine = AsyncEngine(model.engine)
        self._of_key: collections.Counter[str] = collections.Counter()

    def stats(self) -> EngineStats:
        """What the engine has counted."""
        return self.model.engine.stats()

    @contextlib.contextmanager
    def admitted(self, key: str) -> Iterator[None]:
        """Hold a request's place.

        Raises:
            RefusedError: While the server drains or has failed, and beyond a key's limit.
        """
        if self.state is not ServiceState.READY:
            reason = f": {self.why_failed}" if self.why_failed else ""
            raise RefusedError(
                f"the server is {self.state.value}{reason}", status=503, code=self.state.value
            )
        most = self.limits.requests_per_key
        if most and self._of_key[key] >= most:
            raise RefusedError(
                f"this key has {most} requests open, as many as it may; try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        self._of_key[key] += 1
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self._of_key[key] -= 1
            if not self._of_key[key]:
                del self._of_key[key]

    @property
    def self_check_error(self) -> str:
        """Why the engine makes no deterministic answer any more; empty while it does."""
        return self.model.engine.self_check_error

    def check_determinism(self, asked: bool | None) -> bool:
        """Whether an answer will be canonical; refuse a promise that cannot be kept."""
        wanted = self.model.mode != "fast" if asked is None else asked
        if wanted and self.self_check_error:
            raise RefusedError(self.self_check_error, status=503, code="self_check_failed")
        if asked is None:
            return wanted
        if asked and self.model.mode == "fast":
            raise RefusedError(
                "is_deterministic=true needs a server in mode 'invariant' or 'dvr'; this one runs "
                "'fast', which makes no claim",
                field="is_deterministic",
            )
        return asked

    def check_prompt(self, token_ids: Sequence[int], max_tokens: int | None) -> int:
        """How many tokens the answer may have.

        Raises:
            RefusedError: If the prompt is empty or too long, with the numbers, or has unknown ids.
        """
        model = self.model
        if not token_ids:
            raise RefusedError("the prompt has no tokens; give some text", field="prompt")
        room = model.max_len - len(token_ids)
        wanted = max_tokens or max(room, 1)
        if wanted > room:
            raise RefusedError(
                f"the prompt has {len(token_ids)} tokens and the answer may have {wanted}, "
                f"together more than this server's {model.max_len}; shorten one of them",
                code="context_length_exceeded",
                field="prompt",
            )
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < model.vocab_size:
                raise RefusedError(
                    f"token id {token_id} is outside the vocabulary of {model.vocab_size}",
                    field="prompt",
                )
        return wanted

    async def stream(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        is_deterministic: bool,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Piece]:
        """Yield what is released of a request. A consumer that stops listening cancels it.

        Raises:
            RefusedError: If the engine cannot run it, is full, or has stopped; after
                `Limits.request_s`.
        """
        sequences = [
            _Sequence(self.model.tokenizer, sampling.stop, prompt_ids) for _ in range(sampling.n)
        ]
        outputs = self._engine.stream(
            prompt_ids,
            dataclasses.replace(sampling, stop=()),
            is_deterministic=is_deterministic,
            priority=priority,
            cache_salt=cache_salt,
            on_token=lambda event: sequences[event.sequence_idx].push(event),
        )
        try:
            async with asyncio.timeout(self.limits.request_s or None):
                async for output in outputs:
                    seq = sequences[output.sequence_idx]
                    tokens = seq.take(len(output.token_ids))
                    text, completion = "".join(text for _, text in tokens), None
                    if output.finish_reason is not None:
                        text += seq.finish()
                        completion = seq.completion(
                            prompt_ids,
                            output.sequence_idx,
                            output.finish_reason,
                            output.weight_version,
                        )
                    yield Piece(
                        sequence_idx=output.sequence_idx,
                        text=text,
                        tokens=tokens,
                        finish_reason=output.finish_reason,
                        error=output.error,
                        completion=completion,
                    )
        except EngineFullError as error:
            raise RefusedError(str(error), status=429, code="queue_full") from error
        except SelfCheckError as error:
            raise RefusedError(str(error), status=503, code="self_check_failed") from error
        except EngineStoppedError as error:
            self.state, self.why_failed = ServiceState.FAILED, str(error)
            raise RefusedError(str(error), status=500, code="engine_stopped") from error
        except TimeoutError as error:
            raise RefusedError(
                f"the answer took longer than {self.limits.request_s:g} s",
                status=504,
                code="timeout",
            ) from error
        except ValueError as error:
            raise RefusedError(str(error)) from error
        finally:
            await outputs.aclose()

    async def drain(self, most_s: float) -> bool:
        """Take nothing new, and wait for what is open; whether all of it ended in time."""
        if self.state is ServiceState.READY:
            self.state = ServiceState.DRAINING
        try:
            async with asyncio.timeout(most_s):
                while self.num_open:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True
