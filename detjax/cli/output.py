# SPDX-License-Identifier: Apache-2.0
"""Standard output: completions as text, as lines of JSON, or as a part of one document."""

import abc
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from detjax.serving.request import Completion


@runtime_checkable
class TextSink(Protocol):
    """Where text is written: standard output."""

    def write(self, text: str, /) -> int:
        """Take text."""
        ...

    def flush(self) -> None:
        """Hand on what was taken."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A completion and its text."""

    completion: Completion
    text: str


class AbstractWriter(abc.ABC):
    """Writes completions one after the other, each from its first token on."""

    @abc.abstractmethod
    def begin(self, index: int, seq: int) -> None:
        """Begin a completion."""

    @abc.abstractmethod
    def write(self, text: str) -> None:
        """Take more of its text."""

    @abc.abstractmethod
    def end(self, record: Record) -> None:
        """End it."""


class SilentWriter(AbstractWriter):
    """Writes nothing: one JSON document is written at the end, and a check's other runs never."""

    def begin(self, index: int, seq: int) -> None:
        """Do nothing."""

    def write(self, text: str) -> None:
        """Do nothing."""

    def end(self, record: Record) -> None:
        """Do nothing."""


class TextWriter(AbstractWriter):
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

    def end(self, record: Record) -> None:
        """End the line."""
        self._out.write("\n")
        self._out.flush()


class JsonLinesWriter(AbstractWriter):
    """Writes a line of JSON when a completion ends."""

    def __init__(self, out: TextSink, *, fingerprint: str):
        """Write to `out`."""
        self._out = out
        self._fingerprint = fingerprint

    def begin(self, index: int, seq: int) -> None:
        """Wait for the end."""

    def write(self, text: str) -> None:
        """Wait for the end."""

    def end(self, record: Record) -> None:
        """Write the line."""
        self._out.write(to_json(json_entry(record, self._fingerprint)) + "\n")
        self._out.flush()


def make_writer(
    output_format: str, out: TextSink, *, has_headers: bool, fingerprint: str
) -> AbstractWriter:
    """Return the writer for a value of `--format`."""
    if output_format == "text":
        return TextWriter(out, has_headers=has_headers)
    if output_format == "jsonl":
        return JsonLinesWriter(out, fingerprint=fingerprint)
    return SilentWriter()


def to_json(value: Any) -> str:
    """Dump on one line; characters are written as they are."""
    return json.dumps(value, ensure_ascii=False)


def json_entry(record: Record, fingerprint: str) -> dict[str, Any]:
    """Return a completion as JSON has it; `--help` describes it."""
    done = record.completion
    entry = {
        "index": done.request_idx,
        "sequence": done.sequence_idx,
        "prompt_token_ids": list(done.prompt_token_ids),
        "token_ids": list(done.token_ids),
        "text": record.text,
        "finish_reason": done.finish_reason.value,
        # ROUND: none; float32 to float64 is exact, and JSON's decimal names that float64.
        "logprobs": [float(logprob) for logprob in done.logprobs],
    }
    if any(done.top_logprobs):
        entry["top_logprobs"] = [
            [[token_id, float(logprob)] for token_id, logprob in top] for top in done.top_logprobs
        ]
    return {**entry, "digest": done.digest(), "fingerprint": fingerprint}


def digest_of_all(records: Sequence[Record]) -> str:
    """Return the digest of one completion; of several, sha256 over theirs, in order."""
    digests = [record.completion.digest() for record in records]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
