# SPDX-License-Identifier: Apache-2.0
"""Standard output: completions as text, as lines of JSON, or as a part of one document."""

import abc
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from detjax.engine.outputs.completion import CompletionOutput


@runtime_checkable
class TextSink(Protocol):
    """Where text is written: standard output."""

    def write(self, text: str, /) -> int:
        """Take text."""
        ...

    def flush(self) -> None:
        """Hand on what was taken."""
        ...


class AbstractCompletionWriter(abc.ABC):
    """Writes completions one after the other, each from its first token on."""

    @abc.abstractmethod
    def begin(self, index: int, seq: int) -> None:
        """Begin a completion."""

    @abc.abstractmethod
    def write(self, text: str) -> None:
        """Take more of its text."""

    @abc.abstractmethod
    def end(self, output: CompletionOutput) -> None:
        """End it."""


class SilentWriter(AbstractCompletionWriter):
    """Writes nothing: one JSON document is written at the end, and a check's other runs never."""

    def begin(self, index: int, seq: int) -> None:
        """Do nothing."""

    def write(self, text: str) -> None:
        """Do nothing."""

    def end(self, output: CompletionOutput) -> None:
        """Do nothing."""


class TextWriter(AbstractCompletionWriter):
    """Writes text as it is made, under a line that names it where there are several."""

    def __init__(self, out: TextSink, *, has_headers: bool):
        """Write to `out`."""
        self._out = out
        self._has_headers = has_headers

    def begin(self, index: int, seq: int) -> None:
        """Name the completion."""
        if self._has_headers:
            self._out.write(f"=== prompt {index}, sequence {seq} ===\n")

    def write(self, text: str) -> None:
        """Write at once, not when a line is full."""
        self._out.write(text)
        self._out.flush()

    def end(self, output: CompletionOutput) -> None:
        """End the line."""
        self._out.write("\n")
        self._out.flush()


class JsonLinesWriter(AbstractCompletionWriter):
    """Writes a line of JSON when a completion ends."""

    def __init__(
        self, out: TextSink, model: Mapping[str, Any], extras: Sequence[Mapping[str, Any]]
    ):
        """Write to `out` what `model` made, with what is in `extras` under a prompt's index."""
        self._out, self._model, self._extras = out, model, extras

    def begin(self, index: int, seq: int) -> None:
        """Wait for the end."""

    def write(self, text: str) -> None:
        """Wait for the end."""

    def end(self, output: CompletionOutput) -> None:
        """Write the line."""
        entry = entry_of(output, self._extras)
        self._out.write(to_json({**entry, "model": self._model}) + "\n")
        self._out.flush()


def entry_of(output: CompletionOutput, extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a completion as JSON has it, with what its prompt came with."""
    return {**output.as_dict(), **extras[output.completion.request_idx]}


def make_writer(
    output_format: str,
    out: TextSink,
    *,
    has_headers: bool,
    model: Mapping[str, Any],
    extras: Sequence[Mapping[str, Any]],
) -> AbstractCompletionWriter:
    """Return the writer for a value of `--format`; JSON says of what `model` it is."""
    if output_format == "text":
        return TextWriter(out, has_headers=has_headers)
    if output_format == "jsonl":
        return JsonLinesWriter(out, model, extras)
    return SilentWriter()


def to_json(value: Any) -> str:
    """Dump on one line; characters are written as they are."""
    return json.dumps(value, ensure_ascii=False)


def digest_of_all(outputs: Sequence[CompletionOutput]) -> str:
    """Return the digest of one completion; of several, sha256 over theirs, in order."""
    digests = [output.digest() for output in outputs]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
