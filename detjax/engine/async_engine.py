# SPDX-License-Identifier: Apache-2.0
"""The engine for programs that run on asyncio: one stream of outputs a request."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.request_output import RequestOutput
from detjax.engine.outputs_lease import OutputsLease
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import OnToken, ignore_token

Sink = Callable[[RequestOutput | Exception], None]
"""Told each output of a request, and the error that stops the engine; on the event loop."""


@runtime_checkable
class StepsRequests(Protocol):
    """What `AsyncEngine` needs of an engine: `Engine` and `ReplicatedEngine` have it."""

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
        """As `Engine` has it, and so are the others."""
        ...

    def check_request(self, request: Request, *, num_ahead: int = 0) -> None:
        """Refuse what `add_request` would refuse, were `num_ahead` sequences more in the queue."""
        ...

    def cancel(self, request_id: int) -> None:
        """End a request at the next step."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to emit."""
        ...

    def step(self) -> list[RequestOutput]:
        """Step, and return what it released."""
        ...

    def check_idle(self) -> bool:
        """Check a little of an answer again; whether there is more."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        ...

    def check_folder(self, folder: Path) -> None:
        """Refuse weights of a folder that do not fit."""
        ...

    def load_folder(self, folder: Path, *, version: int) -> None:
        """Replace the weights by those of a folder."""
        ...

    def load_adapter(self, folder: Path) -> str:
        """Read an adapter, and return its hash."""
        ...

    def remove_adapter(self, sha256: str) -> None:
        """Let no further request name an adapter."""
        ...

    def sleep(self, *, keeps_weights: bool = True) -> None:
        """Free weights and cache on the devices."""
        ...

    def wake_up(self, *, weights: bool = True, cache: bool = True) -> None:
        """Bring them back."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether weights or cache are not on the devices."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the devices."""
        ...

    @property
    def outputs_lease(self) -> OutputsLease:
        """Which `AsyncEngine` steps it."""
        ...

    @property
    def self_check_error(self) -> str:
        """What a self-check has found to differ; empty while the claim holds."""
        ...

    @property
    def num_checkpoint_params(self) -> int:
        """Most weights of a checkpoint, which may repeat tied embeddings as its output head."""
        ...

    @property
    def weight_version(self) -> int:
        """Of the weights that compute now, which outputs carry."""
        ...

    def stats(self) -> EngineStats:
        """What it has counted."""
        ...


class _Merge:
    """Outputs of a request whose sink is not told every token by itself."""

    def __init__(self, interval: int):
        self._interval = interval
        self._waiting: dict[int, list[RequestOutput]] = {}

    def add(self, output: RequestOutput) -> RequestOutput | None:
        """Take the next output of a sequence; return what is told now, if anything."""
        is_urgent = output.finish_reason is not None or output.prompt_logprobs is not None
        if not self._interval:  # WHY: outputs that are kept until the end cost 7 us a token
            return output if is_urgent else None
        waiting = self._waiting.get(output.sequence_idx)
        is_first = waiting is None
        if waiting is None:
            waiting = self._waiting[output.sequence_idx] = []
        waiting.append(output)
        num_tokens = sum([len(one.token_ids) for one in waiting])
        if not (is_first or is_urgent or num_tokens >= self._interval):
            return None
        self._waiting[output.sequence_idx] = []
        if len(waiting) == 1:
            return output
        return dataclasses.replace(
            output,
            token_ids=tuple([i for one in waiting for i in one.token_ids]),
            logprobs=tuple([p for one in waiting for p in one.logprobs]),
            top_logprobs=tuple([top for one in waiting for top in one.top_logprobs]),
        )


class AsyncEngine:
    """Steps an engine in a thread while anybody waits, and hands each request its outputs.

    An engine's requests are open on one `AsyncEngine` at a time.
    """

    def __init__(self, engine: StepsRequests):
        """Take over an engine; nothing else may step it."""
        self._engine = engine
        self._lease: OutputsLease[AsyncEngine] = engine.outputs_lease
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sinks: dict[int, Sink] = {}
        self._merges: dict[int, _Merge] = {}
        self._pump: asyncio.Task[Exception | None] | None = None

    @property
    def has_open_requests(self) -> bool:
        """Whether outputs of its requests are to come, and its event loop can take them."""
        is_alive = self._loop is not None and not self._loop.is_closed()
        return bool(self._sinks) and is_alive

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        on_token: OnToken = ignore_token,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield what each step releases of a request, until all its sequences have ended.

        A consumer that stops listening, or is cancelled, cancels its request. `on_token` is called
        by the thread that steps, before the output that has the token; True ends the sequence.

        Raises:
            ValueError: If the request cannot run on this engine.
            EngineFullError: If too many wait.
            EngineStoppedError: If an error has stopped the engine, or does so now.
            EngineInUseError: If another `AsyncEngine` has requests open on this engine.
        """
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        request_id = self.open(
            prompt_token_ids,
            sampling,
            is_deterministic=is_deterministic,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            on_token=on_token,
            sink=queue.put_nowait,
        )
        num_left = sampling.num_sequences
        try:
            while num_left:
                self._start_pump()
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                num_left -= output.finish_reason is not None
                yield output
        finally:
            self.close(request_id, has_ended=not num_left)

    def open(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        on_token: OnToken = ignore_token,
        sink: Sink,
        stream_interval: int = 1,
    ) -> int:
        """Begin what `stream` does, without a task of its own: `sink` is told instead.

        Many requests may have one sink. Whoever opens a request closes it.

        Args:
            prompt_token_ids: As `Engine.add_request` has it, and so are those that are not here.
            sampling: How each next token is chosen.
            is_deterministic: Whether the answer must be the canonical one.
            priority: Higher goes first.
            cache_salt: As `Request` has it.
            adapter: Hash of a loaded adapter, or "".
            on_token: Told each token at once.
            sink: Told what is released, and errors.
            stream_interval: Tokens of a sequence that the sink is told at once. The first one, the
                end and prompt logprobs do not wait. 0: the end alone, and of the tokens before it
                `on_token` is told. The event loop does nothing for a token that waits.

        Returns:
            The request's id.

        Raises:
            ValueError, EngineFullError, EngineStoppedError, EngineInUseError: As `stream` does.
        """
        with self._lease.lock:
            self._lease.take(self)
            self._loop = asyncio.get_running_loop()
            request_id = self._engine.add_request(
                prompt_token_ids,
                sampling,
                is_deterministic=is_deterministic,
                priority=priority,
                cache_salt=cache_salt,
                adapter=adapter,
                on_token=on_token,
            )
            self._sinks[request_id] = sink
            if stream_interval != 1:
                self._merges[request_id] = _Merge(stream_interval)
        self._start_pump()
        return request_id

    def close(self, request_id: int, *, has_ended: bool) -> None:
        """Tell the sink nothing more, and cancel the request if it has not ended."""
        del self._sinks[request_id]
        self._merges.pop(request_id, None)
        if not has_ended:
            self._engine.cancel(request_id)
            self._start_pump()

    async def drain(self) -> None:
        """Wait until nothing is left to do.

        Raises:
            EngineStoppedError: If an error stops the engine before that, or has stopped it.
        """
        # WHY: the task ends after the work, and whoever drains wants nothing left of either.
        while self._engine.has_work or not (self._pump is None or self._pump.done()):
            error = await asyncio.shield(self._start_pump())
            if error is not None:
                raise error

    async def change(self, change: Callable[[], None]) -> None:
        """Change the engine in a thread, once it has no work; no step runs meanwhile.

        Raises:
            EngineStoppedError: If an error stops the engine before.
            Exception: What `change` raises.
        """
        while self._engine.has_work:
            error = await asyncio.shield(self._start_pump())
            if error is not None:
                raise error

        def changed() -> None:
            with self._lease.stepping:
                change()

        await asyncio.to_thread(changed)

    def fail(self, error: Exception) -> None:
        """Tell every sink an error, whatever a step is waiting for. In the loop's thread."""
        for sink in tuple(self._sinks.values()):
            sink(error)

    def _start_pump(self) -> asyncio.Task[Exception | None]:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return self._pump

    async def _run(self) -> Exception | None:
        """Step until there is no work, and check some answers then.

        What breaks the engine is told to every sink.
        """
        stop = threading.Event()
        try:
            while True:
                if self._engine.has_work:
                    await asyncio.to_thread(self._steps, stop)
                elif not await asyncio.to_thread(self._check_idle) and not self._engine.has_work:
                    break
        except Exception as error:
            self.fail(error)
            return error
        finally:
            stop.set()
        return None

    def _check_idle(self) -> bool:
        """Check a little of an answer again; whether there is more."""
        with self._lease.stepping:
            return self._engine.check_idle()

    def _steps(self, stop: threading.Event) -> None:
        """Step while there is work, and hand the outputs over.

        In the thread: the next step does not wait for the loop, which may be busy with the outputs
        of the one before. A pump that is cancelled while its step runs loses no output, and the
        next one waits for its turn.
        """
        with self._lease.stepping:
            while self._engine.has_work and not stop.is_set():
                released = self._engine.step()
                with self._lease.lock:
                    # WHY: another may have opened a request since this one's last has ended.
                    holder = self._lease.holder or self
                    holder._hand_over(released)

    def _hand_over(self, released: Sequence[RequestOutput]) -> None:
        """Let the event loop hand on what is due of these outputs; in the thread that steps."""
        mine = [output for output in released if output.request_id in self._sinks]
        outputs = [told for output in mine if (told := self._due(output))]
        if outputs and self._loop is not None:
            self._loop.call_soon_threadsafe(self._share, outputs)

    def _due(self, output: RequestOutput) -> RequestOutput | None:
        """What is told of this one now, with what waited before it; in the thread."""
        merge = self._merges.get(output.request_id)
        return output if merge is None else merge.add(output)

    def _share(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._sinks:
                self._sinks[output.request_id](output)
