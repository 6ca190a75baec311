# SPDX-License-Identifier: Apache-2.0
"""Ends a job of several processes as soon as one of them is lost, and says which.

A process that waits in a collective for one that is gone may wait for ever, and no exception can
reach it there. So threads watch one TCP connection between process 0 and each other process: the
operating system closes it the moment a process dies. A machine that vanishes without a word is
missed after `SILENCE_S`.
"""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

BEAT_S = 1.0
"""Time between two signs of life."""

SILENCE_S = 60.0
"""A process that gave no sign of life for so long is lost."""

GRACE_S = 30.0
"""How long a process may go on working after another one has ended its work."""

_RETRY_S = 0.2


class Watch:
    """This process's connections: of process 0 to all others, of another process to process 0."""

    def __init__(
        self,
        process_id: int,
        links: dict[int, socket.socket],
        *,
        say: Callable[[str], None],
        end: Callable[[int], Any] = os._exit,
    ):
        """Begin to watch.

        Args:
            process_id: Of this process.
            links: A connection to each process that is watched from here.
            say: Called with why the job ends.
            end: Ends this process with an exit code, whatever its main thread is waiting for.
        """
        self._process_id = process_id
        self._links = links
        self._say = say
        self._end_process = end
        self._is_closed = False
        self._lock = threading.Lock()
        self._heard_s = dict.fromkeys(links, time.monotonic())
        self._left_s: dict[int, float] = {}
        self._turns: dict[tuple[int, str], int] = {}
        self._facts: dict[tuple[str, int], tuple[int, str]] = {}
        self._is_working = False
        for peer, link in links.items():
            threading.Thread(target=self._listen, args=(peer, link), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def check_same(self, what: str, value: str) -> None:
        """Have process 0 compare something that must be the same everywhere; a difference ends all.

        Args:
            what: Its name, for the message; each name once at a time, in the same order everywhere.
            value: What to compare; only its hash is sent.
        """
        fact = {"what": what, "hash": hashlib.sha256(value.encode()).hexdigest()}
        if self._process_id == 0:
            self._compare(0, fact)
        else:
            self._tell({"fact": fact})

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Mark the time in which processes need one another; an error in it ends all of them."""
        self._is_working = True
        try:
            yield
        except BaseException as error:
            # If another process was lost, that is the cause: its end is about to be noticed.
            time.sleep(2 * BEAT_S)
            self._is_closed = True  # from here on this error is the one to report
            text = f"process {self._process_id} failed: {type(error).__name__}: {error}"
            self._tell({"ended": text})
            if self._process_id:
                self._say(f"error: {text}")
            raise
        finally:
            self._is_working = False

    def leave(self) -> None:
        """Say that this process ends as it should."""
        self._tell({"bye": True})

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for link in self._links.values():
                with contextlib.suppress(OSError):  # its listener finds out as well
                    link.sendall(data)

    def _listen(self, peer: int, link: socket.socket) -> None:
        with contextlib.suppress(OSError), link.makefile("rb") as lines:
            for line in lines:
                self._heard_s[peer] = time.monotonic()
                self._handle(peer, json.loads(line))
        if peer not in self._left_s and not self._is_closed:
            self._end(f"process {peer} was lost: its connection closed")

    def _handle(self, peer: int, message: dict[str, Any]) -> None:
        if "bye" in message:
            self._left_s[peer] = time.monotonic()
        if "fact" in message:
            self._compare(peer, message["fact"])
        if "ended" in message:
            self._end(message["ended"])

    def _compare(self, peer: int, fact: dict[str, str]) -> None:
        with self._lock:
            turn = self._turns.get((peer, fact["what"]), 0)
            self._turns[peer, fact["what"]] = turn + 1
            other, expected = self._facts.setdefault((fact["what"], turn), (peer, fact["hash"]))
        if expected != fact["hash"]:
            low, high = sorted((peer, other))
            self._end(f"process {high} was given other {fact['what']} than process {low}")

    def _beat(self) -> None:
        while not self._is_closed:
            time.sleep(BEAT_S)
            self._tell({"beat": True})
            now = time.monotonic()
            for peer in self._links:
                if peer in self._left_s:
                    if self._is_working and now - self._left_s[peer] > GRACE_S:
                        self._end(f"process {peer} ended while others still had work to do")
                elif now - self._heard_s[peer] > SILENCE_S:
                    self._end(f"process {peer} was lost: no sign of life for {SILENCE_S:.0f} s")

    def _end(self, reason: str) -> None:
        """End this process at once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._say(f"error: {reason}; process {self._process_id} ends")
        if self._process_id == 0:
            self._tell({"ended": reason})
        self._end_process(1)


def connect(
    process_id: int,
    num_processes: int,
    *,
    host: str,
    port: int,
    join_s: float,
    announcement: str,
    say: Callable[[str], None],
    end: Callable[[int], Any] = os._exit,
) -> tuple[Watch, str]:
    """Connect the processes of a job, and watch.

    Args:
        process_id: Of this process.
        num_processes: Of the job.
        host: Where process 0 is.
        port: On which it listens.
        join_s: How long processes wait for one another.
        announcement: What process 0 tells all; of the others nothing is told.
        say: Called with why the job ends.
        end: Ends this process.

    Returns:
        The watch, and what process 0 announced.

    Raises:
        TimeoutError: If a process does not come in time, naming it.
        ValueError: If two have one id, or an id is not of this job.
    """
    end_s = time.monotonic() + join_s
    if process_id == 0:
        links = _accept_all(num_processes, port, end_s)
        for link in links.values():
            link.sendall(announcement.encode() + b"\n")
    else:
        links = {0: _call(host, port, end_s)}
        links[0].sendall(b"%d\n" % process_id)
        announcement = _first_line(links[0], end_s)
    for link in links.values():
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Watch(process_id, links, say=say, end=end), announcement


def _accept_all(num_processes: int, port: int, end_s: float) -> dict[int, socket.socket]:
    """Wait for every other process."""
    links: dict[int, socket.socket] = {}
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=is_dual) as server:
        while len(links) < num_processes - 1:
            try:
                server.settimeout(max(0.01, end_s - time.monotonic()))
                link, _ = server.accept()
                peer = int(_first_line(link, end_s))
            except TimeoutError as error:
                missing = sorted(set(range(1, num_processes)) - links.keys())
                raise TimeoutError(
                    f"of {num_processes} processes, {missing} did not come to port {port} in time"
                ) from error
            if not 0 < peer < num_processes or peer in links:
                raise ValueError(f"a process came as {peer} of {num_processes}, a second or none")
            links[peer] = link
    return links


def _call(host: str, port: int, end_s: float) -> socket.socket:
    """Connect to process 0 as soon as it listens."""
    while True:
        left_s = end_s - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(0.01, left_s))
        except OSError as error:
            if left_s < _RETRY_S:
                raise TimeoutError(f"no process 0 at {host}:{port} in time: {error}") from error
            time.sleep(_RETRY_S)


def _first_line(link: socket.socket, end_s: float) -> str:
    """Read up to the end of a line, and no further."""
    line = b""
    while not line.endswith(b"\n"):
        link.settimeout(max(0.01, end_s - time.monotonic()))
        piece = link.recv(1)
        if not piece:
            raise TimeoutError("the other process went away before all had come")
        line += piece
    return line.decode().strip()
