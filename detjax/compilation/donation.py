# SPDX-License-Identifier: Apache-2.0
"""Refuse a compiled program that reads a donated argument after it was written in place.

XLA's buffer assignment trusts that no pass moves a read of a buffer behind its writer. One does:
`HloRematerialization` clones cheap reads when a program comes near the device's memory, after copy
insertion, and does not look at in-place updates (docs/upstream). Such a program computes with the
new value where its source says the old one, and nothing tells. So programs are compiled without
that pass, and whatever was compiled is read once more here, as scheduled.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from detjax.compilation.hlo_text import Instruction, Module, parse_module
from detjax.compilation.kept_programs import verify_kept_programs
from detjax.compilation.lowered_kernels import lower
from detjax.compilation.mosaic_kernels import compile_kernels, drop_bytecode, share_kernels

ALIGNMENT_BYTES = 256
"""What XLA and Mosaic GPU ask of the address of a kernel's operand."""

_FORWARDING = {"bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "domain"}
"""Operations whose result is their first operand, where it lies."""

_NO_READ = {"get-tuple-element", "tuple", "parameter", "constant", *_FORWARDING}


class UnsafeProgramError(RuntimeError):
    """A compiled program that would compute something else than its source says."""


def compile_checked(
    lowered: jax.stages.Lowered, options: dict[str, Any], devices: Collection[jax.Device]
) -> jax.stages.Compiled:
    """Compile, and refuse a program with a stale read or an unaligned kernel operand.

    Args:
        lowered: What to compile.
        options: Of the compiler, as `jax.stages.Lowered.compile` takes them.
        devices: That it is for.

    Raises:
        UnsafeProgramError: Naming what is wrong in the optimised program.
    """
    verify_kept_programs()
    drop_bytecode(lowered, compile_kernels(share_kernels(lowered), devices))
    compiled = lowered.compile(options)
    check_program(compiled.as_text() or "")
    return compiled


class CheckedJit:
    """`jax.jit` whose programs are checked when they are compiled, and share their kernels."""

    def __init__(
        self,
        function: Callable,
        *,
        donate_argnums: int | tuple[int, ...],
        options: dict[str, Any],
        out_shardings: Any = None,
    ):
        """Compile nothing yet.

        Args:
            function: Of arrays, positional.
            donate_argnums: Which arguments may be written in place.
            options: Of the compiler.
            out_shardings: Of the results, as `jax.jit` takes them; None leaves them to it.
        """
        self._jitted = jax.jit(function, donate_argnums=donate_argnums, out_shardings=out_shardings)
        self._options = options
        self._programs: dict[Any, jax.stages.Compiled] = {}

    def __call__(self, *operands) -> Any:
        """Run the program of these operands' shapes and shardings.

        Raises:
            UnsafeProgramError: As `compile_checked`.
        """
        leaves, tree = jax.tree.flatten(operands)
        key = tree, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        if key not in self._programs:
            lowered = lower(self._jitted, operands)
            devices = leaves[0].sharding.device_set
            self._programs[key] = compile_checked(lowered, self._options, devices)
        return self._programs[key](*operands)


def check_program(text: str) -> None:
    """Refuse an optimised program, as text, with a stale read or an unaligned kernel operand.

    Raises:
        UnsafeProgramError: Naming what is wrong.
    """
    module = parse_module(text)
    faults = [*stale_reads(module), *unaligned_operands(module)]
    if faults:
        raise UnsafeProgramError(
            f"the compiled program {module.name} is not safe to run: {'; '.join(faults[:5])}"
            + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
            + ". Compile it with detjax.compilation.xla_flags.IN_PLACE_OPTIONS; if it "
            "was, please report it"
        )


# -------------------------------------------------------------------------------- the optimised HLO


# -------------------------------------------------------------------------------------- stale reads


@dataclass(eq=False, slots=True)
class _Value:
    """What one instruction wrote to one buffer. Values that must share a buffer are linked."""

    name: str
    parent: "_Value | None" = None

    def buffer(self) -> "_Value":
        at = self
        while at.parent is not None:
            at = at.parent
        return at

    def share(self, other: "_Value") -> None:
        mine, its = self.buffer(), other.buffer()
        if mine is not its:
            mine.parent = its


type _Tree = _Value | list[_Tree]
"""The value of an instruction; a tuple is a list."""


def _leaves(tree: _Tree) -> Iterator[_Value]:
    if isinstance(tree, _Value):
        yield tree
    else:
        for part in tree:
            yield from _leaves(part)


def _at(tree: _Tree, index: tuple[int, ...]) -> _Tree:
    for i in index:
        assert isinstance(tree, list), (index, tree)
        tree = tree[i]
    return tree


def _same_shape(name: str, shape: str) -> _Tree:
    """New values for the leaves of a shape."""
    if not shape.startswith("("):
        return _Value(name)
    parts, depth, start = [], 0, 1
    for at in range(1, len(shape)):
        depth += shape[at] in "([{"
        if depth == 0 and shape[at] in ",)":
            parts.append(shape[start:at])
            start = at + 1
        depth -= shape[at] in ")]}"
    cleaned = (re.sub(r"/\*.*?\*/", "", part).strip() for part in parts)
    return [_same_shape(f"{name}:{i}", part) for i, part in enumerate(p for p in cleaned if p)]


@dataclass(eq=False, slots=True)
class _Events:
    """What a program does to its buffers, in order.

    Attributes:
        steps: ("read" or "write", value, where, what may lie in its buffer besides).
        unwritten: Which parts of its tuple a loop's body leaves alone, by the body's name.
    """

    steps: list[tuple[str, _Value, str, tuple[_Value, ...]]] = field(default_factory=list)
    unwritten: dict[str, list[bool]] = field(default_factory=dict)

    def read(self, tree: _Tree, where: str, own: tuple[_Value, ...] = ()) -> None:
        """Note a read; of an operation that writes `own` in place while it reads."""
        self.steps += [("read", value, where, own) for value in _leaves(tree)]

    def write(self, tree: _Tree, where: str) -> None:
        self.steps += [("write", value, where, ()) for value in _leaves(tree)]


def stale_reads(module: Module) -> list[str]:
    """Describe every read of a value whose buffer holds another by then.

    Two values share a buffer where they must: a donated parameter and the result that takes its
    place, what a kernel updates in place, and what a loop carries. Whether others share one is for
    buffer assignment to decide, which runs last and sees every read.

    Args:
        module: A scheduled program.

    Returns:
        A sentence each, in the order in which they run; none for a program that is right.
    """
    events = _Events()
    entry = module.computations[module.entry]
    parameters = _parameters(entry)
    arguments = [_same_shape(p.name, p.shape) for p in parameters]
    for argument in arguments:
        events.write(argument, module.entry)
    result = _run(module, module.entry, arguments, events)
    for out, operand, inner in module.donated:
        for new, old in zip(
            _leaves(_at(result, out)), _leaves(_at(arguments[operand], inner)), strict=True
        ):
            new.share(old)
    events.read(result, "the result")
    holds: dict[_Value, _Value] = {}
    faults = []
    for kind, value, where, own in events.steps:
        buffer = value.buffer()
        if kind == "write":
            holds[buffer] = value
        elif holds[buffer] is not value and holds[buffer] not in own:
            faults.append(
                f"{where} reads {value.name} after {holds[buffer].name} was written over it"
            )
    return list(dict.fromkeys(faults))


def _parameters(instructions: list[Instruction]) -> list[Instruction]:
    found = [i for i in instructions if i.opcode == "parameter"]
    return sorted(found, key=lambda i: int(i.text))


def _run(module: Module, name: str, arguments: list[_Tree], events: _Events) -> _Tree:
    """Note what a computation reads and writes; its result."""
    values: dict[str, _Tree] = {}
    instructions = module.computations[name]
    for parameter, argument in zip(_parameters(instructions), arguments, strict=True):
        values[parameter.name] = argument
    # What an asynchronous operation still reads, and what it writes meanwhile.
    pending: dict[str, tuple[list[_Tree], tuple[_Value, ...]]] = {}
    result: _Tree | None = None
    for instruction in instructions:
        operands = [values[operand] for operand in instruction.operands]
        if instruction.opcode not in _NO_READ:
            for operand in operands:
                events.read(operand, instruction.name)
        if instruction.opcode.endswith("-done") and instruction.operands[0] in pending:
            read, own = pending.pop(instruction.operands[0])
            events.read(read, instruction.name, own)
        if instruction.opcode != "parameter":
            values[instruction.name] = _result_of(module, instruction, operands, events)
        if instruction.opcode.endswith("-start") or instruction.opcode == "send":
            # WHY: only with what is donated is it known which result lies over an operand.
            pending[instruction.name] = operands, tuple(_leaves(values[instruction.name]))
        if instruction.opcode.endswith("-update") and instruction.operands[0] in pending:
            pending[instruction.name] = pending.pop(instruction.operands[0])
        if instruction.is_root:
            result = values[instruction.name]
    assert result is not None, f"{name} has no root"
    return result


def _result_of(
    module: Module, instruction: Instruction, operands: list[_Tree], events: _Events
) -> _Tree:
    match instruction.opcode:
        case "tuple":
            return list(operands)
        case "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.text)
            assert index is not None
            return _at(operands[0], (int(index.group(1)),))
        case opcode if opcode in _FORWARDING:
            return operands[0]
        case "while":
            return _run_loop(module, instruction, operands[0], events)
        case "conditional":
            return _run_conditional(module, instruction, operands, events)
        case "call" | "fusion" | "async-start" if _is_inlined(module, instruction):
            return _run_called(module, instruction, operands, events)
        case "async-update" | "custom-call-update" | "fusion-update":
            return operands[0]
        case opcode if opcode.endswith("-done"):
            finished = _finished(instruction, operands[0])
            if finished is not None:
                return finished
    result = _same_shape(instruction.name, instruction.shape)
    # The text has the aliases of what runs, whose result is the second part of what starts it.
    start = (_RESULT,) if instruction.opcode == "custom-call-start" else ()
    for out, operand, inner in instruction.aliasing:
        for new, old in zip(
            _leaves(_at(result, start + out)), _leaves(_at(operands[operand], inner)), strict=True
        ):
            new.share(old)
    events.write(result, instruction.name)
    return result


_RESULT = 1
"""Which part of what starts an operation is its result: operands are the part before."""

_RESULT_FIRST = {"copy-done", "recv-done"}


def _finished(done: Instruction, started: _Tree) -> _Tree | None:
    """The result of an asynchronous operation, which is written from its start on.

    None where it is not seen among the parts of what was started.
    """
    wanted = _same_shape(done.name, done.shape)
    parts = [started]
    if isinstance(started, list):
        parts += started[:1] if done.opcode in _RESULT_FIRST else started[_RESULT : _RESULT + 1]
    return next((part for part in reversed(parts) if _is_alike(part, wanted)), None)


def _is_alike(one: _Tree, other: _Tree) -> bool:
    if isinstance(one, _Value) or isinstance(other, _Value):
        return isinstance(one, _Value) and isinstance(other, _Value)
    return len(one) == len(other) and all(map(_is_alike, one, other))


def _is_inlined(module: Module, instruction: Instruction) -> bool:
    """Whether what it calls may update a buffer in place."""
    if instruction.opcode != "fusion":
        return True
    inner = module.computations.get(instruction.attribute("calls") or "", [])
    return any(i.opcode == "custom-call" for i in inner)


def _run_called(module, instruction: Instruction, operands, events: _Events) -> _Tree:
    called = instruction.attribute("to_apply") or instruction.attribute("calls")
    assert called is not None
    result = _run(module, called, operands, events)
    if instruction.opcode != "async-start":
        return result
    started = _same_shape(instruction.name, instruction.shape)
    assert isinstance(started, list)
    events.write(started, instruction.name)
    return [*started[:_RESULT], result, *started[_RESULT + 1 :]]


def _run_conditional(
    module: Module, instruction: Instruction, operands: list[_Tree], events: _Events
) -> _Tree:
    """One branch runs. What follows finds each buffer as any of them may have left it."""
    written, results = [], []
    for branch, argument in zip(instruction.branches, operands[1:], strict=True):
        # It finds everything as it was before the branch before it.
        events.write(argument, instruction.name)
        begin = len(events.steps)
        results.append(_run(module, branch, [argument], events))
        written += [step for step in events.steps[begin:] if step[0] == "write"]
        events.read(results[-1], branch)
    events.steps += written
    result = _same_shape(instruction.name, instruction.shape)
    joined = []
    for new, *taken in zip(_leaves(result), *map(_leaves, results), strict=True):
        if all(value is taken[0] for value in taken):
            joined.append(taken[0])  # what every branch hands on is not written
            continue
        for value in taken:
            new.share(value)
        events.write(new, instruction.name)
        joined.append(new)
    return _rebuild(result, iter(joined))


def _run_loop(module: Module, loop: Instruction, initial: _Tree, events: _Events) -> _Tree:
    """A loop carries each part of its tuple in one buffer, which its body may write."""
    body, condition = loop.attribute("body"), loop.attribute("condition")
    assert body is not None and condition is not None
    (parameter,) = _parameters(module.computations[body])
    fresh = _same_shape(parameter.name, loop.shape)
    if body not in events.unwritten:
        after = _run(module, body, [fresh], _Events(unwritten=events.unwritten))
        pairs = zip(_leaves(fresh), _leaves(after), strict=True)
        events.unwritten[body] = [new is old for old, new in pairs]
    unwritten = events.unwritten[body]
    # What no turn writes is one value before, in and after the loop, in a buffer of its own.
    flat = zip(_leaves(initial), _leaves(fresh), unwritten, strict=True)
    carried = _rebuild(initial, (old if is_same else new for old, new, is_same in flat))
    _write_others(events, carried, unwritten, loop.name)
    _run(module, condition, [carried], events)
    after = _run(module, body, [carried], events)
    events.read(after, f"the next turn of {loop.name}")
    results = _same_shape(loop.name, loop.shape)
    flat = zip(_leaves(initial), _leaves(results), unwritten, strict=True)
    results = _rebuild(initial, (old if is_same else new for old, new, is_same in flat))
    for values in zip(*map(_leaves, (initial, carried, after, results)), strict=True):
        for value in values[1:]:
            value.share(values[0])
    _write_others(events, results, unwritten, loop.name)
    return results


def _write_others(events: _Events, tree: _Tree, unwritten: list[bool], where: str) -> None:
    for value, is_same in zip(_leaves(tree), unwritten, strict=True):
        if not is_same:
            events.write(value, where)


def _rebuild(tree: _Tree, parts: Iterator[_Value]) -> _Tree:
    """The tree with other leaves."""
    if isinstance(tree, _Value):
        return next(parts)
    return [_rebuild(part, parts) for part in tree]


# -------------------------------------------------------------------------------- aligned operands

_ITEM_BITS = {"pred": 8}


def unaligned_operands(module: Module) -> list[str]:
    """Describe every slice that a fusion hands to a kernel at an address that may not be aligned.

    XLA's dynamic-slice fusion gives a kernel the address of a slice inside its operand, where the
    slice's size, not its offset, is a multiple of 256 bytes.
    """
    faults = []
    for name, instructions in module.computations.items():
        by_name = {i.name: i for i in instructions}
        for call in instructions:
            if call.opcode != "custom-call" or name == module.entry:
                continue
            for operand in call.operands:
                part = by_name[operand]
                while part.opcode in ("bitcast", "get-tuple-element"):
                    part = by_name[part.operands[0]]
                if part.opcode == "dynamic-slice":
                    faults.append(f"{name} hands a kernel {part.name}, a slice at any offset")
                elif part.opcode == "slice":
                    offset = _slice_offset_bytes(part, by_name[part.operands[0]])
                    if offset % ALIGNMENT_BYTES:
                        faults.append(
                            f"{name} hands a kernel {part.name}, which begins {offset} bytes into "
                            f"its operand: no multiple of {ALIGNMENT_BYTES}"
                        )
    return faults


def _slice_offset_bytes(part: Instruction, operand: Instruction) -> int:
    limits = re.search(r"slice=\{([^}]*)\}", part.text)
    shape = re.match(r"(\w+)\[([\d,]*)\]", operand.shape)
    assert limits is not None and shape is not None
    starts = [int(s) for s in re.findall(r"\[(\d+):", limits.group(1))]
    dims = [int(d) for d in shape.group(2).split(",") if d]
    strides = [int(np.prod(dims[i + 1 :])) for i in range(len(dims))]
    digits = re.sub(r"\D*(\d+).*", r"\1", shape.group(1))
    bits = _ITEM_BITS.get(shape.group(1)) or int(digits)
    return sum(s * stride for s, stride in zip(starts, strides, strict=True)) * bits // 8
