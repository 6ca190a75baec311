# SPDX-License-Identifier: Apache-2.0
"""A list of requests on its way to completions: what `Engine.generate` keeps of its own run."""

from collections import abc, deque
from collections.abc import Callable

from detjax.engine.errors import SelfCheckError
from detjax.engine.outputs.completion import CollectedTokens, Completion, best
from detjax.engine.outputs.request_output import (
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    TokenEvent,
)
from detjax.engine.requests.request import Request
from detjax.engine.requests.sequence import OnToken, ignore_token

OnCompletion = Callable[[Completion], None]
"""Told each completion once, when its sequence has ended."""


def ignore_completion(completion: Completion) -> None:
    """Do nothing."""


class GenerateRun:
    """Which requests are still to be asked, and what came of the others.

    Attributes:
        request_ids: The index of each request that was asked, by the engine's id.
        num_left: Sequences that have not ended.
    """

    def __init__(
        self,
        requests: abc.Sequence[Request],
        on_token: OnToken,
        on_completion: OnCompletion = ignore_completion,
    ):
        """Begin with the highest priority; `on_token` is told every token until it raises."""
        self._requests, self._on_token = requests, on_token
        self._on_completion = on_completion
        self._to_ask = deque(sorted(range(len(requests)), key=lambda i: -requests[i].priority))
        self._tokens = {
            (i, s): CollectedTokens()
            for i, request in enumerate(requests)
            for s in range(request.sampling.num_sequences)
        }
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        # By request: the last outputs of sequences whose completions wait for the prompt's logprobs
        self._ended: dict[int, list[RequestOutput]] = {}
        self._completions: dict[tuple[int, int], Completion] = {}
        self._raised: Exception | None = None
        self.request_ids: dict[int, int] = {}
        self.num_left = len(self._tokens)

    @property
    def has_more(self) -> bool:
        """Whether a request is still to be asked."""
        return bool(self._to_ask)

    @property
    def listener(self) -> OnToken:
        """The listener of each request."""
        return ignore_token if self._on_token is ignore_token else self._notify

    def pop_next(self, request_id: int) -> int:
        """Take the index of the next request, which is asked under this id."""
        index = self._to_ask.popleft()
        self.request_ids[request_id] = index
        return index

    def add(self, output: RequestOutput) -> None:
        """Take an output of one of the requests.

        Raises:
            Exception: What `on_token` or `on_completion` raised.
            FloatingPointError: If a logit is NaN.
            SelfCheckError: If a self-check has failed.
            RuntimeError: If the sequence failed for another reason.
        """
        index = self.request_ids[output.request_id]
        self._tokens[index, output.sequence_idx].extend(output)
        self.num_left -= output.finish_reason is not None
        if self._raised is not None:
            raise self._raised
        if output.finish_reason is FinishReason.ERROR:
            kinds = (FloatingPointError, SelfCheckError)
            kind = next((k for k in kinds if isinstance(output.exception, k)), RuntimeError)
            raise kind(f"request {index}: {output.error}") from output.exception
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        if output.finish_reason is not None:
            self._ended.setdefault(index, []).append(output)
        self._complete(index)

    def _complete(self, index: int) -> None:
        """Make the completions of a request's ended sequences, if nothing of them is to come."""
        request = self._requests[index]
        is_wanted = request.sampling.prompt_logprobs is not None
        # Sequence 0 tells the prompt's logprobs for all of a request, unless it is cancelled first.
        if is_wanted and index not in self._prompt_logprobs and self.num_left:
            return
        for last in self._ended.pop(index, ()):
            assert last.finish_reason is not None
            key = index, last.sequence_idx
            self._completions[key] = self._tokens[key].completion(
                request.prompt_token_ids,
                request_idx=index,
                sequence_idx=last.sequence_idx,
                finish_reason=last.finish_reason,
                weight_version=last.weight_version,
                prompt_logprobs=self._prompt_logprobs.get(index),
            )
            self._on_completion(self._completions[key])

    def completions(self) -> list[Completion]:
        """Return all completions, by request; of each its sequences in order, or its best."""
        for index in tuple(self._ended):
            self._complete(index)
        return [
            done
            for i, request in enumerate(self._requests)
            for done in best(
                [self._completions[i, s] for s in range(request.sampling.num_sequences)],
                request.sampling,
            )
        ]

    def _notify(self, event: TokenEvent) -> bool:
        """Pass a token on, until `on_token` raises: that ends the run."""
        if self._raised is not None:
            return True
        try:
            return self._on_token(event)
        except Exception as error:
            self._raised = error
            return True
