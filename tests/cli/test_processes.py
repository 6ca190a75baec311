# SPDX-License-Identifier: Apache-2.0
"""What the processes of a job do together, and that one process waits for nobody."""

import contextlib
import os
import subprocess
import sys

import pytest

from detjax.cli import options
from detjax.cli.errors import InputError
from detjax.cli.parser import parse_args
from detjax.cli.processes import Processes, join_processes
from detjax.models.bundled import bundled_model_path
from detjax.models.identity import model_hash
from detjax.parallel.watch import Watch


class NotedWatch(Watch):
    """Notes what it is told, in order."""

    def __init__(self, told: list[object]):
        self.told = told

    def check_same(self, what: str, value: str) -> None:
        self.told.append((what, value))

    def progress(self) -> None:
        self.told.append("progress")

    @contextlib.contextmanager
    def working(self):
        self.told.append("begin")
        yield
        self.told.append("end")


def use(processes: Processes, told: list[object]) -> None:
    """Do all that a command does with its processes."""
    with processes.working():
        processes.check_same("settings", "a")
        processes.check_same_model(bundled_model_path())
        processes.telling(lambda *what: told.append(what))("weights", 1, 2)
        processes.progress()


def test_processes_of_a_job_compare_and_tell_of_their_progress():
    told: list[object] = []
    use(Processes(count=2, watch=NotedWatch(told)), told)
    same = ("settings", "a"), ("files of the model", model_hash(bundled_model_path()))
    assert told == ["begin", *same, "progress", ("weights", 1, 2), "progress", "end"]


def test_one_process_waits_for_nobody():
    told: list[object] = []
    processes = join_processes(parse_args(["--prompt", "a"]))
    assert processes == Processes() and processes.count == 1
    use(processes, told)
    assert told == [("weights", 1, 2)]


def test_options_that_make_no_job_are_named():
    args = parse_args(["--prompt", "a", options.NUM_PROCESSES.flag, "2"])
    with pytest.raises(InputError, match="--coordinator and --process-id must be given too"):
        join_processes(args)


def test_settings_of_a_job_are_one_text_in_every_process():
    """Python draws the order of a set anew in each process."""
    code = (
        "from detjax.cli.model import _shared_settings; from detjax.cli.parser import parse_args;"
        "args = '--prompt a --tp 2 --seed 3 --coordinator h:1 --num-processes 2 --process-id';"
        "print(_shared_settings(parse_args([*args.split(), '{}'])))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code.format(seed)],
            env=os.environ | {"PYTHONHASHSEED": str(seed + 1)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in range(2)
    }  # fmt: skip
    assert len(told) == 1 and "'options': [" in told.pop()
