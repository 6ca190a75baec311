# SPDX-License-Identifier: Apache-2.0
"""`tools/mutants.py` can make every fault it knows, and says so when a test misses one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec and spec.loader
    module = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants = load()
NAMES = [mutant.name for mutant in mutants.MUTANTS]


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_made_and_its_tests_are_there(mutant):
    for edit in mutant.edits:
        text = mutants.find(ROOT, edit).read_text()
        compile(text.replace(edit.old, edit.new), edit.where, "exec")
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text()


def test_names_are_different():
    assert len(set(NAMES)) == len(NAMES) >= 20


@pytest.fixture
def ends_with(monkeypatch, tmp_path):
    """The exit status of the command, where the tests of a fault end as `ended` says."""

    def run(ended) -> int:
        is_sound = iter([True])

        def run_tests(tree, tests, *, limit_s):
            if next(is_sound, False):
                return subprocess.CompletedProcess([], 0, "", "")
            if isinstance(ended, Exception):
                raise ended
            return subprocess.CompletedProcess([], *ended, "")

        monkeypatch.setattr(mutants, "run_tests", run_tests)
        monkeypatch.setattr(mutants, "copy_tree", lambda to, mutant: tmp_path)
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
        return mutants.main(["-k", "butterfly-is-psum"])

    return run


@pytest.mark.parametrize(
    ("ended", "status", "says"),
    [
        ((1, "FAILED tests/a.py::test_b - no"), 0, "test_b"),
        ((0, "1 passed"), 1, "survives"),
        ((4, "no such test"), 1, "pytest ended with 4"),
        (subprocess.TimeoutExpired("pytest", 1), 1, "hangs"),
        (mutants.MutantError("stands 0 times"), 1, "stands 0 times"),
    ],
    ids=["found", "survives", "no test", "hangs", "not applied"],
)
def test_only_a_test_that_fails_finds_a_fault(ends_with, capsys, ended, status, says):
    assert ends_with(ended) == status
    assert says in capsys.readouterr().out


def test_a_text_that_stands_twice_or_nowhere_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, count in (("x = 1", 2), ("y", 0)):
        with pytest.raises(mutants.MutantError, match=f"stands {count} times in a.py"):
            mutants.find(tmp_path, mutants.Edit(where="a.py", old=old, new=""))


def test_what_names_no_fault_is_an_error(capsys):
    assert mutants.main(["-k", "no such fault"]) == 1
    assert mutants.main(["--list"]) == 0
    assert "butterfly-is-psum" in capsys.readouterr().out
