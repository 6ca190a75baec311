# SPDX-License-Identifier: Apache-2.0
"""Follows the sequences of a run while they are made, and writes each in its turn."""

from detjax.cli.job import Job
from detjax.cli.output import AbstractWriter, Record
from detjax.models.tokenizer import Tokenizer
from detjax.serving.request import Completion, FinishReason, TokenEvent
from detjax.serving.text import TextStream


class Transcript:
    """Follows the sequences of one run: their texts, when each ends, and whose turn it is."""

    def __init__(self, job: Job, tokenizer: Tokenizer, writer: AbstractWriter):
        """Begin, with nothing written."""
        self._job = job
        self._writer = writer
        self._sequences = [_Sequence(job, tokenizer, *key) for key in job.seqs]
        self._of_key = dict(zip(job.seqs, self._sequences, strict=True))
        self._num_written = 0
        self.num_ended = 0

    @property
    def records(self) -> tuple[Record, ...]:
        """All completions; each must have ended."""
        return tuple(seq.record() for seq in self._sequences)

    def on_token(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        seq = self._of_key[event.request_idx, event.sequence_idx]
        is_stopped = seq.push(event)
        self.num_ended += seq.finish_reason is not None
        self._write_in_turn()
        return is_stopped

    def _write_in_turn(self) -> None:
        """Write the first completion that has not ended as far as it goes, and any before it."""
        while self._num_written < len(self._sequences):
            if not self._sequences[self._num_written].write_to(self._writer):
                return
            self._num_written += 1


class _Sequence:
    """One completion while it is made."""

    def __init__(self, job: Job, tokenizer: Tokenizer, index: int, seq: int):
        self._key = (index, seq)
        self._request = job.requests[index]
        self._end_ids = job.end_ids
        self._stream = TextStream(
            tokenizer, job.stop_strings, prompt_ids=self._request.prompt_token_ids
        )
        self._events: list[TokenEvent] = []
        self._texts: list[str] = []
        self._num_written = 0
        self._has_begun = False
        self.finish_reason: FinishReason | None = None

    def push(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        assert self.finish_reason is None, f"{self._key} got a token after its end"
        self._events.append(event)
        delta = self._stream.push(event.token_id)
        self._texts.append(delta.text)
        if delta.is_stopped or event.token_id in self._end_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self._events) == self._request.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            self._texts.append(self._stream.finish())
        return delta.is_stopped

    def write_to(self, writer: AbstractWriter) -> bool:
        """Write what is new; return True if this completion is now written to its end."""
        if self._events and not self._has_begun:
            self._has_begun = True
            writer.begin(*self._key)
        for text in filter(None, self._texts[self._num_written :]):
            writer.write(text)
        self._num_written = len(self._texts)
        if self.finish_reason is not None:
            writer.end(self.record())
        return self.finish_reason is not None

    def record(self) -> Record:
        """Return the completion, which must have ended."""
        assert self.finish_reason is not None, f"{self._key} has not ended"
        completion = Completion(
            request_idx=self._key[0],
            sequence_idx=self._key[1],
            prompt_token_ids=self._request.prompt_token_ids,
            token_ids=tuple(event.token_id for event in self._events),
            logprobs=tuple(event.logprob for event in self._events),
            top_logprobs=tuple(event.top_logprobs for event in self._events),
            finish_reason=self.finish_reason,
        )
        return Record(completion=completion, text="".join(self._texts))
