# SPDX-License-Identifier: Apache-2.0
"""The process of a chat template: Jinja's sandbox, and text that knows where it is from.

`detjax.models.chat_template` runs this file, which imports nothing of detjax.

A control token counts if the template wrote it. So every text in the sandbox carries the origin of
each of its characters, through joins, cuts and filters. What an operation that is not followed here
returns has no known origin; a control token in it is refused by who reads the answer.
"""

import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, SupportsIndex

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

RENDER_S = 10.0
"""For a conversation; the first one also compiles the template."""

MEMORY_BYTES = 2**30
"""Address space of the process, where the system bounds it."""

TEXT_CHARS = 2**25
"""Longest text that a template may give."""

OWN, TOLD, UNKNOWN = b"o", b"t", b"?"
"""Where a character is from: of the template, of the messages, or not known."""


# --------------------------------------------------------------------------------- text with origin


class Traced(str):
    """A text that knows where each of its characters is from: one byte of `_origin` each.

    It is the same text to every comparison, look-up and test. A method that is not among those
    below returns a `str`, all of whose characters have no known origin.
    """

    __slots__ = ("_origin",)
    _origin: bytes

    def __new__(cls, text: str, origin: bytes | None = None) -> "Traced":
        """Without an origin, that of `text`."""
        traced = super().__new__(cls, text)
        traced._origin = _origin(text) if origin is None else origin
        return traced

    def __str__(self) -> "Traced":
        return self

    def __getitem__(self, index: Any) -> "Traced":
        of = self._origin[index] if isinstance(index, slice) else bytes([self._origin[index]])
        return Traced(str.__getitem__(self, index), of)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str) and not hasattr(other, "__html__"):
            return concat((self, other))
        return NotImplemented if hasattr(other, "__radd__") else str.__add__(self, other)

    def __radd__(self, other: Any) -> Any:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> "Traced":
        return Traced(str.__mul__(self, count), self._origin * count)

    def __rmul__(self, count: SupportsIndex) -> "Traced":
        return self * count

    def join(self, pieces: Iterable[str]) -> "Traced":  # noqa: D102
        return concat([one for piece in pieces for one in (self, piece)][1:])

    def strip(self, chars: str | None = None) -> "Traced":  # noqa: D102
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "Traced":  # noqa: D102
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> "Traced":  # noqa: D102
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str) -> "Traced":  # noqa: D102
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> "Traced":  # noqa: D102
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:  # noqa: D102
        return self._found(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:  # noqa: D102
        return self._found(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def partition(self, sep: str) -> Any:  # noqa: D102
        return tuple(self._found(str.partition(self, sep), 0))

    def rpartition(self, sep: str) -> Any:  # noqa: D102
        return tuple(self._found(str.rpartition(self, sep), 0))

    def splitlines(self, keepends: bool = False) -> list[Any]:  # noqa: D102
        lines = self._found(str.splitlines(self, True), 0)
        kept = str.splitlines(self, keepends)
        return [line[: len(text)] for line, text in zip(lines, kept, strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:  # noqa: D102
        if not old:
            return str.replace(self, old, new, count)
        return Traced(new).join(self.split(old, count))

    def _found(self, pieces: Iterable[str], gap: int) -> list["Traced"]:
        """The pieces, which follow each other in this text with at least `gap` between them."""
        found, at = [], 0
        for piece in pieces:
            at = str.index(self, piece, at)
            found.append(self[at : at + len(piece)])
            at += len(piece) + gap
        return found

    def _changed(self, text: str) -> "Traced":
        # A change of case never makes fewer of a character, so equal lengths are one for one.
        return Traced(text, self._origin if len(text) == len(self) else None)

    def upper(self) -> "Traced":  # noqa: D102
        return self._changed(str.upper(self))

    def lower(self) -> "Traced":  # noqa: D102
        return self._changed(str.lower(self))

    def capitalize(self) -> "Traced":  # noqa: D102
        return self._changed(str.capitalize(self))

    def title(self) -> "Traced":  # noqa: D102
        return self._changed(str.title(self))


def _origin(text: str) -> bytes:
    return text._origin if isinstance(text, Traced) else UNKNOWN * len(text)


def concat(pieces: Iterable[str]) -> Traced:
    """Join texts."""
    pieces = list(pieces)
    return Traced("".join(pieces), b"".join(map(_origin, pieces)))


def traced(value: Any, origin: bytes) -> Any:
    """Give every text of a value this origin, keys of mappings among them."""
    if isinstance(value, str):
        return Traced(value, origin * len(value))
    if isinstance(value, dict):
        return {traced(key, origin): traced(one, origin) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(traced(one, origin) for one in value)
    return value


def _is_told(value: Any) -> bool:
    """Whether all texts of a value are of the messages; a plain word, such as a role, may be."""
    if isinstance(value, str):
        return not _origin(value).strip(TOLD) or re.fullmatch(r"[A-Za-z_]*", value) is not None
    if isinstance(value, Mapping):
        return all(_is_told(one) for pair in value.items() for one in pair)
    return not isinstance(value, list | tuple) or all(map(_is_told, value))


# -------------------------------------------------------------------------------------- the sandbox


def make_environment() -> jinja2.Environment:
    """The sandbox and the names that transformers gives, less what is random."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    # WHY: a prompt must be the same in every process.
    del environment.globals["lipsum"], environment.filters["random"]
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Marks the texts of a template as its own."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str | dict | list | tuple):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({super()._output_const_repr(group)})"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    concat: Callable[[Iterable[str]], str] = staticmethod(concat)

    def own(self, value: Any) -> Any:
        """A constant of the template."""
        return traced(value, OWN)


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
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    # What is of the messages stays so, with the signs around it.
    return Traced(text, TOLD * len(text)) if _is_told(value) else text


@jinja2.pass_eval_context
def _join(context: jinja2.nodes.EvalContext, value: Any, d: str = "", attribute: Any = None) -> str:
    # WHY: the default is a text of Jinja's own, whose `join` follows no origin.
    d = Traced(d) if isinstance(d, str) else d
    return jinja2.filters.sync_do_join(context, value, d, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


# ------------------------------------------------------------------------------------- the process


def render(template: jinja2.Template, own: dict[str, Any], told: dict[str, Any]) -> Traced:
    """Render what a conversation tells; its roles are names that the template knows."""
    told = traced(told, TOLD)
    for message in told.get("messages", ()):
        if "role" in message:
            message["role"] = traced(message["role"], OWN)
    text = template.render(traced(own, OWN) | told)
    if len(text) > TEXT_CHARS:
        raise ValueError(f"it gave {len(text)} characters, more than {TEXT_CHARS}")
    return Traced(text)


def _serve() -> None:
    """Read a template, then the two parts of contexts, a line each; answer each with a line."""
    template = json.loads(sys.stdin.buffer.readline())
    _bound_memory()
    compiled = None
    _reply({})
    while line := sys.stdin.buffer.readline():
        # Ends this process should the one that waits for it be gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * RENDER_S)
        try:
            compiled = compiled or make_environment().from_string(template)
            text = render(compiled, **json.loads(line))
            runs = [found[0] for found in re.finditer(rb"(.)\1*", text._origin)]
            origin = [(run[:1].decode(), len(run)) for run in runs]
            reply = {"text": str.__str__(text), "origin": origin}
        except Exception as error:
            reply = {"error": f"{error}" or type(error).__name__}
        _reply(reply)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _bound_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has it
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _reply(reply: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
