# SPDX-License-Identifier: Apache-2.0
"""How far a start is: bars on a terminal, lines now and then elsewhere, and an end to both."""

import io
import time

import pytest
import rich.console

from detjax import progress
from detjax.progress import Heartbeat, show_progress, show_stages

BYTES = {"in_bytes": True}
STAGES = "compiling", "checking"


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What is said, which is asked for a hundred times a second."""
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    return []


def wait_for(lines: list[str], text: str) -> None:
    until_s = time.monotonic() + 10
    while not any(text in line for line in lines):
        assert time.monotonic() < until_s, lines
        time.sleep(0.005)


def no_terminal() -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), force_terminal=False)


@pytest.mark.parametrize(
    ("options", "done", "says"),
    [
        (BYTES, 0, "loading: 0%, "),
        (BYTES, 3, "loading: 75%, "),
        ({}, 3, "loading: 3 of 4, "),
    ],
)
def test_a_stage_says_how_far_it_is(lines, options, done, says):
    with show_progress("loading", no_terminal(), lines.append, **options) as tell:
        wait_for(lines, "loading, 0 s")
        tell("w", done, 4)
        wait_for(lines, says)
    time.sleep(0.05)
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count


def test_nothing_is_said_of_what_is_quick(lines, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    with show_progress("loading", no_terminal(), lines.append) as tell:
        tell("w", 1, 2)
    assert lines == []


def test_a_stage_that_fails_says_no_more(lines):
    with (
        pytest.raises(ZeroDivisionError),
        show_progress("loading", no_terminal(), lines.append),
    ):
        raise ZeroDivisionError
    time.sleep(0.05)
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count


def test_stages_that_overlap_are_told_side_by_side(lines):
    with show_stages(STAGES, no_terminal(), lines.append) as (compiled, checked):
        compiled("decode 8x1", 1, 2)
        wait_for(lines, "compiling: 1 of 2, 0 s")
        checked("decode 8x1", 1, 3)
        wait_for(lines, "compiling: 1 of 2, checking: 1 of 3, ")
        compiled("prefill 1x64", 2, 2)
        wait_for(lines, "compiling: 2 of 2, checking: 1 of 3, ")


def test_a_terminal_has_bars_and_no_lines(lines):
    file = io.StringIO()
    screen = rich.console.Console(file=file, force_terminal=True, width=120)
    with show_stages(STAGES, screen, lines.append) as (compiled, checked):
        compiled("decode 8x1", 1, 2)
        assert "checking" not in file.getvalue()
        checked("prefill 1x64", 2, 3)
    shown = file.getvalue()
    assert "compiling" in shown and "checking prefill 1x64" in shown and "2/3" in shown
    assert lines == []


def test_a_heartbeat_begins_again(lines):
    heart = Heartbeat(lines.append)
    for text in ("one", "two"):
        heart.update(text)
        wait_for(lines, f"{text}, 0 s")
        heart.stop()
    heart.stop()
