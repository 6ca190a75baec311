# SPDX-License-Identifier: Apache-2.0
"""How far a start is: a bar on a terminal, else a line now and then."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

EVERY_S = 5.0
"""Seconds between lines where there is no terminal."""

Progress = Callable[[str, int, int], None]
"""Told (what was just done, done, total)."""
Say = Callable[[str], None]
"""Writes a line."""


class Heartbeat:
    """Says what is going on every few seconds, while it goes on, from a thread of its own."""

    def __init__(self, say: Say):
        """Say nothing until `update`."""
        self._say, self._text = say, ""
        self._stop: threading.Event | None = None

    def update(self, text: str) -> None:
        """From now on this is going on."""
        self._text = text
        if self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._beat, args=(self._stop,), daemon=True).start()

    def stop(self) -> None:
        """Nothing goes on any more."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _beat(self, stop: threading.Event) -> None:
        begin_s = time.monotonic()
        while not stop.wait(EVERY_S):
            self._say(f"{self._text}, {time.monotonic() - begin_s:.0f} s")


@contextlib.contextmanager
def show_progress(
    stage: str, console: rich.console.Console, say: Say, *, in_bytes: bool = False, then: str = ""
) -> Iterator[Progress]:
    """Show how far a stage of a start is, until the end of the context.

    Args:
        stage: What is done, such as "compiling".
        console: Shows a bar if it is a terminal.
        say: Writes a line now and then if it is none.
        in_bytes: What is counted are bytes.
        then: What is done once all is counted; empty is nothing.
    """
    if console.is_terminal:
        with _bar(stage, console, in_bytes=in_bytes, then=then) as bar:
            yield bar
        return

    heartbeat = Heartbeat(say)

    def progress(what: str, done: int, total: int) -> None:
        far = f"{done / max(total, 1):.0%}" if in_bytes else f"{done} of {total}"
        heartbeat.update(then if then and done == total else f"{stage}: {far}")

    heartbeat.update(stage)
    try:
        yield progress
    finally:
        heartbeat.stop()


@contextlib.contextmanager
def _bar(
    stage: str, console: rich.console.Console, *, in_bytes: bool, then: str
) -> Iterator[Progress]:
    columns = rich.progress.Progress.get_default_columns()
    if not in_bytes:
        columns += (rich.progress.MofNCompleteColumn(),)
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(stage, total=None)

        def progress(what: str, done: int, total: int) -> None:
            is_then = then and done == total
            shown = then if is_then else f"{stage} {what}"
            bar.update(task, description=shown, completed=done, total=None if is_then else total)

        yield progress
