# SPDX-License-Identifier: Apache-2.0
"""Answers as they go out: in one piece, or as server-sent events while they are made."""

import abc
import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from urllib.parse import quote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from detjax.engine.outputs.completion import best
from detjax.engine.outputs.request_output import FinishReason
from detjax.server.answer_reader import AnswerReader
from detjax.server.answers import Json, Usage, error_body
from detjax.server.errors import RefusedError
from detjax.server.options import ACCESS_LOG
from detjax.server.output_deltas import OutputDelta
from detjax.server.request_reader import ParsedRequest, PreparedRequest
from detjax.server.service import Service

LOG = logging.getLogger(ACCESS_LOG)

CLIENT_LEFT = 499
"""In the log, where a client did not wait for its answer; it is not sent to anybody."""

OutputDeltas = AsyncGenerator[tuple[PreparedRequest, list[OutputDelta]]]
"""What is new, a step at a time. Whoever stops listening cancels the request."""

AnswerFormat = Callable[[Json], Json]
"""Makes the whole answer of a request of that of a completion."""

DONE = b"data: [DONE]\n\n"

_TEXT = msgspec.json.Encoder()


def as_it_is(answer: Json) -> Json:
    """A completion's own answer."""
    return answer


class AbstractEventWriter(abc.ABC):
    """Writes one answer as server-sent events."""

    @abc.abstractmethod
    def of(self, deltas: list[OutputDelta]) -> bytes:
        """The events of some deltas.

        Raises:
            RefusedError: If a sequence has failed.
        """

    @abc.abstractmethod
    def end(self) -> bytes:
        """The events after the last delta."""

    @abc.abstractmethod
    def error(self, error: RefusedError) -> bytes:
        """The end of an answer that failed within."""


async def respond(
    service: Service,
    request: Request,
    parsed: ParsedRequest,
    *,
    answer_format: AnswerFormat = as_it_is,
    writer: Callable[[PreparedRequest], AbstractEventWriter] | None = None,
) -> Response:
    """Read and answer a request, in one piece or as a stream.

    Args:
        service: That answers.
        request: As it came.
        parsed: What it says; its text is not read yet.
        answer_format: Makes the whole answer of a completion's.
        writer: Makes its events; None is OpenAI's chunks of completions.

    Raises:
        RefusedError: If it cannot be answered: before a stream begins, not within.
        ClientDisconnect: If the client has left.
    """
    begin_s = time.perf_counter()
    deltas = deltas_of(service, request, parsed)
    if not parsed.fields.stream:
        return reply(answer_format(await unless_left(request, whole(deltas))))
    # WHY: a request that cannot run is refused with its status, before the stream begins.
    prepared, first = await unless_left(request, anext(deltas))
    return _EventStream(_events(request, (writer or _Chunks)(prepared), first, deltas, begin_s))


class _EventStream(StreamingResponse):
    """Server-sent events, until the client leaves.

    WHY: starlette's own runs the stream in a task group, whose bookkeeping costs as much for every
    token as detjax does.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]):
        super().__init__(events, headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task, has_left = asyncio.current_task(), False
        assert task is not None

        async def watch() -> None:
            nonlocal has_left
            await self.listen_for_disconnect(receive)
            has_left = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await self.stream_response(send)
        except asyncio.CancelledError:
            # The client's leaving ends the stream alone; whoever else cancels means the task.
            if not has_left or task.uncancel():
                raise
        finally:
            watcher.cancel()


def reply(body: Json, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def deltas_of(service: Service, request: Request, parsed: ParsedRequest) -> OutputDeltas:
    """What a request says, with what is new of every prompt as it comes.

    It holds its place from its reading on, which waits for its turn. Whoever stops listening ends
    the reading as well.
    """
    try:
        with service.admitted(key_of(request)):
            async with service.turns.turn():
                prepared = await parsed.run()
                if service.limits.logs_prompts:
                    await log_prompts(service, request, prepared)
                deltas = service.stream(
                    [prompt.token_ids for prompt in prepared.engine_prompts],
                    prepared.shape.sampling,
                    is_deterministic=prepared.shape.is_deterministic,
                    priority=prepared.fields.priority,
                    cache_salt=prepared.fields.cache_salt,
                    adapter=prepared.shape.adapter_hash,
                    is_whole=not prepared.fields.stream,
                )
                async with contextlib.aclosing(deltas):
                    async for found in deltas:
                        yield prepared, found
    except RefusedError as error:
        raise parsed.fields.as_asked(error) from error


async def whole(deltas: OutputDeltas) -> Json:
    """The answer in one piece."""
    prepared: PreparedRequest | None = None
    usage: Usage | None = None
    parts: dict[int, dict[int, list[OutputDelta]]] = {}
    async with contextlib.aclosing(deltas):
        async for said, found in deltas:
            prepared, usage = said, usage or Usage(said.num_prompt_tokens, said.shape)
            for delta in found:
                raise_failed(delta)
                usage.add(delta)
                of_prompt = parts.setdefault(delta.prompt_idx, {})
                of_prompt.setdefault(delta.sequence_idx, []).append(delta)
    assert prepared is not None and usage is not None  # each sequence has a last delta
    sampling = prepared.shape.sampling
    choices, card = [], prepared.shape.card(is_chunk=False)
    for prompt, of_prompt in sorted(parts.items()):
        made = [done for _, found in sorted(of_prompt.items()) if (done := found[-1].completion)]
        echo = prepared.engine_prompts[prompt].echo
        for done in best(made, sampling):
            if choices:  # WHY: a choice of many logprobs takes tens of milliseconds
                await asyncio.sleep(0)
            found = of_prompt[done.sequence_idx]
            choice = prepared.shape.choice(len(choices), echo, found)
            # As vLLM has it: in each choice; of a conversation, beside them.
            (card if prepared.shape.is_chat else choice).update(prepared.shape.of_prompt(found[0]))
            choices.append(choice)
    return card | {"choices": choices, "usage": usage.as_dict()}


async def _events(
    request: Request,
    writer: AbstractEventWriter,
    first: list[OutputDelta],
    deltas: OutputDeltas,
    begin_s: float,
) -> AsyncIterator[bytes]:
    """The answer as server-sent events; those of a step are one write."""
    status = 200
    try:
        async with contextlib.aclosing(deltas):
            yield writer.of(first)
            async for _, found in deltas:
                if events := writer.of(found):
                    yield events
        yield writer.end()
    except RefusedError as error:
        status = error.status
        yield writer.error(error)
    except (asyncio.CancelledError, GeneratorExit):
        status = CLIENT_LEFT
        raise
    except Exception as error:  # told to the client, whose answer has begun
        status = 500
        logging.getLogger("detjax.server").exception("%s: its stream has failed", id_of(request))
        yield writer.error(
            RefusedError(f"the server has failed: {type(error).__name__}", status=500)
        )
    finally:
        log(request, status, begin_s)


class _Chunks(AbstractEventWriter):
    """Writes the events of one answer. What all chunks begin with is encoded once."""

    def __init__(self, prepared: PreparedRequest):
        """Nothing is written yet."""
        self._prepared = prepared
        self._head = b"data: " + msgspec.json.encode(prepared.shape.card(is_chunk=True))[:-1]
        self._offsets: dict[int, int] = {}
        shape = prepared.shape
        self._usage = Usage(prepared.num_prompt_tokens, shape)
        self._has_tokens = shape.num_top is not None or shape.has_token_ids
        self._has_text_only = not (self._has_tokens or shape.syntax)
        self._readers: dict[int, AnswerReader] = collections.defaultdict(self._reader)
        self._num_calls: collections.Counter[int] = collections.Counter()

    def of(self, deltas: list[OutputDelta]) -> bytes:
        """As `AbstractEventWriter` has it."""
        shape, n, events = self._prepared.shape, self._prepared.shape.sampling.n, []
        for delta in deltas:
            raise_failed(delta)
            self._usage.add(delta)
            index = delta.prompt_idx * n + delta.sequence_idx
            is_first, is_whole = index not in self._offsets, delta.completion is not None
            if self._has_text_only and not (is_first or is_whole):
                events += [self._text_event(index, delta)] if delta.text else []
                continue
            if is_first:
                events += self._begin(index, delta)
            offset, said, num_calls = self._offsets[index], None, self._num_calls[index]
            if shape.syntax is not None:
                said = self._readers[index].push(delta.text)
                if is_whole:
                    said = said.then(self._readers[index].finish())
                self._num_calls[index] += len(said.calls)
            if said is not None and not (any(said) or is_first or is_whole or self._has_tokens):
                continue  # nothing is to be told yet, as within a tag
            choice = shape.chunk(
                index, delta, offset, is_first=is_first, said=said, num_calls=num_calls
            )
            head = self._begun()
            if of_prompt := shape.of_prompt(delta, is_first=is_first):
                if shape.is_chat:
                    head += b"," + msgspec.json.encode(of_prompt)[1:-1]
                else:
                    choice |= of_prompt
            events.append(self._event(choice, head))
            self._offsets[index] = offset + sum(len(own) for _, own in delta.tokens)
        return b"".join(events)

    def _begun(self) -> bytes:
        """What the next event begins with."""
        if not self._prepared.counts_in_each:
            return self._head
        return self._head + b',"usage":' + msgspec.json.encode(self._usage.as_dict())

    def _reader(self) -> AnswerReader:
        assert self._prepared.shape.syntax is not None
        return AnswerReader(self._prepared.shape.syntax)

    def _text_event(self, index: int, delta: OutputDelta) -> bytes:
        """What `Shape.chunk` makes of a delta in the midst that tells its text alone, sooner."""
        text = _TEXT.encode(delta.text)
        is_chat = self._prepared.shape.is_chat
        told = b'"delta":{"content":%b}' % text if is_chat else b'"text":%b' % text
        return (
            b'%b,"choices":[{"index":%d,"finish_reason":null,%b,"logprobs":null}]}\n\n'
            % (self._begun(), index, told)
        )  # fmt: skip

    def _begin(self, index: int, first: OutputDelta) -> list[bytes]:
        """The event of an echoed prompt, if it is, and where the text goes on."""
        shape = self._prepared.shape
        echo = shape.echo(self._prepared.engine_prompts[first.prompt_idx].echo, first)
        self._offsets[index] = len(echo.text)
        if not any(echo):
            return []
        logprobs = shape.logprobs([], 0, echo) if echo.tokens else None
        choice = {"index": index, "text": echo.text, "logprobs": logprobs, "finish_reason": None}
        return [self._event(choice, self._begun())]

    def end(self) -> bytes:
        """The end, with the count of tokens if it is wanted."""
        if not self._prepared.has_usage:
            return DONE
        counts = msgspec.json.encode(self._usage.as_dict())
        return self._head + b',"choices":[],"usage":' + counts + b"}\n\n" + DONE

    def error(self, error: RefusedError) -> bytes:
        """An event of its own."""
        body = error_body(str(error), status=error.status, code=error.code, field=error.field)
        return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE

    def _event(self, choice: Json, head: bytes) -> bytes:
        return head + b',"choices":[' + msgspec.json.encode(choice) + b"]}\n\n"


def raise_failed(delta: OutputDelta) -> None:
    """A sequence that failed fails its request, and no other."""
    if delta.finish_reason is FinishReason.ERROR:
        status, code = (400, "no_token") if delta.is_own_fault else (500, "request_failed")
        raise RefusedError(delta.error, status=status, code=code)


async def unless_left[T](request: Request, wanted: Awaitable[T]) -> T:
    """What is wanted, unless the client leaves before: then it is cancelled.

    Raises:
        ClientDisconnect: If the client has left.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(wanted), asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def key_of(request: Request) -> str:
    """The API key that a request came with; empty if with none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def id_of(request: Request) -> str:
    """The id of a request: the client's `X-Request-Id`, else one of ours."""
    return request.state.request_id


async def log_prompts(service: Service, request: Request, prepared: PreparedRequest) -> None:
    """One line a prompt, with its text as JSON, so that it is one line."""
    for text in await service.texts.decode([one.token_ids for one in prepared.engine_prompts]):
        LOG.info("%s prompt %s", id_of(request), msgspec.json.encode(text).decode())


def log(request: Request, status: int, begin_s: float) -> None:
    """One line a request; no text of anybody."""
    client = request.client.host if request.client else "-"
    LOG.info(
        "%s %s %s %d %.3f s %s",
        client, request.method, quote(request.scope["path"]), status, time.perf_counter() - begin_s,
        id_of(request), extra={"path": request.scope["path"]},
    )  # fmt: skip
