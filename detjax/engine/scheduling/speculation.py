# SPDX-License-Identifier: Apache-2.0
"""Drafts and their verification: which sequences draft, and which windows are verified when.

A window is the last committed token and the drafts behind it. It opens with its first draft, closes
when it is full, late or would end the sequence, and is gone when its verification is launched.
"""

from collections import abc
from collections.abc import Callable

from detjax.engine.config import ReplicaConfig
from detjax.engine.requests.sequence import (
    DecodeRow,
    Sequence,
    VerifyRow,
    attributing_errors,
    max_committed,
)

Propose = Callable[[abc.Sequence[int], int], tuple[int, ...]]
"""From the tokens so far and the most drafts wanted, drafts that cost no model; or none."""


def propose_nothing(tokens: abc.Sequence[int], most: int) -> tuple[int, ...]:
    """Give no drafts."""
    return ()


def predicted_drafts(seq: Sequence) -> tuple[int, ...]:
    """Return what the request predicts to follow, as long as it has been right."""
    predicted = seq.request.predicted_token_ids
    made = seq.tokens[len(seq.request.prompt_token_ids) :]
    is_right = len(made) < len(predicted) and tuple(made) == predicted[: len(made)]
    return predicted[len(made) :] if is_right else ()


def open_window(seq: Sequence) -> None:
    """Begin a new window, without a draft."""
    seq.num_drafts = 0
    seq.window_idx += 1
    seq.closed_step = None


class Speculation:
    """Which sequences draft, and how windows fill up and are verified."""

    def __init__(self, config: ReplicaConfig, propose: Propose):
        """Draft from the first step on, if few do.

        Args:
            config: Sizes and policies.
            propose: Host-side drafts for sequences that are decoded canonically.
        """
        self._config = config
        self._propose = propose
        self._is_on = True

    # ------------------------------------------------------------------------------------- drafting

    def switch(self, running: abc.Sequence[Sequence]) -> None:
        """Draft while few do; once it is off, only when clearly fewer do."""
        decoding = [s for s in running if s.is_prefilled]
        if not decoding:
            return
        share = sum(s.is_drafted for s in decoding) / len(decoding)
        limit = self._config.max_draft_fraction
        self._is_on = share <= (limit if self._is_on else 0.8 * limit)

    def drafts(self, seq: Sequence) -> bool:
        """Whether a decode step of a sequence makes a draft now."""
        # A grammar says what may follow a token when it has seen it.
        return seq.is_drafted and self._is_on and seq.guide is None

    def can_decode(self, seq: Sequence) -> bool:
        """Whether a decode step may take a sequence now, or something else must happen first."""
        if not seq.is_prefilled or seq.len_bound >= seq.max_len:
            return False
        if not self.drafts(seq):
            # What drafts have written is to be verified first.
            waits = self._config.has_prompt_lookup or seq.guide is not None
            return not (waits and seq.num_in_flight or seq.num_drafts)
        return seq.closed_step is None and self._room(seq) > 0

    def num_wanted(self, seq: Sequence) -> int:
        """Tokens that a sequence can decode before something else must happen."""
        if seq.guide is not None:
            return 1
        return self._room(seq) if self.drafts(seq) else seq.max_len - seq.len_bound

    def last_position(self, seq: Sequence, num_tokens: int) -> int:
        """The last position whose keys and values `num_tokens` more tokens need."""
        if self.drafts(seq):
            # A draft needs the page of its successor too: verification runs up to there.
            return seq.len_bound - 1 + seq.num_drafts + num_tokens
        return seq.len_bound - 2 + num_tokens

    def decode(self, seq: Sequence, num_tokens: int, *, step: int) -> DecodeRow:
        """Make the row of a decode step, and count its tokens: as drafts, or as to be committed."""
        row = DecodeRow(
            seq=seq,
            num_preemptions=seq.num_preemptions,
            num_tokens=num_tokens,
            is_draft=self.drafts(seq),
            window_idx=seq.window_idx,
        )
        if row.is_draft:
            if seq.num_drafts == 0:
                seq.opened_step = step
            seq.num_drafts += num_tokens
        else:
            seq.closed_step = None
        seq.num_in_flight += max_committed(row)
        return row

    def _room(self, seq: Sequence) -> int:
        """Drafts that the open window can still take."""
        return self._max_drafts(seq) - seq.num_drafts

    def _max_drafts(self, seq: Sequence) -> int:
        """Drafts of a full window; one of d drafts may commit d + 1 tokens."""
        return min(self._config.verify_window, seq.max_len - seq.len_bound) - 1

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

    def verify(self, seq: Sequence, given: tuple[int, ...] | None = None) -> VerifyRow:
        """Make the row of a verification, of `given` drafts or the window's, and open a new one."""
        num_drafts = seq.num_drafts if given is None else len(given)
        row = VerifyRow(
            seq=seq, num_preemptions=seq.num_preemptions, num_drafts=num_drafts, given=given
        )
        seq.num_in_flight += max_committed(row)
        open_window(seq)
        return row

    def propose(self, seq: Sequence) -> tuple[int, ...] | None:
        """Return drafts of the host for a running sequence; None if it decodes, or waits.

        What a request predicts is verified to its end: the last token by a window without drafts.

        Raises:
            SequenceError: If proposing raises.
        """
        if not self.can_decode(seq) or seq.guide is not None:
            return None
        most = self._max_drafts(seq)
        with attributing_errors(seq):
            if predicted := predicted_drafts(seq):
                return predicted[:most]
            return tuple(self._propose(seq.tokens, most)[:most]) or None

    def _close_if_due(self, seq: Sequence, step: int) -> bool:
        """Close the window of a sequence if its time has come, and say whether it is closed."""
        is_drafted = seq.is_drafted and seq.guide is None
        if not (is_drafted and seq.is_prefilled and seq.len_bound < seq.max_len):
            return False
        is_late = seq.num_drafts > 0 and step - seq.opened_step >= self._config.verify_deadline
        if seq.closed_step is None and (is_late or not self.can_decode(seq)):
            seq.closed_step = step
        return seq.closed_step is not None

    def _has_company(
        self, running: abc.Sequence[abc.Sequence[Sequence]], *, step: int, within: int
    ) -> bool:
        """Whether a window that is open will be full, or late, in so many steps or fewer."""
        drafting = (s for seqs in running for s in seqs if self.drafts(s) and self.can_decode(s))
        return any(self._num_open_steps(s, step) <= within for s in drafting)

    def _num_open_steps(self, seq: Sequence, step: int) -> int:
        """Steps until the window of a sequence that drafts closes, if no draft ends it."""
        until_full = -(-self._room(seq) // self._config.decode_steps)
        opened_step = seq.opened_step if seq.num_drafts else step
        return min(until_full, opened_step + self._config.verify_deadline - step)

    def _riders(self, running: abc.Sequence[Sequence]) -> list[Sequence]:
        """Open windows, at least half full, for rows that would be padding."""
        half = self._config.verify_window // 2
        riders = [s for s in running if s.closed_step is None and s.num_drafts >= half > 0]
        return sorted(riders, key=lambda s: (-s.num_drafts, s.service_order))
