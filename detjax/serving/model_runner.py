# SPDX-License-Identifier: Apache-2.0
"""A batch on its way to the device: its rows become arrays, the arrays a program's operands.

What a step needs of the step before stays on the device: the slots, and the pages of the cache.
"""

import dataclasses
import os
import time
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from detjax.loaded_code import this_moment
from detjax.models.fast import quantise_params
from detjax.models.loading import LoadedModel
from detjax.models.paths import Kernels
from detjax.serving import trace
from detjax.serving.adjustments import AdjustOperands, num_words, pack_record, record_len
from detjax.serving.config import ReplicaConfig
from detjax.serving.device_arrays import pages_shape
from detjax.serving.device_state import DeviceState, Placed, read_result
from detjax.serving.launch_operands import DecodeOperands, PrefillOperands, VerifyOperands
from detjax.serving.metrics import EngineStats, Pauses
from detjax.serving.placed_rows import PlacedRows
from detjax.serving.program_key import (
    ProgramKey,
    ProgramKind,
    program_keys,
    round_num_top,
    table_lens,
)
from detjax.serving.programs import Candidates, ProgramCache
from detjax.serving.request import SamplingParams
from detjax.serving.sampling import SamplingRows
from detjax.serving.self_check.claim import Claim
from detjax.serving.self_check.device import checksum_program
from detjax.serving.self_check.program_check import check_programs, is_checkable, rank_in_check
from detjax.serving.self_check.session import Reach
from detjax.serving.sequence import (
    DecodeRow,
    PrefillRow,
    Row,
    ScheduledBatch,
    Sequence,
    VerifyRow,
    blaming,
)

_IDLE: tuple[SamplingParams, int] = (SamplingParams(), 0)
_LEAST_IDLE = 12
"""Pages that a check of programs wants on each replica, though cached ones are evicted for it."""


def ignore_compiling(name: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A program that was handed over, with its operands from the host.

    `rows` are by replica.
    """

    key: ProgramKey
    rows: abc.Sequence[abc.Sequence[Row]]
    operands: Any
    result: Future[jax.Array]
    launched_s: float

    def read(self) -> np.ndarray:
        """Wait for the result. Raises what the call of the program raised."""
        return read_result(self.result.result())


class _Least(NamedTuple):
    """What programs do at least, though no row wants it: see `ModelRunner.set_least`."""

    num_top: int
    with_filters: bool
    with_adjustments: bool
    num_prompt_top: int


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
        pauses: Pauses,
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
            pauses: Is told when programs were compiled and checked.

        Raises:
            ValueError: If `programs` are of another model or other sizes.
        """
        self._model, self._config, self._stats, self._trace = model, config, stats, tracer
        self._claim, self._idle_pages, self._pauses = claim, idle_pages, pauses
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
        self._text_len = config.table_len * config.page_len
        self.set_least()
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

    def set_least(
        self,
        *,
        num_top: int = 0,
        with_filters: bool = False,
        with_adjustments: bool = False,
        num_prompt_top: int = 0,
    ) -> None:
        """From now on, run programs that do at least this, though no row wants it.

        `num_prompt_top` is of programs that report logprobs of the prompt, for rows that want them.

        For a list of requests that is known ahead: one variant for all, so fewer are compiled.
        """
        self._least = _Least(num_top, with_filters, with_adjustments, num_prompt_top)

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
        kernels: Kernels = "fast" if self._config.mode == "fast" else "invariant"
        wanted = [r.seq.request.sampling for part in rows for r in part if r.is_scored]
        tops = [self._least.num_prompt_top, *(p.num_prompt_logprobs or 0 for p in wanted)]
        key = self._key(
            "prefill",
            rows,
            size=shape[0],
            length=shape[1],
            kernels=kernels,
            num_prompt_top=round_num_top(max(tops)) if wanted else None,
        )
        num_rows, no_slot = self._num_rows(key), self._config.num_slots
        operands = PrefillOperands.padding(
            num_rows, no_slot=no_slot, table_len=key.table_len, length=key.length
        )
        sampling = [_IDLE] * num_rows
        next_ids = np.zeros(num_rows, np.int32)
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
                if row.start + count < len(seq.tokens):
                    next_ids[at] = seq.tokens[row.start + count]
            sampling[at] = (seq.request.sampling, seq.sequence_idx)
            self._stats.prefill_tokens += count
        host = operands.pack(), SamplingRows.pack(sampling)
        return self._run(key, rows, *host, *([next_ids] if wanted else []))

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
        told = self._least, [[_told_of(row) for row in part] for part in rows]
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
        return self._run(key, rows, operands.pack())

    def _key(
        self,
        kind: ProgramKind,
        rows: abc.Sequence[abc.Sequence[Row]],
        *,
        size: int,
        length: int,
        kernels: Kernels,
        weights: str = "full",
        num_prompt_top: int | None = None,
    ) -> ProgramKey:
        """The smallest program that does what these rows want."""
        seqs = [row.seq for part in rows for row in part]
        longest = max(len(seq.pages) for seq in seqs)
        num_tops = (seq.request.sampling.num_top_logprobs for seq in seqs)
        adjusts = self._least.with_adjustments or any(seq.is_adjusted for seq in seqs)
        return ProgramKey(
            kind=kind,
            rows=size,
            length=length,
            table_len=next(n for n in table_lens(kind, self._config) if n >= longest),
            mode=kernels,
            weights=weights,
            num_top=round_num_top(max(self._least.num_top, *num_tops)),
            with_filters=self._least.with_filters or any(seq.is_filtered for seq in seqs),
            text_len=self._text_len if adjusts else 0,
            num_prompt_top=num_prompt_top,
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

    def _run(self, key: ProgramKey, rows, *host, placed: Placed | None = None) -> Launch:
        """Hand over a program; `placed` is the first of `host`, where it lies."""
        given = host if placed is None else (placed, *host[1:])
        program = self._program(key)
        adjust = self._adjust_operands(key, rows) if key.text_len else None
        launched_s = time.perf_counter()
        result = self._device.run(
            key.name, program, self._params_of(key), *given, text_len=key.text_len, adjust=adjust
        )
        self._stats.num_launches += 1
        return Launch(key=key, rows=rows, operands=host, result=result, launched_s=launched_s)

    def _adjust_operands(
        self, key: ProgramKey, rows: abc.Sequence[abc.Sequence[Row]]
    ) -> AdjustOperands:
        """What a step with adjustments has beside its other operands."""
        vocab_size = self._model.config.vocab_size
        num_rows = self._num_rows(key)
        slot = np.full(num_rows, self._config.num_slots, np.int32)
        is_first = key.kind == "prefill"
        banned = np.zeros((num_rows, num_words(vocab_size)), np.int32)
        records = np.zeros((num_rows, record_len(vocab_size) if is_first else 0), np.int32)
        token_ids = np.zeros((num_rows, key.text_len if is_first else 0), np.int32)
        for at, row in places(key, rows):
            seq = row.seq
            if not seq.is_adjusted or (isinstance(row, PrefillRow) and not row.is_last):
                continue
            slot[at] = seq.slot
            with blaming(seq):
                if seq.guide is not None:
                    banned[at] = seq.guide.banned(seq.output_ids)
                if is_first:
                    records[at] = pack_record(
                        seq.request.sampling,
                        prompt_len=len(seq.request.prompt_token_ids),
                        end_token_ids=seq.end_token_ids,
                        vocab_size=vocab_size,
                    )
                    token_ids[at, : len(seq.tokens)] = seq.tokens
        return AdjustOperands(
            slot=slot,
            banned=None if key.kind == "verify" else banned,
            record=records if is_first else None,
            token_ids=token_ids if is_first else None,
        )

    # ------------------------------------------------------------------------------------ compiling

    def compile(
        self,
        progress: Callable[[str, int, int], None],
        *,
        with_filters: bool,
        with_adjustments: bool,
        num_top_logprobs: int,
        with_prompt_logprobs: bool,
    ) -> None:
        """Compile the programs that requests will need, several at a time: see `Engine.compile`."""
        num_tops = sorted({0, round_num_top(num_top_logprobs)})
        keys = program_keys(
            self._config,
            num_tops=num_tops,
            filters=(False, True) if with_filters else (False,),
            text_lens=(0, self._text_len) if with_adjustments else (0,),
            num_prompt_tops=(None, *num_tops) if with_prompt_logprobs else (None,),
        )
        missing = [key for key in self._as_checked(keys) if key not in self.programs]
        # Of several GPUs nothing has shown yet that programs may run while others are compiled.
        mesh = self._model.mesh
        checks_early = mesh.size == 1 or self._model.backend.platform == "cpu"
        begin_s, asked = time.perf_counter(), this_moment()
        with ThreadPoolExecutor(max_workers=1 + max(4, os.cpu_count() or 1)) as pool:
            if self._config.self_check != "off":
                cache = pages_shape(self._model, self.programs.num_pages)
                pool.submit(checksum_program, mesh, cache.shape, cache.dtype)
            # Each program is checked when it is there, while others are still compiled.
            checking = pool.submit(self._check_new, keys) if checks_early else None
            futures = {key: pool.submit(self._get, key, asked) for key in missing}
            for done, (key, future) in enumerate(futures.items(), start=1):
                future.result()
                progress(key.name, done, len(missing))
            self._count_compiled(len(missing), begin_s)
            begin_s = time.perf_counter()
            num_checked = self._check_new(keys) if checking is None else checking.result()
        self._note_checking(num_checked, begin_s)

    def _as_checked(self, keys: abc.Sequence[ProgramKey]) -> list[ProgramKey]:
        """In the order in which a check of all wants them."""
        # WHY: a check that waits for the last program begins when all others are there: it ends
        # 1.3 s after them in a start of 8B shapes that reads what it compiled before, 0.6 so.
        variants = list(dict.fromkeys((key.num_top, key.with_filters) for key in keys))
        reference = min(self._config.prefill_shapes)

        def rank(key: ProgramKey) -> tuple:
            is_reference = key.kind == "prefill" and (key.rows, key.length) == reference
            variant = variants.index((key.num_top, key.with_filters))
            return variant, not is_reference, rank_in_check(key)

        return sorted(keys, key=rank)

    def _get(self, key: ProgramKey, asked: int | None = None) -> Callable:
        return self.programs.get(key, self._params_of(key), asked)

    def _params_of(self, key: ProgramKey) -> dict:
        return self._model.params if key.weights == "full" else self._draft_params

    def _program(self, key: ProgramKey) -> Callable:
        if key not in self.programs:
            begin_s = time.perf_counter()
            self._get(key)
            self._count_compiled(1, begin_s)
        begin_s = time.perf_counter()
        self._note_checking(self._check_new((key,)), begin_s)
        return self._get(key)

    def _count_compiled(self, count: int, begin_s: float) -> None:
        end_s = time.perf_counter()
        self._stats.num_compiled += count
        self._stats.compile_s += end_s - begin_s
        self._pauses.add(begin_s, end_s)
        self._trace.span(trace.HOST, "compile", begin_s, end_s, programs=count)

    # ------------------------------------------------------------------------------------- checking

    def _check_new(self, keys: abc.Sequence[ProgramKey]) -> int:
        """Compare the programs among these that make a claim with prefill, once each.

        Waits for those that are still compiled.

        Returns:
            How many there were.
        """
        if self._config.self_check == "off":
            return 0
        checked = self.programs.checked
        new = [key for key in keys if key not in checked and is_checkable(key)]
        for variant in dict.fromkeys((key.num_top, key.with_filters) for key in new):
            some = [key for key in new if (key.num_top, key.with_filters) == variant]
            reference = self._reference_key(some)
            reach = Reach(
                run=self.run_aside,
                checksums=self._device.checksums,
                idle=self._idle(),
            )
            done, found = check_programs(self._model, self._config, some, reference, reach)
            checked.update(done)
            self._claim.note(found)
        self._stats.num_self_checked += sum(key in checked for key in new)
        return len(new)

    def _note_checking(self, count: int, begin_s: float) -> None:
        if not count:
            return
        end_s = time.perf_counter()
        self._stats.num_self_unchecked = sum(
            is_checkable(key) and key not in self.programs.checked for key in self.programs
        )
        self._stats.self_check_s += end_s - begin_s
        self._pauses.add(begin_s, end_s)
        self._trace.span(trace.HOST, "self-check", begin_s, end_s, programs=count)

    def _reference_key(self, keys: abc.Sequence[ProgramKey]) -> ProgramKey:
        """The prefill of one sequence with what these programs report, or the smallest there is."""
        config = self._config
        rows, length = min(config.prefill_shapes)
        alike = dataclasses.replace(
            keys[0], kind="prefill", rows=rows, length=length, table_len=config.table_len
        )
        known = (
            key
            for key in (*self.programs, *keys)
            if dataclasses.replace(key, rows=rows, length=length) == alike
        )
        return min(known, key=lambda key: (key.rows, key.length), default=alike)

    def _idle(self) -> np.ndarray:
        """Pages that nobody holds, int32 [dp, m]."""
        idle = self._idle_pages(_LEAST_IDLE)
        count = min(map(len, idle))
        return np.asarray([pages[:count] for pages in idle], np.int32)

    def run_aside(self, key: ProgramKey, slots, sampling, *host) -> tuple[Any, jax.Array]:
        """Launch a program on the cache, with slots that are nobody's: `DeviceState.run_aside`."""
        return self._device.run_aside(self._get(key), self._params_of(key), slots, sampling, *host)


def _smallest(sizes: abc.Sequence[int], rows: abc.Sequence[abc.Sequence[Row]]) -> int:
    """The smallest of `sizes`, which ascend, that holds the rows of every replica."""
    most = max(len(part) for part in rows)
    return next(size for size in sizes if size >= most)
