# SPDX-License-Identifier: Apache-2.0
"""A local Ray with two replicas, one of which is killed: `python fleet.py '{"part": ...}'`.

Asked by `test_ray.py`, which says what to answer. Prints what every row or request got, and
which processes did the work, as one line of JSON. In a process of its own, as Ray's libraries warn.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import openai
import pyarrow as pa
import ray
from ray import serve
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import detjax
import detjax.ray

TOKEN = "DETJAX_FLEET"
"""In the environment of this Ray's processes alone, so that no other is ever killed."""

SIZES = {"max_len": 256, "batch_size": 4}
NUM_WARM = 4
NUM_BEGUN = 4
"""Streams under way before a replica is killed: the one that has the most of them."""

MIN_TOKENS = 4
"""A client has read so many of a stream that is under way."""

WORKER = "x-worker"
"""The header that names the process of an answer."""

SAMPLING = {"max_tokens": 24, "temperature": 0.7}


class Noting(detjax.ray.Generate):
    """Leaves a file for every batch that it begins, with its process."""

    def __init__(self, folder: str, **options):
        super().__init__(**options)
        self._folder = Path(folder)

    def __call__(self, batch: pa.Table) -> pa.Table:
        (self._folder / f"{os.getpid()}-{uuid.uuid4()}").touch()
        time.sleep(0.2)  # so that there is a midst to be killed in
        return super().__call__(batch)


class Holding:
    """Names its process in each answer, and keeps the last event of a stream until a file exists.

    WHY: a stream that a client has not read to its end is then under way for certain.
    """

    def __init__(self, app: ASGIApp, released: Path):
        self._app, self._released = app, released

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_held(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (WORKER.encode(), str(os.getpid()).encode())
                message = {**message, "headers": [*message["headers"], named]}
            body = message.get("body", b"")
            while body.startswith(b"data:") and b'"detjax"' in body and not self._released.exists():
                await asyncio.sleep(0.02)
            await send(message)

        await self._app(scope, receive, send_held)


class Held(detjax.ray.Server):
    """A replica whose streams do not end before a file exists."""

    def __init__(self, argv: Sequence[str], released: Path):
        super().__init__(argv)
        self._released = released

    def __serve_build_asgi_app__(self) -> Starlette:
        app = super().__serve_build_asgi_app__()
        app.add_middleware(Holding, released=self._released)
        return app


def run_data(rows: list[dict]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        killed = []

        def seen() -> list[int]:
            return [int(path.name.partition("-")[0]) for path in Path(folder).iterdir()]

        def kill() -> None:
            while len(set(pids := seen())) < 2 or min(map(pids.count, set(pids))) < 2:
                time.sleep(0.02)
            killed.append(pids[0])
            os.kill(pids[0], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        answered = ray.data.from_items(rows).map_batches(
            Noting, batch_format="pyarrow", batch_size=2, concurrency=2,
            fn_constructor_kwargs={
                "folder": folder, "sampling": detjax.SamplingParams(**SAMPLING),
                "seed_column": "seed", **SIZES,
            },
        )  # fmt: skip
        done = answered.materialize()
        schema = done.schema()
        return {
            "killed": killed,
            "workers": sorted(set(seen())),
            "found": done.take_all(),
            "schema": {n: str(kind) for n, kind in zip(schema.names, schema.types, strict=True)},
        }


def replicas() -> list[int]:
    """Processes of this Ray that are a replica."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"{TOKEN}={os.environ[TOKEN]}".encode() in (path / "environ").read_bytes()
            if is_ours and (path / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                found.append(int(path.name))
        except OSError:
            continue
    return sorted(found)


async def streamed(client: openai.AsyncOpenAI, row: dict, begun: Callable[[int], None]) -> dict:
    """The answer of a stream, asked again until one is whole; those that were cut begin as it.

    `begun` is told the process of each stream that is under way.
    """
    cut, own = [], row | {"return_token_ids": True}
    while True:
        token_ids: list[int] = []
        try:
            stream = await client.completions.create(
                model=row["model"], prompt=row["prompt"], stream=True, extra_body=own
            )
            async for chunk in stream:
                said = chunk.choices[0].model_extra
                token_ids += said["token_ids"]
                if len(token_ids) - len(said["token_ids"]) < MIN_TOKENS <= len(token_ids):
                    begun(int(stream.response.headers[WORKER]))
                if "detjax" in said:
                    assert all(part == token_ids[: len(part)] for part in cut), (cut, token_ids)
                    return {"digest": said["detjax"]["digest"], "cut": [len(part) for part in cut]}
        except (openai.APIError, httpx.HTTPError):
            await asyncio.sleep(0.2)
        cut.append(token_ids)


def run_streams(rows: list[dict], options: dict) -> dict:
    """Streams at once, and a replica killed while clients read what it has begun."""
    with tempfile.TemporaryDirectory() as folder:
        released = Path(folder) / "released"

        async def ask_all(client: openai.AsyncOpenAI, kill: Callable[[int], None]) -> list[dict]:
            # Both replicas compile now, so that streams of both are open when one is killed.
            short = {"model": rows[0]["model"], "prompt": "x", "max_tokens": 2}
            await asyncio.gather(*(client.completions.create(**short) for _ in range(4 * NUM_WARM)))
            under_way = Counter[int]()

            def begun(pid: int) -> None:
                under_way[pid] += 1
                if under_way.total() == NUM_BEGUN:
                    kill(under_way.most_common(1)[0][0])
                    released.touch()

            return await asyncio.gather(*(streamed(client, row, begun) for row in rows))

        built = detjax.ray.build(server_options(options))._bound_deployment
        held = built.options(func_or_class=serve.ingress()(Held))
        return run_serve(held.bind(*built.init_args, released), ask_all)


def run_answers(rows: list[dict], options: dict) -> dict:
    """Answers in one piece, and a replica killed in their midst."""

    async def ask_all(client: openai.AsyncOpenAI, kill: Callable[[int], None]) -> list[dict]:
        num_done = 0

        async def ask(i: int, row: dict) -> dict:
            nonlocal num_done
            await asyncio.sleep(0.05 * i)
            answer = await client.completions.create(model="novels-6m", **row, **SAMPLING)
            num_done += 1
            if num_done == 8:
                kill(replicas()[0])
            said = answer.choices[0].model_extra["detjax"]
            return row | {"digest": said["digest"], "fingerprint": answer.system_fingerprint}

        return await asyncio.gather(*itertools.starmap(ask, enumerate(rows)))

    return run_serve(detjax.ray.build(server_options(options)), ask_all)


def server_options(options: dict) -> dict:
    return options | SIZES | {"no_compile": True}


def run_serve(app: serve.Application, ask_all: Callable[..., Awaitable[list[dict]]]) -> dict:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app)
    before, killed = replicas(), []

    def kill(pid: int) -> None:
        assert pid in before, (pid, before)
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)
        while pid in replicas():
            time.sleep(0.01)

    async def ask() -> list[dict]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=30, timeout=240
        ) as client:
            return await ask_all(client, kill)

    found = asyncio.run(ask())
    until_s = time.monotonic() + 120
    while (after := replicas()) == before or len(after) < 2:
        assert time.monotonic() < until_s, (before, after)
        time.sleep(0.2)
    serve.shutdown()
    return {"killed": killed, "workers": sorted({*before, *after}), "found": found}


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ |= {TOKEN: str(uuid.uuid4()), "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    try:
        rows = asked["rows"]
        if asked["part"] == "data":
            said = run_data(rows)
        else:
            run = {"serve": run_answers, "streams": run_streams}[asked["part"]]
            said = run(rows, asked["options"])
    finally:
        ray.shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
