# SPDX-License-Identifier: Apache-2.0
"""Computes a batch of prompts once, in one of the ways that must all give the same bits."""

import dataclasses
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from detjax.cli.display import Display
from detjax.cli.output import AbstractCompletionWriter
from detjax.cli.processes import Processes
from detjax.cli.prompt_batch import PromptBatch
from detjax.cli.transcript import Transcript
from detjax.engine.config import EngineConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import TokenEvent
from detjax.engine.outputs.text_batch import TextBatch
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # imports JAX
    from detjax.llm import LLM

_IMPORTED_S = time.perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """One way to compute a batch of prompts.

    Attributes:
        engine: How much the engine does at once.
        order_name: How `order` came about, for people.
        order: The requests of the engine, as indices into those of the batch; None is a
            neighbour, a request whose answer nobody wants.
    """

    engine: EngineConfig
    order_name: str
    order: tuple[int | None, ...]

    @property
    def num_neighbours(self) -> int:
        """Requests beside those of the batch."""
        return self.order.count(None)

    def renumbered[Of: (TokenEvent, Completion)](self, made: Of) -> Of | None:
        """Number what the engine made as the batch numbers its request; None of a neighbour."""
        index = self.order[made.request_idx]
        return None if index is None else dataclasses.replace(made, request_idx=index)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run gave.

    Attributes:
        outputs: The completions, in order.
        stats: What the engine counted.
        running_s: Seconds of its steps, without those in which a program was compiled.
        first_token_s: When the first token came, in seconds since the process started; None where
            only prompts are scored.
    """

    outputs: tuple[CompletionOutput, ...]
    stats: EngineStats
    running_s: float
    first_token_s: float | None


def run_batch(
    batch: PromptBatch,
    plan: RunPlan,
    llm: "LLM",
    *,
    processes: Processes,
    writer: AbstractCompletionWriter,
    display: Display,
    is_live: bool,
) -> RunResult:
    """Compute a batch as `plan` says, and write its completions as they come.

    Args:
        batch: What to compute.
        plan: How.
        llm: With the engine of the plan, which has computed nothing yet.
        processes: That compute it together.
        writer: Where completions go.
        display: Where progress goes.
        is_live: Text appears where progress does, which must end when it begins.
    """
    texts = llm.text_batch(batch.requests)
    listener = _Listener(plan, texts, writer, display, processes, is_live=is_live)
    requests = _requests(texts, plan)
    with display.compiling() as stages, processes.working():
        compiled, checked = map(processes.telling, stages)
        llm.engine.compile(compiled, requests, checked=checked)
    ahead_s = llm.engine.stats().compile_s
    display.busy("reading the prompts")
    processes.check_same("requests", repr(requests))
    try:
        with processes.working():
            processes.progress()
            completions = llm.engine.generate(
                requests, on_token=listener.on_token, on_completion=listener.on_completion
            )
    finally:
        display.idle()
    ours = [done for one in completions if (done := plan.renumbered(one)) is not None]
    stats = llm.engine.stats()
    return RunResult(
        outputs=texts.outputs(ours),
        stats=stats,
        running_s=stats.step_s.total - (stats.compile_s - ahead_s),
        first_token_s=listener.first_token_s,
    )


class _Listener:
    """Writes what an engine emits of the batch's requests, and shows how far the run is.

    Attributes:
        first_token_s: When the first token came, in seconds since the process started.
    """

    def __init__(
        self,
        plan: RunPlan,
        texts: TextBatch,
        writer: AbstractCompletionWriter,
        display: Display,
        processes: Processes,
        *,
        is_live: bool,
    ):
        self._plan, self._texts, self._display = plan, texts, display
        self._processes, self._is_live = processes, is_live
        self._transcript = Transcript(texts, writer)
        self._num_tokens = 0
        self.first_token_s: float | None = None

    def on_token(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string of its sequence is complete."""
        self._processes.progress()
        if self.first_token_s is None:
            self.first_token_s = _process_age_s()
        self._num_tokens += 1
        if self._is_live:
            self._display.idle()
        else:
            ended = f"{self._texts.num_ended} of {len(self._texts.sequences)} completions"
            self._display.busy(f"{ended}, {self._num_tokens} tokens")
        ours = self._plan.renumbered(event)
        return ours is not None and self._transcript.on_token(ours)

    def on_completion(self, completion: Completion) -> None:
        """Take the completion of a sequence, after its tokens."""
        if (ours := self._plan.renumbered(completion)) is not None:
            self._transcript.on_completion(ours)


def _requests(texts: TextBatch, plan: RunPlan) -> list[Request]:
    """Return what the engine is asked, neighbours included."""
    requests = texts.token_requests
    neighbours = (_neighbour(requests[i % len(requests)], i) for i in itertools.count())
    return [next(neighbours) if i is None else requests[i] for i in plan.order]


def _neighbour(like: Request, number: int) -> Request:
    """Return a request unlike those of the batch: another prompt, length and sampling."""
    ids = like.prompt_token_ids[::-1][: 1 + number * 7 % len(like.prompt_token_ids)]
    sampling = SamplingParams(
        max_tokens=1 + (3 + number * 5) % like.sampling.max_tokens,
        temperature=0.5 + 0.25 * (number % 4),
        top_k=20 * (number % 3),
        seed=number,
    )
    # Every other one is not verified where that can be chosen.
    is_deterministic = like.is_deterministic and number % 2 == 0
    return Request(prompt_token_ids=ids, sampling=sampling, is_deterministic=is_deterministic)


def _process_age_s() -> float:
    """Return seconds since this process started; since this module's import where unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED_S
