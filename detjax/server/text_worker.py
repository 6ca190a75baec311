# SPDX-License-Identifier: Apache-2.0
"""Work on text that may take long: in processes of their own, which are killed at their limits."""

import asyncio
import contextlib
import functools
import heapq
import itertools
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.models.chat_template import START_S
from detjax.models.tokenizer import Tokenizer
from detjax.server.errors import RefusedError
from detjax.server.text_process import Setup
from detjax.server.text_tasks import (
    Decode,
    Encode,
    Judge,
    Template,
    TextTask,
    TextTools,
    TokenTexts,
)

IDLE_S = 30.0
"""Seconds without work after which a process ends, and its memory is free."""

GRACE_S = 0.3
"""Seconds that work goes on when nobody wants it any more: less than a process takes to start."""

SHORT_BYTES = 2**13
"""Longest work that the server does itself, which takes 3 ms and holds Python's lock meanwhile."""

MEDIUM_BYTES = 2**18
"""Longest work of the process that does no longer one, so that 100 kB do not wait for 8 MB."""

_KEPT_VARIABLES = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
_ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_NUM_JUDGED = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """Of the work of one process.

    Attributes:
        task_s: Seconds of one piece of work.
        memory_bytes: Address space of the process.
        waiting_bytes: Of work that waits; what is beyond is refused with 429.
    """

    task_s: float
    memory_bytes: int = 2**32
    waiting_bytes: int = 2**26


MEDIUM_LIMITS = TaskLimits(task_s=5.0, memory_bytes=2**31)
LONG_LIMITS = TaskLimits(task_s=30.0)
FORM_LIMITS = TaskLimits(task_s=5.0, memory_bytes=2**31, waiting_bytes=2**22)


class _SmallestFirst:
    """A lock that the smallest of those who wait has next, for tasks of one event loop."""

    def __init__(self, most_bytes: int):
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_taken = False

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Wait for the lock, and hold it."""
        if self._is_taken:
            await self._wait(size)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, size: int) -> None:
        if self._num_bytes + size > self._most_bytes:
            raise RefusedError(
                f"{self._num_bytes} bytes of text wait to be read, and this has {size}: together "
                f"more than {self._most_bytes}; try again later",
                status=429,
                code="queue_full",
            )
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), waiter))
        self._num_bytes += size
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # its turn had just come
                self._pass_on()
            raise
        finally:
            self._num_bytes -= size

    def _pass_on(self) -> None:
        while self._waiting:
            *_, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                waiter.set_result(None)
                return
        self._is_taken = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    """A process that runs, and this side of its connection."""

    process: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def start(cls) -> "_Process":
        """Start one.

        WHY: not by multiprocessing, which imports the program's main module once more.
        """
        ours, theirs = Pipe()
        folders = [folder or os.getcwd() for folder in sys.path]
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "detjax.server.text_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=kept | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(folders)},
            )
        return cls(process=process, connection=ours)

    def ask(self, frame: bytes) -> bytes:
        """Send a frame and wait for the answer, in a thread.

        Raises:
            EOFError, OSError: If the process ends before it has answered.
        """
        self.connection.send_bytes(frame)
        return self.connection.recv_bytes()

    def kill(self) -> None:
        """End it, and the template's process that it may have: they are one group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        one = processes.pop()
        one.kill()
        one.connection.close()


class Worker:
    """A process that does one piece of work at a time, the shortest first. It starts when needed.

    Its memory is free when it has had nothing to do for `IDLE_S`, or was killed at a limit.
    """

    def __init__(self, setup: Setup, limits: TaskLimits, *, what: str):
        """Start nothing yet.

        Args:
            setup: What the process is told first.
            limits: Of work.
            what: Names the work in errors.
        """
        self._setup, self._limits, self._what = setup, limits, what
        self._lock = _SmallestFirst(limits.waiting_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="detjax-text")
        self._processes: list[_Process] = []  # one or none
        self._idle: asyncio.TimerHandle | None = None
        weakref.finalize(self, _end_all, self._processes)

    @property
    def process_id(self) -> int | None:
        """Of the process that runs now, if one does."""
        return self._processes[0].process.pid if self._processes else None

    def close(self) -> None:
        """End the process; it would start again."""
        _end_all(self._processes)

    async def run(self, frame: bytes) -> Any:
        """Do what was pickled. Whoever is cancelled meanwhile ends the work.

        Raises:
            RefusedError: If the work is refused, passes a limit, or too much of it waits.
            RuntimeError: If it fails by a fault of ours.
        """
        async with self._lock.turn(len(frame)):
            if self._idle is not None:
                self._idle.cancel()
            try:
                await self._start()
                reply = msgspec.msgpack.decode(await self._ask(frame, self._limits.task_s))
            finally:
                loop = asyncio.get_running_loop()
                self._idle = loop.call_later(IDLE_S, _end_all, self._processes)
        if "fault" in reply:
            raise RuntimeError(f"{self._what}: {reply['fault']}")
        if "refused" in reply:
            raise RefusedError(reply["refused"])
        return reply["result"]

    async def _start(self) -> None:
        """Wait until a process runs. Whoever is cancelled meanwhile leaves it to the next."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.run_in_executor(self._thread, self._ready), START_S)
        except (EOFError, OSError) as error:  # a TimeoutError is one
            _end_all(self._processes)
            raise RuntimeError(f"the process for {self._what} did not start: {error!r}") from error

    def _ready(self) -> None:
        """Start a process and send it its setup, in the thread, unless one runs."""
        if self._processes and self._processes[0].process.poll() is not None:
            _end_all(self._processes)  # the system has killed it
        if not self._processes:
            self._processes.append(_Process.start())
            self._processes[0].ask(pickle.dumps(self._setup))

    async def _ask(self, frame: bytes, most_s: float) -> bytes:
        """Send a frame and wait for the answer; kill the process if it does not come in time."""
        loop, process = asyncio.get_running_loop(), self._processes[0]
        answer = loop.run_in_executor(self._thread, process.ask, frame)
        try:
            done, _ = await asyncio.wait({answer}, timeout=most_s)
            if not done:
                raise RefusedError(
                    f"{self._what} takes more than the {most_s:g} s that it may; shorten it"
                )
            return answer.result()
        except (EOFError, OSError) as error:
            raise RefusedError(
                f"{self._what} takes more memory than it may, which is "
                f"{self._limits.memory_bytes >> 20} MiB, or its process was killed; shorten it"
            ) from error
        except asyncio.CancelledError:
            await asyncio.wait({answer}, timeout=GRACE_S)
            raise
        finally:
            if not answer.done() or answer.cancelled() or answer.exception() is not None:
                _end_all(self._processes)
                await asyncio.gather(answer, return_exceptions=True)


class TextPool:
    """Turns text to tokens and back, and judges forms, for one model. Nobody waits for another.

    Short work is done at once, long work by a `Worker`: one for what takes a tenth of a second, one
    for what takes seconds, one for forms. Requires a running event loop.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]):
        """Start nothing yet."""
        self._tools = TextTools.of(tokenizer, vocab_size, eos_token_ids)
        # WHY: now, as a vocabulary of 128,000 takes 0.1 s, in which nobody is answered
        pickled = pickle.dumps(tokenizer)

        def worker(limits: TaskLimits, what: str) -> Worker:
            setup = Setup(
                tokenizer=pickled, vocab_size=vocab_size, eos_token_ids=tuple(eos_token_ids),
                task_s=limits.task_s, memory_bytes=limits.memory_bytes,
                is_judge=limits is FORM_LIMITS,
            )  # fmt: skip
            return Worker(setup, limits, what=what)

        self.medium = worker(MEDIUM_LIMITS, "reading the text")
        self.long = worker(LONG_LIMITS, "reading the text")
        self.forms = worker(FORM_LIMITS, "compiling structured_outputs")
        # WHY: of its own, as the engine steps in the loop's, whose few threads templates could take
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="detjax-template")
        self._judged: OrderedDict[StructuredOutput, None] = OrderedDict()

    def close(self) -> None:
        """End all processes."""
        for worker in (self.medium, self.long, self.forms):
            worker.close()

    async def encode(self, texts: Sequence[str], *, is_raw: bool = False) -> list[tuple[int, ...]]:
        """The ids of some texts.

        Raises:
            RefusedError: As `Worker.run` does.
        """
        found = await self._done(Encode(texts=texts, is_raw=is_raw), sum(map(len, texts)))
        return [tuple(ids) for ids in found]

    async def decode(
        self, prompts: Sequence[Sequence[int]], *, shows_special: bool = False
    ) -> list[str]:
        """The text of some token ids; `shows_special`: with the special tokens among them.

        Raises:
            RefusedError: As `Worker.run` does.
        """
        work = Decode(prompts=prompts, shows_special=shows_special)
        return await self._done(work, sum(map(len, prompts)))

    async def names(self, token_ids: Sequence[int]) -> list[str | None]:
        """What the vocabulary calls some tokens.

        Raises:
            RefusedError: As `Worker.run` does.
        """
        return await self._done(TokenTexts(token_ids=token_ids), len(token_ids))

    async def template(
        self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]
    ) -> tuple[int, ...]:
        """The ids of a conversation.

        Raises:
            RefusedError: As `Worker.run` does, and if the template refuses it.
        """
        work = Template(messages=messages, variables=variables)
        try:
            frame = pickle.dumps(work)
        except RecursionError as error:
            raise RefusedError("messages or tools are nested too deeply; flatten them") from error
        if len(frame) > SHORT_BYTES:
            return tuple(await self._worker(len(frame)).run(frame))
        try:
            return tuple(await self.in_thread(work.run, self._tools))
        except (ValueError, RecursionError) as error:
            raise RefusedError(str(error)) from error

    async def judge(self, form: StructuredOutput) -> None:
        """Refuse a form that is not valid, or that costs too much.

        Raises:
            RefusedError: As `Worker.run` does, and if it is refused.
        """
        if form not in self._judged:
            await self.forms.run(pickle.dumps(Judge(form=form)))
            self._judged[form] = None
            while len(self._judged) > _NUM_JUDGED:
                self._judged.popitem(last=False)
        self._judged.move_to_end(form)

    async def in_thread[**P, T](
        self, function: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call what waits, or holds Python's lock no longer than a switch, and is known to end."""
        call = functools.partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def in_background(self, function: Callable[[], None]) -> None:
        """Call in a thread what nobody waits for."""
        self._threads.submit(function)

    def _worker(self, size: int) -> Worker:
        return self.medium if size <= MEDIUM_BYTES else self.long

    async def _done(self, work: TextTask, size: int) -> Any:
        if size <= SHORT_BYTES:
            try:
                return work.run(self._tools)
            except ValueError as error:
                raise RefusedError(str(error)) from error
        frame = pickle.dumps(work)
        return await self._worker(len(frame)).run(frame)
