# SPDX-License-Identifier: Apache-2.0
"""Compare a loaded engine with the answers that each request gets alone."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from detjax.engine.async_engine import StepsRequests
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason, RequestOutput, TokenEvent
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """A request, and tokens that end a sequence like a stop string, after all have come."""

    request: Request
    stop: tuple[int, ...]


class StopAfter:
    """Sees the tokens of each sequence of a request, and ends it after `stop`."""

    def __init__(self, stop: tuple[int, ...]):
        """Watch for `stop`; none where it is empty."""
        self._stop = stop
        self._seen: dict[int, list[int]] = {}

    def __call__(self, event: TokenEvent) -> bool:
        """Take a token."""
        seen = self._seen.setdefault(event.sequence_idx, [])
        seen.append(event.token_id)
        return bool(self._stop) and tuple(seen[-len(self._stop) :]) == self._stop


def make_load(
    count: int,
    *,
    seed: int,
    vocab_size: int,
    longest_prompt: int,
    most_tokens: int,
    long_every: int = 0,
) -> list[LoadRequest]:
    """Draw requests of every kind: greedy and sampled, filtered, n > 1, stops, shared prefixes.

    With `long_every`, every such request has an answer five times as long, which may need pages
    that were not reserved for it.
    """
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, vocab_size, longest_prompt) for _ in range(4)]
    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.7),
        SamplingParams(temperature=0.9, min_p=0.05, top_k=20),
        SamplingParams(temperature=0.7, n=3),
        SamplingParams(),
    )
    requests = []
    for i in range(count):
        length = int(rng.integers(1, longest_prompt + 1))
        factor = 5 if long_every and i % long_every == 0 else 1
        prompt = rng.integers(0, vocab_size, length)
        if rng.random() < 0.6:
            shared = int(rng.integers(0, length + 1))
            prompt[:shared] = heads[rng.integers(4)][:shared]
        sampling = dataclasses.replace(
            kinds[i % len(kinds)],
            max_tokens=factor * int(rng.integers(1, most_tokens + 1)),
            seed=int(rng.integers(0, 2**63)),
            stop_token_ids=tuple(map(int, rng.integers(0, vocab_size, rng.integers(0, 4)))),
        )
        stop = tuple(map(int, rng.integers(0, vocab_size, 1))) if i % 5 == 0 else ()
        request = Request(prompt_token_ids=tuple(map(int, prompt)), sampling=sampling)
        requests.append(LoadRequest(request=request, stop=stop))
    return requests


def lone_answers(
    model: LoadedModel, requests: Sequence[LoadRequest], *, max_len: int
) -> list[list[Completion]]:
    """Answer each request alone, in `invariant` mode at batch size 1; sequences of each."""
    config = EngineConfig(batch_size=1, prefill_chunk=64, max_len=max_len, has_prefix_cache=False)
    engine = Engine(model, config)
    return [engine.generate([drawn.request], on_token=StopAfter(drawn.stop)) for drawn in requests]


@dataclass(kw_only=True, slots=True)
class LoadReport:
    """The result of a load.

    Attributes:
        num_requests: Requests sent.
        num_sequences: Of these requests, all of which must have ended once.
        num_cancelled: Sequences that were cancelled before their end.
        num_plain: Sequences that did not ask to be deterministic.
        num_plain_different: Of these, how many are not the canonical answer.
        wrong: A line for each deterministic sequence that is not the canonical answer.
        lost: Sequences that never ended, or received output after their end.
    """

    num_requests: int = 0
    num_sequences: int = 0
    num_cancelled: int = 0
    num_plain: int = 0
    num_plain_different: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Asked:
    """A requested sequence, and what it received."""

    want: Completion
    is_plain: bool
    outputs: list[RequestOutput] = field(default_factory=list)


def run_load(
    engine: StepsRequests,
    requests: Sequence[LoadRequest],
    expected: Sequence[Sequence[Completion]],
    *,
    num_requests: int,
    seed: int,
    plain_share: float,
    cancelled_share: float = 0.1,
    max_waiting: int = 40,
) -> LoadReport:
    """Send random requests at random times, cancel some, and compare every bit of the answers.

    Args:
        engine: At rest.
        requests: To draw from, again and again.
        expected: Of each request, its sequences' answers.
        num_requests: How many to ask.
        seed: Of the load.
        plain_share: Share of requests that do not ask to be deterministic.
        cancelled_share: Share of requests that are to be cancelled, up to 60 steps after they are
            asked; some will have ended.
        max_waiting: Requests under way at which no new one is asked.
    """
    rng = np.random.default_rng(seed)
    report = LoadReport(num_requests=num_requests)
    asked: dict[tuple[int, int], _Asked] = {}
    under_way: dict[int, int] = {}
    doomed: dict[int, list[int]] = {}
    num_left, step = num_requests, 0
    while num_left or engine.has_work:
        for _ in range(min(num_left, int(rng.poisson(rng.choice([0.3, 1.0, 6.0]))))):
            if len(under_way) >= max_waiting:
                break
            index = int(rng.integers(len(requests)))
            drawn, is_plain = requests[index], bool(rng.random() < plain_share)
            request_id = engine.add_request(
                drawn.request.prompt_token_ids,
                drawn.request.sampling,
                is_deterministic=not is_plain,
                priority=int(rng.integers(0, 3)),
                cache_salt=drawn.request.cache_salt,
                adapter=drawn.request.adapter,
                on_token=StopAfter(drawn.stop),
            )
            under_way[request_id] = len(expected[index])
            for sequence_idx, want in enumerate(expected[index]):
                asked[request_id, sequence_idx] = _Asked(want=want, is_plain=is_plain)
            if rng.random() < cancelled_share:
                doomed.setdefault(step + int(rng.integers(1, 60)), []).append(request_id)
            num_left -= 1
        step += 1
        for request_id in doomed.pop(step, ()):
            engine.cancel(request_id)
        for output in engine.step():
            seq = asked[output.request_id, output.sequence_idx]
            seq.outputs.append(output)
            if output.finish_reason is not None:
                under_way[output.request_id] -= 1
                if not under_way[output.request_id]:
                    del under_way[output.request_id]
    for (request_id, sequence_idx), seq in asked.items():
        _judge(f"request {request_id}, sequence {sequence_idx}", seq, report)
    return report


def _judge(name: str, seq: _Asked, report: LoadReport) -> None:
    """Add a sequence to the report."""
    report.num_sequences += 1
    ends = [o.finish_reason for o in seq.outputs if o.finish_reason is not None]
    if len(ends) != 1 or seq.outputs[-1].finish_reason is None:
        report.lost.append(f"{name}: ended as {ends} in {len(seq.outputs)} outputs")
        return
    difference = _difference(seq, ends[0])
    report.num_cancelled += ends[0] is FinishReason.CANCELLED
    if seq.is_plain:
        report.num_plain += 1
        report.num_plain_different += bool(difference)
        if ends[0] is FinishReason.ERROR:
            report.wrong.append(f"{name}: {seq.outputs[-1].error}")
    elif difference:
        report.wrong.append(f"{name}: {difference}")


def _difference(seq: _Asked, reason: FinishReason) -> str:
    """Say how an answer differs from the canonical one, or from its beginning if cancelled."""
    want = seq.want
    ids = [i for o in seq.outputs for i in o.token_ids]
    logprobs = np.array([p for o in seq.outputs for p in o.logprobs], np.float32)
    count = len(ids)
    if reason is not FinishReason.CANCELLED:
        if reason is not want.finish_reason:
            return f"ended by {reason}, not {want.finish_reason} {seq.outputs[-1].error}"
        if count != len(want.token_ids):
            return f"{count} tokens, not {len(want.token_ids)}"
    if tuple(ids) != want.token_ids[:count]:
        return f"tokens {ids}, not {want.token_ids[:count]}"
    wanted = np.array(want.logprobs[:count], np.float32)
    if not (logprobs.view(np.uint32) == wanted.view(np.uint32)).all():
        return f"logprobs {logprobs}, not {wanted}"
    tops = tuple(top for o in seq.outputs for top in o.top_logprobs)
    if tops != want.top_logprobs[:count]:
        return f"top logprobs {tops}, not {want.top_logprobs[:count]}"
    of_prompt = next((o.prompt_logprobs for o in seq.outputs if o.prompt_logprobs), None)
    is_told = want.sequence_idx == 0 and reason is not FinishReason.CANCELLED
    if is_told and (of_prompt or ()) != (want.prompt_logprobs or ()):
        return f"logprobs of the prompt {of_prompt}, not {want.prompt_logprobs}"
    return ""
