# SPDX-License-Identifier: Apache-2.0
"""What stays on the devices from step to step, and the calls of the programs that change it."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax.compilation.loaded_code import one_moment
from detjax.engine import trace
from detjax.engine.config import DRAFTS_OF_OTHERS
from detjax.engine.metrics import EngineStats
from detjax.engine.running.device_arrays import (
    empty,
    empty_pages,
    rows_shape,
    sampling_shape,
    slots_shape,
)
from detjax.engine.running.draft_programs import DraftState
from detjax.engine.running.head_programs import HeadState
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.running.programs import ProgramCache
from detjax.engine.sampling.adjustments import num_words
from detjax.engine.self_check.device import checksums, filled_pages
from detjax.engine.self_check.filled_places import FilledPlaces
from detjax.models.loading import LoadedModel
from detjax.parallel.dispatch import finished, ordered
from detjax.parallel.mesh import DP_AXIS

Placed = np.ndarray | jax.Array
"""An operand, on the host or where it lies."""

Call = tuple[Callable, tuple]
"""A compiled program, and its operands from the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowUps:
    """What follows a forward program in the same launch; each is as `choice_programs` has it.

    Attributes:
        install: Puts adjustments into slots.
        choice: Chooses again, by all sampling parameters.
        reads_result: The choice program takes the forward program's result, as windows do.
        score: Computes logprobs of a prompt.
        draft_prefills: Prefills of the draft model, with its weights; before its own steps, and
            behind the program of another model.
    """

    install: Call | None = None
    choice: Call | None = None
    reads_result: bool = False
    score: Call | None = None
    draft_prefills: tuple[Call, ...] = ()


NO_FOLLOW_UPS = FollowUps()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchResult:
    """What a launch gives; NumPy arrays once it was read.

    Attributes:
        choice: int32, packed as `launch_operands` has it.
        scores: int32 [B, X] of a prompt, as `prompt_logprobs` has it; None if none were asked for.
    """

    choice: Any
    scores: Any = None

    def read(self) -> "LaunchResult":
        """Wait for it, and copy it to the host."""
        scores = None if self.scores is None else read_result(self.scores)
        return LaunchResult(choice=read_result(self.choice), scores=scores)


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

    Programs are called one after the other in a thread of its own, and in one order with those of
    other engines on these devices (`parallel.dispatch`). The thread starts the copies of their
    results to the host as well. That takes the host as long as a step of a small model takes the
    device, and Python's lock is free for most of it, so the engine plans and commits meanwhile.
    Whatever else looks at the state waits for the calls before it.

    Attributes:
        filled: Places of the cache that hold what it was filled with.
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
        self._devices = tuple(model.mesh.devices.flat)
        self._starts_copies = not _is_host(self._devices[0])
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="detjax-dispatch")
        self._arrays: tuple = ()
        self._adjusted: Any = None
        self._drafts: DraftState | HeadState | None = None
        # By rows: what programs leave for choice programs, read by nothing else.
        self._logits: dict[int, jax.Array] = {}
        self._no_bans: dict[int, jax.Array] = {}
        self.reset()

    @one_moment()
    def reset(self) -> None:
        """Allocate everything anew. Nothing that was in it is known any more."""
        self.settle()
        model, programs = self._model, self._programs
        self._arrays, self._adjusted, self._logits = (), None, {}  # the old cache is freed first
        self._drafts = None
        if programs.drafts is not None:
            self._drafts = programs.drafts.empty_state()
        self._adjusted = empty(model, programs.adjusted_shape)
        self.filled = FilledPlaces(is_known=self._is_filled)
        self._arrays = (
            (filled_pages if self._is_filled else empty_pages)(
                model, programs.num_pages, programs.num_local_pages
            ),
            empty(model, slots_shape(model, programs.num_slots, programs.window_len)),
            empty(model, sampling_shape(model, programs.num_slots)),
        )
        # WHY: a cache without memory would be told of by the first program that reads it.
        jax.block_until_ready(self._arrays)

    def release(self) -> None:
        """Free everything, until `reset`."""
        self.settle()
        self._arrays, self._adjusted, self._logits, self._no_bans = (), None, {}, {}
        self._drafts = None

    def settle(self) -> None:
        """Wait until every program that was handed over has been called; they may still run."""
        self._thread.submit(int).result()

    @property
    def is_lost(self) -> bool:
        """Whether a call took the state and did not give it back: it raised, or had no memory."""
        self.settle()
        state = self._arrays, self._adjusted, self._drafts
        return not self._arrays or any(leaf.is_deleted() for leaf in jax.tree.leaves(state))

    def prepare(self, keys: Iterable[ProgramKey]) -> None:
        """Allocate what programs and the choice programs behind them need, before they run."""
        for rows in {key.logit_rows for key in keys if key.logit_rows}:
            self._thread.submit(copy_context().run, self._logits_of, rows).result()
            self.no_bans(rows)

    def _logits_of(self, rows: int) -> jax.Array:
        if rows not in self._logits:
            self._logits[rows] = empty(self._model, self._programs.logits_shape(rows))
        return self._logits[rows]

    def no_bans(self, rows: int) -> jax.Array:
        """`banned` of a choice program where no row has a grammar, on the device."""
        if rows not in self._no_bans:
            model = self._model
            count = rows * model.mesh.shape[DP_AXIS]
            words = num_words(model.config.vocab_size)
            self._no_bans[rows] = empty(model, rows_shape(model, count, jnp.int32, words))
        return self._no_bans[rows]

    def run(
        self,
        key: ProgramKey,
        program: Callable,
        params: dict,
        *operands: Any,
        after: FollowUps = NO_FOLLOW_UPS,
    ) -> Future[LaunchResult]:
        """Hand over a forward program and what follows it, and return at once.

        Args:
            key: Of the program.
            program: Compiled.
            params: Its weights.
            operands: What it takes behind its state.
            after: What follows it.

        Returns:
            Its result, when it has been called; the device may still be at it. What the call raises
            is raised where the result is read.
        """
        self.filled.forget()
        return self._thread.submit(self._ordered(self._call), key, program, params, operands, after)

    def _call(
        self,
        key: ProgramKey,
        program: Callable,
        params: dict,
        operands: tuple,
        after: FollowUps,
    ) -> LaunchResult:
        begin_s = time.perf_counter()
        hidden = features = None
        if key.weights in DRAFTS_OF_OTHERS:
            self._prefill_drafts(after)
            choice = self._draft(program, params, operands)
        else:
            arrays, hidden, features, choice = self._forward(
                key, program, params, self._arrays, operands
            )
            # One store, so that nothing finds the cache of one step and the slots of another.
            self._arrays = arrays
        if after.install is not None:
            install, rows = after.install
            self._adjusted = finished(self._devices, install(self._adjusted, *rows))
        if after.choice is not None:
            cache, slots, sampling = self._arrays
            slots, self._adjusted, choice = self._choose(key, after, slots, sampling, choice)
            self._arrays = cache, slots, sampling
        scores = None
        if after.score is not None:
            score, given = after.score
            scores = finished(self._devices, score(params, hidden, *given))
        if key.weights not in DRAFTS_OF_OTHERS:
            self._prefill_drafts(after, features)
        result = LaunchResult(choice=choice, scores=scores)
        if self._starts_copies:
            for array in jax.tree.leaves((choice, scores)):
                array.copy_to_host_async()
        end_s = time.perf_counter()
        self._stats.dispatch_s += end_s - begin_s
        self._trace.span(trace.DISPATCH, key.name, begin_s, end_s)
        return result

    def _prefill_drafts(self, after: FollowUps, features: Any = None) -> None:
        """Call the prefills of the draft model, or of a head with what the prefill has left."""
        left = () if features is None else (features,)
        for prefill, (params, packed) in after.draft_prefills:
            assert self._programs.drafts is not None
            tables = self._programs.drafts.model.rope_tables
            called = prefill(params, tables, self._drafts, *left, packed)
            self._drafts = finished(self._devices, called)

    def _draft(self, program: Callable, params: dict, operands: tuple) -> Any:
        """Call a step of the draft model, which puts drafts into slots; its result."""
        assert self._programs.drafts is not None
        cache, slots, sampling = self._arrays
        tables = self._programs.drafts.model.rope_tables
        called = program(params, tables, self._drafts, slots, sampling, *operands)
        self._drafts, slots, result = finished(self._devices, called)
        self._arrays = cache, slots, sampling
        return result

    def _forward(
        self, key: ProgramKey, program: Callable, params: dict, arrays: tuple, operands: tuple
    ) -> tuple[tuple, Any, Any, Any]:
        """Call a forward program: (cache, slots, sampling; hidden states; features; result).

        A verification puts its features into slots, and gives none. Those of a check are of
        nobody; at worst a sequence is drafted worse once.
        """
        if key.kind == "windows":
            return self._windows(program, params, arrays, operands)
        puts = key.leaves_features and key.kind == "verify"
        left = [self._logits_of(key.logit_rows)] if key.logit_rows else []
        tables = self._model.rope_tables
        old = (self._drafts.features,) if puts and isinstance(self._drafts, HeadState) else ()
        called = program(params, tables, *arrays, *left, *old, *operands)
        *state, result = finished(self._devices, called)
        features = state.pop() if key.leaves_features else None
        if puts and isinstance(self._drafts, HeadState):
            self._drafts = dataclasses.replace(self._drafts, features=features)
            features = None
        hidden = state.pop() if key.leaves_hidden else None
        if left:
            self._logits[key.logit_rows] = state.pop()
        # Only a prefill gives new sampling parameters.
        return (*state, *arrays[len(state) :]), hidden, features, result

    def _windows(
        self, program: Callable, params: dict, arrays: tuple, operands: tuple
    ) -> tuple[tuple, None, None, Any]:
        """Call a program of several windows, which changes what the draft model keeps as well.

        A check has slots that sequences have, too: these may be drafted worse for it.
        """
        assert self._programs.drafts is not None
        tables = self._model.rope_tables, self._programs.drafts.model.rope_tables
        called = program(params, tables, *arrays, self._drafts, *operands)
        cache, slots, self._drafts, result = finished(self._devices, called)
        return (cache, slots, arrays[2]), None, None, result

    def _choose(
        self, key: ProgramKey, after: FollowUps, slots: Any, sampling: Any, result: Any
    ) -> tuple[Any, Any, Any]:
        """Call a choice program: (slots, adjusted slots, result)."""
        assert after.choice is not None
        choose, rows = after.choice
        read = (result,) if after.reads_result else ()
        logits = self._logits[key.logit_rows]
        chosen = choose(slots, sampling, self._adjusted, logits, *rows, *read)
        return finished(self._devices, chosen)

    def run_check(
        self,
        key: ProgramKey,
        program: Callable,
        params: dict,
        slots: Any,
        sampling: Any,
        *operands: Any,
        after: FollowUps = NO_FOLLOW_UPS,
    ) -> tuple[Any, jax.Array]:
        """Call a program on the cache, with scratch slots, which no sequence has.

        Args:
            key: Of the program.
            program: Compiled.
            params: Its weights.
            slots: Of all replicas; those of sequences stay as they are.
            sampling: Of these slots.
            operands: What it takes behind its state.
            after: A choice program for rows without adjustments, or nothing.

        Returns:
            The new slots, and the result.
        """
        return self._thread.submit(
            self._ordered(self._call_check),
            key,
            program,
            params,
            (slots, sampling),
            operands,
            after,
        ).result()

    def _call_check(
        self,
        key: ProgramKey,
        program: Callable,
        params: dict,
        scratch: tuple,
        operands: tuple,
        after: FollowUps,
    ) -> tuple[Any, jax.Array]:
        cache, *others = self._arrays
        arrays, _, _, result = self._forward(key, program, params, (cache, *scratch), operands)
        cache, slots, sampling = arrays
        self._arrays = (cache, *others)
        if after.choice is not None:
            slots, self._adjusted, result = self._choose(key, after, slots, sampling, result)
        return slots, result

    def checksums(self, pages: np.ndarray, local_pages: np.ndarray | None) -> list[list[jax.Array]]:
        """A number for the content of each of these pages, int32 [dp, n]: `device.checksums`."""
        self.settle()
        return self._ordered(checksums)(self._model.mesh, self._arrays[0], pages, local_pages)

    def _ordered[**P, R](self, call: Callable[P, R]) -> Callable[P, R]:
        return ordered(self._devices, call)
