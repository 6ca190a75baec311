# SPDX-License-Identifier: Apache-2.0
"""Compiles ahead, for `--warm`: what a later start will find on the disk."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from detjax.progress import Progress

if TYPE_CHECKING:  # imports JAX
    from detjax.engine.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A program, and when it was ready, in seconds after the first was begun."""

    name: str
    ready_s: float


def warm(engine: "Engine", progress: Progress, checked: Progress) -> tuple[Compiled, ...]:
    """Compile all that requests can need, several programs at a time.

    Args:
        engine: Which has computed nothing.
        progress: Told (what, done, total) of what is compiled.
        checked: The same of what is checked.
    """
    begin_s = time.perf_counter()
    found = []

    def compiled(what: str, done: int, total: int) -> None:
        found.append(Compiled(name=what, ready_s=time.perf_counter() - begin_s))
        progress(what, done, total)

    engine.compile(compiled, checked=checked)
    return tuple(found)
