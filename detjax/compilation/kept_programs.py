# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that are kept between processes, and verified whenever one is read.

JAX writes an executable as a file and runs what it finds there. Its compression may notice a
flipped bit and need not, a process may read what another has half written, and another user may
have put it there. Here a file begins with a code of its name and of what follows, which only this
user can make (`kept_trust`), and appears under its name when it is complete. A file that is not as
it was written is removed, and the program compiled again.
"""

import contextlib
import contextvars
import functools
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache  # WHY: how a cache is opened has no public name
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from detjax.compilation.kept_trust import Seal, make_private, read_private, user_seal
from detjax.compilation.source import compile_key, toolchain_key

_ENDING = "-cache"  # as JAX ends the name of a file
_installing = threading.Lock()
_open_plain = compilation_cache.get_file_cache


@functools.cache  # WHY: not a constant of this module: `loaded_code_hash` counts those
def _is_out_of_use() -> contextvars.ContextVar[bool]:
    return contextvars.ContextVar("_is_out_of_use", default=False)


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """JAX neither reads nor keeps what this thread compiles meanwhile.

    What XLA:CPU has read cannot be written a second time: the bytes lack functions, and the process
    that reads them fails when it runs the program.
    """
    token = _is_out_of_use().set(True)
    try:
        yield
    finally:
        _is_out_of_use().reset(token)


class VerifiedCache(CacheInterface):
    """JAX's folder of executables, with a code in each file that its user alone can make.

    The name of a file has `toolchain_key` and the user's key's name in it, beside JAX's key of the
    program. Files of other users, and of a process without detjax, have other names, and are
    neither read nor changed.
    """

    def __init__(self, base: LRUCache, seal: Seal):
        """Keep programs where `base` does, with its bound on their size, if it has one."""
        self._base, self._path, self._seal = base, base.path, seal
        self._suffix = f"detjax-{toolchain_key()}-{seal.key_id}"

    def get(self, key: str) -> Any:
        """The bytes that were put under a key; None if nothing was, or it cannot be trusted."""
        if _is_out_of_use().get():
            return None
        file = self.file(key)
        try:
            held = self._read(self._name(key))
        except OSError as error:
            warnings.warn(
                f"{file} cannot be used ({error.strerror}), so it is compiled again", stacklevel=2
            )
            return None
        if held is None:
            return None
        value = self._seal.opened(self._name(key), held)
        if value is None:
            warnings.warn(f"{file} is not as it was written, so it is compiled again", stacklevel=2)
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        return value

    def _read(self, name: str) -> bytes | None:
        if not self._is_local:
            return self._base.get(name)
        held = read_private(Path(self._path) / f"{name}{_ENDING}")
        if held is not None and self._base.eviction_enabled:
            self._base.get(name)  # notes that it was used
        return held

    @property
    def _is_local(self) -> bool:
        return "://" not in str(self._path)

    def has(self, key: str) -> bool:
        """Whether something is kept under a key."""
        return self.file(key).exists()

    def put(self, key: str, value: bytes) -> None:
        """Keep a program. Where several processes do, one file of theirs stays, whole."""
        if _is_out_of_use().get():
            return
        name = self._name(key)
        held = self._seal.code(name, value) + value
        if self._base.eviction_enabled or not self._is_local:
            # Under the lock of the folder, or where a store takes files whole.
            self._base.put(name, held)
            if self._is_local:
                with contextlib.suppress(FileNotFoundError):  # it was too large, or is evicted
                    os.chmod(self.file(key), 0o600)
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
        return self._path / f"{self._name(key)}{_ENDING}"

    def _name(self, key: str) -> str:
        return f"{key}-{self._suffix}"


def verify_kept_programs() -> None:
    """From now on, JAX verifies what it reads from a folder of compiled programs, if it has one."""
    with _installing:
        if compilation_cache.get_file_cache is not _open_verified:
            compilation_cache.get_file_cache = _open_verified
            reset_cache()


def keep_programs(folder: Path) -> None:
    """Keep every compiled program, however small, in a folder.

    Raises:
        OSError: If the folder cannot be made or written, others may write to it, or there is no
            key (`kept_trust.user_seal`).
    """
    user_seal()
    make_private(folder)
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
        OSError: As `keep_programs`, for the folder or for `cache_dir`.
    """
    make_private(Path(cache_dir).expanduser())
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
    try:
        if "://" not in path:
            # WHY: not by JAX, whose folders may be writable by others, as the umask has it.
            make_private(Path(path))
        opened = _open_plain(path)
        if opened is None or not isinstance(opened[0], LRUCache):
            return opened
        return VerifiedCache(opened[0], user_seal()), opened[1]
    except OSError as error:
        warnings.warn(f"no programs are kept in {path}: {error.strerror}", stacklevel=2)
        return None
