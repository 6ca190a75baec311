# SPDX-License-Identifier: Apache-2.0
"""The text of a compiled program, parsed: modules and instructions of HLO."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Unique in its computation.
        shape: As text; "(...)" for a tuple.
        opcode: Such as "fusion".
        operands: Names of instructions before it.
        text: Everything after the operands, and for constants and parameters what is between the
            parentheses.
        is_root: Whether it is the computation's result.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """A computation that it calls, as in `calls=%name`."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return match and match.group(1)

    @property
    def branches(self) -> list[str]:
        """Computations of a `conditional`."""
        match = re.search(r"branch_computations=\{([^}]*)\}", self.text)
        if match:
            return re.findall(r"%?([\w.\-]+)", match.group(1))
        names = self.attribute("true_computation"), self.attribute("false_computation")
        return [name for name in names if name]

    @property
    def aliasing(self) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
        """(index of the result, operand, index in it) of what is written in place."""
        match = re.search(r"output_to_operand_aliasing=\{(.*?)\)\}", self.text)
        return _aliases(match.group(1) + ")") if match else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """An optimised program: its computations, instructions in the order in which they run.

    Attributes:
        name: Of the program.
        entry: Name of the computation that runs.
        computations: By name.
        donated: (index of the result, parameter, index in it) of each donated argument.
    """

    name: str
    entry: str
    computations: dict[str, list[Instruction]]
    donated: list[tuple[tuple[int, ...], int, tuple[int, ...]]]


def parse_module(text: str) -> Module:
    """Read the text of an optimised program.

    Raises:
        ValueError: If it has no entry computation or is not scheduled.
    """
    head = re.search(r"^HloModule ([\w.\-]+)(.*)$", text, re.MULTILINE)
    if not head or "is_scheduled=true" not in head.group(2):
        raise ValueError("not the text of a scheduled HLO module")
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if line.startswith(("  ", "\t")) and current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current.append(instruction)
        elif line.rstrip().endswith("{") and (
            match := re.match(r"(ENTRY )?%?([\w.\-]+) .*->", line)
        ):
            current = computations[match.group(2)] = []
            entry = match.group(2) if match.group(1) else entry
        elif line.startswith("}"):
            current = None
    if entry is None:
        raise ValueError("the HLO module has no entry computation")
    alias = re.search(r"input_output_alias=\{(.*?\)) \}", head.group(2))
    return Module(
        name=head.group(1),
        entry=entry,
        computations=computations,
        donated=_aliases(alias.group(1)) if alias else [],
    )


def _aliases(text: str) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Read `{1}: (3, {}, may-alias), ...`."""
    return [
        (_index(out), int(operand), _index(inner))
        for out, operand, inner in re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", text)
    ]


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in text.replace(",", " ").split())


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest, 0) - 1
    inside, after = rest[:end], rest[end + 1 :]
    is_leaf = opcode in ("constant", "parameter")
    return Instruction(
        name=match.group(2),
        shape=shape,
        opcode=opcode,
        operands=() if is_leaf else tuple(re.findall(r"%([\w.\-]+)", inside)),
        text=inside if is_leaf else after,
        is_root=bool(match.group(1)),
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at `start` is closed."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")
