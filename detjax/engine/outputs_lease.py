# SPDX-License-Identifier: Apache-2.0
"""Which `AsyncEngine` has the outputs of an engine's steps: one at a time."""

import threading
import weakref
from typing import Protocol, runtime_checkable

from detjax.engine.errors import EngineInUseError


@runtime_checkable
class TakesOutputs(Protocol):
    """What holds a lease."""

    @property
    def has_open_requests(self) -> bool:
        """Whether outputs of its requests are to come, which it can still hand on."""
        ...


class OutputsLease[T: TakesOutputs]:
    """Names the one holder of an engine's outputs.

    A step returns outputs of all requests, once. Were two objects to step, each would drop what it
    does not know.

    Attributes:
        lock: Held while requests are opened, and while outputs are handed to the holder. So no
            output of a request is handed on before its holder knows the request.
        stepping: Held by a thread from its first step until the outputs of its last are handed
            over. So outputs keep the order of steps while one holder takes over from another.
    """

    def __init__(self):
        """Begin without a holder."""
        self.lock = threading.Lock()
        self.stepping = threading.Lock()
        self._holder: weakref.ref[T] | None = None

    @property
    def holder(self) -> T | None:
        """The holder now, if there is one."""
        return None if self._holder is None else self._holder()

    def take(self, holder: T) -> None:
        """Give the outputs to a holder, with `lock` held.

        Raises:
            EngineInUseError: If another holder has requests open.
        """
        other = self.holder
        if other is not None and other is not holder and other.has_open_requests:
            raise EngineInUseError(
                "another AsyncEngine has requests open on this engine, and would lose the outputs "
                "of one of the two; use one AsyncEngine for each engine"
            )
        self._holder = weakref.ref(holder)
