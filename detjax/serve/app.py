# SPDX-License-Identifier: Apache-2.0
"""The routes: a Starlette application over one `Service`."""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import detjax
from detjax.serve import metrics
from detjax.serve.answers import Json, Shape, error_body, usage
from detjax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RefusedError,
    SamplingFields,
    TokenizeRequest,
    parse,
    sampling_params,
)
from detjax.serve.service import Piece, Service, ServiceState
from detjax.serving.request import FinishReason

LOG = logging.getLogger("detjax.serve")
ACCESS_LOG = logging.getLogger("detjax.serve.access")
MAX_PROMPTS = 1024
"""Prompts of one request."""

CLIENT_LEFT = 499
"""In the log, where a client did not wait for its answer; it is not sent to anybody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One prompt of a request, ready for the engine, and the text that an answer begins with."""

    token_ids: tuple[int, ...]
    echo: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request, ready for the engine."""

    questions: Sequence[Question]
    shape: Shape
    fields: SamplingFields
    has_usage: bool


Pieces = AsyncGenerator[tuple[int, Piece]]
"""(which prompt, what is new of it)."""


def make_app(service: Service, *, api_keys: Sequence[str] = ()) -> Starlette:
    """The application. With `api_keys` every route but `/health` and `/version` asks for one."""
    routes = _Routes(service, api_keys)
    table: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...] = (
        ("GET", "/health", routes.health),
        ("GET", "/version", routes.version),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/v1/models", routes.models),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("POST", "/v1/completions", routes.completions),
        ("POST", "/v1/chat/completions", routes.chat),
    )
    return Starlette(
        routes=[Route(path, routes.guarded(run), methods=[verb]) for verb, path, run in table],
        exception_handlers={HTTPException: _http_error},
    )


def reply(body: Json, status: int = 200, **headers: str) -> Response:
    """A JSON answer."""
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def refusal(error: RefusedError) -> Response:
    """An error as an answer; where it helps, when to ask again."""
    body = error_body(str(error), status=error.status, code=error.code, field=error.field)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return Response(
        msgspec.json.encode(body), error.status, headers=headers, media_type="application/json"
    )


def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this verb."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return reply(
        error_body(message, status=error.status_code, code="", field=""), error.status_code
    )


class _Routes:
    """What each route does."""

    def __init__(self, service: Service, api_keys: Sequence[str]):
        self._service, self._keys = service, [key.encode() for key in api_keys]

    def guarded(
        self, run: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route with its key checked, its refusals told, and a line in the log."""

        async def guarded_route(request: Request) -> Response:
            begin_s = time.perf_counter()
            try:
                self._check_key(request)
                response = await run(request)
            except RefusedError as error:
                response = refusal(error)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_LEFT)
            except Exception:
                LOG.exception("%s %s failed", request.method, request.url.path)
                message = "this is a fault of detjax; the server's log has the rest"
                response = reply(error_body(message, status=500, code="", field=""), 500)
            if not isinstance(response, StreamingResponse):
                _log(request, response.status_code, begin_s)
            return response

        return guarded_route

    def _check_key(self, request: Request) -> None:
        if not self._keys or request.url.path in ("/health", "/version"):
            return
        given = _key_of(request).encode()
        if not any([hmac.compare_digest(given, key) for key in self._keys]):
            raise RefusedError(
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    # ----------------------------------------------------------------------------- about the server

    async def health(self, request: Request) -> Response:
        """The state; 200 only where requests are taken."""
        service = self._service
        body = {"status": service.state.value}
        if service.why_failed:
            body["reason"] = service.why_failed
        if service.self_check_error:
            body |= {"status": "self_check_failed", "reason": service.self_check_error}
        is_well = service.state is ServiceState.READY and not service.self_check_error
        return reply(body, 200 if is_well else 503)

    async def version(self, request: Request) -> Response:
        """Which detjax, and the fingerprint of what decides a bit."""
        model = self._service.model
        return reply({"version": detjax.__version__, "system_fingerprint": model.fingerprint})

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        return Response(metrics.render(self._service), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """The one model."""
        model = self._service.model
        card = {
            "id": model.name,
            "object": "model",
            "owned_by": "detjax",
            "created": 0,
            "max_model_len": model.max_len,
        }
        return reply({"object": "list", "data": [card]})

    # --------------------------------------------------------------------------------------- tokens

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text or a conversation, as a completion of it would begin."""
        asked = parse(await self._body(request), TokenizeRequest)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RefusedError("give either prompt or messages", field="prompt")
        if asked.messages is not None:
            ids = await self._template(asked.messages, {})
        else:
            ids = await self._encode(asked.prompt or "")
        tokenizer = self._service.model.tokenizer
        found: Json = {
            "count": len(ids),
            "max_model_len": self._service.model.max_len,
            "tokens": list(ids),
        }
        if asked.return_token_strs:
            found["token_strs"] = [tokenizer.backend.id_to_token(i) for i in ids]
        return reply(found)

    async def detokenize(self, request: Request) -> Response:
        """The text of some ids."""
        asked = parse(await self._body(request), DetokenizeRequest)
        self._check_model(asked.model)
        vocab_size = self._service.model.vocab_size
        for token_id in asked.tokens:
            if not 0 <= token_id < vocab_size:
                raise RefusedError(
                    f"token id {token_id} is outside the vocabulary of {vocab_size}",
                    field="tokens",
                )
        return reply({"prompt": self._service.model.tokenizer.decode(asked.tokens)})

    # -------------------------------------------------------------------------------------- answers

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = parse(await self._body(request), CompletionRequest)
        self._check_model(asked.model)
        asked.check()
        prompts = asked.prompts()
        if len(prompts) > MAX_PROMPTS:
            raise RefusedError(
                f"prompt has {len(prompts)} prompts, more than {MAX_PROMPTS}", field="prompt"
            )
        questions = []
        for prompt in prompts:
            ids = await self._encode(prompt) if isinstance(prompt, str) else tuple(prompt)
            self._service.check_prompt(ids, asked.max_tokens)
            echo = ""
            if asked.echo:
                is_text = isinstance(prompt, str)
                echo = prompt if is_text else self._service.model.tokenizer.decode(ids)
            questions.append(Question(token_ids=ids, echo=echo))
        shape = self._shape(
            asked, max_tokens=asked.max_tokens, num_top=asked.logprobs, is_chat=False
        )
        return await self._answer(request, self._asked(asked, questions, shape))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = parse(await self._body(request), ChatRequest)
        self._check_model(asked.model)
        asked.check()
        ids = await self._template(asked.messages, asked.variables())
        wanted = self._service.check_prompt(ids, asked.max_tokens or asked.max_completion_tokens)
        num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        shape = self._shape(asked, max_tokens=wanted, num_top=num_top, is_chat=True)
        return await self._answer(request, self._asked(asked, [Question(token_ids=ids)], shape))

    def _shape(
        self, asked: SamplingFields, *, max_tokens: int, num_top: int | None, is_chat: bool
    ) -> Shape:
        model = self._service.model
        return Shape(
            tokenizer=model.tokenizer,
            model=model.name,
            fingerprint=model.fingerprint,
            is_chat=is_chat,
            sampling=sampling_params(asked, max_tokens=max_tokens, num_top=num_top or 0),
            is_deterministic=self._service.check_determinism(asked.is_deterministic),
            num_top=num_top,
            has_token_ids=asked.return_token_ids,
            has_logprob_bytes=asked.return_logprob_bytes,
        )

    def _asked(self, fields: SamplingFields, questions: Sequence[Question], shape: Shape) -> Asked:
        has_usage = fields.stream_options is not None and fields.stream_options.include_usage
        return Asked(questions=questions, shape=shape, fields=fields, has_usage=has_usage)

    async def _answer(self, request: Request, asked: Asked) -> Response:
        if not asked.fields.stream:
            return reply(await _unless_left(request, self._whole(request, asked)))
        begin_s = time.perf_counter()
        pieces = self._pieces(request, asked)
        # WHY: a request that cannot run is refused with its status, before the stream begins.
        first = await _unless_left(request, anext(pieces))
        events = self._events(request, asked, first, pieces, begin_s)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def _pieces(self, request: Request, asked: Asked) -> Pieces:
        """What is new of every prompt, as it comes. Whoever stops listening cancels all."""
        queue: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

        async def follow(index: int, question: Question) -> None:
            pieces = self._service.stream(
                question.token_ids,
                asked.shape.sampling,
                is_deterministic=asked.shape.is_deterministic,
                priority=asked.fields.priority,
                cache_salt=asked.fields.cache_salt,
            )
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        queue.put_nowait((index, piece))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        with self._service.admitted(_key_of(request)):
            tasks = [asyncio.create_task(follow(i, q)) for i, q in enumerate(asked.questions)]
            try:
                num_left = len(tasks)
                while num_left:
                    found = await queue.get()
                    if isinstance(found, Exception):
                        raise found
                    if found is None:
                        num_left -= 1
                    else:
                        yield found
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, request: Request, asked: Asked) -> Json:
        """The answer in one piece."""
        n = asked.shape.sampling.n
        parts: dict[int, list[Piece]] = {}
        pieces = self._pieces(request, asked)
        async with contextlib.aclosing(pieces):
            async for prompt, piece in pieces:
                _raise_failed(piece)
                parts.setdefault(prompt * n + piece.sequence_idx, []).append(piece)
        choices, num_tokens = [], 0
        for index, found in sorted(parts.items()):
            done = found[-1].completion
            assert done is not None
            tokens = [token for piece in found for token in piece.tokens]
            text = asked.questions[index // n].echo + "".join(piece.text for piece in found)
            choices.append(asked.shape.choice(index, text, tokens, done))
            num_tokens += len(done.token_ids)
        num_prompt = sum(len(question.token_ids) for question in asked.questions)
        return asked.shape.card(is_chunk=False) | {
            "choices": choices,
            "usage": usage(num_prompt, num_tokens),
        }

    async def _events(
        self,
        request: Request,
        asked: Asked,
        first: tuple[int, Piece],
        pieces: Pieces,
        begin_s: float,
    ) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        n, shape, status = asked.shape.sampling.n, asked.shape, 200
        offsets: dict[int, int] = {}
        num_tokens = 0
        try:
            async with contextlib.aclosing(_chained(first, pieces)) as found:
                async for prompt, piece in found:
                    _raise_failed(piece)
                    index = prompt * n + piece.sequence_idx
                    is_first = index not in offsets
                    if is_first and asked.questions[prompt].echo:
                        echo = asked.questions[prompt].echo
                        yield _event(shape.card(is_chunk=True) | {
                            "choices": [{"index": index, "text": echo, "logprobs": None,
                                         "finish_reason": None}]})  # fmt: skip
                    offset = offsets.setdefault(index, 0)
                    choice = shape.chunk(index, piece, offset, is_first=is_first)
                    offsets[index] += len(piece.text)
                    num_tokens += len(piece.tokens)
                    yield _event(shape.card(is_chunk=True) | {"choices": [choice]})
            if asked.has_usage:
                num_prompt = sum(len(question.token_ids) for question in asked.questions)
                counts = {"choices": [], "usage": usage(num_prompt, num_tokens)}
                yield _event(shape.card(is_chunk=True) | counts)
            yield b"data: [DONE]\n\n"
        except RefusedError as error:
            status = error.status
            yield _event(error_body(str(error), status=status, code=error.code, field=error.field))
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            status = CLIENT_LEFT
            raise
        finally:
            _log(request, status, begin_s)

    # ------------------------------------------------------------------------------------ the input

    async def _body(self, request: Request) -> bytes:
        """The body, no larger than allowed."""
        most, body = self._service.limits.body_bytes, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise RefusedError(
                    f"the body is larger than {most} bytes", status=413, code="body_too_large"
                )
        return bytes(body)

    def _check_model(self, name: str) -> None:
        served = self._service.model.name
        if name != served:
            raise RefusedError(
                f"model {name!r} is not served here; {served!r} is",
                status=404,
                code="model_not_found",
                field="model",
            )

    async def _encode(self, text: str) -> tuple[int, ...]:
        # WHY: a thread, as a long prompt takes a second, and others' answers go on meanwhile.
        return tuple(await asyncio.to_thread(self._service.model.tokenizer.encode, text))

    async def _template(
        self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[int, ...]:
        tokenizer = self._service.model.tokenizer
        try:
            ids = await asyncio.to_thread(
                tokenizer.apply_chat_template, messages, variables=variables
            )
        except ValueError as error:
            raise RefusedError(str(error), field="messages") from error
        return tuple(ids)


def _raise_failed(piece: Piece) -> None:
    """A sequence that failed fails its request, and no other."""
    if piece.finish_reason is FinishReason.ERROR:
        raise RefusedError(piece.error, status=500, code="request_failed")


async def _chained(first: tuple[int, Piece], rest: Pieces) -> Pieces:
    """One after the other; what is left of `rest` is closed with it."""
    async with contextlib.aclosing(rest):
        yield first
        async for found in rest:
            yield found


async def _unless_left[T](request: Request, wanted: Awaitable[T]) -> T:
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


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _key_of(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ").strip()


def _log(request: Request, status: int, begin_s: float) -> None:
    """One line a request; no text of anybody."""
    client = request.client.host if request.client else "-"
    ACCESS_LOG.info(
        "%s %s %s %d %.3f s",
        client, request.method, request.url.path, status, time.perf_counter() - begin_s,
    )  # fmt: skip
