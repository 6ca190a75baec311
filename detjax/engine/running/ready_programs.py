# SPDX-License-Identifier: Apache-2.0
"""The programs of an engine, each compiled and compared with prefill before it first runs."""

import dataclasses
import itertools
import logging
import os
import time
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax.compilation.loaded_code import one_moment, this_moment
from detjax.engine import trace
from detjax.engine.config import ReplicaConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.requests.request import Request
from detjax.engine.running.choice_programs import pack_windows
from detjax.engine.running.compile_workers import CompileWorkers, num_workers
from detjax.engine.running.device_arrays import pages_shape
from detjax.engine.running.device_state import NO_FOLLOW_UPS, DeviceState, FollowUps
from detjax.engine.running.launch_operands import VerifyOperands, slot_of
from detjax.engine.running.program_key import (
    CHOICES,
    AnyKey,
    ChoiceKey,
    ProgramKey,
    choice_keys,
    keys_of_requests,
    program_keys,
)
from detjax.engine.running.programs import DRAFTS, ProgramCache
from detjax.engine.self_check.claim import Claim
from detjax.engine.self_check.device import checksum_program
from detjax.engine.self_check.probes import IdlePages
from detjax.engine.self_check.program_check import (
    check_programs,
    checkable_keys,
    leaves_for,
    rank_in_check,
)
from detjax.engine.self_check.session import CheckContext
from detjax.interpreter_exit import refuse_at_exit
from detjax.models.fast import quantise_params
from detjax.models.loading import LoadedModel
from detjax.models.params import Params

LOG = logging.getLogger(__name__)
"""Says what is compiled while requests wait."""


def ignore_progress(name: str, done: int, total: int) -> None:
    """Show nothing."""


GivesIdlePages = Callable[[int], tuple[list[list[int]], list[list[int]] | None]]
"""Pages of each replica that nobody holds, at least so many if there are; and those of local
layers, None where these have the pages of the others."""

_LEAST_IDLE = 12
"""Pages that a check of programs wants on each replica, though cached ones are evicted for it."""


class ReadyPrograms:
    """Compiles programs, ahead or when they are first needed, and checks those that make a claim.

    Attributes:
        cache: The compiled programs, which other engines of these sizes may share.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: ReplicaConfig,
        cache: ProgramCache,
        device: DeviceState,
        *,
        claim: Claim,
        idle_pages: GivesIdlePages,
        stats: EngineStats,
        tracer: trace.TracesEvents,
    ):
        """Compile nothing yet.

        Args:
            model: On its mesh.
            config: Of each replica.
            cache: Where programs are compiled and kept.
            device: Where a check runs them.
            claim: Is told what a check finds.
            idle_pages: Of the scheduler.
            stats: Where compilations are counted.
            tracer: Keeps a timeline.
        """
        self._model, self._config, self._stats, self._trace = model, config, stats, tracer
        self.cache, self._device = cache, device
        self._claim, self._idle_pages = claim, idle_pages
        self._workers: CompileWorkers | None = None
        self._checkable = frozenset(checkable_keys(config))
        self._drafts_on_host: Params | None = None
        self.take_weights()

    def take_weights(self) -> None:
        """Use the model's weights as they are now, in 8 bits for drafts that want it.

        Those of a draft model come back where `drop_drafts` has put them away.
        """
        self._draft_params = self._model.params
        if self.cache.drafts is not None:
            if self._drafts_on_host is not None:
                self.cache.drafts.model.put_weights_back(self._drafts_on_host)
                self._drafts_on_host = None
            self._draft_params = self.cache.drafts.params_beside(self._model.params)
        elif self._config.draft_weights != "full":
            dtype = jnp.dtype(self._config.draft_weights)
            self._draft_params = quantise_params(self._model.params, dtype)

    def drop_drafts(self) -> None:
        """Free the weights of drafts until `take_weights`; the host keeps a draft model's."""
        self._draft_params = self._model.params
        if self.cache.drafts is not None and self._drafts_on_host is None:
            self._drafts_on_host = self.cache.drafts.model.take_weights_to_host()

    def params_of(self, key: AnyKey) -> dict:
        """The weights that a program takes."""
        if not isinstance(key, ProgramKey):
            return self._model.params
        if key.kind == "windows":
            return {**self._model.params, DRAFTS: self._draft_params}
        return self._model.params if key.weights == "full" else self._draft_params

    # ------------------------------------------------------------------------------------ compiling

    @one_moment()
    def compile(
        self,
        progress: Callable[[str, int, int], None],
        requests: abc.Sequence[Request] | None,
        checked: Callable[[str, int, int], None],
    ) -> None:
        """Compile the programs that requests can need, several at a time: see `Engine.compile`."""
        keys = program_keys(self._config)
        wanted: list[AnyKey] = [*self._as_checked(keys), *choice_keys(self._config)]
        if requests is not None:
            wanted = keys_of_requests(self._config, wanted, requests)
            keys = [key for key in keys if key in wanted]
        missing = [key for key in wanted if key not in self.cache]
        self._device.prepare(keys)
        # Of several GPUs nothing has shown yet that programs may run while others are compiled.
        mesh = self._model.mesh
        checks_early = mesh.size == 1 or self._model.backend.platform == "cpu"
        begin_s, asked = time.perf_counter(), this_moment()
        self._workers = workers = self._start_workers(missing)
        num_threads = max(4, os.cpu_count() or 1)
        with workers or nullcontext(), ThreadPoolExecutor(max_workers=1 + num_threads) as pool:
            if self._config.self_check != "off":
                cache = pages_shape(self._model, self.cache.num_pages, self.cache.num_local_pages)
                for leaf in jax.tree.leaves(cache):
                    here = copy_context()
                    pool.submit(here.run, checksum_program, mesh, leaf.shape, leaf.dtype)
            # Each program is checked when it is there, while others are still compiled.
            checking = None
            if checks_early:
                checking = pool.submit(copy_context().run, self._check_new, wanted, checked)
            futures = {key: pool.submit(self._get, key, asked) for key in missing}
            for done, (key, future) in enumerate(futures.items(), start=1):
                future.result()
                progress(key.name, done, len(missing))
            self._count_compiled(len(missing), begin_s)
            begin_s = time.perf_counter()
            if checking is None:
                num_checked = self._check_new(wanted, checked)
            else:
                num_checked = checking.result()
        self._note_checking(num_checked, begin_s)

    def _start_workers(self, missing: abc.Sequence[AnyKey]) -> CompileWorkers | None:
        """Processes that compile these programs, where they pay."""
        count = num_workers(self._model, self.cache, missing)
        if not count:
            return None
        try:
            return CompileWorkers(self._model, self.cache, missing, count)
        except OSError as error:
            LOG.warning("programs are compiled by one process, as no other starts: %s", error)
            return None

    def _as_checked(self, keys: abc.Sequence[ProgramKey]) -> list[ProgramKey]:
        """In the order in which a check of all wants them."""
        # WHY: a check that waits for the last program begins when all others are there: it ends
        # 1.3 s after them in a start of 8B shapes that reads what it compiled before, 0.6 so.
        reference = min(self._config.prefill_shapes)

        def rank(key: ProgramKey) -> tuple:
            is_reference = key.kind == "prefill" and (key.rows, key.length) == reference
            return key.leaves_hidden, not is_reference, rank_in_check(key)

        return sorted(keys, key=rank)

    def _get(self, key: AnyKey, asked: int | None = None) -> Callable:
        refuse_at_exit()
        if self._workers is not None:
            self._workers.wait(key)
        return self.cache.get(key, self.params_of(key), asked)

    def get(self, key: AnyKey) -> Callable:
        """A program, compiled and checked if need be: where nobody has called `compile`."""
        if key not in self.cache:
            begin_s = time.perf_counter()
            self._stats.compiling = key.name
            LOG.info("all requests wait for a program that is compiled now: %s", key.name)
            try:
                self._get(key)
            finally:
                self._stats.compiling = ""
            self._count_compiled(1, begin_s)
            LOG.info("compiled after %.1f s: %s", time.perf_counter() - begin_s, key.name)
        begin_s = time.perf_counter()
        self._note_checking(self._check_new((key,), ignore_progress), begin_s)
        return self._get(key)

    def _count_compiled(self, count: int, begin_s: float) -> None:
        end_s = time.perf_counter()
        self._stats.num_compiled += count
        self._stats.compile_s += end_s - begin_s
        self._trace.span(trace.HOST, "compile", begin_s, end_s, programs=count)

    # ------------------------------------------------------------------------------------- checking

    def _check_new(
        self, keys: abc.Sequence[AnyKey], progress: Callable[[str, int, int], None]
    ) -> int:
        """Compare the programs among these that make a claim with prefill, once each.

        Waits for those that are still compiled. `progress` is told (what, done, total).

        Returns:
            How many there were.
        """
        if self._config.self_check == "off":
            return 0
        new = [key for key in keys if key in self._checkable and key not in self.cache.checked]
        forward = [key for key in new if isinstance(key, ProgramKey)]
        choices = [key for key in new if isinstance(key, ChoiceKey)]
        count = itertools.count(1)

        def checked(key: AnyKey) -> None:
            progress(key.name, next(count), len(new))

        if forward:
            self.cache.checked.update(self._check(forward, None, checked))
        for kind in CHOICES:
            some = [key for key in choices if (key.with_filters, key.num_top) == kind]
            known = {leaves_for(key, self._own(keys)): key for key in some}
            if before := [key for key in known if key is not None]:
                done = self._check(before, kind, lambda key, known=known: checked(known[key]))
                self.cache.checked.update(known[key] for key in done)
        self._stats.num_self_checked += sum(key in self.cache.checked for key in new)
        return len(new)

    def _check(
        self,
        keys: abc.Sequence[ProgramKey],
        choice: tuple[bool, int] | None,
        on_checked: Callable[[ProgramKey], None],
    ) -> list[ProgramKey]:
        """Compare programs, with choice programs of a kind behind them or alone; the checked."""
        idle, local = self._idle()
        context = CheckContext(
            run=self.run_check,
            checksums=self._device.checksums,
            idle=idle,
            local_idle=local,
            filled=self._device.filled,
        )
        reference = self._reference_key(keys)
        done, found = check_programs(
            self._model, self._config, keys, reference, context,
            choice=choice, on_checked=on_checked,
        )  # fmt: skip
        self._claim.note(found)
        return done

    def _note_checking(self, count: int, begin_s: float) -> None:
        if not count:
            return
        end_s = time.perf_counter()
        self._stats.num_self_unchecked = sum(key not in self.cache.checked for key in self._own(()))
        self._stats.self_check_s += end_s - begin_s
        self._trace.span(trace.HOST, "self-check", begin_s, end_s, programs=count)

    def _reference_key(self, keys: abc.Sequence[ProgramKey]) -> ProgramKey:
        """The prefill of the fewest tokens, of those that are compiled or among `keys`."""
        own = self._own((*keys, *program_keys(self._config)[:1]))
        known = [key for key in own if isinstance(key, ProgramKey) and key.kind == "prefill"]
        return min(known, key=lambda key: (key.leaves_hidden, key.rows, key.length))

    def _own(self, keys: abc.Iterable[AnyKey]) -> list[AnyKey]:
        """The programs that are compiled or among `keys` and that this configuration can check.

        WHY: another engine that shares the cache may have shorter page tables. A position behind
        their end has no page, and a kernel would write at an address that is none.
        """
        return [key for key in (*self.cache, *keys) if key in self._checkable]

    def _idle(self) -> tuple[IdlePages, IdlePages | None]:
        """Pages that nobody holds, and those of local layers if they have their own."""
        idle, local = self._idle_pages(_LEAST_IDLE)
        of_all = _alike(idle, self._config.num_pages)
        return of_all, None if local is None else _alike(local, self._config.num_local_pages)

    def run_check(
        self, key: ProgramKey, slots, sampling, *host, choice: tuple[bool, int] | None = None
    ) -> tuple[Any, jax.Array]:
        """Launch a program on the cache, with scratch slots: `DeviceState.run_check`.

        `choice` is of `CHOICES`: the choice program that follows, for rows without adjustments.
        """
        after = NO_FOLLOW_UPS if choice is None else self._check_choice(key, choice, host[0])
        return self._device.run_check(
            key, self._get(key), self.params_of(key), slots, sampling, *host, after=after
        )

    def _check_choice(self, key: ProgramKey, choice: tuple[bool, int], packed) -> FollowUps:
        """A choice program for the rows of packed operands."""
        size, no_slot = key.logit_rows, self._config.num_slots
        choice_key = ChoiceKey(rows=size, length=1, with_filters=choice[0], num_top=choice[1])
        if key.kind == "verify":
            given = VerifyOperands.unpack(packed, table_len=key.table_len, length=key.length)
            choice_key = dataclasses.replace(choice_key, rows=key.rows, length=key.length)
            windows = pack_windows(given, np.full(len(packed), no_slot, np.int32))
            return FollowUps(choice=(self._get(choice_key), (windows,)), reads_result=True)
        slots = np.full((self._config.num_replicas, size, 2), no_slot, np.int32)
        slots[:, : key.rows, 0] = slot_of(packed).reshape(-1, key.rows)
        operands = slots.reshape(-1, 2), self._device.no_bans(size)
        return FollowUps(choice=(self._get(choice_key), operands))


def _alike(idle: abc.Sequence[abc.Sequence[int]], num_pages: int) -> IdlePages:
    """As many idle pages of each replica."""
    count = min(map(len, idle))
    pages = np.asarray([pages[:count] for pages in idle], np.int32).reshape(len(idle), count)
    return IdlePages(pages=pages, num_pages=num_pages)
