# SPDX-License-Identifier: Apache-2.0
"""A request head that does not end, or not in time, ends its connection; others are answered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from detjax.server import heads
from detjax.server.heads import MOST_BYTES, BoundedHeads

BODY = b"x" * 300_000
ASKED = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % len(BODY)


async def app(scope, receive, send) -> None:
    """Says how long the body was."""
    count, more = 0, True
    while more:
        message = await receive()
        count, more = count + len(message["body"]), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(count).encode()})


@contextlib.asynccontextmanager
async def serving(protocol: type) -> AsyncIterator[int]:
    config = uvicorn.Config(app, port=0, http=protocol, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await running


async def sent(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[bytes, int]:
    """What comes back, and how many bytes were taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken = 0
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            taken += len(piece)
            await asyncio.sleep(pause_s)
            if reader.at_eof() or reader._buffer:  # type: ignore[attr-defined]
                break
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        found = await asyncio.wait_for(reader.read(4096), 0.5)
    writer.close()
    return found, taken


ENDLESS = (b"GET / HTTP/1.1\r\nx: ", *[b"a" * 8192] * 64)


def test_a_head_that_does_not_end_is_refused_and_others_are_answered():
    async def run() -> None:
        async with serving(BoundedHeads) as port:
            found, taken = await sent(port, *ENDLESS, pause_s=0.002)
            assert found.startswith(b"HTTP/1.1 431 ") or taken < 4 * MOST_BYTES
            assert taken < sum(map(len, ENDLESS))
            # Many headers of a usual size, a large body in the same read, and one head in pieces.
            usual = b"".join(b"x-%d: %s\r\n" % (i, b"v" * 500) for i in range(60))
            for pieces in ((ASKED + usual + b"\r\n" + BODY,), (ASKED, usual, b"\r\n", BODY)):
                found, _ = await sent(port, *pieces)
                assert found.startswith(b"HTTP/1.1 200 ") and b"300000" in found

    asyncio.run(run())


def test_a_head_that_is_late_is_refused(monkeypatch):
    monkeypatch.setattr(heads, "MOST_S", 0.2)

    async def run() -> None:
        async with serving(BoundedHeads) as port:
            found, _ = await sent(port, b"GET / HT", pause_s=0.5)
            assert found.startswith(b"HTTP/1.1 408 ")
            found, _ = await sent(port, b"", pause_s=0.5)
            assert found == b""  # closed, without a word
            found, _ = await sent(port, ASKED + b"\r\n", BODY, pause_s=0.4)  # the body may be later
            assert b"300000" in found

    asyncio.run(run())


@pytest.mark.control
def test_control_without_bounds_all_of_it_is_taken():
    async def run() -> None:
        async with serving(HttpToolsProtocol) as port:
            found, taken = await sent(port, *ENDLESS, pause_s=0.002)
            assert (found, taken) == (b"", sum(map(len, ENDLESS)))

    asyncio.run(run())
