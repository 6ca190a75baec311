# SPDX-License-Identifier: Apache-2.0
"""Writes the sequences of a run while they are made, each in its turn."""

from detjax.cli.output import AbstractCompletionWriter
from detjax.engine.outputs.completion import Completion, best
from detjax.engine.outputs.request_output import TokenEvent
from detjax.engine.outputs.text_batch import SequenceText, TextBatch


class Transcript:
    """Writes the sequences of one run: each as far as it goes, after those before it.

    Of a prompt with more sequences than are wanted, the best are written when all have ended.
    """

    def __init__(self, batch: TextBatch, writer: AbstractCompletionWriter):
        """Begin, with nothing written."""
        self._batch = batch
        self._writer = writer
        self._waiting = list(batch.sequences.values())[::-1]  # not written to their end, last first
        self._num_pieces = 0  # of the first of them
        self._has_begun = False

    def on_token(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        is_stopped = self._batch.on_token(event)
        self._write_on()
        return is_stopped

    def on_completion(self, completion: Completion) -> None:
        """Take the completion of a sequence, after its tokens."""
        self._batch.on_completion(completion)
        self._write_on()

    def _write_on(self) -> None:
        """Write what is new, of the first sequence that is not written to its end, and so on."""
        while self._waiting:
            first = self._waiting[-1]
            num_written = self._write_best(first) if first.is_candidate else self._write(first)
            if not num_written:
                break
            del self._waiting[-num_written:]
            self._num_pieces, self._has_begun = 0, False

    def _write(self, sequence: SequenceText) -> bool:
        """Write what is new of a sequence; return True if it is now written to its end."""
        if not self._has_begun and (sequence.num_tokens or sequence.output is not None):
            self._has_begun = True
            self._writer.begin(*sequence.key)
        for text in sequence.pieces[self._num_pieces :]:
            self._writer.write(text)
        self._num_pieces = len(sequence.pieces)
        if sequence.output is None:
            return False
        self._writer.end(sequence.output)
        return True

    def _write_best(self, first: SequenceText) -> int:
        """Write the best of a prompt's sequences if all have ended; how many there were, or 0."""
        made = self._waiting[: -first.sampling.num_sequences - 1 : -1]
        outputs = [sequence.output for sequence in made if sequence.output is not None]
        if len(outputs) < len(made):
            return 0
        for done in best([output.completion for output in outputs], first.sampling):
            self._num_pieces, self._has_begun = 0, False
            self._write(made[done.sequence_idx])
        return len(made)
