# SPDX-License-Identifier: Apache-2.0
"""The routes of an administrator: weights, adapters, sleep, pause, as SGLang and vLLM name them."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from detjax.server.control import Control
from detjax.server.errors import RefusedError
from detjax.server.request_reader import RequestReader
from detjax.server.service import Service
from detjax.server.streaming import reply, unless_left
from detjax.server.turns import Hold, PauseMode

OpenMode = Literal["wait", "abort"]

Handler = Callable[[Request], Awaitable[Response]]

RouteRow = tuple[str, str, Handler, type[msgspec.Struct] | None]
"""A route: verb, path, what it does, and the type of its body."""


class UpdateWeightsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /update_weights_from_disk, with SGLang's names.

    Attributes:
        model_path: A folder of safetensors, in a `--weights-dir`. If it has a config.json it must
            be that of the model. Tokenizer and templates stay as they are.
        mode: What becomes of open requests: "wait" lets them end with the old weights, "abort" ends
            them with an error. Requests that come meanwhile wait, and have the new weights.
        abort_all_requests: SGLang's name of mode "abort".
        weight_version: A number, or its digits, above that of the weights of now; one more than it
            if left out. Answers, receipts and metrics carry it.
        load_format: Taken only as "auto" or "safetensors".
        flush_cache: Taken only as true: cached prefixes are of the old weights.
        is_async, torch_empty_cache, keep_pause, recapture_cuda_graph: Taken only as false.
        token_step: For the caller's own records; it decides nothing.
        manifest: Taken only as null.
    """

    model_path: str
    mode: OpenMode | None = None
    abort_all_requests: bool = False
    weight_version: int | str | None = None
    load_format: Literal["auto", "safetensors"] = "auto"
    flush_cache: bool = True
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        ignored = "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph", "manifest"
        for name in ignored:
            if getattr(self, name):
                raise RefusedError(f"{name} is not supported: leave it out", field=name)
        if not self.flush_cache:
            raise RefusedError(
                "flush_cache=false is not supported: cached prefixes are of the old weights",
                field="flush_cache",
            )
        if self.abort_all_requests and self.mode == "wait":
            raise RefusedError(
                "abort_all_requests=true is mode 'abort', and mode is 'wait'; give one",
                field="abort_all_requests",
            )


def version_of(given: int | str | None) -> int | None:
    """A version of weights as a number.

    Raises:
        RefusedError: If it is none, or out of range.
    """
    if isinstance(given, str):
        if not (given.isascii() and given.isdigit()) or len(given) > 15:
            raise RefusedError(
                f"weight_version={given!r:.80} must be a number", field="weight_version"
            )
        given = int(given)
    if given is not None and not 0 <= given < 2**53:
        raise RefusedError(
            f"weight_version={given} must be from 0 to 2**53 - 1", field="weight_version"
        )
    return given


class PauseRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What POST /pause takes, in its query or as JSON, with vLLM's names.

    Attributes:
        mode: What becomes of open requests: "abort" or "wait". "keep" is taken where there are
            none.
        clear_cache: Forget cached prefixes, too.
    """

    mode: Literal["wait", "abort", "keep"] = "abort"
    clear_cache: bool = True


class SleepRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What POST /sleep takes, in its query or as JSON, with vLLM's names.

    Attributes:
        level: 1 keeps the weights in the host's memory; 2 gives them up, so that others must be
            loaded before the server wakes.
        mode: What becomes of open requests: "abort" or "wait".
    """

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    mode: OpenMode = "abort"


class WakeUpRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What POST /wake_up takes, in its query or as JSON, with vLLM's names.

    Attributes:
        tags: What is brought back: "weights", "kv_cache"; all if none is given.
    """

    tags: list[Literal["weights", "kv_cache"]] = []


AdapterName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f\x7f-\x9f]+$")
]
"""Without white space and control characters: clients and logs show names in lines."""


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/load_lora_adapter, with vLLM's names.

    Attributes:
        lora_name: What clients ask for as their `model`.
        lora_path: A folder that PEFT has saved, in a `--weights-dir`.
        load_inplace: Whether it may replace one of this name. Requests that have the old one go on
            with it.
    """

    lora_name: AdapterName
    lora_path: str
    load_inplace: bool = False


class ReloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /skyrl/v1/load_lora_adapter, with SkyRL's names.

    Attributes:
        lora_name: What clients ask for as their `model`; one of this name is replaced.
        lora_path: As for /v1/load_lora_adapter.
    """

    lora_name: AdapterName
    lora_path: str


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/unload_lora_adapter, with vLLM's names.

    Attributes:
        lora_name: Of the adapter.
        lora_int_id: vLLM's number of it, for the caller's own records.
    """

    lora_name: str
    lora_int_id: int | None = None


class Admin:
    """What each route does."""

    def __init__(self, service: Service, reader: RequestReader, control: Control):
        """Of a service."""
        self._service, self._reader, self._control = service, reader, control

    async def update_weights(self, request: Request) -> Response:
        """Replace the weights by those of a folder."""
        asked = await self._reader.parsed(request, UpdateWeightsRequest)
        asked.check()
        mode = "abort" if asked.abort_all_requests else asked.mode or "wait"
        update = self._control.update(
            asked.model_path, version=version_of(asked.weight_version), mode=PauseMode(mode)
        )
        version, num_open = await unless_left(request, update)
        return reply({
            "success": True,
            "message": f"the weights are those of {asked.model_path}",
            "num_paused_requests": num_open,
            "weight_version": version,
            "weights": self._service.model.identity.model["weights"],
        })  # fmt: skip

    async def load_adapter(self, request: Request) -> Response:
        """Serve the adapter of a folder under a name."""
        asked = await self._reader.parsed(request, LoadAdapterRequest)
        return await self._loaded(asked.lora_name, asked.lora_path, replaces=asked.load_inplace)

    async def reload_adapter(self, request: Request) -> Response:
        """Serve the adapter of a folder under a name, in place of another of this name."""
        asked = await self._reader.parsed(request, ReloadAdapterRequest)
        return await self._loaded(asked.lora_name, asked.lora_path, replaces=True)

    async def _loaded(self, name: str, folder: str, *, replaces: bool) -> Response:
        await self._control.load_adapter(name, folder, replaces=replaces)
        return _told(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Serve an adapter no more."""
        asked = await self._reader.parsed(request, UnloadAdapterRequest)
        self._control.unload_adapter(asked.lora_name)
        return _told(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def pause(self, request: Request) -> Response:
        """Let requests that come wait."""
        asked = await self._reader.fields(request, PauseRequest)
        pause = self._control.pause(PauseMode(asked.mode), clears_cache=asked.clear_cache)
        await unless_left(request, pause)
        return reply({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Let requests in again."""
        await self._reader.fields(request, _Nothing)
        self._control.resume()
        return reply({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Whether requests wait for `/resume`."""
        return reply({"is_paused": self._service.turns.has(Hold.PAUSED)})

    async def sleep(self, request: Request) -> Response:
        """Free weights and cache on the devices."""
        asked = await self._reader.fields(request, SleepRequest)
        sleep = self._control.sleep(level=asked.level, mode=PauseMode(asked.mode))
        await unless_left(request, sleep)
        return reply({"status": "sleeping", "level": asked.level})

    async def wake_up(self, request: Request) -> Response:
        """Bring weights and cache back."""
        asked = await self._reader.fields(request, WakeUpRequest)
        tags = asked.tags or ["weights", "kv_cache"]
        wake = self._control.wake_up(weights="weights" in tags, cache="kv_cache" in tags)
        await unless_left(request, wake)
        return reply({"status": self._service.state.value})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether weights or cache are not on the devices."""
        return reply({"is_sleeping": self._service.turns.has(Hold.SLEEPING)})

    @property
    def routes(self) -> tuple[RouteRow, ...]:
        """Of the table of routes: verb, path, handler, type of the body."""
        return (
            ("POST", "/update_weights_from_disk", self.update_weights, UpdateWeightsRequest),
            ("POST", "/v1/load_lora_adapter", self.load_adapter, LoadAdapterRequest),
            ("POST", "/skyrl/v1/load_lora_adapter", self.reload_adapter, ReloadAdapterRequest),
            ("POST", "/v1/unload_lora_adapter", self.unload_adapter, UnloadAdapterRequest),
            ("POST", "/pause", self.pause, PauseRequest),
            ("POST", "/resume", self.resume, None),
            ("GET", "/is_paused", self.is_paused, None),
            ("POST", "/sleep", self.sleep, SleepRequest),
            ("POST", "/wake_up", self.wake_up, WakeUpRequest),
            ("GET", "/is_sleeping", self.is_sleeping, None),
        )


def _told(text: str) -> Response:
    """A line of text, as vLLM's server answers."""
    return Response(text, media_type="text/plain")


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No field."""
