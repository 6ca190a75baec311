# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax.serve` in two processes on one mesh: the answers of one, and how it ends.

What process 1 must notice, and the control, are in `tests/engine/test_replicated_engine.py`.
"""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

import detjax
from detjax.serve import check_options, main, make_parser
from detjax.server.job import FAILED_S, SHARED_OPTIONS

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"(\w+=\S+ )*python -m detjax\.serve( |$)")
PROMPTS = ("The old house by the sea", "It was late", "17+26=", "He said that the whole of the")
NOTICED_S = 10.0
"""Within which a lost process must be seen in `/health`; it takes less than one."""


@dataclass
class Job:
    processes: list[subprocess.Popen]
    client: httpx.AsyncClient

    def wait(self) -> list[int]:
        return [process.wait(60) for process in self.processes]

    def log(self) -> str:
        assert self.processes[0].stderr is not None
        return self.processes[0].stderr.read()


@contextlib.contextmanager
def started(*options: str, num_processes: int = 2) -> Iterator[Job]:
    """A job that is ready. Programs are kept with those of the other tests."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(jax.config.jax_compilation_cache_max_size),
    }
    command = [
        sys.executable, "-m", "detjax.serve", "--port", "0", "--no-compile", "--max-len", "256",
        "--batch-size", "4", "--coordinator", f"localhost:{port}", "--num-processes",
        str(num_processes), *options, "--process-id",
    ]  # fmt: skip
    processes = [
        subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True, env=env)
        for i in range(num_processes)
    ]
    try:
        lines = []
        for line in processes[0].stderr or ():
            lines.append(line)
            if found := re.search(r"ready: (http://127\.0\.0\.1:\d+) ", line):
                break
        else:
            pytest.fail("".join(lines))
        yield Job(processes, httpx.AsyncClient(base_url=found[1], timeout=240))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


async def closing(job: Job, ask: Callable[[Job], Awaitable[None]]) -> None:
    async with job.client:
        await ask(job)


def body(index: int) -> dict:
    """Requests of every kind."""
    return {
        "model": "novels-6m", "prompt": PROMPTS[index % 4] + " and" * (index % 3),
        "max_tokens": 8 + 5 * (index % 5), "temperature": (index % 3) / 2, "seed": index,
        "n": 1 + (index % 7 == 0), "top_p": 1.0 if index % 2 else 0.9,
        "priority": index % 4, "stop": [" the"] if index % 6 == 5 else None,
    }  # fmt: skip


def expected(llm: detjax.LLM, index: int) -> list[str]:
    """Digests of one process, at its own batch size, alone."""
    asked = body(index)
    sampling = detjax.SamplingParams(
        max_tokens=asked["max_tokens"], temperature=asked["temperature"], seed=asked["seed"],
        n=asked["n"], top_p=asked["top_p"], stop=tuple(asked["stop"] or ()),
    )  # fmt: skip
    return [done.digest() for done in llm.generate(asked["prompt"], sampling)[0].outputs]


async def digests(client: httpx.AsyncClient, index: int) -> list[str]:
    answer = await client.post("/v1/completions", json=body(index))
    assert answer.status_code == 200, answer.text
    return [choice["detjax"]["digest"] for choice in answer.json()["choices"]]


async def leave_early(client: httpx.AsyncClient, index: int, num_lines: int) -> None:
    """Ask for a long answer, and go away in its midst."""
    asked = body(index) | {"stream": True, "max_tokens": 200, "stop": None}
    async with client.stream("POST", "/v1/completions", json=asked) as stream:
        async for _ in stream.aiter_lines():
            num_lines -= 1
            if num_lines <= 0:
                return


async def load(client: httpx.AsyncClient, count: int) -> list[list[str]]:
    """All at random times, with as many that are cancelled."""
    rng = np.random.default_rng(5)
    delays = rng.uniform(0, 2, 2 * count)

    async def after(delay: float, wanted):
        await asyncio.sleep(delay)
        return await wanted

    asking = [after(delays[i], digests(client, i)) for i in range(count)]
    leaving = [
        after(delays[count + i], leave_early(client, i, int(rng.integers(1, 20))))
        for i in range(count)
    ]
    return (await asyncio.gather(*asking, *leaving))[:count]


async def cancelled(client: httpx.AsyncClient) -> float:
    metrics = (await client.get("/metrics")).text
    return float(re.findall(r"detjax_\w*cancel\w*(?:\{[^}]*\})? ([\d.e+]+)", metrics)[0])


@pytest.mark.slow
@pytest.mark.invariance
def test_a_job_of_tp_2_answers_as_one_process_and_fails_closed_when_one_is_lost(llm):
    """Under a load with cancellations; then process 1 is killed in the midst of an answer."""

    async def ask(job: Job) -> None:
        got = await load(job.client, 16)
        assert got == [expected(llm, i) for i in range(16)]
        assert await cancelled(job.client) > 3
        stream = asyncio.create_task(failing(job.client))
        await asyncio.sleep(1)
        job.processes[1].kill()
        since_s = time.monotonic()
        said = await stream
        assert "process 1 was lost: its connection closed" in said, said
        health = await job.client.get("/health")
        assert time.monotonic() - since_s < NOTICED_S
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "process 1 was lost" in health.json()["reason"]
        refused = await job.client.post("/v1/completions", json=body(1))
        assert refused.status_code == 503 and "process 1 was lost" in refused.text
        await asyncio.to_thread(job.processes[0].wait, FAILED_S + NOTICED_S)

    async def failing(client: httpx.AsyncClient) -> str:
        """A stream of many answers, which is cut; its last event."""
        asked = body(0) | {"stream": True, "max_tokens": 240, "n": 64, "stop": None}
        async with client.stream("POST", "/v1/completions", json=asked) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        return lines[-2]

    with started("--tp", "2") as job:
        asyncio.run(closing(job, ask))
        assert job.wait() == [1, -signal.SIGKILL]
        assert "error: process 1 was lost: its connection closed; process 0 ends" in job.log()


@pytest.mark.slow
@pytest.mark.invariance
def test_a_job_of_dp_2_answers_as_one_process_and_drains_when_another_is_told_to(llm):
    """With drafts that are verified; process 1 gets the SIGTERM."""

    async def ask(job: Job) -> None:
        assert await load(job.client, 12) == [expected(llm, i) for i in range(12)]
        under_way = asyncio.create_task(digests(job.client, 4))
        while "detjax_http_requests_open 1" not in (await job.client.get("/metrics")).text:
            assert not under_way.done()
        job.processes[1].send_signal(signal.SIGTERM)
        assert await under_way == expected(llm, 4)

    with started("--dp", "2", "--mode", "dvr") as job:
        asyncio.run(closing(job, ask))
        assert job.wait() == [0, 0]
        log = job.log()
        assert "draining: 1 requests are open" in log and "Traceback" not in log, log


@pytest.mark.slow
def test_a_job_that_cannot_be_opened_ends_in_all_processes():
    """What only the devices show is refused after all have joined."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable, "-m", "detjax.serve", "--port", "0", "--tp", "2", "--kv-memory", "0.5",
        "--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id",
    ]  # fmt: skip
    processes = [
        subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode > 0 for process in processes] == [True, True], (
        [process.returncode for process in processes],
        errors,
    )
    assert all(
        "--gpu-memory-utilization 0.5 is a share of a GPU's memory" in text for text in errors
    ), errors


@pytest.mark.slow
def test_an_option_that_differs_is_named_before_anything_is_compiled():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable, "-m", "detjax.serve", "--port", "0", "--tp", "2",
        "--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id",
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [*command, str(i), "--max-len", str(256 + 128 * i)], stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode for process in processes)
    assert "error: process 1 was given other --max-len than process 0" in "".join(errors), errors
    assert not any("compil" in text for text in errors), errors


def test_every_option_that_is_compared_is_one():
    args = vars(make_parser().parse([]))
    assert set(SHARED_OPTIONS) <= set(args)


def test_the_commands_of_the_docs_are_commands():
    lines = (ROOT / "docs" / "server.md").read_text().splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if COMMAND.match(line)]
    assert len(commands) >= 5
    for words in commands:
        argv = words[words.index("detjax.serve") + 1 :]
        parser = make_parser()
        check_options(parser.parse_args(argv[:-1] if argv[-1:] == ["&"] else argv))


def test_options_of_a_job_go_together(capsys):
    assert main(["--port", "0", "--num-processes", "2"]) == 2
    assert "--coordinator and --process-id must be given too" in capsys.readouterr().err
