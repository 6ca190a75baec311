# SPDX-License-Identifier: Apache-2.0
"""How far a start is: a bar on a terminal, else a line now and then."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.progress

EVERY_S = 5.0
"""Seconds between lines where there is no terminal."""

COMPILE_STAGES = "compiling programs", "checking programs"
"""Of `Engine.compile`."""

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
    stage: str, console: rich.console.Console, say: Say, *, in_bytes: bool = False
) -> Iterator[Progress]:
    """Show how far a stage of a start is: `show_stages` of one."""
    with show_stages((stage,), console, say, in_bytes=in_bytes) as (progress,):
        yield progress


@contextlib.contextmanager
def show_stages(
    stages: Sequence[str], console: rich.console.Console, say: Say, *, in_bytes: bool = False
) -> Iterator[list[Progress]]:
    """Show how far stages of a start are, which may overlap, until the end of the context.

    Args:
        stages: What is done, such as "compiling"; all but the first begin when they are told of.
        console: Shows bars if it is a terminal.
        say: Writes a line now and then if it is none.
        in_bytes: What is counted are bytes.
    """
    if console.is_terminal:
        columns = rich.progress.Progress.get_default_columns()
        if not in_bytes:
            columns += (rich.progress.MofNCompleteColumn(),)
        with rich.progress.Progress(*columns, console=console, transient=True) as bar:
            yield [_bar(bar, stage, is_seen=stage == stages[0]) for stage in stages]
        return

    heartbeat, far = Heartbeat(say), {stages[0]: stages[0]}

    def of(stage: str) -> Progress:
        def progress(what: str, done: int, total: int) -> None:
            share = f"{done / max(total, 1):.0%}" if in_bytes else f"{done} of {total}"
            far[stage] = f"{stage}: {share}"
            heartbeat.update(", ".join(list(far.values())))

        return progress

    heartbeat.update(stages[0])
    try:
        yield [of(stage) for stage in stages]
    finally:
        heartbeat.stop()


def _bar(bar: rich.progress.Progress, stage: str, *, is_seen: bool) -> Progress:
    """A line of a bar, which appears when something is told."""
    task = bar.add_task(stage, total=None, visible=is_seen)

    def progress(what: str, done: int, total: int) -> None:
        bar.update(task, description=f"{stage} {what}", completed=done, total=total, visible=True)

    return progress
