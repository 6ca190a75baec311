# SPDX-License-Identifier: Apache-2.0
"""What an engine notes about itself: its counters, and its timeline."""

import time

from detjax.engine import trace
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.sequence import Sequence, VerifyRow, WindowsRow
from detjax.engine.running.model_runner import Launch


class StatLogger:
    """Adds to the counters and tells the trace.

    Attributes:
        stats: Counters since the engine was made.
    """

    def __init__(self, stats: EngineStats, tracer: trace.TracesEvents):
        """Note to these."""
        self.stats, self._trace = stats, tracer

    def note_step(
        self, begin_s: float, scheduled_s: float, launched_s: float, wait_s: float, did_launch: bool
    ) -> None:
        """Note a step's phases; it ends now.

        Args:
            begin_s: When it began, of `time.perf_counter`, as all times.
            scheduled_s: When its batch was known.
            launched_s: When its programs were launched.
            wait_s: Seconds that it waited for results.
            did_launch: Whether there was anything to launch.
        """
        end_s = time.perf_counter()
        stats = self.stats
        stats.plan_s += scheduled_s - begin_s
        stats.launch_s += launched_s - scheduled_s
        stats.commit_s += end_s - launched_s - wait_s
        if did_launch:
            stats.num_steps += 1
            stats.step_s.add(end_s - begin_s)
        self._trace.span(trace.HOST, "plan", begin_s, scheduled_s)
        self._trace.span(trace.HOST, "launch", scheduled_s, launched_s)
        self._trace.span(trace.HOST, "wait and commit", launched_s, end_s, wait_ms=wait_s * 1e3)

    def note_result(self, launch: Launch, begin_s: float) -> None:
        """Note that the result of a launch has been read, for which the host waited from then."""
        end_s = time.perf_counter()
        self.stats.wait_s += end_s - begin_s
        num_rows = sum(map(len, launch.rows))
        self._trace.span(trace.DEVICE, launch.key.name, launch.launched_s, end_s, rows=num_rows)

    def note_window(self, row: VerifyRow | WindowsRow, num_drafts: int, num_committed: int) -> None:
        """Note a verification of a window."""
        row.seq.windows = row.seq.windows.add(num_drafts=num_drafts, num_accepted=num_committed - 1)
        self.stats.num_windows += 1
        self.stats.draft_tokens += num_drafts
        self.stats.accepted_tokens += num_committed - 1
        self.stats.num_rollbacks += num_committed <= num_drafts
        self.stats.note_drafts(row.source, num_drafts, num_committed - 1)

    def note_arrival(self, seq: Sequence) -> None:
        """Note a new sequence."""
        num_tokens = len(seq.request.prompt_token_ids)
        self.stats.prompt_tokens += num_tokens
        self._trace.request("b", seq.name, f"request {seq.name}", prompt_tokens=num_tokens)

    def note_release(self, seq: Sequence) -> None:
        """Note that tokens of a sequence are released."""
        now_s, listener = time.perf_counter(), seq.listener
        if listener.released_s:
            self.stats.between_tokens_s.add(now_s - listener.released_s)
        else:
            self.stats.first_token_s.add(now_s - listener.arrived_s)
            self._trace.request("n", seq.name, "first token")
        listener.released_s = now_s

    def note_end(self, seq: Sequence, reason: FinishReason) -> None:
        """Note the end of a sequence."""
        now_s = time.perf_counter()
        self.stats.end_to_end_s.add(now_s - seq.listener.arrived_s)
        self.stats.num_failed += reason is FinishReason.ERROR
        self.stats.num_cancelled += reason is FinishReason.CANCELLED
        self.stats.num_finished += reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.stats.num_cut += reason is FinishReason.LENGTH
        name = f"request {seq.name}"
        self._trace.request("e", seq.name, name, reason=reason.value, tokens=seq.num_outputs)
