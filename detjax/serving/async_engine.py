# SPDX-License-Identifier: Apache-2.0
"""The engine for programs that run on asyncio: one stream of outputs a request."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence

from detjax.serving.engine import Engine
from detjax.serving.request import RequestOutput, SamplingParams
from detjax.serving.sequence import OnToken, ignore_token


class AsyncEngine:
    """Steps an engine in a thread while anybody waits, and hands each request its outputs."""

    def __init__(self, engine: Engine):
        """Take over an engine; nothing else may step it."""
        self._engine = engine
        self._queues: dict[int, asyncio.Queue[RequestOutput | Exception]] = {}
        self._pump: asyncio.Task[Exception | None] | None = None
        self._stepping = threading.Lock()

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        on_token: OnToken = ignore_token,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield what each step releases of a request, until all its sequences have ended.

        A consumer that stops listening, or is cancelled, cancels its request. `on_token` is called
        by the thread that steps, before the output that has the token; True ends the sequence.

        Raises:
            ValueError: If the request cannot run on this engine.
            EngineFullError: If too many wait.
            EngineStoppedError: If an error has stopped the engine, or does so now.
        """
        request_id = self._engine.add_request(
            prompt_token_ids,
            sampling,
            is_deterministic=is_deterministic,
            priority=priority,
            cache_salt=cache_salt,
            on_token=on_token,
        )
        queue = self._queues[request_id] = asyncio.Queue()
        num_left = sampling.n
        try:
            while num_left:
                self._start_pump()
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                num_left -= output.finish_reason is not None
                yield output
        finally:
            del self._queues[request_id]
            if num_left:
                self._engine.cancel(request_id)
                self._start_pump()

    async def drain(self) -> None:
        """Wait until nothing is left to do.

        Raises:
            EngineStoppedError: If an error stops the engine before that, or has stopped it.
        """
        while self._engine.has_work:
            error = await asyncio.shield(self._start_pump())
            if error is not None:
                raise error

    def _start_pump(self) -> asyncio.Task[Exception | None]:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return self._pump

    async def _run(self) -> Exception | None:
        """Step until there is no work, and check some answers then.

        What breaks the engine is raised by every stream.
        """
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._engine.has_work:
                    await asyncio.to_thread(self._step, loop)
                elif not await asyncio.to_thread(self._check_idle) and not self._engine.has_work:
                    break
        except Exception as error:
            for queue in self._queues.values():
                queue.put_nowait(error)
            return error
        return None

    def _check_idle(self) -> bool:
        """Check a little of an answer again; whether there is more."""
        with self._stepping:
            return self._engine.check_idle()

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step, and hand the outputs over.

        In the thread: a pump that is cancelled while its step runs loses no output, and the next
        one waits for its turn.
        """
        with self._stepping:
            outputs = self._engine.step()
            loop.call_soon_threadsafe(self._share, outputs)

    def _share(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id in self._queues:
                self._queues[output.request_id].put_nowait(output)
