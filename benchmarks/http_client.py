# SPDX-License-Identifier: Apache-2.0
"""A bare HTTP client for loads: it costs little, reads as slowly as told, and leaves when told.

As a process of its own (`python -m benchmarks.http_client`) it reads a plan from standard input and
writes what became of it to standard output, both JSON; it imports no JAX.
"""

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

SLOW_READ_BYTES, SLOW_READ_S = 512, 0.05
"""A slow reader takes so much, so often."""


@dataclass(kw_only=True, slots=True)
class HttpExchange:
    """What became of one request: times are of `time.perf_counter`.

    Attributes:
        asked_s: When it was sent.
        pieces_s: When each event came.
        status: Of the answer; 0 before there is one.
        digest: Of its one choice, once it is whole.
        num_tokens: Of the answer, once it is whole.
        error: What the answer said went wrong.
    """

    asked_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    status: int = 0
    digest: str = ""
    num_tokens: int = 0
    error: str = ""


async def exchange(
    host: str, port: int, body: dict, *, leaves_after: int | None = None, is_slow: bool = False
) -> HttpExchange:
    """Ask for a completion of one choice, streamed or whole.

    Args:
        host: Of the server.
        port: Of the server.
        body: With `stream` and `stream_options.include_usage`, or without both.
        leaves_after: Events after which the connection is cut; 0 cuts it once the body is sent.
        is_slow: Read a little, wait, read on.
    """
    found = HttpExchange()
    # WHY: a small buffer, so that who reads slowly is felt by the server.
    limit = SLOW_READ_BYTES if is_slow else 1 << 16
    reader, writer = await asyncio.open_connection(host, port, limit=limit)
    try:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        found.asked_s = time.perf_counter()
        writer.write(head.encode() + data)
        await writer.drain()
        if leaves_after == 0:
            return found
        found.status = int((await reader.readuntil(b"\r\n")).split()[1])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
        if found.status != 200:
            found.error = (await reader.read()).decode(errors="replace")
            return found
        if not body.get("stream"):
            answer = json.loads(await reader.read())
            found.pieces_s.append(time.perf_counter())
            found.digest = answer["choices"][0]["detjax"]["digest"]
            found.num_tokens = answer["usage"]["completion_tokens"]
            return found
        async for event in _events(reader, is_slow=is_slow):
            if event == b"[DONE]":
                break
            found.pieces_s.append(time.perf_counter())
            if leaves_after and len(found.pieces_s) >= leaves_after:
                return found
            # WHY: most events are not looked into, so that the client costs little.
            if b'"digest"' in event:
                found.digest = event.partition(b'"digest":"')[2][:64].decode()
            elif b'"usage"' in event:
                found.pieces_s.pop()
                found.num_tokens = json.loads(event)["usage"]["completion_tokens"]
            elif b'"error"' in event[:10]:
                found.error = event.decode()
        return found
    finally:
        writer.transport.abort()


async def _events(reader: asyncio.StreamReader, *, is_slow: bool) -> AsyncIterator[bytes]:
    """Server-sent events of a chunked answer. Chunks hold whole events, as our server writes."""
    rest = b""
    while True:
        data = await reader.read(SLOW_READ_BYTES if is_slow else 1 << 16)
        if not data:
            return
        # Chunk sizes stand on lines of their own between the events.
        lines = (rest + data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:]
        if is_slow:
            await asyncio.sleep(SLOW_READ_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One request of a load: when, what, and how its client behaves."""

    at_s: float
    body: dict
    leaves_after: int | None = None
    is_slow: bool = False


def run_plans(
    host: str, port: int, plans: Sequence[Plan], *, in_turn: bool = False
) -> list[HttpExchange]:
    """Run a load from a process of its own; what became of each request, in order.

    Args:
        host: Of the server.
        port: Of the server.
        plans: What to ask.
        in_turn: One after the other, each when the one before has ended; `at_s` is not looked at.
    """
    given = {
        "host": host,
        "port": port,
        "in_turn": in_turn,
        "plans": [dataclasses.asdict(plan) for plan in plans],
    }
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.http_client"],
        input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return [HttpExchange(**entry) for entry in json.loads(ran.stdout)]


async def _run(host: str, port: int, plans: Sequence[Plan], *, in_turn: bool) -> list[HttpExchange]:
    begin_s = time.perf_counter()

    async def one(plan: Plan) -> HttpExchange:
        if not in_turn:
            await asyncio.sleep(max(0.0, begin_s + plan.at_s - time.perf_counter()))
        try:
            return await exchange(
                host, port, plan.body, leaves_after=plan.leaves_after, is_slow=plan.is_slow
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            return HttpExchange(error=repr(error))

    if in_turn:
        return [await one(plan) for plan in plans]
    return await asyncio.gather(*map(one, plans))


def main() -> None:
    """Read a plan, run it, write what became of it."""
    given = json.load(sys.stdin)
    plans = [Plan(**entry) for entry in given["plans"]]
    found = asyncio.run(_run(given["host"], given["port"], plans, in_turn=given["in_turn"]))
    json.dump([dataclasses.asdict(entry) for entry in found], sys.stdout)


if __name__ == "__main__":
    main()
