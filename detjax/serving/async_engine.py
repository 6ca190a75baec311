# SPDX-License-Identifier: Apache-2.0
"""The engine for programs that run on asyncio: one stream of outputs a request."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from detjax.serving.engine import Engine
from detjax.serving.request import RequestOutput, SamplingParams


class AsyncEngine:
    """Steps an engine in a thread while anybody waits, and hands each request its outputs."""

    def __init__(self, engine: Engine):
        """Take over an engine; nothing else may step it."""
        self._engine = engine
        self._queues: dict[int, asyncio.Queue[RequestOutput | Exception]] = {}
        self._pump: asyncio.Task | None = None

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        is_deterministic: bool = True,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield what each step releases of a request, until all its samples have ended.

        A consumer that stops listening, or is cancelled, cancels its request.

        Raises:
            ValueError: If the request cannot run on this engine.
        """
        request_id = self._engine.add_request(
            prompt_token_ids, sampling, is_deterministic=is_deterministic, priority=priority
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
        """Wait until nothing is left to do."""
        while self._engine.has_work:
            self._start_pump()
            assert self._pump is not None
            await asyncio.shield(self._pump)

    def _start_pump(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Step until there is no work. What breaks the engine is raised by every stream."""
        try:
            while self._engine.has_work:
                for output in await asyncio.to_thread(self._engine.step):
                    if output.request_id in self._queues:
                        self._queues[output.request_id].put_nowait(output)
        except Exception as error:
            for queue in self._queues.values():
                queue.put_nowait(error)
