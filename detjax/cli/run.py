# SPDX-License-Identifier: Apache-2.0
"""Computes a job once, in one of the ways that must all give the same bits."""

import dataclasses
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from detjax.cli.display import Display
from detjax.cli.job import Job
from detjax.cli.model import OpenModel
from detjax.cli.output import AbstractWriter
from detjax.cli.transcript import Transcript
from detjax.engine.config import EngineConfig
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import TokenEvent
from detjax.engine.outputs.text_batch import TextBatch
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.trace import NO_TRACE, TracesEvents
from detjax.models.tokenizer import Tokenizer

_IMPORTED_S = time.perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """One way to compute a job.

    Attributes:
        engine: How much the engine does at once.
        order_name: How `order` came about, for people.
        order: The requests of the engine, as indices into those of the job; None is a
            neighbour, a request whose answer nobody wants.
    """

    engine: EngineConfig
    order_name: str
    order: tuple[int | None, ...]

    @property
    def num_neighbours(self) -> int:
        """Requests beside those of the job."""
        return self.order.count(None)


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


def run_job(
    job: Job,
    plan: RunPlan,
    model: OpenModel,
    tokenizer: Tokenizer,
    *,
    writer: AbstractWriter,
    display: Display,
    is_live: bool,
    tracer: TracesEvents = NO_TRACE,
) -> RunResult:
    """Compute a job as `plan` says, and write its completions as they come.

    Args:
        job: What to compute.
        plan: How.
        model: With what.
        tokenizer: That of the model.
        writer: Where completions go.
        display: Where progress goes.
        is_live: Text appears where progress does, which must end when it begins.
        tracer: Keeps a timeline.
    """
    batch = TextBatch(job.requests, tokenizer, end_ids=job.end_ids, fingerprint=model.fingerprint)
    transcript = Transcript(batch, writer)
    engine = model.make_engine(plan.engine, tracer)
    num_sequences = len(job.seqs)
    times: list[float] = []
    counter = itertools.count(1)

    def on_token(event: TokenEvent) -> bool:
        if not times:
            times.append(_process_age_s())
        index = plan.order[event.request_idx]
        num_tokens = next(counter)
        if is_live:
            display.idle()
        else:
            ended = f"{batch.num_ended} of {num_sequences} completions"
            display.busy(f"{ended}, {num_tokens} tokens")
        if index is None:
            return False
        return transcript.on_token(dataclasses.replace(event, request_idx=index))

    def on_completion(completion: Completion) -> None:
        index = plan.order[completion.request_idx]
        if index is not None:
            transcript.on_completion(dataclasses.replace(completion, request_idx=index))

    requests = _requests(batch, plan)
    with display.compiling() as progress:
        engine.compile(progress, requests)
    ahead_s = engine.stats().compile_s
    display.busy("reading the prompts")
    try:
        completions = engine.generate(requests, on_token=on_token, on_completion=on_completion)
    finally:
        display.idle()
    ours = [
        dataclasses.replace(completion, request_idx=index)
        for completion in completions
        if (index := plan.order[completion.request_idx]) is not None
    ]
    stats = engine.stats()
    return RunResult(
        outputs=batch.outputs(ours),
        stats=stats,
        running_s=stats.step_s.total - (stats.compile_s - ahead_s),
        first_token_s=times[0] if times else None,
    )


def _requests(batch: TextBatch, plan: RunPlan) -> list[Request]:
    """Return what the engine is asked, neighbours included."""
    requests = batch.token_requests
    neighbours = (_neighbour(requests[i % len(requests)], i) for i in itertools.count())
    return [next(neighbours) if i is None else requests[i] for i in plan.order]


def _neighbour(like: Request, number: int) -> Request:
    """Return a request unlike one of the job: another prompt, length and sampling."""
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
