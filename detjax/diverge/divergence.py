# SPDX-License-Identifier: Apache-2.0
"""The first difference between two settings, as data and as text."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDifference:
    """The first generated token with a different bit.

    Attributes:
        index: Among the generated tokens, from 0.
        position: Of the token in the sequence.
        a: Its id and the bits of its float32 logprob, or None where the answer has ended.
        b: Likewise.
    """

    index: int
    position: int
    a: tuple[int, int] | None
    b: tuple[int, int] | None

    def __str__(self) -> str:
        """Return both, one line each."""
        head = f"first token that differs: {self.index} (position {self.position})"
        return "\n".join([head, f"  a  {_token(self.a)}", f"  b  {_token(self.b)}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """How one setting computed the operation.

    Attributes:
        program: Its name.
        row: Of the sequence in it, over all replicas.
        value: Of the first element that differs.
        bits: Its bits, in hexadecimal.
        kernels: What ran, in order.
        beside: A line for each other row of the launch.
    """

    program: str
    row: int
    value: str
    bits: str
    kernels: tuple[str, ...]
    beside: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line for each fact."""
        lines = [f"{self.value} ({self.bits}) in row {self.row} of {self.program}"]
        lines += [f"       kernel  {kernel}" for kernel in self.kernels]
        lines += [f"       beside  {line}" for line in self.beside or ("no other row",)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The first operation whose bits differ.

    Attributes:
        position: Of the token that it computes.
        layer: None before the first layer and after the last.
        name: The tap; `cache` if written entries have changed since; `commit` if the answer's token
            is not the one that the device chose.
        operation: What computes it, in words.
        cause: What else is known about the reason.
        last_equal: The last equal result before it; empty if there is none.
        order: What the profile fixes of its sums; empty if it fixes nothing.
        num_different: Number of elements that differ.
        num_elements: Number of all elements.
        index: Index of the first that differs.
        a: One side.
        b: The other.
    """

    position: int
    layer: int | None
    name: str
    operation: str
    cause: str
    last_equal: str
    order: str
    num_different: int
    num_elements: int
    index: tuple[int, ...]
    a: Side
    b: Side

    def __str__(self) -> str:
        """Return several lines."""
        where = "" if self.layer is None else f"layer {self.layer}, "
        lines = [f"first operation that differs: position {self.position}, {where}{self.name}"]
        lines.append(f"  what {self.operation}")
        facts = {"why ": self.cause, "sums": self.order, "same": self.last_equal}
        lines += [f"  {name} {text}" for name, text in facts.items() if text]
        at = f"at {list(self.index)}" if self.index else "a number"
        lines.append(f"  size {self.num_different} of {self.num_elements} elements, first {at}")
        return "\n".join([*lines, f"  a    {self.a}", f"  b    {self.b}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The result of comparing two settings, or an answer and a setting.

    Attributes:
        a: One side.
        b: The other side.
        num_tokens: Generated tokens compared.
        is_deep: Whether every operation was compared even if the answers are equal.
        token: The first token that differs; None if all are equal.
        site: The first operation that differs; None if all are equal, or it cannot be found.
        notes: Facts that the reader needs in addition.
    """

    a: str
    b: str
    num_tokens: int
    is_deep: bool
    token: TokenDifference | None
    site: Site | None
    notes: tuple[str, ...]

    @property
    def is_found(self) -> bool:
        """Whether a bit differs."""
        return self.token is not None or self.site is not None

    def __str__(self) -> str:
        """Return the report for an engineer."""
        lines = [f"a  {self.a}", f"b  {self.b}"]
        if self.token is None:
            lines.append(f"all {self.num_tokens} tokens and logprobs are equal, bit for bit")
            if self.is_deep and self.site is None:
                lines.append("and so is every operation that a tap sees")
        else:
            lines.append(str(self.token))
        if self.site is not None:
            lines.append(str(self.site))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return dataclasses.asdict(self)


def _token(token: tuple[int, int] | None) -> str:
    if token is None:
        return "no token: the answer has ended"
    token_id, bits = token
    logprob = float(np.uint32(bits).view(np.float32))
    return f"id {token_id}  logprob {logprob!r} (0x{bits:08x})"
