# SPDX-License-Identifier: Apache-2.0
"""Which rows the next step runs. Pure Python: no model, no array, no clock.

The scheduler counts what has been launched, not what has come back: it runs a step ahead of the
device. Where a count is not known yet (how much of a window a verification commits) it reckons
with the most, and is corrected when the result is read. None of its choices can change a bit of a
deterministic answer.
"""

import bisect
import enum
import heapq
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from detjax.serving.kv_cache import PagePool, page_key, salted_root
from detjax.serving.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Sizes and policies. Those of a replica, where there are several.

    Attributes:
        num_replicas: Replicas, each with its own slots and pages.
        num_slots: Sequences that run at once.
        num_pages: Cache pages.
        page_len: Tokens of a page.
        prefill_shapes: (rows, tokens a row) that a prefill may have.
        max_tokens_per_step: Most tokens of a step, padding included.
        max_prefill_streak: Steps in a row that decoding waits while there are prompts to prefill.
        verify_rows: Windows of one verification.
        verify_window: Tokens of one window.
        verify_patience: Steps that a full window may wait for company.
        verify_deadline: Steps after which an open window counts as full.
        max_draft_fraction: Most share of drafted sequences among those that decode, at which they
            draft; above it the decode step is canonical and needs no verification.
        decode_steps: Most tokens of a sequence in one launch, while all who run decode.
        ageing_steps: Steps of waiting that one level of priority is worth.
        has_prefix_cache: Whether full canonical pages are shared between requests.
        is_synchronous: Sequences that are not drafted wait for each result, so that the host can
            propose drafts from it.

    Raises:
        ValueError: If no prefill would fit into a step beside everything else.
    """

    num_replicas: int
    num_slots: int
    num_pages: int
    page_len: int
    prefill_shapes: tuple[tuple[int, int], ...]
    max_tokens_per_step: int
    max_prefill_streak: int
    verify_rows: int
    verify_window: int
    verify_patience: int
    verify_deadline: int
    max_draft_fraction: float
    decode_steps: int
    ageing_steps: int
    has_prefix_cache: bool
    is_synchronous: bool

    def __post_init__(self):
        """Check that a prefill always fits."""
        least = min(rows * length for rows, length in self.prefill_shapes)
        least += self.num_slots + self.verify_rows * self.verify_window
        if self.max_tokens_per_step < least:
            raise ValueError(
                f"max_tokens_per_step={self.max_tokens_per_step} must be at least {least}: every "
                "slot, a verification and the smallest prefill; raise it or lower those"
            )


_MIN_QUEUE = 64
"""Entries of a queue that is not worth tidying."""


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One sequence of a request. `Scheduler` alone changes it.

    Attributes:
        request_id: Of the request.
        sequence_idx: Which of the request's sequences.
        request: What was asked.
        is_drafted: Tokens may be proposed by drafts and committed by verification.
        is_canonical: What is committed was computed canonically, so its pages may be shared.
        rank: Order of service; the lowest is never preempted by another.
        max_len: Length at which it ends.
        tokens: The prompt and what has been committed.
        state: Waiting, running or done.
        replica: Where it runs.
        slot: Its slot there.
        epoch: How often it was preempted. Results of an earlier epoch are dropped.
        pages: Its pages, in order.
        keys: Of its leading full pages.
        num_registered: How many leading pages the prefix cache was told of.
        num_to_prefill: Tokens that prefill computes, before decoding goes on.
        num_prefilled: How many of them have been launched.
        num_pending: Most tokens that results not read yet may commit.
        num_drafts: Drafts launched in the open window.
        window: Windows before the open one.
        opened_step: When the open window got its first draft.
        closed_step: When the open window was found full; None before.
    """

    request_id: int
    sequence_idx: int
    request: Request
    is_drafted: bool
    is_canonical: bool
    service_order: tuple[int, int]
    max_len: int
    tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    replica: int = 0
    slot: int = 0
    epoch: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_to_prefill: int = 0
    num_prefilled: int = 0
    num_pending: int = 0
    num_drafts: int = 0
    window: int = 0
    opened_step: int = 0
    closed_step: int | None = None

    @property
    def num_outputs(self) -> int:
        """Tokens committed so far."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def len_bound(self) -> int:
        """Longest that `tokens` can be once all results are read."""
        return len(self.tokens) + self.num_pending

    @property
    def is_prefilled(self) -> bool:
        """Whether its prompt has been launched to the end."""
        return self.num_prefilled == self.num_to_prefill


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRow:
    """Tokens `start` onwards of a sequence; the last row of a prompt chooses a token."""

    seq: Sequence
    epoch: int
    start: int
    token_ids: abc.Sequence[int]
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """`num_tokens` that are committed at once, or as many drafts from `offset` of a window on."""

    seq: Sequence
    epoch: int
    num_tokens: int
    is_draft: bool
    offset: int
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyRow:
    """A window of `num_drafts` drafts: those on the device, or `given` by the host."""

    seq: Sequence
    epoch: int
    num_drafts: int
    given: tuple[int, ...] | None


Row = PrefillRow | DecodeRow | VerifyRow


def max_committed(row: Row) -> int:
    """Most tokens that the result of a row can commit."""
    match row:
        case PrefillRow():
            return int(row.is_last)
        case DecodeRow():
            return 0 if row.is_draft else row.num_tokens
        case VerifyRow():
            return row.num_drafts + 1


@dataclass(kw_only=True, slots=True)
class ScheduledBatch:
    """Rows of one step, by replica. They run in this order: verify, prefill, decode.

    Attributes:
        verifies: Windows to verify.
        prefill_shape: (rows, tokens a row); None where there is no prefill.
        prefills: Pieces of prompts.
        decodes: Tokens to commit, or drafts.
        failed: Sequences that end here, each with the reason.
    """

    verifies: list[list[VerifyRow]]
    prefill_shape: tuple[int, int] | None
    prefills: list[list[PrefillRow]]
    decodes: list[list[DecodeRow]]
    failed: list[tuple[Sequence, str]]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not any(
            rows for part in (self.verifies, self.prefills, self.decodes) for rows in part
        )


class SequenceError(Exception):
    """Planning or laying out a row raised for this sequence alone; the cause says what."""

    def __init__(self, seq: Sequence):
        super().__init__(f"request {seq.request_id}, sequence {seq.sequence_idx}")
        self.seq = seq


@contextmanager
def blaming(seq: Sequence) -> Iterator[None]:
    """Say whose fault it is."""
    try:
        yield
    except Exception as error:
        raise SequenceError(seq) from error


class _Replica:
    """The slots and pages of one data-parallel rank."""

    def __init__(self, config: SchedulerConfig):
        self.pool = PagePool(config.num_pages)
        self.num_slots = config.num_slots
        self.free_slots = list(range(config.num_slots - 1, -1, -1))
        self.running: list[Sequence] = []  # by rank
        self.coming: dict[bytes, int] = {}  # pages that the prefills of this plan will write

    def find(self, key: bytes) -> int | None:
        """The page of a key whose content is there, or written by a launch of this plan."""
        page = self.pool.find(key)
        return self.coming.get(key) if page is None else page

    def vacate(self) -> None:
        """Take slots and pages from everybody; see `PagePool.reclaim`."""
        self.running, self.coming = [], {}
        self.free_slots = list(range(self.num_slots - 1, -1, -1))
        self.pool.reclaim()

    def prefilling(self) -> list[Sequence]:
        return [s for s in self.running if not s.is_prefilled]


Propose = Callable[[abc.Sequence[int], int], tuple[int, ...]]
"""From the tokens so far and the most drafts wanted, drafts that cost no model; or none."""


def propose_nothing(tokens: abc.Sequence[int], most: int) -> tuple[int, ...]:
    """Give no drafts."""
    return ()


class Scheduler:
    """Admits, orders, preempts and ends sequences, and says what the next step runs."""

    def __init__(
        self, config: SchedulerConfig, *, root_key: bytes = b"", propose: Propose = propose_nothing
    ):
        """Begin with nothing to do.

        Args:
            config: Sizes and policies.
            root_key: Names the weights and numerics that pages are computed with.
            propose: Host-side drafts for sequences that are decoded canonically.
        """
        self._config = config
        self._root_key = root_key
        self._propose = propose
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._replicas = [_Replica(config) for _ in range(config.num_replicas)]
        self._serial = 0
        self._step = 0
        self._num_held = 0
        self._is_drafting = True
        self.num_waiting = 0
        self.num_preempted = 0
        self.num_prefix_tokens = 0

    # ---------------------------------------------------------------------------------------- state

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot."""
        return [seq for replica in self._replicas for seq in replica.running]

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs."""
        return self.num_waiting > 0 or any(replica.running for replica in self._replicas)

    @property
    def pools(self) -> list[PagePool]:
        """The pages of each replica."""
        return [replica.pool for replica in self._replicas]

    # --------------------------------------------------------------------------- life of a sequence

    def add(
        self,
        request: Request,
        *,
        request_id: int,
        sequence_idx: int,
        max_len: int,
        is_drafted: bool,
        is_canonical: bool,
    ) -> Sequence:
        """Queue a sequence."""
        # WHY: a level of priority moves the arrival back, so the order never changes while waiting
        # and everybody's turn comes.
        arrival = self._step - request.priority * self._config.ageing_steps
        seq = Sequence(
            request_id=request_id,
            sequence_idx=sequence_idx,
            request=request,
            is_drafted=is_drafted,
            is_canonical=is_canonical,
            service_order=(arrival, self._serial),
            max_len=max_len,
            tokens=list(request.prompt_token_ids),
        )
        self._serial += 1
        self._wait(seq)
        return seq

    def end(self, seq: Sequence) -> None:
        """Take back everything that a sequence holds. Its results in flight are dropped."""
        if seq.state is SequenceState.RUNNING:
            self._leave(seq)
        was_waiting = seq.state is SequenceState.WAITING
        seq.state = SequenceState.DONE
        if was_waiting:
            self.num_waiting -= 1  # the queue skips it
            self._tidy()

    def _tidy(self) -> None:
        """Drop from the queue who has ended there, once they are the most of it."""
        if len(self._waiting) > max(_MIN_QUEUE, 2 * self.num_waiting):
            kept = [entry for entry in self._waiting if entry[1].state is SequenceState.WAITING]
            heapq.heapify(kept)
            self._waiting = kept

    def launched(self) -> None:
        """Note that the device has taken the launches of the last plan.

        From now on others may find the pages that they write. A plan that was not launched has told
        nobody of its pages: `restart` then.
        """
        for replica in self._replicas:
            for key, page in replica.coming.items():
                replica.pool.register(page, key)
            replica.coming = {}

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Let these sequences, and no others, begin anew from what they have committed.

        For a plan that was not launched, or any call that did not end: right whatever it has left
        behind. Cached pages stay; results in flight are dropped.
        """
        for replica in self._replicas:
            replica.vacate()
        self._waiting, self.num_waiting = [], 0
        for seq in seqs:
            seq.pages, seq.keys, seq.num_registered = [], [], 0
            seq.epoch += 1
            seq.num_pending = 0
            self._open_window(seq)
            self._wait(seq)

    def is_current(self, row: Row) -> bool:
        """Whether the result of a row still counts."""
        return row.seq.state is SequenceState.RUNNING and row.epoch == row.seq.epoch

    def retire(self, row: Row) -> None:
        """Note that the result of a current row has been read. Commit its tokens afterwards."""
        row.seq.num_pending -= max_committed(row)

    def commit(self, seq: Sequence, token_id: int) -> None:
        """Append a token to a running sequence."""
        seq.tokens.append(token_id)

    def share_pages(self, seq: Sequence) -> None:
        """Let others find the pages that a running sequence's committed tokens have filled."""
        if seq.is_canonical and seq.is_prefilled:
            # The last token's keys and values are not computed yet.
            self._register(seq, len(seq.tokens) - 1)

    def forget_pages(self) -> None:
        """Empty the prefix cache, as its pages are of other weights than those to come."""
        for pool in self.pools:
            pool.forget()

    def close_window(self, row: DecodeRow) -> None:
        """Verify the window of a draft at once, since the draft would end the sequence."""
        seq = row.seq
        if seq.window == row.window and seq.closed_step is None:
            seq.closed_step = self._step

    def _wait(self, seq: Sequence) -> None:
        seq.state = SequenceState.WAITING
        heapq.heappush(self._waiting, (seq.service_order, seq))
        self.num_waiting += 1

    def _leave(self, seq: Sequence) -> None:
        replica = self._replicas[seq.replica]
        replica.pool.give_back(seq.pages)
        replica.running.remove(seq)
        replica.free_slots.append(seq.slot)
        seq.pages = []
        seq.num_registered = 0

    def _preempt(self, seq: Sequence) -> None:
        """Free a sequence's slot and pages. What it committed stays, and is computed again."""
        self._leave(seq)
        seq.epoch += 1
        seq.num_pending = 0
        self._open_window(seq)
        self._wait(seq)
        self.num_preempted += 1

    def _open_window(self, seq: Sequence) -> None:
        seq.num_drafts = 0
        seq.window += 1
        seq.closed_step = None

    # ------------------------------------------------------------------------------------- planning

    def schedule(self) -> ScheduledBatch:
        """Decide the next step, and reckon with its having been launched: `launched` says so."""
        assert not any(replica.coming for replica in self._replicas), "launched() was not called"
        self._step += 1
        self._choose_drafting()
        batch = ScheduledBatch(
            verifies=[[] for _ in self._replicas],
            prefill_shape=None,
            prefills=[[] for _ in self._replicas],
            decodes=[[] for _ in self._replicas],
            failed=[],
        )
        if self._num_held < self._config.max_prefill_streak:
            self._admit(batch)
            if any(replica.prefilling() for replica in self._replicas):
                self._num_held += any(s.is_prefilled for s in self.running)
                self._schedule_prefills(batch, self._config.max_tokens_per_step)
                return batch
        self._num_held = 0
        self._schedule_verifies(batch)
        most_tokens = self._decode_steps()
        for replica, rows in zip(self._replicas, batch.decodes, strict=True):
            self._schedule_decodes(replica, rows, batch, most_tokens)
        # WHY: who was preempted for a later row's pages must not write to them any more.
        batch.verifies = [[r for r in rows if self.is_current(r)] for rows in batch.verifies]
        used = max(len(rows) for rows in batch.decodes)
        if any(batch.verifies):
            used += self._config.verify_rows * self._config.verify_window
        self._admit(batch)
        self._schedule_prefills(batch, self._config.max_tokens_per_step - used)
        return batch

    def _ensure_page(
        self, replica: _Replica, seq: Sequence, position: int, batch: ScheduledBatch
    ) -> bool:
        """Give the sequence pages up to `position`, at the cost of those that rank below it."""
        missing = self._num_missing_pages(seq, position)
        if not missing:
            return True
        while replica.pool.num_available < missing:
            if seq.num_pending:
                return False  # what is coming may end it
            last = replica.running[-1]
            if last is not seq:
                self._preempt(last)
                continue
            if len(replica.running) == 1:
                self._fail(seq, position + 1, batch)
            return False
        seq.pages += replica.pool.take(missing)
        return True

    def _fail(self, seq: Sequence, num_tokens: int, batch: ScheduledBatch) -> None:
        self.end(seq)
        cache = f"the cache of {self._config.num_pages} pages of {self._config.page_len}"
        batch.failed.append((seq, f"its {num_tokens} tokens do not fit in {cache}"))

    # --------------------------------------------------------------------------------------- decode

    def _schedule_decodes(
        self, replica: _Replica, rows: list[DecodeRow], batch: ScheduledBatch, most_tokens: int
    ) -> None:
        # Best rank first: who is preempted for another has no row yet.
        for seq in tuple(replica.running):
            if seq.state is not SequenceState.RUNNING or not self._can_decode(seq):
                continue
            num_tokens = min(self._wanted(seq), most_tokens)
            # Nobody is preempted for tokens that may turn out to lie behind an end.
            last = self._last_position(seq, num_tokens)
            if self._num_missing_pages(seq, last) > replica.pool.num_available:
                num_tokens = 1
                last = self._last_position(seq, num_tokens)
            if self._ensure_page(replica, seq, last, batch):
                rows.append(self._decode(seq, num_tokens))

    def _decode_steps(self) -> int:
        """Tokens of a sequence in one launch of this step.

        Several while all who run decode, since others would wait for them, and while somebody
        wants more than half of them.
        """
        steps = self._config.decode_steps
        if steps == 1 or not all(s.is_prefilled for s in self.running):
            return 1
        wanted = max((self._wanted(s) for s in self.running if self._can_decode(s)), default=0)
        return steps if 2 * wanted > steps else 1

    def _wanted(self, seq: Sequence) -> int:
        """Tokens that a sequence can decode before something else must happen."""
        return self._room(seq) if self._drafts(seq) else seq.max_len - seq.len_bound

    def _last_position(self, seq: Sequence, num_tokens: int) -> int:
        """The last position whose keys and values `num_tokens` more tokens need."""
        if self._drafts(seq):
            # A draft needs the page of its successor too: verification runs up to there.
            return seq.len_bound - 1 + seq.num_drafts + num_tokens
        return seq.len_bound - 2 + num_tokens

    def _num_missing_pages(self, seq: Sequence, position: int) -> int:
        """Pages up to `position` that a sequence does not hold."""
        return max(0, position // self._config.page_len + 1 - len(seq.pages))

    def _drafts(self, seq: Sequence) -> bool:
        """Whether a decode step of a sequence makes a draft now."""
        return seq.is_drafted and self._is_drafting

    def _choose_drafting(self) -> None:
        """Draft while few do; once it is off, only when clearly fewer do."""
        decoding = [s for s in self.running if s.is_prefilled]
        if not decoding:
            return
        share = sum(s.is_drafted for s in decoding) / len(decoding)
        limit = self._config.max_draft_fraction
        self._is_drafting = share <= (limit if self._is_drafting else 0.8 * limit)

    def _can_decode(self, seq: Sequence) -> bool:
        if not seq.is_prefilled or seq.len_bound >= seq.max_len:
            return False
        if not self._drafts(seq):
            # What drafts have written is to be verified first.
            is_waiting = self._config.is_synchronous and seq.num_pending
            return not (is_waiting or seq.num_drafts)
        return seq.closed_step is None and self._room(seq) > 0

    def _room(self, seq: Sequence) -> int:
        """Drafts that the open window can still take."""
        # A window of d drafts may commit d + 1 tokens.
        most = min(self._config.verify_window, seq.max_len - seq.len_bound) - 1
        return most - seq.num_drafts

    def _decode(self, seq: Sequence, num_tokens: int) -> DecodeRow:
        row = DecodeRow(
            seq=seq,
            epoch=seq.epoch,
            num_tokens=num_tokens,
            is_draft=self._drafts(seq),
            offset=seq.num_drafts,
            window=seq.window,
        )
        if row.is_draft:
            if seq.num_drafts == 0:
                seq.opened_step = self._step
            seq.num_drafts += num_tokens
        else:
            seq.closed_step = None
        seq.num_pending += max_committed(row)
        return row

    # --------------------------------------------------------------------------------- verification

    def _schedule_verifies(self, batch: ScheduledBatch) -> None:
        """Full windows first; parts of windows when they waited too long or ride for nothing."""
        self._schedule_given(batch)
        ready = [[s for s in r.running if self._mark_ready(s)] for r in self._replicas]
        waited = max((self._step - (s.closed_step or 0) for r in ready for s in r), default=-1)
        if waited < 0:
            return
        is_full = any(len(seqs) >= self._config.verify_rows for seqs in ready)
        is_due = waited >= self._config.verify_patience or any(batch.verifies)
        if not (is_full or is_due or self._is_stuck()):
            return
        for replica, seqs, rows in zip(self._replicas, ready, batch.verifies, strict=True):
            seqs.sort(key=lambda s: (s.closed_step, s.service_order))
            seqs += self._riders(replica)
            for seq in seqs:
                if len(rows) == self._config.verify_rows:
                    break
                # WHY: who finds no page takes no row from the next, whose end may free one.
                position = seq.len_bound - 1 + seq.num_drafts
                if seq.state is SequenceState.RUNNING and self._ensure_page(
                    replica, seq, position, batch
                ):
                    rows.append(self._verify(seq, seq.num_drafts, None))

    def _mark_ready(self, seq: Sequence) -> bool:
        """Whether a window is to be verified. Notes since when."""
        if not (seq.is_drafted and seq.is_prefilled and seq.len_bound < seq.max_len):
            return False
        age = self._step - seq.opened_step
        is_late = seq.num_drafts > 0 and age >= self._config.verify_deadline
        if seq.closed_step is None and (is_late or not self._can_decode(seq)):
            seq.closed_step = self._step
        return seq.closed_step is not None

    def _is_stuck(self) -> bool:
        """Whether nobody can go on without a verification."""
        return not any(self._can_decode(s) or not s.is_prefilled for s in self.running)

    def _riders(self, replica: _Replica) -> list[Sequence]:
        """Open windows, at least half full, for rows that would be padding."""
        half = self._config.verify_window // 2
        riders = [s for s in replica.running if s.closed_step is None and s.num_drafts >= half > 0]
        return sorted(riders, key=lambda s: (-s.num_drafts, s.service_order))

    def _schedule_given(self, batch: ScheduledBatch) -> None:
        """Windows whose drafts the host proposes, for sequences without a result to come."""
        if not self._config.is_synchronous:
            return
        for replica, rows in zip(self._replicas, batch.verifies, strict=True):
            for seq in tuple(replica.running):
                if len(rows) == self._config.verify_rows:
                    break
                if seq.state is not SequenceState.RUNNING or not self._can_decode(seq):
                    continue
                room = min(self._config.verify_window, seq.max_len - seq.len_bound) - 1
                with blaming(seq):
                    given = tuple(self._propose(seq.tokens, room)[:room])
                position = seq.len_bound - 1 + len(given)
                if given and self._ensure_page(replica, seq, position, batch):
                    rows.append(self._verify(seq, len(given), given))

    def _verify(self, seq: Sequence, num_drafts: int, given: tuple[int, ...] | None) -> VerifyRow:
        row = VerifyRow(seq=seq, epoch=seq.epoch, num_drafts=num_drafts, given=given)
        seq.num_pending += max_committed(row)
        self._open_window(seq)
        return row

    # ------------------------------------------------------------------------ admission and prefill

    def _admit(self, batch: ScheduledBatch) -> None:
        """Let the best of those who wait run, while there are slots, pages and rows to prefill."""
        most_rows = max(rows for rows, _ in self._config.prefill_shapes)
        while self._waiting:
            seq = self._waiting[0][1]
            if seq.state is SequenceState.WAITING:
                open_ones = [
                    (-self._count_matched(r, seq), -r.pool.num_available, i)
                    for i, r in enumerate(self._replicas)
                    if r.free_slots and len(r.prefilling()) < most_rows
                ]
                # WHY: nobody overtakes the first: small requests would starve a large one.
                if not any(self._enter(i, seq, batch) for _, _, i in sorted(open_ones)):
                    return
                self.num_waiting -= 1
            heapq.heappop(self._waiting)

    def _enter(self, index: int, seq: Sequence, batch: ScheduledBatch) -> bool:
        """Give a sequence a slot and pages for all its tokens, or end it; False if it must wait."""
        replica = self._replicas[index]
        matched = self._matched(replica, seq)
        replica.pool.share(matched)
        missing = -(-len(seq.tokens) // self._config.page_len) - len(matched)
        # Those who run and may outgrow their pages will need one each, sooner or later.
        growing = sum(not self._is_housed(s) for s in replica.running)
        if replica.pool.num_available < missing + growing:
            replica.pool.give_back(matched)
            if replica.running:
                return False
            seq.state = SequenceState.DONE
            self._fail(seq, len(seq.tokens), batch)
            return True
        seq.pages = matched + replica.pool.take(missing)
        seq.state = SequenceState.RUNNING
        seq.replica, seq.slot = index, replica.free_slots.pop()
        seq.num_registered = len(matched)
        seq.num_to_prefill = len(seq.tokens)
        seq.num_prefilled = len(matched) * self._config.page_len
        self.num_prefix_tokens += seq.num_prefilled
        bisect.insort(replica.running, seq, key=lambda s: s.service_order)
        return True

    def _is_housed(self, seq: Sequence) -> bool:
        """Whether a sequence holds all pages that it can ever need."""
        return len(seq.pages) * self._config.page_len >= seq.max_len

    def _schedule_prefills(self, batch: ScheduledBatch, most_tokens: int) -> None:
        batch.prefill_shape = shape = self._prefill_shape(most_tokens)
        if shape is None:
            return
        num_rows, length = shape
        for replica, rows in zip(self._replicas, batch.prefills, strict=True):
            for seq in replica.prefilling()[:num_rows]:
                rows.append(self._prefill(replica, seq, length))

    def _prefill_shape(self, most_tokens: int) -> tuple[int, int] | None:
        """The shape that computes most tokens among those of which half is no padding."""
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
                sized.append((min(share, 0.5), useful, -rows * length, (rows, length)))
        return max(sized)[-1]

    def _prefill(self, replica: _Replica, seq: Sequence, length: int) -> PrefillRow:
        self._match_more(replica, seq)
        start = seq.num_prefilled
        stop = min(start + length, seq.num_to_prefill)
        seq.num_prefilled = stop
        row = PrefillRow(
            seq=seq,
            epoch=seq.epoch,
            start=start,
            token_ids=seq.tokens[start:stop],
            is_last=seq.is_prefilled,
        )
        seq.num_pending += max_committed(row)
        # WHY: found at once. Whoever reads these pages in this plan is in the same launch, which
        # writes all keys and values of a layer before any row attends to them.
        for key, page in self._unregistered(seq, stop):
            replica.coming.setdefault(key, page)
        return row

    # --------------------------------------------------------------------------------- prefix cache

    def _key(self, seq: Sequence, index: int) -> bytes:
        """Name page `index` of a sequence, whose tokens must be there."""
        page_len = self._config.page_len
        while len(seq.keys) <= index:
            start = len(seq.keys) * page_len
            if seq.keys:
                parent = seq.keys[-1]
            else:
                parent = salted_root(self._root_key, seq.request.cache_salt)
            seq.keys.append(page_key(parent, seq.tokens[start : start + page_len]))
        return seq.keys[index]

    def _max_matched(self, seq: Sequence) -> int:
        """Pages that may come from others: not the last token's, whose logits are needed."""
        if not self._config.has_prefix_cache:
            return 0
        return (len(seq.tokens) - 1) // self._config.page_len

    def _matched(self, replica: _Replica, seq: Sequence) -> list[int]:
        """Pages of the longest prefix that is in the cache."""
        pages = []
        for index in range(self._max_matched(seq)):
            page = replica.pool.find(self._key(seq, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def _count_matched(self, replica: _Replica, seq: Sequence) -> int:
        return len(self._matched(replica, seq))

    def _match_more(self, replica: _Replica, seq: Sequence) -> None:
        """Use pages that another sequence has filled since this one was admitted."""
        page_len = self._config.page_len
        while seq.num_prefilled % page_len == 0:
            index = seq.num_prefilled // page_len
            if index >= self._max_matched(seq):
                return
            page = replica.find(self._key(seq, index))
            if page is None:
                return
            replica.pool.share([page])
            replica.pool.give_back([seq.pages[index]])
            seq.pages[index] = page
            seq.num_registered = index + 1
            seq.num_prefilled += page_len
            self.num_prefix_tokens += page_len

    def _register(self, seq: Sequence, num_tokens: int) -> None:
        """Tell the prefix cache of pages that `num_tokens` canonical tokens fill."""
        pool = self._replicas[seq.replica].pool
        for key, page in self._unregistered(seq, num_tokens):
            pool.register(page, key)

    def _unregistered(self, seq: Sequence, num_tokens: int) -> Iterator[tuple[bytes, int]]:
        """Keys and pages that `num_tokens` tokens fill and nobody was told of, who is told now."""
        if not self._config.has_prefix_cache:
            return
        for index in range(seq.num_registered, num_tokens // self._config.page_len):
            yield self._key(seq, index), seq.pages[index]
            seq.num_registered = index + 1
