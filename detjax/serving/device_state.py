# SPDX-License-Identifier: Apache-2.0
"""What stays on the devices from step to step, and the calls of the programs that change it."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from detjax.models.loading import LoadedModel
from detjax.serving import trace
from detjax.serving.adjustments import AdjustedSlots, AdjustOperands
from detjax.serving.device_arrays import (
    adjusted_shape,
    empty,
    empty_pages,
    sampling_shape,
    slots_shape,
)
from detjax.serving.metrics import EngineStats
from detjax.serving.programs import ProgramCache
from detjax.serving.self_check.device import checksums, filled_pages

Placed = np.ndarray | jax.Array
"""An operand, on the host or where it lies."""


def _is_host(device: jax.Device) -> bool:
    """Whether a result lies where it is read.

    WHY: there jaxlib has nothing to copy. Asked all the same before the result is there, it takes
    Python's lock in a thread of its own then; where the interpreter is ending meanwhile, that ends
    the process by a signal (jaxlib 0.11.2: 12 of 36 starts on two busy cores).
    """
    return device.platform == "cpu"


def read_result(result: Any) -> np.ndarray:
    """What a program gave, on the host, when it is there."""
    if isinstance(result, jax.Array) and _is_host(next(iter(result.devices()))):
        jax.block_until_ready(result)
    return np.asarray(result)


class DeviceState:
    """The cache, the slots and their sampling parameters; programs write them in place.

    Programs are called one after the other in a thread of its own, which starts the copy of their
    results to the host as well. That takes the host as long as a step of a small model takes the
    device, and Python's lock is free for most of it, so the engine plans and commits meanwhile.
    Whatever else looks at the state waits for the calls before it.
    """

    def __init__(
        self,
        model: LoadedModel,
        programs: ProgramCache,
        *,
        is_filled: bool,
        stats: EngineStats,
        tracer: trace.TracesEvents,
    ):
        """Allocate everything.

        Args:
            model: On its mesh.
            programs: Whose sizes these are.
            is_filled: Whether the cache begins with random bits instead of zeros, for self-checks.
            stats: Where the time of calls is counted.
            tracer: Keeps a timeline.
        """
        self._model, self._programs, self._is_filled = model, programs, is_filled
        self._stats, self._trace = stats, tracer
        self._starts_copies = not _is_host(model.mesh.devices.flat[0])
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="detjax-dispatch")
        self._arrays: tuple = ()
        self._adjusted: AdjustedSlots | None = None
        self.reset()

    def reset(self) -> None:
        """Allocate everything anew. Nothing that was in it is known any more."""
        self.settle()
        model, programs = self._model, self._programs
        self._arrays, self._adjusted = (), None  # the old cache is freed first
        self._arrays = (
            (filled_pages if self._is_filled else empty_pages)(model, programs.num_pages),
            empty(model, slots_shape(model, programs.num_slots, programs.window_len)),
            empty(model, sampling_shape(model, programs.num_slots)),
        )

    def settle(self) -> None:
        """Wait until every program that was handed over has been called; they may still run."""
        self._thread.submit(int).result()

    @property
    def is_lost(self) -> bool:
        """Whether a call took the state and did not give it back: it raised, or had no memory."""
        self.settle()
        return not self._arrays or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._arrays))

    def run(
        self,
        name: str,
        program: Callable,
        params: dict,
        *operands: Any,
        text_len: int = 0,
        adjust: AdjustOperands | None = None,
    ) -> Future[jax.Array]:
        """Hand over a program, and return at once.

        Args:
            name: Of the program, for the timeline.
            program: Compiled.
            params: Its weights.
            operands: What it takes behind its state.
            text_len: Of a program with adjustments: tokens of a text that a slot has room for.
            adjust: Of such a program: what it has beside its other operands.

        Returns:
            Its result, when it has been called; the device may still be at it. What the call raises
            is raised by whoever asks for the result.
        """
        if adjust is not None and self._adjusted is None:
            shape = adjusted_shape(self._model, self._programs.num_slots, text_len)
            self._adjusted = empty(self._model, shape)
        return self._thread.submit(self._call, name, program, params, operands, adjust)

    def _call(
        self,
        name: str,
        program: Callable,
        params: dict,
        operands: tuple,
        adjust: AdjustOperands | None,
    ) -> jax.Array:
        begin_s = time.perf_counter()
        before, tables = self._arrays, self._model.rope_tables
        if adjust is None:
            *after, result = program(params, tables, *before, *operands)
        else:
            *after, self._adjusted, result = program(
                params, tables, *before, *operands, self._adjusted, adjust
            )
        # One store, so that nothing finds the cache of one step and the slots of another. Only a
        # prefill gives new sampling parameters.
        self._arrays = (*after, *before[len(after) :])
        if self._starts_copies:
            result.copy_to_host_async()
        end_s = time.perf_counter()
        self._stats.dispatch_s += end_s - begin_s
        self._trace.span(trace.DISPATCH, name, begin_s, end_s)
        return result

    def run_aside(
        self, program: Callable, params: dict, slots: Any, sampling: Any, *operands: Any
    ) -> tuple[Any, jax.Array]:
        """Call a program on the cache, with slots that are nobody's.

        Args:
            program: Compiled.
            params: Its weights.
            slots: Of all replicas; those of sequences stay as they are.
            sampling: Of these slots.
            operands: What it takes behind its state.

        Returns:
            The new slots, and the result.
        """
        return self._thread.submit(
            self._call_aside, program, params, slots, sampling, operands
        ).result()

    def _call_aside(
        self, program: Callable, params: dict, slots: Any, sampling: Any, operands: tuple
    ) -> tuple[Any, jax.Array]:
        cache, *others = self._arrays
        tables = self._model.rope_tables
        cache, new_slots, *_, result = program(params, tables, cache, slots, sampling, *operands)
        self._arrays = (cache, *others)
        return new_slots, result

    def checksums(self, pages: np.ndarray) -> list[jax.Array]:
        """A number for the content of each of these pages, int32 [dp, n]: `device.checksums`."""
        self.settle()
        return checksums(self._model.mesh, self._arrays[0], pages)
