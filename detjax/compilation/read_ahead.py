# SPDX-License-Identifier: Apache-2.0
"""What a start will need, read while it is still busy with something else.

XLA unpacks an executable that is read and prints each of its instructions, some 0.07 s of one core,
and a start has as many executables as its configuration has programs. Which they are, an earlier
start has written down.
"""

import atexit
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from detjax.compilation.kept_programs import VerifiedCache

NUM_THREADS = 4
"""That read at once, beside those that read weights."""


class ReadAhead:
    """Names that the last start used, in order, each read by a thread until it is taken."""

    def __init__(self, folder: VerifiedCache, name: str, read: Callable[[str], Any]):
        """Begin to read.

        Args:
            folder: Where names are written down.
            name: Of the list.
            read: Gives what a name stands for, or None.
        """
        self._folder, self._name, self._read = folder, name, read
        self._lock = threading.Lock()
        self._used: dict[str, None] = {}
        held = folder.get(name)
        self._waiting: dict[str, Future[Any]] = {}
        for each in [] if held is None else json.loads(held):
            self._waiting[each] = Future()
        todo = iter(list(self._waiting.items()))
        self._threads = [
            threading.Thread(target=self._work, args=(todo,), daemon=True)
            for _ in range(min(NUM_THREADS, len(self._waiting)))
        ]
        for thread in self._threads:
            thread.start()
        # WHY: a thread that is still in jaxlib when the interpreter ends would end it with a crash.
        atexit.register(_stop, weakref.ref(self))

    def _work(self, todo: Iterator[tuple[str, Future[Any]]]) -> None:
        while True:
            with self._lock:
                entry = next(todo, None)
            if entry is None:
                return
            name, future = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._read(name))
                except BaseException as error:
                    future.set_exception(error)

    def take(self, name: str) -> Any:
        """What has been read under a name, now or when it is; None if it is for you to read."""
        with self._lock:
            future = self._waiting.pop(name, None)
        if future is None or future.cancel():
            return None
        return future.result()

    def note(self, name: str) -> None:
        """Write down that this process uses a name, for the next one.

        Raises:
            OSError: If it cannot be written.
        """
        with self._lock:
            if name in self._used:
                return
            self._used[name] = None
            self._folder.put(self._name, json.dumps(list(self._used)).encode())

    def stop(self) -> None:
        """Forget what nobody has taken, and wait for what is being read."""
        with self._lock:
            left = list(self._waiting.values())
            self._waiting.clear()
        for future in left:
            future.cancel()
        for thread in self._threads:
            thread.join()


def _stop(of: weakref.ref[ReadAhead]) -> None:
    ahead = of()
    if ahead is not None:
        ahead.stop()
