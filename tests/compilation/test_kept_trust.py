# SPDX-License-Identifier: Apache-2.0
"""The key of the user's own: made once, whole, and read by nobody else."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from detjax.compilation.kept_trust import Seal, user_seal


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    user_seal.cache_clear()
    yield tmp_path / "detjax"
    user_seal.cache_clear()


def anew() -> Seal:
    user_seal.cache_clear()
    return user_seal()


def test_a_key_is_made_once_for_its_user_alone(state):
    seal = user_seal()
    assert [file.name for file in state.iterdir()] == ["cache.key"]
    assert (state / "cache.key").stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    held = seal.code("name", b"value") + b"value"
    assert anew().opened("name", held) == b"value"
    assert seal.opened("nam", held) is None and seal.opened("name", held + b"e") is None
    assert seal.code("a", b"bc") != seal.code("ab", b"c")


def test_many_who_begin_at_once_have_one_key(state):
    with ThreadPoolExecutor(8) as pool:
        assert len({seal.key_id for seal in pool.map(lambda _: anew(), range(40))}) == 1


def test_another_process_has_the_same_key(state):
    code = "from detjax.compilation.kept_trust import user_seal; print(user_seal().key_id)"
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout  # fmt: skip
    assert said.strip() == user_seal().key_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_key_that_others_can_read_or_write_is_refused(state, mode):
    user_seal()
    (state / "cache.key").chmod(mode)
    with pytest.raises(PermissionError):
        anew()


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_key_that_is_not_whole_is_refused(state, content):
    user_seal()
    (state / "cache.key").write_bytes(content)
    with pytest.raises(PermissionError, match="must have 32 bytes"):
        anew()


def test_a_folder_of_the_key_that_others_may_write_to_is_refused(state):
    user_seal()
    state.chmod(0o770)
    with pytest.raises(PermissionError, match="others may write to it"):
        anew()
