# SPDX-License-Identifier: Apache-2.0
"""Chat templates: programs that come with a model, so they run where they can do no harm.

That is a process of its own, with bounded time and memory, an empty environment and Jinja's
sandbox. The process runs this very file, which imports nothing of detjax, and is kept for the next
conversation.
"""

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

START_S = 60.0
"""For Python to start."""

RENDER_S = 10.0
"""For a conversation; the first one also compiles the template."""

MEMORY_BYTES = 2**30
"""Address space of the process, where the system bounds it."""

TEMPLATE_CHARS, TEXT_CHARS = 2**20, 2**25
"""Longest template, and longest text that it may give."""

_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


# ------------------------------------------------------------------------- what a template may do


def make_environment() -> jinja2.Environment:
    """The sandbox and the names that transformers gives, less what is random."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    # WHY: a prompt must be the same in every process.
    del environment.globals["lipsum"], environment.filters["random"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Keep the body as a block of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("render_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def render_body(self, caller: Any) -> str:
        """Return what the body renders."""
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump without HTML escapes, which Jinja's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


# ------------------------------------------------------------------------------ the calling side


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


def render_template(template: str, context: Mapping[str, Any]) -> str:
    """Render a template with values that JSON can hold.

    Raises:
        ValueError: If it raises, or takes too long or too much memory.
    """
    return _renderer(template).render(context)


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

    def render(self, context: Mapping[str, Any]) -> str:
        try:
            line = json.dumps(dict(context), default=_as_dict).encode() + b"\n"
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
        return reply["text"]

    def _started(self) -> "subprocess.Popen[bytes]":
        if not self._processes:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__],
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


# --------------------------------------------------------------------------------- the other side


def _serve() -> None:
    """Read a template, then contexts, a line each, and answer each with a line."""
    template = json.loads(sys.stdin.buffer.readline())
    _bound_memory()
    compiled = None
    _reply({})
    while line := sys.stdin.buffer.readline():
        # Ends this process should the one that waits for it be gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * RENDER_S)
        try:
            compiled = compiled or make_environment().from_string(template)
            text = compiled.render(json.loads(line))
            if len(text) > TEXT_CHARS:
                raise ValueError(f"it gave {len(text)} characters, more than {TEXT_CHARS}")
            reply = {"text": text}
        except Exception as error:
            reply = {"error": f"{error}" or type(error).__name__}
        _reply(reply)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _bound_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has it
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _reply(reply: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
