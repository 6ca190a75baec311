# SPDX-License-Identifier: Apache-2.0
"""Which rows the next step runs. Pure Python: no model, no array, no clock.

The scheduler counts what has been launched, not what has come back: it runs a step ahead of the
device. Where a count is not known yet (how much of a window a verification commits) it reckons
with the most, and is corrected when the result is read. None of its choices can change a bit of a
deterministic answer.
"""

import bisect
from collections import abc
from collections.abc import Iterable

from detjax.engine.config import MOSTLY_USEFUL, ReplicaConfig
from detjax.engine.errors import OutOfPagesError
from detjax.engine.requests.sequence import (
    NOTHING_HELD,
    DecodeRow,
    PrefillRow,
    Row,
    ScheduledBatch,
    Sequence,
    SequenceState,
    max_committed,
)
from detjax.engine.scheduling.adapter_slots import AdapterSlots
from detjax.engine.scheduling.drafters import Drafter
from detjax.engine.scheduling.kv_cache import PagePool
from detjax.engine.scheduling.local_pages import LocalPages
from detjax.engine.scheduling.prefix_cache import PrefixCache
from detjax.engine.scheduling.speculation import DraftPlan, Speculation, open_window
from detjax.engine.scheduling.waiting_queue import WaitingQueue


class _Replica:
    """The slots and pages of one data-parallel rank, and its sequences in order of service."""

    def __init__(self, config: ReplicaConfig, root_key: bytes):
        self.pool = PagePool(config.num_pages)
        self.local: LocalPages | None = None
        if config.num_local_pages:
            self.local = LocalPages(
                self.pool,
                num_pages=config.num_local_pages,
                page_len=config.page_len,
                reach=config.local_reach,
            )
        self.prefixes = PrefixCache(
            self.pool,
            local=self.local,
            page_len=config.page_len,
            root_key=root_key,
            is_enabled=config.has_prefix_cache,
        )
        self.num_slots = config.num_slots
        self.free_slots = list(range(config.num_slots - 1, -1, -1))
        self.running: list[Sequence] = []

    def vacate(self) -> None:
        """Take slots and pages from everybody; see `PagePool.reclaim`."""
        self.running = []
        self.prefixes.drop_announced()
        self.free_slots = list(range(self.num_slots - 1, -1, -1))
        self.pool.reclaim()
        if self.local is not None:
            self.local.clear()

    def hold(self, seq: Sequence, first: int, last: int) -> None:
        """Give a sequence the local pages of its tokens from one position to another.

        What lies before is not read any more; it goes to others in launches that come later.
        """
        if self.local is not None:
            seq.held = self.local.move(seq.pages, seq.held, (first, last))

    def free(self, seq: Sequence) -> None:
        """Take all pages of a sequence."""
        if self.local is not None:
            self.local.release(seq.held_pages)
        self.pool.free(seq.pages)
        seq.pages, seq.held = [], NOTHING_HELD

    def prefilling(self) -> list[Sequence]:
        return [s for s in self.running if not s.is_prefilled]


class Scheduler:
    """Admits, orders, preempts and ends sequences, and says what the next step runs.

    Attributes:
        adapters: Which adapter is in which slot of the devices.
        num_preempted: Times a sequence lost its pages to another.
        num_prefix_tokens: Tokens that were not computed, as the prefix cache had them.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        root_key: bytes = b"",
        drafters: abc.Sequence[Drafter] = (),
        num_adapter_slots: int = 0,
    ):
        """Begin with nothing to do.

        Args:
            config: Sizes and policies.
            root_key: Names the weights and numerics that pages are computed with.
            drafters: As `Speculation` takes them.
            num_adapter_slots: Adapters that may be on the devices at once.
        """
        self._config = config
        self._waiting = WaitingQueue()
        self._replicas = [_Replica(config, root_key) for _ in range(config.num_replicas)]
        self._speculation = Speculation(config, drafters)
        self.adapters = AdapterSlots(num_adapter_slots)
        self._num_added = 0
        self._step = 0
        self._has_prefilled = False  # in the last step
        self._prefill_streak = 0
        self.num_preempted = 0
        self.num_prefix_tokens = 0

    # ---------------------------------------------------------------------------------------- state

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot."""
        return [seq for replica in self._replicas for seq in replica.running]

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._waiting.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs."""
        return self.num_waiting > 0 or any(replica.running for replica in self._replicas)

    @property
    def pools(self) -> list[PagePool]:
        """The pages of each replica."""
        return [replica.pool for replica in self._replicas]

    @property
    def local_pages(self) -> list[LocalPages | None]:
        """What local layers of each replica have of its pages; None where that is all of them."""
        return [replica.local for replica in self._replicas]

    def idle_pages(self, least: int) -> tuple[list[list[int]], list[list[int]] | None]:
        """Pages of each replica that nobody holds, as `PagePool.idle_pages` has them.

        And those of local layers; None where these have the pages of the others.
        """
        local = [pages.idle_pages(least) for pages in self.local_pages if pages is not None]
        return [pool.idle_pages(least) for pool in self.pools], local or None

    # --------------------------------------------------------------------------- life of a sequence

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        # WHY: a level of priority moves the arrival back, so the order never changes while waiting
        # and everybody's turn comes.
        arrival = self._step - seq.request.priority * self._config.ageing_steps
        seq.service_order = (arrival, self._num_added)
        self._num_added += 1
        self._waiting.push(seq)

    def end(self, seq: Sequence) -> None:
        """Take back everything that a sequence holds. Its results in flight are dropped."""
        if seq.state is SequenceState.RUNNING:
            self._release(seq)
        was_waiting = seq.state is SequenceState.WAITING
        if seq.state is not SequenceState.DONE:
            self._speculation.note_end(seq)
        seq.state = SequenceState.DONE
        if was_waiting:
            self._waiting.drop_ended()

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Let these sequences, and no others, begin anew from what they have committed.

        For a batch that was not launched, or any call that did not end: right whatever it has left
        behind. Cached pages stay; results in flight are dropped.
        """
        for replica in self._replicas:
            replica.vacate()
        self.adapters.release_all()
        self._waiting.clear()
        for seq in seqs:
            seq.pages, seq.page_keys, seq.num_registered = [], [], 0
            seq.held = NOTHING_HELD
            self._begin_anew(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Free a sequence's slot and pages. What it committed stays, and is computed again."""
        self._release(seq)
        self._begin_anew(seq)
        self.num_preempted += 1

    def _release(self, seq: Sequence) -> None:
        replica = self._replicas[seq.replica]
        replica.free(seq)
        replica.running.remove(seq)
        replica.free_slots.append(seq.slot)
        self.adapters.release(seq.request.adapter)
        seq.num_registered = 0

    def _begin_anew(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        seq.num_in_flight = 0
        seq.drafter_len = None
        open_window(seq)
        self._waiting.push(seq)

    # -------------------------------------------------------------------------------------- results

    def confirm_launch(self) -> None:
        """Note that the device has taken the launches of the last batch.

        From now on others may find the pages that they write. A batch that was not launched has
        told nobody of its pages: `restart` then.
        """
        for replica in self._replicas:
            replica.prefixes.register_announced()

    def is_current(self, row: Row) -> bool:
        """Whether the result of a row still counts."""
        return (
            row.seq.state is SequenceState.RUNNING
            and row.num_preemptions == row.seq.num_preemptions
        )

    def note_read(self, row: Row) -> None:
        """Note that the result of a current row has been read. Commit its tokens afterwards."""
        row.seq.num_in_flight -= max_committed(row)

    def commit(self, seq: Sequence, token_id: int) -> None:
        """Append a token to a running sequence."""
        seq.tokens.append(token_id)

    def close_window(self, row: DecodeRow) -> None:
        """Verify the window of a draft at once, since the draft would end the sequence."""
        self._speculation.close_window(row, step=self._step)

    @property
    def draft_plan(self) -> DraftPlan:
        """What the last step drafts."""
        return self._speculation.plan

    def note_step(self, plan: DraftPlan, *, seconds: float, tokens: int) -> None:
        """Note what a step of a plan took: `Speculation.note_step`."""
        self._speculation.note_step(plan, seconds=seconds, tokens=tokens)

    def share_pages(self, seq: Sequence) -> None:
        """Let others find the pages that a running sequence's committed tokens have filled."""
        if seq.is_canonical and seq.is_prefilled:
            # The last token's keys and values are not computed yet.
            self._replicas[seq.replica].prefixes.register(seq, len(seq.tokens) - 1)

    def forget_pages(self) -> None:
        """Empty the prefix cache. Running sequences keep their pages, which no other finds."""
        for replica in self._replicas:
            replica.prefixes.clear()

    # ----------------------------------------------------------------------------------- scheduling

    def schedule(self) -> ScheduledBatch:
        """Decide the next step, and reckon with its having been launched: `confirm_launch` says so.

        Raises:
            SequenceError: If proposing drafts for a sequence raises.
        """
        for replica in self._replicas:
            assert not replica.prefixes.has_coming, "confirm_launch() was not called"
        self._step += 1
        self._speculation.switch(self.running, has_prefill=self._has_prefilled)
        self._has_prefilled = False
        batch = ScheduledBatch.empty(len(self._replicas))
        if self._prefill_streak < self._config.max_prefill_streak:
            self._admit(batch)
            if any(replica.prefilling() for replica in self._replicas):
                self._prefill_streak += any(s.is_prefilled for s in self.running)
                self._schedule_prefills(batch, self._config.max_tokens_per_step)
                return batch
        self._prefill_streak = 0
        self._schedule_given(batch)
        self._schedule_verifies(batch)
        self._schedule_windows(batch)
        most_tokens = self._choose_decode_steps()
        for replica, rows in zip(self._replicas, batch.decodes, strict=True):
            self._schedule_decodes(replica, rows, batch, most_tokens)
        # WHY: a sequence that was preempted for a later row's pages must not write to them.
        batch.verifies = [[r for r in rows if self.is_current(r)] for rows in batch.verifies]
        batch.windows = [[r for r in rows if self.is_current(r)] for rows in batch.windows]
        used = max(len(rows) for rows in batch.decodes)
        if any(batch.verifies) or any(batch.windows):
            used += self._config.verify_rows * self._config.verify_window
        self._admit(batch)
        self._schedule_prefills(batch, self._config.max_tokens_per_step - used)
        return batch

    def _ensure_page(
        self, replica: _Replica, seq: Sequence, position: int, batch: ScheduledBatch
    ) -> bool:
        """Give the sequence pages up to `position`, at the cost of those that rank below it."""
        missing = self._num_missing_pages(seq, position)
        while replica.pool.num_available < missing:
            if seq.num_in_flight:
                return False  # what is coming may end it
            last = replica.running[-1]
            if last is not seq:
                self._preempt(last)
                continue
            if len(replica.running) == 1:
                self._fail(seq, position + 1, batch)
            return False
        seq.pages += replica.pool.allocate(missing)
        # What is committed next may be computed again from the last token on.
        replica.hold(seq, len(seq.tokens) - 1, position)
        return True

    def _num_missing_pages(self, seq: Sequence, position: int) -> int:
        """Pages up to `position` that a sequence does not hold."""
        return max(0, position // self._config.page_len + 1 - len(seq.pages))

    def _fail(self, seq: Sequence, num_tokens: int, batch: ScheduledBatch) -> None:
        self.end(seq)
        cache = f"the cache of {self._config.num_pages} pages of {self._config.page_len}"
        error = OutOfPagesError(f"its {num_tokens} tokens do not fit in {cache}")
        batch.failed.append((seq, error))

    # --------------------------------------------------------------------------------- verification

    def _schedule_given(self, batch: ScheduledBatch) -> None:
        """Windows whose drafts the host proposes, for sequences without a result to come."""
        if not self._config.has_prompt_lookup:
            return
        for replica, rows in zip(self._replicas, batch.verifies, strict=True):
            for seq in tuple(replica.running):
                if len(rows) == self._config.verify_rows:
                    break
                if seq.state is not SequenceState.RUNNING:
                    continue
                given = self._speculation.propose(seq)
                if given is None:
                    continue
                position = seq.len_bound - 1 + len(given.token_ids)
                if self._ensure_page(replica, seq, position, batch):
                    rows.append(self._speculation.verify(seq, given))

    def _schedule_verifies(self, batch: ScheduledBatch) -> None:
        """Windows on the device that are full, or late, or ride for nothing."""
        windows = self._speculation.choose_windows(
            [replica.running for replica in self._replicas],
            step=self._step,
            is_due=any(batch.verifies),
        )
        for replica, seqs, rows in zip(self._replicas, windows, batch.verifies, strict=True):
            for seq in seqs:
                if len(rows) == self._config.verify_rows:
                    break
                # WHY: a sequence without a page takes no row from the next, whose end may free one.
                position = seq.len_bound - 1 + seq.num_drafts
                if seq.state is SequenceState.RUNNING and self._ensure_page(
                    replica, seq, position, batch
                ):
                    rows.append(self._speculation.verify(seq))

    def _schedule_windows(self, batch: ScheduledBatch) -> None:
        """Several windows a launch of a draft model, on the terms of several tokens a launch."""
        speculation, most = self._speculation, self._config.windows
        if most == 1 or not all(s.is_prefilled and not s.needs_choice for s in self.running):
            return  # others would wait, or a choice program follows each window
        wanted = [
            [(seq, count) for seq in replica.running if (count := speculation.num_windows(seq))]
            for replica in self._replicas
        ]
        fewest = [speculation.fewest_windows(seq) for part in wanted for seq, _ in part]
        if 2 * max(fewest, default=0) <= most:
            return
        for replica, part, rows in zip(self._replicas, wanted, batch.windows, strict=True):
            for seq, count in part:
                last = speculation.last_of_windows(seq, count)
                # Nobody is preempted for tokens that may turn out to lie behind an end.
                has_pages = self._num_missing_pages(seq, last) <= replica.pool.num_available
                if has_pages and self._ensure_page(replica, seq, last, batch):
                    rows.append(speculation.draft_windows(seq, count))

    # --------------------------------------------------------------------------------------- decode

    def _choose_decode_steps(self) -> int:
        """Choose how many tokens of a sequence one launch of this step makes.

        Several while all running sequences decode, since others would wait for them, and while
        one of them wants more than half of the tokens.
        """
        steps, speculation = self._config.decode_steps, self._speculation
        if steps == 1 or not all(s.is_prefilled for s in self.running):
            return 1
        decoding = [
            s
            for s in self.running
            if speculation.can_decode(s) and not speculation.drafts_by_model(s)
        ]
        if any(s.needs_choice for s in decoding):
            return 1  # a choice program follows each token
        wanted = max((speculation.num_wanted(s) for s in decoding), default=0)
        return steps if 2 * wanted > steps else 1

    def _schedule_decodes(
        self, replica: _Replica, rows: list[DecodeRow], batch: ScheduledBatch, most_tokens: int
    ) -> None:
        speculation = self._speculation
        has_windows = {row.seq for part in batch.windows for row in part}
        # Best rank first: a sequence that is preempted for another has no row yet.
        for seq in tuple(replica.running):
            if seq.state is not SequenceState.RUNNING or not speculation.can_decode(seq):
                continue
            if seq in has_windows:
                continue
            num_tokens = speculation.num_wanted(seq)
            if not speculation.drafts_by_model(seq):
                num_tokens = min(num_tokens, most_tokens)
            # Nobody is preempted for tokens that may turn out to lie behind an end.
            last = speculation.last_position(seq, num_tokens)
            if self._num_missing_pages(seq, last) > replica.pool.num_available:
                num_tokens = 1
                last = speculation.last_position(seq, num_tokens)
            if self._ensure_page(replica, seq, last, batch):
                rows.append(speculation.decode(seq, num_tokens, step=self._step))

    # ------------------------------------------------------------------------------------ admission

    def _admit(self, batch: ScheduledBatch) -> None:
        """Admit waiting sequences in order, while there are slots, pages and rows to prefill."""
        most_rows = max(rows for rows, _ in self._config.prefill_shapes)
        while (seq := self._waiting.first()) is not None:
            open_ones = [
                (-len(r.prefixes.find_prefix(seq)), -r.pool.num_available, i)
                for i, r in enumerate(self._replicas)
                if r.free_slots and len(r.prefilling()) < most_rows
            ]
            # WHY: nobody overtakes the first: small requests would starve a large one.
            if not any(self._try_admit(i, seq, batch) for _, _, i in sorted(open_ones)):
                return
            self._waiting.pop_first()

    def _try_admit(self, index: int, seq: Sequence, batch: ScheduledBatch) -> bool:
        """Give a sequence a slot and pages for all its tokens, or end it; False if it must wait."""
        if not self.adapters.can_hold(seq.request.adapter):
            return False
        replica = self._replicas[index]
        matched = replica.prefixes.find_prefix(seq)
        replica.pool.share(matched)
        missing = -(-len(seq.tokens) // self._config.page_len) - len(matched)
        # Running sequences that may outgrow their pages will need one each.
        growing = sum(not self._has_all_pages(s) for s in replica.running)
        if replica.pool.num_available < missing + growing:
            replica.pool.free(matched)
            if replica.running:
                return False
            seq.state = SequenceState.DONE
            self._fail(seq, len(seq.tokens), batch)
            return True
        seq.pages = matched + replica.pool.allocate(missing)
        seq.state = SequenceState.RUNNING
        seq.replica, seq.slot = index, replica.free_slots.pop()
        seq.adapter_slot = self.adapters.hold(seq.request.adapter)
        seq.num_registered = len(matched)
        seq.num_to_prefill = len(seq.tokens)
        seq.num_prefilled = len(matched) * self._config.page_len
        replica.hold(seq, seq.num_prefilled, seq.num_prefilled - 1)
        self._note_cached(seq, seq.num_prefilled)
        bisect.insort(replica.running, seq, key=lambda s: s.service_order)
        return True

    def _note_cached(self, seq: Sequence, num_tokens: int) -> None:
        """Count tokens that the prefix cache had. What a preempted sequence finds is its own."""
        self.num_prefix_tokens += num_tokens
        if not seq.num_preemptions:
            seq.num_cached += num_tokens

    def _has_all_pages(self, seq: Sequence) -> bool:
        """Whether a sequence holds all pages that it can ever need."""
        return len(seq.pages) * self._config.page_len >= seq.max_len

    # -------------------------------------------------------------------------------------- prefill

    def _schedule_prefills(self, batch: ScheduledBatch, most_tokens: int) -> None:
        batch.prefill_shape = shape = self._choose_prefill_shape(most_tokens)
        if shape is None:
            return
        self._has_prefilled = True
        num_rows, length = shape
        for replica, rows in zip(self._replicas, batch.prefills, strict=True):
            for seq in replica.prefilling()[:num_rows]:
                rows.append(self._prefill(replica, seq, length))

    def _choose_prefill_shape(self, most_tokens: int) -> tuple[int, int] | None:
        """The shape that computes most tokens among those that are `MOSTLY_USEFUL`."""
        missing = [
            [s.num_to_prefill - s.num_prefilled for s in r.prefilling()] for r in self._replicas
        ]
        if not any(missing):
            return None
        sized = []
        for rows, length in self._config.prefill_shapes:
            if rows * length <= most_tokens:
                useful = sum(min(n, length) for counts in missing for n in counts[:rows])
                share = useful / (rows * length * len(missing))
                sized.append((min(share, MOSTLY_USEFUL), useful, -rows * length, (rows, length)))
        return max(sized)[-1]

    def _prefill(self, replica: _Replica, seq: Sequence, length: int) -> PrefillRow:
        """Make the row of a prefill, of up to `length` tokens that the cache does not have."""
        self._note_cached(seq, replica.prefixes.extend_prefix(seq))
        start = seq.num_prefilled
        stop = min(start + length, seq.num_to_prefill)
        replica.hold(seq, start, stop - 1)
        seq.num_prefilled = stop
        row = PrefillRow(
            seq=seq,
            num_preemptions=seq.num_preemptions,
            start=start,
            token_ids=seq.tokens[start:stop],
            is_last=seq.is_prefilled,
            is_scored=min(stop, seq.num_to_score) > max(start, len(seq.prompt_logprobs)),
        )
        seq.num_in_flight += max_committed(row)
        replica.prefixes.announce(seq, stop)
        return row
