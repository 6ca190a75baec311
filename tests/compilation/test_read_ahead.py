# SPDX-License-Identifier: Apache-2.0
"""What a start will need is read while it is busy with something else."""

import logging
import subprocess
import sys
import threading

import jax
import pytest

from detjax.compilation import kept_executables, read_ahead
from detjax.compilation.kept_programs import keep_programs_of_build, opened_folder
from detjax.compilation.read_ahead import ReadAhead
from detjax.testing import assert_bitwise_equal
from tests.compilation.test_kept_executables import ROOT, Step

NAME = "start-of-a-test"


@pytest.fixture
def folder(cache_folder):
    keep_programs_of_build(cache_folder)
    return opened_folder()


def used(folder, *names: str) -> None:
    """Write down what a start used."""
    earlier = ReadAhead(folder, NAME, lambda name: None)
    for name in names:
        earlier.note(name)


def test_what_the_last_start_used_is_read_in_its_order(folder, monkeypatch):
    monkeypatch.setattr(read_ahead, "NUM_THREADS", 1)
    used(folder, "b", "a", "b", "c")
    found = []
    ahead = ReadAhead(folder, NAME, lambda name: found.append(name) or name.upper())
    for thread in ahead._threads:
        thread.join()
    assert found == ["b", "a", "c"]
    assert [ahead.take(name) for name in ("a", "c", "d")] == ["A", "C", None]
    assert ahead.take("a") is None, "once"
    ahead.note("c")
    assert ReadAhead(folder, NAME, str.upper)._waiting.keys() == {"c"}


def test_who_needs_what_is_not_read_yet_reads_it(folder, monkeypatch):
    monkeypatch.setattr(read_ahead, "NUM_THREADS", 1)
    used(folder, "slow", "next")
    entered, go_on = threading.Event(), threading.Event()
    found = []

    def read(name):
        found.append(name)
        entered.set()
        assert go_on.wait(60)
        return name

    ahead = ReadAhead(folder, NAME, read)
    assert entered.wait(60)
    assert ahead.take("next") is None
    go_on.set()
    assert ahead.take("slow") == "slow"
    for thread in ahead._threads:
        thread.join()
    assert found == ["slow"], "what was taken over is not read a second time"


def test_what_stops_reads_no_more(folder, monkeypatch):
    monkeypatch.setattr(read_ahead, "NUM_THREADS", 1)
    used(folder, "slow", "next")
    entered, go_on = threading.Event(), threading.Event()
    found = []

    def read(name):
        found.append(name)
        entered.set()
        assert go_on.wait(60)

    ahead = ReadAhead(folder, NAME, read)
    assert entered.wait(60)
    threading.Timer(0.05, go_on.set).start()
    ahead.stop()
    assert found == ["slow"]
    assert ahead.take("next") is None


def test_an_error_reaches_who_asks(folder):
    used(folder, "a")

    def read(name):
        raise RuntimeError("the driver is gone")

    ahead = ReadAhead(folder, NAME, read)
    for thread in ahead._threads:
        thread.join()
    with pytest.raises(RuntimeError, match="the driver is gone"):
        ahead.take("a")


def test_a_step_is_read_before_it_is_asked_for(folder, caplog):
    caplog.set_level(logging.DEBUG, kept_executables.__name__)
    devices = jax.devices()[:1]
    step = Step()

    def start() -> None:
        kept_executables.read_ahead(devices, root=ROOT, asked_of=("a model",))
        for thread in kept_executables._ahead()[tuple(devices)]._threads:
            thread.join()

    start()
    want = step.run()
    start()
    assert_bitwise_equal(step.run(), want, claim="read ahead")
    assert "read ahead executable-" in caplog.text
    assert step.num_lowered == 1
    kept_executables._ahead().clear()


ENDS = """
import sys, time
from detjax.compilation.kept_programs import keep_programs_of_build, opened_folder
from detjax.compilation.read_ahead import ReadAhead
keep_programs_of_build(sys.argv[1])
first = ReadAhead(opened_folder(), "start", lambda name: None)
for i in range(50):
    first.note(str(i))
ahead = ReadAhead(opened_folder(), "start", lambda name: time.sleep(0.2))
"""


def test_a_process_ends_while_it_reads(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
