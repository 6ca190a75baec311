# SPDX-License-Identifier: Apache-2.0
"""After a call that did not end: the tables of requests hold, and all else follows from them."""

import warnings

from detjax.engine.outputs.output_processor import OutputProcessor
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request_states import RequestStates
from detjax.engine.running.model_runner import ModelRunner
from detjax.engine.scheduling.scheduler import Scheduler


class Recovery:
    """Recovers an engine. Each of these may itself be interrupted, and begins anew then."""

    def __init__(
        self,
        states: RequestStates,
        scheduler: Scheduler,
        runner: ModelRunner,
        output_processor: OutputProcessor,
    ):
        """Recover these."""
        self._states, self._scheduler = states, scheduler
        self._runner, self._output_processor = runner, output_processor

    def recover(self) -> None:
        """Make the tables of scheduler and runner anew, if a call did not end.

        Results in flight must not be read any more: live sequences begin anew.
        """
        states = self._states
        if not states.is_interrupted:
            return
        self._settle()
        is_lost = self._runner.is_lost
        if is_lost:
            self._scheduler.forget_pages()
            self._runner.reset()
        self._scheduler.restart(states.sequences())
        for seq in states.sequences():
            if seq.listener.num_emitted < len(seq.tokens):
                self._output_processor.emit(seq, states.pending[seq][-1])
            elif (reason := seq.end_reason) is not None:
                self._output_processor.finish(seq, reason)
        states.is_interrupted = False
        if is_lost:
            warnings.warn(
                "a launch was interrupted and took the cache with it: the cache was allocated "
                "anew, and requests under way are computed again",
                RuntimeWarning,
                stacklevel=4,
            )

    def _settle(self) -> None:
        """Let the tables agree where a call was interrupted between two of them."""
        states = self._states
        ended = {
            (o.request_id, o.sequence_idx) for o in states.outputs if o.finish_reason is not None
        }
        known = {request_id for request_id, _ in ended} | set(states.live)
        states.keep_in_inbox(lambda arrival: arrival.request_id not in known)
        for seq in states.sequences():
            pending = states.pending.get(seq)
            if (seq.request_id, seq.sequence_idx) in ended:
                states.forget(seq)
            elif pending and pending[-1].position == len(seq.tokens):
                seq.tokens.append(pending[-1].token_id)
        states.live = {request_id: seqs for request_id, seqs in states.live.items() if seqs}

    def drop_abandoned(self) -> None:
        """Forget the requests of a `generate` that did not end, and nobody else's."""
        states = self._states
        if not states.abandoned:
            return
        was_interrupted, states.is_interrupted = states.is_interrupted, True
        for request_id in states.abandoned:
            for seq in states.sequences_of(request_id):
                if not was_interrupted:
                    self._scheduler.end(seq)
                states.forget(seq)
        states.outputs = [o for o in states.outputs if o.request_id not in states.abandoned]
        states.keep_in_inbox(lambda arrival: arrival.request_id not in states.abandoned)
        states.abandoned.clear()
        states.is_interrupted = was_interrupted

    def end_all(self, exception: Exception) -> None:
        """End everybody with an error, those in the inbox too, and forget cancellations."""
        states = self._states
        for seq in states.sequences():
            self._output_processor.finish(seq, FinishReason.ERROR, exception)
        lost = {arrival.request_id: arrival for arrival in tuple(states.inbox)}
        for arrival in lost.values():
            self._output_processor.refuse(arrival, exception)
        states.keep_in_inbox(lambda arrival: arrival.request_id not in lost)
        states.cancels.clear()
