# SPDX-License-Identifier: Apache-2.0
"""The interpreter ends only when no thread is at work for detjax.

WHY: a daemon thread that asks for Python's lock once the interpreter ends is ended by unwinding its
stack (Python 3.12 and 3.13). Functions of jaxlib and of tokenizers may not be unwound: the process
then ends by SIGABRT, whatever its exit status was to be.
"""

import concurrent.futures.thread  # noqa: F401, first: see below
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
"""How long the end of the interpreter waits for threads at work."""


class InterpreterExitError(RuntimeError):
    """The interpreter ends, and nothing new is begun."""


class ExitGate:
    """Counts threads that are at work, and lets the interpreter's end wait for them.

    The main thread is not counted: it is the one that waits.
    """

    def __init__(self) -> None:
        """Nobody is at work."""
        self._changed = threading.Condition()
        self._inside: set[int] = set()  # of `threading.get_ident`
        self._is_closed = False
        # WHY: an error holds the frames that it has passed. A thread that ends would free their
        # arrays and engines, in jaxlib, while the interpreter ends.
        self._kept: dict[int, BaseException] = {}

    def refuse_if_closed(self) -> None:
        """Refuse to begin anything.

        Raises:
            InterpreterExitError: If the interpreter ends.
        """
        if self._is_closed:
            raise InterpreterExitError(
                "the interpreter ends, and detjax begins nothing more; join() the threads that "
                "call it before the main thread ends"
            )

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Be at work; the interpreter does not end meanwhile. It may be nested.

        Raises:
            InterpreterExitError: If the interpreter ends.
            SystemExit: In place of any error in a daemon thread, if the interpreter ends.
        """
        ident = threading.get_ident()
        is_counted = ident != threading.main_thread().ident and ident not in self._inside
        if not is_counted:
            self.refuse_if_closed()
            yield
            return
        with self._changed:
            self._inside.add(ident)
        try:
            self.refuse_if_closed()
            yield
        except Exception as error:
            if not self._is_closed:
                raise
            self._kept.setdefault(ident, error)
            if not threading.current_thread().daemon:
                raise
            # WHY: Python prints any other error of a thread. A thread that Python ends while it
            # prints keeps the lock of stderr, which ends the process by SIGABRT as well.
            ended = self._kept[ident] = SystemExit(str(error))
            raise ended from error
        finally:
            with self._changed:
                self._inside.discard(ident)
                self._changed.notify_all()

    def close(self) -> None:
        """Let nothing more begin, and wait until nobody is at work, for `PATIENCE_S` at most.

        Ctrl-C ends the wait.
        """
        with contextlib.suppress(KeyboardInterrupt), self._changed:
            self._is_closed = True
            if not self._changed.wait_for(lambda: not self._inside, PATIENCE_S):
                print(
                    f"detjax: {len(self._inside)} threads are still at work after {PATIENCE_S:g} "
                    "s, and the interpreter ends without them; it may end by SIGABRT",
                    file=sys.stderr,
                )

    def forget_threads(self) -> None:
        """Forget the threads of the process that this one was forked from."""
        self._changed, self._inside = threading.Condition(), set()


@functools.cache  # WHY: not a constant of this module: those count in the names of kept programs
def _gate() -> ExitGate:
    """The gate of this process."""
    return ExitGate()


# WHY: `atexit` comes too late. Python closes all executors before, so that a call under way would
# fail with an error about futures. `concurrent.futures.thread` registers that by the same function,
# and what is registered last is called first.
threading._register_atexit(_gate().close)  # pyright: ignore[reportAttributeAccessIssue]
os.register_at_fork(after_in_child=_gate().forget_threads)


def working() -> contextlib.AbstractContextManager[None]:
    """`ExitGate.working` of this process."""
    return _gate().working()


def refuse_at_exit() -> None:
    """`ExitGate.refuse_if_closed` of this process."""
    _gate().refuse_if_closed()


def finishes_before_exit[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Let the interpreter's end wait for calls of a function, and refuse those that come later.

    Args:
        function: Works with arrays, programs or tokenizers. One that runs long asks
            `refuse_at_exit` from time to time.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with working():
            return function(*args, **kwargs)

    return call
