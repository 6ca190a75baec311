# SPDX-License-Identifier: Apache-2.0
"""A timeline in Chrome's trace format, which https://ui.perfetto.dev opens."""

import json
import time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

HOST, DEVICE, DISPATCH = 1, 2, 3
_NAMES = {
    HOST: "host",
    DEVICE: "device, from launch to the result being read",
    DISPATCH: "dispatch thread, calls of programs",
}


@runtime_checkable
class TracesEvents(Protocol):
    """What the engine tells its events to."""

    def span(self, track: int, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        """Something that took from `begin_s` to `end_s` of `time.perf_counter`."""
        ...

    def request(self, phase: str, key: str, name: str, **facts: Any) -> None:
        """A sequence's life, now: phase "b" begins, "n" is a point, "e" ends."""
        ...


class NoTrace:
    """Keeps nothing."""

    def span(self, track: int, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        """See `TracesEvents`."""

    def request(self, phase: str, key: str, name: str, **facts: Any) -> None:
        """See `TracesEvents`."""


NO_TRACE = NoTrace()


class Trace:
    """Keeps events in memory until they are written."""

    def __init__(self):
        """Begin now."""
        self._begin_s = time.perf_counter()
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}
            for track, name in _NAMES.items()
        ]

    def span(self, track: int, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        """See `TracesEvents`."""
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "pid": 1,
                "tid": track,
                "ts": self._us(begin_s),
                "dur": (end_s - begin_s) * 1e6,
                "args": facts,
            }
        )

    def request(self, phase: str, key: str, name: str, **facts: Any) -> None:
        """See `TracesEvents`."""
        self._events.append(
            {
                "ph": phase,
                "cat": "request",
                "id": key,
                "name": name,
                "pid": 1,
                "tid": HOST,
                "ts": self._us(time.perf_counter()),
                "args": facts,
            }
        )

    def write(self, path: Path) -> None:
        """Write what was kept so far."""
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))

    def _us(self, at_s: float) -> float:
        return (at_s - self._begin_s) * 1e6
