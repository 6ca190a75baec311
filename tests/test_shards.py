# SPDX-License-Identifier: Apache-2.0
"""Every slow test is in exactly one shard, and the shards are balanced."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from . import shards
from .conftest import SLOW_TESTS

ROOT = Path(__file__).parents[1]
OTHERS = "tests/test_mutants.py", "tests/test_progress.py", "tests/test_source_rules.py"
SECONDS = json.loads(shards.SECONDS.read_text())


def kept_by(shard: int, node_ids: list[str]) -> list[str]:
    """What the plugin keeps of some tests."""
    options = {"shard": shard, "start_within": None}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    plugin = shards.ShardPlugin(SimpleNamespace(getoption=options.get, hook=hook))
    items = [SimpleNamespace(nodeid=node_id) for node_id in node_ids]
    plugin.pytest_collection_modifyitems(items)
    return [item.nodeid for item in items]


def test_every_slow_test_is_in_exactly_one_shard(request):
    """Of the tests that this run has collected, and of a file that nobody has measured."""
    tests = [*request.config.stash[SLOW_TESTS], "tests/test_new.py::test_new[a]"]
    tests += [f"{path}::test_any" for path in (*SECONDS, *shards.SEPARATE)]
    kept = Counter(one for shard in range(shards.NUM_SHARDS) for one in kept_by(shard, tests))
    assert kept == Counter(tests)


def test_tests_of_a_file_stay_together_unless_they_share_nothing():
    names = [f"test_{i}" for i in range(60)]
    for path in [*SECONDS, "tests/test_new.py"]:
        assert len({shards.shard_of(f"{path}::{name}") for name in names}) == 1
    for path in shards.SEPARATE:
        assert len({shards.shard_of(f"{path}::{name}") for name in names}) == shards.NUM_SHARDS


def test_shards_are_balanced():
    """Longest first leaves a difference of at most the longest file."""
    loads = [0.0] * shards.NUM_SHARDS
    for path, shard in shards.measured_shards().items():
        loads[shard] += SECONDS[path]
    assert max(loads) - min(loads) <= max(SECONDS.values())


def test_every_file_that_was_measured_is_there():
    assert [path for path in SECONDS if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_a_run_lists_the_tests_that_did_not_run():
    """Of its own shard by name, of the others by count; a worker tells the controller."""
    late = "tests/test_array_types.py::test_every_axis_is_in_the_glossary"
    shard = shards.shard_of(late)
    other = next(path for path in OTHERS if shards.shard_of(path) != shard)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-q", late, other]
    command += ["--shard", str(shard), "--start-within", "0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"1 tests did not run: {shards.TOO_LATE}\n  {late}\n" in run.stdout
    assert re.search(rf"  shard {shards.shard_of(other)}: [1-9]\d* in {other}\n", run.stdout)
