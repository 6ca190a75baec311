# SPDX-License-Identifier: Apache-2.0
"""Two engines on one log: what both do, and how the job ends when one of them does something else.

Both are in this process and have a device each, so that a fault can be planted in one of them. Real
processes on one mesh: `tests/parallel/test_replicated.py`.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest

from detjax.engine import replicated_engine
from detjax.engine.async_engine import AsyncEngine
from detjax.engine.engine import Engine
from detjax.engine.errors import EngineFullError, EngineStoppedError
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.replicated_engine import ReplicatedEngine, follow
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running import device_state
from detjax.parallel import watch as watching
from detjax.parallel.watch import MAIL_BYTES, Watch, connect
from detjax.testing import assert_bitwise_equal
from detjax.testing.load import StopAfter, make_load, run_load

INTEGERS = runpy.run_path(str(Path(__file__).with_name("test_engine_faults.py")))
"""A device of integers: no program is compiled, and a wrong page changes an answer."""

VOCAB, MAX_LEN = INTEGERS["VOCAB"], INTEGERS["MAX_LEN"]
make_engine = INTEGERS["engine"]


@pytest.fixture(autouse=True)
def integers(monkeypatch):
    """Every engine of a test has a cache of its own, of integers."""
    buffer, page_len = INTEGERS["Buffer"], INTEGERS["PAGE"]
    monkeypatch.setattr(
        device_state, "empty_pages",
        lambda model, num_pages, _: buffer([-7 * place for place in range(num_pages * page_len)]),
    )  # fmt: skip
    monkeypatch.setattr(device_state, "empty", lambda model, shapes: buffer({}))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(watching, "BEAT_S", 0.05)


def connect_pair(ends: list[Callable[[int], Any]]) -> list[Watch]:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]

    def join(i: int) -> Watch:
        return connect(
            i, 2, host="localhost", port=port, join_s=10.0, announcement="",
            say=lambda text: None, end=ends[i],
        )[0]  # fmt: skip

    with ThreadPoolExecutor() as pool:
        return list(pool.map(join, range(2)))


@dataclasses.dataclass
class Pair:
    """Process 0's engine on its own, the other's, and what becomes of `follow` there."""

    engine: ReplicatedEngine
    own: Engine
    other: Engine
    failures: list[str]
    has_ended: threading.Event
    followed: Future


@contextlib.contextmanager
def paired(**changes) -> Iterator[Pair]:
    failures, has_ended = [], threading.Event()

    def end(code: int) -> None:  # as the server does
        engine.fail(watches[0].why_ended)
        has_ended.set()

    watches = connect_pair([end, lambda code: None])
    own = make_engine(**changes)
    other = make_engine(**changes)
    engine = ReplicatedEngine(own, watches[0], on_fail=failures.append)
    with ThreadPoolExecutor(1) as pool:
        followed = pool.submit(follow, other, watches[1])
        try:
            yield Pair(engine, own, other, failures, has_ended, followed)
        finally:
            # Whatever happened, the thread must get out of `follow`.
            watches[1].mail.put((0, replicated_engine._ENCODER.encode(replicated_engine.End())))
            with contextlib.suppress(Exception):
                followed.result(60)
            for watch in watches:
                watch.close()


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 5 * i) % VOCAB for i in range(length)]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("mode", "plain_share", "steps_ahead"),
    [
        ("dvr", 0.5, 2),
        pytest.param("dvr", 0.5, 1, marks=pytest.mark.slow),
        pytest.param("invariant", 0.0, 1, marks=pytest.mark.slow),
    ],
)
def test_a_load_with_cancellations_is_bitwise_that_of_lone_requests(mode, plain_share, steps_ahead):
    """Both engines launch the same, and answers are those of one engine at batch size 1."""
    sizes = {"vocab_size": VOCAB, "longest_prompt": 24, "most_tokens": 12}
    questions = make_load(12, seed=1, **sizes, long_every=3)
    alone = make_engine(batch_size=1, has_prefix_cache=False)
    expected = [alone.generate([q.request], on_token=StopAfter(q.stop)) for q in questions]
    with paired(mode=mode, num_pages=20, steps_ahead=steps_ahead) as pair:
        report = run_load(
            pair.engine, questions, expected,
            num_requests=200, seed=2, plain_share=plain_share, cancelled_share=0.3,
        )  # fmt: skip
        pair.engine.close()
        pair.followed.result(60)
        assert not pair.failures
    assert not report.wrong and not report.lost, report
    assert report.num_cancelled > 20
    mine, its = pair.own.stats(), pair.other.stats()
    for name in ("num_launches", "num_finished", "num_cancelled", "num_preempted", "num_rollbacks"):
        assert getattr(mine, name) == getattr(its, name), name
    assert mine.num_finished > 100 and mine.num_preempted > 0
    assert (mine.num_rollbacks > 0) is (mode == "dvr")


def plant(fault: str, other: Engine) -> None:
    """Let the follower's engine do something else than it is told."""
    step, take = other.step, other.enqueue_request
    if fault == "a cancellation":
        other.cancel = lambda request_id: None
    elif fault == "an order":
        held: list[tuple] = []

        def take_late(request, on_token):
            held.append((request, on_token))
            for each in reversed(held) if len(held) == 2 else ():
                take(*each)

        other.enqueue_request = take_late
    else:
        field = {"a token": "token_ids", "a logprob": "logprobs"}[fault]

        def step_wrong():
            outputs = step()
            if not any(output.token_ids for output in outputs):
                return outputs
            first, *rest = getattr(outputs[0], field)
            wrong = first + 1 if fault == "a token" else np.nextafter(first, np.float32(0))
            return [dataclasses.replace(outputs[0], **{field: (wrong, *rest)}), *outputs[1:]]

        other.step = step_wrong


@pytest.mark.control
@pytest.mark.parametrize("fault", ["a token", "a logprob", "a cancellation", "an order"])
def test_control_a_follower_that_differs_ends_the_job(fault):
    """It is made to differ once; process 0 fails closed, and says who and why."""
    with paired() as pair:
        plant(fault, pair.other)
        first = pair.engine.add_request(prompt(20), SamplingParams(max_tokens=16))
        pair.engine.add_request(prompt(30, 4), SamplingParams(max_tokens=16))
        pair.engine.step()
        pair.engine.cancel(first)
        with contextlib.suppress(EngineStoppedError):
            pair.engine.drain()
        assert pair.has_ended.wait(20)
        for call in (pair.engine.step, lambda: pair.engine.add_request([1], SamplingParams())):
            with pytest.raises(EngineStoppedError, match="process 1 failed: DivergedError: step"):
                call()
    assert len(pair.failures) == 1 and "process 1 failed" in pair.failures[0]


def test_an_error_in_process_0_ends_the_job():
    with paired() as pair:
        pair.engine.add_request(prompt(20), SamplingParams(max_tokens=16))
        pair.own.step = lambda: 1 // 0
        for _ in range(2):
            with pytest.raises(EngineStoppedError, match="ended: ZeroDivisionError"):
                pair.engine.step()
    assert len(pair.failures) == 1


def test_streams_end_with_what_ended_the_job_though_a_step_hangs():
    """A collective that waits for a lost process may never return."""
    with paired() as pair:
        is_hanging, goes_on = threading.Event(), threading.Event()
        step = pair.own.step

        def hang():
            is_hanging.set()
            assert goes_on.wait(60)
            return step()

        pair.own.step = hang

        async def ask() -> str:
            serving = AsyncEngine(pair.engine)
            loop = asyncio.get_running_loop()

            async def listen() -> str:
                with pytest.raises(EngineStoppedError) as raised:
                    async for _ in serving.stream(prompt(8), SamplingParams(max_tokens=4)):
                        pass
                return str(raised.value)

            listener = asyncio.create_task(listen())
            await asyncio.to_thread(is_hanging.wait, 20)
            loop.call_soon(serving.fail, EngineStoppedError("process 1 was lost"))
            said = await asyncio.wait_for(listener, 20)
            goes_on.set()
            return said

        assert asyncio.run(ask()) == "process 1 was lost"


def test_what_listeners_say_ends_sequences_in_both():
    """By a stop, by an error, and not at all; the follower has no listener of its own."""
    with paired() as pair:
        heard: dict[str, int] = {"stop": 0, "raise": 0, "none": 0}

        def listener(name: str):
            def on_token(event) -> bool:
                heard[name] += 1
                if heard[name] == 5 and name == "raise":
                    raise LookupError("planted")
                return heard[name] == 5 and name == "stop"

            return on_token

        for name in heard:
            pair.engine.add_request(
                prompt(9), SamplingParams(max_tokens=12, temperature=0.7), on_token=listener(name)
            )
        outputs = pair.engine.drain()
        pair.engine.close()
        pair.followed.result(60)
    ends = {o.request_id: o for o in outputs if o.finish_reason is not None}
    reasons = [ends[i].finish_reason for i in range(3)]
    assert reasons == [FinishReason.STOP, FinishReason.ERROR, FinishReason.LENGTH]
    assert heard == {"stop": 5, "raise": 5, "none": 12}
    assert "its consumer raised LookupError('planted')" in ends[1].error
    assert pair.other.stats().num_failed == 1 and pair.other.stats().num_finished == 2


def test_a_request_is_refused_before_anybody_else_hears_of_it():
    with paired(max_waiting=4) as pair:
        with pytest.raises(ValueError, match="outside the vocabulary of 50"):
            pair.engine.add_request([50], SamplingParams())
        with pytest.raises(UnicodeEncodeError):
            pair.engine.add_request([1], SamplingParams(), cache_salt="\ud800")
        pair.engine.add_request([1], SamplingParams(n=3, max_tokens=2))
        with pytest.raises(EngineFullError, match="3 sequences wait, 2 more would, and max_w"):
            pair.engine.add_request([1], SamplingParams(n=2))
        assert [o.request_id for o in pair.engine.drain() if o.finish_reason] == [0, 0, 0]
        assert pair.engine.add_request([1], SamplingParams(n=4, max_tokens=1)) == 1


def test_no_step_takes_more_of_the_log_than_fits_into_a_message(monkeypatch):
    request = replicated_engine.Request(
        prompt_token_ids=tuple(prompt(40)), sampling=SamplingParams(max_tokens=1)
    )
    one = len(replicated_engine._ENCODER.encode(replicated_engine.Admission(request, False)))
    monkeypatch.setattr(replicated_engine, "MAX_BEGIN_BYTES", one + 1)
    with paired() as pair:
        for _ in range(6):
            pair.engine.add_request(prompt(40), SamplingParams(max_tokens=1))
        sent = []
        send = pair.engine._watch.send
        monkeypatch.setattr(
            pair.engine._watch, "send", lambda data: (sent.append(data), send(data))
        )
        pair.engine.drain()
        pair.engine.close()
        pair.followed.result(60)
        begins = [m for m in map(replicated_engine._DECODER.decode, sent)
                  if isinstance(m, replicated_engine.Begin)]  # fmt: skip
    assert [len(begin.entries) for begin in begins if begin.entries] == [2, 2, 2]
    with pytest.raises(ValueError, match="more than the 67108864 of a message"):
        pair.engine._watch.send(bytes(MAIL_BYTES + 1))


@pytest.mark.nightly
def test_the_benchmark_measures_both_sides():
    command = [sys.executable, "-m", "benchmarks.replication", "--batches", "2", "--steps", "20"]
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env, check=True)
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["steps"] == 10 and 0 < row["beside_us_p10"] <= row["beside_us_p90"]
    assert 0 < row["lag_us_p50"] < 1e6


def test_requests_survive_the_log_bit_for_bit():
    """Every value of a request, at the ends of its range, is the same at the other end."""
    samplings = [
        SamplingParams(seed=2**64 - 1, temperature=1e-30, top_p=np.nextafter(0.0, 1.0)),
        SamplingParams(seed=0, temperature=1e30, min_p=0.1 + 0.2, stop_token_ids=(0, 49), n=1024),
        SamplingParams(max_tokens=2**40, top_k=2**40, logprobs=64),
    ]
    for sampling in samplings:
        request = replicated_engine.Request(
            prompt_token_ids=(0, 2**31 - 1), sampling=sampling, is_deterministic=False,
            priority=-100, cache_salt="\0ä\U0001f40b",
        )  # fmt: skip
        begin = replicated_engine.Begin(7, (replicated_engine.Admission(request, True),))
        data = replicated_engine._ENCODER.encode(begin)
        assert replicated_engine._DECODER.decode(data) == begin
        for name in ("temperature", "top_p", "min_p"):
            assert_bitwise_equal(
                np.float64(
                    getattr(
                        replicated_engine._DECODER.decode(data).entries[0].request.sampling, name
                    )
                ),
                np.float64(getattr(sampling, name)),
                claim=f"{name} survives the log",
            )
