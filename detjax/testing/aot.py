# SPDX-License-Identifier: Apache-2.0
"""Compile programs to sm_90a machine code on a machine without a GPU, and describe the code.

Needs the CUDA plugin of JAX and the wheel with ptxas, but no device and no driver:

    pip install --no-deps jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc \
        nvidia-nvvm nvidia-cuda-runtime nvidia-nvjitlink nvidia-cuda-cupti

JAX reads its platforms once, so use a process of its own and call `start` before any array.
"""

import atexit
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.compilation.donation import stale_reads, unaligned_operands
from detjax.compilation.hlo_text import parse_module
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 149000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
runtime_version: { major: 13 minor: 0 patch: 0 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""
"""What the compiler asks of a device, as XLA's text protocol buffer."""

H200_BYTES = 149_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCode:
    """One Mosaic GPU kernel as compiled by ptxas.

    Attributes:
        name: Its `kernel_name`.
        num_registers: Registers a thread.
        spill_bytes: Bytes stored to local memory because registers ran out, a thread.
        wgmma: Shapes of its tensor-core instructions, such as "m64n256k16".
        waits_for_wgmma: Whether ptxas put tensor-core instructions one after the other, for lack of
            registers or as others write what they read.
        contractions: Pairs of a product and a sum that ptxas may fuse (`contractible`).
    """

    name: str
    num_registers: int
    spill_bytes: int
    wgmma: tuple[str, ...]
    waits_for_wgmma: bool
    contractions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        kernels: Its Mosaic GPU kernels, each once.
        hlo: Its optimised HLO.
        temp_bytes: Device memory in addition to arguments and results.
    """

    kernels: tuple[KernelCode, ...]
    hlo: str
    temp_bytes: int

    @property
    def num_clones(self) -> int:
        """Return the number of instructions that rematerialization repeats."""
        return len(re.findall(r"^\s+%[\w.\-]+\.remat\d* = ", self.hlo, re.MULTILINE))

    def faults(self) -> list[str]:
        """Return reads after their writer, and kernel operands that are not aligned."""
        module = parse_module(self.hlo)
        return [*stale_reads(module), *unaligned_operands(module)]

    def float_arithmetic(self) -> list[str]:
        """Return XLA's own instructions, outside kernels, whose result is a rounded float."""
        return [
            f"{name} = {opcode}"
            for name, opcode in _FLOAT_RESULT.findall(self.hlo)
            if opcode in _ROUNDING_OPCODES
        ]

    def copies(self, *, least_bytes: int) -> list[str]:
        """Return lines of the HLO that copy an array of at least so many bytes."""
        found = []
        for line in self.hlo.splitlines():
            match = re.search(r"= \(?(\w+)\[([\d,]*)\].* copy(?:-start)?\(", line)
            if match and array_bytes(*match.groups()) >= least_bytes:
                found.append(line.strip())
        return found


_FLOAT_RESULT = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = \(?(?:bf16|f8\w+|f16|f32|f64)\[[^ ]* ([\w\-]+)\(", re.MULTILINE
)
_ROUNDING_OPCODES = frozenset({
    "add", "all-reduce", "atan2", "cbrt", "convolution", "cosine", "divide", "dot", "erf",
    "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "multiply", "power",
    "reduce-scatter", "remainder", "rsqrt", "sine", "sqrt", "subtract", "tan", "tanh",
})  # fmt: skip
"""Whose result depends on an order, on what it is fused with, or on a library. Conversions are
rounded one way, and copies, selections and comparisons are exact."""


def contractible(ptx: str) -> list[str]:
    """Return products that feed a sum without named rounding: ptxas may fuse the two.

    ptxas decides by the surrounding code, so one kernel may round where another does not. `mul.rn`
    and `add.rn` are never fused.
    """
    feeds: dict[str, str] = {}
    for mul, to in re.findall(r"\b(mul(?:\.ftz)?(?:\.sat)?\.b?f\w+)\s+(%\w+),", ptx):
        feeds[to] = mul
    copies = re.findall(r"\bmov\.\w+\s+(%\w+), (%\w+);", ptx)
    for _ in copies:  # through moves, in whatever order they stand
        new = {to: feeds[of] for to, of in copies if of in feeds and to not in feeds}
        if not new:
            break
        feeds |= new
    sums = re.findall(r"\b((?:add|sub)(?:\.ftz)?(?:\.sat)?\.b?f\w+)\s+%\w+, ([^;]+);", ptx)
    return [
        f"{feeds[of]} {of} feeds {name}"
        for name, operands in sums
        for of in re.findall(r"%\w+", operands)
        if of in feeds
    ]


def array_bytes(dtype: str, dims: str) -> int:
    """Bytes of an HLO shape, of its dtype's name and its dimensions between commas."""
    bits = int(re.sub(r"\D*(\d+).*", r"\1", dtype)) if dtype != "pred" else 8
    return int(np.prod([int(d) for d in dims.split(",") if d])) * bits // 8


def why_unavailable() -> str | None:
    """Return what is missing to compile for a GPU here, or None."""
    if not any(_is_module(f"jax_plugins.xla_cuda{major}") for major in (12, 13)):
        return "JAX's CUDA plugin is not installed (see detjax/testing/aot.py)"
    if shutil.which("ptxas", path=_search_path()) is None:
        return "ptxas is neither in PATH nor in NVIDIA's wheels"
    return None


_MESH_PROGRAM = """
import importlib
aot = importlib.import_module("detjax.testing.aot")
aot.start()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = aot.h200_mesh(tp=2)
add = jax.shard_map(lambda x: jax.lax.psum(x, "tp"), mesh=mesh, in_specs=P("tp"), out_specs=P())
whole = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(mesh, P("tp")))
jax.jit(add).lower(whole).compile()
"""


@functools.cache
def why_no_mesh() -> str | None:
    """Return why the compiler cannot target several GPUs, or None; asked once, in a process.

    Some clients crash where there is no device to ask how GPUs are connected.
    """
    run = subprocess.run([sys.executable, "-c", _MESH_PROGRAM], capture_output=True, check=False)
    if run.returncode >= 0:
        return None
    return f"the compiler dies of signal {-run.returncode} when it compiles for two GPUs"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _search_path() -> str:
    """PATH, after the folders of NVIDIA's wheels that hold programs."""
    folders = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += [str(ptxas.parent) for ptxas in sorted(Path(root).glob("*/bin/ptxas"))]
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def start() -> None:
    """Prepare this process to compile for an H200; call before JAX starts.

    Raises:
        RuntimeError: If the plugin or ptxas is missing.
    """
    missing = why_unavailable()
    if missing:
        raise RuntimeError(missing)
    os.environ["PATH"] = _search_path()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    dumps = tempfile.TemporaryDirectory(prefix="detjax_aot_")
    atexit.register(dumps.cleanup)
    os.environ["MOSAIC_GPU_DUMP_TO"] = dumps.name
    for part in ("PTX", "PTXAS"):
        os.environ[f"MOSAIC_GPU_DUMP_{part}"] = "1"
    jax.config.update("jax_platforms", "cpu,cuda")


def h200_mesh(memory_bytes: int = H200_BYTES, *, dp: int = 1, tp: int = 1) -> Mesh:
    """Return a mesh of H200s that exist only for the compiler.

    Args:
        memory_bytes: Memory that the compiler assumes. If a program's arguments take more, XLA
            treats the program as one of production size on a full GPU.
        dp: Replicas.
        tp: Ranks of each.
    """
    target = H200.replace(str(H200_BYTES), str(memory_bytes))
    topology = topologies.get_topology_desc(
        "h200", "cuda", target_config=target, topology=f"1x1x{dp * tp}"
    )
    return Mesh(np.asarray(topology.devices).reshape(dp, tp), (DP_AXIS, TP_AXIS))


def compile_program(fn: Callable, *shapes: jax.ShapeDtypeStruct) -> CompiledProgram:
    """Compile `jax.jit(fn)` for one H200."""
    whole = NamedSharding(h200_mesh(), P())
    shardings = tuple(whole for _ in shapes)
    return inspect_program(lambda: jax.jit(fn, in_shardings=shardings).lower(*shapes).compile())


def inspect_program(compile_it: Callable[[], jax.stages.Compiled]) -> CompiledProgram:
    """Run a compilation and read the output of the kernel compiler."""
    folder = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    before = set(folder.iterdir())
    compiled = compile_it()
    memory = compiled.memory_analysis()
    assert memory is not None  # every GPU executable knows
    logs = sorted(path for path in set(folder.iterdir()) - before if path.suffix == ".ptxas")
    return CompiledProgram(
        kernels=tuple(_kernel_code(log) for log in logs),
        hlo=compiled.as_text() or "",
        temp_bytes=memory.temp_size_in_bytes,
    )


def _kernel_code(log: Path) -> KernelCode:
    text = log.read_text()
    ptx = log.with_suffix(".ptx").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", text)
    (spill,) = re.findall(r"stack frame, (\d+) bytes spill stores", text)
    return KernelCode(
        name=re.sub(r"_\d+$", "", log.stem),
        num_registers=int(registers),
        spill_bytes=int(spill),
        wgmma=tuple(sorted(set(re.findall(r"wgmma\.mma_async\S*\.(m\d+n\d+k\d+)", ptx)))),
        waits_for_wgmma="wgmma.mma_async instructions are serialized" in text,
        contractions=tuple(contractible(ptx)),
    )
