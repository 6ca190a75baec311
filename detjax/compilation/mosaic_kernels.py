# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernels of a lowered program: named by what they compute, and compiled once.

JAX puts a kernel for Hopper into a program as MLIR bytecode with its sha256, and jaxlib compiles
what has the same hash once in a process. But in the bytecode is also the name of a dump, with a
number that counts the kernels of the process (jaxlib 0.11.2). So no two programs share a kernel,
and JAX's cache on disk finds a program again only where kernels were lowered in the same order.
Here the name is taken out. Kernels that are new are then compiled several at a time, where a
program would compile one after another. Their bytecode then leaves the program, which has one copy
of it a call: jaxlib looks for a kernel by its hash, and for the bytecode only where it has none. So
XLA has less to carry through its passes, to write and to read.
"""

import functools
import hashlib
import io
import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jaxlib import xla_client  # WHY: JAX compiles what it has traced, not a kernel by itself

_TARGET = "mosaic_gpu_v2"
_CONFIG = "mhlo.backend_config"
_DUMP_NAME = "mosaic_gpu.dump_basename"
_BYTECODE_VERSION = 0  # that of JAX


def share_kernels(lowered: jax.stages.Lowered) -> dict[bytes, bytes]:
    """Name each kernel of a program by what it computes, in place.

    Returns:
        By the sha256 of each kernel's bytecode, a program that is one call of it, as bytecode. Not
        of kernels whose bytecode has left the program, as jaxlib has them.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    found: dict[bytes, bytes] = {}
    module.context.allow_unregistered_dialects = True  # those of JAX's stable form of kernels
    with module.context, ir.Location.unknown():
        for call in kernel_calls(module.operation):
            held: Any = call.attributes[_CONFIG]
            config = {entry.name: entry.attr for entry in held}
            if not config["module"].value_bytes:
                continue  # JAX may give a program that it has lowered before: see `drop_bytecode`
            written = _without_dump_name(config["module"].value_bytes)
            name = hashlib.sha256(written).digest()
            config |= {"module": ir.StringAttr.get(written), "kernel_hash": ir.StringAttr.get(name)}
            call.attributes[_CONFIG] = ir.DictAttr.get(config)
            found[name] = program_of_call(call)
    return found


def is_kernel_call(operation: ir.Operation) -> bool:
    """Whether an operation of a lowered program calls a kernel."""
    if operation.name != "stablehlo.custom_call":
        return False
    target: Any = operation.attributes["call_target_name"]
    return target.value == _TARGET


def kernel_calls(operation: ir.Operation) -> Iterator[ir.Operation]:
    """The calls of kernels in an operation, such as a module."""
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                if is_kernel_call(each.operation):
                    yield each.operation
                else:
                    yield from kernel_calls(each.operation)


def _without_dump_name(bytecode: bytes) -> bytes:
    kernel = ir.Module.parse(bytecode)
    if _DUMP_NAME in kernel.operation.attributes:
        del kernel.operation.attributes[_DUMP_NAME]
    written = io.BytesIO()
    kernel.operation.write_bytecode(written, desired_version=_BYTECODE_VERSION)
    return written.getvalue()


def program_of_call(call: ir.Operation) -> bytes:
    """A program that is one call, as bytecode."""
    program = ir.Module.create()
    results = [result.type for result in call.results]
    with ir.InsertionPoint(program.body):
        main = func.FuncOp("main", ([operand.type for operand in call.operands], results))
    with ir.InsertionPoint(main.add_entry_block()):
        again = ir.Operation.create(call.name, results, list(main.arguments), dict(call.attributes))
        func.ReturnOp(list(again.results))
    written = io.BytesIO()
    program.operation.write_bytecode(written)
    return written.getvalue()


def drop_bytecode(lowered: jax.stages.Lowered, names: Collection[bytes]) -> None:
    """Take the bytecode of kernels that jaxlib has compiled out of a program, in place.

    The kernels' hashes stay. An executable has the machine code of each call, so a process that
    reads it needs no bytecode either.

    Args:
        lowered: After `share_kernels`.
        names: Of the kernels, as `compile_kernels` gives them.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        for call in kernel_calls(module.operation):
            held: Any = call.attributes[_CONFIG]
            config = {entry.name: entry.attr for entry in held}
            if config["kernel_hash"].value_bytes in names:
                config["module"] = ir.StringAttr.get("")
                call.attributes[_CONFIG] = ir.DictAttr.get(config)


def compile_kernels(kernels: dict[bytes, bytes], devices: Collection[jax.Device]) -> set[bytes]:
    """Have jaxlib compile kernels several at a time, and wait until it has them.

    It keeps them for all programs of the process. One that cannot be compiled is left to its
    program, whose compilation says why. In a job of several processes all are: the device may be
    another process's, and compilers may wait for one another.

    Args:
        kernels: As `share_kernels` gives them.
        devices: That their program is for, all of one kind; nothing runs there.

    Returns:
        The names of those that jaxlib has.
    """
    if jax.process_count() > 1:
        return set()
    device = next(iter(devices))

    def compile_one(program: bytes) -> None:
        device.client.compile_and_load(
            program,
            # WHY: a tuple, not a DeviceList: docs/upstream/README.md, two threads that are first.
            executable_devices=(device,),
            compile_options=xla_client.CompileOptions(),
        )

    return _kernel_compiler().compile(kernels, device.device_kind, compile_one)


class KernelCompiler:
    """Threads that compile kernels, each once."""

    def __init__(self) -> None:
        """Compile nothing yet."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernels")
        self._begun: dict[tuple[bytes, str], Future[None]] = {}

    def compile(
        self,
        kernels: dict[bytes, bytes],
        device_kind: str,
        compile_one: Callable[[bytes], None],
    ) -> set[bytes]:
        """Begin with kernels that nobody is at, and wait for all, also those of other threads.

        Args:
            kernels: As `share_kernels` gives them.
            device_kind: Each kernel is compiled once for each.
            compile_one: Compiles a program, given as bytecode.

        Returns:
            The names of those whose compilation did not fail.
        """
        with self._lock:
            for name, program in kernels.items():
                if (name, device_kind) not in self._begun:
                    begun = self._threads.submit(compile_one, program)
                    self._begun[name, device_kind] = begun
            waited_for = {name: self._begun[name, device_kind] for name in kernels}
        return {name for name, begun in waited_for.items() if begun.exception() is None}


@functools.cache  # WHY: not a constant of this module: `loaded_code_hash` counts those
def _kernel_compiler() -> KernelCompiler:
    return KernelCompiler()
