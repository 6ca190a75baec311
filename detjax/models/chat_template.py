# SPDX-License-Identifier: Apache-2.0
"""Chat templates: programs that come with a model, so they run where they can do no harm.

That is a process of its own, with bounded time and memory, an empty environment and Jinja's
sandbox: `detjax.models.template_process`. It is kept for the next conversation.
"""

import contextlib
import functools
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jinja2

from detjax.models import template_process
from detjax.models.template_process import MEMORY_BYTES, RENDER_S, make_environment

START_S = 60.0
"""Seconds that a process may take to start, and to read what it works with."""

TEMPLATE_CHARS = 2**20
"""Longest template."""

OWN = template_process.OWN.decode()
TOLD = template_process.TOLD.decode()
UNKNOWN = template_process.UNKNOWN.decode()
"""Where a character is from; see `Rendered.origin`."""

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
"""Of a template that reads the messages alone."""
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """What a template made of a conversation.

    Attributes:
        text: All of it.
        origin: Where each character is from: `OWN` of the template, `TOLD` of the messages and
            variables, `UNKNOWN` if what the template did to it does not show.
    """

    text: str
    origin: str


def check_template(template: str) -> None:
    """Read a template without running or compiling any of it.

    Raises:
        ValueError: If it has a syntax error, or is too long or too deep.
    """
    if len(template) > TEMPLATE_CHARS:
        raise ValueError(
            f"the chat template has {len(template)} characters, more than {TEMPLATE_CHARS}"
        )
    try:
        make_environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template has a syntax error: {error}") from error
    except RecursionError as error:
        raise ValueError("the chat template is nested too deeply") from error


def render_template(
    template: str, told: Mapping[str, Any], own: Mapping[str, Any] = NO_VARIABLES
) -> Rendered:
    """Render a template with values that JSON can hold.

    Args:
        template: Of the model.
        told: What the client says: `messages`, and other variables.
        own: What the model's folder adds: `bos_token` and the like.

    Raises:
        ValueError: If it raises, or takes too long or too much memory.
    """
    return _renderer(template).render(told, own)


def start_template(template: str) -> None:
    """Start the process of a template, in a thread, for whoever will soon render with it."""
    threading.Thread(target=_renderer(template).start, daemon=True).start()


@functools.lru_cache(maxsize=16)
def _renderer(template: str) -> "_Renderer":
    return _Renderer(template)


class _Renderer:
    """The process of one template. It starts when it is needed and ends with this object."""

    def __init__(self, template: str):
        self._template = template
        self._processes: list[subprocess.Popen[bytes]] = []  # one or none
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._processes)

    def start(self) -> None:
        """Start the process. If that fails, `render` tries again and says why."""
        with self._lock:
            try:
                self._started()
            except Exception:
                _end_all(self._processes)

    def render(self, told: Mapping[str, Any], own: Mapping[str, Any]) -> Rendered:
        try:
            context = {"told": dict(told), "own": dict(own)}
            line = json.dumps(context, default=_as_dict).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a chat template takes what JSON can hold: {error}") from error
        with self._lock:
            try:
                reply = json.loads(self._exchange(self._started(), line, RENDER_S))
            except BaseException:
                _end_all(self._processes)
                raise
        if "error" in reply:
            raise ValueError(reply["error"])
        origin = "".join(kind * length for kind, length in reply["origin"])
        return Rendered(text=reply["text"], origin=origin)

    def _started(self) -> "subprocess.Popen[bytes]":
        if not self._processes:
            process = subprocess.Popen(
                [sys.executable, "-P", template_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            )
            self._processes.append(process)
            line = json.dumps(self._template).encode() + b"\n"
            self._exchange(process, line, START_S)
        return self._processes[0]

    def _exchange(
        self, process: "subprocess.Popen[bytes]", line: bytes, limit_s: float
    ) -> bytearray:
        """Send a line and wait for one."""
        assert process.stdin is not None and process.stdout is not None
        end_s, sent, reply = time.monotonic() + limit_s, 0, bytearray()
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise ValueError(f"it took more than {limit_s:.0f} s")
                for key, _ in selector.select(left_s):
                    if key.fileobj is process.stdin:
                        with contextlib.suppress(BrokenPipeError):  # reading tells what happened
                            sent += os.write(process.stdin.fileno(), line[sent : sent + 2**16])
                        if sent == len(line) or process.poll() is not None:
                            selector.unregister(process.stdin)
                    elif piece := os.read(process.stdout.fileno(), 2**16):
                        reply += piece
                    else:
                        raise ValueError(
                            f"its process ended with {process.wait()}; it may use "
                            f"{MEMORY_BYTES >> 20} MiB"
                        )
        return reply


def _end_all(processes: "list[subprocess.Popen[bytes]]") -> None:
    while processes:
        process = processes.pop()
        process.kill()
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()


def _as_dict(value: Any) -> dict:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}")
