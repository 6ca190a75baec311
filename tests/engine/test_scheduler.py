# SPDX-License-Identifier: Apache-2.0
"""The scheduler without a model: a simulated device runs its batches a step behind."""

import dataclasses
from collections import Counter, abc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from detjax.engine.config import ReplicaConfig
from detjax.engine.errors import OutOfPagesError
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import (
    DecodeRow,
    PrefillRow,
    ScheduledBatch,
    Sequence,
    SequenceError,
    SequenceState,
    VerifyRow,
    WindowsRow,
    max_committed,
)
from detjax.engine.scheduling.scheduler import Scheduler

PAGE = 4
CONFIG = ReplicaConfig(
    mode="dvr",
    num_replicas=1,
    num_slots=3,
    num_pages=8,
    page_len=PAGE,
    table_lens=(8,),
    prefill_shapes=((1, 6), (2, 4)),
    decode_sizes=(3,),
    verify_sizes=(2,),
    verify_window=4,
    verify_patience=3,
    verify_deadline=6,
    max_tokens_per_step=1000,
    max_prefill_streak=0,
    max_draft_fraction=1.0,
    max_draft_batch=0,
    adapts_drafts=False,
    draft_lens=(3,),
    decode_steps=2,
    draft_weights="full",
    ageing_steps=10,
    has_prefix_cache=True,
    has_prompt_lookup=False,
    self_check="off",
)


class Device:
    """Runs batches at once, as a device would in order, and hands results over a step later.

    The token after a prefix is a function of the prefix. Each page remembers what was written to
    each place, and every read checks that it finds its own tokens' entries there, and a canonical
    row only canonical ones. Drafts are wrong where `is_right` says so.
    """

    def __init__(self, scheduler: Scheduler, config: ReplicaConfig):
        self.scheduler = scheduler
        self.config = config
        self.written: list[dict[int, tuple]] = [{} for _ in range(config.num_replicas)]
        self.local: list[dict[int, tuple]] = [{} for _ in range(config.num_replicas)]
        self.windows: dict[tuple[int, int], list[int]] = {}  # of each slot: committed, drafts
        self.prefixes: dict[tuple[int, int], list[int]] = {}  # all tokens up to the committed one
        self.is_right = lambda: True
        self.drafter = HeadCache() if config.draft_weights == "eagle3" else DraftCache(config)
        self.end: int | None = 3
        self.in_flight: list[tuple] = []

    @staticmethod
    def token_after(tokens: list[int]) -> int:
        return hash(tuple(tokens)) % 7

    def write(self, seq: Sequence, tokens: list[int], start: int, *, kind: str) -> None:
        """Write the entries of `tokens[start:]`, then read all as attention would."""
        pages, written = seq.pages, self.written[seq.replica]
        for position in range(start, len(tokens)):
            place = pages[position // PAGE] * PAGE + position % PAGE
            written[place] = (tuple(tokens[: position + 1]), kind)
        for position in range(len(tokens)):
            place = pages[position // PAGE] * PAGE + position % PAGE
            prefix, how = written[place]
            assert prefix == tuple(tokens[: position + 1]), "read another sequence's entry"
            assert how == "canonical" or kind == "draft", "read a draft's entry"
        if self.config.num_local_pages:
            self.write_locally(seq, tokens, start, kind=kind)

    def write_locally(self, seq: Sequence, tokens: list[int], start: int, *, kind: str) -> None:
        """The same on the pages of local layers, which read no further back than they may."""
        held, written = seq.held, self.local[seq.replica]

        def place(position: int) -> int:
            index = position // PAGE - held.first
            assert 0 <= index < len(held.local_pages), "a local layer has no such page"
            return held.local_pages[index] * PAGE + position % PAGE

        for position in range(start, len(tokens)):
            written[place(position)] = (tuple(tokens[: position + 1]), kind)
        for position in range(max(0, start - self.config.local_reach + 1), len(tokens)):
            prefix, how = written[place(position)]
            assert prefix == tuple(tokens[: position + 1]), "a local layer read another's entry"
            assert how == "canonical" or kind == "draft", "a local layer read a draft's entry"

    def launch(self, batch: ScheduledBatch) -> None:
        done = []
        for replica, (verifies, windows) in enumerate(
            zip(batch.verifies, batch.windows, strict=True)
        ):
            assert len(verifies) <= self.config.verify_rows
            done += [self.verify(replica, row) for row in verifies]
            done += [self.draft_windows(replica, row) for row in windows]
        launched_prefill = [
            self.prefill(replica, row, batch.prefill_shape)
            for replica, rows in enumerate(batch.prefills)
            for row in rows
        ]
        for rows in batch.decodes:
            assert len(rows) <= self.config.num_slots
        done += launched_prefill
        done += [self.decode(i, row) for i, rows in enumerate(batch.decodes) for row in rows]
        self.check_size(batch)
        self.in_flight.append(done)

    def check_size(self, batch: ScheduledBatch) -> None:
        size = max(len(rows) for rows in batch.decodes)
        has_windows = any(batch.verifies) or any(batch.windows)
        size += self.config.verify_rows * self.config.verify_window * has_windows
        if batch.prefill_shape:
            size += batch.prefill_shape[0] * batch.prefill_shape[1]
        assert size <= self.config.max_tokens_per_step

    def prefill(self, replica: int, row: PrefillRow, shape) -> tuple:
        tokens = row.seq.tokens[: row.start] + list(row.token_ids)
        assert 0 < len(row.token_ids) <= shape[1]
        assert row.seq.replica == replica
        self.write(row.seq, tokens, row.start, kind="canonical")
        self.drafter.prefill(row.seq, tokens, row.start, is_last=row.is_last)
        if not row.is_last:
            return row, []
        assert tokens == row.seq.tokens
        key = replica, row.seq.slot
        self.prefixes[key] = tokens + [self.token_after(tokens)]
        self.windows[key] = []
        return row, [self.prefixes[key][-1]]

    def decode(self, replica: int, row: DecodeRow) -> tuple:
        key = replica, row.seq.slot
        drafts = self.windows[key] if row.is_draft else []
        tokens = self.prefixes[key] + drafts
        # The device counts the drafts of a slot, and the host those of a sequence.
        assert len(self.windows[key]) == row.seq.num_drafts - row.num_tokens * row.is_draft
        kind = "canonical" if row.seq.is_canonical and not row.is_draft else "draft"
        has_model = row.is_draft and self.config.draft_weights in ("draft_model", "eagle3")
        most = self.config.verify_window - 1 if has_model else self.config.decode_steps
        assert 1 <= row.num_tokens <= most
        if not row.is_draft:
            self.drafter.miss(row.seq)
        if has_model:
            self.draft(key, row)
            return row, self.windows[key][len(drafts) :]
        for _ in range(row.num_tokens):
            self.write(row.seq, tokens, len(tokens) - 1, kind=kind)
            is_right = not row.is_draft or self.is_right()
            tokens = tokens + [self.token_after(tokens) + (0 if is_right else 100)]
        if row.is_draft:
            self.windows[key] = tokens[len(self.prefixes[key]) :]
            return row, self.windows[key][len(drafts) :]
        self.prefixes[key] = tokens
        return row, tokens[-row.num_tokens :]

    def draft(self, key: tuple[int, int], row: DecodeRow) -> None:
        """Drafts of a draft model or head behind those of a slot's window."""
        tokens = self.prefixes[key] + self.windows[key]
        self.drafter.begin(row, tokens, committed=len(self.prefixes[key]))
        for _ in range(row.num_tokens):
            self.drafter.run(row.seq, tokens)
            tokens = tokens + [self.token_after(tokens) + (0 if self.is_right() else 100)]
        self.windows[key] = tokens[len(self.prefixes[key]) :]

    def draft_windows(self, replica: int, row: WindowsRow) -> tuple:
        """Windows of one launch, from an empty one to an empty one."""
        key, seq, count = (replica, row.seq.slot), row.seq, row.num_preemptions
        assert not self.windows[key] and row.seq.num_drafts == 0
        assert 1 <= row.num_windows <= self.config.windows
        assert row.num_drafts in self.config.draft_lens
        chosen = []
        for _ in range(row.num_windows):
            if len(chosen) == row.most_tokens:
                break
            num_drafts = min(row.num_drafts, row.most_tokens - len(chosen) - 1)
            drafting = DecodeRow(
                seq=seq, num_preemptions=count, num_tokens=num_drafts,
                is_draft=True, window_idx=row.seq.window_idx,
            )  # fmt: skip
            self.draft(key, drafting)
            window = VerifyRow(
                seq=seq, num_preemptions=count, num_drafts=num_drafts, given=None,
                source=row.source,
            )  # fmt: skip
            chosen += self.verify(replica, window)[1]
        return row, chosen

    def verify(self, replica: int, row: VerifyRow) -> tuple:
        key = replica, row.seq.slot
        drafts = self.windows[key][: row.num_drafts] if row.given is None else list(row.given)
        assert len(drafts) == row.num_drafts < self.config.verify_window
        tokens = self.prefixes[key]
        self.write(row.seq, tokens + drafts, len(tokens) - 1, kind="canonical")
        chosen = []
        for draft in [*drafts, None]:
            chosen.append(self.token_after(tokens + chosen))
            if chosen[-1] != draft:
                break
        accepted = len(chosen) - 1
        self.drafter.verify(row.seq, tokens, num_drafts=row.num_drafts, accepted=accepted)
        self.prefixes[key] = tokens + chosen
        self.windows[key] = []
        return row, chosen

    def note_read(self) -> list[tuple[Sequence, list[int]]]:
        """Read the oldest results and commit them, as the engine does."""
        told = []
        for row, token_ids in self.in_flight.pop(0):
            if not self.scheduler.is_current(row):
                continue
            seq = row.seq
            self.scheduler.note_read(row)
            if isinstance(row, DecodeRow) and row.is_draft:
                if self.end in token_ids:
                    self.scheduler.close_window(row)
                continue
            assert len(token_ids) <= max_committed(row)
            for token_id in token_ids:
                self.scheduler.commit(seq, token_id)
                if len(seq.tokens) >= seq.max_len or token_id == self.end:
                    self.scheduler.end(seq)
                    break
            told.append((seq, token_ids))
            if seq.state is SequenceState.RUNNING:
                self.scheduler.share_pages(seq)
        return told


class Followed:
    """Sequences whose every token a draft model has run, or a head.

    Entries of a prefix that was found may be of a sequence without drafts.
    """

    def __init__(self):
        self.num_prefilled: dict[tuple[int, int], int] = {}  # without a gap, from the first on

    def prefill(self, seq: Sequence, start: int, stop: int) -> None:
        key = id(seq), seq.num_preemptions
        if start <= self.num_prefilled.get(key, 0):
            self.num_prefilled[key] = stop

    def miss(self, seq: Sequence) -> None:
        self.num_prefilled[id(seq), seq.num_preemptions] = -1

    def knows_all(self, seq: Sequence) -> bool:
        return self.num_prefilled.get((id(seq), seq.num_preemptions), 0) >= seq.num_to_prefill


class DraftCache:
    """A draft model's cache: each token that it runs must find its own tokens before it.

    Like the device it knows the first token of the last window and the drafts behind it, and so the
    last draft, which no step has run. What a step without drafts commits it does not know.
    """

    def __init__(self, config: ReplicaConfig):
        self.is_used = config.draft_weights == "draft_model"
        self.written: dict[tuple[int, int], tuple] = {}
        # Of each slot: position of the first token of the last window, and of the last one known.
        self.known: dict[tuple[int, int], tuple[int, int]] = {}
        self.followed = Followed()
        self.num_missed = 0

    def write(self, seq: Sequence, tokens: list[int], position: int) -> None:
        self.written[place_of(seq, position)] = tuple(tokens[: position + 1])

    def prefill(self, seq: Sequence, tokens: list[int], start: int, *, is_last: bool) -> None:
        if self.is_used and seq.is_drafted:
            self.followed.prefill(seq, start, len(tokens))
            for position in range(start, len(tokens)):
                self.write(seq, tokens, position)
            if is_last:
                self.known[seq.replica, seq.slot] = len(tokens) - 1, len(tokens) - 1

    def miss(self, seq: Sequence) -> None:
        """It is told what it has missed before it drafts again."""

    def begin(self, row: DecodeRow, tokens: list[int], *, committed: int) -> None:
        """Run what was missed, and the token before the newest one, which the device must know."""
        seq, key = row.seq, (row.seq.replica, row.seq.slot)
        if row.missed_from is not None:
            assert len(seq.tokens) == committed, "results in flight commit more"
            self.num_missed += committed - 1 - row.missed_from
            self.prefill(seq, seq.tokens[:-1], row.missed_from, is_last=True)
        first, last = self.known[key]
        assert first <= len(tokens) - 2 <= last, "not in the window"
        self.write(seq, tokens, len(tokens) - 2)
        self.known[key] = committed - 1, len(tokens) - 1

    def verify(self, seq: Sequence, tokens: list[int], *, num_drafts: int, accepted: int) -> None:
        """Drafts that were accepted are still known. One that was not is no token of the text."""
        if self.is_used and num_drafts:
            first, _ = self.known[seq.replica, seq.slot]
            assert first == len(tokens) - 1, "drafted from another token"
            self.known[seq.replica, seq.slot] = first, first + accepted

    def run(self, seq: Sequence, tokens: list[int]) -> None:
        """Run the newest token, which reads all before it, and know the draft behind it."""
        self.write(seq, tokens, len(tokens) - 1)
        first, _ = self.known[seq.replica, seq.slot]
        self.known[seq.replica, seq.slot] = first, len(tokens)
        if self.followed.knows_all(seq):
            for position in range(len(tokens)):
                found = self.written.get(place_of(seq, position))
                assert found == tuple(tokens[: position + 1]), "read another entry"


class HeadCache:
    """What a head drafts from: the hidden states of the step before, and of no other.

    Entry p is of the hidden state of position p and the token behind it. Where steps without drafts
    have committed tokens its cache has holes, which cost acceptance alone.
    """

    def __init__(self):
        self.written: dict[tuple[int, int], tuple] = {}
        # Of each slot: position of the first hidden state, and how many there are.
        self.left: dict[tuple[int, int], tuple[int, int]] = {}
        self.followed = Followed()
        self.num_missed = 0

    def write(self, seq: Sequence, tokens: list[int], start: int) -> None:
        for position in range(start, len(tokens) - 1):
            self.written[place_of(seq, position)] = tuple(tokens[: position + 2])

    def prefill(self, seq: Sequence, tokens: list[int], start: int, *, is_last: bool) -> None:
        if seq.is_drafted:
            self.followed.prefill(seq, start, len(tokens))
            self.write(seq, seq.tokens[: len(tokens) + 1], start)
            if is_last:
                self.left[seq.replica, seq.slot] = len(tokens) - 1, 1

    def verify(self, seq: Sequence, tokens: list[int], *, num_drafts: int, accepted: int) -> None:
        self.left[seq.replica, seq.slot] = len(tokens) - 1, num_drafts + 1

    def miss(self, seq: Sequence) -> None:
        self.followed.miss(seq)

    def begin(self, row: DecodeRow, tokens: list[int], *, committed: int) -> None:
        assert len(tokens) == committed, "a window is drafted in one launch"
        assert row.missed_from is None
        first, count = self.left[row.seq.replica, row.seq.slot]
        assert 1 <= committed - 1 - first <= count, "hidden states of another step"
        self.write(row.seq, tokens, first)

    def run(self, seq: Sequence, tokens: list[int]) -> None:
        """Its entries are on pages that the sequence holds, and none is missing."""
        self.write(seq, tokens, len(tokens) - 2)
        if self.followed.knows_all(seq):
            for position in range(len(tokens) - 1):
                found = self.written.get(place_of(seq, position))
                assert found == tuple(tokens[: position + 2]), "read another entry"


def place_of(seq: Sequence, position: int) -> tuple[int, int]:
    """Where an entry of a sequence lies: its replica, and the place there."""
    return seq.replica, seq.pages[position // PAGE] * PAGE + position % PAGE


class Simulation:
    """A scheduler and its device, whose results are read so many steps late."""

    def __init__(self, config: ReplicaConfig = CONFIG, *, steps_ahead: int = 1, **given):
        self.config, self.steps_ahead = config, steps_ahead
        self.scheduler = Scheduler(config, **given)
        self.device = Device(self.scheduler, config)
        self.seqs: list[Sequence] = []
        self.failed: list[tuple[Sequence, OutOfPagesError]] = []
        self.num_steps = 0

    def add(
        self, prompt, *, most=6, is_drafted=False, is_canonical=True, priority=0, salt=""
    ) -> Sequence:
        request = Request(
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(),
            priority=priority,
            cache_salt=salt,
        )
        seq = Sequence(
            request_id=len(self.seqs),
            sequence_idx=0,
            request=request,
            sampling=request.sampling,
            is_drafted=is_drafted,
            is_canonical=is_canonical,
            max_len=len(prompt) + most,
        )
        self.scheduler.add(seq)
        self.seqs.append(seq)
        return seq

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.num_steps += 1
        self.failed += batch.failed
        self.device.launch(batch)
        self.scheduler.confirm_launch()
        # Any times: what was quickest changes from block to block, at the same load.
        seconds = 0.01 + hash((self.num_steps // 40, self.scheduler.draft_plan.drafts)) % 7
        self.scheduler.note_step(self.scheduler.draft_plan, seconds=seconds, tokens=1)
        if len(self.device.in_flight) > self.steps_ahead:
            self.device.note_read()
        return batch

    def interrupt(self) -> None:
        """Schedule, launch nothing, and begin anew."""
        self.failed += self.scheduler.schedule().failed
        self.scheduler.restart([s for s in self.seqs if s.state is not SequenceState.DONE])

    def drain(self, most_steps: int = 3000) -> int:
        """Step until nothing is left; how many steps it took."""
        for count in range(most_steps):
            if not self.scheduler.has_work:
                return count
            self.step()
        raise AssertionError(f"not done after {most_steps} steps")

    def most_steps(self, seqs: abc.Sequence[Sequence] | None = None) -> int:
        """Steps after which sequences must have ended, if only the first in rank gets on.

        Each of its tokens takes a step, a wait for company and for the results of steps before;
        each of its chunks the decode steps that wait for it.
        """
        config, seqs = self.config, self.seqs if seqs is None else seqs
        wait = (
            3
            + self.steps_ahead
            + config.verify_patience
            + config.verify_deadline
            + config.max_prefill_streak
        )
        return (sum(s.max_len for s in seqs) + len(seqs)) * wait + 10

    def check_answers(self) -> None:
        failed = {id(seq) for seq, _ in self.failed}
        for seq in self.seqs:
            tokens = list(seq.request.prompt_token_ids)
            while len(tokens) < len(seq.tokens):
                tokens.append(Device.token_after(tokens))
            assert seq.tokens == tokens
            is_ended = len(tokens) == seq.max_len or tokens[-1] == self.device.end
            assert is_ended or id(seq) in failed or seq.state is not SequenceState.DONE


def random_configuration(rng: np.random.Generator, steps_ahead: int = 3) -> ReplicaConfig:
    """Every policy, and sizes at which pages, slots and windows run out."""
    slots, window = int(rng.choice([1, 2, 2, 3, 4])), int(rng.choice([1, 1, 2, 3, 5]))
    has_prompt_lookup = rng.random() < 0.2
    has_model = window > 1 and not has_prompt_lookup and rng.random() < 0.5
    of_local, of_windows = rng.spawn(2)
    reach = 0 if has_model else int(of_local.choice([0, 1, 3, 5, 9]))
    shapes = (((1, 6),), ((1, 6), (2, 4)), ((1, 1),), ((3, 9),))
    config = changed(
        num_replicas=int(rng.choice([1, 1, 1, 2])),
        num_slots=slots,
        num_pages=int(rng.integers(2, 11)),
        prefill_shapes=shapes[rng.integers(len(shapes))],
        max_prefill_streak=int(rng.choice([0, 1, 5])),
        verify_sizes=(min(slots, int(rng.choice([1, 1, 2, 4]))),),
        verify_window=window,
        verify_patience=int(rng.choice([0, 3, 50])),
        verify_deadline=int(rng.choice([1, 6, 50])),
        max_draft_fraction=float(rng.choice([0.0, 0.6, 1.0, 1.0])),
        max_draft_batch=int(rng.choice([0, 0, 1, 2])),
        adapts_drafts=bool((has_model or has_prompt_lookup) and rng.random() < 0.5),
        draft_lens=(*[(window - 1) // 2] * (has_model and window > 2), window - 1),
        draft_weights=str(rng.choice(["draft_model", "eagle3"])) if has_model else "full",
        decode_steps=1 if has_prompt_lookup else int(rng.integers(1, max(2, window))),
        ageing_steps=int(rng.choice([0, 1, 10])),
        has_prefix_cache=bool(rng.random() < 0.5),
        has_prompt_lookup=has_prompt_lookup,
        local_reach=reach,
        windows=int(of_windows.choice([1, 2, 5])) if has_model else 1,
    )
    if not reach:
        return config
    least = config.least_local_pages(steps_ahead)
    return dataclasses.replace(config, num_local_pages=least + int(of_local.choice([0, 0, 1, 4])))


class HalfWrong:
    """What the host drafts: nothing, a right token, or a right one and a wrong one."""

    name = "half wrong"

    def draft(self, seq, most):
        return (Device.token_after(seq.tokens), 99)[: min(most, len(seq.tokens) % 3)] or None


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancellations and steps in any order; then everything must end rightly."""

    def __init__(self):
        super().__init__()
        self.simulation = Simulation()
        self.cancelled: set[int] = set()

    @initialize(seed=st.integers(0, 2**32 - 1))
    def choose(self, seed):
        config = random_configuration(np.random.default_rng(seed), 1 + seed % 3)
        given = {"drafters": (HalfWrong(),)} if config.has_prompt_lookup else {}
        self.simulation = Simulation(config, steps_ahead=1 + seed % 3, **given)

    @rule(
        length=st.integers(1, 14),
        most=st.integers(1, 12),
        first=st.integers(0, 1),
        kind=st.sampled_from(["drafted", "direct", "plain"]),
        priority=st.integers(-1, 2),
    )
    def arrive(self, length, most, first, kind, priority):
        prompt = [first, *range(1, length)]  # shared prefixes are the rule
        if self.simulation.config.has_prompt_lookup:
            kind = "direct"  # prompt lookup is of canonical engines alone
        self.simulation.add(
            prompt,
            most=most,
            is_drafted=kind == "drafted",
            is_canonical=kind != "plain",
            priority=priority,
        )

    @rule(data=st.data())
    def cancel(self, data):
        if self.simulation.seqs:
            index = data.draw(st.integers(0, len(self.simulation.seqs) - 1))
            seq = self.simulation.seqs[index]
            if seq.state is not SequenceState.DONE:
                self.cancelled.add(index)
                self.simulation.scheduler.end(seq)

    @rule(count=st.integers(1, 6), rights=st.lists(st.booleans(), min_size=1, max_size=5))
    def step(self, count, rights):
        turn = iter(rights * 1000)
        self.simulation.device.is_right = lambda: next(turn)
        for _ in range(count):
            self.simulation.step()

    @rule()
    def interrupt(self):
        """A batch is scheduled and never launched: nothing that it would have written is read."""
        self.simulation.interrupt()

    @invariant()
    def slots_and_pages_are_counted(self):
        config, scheduler = self.simulation.config, self.simulation.scheduler
        for replica, pool in enumerate(scheduler.pools):
            running = [s for s in scheduler.running if s.replica == replica]
            assert len({s.slot for s in running}) == len(running) <= config.num_slots
            held = {page for s in running for page in s.pages}
            assert pool.num_pages - pool.num_available == len(held)
            counts = Counter(page for s in running for page in s.pages)
            if (local := scheduler.local_pages[replica]) is not None:
                bound = local.bound[sorted({page for s in running for page in s.held_pages})]
                assert len(set(bound.tolist())) == len(bound) == local.num_held
                for seq in running:
                    assert tuple(local.bound[seq.held_pages].tolist()) == seq.held.local_pages
            for seq in running:
                private = [p for p in seq.pages[seq.num_registered :] if counts[p] > 1]
                assert not private, "an unfinished page has two owners"
                assert seq.num_in_flight >= 0 and seq.len_bound <= seq.max_len

    def teardown(self):
        self.simulation.device.is_right = lambda: True
        self.simulation.drain(self.simulation.most_steps())
        assert self.simulation.scheduler.num_waiting == 0
        for pool in self.simulation.scheduler.pools:
            assert pool.num_available == pool.num_pages
        for local in self.simulation.scheduler.local_pages:
            assert local is None or local.num_held == 0
        for index in self.cancelled:
            assert self.simulation.seqs[index].state is SequenceState.DONE
        kept = [s for i, s in enumerate(self.simulation.seqs) if i not in self.cancelled]
        self.simulation.seqs = kept
        self.simulation.check_answers()
        assert all(s.state is SequenceState.DONE for s in kept)
        config = self.simulation.config
        for seq, reason in self.simulation.failed:
            assert len(seq.tokens) + config.verify_window > config.num_pages * PAGE, reason


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def random_simulation(rng: np.random.Generator, **changes) -> Simulation:
    """Any configuration, drafts that are often wrong, and an end token in half of all runs."""
    config = dataclasses.replace(random_configuration(rng), **changes)
    given = {"drafters": (HalfWrong(),)} if config.has_prompt_lookup else {}
    simulation = Simulation(config, **given)
    simulation.device.is_right = lambda: rng.random() < 0.7
    simulation.device.end = 3 if rng.random() < 0.5 else None
    return simulation


def add_random(simulation: Simulation, rng: np.random.Generator, **given) -> Sequence:
    kind = rng.choice(
        ["direct"] if simulation.config.has_prompt_lookup else ["drafted"] * 3 + ["plain"]
    )
    return simulation.add(
        [int(rng.integers(2)), *range(1, int(rng.integers(1, 14)))],
        most=int(rng.integers(1, 13)),
        is_drafted=kind == "drafted",
        is_canonical=kind != "plain",
        **given,
    )


@pytest.mark.parametrize(
    "count",
    [
        100,
        pytest.param(400, marks=pytest.mark.slow),
        pytest.param(10_000, marks=pytest.mark.nightly),
    ],
)
def test_every_configuration_makes_progress(count):
    """Few pages, few slots, one row to verify: whatever waits for whom, everybody ends in time."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        simulation = random_simulation(rng)
        for _ in range(rng.integers(2, 9)):
            add_random(simulation, rng, priority=int(rng.integers(-1, 2)))
            for _ in range(rng.integers(0, 3)):
                simulation.step()
        try:
            simulation.drain(simulation.most_steps())
            simulation.check_answers()
        except AssertionError as error:
            raise AssertionError(f"{seed=}: {simulation.config}") from error


@pytest.mark.parametrize(
    "count",
    [15, pytest.param(60, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)],
)
def test_nobody_starves_behind_those_who_keep_coming(count):
    """One of the lowest priority ends in the time that those take who rank before it."""
    for seed in range(count):
        rng = np.random.default_rng([7, seed])
        simulation = random_simulation(rng, verify_patience=3, verify_deadline=6)
        for _ in range(3):
            add_random(simulation, rng)
            simulation.step()
        last = add_random(simulation, rng, priority=-1)
        for _ in range(3000):
            if last.state is SequenceState.DONE:
                break
            add_random(simulation, rng, priority=int(rng.integers(-1, 2)))
            simulation.step()
            ahead = [s for s in simulation.seqs if s.service_order <= last.service_order]
            assert simulation.num_steps <= simulation.most_steps(ahead), f"{seed=}"
        assert last.state is SequenceState.DONE, f"{seed=}: {simulation.config}"


@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
def test_a_draft_model_runs_the_last_draft_of_a_window_accepted_whole(steps_ahead):
    """The result is read while the sequence waits for a page. It preempts another, and decodes
    without drafts as long as two decoded; then it drafts again.

    The device checks that what a draft reads was written.
    """
    preempted = missed = 0
    for length in range(5, 14):
        simulation = model_drafts("draft_model", steps_ahead, num_pages=6, max_draft_batch=1)
        simulation.add([1] * 4, most=20, is_drafted=True)
        simulation.step()
        simulation.step()
        simulation.add([2] * length, most=20 - length, is_drafted=True)
        simulation.drain()
        simulation.check_answers()
        preempted += simulation.scheduler.num_preempted
        missed += simulation.device.drafter.num_missed
    assert preempted > 2 and missed > 10


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
def test_a_window_without_drafts_is_verified_when_nothing_is_drafted_behind_it(
    drafter, steps_ahead
):
    """The last windows could end the sequence, and are rolled back from any place on."""
    without = 0
    for wrong in range(8, 28):
        simulation = model_drafts(drafter, steps_ahead)
        turn = iter(range(1000))
        simulation.device.is_right = lambda turn=turn, wrong=wrong: next(turn) < wrong
        seq = simulation.add([1], most=26, is_drafted=True)
        while simulation.scheduler.has_work:
            (rows,) = simulation.step().verifies
            without += sum(row.num_drafts == 0 for row in rows)
            assert all(row.num_drafts or seq.len_bound == seq.max_len for row in rows)
        simulation.check_answers()
    assert without > 5


def model_drafts(drafter: str, steps_ahead: int, **changes) -> Simulation:
    """Drafts of another model for sequences that only their length ends."""
    sizes = {"num_pages": 80, "verify_patience": 0, "has_prefix_cache": False}
    config = changed(**sizes | changes, draft_weights=drafter)
    simulation = Simulation(config, steps_ahead=steps_ahead)
    simulation.device.end = None
    return simulation


def changed(**changes) -> ReplicaConfig:
    return dataclasses.replace(CONFIG, **changes)


def test_a_level_of_priority_is_worth_its_steps_of_waiting_and_no_more():
    simulation = Simulation(changed(num_slots=1, has_prefix_cache=False))
    simulation.add([1] * 4, most=30)
    simulation.step()
    low = simulation.add([2] * 4, most=2)
    order = []
    for step in range(200):
        if step < 40:
            simulation.add([3 + step % 2] * 4, most=2, priority=1)
        simulation.step()
        order += [s for s in simulation.scheduler.running if s not in order]
    before = order.index(low) - 1  # without the first of all
    assert 5 <= before <= 11  # those that came within ten steps of it


def test_the_first_in_line_is_not_overtaken_by_smaller_requests():
    simulation = Simulation(changed(num_pages=6, has_prefix_cache=False))
    simulation.add([1] * 12, most=10)
    simulation.step()
    large = simulation.add([2] * 16, most=2)
    small = [simulation.add([3] * 2, most=2) for _ in range(3)]
    for _ in range(4):
        simulation.step()
        assert large.state is SequenceState.WAITING
        assert all(s.state is SequenceState.WAITING for s in small)
    simulation.drain()
    simulation.check_answers()


def test_preempted_sequences_go_on_where_they_were_and_use_their_own_pages_again():
    simulation = Simulation(changed(num_pages=7))
    simulation.device.end = None
    first = simulation.add([1] * 8, most=16)
    second = simulation.add([2] * 8, most=16)
    simulation.drain()
    assert simulation.scheduler.num_preempted > 0
    assert first.num_preemptions == 0 and second.num_preemptions > 0
    assert simulation.scheduler.num_prefix_tokens > 0
    simulation.check_answers()
    assert not simulation.failed


def test_one_sequence_that_outgrows_the_cache_fails_alone_with_the_reason():
    simulation = Simulation(changed(num_pages=4))
    simulation.device.end = None
    large = simulation.add([1] * 8, most=30)
    other = simulation.add([2] * 4, most=4)
    simulation.drain()
    ((seq, reason),) = simulation.failed
    assert seq is large and str(reason) == "its 17 tokens do not fit in the cache of 4 pages of 4"
    assert other.num_outputs == 4


def test_nobody_waits_for_a_page_that_those_who_run_cannot_need():
    """Three sequences of two pages each fill the cache, and each may be admitted at once."""
    simulation = Simulation(changed(num_pages=6, has_prefix_cache=False))
    simulation.device.end = None
    seqs = [simulation.add([i] * 5, most=3) for i in range(3)]
    for _ in range(3):
        simulation.step()
    assert [s.state for s in seqs] == [SequenceState.RUNNING] * 3
    simulation.drain()
    assert simulation.scheduler.num_preempted == 0
    simulation.check_answers()


def test_a_prompt_that_outgrows_the_cache_fails_alone():
    simulation = Simulation(changed(num_pages=4))
    simulation.add([1] * 17, most=3)
    simulation.add([2] * 4, most=4)
    simulation.drain()
    ((_, reason),) = simulation.failed
    assert str(reason) == "its 17 tokens do not fit in the cache of 4 pages of 4"


def test_sequences_of_one_prompt_compute_it_once():
    simulation = Simulation(changed(num_pages=20, prefill_shapes=((3, 4),)))
    for _ in range(3):
        simulation.add([1, 2, 3, 4, 5, 6, 7, 8, 9], most=3)
    simulation.drain()
    # All but the last token, which each computes for its logits, and the page that it lies in.
    assert simulation.scheduler.num_prefix_tokens == 2 * 8
    simulation.check_answers()


@pytest.mark.parametrize(
    ("patience", "size", "num_waited"), [(0, 1, 0), (5, 1, 0), (6, 2, 6), (9, 2, 6)]
)
def test_full_windows_wait_for_company_at_most_their_patience(patience, size, num_waited):
    """Windows of 9 drafts, the second opened 6 steps later; no wait where that is too late."""
    config = changed(
        num_slots=3, num_pages=40, verify_patience=patience, verify_window=10, decode_steps=1,
        verify_deadline=99, verify_sizes=(3,),
    )  # fmt: skip
    simulation = Simulation(config)
    simulation.device.end = None
    simulation.add([1] * 4, most=99, is_canonical=False)  # so that there is other work
    verified, waited = [], 0
    for step in range(30):
        if step in (1, 7):
            simulation.add([2 + step] * 4, most=60, is_drafted=True)
        (verified,) = simulation.step().verifies
        if verified:
            break
        waited += any(s.closed_step is not None for s in simulation.scheduler.running)
    assert (len(verified), waited) == (size, num_waited)


@pytest.mark.parametrize("num_drafted", [1, 3])
def test_a_sequence_that_is_verified_never_stands_still(num_drafted):
    """Its window is verified in the step that finds it full, and the next one opens there."""
    config = changed(
        num_slots=4, num_pages=80, verify_patience=4, verify_window=8, decode_steps=1,
        verify_deadline=99, verify_sizes=(4,), prefill_shapes=((4, 4),),
    )  # fmt: skip
    simulation = Simulation(config)
    simulation.device.end = None
    for i in range(4):
        drafted = i < num_drafted
        simulation.add([i] * 4, most=41, is_drafted=drafted, is_canonical=drafted)
    num_windows = 0
    while simulation.scheduler.has_work:
        batch = simulation.step()
        num_windows += sum(map(len, batch.verifies))
        rows = [row.seq for part in batch.decodes for row in part]
        if len(simulation.scheduler.running) == 4 and not any(batch.prefills):
            assert len(rows) == 4 or simulation.seqs[0].len_bound == 45
    assert num_windows == 5 * num_drafted  # each of 8 tokens, behind the prompt's
    simulation.check_answers()


def test_drafting_gives_way_to_canonical_steps_where_most_are_deterministic():
    simulation = Simulation(changed(num_pages=60, max_draft_fraction=0.5))
    simulation.device.end = None
    plain = [simulation.add([i] * 4, most=30, is_canonical=False) for i in (1, 2)]
    drafted = simulation.add([3] * 4, most=60, is_drafted=True)
    kinds = []
    while simulation.scheduler.has_work:
        is_alone = all(s.state is SequenceState.DONE for s in plain)
        batch = simulation.step()
        rows = [r for rows in batch.decodes for r in rows if r.seq is drafted]
        kinds += [(r.is_draft, is_alone) for r in rows]
    assert {is_draft for is_draft, is_alone in kinds if is_alone} == {False}
    assert {is_draft for is_draft, is_alone in kinds if not is_alone} == {True}
    simulation.check_answers()


def test_nobody_waits_for_company_that_cannot_come():
    simulation = Simulation(changed(verify_patience=1000, verify_deadline=1000))
    seq = simulation.add([1] * 4, most=12, is_drafted=True)
    assert simulation.drain() < 40
    assert seq.state is SequenceState.DONE


def test_drafts_that_are_always_wrong_still_progress():
    simulation = Simulation()
    simulation.device.is_right = lambda: False
    seqs = [simulation.add([i] * 5, most=12, is_drafted=True) for i in range(6)]
    simulation.drain()
    assert all(s.state is SequenceState.DONE for s in seqs)
    simulation.check_answers()


def test_pages_of_a_batch_that_was_not_launched_are_not_found():
    simulation = Simulation()
    prompt = [1] * (3 * PAGE)
    simulation.add(prompt)
    simulation.scheduler.schedule()
    simulation.scheduler.restart([])
    assert simulation.scheduler.pools[0].num_cached == 0
    simulation.add(prompt)
    simulation.seqs.pop(0)
    simulation.drain()  # the device checks every entry that is read
    assert simulation.scheduler.num_prefix_tokens == 0
    simulation.check_answers()
    simulation.add(prompt)
    simulation.drain()
    assert simulation.scheduler.num_prefix_tokens == 2 * PAGE


def test_the_queue_forgets_who_was_cancelled_while_waiting():
    simulation = Simulation(changed(num_slots=1))
    first = simulation.add([1] * 4, most=6)
    simulation.step()
    for i in range(5000):
        simulation.scheduler.end(simulation.add([i] * 4, most=6))
        assert simulation.scheduler._waiting.num_entries <= 65
    assert simulation.scheduler.num_waiting == 0
    simulation.seqs = [first]
    simulation.drain()
    simulation.check_answers()


def test_a_salt_keeps_the_prefixes_of_tenants_apart():
    simulation = Simulation(changed(num_pages=20))
    prefix_tokens = []
    for salt in ("", "a", "b", "a", "b", "", "\ud800"):
        before = simulation.scheduler.num_prefix_tokens
        simulation.add([1] * 9, salt=salt)
        simulation.drain()
        prefix_tokens.append(simulation.scheduler.num_prefix_tokens - before)
    assert prefix_tokens == [0, 0, 0, 8, 8, 8, 0]
    simulation.check_answers()


def test_what_a_proposal_raises_names_its_sequence():
    class Raising(HalfWrong):
        def draft(self, seq, most):
            if seq.tokens[0] == 2:
                raise ZeroDivisionError("no draft")

    config = changed(decode_steps=1, has_prompt_lookup=True)
    simulation = Simulation(config, drafters=(Raising(),))
    simulation.device.end = None
    simulation.add([1] * 4)
    bad = simulation.add([2] * 4)
    with pytest.raises(SequenceError) as caught:
        simulation.drain()
    assert caught.value.seq is bad and isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_window_that_finds_no_page_takes_no_row_from_one_that_has_its_own():
    """The lower rank's window has waited longer, and needs a page that the higher one holds."""
    config = changed(
        num_slots=2, num_pages=5, verify_sizes=(1,), verify_window=1, max_draft_fraction=1.0
    )
    simulation = Simulation(dataclasses.replace(config, decode_steps=1))
    simulation.device.end = None
    first = simulation.add([1] * 13, most=3, is_drafted=True)
    second = simulation.add([2] * 4, most=4, is_drafted=True)
    simulation.drain(200)
    assert first.num_outputs == 3 and second.num_outputs == 4
    simulation.check_answers()


def test_proposals_of_the_host_are_verified_and_progress():
    class RightAndWrong(HalfWrong):
        def draft(self, seq, most):
            drafts = (Device.token_after(seq.tokens), 99)[:most]
            return drafts if len(seq.tokens) % 2 and drafts else None

    config = changed(decode_steps=1, has_prompt_lookup=True)
    simulation = Simulation(config, drafters=(RightAndWrong(),))
    for i in range(4):
        simulation.add([i] * 5, most=9)
    batches = []
    while simulation.scheduler.has_work:
        batches.append(simulation.step())
    given = [r for batch in batches for rows in batch.verifies for r in rows]
    assert given and all(r.given for r in given)
    simulation.check_answers()


def test_the_prefill_shape_that_wastes_least_runs():
    config = changed(num_slots=8, num_pages=200, prefill_shapes=((1, 16), (4, 4), (1, 4)))
    simulation = Simulation(config)
    simulation.add([9] * 16)
    assert simulation.step().prefill_shape == (1, 16)
    for i in range(4):
        simulation.add([i] * 4)
    assert simulation.step().prefill_shape == (4, 4)
    simulation.add([5] * 3)
    assert simulation.step().prefill_shape == (1, 4)


@pytest.mark.parametrize(
    ("length", "shapes"),
    [
        (11, [(1, 4)] * 3),  # less than three quarters of 16
        (12, [(1, 16)]),
        (16 + 12, [(1, 16)] * 2),
        (16 + 5, [(1, 16), (1, 4), (1, 4)]),
    ],
)
def test_a_long_prompt_runs_in_large_steps_until_they_would_be_padding(length, shapes):
    config = changed(num_slots=1, num_pages=200, prefill_shapes=((1, 16), (1, 4)))
    simulation = Simulation(config)
    simulation.add([9] * length)
    assert [simulation.step().prefill_shape for _ in shapes] == shapes


def test_a_step_holds_no_more_tokens_than_allowed():
    least = 3 + 2 * 4 + 6
    with pytest.raises(
        ValueError, match=f"max_tokens_per_step={least - 1} must be at least {least}"
    ):
        changed(max_tokens_per_step=least - 1)
    config = changed(max_tokens_per_step=least, prefill_shapes=((1, 6), (1, 40)), num_pages=60)
    simulation = Simulation(config)
    for i in range(6):
        simulation.add([i] * 40, most=10, is_drafted=bool(i % 2))
    shapes = set()
    while simulation.scheduler.has_work:
        shapes.add(simulation.step().prefill_shape)  # the device checks the size
    assert shapes == {None, (1, 6)}
    simulation.check_answers()


@pytest.mark.parametrize(
    ("patience", "decoded"), [(0, "11111111"), (2, "00101111"), (99, "00001111")]
)
def test_decoding_waits_for_prompts_as_long_as_it_may(patience, decoded):
    """Four prompts of one chunk each come while a sequence decodes."""
    config = changed(
        num_slots=5, num_pages=60, prefill_shapes=((1, 6),), max_prefill_streak=patience
    )
    simulation = Simulation(config)
    simulation.add([9] * 6, most=20)
    simulation.step()
    for i in range(4):
        simulation.add([i] * 6, most=20)
    batches = [simulation.step() for _ in range(8)]
    assert "".join(str(int(bool(batch.decodes[0]))) for batch in batches) == decoded
    simulation.drain()
    simulation.check_answers()


def test_a_window_whose_draft_would_end_the_sequence_is_verified_early():
    simulation = Simulation(
        changed(decode_steps=1, verify_window=30, num_pages=40, verify_deadline=99)
    )
    tokens = [2] * 4
    while len(tokens) < 20:
        tokens.append(Device.token_after(tokens))
    simulation.device.end = next(t for t in tokens[9:] if t not in tokens[:9])
    seq = simulation.add(tokens[:4], most=60, is_drafted=True)
    windows = []
    while simulation.scheduler.has_work:
        windows += [r.num_drafts for rows in simulation.step().verifies for r in rows]
    assert seq.tokens == tokens[: tokens.index(simulation.device.end) + 1]
    # One more draft than needed was launched before the end was read.
    assert windows == [seq.num_outputs]
    simulation.check_answers()


@pytest.mark.parametrize(
    ("is_drafted", "counts"),
    [(True, {3, 2}), (False, {3})],  # five drafts and the committed token are a window
)
def test_a_launch_makes_several_tokens_while_all_who_run_decode(is_drafted, counts):
    simulation = Simulation(changed(num_pages=80, verify_window=6, decode_steps=3))
    simulation.device.end = None
    simulation.add([1] * 4, most=100, is_drafted=is_drafted)
    alone, beside = [], []
    for step in range(24):
        if step == 6:
            # Prefilled in six steps, so that a window opens when all decode again.
            simulation.add([2] * 36, most=100)
        batch = simulation.step()
        # Who has just come is admitted behind what was launched for those who run.
        is_beside = step > 6 and any(batch.prefills)
        (beside if is_beside else alone).extend(
            r.num_tokens for part in batch.decodes for r in part
        )
    assert set(alone) == counts and set(beside) == {1}
    simulation.drain()
    simulation.check_answers()


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_nobody_loses_a_page_to_tokens_that_lie_behind_an_end(num_sequences, steps):
    """The cache is full when the answers end, which is not known yet at the next launch."""
    simulation = Simulation(
        changed(num_pages=3 * num_sequences, decode_steps=steps, has_prefix_cache=False)
    )
    simulation.device.end = 9
    simulation.device.token_after = lambda before: 9 if len(before) == 3 * PAGE else 1
    for first in range(num_sequences):
        simulation.add([first] * (2 * PAGE), most=3 * PAGE)
    simulation.drain()
    assert simulation.scheduler.num_preempted == 0 and not simulation.failed
    assert {len(seq.tokens) for seq in simulation.seqs} == {3 * PAGE + 1}
