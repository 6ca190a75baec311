# SPDX-License-Identifier: Apache-2.0
"""A batch on its way to the device: its rows become arrays, the arrays a program's operands.

What a step needs of the step before stays on the device: the slots, and the pages of the cache.
"""

import dataclasses
import logging
import os
import time
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax.compilation.loaded_code import this_moment
from detjax.engine import trace
from detjax.engine.config import ReplicaConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.requests.request import Request, SamplingParams
from detjax.engine.requests.sequence import (
    DecodeRow,
    PrefillRow,
    Row,
    ScheduledBatch,
    Sequence,
    VerifyRow,
    blaming,
    max_committed,
)
from detjax.engine.running.choice_programs import pack_windows
from detjax.engine.running.compile_workers import CompileWorkers, num_workers
from detjax.engine.running.device_arrays import pages_shape
from detjax.engine.running.device_state import (
    NOTHING_AFTER,
    Aftermath,
    Call,
    DeviceState,
    LaunchResult,
    Placed,
)
from detjax.engine.running.launch_operands import (
    DecodeOperands,
    PrefillOperands,
    VerifyOperands,
    slot_of,
)
from detjax.engine.running.placed_rows import PlacedRows
from detjax.engine.running.program_key import (
    CHOICES,
    AnyKey,
    ChoiceKey,
    InstallKey,
    ProgramKey,
    ProgramKind,
    ScoreKey,
    choice_keys,
    choice_of,
    install_rows,
    keys_of_requests,
    logit_rows,
    prefill_mode,
    program_keys,
    score_top_of,
    table_lens,
)
from detjax.engine.running.programs import Candidates, ProgramCache
from detjax.engine.sampling.adjustments import (
    AdjustedRows,
    count_uses,
    num_words,
    pack_record,
    recent_tokens,
)
from detjax.engine.sampling.guides import SEEN_TO
from detjax.engine.sampling.sampling import SamplingRows
from detjax.engine.self_check.claim import Claim
from detjax.engine.self_check.device import checksum_program
from detjax.engine.self_check.program_check import (
    check_programs,
    checkable_keys,
    is_checkable,
    leaves_for,
    rank_in_check,
)
from detjax.engine.self_check.session import Reach
from detjax.models.fast import quantise_params
from detjax.models.loading import LoadedModel
from detjax.models.paths import Kernels

LOG = logging.getLogger(__name__)
"""Says what is compiled while requests wait."""

_IDLE: tuple[SamplingParams, int] = (SamplingParams(), 0)
_LEAST_IDLE = 12
"""Pages that a check of programs wants on each replica, though cached ones are evicted for it."""


def ignore_compiling(name: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A program that was handed over, with its operands from the host.

    Attributes:
        key: Of the forward program.
        rows: By replica.
        operands: From the host.
        result: Of the forward program and what follows it.
        launched_s: When it was handed over.
        num_top: How many top logprobs it reports.
        num_prompt_top: How many top logprobs of a prompt it reports.
    """

    key: ProgramKey
    rows: abc.Sequence[abc.Sequence[Row]]
    operands: Any
    result: Future[LaunchResult]
    launched_s: float
    num_top: int = 0
    num_prompt_top: int = 0

    def read(self) -> LaunchResult:
        """Wait for the result: rows of `key`. Raises what the call of a program raised."""
        result = self.result.result().read()
        # A choice program may have more rows of each replica than the program before it.
        of_replica = result.choice.reshape(len(self.rows), -1, *result.choice.shape[1:])
        choice = of_replica[:, : self.key.rows].reshape(-1, *result.choice.shape[1:])
        return dataclasses.replace(result, choice=choice)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaidOut:
    """A decode step as it was launched last.

    Attributes:
        key: Its program.
        packed: `DecodeOperands`.
        told: What both follow from.
    """

    key: ProgramKey
    packed: np.ndarray
    told: tuple


def _told_of(row: DecodeRow) -> tuple[int, ...]:
    """What the operands of a row follow from. Within an epoch a sequence only gets more pages."""
    seq = row.seq  # not kept itself: an engine at rest knows no request
    return (
        seq.request_id, seq.sequence_idx, row.epoch, len(seq.pages), row.is_draft, row.num_tokens,
    )  # fmt: skip


def places[T: Row](key: ProgramKey, rows: abc.Sequence[abc.Sequence[T]]) -> Iterator[tuple[int, T]]:
    """(row of the program, row of the batch)."""
    for replica, part in enumerate(rows):
        for i, row in enumerate(part):
            yield replica * key.rows + i, row


class ModelRunner:
    """The device's side of an engine: weights, programs, cache and slots.

    Attributes:
        programs: The compiled programs, which other engines of these sizes may share.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: ReplicaConfig,
        *,
        candidates: Candidates,
        programs: ProgramCache | None,
        claim: Claim,
        idle_pages: Callable[[int], list[list[int]]],
        stats: EngineStats,
        tracer: trace.TracesEvents,
    ):
        """Allocate the cache.

        Args:
            model: On its mesh.
            config: Of each replica.
            candidates: Replaces the drafts of `dvr`.
            programs: Programs to share, or None.
            claim: Is told what a check of programs finds.
            idle_pages: Pages of each replica that nobody holds, at least so many if there are.
            stats: Where launches and compilations are counted.
            tracer: Keeps a timeline.

        Raises:
            ValueError: If `programs` are of another model or other sizes.
        """
        self._model, self._config, self._stats, self._trace = model, config, stats, tracer
        self._claim, self._idle_pages = claim, idle_pages
        self._workers: CompileWorkers | None = None
        self._checkable = frozenset(checkable_keys(config))
        dp = config.num_replicas
        sizes = {
            "num_pages": dp * config.num_pages,
            "num_slots": dp * config.num_slots,
            "window_len": config.verify_window,
        }
        self.programs = programs or ProgramCache(
            model,
            num_pages=sizes["num_pages"],
            num_slots=sizes["num_slots"],
            window_len=sizes["window_len"],
            candidates=candidates,
        )
        if not self.programs.is_for(model, **sizes):
            raise ValueError(
                f"programs for {self.programs.sizes} are not of this model and {sizes}; share "
                "those of an engine of these sizes, or none"
            )
        self.take_weights()
        self._device = DeviceState(
            model,
            self.programs,
            is_filled=config.self_check != "off",
            stats=stats,
            tracer=tracer,
        )
        self._forget_rows()
        # What each slot's row of the page table holds, and how much of it is up to date.
        self._tables = np.zeros((dp, config.num_slots, config.table_len), np.int32)
        self._num_synced = np.zeros((dp, config.num_slots), np.int32)

    def reset(self) -> None:
        """Allocate the cache and the slots anew. Nothing that was in them is known any more."""
        self._device.reset()
        self._forget_rows()

    def release(self) -> None:
        """Free the cache and the slots, until `reset`."""
        self._device.release()
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._placed = PlacedRows(self._model.mesh, self._stats)
        self._laid_out: dict[str, _LaidOut] = {}

    def settle(self) -> None:
        """Wait until every program that was launched has been called; they may still run."""
        self._device.settle()

    @property
    def is_lost(self) -> bool:
        """Whether a launch took the cache and did not give it back."""
        return self._device.is_lost

    def take_weights(self) -> None:
        """Use the model's weights as they are now, in 8 bits for drafts that want it."""
        self._draft_params = self._model.params
        if self._config.draft_weights != "full":
            dtype = jnp.dtype(self._config.draft_weights)
            self._draft_params = quantise_params(self._model.params, dtype)

    def drop_drafts(self) -> None:
        """Free the weights in 8 bits, until `take_weights`."""
        self._draft_params = self._model.params

    # ------------------------------------------------------------------------------------ launching

    def launch(self, batch: ScheduledBatch) -> list[Launch]:
        """Hand the programs of a step to the device, in the order in which they must run.

        Raises:
            SequenceError: If a row of a sequence cannot be laid out; programs before it may run.
        """
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
        wanted = [r.seq.request.sampling for part in rows for r in part if r.is_scored]
        key = self._key(
            "prefill",
            rows,
            size=shape[0],
            length=shape[1],
            kernels=prefill_mode(self._config),
            leaves_hidden=bool(wanted),
        )
        num_rows, no_slot = self._num_rows(key), self._config.num_slots
        operands = PrefillOperands.padding(
            num_rows, no_slot=no_slot, table_len=key.table_len, length=key.length
        )
        sampling = [_IDLE] * num_rows
        targets = np.zeros((num_rows, key.length), np.int32)
        for at, row in places(key, rows):
            seq = row.seq
            count = len(row.token_ids)
            self._sync_pages(seq, is_new=True)
            # The token that follows an unfinished prompt is not wanted: no such slot.
            operands.slot[at] = seq.slot if row.is_last else no_slot
            operands.start[at], operands.count[at] = row.start, count
            operands.page_table[at] = self._tables[seq.replica, seq.slot]
            with blaming(seq):
                operands.token_ids[at, :count] = row.token_ids
                if row.is_scored:
                    following = seq.tokens[row.start + 1 : row.start + 1 + count]
                    targets[at, : len(following)] = following
            sampling[at] = (seq.sampling, seq.sequence_idx)
            self._stats.prefill_tokens += count
        most = max((sampling.prompt_logprobs or 0 for sampling in wanted), default=0)
        score = self._score_call(key, score_top_of(most), targets) if wanted else None
        return self._run(
            key, rows, operands.pack(), SamplingRows.pack(sampling),
            install=self._install_call(rows), score=score, num_prompt_top=score_top_of(most),
        )  # fmt: skip

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
        laid_out = self._lay_out(rows, weights)
        placed = self._placed.place(laid_out.key, laid_out.packed)
        return self._run(laid_out.key, rows, laid_out.packed, placed=placed)

    def _lay_out(self, rows: list[list[DecodeRow]], weights: str) -> "_LaidOut":
        """The program of a decode step, and its operands: those of the step before if they hold."""
        # WHY: until a sequence comes, goes or needs a page every step is told the same, and on a
        # small model the host is what a step waits for.
        told = tuple(tuple(_told_of(row) for row in part) for part in rows)
        last = self._laid_out.get(weights)
        if last is not None and last.told == told:
            return last
        size = _smallest(self._config.decode_sizes, rows)
        most_tokens = max(row.num_tokens for part in rows for row in part)
        length = self._config.decode_steps if most_tokens > 1 else 1
        is_committed = any(row.seq.is_drafted and not row.is_draft for part in rows for row in part)
        is_canonical = self._config.mode == "invariant" or is_committed
        kernels: Kernels = "invariant" if is_canonical else "fast"
        key = self._key("decode", rows, size=size, length=length, kernels=kernels, weights=weights)
        operands = DecodeOperands.padding(
            self._num_rows(key), no_slot=self._config.num_slots, table_len=key.table_len
        )
        for replica, part in enumerate(rows):
            for row in part:
                self._sync_pages(row.seq, is_new=False)
            if part:
                at = slice(replica * size, replica * size + len(part))
                slots = [r.seq.slot for r in part]
                operands.slot[at] = slots
                operands.is_draft[at] = [r.is_draft for r in part]
                operands.count[at] = [r.num_tokens for r in part]
                operands.page_table[at] = self._tables[replica, slots, : key.table_len]
        self._laid_out[weights] = _LaidOut(key=key, packed=operands.pack(), told=told)
        return self._laid_out[weights]

    def _launch_verify(self, rows: list[list[VerifyRow]]) -> Launch:
        size, length = _smallest(self._config.verify_sizes, rows), self._config.verify_window
        key = self._key("verify", rows, size=size, length=length, kernels="invariant")
        operands = VerifyOperands.padding(
            self._num_rows(key),
            no_slot=self._config.num_slots,
            table_len=key.table_len,
            length=length,
        )
        for at, row in places(key, rows):
            seq = row.seq
            self._sync_pages(seq, is_new=False)
            operands.slot[at], operands.num_drafts[at] = seq.slot, row.num_drafts
            operands.is_given[at] = row.given is not None
            operands.page_table[at] = self._tables[seq.replica, seq.slot, : key.table_len]
            if row.given is not None:
                with blaming(seq):
                    operands.token_ids[at, 1 : 1 + len(row.given)] = row.given
        self._stats.verify_launches += 1
        return self._run(key, rows, operands.pack(), windows=operands)

    def _key(
        self,
        kind: ProgramKind,
        rows: abc.Sequence[abc.Sequence[Row]],
        *,
        size: int,
        length: int,
        kernels: Kernels,
        weights: str = "full",
        leaves_hidden: bool = False,
    ) -> ProgramKey:
        """The smallest program that holds these rows."""
        longest = max(len(row.seq.pages) for part in rows for row in part)
        return ProgramKey(
            kind=kind,
            rows=size,
            length=length,
            table_len=next(n for n in table_lens(kind, self._config) if n >= longest),
            mode=kernels,
            weights=weights,
            logit_rows=logit_rows(self._config, kind, size, length),
            leaves_hidden=leaves_hidden,
        )

    def _num_rows(self, key: ProgramKey) -> int:
        """Rows of a program over all replicas."""
        return self._config.num_replicas * key.rows

    def _sync_pages(self, seq: Sequence, *, is_new: bool) -> None:
        """Bring the slot's row of the page table up to date."""
        at = seq.replica, seq.slot
        first, count = 0 if is_new else self._num_synced[at], len(seq.pages)
        if first != count:
            self._tables[at][first:count] = seq.pages[first:]
            self._num_synced[at] = count

    def _run(
        self,
        key: ProgramKey,
        rows: abc.Sequence[abc.Sequence[Row]],
        *host: Any,
        placed: Placed | None = None,
        windows: VerifyOperands | None = None,
        install: Call | None = None,
        score: Call | None = None,
        num_prompt_top: int = 0,
    ) -> Launch:
        """Hand over a program and what follows it; `placed` is the first of `host`, where it lies.

        `windows` are the operands of a verification.
        """
        given = host if placed is None else (placed, *host[1:])
        program = self._program(key)
        choice_key = self._choice_key(key, rows)
        after = NOTHING_AFTER
        if choice_key is not None or score is not None:
            after = Aftermath(
                install=install,
                choice=choice_key and self._choice_call(choice_key, key, rows, windows),
                reads_result=windows is not None,
                score=score,
            )
        launched_s = time.perf_counter()
        result = self._device.run(key, program, self._params_of(key), *given, after=after)
        self._stats.num_launches += 1
        return Launch(
            key=key,
            rows=rows,
            operands=host,
            result=result,
            launched_s=launched_s,
            num_top=choice_key.num_top if choice_key is not None else 0,
            num_prompt_top=num_prompt_top,
        )

    # --------------------------------------------------------------------- what follows a program

    def _choice_key(
        self, key: ProgramKey, rows: abc.Sequence[abc.Sequence[Row]]
    ) -> ChoiceKey | None:
        """The program that chooses for these rows; None where the forward program does."""
        asking = [
            row.seq for part in rows for row in part if row.seq.needs_choice and _commits(row)
        ]
        if not asking:
            return None
        assert key.logit_rows, "the scheduler has given these rows several tokens a launch"
        with_filters, num_top = choice_of(
            is_filtered=any(seq.is_filtered for seq in asking),
            num_top=max(seq.request.sampling.logprobs for seq in asking),
        )
        length = key.length if key.kind == "verify" else 1
        return ChoiceKey(
            rows=key.logit_rows // length,
            length=length,
            with_filters=with_filters,
            num_top=num_top,
        )

    def _choice_call(
        self,
        choice_key: ChoiceKey,
        key: ProgramKey,
        rows: abc.Sequence[abc.Sequence[Row]],
        windows: VerifyOperands | None,
    ) -> Call:
        """A choice program with its operands."""
        size, no_slot = choice_key.rows, self._config.num_slots
        slots = np.full((self._config.num_replicas * size, 2), no_slot, np.int32)
        banned: np.ndarray | None = None
        for replica, part in enumerate(rows):
            for i, row in enumerate(part):
                seq, at = row.seq, replica * size + i
                if not _commits(row):
                    continue
                slots[at] = seq.slot, seq.slot if seq.is_adjusted else no_slot
                if seq.guide is not None:
                    if banned is None:
                        words = num_words(self._model.config.vocab_size)
                        banned = np.zeros((len(slots), words), np.int32)
                    with blaming(seq):
                        banned[at] = seq.guide.banned(seq.output_ids)
        program = self._program(choice_key)
        if windows is not None:
            return program, (pack_windows(windows, slots[:, 1]),)
        return program, (slots, self._device.no_bans(size) if banned is None else banned)

    def _install_call(self, rows: abc.Sequence[abc.Sequence[PrefillRow]]) -> Call | None:
        """Puts adjustments of sequences whose prompts end here into their slots."""
        if not any(row.is_last and row.seq.is_adjusted for part in rows for row in part):
            return None
        size = install_rows(self._config)
        shapes = self.programs.adjusted_shape
        count = self._config.num_replicas * size
        slot = np.full(count, self._config.num_slots, np.int32)
        values = jax.tree.map(lambda x: np.zeros((count, *x.shape[1:]), x.dtype), shapes)
        for replica, part in enumerate(rows):
            for i, row in enumerate(part):
                seq, at = row.seq, replica * size + i
                if not (row.is_last and seq.is_adjusted):
                    continue
                slot[at] = seq.slot
                prompt_ids, output_ids = seq.request.prompt_token_ids, seq.output_ids
                sampling = seq.request.sampling
                if seq.guide is not None:
                    sampling = dataclasses.replace(sampling, **SEEN_TO)
                with blaming(seq):
                    values.record[at] = pack_record(
                        sampling,
                        prompt_len=len(prompt_ids),
                        end_token_ids=seq.end_token_ids,
                        vocab_size=self._model.config.vocab_size,
                    )
                    values.recent[at] = recent_tokens(output_ids)
                    values.uses[at] = count_uses(prompt_ids, output_ids, values.uses.shape[1])
        program = self._program(InstallKey(rows=size))
        return program, (AdjustedRows(slot=slot, slots=values),)

    def _score_call(self, key: ProgramKey, num_top: int, targets: np.ndarray) -> Call:
        """Computes the logprobs of `targets` from the hidden states of a prefill."""
        score = ScoreKey(rows=key.rows, length=key.length, mode=key.mode, num_top=num_top)
        return self._program(score), (targets,)

    # ------------------------------------------------------------------------------------ compiling

    def compile(
        self,
        progress: Callable[[str, int, int], None],
        requests: abc.Sequence[Request] | None = None,
    ) -> None:
        """Compile the programs that requests can need, several at a time: see `Engine.compile`."""
        keys = program_keys(self._config)
        wanted: list[AnyKey] = [*self._as_checked(keys), *choice_keys(self._config)]
        if requests is not None:
            wanted = keys_of_requests(self._config, wanted, requests)
            keys = [key for key in keys if key in wanted]
        missing = [key for key in wanted if key not in self.programs]
        self._device.prepare(keys)
        # Of several GPUs nothing has shown yet that programs may run while others are compiled.
        mesh = self._model.mesh
        checks_early = mesh.size == 1 or self._model.backend.platform == "cpu"
        begin_s, asked = time.perf_counter(), this_moment()
        self._workers = workers = self._start_workers(missing)
        num_threads = max(4, os.cpu_count() or 1)
        with workers or nullcontext(), ThreadPoolExecutor(max_workers=1 + num_threads) as pool:
            if self._config.self_check != "off":
                cache = pages_shape(self._model, self.programs.num_pages)
                pool.submit(checksum_program, mesh, cache.shape, cache.dtype)
            # Each program is checked when it is there, while others are still compiled.
            checking = pool.submit(self._check_new, wanted) if checks_early else None
            futures = {key: pool.submit(self._get, key, asked) for key in missing}
            for done, (key, future) in enumerate(futures.items(), start=1):
                future.result()
                progress(key.name, done, len(missing))
            self._count_compiled(len(missing), begin_s)
            begin_s = time.perf_counter()
            num_checked = self._check_new(wanted) if checking is None else checking.result()
        self._note_checking(num_checked, begin_s)

    def _start_workers(self, missing: abc.Sequence[AnyKey]) -> CompileWorkers | None:
        """Processes that compile these programs, where they pay."""
        count = num_workers(self._model, self.programs, missing)
        if not count:
            return None
        try:
            return CompileWorkers(self._model, self.programs, missing, count)
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
        if self._workers is not None:
            self._workers.wait(key)
        return self.programs.get(key, self._params_of(key), asked)

    def _params_of(self, key: AnyKey) -> dict:
        is_draft = isinstance(key, ProgramKey) and key.weights != "full"
        return self._draft_params if is_draft else self._model.params

    def _program(self, key: AnyKey) -> Callable:
        """A program, compiled and checked if need be: where nobody has called `compile`."""
        if key not in self.programs:
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
        self._note_checking(self._check_new((key,)), begin_s)
        return self._get(key)

    def _count_compiled(self, count: int, begin_s: float) -> None:
        end_s = time.perf_counter()
        self._stats.num_compiled += count
        self._stats.compile_s += end_s - begin_s
        self._trace.span(trace.HOST, "compile", begin_s, end_s, programs=count)

    # ------------------------------------------------------------------------------------- checking

    def _check_new(self, keys: abc.Sequence[AnyKey]) -> int:
        """Compare the programs among these that make a claim with prefill, once each.

        Waits for those that are still compiled.

        Returns:
            How many there were.
        """
        if self._config.self_check == "off":
            return 0
        new = [key for key in keys if key in self._checkable and key not in self.programs.checked]
        forward = [key for key in new if isinstance(key, ProgramKey)]
        choices = [key for key in new if isinstance(key, ChoiceKey)]
        if forward:
            self.programs.checked.update(self._check(forward, None))
        for kind in CHOICES:
            some = [key for key in choices if (key.with_filters, key.num_top) == kind]
            known = {leaves_for(key, (*self.programs, *keys)): key for key in some}
            if before := [key for key in known if key is not None]:
                done = self._check(before, kind)
                self.programs.checked.update(known[key] for key in done)
        self._stats.num_self_checked += sum(key in self.programs.checked for key in new)
        return len(new)

    def _check(
        self, keys: abc.Sequence[ProgramKey], choice: tuple[bool, int] | None
    ) -> list[ProgramKey]:
        """Compare programs, with choice programs of a kind behind them or alone; the checked."""
        reach = Reach(run=self.run_aside, checksums=self._device.checksums, idle=self._idle())
        reference = self._reference_key(keys)
        done, found = check_programs(
            self._model, self._config, keys, reference, reach, choice=choice
        )
        self._claim.note(found)
        return done

    def _note_checking(self, count: int, begin_s: float) -> None:
        if not count:
            return
        end_s = time.perf_counter()
        self._stats.num_self_unchecked = sum(
            is_checkable(key) and key not in self.programs.checked for key in self.programs
        )
        self._stats.self_check_s += end_s - begin_s
        self._trace.span(trace.HOST, "self-check", begin_s, end_s, programs=count)

    def _reference_key(self, keys: abc.Sequence[ProgramKey]) -> ProgramKey:
        """The prefill of the fewest tokens, of those that are compiled or among `keys`."""
        wanted = (*self.programs, *keys, *program_keys(self._config)[:1])
        known = [key for key in wanted if key.kind == "prefill" and is_checkable(key)]
        return min(known, key=lambda key: (key.leaves_hidden, key.rows, key.length))

    def _idle(self) -> np.ndarray:
        """Pages that nobody holds, int32 [dp, m]."""
        idle = self._idle_pages(_LEAST_IDLE)
        count = min(map(len, idle))
        return np.asarray([pages[:count] for pages in idle], np.int32)

    def run_aside(
        self, key: ProgramKey, slots, sampling, *host, choice: tuple[bool, int] | None = None
    ) -> tuple[Any, jax.Array]:
        """Launch a program on the cache, with slots that are nobody's: `DeviceState.run_aside`.

        `choice` is of `CHOICES`: the choice program that follows, for rows without adjustments.
        """
        after = NOTHING_AFTER if choice is None else self._choice_aside(key, choice, host[0])
        return self._device.run_aside(
            key, self._get(key), self._params_of(key), slots, sampling, *host, after=after
        )

    def _choice_aside(self, key: ProgramKey, choice: tuple[bool, int], packed) -> Aftermath:
        """A choice program for the rows of packed operands."""
        size, no_slot = key.logit_rows, self._config.num_slots
        choice_key = ChoiceKey(rows=size, length=1, with_filters=choice[0], num_top=choice[1])
        if key.kind == "verify":
            given = VerifyOperands.unpack(packed, table_len=key.table_len, length=key.length)
            choice_key = dataclasses.replace(choice_key, rows=key.rows, length=key.length)
            windows = pack_windows(given, np.full(len(packed), no_slot, np.int32))
            return Aftermath(choice=(self._get(choice_key), (windows,)), reads_result=True)
        slots = np.full((self._config.num_replicas, size, 2), no_slot, np.int32)
        slots[:, : key.rows, 0] = slot_of(packed).reshape(-1, key.rows)
        operands = slots.reshape(-1, 2), self._device.no_bans(size)
        return Aftermath(choice=(self._get(choice_key), operands))


def _commits(row: Row) -> bool:
    """Whether the token chosen for a row is wanted: not behind a piece of a prompt."""
    return not isinstance(row, PrefillRow) or max_committed(row) > 0


def _smallest(sizes: abc.Sequence[int], rows: abc.Sequence[abc.Sequence[Row]]) -> int:
    """The smallest of `sizes`, which ascend, that holds the rows of every replica."""
    most = max(len(part) for part in rows)
    return next(size for size in sizes if size >= most)
