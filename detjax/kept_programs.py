# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that are kept between processes, and verified whenever one is read.

JAX writes an executable as a file and runs what it finds there. Its compression may notice a
flipped bit and need not, and a process may read what another has half written. Here a file begins
with the sha256 of its name and of what follows, and appears under its name when it is complete. A
file that is not as it was written is removed, and the program compiled again.
"""

import functools
import hashlib
import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache  # WHY: how a cache is opened has no public name
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from detjax.source import compile_key, toolchain_key

_DIGEST_BYTES = 32
_installing = threading.Lock()
_open_plain = compilation_cache.get_file_cache


class VerifiedCache(CacheInterface):
    """JAX's folder of executables, with a digest in each file.

    The name of a file has `toolchain_key` in it, beside JAX's key of the program. Files of a
    process without detjax have other names, and are neither read nor changed.
    """

    def __init__(self, base: LRUCache):
        """Keep programs where `base` does, with its bound on their size, if it has one."""
        self._base, self._path = base, base.path
        self._toolchain = toolchain_key()

    def get(self, key: str) -> Any:
        """The bytes that were put under a key; None if nothing was, or it is damaged."""
        name = self._name(key)
        held = self._base.get(name)
        if held is None:
            return None
        digest, value = held[:_DIGEST_BYTES], held[_DIGEST_BYTES:]
        if digest == self._digest(name, value):
            return value
        file = self.file(key)
        warnings.warn(f"{file} is not as it was written, so it is compiled again", stacklevel=2)
        file.unlink(missing_ok=True)
        return None

    def has(self, key: str) -> bool:
        """Whether something is kept under a key."""
        return self.file(key).exists()

    def put(self, key: str, value: bytes) -> None:
        """Keep a program. Where several processes do, one file of theirs stays, whole."""
        name = self._name(key)
        held = self._digest(name, value) + value
        if self._base.eviction_enabled or "://" in str(self._path):
            # Under the lock of the folder, or where a store takes files whole.
            self._base.put(name, held)
            return
        with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
            try:
                file.write(held)
                file.close()
                os.replace(file.name, self.file(key))
            except BaseException:
                os.unlink(file.name)
                raise

    def file(self, key: str) -> Any:
        """Where a program is kept: a path, or one of a store."""
        return self._path / f"{self._name(key)}-cache"

    def _name(self, key: str) -> str:
        return f"{key}-detjax-{self._toolchain}"

    def _digest(self, name: str, value: bytes) -> bytes:
        return hashlib.sha256(name.encode() + b"\n" + value).digest()


def verify_kept_programs() -> None:
    """From now on, JAX verifies what it reads from a folder of compiled programs, if it has one."""
    with _installing:
        if compilation_cache.get_file_cache is not _open_verified:
            compilation_cache.get_file_cache = _open_verified
            reset_cache()


def keep_programs(folder: Path) -> None:
    """Keep every compiled program, however small, in a folder.

    Raises:
        OSError: If the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    verify_kept_programs()
    is_other = jax.config.jax_compilation_cache_dir != str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if is_other:
        reset_cache()  # WHY: JAX goes on with the folder that it has opened once


def keep_programs_of_build(cache_dir: str | Path) -> Path:
    """Keep every compiled program in a folder of `cache_dir` that is of this build alone.

    So what another detjax has compiled is never run.

    Returns:
        The folder.

    Raises:
        OSError: If the folder cannot be made or written.
    """
    folder = Path(cache_dir).expanduser() / compile_key()
    keep_programs(folder)
    _folders_of_build().add(str(folder))
    return folder


@functools.cache  # WHY: not a constant of this module: `loaded_code_hash` counts those
def _folders_of_build() -> set[str]:
    return set()


def opened_folder() -> VerifiedCache | None:
    """Where this process keeps programs, if it does so in a folder of its build alone."""
    path = jax.config.jax_compilation_cache_dir
    is_on = jax.config.jax_enable_compilation_cache
    if not is_on or path is None or path not in _folders_of_build():
        return None
    opened = _open_verified(path)
    return opened[0] if opened and isinstance(opened[0], VerifiedCache) else None


def _open_verified(path: str) -> tuple[CacheInterface, str] | None:
    opened = _open_plain(path)
    if opened is None or not isinstance(opened[0], LRUCache):
        return opened
    return VerifiedCache(opened[0]), opened[1]
