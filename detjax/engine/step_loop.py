# SPDX-License-Identifier: Apache-2.0
"""A step of an engine: launch the next batch, and commit the results of an earlier one."""

import time
from collections import deque

from detjax.engine.errors import SelfCheckError
from detjax.engine.outputs.output_processor import OutputProcessor
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.input_processor import InputProcessor
from detjax.engine.requests.request_states import RequestStates
from detjax.engine.running.model_runner import Launch, ModelRunner
from detjax.engine.scheduling.scheduler import Scheduler
from detjax.engine.scheduling.speculation import DraftPlan
from detjax.engine.self_check.claim import Claim
from detjax.engine.self_check.recheck import Rechecks
from detjax.engine.stat_logger import StatLogger


class StepLoop:
    """Runs steps, some of them ahead of the results that are read.

    Attributes:
        launched: The launches of the last step.
        forgets_prefixes: The next step begins with an empty prefix cache.
    """

    def __init__(
        self,
        states: RequestStates,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        rechecks: Rechecks,
        claim: Claim,
        stat_logger: StatLogger,
        steps_ahead: int,
    ):
        """Begin with nothing in flight.

        Args:
            states: The requests.
            scheduler: Says what a step runs.
            runner: Launches it.
            input_processor: Admits requests first.
            output_processor: Commits results last.
            rechecks: Give their pages up, as requests need them.
            claim: Says whether a self-check has failed.
            stat_logger: Counts steps.
            steps_ahead: Steps in flight when results are read.
        """
        self._states, self._scheduler, self._runner = states, scheduler, runner
        self._input_processor, self._output_processor = input_processor, output_processor
        self._rechecks, self._claim, self._stat_logger = rechecks, claim, stat_logger
        self._steps_ahead = steps_ahead
        self._in_flight: deque[tuple[DraftPlan, list[Launch]]] = deque()
        self._read_s: float | None = None  # when the results before were read, if work went on
        self.launched: list[Launch] = []
        self.forgets_prefixes = False

    def drop_in_flight(self) -> None:
        """Read no result of a step that was launched."""
        self._in_flight.clear()
        self._read_s = None

    def advance(self) -> None:
        """Launch a step and commit the results of the one `steps_ahead` before."""
        begin_s = time.perf_counter()
        self._rechecks.give_up()
        if self.forgets_prefixes:
            self.forgets_prefixes = False
            self._scheduler.forget_pages()
        self._input_processor.admit()
        batch = self._scheduler.schedule()
        for seq, error in batch.failed:
            self._output_processor.finish(seq, FinishReason.ERROR, error)
        scheduled_s = time.perf_counter()
        self.launched = self._runner.launch(batch)
        self._scheduler.confirm_launch()
        launched_s = time.perf_counter()
        waited = self._stat_logger.stats.wait_s
        if self.launched:
            self._in_flight.append((self._scheduler.draft_plan, self.launched))
        # Where nothing could be launched, what comes next waits for a result.
        is_due = len(self._in_flight) > self._steps_ahead or not self.launched
        if self._claim.difference is not None:
            self._end_deterministic()
        if is_due and self._in_flight:
            self._finish(*self._in_flight.popleft())
        if not self._states.live:
            # WHY: a step behind the last end may still want the weights, which may go away now.
            self._runner.settle()
            self._read_s = None
        wait_s = self._stat_logger.stats.wait_s - waited
        self._stat_logger.note_step(begin_s, scheduled_s, launched_s, wait_s, bool(self.launched))

    def _finish(self, plan: DraftPlan, launches: list[Launch]) -> None:
        """Commit the results of a step, and tell the scheduler what it took."""
        stats = self._stat_logger.stats
        before_s, before = self._read_s, stats.decode_tokens
        for launch in launches:
            self._output_processor.process_output(launch)
        self._read_s = time.perf_counter()
        if before_s is not None and not any(one.key.kind == "prefill" for one in launches):
            tokens = stats.decode_tokens - before
            self._scheduler.note_step(plan, seconds=self._read_s - before_s, tokens=tokens)

    def _end_deterministic(self) -> None:
        """End deterministic requests with an error, since a self-check has failed."""
        for seq in self._states.sequences():
            if seq.request.is_deterministic:
                error = SelfCheckError(self._claim.error)
                self._output_processor.finish(seq, FinishReason.ERROR, error)
