# SPDX-License-Identifier: Apache-2.0
"""Weights in the bodies of requests, for trainers that share no folder with the server.

The three routes have vLLM's names: an update is started, tensors come in any number of requests,
and it is finished. Until then the old weights answer. Each body is a file in safetensors' format,
which holds no code. It is written to a folder of this process, so that a finished update is one of
files: `Control` has it checked, and put in place as a whole.
"""

import asyncio
import contextlib
import json
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from detjax.models.weights.files import INDEX_NAME, open_file
from detjax.server.admin import OpenMode, RouteRow, version_of
from detjax.server.control import Control
from detjax.server.errors import RefusedError
from detjax.server.request_reader import RequestReader
from detjax.server.service import Service
from detjax.server.streaming import reply, unless_left
from detjax.server.turns import PauseMode

_WRITTEN_AT_ONCE = 8 << 20
"""Bytes: each piece of a body has 64 kB, and each write takes a thread."""

_MOST_BYTES_A_WEIGHT, _HEADER_BYTES = 4, 16 << 20
"""An update has no more bytes than the model's weights in float32, and room for names."""


class StartWeightUpdateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /start_weight_update, with vLLM's name and two more.

    Attributes:
        is_checkpoint_format: Taken only as true: tensors have the names of the model's folder.
        mode: What becomes of requests that are open when the update is finished, as for
            /update_weights_from_disk.
        weight_version: As there.
    """

    is_checkpoint_format: bool = True
    mode: OpenMode = "wait"
    weight_version: int | str | None = None

    def check(self) -> None:
        """Refuse what would have to be ignored."""
        if not self.is_checkpoint_format:
            raise RefusedError(
                "is_checkpoint_format=false is not supported: send tensors with the names and "
                "shapes of the model's folder",
                field="is_checkpoint_format",
            )


class WeightUpload:
    """The files of one update, in a folder that is removed with it."""

    def __init__(self, *, version: int | None, mode: PauseMode, most_bytes: int):
        """Nothing has come. All bodies together may have `most_bytes`."""
        self.version, self.mode, self._most_bytes = version, mode, most_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="detjax-weights-"))
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._file_of: dict[str, str] = {}
        self._bytes_of: dict[Path, int] = {}
        self._num_files = self.num_coming = 0

    async def add(self, parts: AsyncIterator[bytes], *, most_s: float) -> tuple[Sequence[str], int]:
        """Keep one body; return the names of its tensors, and its bytes.

        Args:
            parts: Of the body.
            most_s: Seconds that each may take to arrive.

        Raises:
            RefusedError: If it is no whole file of safetensors, has a tensor that came before, or
                has more bytes than the model can need. Nothing of it is kept.
        """
        path = self.folder / f"part{self._num_files}.safetensors"
        self._num_files += 1
        self.num_coming += 1
        try:
            num_bytes = await _write(path, self._counted(path, parts), most_s)
            names = await asyncio.to_thread(_names_in, path)
            if twice := sorted(self._file_of.keys() & set(names)):
                raise RefusedError(
                    f"tensor {twice[0]!r} has come before in this update; send each once, or "
                    "start again",
                    field=twice[0],
                )
        except BaseException:
            path.unlink(missing_ok=True)
            self._bytes_of.pop(path, None)
            raise
        finally:
            self.num_coming -= 1
        self._file_of |= dict.fromkeys(names, path.name)
        return names, num_bytes

    async def _counted(self, path: Path, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The parts of a body that goes to a file, as long as there is room."""
        async for part in parts:
            self._bytes_of[path] = self._bytes_of.get(path, 0) + len(part)
            if sum(self._bytes_of.values()) > self._most_bytes:
                raise RefusedError(
                    f"this update has more than {self._most_bytes} bytes, which are the model's "
                    "weights in float32 and room for names; send each tensor once",
                    status=413,
                    code="body_too_large",
                )
            yield part

    def complete(self) -> None:
        """Write the index of the files, with which they are a folder of weights."""
        index = {"metadata": {}, "weight_map": self._file_of}
        (self.folder / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


class WeightUploads:
    """What each route does."""

    def __init__(self, service: Service, reader: RequestReader, control: Control):
        """Of a service."""
        self._service, self._reader, self._control = service, reader, control
        self._upload: WeightUpload | None = None

    async def start(self, request: Request) -> Response:
        """Begin an update whose tensors come in bodies; one that was begun before is forgotten."""
        asked = await self._reader.fields(request, StartWeightUpdateRequest)
        asked.check()
        version = version_of(asked.weight_version)
        if self._upload is not None and self._upload.num_coming:
            raise _busy("tensors of the update that was begun before still come")
        num_params = self._service.model.engine.num_checkpoint_params
        upload = WeightUpload(
            version=version, mode=PauseMode(asked.mode),
            most_bytes=num_params * _MOST_BYTES_A_WEIGHT + _HEADER_BYTES,
        )  # fmt: skip
        try:
            self._control.check_update(upload.folder, version=version)
        except BaseException:
            upload.close()
            raise
        self._forget()
        self._upload = upload
        return reply({"status": "started", "weight_version": self._control.next_version(version)})

    async def update(self, request: Request) -> Response:
        """Take tensors: the body is a file in safetensors' format."""
        if request.headers.get("content-type", "").startswith("application/json"):
            raise RefusedError(
                "tensors come in the body, as a file in safetensors' format (Content-Type: "
                "application/octet-stream); this server takes none by NCCL or CUDA IPC",
                field="update_info",
            )
        upload = self._begun()
        most_s = self._service.limits.body_s
        names, num_bytes = await upload.add(request.stream(), most_s=most_s)
        return reply({"status": "received", "num_tensors": len(names), "num_bytes": num_bytes})

    async def finish(self, request: Request) -> Response:
        """Replace the weights by the tensors that have come, all of them or none."""
        await self._reader.body(request)
        upload = self._begun()
        if upload.num_coming:
            raise _busy("tensors of this update still come")
        self._upload = None
        try:
            await asyncio.to_thread(upload.complete)
            update = self._control.replace(
                upload.folder, version=upload.version, mode=upload.mode, field=""
            )
            version, num_open = await unless_left(request, update)
        except RefusedError as error:
            message = str(error).replace(f"{upload.folder}/", "").replace(str(upload.folder), "it")
            raise RefusedError(
                f"{message} (this update is forgotten; start it again)",
                status=error.status, code=error.code, field=error.field,
            ) from error  # fmt: skip
        finally:
            upload.close()
        return reply({
            "success": True,
            "num_paused_requests": num_open,
            "weight_version": version,
            "weights": self._service.model.identity.model["weights"],
        })  # fmt: skip

    @property
    def routes(self) -> tuple[RouteRow, ...]:
        """Of the table of routes: verb, path, handler, type of the body."""
        return (
            ("POST", "/start_weight_update", self.start, StartWeightUpdateRequest),
            ("POST", "/update_weights", self.update, None),
            ("POST", "/finish_weight_update", self.finish, None),
        )

    def _begun(self) -> WeightUpload:
        if self._upload is None:
            raise RefusedError(
                "no update has been started; ask /start_weight_update first",
                status=409,
                code="not_started",
            )
        return self._upload

    def _forget(self) -> None:
        if self._upload is not None:
            self._upload.close()
        self._upload = None


def _busy(why: str) -> RefusedError:
    return RefusedError(f"{why}; ask when they have", status=409, code="busy")


async def _write(path: Path, parts: AsyncIterator[bytes], most_s: float) -> int:
    """Write a body to a file; return its bytes."""
    held: list[bytes] = []
    num_held = num_bytes = 0
    try:
        with path.open("wb") as file:
            while (part := await _next(parts, most_s)) is not None:
                held.append(part)
                num_held += len(part)
                num_bytes += len(part)
                if num_held >= _WRITTEN_AT_ONCE:
                    await asyncio.to_thread(file.writelines, held)
                    held, num_held = [], 0
            await asyncio.to_thread(file.writelines, held)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise RefusedError(
                f"nothing came for {most_s:g} s", status=408, code="timeout"
            ) from error
        raise RefusedError(
            f"the tensors cannot be kept ({error.strerror}); give the server room in TMPDIR",
            status=507,
            code="no_room",
        ) from error
    return num_bytes


async def _next(parts: AsyncIterator[bytes], most_s: float) -> bytes | None:
    """The next part of a body; None after the last."""
    async with asyncio.timeout(most_s):
        return await anext(parts, None)


def _names_in(path: Path) -> Sequence[str]:
    """The tensors of a file.

    Raises:
        RefusedError: If it is not a whole file of safetensors.
    """
    try:
        with contextlib.ExitStack() as stack:
            return [name for name, _ in open_file(path, stack)]
    except ValueError as error:
        reason = str(error).replace(f"{path} ", "").replace("download it again", "send it again")
        raise RefusedError(f"the body is no whole file in safetensors' format: {reason}") from error
