# SPDX-License-Identifier: Apache-2.0
"""A GPU test whose kernel never ends is a failure with a name."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests import conftest
from tests.conftest import pytest_runtest_protocol  # noqa: F401

conftest.GPU_TEST_S = 1
"""

TESTS = """
import time

import pytest


@pytest.mark.gpu
def test_hangs():
    time.sleep(60)


def test_of_no_gpu_may_take_longer():
    time.sleep(2)
"""


@pytest.mark.slow
def test_a_gpu_test_that_never_ends_is_a_failure(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-n", "1", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", tmp_path]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_it.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
    )  # fmt: skip
    assert found.returncode == 1, found.stdout + found.stderr
    assert "crashed while running 'test_it.py::test_hangs'" in found.stdout
    assert "1 failed, 1 passed" in found.stdout
