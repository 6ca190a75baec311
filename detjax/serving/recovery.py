# SPDX-License-Identifier: Apache-2.0
"""After a call that did not end: the ledger is true, and all else is made from it."""

import warnings

from detjax.serving.delivery import Delivery
from detjax.serving.ledger import Ledger
from detjax.serving.model_runner import ModelRunner
from detjax.serving.request import FinishReason
from detjax.serving.scheduler import Scheduler


class Recovery:
    """Mends an engine. Each of these may itself be interrupted, and begins anew then."""

    def __init__(
        self, ledger: Ledger, scheduler: Scheduler, runner: ModelRunner, delivery: Delivery
    ):
        """Mend these."""
        self._ledger, self._scheduler = ledger, scheduler
        self._runner, self._delivery = runner, delivery

    def mend(self) -> None:
        """Make the tables of scheduler and runner anew, if a call did not end.

        Results in flight must not be read any more: whoever is under way begins anew.
        """
        ledger = self._ledger
        if not ledger.is_torn:
            return
        self._settle()
        is_lost = self._runner.is_lost
        if is_lost:
            self._scheduler.forget_pages()
            self._runner.reset()
        self._scheduler.restart(ledger.sequences())
        for seq in ledger.sequences():
            if seq.listener.told_len < len(seq.tokens):
                self._delivery.tell(seq, ledger.news[seq][-1])
            elif (reason := seq.end_reason) is not None:
                self._delivery.finish(seq, reason)
        ledger.is_torn = False
        if is_lost:
            warnings.warn(
                "a launch was interrupted and took the cache with it: the cache was allocated "
                "anew, and requests under way are computed again",
                RuntimeWarning,
                stacklevel=4,
            )

    def _settle(self) -> None:
        """Let the ledger's tables agree where a call was interrupted between two of them."""
        ledger = self._ledger
        ended = {
            (o.request_id, o.sequence_idx) for o in ledger.outputs if o.finish_reason is not None
        }
        known = {request_id for request_id, _ in ended} | set(ledger.live)
        ledger.keep_in_inbox(lambda arrival: arrival.request_id not in known)
        for seq in ledger.sequences():
            news = ledger.news.get(seq)
            if (seq.request_id, seq.sequence_idx) in ended:
                ledger.forget(seq)
            elif news and news[-1].position == len(seq.tokens):
                seq.tokens.append(news[-1].token_id)
        ledger.live = {request_id: seqs for request_id, seqs in ledger.live.items() if seqs}

    def drop_unwanted(self) -> None:
        """Forget the requests of a `generate` that did not end, and nobody else's."""
        ledger = self._ledger
        if not ledger.unwanted:
            return
        was_torn, ledger.is_torn = ledger.is_torn, True
        for request_id in ledger.unwanted:
            for seq in ledger.sequences_of(request_id):
                if not was_torn:
                    self._scheduler.end(seq)
                ledger.forget(seq)
        ledger.outputs = [o for o in ledger.outputs if o.request_id not in ledger.unwanted]
        ledger.keep_in_inbox(lambda arrival: arrival.request_id not in ledger.unwanted)
        ledger.unwanted.clear()
        ledger.is_torn = was_torn

    def end_all(self, exception: Exception) -> None:
        """End everybody with an error, those in the inbox too, and forget cancellations."""
        ledger = self._ledger
        for seq in ledger.sequences():
            self._delivery.finish(seq, FinishReason.ERROR, exception)
        lost = {arrival.request_id: arrival for arrival in tuple(ledger.inbox)}
        for arrival in lost.values():
            self._delivery.refuse(arrival, exception)
        ledger.keep_in_inbox(lambda arrival: arrival.request_id not in lost)
        ledger.cancels.clear()
