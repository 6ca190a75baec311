# SPDX-License-Identifier: Apache-2.0
"""The queue of sequences that wait for a slot."""

import heapq

from detjax.engine.requests.sequence import Sequence, SequenceState

_MIN_ENTRIES = 64
"""Entries of a queue that is not worth tidying."""


class WaitingQueue:
    """Sequences in order of service. Those that ended while waiting are skipped, and dropped later.

    Attributes:
        num_waiting: Sequences that wait.
    """

    def __init__(self):
        """Begin empty."""
        self._entries: list[tuple[tuple[int, int], Sequence]] = []
        self.num_waiting = 0

    @property
    def num_entries(self) -> int:
        """Sequences that wait, and those that have ended and are not dropped yet."""
        return len(self._entries)

    def push(self, seq: Sequence) -> None:
        """Let a sequence wait."""
        seq.state = SequenceState.WAITING
        heapq.heappush(self._entries, (seq.service_order, seq))
        self.num_waiting += 1

    def first(self) -> Sequence | None:
        """Return the sequence to be served next, if one waits."""
        while self._entries and self._entries[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def pop_first(self) -> None:
        """Take out the first, whatever its state is by now."""
        heapq.heappop(self._entries)
        self.num_waiting -= 1

    def drop_ended(self) -> None:
        """Note that a waiting sequence has ended."""
        self.num_waiting -= 1
        if len(self._entries) > max(_MIN_ENTRIES, 2 * self.num_waiting):
            kept = [entry for entry in self._entries if entry[1].state is SequenceState.WAITING]
            heapq.heapify(kept)
            self._entries = kept

    def clear(self) -> None:
        """Forget all sequences."""
        self._entries, self.num_waiting = [], 0
