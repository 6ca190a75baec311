# SPDX-License-Identifier: Apache-2.0
"""The texts of many requests, made from the tokens that an engine tells."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import TokenEvent
from detjax.engine.outputs.text import TextStream
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.text_request import token_sampling
from detjax.models.tokenizer import Tokenizer


class SequenceText:
    """The text of one sequence while it is made.

    Attributes:
        key: (index of the request, index of the sequence).
        pieces: The text so far, in final pieces.
        num_tokens: Tokens so far.
        output: The completion and its text; None while the sequence goes on.
    """

    def __init__(
        self,
        request: Request,
        key: tuple[int, int],
        *,
        tokenizer: Tokenizer,
        end_ids: Collection[int],
        fingerprint: str,
    ):
        """Begin, with no token.

        Args:
            request: Its `stop` texts end the sequence.
            key: Which sequence it is.
            tokenizer: Of the model.
            end_ids: The model's own end tokens: `ModelConfig.eos_token_ids`.
            fingerprint: Of the model.
        """
        self.key = key
        self.pieces: list[str] = []
        self.num_tokens = 0
        self.output: CompletionOutput | None = None
        self._request, self._fingerprint = request, fingerprint
        self._stream = TextStream.of(
            request.sampling, tokenizer, prompt_ids=request.prompt_token_ids, eos_ids=end_ids
        )

    @property
    def sampling(self) -> SamplingParams:
        """Of its request."""
        return self._request.sampling

    @property
    def is_candidate(self) -> bool:
        """Whether its request makes more sequences than are wanted."""
        return self.sampling.num_sequences > self.sampling.n

    def push(self, token_id: int) -> bool:
        """Take a token; return True if a stop string is complete."""
        assert self.output is None, f"{self.key} got a token after its end"
        self.num_tokens += 1
        delta = self._stream.push(token_id)
        if delta.text:
            self.pieces.append(delta.text)
        return delta.is_stopped

    def whole(self) -> str:
        """The whole text, once its last token was pushed."""
        if rest := self._stream.finish():
            self.pieces.append(rest)
        return "".join(self.pieces)

    def end(self, completion: Completion) -> CompletionOutput:
        """Take the completion, whose tokens were pushed; return it with the whole text."""
        self.output = CompletionOutput(
            completion=completion,
            text=self.whole(),
            fingerprint=self._fingerprint,
            sampling=self.sampling,
            is_deterministic=self._request.is_deterministic,
            adapter=self._request.adapter,
        )
        return self.output


class TextBatch:
    """What an engine makes of requests, as text: stop strings end sequences here.

    Give `token_requests`, `on_token` and `on_completion` to `Engine.generate`, and what it returns
    to `outputs`. The engine alone decides every other end.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        *,
        end_ids: Collection[int],
        fingerprint: str,
    ):
        """Begin, with no token.

        Args:
            requests: May have `stop` strings. `max_tokens` of each fits the engine's `max_len`.
            tokenizer: Of the model.
            end_ids: The model's own end tokens: `ModelConfig.eos_token_ids`.
            fingerprint: Of the model.
        """
        self.token_requests = tuple(_token_request(r, tokenizer) for r in requests)
        self.sequences = {
            (i, s): SequenceText(
                request,
                (i, s),
                tokenizer=tokenizer,
                end_ids=end_ids,
                fingerprint=fingerprint,
            )
            for i, request in enumerate(requests)
            for s in range(request.sampling.num_sequences)
        }
        self.num_ended = 0

    def on_token(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        return self.sequences[event.request_idx, event.sequence_idx].push(event.token_id)

    def on_completion(self, completion: Completion) -> None:
        """Take the completion of a sequence, after its tokens."""
        self.sequences[completion.request_idx, completion.sequence_idx].end(completion)
        self.num_ended += 1

    def outputs(self, completions: Iterable[Completion]) -> tuple[CompletionOutput, ...]:
        """Return completions with their texts, by request; of each in the given order."""
        outputs = []
        for done in sorted(completions, key=lambda done: done.request_idx):
            output = self.sequences[done.request_idx, done.sequence_idx].output
            assert output is not None, f"the completion {done} was not told"
            outputs.append(output)
        return tuple(outputs)


def _token_request(request: Request, tokenizer: Tokenizer) -> Request:
    sampling = token_sampling(request.sampling, tokenizer)
    if sampling is request.sampling:
        return request
    return dataclasses.replace(request, sampling=sampling)
