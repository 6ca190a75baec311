# SPDX-License-Identifier: Apache-2.0
"""The state of requests: which have arrived, are cancelled or live, and what is to be emitted.

An interrupt may come anywhere. So each of these tables is changed by one operation at a time, and
`recovery` makes everything else from them.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from detjax.engine.outputs.request_output import RequestOutput, TopLogprobs
from detjax.engine.requests.request import Request
from detjax.engine.requests.sequence import OnToken, Sequence
from detjax.models.adapters.low_rank import Adapter


class CommittedToken(NamedTuple):
    """A token that a step has committed and not emitted yet."""

    position: int
    token_id: int
    logprob: np.float32
    top_logprobs: TopLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request on its way in, and its adapter. Events of its tokens carry `request_idx`."""

    request_id: int
    request: Request
    request_idx: int
    on_token: OnToken
    arrived_s: float
    adapter: Adapter | None = None


class RequestStates:
    """The tables of one engine.

    Attributes:
        inbox: Requests that no step has seen yet.
        num_in_inbox: Sequences of these.
        cancels: Ids of requests to end.
        live: Sequences that have not ended, by request and index.
        pending: Of these, the tokens that were committed since outputs were last emitted.
        outputs: To be returned by a later step: ends, and outputs of requests that the caller of
            this step does not want.
        abandoned: Requests of a `generate` that did not end.
        is_interrupted: Whether a call has begun and not ended.
    """

    def __init__(self):
        """Begin with nobody."""
        self.inbox: deque[Arrival] = deque()
        self.num_in_inbox = 0
        self._lock = threading.Lock()  # of the two above, and of nothing that takes long
        self.cancels: deque[int] = deque()
        self.live: dict[int, dict[int, Sequence]] = {}
        self.pending: dict[Sequence, list[CommittedToken]] = {}
        self.outputs: list[RequestOutput] = []
        self.abandoned: set[int] = set()
        self.is_interrupted = False

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute or to emit."""
        return self.is_interrupted or any((self.inbox, self.cancels, self.outputs, self.live))

    # ---------------------------------------------------------------------------------------- inbox

    def put_in_inbox(self, arrival: Arrival) -> None:
        """Take a request, from any thread."""
        with self._lock:
            self.inbox.append(arrival)
            self.num_in_inbox += arrival.request.sampling.num_sequences

    def pop_inbox(self) -> None:
        """Drop the first of the inbox, whose sequences are known by now."""
        with self._lock:
            arrival = self.inbox.popleft()
            self.num_in_inbox -= arrival.request.sampling.num_sequences

    def keep_in_inbox(self, is_kept: Callable[[Arrival], bool]) -> None:
        """Forget other arrivals, while any thread may bring new ones."""
        with self._lock:
            self.inbox = deque(filter(is_kept, self.inbox))
            self.num_in_inbox = sum(
                arrival.request.sampling.num_sequences for arrival in self.inbox
            )

    # ------------------------------------------------------------------------------------ sequences

    def sequences(self) -> list[Sequence]:
        """Return the sequences that have not ended, in order of arrival."""
        return [seq for seqs in tuple(self.live.values()) for seq in tuple(seqs.values())]

    def sequences_of(self, request_id: int) -> list[Sequence]:
        """Return a request's sequences that have not ended."""
        return list(self.live.get(request_id, {}).values())

    def is_live(self, seq: Sequence) -> bool:
        """Whether a sequence has not ended."""
        return seq.sequence_idx in self.live.get(seq.request_id, ())

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that has ended."""
        self.pending.pop(seq, None)
        seqs = self.live.get(seq.request_id, {})
        seqs.pop(seq.sequence_idx, None)
        if not seqs:
            self.live.pop(seq.request_id, None)
