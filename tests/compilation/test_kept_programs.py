# SPDX-License-Identifier: Apache-2.0
"""Programs that are kept between processes: read as they were written, or compiled again."""

import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

from detjax.compilation import kept_programs, kept_trust, source
from detjax.compilation.kept_programs import VerifiedCache, keep_programs, verify_kept_programs
from detjax.compilation.kept_trust import Seal, user_seal
from detjax.compilation.source import default_cache_dir
from detjax.testing import assert_bitwise_equal

KEY, VALUE = "jit_step-0123", bytes(range(256)) * 40
NO_BOUND = -1


def cache(folder, max_size=NO_BOUND) -> VerifiedCache:
    return VerifiedCache(kept_programs.LRUCache(str(folder), max_size=max_size), user_seal())


@pytest.mark.parametrize("max_size", [NO_BOUND, 1 << 20])
def test_what_was_put_comes_back_in_another_process_too(tmp_path, max_size):
    cache(tmp_path, max_size).put(KEY, VALUE)
    assert cache(tmp_path, max_size).get(KEY) == VALUE
    assert cache(tmp_path, max_size).get("jit_step-4567") is None


@pytest.mark.parametrize("where", [0, 31, 32, 5000, -1, "short", "empty", "another's"])
def test_a_damaged_program_is_removed_and_not_run(tmp_path, where):
    made = cache(tmp_path)
    made.put(KEY, VALUE)
    file = Path(made.file(KEY))
    held = bytearray(file.read_bytes())
    if where == "another's":  # whole, but of another program
        made.put("jit_other-89", VALUE[1:])
        held = bytearray(made.file("jit_other-89").read_bytes())
    elif isinstance(where, int):
        held[where] ^= 1
    else:
        held = held[: {"short": 5000, "empty": 0}[where]]
    file.write_bytes(held)
    with pytest.warns(UserWarning, match="not as it was written"):
        assert made.get(KEY) is None
    assert not file.exists()
    made.put(KEY, VALUE)
    assert made.get(KEY) == VALUE


def test_another_toolchain_has_other_files(tmp_path, monkeypatch):
    cache(tmp_path).put(KEY, VALUE)
    monkeypatch.setattr(source, "cpu_arch", lambda: "another processor")
    assert cache(tmp_path).get(KEY) is None
    monkeypatch.undo()
    monkeypatch.setattr(source, "_version", lambda package: "9")
    assert cache(tmp_path).get(KEY) is None
    monkeypatch.undo()
    assert cache(tmp_path).get(KEY) == VALUE


def test_who_reads_while_others_write_reads_all_of_it(tmp_path):
    """As processes do: each caller opens the folder for itself."""

    def put_often(number: int) -> set[bytes | None]:
        found: set[bytes | None] = set()
        for _ in range(60):
            made = cache(tmp_path)
            made.put(KEY, VALUE * 20)
            found.add(made.get(KEY))
        return found

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(put_often, range(4))) == {VALUE * 20}
    assert len(list(tmp_path.iterdir())) == 1, "no half file is left"


@pytest.mark.parametrize("max_size", [NO_BOUND, 1 << 20])
@pytest.mark.parametrize("how", ["a link", "a folder", "others may write", "a pipe", "a loop"])
def test_what_others_may_have_put_there_is_not_used(tmp_path, how, max_size):
    made = cache(tmp_path / "kept", max_size)
    made.put(KEY, VALUE)
    file = Path(made.file(KEY))
    assert made.get(KEY) == VALUE and file.stat().st_mode & 0o777 == 0o600
    if how == "others may write":
        file.chmod(0o666)
    else:
        moved = file.rename(tmp_path / "moved")
        put = {
            "a link": lambda: file.symlink_to(moved), "a folder": file.mkdir,
            "a pipe": lambda: os.mkfifo(file, 0o600), "a loop": lambda: file.symlink_to(file),
        }  # fmt: skip
        put[how]()
    with pytest.warns(UserWarning, match="cannot be used .* so it is compiled again"):
        assert made.get(KEY) is None


def test_a_file_of_another_user_is_not_used(tmp_path, monkeypatch):
    made = cache(tmp_path)
    made.put(KEY, VALUE)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    owner = f"user {me} owns it" if me else None
    if owner is None:  # root's files are everybody's
        os.chown(made.file(KEY), 12345, 12345)
        owner = "user 12345 owns it"
    with pytest.warns(UserWarning, match=owner):
        assert made.get(KEY) is None


def test_a_file_that_cannot_be_read_is_compiled_again(tmp_path, monkeypatch):
    made = cache(tmp_path)
    made.put(KEY, VALUE)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kept_trust.os, "open", refuse)
    with pytest.warns(UserWarning, match="cannot be used .Permission denied., so it is compiled"):
        assert made.get(KEY) is None


@pytest.mark.control
def test_a_program_of_another_key_has_another_name_and_no_plain_hash_is_enough(tmp_path):
    made, base = cache(tmp_path), kept_programs.LRUCache(str(tmp_path), max_size=NO_BOUND)
    stranger = VerifiedCache(base, Seal(bytes(32)))
    stranger.put(KEY, VALUE)
    assert made.get(KEY) is None and stranger.get(KEY) == VALUE
    # The stranger knows the name, and all but the key.
    file = Path(made.file(KEY))
    name = file.name.removesuffix("-cache")
    for code in (Seal(bytes(32)).code(name, VALUE), hashlib.sha256(VALUE).digest(), bytes(32)):
        file.write_bytes(code + VALUE)
        file.chmod(0o600)
        with pytest.warns(UserWarning, match="not as it was written"):
            assert made.get(KEY) is None
    file.write_bytes(user_seal().code(name, VALUE) + VALUE)
    file.chmod(0o600)
    assert made.get(KEY) == VALUE


@pytest.mark.parametrize("which", ["the folder", "that of all builds"])
def test_a_folder_that_others_may_write_to_is_refused_by_name(cache_folder, which):
    folder = cache_folder / "shared"
    inner = kept_programs.keep_programs_of_build(folder)
    shared = inner if which == "the folder" else folder
    assert shared.stat().st_mode & 0o777 == 0o700
    shared.chmod(0o777)
    with pytest.raises(
        PermissionError, match=rf"{shared} would be run, and others may write to it"
    ):
        kept_programs.keep_programs_of_build(folder)
    if which == "the folder":  # it became so later
        with pytest.warns(UserWarning, match="no programs are kept in .* would be run"):
            assert kept_programs.opened_folder() is None


def test_a_folder_that_cannot_be_opened_is_a_warning(cache_folder, monkeypatch):
    kept_programs.keep_programs_of_build(cache_folder / "kept")

    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kept_programs, "make_private", refuse)
    with pytest.warns(UserWarning, match="no programs are kept in .*: Permission denied"):
        assert kept_programs.opened_folder() is None


def compiled_anew(x) -> np.ndarray:
    jax.clear_caches()
    return np.asarray(jax.jit(lambda x: jnp.sin(x) * 3 + x)(x))


def damaged(entry: bytes) -> bytes:
    """An executable with another constant in it, behind a checksum of JAX's that is right."""
    plain = zlib.decompress(entry)
    three, four = (np.float32(number).tobytes() for number in (3, 4))
    assert three in plain
    return zlib.compress(plain.replace(three, four))


def test_jax_runs_no_damaged_program(cache_folder):
    folder = cache_folder
    x = jnp.linspace(0, 1, 64)
    want = compiled_anew(x)
    keep_programs(folder / "an earlier one")
    compiled_anew(x)
    keep_programs(folder)
    assert_bitwise_equal(compiled_anew(x), want, claim="compiled and kept")
    files = [f for f in folder.iterdir() if "lambda" in f.name]
    assert files and all("-detjax-" in f.name for f in files)
    for file in files:
        held = bytearray(file.read_bytes())
        held[len(held) // 2] ^= 4
        file.write_bytes(held)
    with pytest.warns(UserWarning, match="not as it was written"):
        got = compiled_anew(x)
    assert_bitwise_equal(got, want, claim="compiled again")
    assert_bitwise_equal(compiled_anew(x), want, claim="read again")


@pytest.mark.control
def test_control_jax_alone_runs_a_damaged_program(cache_folder, monkeypatch):
    """What the digest is for: JAX has no checksum of its own of what it runs."""
    monkeypatch.setattr(compilation_cache, "get_file_cache", kept_programs._open_plain)
    x = jnp.linspace(0, 1, 64)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    kept_programs.reset_cache()
    want = compiled_anew(x)
    for file in Path(cache_folder).glob("*lambda*-cache"):
        file.write_bytes(damaged(file.read_bytes()))
    got = compiled_anew(x)
    assert (got != want).any()


def test_compiling_a_step_turns_verifying_on(monkeypatch):
    monkeypatch.setattr(compilation_cache, "get_file_cache", kept_programs._open_plain)
    verify_kept_programs()
    assert compilation_cache.get_file_cache is kept_programs._open_verified


def test_the_commands_keep_programs_where_the_user_says(monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == "/home/someone/.cache/detjax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_dir() == "/caches/detjax"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/programs")
    assert default_cache_dir() == "/programs"
