# SPDX-License-Identifier: Apache-2.0
"""Standard error, as far as its kind of terminal can show it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import rich.console
from rich.table import Table
from rich.text import Text

from detjax.escaping import escaped
from detjax.progress import COMPILE_STAGES, Heartbeat, Progress, show_progress, show_stages

MAX_LINES = 10
"""Most differences that are written, one a line."""


class Display:
    """Everything on standard error but the one line of an error."""

    def __init__(self, *, is_quiet: bool = False):
        """Write to standard error, with what its kind of terminal can show.

        Args:
            is_quiet: Write only lines in red: what is wrong.
        """
        self._console = rich.console.Console(
            stderr=True, highlight=False, soft_wrap=True, quiet=is_quiet
        )
        self._loud = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._heartbeat = Heartbeat(self.line)

    @property
    def is_terminal(self) -> bool:
        """Whether there is one."""
        return self._console.is_terminal

    def facts(self, facts: Mapping[str, str]) -> None:
        """Write a line for each: its name, and what it is."""
        for name, value in facts.items():
            self._console.print(Text.assemble((f"{name:<11}", "dim"), " ", escaped(value)))

    def line(self, text: str, *, style: str = "") -> None:
        """Write a line, without control characters."""
        console = self._loud if "red" in style else self._console
        console.print(Text(escaped(text), style=style))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write a table."""
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(escaped(str(cell))) for cell in row))
        self._console.print(table)

    def progress(self, stage: str, *, in_bytes: bool = False) -> AbstractContextManager[Progress]:
        """See `show_progress`. Yields a function of (what, done, total)."""
        return show_progress(stage, self._console, self.line, in_bytes=in_bytes)

    def compiling(self) -> AbstractContextManager[list[Progress]]:
        """`progress` of programs, as they are compiled and as they are checked."""
        return show_stages(COMPILE_STAGES, self._console, self.line)

    def busy(self, text: str) -> None:
        """Show that something is going on, until `idle`: elsewhere than on a terminal by lines."""
        if self._console.is_terminal:
            self._status.update(text)
            self._status.start()
        else:
            self._heartbeat.update(text)

    def idle(self) -> None:
        """Take away what `busy` shows."""
        self._status.stop()
        self._heartbeat.stop()
