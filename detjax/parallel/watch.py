# SPDX-License-Identifier: Apache-2.0
"""Ends a job of several processes as soon as one of them is lost, and says which.

A process that waits in a collective for one that is gone may wait for ever, and no exception can
reach it there. So threads watch one TCP connection between process 0 and each other process: the
operating system closes it the moment a process dies. A machine that vanishes without a word is
missed after `SILENCE_S`, a process whose main thread hangs while its other threads live after
`STALL_S`.

Whoever can reach the port while a job gathers can pose as one of its processes. Everybody else who
connects, a health probe or a scanner, is sent away and delays nobody.
"""

import contextlib
import hashlib
import json
import os
import queue
import selectors
import socket
import struct
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

STALL_S = 1800.0
"""While they work, processes that tell of their progress make some in such a time: longer than
compiling takes."""

HELLO_S = 5.0
"""Who connects and does not say in such a time which process it is, is sent away."""

LINE_BYTES = 4096
"""Longest message between two processes; a longer one ends the job."""

MAIL_BYTES = 64 << 20
"""Most bytes of `Watch.send`."""

_RETRY_S = 0.2
_HELLO, _HELLO_BYTES, _MOST_STRANGERS = b"detjax-job", 64, 256
_LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}


class Watch:
    """This process's connections: of process 0 to all others, of another process to process 0.

    Attributes:
        mail: (process, bytes) of every `send` of those at the other ends, in order.
        why_ended: Why the job ended, once it has.
    """

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
        self.mail: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self.why_ended = ""
        self._lock = threading.Lock()
        self._heard_s = dict.fromkeys(links, time.monotonic())
        self._left_s: dict[int, float] = {}
        self._turns: dict[tuple[int, str], int] = {}
        self._facts: dict[tuple[str, int], tuple[int, str, int]] = {}
        self._is_working = False
        self._is_telling = False
        self._progress = dict.fromkeys((process_id, *links), 0)
        self._progressed_s = time.monotonic()
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

    def progress(self) -> None:
        """Tell that the work goes on. Who has told once must go on telling until the work ends."""
        self._progress[self._process_id] += 1
        self._progressed_s = time.monotonic()
        self._is_telling = True

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
            text = text[: LINE_BYTES // 16]  # JSON may take twelve bytes a character
            self._tell({"ended": text})
            if self._process_id:
                self._say(f"error: {text}")
            raise
        finally:
            self._is_working = self._is_telling = False

    def send(self, data: bytes) -> None:
        """Put bytes into the `mail` of whoever is at the other ends, after what was sent before.

        Raises:
            ValueError: If they are more than `MAIL_BYTES`.
        """
        if len(data) > MAIL_BYTES:
            raise ValueError(f"{len(data)} bytes are more than the {MAIL_BYTES} of a message")
        # WHY: one write, as a second small one would wait for the first's acknowledgement.
        self._write(b'{"mail": %d}\n' % len(data) + data)

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
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        with self._lock:
            for link in self._links.values():
                with contextlib.suppress(OSError):  # its listener finds out as well
                    link.sendall(data)

    def _listen(self, peer: int, link: socket.socket) -> None:
        with contextlib.suppress(OSError), link.makefile("rb") as lines:
            while (line := lines.readline(LINE_BYTES)).endswith(b"\n"):
                self._heard_s[peer] = time.monotonic()
                try:
                    message = json.loads(line)
                    if "mail" in message:
                        data = lines.read(_mail_length(message))
                        if len(data) == message["mail"]:  # else the connection has closed
                            self.mail.put((peer, data))
                    self._handle(peer, message)
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    return self._end(f"process {peer} sent no message of a job: {error!r:.200}")
            if len(line) == LINE_BYTES:
                return self._end(f"process {peer} sent a line of more than {LINE_BYTES} bytes")
        if peer not in self._left_s and not self._is_closed:
            self._end(f"process {peer} was lost: its connection closed")

    def _handle(self, peer: int, message: dict[str, Any]) -> None:
        if "beat" in message and self._progress[peer] != int(message["beat"]):
            self._progress[peer] = int(message["beat"])
            self._progressed_s = time.monotonic()
        if "bye" in message:
            self._left_s[peer] = time.monotonic()
        if "fact" in message:
            self._compare(peer, message["fact"])
        if "ended" in message:
            self._end(str(message["ended"]))

    def _compare(self, peer: int, fact: dict[str, str]) -> None:
        with self._lock:
            turn = self._turns.get((peer, fact["what"]), 0)
            self._turns[peer, fact["what"]] = turn + 1
            key = fact["what"], turn
            other, expected, count = self._facts.get(key, (peer, fact["hash"], 0))
            self._facts[key] = other, expected, count + 1
            if count == len(self._links):
                del self._facts[key]  # all have said it
        if expected != fact["hash"]:
            low, high = sorted((peer, other))
            self._end(f"process {high} was given other {fact['what']} than process {low}")

    def _beat(self) -> None:
        while not self._is_closed:
            time.sleep(BEAT_S)
            self._tell({"beat": self._progress[self._process_id]})
            now = time.monotonic()
            # Process 0 sees all of them, so it goes first.
            stall_s = STALL_S + (GRACE_S if self._process_id else 0)
            if self._is_telling and now - self._progressed_s > stall_s:
                self._end(self._stall())
            for peer in self._links:
                if peer in self._left_s:
                    if self._is_working and now - self._left_s[peer] > GRACE_S:
                        self._end(f"process {peer} ended while others still had work to do")
                elif now - self._heard_s[peer] > SILENCE_S:
                    self._end(f"process {peer} was lost: no sign of life for {SILENCE_S:.0f} s")

    def _stall(self) -> str:
        """Which processes are behind the others, as far as can be seen from here."""
        least = min(self._progress.values())
        behind = sorted(i for i, count in self._progress.items() if count == least)
        if len(behind) == len(self._progress):
            return f"no process made progress for {STALL_S:.0f} s"
        names = ", ".join(map(str, behind))
        return f"process {names} hangs: no progress for {STALL_S:.0f} s, the others wait for it"

    def _end(self, reason: str) -> None:
        """End this process at once."""
        if self._is_closed:
            return
        self._is_closed, self.why_ended = True, reason
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
        links = _accept_all(num_processes, host, port, end_s)
        for link in links.values():
            link.settimeout(HELLO_S)
            link.sendall(b"%s %s\n" % (_HELLO, announcement.encode()))
    else:
        links = {0: _call(host, port, end_s)}
        links[0].sendall(b"%s %d %d\n" % (_HELLO, process_id, num_processes))
        try:
            announcement = _announced(links[0], f"{host}:{port}", end_s)
        except BaseException:
            links[0].close()
            raise
    for link in links.values():
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # WHY: whoever reads nothing more must not keep this one from noticing it.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SILENCE_S), 0))
    return Watch(process_id, links, say=say, end=end), announcement


def _mail_length(message: dict[str, Any]) -> int:
    length = message["mail"]
    if type(length) is not int or not 0 <= length <= MAIL_BYTES:
        raise ValueError(f"mail of {length!r} bytes")
    return length


def bind_address(host: str) -> str | None:
    """Where process 0 listens: on the loopback interface if that is `host`; None: on all."""
    return _LOOPBACK.get(host)


def _accept_all(num_processes: int, host: str, port: int, end_s: float) -> dict[int, socket.socket]:
    """Wait for every other process. Who connects and is none of them delays nobody."""
    links: dict[int, socket.socket] = {}
    with _Listener(host, port) as door, contextlib.ExitStack() as on_error:
        while len(links) < num_processes - 1:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                missing = sorted(set(range(1, num_processes)) - links.keys())
                others = f"; {door.num_refused} others did" if door.num_refused else ""
                raise TimeoutError(
                    f"of {num_processes} processes, {missing} did not come to port {port}{others}"
                )
            for said, link in door.wait(min(_RETRY_S, left_s)):
                on_error.callback(link.close)
                peer = _peer_of(said, num_processes)
                if peer is None:
                    door.refuse(link)
                    continue
                if not 0 < peer < num_processes or peer in links:
                    raise ValueError(
                        f"a process came as {peer} of {num_processes}, a second or none"
                    )
                links[peer] = link
        on_error.pop_all()
    return links


class _Listener:
    """Where process 0 listens, and those who have connected and not yet said who they are."""

    def __init__(self, host: str, port: int):
        address = bind_address(host)
        is_dual = address is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual or address == "::1" else socket.AF_INET
        self._server = socket.create_server(
            (address or "", port), family=family, dualstack_ipv6=is_dual
        )
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._said: dict[socket.socket, bytes] = {}
        self._until_s: dict[socket.socket, float] = {}
        self.num_refused = 0

    def __enter__(self) -> "_Listener":
        return self

    def __exit__(self, *_: object) -> None:
        for link in list(self._said):
            self.refuse(self._forget(link))
        self._selector.close()
        self._server.close()

    def wait(self, most_s: float) -> list[tuple[bytes, socket.socket]]:
        """Whoever has said a line, or as much as is listened to, and what."""
        now = time.monotonic()
        for link in [link for link, until_s in self._until_s.items() if now > until_s]:
            self.refuse(self._forget(link))
        found = []
        for key, _ in self._selector.select(most_s):
            link = key.fileobj
            assert isinstance(link, socket.socket)
            if link is self._server:
                self._accept()
            elif not self._has_more(link):
                said = self._said[link]
                found.append((said, self._forget(link)))
        return found

    def refuse(self, link: socket.socket) -> None:
        """Send somebody away."""
        self.num_refused += 1
        link.close()

    def _accept(self) -> None:
        try:
            link, _ = self._server.accept()
        except OSError:  # it has gone again
            return
        if len(self._said) >= _MOST_STRANGERS:
            return self.refuse(link)
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ)
        self._said[link], self._until_s[link] = b"", time.monotonic() + HELLO_S

    def _has_more(self, link: socket.socket) -> bool:
        """Read on; say whether the line goes on after that."""
        try:
            piece = link.recv(_HELLO_BYTES - len(self._said[link]))
        except OSError:
            piece = b""
        self._said[link] += piece
        return bool(piece) and not piece.endswith(b"\n") and len(self._said[link]) < _HELLO_BYTES

    def _forget(self, link: socket.socket) -> socket.socket:
        self._selector.unregister(link)
        del self._said[link], self._until_s[link]
        return link


def _peer_of(said: bytes, num_processes: int) -> int | None:
    """Which process of a job says this in its first line; None if it is none."""
    words = said.split()
    is_ours = len(words) == 3 and words[0] == _HELLO and said.endswith(b"\n")
    if not is_ours or not all(word.isdigit() for word in words[1:]):
        return None
    if int(words[2]) != num_processes:
        raise ValueError(
            f"process {int(words[1])} was started with --num-processes {int(words[2])}, "
            f"process 0 with {num_processes}; give all the same"
        )
    return int(words[1])


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


def _announced(link: socket.socket, where: str, end_s: float) -> str:
    """Read what process 0 tells all, and no further."""
    line = b""
    while not line.endswith(b"\n"):
        link.settimeout(max(0.01, end_s - time.monotonic()))
        try:
            piece = link.recv(1)
        except TimeoutError as error:
            raise TimeoutError(f"process 0 at {where} waited in vain for the others") from error
        except OSError:
            piece = b""
        if not piece:
            raise TimeoutError("the other process went away before all had come")
        line += piece
        if not (line.startswith(_HELLO) or _HELLO.startswith(line)) or len(line) > _HELLO_BYTES:
            raise ValueError(
                f"{where} answers, but not as process 0 of a job; give --coordinator another port"
            )
    return line.removeprefix(_HELLO).decode().strip()
