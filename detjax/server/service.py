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
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path

from detjax.engine.async_engine import AsyncEngine, StepsRequests
from detjax.engine.errors import (
    EngineFullError,
    EngineStoppedError,
    PromptTooLongError,
    SelfCheckError,
)
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.request_output import (
    RequestOutput,
)
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.text_request import token_sampling
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.server.errors import RefusedError
from detjax.server.output_deltas import (
    OutputDelta,
    PromptLogprobsFirst,
    StreamedSequence,
    delta_of,
    listener_of,
)
from detjax.server.served_model import Limits, ServedModel
from detjax.server.text_worker import TextPool
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
        self._texts: TextPool | None = None
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
        self._texts = TextPool(
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
    def texts(self) -> TextPool:
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

    def check_prompt(
        self, token_ids: Sequence[int], max_tokens: int | None, *, place: str = ""
    ) -> int:
        """How many tokens the answer may have.

        Args:
            token_ids: Of the prompt.
            max_tokens: Of the answer; None is as many as fit.
            place: Of the prompt in the request, if it is one of several.

        Raises:
            RefusedError: If the prompt is empty or too long, with the numbers, or has unknown ids.
        """
        limits = self.model.limits
        room = limits.max_len - len(token_ids)
        wanted = max(room, 1) if max_tokens is None else max_tokens
        field = place or "prompt"
        try:
            limits.check_prompt(token_ids, place or "the prompt", num_wanted=wanted)
        except PromptTooLongError as error:
            raise RefusedError(str(error), code="context_length_exceeded", field=field) from error
        except ValueError as error:
            raise RefusedError(str(error), field=field) from error
        return wanted

    async def stream(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        *,
        is_deterministic: bool,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        is_whole: bool = False,
    ) -> AsyncGenerator[list[OutputDelta]]:
        """Yield what is released of some prompts, all of a step at once.

        With `is_whole` a sequence comes in one piece at its end, and its prompt's logprobs before.
        A consumer that stops listening cancels all of them.

        Raises:
            RefusedError: If the engine cannot run one, is full, or has stopped; after
                `Limits.request_s`; when `drain` gives up.
        """
        model, n = self.model, sampling.num_sequences
        of_tokens = self.tokens_of(sampling)
        sequences: list[list[StreamedSequence]] = []
        inbox, num_left = _Inbox(self.limits.request_s), [n] * len(prompts)
        is_scored = sampling.prompt_logprobs is not None
        scored = [PromptLogprobsFirst(is_wanted=is_scored) for _ in prompts]
        self._inboxes.add(inbox)
        opened: list[int] = []
        try:
            if self.turns.is_aborting:
                raise _aborted()
            await self._compile(sampling, is_deterministic=is_deterministic)
            for i, ids in enumerate(prompts):
                if i:  # WHY: a thousand prompts of a thousand sequences take seconds
                    await asyncio.sleep(0)
                sequences.append([StreamedSequence(model, sampling, ids) for _ in range(n)])
                request_id = self._engine.open(
                    ids,
                    of_tokens,
                    is_deterministic=is_deterministic,
                    priority=priority,
                    cache_salt=cache_salt,
                    adapter=adapter,
                    on_token=listener_of(sequences[i]),
                    sink=functools.partial(inbox.put, i),
                    stream_interval=0 if is_whole else self.limits.stream_interval,
                )
                opened.append(request_id)
            while any(num_left):
                deltas = []
                for i, output in await inbox.take():
                    if isinstance(output, Exception):
                        raise output
                    num_left[i] -= output.finish_reason is not None
                    seq = sequences[i][output.sequence_idx]
                    delta = delta_of(seq, output, i, prompts[i])
                    deltas += scored[i].add(delta, output.prompt_logprobs)
                if deltas:
                    yield deltas
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
        except EngineFullError as error:
            count = num_prompts * sampling.num_sequences
            if count <= error.max_waiting:
                raise RefusedError(str(error), status=429, code="queue_full") from error
            # WHY: clients ask again after a 429, and this would be refused at any time.
            raise RefusedError(
                f"the request is for {count} sequences at once, more than may wait here "
                f"(max_waiting={error.max_waiting}); ask for fewer in each request",
                field="prompt" if num_prompts > 1 else "n",
            ) from error
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

    async def drain(self, most_s: float) -> int:
        """Take nothing new, and wait for what is open; return how many did not end in time.

        What did not is told so: its client gets an error, and its pages are free.
        """
        if self.takes_requests:
            self.state = ServiceState.DRAINING
        has_ended = await self._is_idle_within(most_s)
        num_given_up = self.num_open
        if self._texts is not None:
            self._texts.close()
        if has_ended:
            return 0
        error = RefusedError(
            "the server stops before the answer ended", status=503, code="draining"
        )
        for inbox in tuple(self._inboxes):
            inbox.put(0, error)
        await self._is_idle_within(1.0)
        return num_given_up

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
