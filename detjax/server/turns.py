# SPDX-License-Identifier: Apache-2.0
"""Which requests have their turn, and which wait while the engine is paused or changed."""

import asyncio
import contextlib
import enum
import time
from collections.abc import AsyncGenerator

from detjax.server.errors import RefusedError


class Hold(enum.Enum):
    """Why requests wait; the first that holds is told."""

    SLEEPING = "sleeping"
    UPDATING = "updating"
    PAUSED = "paused"


class PauseMode(enum.Enum):
    """What becomes of open requests before the engine is paused or changed."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"  # of a pause alone, and only where there are none


class Turns:
    """Lets requests in unless something holds them.

    A request has its turn from before its text is read until its answer has ended, so all of an
    answer is of one model. Requests that are held wait here, in no order.
    """

    def __init__(self, *, max_held: int, most_s: float):
        """Nothing is held.

        Args:
            max_held: Requests that may wait.
            most_s: Seconds that one may wait; 0 sets no limit.
        """
        self._max_held, self._most_s = max_held, most_s
        self._holds: dict[Hold, float] = {}
        self._changed = asyncio.Event()
        self._closed: RefusedError | None = None
        self.is_aborting = False
        self.num_running = self.num_held = 0

    @property
    def hold(self) -> Hold | None:
        """Why requests wait; None: they do not."""
        return next((hold for hold in Hold if hold in self._holds), None)

    @property
    def hold_begin_s(self) -> float:
        """Since when, in `time.monotonic`."""
        return min(self._holds.values())

    def has(self, hold: Hold) -> bool:
        """Whether this is one of the reasons."""
        return hold in self._holds

    def begin(self, hold: Hold) -> None:
        """Let requests that come wait."""
        self._holds.setdefault(hold, time.monotonic())

    def end(self, hold: Hold) -> None:
        """Let them in, if nothing else holds them."""
        self._holds.pop(hold, None)
        self._wake()

    def close(self, error: RefusedError | None) -> None:
        """Refuse requests that wait, and all that would; None: no longer."""
        self._closed = error
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Wait until nothing holds requests; then this one runs.

        Raises:
            RefusedError: If too many wait, it waits too long, or the server stops.
        """
        if self._holds:
            await self._wait()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._wake()

    async def _wait(self) -> None:
        if self.num_held >= self._max_held:
            raise RefusedError(
                f"{self.num_held} requests wait for the server, which is {self._why()}; try again "
                "later",
                status=429,
                code="queue_full",
            )
        self.num_held += 1
        try:
            async with asyncio.timeout(self._most_s or None):
                while self._holds and self._closed is None:
                    await self._changed.wait()
        except TimeoutError as error:
            raise RefusedError(
                f"the server is {self._why()}, and the request waited {self._most_s:g} s",
                status=504,
                code="timeout",
            ) from error
        finally:
            self.num_held -= 1
        if self._closed is not None:
            raise self._closed

    def _why(self) -> str:
        return "ready" if self.hold is None else self.hold.value

    async def quiet(self) -> None:
        """Wait until no request runs."""
        while self.num_running:
            await self._changed.wait()
