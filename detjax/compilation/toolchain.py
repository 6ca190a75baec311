# SPDX-License-Identifier: Apache-2.0
"""The files that make a GPU's code here: XLA's plugin, NVIDIA's assembler and its library.

XLA takes `ptxas`, `nvlink` and `libdevice` from the folder that JAX names, that of NVIDIA's wheels.
Mosaic GPU asks XLA's flags instead, and then PATH, so its kernels may be assembled by another
ptxas, such as one of the system. exp, log and conversions come from these files, so each counts by
its bytes. Starts no JAX.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from detjax.compilation.kept_trust import make_private, read_private, state_dir
from detjax.compilation.xla_flags import given_flags

MAJORS = (12, 13)
"""Of CUDA, for which JAX has a plugin."""

DATA_DIR_FLAG = "--xla_gpu_cuda_data_dir"
_XLA_DEFAULT = "cuda_sdk_lib"
_SYSTEM_ROOTS = ("/usr/local/cuda", "/opt/cuda")
_LIBDEVICE = Path("nvvm/libdevice/libdevice.10.bc")
_DRIVER = Path("/proc/driver/nvidia/version")
_NONE = "none"
_DIGITS = 16


def toolchain() -> tuple[str, ...]:
    """What makes a GPU's code in this process: a name and a hash for each file.

    Such as "ptxas 13.0.88 7d1f0f22a3c9e0b1". Hashes are 16 hexadecimal digits of a sha256 of the
    bytes; a wrapper script counts by what it says of its version, too. Without ptxas the driver
    counts, which compiles then. Of several files that could be found, the first does, as the
    compilers take it. Empty without JAX's CUDA plugin.
    """
    files = toolchain_files()
    compiled_by_driver = [f"driver {driver()}"] if files and files["ptxas"] is None else []
    return (*(f"{name} {_described(file)}" for name, file in files.items()), *compiled_by_driver)


def toolchain_files() -> dict[str, Path | None]:
    """Where those files lie; None for one that is not found. Empty without JAX's CUDA plugin.

    Names that begin with "mosaic" are of the compiler of Pallas kernels.
    """
    plugins = {major: _package(f"jax_plugins.xla_cuda{major}") for major in MAJORS}
    files: dict[str, Path | None] = {}
    roots = []
    for major, folder in plugins.items():
        if folder is None:
            continue
        site = folder.parents[1]
        parts = site / f"jax_cuda{major}_plugin"
        files[f"plugin{major}"] = folder / "xla_cuda_plugin.so"
        files[f"mosaic-runtime{major}"] = parts / "libmosaic_gpu_runtime.so"
        files[f"mosaic-extension{major}"] = parts / "_mosaic_gpu_ext.so"
        roots += [site / "nvidia" / name for name in ("cuda_nvcc", f"cu{major}")]
    if not files:
        return {}
    home = os.environ.get("CUDA_HOME", "")
    others = [*([Path(home)] if home else []), *map(Path, _SYSTEM_ROOTS), *roots]
    flagged = _data_dir()
    for prefix, first in (("", _cuda_path() or flagged), ("mosaic-", flagged)):
        for tool in ("ptxas", "nvlink"):
            files[prefix + tool] = _first(_tool_places(tool, first, others))
        files[f"{prefix}libdevice"] = _first(root / _LIBDEVICE for root in (first, *others))
    return files


def driver() -> str:
    """The version of NVIDIA's kernel module, such as "580.159.04"; "none" without one."""
    text = _DRIVER.read_text() if _DRIVER.exists() else ""
    found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else _NONE


def _package(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _data_dir() -> Path:
    """What XLA's flags name, the last of them, or XLA's default."""
    values = [flag.partition("=") for flag in given_flags().split()]
    return Path(next((v for name, _, v in reversed(values) if name == DATA_DIR_FLAG), _XLA_DEFAULT))


def _cuda_path() -> Path | None:
    """The folder that JAX hands to XLA with each program."""
    from jax._src import lib  # WHY: it has no public name, and starts no JAX

    return None if lib.cuda_path is None else Path(lib.cuda_path)


def _tool_places(tool: str, first: Path, others: list[Path]) -> Iterator[Path]:
    """Where the compilers look, in their order."""
    yield first / "bin" / tool
    yield from (Path(folder) / tool for folder in os.environ.get("PATH", "").split(os.pathsep))
    yield from (root / "bin" / tool for root in others)


def _first(places: Iterator[Path]) -> Path | None:
    return next((place for place in places if os.path.isfile(place)), None)


# ------------------------------------------------------------------------------------------ hashes


def _described(file: Path | None) -> str:
    """The version that a program tells, if it is one, and the hash."""
    try:
        if file is None:
            return _NONE
        found = os.stat(file)
        key = (str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return _described_as(*key, found.st_ino)


@functools.cache
def _described_as(path: str, *stat: int) -> str:
    """As `_described`, once for each state of a file; kept on disk for the next process."""
    known = _read_known()
    key = " ".join([path, *map(str, stat)])
    if key in known:
        return known[key]
    try:
        digest, is_script = _hash_file(Path(path))
    except OSError as error:
        return f"unreadable ({error.strerror})"
    said = _version_text(path) if os.access(path, os.X_OK) and ".so" not in path else ""
    version = re.search(r"\bV(\d+(?:\.\d+)+)", said or "")
    if is_script:
        digest = hashlib.sha256(f"{digest} {said}".encode()).hexdigest()
    described = " ".join([*([version[1]] if version else []), digest[:_DIGITS]])
    has_failed = said is None
    if not is_script and not has_failed:  # what a script runs may change behind it
        _keep_known(path, key, described)
    return described


def _hash_file(file: Path) -> tuple[str, bool]:
    """The sha256 of a file, and whether it is a script."""
    with open(file, "rb") as opened:
        is_script = opened.read(2) == b"#!"
        opened.seek(0)
        return hashlib.file_digest(opened, "sha256").hexdigest(), is_script


def _version_text(program: str) -> str | None:
    """What it says; None if it could not be asked."""
    try:
        run = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except UnicodeDecodeError:
        return ""
    except (OSError, subprocess.SubprocessError) as error:
        # A file that is no program of this machine says nothing, now and later.
        return "" if getattr(error, "errno", None) in (errno.ENOEXEC, errno.EACCES) else None
    return run.stdout


def _known_file() -> Path:
    return state_dir() / "toolchain.json"


def _read_known() -> dict[str, str]:
    """Hashes that an earlier process has made, by path and state of the file."""
    try:
        make_private(state_dir())
        held = json.loads(read_private(_known_file()) or b"{}")
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _keep_known(path: str, key: str, described: str) -> None:
    """Keep a hash in the place of earlier ones of that path. Without a place, nothing is kept."""
    others = {k: v for k, v in _read_known().items() if not k.startswith(f"{path} ")}
    with contextlib.suppress(OSError):
        folder = state_dir()
        make_private(folder)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump(others | {key: described}, file)
        os.replace(file.name, _known_file())
