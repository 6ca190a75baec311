# SPDX-License-Identifier: Apache-2.0
"""From a launch's result to outputs: tokens are committed and emitted, and sequences ended."""

import time

import numpy as np

from detjax.engine.errors import ConsumerError, NaNLogitError, NoTokenError
from detjax.engine.outputs.prompt_logprobs import num_columns, read_scores
from detjax.engine.outputs.request_output import FinishReason, RequestOutput, TokenEvent
from detjax.engine.requests.request_states import Arrival, CommittedToken, RequestStates
from detjax.engine.requests.sequence import (
    DecodeRow,
    PrefillRow,
    Sequence,
    SequenceState,
    VerifyRow,
    WindowsRow,
    ignore_token,
    max_committed,
)
from detjax.engine.running.device_state import LaunchResult
from detjax.engine.running.launch_operands import unpack_choice, unpack_num_committed
from detjax.engine.running.model_runner import Launch, places
from detjax.engine.sampling.sampling import NO_TOKEN_LOGPROB, Choice
from detjax.engine.scheduling.scheduler import Scheduler
from detjax.engine.self_check.recheck import Rechecks
from detjax.engine.stat_logger import StatLogger

Ending = tuple[FinishReason, Exception | None]
"""Why a sequence ends, and what went wrong where it is an error."""


class OutputProcessor:
    """Commits tokens, calls their listeners, and ends sequences.

    Attributes:
        weight_version: Of the weights that compute, which outputs carry.
    """

    def __init__(
        self,
        states: RequestStates,
        scheduler: Scheduler,
        stat_logger: StatLogger,
        rechecks: Rechecks,
    ):
        """Deliver nothing yet. Of what is released, some is offered to `rechecks`."""
        self._rechecks = rechecks
        self._states, self._scheduler, self._stat_logger = states, scheduler, stat_logger
        self.weight_version = 0

    # -------------------------------------------------------------------------------------- results

    def process_output(self, launch: Launch) -> None:
        """Wait for the result of a launch, and commit what it decided."""
        begin_s = time.perf_counter()
        result = launch.read()
        packed = result.choice
        self._stat_logger.note_result(launch, begin_s)
        key, stats = launch.key, self._stat_logger.stats
        choice = unpack_choice(packed, launch.num_top)
        for at, row in places(key, launch.rows):
            if not self._scheduler.is_current(row):
                stats.surplus_tokens += 1
                continue
            self._scheduler.note_read(row)
            match row:
                case VerifyRow():
                    num_committed = int(unpack_num_committed(packed)[at])
                    self._stat_logger.note_window(row, row.num_drafts, num_committed)
                    self._commit_all(row.seq, choice, (at,), num_committed)
                case WindowsRow():
                    stats.surplus_tokens += self._commit_windows(row, choice, packed[at], at)
                case DecodeRow(is_draft=True):
                    drafts = np.ravel(choice.token_ids[at])[: row.num_tokens]
                    if not row.seq.end_token_ids.isdisjoint(drafts):
                        self._scheduler.close_window(row)
                case DecodeRow() if key.length > 1:
                    num_done = self._commit_all(row.seq, choice, (at,), row.num_tokens)
                    stats.surplus_tokens += row.num_tokens - num_done
                case PrefillRow():
                    if self._score(row, launch, result, at) and row.is_last:
                        self._commit(row.seq, choice, at)
                case DecodeRow():
                    self._commit(row.seq, choice, at)
            if row.seq.state is SequenceState.RUNNING:
                self._scheduler.share_pages(row.seq)

    def _score(self, row: PrefillRow, launch: Launch, result: LaunchResult, at: int) -> bool:
        """Keep the logprobs of the prompt from a prefill; False if the sequence ends."""
        seq = row.seq
        if row.is_scored:
            first = len(seq.prompt_logprobs) - row.start
            stop = min(len(row.token_ids), seq.num_to_score - row.start)
            size = num_columns(launch.num_prompt_top)
            found = read_scores(
                result.scores[at][first * size : stop * size],
                num_top=launch.num_prompt_top,
                most=seq.request.sampling.prompt_logprobs or 0,
            )
            for i, one in enumerate(found, start=row.start + first + 1):
                if one.logprob != one.logprob:
                    self.finish(seq, FinishReason.ERROR, _nan_error(i))
                    return False
            seq.prompt_logprobs += found
        if row.is_last and not max_committed(row):
            self.finish(seq, FinishReason.LENGTH)
            return False
        return True

    def _commit_all(self, seq: Sequence, choice: Choice, at: tuple[int, ...], count: int) -> int:
        """Commit `count` tokens at `at`, or those up to the sequence's end; how many."""
        for i in range(count):
            if not self._commit(seq, choice, (*at, i)):
                return i + 1
        return count

    def _commit_windows(self, row: WindowsRow, choice: Choice, packed: np.ndarray, at: int) -> int:
        """Commit the windows of row `at` up to the sequence's end; tokens behind it."""
        left, surplus = row.most_tokens, 0
        for i, num_committed in enumerate(unpack_num_committed(packed)[: row.num_windows].tolist()):
            if not left:
                break  # the windows that follow are padding
            num_done = 0
            if row.seq.state is SequenceState.RUNNING:
                self._stat_logger.note_window(row, min(row.num_drafts, left - 1), num_committed)
                num_done = self._commit_all(row.seq, choice, (at, i), num_committed)
            left -= num_committed
            surplus += num_committed - num_done
        return surplus

    def _commit(self, seq: Sequence, choice: Choice, at) -> bool:
        """Append a token and emit it; False if the sequence has ended."""
        position, logprob = len(seq.tokens), choice.logprobs[at]
        if logprob != logprob:
            self.finish(seq, FinishReason.ERROR, _nan_error(position))
            return False
        if logprob == NO_TOKEN_LOGPROB:
            error = (
                f"no token is possible at position {position}: allowed_token_ids, bad_words, "
                "min_tokens and structured output together forbid every one"
            )
            self.finish(seq, FinishReason.ERROR, NoTokenError(error))
            return False
        token_id, top = int(choice.token_ids[at]), ()
        if num_top := seq.request.sampling.logprobs:
            ids, values = choice.top_ids[at], choice.top_logprobs[at]
            # Where fewer tokens are possible, fewer are reported.
            top = tuple((int(ids[k]), values[k]) for k in range(num_top) if values[k] > -np.inf)
        # Pending first: should an interrupt come between, `recovery` commits what it finds there.
        token = CommittedToken(position, token_id, logprob, top)
        self._states.pending.setdefault(seq, []).append(token)
        self._scheduler.commit(seq, token_id)
        self._stat_logger.stats.decode_tokens += 1
        return self.emit(seq, token)

    def emit(self, seq: Sequence, token: CommittedToken) -> bool:
        """Tell the listener a committed token, and end the sequence if it ends here.

        Returns:
            Whether it goes on.
        """
        ending = self._notify(seq, token)
        if ending is not None:
            self.finish(seq, *ending)
        return ending is None

    def _notify(self, seq: Sequence, token: CommittedToken) -> Ending | None:
        """Call the listener with a token; how the sequence ends, if it does."""
        listener = seq.listener
        listener.num_emitted = token.position + 1
        reason = seq.end_reason
        if listener.on_token is not ignore_token:
            event = TokenEvent(
                request_idx=listener.request_idx,
                sequence_idx=seq.sequence_idx,
                token_id=token.token_id,
                logprob=token.logprob,
                top_logprobs=token.top_logprobs,
            )
            try:
                reason = FinishReason.STOP if listener.on_token(event) else reason
            except Exception as raised:
                return FinishReason.ERROR, ConsumerError(f"its consumer raised {raised!r}")
        return None if reason is None else (reason, None)

    # ----------------------------------------------------------------------------------------- ends

    def finish(
        self, seq: Sequence, reason: FinishReason, exception: Exception | None = None
    ) -> None:
        """End a sequence, free what it holds and note its last output."""
        if seq in self._states.pending:
            self._stat_logger.note_release(seq)
            if exception is None:
                self._rechecks.offer(seq, self._states.pending[seq])
        # The end first: should an interrupt come between, `recovery` drops a sequence with an end.
        self._states.outputs.append(self._output(seq, reason, exception))
        self._scheduler.end(seq)
        self._states.forget(seq)
        self._stat_logger.note_end(seq, reason)

    def refuse(self, arrival: Arrival, exception: Exception) -> None:
        """End every sequence of a request that never began."""
        self._states.outputs += [
            RequestOutput(
                request_id=arrival.request_id,
                sequence_idx=sequence_idx,
                token_ids=(),
                logprobs=(),
                top_logprobs=(),
                finish_reason=FinishReason.ERROR,
                exception=exception,
                weight_version=self.weight_version,
            )
            for sequence_idx in range(arrival.request.sampling.num_sequences)
        ]

    def collect(self) -> list[RequestOutput]:
        """Return the outputs to emit: ends, then in order of arrival where sequences go on."""
        going_on = list(self._states.pending)  # few, though many may wait
        going_on.sort(key=lambda seq: (seq.request_id, seq.sequence_idx))
        for seq in going_on:
            self._stat_logger.note_release(seq)
            self._rechecks.offer(seq, self._states.pending[seq])
        return [*self._states.outputs, *(self._output(seq, None, None) for seq in going_on)]

    def _output(
        self, seq: Sequence, reason: FinishReason | None, exception: Exception | None
    ) -> RequestOutput:
        pending = self._states.pending.get(seq, ())
        # Told once: with the first token, or with an end before it.
        is_first = len(pending) == seq.num_outputs
        has_scores = seq.wants_scores and seq.is_scored and is_first
        return RequestOutput(
            request_id=seq.request_id,
            sequence_idx=seq.sequence_idx,
            token_ids=tuple(token.token_id for token in pending),
            logprobs=tuple(token.logprob for token in pending),
            top_logprobs=tuple(token.top_logprobs for token in pending),
            finish_reason=reason,
            exception=exception,
            weight_version=self.weight_version,
            windows=seq.windows,
            prompt_logprobs=tuple(seq.prompt_logprobs) if has_scores else None,
            num_cached_tokens=seq.num_cached,
        )


def _nan_error(position: int) -> NaNLogitError:
    return NaNLogitError(
        f"a NaN logit at position {position}; check the weights for NaN or infinity"
    )
