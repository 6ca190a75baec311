# SPDX-License-Identifier: Apache-2.0
"""Executables that a process takes over from an earlier one, without tracing and lowering.

JAX looks for a compiled program under a hash of its lowered text, and tracing and lowering are most
of the time of a start: seconds of Python a program, one program at a time. Here the name of an
executable is a hash of what it is traced from, so that it is read in a fraction of a second. In it
are the package's files and the compilers (`source.compile_key`), the code that is loaded
(`loaded_code_hash`), JAX's settings, variables of the environment that compilers read, the devices,
and shapes, dtypes and places of the operands. Where something cannot be told from another, such as
a function that a test has put in place, nothing is read or kept. Answers to questions that take as
much tracing, such as whether the kernels take a model, are kept alike.
"""

import functools
import hashlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax._src import config as jax_config  # WHY: what tracing depends on has no public name

from detjax.compilation.donation import compile_checked
from detjax.compilation.executable_form import read_executable, write_executable
from detjax.compilation.kept_programs import VerifiedCache, compiled_anew, opened_folder
from detjax.compilation.loaded_code import Root, UnknownCodeError, loaded_code_hash, now
from detjax.compilation.read_ahead import ReadAhead
from detjax.compilation.source import compile_key

LOG = logging.getLogger(__name__)
"""Says at level DEBUG what was read and kept, and why something was not."""

_COMPILERS_READ = (
    "CUDA_", "JAX_", "LLVM_", "MLIR_", "MOSAIC_", "NVIDIA_", "PALLAS_", "TF_", "XLA_",
)  # fmt: skip
_NOT_READ = (
    "compilation_cache_dir", "persistent_cache_", "compilation_cache_max_size", "pallas_fuser_",
)  # fmt: skip
"""Parts of names of settings and variables that no program depends on: where programs are kept, and
a fuser that is not used here, whose settings are there only once some trace has looked for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executable:
    """What an executable is made from: all that its name has in it.

    Attributes:
        options: Of the compiler.
        operands: Shapes of the arguments, with their shardings.
        devices: Where the program runs.
        root: Names of the modules that the program is traced from.
        traced_from: Whatever else the program depends on.
    """

    options: dict[str, Any]
    operands: Any
    devices: tuple[jax.Device, ...]
    root: Root
    traced_from: tuple[Any, ...]

    def name(self, asked: int | None) -> str | None:
        """Its name on the disk; None where something cannot be told from another."""
        described = [*_described_operands(self.operands), *map(_described_device, self.devices)]
        try:
            made_from = (self.options, *self.traced_from)
            return _name("executable", self.root, made_from, described, asked)
        except UnknownCodeError as error:
            LOG.debug("not kept: %s", error)
            return None


def is_kept(program: Executable) -> bool:
    """Whether an earlier process has kept an executable."""
    folder = _folder_for(program.devices)
    name = None if folder is None else program.name(None)
    return folder is not None and name is not None and folder.has(name)


def compile_or_read(
    lower: Callable[[], jax.stages.Lowered], program: Executable, *, asked: int | None = None
) -> jax.stages.Compiled:
    """Return the executable that an earlier process has kept, or lower and compile, and keep it.

    Programs are kept where one process has all devices, and of at most two GPUs: no more have read
    any.

    Args:
        lower: Traces and lowers the program.
        program: What it is made from.
        asked: A moment (`loaded_code.this_moment`) since which the program is wanted, so that those
            of one request share a hash of the code; that of the call if None.

    Raises:
        UnsafeProgramError: As `compile_checked`. What was kept was checked before.
    """
    devices, options = program.devices, program.options
    folder = _folder_for(devices)
    if folder is None:
        return compile_checked(lower(), options, devices)
    before = program.name(asked)
    if before is None:
        return compile_checked(lower(), options, devices)
    ahead = _ahead().get(tuple(devices))
    found = None if ahead is None else ahead.take(before)
    if found is not None:
        LOG.debug("read ahead %s", before)
    else:
        found = _read(folder, before, devices)
        if found is not None:
            LOG.debug("read %s", before)
    if found is not None:
        _note(ahead, folder, before)
        return found
    with compiled_anew():
        compiled = compile_checked(lower(), options, devices)
    if program.name(now()) == before:
        _keep(folder, before, compiled)
        LOG.debug("kept %s", before)
        _note(ahead, folder, before)
    else:
        LOG.debug("not kept: what %s is traced from has changed meanwhile", before)
    return compiled


def _folder_for(devices: Sequence[jax.Device]) -> VerifiedCache | None:
    """Where executables of these devices are kept; None if they are not."""
    is_proven = _is_proven(len(devices), devices[0].platform) and jax.process_count() == 1
    return opened_folder() if is_proven else None


def _is_proven(num_devices: int, platform: str) -> bool:
    """Whether executables of so many devices have been read and have communicated."""
    return num_devices <= 2 or platform == "cpu"


def read_ahead(devices: Sequence[jax.Device], *, root: Root, asked_of: Sequence[Any]) -> None:
    """Read, in threads, the executables that the last process used that asked for the same.

    Args:
        devices: Where programs will run.
        root: Names of the modules that ask.
        asked_of: What the process starts: a model, and how it runs.
    """
    folder = _folder_for(devices)
    earlier = _ahead().pop(tuple(devices), None)
    if earlier is not None:
        earlier.stop()
    if folder is None:
        return
    try:
        name = _name("start", root, asked_of, [*map(_described_device, devices)])
    except UnknownCodeError as error:
        LOG.debug("nothing is read ahead: %s", error)
        return
    _ahead()[tuple(devices)] = ReadAhead(folder, name, lambda name: _read(folder, name, devices))


@functools.cache  # WHY: not a constant of this module: those count
def _ahead() -> dict[tuple[jax.Device, ...], ReadAhead]:
    """Of the devices of each start."""
    return {}


def _note(ahead: ReadAhead | None, folder: VerifiedCache, name: str) -> None:
    if ahead is None:
        return
    try:
        ahead.note(name)
    except OSError as error:
        LOG.debug("%s is not noted: %s", folder.file(name), error)


def find_or_ask(
    ask: Callable[[], str | None], *, root: Root, asked_of: Sequence[Any]
) -> str | None:
    """Return what an earlier process was answered, or ask, and keep the answer.

    For questions that need seconds of tracing, where nothing but code and settings decides.

    Args:
        ask: Gives a text or None.
        root: Names of the modules that the answer comes from.
        asked_of: Whatever else it depends on.
    """
    folder = opened_folder()
    if folder is None:
        return ask()

    def name(asked: int | None) -> str | None:
        try:
            return _name("answer", root, asked_of, [], asked)
        except UnknownCodeError as error:
            LOG.debug("no answer is kept: %s", error)
            return None

    before = name(None)
    held = None if before is None else folder.get(before)
    if held is not None:
        LOG.debug("answered by %s", before)
        return json.loads(held)
    answer = ask()
    if before is not None and name(now()) == before:
        _put(folder, before, json.dumps(answer).encode())
    return answer


def _name(
    kind: str,
    root: Root,
    made_from: Sequence[Any],
    described: Sequence[str],
    asked: int | None = None,
) -> str:
    """Name what is kept by what it is made from.

    Raises:
        UnknownCodeError: As `loaded_code_hash`.
    """
    parts = [
        compile_key(),
        loaded_code_hash(root, *made_from, asked=asked),
        sys.version,
        f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}",
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if _is_read(name)),
        *_settings(),
        *described,
    ]
    for part in parts:
        if re.search(r" at 0x[0-9a-f]+", part):
            raise UnknownCodeError(f"an address in {part[:200]}")
    held = "".join(f"{len(part)} {part}\n" for part in parts)
    return f"{kind}-{hashlib.sha256(held.encode()).hexdigest()}"


def _settings() -> list[str]:
    """JAX's settings, and those of this thread, which `with` statements set."""
    here = zip(jax_config.trace_context_names(), jax_config.trace_context(), strict=True)
    pairs = [*jax.config.values.items(), *here]
    return sorted(f"{name}={value!r}" for name, value in pairs if _is_setting(name))


def _is_setting(name: str) -> bool:
    # Axes are those of a trace around this one, and there is none.
    return name != "axis_env_state" and not any(part in name.lower() for part in _NOT_READ)


def _is_read(variable: str) -> bool:
    return variable.startswith(_COMPILERS_READ) and _is_setting(variable)


def _described_operands(operands: Any) -> list[str]:
    leaves, tree = jax.tree.flatten(operands)
    return [str(tree), *map(_described, leaves)]


def _described(leaf: Any) -> str:
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    if layout is not None and layout.major_to_minor == tuple(range(leaf.ndim)):
        layout = None if not layout.tiling else layout  # as of a shape: that of JAX
    weak = getattr(leaf, "weak_type", False)
    return f"{leaf.dtype}{leaf.shape} {weak} {leaf.sharding!r} {layout!r}"


def _described_device(device: jax.Device) -> str:
    client = device.client
    told = getattr(device, "compute_capability", None), getattr(device, "core_count", None)
    return f"{device.id} {device.device_kind} {client.platform} {client.platform_version} {told}"


def _read(
    folder: VerifiedCache, name: str, devices: Sequence[jax.Device]
) -> jax.stages.Compiled | None:
    held = folder.get(name)
    if held is None:
        return None
    try:
        return read_executable(held, devices)
    except Exception as error:  # whatever a driver or a library may say of its own bytes
        warnings.warn(
            f"{folder.file(name)} cannot be loaded ({error}), so it is compiled again",
            stacklevel=2,
        )
        return None


def _keep(folder: VerifiedCache, name: str, compiled: jax.stages.Compiled) -> None:
    try:
        written = write_executable(compiled)
    except Exception as error:  # what cannot be written runs all the same
        warnings.warn(f"{folder.file(name)} is not kept: {error}", stacklevel=2)
        return
    _put(folder, name, written)


def _put(folder: VerifiedCache, name: str, written: bytes) -> None:
    try:
        folder.put(name, written)
    except OSError as error:
        warnings.warn(f"{folder.file(name)} is not kept: {error}", stacklevel=2)
