# SPDX-License-Identifier: Apache-2.0
"""Several processes over localhost: the bits of one, and an end when one of them is lost."""

import functools
import json
import runpy
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from detjax.parallel import watch as watching
from detjax.parallel.distributed import JobSpec, find_job
from detjax.parallel.mesh import devices_of_process
from detjax.parallel.watch import connect

WORKER = Path(__file__).with_name("worker.py")
PROMPTLY_S = 20


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start(num_processes: int, **what) -> list[subprocess.Popen]:
    """Every process of a job, or those named in `only`."""
    what = {"coordinator": f"localhost:{free_port()}", "num_processes": num_processes, **what}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps({**what, "process_id": process_id})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process_id in what.get("only", range(num_processes))
    ]


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each; none may outlast the test."""
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


@functools.cache
def digests_of_one_process() -> list[str]:
    """What the worker generates on one device, in this process."""
    worker = runpy.run_path(str(WORKER))
    engine = worker["make_engine"]((1, 1))
    return [c.digest() for c in engine.generate(worker["requests"](changed=False))]


@pytest.mark.invariance
@pytest.mark.parametrize(
    ("num_processes", "devices"),
    [
        (2, 1),
        pytest.param(2, 4, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_processes_are_bitwise_mesh_invariant(num_processes, devices):
    """2 and 4 processes of a tp group, with one device each or several, speak as one."""
    mesh = (1, num_processes * devices)
    ended = finish(start(num_processes, devices=devices, mesh=mesh))
    for code, _, errors in ended:
        assert code == 0, errors
    assert json.loads(ended[0][1]) == digests_of_one_process()
    assert [out for _, out, _ in ended[1:]] == [""] * (num_processes - 1)


@pytest.mark.parametrize(
    ("fault", "faulty", "message"),
    [
        pytest.param(
            "killed", 1, "error: process 1 was lost: its connection closed; process 0 ends",
            marks=pytest.mark.slow,
        ),
        ("killed", 0, "error: process 0 was lost: its connection closed; process 1 ends"),
        pytest.param(
            "raises", 1, "error: process 1 failed: ZeroDivisionError: planted; process 0 ends",
            marks=pytest.mark.slow,
        ),
        ("other requests", 1, "error: process 1 was given other requests than process 0"),
    ],
)  # fmt: skip
def test_a_lost_process_ends_the_job_and_is_named(fault, faulty, message):
    processes = start(2, devices=1, mesh=(1, 2), fault=fault, faulty=faulty)
    other = 1 - faulty
    processes[faulty].wait(timeout=240)
    since_s = time.monotonic()
    processes[other].wait(timeout=240)
    assert time.monotonic() - since_s < PROMPTLY_S
    code, _, errors = finish(processes)[other]
    assert code == 1 and message in errors, errors


def test_a_process_that_waits_in_vain_says_so():
    first, second = (finish(start(3, only=[i], join_s=2))[0] for i in (0, 1))
    assert first[0] != 0 and "of 3 processes, [1, 2] did not come to port" in first[2], first[2]
    assert second[0] != 0 and "no process 0 at localhost:" in second[2], second[2]


@pytest.fixture
def pair(monkeypatch):
    """Connects processes 0 and 1 in this one; gives both watches, what they say, and their end."""
    opened = []

    def connect_pair(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(watching, name, value)
        said, ended = [], threading.Event()
        join = functools.partial(
            connect,
            host="localhost",
            port=free_port(),
            join_s=10.0,
            announcement="",
            say=said.append,
            end=lambda code: ended.set(),
        )
        with ThreadPoolExecutor() as pool:
            joining = [pool.submit(join, i, 2) for i in range(2)]
            opened.extend(each.result()[0] for each in joining)
        return *opened, said, ended

    yield connect_pair
    for watch in opened:
        watch.close()


def test_a_process_that_ends_too_early_is_named(pair):
    first, second, said, ended = pair(BEAT_S=0.05, GRACE_S=0.2)
    second.leave()
    assert not ended.wait(0.5)  # nobody needs it any more
    with first.working():
        assert ended.wait(10)
    assert "error: process 1 ended while others still had work to do; process 0 ends" in said


def test_a_silent_process_is_named(pair, monkeypatch):
    first, second, said, ended = pair(BEAT_S=0.05, SILENCE_S=0.3)
    monkeypatch.setattr(second, "_tell", lambda message: None)
    assert ended.wait(10)
    assert "error: process 1 was lost: no sign of life for 0 s; process 0 ends" in said


def test_sameness_is_compared_in_turn(pair):
    first, second, said, ended = pair()
    for value in ("a", "b"):
        first.check_same("turns", value)
        second.check_same("turns", value)
    assert not ended.wait(0.3)
    second.check_same("turns", "d")
    first.check_same("turns", "c")
    assert ended.wait(10)
    assert "error: process 1 was given other turns than process 0; process 0 ends" in said


def test_options_of_a_job_go_together():
    assert find_job(None, None, None) is None
    assert find_job("n1:9000", 1, 0) is None
    spec = JobSpec(coordinator="n1:9000", num_processes=4, process_id=3)
    assert find_job("n1:9000", 4, 3) == spec
    assert spec.address == ("n1", 9000)
    assert JobSpec(coordinator="[::1]:90", num_processes=1, process_id=0).address == ("::1", 90)
    for options, message in (
        (("n1:9000", 4, None), "--process-id must be given too"),
        ((None, 4, None), "--coordinator and --process-id must be given too"),
        (("n1:9000", 4, 4), "--process-id 4 must be at least 0 and less than --num-processes 4"),
        (("n1", 4, 0), "--coordinator n1 must be HOST:PORT"),
        (("n1:0", 4, 0), "--coordinator n1:0 must be HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=message):
            find_job(*options)


def test_the_command_takes_the_options_of_a_job():
    from detjax.cli.errors import InputError
    from detjax.cli.parser import parse_args

    options = ["--coordinator", "n1:9000", "--num-processes", "2", "--process-id", "1"]
    args = parse_args(["--prompt", "x", *options])
    assert (args.coordinator, args.num_processes, args.process_id) == ("n1:9000", 2, 1)
    with pytest.raises(InputError, match="--prompt - reads what only one process has"):
        parse_args(["--prompt", "-", *options])
    with pytest.raises(InputError, match="--process-id: invalid int value"):
        parse_args(["--prompt", "x", "--process-id", "one"])


def test_devices_divide_over_processes():
    assert devices_of_process(8, 2) == 4
    for num_processes in (3, 16):
        with pytest.raises(ValueError, match=f"do not divide over {num_processes} processes"):
            devices_of_process(8, num_processes)


@pytest.mark.parametrize(
    ("nodes", "visible", "local_gpus"),
    [("2", "0,1,2,3", (1,)), ("4", "0,1,2,3", ()), ("2", "0", ())],
)
def test_slurm_describes_the_job(monkeypatch, nodes, visible, local_gpus):
    """One task a machine drives all its GPUs, of several tasks each one, unless srun bound it."""
    environ = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_NODES": nodes,
        "CUDA_VISIBLE_DEVICES": visible,
        "JAX_COORDINATOR_PORT": "9000",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert find_job(None, None, None) == JobSpec(
        coordinator="gpu07:9000", num_processes=4, process_id=3, local_gpus=local_gpus
    )
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    assert find_job(None, None, None) is None
