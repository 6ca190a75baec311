# SPDX-License-Identifier: Apache-2.0
"""An eighth of the slow tests at a time, and no start of a test after the end of the time.

`--shard K` keeps the tests of one of eight shards. `.ci/run` takes K from the number of commits, so
eight commits in a row run every slow test: with fewer shards the time was over before the end of
each, and what stood there never ran. Tests of one file share models and programs, so a
file is in one shard. The tests of `SEPARATE` compile in processes of their own and share nothing.
"""

import functools
import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

NUM_SHARDS = 8

SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds of the slow tests of each file: a first estimate, until `--write-seconds` of a run of all
of them, or the lines that `.ci/run` prints of its shard, take its place."""

SEPARATE = ("tests/aot/test_sm90_code.py",)
"""Files whose tests are dealt out one by one."""

TOO_LATE = "the time of this run is over"


def divide(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the shard of each name: the longest first, each into the shard with the least."""
    shards, loads = {}, [0.0] * NUM_SHARDS
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        shards[name] = loads.index(min(loads))
        loads[shards[name]] += seconds[name]
    return shards


@functools.cache
def measured_shards() -> dict[str, int]:
    """Return the shard of each file in `seconds.json`."""
    return divide(json.loads(SECONDS.read_text()))


def shard_of(node_id: str) -> int:
    """Return the one shard of a test; the name of a file that was not measured decides."""
    path = node_id.partition("::")[0]
    name = node_id if path in SEPARATE else path
    by_name = zlib.crc32(name.encode()) % NUM_SHARDS
    return measured_shards().get(name, by_name)


def lines_of(node_ids: Iterable[str]) -> list[str]:
    """Return a line for each shard and file: how many of the tests it has."""
    found = Counter((shard_of(one), one.partition("::")[0]) for one in node_ids)
    return [f"  shard {shard}: {count} in {path}" for (shard, path), count in sorted(found.items())]


def add_options(parser: pytest.Parser) -> None:
    """Add the options of `.ci/run`, whose time is too short for all slow tests at once."""
    shards = range(NUM_SHARDS)
    parser.addoption("--shard", type=int, choices=shards, help="run only the tests of this shard")
    parser.addoption(
        "--start-within", type=float, metavar="S", help="skip tests that would start after S s"
    )
    parser.addoption(
        "--write-seconds", action="store_true", help="write tests/seconds.json of what has run"
    )


class ShardPlugin:
    """Keeps the tests of one shard, skips those that would start too late, and lists both.

    Args:
        config: Of this process, which may be a worker of pytest-xdist or their controller.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._shard: int | None = config.getoption("shard")
        limit_s = config.getoption("start_within")
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self._elsewhere: list[str] = []
        self._late: list[str] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect what is in another shard. `-m` and `-k` have deselected before."""
        if self._shard is None:
            return
        others = [item for item in items if shard_of(item.nodeid) != self._shard]
        items[:] = [item for item in items if shard_of(item.nodeid) == self._shard]
        self._config.hook.pytest_deselected(items=others)
        self._elsewhere = [item.nodeid for item in others]
        getattr(self._config, "workeroutput", {})["elsewhere"] = self._elsewhere

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """Take what a worker of pytest-xdist has deselected. All workers collect the same."""
        self._elsewhere = getattr(node, "workeroutput", {}).get("elsewhere", self._elsewhere)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Skip a test that would start too late."""
        if self._end is not None and time.monotonic() > self._end:
            pytest.skip(TOO_LATE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the time of a test, and a test that would have started too late."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.skipped and TOO_LATE in str(report.longrepr):
            self._late.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """List what did not run: counts of the other shards, names of what was too late."""
        if self._shard is not None:
            terminalreporter.section(f"shard {self._shard} of {NUM_SHARDS}")
            terminalreporter.line(f"{len(self._elsewhere)} tests of other shards did not run")
            terminalreporter.line("\n".join(lines_of(self._elsewhere)))
            seconds = json.dumps(self._whole_seconds(), sort_keys=True)
            terminalreporter.line(f"seconds of this shard, by file: {seconds}")
        if self._end is not None:
            terminalreporter.line(f"{len(self._late)} tests did not run: {TOO_LATE}")
            terminalreporter.line("\n".join(f"  {node_id}" for node_id in sorted(self._late)))
        if self._config.getoption("write_seconds"):
            SECONDS.write_text(json.dumps(self._whole_seconds(), indent=1, sort_keys=True) + "\n")

    def _whole_seconds(self) -> dict[str, float]:
        """Return the time of each file's tests that have run, if it is a second or more."""
        return {path: round(s, 1) for path, s in self._seconds.items() if s >= 1}
