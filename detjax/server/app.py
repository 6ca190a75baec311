# SPDX-License-Identifier: Apache-2.0
"""The application: which path is whose, who may ask, and what is told where it goes wrong."""

import functools
import hmac
import logging
import re
import time
import uuid
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from detjax.server.admin import Admin, Handler, RouteRow
from detjax.server.answers import error_body
from detjax.server.chat_request import ChatRequest, DetokenizeRequest, TokenizeRequest
from detjax.server.control import Control
from detjax.server.errors import RefusedError
from detjax.server.information import PAGE_FILES, PAGE_POLICY, Information, ResetCacheRequest
from detjax.server.openapi import Operation, document, page
from detjax.server.options import WebOptions, is_local_name
from detjax.server.protocol import CompletionRequest
from detjax.server.request_reader import RequestReader
from detjax.server.response_events import ResponseWriter, answer_format_of
from detjax.server.responses import ResponsesRequest, named_as_asked
from detjax.server.service import Service
from detjax.server.streaming import CLIENT_LEFT, id_of, key_of, log, reply, respond
from detjax.server.token_requests import GenerateRequest
from detjax.server.weight_uploads import WeightUploads

LOG = logging.getLogger("detjax.server")

PAGE_PATHS = ("/", *(f"/{name}" for name in PAGE_FILES))
MAX_ID_CHARS = 128
_ID = re.compile(f"[!-~]{{1,{MAX_ID_CHARS}}}")
OPEN_PATHS = frozenset((
    "/health", "/health/live", "/health/ready", "/version", "/openapi.json", "/docs", *PAGE_PATHS,
))  # fmt: skip
"""Paths that need no key."""

NCCL_PATHS = (
    ("GET", "/server_info"), ("GET", "/get_world_size"), ("POST", "/init_weight_transfer_engine"),
    ("POST", "/init_weight_update_communicator"), ("POST", "/collective_rpc"),
    ("POST", "/fetch_weights"),
)  # fmt: skip
"""What trainers ask a server of vLLM, or of SkyRL's, to send weights by NCCL, or to its workers."""

OPEN_TO_ALL = WebOptions()


def make_app(service: Service, options: WebOptions = OPEN_TO_ALL) -> Starlette:
    """The application. With keys all routes but those of `OPEN_PATHS` ask for one."""
    reader = RequestReader(service)
    admin = _admin_rows(service, reader, options.weights_dirs) if options.admin_keys else ()
    gate = _Gate.of(options, {path for _, path, _, _ in admin})

    async def openapi(request: Request) -> Response:
        """This document."""
        return reply(told)

    async def docs(request: Request) -> Response:
        """This document, for people."""
        headers = {"Content-Security-Policy": PAGE_POLICY}
        return Response(page(told), media_type="text/html", headers=headers)

    table: tuple[RouteRow, ...] = (
        *_information_rows(Information(service, reader)),
        *_generation_rows(service, reader),
        *((verb, path, no_nccl, None) for verb, path in NCCL_PATHS),
        ("GET", "/openapi.json", openapi, None),
        ("GET", "/docs", docs, None),
        *admin,
    )
    told = document([
        Operation(
            verb=verb,
            path=path.replace(":path", ""),
            summary=(run.__doc__ or "").partition("\n")[0],
            body=body,
            is_open=path in gate.open_paths,
            is_admin=path in gate.admin_paths,
        )
        for verb, path, run, body in table
        if path not in PAGE_PATHS
    ])  # fmt: skip
    return Starlette(
        routes=[Route(path, _guarded(run, gate), methods=[verb]) for verb, path, run, _ in table],
        exception_handlers={HTTPException: _http_error},
        middleware=_middleware(options),
    )


async def no_nccl(request: Request) -> Response:
    """Refused: this server takes no weights by NCCL."""
    raise RefusedError(
        "this server takes no weights by NCCL, CUDA IPC or methods of workers: send them with "
        "/start_weight_update, /update_weights (a file of safetensors as the body) and "
        "/finish_weight_update, or name a folder to /update_weights_from_disk; docs/training.md "
        "has what TRL, verl and SkyRL need",
        status=501,
        code="no_nccl",
    )


def _information_rows(about: Information) -> tuple[RouteRow, ...]:
    """The routes that generate nothing."""
    return (
        *(("GET", path, about.page, None) for path in PAGE_PATHS),
        ("GET", "/health", about.health, None),
        ("GET", "/health/live", about.live, None),
        ("GET", "/health/ready", about.ready, None),
        ("GET", "/version", about.version, None),
        ("GET", "/metrics", about.metrics, None),
        ("POST", "/reset_prefix_cache", about.reset_prefix_cache, ResetCacheRequest),
        ("GET", "/v1/models", about.models, None),
        ("GET", "/v1/models/{name:path}", about.model, None),
        ("GET", "/tokenizer_info", about.tokenizer_info, None),
        ("POST", "/tokenize", about.tokenize, TokenizeRequest),
        ("POST", "/detokenize", about.detokenize, DetokenizeRequest),
    )


def _generation_rows(service: Service, reader: RequestReader) -> tuple[RouteRow, ...]:
    """The routes that ask the engine."""

    async def completions(request: Request) -> Response:
        """Continue texts or token ids."""
        asked = await reader.parsed(request, CompletionRequest)
        return await respond(service, request, reader.completion(asked, id_of(request)))

    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        asked = await reader.parsed(request, ChatRequest)
        return await respond(service, request, reader.chat(asked, id_of(request)))

    async def responses(request: Request) -> Response:
        """Answer a text or a conversation, in the form of OpenAI's responses."""
        asked = await reader.parsed(request, ResponsesRequest)
        asked.check()
        with named_as_asked(asked):
            return await respond(
                service, request, reader.chat(asked.as_chat(), id_of(request)),
                answer_format=answer_format_of(asked),
                writer=functools.partial(ResponseWriter, asked),
            )  # fmt: skip

    async def generate(request: Request) -> Response:
        """Continue token ids, as vLLM's route for trainers does."""
        asked = await reader.parsed(request, GenerateRequest)
        completion = asked.as_completion(service.model.name)
        return await respond(
            service, request, reader.completion(completion, id_of(request)),
            answer_format=asked.answer,
        )  # fmt: skip

    return (
        ("POST", "/v1/completions", completions, CompletionRequest),
        ("POST", "/inference/v1/generate", generate, GenerateRequest),
        ("POST", "/v1/chat/completions", chat, ChatRequest),
        ("POST", "/v1/responses", responses, ResponsesRequest),
    )


def _admin_rows(
    service: Service, reader: RequestReader, folders: tuple[Path, ...]
) -> tuple[RouteRow, ...]:
    """The routes of an administrator, with the folders that weights may be read from."""
    control = Control(service, folders)
    return (
        *Admin(service, reader, control).routes,
        *WeightUploads(service, reader, control).routes,
    )


def _middleware(options: WebOptions) -> list[Middleware]:
    """What lets pages of other origins ask, if some may."""
    if not options.origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=options.methods,
            allow_headers=options.headers,
            allow_credentials=options.has_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gate:
    """The keys, none where all may ask, the paths that need none, and whose pages may ask.

    The paths of an administrator need a key of their own, always.
    """

    keys: tuple[bytes, ...]
    admin_keys: tuple[bytes, ...]
    open_paths: frozenset[str]
    admin_paths: frozenset[str]
    origins: tuple[str, ...]
    is_local: bool

    @classmethod
    def of(cls, options: WebOptions, admin_paths: Set[str]) -> "_Gate":
        """As the options have it."""
        return cls(
            keys=tuple(key.encode() for key in options.api_keys),
            admin_keys=tuple(key.encode() for key in options.admin_keys),
            open_paths=OPEN_PATHS | ({"/metrics"} if options.has_open_metrics else set[str]()),
            admin_paths=frozenset(admin_paths),
            origins=options.origins,
            is_local=options.is_local,
        )


def _guarded(run: Handler, gate: _Gate) -> Handler:
    """A route with its key checked, its refusals told, and a line in the log."""

    async def guarded_route(request: Request) -> Response:
        begin_s = time.perf_counter()
        request.state.request_id = uuid.uuid4().hex
        try:
            request.state.request_id = _given_id(request) or id_of(request)
            _check_key(request, gate)
            _check_origin(request, gate)
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


def _check_key(request: Request, gate: _Gate) -> None:
    # WHY: the path that is routed. That of `request.url` has in it what the Host header says.
    is_admin = request.scope["path"] in gate.admin_paths
    keys = gate.admin_keys if is_admin else gate.keys
    if not is_admin and (not keys or request.scope["path"] in gate.open_paths):
        return
    given = key_of(request).encode()
    if not any([hmac.compare_digest(given, key) for key in keys]):
        raise RefusedError(
            f"the {'admin' if is_admin else 'API'} key is missing or wrong; send Authorization: "
            "Bearer KEY",
            status=401,
            code="invalid_api_key",
        )


def _check_origin(request: Request, gate: _Gate) -> None:
    """Refuse pages of strangers that post where nobody needs a key.

    WHY: a browser sends such a request before it asks whether it may, and only keeps the answer
    from the page. The engine's time would be spent, and its cache could be emptied. A stranger's
    name may also stand for this machine's own address (DNS rebinding), so a server that only this
    machine reaches has pages of local names alone.
    """
    origin = request.headers.get("origin")
    if gate.keys or request.method != "POST" or origin is None:
        return
    page = urlsplit(origin)
    is_own = page.netloc == request.headers.get("host")
    is_own = is_own and (is_local_name(page.hostname) or not gate.is_local)
    if not is_own and not {"*", origin} & set(gate.origins):
        raise RefusedError(
            f"pages of {origin[:80]!r} may not ask this server; start it with --allowed-origins "
            "and their origin (also that of a proxy in front of it), or with an API key",
            status=403,
            code="origin_not_allowed",
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
    message = f"{request.method} {request.scope['path']}: {error.detail}; GET /docs has the routes"
    return reply(
        error_body(message, status=error.status_code, code="", field=""), error.status_code
    )
