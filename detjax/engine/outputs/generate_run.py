# SPDX-License-Identifier: Apache-2.0
"""A list of requests on its way to completions: what `Engine.generate` keeps of its own run."""

from collections import abc, deque

from detjax.engine.errors import SelfCheckError
from detjax.engine.outputs.completion import Completion, best
from detjax.engine.outputs.request_output import (
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    TokenEvent,
)
from detjax.engine.requests.request import Request
from detjax.engine.requests.sequence import OnToken, ignore_token


class GenerateRun:
    """Which requests are still to be asked, and what came of the others.

    Attributes:
        request_ids: The index of each request that was asked, by the engine's id.
        num_left: Sequences that have not ended.
    """

    def __init__(self, requests: abc.Sequence[Request], on_token: OnToken):
        """Begin with the highest priority; `on_token` is told every token until it raises."""
        self._requests, self._on_token = requests, on_token
        self._to_ask = deque(sorted(range(len(requests)), key=lambda i: -requests[i].priority))
        self._outputs: dict[tuple[int, int], list[RequestOutput]] = {
            (i, s): []
            for i, request in enumerate(requests)
            for s in range(request.sampling.num_sequences)
        }
        self._raised: Exception | None = None
        self.request_ids: dict[int, int] = {}
        self.num_left = len(self._outputs)

    @property
    def has_more(self) -> bool:
        """Whether a request is still to be asked."""
        return bool(self._to_ask)

    @property
    def listener(self) -> OnToken:
        """Whom the engine tells."""
        return ignore_token if self._on_token is ignore_token else self._hear

    def pop_next(self, request_id: int) -> int:
        """Take the index of the next request, which is asked under this id."""
        index = self._to_ask.popleft()
        self.request_ids[request_id] = index
        return index

    def add(self, output: RequestOutput) -> None:
        """Take an output of one of the requests.

        Raises:
            Exception: What `on_token` raised.
            FloatingPointError: If a logit is NaN.
            SelfCheckError: If a self-check has failed.
            RuntimeError: If the sequence failed for another reason.
        """
        index = self.request_ids[output.request_id]
        self._outputs[index, output.sequence_idx].append(output)
        self.num_left -= output.finish_reason is not None
        if self._raised is not None:
            raise self._raised
        if output.finish_reason is FinishReason.ERROR:
            told = (FloatingPointError, SelfCheckError)
            kind = next((k for k in told if isinstance(output.exception, k)), RuntimeError)
            raise kind(f"request {index}: {output.error}") from output.exception

    def completions(self) -> list[Completion]:
        """Put the outputs together, by request; of each its sequences in order, or its best."""
        scores = {
            i: output.prompt_logprobs
            for (i, _), outputs in self._outputs.items()
            for output in outputs
            if output.prompt_logprobs is not None
        }
        made: dict[int, list[Completion]] = {}
        for (i, s), outputs in self._outputs.items():
            done = _completion(
                outputs,
                request_idx=i,
                sequence_idx=s,
                request=self._requests[i],
                prompt_logprobs=scores.get(i),
            )
            made.setdefault(i, []).append(done)
        return [
            done for i, all_of in made.items() for done in best(all_of, self._requests[i].sampling)
        ]

    def _hear(self, event: TokenEvent) -> bool:
        """Pass a token on, until `on_token` raises: that ends the run."""
        if self._raised is not None:
            return True
        try:
            return self._on_token(event)
        except Exception as error:
            self._raised = error
            return True


def _completion(
    outputs: abc.Sequence[RequestOutput],
    *,
    request_idx: int,
    sequence_idx: int,
    request: Request,
    prompt_logprobs: PromptLogprobs | None,
) -> Completion:
    """Put the outputs of a sequence that has ended together."""
    reason = outputs[-1].finish_reason
    assert reason is not None
    return Completion(
        request_idx=request_idx,
        sequence_idx=sequence_idx,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(i for o in outputs for i in o.token_ids),
        logprobs=tuple(p for o in outputs for p in o.logprobs),
        top_logprobs=tuple(t for o in outputs for t in o.top_logprobs),
        finish_reason=reason,
        weight_version=outputs[-1].weight_version,
        prompt_logprobs=prompt_logprobs,
    )
