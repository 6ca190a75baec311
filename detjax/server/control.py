# SPDX-License-Identifier: Apache-2.0
"""What an administrator does with a server's engine: pause it, let it sleep, give it new weights.

Each operation holds requests that come, and lets those that are open end, or aborts them, so that
no answer has tokens of two weights.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path

from detjax.engine.sleep import AsleepError
from detjax.server.errors import RefusedError
from detjax.server.served_adapters import NameTakenError, ServedAdapters
from detjax.server.service import Service
from detjax.server.turns import Hold, PauseMode


class Control:
    """Operations on a service's engine, one at a time.

    An operation whose caller leaves while it waits for open requests is taken back. What has begun
    with the engine goes to its end.
    """

    def __init__(self, service: Service, folders: tuple[Path, ...]):
        """Of a service.

        Args:
            service: Whose engine.
            folders: In which weights may be read.
        """
        self._service, self._folders = service, folders
        self._busy = ""

    async def update(self, folder: str, *, version: int | None, mode: PauseMode) -> tuple[int, int]:
        """Replace the weights by those of a folder.

        They are checked as far as their files' headers say, before any request is held or aborted.

        Returns:
            The version that the new weights have, and how many requests were open.

        Raises:
            RefusedError: If the folder is not allowed, the weights do not fit, or another operation
                is under way. The old weights are in place then.
        """
        path = self._allowed(folder)
        return await self.replace(path, version=version, mode=mode, field="model_path")

    async def replace(
        self, path: Path, *, version: int | None, mode: PauseMode, field: str
    ) -> tuple[int, int]:
        """As `update`, of a folder that is allowed; `field` says where the caller has given it."""
        service = self._service
        with self._alone("an update of weights"):
            version = self.next_version(version)
            with _as_refusal(field):
                await asyncio.to_thread(service.model.engine.check_folder, path)
            num_open = service.turns.num_running
            async with self._quiet(Hold.UPDATING, mode):
                load = functools.partial(service.model.engine.load_folder, path, version=version)
                await _to_its_end(self._changed(load))
            return version, num_open

    def next_version(self, version: int | None) -> int:
        """The version that other weights get, which is one more if none is given.

        Raises:
            RefusedError: If it is not above that of the weights of now.
        """
        latest = self._service.model.engine.weight_version
        if version is not None and version <= latest:
            raise RefusedError(
                f"weight_version={version} must be above {latest}, the version of the weights "
                "of now, so that receipts can tell them apart",
                field="weight_version",
            )
        return latest + 1 if version is None else version

    def check_update(self, empty: Path, *, version: int | None) -> None:
        """Refuse an update before any of its weights have come to a folder, which is empty yet.

        Raises:
            RefusedError: If the server takes no requests, its engine no weights, or the version is
                not above that of the weights of now.
        """
        if not self._service.takes_requests:
            raise self._service.not_ready()
        self.next_version(version)
        # An engine that takes weights has nothing to say yet but that there are none.
        with _as_refusal(""), contextlib.suppress(FileNotFoundError):
            self._service.model.engine.check_folder(empty)

    async def load_adapter(self, name: str, folder: str, *, replaces: bool) -> None:
        """Serve the adapter of a folder under a name, while requests run.

        `replaces`: in place of the one of this name; requests that have it go on with it.

        Raises:
            RefusedError: If the folder is not allowed, the name is taken and not to be replaced, or
                the adapter does not go with the model.
        """
        service = self._service
        if not service.takes_requests:
            raise service.not_ready()
        path = self._allowed(folder, field="lora_path")
        adapters = self._adapters()
        with _as_refusal("lora_path"):
            try:
                await asyncio.to_thread(adapters.load, name, path, replaces=replaces)
            except NameTakenError as error:
                raise RefusedError(str(error), field="lora_name") from error

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more; requests that have it go on.

        Raises:
            RefusedError: If there is none of this name.
        """
        try:
            self._adapters().unload(name)
        except KeyError as error:
            raise RefusedError(
                f"there is no adapter {name!r:.200} here", status=404, code="model_not_found",
                field="lora_name",
            ) from error  # fmt: skip

    def _adapters(self) -> ServedAdapters:
        adapters = self._service.model.adapters
        if adapters is None:
            raise RefusedError("this server has no adapters; start it with --enable-lora")
        return adapters

    async def pause(self, mode: PauseMode, *, clears_cache: bool) -> None:
        """Let requests that come wait until `resume`.

        Raises:
            RefusedError: If requests are open and would have to be kept, whose answers could have
                tokens of two weights then; or the cache cannot be cleared.
        """
        engine, num_open = self._service.model.engine, self._service.turns.num_running
        with self._alone("a pause"), _as_refusal("clear_cache"):
            if mode is PauseMode.KEEP and num_open:
                raise RefusedError(
                    f"mode='keep' with {num_open} open requests is not supported, as an answer "
                    "has one version of the weights; ask for mode='wait' or 'abort'",
                    status=409, code="requests_open", field="mode",
                )  # fmt: skip
            if clears_cache:
                engine.reset_prefix_cache()  # refuses where it cannot, before anything waits
            async with self._quiet(Hold.PAUSED, mode, is_kept=True):
                if clears_cache:
                    engine.reset_prefix_cache()

    def resume(self) -> None:
        """Let them in."""
        with self._alone("a resume"):
            self._service.turns.end(Hold.PAUSED)

    async def sleep(self, *, level: int, mode: PauseMode) -> None:
        """Free the weights (level 1 keeps a copy on the host) and the cache on the devices."""
        engine = self._service.model.engine
        with self._alone("a sleep"):
            async with self._quiet(Hold.SLEEPING, mode, is_kept=True):
                sleep = functools.partial(engine.sleep, keeps_weights=level == 1)
                await _to_its_end(self._changed(sleep))

    async def wake_up(self, *, weights: bool, cache: bool) -> None:
        """Bring back what sleeps; requests have their turn once everything is there.

        Of an engine that is awake nothing is asked, so that open requests are not waited for.
        """
        service = self._service
        with self._alone("a wake-up"):
            if not service.model.engine.is_asleep:
                service.turns.end(Hold.SLEEPING)
                return
            wake = functools.partial(service.model.engine.wake_up, weights=weights, cache=cache)
            await _to_its_end(self._changed(wake))
            if not service.model.engine.is_asleep:
                service.turns.end(Hold.SLEEPING)

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        service = self._service
        if not service.takes_requests:
            raise service.not_ready()
        if self._busy:
            raise RefusedError(
                f"{self._busy} is under way; ask for {what} when it has ended",
                status=409,
                code="busy",
            )
        self._busy = what
        try:
            yield
        finally:
            self._busy = ""

    @contextlib.asynccontextmanager
    async def _quiet(
        self, hold: Hold, mode: PauseMode, *, is_kept: bool = False
    ) -> AsyncGenerator[None]:
        """Hold requests while this lasts, with none open within; `is_kept`: and afterwards."""
        service = self._service
        was_held = service.turns.has(hold)
        service.turns.begin(hold)
        has_ended = False
        try:
            if mode is PauseMode.ABORT:
                service.abort()
            try:
                await service.turns.quiet()
            finally:
                service.turns.is_aborting = False
            yield
            has_ended = True
        finally:
            if not (is_kept and has_ended or was_held):
                service.turns.end(hold)

    async def _changed(self, change: Callable[[], None]) -> None:
        """Change the engine, and take note of which weights it has then, whatever came of it."""
        service, engine = self._service, self._service.model.engine
        try:
            with _as_refusal(""):
                await service.change(change)
        except RuntimeError as error:  # of the device
            if engine.is_asleep and not service.turns.has(Hold.SLEEPING):
                service.fail(f"the old weights could not be put back: {error}")
            raise RefusedError(
                f"the device has failed: {error}", status=500, code="change_failed"
            ) from error
        finally:
            if engine.has_weights:
                await service.identify()

    def _allowed(self, folder: str, field: str = "model_path") -> Path:
        """The folder, if it lies in one that weights may be read from, and so do its files."""
        try:
            path = Path(folder).resolve()
            files = [file.resolve() for file in path.iterdir()] if self._has(path) else []
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RefusedError(
                f"{field}={folder!r:.500} cannot be read: {reason}", field=field
            ) from error
        if not (self._has(path) and all(map(self._has, files))):
            raise RefusedError(
                f"{field}={folder!r:.500} is not in a --weights-dir of this server, or has a "
                "link out of it",
                status=403,
                code="folder_not_allowed",
                field=field,
            )
        return path

    def _has(self, path: Path) -> bool:
        """Whether a path lies in an allowed folder, or is one."""
        return any(map(path.is_relative_to, self._folders))


@contextlib.contextmanager
def _as_refusal(field: str) -> Iterator[None]:
    """Errors of weights as what the caller is told."""
    try:
        yield
    except RefusedError:
        raise
    except AsleepError as error:
        raise RefusedError(str(error), status=409, code="asleep") from error
    except (ValueError, OSError) as error:
        raise RefusedError(str(error), field=field) from error


async def _to_its_end(change: Coroutine[None, None, None]) -> None:
    """Await what goes to its end even if this is cancelled meanwhile."""
    task = asyncio.create_task(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
