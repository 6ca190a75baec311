# SPDX-License-Identifier: Apache-2.0
"""From an engine's outputs to what is new of each sequence, with its text."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from detjax.engine.errors import NoTokenError
from detjax.engine.outputs.completion import CollectedTokens, Completion
from detjax.engine.outputs.request_output import (
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    TokenEvent,
    WindowCounts,
)
from detjax.engine.outputs.text import TextStream
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import OnToken
from detjax.server.served_model import ServedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDelta:
    """What is new of one sequence: final, never taken back.

    Attributes:
        prompt_idx: Which of the request's prompts.
        sequence_idx: Which of the prompt's `n`.
        text: New text; often none.
        tokens: New tokens, each with the text that it adds itself (`TextDelta.own`).
        finish_reason: None while it goes on.
        error: What went wrong where `finish_reason` is ERROR.
        is_own_fault: It went wrong by what was asked.
        completion: All of its tokens, with the last delta.
        whole_text: All of its text, with the last delta.
        windows: Of drafts, so far.
        prompt_token_ids: The prompt.
        prompt_logprobs: Of the prompt, with the first delta, where they were asked for.
        num_cached: Tokens of the prompt that the prefix cache had.
    """

    prompt_idx: int
    sequence_idx: int
    text: str
    tokens: tuple[tuple[TokenEvent, str], ...]
    finish_reason: FinishReason | None
    error: str
    completion: Completion | None
    windows: WindowCounts
    whole_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    is_own_fault: bool = False
    num_cached: int = 0


class StreamedSequence:
    """One sequence while it is made. The engine's thread pushes; the stream takes what was told."""

    def __init__(self, model: ServedModel, sampling: SamplingParams, prompt_ids: Sequence[int]):
        self._stream = TextStream.of(
            sampling, model.tokenizer, prompt_ids=prompt_ids, eos_ids=model.end_token_ids
        )
        self._tokens: list[tuple[TokenEvent, str]] = []
        self._collected = CollectedTokens()
        self._released: list[str] = []
        self._num_taken = 0

    def push(self, event: TokenEvent) -> bool:
        """Take a token; True if a stop string is complete."""
        delta = self._stream.push(event.token_id)
        self._collected.push(event)
        self._tokens.append((event, delta.own))
        self._released.append(delta.text)
        return delta.is_stopped

    def take(self, count: int) -> tuple[tuple[tuple[TokenEvent, str], ...], str]:
        """The next `count` tokens, which the engine has released, and the text they release."""
        begin, self._num_taken = self._num_taken, self._num_taken + count
        text = "".join(self._released[begin : self._num_taken])
        return tuple(self._tokens[begin : self._num_taken]), text

    def take_rest(self) -> tuple[tuple[tuple[TokenEvent, str], ...], str]:
        """`take` of all that were not taken; nothing is pushed any more."""
        return self.take(len(self._tokens) - self._num_taken)

    def finish(self) -> str:
        """The text that was held back; nothing is pushed any more."""
        self._released.append(self._stream.finish())
        return self._released[-1]

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join(self._released)

    def completion(
        self, prompt_ids: tuple[int, ...], sequence_idx: int, reason: FinishReason, version: int
    ) -> Completion:
        """All of its tokens; nothing is pushed any more."""
        return self._collected.completion(
            prompt_ids,
            request_idx=0,
            sequence_idx=sequence_idx,
            finish_reason=reason,
            weight_version=version,
        )


class PromptLogprobsFirst:
    """Puts a prompt's logprobs to the first delta of each sequence, and to its completion.

    The engine tells them with sequence 0; deltas of others that come before wait for them.
    """

    def __init__(self, *, is_wanted: bool):
        self._is_wanted = is_wanted
        self._waiting: list[OutputDelta] = []
        self._scores: PromptLogprobs | None = None
        self._begun: set[int] = set()

    def add(self, delta: OutputDelta, scores: PromptLogprobs | None) -> list[OutputDelta]:
        """Take a delta; return what can be told now."""
        if not self._is_wanted:
            return [delta]
        self._scores = self._scores if scores is None else scores
        self._waiting.append(delta)
        if self._scores is None and delta.finish_reason is not FinishReason.ERROR:
            return []
        told, self._waiting = self._waiting, []
        return [self._scored(one) for one in told]

    def _scored(self, delta: OutputDelta) -> OutputDelta:
        first = None if delta.sequence_idx in self._begun else self._scores
        self._begun.add(delta.sequence_idx)
        done = delta.completion
        if done is not None:
            done = dataclasses.replace(done, prompt_logprobs=self._scores)
        return dataclasses.replace(delta, prompt_logprobs=first, completion=done)


def listener_of(sequences: Sequence[StreamedSequence]) -> OnToken:
    """Hand each token to its sequence, in the engine's thread."""
    return lambda event: sequences[event.sequence_idx].push(event)


def delta_of(
    seq: StreamedSequence, output: RequestOutput, prompt_idx: int, prompt_ids: tuple[int, ...]
) -> OutputDelta:
    """What is new of a sequence since its output before."""
    has_ended = output.finish_reason is not None
    tokens, text = seq.take_rest() if has_ended else seq.take(len(output.token_ids))
    completion = None
    if output.finish_reason is not None:
        text += seq.finish()
        completion = seq.completion(
            prompt_ids, output.sequence_idx, output.finish_reason, output.weight_version
        )
    return OutputDelta(
        prompt_idx=prompt_idx,
        sequence_idx=output.sequence_idx,
        text=text,
        tokens=tokens,
        finish_reason=output.finish_reason,
        error=output.error,
        completion=completion,
        whole_text="" if completion is None else seq.text,
        windows=output.windows,
        prompt_token_ids=prompt_ids,
        is_own_fault=isinstance(output.exception, NoTokenError),
        num_cached=output.num_cached_tokens,
    )
