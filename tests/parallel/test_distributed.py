# SPDX-License-Identifier: Apache-2.0
"""Several processes over localhost: the bits of one, and an end when one of them is lost."""

import functools
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import detjax
from detjax.models.bundled import bundled_model_path
from detjax.parallel import watch as watching
from detjax.parallel.job_spec import JobSpec, find_job
from detjax.parallel.mesh import devices_of_process
from detjax.parallel.watch import connect
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow

WORKER = Path(__file__).with_name("worker.py")
PACKAGE = Path(detjax.__file__).parent
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


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("num_processes", "devices"), [(2, 1), (2, 4), (4, 1)])
def test_processes_are_bitwise_mesh_invariant(num_processes, devices):
    """2 and 4 processes of a tp group, with one device each or several, speak as one."""
    mesh = (1, num_processes * devices)
    ended = finish(start(num_processes, devices=devices, mesh=mesh))
    for code, _, errors in ended:
        assert code == 0, errors
    assert json.loads(ended[0][1]) == digests_of_one_process()
    assert [out for _, out, _ in ended[1:]] == [""] * (num_processes - 1)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_model_of_two_processes_is_saved_as_it_was_read(tmp_path):
    """Each has half of every matrix; one writes."""
    folder = tmp_path / "saved"
    for code, _, errors in finish(start(2, devices=1, mesh=(1, 2), save=str(folder))):
        assert code == 0, errors
    found, want = (load_file(it / "model.safetensors") for it in (folder, bundled_model_path()))
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert_bitwise_equal(found[name], tensor, claim=name)


@pytest.mark.slow
def test_a_process_that_is_late_is_waited_for():
    """As one that loads or compiles beside other work on its machine."""
    ended = finish(start(2, devices=1, mesh=(1, 2), fault="late", faulty=1))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert json.loads(ended[0][1]) == digests_of_one_process()


@pytest.mark.nightly
def test_the_example_of_a_replicated_engine_speaks_for_both_processes():
    path = PACKAGE.parent / "examples" / "replicated_engine.py"
    address = f"localhost:{free_port()}"
    ended = finish([
        subprocess.Popen(
            [sys.executable, str(path), address, "2", str(i)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        )
        for i in range(2)
    ])  # fmt: skip
    assert [code for code, _, _ in ended] == [0, 0], ended
    llm = detjax.LLM("novels-6m", max_len=256, show_progress=False)
    prompts = ["The old house by the sea", "It was late", "17+26="]
    found = llm.generate(prompts, detjax.SamplingParams(max_tokens=16))
    assert ended[0][1] == "".join(f"{out.prompt}:{out.outputs[0].text}\n" for out in found)
    assert ended[1][1] == ""


@pytest.mark.parametrize("arguments", [[], ["localhost:9000", "two", "0"]])
def test_the_example_of_a_replicated_engine_says_what_it_needs(arguments, monkeypatch):
    path = PACKAGE.parent / "examples" / "replicated_engine.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit, match="give ADDRESS PROCESSES PROCESS_ID, such as: python "):
        runpy.run_path(str(path))


@pytest.mark.parametrize(
    ("fault", "faulty", "message"),
    [
        pytest.param(
            "killed", 1, "error: process 1 was lost: its connection closed; process 0 ends",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "killed", 0, "error: process 0 was lost: its connection closed; process 1 ends",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "raises", 1, "error: process 1 failed: ZeroDivisionError: planted; process 0 ends",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "other requests", 1, "error: process 1 was given other requests than process 0",
            marks=pytest.mark.slow,
        ),
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


def test_a_process_whose_main_thread_hangs_is_named(pair):
    """Its beats go on, its progress does not."""
    first, second, said, ended = pair(BEAT_S=0.02, STALL_S=0.4)
    with first.working(), second.working():
        for _ in range(40):  # longer than STALL_S
            first.progress(), second.progress()
            time.sleep(0.02)
        assert not ended.is_set()
        first.progress()
        assert ended.wait(10)
    assert "error: process 1 hangs: no progress for 0 s, the others wait for it" in said[0]


def test_who_tells_of_no_progress_may_work_as_long_as_it_takes(pair):
    first, second, said, ended = pair(BEAT_S=0.02, STALL_S=0.1)
    with first.working(), second.working():
        assert not ended.wait(0.4)
        first.progress()
    assert not ended.wait(0.4)  # nobody works


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"what?\n", "process 1 sent no message of a job"),
        (b"[" * 3000 + b"\n", "process 1 sent no message of a job"),
        (b'{"fact": {}}\n', "process 1 sent no message of a job"),
        (b"7\n", "process 1 sent no message of a job"),
        (b"x" * 200_000, "process 1 sent a line of more than 4096 bytes"),
    ],
)
def test_a_line_that_is_no_message_ends_the_job_and_is_named(pair, line, says):
    first, second, said, ended = pair()
    second._links[0].sendall(line)
    assert ended.wait(10)
    assert says in said[0]


def test_facts_that_were_compared_are_forgotten(pair):
    first, second, said, ended = pair()
    for i in range(100):
        first.check_same("turns", str(i))
        second.check_same("turns", str(i))
    until_s = time.monotonic() + 10
    while first._facts and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not first._facts and not said


def joining(port: int, process_id: int, num_processes: int, *, join_s: float = 10.0):
    """What a process does first; its watch must be closed."""
    return connect(
        process_id, num_processes, host="localhost", port=port, join_s=join_s,
        announcement="4711", say=print, end=lambda code: None,
    )  # fmt: skip


def visit(port: int) -> socket.socket:
    """Connect as soon as somebody listens."""
    until_s = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("localhost", port), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_probes_and_silent_connections_delay_no_job():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(joining, port, 0, 2)
        visitors = [visit(port) for _ in range(4)]
        visitors[0].sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        visitors[1].sendall(b"x" * 10_000)
        visitors[2].close()
        visitors[3].sendall(b"detjax-jo")  # and nothing more
        since_s = time.monotonic()
        second = pool.submit(joining, port, 1, 2)
        (watch, _), (other, announced) = first.result(10), second.result(10)
        assert time.monotonic() - since_s < watching.HELLO_S
    for each in (watch, other, *visitors):
        each.close()
    assert announced == "4711"


def test_who_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(watching, "HELLO_S", 0.1)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(joining, port, 0, 2, join_s=1.0)
        with visit(port) as visitor:
            assert visitor.recv(1) == b""
        with pytest.raises(TimeoutError, match=r"\[1\] did not come to port \d+; 1 others did"):
            first.result(10)


def test_other_numbers_of_processes_are_told_apart():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(joining, port, 0, 2)
        second = pool.submit(joining, port, 2, 3)
        with pytest.raises(ValueError, match="process 2 was started with --num-processes 3"):
            first.result(10)
        with pytest.raises(TimeoutError, match="went away before all had come"):
            second.result(10)


def test_a_port_of_something_else_is_named():
    with socket.create_server(("localhost", 0)) as server, ThreadPoolExecutor() as pool:
        port = server.getsockname()[1]
        second = pool.submit(joining, port, 1, 2)
        link, _ = server.accept()
        link.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(ValueError, match=f"localhost:{port} answers, but not as process 0"):
            second.result(10)
        link.close()


@pytest.mark.parametrize(
    "what",
    quick_and_slow(("code of detjax",), ("files of the model", "--stop")),
)
def test_processes_that_run_something_else_are_refused(tmp_path, what):
    """The whole command, process 1 with other code, weights or options."""
    model, code = tmp_path / "model", tmp_path / "code"
    shutil.copytree(bundled_model_path(), model)
    options = [["--model", str(bundled_model_path())] for _ in range(2)]
    paths = [PACKAGE.parent, PACKAGE.parent]
    if what == "files of the model":
        weights = bytearray((model / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (model / "model.safetensors").write_bytes(weights)
        options[1] = ["--model", str(model)]
    elif what == "--stop":
        options[1] += ["--stop", "x"]
    else:
        shutil.copytree(PACKAGE, code / "detjax", ignore=shutil.ignore_patterns("__pycache__"))
        norm = code / "detjax" / "models" / "layers.py"
        norm.write_text(norm.read_text() + "\n# another eps\n")
        paths[1] = code
    job = ["--prompt", "17+26=", "--max-tokens", "2", "--tp", "2", "--num-processes", "2",
           "--coordinator", f"localhost:{free_port()}"]  # fmt: skip
    command = [sys.executable, "-P", "-m", "detjax.generate", *job, "--process-id"]
    processes = [
        subprocess.Popen(
            [*command, str(i), *options[i]],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(paths[i])},
        )
        for i in range(2)
    ]  # fmt: skip
    (code, out, err), _ = finish(processes)
    assert code == 1 and out == "", err
    assert f"error: process 1 was given other {what} than process 0; process 0 ends" in err


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
