# SPDX-License-Identifier: Apache-2.0
"""Requests of a server on one engine: who may ask, what an answer is made of, and when it ends."""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import functools
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detjax.engine.async_engine import AsyncEngine, StepsRequests
from detjax.engine.errors import (
    EngineFullError,
    EngineStoppedError,
    NoTokenError,
    PromptTooLongError,
    SelfCheckError,
)
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import CollectedTokens, Completion
from detjax.engine.outputs.request_output import (
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    TokenEvent,
    WindowCounts,
)
from detjax.engine.outputs.text import TextStream
from detjax.engine.requests.checks import RequestLimits
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import OnToken
from detjax.engine.requests.text_request import token_sampling
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.tokenizer import Tokenizer
from detjax.proof.identity import Identity
from detjax.proof.signing import SigningKey
from detjax.server.protocol import NO_DEFAULTS, RefusedError
from detjax.server.text_worker import Texts
from detjax.server.turns import Turns


class ServiceState(enum.Enum):
    """What `/health` says. In the last three, requests that come wait."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    SLEEPING = "sleeping"
    UPDATING = "updating"
    PAUSED = "paused"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model and what is told of it.

    Attributes:
        name: That clients ask for.
        engine: An `Engine` or a `ReplicatedEngine`; nothing else may step it.
        tokenizer: Of the model.
        vocab_size: Of the model.
        max_len: Most tokens of a prompt and its answer.
        mode: `invariant`, `dvr` or `fast`.
        fingerprint: Of numerics and build; the same for every model, mesh, batch and mode.
        identity: What model, numerics and build these are.
        end_token_ids: The model's own.
        weight_version: Of the weights in `identity`.
        identify: Gives the identity as it is now, which takes a while after the weights have
            changed; None where it never changes.
        signing_key: Of receipts; None signs none.
        default_sampling: Fields of `SamplingParams` that requests leave out.
    """

    name: str
    engine: StepsRequests
    tokenizer: Tokenizer
    vocab_size: int
    max_len: int
    mode: str
    fingerprint: str
    identity: Identity
    end_token_ids: tuple[int, ...]
    weight_version: int = 0
    identify: Callable[[], Identity] | None = None
    signing_key: SigningKey | None = None
    default_sampling: Mapping[str, Any] = NO_DEFAULTS

    @property
    def limits(self) -> RequestLimits:
        """What is allowed of a request."""
        return RequestLimits(
            vocab_size=self.vocab_size,
            eos_token_ids=self.end_token_ids,
            max_len=self.max_len,
            max_len_name="this server's context",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a server takes.

    Attributes:
        body_bytes: Of a request.
        body_s: Seconds that a body may take to arrive.
        requests_per_key: At once, of one API key; 0 sets no limit.
        request_s: Seconds an answer may take; 0 sets no limit.
        stream_interval: Tokens of a sequence in an event of a stream; the first goes at once.
        logs_prompts: The log has the text of prompts.
        max_held: Requests that may wait while the server is paused, sleeps or gets other weights.
    """

    body_bytes: int = 8 << 20
    body_s: float = 60.0
    requests_per_key: int = 0
    request_s: float = 0.0
    stream_interval: int = 1
    logs_prompts: bool = False
    max_held: int = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is new of one sequence: final, never taken back.

    Attributes:
        prompt_idx: Which of the request's prompts.
        sequence_idx: Which of the prompt's `n`.
        text: New text; often none.
        tokens: New tokens, each with the text that it adds itself (`TextDelta.own`).
        finish_reason: None while it goes on.
        error: What went wrong where `finish_reason` is ERROR.
        is_own_fault: It went wrong by what was asked.
        completion: All of its tokens, with the last piece.
        whole_text: All of its text, with the last piece.
        windows: Of drafts, so far.
        prompt_token_ids: The prompt.
        prompt_logprobs: Of the prompt, with the first piece, where they were asked for.
        num_cached: Tokens of the prompt that the prefix cache had.
    """

    prompt_idx: int
    sequence_idx: int
    text: str
    tokens: tuple[tuple[TokenEvent, str], ...]
    finish_reason: FinishReason | None
    error: str
    completion: Completion | None
    windows: WindowCounts
    whole_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    is_own_fault: bool = False
    num_cached: int = 0


class _Sequence:
    """One sequence while it is made. The engine's thread pushes; the stream takes what was told."""

    def __init__(self, model: ServedModel, sampling: SamplingParams, prompt_ids: Sequence[int]):
        self._stream = TextStream.of(
            sampling, model.tokenizer, prompt_ids=prompt_ids, eos_ids=model.end_token_ids
        )
        self._tokens: list[tuple[TokenEvent, str]] = []
        self._collected = CollectedTokens()
        self._released: list[str] = []
        self._num_taken = 0

    def push(self, event: TokenEvent) -> bool:
        """Take a token; True if a stop string is complete."""
        delta = self._stream.push(event.token_id)
        self._collected.push(event)
        self._tokens.append((event, delta.own))
        self._released.append(delta.text)
        return delta.is_stopped

    def take(self, count: int) -> tuple[tuple[tuple[TokenEvent, str], ...], str]:
        """The next `count` tokens, which the engine has released, and the text they release."""
        begin, self._num_taken = self._num_taken, self._num_taken + count
        text = "".join(self._released[begin : self._num_taken])
        return tuple(self._tokens[begin : self._num_taken]), text

    def take_rest(self) -> tuple[tuple[tuple[TokenEvent, str], ...], str]:
        """`take` of all that were not taken; nothing is pushed any more."""
        return self.take(len(self._tokens) - self._num_taken)

    def finish(self) -> str:
        """The text that was held back; nothing is pushed any more."""
        self._released.append(self._stream.finish())
        return self._released[-1]

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join(self._released)

    def completion(
        self, prompt_ids: tuple[int, ...], sequence_idx: int, reason: FinishReason, version: int
    ) -> Completion:
        return self._collected.completion(
            prompt_ids,
            request_idx=0,
            sequence_idx=sequence_idx,
            finish_reason=reason,
            weight_version=version,
        )


class _Inbox:
    """What an engine has told of some requests, taken by one task; on the event loop."""

    def __init__(self, most_s: float):
        """Nothing yet, and no waiting after `most_s` seconds; 0 sets no limit."""
        self._until_s = asyncio.get_running_loop().time() + most_s if most_s else math.inf
        self._items: list[tuple[int, RequestOutput | Exception]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, prompt_idx: int, item: RequestOutput | Exception) -> None:
        """Wake the task, once for all that a step tells."""
        self._items.append((prompt_idx, item))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, RequestOutput | Exception]]:
        """All that there is, at least one.

        Raises:
            TimeoutError: After the time of the request.
        """
        loop = asyncio.get_running_loop()
        if loop.time() > self._until_s:
            raise TimeoutError
        if not self._items:
            self._waiter = loop.create_future()
            if self._until_s == math.inf:
                await self._waiter
            else:
                # WHY: around each wait, as a timeout belongs to a task, and another reads the rest.
                async with asyncio.timeout_at(self._until_s):
                    await self._waiter
        items, self._items = self._items, []
        return items


class _ScoredFirst:
    """Puts a prompt's logprobs to the first piece of each sequence, and to its completion.

    The engine tells them with sequence 0; pieces of others that come before wait for them.
    """

    def __init__(self, *, is_wanted: bool):
        self._is_wanted = is_wanted
        self._waiting: list[Piece] = []
        self._scores: PromptLogprobs | None = None
        self._begun: set[int] = set()

    def add(self, piece: Piece, scores: PromptLogprobs | None) -> list[Piece]:
        """Take a piece; return what can be told now."""
        if not self._is_wanted:
            return [piece]
        self._scores = self._scores if scores is None else scores
        self._waiting.append(piece)
        if self._scores is None and piece.finish_reason is not FinishReason.ERROR:
            return []
        told, self._waiting = self._waiting, []
        return [self._scored(one) for one in told]

    def _scored(self, piece: Piece) -> Piece:
        first = None if piece.sequence_idx in self._begun else self._scores
        self._begun.add(piece.sequence_idx)
        done = piece.completion
        if done is not None:
            done = dataclasses.replace(done, prompt_logprobs=self._scores)
        return dataclasses.replace(piece, prompt_logprobs=first, completion=done)


class Service:
    """Answers requests on one engine, and knows whether it may."""

    def __init__(self, model: ServedModel | None, limits: Limits):
        """Take over an engine; None: `open` brings it later."""
        self.limits = limits
        self.turns = Turns(max_held=limits.max_held, most_s=limits.request_s)
        self._state, self._state_begin_s = ServiceState.STARTING, time.monotonic()
        self.why_failed = ""
        self.opened_at_s = 0  # in Unix time
        self.num_open = 0
        self._of_key: collections.Counter[str] = collections.Counter()
        self._inboxes: set[_Inbox] = set()
        self._model: ServedModel | None = None
        self._texts: Texts | None = None
        if model is not None:
            self.open(model)

    @property
    def state(self) -> ServiceState:
        """What `/health` says."""
        hold = self.turns.hold if self.takes_requests else None
        return self._state if hold is None else ServiceState(hold.value)

    @state.setter
    def state(self, state: ServiceState) -> None:
        if state is not self._state:
            self._state, self._state_begin_s = state, time.monotonic()
            self.turns.close(None if self.takes_requests else self.not_ready())

    @property
    def takes_requests(self) -> bool:
        """Whether requests are let in, to be answered or to wait."""
        return self._state is ServiceState.READY

    @property
    def state_s(self) -> float:
        """Seconds in this state."""
        begin_s = self._state_begin_s
        if self.takes_requests and self.turns.hold is not None:
            begin_s = self.turns.hold_begin_s
        return time.monotonic() - begin_s

    def open(self, model: ServedModel) -> None:
        """Take over an engine, and requests from now on."""
        if self._texts is not None:
            self._texts.close()
        # WHY: its errors go to clients, who know the model by this name, not by its folder.
        tokenizer = dataclasses.replace(model.tokenizer, source=Path(model.name))
        model = dataclasses.replace(model, tokenizer=tokenizer)
        self._model, self._engine = model, AsyncEngine(model.engine)
        self.opened_at_s = int(time.time())
        self._texts = Texts(
            model.tokenizer, vocab_size=model.vocab_size, eos_token_ids=model.end_token_ids
        )
        self.state = ServiceState.READY
        self._texts.in_background(functools.partial(_read_grammars, model.engine))
        self._texts.in_background(model.tokenizer.make_ready)

    @property
    def model(self) -> ServedModel:
        """What is served.

        Raises:
            RefusedError: While the server starts.
        """
        if self._model is None:
            raise self.not_ready()
        return self._model

    @property
    def texts(self) -> Texts:
        """What turns text to tokens and back.

        Raises:
            RefusedError: While the server starts.
        """
        if self._texts is None:
            raise self.not_ready()
        return self._texts

    def not_ready(self) -> RefusedError:
        """Why requests are not let in."""
        reason = f": {self.why_failed}" if self.why_failed else ""
        return RefusedError(
            f"the server is {self.state.value}{reason}", status=503, code=self.state.value
        )

    def stats(self) -> EngineStats:
        """What the engine has counted."""
        return self.model.engine.stats()

    @contextlib.contextmanager
    def admitted(self, key: str) -> Iterator[None]:
        """Hold a request's place.

        Raises:
            RefusedError: Unless the server is ready, and beyond a key's limit.
        """
        if not self.takes_requests:
            raise self.not_ready()
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
        limits = self.model.limits
        room = limits.max_len - len(token_ids)
        wanted = max(room, 1) if max_tokens is None else max_tokens
        try:
            limits.check_prompt(token_ids, "the prompt", num_wanted=wanted)
        except PromptTooLongError as error:
            raise RefusedError(
                str(error), code="context_length_exceeded", field="prompt"
            ) from error
        except ValueError as error:
            raise RefusedError(str(error), field="prompt") from error
        return wanted

    async def stream(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        *,
        is_deterministic: bool,
        priority: int = 0,
        cache_salt: str = "",
        is_whole: bool = False,
    ) -> AsyncGenerator[list[Piece]]:
        """Yield what is released of some prompts, all of a step at once.

        With `is_whole` a sequence comes in one piece at its end, and its prompt's logprobs before.
        A consumer that stops listening cancels all of them.

        Raises:
            RefusedError: If the engine cannot run one, is full, or has stopped; after
                `Limits.request_s`; when `drain` gives up.
        """
        model, n = self.model, sampling.num_sequences
        of_tokens = self.tokens_of(sampling)
        sequences: list[list[_Sequence]] = []
        inbox, num_left = _Inbox(self.limits.request_s), [n] * len(prompts)
        is_scored = sampling.prompt_logprobs is not None
        scored = [_ScoredFirst(is_wanted=is_scored) for _ in prompts]
        self._inboxes.add(inbox)
        opened: list[int] = []
        try:
            if self.turns.is_aborting:
                raise _aborted()
            await self._compile(sampling, is_deterministic=is_deterministic)
            for i, ids in enumerate(prompts):
                if i:  # WHY: a thousand prompts of a thousand sequences take seconds
                    await asyncio.sleep(0)
                sequences.append([_Sequence(model, sampling, ids) for _ in range(n)])
                request_id = self._engine.open(
                    ids,
                    of_tokens,
                    is_deterministic=is_deterministic,
                    priority=priority,
                    cache_salt=cache_salt,
                    on_token=_listener(sequences[i]),
                    sink=functools.partial(inbox.put, i),
                    stream_interval=0 if is_whole else self.limits.stream_interval,
                )
                opened.append(request_id)
            while any(num_left):
                pieces = []
                for i, output in await inbox.take():
                    if isinstance(output, Exception):
                        raise output
                    num_left[i] -= output.finish_reason is not None
                    seq = sequences[i][output.sequence_idx]
                    piece = _piece(seq, output, i, prompts[i])
                    pieces += scored[i].add(piece, output.prompt_logprobs)
                if pieces:
                    yield pieces
        except Exception as error:
            if (refused := self._refusal(error)) is None:
                raise
            raise refused from error
        finally:
            self._inboxes.discard(inbox)
            for i, request_id in enumerate(opened):
                self._engine.close(request_id, has_ended=not num_left[i])

    def tokens_of(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling as the engine can run it.

        Raises:
            RefusedError: If a bad word has too many tokens.
        """
        try:
            return token_sampling(sampling, self.model.tokenizer)
        except ValueError as error:
            raise RefusedError(str(error), field="bad_words") from error

    def check_queue(
        self, num_prompts: int, sampling: SamplingParams, *, is_deterministic: bool
    ) -> None:
        """Refuse a request whose sequences the queue has no room for, before any is made.

        The sampling is checked as well, but for its form.

        Raises:
            RefusedError: If it is.
        """
        of_tokens = dataclasses.replace(self.tokens_of(sampling), structured_output=None)
        one = Request(prompt_token_ids=(0,), sampling=of_tokens, is_deterministic=is_deterministic)
        try:
            num_ahead = (num_prompts - 1) * sampling.num_sequences
            self.model.engine.check_request(one, num_ahead=num_ahead)
        except Exception as error:
            if (refused := self._refusal(error)) is None:
                raise
            raise refused from error

    async def _compile(self, sampling: SamplingParams, *, is_deterministic: bool) -> None:
        """Compile the form of a request in a thread, once it is judged: `open` finds it there."""
        if (form := sampling.structured_output) is None:
            return
        try:
            await self.texts.judge(form)
        except RefusedError as error:
            error.field = error.field or "structured_outputs"
            raise
        plain = SamplingParams(max_tokens=1, structured_output=form)
        one = Request(prompt_token_ids=(0,), sampling=plain, is_deterministic=is_deterministic)
        await self.texts.in_thread(self.model.engine.check_request, one)

    def _refusal(self, error: Exception) -> RefusedError | None:
        """What the client is told of an error; None of a fault of ours."""
        match error:
            case RefusedError():
                return error
            case EngineFullError():
                return RefusedError(str(error), status=429, code="queue_full")
            case SelfCheckError():
                return RefusedError(str(error), status=503, code="self_check_failed")
            case EngineStoppedError():
                self.why_failed = _less_folders(str(error))
                self.state = ServiceState.FAILED
                return RefusedError(self.why_failed, status=500, code="engine_stopped")
            case TimeoutError():
                return RefusedError(
                    f"the answer took longer than {self.limits.request_s:g} s",
                    status=504,
                    code="timeout",
                )
            case ValueError():
                is_form = str(error).startswith("structured_output")
                return RefusedError(str(error), field="structured_outputs" if is_form else "")
        return None

    def fail(self, reason: str) -> None:
        """End every stream with an error, whatever the engine waits for, and take no more."""
        self.why_failed = reason
        self.state = ServiceState.FAILED
        self._engine.fail(EngineStoppedError(reason))

    def abort(self) -> None:
        """End every open answer with an error, until `turns.is_aborting` is taken back."""
        self.turns.is_aborting = True
        for inbox in tuple(self._inboxes):
            inbox.put(0, _aborted())

    async def change(self, change: Callable[[], None]) -> None:
        """Change the engine, which has no request.

        Raises:
            RefusedError: If the engine has stopped.
            Exception: What `change` raises.
        """
        try:
            await self._engine.change(change)
        except EngineStoppedError as error:
            raise self._refusal(error) or error from error

    async def identify(self) -> None:
        """Take note of the weights that compute now."""
        model = self.model
        version = model.engine.weight_version
        if model.identify is None or version == model.weight_version:
            return
        identity = await asyncio.to_thread(model.identify)
        self._model = dataclasses.replace(model, identity=identity, weight_version=version)

    async def drain(self, most_s: float) -> bool:
        """Take nothing new, and wait for what is open; whether all of it ended in time.

        What did not is told so: its client gets an error, and its pages are free.
        """
        if self.takes_requests:
            self.state = ServiceState.DRAINING
        has_ended = await self._is_idle_within(most_s)
        if self._texts is not None:
            self._texts.close()
        if has_ended:
            return True
        error = RefusedError(
            "the server stops before the answer ended", status=503, code="draining"
        )
        for inbox in tuple(self._inboxes):
            inbox.put(0, error)
        await self._is_idle_within(1.0)
        return False

    async def _is_idle_within(self, most_s: float) -> bool:
        try:
            async with asyncio.timeout(most_s):
                while self.num_open:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True


def _read_grammars(engine: StepsRequests) -> None:
    """Let an engine read the tokenizer for forms before anybody asks for one.

    WHY: llguidance holds Python's lock for half a second with a vocabulary of 128,000.
    """
    form = StructuredOutput(kind="regex", spec="a")
    sampling = SamplingParams(max_tokens=1, structured_output=form)
    one = Request(prompt_token_ids=(0,), sampling=sampling, is_deterministic=False)
    with contextlib.suppress(ValueError, RuntimeError):  # told to whoever asks for a form
        engine.check_request(one)


def _aborted() -> RefusedError:
    return RefusedError(
        "the answer was aborted, as the server is paused, sleeps or gets other weights; ask again",
        status=503,
        code="aborted",
    )


def _less_folders(text: str) -> str:
    """The text without the folders of this machine: of a path its last name."""
    return re.sub(r"(?<![\w/:])/(?:[\w.+-]+/)+(?=[\w.+-])", "", text)


def _listener(sequences: Sequence[_Sequence]) -> OnToken:
    """Hand each token to its sequence, in the engine's thread."""
    return lambda event: sequences[event.sequence_idx].push(event)


def _piece(
    seq: _Sequence, output: RequestOutput, prompt_idx: int, prompt_ids: tuple[int, ...]
) -> Piece:
    has_ended = output.finish_reason is not None
    tokens, text = seq.take_rest() if has_ended else seq.take(len(output.token_ids))
    completion = None
    if output.finish_reason is not None:
        text += seq.finish()
        completion = seq.completion(
            prompt_ids, output.sequence_idx, output.finish_reason, output.weight_version
        )
    return Piece(
        prompt_idx=prompt_idx,
        sequence_idx=output.sequence_idx,
        text=text,
        tokens=tokens,
        finish_reason=output.finish_reason,
        error=output.error,
        completion=completion,
        whole_text="" if completion is None else seq.text,
        windows=output.windows,
        prompt_token_ids=prompt_ids,
        is_own_fault=isinstance(output.exception, NoTokenError),
        num_cached=output.num_cached_tokens,
    )
