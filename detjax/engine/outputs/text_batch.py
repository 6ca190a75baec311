# SPDX-License-Identifier: Apache-2.0
"""The texts of many requests, made from the tokens that an engine tells."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.outputs.request_output import FinishReason, TokenEvent
from detjax.engine.outputs.text import TextStream
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.text_request import token_sampling
from detjax.models.tokenizer import Tokenizer


class SequenceText:
    """One sequence while it is made: its tokens, its text so far, and why it ends.

    Attributes:
        pieces: Its text so far, in final pieces.
        finish_reason: None while it goes on.
    """

    def __init__(
        self,
        request: Request,
        *,
        request_idx: int,
        sequence_idx: int,
        tokenizer: Tokenizer,
        end_ids: Collection[int],
        fingerprint: str,
    ):
        """Begin, with no token.

        Args:
            request: Its `stop` texts, `stop_token_ids` and `max_tokens` end the sequence.
            request_idx: What `completion` will carry.
            sequence_idx: Which of the request's sequences.
            tokenizer: Of the model.
            end_ids: The model's own end tokens: `ModelConfig.eos_token_ids`.
            fingerprint: Of the model.
        """
        self.key = (request_idx, sequence_idx)
        self.pieces: list[str] = []
        # Nothing is generated where only the prompt is scored.
        has_tokens = request.sampling.max_tokens > 0
        self.finish_reason: FinishReason | None = None if has_tokens else FinishReason.LENGTH
        self._request = request
        sampling = request.sampling
        self._end_ids = sampling.end_token_ids(end_ids)
        self._fingerprint = fingerprint
        self._stream = TextStream.of(
            sampling, tokenizer, prompt_ids=request.prompt_token_ids, eos_ids=end_ids
        )
        self._events: list[TokenEvent] = []

    @property
    def sampling(self) -> SamplingParams:
        """Of its request."""
        return self._request.sampling

    @property
    def is_candidate(self) -> bool:
        """Whether its request makes more sequences than are wanted."""
        return self.sampling.num_sequences > self.sampling.n

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._events)

    def push(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        assert self.finish_reason is None, f"{self.key} got a token after its end"
        self._events.append(event)
        delta = self._stream.push(event.token_id)
        if delta.text:
            self.pieces.append(delta.text)
        if delta.is_stopped or event.token_id in self._end_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self._events) == self._request.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None and (rest := self._stream.finish()):
            self.pieces.append(rest)
        return delta.is_stopped

    def output(self) -> CompletionOutput:
        """Return the completion, which must have ended."""
        assert self.finish_reason is not None, f"{self.key} has not ended"
        completion = Completion(
            request_idx=self.key[0],
            sequence_idx=self.key[1],
            prompt_token_ids=self._request.prompt_token_ids,
            token_ids=tuple(event.token_id for event in self._events),
            logprobs=tuple(event.logprob for event in self._events),
            top_logprobs=tuple(event.top_logprobs for event in self._events),
            finish_reason=self.finish_reason,
        )
        return CompletionOutput(
            completion=completion,
            text="".join(self.pieces),
            fingerprint=self._fingerprint,
            sampling=self._request.sampling,
            is_deterministic=self._request.is_deterministic,
        )


class TextBatch:
    """What an engine makes of requests, as text: stop strings end sequences here.

    Give `token_requests` and `on_token` to `Engine.generate`, and what it returns to `outputs`.
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
        self.token_requests = tuple(
            dataclasses.replace(r, sampling=token_sampling(r.sampling, tokenizer)) for r in requests
        )
        self.sequences = {
            (i, s): SequenceText(
                request,
                request_idx=i,
                sequence_idx=s,
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
        sequence = self.sequences[event.request_idx, event.sequence_idx]
        is_stopped = sequence.push(event)
        self.num_ended += sequence.finish_reason is not None
        return is_stopped

    def outputs(self, completions: Iterable[Completion]) -> tuple[CompletionOutput, ...]:
        """Put the texts to what the engine returned, by request; of each in the given order."""
        outputs = []
        for done in sorted(completions, key=lambda done: done.request_idx):
            key = done.request_idx, done.sequence_idx
            told = self.sequences[key].output()
            # Its tokens, told one by one, must be the completion that the engine returned.
            is_same = (told.digest(), told.finish_reason) == (done.digest(), done.finish_reason)
            assert is_same, f"{key}: {told} was told, {done} returned"
            outputs.append(dataclasses.replace(told, completion=done))
        return tuple(outputs)
