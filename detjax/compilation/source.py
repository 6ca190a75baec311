# SPDX-License-Identifier: Apache-2.0
"""Which detjax this is, and what compiles its programs here. Starts no JAX."""

import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

from detjax.compilation.toolchain import driver, toolchain


@functools.cache
def source_hash() -> str:
    """Hash the name and the bytes of every file of the package that is code, as on the disk.

    These are Python files and what the reference kernels are compiled from, their tables included.
    """
    root, total = Path(__file__).parents[1], hashlib.sha256()
    compiled = root.glob("pallas_kernels/reference_code/*.*")
    for path in sorted([*root.rglob("*.py"), *compiled]):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {digest}\n".encode())
    return total.hexdigest()


@functools.cache  # WHY: a start asks a dozen times, and the kernel writes megabytes for many cores
def cpu_arch() -> str:
    """The processor and the instruction sets XLA:CPU chooses from, where the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    fields = {}
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    sets = [f for f in fields.get("flags", fields.get("Features", "")).split() if _is_vector(f)]
    family = " ".join(fields.get(k, "") for k in ("vendor_id", "cpu family", "model"))
    return f"{platform.machine()} {family} {' '.join(sorted(sets))}"


def _is_vector(flag: str) -> bool:
    return flag.startswith(("avx", "amx", "fma", "f16c", "sve", "asimd", "bf16", "i8mm"))


TOOLCHAIN = ("jax", "jaxlib")
"""Packages that make a program's code. What else makes a GPU's is in files (`toolchain`)."""


def toolchain_key() -> str:
    """Name what turns a lowered program into code here: 16 hexadecimal digits.

    Of the versions of `TOOLCHAIN`, of the host's processor, for which XLA:CPU compiles, and with
    JAX's CUDA plugin of the files of `toolchain()` and of the driver, which JAX's own key of a
    program does not have. The lowered program, the compiler's options and flags, and the kind of
    the devices are in that key.
    """
    files = toolchain()
    parts = [cpu_arch(), *files, *([f"driver {driver()}"] if files else [])]
    found = ((package, _version(package)) for package in TOOLCHAIN)
    parts += [f"{package} {version}" for package, version in found if version is not None]
    return _short_hash(parts)


@functools.cache  # WHY: of what is loaded, and slow to read
def _version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compile_key() -> str:
    """Name what a compiled program was made by, for a folder of a compilation cache.

    16 hexadecimal digits over detjax's source, `toolchain_key()` and `XLA_FLAGS`. JAX has a key of
    its own for each program. This one keeps apart what another detjax has compiled, so that a cache
    can never give another build's digest.
    """
    return _short_hash([source_hash(), toolchain_key(), os.environ.get("XLA_FLAGS", "")])


NO_CACHE = "none"
"""The folder of compiled programs that is none."""


def default_cache_dir() -> str:
    """Return the folder for compiled programs: that of JAX's variable, or of the user's cache."""
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if named and "://" not in named:
        return named
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return str(Path(root).expanduser() / "detjax")


def _short_hash(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
