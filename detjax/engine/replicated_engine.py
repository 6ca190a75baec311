# SPDX-License-Identifier: Apache-2.0
"""One engine in every process of a job, all of them on one plan.

An engine's plan is a function of what it is asked, and between which of its steps. So process 0
sends a log: which requests and cancellations come before a step, in which order, and after the step
which sequences their listeners have ended. The others step once for each entry, and compare a
digest of what they launched and of what came of it with that of process 0.
"""

import hashlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from detjax.engine.engine import Engine
from detjax.engine.errors import EngineStoppedError
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.request_output import RequestOutput, TokenEvent
from detjax.engine.outputs_lease import OutputsLease
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import OnToken, ignore_token
from detjax.parallel.watch import Watch

try:
    import msgspec
except ImportError as error:
    raise ImportError(f'{error}; pip install "detjax[serve]"') from error

MAX_BEGIN_BYTES = 8 << 20
"""Of the requests that one step takes; more wait for the next."""


class Admission(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A request; `is_heard` if somebody listens to its tokens and may end it."""

    request: Request
    is_heard: bool


class Cancellation(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Ends a request."""

    request_id: int


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What a listener said to the `number`th token that was heard in a step: stop, or an error."""

    number: int
    error: str


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """What comes before a step, in order. Each is an `Admission` or a `Cancellation`."""

    step: int
    entries: tuple[Admission | Cancellation, ...]


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """What came of a step: what listeners said, and the digest of launches and outputs."""

    step: int
    verdicts: tuple[Verdict, ...]
    digest: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """No step follows."""


class _RawBegin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """`Begin` of entries that are encoded already."""

    step: int
    entries: tuple[msgspec.Raw, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Begin | Done | End)


@dataclass(frozen=True, slots=True)
class _Add:
    """A request in the log of process 0, and its bytes there."""

    data: bytes
    request: Request
    on_token: OnToken
    request_id: int

    @property
    def num_sequences(self) -> int:
        return self.request.sampling.num_sequences

    def apply(self, engine: Engine) -> None:
        request_id = engine.enqueue_request(self.request, self.on_token)
        assert request_id == self.request_id, (request_id, self.request_id)


@dataclass(frozen=True, slots=True)
class _Cancel:
    """A cancellation in the log of process 0, and its bytes there."""

    data: bytes
    request_id: int
    num_sequences: int = 0

    def apply(self, engine: Engine) -> None:
        engine.cancel(self.request_id)


def ignore_failure(reason: str) -> None:
    """Tell nobody."""


class ReplicatedEngine:
    """Process 0's engine of a job; the others `follow`. For `AsyncEngine`, or to step by hand.

    It has those methods of `Engine` that change nothing but requests, and calls them alike. A lost
    process, another plan or an error ends the job: every call raises `EngineStoppedError` from then
    on, and there is no `reset`.
    """

    def __init__(
        self, engine: Engine, watch: Watch, *, on_fail: Callable[[str], None] = ignore_failure
    ):
        """Take over an engine that has not been asked anything; nothing else may call it.

        Args:
            engine: Of the same model and configuration in every process.
            watch: The connections of process 0.
            on_fail: Told once, from any thread, why the job ended.
        """
        self._engine, self._watch, self._on_fail = engine, watch, on_fail
        self._lock = threading.Lock()  # of the log, and of nothing that takes long
        self._stepping = threading.Lock()
        self._log: deque[_Add | _Cancel] = deque()
        self._num_pending = 0
        self._request_ids = itertools.count()
        self._step = 0
        self._num_heard = 0
        self._verdicts: list[Verdict] = []
        self._why_failed = ""

    # ------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        on_token: OnToken = ignore_token,
    ) -> int:
        """Queue a request for the next step of all processes: as `Engine.add_request`."""
        self._refuse_if_failed()
        request = Request(
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            is_deterministic=is_deterministic,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        is_heard = on_token is not ignore_token
        data = _ENCODER.encode(Admission(request, is_heard))
        heard = self._recorded(on_token) if is_heard else ignore_token
        with self._lock:
            self._engine.check_request(request, num_ahead=self._num_pending)
            request_id = next(self._request_ids)
            self._log.append(_Add(data, request, heard, request_id))
            self._num_pending += request.sampling.num_sequences
        return request_id

    def check_request(self, request: Request, *, num_ahead: int = 0) -> None:
        """Refuse what `add_request` would refuse, were `num_ahead` sequences more in the queue."""
        self._refuse_if_failed()
        self._engine.check_request(request, num_ahead=self._num_pending + num_ahead)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step. Unknown or ended: no effect."""
        data = _ENCODER.encode(Cancellation(request_id))
        with self._lock:
            self._log.append(_Cancel(data, request_id))

    def _recorded(self, on_token: OnToken) -> OnToken:
        """A listener whose verdicts are sent."""

        def recorded(event: TokenEvent) -> bool:
            self._num_heard += 1
            number = self._num_heard
            try:
                is_end = on_token(event)
            except Exception as error:
                self._verdicts.append(Verdict(number, f"{type(error).__name__}: {error}"))
                raise
            if is_end:
                self._verdicts.append(Verdict(number, ""))
            return is_end

        return recorded

    # ---------------------------------------------------------------------------------------- steps

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to emit."""
        return bool(self._log) or self._engine.has_work

    def step(self) -> list[RequestOutput]:
        """Step in all processes, and return what process 0's own step released.

        Raises:
            EngineStoppedError: If the job has ended, or does so now.
        """
        with self._stepping:
            self._refuse_if_failed()
            try:
                with self._watch.working():
                    return self._replicated_step()
            except BaseException as error:
                self.fail(f"{type(error).__name__}: {error}")
                if isinstance(error, Exception):
                    raise EngineStoppedError(self._reason()) from error
                raise

    def _replicated_step(self) -> list[RequestOutput]:
        self._watch.progress()
        entries = self._cut()
        raw = tuple(msgspec.Raw(entry.data) for entry in entries)
        self._watch.send(_ENCODER.encode(_RawBegin(self._step, raw)))
        for entry in entries:
            entry.apply(self._engine)
        self._num_heard, self._verdicts = 0, []
        outputs = self._engine.step()
        done = Done(self._step, tuple(self._verdicts), _digest(self._engine, outputs))
        self._watch.send(_ENCODER.encode(done))
        self._step += 1
        return outputs

    def _cut(self) -> list[_Add | _Cancel]:
        """Take what this step begins with: the oldest of the log, in order."""
        entries, num_bytes = [], 0
        with self._lock:
            while self._log and (not entries or num_bytes < MAX_BEGIN_BYTES):
                entry = self._log.popleft()
                entries.append(entry)
                num_bytes += len(entry.data)
                self._num_pending -= entry.num_sequences
        return entries

    def drain(self) -> list[RequestOutput]:
        """Step until nothing is left to do; return everything that was released on the way."""
        outputs: list[RequestOutput] = []
        while self.has_work:
            outputs += self.step()
        return outputs

    # ------------------------------------------------------------------------------------- its ends

    def fail(self, reason: str) -> None:
        """Note that the job has ended, from any thread. The first reason is kept."""
        with self._lock:
            is_first, self._why_failed = not self._why_failed, self._why_failed or reason
        if is_first:
            self._on_fail(self._reason())

    def close(self) -> None:
        """Let the other processes return from `follow`, after a step that is under way."""
        with self._stepping:
            if not self._why_failed:
                self._why_failed = "it was closed"
                self._watch.send(_ENCODER.encode(End()))

    def _refuse_if_failed(self) -> None:
        if self._why_failed:
            raise EngineStoppedError(self._reason())

    def _reason(self) -> str:
        why = self._watch.why_ended or self._why_failed
        return f"the job of several processes has ended: {why}"

    def reset_prefix_cache(self) -> None:
        """Refuse it: the other processes would go on with theirs.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "the prefix cache of a server of several processes cannot be cleared; pause it with "
            "clear_cache=false, or start it again"
        )

    @property
    def outputs_lease(self) -> OutputsLease:
        """As `Engine` has it."""
        return self._engine.outputs_lease

    def check_folder(self, folder: Path) -> NoReturn:
        """Refuse it, and so do `load_folder`, `sleep` and `wake_up`, as `reset_prefix_cache` does.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "the weights of a server of several processes cannot be replaced or put to sleep; use "
            "one process for all GPUs of a machine, or start it again"
        )

    def load_folder(self, folder: Path, *, version: int) -> None:
        """Refuse it."""
        self.check_folder(folder)

    def load_adapter(self, folder: Path) -> NoReturn:
        """Refuse it, and so does `remove_adapter`.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "adapters in a job of several processes are not supported; use one process for all "
            "GPUs of a machine"
        )

    def remove_adapter(self, sha256: str) -> None:
        """Refuse it."""
        self.load_adapter(Path())

    def sleep(self, *, keeps_weights: bool = True) -> None:
        """Refuse it."""
        self.check_folder(Path())

    def wake_up(self, *, weights: bool = True, cache: bool = True) -> None:
        """Refuse it."""
        self.check_folder(Path())

    @property
    def is_asleep(self) -> bool:
        """Never."""
        return False

    @property
    def has_weights(self) -> bool:
        """Always."""
        return True

    def check_idle(self) -> bool:
        """Nothing: a check is a launch, and the other processes would not make it."""
        return False

    @property
    def self_check_error(self) -> str:
        """As `Engine` has it."""
        return self._engine.self_check_error

    @property
    def num_checkpoint_params(self) -> int:
        """As `Engine` has it."""
        return self._engine.num_checkpoint_params

    @property
    def weight_version(self) -> int:
        """As `Engine` has it."""
        return self._engine.weight_version

    def stats(self) -> EngineStats:
        """What process 0's engine has counted; the others count the same."""
        return self._engine.stats()


# --------------------------------------------------------------------------------------- the others


class DivergedError(RuntimeError):
    """This process has launched something else than process 0, or something else came of it."""


def follow(engine: Engine, watch: Watch) -> None:
    """Do in this process what process 0's `ReplicatedEngine` does, until it is closed.

    Args:
        engine: Of the same model and configuration as that of process 0; asked nothing before.
        watch: The connection to process 0. It ends this process if process 0 is lost.

    Raises:
        DivergedError: If the digest of a step is not that of process 0.
        EngineStoppedError: If a step fails here.
    """
    follower = _Follower(engine, watch)
    for step in itertools.count():
        data = watch.mail.get()[1]
        with watch.working():
            watch.progress()
            message = _DECODER.decode(data)
            if isinstance(message, End):
                return
            follower.step(step, message)


class _Follower:
    def __init__(self, engine: Engine, watch: Watch):
        self._engine, self._watch = engine, watch
        self._num_heard = 0
        self._done: Done | None = None
        self._errors: dict[int, str] = {}

    def receive(self) -> Begin | Done | End:
        _, data = self._watch.mail.get()
        return _DECODER.decode(data)

    def step(self, step: int, begin: Begin | Done) -> None:
        if not isinstance(begin, Begin) or begin.step != step:
            raise DivergedError(f"step {step} begins with {type(begin).__name__} {begin.step}")
        for entry in begin.entries:
            if isinstance(entry, Admission):
                self._engine.enqueue_request(
                    entry.request, self._replay if entry.is_heard else ignore_token
                )
            else:
                self._engine.cancel(entry.request_id)
        self._num_heard, self._done = 0, None
        outputs = self._engine.step()
        self._await_done()
        assert self._done is not None
        digest = _digest(self._engine, outputs)
        if (self._done.step, self._done.digest) != (step, digest):
            raise DivergedError(
                f"step {step} has digest {digest.hex()} here and {self._done.digest.hex()} in "
                f"process 0 (its step {self._done.step})"
            )

    def _replay(self, event: TokenEvent) -> bool:
        """Say of a token what its listener in process 0 said."""
        self._num_heard += 1
        self._await_done()
        error = self._errors.get(self._num_heard)
        if error:
            raise RuntimeError(error)
        return error is not None

    def _await_done(self) -> None:
        if self._done is None:
            done = self.receive()
            if not isinstance(done, Done):
                raise DivergedError(f"a {type(done).__name__} before the step was done")
            self._done = done
            self._errors = {verdict.number: verdict.error for verdict in done.verdicts}


def _digest(engine: Engine, outputs: Sequence[RequestOutput]) -> bytes:
    """Hash what a step has launched, and what it has released: 16 bytes.

    Of a launch the program and every operand from the host: tokens, positions, slots, pages,
    sampling parameters. Of an output the sequence, its tokens, the bits of their logprobs and
    of the prompt's, and why it ended.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for launch in engine.launched:
        hasher.update(repr(launch.key).encode())
        for operand in jax.tree.leaves(launch.operands):
            hasher.update(np.asarray(operand).tobytes())
    numbers: list[int] = []
    logprobs: list[Any] = []
    for output in outputs:
        reason = "" if output.finish_reason is None else output.finish_reason.value
        hasher.update(reason.encode() + b"\0")
        numbers += (output.request_id, output.sequence_idx, len(output.token_ids))
        numbers += output.token_ids
        logprobs += output.logprobs
        for one in output.prompt_logprobs or ():
            numbers.append(one.rank)
            logprobs.append(one.logprob)
    hasher.update(np.asarray(numbers, np.int64).tobytes())
    hasher.update(np.asarray(logprobs, np.float32).tobytes())
    return hasher.digest()
