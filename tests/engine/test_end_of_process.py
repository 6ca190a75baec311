# SPDX-License-Identifier: Apache-2.0
"""A process may end while programs run, and while daemon threads wait for them."""

import signal
import subprocess
import sys

import pytest

ENDS = """
import sys, time
import types
import jax, jax.numpy as jnp
import detjax

class Late:
    '''Lets other threads run for a while when the interpreter ends.'''
    def __del__(self, sleep=time.sleep):
        sleep(6)

late = Late()
llm = detjax.LLM("bundled", num_pages=4, batch_size=1, show_progress=False, cache_dir=None)
device = llm.engine._runner._device
device._starts_copies = device._starts_copies or sys.argv[1] == "copies"
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 80, lambda i, x: jnp.tanh(x @ x), x)[:1])
x = jnp.ones((600, 600), jnp.float32)
jax.block_until_ready(slow(x))
key = types.SimpleNamespace(
    kind="decode", name="slow", logit_rows=0, leaves_hidden=False, leaves_features=False,
    weights="full",
)
launched = device.run(key, lambda params, tables, *state: (slow(x),), llm.model.params)
assert not launched.result().choice.is_ready()
"""


def ended(how: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", ENDS, how], capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_process_ends_while_a_program_runs():
    run = ended("as it is")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.control
def test_control_a_copy_that_has_been_asked_for_ends_it_by_a_signal():
    """Why a CPU is not asked for copies of results."""
    run = ended("copies")
    assert run.returncode == -signal.SIGABRT, run.stderr


DAEMON = """
import atexit, sys, threading, time

class Late:
    '''Lets other threads run for a while when the interpreter ends.'''
    def __del__(self, sleep=time.sleep):
        sleep(6)

late, inside = Late(), []
atexit.register(lambda: print("inside" if inside else "outside", flush=True))  # called last
import jax, jax.numpy as jnp
import detjax

slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda i, x: jnp.tanh(x @ x), x)[:1])
x = jnp.ones((600, 600), jnp.float32)
jax.block_until_ready(slow(x))
llm = detjax.LLM("bundled", num_pages=4, batch_size=1, show_progress=False, cache_dir=None)
entered, is_held = threading.Event(), sys.argv[1] == "held"

def read():
    inside.append(True)
    result = slow(x)
    entered.set()
    jax.block_until_ready(result)
    inside.clear()

def step(advance=llm.engine._loop.advance):
    read()
    advance()

def work():
    if is_held:
        llm.engine._loop.advance = step
        llm.generate("The old house", detjax.SamplingParams(max_tokens=8))
    else:
        read()

threading.Thread(target=work, daemon=True).start()
entered.wait()
sys.exit(3)
"""


def ended_at_work(how: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", DAEMON, how], capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_process_ends_while_a_daemon_thread_reads_a_result():
    run = ended_at_work("held")
    assert (run.returncode, run.stdout, run.stderr) == (3, "outside\n", "")


@pytest.mark.slow
@pytest.mark.control
def test_control_a_daemon_thread_that_nothing_waits_for_ends_it_by_a_signal():
    run = ended_at_work("alone")
    assert (run.returncode, run.stdout) == (-signal.SIGABRT, "inside\n"), run.stderr
