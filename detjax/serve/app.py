# SPDX-License-Identifier: Apache-2.0
"""The application: which path is whose, who may ask, and what is told where it goes wrong."""

import functools
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from detjax.serve.answers import error_body
from detjax.serve.information import PAGE_FILES, Information
from detjax.serve.protocol import ChatRequest, CompletionRequest, RefusedError
from detjax.serve.questions import Reader
from detjax.serve.responses import ResponsesRequest, ResponseWriter, form_of, named_as_asked
from detjax.serve.service import Service
from detjax.serve.streaming import CLIENT_LEFT, id_of, key_of, log, reply, respond

LOG = logging.getLogger("detjax.serve")

Run = Callable[[Request], Awaitable[Response]]

PAGE_PATHS = ("/", *(f"/{name}" for name in PAGE_FILES))
MAX_ID_CHARS = 128
_ID = re.compile(f"[!-~]{{1,{MAX_ID_CHARS}}}")
OPEN_PATHS = frozenset(("/health", "/health/live", "/health/ready", "/version", *PAGE_PATHS))
"""Paths that need no key."""


def make_app(service: Service, *, api_keys: Sequence[str] = ()) -> Starlette:
    """The application. With `api_keys` all routes but those of `OPEN_PATHS` ask for one."""
    reader = Reader(service)
    about, keys = Information(service, reader), [key.encode() for key in api_keys]

    async def completions(request: Request) -> Response:
        asked = await reader.parsed(request, CompletionRequest)
        return await respond(service, request, reader.completion(asked, id_of(request)))

    async def chat(request: Request) -> Response:
        asked = await reader.parsed(request, ChatRequest)
        return await respond(service, request, reader.chat(asked, id_of(request)))

    async def responses(request: Request) -> Response:
        asked = await reader.parsed(request, ResponsesRequest)
        asked.check()
        with named_as_asked(asked):
            return await respond(
                service, request, reader.chat(asked.as_chat(), id_of(request), is_read=False),
                form=form_of(asked),
                writer=functools.partial(ResponseWriter, asked),
            )  # fmt: skip

    table: tuple[tuple[str, str, Run], ...] = (
        *(("GET", path, about.page) for path in PAGE_PATHS),
        ("GET", "/health", about.health),
        ("GET", "/health/live", about.live),
        ("GET", "/health/ready", about.ready),
        ("GET", "/version", about.version),
        ("GET", "/metrics", about.metrics),
        ("GET", "/v1/models", about.models),
        ("GET", "/v1/models/{name:path}", about.model),
        ("GET", "/tokenizer_info", about.tokenizer_info),
        ("POST", "/tokenize", about.tokenize),
        ("POST", "/detokenize", about.detokenize),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/responses", responses),
    )
    return Starlette(
        routes=[Route(path, _guarded(run, keys), methods=[verb]) for verb, path, run in table],
        exception_handlers={HTTPException: _http_error},
    )


def _guarded(run: Run, keys: Sequence[bytes]) -> Run:
    """A route with its key checked, its refusals told, and a line in the log."""

    async def guarded_route(request: Request) -> Response:
        begin_s = time.perf_counter()
        request.state.request_id = uuid.uuid4().hex
        try:
            request.state.request_id = _given_id(request) or id_of(request)
            _check_key(request, keys)
            response = await run(request)
        except RefusedError as error:
            response = _refusal(error)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)
        except Exception:
            LOG.exception("%s %s failed", request.method, request.scope["path"])
            message = "this is a fault of detjax; the server's log has the rest"
            response = reply(error_body(message, status=500, code="", field=""), 500)
        response.headers["X-Request-Id"] = id_of(request)
        if not isinstance(response, StreamingResponse):
            log(request, response.status_code, begin_s)
        return response

    return guarded_route


def _given_id(request: Request) -> str:
    """The id that the client gives its request; empty if none."""
    given = request.headers.get("x-request-id", "")
    if given and not _ID.fullmatch(given):
        raise RefusedError(
            f"X-Request-Id {given[:MAX_ID_CHARS]!r} must be 1 to {MAX_ID_CHARS} letters, digits "
            "and signs of ASCII, without spaces",
            field="X-Request-Id",
        )
    return given


def _check_key(request: Request, keys: Sequence[bytes]) -> None:
    # WHY: the path that is routed. That of `request.url` has in it what the Host header says.
    if not keys or request.scope["path"] in OPEN_PATHS:
        return
    given = key_of(request).encode()
    if not any([hmac.compare_digest(given, key) for key in keys]):
        raise RefusedError(
            "the API key is missing or wrong; send Authorization: Bearer KEY",
            status=401,
            code="invalid_api_key",
        )


def _refusal(error: RefusedError) -> Response:
    """An error as an answer; where it helps, when to ask again."""
    body = error_body(str(error), status=error.status, code=error.code, field=error.field)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return Response(
        msgspec.json.encode(body), error.status, headers=headers, media_type="application/json"
    )


def _http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this verb."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']}: {error.detail}"
    return reply(
        error_body(message, status=error.status_code, code="", field=""), error.status_code
    )
