# SPDX-License-Identifier: Apache-2.0
"""The C++ of the reference kernels: compiled once on this machine, and called from XLA."""

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from detjax.compilation.kept_trust import make_private
from detjax.compilation.source import cpu_arch, default_cache_dir
from detjax.pallas_kernels.backend import Backend

LOG = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "reference_code"
FUNCTIONS = ("ex2", "rcp", "rsqrt")
"""Of a Hopper GPU; `benchmarks/hopper_bits.py` has collected their tables."""
OPERATIONS = (
    "add_experts", "add_leaves", "add_parts", "add_where_not_zero", "adjust_logits", "attention",
    "block_stats", "delta_rule", "expert_product", "first_maximum", "gated_rms_norm", "geglu",
    "gumbel_scores", "join", "log_probs", "log_sum_exp", "lora_hidden", "nucleus_sums", "product",
    "quantize_rows", "rms_norm", "rope", "route",
    "route_by_sigmoid", "sigmoid_gate", "softcap", "split_rows", "swiglu",
    "w8a8_product",
)  # fmt: skip
PREFIX = "detjax_"
"""Of the operations' names in JAX, XLA and the library."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-Wno-psabi")
"""Nothing is fused that is not written so, and no result depends on the instruction sets."""
OF_PROCESSOR = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",)}
"""Let `fma` be one instruction. The library runs on the machine that compiles it alone."""
COMPILERS = ("c++", "g++", "clang++")
PACKAGED = "ziglang"
"""A package that has clang and a C++ library with it, for machines without a compiler."""


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: that of CXX, the system's, or the packaged one.

    Raises:
        FileNotFoundError: If there is none, naming what was looked for.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for name, *options in [named] if named else [[name] for name in COMPILERS]:
        if path := shutil.which(name):
            return [path, *options]
    if not named and importlib.util.find_spec(PACKAGED):
        return [sys.executable, "-m", PACKAGED, "c++", "-fno-sanitize=all", "-s"]
    looked_for = f"CXX={shlex.join(named)}" if named else ", ".join((*COMPILERS, PACKAGED))
    raise FileNotFoundError(
        f"the reference backend is compiled on the machine that runs it, and no C++ compiler is "
        f"here (looked for {looked_for}); install g++ 12 or clang 16, or run pip install "
        f"{PACKAGED}, or name one with CXX"
    )


def _output_of(command: Sequence[str]) -> str:
    """Run a compiler.

    Raises:
        RuntimeError: If it fails, with the end of what it wrote.
    """
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(
            f"{command[0]} could not compile the reference kernels: {run.stderr[-2000:]}"
        )
    return run.stdout


def _compile(command: Sequence[str], library: Path) -> None:
    """Compile the files side by side, and link them.

    WHY: on two cores 10 s instead of 15; half of each is spent on the headers of XLA.
    """
    headers = ["-isystem", jax.ffi.include_dir()]

    def compile_file(source: Path) -> str:
        _output_of([*command, *headers, "-c", str(source), "-o", f"{parts}/{source.stem}.o"])
        return f"{parts}/{source.stem}.o"

    with tempfile.TemporaryDirectory() as parts, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_file, sorted(SOURCES.glob("*.cc"))))
        _output_of([*command, "-shared", *objects, "-o", str(library)])


def _compiled() -> Path:
    """Return the library of these sources, which is compiled if the cache does not have it."""
    compiler = find_compiler()
    files = sorted(SOURCES.glob("*.cc")) + sorted(SOURCES.glob("*.h"))
    parts = [path.read_bytes() for path in files]
    flags = (*FLAGS, *OF_PROCESSOR.get(platform.machine(), ()))
    parts += [part.encode() for part in (*flags, jax.lib.__version__, cpu_arch())]
    parts += [part.encode() for part in compiler]
    parts.append(_output_of([*compiler, "--version"]).encode())
    key = hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]
    folder = Path(default_cache_dir()) / "reference"
    make_private(folder)
    path = folder / f"{key}.so"
    if not path.exists():
        handle, unfinished = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        LOG.warning(
            "compiling the reference kernels for this machine, once: some 10 s, or two minutes "
            "where %s has to build its C++ library first", PACKAGED
        )  # fmt: skip
        try:
            _compile([*compiler, *flags], Path(unfinished))
            os.replace(unfinished, path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return path


def special_function_steps() -> tuple[np.ndarray, ...]:
    """Return by how much each entry of a table differs from the one before it, int8."""
    with np.load(SOURCES / "special_functions.npz") as steps:
        return tuple(steps[name] for name in FUNCTIONS)


def _fill_tables(loaded: ctypes.CDLL) -> None:
    """Fill the tables, for which every operation waits; tell it if they cannot be read."""
    pointers = [None] * len(FUNCTIONS)
    try:
        steps = special_function_steps()
        assert all(one.dtype == np.int8 and one.flags.c_contiguous for one in steps)
        pointers = [one.ctypes.data_as(ctypes.c_void_p) for one in steps]
    finally:
        loaded.detjax_set_tables(*pointers)


@functools.cache
def library() -> ctypes.CDLL:
    """Compile if need be, load, and make the operations known to XLA.

    Raises:
        FileNotFoundError: If there is no C++ compiler.
        RuntimeError: If it fails.
        OSError: If the cache cannot be used.
    """
    loaded = ctypes.CDLL(str(_compiled()))
    # WHY: a third of a second that nothing waits for until the first operation runs.
    threading.Thread(target=_fill_tables, args=(loaded,), daemon=True).start()
    for name in OPERATIONS:
        handler = jax.ffi.pycapsule(getattr(loaded, f"{PREFIX}{name}"))
        jax.ffi.register_ffi_target(f"{PREFIX}{name}", handler, platform=Backend.REFERENCE.platform)
    return loaded


@functools.cache
def _primitive(name: str) -> core.Primitive:
    """Make one of `OPERATIONS` known to JAX.

    The library is loaded when it is lowered. A model can be traced without it, as is done to learn
    what the backend refuses.
    """
    primitive = core.Primitive(f"{PREFIX}{name}")
    primitive.multiple_results = True

    def lower(ctx, *operands, out, **attributes):
        library()
        return jax.ffi.ffi_lowering(primitive.name)(ctx, *operands, **attributes)

    def shapes(*operands, out, **attributes):
        return [ShapedArray(shape, dtype) for shape, dtype in out]

    @functools.cache
    def compiled(**options):
        return jax.jit(functools.partial(primitive.bind, **options))

    primitive.def_abstract_eval(shapes)
    primitive.def_impl(lambda *operands, **options: compiled(**options)(*operands))
    mlir.register_lowering(primitive, lower, platform=Backend.REFERENCE.platform)
    return primitive


def call(name: str, out, *operands, **attributes):
    """Call one of `OPERATIONS`; `out` has the shape and the dtype of the result, or of each."""
    shapes = [out] if isinstance(out, jax.ShapeDtypeStruct) else out
    described = tuple((shape.shape, shape.dtype) for shape in shapes)
    results = _primitive(name).bind(*operands, out=described, **attributes)
    return results[0] if isinstance(out, jax.ShapeDtypeStruct) else results
