# SPDX-License-Identifier: Apache-2.0
"""The end of the interpreter waits for calls under way and refuses later ones."""

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from detjax import interpreter_exit
from detjax.interpreter_exit import ExitGate, InterpreterExitError

WAIT_S = 60.0


class Held:
    """Something that a thread's frame keeps alive."""


class Caller:
    """A thread that works behind a gate until it is let go, and then begins something else."""

    def __init__(self, gate: ExitGate, *, daemon: bool):
        self._gate = gate
        self.error: type[BaseException] | None = None
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=daemon)
        self.thread.start()
        assert self.entered.wait(WAIT_S)

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = type(error)

    def _call(self) -> None:
        held = Held()
        self.held = weakref.ref(held)
        with self._gate.working():
            with self._gate.working():
                pass
            self.entered.set()
            assert self.go_on.wait(WAIT_S)
            with self._gate.working():
                raise AssertionError("begun after the end")


def closing(gate: ExitGate) -> threading.Thread:
    """A thread that closes a gate, once it is closed."""
    thread = threading.Thread(target=gate.close)
    thread.start()
    while not gate._is_closed:
        pass
    return thread


@pytest.mark.parametrize(
    ("daemon", "error"), [(False, InterpreterExitError), (True, SystemExit)], ids=str
)
def test_the_end_waits_for_a_call_and_refuses_what_it_begins(daemon, error):
    gate = ExitGate()
    caller = Caller(gate, daemon=daemon)
    end = closing(gate)
    end.join(0.2)
    assert end.is_alive(), "it does not wait"
    caller.go_on.set()
    end.join(WAIT_S)
    caller.thread.join(WAIT_S)
    assert not end.is_alive() and caller.error is error
    assert caller.held() is not None, "the thread has freed what its frames held"


def test_what_fails_otherwise_keeps_its_error_and_frees_its_frames():
    gate = ExitGate()
    with pytest.raises(ValueError, match="of the caller"), gate.working():
        raise ValueError("of the caller")
    assert not gate._kept and not gate._inside


def test_a_closed_gate_refuses_the_main_thread():
    gate = ExitGate()
    gate.close()
    with pytest.raises(InterpreterExitError, match=r"join\(\) the threads"), gate.working():
        pass


def test_the_end_does_not_wait_for_ever(monkeypatch, capsys):
    monkeypatch.setattr(interpreter_exit, "PATIENCE_S", 0.1)
    gate = ExitGate()
    caller = Caller(gate, daemon=True)
    gate.close()
    assert "1 threads are still at work after 0.1 s" in capsys.readouterr().err
    caller.go_on.set()
    caller.thread.join(WAIT_S)


def test_a_fork_does_not_wait_for_threads_of_its_parent(capsys):
    gate = ExitGate()
    caller = Caller(gate, daemon=True)
    gate.forget_threads()
    gate.close()
    assert capsys.readouterr().err == ""
    caller.go_on.set()
    caller.thread.join(WAIT_S)


BODY = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from detjax.interpreter_exit import finishes_before_exit

pool, begun = ThreadPoolExecutor(1), threading.Event()
pool.submit(int).result()  # its thread is there: Python starts none once it ends

@finishes_before_exit
def call():
    begun.set()
    time.sleep(1)
    print(pool.submit(int, "7").result(), flush=True)

def work():
    while True:
        call()

threading.Thread(target=work, daemon=sys.argv[1] == "daemon").start()
begun.wait()
sys.exit(3)
"""


def ended(how: str) -> subprocess.CompletedProcess:
    given = [sys.executable, "-c", BODY, how]
    return subprocess.run(given, capture_output=True, text=True, timeout=60)


def _is_silent(errors: str) -> bool:
    return errors == ""


def _names_the_error(errors: str) -> bool:
    return errors.splitlines()[-1].startswith("detjax.interpreter_exit.InterpreterExitError: ")


@pytest.mark.parametrize(
    ("how", "is_told"),
    [("daemon", _is_silent), ("joined", _names_the_error)],
    ids=["daemon", "joined"],
)
def test_a_call_under_way_ends_with_its_executors_open(how: str, is_told: Callable[[str], bool]):
    run = ended(how)
    assert (run.returncode, run.stdout) == (3, "7\n"), run.stderr
    assert is_told(run.stderr), run.stderr
