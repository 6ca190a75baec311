# SPDX-License-Identifier: Apache-2.0
"""Drafts and their verification: which sequences draft, and which windows are verified when.

A window is the last committed token and the drafts behind it. It opens with its first draft, closes
when it is full, late or would end the sequence, and is gone when its verification is launched.
"""

from collections import abc
from dataclasses import dataclass

from detjax.defaults import HEADS
from detjax.engine.config import DRAFTS_OF_OTHERS, ReplicaConfig
from detjax.engine.requests.sequence import (
    DecodeRow,
    Sequence,
    VerifyRow,
    WindowsRow,
    attributing_errors,
    max_committed,
)
from detjax.engine.scheduling.draft_choice import DraftChoice
from detjax.engine.scheduling.drafters import Drafter, FollowsSequences


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDrafts:
    """Drafts of a window, and the name of the `Drafter` that made them."""

    source: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPlan:
    """What a step drafts.

    Attributes:
        num_decoding: Sequences that decode.
        drafts: Of a window that opens; None where the load alone forbids them.
    """

    num_decoding: int
    drafts: int | None


def open_window(seq: Sequence) -> None:
    """Begin a new window, without a draft."""
    seq.num_drafts = 0
    seq.window_idx += 1
    seq.closed_step = None


class Speculation:
    """Which sequences draft, and how windows fill up and are verified."""

    def __init__(self, config: ReplicaConfig, drafters: abc.Sequence[Drafter]):
        """Draft from the first step on, if few do.

        Args:
            config: Sizes and policies.
            drafters: On the host, for sequences that are decoded canonically; the first that has
                something for a sequence drafts.
        """
        self._config = config
        self._drafters = drafters
        self._has_model = config.draft_weights in DRAFTS_OF_OTHERS
        self._has_head = config.draft_weights in HEADS
        self._is_small_share = self._is_small_batch = True
        self._choice = (
            DraftChoice(sorted({0, *config.draft_lens})) if config.adapts_drafts else None
        )
        self._num_decoding, self._most = 0, config.verify_window - 1

    # ------------------------------------------------------------------------------------- drafting

    def switch(self, running: abc.Sequence[Sequence], *, has_prefill: bool) -> None:
        """Draft while few do, and as long as it pays; once it is off, when clearly fewer do.

        Args:
            running: Sequences.
            has_prefill: Whether the step is believed to prefill.
        """
        decoding = [s for s in running if s.is_prefilled]
        self._num_decoding = len(decoding)
        if not decoding:
            return
        share = sum(s.is_drafted for s in decoding) / len(decoding)
        limit = self._config.max_draft_fraction
        self._is_small_share = share <= (limit if self._is_small_share else 0.8 * limit)
        most = self._config.max_draft_batch
        scale = 1.0 if self._is_small_batch else 0.8
        self._is_small_batch = not most or len(decoding) <= max(1, scale * most)
        if self._choice is not None:
            self._most = self._choice.choose(len(decoding), has_prefill=has_prefill)

    @property
    def plan(self) -> DraftPlan:
        """What the last `switch` has decided."""
        drafts = self._most if self._is_small_share and self._is_small_batch else None
        return DraftPlan(num_decoding=self._num_decoding, drafts=drafts)

    def note_step(self, plan: DraftPlan, *, seconds: float, tokens: int) -> None:
        """Note what a step without a prefill took: see `DraftChoice.note`."""
        if self._choice is not None and plan.num_decoding and plan.drafts is not None:
            self._choice.note(plan.num_decoding, plan.drafts, seconds=seconds, tokens=tokens)

    @property
    def _is_on(self) -> bool:
        """Whether drafts are made at all."""
        pays = self._choice is None or self._most > 0
        return self._is_small_share and self._is_small_batch and pays

    def drafts(self, seq: Sequence) -> bool:
        """Whether a decode step of a sequence makes a draft now."""
        # A grammar says what may follow a token when it has seen it.
        if not (seq.is_drafted and self._is_on and seq.guide is None):
            return False
        # A draft model would compute what it has missed for a window without room for a draft.
        return seq.drafter_len is None or self._max_drafts(seq) > 0

    def can_decode(self, seq: Sequence) -> bool:
        """Whether a decode step may take a sequence now, or something else must happen first."""
        if not seq.is_prefilled or seq.len_bound >= seq.max_len:
            return False
        if not self.drafts(seq):
            # What drafts have written is to be verified first.
            proposes = self._config.has_prompt_lookup and self._is_on
            waits = proposes or seq.guide is not None
            return not (waits and seq.num_in_flight or seq.num_drafts)
        # What a draft model has missed is computed from the committed tokens. A head needs hidden
        # states first, which a window without drafts leaves.
        misses = seq.drafter_len is not None and (seq.num_in_flight > 0 or self._has_head)
        return seq.closed_step is None and self._room(seq) > 0 and not misses

    def num_wanted(self, seq: Sequence) -> int:
        """Tokens that a sequence can decode before something else must happen."""
        if seq.guide is not None:
            return 1
        return self._room(seq) if self.drafts(seq) else seq.max_len - seq.len_bound

    def drafts_by_model(self, seq: Sequence) -> bool:
        """Whether a draft model makes the drafts of a sequence now: a window in one launch."""
        return self._has_model and self.drafts(seq)

    def last_position(self, seq: Sequence, num_tokens: int) -> int:
        """The last position whose keys and values `num_tokens` more tokens need."""
        if self.drafts(seq):
            # A draft needs the page of its successor too: verification runs up to there.
            return seq.len_bound - 1 + seq.num_drafts + num_tokens
        return seq.len_bound - 2 + num_tokens

    def decode(self, seq: Sequence, num_tokens: int, *, step: int) -> DecodeRow:
        """Make the row of a decode step, and count its tokens: as drafts, or as to be committed."""
        is_draft = self.drafts(seq)
        row = DecodeRow(
            seq=seq,
            num_preemptions=seq.num_preemptions,
            num_tokens=num_tokens,
            is_draft=is_draft,
            window_idx=seq.window_idx,
            missed_from=seq.drafter_len if is_draft else None,
        )
        if is_draft:
            if seq.num_drafts == 0:
                seq.opened_step = step
            seq.num_drafts += num_tokens
            seq.drafter_len = None
        else:
            seq.closed_step = None
            if self._has_model and seq.is_drafted and seq.drafter_len is None:
                # Not the newest token, nor the one before: no step has run the last draft of a
                # window that was accepted whole. Results in flight commit more, which are computed
                # once more then.
                seq.drafter_len = max(0, len(seq.tokens) - 2)
        seq.num_in_flight += max_committed(row)
        return row

    def _room(self, seq: Sequence) -> int:
        """Drafts that the open window can still take; of a head, a window is one launch's."""
        if self._has_head and seq.num_drafts:
            return 0
        return self._max_drafts(seq) - seq.num_drafts

    def _max_drafts(self, seq: Sequence) -> int:
        """Drafts of a full window; one of d drafts may commit d + 1 tokens."""
        return min(self._most + 1, seq.max_len - seq.len_bound) - 1

    # --------------------------------------------------------------------------------- verification

    def close_window(self, row: DecodeRow, *, step: int) -> None:
        """Verify the window of a draft at once, since the draft would end the sequence."""
        seq = row.seq
        if seq.window_idx == row.window_idx and seq.closed_step is None:
            seq.closed_step = step

    def choose_windows(
        self, running: abc.Sequence[abc.Sequence[Sequence]], *, step: int, is_due: bool
    ) -> list[list[Sequence]]:
        """Say whose windows are to be verified now, most urgent first, by replica.

        Full windows first; then parts of windows, for rows that would be padding. None, while they
        wait for company: another window that will be full before they have waited too long.

        Args:
            running: Running sequences, by replica.
            step: Now.
            is_due: Whether a verification runs anyway.
        """
        ready = [[s for s in seqs if self._close_if_due(s, step)] for seqs in running]
        waited = max((step - (s.closed_step or 0) for r in ready for s in r), default=-1)
        if waited < 0:
            return [[] for _ in running]
        is_full = any(len(seqs) >= self._config.verify_rows for seqs in ready)
        left = self._config.verify_patience - waited
        if not (is_full or is_due or not self._has_company(running, step=step, within=left)):
            return [[] for _ in running]
        for seqs, all_seqs in zip(ready, running, strict=True):
            seqs.sort(key=lambda s: (s.closed_step, s.service_order))
            seqs += self._riders(all_seqs)
        return ready

    def verify(self, seq: Sequence, given: HostDrafts | None = None) -> VerifyRow:
        """Make the row of a verification, of `given` drafts or the window's, and open a new one."""
        row = VerifyRow(
            seq=seq,
            num_preemptions=seq.num_preemptions,
            num_drafts=seq.num_drafts if given is None else len(given.token_ids),
            given=None if given is None else given.token_ids,
            source=self._config.draft_weights if given is None else given.source,
        )
        seq.num_in_flight += max_committed(row)
        if self._has_head:
            seq.drafter_len = None  # it drafts from what this verification leaves
        open_window(seq)
        return row

    def num_windows(self, seq: Sequence) -> int:
        """Windows of a sequence that one launch may draft and verify; 0 where it may none."""
        is_whole = not seq.num_drafts and seq.drafter_len is None
        if not (is_whole and self.drafts_by_model(seq) and self.can_decode(seq)):
            return 0
        return min(self._config.windows, seq.max_len - seq.len_bound)

    def fewest_windows(self, seq: Sequence) -> int:
        """Windows that hold the tokens which a sequence wants, if every draft is right."""
        return -(-(seq.max_len - seq.len_bound) // (self._most + 1))

    def last_of_windows(self, seq: Sequence, num_windows: int) -> int:
        """The last position whose keys and values so many windows need."""
        return seq.len_bound - 2 + self._most_tokens(seq, num_windows)

    def draft_windows(self, seq: Sequence, num_windows: int) -> WindowsRow:
        """Make the row of several windows, behind which a new one opens."""
        row = WindowsRow(
            seq=seq,
            num_preemptions=seq.num_preemptions,
            num_windows=num_windows,
            num_drafts=self._most,
            most_tokens=self._most_tokens(seq, num_windows),
            source=self._config.draft_weights,
        )
        seq.num_in_flight += max_committed(row)
        open_window(seq)
        return row

    def _most_tokens(self, seq: Sequence, num_windows: int) -> int:
        """Most tokens that so many windows commit."""
        return min(num_windows * (self._most + 1), seq.max_len - seq.len_bound)

    def propose(self, seq: Sequence) -> HostDrafts | None:
        """Return drafts of the host for a running sequence; None if it decodes, or waits.

        Raises:
            SequenceError: If a drafter raises.
        """
        if not (self._is_on and self.can_decode(seq)) or seq.guide is not None:
            return None
        most = self._max_drafts(seq)
        for drafter in self._drafters:
            with attributing_errors(seq):
                drafts = drafter.draft(seq, most)
                if drafts is not None:
                    return HostDrafts(source=drafter.name, token_ids=tuple(drafts[:most]))
        return None

    def note_end(self, seq: Sequence) -> None:
        """Tell the drafters that a sequence has ended."""
        for drafter in self._drafters:
            if isinstance(drafter, FollowsSequences):
                drafter.end(seq)

    def _close_if_due(self, seq: Sequence, step: int) -> bool:
        """Close the window of a sequence if its time has come, and say whether it is closed."""
        is_drafted = seq.is_drafted and seq.guide is None
        if not (is_drafted and seq.is_prefilled and seq.len_bound < seq.max_len):
            return False
        if self._has_model and not seq.num_drafts and self._waits_for_results(seq):
            return False
        is_late = seq.num_drafts > 0 and step - seq.opened_step >= self._config.verify_deadline
        if seq.closed_step is None and (is_late or not self.can_decode(seq)):
            seq.closed_step = step
        return seq.closed_step is not None

    def _waits_for_results(self, seq: Sequence) -> bool:
        """Whether the empty window of a sequence is verified only when all results have been read.

        They may leave room for a draft. No draft model has run what a window without drafts
        commits, and its hidden states replace those from which a head has drafted nothing yet. So
        only a head that has missed tokens wants such a window sooner.
        """
        begins_again = self._has_head and seq.drafter_len is not None and self.drafts(seq)
        return seq.num_in_flight > 0 and not begins_again

    def _has_company(
        self, running: abc.Sequence[abc.Sequence[Sequence]], *, step: int, within: int
    ) -> bool:
        """Whether a window that is open will be full, or late, in so many steps or fewer."""
        drafting = (s for seqs in running for s in seqs if self.drafts(s) and self.can_decode(s))
        return any(self._num_open_steps(s, step) <= within for s in drafting)

    def _num_open_steps(self, seq: Sequence, step: int) -> int:
        """Steps until the window of a sequence that drafts closes, if no draft ends it."""
        until_full = 1 if self._has_model else -(-self._room(seq) // self._config.decode_steps)
        opened_step = seq.opened_step if seq.num_drafts else step
        return min(until_full, opened_step + self._config.verify_deadline - step)

    def _riders(self, running: abc.Sequence[Sequence]) -> list[Sequence]:
        """Open windows, at least half full, for rows that would be padding."""
        half = self._config.verify_window // 2
        riders = [s for s in running if s.closed_step is None and s.num_drafts >= half > 0]
        return sorted(riders, key=lambda s: (-s.num_drafts, s.service_order))
