# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around a server: clients, weights, devices, signals. Nobody else notices."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import httpx
import jax.numpy as jnp
import pytest

from detjax.server.app import make_app
from detjax.server.service import ServiceState

from .conftest import make_service, served
from .small import body, post, small_model, small_service
from .test_app import BODY, PROMPT, answer, events, gone_quiet
from .test_app import post as post_to

NAN_TOKEN = 77


def digests(got) -> list[str]:
    return [choice["detjax"]["digest"] for choice in got["choices"]]


def run_small(scenario, model=None, **options):
    """A scenario of an ASGI application and its service, on a loop of its own."""
    service = small_service(model, **options)

    async def run():
        await scenario(service, make_app(service))

    asyncio.run(run())


@pytest.mark.slow
def test_weights_with_a_nan_fail_the_request_that_meets_it_and_no_other():
    model = small_model()
    embed = model.params["embed"]
    model.params["embed"] = embed.at[NAN_TOKEN].set(jnp.nan)

    async def scenario(service, app):
        path, good = "/v1/completions", body(prompt=[5, 6, 7], seed=1)
        alone = await post(app, path, [good])
        bad, streamed, other = await asyncio.gather(
            post(app, path, [body(prompt=[5, NAN_TOKEN, 7])]),
            post(app, path, [body(prompt=[[5, 6, 7], [NAN_TOKEN]], stream=True)]),
            post(app, path, [good]),
        )
        assert bad.status == 500 and "NaN logit" in bad.json()["error"]["message"]
        assert streamed.status == 500 or b"NaN logit" in streamed.body
        assert other.status == 200 and digests(other.json()) == digests(alone.json())
        await service._engine.drain()  # what failed beside a good prompt cancels that at a step
        assert service.state is ServiceState.READY and service.num_open == 0
        assert service.stats().num_pages_held == 0

    run_small(scenario, model)


@pytest.mark.slow
def test_a_device_that_fails_closes_the_server_and_health_says_why(monkeypatch):
    async def scenario(service, app):
        path = "/v1/completions"
        assert (await post(app, path, [body()])).status == 200
        runner, left = service.model.engine._runner, iter([True, True])
        launch = runner.launch

        def launch_or_fail(batch):
            if next(left, False):
                return launch(batch)
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(runner, "launch", launch_or_fail)
        found = await asyncio.gather(
            *(post(app, path, [body(max_tokens=20, stream=i % 2 == 0)]) for i in range(6))
        )
        for one in found:
            assert one.status == 500 or b"the device is lost" in one.body
            assert b'"type":"server_error"' in one.body
        assert service.state is ServiceState.FAILED and "the device is lost" in service.why_failed
        late = await post(app, path, [body()])
        assert late.status == 503 and late.json()["error"]["code"] == "failed"
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://small") as client:
            health = await client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert "the device is lost" in health.json()["reason"]

    run_small(scenario)


def test_a_body_that_never_ends_is_given_up():
    async def scenario(service, app):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
                 "query_string": b"", "client": None}  # fmt: skip
        sent, parts = [], [{"type": "http.request", "body": b'{"mod', "more_body": True}]

        async def receive():
            if parts:
                return parts.pop()
            await asyncio.sleep(60)

        async def send(event):
            sent.append(event)

        await app(scope, receive, send)
        assert sent[0]["status"] == 408 and b"within 0.05 s" in sent[1]["body"]

    run_small(scenario, body_s=0.05)


def test_what_does_not_end_while_the_server_drains_is_told_so():
    async def scenario(service, app):
        long = [body(max_tokens=100, stream=i == 1) for i in range(3)]
        asked = [asyncio.create_task(post(app, "/v1/completions", [one])) for one in long]
        while service.num_open < 3:
            assert not any(one.done() for one in asked)
            await asyncio.sleep(0.001)
        assert await service.drain(0.0) == 3
        found = await asyncio.gather(*asked)
        for one in found:
            assert one.status == 503 or b"the server stops before the answer ended" in one.body
        assert service.num_open == 0
        await service._engine.drain()
        assert service.stats().num_pages_held == 0

    run_small(scenario)


CANARIES = ["crimson", "walnut", "harbour", "lantern", "thistle", "glacier", "pepper", "violin"]


@pytest.mark.slow
def test_no_request_reads_anothers_text(running):
    """Canaries: each prompt has a word of its own, and no answer shows another's."""

    def of(i):
        word = CANARIES[i % len(CANARIES)]
        prompt = f"{PROMPT} they called it the {word} {i}. " + f"The {word} was " * (i % 5)
        return word, {
            "prompt": prompt, "echo": True, "return_token_ids": True, "max_tokens": 4 + i % 17,
            "temperature": 0.7 * (i % 2), "seed": i, "n": 1 + i % 3 // 2, "logprobs": None,
            "stop": ["zz"] if i % 4 == 0 else None,
        }  # fmt: skip

    def ask(i, client, is_stream):
        word, fields = of(i)
        if not is_stream:
            return answer(client, **fields)["choices"]
        chunks = events(post_to(client, stream=True, **fields))
        whole: dict[int, dict] = {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            entry = whole.setdefault(choice["index"], {"text": ""})
            entry |= choice | {"text": entry["text"] + choice["text"]}
        return [whole[index] for index in sorted(whole)]

    with running.client() as client:
        alone = {i: [c["detjax"]["digest"] for c in ask(i, client, False)] for i in range(40)}

    def under_load(i):
        with running.client() as client:
            if i % 5 == 4:  # who leaves early must not hand the rest to somebody else
                word, fields = of(i)
                request = BODY | fields | {"stream": True, "max_tokens": 60, "echo": False}
                with client.stream("POST", "/v1/completions", json=request) as response:
                    next(response.iter_lines())
                return None
            return ask(i, client, i % 2 == 0)

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        found = list(pool.map(under_load, range(40)))
    gone_quiet(running)
    for i, choices in enumerate(found):
        if choices is None:
            continue
        word, fields = of(i)
        assert [choice["detjax"]["digest"] for choice in choices] == alone[i]
        for choice in choices:
            assert choice["text"].startswith(fields["prompt"])
            told = choice["text"] + running.llm.tokenizer.decode(choice["prompt_token_ids"])
            assert [name for name in CANARIES if name in told] == [word]


def raw_request(running, fields, *, receive_bytes=0) -> socket.socket:
    """A connection that has sent a whole request and read nothing."""
    host, port = re.findall(r"//(.*):(\d+)", running.url)[0]
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect((host, int(port)))
    data = json.dumps(BODY | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


@pytest.mark.slow
def test_killed_clients_half_open_sockets_and_slow_readers_hold_nobody_up(running, client):
    want = digests(answer(client))
    killed = [raw_request(running, {"max_tokens": 200, "stream": True}) for _ in range(3)]
    for one in killed:
        one.recv(10)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()  # a reset, as of a process that was killed
    host, port = re.findall(r"//(.*):(\d+)", running.url)[0]
    half_open = []
    for beginning in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                      b"Content-Length: 1000\r\n\r\n{\"model\""):  # fmt: skip
        half_open.append(socket.create_connection((host, int(port))))
        half_open[-1].sendall(beginning)
    fields = {"max_tokens": 200, "stream": True, "logprobs": 64, "return_token_ids": True}
    slow = raw_request(running, fields, receive_bytes=4096)
    assert digests(answer(client)) == want  # while nobody reads the slow one
    slow.settimeout(120)
    received = b""
    while b"data: [DONE]" not in received:
        part = slow.recv(8192)
        assert part
        received += part
    told = re.findall(rb'"digest":"([0-9a-f]{64})"', received)
    whole = answer(client, max_tokens=200, logprobs=64)
    assert [one.decode() for one in told] == digests(whole)
    for one in (slow, *half_open):
        one.close()
    gone_quiet(running)
    assert digests(answer(client)) == want


@pytest.mark.slow
def test_sigterm_under_load_ends_every_answer_or_refuses_it():
    with subprocess.Popen(
        [sys.executable, "-m", "detjax.serve", "--port", "0", "--no-compile", "--max-len", "256",
         "--batch-size", "4", "--drain-timeout", "120"],
        stderr=subprocess.PIPE, text=True, env=os.environ,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            url = ""
            for line in process.stderr:
                if found := re.search(r"(starting|ready): (http://127\.0\.0\.1:\d+)", line):
                    url = found[2]
                    if found[1] == "ready":
                        break
                    assert httpx.get(f"{url}/health").json() == {"status": "starting"}
            bodies = [BODY | {"max_tokens": 30 + i, "seed": i, "temperature": 0.9}
                      for i in range(8)]  # fmt: skip
            with httpx.Client(base_url=url, timeout=300) as client:
                alone = [digests(client.post("/v1/completions", json=b).json()) for b in bodies]

            def ask(i):
                try:
                    with httpx.Client(base_url=url, timeout=300) as own:
                        return own.post("/v1/completions", json=bodies[i % 8])
                except httpx.ConnectError:
                    return None

            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                asked = [pool.submit(ask, i) for i in range(16)]
                while not any(one.done() for one in asked):
                    time.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                late = [pool.submit(ask, i) for i in range(4)]
                found = [one.result() for one in (*asked, *late)]
            assert process.wait(60) == 0
            for i, response in enumerate(found[:16]):
                assert response is not None and response.status_code == 200
                assert digests(response.json()) == alone[i % 8]
            assert all(one is None or one.status_code in (200, 503) for one in found[16:])
        finally:
            process.kill()


@pytest.mark.slow
def test_wrong_key_model_and_length_are_told_with_the_numbers(llm):
    with served(make_service(llm), llm, api_keys=["k"]) as running:
        with running.client(headers={"Authorization": "Bearer other"}) as own:
            assert post_to(own).status_code == 401
        with running.client(headers={"Authorization": "Bearer k"}) as own:
            assert post_to(own, model="other").status_code == 404
            late = post_to(own, prompt=[5] * 300)
            assert late.status_code == 400
            assert (
                "has 300 tokens and its answer 12, more than this"
                in late.json()["error"]["message"]
            )
