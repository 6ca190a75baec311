# SPDX-License-Identifier: Apache-2.0
"""A batch on its way to the device: its rows become arrays, the arrays a program's operands.

What a step needs of the step before stays on the device: the slots, and the pages of the cache.
"""

import dataclasses
import time
from collections import abc
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from detjax.defaults import HEADS
from detjax.engine import trace
from detjax.engine.config import DRAFTS_OF_OTHERS, ReplicaConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.requests.request import Request
from detjax.engine.requests.sequence import (
    DecodeRow,
    PrefillRow,
    Row,
    ScheduledBatch,
    Sequence,
    VerifyRow,
    WindowsRow,
    attributing_errors,
)
from detjax.engine.running.device_state import (
    NO_FOLLOW_UPS,
    Call,
    DeviceState,
    FollowUps,
    LaunchResult,
    Placed,
)
from detjax.engine.running.follow_ups import FollowUpCalls
from detjax.engine.running.launch_operands import (
    DecodeOperands,
    PrefillOperands,
    VerifyOperands,
    WindowsOperands,
    unwanted_slot,
)
from detjax.engine.running.placed_rows import PlacedRows
from detjax.engine.running.program_key import (
    ProgramKey,
    ProgramKind,
    leaves_features,
    logit_rows,
    prefill_mode,
    score_top_of,
    table_lens,
)
from detjax.engine.running.programs import Candidates, ProgramCache
from detjax.engine.running.ready_programs import GivesIdlePages, ReadyPrograms
from detjax.engine.running.resident_adapters import ResidentAdapters
from detjax.engine.sampling.sampling import IDLE_ROW, SamplingRows
from detjax.engine.self_check.claim import Claim
from detjax.models.forward_paths import KernelMode
from detjax.models.heads.head import AnyDraftModel
from detjax.models.loading import LoadedModel


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


def _inputs(row: DecodeRow | WindowsRow, *of_row: Hashable) -> tuple[Hashable, ...]:
    """What the operands of a row follow from.

    Until it is preempted a sequence only gets pages; those of local layers come and go.
    """
    seq = row.seq  # not kept itself: an engine at rest knows no request
    place = row.num_preemptions, len(seq.pages), seq.held
    return seq.request_id, seq.sequence_idx, *place, *of_row


def _decode_inputs(row: DecodeRow) -> tuple[Hashable, ...]:
    return _inputs(row, row.is_draft, row.num_tokens)


def _windows_inputs(row: WindowsRow) -> tuple[Hashable, ...]:
    return _inputs(row, row.num_windows, row.num_drafts, row.most_tokens)


def places[T: Row](key: ProgramKey, rows: abc.Sequence[abc.Sequence[T]]) -> Iterator[tuple[int, T]]:
    """(row of the program, row of the batch)."""
    for replica, part in enumerate(rows):
        for i, row in enumerate(part):
            yield replica * key.rows + i, row


def _programs_for(
    model: LoadedModel,
    config: ReplicaConfig,
    programs: ProgramCache | None,
    candidates: Candidates,
    draft_model: AnyDraftModel | None,
) -> ProgramCache:
    """The programs of an engine: `programs` if they have its sizes, or new ones if None.

    Raises:
        ValueError: If they are of another model or other sizes.
    """
    sizes = config.program_sizes
    if programs is None:
        return ProgramCache(model, **sizes, candidates=candidates, draft_model=draft_model)
    if not programs.is_for(model, draft_model, sizes):
        raise ValueError(
            f"programs for {programs.sizes} are not of this model and {sizes}; share "
            "those of an engine of these sizes, or none"
        )
    return programs


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
        draft_model: AnyDraftModel | None,
        claim: Claim,
        idle_pages: GivesIdlePages,
        stats: EngineStats,
        tracer: trace.TracesEvents,
    ):
        """Allocate the cache.

        Args:
            model: On its mesh.
            config: Of each replica.
            candidates: Replaces the drafts of `dvr`.
            programs: Programs to share, or None.
            draft_model: Makes the drafts where the configuration says so.
            claim: Is told what a check of programs finds.
            idle_pages: Of the scheduler.
            stats: Where launches and compilations are counted.
            tracer: Keeps a timeline.

        Raises:
            ValueError: If `programs` are of another model or other sizes.
        """
        self._model, self._config, self._stats, self._trace = model, config, stats, tracer
        self._adapters = ResidentAdapters(model, config)
        self.programs = _programs_for(model, config, programs, candidates, draft_model)
        self._device = DeviceState(
            model,
            self.programs,
            is_filled=config.self_check != "off",
            stats=stats,
            tracer=tracer,
        )
        self._ready = ReadyPrograms(
            model,
            config,
            self.programs,
            self._device,
            claim=claim,
            idle_pages=idle_pages,
            stats=stats,
            tracer=tracer,
        )
        self._follow_ups = FollowUpCalls(
            config,
            vocab_size=model.config.vocab_size,
            adjusted_shape=self.programs.adjusted_shape,
            program=self._ready.get,
            no_bans=self._device.no_bans,
        )
        self._forget_rows()
        # What each slot's row of the page table holds, and how much of it is up to date.
        slots = config.num_replicas, config.num_slots
        self._tables = np.zeros((*slots, config.table_len), np.int32)
        self._num_synced = np.zeros(slots, np.int32)
        self._local_tables = np.zeros((*slots, config.table_len), np.int32)

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

    def settle(self) -> None:
        """Wait until every program that was launched has been called; they may still run."""
        self._device.settle()

    @property
    def is_lost(self) -> bool:
        """Whether a launch took the cache and did not give it back."""
        return self._device.is_lost

    def take_weights(self) -> None:
        """Use the model's weights as they are now, in 8 bits for drafts that want it."""
        self._ready.take_weights()

    def compile(
        self,
        progress: Callable[[str, int, int], None],
        requests: abc.Sequence[Request] | None,
        checked: Callable[[str, int, int], None],
    ) -> None:
        """Compile the programs that requests can need, several at a time: see `Engine.compile`."""
        self._ready.compile(progress, requests, checked)
        self._adapters.compile()

    def run_check(
        self, key: ProgramKey, slots, sampling, *host, choice: tuple[bool, int] | None = None
    ) -> tuple[Any, jax.Array]:
        """Launch a program with scratch slots: `ReadyPrograms.run_check`."""
        self._device.filled.forget()
        return self._ready.run_check(key, slots, sampling, *host, choice=choice)

    def drop_drafts(self) -> None:
        """Free the weights in 8 bits, until `take_weights`."""
        self._ready.drop_drafts()

    # ------------------------------------------------------------------------------------ launching

    def launch(self, batch: ScheduledBatch) -> list[Launch]:
        """Hand the programs of a step to the device, in the order in which they must run.

        Raises:
            SequenceError: If a row of a sequence cannot be laid out; programs before it may run.
        """
        launches = []
        if any(batch.verifies):
            launches.append(self._launch_verify(batch.verifies))
        most = self._config.verify_rows
        for first in range(0, max(map(len, batch.windows)), most):
            some = [part[first : first + most] for part in batch.windows]
            launches.append(self._launch_windows(some, first))
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
        operands = self._prefill_operands(shape)
        sampling = [IDLE_ROW] * num_rows
        targets = np.zeros((num_rows, key.length), np.int32)
        for at, row in places(key, rows):
            seq = row.seq
            count = len(row.token_ids)
            self._sync_pages(seq, is_new=True)
            self._adapters.bring(seq)
            # The token that follows an unfinished prompt is not wanted.
            operands.slot[at] = seq.slot if row.is_last else unwanted_slot(seq.slot, no_slot)
            operands.start[at], operands.count[at] = row.start, count
            self._put_tables(operands, at, seq.replica, seq.slot)
            with attributing_errors(seq):
                operands.token_ids[at, :count] = row.token_ids
                if row.is_scored:
                    following = seq.tokens[row.start + 1 : row.start + 1 + count]
                    targets[at, : len(following)] = following
            sampling[at] = (seq.sampling, seq.sequence_idx)
            self._stats.prefill_tokens += count
        most = max((sampling.prompt_logprobs or 0 for sampling in wanted), default=0)
        score = self._follow_ups.score_call(key, score_top_of(most), targets) if wanted else None
        packed = operands.pack()
        return self._run(
            key, rows, packed, SamplingRows.pack(sampling),
            install=self._follow_ups.install_call(rows), score=score,
            num_prompt_top=score_top_of(most),
            draft_prefills=self._draft_prefills(rows, shape, packed),
        )  # fmt: skip

    def _draft_prefills(
        self, rows: list[list[PrefillRow]], shape: tuple[int, int], packed: np.ndarray
    ) -> tuple[Call, ...]:
        """The draft model's prefill of the same rows, if it will draft for one of them."""
        is_drafted = any(row.seq.is_drafted for part in rows for row in part)
        if self._config.draft_weights not in DRAFTS_OF_OTHERS or not is_drafted:
            return ()
        if self._config.draft_weights in HEADS:
            packed = self._head_operands(rows, shape).pack()
        return (self._draft_prefill(shape, packed),)

    def _head_operands(
        self, rows: list[list[PrefillRow]], shape: tuple[int, int]
    ) -> PrefillOperands:
        """A head's prefill of the same rows: each position with the token behind it."""
        operands = self._prefill_operands(shape)
        for replica, part in enumerate(rows):
            for at, row in enumerate(part, start=replica * shape[0]):
                seq, first = row.seq, row.start + 1
                # The token behind the last one of a prompt is not known to the host.
                ids = seq.tokens[first : first + len(row.token_ids)]
                operands.slot[at] = seq.slot if row.is_last else self._config.num_slots
                operands.start[at], operands.count[at] = row.start, len(ids)
                self._put_tables(operands, at, seq.replica, seq.slot)
                operands.token_ids[at, : len(ids)] = ids
        return operands

    def _draft_prefill(self, shape: tuple[int, int], packed: np.ndarray) -> Call:
        """A prefill of the draft model, of the packed operands of one of a shape."""
        key = ProgramKey(
            kind="prefill",
            rows=shape[0],
            length=shape[1],
            table_len=self._config.table_len,
            mode="fast",
            weights=self._config.draft_weights,
        )
        return self._ready.get(key), (self._ready.params_of(key), packed)

    def _prefill_operands(self, shape: tuple[int, int]) -> PrefillOperands:
        """Rows of padding of a prefill of a shape."""
        return PrefillOperands.padding(
            self._config.num_replicas * shape[0],
            no_slot=self._config.num_slots,
            table_len=self._config.table_len,
            length=shape[1],
            num_tables=self._config.num_tables,
        )

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
        inputs = tuple(tuple(_decode_inputs(row) for row in part) for part in rows)
        step = self._placed.step(weights, inputs, lambda: self._prepare_decode(rows, weights))
        return self._run(
            step.key, rows, step.packed, placed=self._placed.place(step),
            draft_prefills=self._missed_tokens(rows),
        )  # fmt: skip

    def _missed_tokens(self, rows: list[list[DecodeRow]]) -> tuple[Call, ...]:
        """Prefills by the draft model of what it has missed, in steps without drafts."""
        missed = [row for part in rows for row in part if row.missed_from is not None]
        return tuple(call for row in missed for call in self._catch_up(row))

    def _catch_up(self, row: DecodeRow) -> Iterator[Call]:
        """The draft model's prefill of the tokens of one sequence that it has missed."""
        seq, shape = row.seq, min(self._config.prefill_shapes)
        assert row.missed_from is not None
        self._sync_pages(seq, is_new=False)
        stop = len(seq.tokens) - 1  # the step itself runs the last one
        for start in range(row.missed_from, stop, shape[1]):
            operands = self._prefill_operands(shape)
            ids = seq.tokens[start : min(start + shape[1], stop)]
            at = seq.replica * shape[0]
            operands.slot[at], operands.start[at], operands.count[at] = seq.slot, start, len(ids)
            self._put_tables(operands, at, seq.replica, seq.slot)
            operands.token_ids[at, : len(ids)] = ids
            yield self._draft_prefill(shape, operands.pack())

    def _prepare_decode(
        self, rows: list[list[DecodeRow]], weights: str
    ) -> tuple[ProgramKey, np.ndarray]:
        """The program of a decode step, and its operands."""
        size = _smallest(self._config.decode_sizes, rows)
        most_tokens = max(row.num_tokens for part in rows for row in part)
        length = self._config.decode_steps if most_tokens > 1 else 1
        is_committed = any(row.seq.is_drafted and not row.is_draft for part in rows for row in part)
        is_canonical = self._config.mode == "invariant" or is_committed
        kernels: KernelMode = "invariant" if is_canonical else "fast"
        if weights in DRAFTS_OF_OTHERS:
            length = next(n for n in self._config.draft_lens if n >= most_tokens)
            kernels = "fast"
        key = self._key("decode", rows, size=size, length=length, kernels=kernels, weights=weights)
        operands = DecodeOperands.padding(
            self._num_rows(key),
            no_slot=self._config.num_slots,
            table_len=key.table_len,
            num_tables=self._config.num_tables,
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
                self._put_tables(operands, at, replica, slots)
        return key, operands.pack()

    def _launch_verify(self, rows: list[list[VerifyRow]]) -> Launch:
        size, length = _smallest(self._config.verify_sizes, rows), self._config.verify_window
        key = self._key("verify", rows, size=size, length=length, kernels="invariant")
        operands = VerifyOperands.padding(
            self._num_rows(key),
            no_slot=self._config.num_slots,
            table_len=key.table_len,
            length=length,
            num_tables=self._config.num_tables,
        )
        for at, row in places(key, rows):
            seq = row.seq
            self._sync_pages(seq, is_new=False)
            operands.slot[at], operands.num_drafts[at] = seq.slot, row.num_drafts
            operands.is_given[at] = row.given is not None
            self._put_tables(operands, at, seq.replica, seq.slot)
            if row.given is not None:
                with attributing_errors(seq):
                    self._refuse_unknown(row)
                    operands.token_ids[at, 1 : 1 + len(row.given)] = row.given
        self._stats.verify_launches += 1
        return self._run(key, rows, operands.pack(), windows=operands)

    def _launch_windows(self, rows: list[list[WindowsRow]], first: int) -> Launch:
        """Several windows of each row, whose drafts a draft model or head makes.

        They are the rows of the batch from `first` on.
        """
        inputs = tuple(tuple(_windows_inputs(row) for row in part) for part in rows)
        name = f"windows from {first}"
        step = self._placed.step(name, inputs, lambda: self._prepare_windows(rows))
        self._stats.verify_launches += max(row.num_windows for part in rows for row in part)
        return self._run(step.key, rows, step.packed, placed=self._placed.place(step))

    def _prepare_windows(self, rows: list[list[WindowsRow]]) -> tuple[ProgramKey, np.ndarray]:
        """The program of several windows, and its operands."""
        size = _smallest(self._config.verify_sizes, rows)
        length = 1 + max(row.num_drafts for part in rows for row in part)
        key = self._key("windows", rows, size=size, length=length, kernels="invariant")
        operands = WindowsOperands.padding(
            self._num_rows(key),
            no_slot=self._config.num_slots,
            table_len=key.table_len,
            num_tables=self._config.num_tables,
        )
        for at, row in places(key, rows):
            seq = row.seq
            self._sync_pages(seq, is_new=False)
            operands.slot[at], operands.count[at] = seq.slot, row.num_windows
            operands.most_tokens[at] = row.most_tokens
            self._put_tables(operands, at, seq.replica, seq.slot)
        return key, operands.pack()

    def _refuse_unknown(self, row: VerifyRow) -> None:
        """Refuse drafts of the host that are no tokens.

        Raises:
            ValueError: Naming the source and the token.
        """
        vocab_size = self._model.config.vocab_size
        unknown = [draft for draft in row.given or () if not 0 <= draft < vocab_size]
        if unknown:
            raise ValueError(
                f"the drafter {row.source!r} drafted {unknown[0]}, which is no token of the "
                f"vocabulary of {vocab_size}"
            )

    def _key(
        self,
        kind: ProgramKind,
        rows: abc.Sequence[abc.Sequence[Row]],
        *,
        size: int,
        length: int,
        kernels: KernelMode,
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
            logit_rows=logit_rows(self._config, kind, size, length, weights),
            leaves_hidden=leaves_hidden,
            leaves_features=leaves_features(self._config, kind, weights),
            has_adapters=weights == "full"
            and any(row.seq.adapter_slot >= 0 for part in rows for row in part),
            windows=self._config.windows if kind == "windows" else 1,
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
        if self._config.num_local_pages:
            held = seq.held
            self._local_tables[at][:count] = 0  # of any page: nobody reads it
            self._local_tables[at][held.first :][: len(held.local_pages)] = held.local_pages

    def _put_tables(self, operands: Any, at: Any, replica: int, slots: Any) -> None:
        """Fill in the page tables of rows, for the sequences of these slots."""
        table_len = operands.page_table.shape[1]
        operands.page_table[at] = self._tables[replica, slots, :table_len]
        if operands.local_table is not None:
            operands.local_table[at] = self._local_tables[replica, slots, :table_len]

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
        draft_prefills: tuple[Call, ...] = (),
    ) -> Launch:
        """Hand over a program and what follows it; `placed` is the first of `host`, where it lies.

        `windows` are the operands of a verification.
        """
        given = host if placed is None else (placed, *host[1:])
        program = self._ready.get(key)
        is_drafting = key.weights in DRAFTS_OF_OTHERS
        choice_key = None if is_drafting else self._follow_ups.choice_key(key, rows)
        after = NO_FOLLOW_UPS
        if choice_key is not None or score is not None or draft_prefills:
            after = FollowUps(
                install=install,
                choice=choice_key and self._follow_ups.choice_call(choice_key, key, rows, windows),
                reads_result=windows is not None,
                score=score,
                draft_prefills=draft_prefills,
            )
        launched_s = time.perf_counter()
        params = self._adapters.in_params(self._ready.params_of(key))
        result = self._device.run(key, program, params, *given, after=after)
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


def _smallest(sizes: abc.Sequence[int], rows: abc.Sequence[abc.Sequence[Row]]) -> int:
    """The smallest of `sizes`, which ascend, that holds the rows of every replica."""
    most = max(len(part) for part in rows)
    return next(size for size in sizes if size >= most)
