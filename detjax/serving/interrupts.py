# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C that waits its turn."""

import signal
import threading
from typing import Any


class HeldInterrupts:
    """Lets Ctrl-C wait until the block is left: what is in it happens wholly or not at all.

    Python's main thread alone is interrupted, so elsewhere there is nothing to hold.
    """

    def __enter__(self):
        self._held: list[tuple] = []
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                signal.signal(signal.SIGINT, self._hold)
                self._handler = handler

    def _hold(self, *interrupt) -> None:
        self._held.append(interrupt)

    def __exit__(self, *_):
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._held:
                self._handler(*self._held[-1])
