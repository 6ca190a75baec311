# SPDX-License-Identifier: Apache-2.0
"""The routes that tell of the server and of tokens: health, version, metrics, models, the page."""

import dataclasses
import functools
import importlib.resources
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import detjax
from detjax.server import metrics
from detjax.server.answers import Json
from detjax.server.chat_request import DetokenizeRequest, TokenizeRequest
from detjax.server.errors import RefusedError
from detjax.server.request_reader import RequestReader
from detjax.server.served_adapters import ServedAdapter
from detjax.server.service import Service, ServiceState
from detjax.server.streaming import key_of, reply, unless_left

PAGE_FILES = {
    "page.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
}
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_REASONS = {
    ServiceState.STARTING: "the model is loading, or its programs are compiled",
    ServiceState.DRAINING: "the server stops, and lets open answers end",
    ServiceState.FAILED: "the engine has stopped",
    ServiceState.SLEEPING: "its weights or cache are not on the devices; requests wait",
    ServiceState.UPDATING: "it gets other weights; requests wait",
    ServiceState.PAUSED: "an administrator has paused it; requests wait",
}
PAGE_POLICY = "default-src 'self'; img-src 'self' data:"
"""The page loads nothing from elsewhere, and runs no script but its own."""


class ResetCacheRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What POST /reset_prefix_cache takes, in its query or as JSON, with vLLM's names.

    Attributes:
        reset_running_requests: Taken only as false.
    """

    reset_running_requests: bool = False


class Information:
    """What each route does."""

    def __init__(self, service: Service, reader: RequestReader):
        """Of a service."""
        self._service, self._reader = service, reader
        folder = importlib.resources.files("detjax.server") / "page"
        self._page = {name: (folder / name).read_bytes() for name in PAGE_FILES}

    async def page(self, request: Request) -> Response:
        """The page, its style and its script."""
        name = request.scope["path"].removeprefix("/") or "page.html"
        headers = {"Cache-Control": "no-cache", "Content-Security-Policy": PAGE_POLICY}
        return Response(self._page[name], media_type=PAGE_FILES[name], headers=headers)

    async def health(self, request: Request) -> Response:
        """The state; 200 only where requests are taken, to be answered or to wait."""
        service = self._service
        body = {"status": service.state.value}
        if service.why_failed:
            body["reason"] = service.why_failed
        if not service.takes_requests:
            return reply(body, 503)
        if service.self_check_error:
            failed = {"status": "self_check_failed", "reason": service.self_check_error}
            return reply(failed, 503)
        if compiling := service.stats().compiling:
            body["compiling"] = compiling  # requests wait for it
        return reply(body)

    async def live(self, request: Request) -> Response:
        """200 as long as the process answers at all, whatever its state."""
        return reply({"status": "live", "state": self._service.state.value})

    async def ready(self, request: Request) -> Response:
        """As `health`, with the reason in every state, and how long the server has been in it.

        503 also where requests wait.
        """
        service = self._service
        response = await self.health(request)
        if response.status_code == 200 and service.state is ServiceState.READY:
            return response
        is_broken = service.state is ServiceState.READY
        reason = service.self_check_error if is_broken else service.why_failed
        reason = reason or _REASONS[service.state]
        status = "self_check_failed" if is_broken else service.state.value
        since_s = round(service.state_s, 3)
        return reply({"status": status, "reason": reason, "since_s": since_s}, 503)

    async def version(self, request: Request) -> Response:
        """Which detjax, model, numerics and build."""
        model = self._service.model
        known = {
            "version": detjax.__version__,
            "system_fingerprint": model.fingerprint,
            "weight_version": model.weight_version,
        }
        identity = dataclasses.asdict(model.identity)
        # WHY: this route needs no key, and the model's own name may be a folder of this machine.
        identity["model"] |= {"name": model.name}
        return reply(known | identity)

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        return Response(metrics.render(self._service), media_type="text/plain; version=0.0.4")

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes. Later prompts are computed anew, with the same bits."""
        asked = await self._reader.fields(request, ResetCacheRequest)
        if asked.reset_running_requests:
            raise RefusedError(
                "reset_running_requests=true is not supported: requests keep what they have "
                "computed; leave it out",
                field="reset_running_requests",
            )
        try:
            self._service.model.engine.reset_prefix_cache()
        except ValueError as error:
            raise RefusedError(str(error)) from error
        return reply({"status": "reset"})

    async def models(self, request: Request) -> Response:
        """The model and its adapters, in a list."""
        adapters = self._service.model.adapters or ()
        cards = [self._model_card(), *map(self._adapter_card, adapters)]
        return reply({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """The model or an adapter, by its name."""
        adapter = self._reader.check_model(request.path_params["name"])
        return reply(self._model_card() if adapter is None else self._adapter_card(adapter))

    def _adapter_card(self, adapter: ServedAdapter) -> Json:
        """As vLLM's server has it: a model whose parent is the base model."""
        model = self._service.model
        card = {"id": adapter.name, "parent": model.name, "adapter": adapter.sha256}
        return self._model_card() | card

    def _model_card(self) -> Json:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "owned_by": "detjax",
            "created": self._service.opened_at_s,
            "max_model_len": model.max_len,
            "mode": model.mode,
            "drafts": self._drafts(),
            "weights": model.identity.model["weights"],
            "weight_version": model.weight_version,
            "has_chat_template": model.tokenizer.chat_template is not None,
        }

    def _drafts(self) -> Json:
        """What became of drafts so far, by their source; nothing while none was verified."""
        counted = dict(self._service.stats().drafts)  # the engine adds to it meanwhile
        return {
            source: {
                "num_windows": counts.num_windows,
                "acceptance": counts.acceptance,
                "tokens_per_window": counts.tokens_per_window,
            }
            for source, counts in counted.items()
        }

    async def tokenizer_info(self, request: Request) -> Response:
        """What a client needs to make prompts itself, as vLLM's server names it."""
        tokenizer = self._service.model.tokenizer
        named = {name: tokenizer.template_tokens.get(name) for name in TOKEN_NAMES}
        return reply(named | {"chat_template": tokenizer.chat_template})

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text or a conversation, as a completion of it would begin."""
        asked = await self._reader.parsed(request, TokenizeRequest)
        return await self._admitted(request, functools.partial(self._tokens_of, asked))

    async def detokenize(self, request: Request) -> Response:
        """The text of some ids, with the special tokens among them."""
        asked = await self._reader.parsed(request, DetokenizeRequest)
        return await self._admitted(request, functools.partial(self._text_of, asked))

    async def _admitted(self, request: Request, make: Callable[[], Awaitable[Json]]) -> Response:
        """What is made under the limits of a request, unless its client leaves before."""

        async def made() -> Json:
            with self._service.admitted(key_of(request)):
                return await make()

        return reply(await unless_left(request, made()))

    async def _tokens_of(self, asked: TokenizeRequest) -> Json:
        self._reader.check_model(asked.model)
        asked.check()
        if asked.messages is not None:
            ids = await self._reader.template(asked.messages, asked.variables())
        else:
            is_raw = asked.add_special_tokens is False
            (ids,) = await self._reader.encode([asked.prompt or ""], is_raw=is_raw)
        found: Json = {
            "count": len(ids),
            "max_model_len": self._service.model.max_len,
            "tokens": list(ids),
        }
        if asked.return_token_strs:
            found["token_strs"] = await self._service.texts.names(ids)
        return found

    async def _text_of(self, asked: DetokenizeRequest) -> Json:
        self._reader.check_model(asked.model)
        try:
            (text,) = await self._service.texts.decode([asked.tokens], shows_special=True)
        except RefusedError as error:
            error.field = "tokens"
            raise
        return {"prompt": text}
