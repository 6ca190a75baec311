# SPDX-License-Identifier: Apache-2.0
"""Bounds of a request's head: its bytes, and the time in which it must arrive.

uvicorn's parser has none, and takes longer with every byte of a header that does not end.
"""

import asyncio
import logging

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LOG = logging.getLogger(__name__)

MOST_BYTES = 2**16
"""Of reads in which a head neither begins nor ends; a read has at most 256 KiB."""
MOST_S = 30.0
"""From the first byte of a head, or from the connection, to its end."""

_TOO_LARGE = "431 Request Header Fields Too Large"
_TOO_LATE = "408 Request Timeout"


class BoundedHeads(HttpToolsProtocol):
    """A connection that ends if a head is too long or too late."""

    _is_head, _num_bytes = True, 0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head has begun."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """No head is awaited."""
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        """It ends."""
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Read, and count what belongs to a head alone."""
        was_head = self._is_head
        super().data_received(data)
        if was_head and self._is_head:
            self._num_bytes += len(data)
            if self._num_bytes > MOST_BYTES:
                self._refuse(_TOO_LARGE)

    def _begin_head(self) -> None:
        if self._late is None:
            self._is_head, self._num_bytes = True, 0
            self._late = self.loop.call_later(MOST_S, self._refuse, _TOO_LATE)

    def _end_head(self) -> None:
        self._is_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: str) -> None:
        self._end_head()
        if self.transport.is_closing():
            return
        if self._num_bytes:  # a connection that was only opened is closed without a word
            LOG.info("a request head of %s ends the connection: %s", self.client, status)
            answer = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(answer.encode())
        self.transport.close()
