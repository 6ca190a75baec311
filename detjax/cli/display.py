# SPDX-License-Identifier: Apache-2.0
"""Standard error, as far as its kind of terminal can show it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import rich.console
import rich.progress
from rich.table import Table
from rich.text import Text

from detjax.cli.model import Progress


class Display:
    """Everything on standard error but the one line of an error."""

    def __init__(self):
        """Write to standard error, with what its kind of terminal can show."""
        self._console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("")

    def facts(self, facts: Mapping[str, str]) -> None:
        """Write a line for each: its name, and what it is."""
        for name, value in facts.items():
            self._console.print(Text.assemble((f"{name:<11}", "dim"), " ", value))

    def line(self, text: str, *, style: str = "") -> None:
        """Write a line."""
        self._console.print(Text(text, style=style))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write a table."""
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(str, row))
        self._console.print(table)

    @contextlib.contextmanager
    def loading(self) -> Iterator[Progress]:
        """Show how far loading is. Yields a function of (what, done, total)."""
        is_hidden = not self._console.is_terminal
        with rich.progress.Progress(
            console=self._console, transient=True, disable=is_hidden
        ) as bar:
            task = bar.add_task("load", total=None)

            def progress(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total)

            yield progress

    def busy(self, text: str) -> None:
        """Show that something is going on, on a terminal, until `idle`."""
        if self._console.is_terminal:
            self._status.update(text)
            self._status.start()

    def idle(self) -> None:
        """Take away what `busy` shows."""
        self._status.stop()
