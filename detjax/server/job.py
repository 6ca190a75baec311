# SPDX-License-Identifier: Apache-2.0
"""A server of several processes: process 0 serves, and the engines of the others follow its own."""

import argparse
import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from detjax.cli.errors import BAD_INPUT, INTERNAL_ERROR, OK
from detjax.cli.options import flag_like
from detjax.engine.replicated_engine import ReplicatedEngine, follow
from detjax.llm import LLM
from detjax.models.hub import find_model
from detjax.models.identity import model_hash
from detjax.parallel.distributed import start_job
from detjax.parallel.job_spec import JobSpec
from detjax.parallel.watch import Watch
from detjax.server.service import Service

FAILED_S = 5.0
"""How long process 0 answers with what has ended the job before it ends as well."""

_DRAIN = b"drain"

SHARED_OPTIONS = (
    "dtype", "cast_weights", "quantized_weights", "kv_cache_dtype", "backend", "mode",
    "decode_steps", "tp", "dp", "max_len", "batch_size", "decode_batches",
    "max_num_batched_tokens", "max_waiting", "self_check",
)  # fmt: skip
"""Options that every process of a job is given alike."""


OpenLLM = Callable[[argparse.Namespace, int], LLM]
"""Opens the model of the options on the devices of so many processes."""


@contextlib.contextmanager
def _ending(job: JobSpec) -> Iterator[None]:
    """After an error let this process end, whatever it waits for at its exit.

    JAX's runtime would wait there for the others, which are gone. Process 0 has time to say what it
    was; of the others the watch has said it.
    """
    try:
        yield
    except BaseException as error:
        code = BAD_INPUT if isinstance(error, ValueError | OSError) else INTERNAL_ERROR
        if job.process_id:
            os._exit(code)
        _end_soon(code)
        raise


def _end_soon(code: int) -> None:
    timer = threading.Timer(FAILED_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _open(args: argparse.Namespace, job: JobSpec, watch: Watch, open_llm: OpenLLM) -> LLM:
    """Open the model in this process of a job, and compare what must be the same in all."""
    with _ending(job), watch.working():
        folder = find_model(args.model, revision=args.revision)
        watch.check_same("files of the model", model_hash(folder))
        # WHY: each by its name, and before anything is compiled. What follows from them is compared
        # once it is known.
        for name in SHARED_OPTIONS:
            watch.check_same(flag_like(name), repr(getattr(args, name)))
        llm = open_llm(args, job.num_processes)
        watch.check_same("settings", f"{llm.config.fingerprint} {llm.config.engine}")
    return llm


class Leader:
    """Process 0 of a job. Once the job has ended, this process ends too, with exit code 1.

    Attributes:
        engine: Once the model is open.
    """

    engine: ReplicatedEngine

    def __init__(self, job: JobSpec):
        """Join nobody yet. In the thread of a running event loop."""
        self._job, self._loop = job, asyncio.get_running_loop()
        self._service: Service | None = None
        self._has_failed = False

    def open(self, args: argparse.Namespace, open_llm: OpenLLM) -> LLM:
        """Join the other processes, and open the model with them.

        Raises:
            ValueError, FileNotFoundError, TimeoutError: As `start_job` and `LLM` say.
        """
        self._watch = start_job(self._job, end=self._end)
        llm = _open(args, self._job, self._watch, open_llm)
        self.engine = ReplicatedEngine(llm.engine, self._watch, on_fail=self._fail)
        return llm

    def attend(self, service: Service, drain: Callable[[], None]) -> None:
        """From now on tell a service of a failure, and drain it when another process asks."""
        self._service = service

        def listen() -> None:
            while self._watch.mail.get()[1] == _DRAIN:
                self._loop.call_soon_threadsafe(drain)

        threading.Thread(target=listen, daemon=True).start()

    def close(self) -> int:
        """Let the others end; the exit code of this process."""
        self._watch.mail.put((0, b""))  # nobody asks any more
        self.engine.close()
        return INTERNAL_ERROR if self._has_failed else OK

    def _end(self, code: int) -> None:
        """The job has ended. Called by the watch, in a thread of its own."""
        if self._service is None:
            os._exit(code)
        self.engine.fail(self._watch.why_ended)

    def _fail(self, reason: str) -> None:
        """Answer with the reason for a while. A step may hang in a collective for ever."""
        self._has_failed = True
        _end_soon(INTERNAL_ERROR)
        if self._service is not None:
            self._loop.call_soon_threadsafe(self._service.fail, reason)


def follow_server(args: argparse.Namespace, job: JobSpec, open_llm: OpenLLM) -> int:
    """Do what process 0 does until it ends; the exit code. SIGTERM here drains the whole server.

    Raises:
        ValueError, FileNotFoundError, TimeoutError: As `start_job` and `LLM` say.
    """
    watch = start_job(job)
    llm = _open(args, job, watch, open_llm)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: watch.send(_DRAIN))
    with _ending(job):
        follow(llm.engine, watch)
    return OK
