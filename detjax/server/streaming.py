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
from detjax.server.answers import Json, Usage, error_body
from detjax.server.options import ACCESS_LOG
from detjax.server.protocol import RefusedError
from detjax.server.questions import Asked, Reading
from detjax.server.reading import AnswerReader
from detjax.server.service import Piece, Service

LOG = logging.getLogger(ACCESS_LOG)

CLIENT_LEFT = 499
"""In the log, where a client did not wait for its answer; it is not sent to anybody."""

Pieces = AsyncGenerator[tuple[Asked, list[Piece]]]
"""What is new, a step at a time. Whoever stops listening cancels the request."""

Form = Callable[[Json], Json]

DONE = b"data: [DONE]\n\n"

_TEXT = msgspec.json.Encoder()


def as_it_is(answer: Json) -> Json:
    """The form of a completion."""
    return answer


class AbstractWriter(abc.ABC):
    """Writes one answer as server-sent events."""

    @abc.abstractmethod
    def of(self, pieces: list[Piece]) -> bytes:
        """The events of some pieces.

        Raises:
            RefusedError: If a sequence has failed.
        """

    @abc.abstractmethod
    def end(self) -> bytes:
        """The events after the last piece."""

    @abc.abstractmethod
    def error(self, error: RefusedError) -> bytes:
        """The end of an answer that failed within."""


async def respond(
    service: Service,
    request: Request,
    reading: Reading,
    *,
    form: Form = as_it_is,
    writer: Callable[[Asked], AbstractWriter] | None = None,
) -> Response:
    """Read and answer a request, in one piece or as a stream.

    Args:
        service: That answers.
        request: As it came.
        reading: Reads what it says.
        form: Makes the whole answer of a completion.
        writer: Makes its events; None is OpenAI's chunks of completions.

    Raises:
        RefusedError: If it cannot be answered: before a stream begins, not within.
        ClientDisconnect: If the client has left.
    """
    begin_s = time.perf_counter()
    pieces = pieces_of(service, request, reading)
    if not reading.fields.stream:
        return reply(form(await unless_left(request, whole(pieces))))
    # WHY: a request that cannot run is refused with its status, before the stream begins.
    asked, first = await unless_left(request, anext(pieces))
    return _EventStream(_events(request, (writer or _Chunks)(asked), first, pieces, begin_s))


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


async def pieces_of(service: Service, request: Request, reading: Reading) -> Pieces:
    """What a request says, with what is new of every prompt as it comes.

    It holds its place from its reading on, which waits for its turn. Whoever stops listening ends
    the reading as well.
    """
    try:
        with service.admitted(key_of(request)):
            async with service.turns.turn():
                asked = await reading.run()
                if service.limits.logs_prompts:
                    await log_prompts(service, request, asked)
                pieces = service.stream(
                    [question.token_ids for question in asked.questions],
                    asked.shape.sampling,
                    is_deterministic=asked.shape.is_deterministic,
                    priority=asked.fields.priority,
                    cache_salt=asked.fields.cache_salt,
                    is_whole=not asked.fields.stream,
                )
                async with contextlib.aclosing(pieces):
                    async for found in pieces:
                        yield asked, found
    except RefusedError as error:
        raise reading.fields.as_asked(error) from error


async def whole(pieces: Pieces) -> Json:
    """The answer in one piece."""
    asked: Asked | None = None
    usage: Usage | None = None
    parts: dict[int, dict[int, list[Piece]]] = {}
    async with contextlib.aclosing(pieces):
        async for said, found in pieces:
            asked, usage = said, usage or Usage(said.num_prompt_tokens)
            for piece in found:
                raise_failed(piece)
                usage.add(piece)
                of_prompt = parts.setdefault(piece.prompt_idx, {})
                of_prompt.setdefault(piece.sequence_idx, []).append(piece)
    assert asked is not None and usage is not None  # each sequence has a last piece
    sampling = asked.shape.sampling
    choices, card = [], asked.shape.card(is_chunk=False)
    for prompt, of_prompt in sorted(parts.items()):
        made = [done for _, found in sorted(of_prompt.items()) if (done := found[-1].completion)]
        echo = asked.questions[prompt].echo
        for done in best(made, sampling):
            if choices:  # WHY: a choice of many logprobs takes tens of milliseconds
                await asyncio.sleep(0)
            found = of_prompt[done.sequence_idx]
            choice = asked.shape.choice(len(choices), echo, found)
            # As vLLM has it: in each choice; of a conversation, beside them.
            (card if asked.shape.is_chat else choice).update(asked.shape.of_prompt(found[0]))
            choices.append(choice)
    return card | {"choices": choices, "usage": usage.as_dict()}


async def _events(
    request: Request, writer: AbstractWriter, first: list[Piece], pieces: Pieces, begin_s: float
) -> AsyncIterator[bytes]:
    """The answer as server-sent events; those of a step are one write."""
    status = 200
    try:
        async with contextlib.aclosing(pieces):
            yield writer.of(first)
            async for _, found in pieces:
                yield writer.of(found)
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


class _Chunks(AbstractWriter):
    """Writes the events of one answer. What all chunks begin with is encoded once."""

    def __init__(self, asked: Asked):
        """Nothing is written yet."""
        self._asked = asked
        self._head = b"data: " + msgspec.json.encode(asked.shape.card(is_chunk=True))[:-1]
        self._offsets: dict[int, int] = {}
        self._usage = Usage(asked.num_prompt_tokens)
        shape = asked.shape
        self._has_text_only = not (shape.num_top is not None or shape.has_token_ids or shape.form)
        self._readers: dict[int, AnswerReader] = collections.defaultdict(self._reader)
        self._num_calls: collections.Counter[int] = collections.Counter()

    def of(self, pieces: list[Piece]) -> bytes:
        """As `AbstractWriter` has it."""
        shape, n, events = self._asked.shape, self._asked.shape.sampling.n, []
        for piece in pieces:
            raise_failed(piece)
            self._usage.add(piece)
            index = piece.prompt_idx * n + piece.sequence_idx
            is_first = index not in self._offsets
            if self._has_text_only and not is_first and piece.completion is None:
                events.append(self._text_event(index, piece))
                continue
            if is_first:
                events += self._begin(index, piece)
            offset, said, num_calls = self._offsets[index], None, self._num_calls[index]
            if shape.form is not None:
                said = self._readers[index].push(piece.text)
                if piece.completion is not None:
                    said = said.then(self._readers[index].finish())
                self._num_calls[index] += len(said.calls)
            choice, head = (
                shape.chunk(
                    index, piece, offset, is_first=is_first, said=said, num_calls=num_calls
                ),
                self._head,
            )
            if of_prompt := shape.of_prompt(piece, is_first=is_first):
                if shape.is_chat:
                    head += b"," + msgspec.json.encode(of_prompt)[1:-1]
                else:
                    choice |= of_prompt
            events.append(self._event(choice, head))
            self._offsets[index] = offset + sum(len(own) for _, own in piece.tokens)
        return b"".join(events)

    def _reader(self) -> AnswerReader:
        assert self._asked.shape.form is not None
        return AnswerReader(self._asked.shape.form)

    def _text_event(self, index: int, piece: Piece) -> bytes:
        """What `Shape.chunk` makes of a piece in the midst that tells its text alone, sooner."""
        text = _TEXT.encode(piece.text)
        told = (
            b'"delta":{"content":%b}' % text if self._asked.shape.is_chat else b'"text":%b' % text
        )
        return (
            b'%b,"choices":[{"index":%d,"finish_reason":null,%b,"logprobs":null}]}\n\n'
            % (self._head, index, told)
        )  # fmt: skip

    def _begin(self, index: int, first: Piece) -> list[bytes]:
        """The event of an echoed prompt, if it is, and where the text goes on."""
        shape = self._asked.shape
        echo = shape.echo(self._asked.questions[first.prompt_idx].echo, first)
        self._offsets[index] = len(echo.text)
        if not echo.text:
            return []
        logprobs = shape.logprobs([], 0, echo) if echo.tokens else None
        choice = {"index": index, "text": echo.text, "logprobs": logprobs, "finish_reason": None}
        return [self._event(choice, self._head)]

    def end(self) -> bytes:
        """The end, with the count of tokens if it is wanted."""
        if not self._asked.has_usage:
            return DONE
        counts = msgspec.json.encode(self._usage.as_dict())
        return self._head + b',"choices":[],"usage":' + counts + b"}\n\n" + DONE

    def error(self, error: RefusedError) -> bytes:
        """An event of its own."""
        body = error_body(str(error), status=error.status, code=error.code, field=error.field)
        return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE

    def _event(self, choice: Json, head: bytes) -> bytes:
        return head + b',"choices":[' + msgspec.json.encode(choice) + b"]}\n\n"


def raise_failed(piece: Piece) -> None:
    """A sequence that failed fails its request, and no other."""
    if piece.finish_reason is FinishReason.ERROR:
        status, code = (400, "no_token") if piece.is_own_fault else (500, "request_failed")
        raise RefusedError(piece.error, status=status, code=code)


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


async def log_prompts(service: Service, request: Request, asked: Asked) -> None:
    """One line a prompt, with its text as JSON, so that it is one line."""
    for text in await service.texts.decode([one.token_ids for one in asked.questions]):
        LOG.info("%s prompt %s", id_of(request), msgspec.json.encode(text).decode())


def log(request: Request, status: int, begin_s: float) -> None:
    """One line a request; no text of anybody."""
    client = request.client.host if request.client else "-"
    LOG.info(
        "%s %s %s %d %.3f s %s",
        client, request.method, quote(request.scope["path"]), status, time.perf_counter() - begin_s,
        id_of(request), extra={"path": request.scope["path"]},
    )  # fmt: skip
