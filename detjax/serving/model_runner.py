# SPDX-License-Identifier: Apache-2.0
"""A plan on its way to the device: its rows become arrays, the arrays a program's operands.

What a step needs of the step before stays on the device: the slots, and the pages of the cache.
"""

import os
import signal
import threading
import time
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from detjax.models.fast import quantise_params
from detjax.models.loading import LoadedModel
from detjax.models.paths import Kernels
from detjax.serving import trace
from detjax.serving.config import EngineConfig, ReplicaSizes
from detjax.serving.metrics import EngineStats
from detjax.serving.programs import (
    BY_ROW,
    Candidates,
    ProgramCache,
    ProgramKey,
    ProgramKind,
    ProgramSizes,
    empty,
    empty_pages,
    sampling_shape,
    slots_shape,
)
from detjax.serving.request import SamplingParams
from detjax.serving.sampling import SamplingRows
from detjax.serving.scheduler import (
    DecodeRow,
    PrefillRow,
    Row,
    ScheduledBatch,
    Sequence,
    VerifyRow,
    blaming,
)

_IDLE: tuple[SamplingParams, int] = (SamplingParams(), 0)


class _HeldInterrupts:
    """Lets Ctrl-C wait until the block is left: what is in it happens wholly or not at all.

    Python's main thread alone is interrupted, so elsewhere there is nothing to hold.
    """

    def __enter__(self):
        self._held: list[tuple] = []
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                signal.signal(signal.SIGINT, self._hold)
                self._handler = handler

    def _hold(self, *interrupt) -> None:
        self._held.append(interrupt)

    def __exit__(self, *_):
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._held:
                self._handler(*self._held[-1])


def ignore_compiling(name: str, done: int, total: int) -> None:
    """Show nothing."""


@runtime_checkable
class Wants(Protocol):
    """What a sequence asks of the programs that compute its tokens."""

    @property
    def is_filtered(self) -> bool:
        """Whether it has a top-k, top-p or min-p."""
        ...

    @property
    def num_top(self) -> int:
        """Top logprobs that it wants."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A program that was handed to the device. `rows` are by replica."""

    step: ProgramKey
    rows: abc.Sequence[abc.Sequence[Row]]
    result: jax.Array
    launched_s: float


def places[T: Row](
    step: ProgramKey, rows: abc.Sequence[abc.Sequence[T]]
) -> Iterator[tuple[int, T]]:
    """(row of the program, row of the plan)."""
    for replica, part in enumerate(rows):
        for i, row in enumerate(part):
            yield replica * step.rows + i, row


class ModelRunner:
    """The device's side of an engine: weights, programs, cache and slots.

    Attributes:
        programs: The compiled programs, which other engines of these sizes may share.
        min_top: Top logprobs that every program reports at least.
        always_filters: Whether every program filters.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        sizes: ReplicaSizes,
        *,
        dp: int,
        max_draft_fraction: float,
        candidates: Candidates,
        programs: ProgramCache | None,
        wants: Mapping[Sequence, Wants],
        stats: EngineStats,
        tracer: trace.TracesEvents,
    ):
        """Allocate the cache.

        Args:
            model: On its mesh.
            config: Of the engine.
            sizes: Of each of the `dp` replicas.
            dp: Replicas.
            max_draft_fraction: As `config.max_draft_fraction`, where it is given.
            candidates: Replaces the drafts of `dvr`.
            programs: Programs to share, or None.
            wants: Of every sequence that runs; read at each launch.
            stats: Where launches and compilations are counted.
            tracer: Keeps a timeline.

        Raises:
            ValueError: If `programs` are of another model or other sizes.
        """
        self._model, self._config, self._sizes = model, config, sizes
        self._dp, self._draft_share = dp, max_draft_fraction
        self._wants, self._stats, self._trace = wants, stats, tracer
        program_sizes = ProgramSizes(
            num_pages=dp * sizes.num_pages,
            num_slots=config.batch_size,
            window_len=config.verify_window,
        )
        self.programs = programs or ProgramCache(model, program_sizes, candidates=candidates)
        if self.programs.sizes != program_sizes or not self.programs.is_for(model):
            raise ValueError(
                f"programs={self.programs.sizes} are not of this model and {program_sizes}"
            )
        self.min_top, self.always_filters = 0, False
        self.take_weights()
        self.reset()
        # What each slot's row of the page table holds, and how much of it is up to date.
        self._tables = np.zeros((dp, sizes.num_slots, sizes.table_len), np.int32)
        self._num_synced = np.zeros((dp, sizes.num_slots), np.int32)
        self._last_rows: dict[ProgramKey, tuple[np.ndarray, jax.Array | None]] = {}

    def reset(self) -> None:
        """Allocate the cache and the slots anew. Nothing that was in them is known any more."""
        model, num_slots = self._model, self._config.batch_size
        self._state = ()  # the old cache is freed first
        self._state = (
            empty_pages(model, self.programs.sizes.num_pages),
            empty(model, slots_shape(model, num_slots, self._config.verify_window)),
            empty(model, sampling_shape(model, num_slots)),
        )

    @property
    def is_lost(self) -> bool:
        """Whether an interrupted launch took the cache and did not give it back.

        A launch donates it, and stores the new one while interrupts are held. So only what else
        may raise in between does this, as an exception that one thread sets in another.
        """
        return not self._state or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))

    def take_weights(self) -> None:
        """Use the model's weights as they are now, in 8 bits for drafts that want it."""
        self._draft_params = self._model.params
        if self._config.draft_weights != "full":
            dtype = jnp.dtype(self._config.draft_weights)
            self._draft_params = quantise_params(self._model.params, dtype)

    # ------------------------------------------------------------------------------------ launching

    def launch(self, batch: ScheduledBatch) -> list[Launch]:
        """Hand the programs of a step to the device, in the order in which they must run."""
        launches = []
        if any(batch.verifies):
            launches.append(self._launch_verify(batch.verifies))
        if any(batch.prefills):
            assert batch.prefill_shape is not None
            launches.append(self._launch_prefill(batch.prefills, batch.prefill_shape))
        if any(batch.decodes):
            launches += self._launch_decodes(batch.decodes)
        return launches

    def _launch_prefill(self, rows: list[list[PrefillRow]], shape: tuple[int, int]) -> Launch:
        kernels: Kernels = "fast" if self._config.mode == "fast" else "invariant"
        step = self._step("prefill", rows, size=shape[0], length=shape[1], kernels=kernels)
        host = self._host_rows(step)
        head, table, ids = (part(host) for part in _parts(step))
        sampling = [_IDLE] * len(host)
        for at, row in places(step, rows):
            seq = row.seq
            count = len(row.token_ids)
            self._sync_pages(seq, is_new=True)
            # The token that follows an unfinished prompt is not wanted: no such slot.
            slot = seq.slot if row.is_last else self._sizes.num_slots
            head[at] = slot, row.start, count
            table[at] = self._tables[seq.replica, seq.slot]
            with blaming(seq):
                ids[at, :count] = row.token_ids
            sampling[at] = (seq.request.sampling, seq.sequence_idx)
            self._stats.prefill_tokens += count
        return self._run(step, rows, host, SamplingRows.pack(sampling))

    def _launch_decodes(self, rows: list[list[DecodeRow]]) -> list[Launch]:
        """One launch; two where drafts have weights of their own and others decode too."""
        if self._config.draft_weights == "full":
            return [self._launch_decode(rows, weights="full")]
        launches = []
        for is_draft in (False, True):
            some = [[r for r in part if r.is_draft is is_draft] for part in rows]
            if any(some):
                weights = self._config.draft_weights if is_draft else "full"
                launches.append(self._launch_decode(some, weights=weights))
        return launches

    def _launch_decode(self, rows: list[list[DecodeRow]], *, weights: str) -> Launch:
        """A token of each row, or up to `decode_steps`."""
        size = _smallest(self._sizes.decode_sizes, rows)
        most_tokens = max(row.num_tokens for part in rows for row in part)
        length = self._config.decode_steps if most_tokens > 1 else 1
        is_committed = any(row.seq.is_drafted and not row.is_draft for part in rows for row in part)
        is_canonical = self._config.mode == "invariant" or is_committed
        kernels: Kernels = "invariant" if is_canonical else "fast"
        step = self._step(
            "decode", rows, size=size, length=length, kernels=kernels, weights=weights
        )
        host = self._host_rows(step)
        head, table, _ = (part(host) for part in _parts(step))
        for replica, part in enumerate(rows):
            for row in part:
                self._sync_pages(row.seq, is_new=False)
            if part:
                at = slice(replica * size, replica * size + len(part))
                slots = [r.seq.slot for r in part]
                head[at, 0] = slots
                head[at, 1] = [r.offset if r.is_draft else -1 for r in part]
                head[at, 2] = [r.num_tokens for r in part]
                table[at] = self._tables[replica, slots, : step.table_len]
        return self._run(step, rows, self._placed(step, host))

    def _placed(self, step: ProgramKey, host: np.ndarray) -> np.ndarray | jax.Array:
        """The rows of a decode step, on the devices if they are those of the last such step.

        Until a sequence needs a page they do not change, and what stays where it is needs no
        transfer and no new address in the CUDA graph.
        """
        if jax.process_count() > 1:  # placing is collective there
            return host
        last, placed = self._last_rows.get(step, (None, None))
        if last is None or not np.array_equal(last, host):
            self._last_rows[step] = host, None
            return host
        if placed is None:
            placed = jax.device_put(host, NamedSharding(self._model.mesh, BY_ROW))
            self._last_rows[step] = host, placed
        return placed

    def _launch_verify(self, rows: list[list[VerifyRow]]) -> Launch:
        size, length = _smallest(self._sizes.verify_sizes, rows), self._config.verify_window
        step = self._step("verify", rows, size=size, length=length, kernels="invariant")
        host = self._host_rows(step)
        head, table, ids = (part(host) for part in _parts(step))
        for at, row in places(step, rows):
            self._sync_pages(row.seq, is_new=False)
            head[at] = row.seq.slot, row.num_drafts, row.given is not None
            table[at] = self._tables[row.seq.replica, row.seq.slot, : step.table_len]
            if row.given is not None:
                with blaming(row.seq):
                    ids[at, 1 : 1 + len(row.given)] = row.given
        self._stats.verify_launches += 1
        return self._run(step, rows, host)

    def _step(
        self,
        kind: ProgramKind,
        rows: abc.Sequence[abc.Sequence[Row]],
        *,
        size: int,
        length: int,
        kernels: Kernels,
        weights: str = "full",
    ) -> ProgramKey:
        wants = [self._wants[row.seq] for part in rows for row in part]
        longest = max(len(row.seq.pages) for part in rows for row in part)
        return ProgramKey(
            kind=kind,
            rows=size,
            length=length,
            table_len=next(n for n in _tables_of(kind, self._sizes) if n >= longest),
            mode=kernels,
            weights=weights,
            num_top=_rounded_top(max(self.min_top, *(want.num_top for want in wants))),
            with_filters=self.always_filters or any(want.is_filtered for want in wants),
        )

    def _host_rows(self, step: ProgramKey) -> np.ndarray:
        """Rows of padding: no slot, no page, no token."""
        return step.layout.padding(self._dp * step.rows, self._sizes.num_slots)

    def _sync_pages(self, seq: Sequence, *, is_new: bool) -> None:
        """Bring the slot's row of the page table up to date."""
        at = seq.replica, seq.slot
        first, count = 0 if is_new else self._num_synced[at], len(seq.pages)
        if first != count:
            self._tables[at][first:count] = seq.pages[first:]
            self._num_synced[at] = count

    def _run(self, step: ProgramKey, rows, *host) -> Launch:
        program = self._program(step)
        params = self._params_of(step)
        launched_s = time.perf_counter()
        with _HeldInterrupts():
            *state, result = program(params, self._model.rope_tables, *self._state, *host)
            # One store, so that nothing finds the cache of one step and the slots of another. Only
            # a prefill gives new parameters.
            self._state = (*state, *self._state[len(state) :])
        result.copy_to_host_async()
        self._stats.num_launches += 1
        return Launch(step=step, rows=rows, result=result, launched_s=launched_s)

    # ------------------------------------------------------------------------------------ compiling

    def compile(
        self,
        progress: Callable[[str, int, int], None] = ignore_compiling,
        *,
        with_filters: bool = False,
    ) -> None:
        """Compile the steps that requests will need, several at a time.

        Top logprobs are compiled when a request first asks for them, and so are filters.

        Args:
            progress: Told (what, done, total).
            with_filters: Compile for requests with a top-k, top-p or min-p, too.
        """
        variants = (False, True) if with_filters else (False,)
        steps = [
            step
            for variant in variants
            for step in program_keys(
                self._config,
                self._sizes,
                max_draft_fraction=self._draft_share,
                with_filters=variant,
            )
        ]
        wanted = [step for step in steps if step not in self.programs]
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(max_workers=max(4, os.cpu_count() or 1)) as pool:
            futures = {step: pool.submit(self._get, step) for step in wanted}
            for done, (step, future) in enumerate(futures.items(), start=1):
                future.result()
                progress(step.name, done, len(wanted))
        self._count_compiled(len(wanted), begin_s)

    def _get(self, step: ProgramKey) -> Callable:
        return self.programs.get(step, self._params_of(step))

    def _params_of(self, step: ProgramKey) -> dict:
        return self._model.params if step.weights == "full" else self._draft_params

    def _program(self, step: ProgramKey) -> Callable:
        if step not in self.programs:
            begin_s = time.perf_counter()
            self._get(step)
            self._count_compiled(1, begin_s)
        return self._get(step)

    def _count_compiled(self, count: int, begin_s: float) -> None:
        end_s = time.perf_counter()
        self._stats.num_compiled += count
        self._stats.compile_s += end_s - begin_s
        self._trace.span(trace.HOST, "compile", begin_s, end_s, programs=count)


def program_keys(
    config: EngineConfig,
    sizes: ReplicaSizes,
    *,
    max_draft_fraction: float,
    with_filters: bool = False,
) -> list[ProgramKey]:
    """The programs that requests without top logprobs need, in the order of their first use."""
    steps = []

    def add(kind: ProgramKind, rows: int, length: int, kernels: Kernels, weights="full"):
        steps.extend(
            ProgramKey(
                kind=kind,
                rows=rows,
                length=length,
                table_len=table_len,
                mode=kernels,
                weights=weights,
                num_top=0,
                with_filters=with_filters,
            )
            for table_len in _tables_of(kind, sizes)
        )

    for rows, length in sizes.prefill_shapes:
        add("prefill", rows, length, "fast" if config.mode == "fast" else "invariant")
    for rows in sizes.decode_sizes:
        for length in sorted({1, config.decode_steps}):
            if config.mode == "invariant" or config.mode == "dvr" and max_draft_fraction < 1:
                add("decode", rows, length, "invariant")
            if config.mode != "invariant":
                add("decode", rows, length, "fast")
            if config.draft_weights != "full":
                add("decode", rows, length, "fast", config.draft_weights)
    is_drafting = config.mode == "dvr" and max_draft_fraction > 0
    if is_drafting or config.has_prompt_lookup:
        for rows in sizes.verify_sizes:
            add("verify", rows, config.verify_window, "invariant")
    return steps


def _tables_of(kind: ProgramKind, sizes: ReplicaSizes) -> tuple[int, ...]:
    """Widths of the page table for which a kind of step is compiled, ascending.

    Rows of a prefill are few, and its speed does not depend on the table's width.
    """
    return (sizes.table_len,) if kind == "prefill" else sizes.table_lens


def _parts(step: ProgramKey) -> tuple[Callable, Callable, Callable]:
    """How to find the head, the page table and the token ids in a step's host array."""
    return step.layout.head, step.layout.table, step.layout.ids


def _smallest(sizes: abc.Sequence[int], rows: abc.Sequence[abc.Sequence[Row]]) -> int:
    """The smallest of `sizes`, which ascend, that holds the rows of every replica."""
    most = max(len(part) for part in rows)
    return next(size for size in sizes if size >= most)


def _rounded_top(num_top: int) -> int:
    """Few sizes, so that few programs are compiled: 0, 4, 16 or 64."""
    return next(size for size in (0, 4, 16, 64) if size >= num_top)
