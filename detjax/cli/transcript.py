# SPDX-License-Identifier: Apache-2.0
"""Writes the sequences of a run while they are made, each in its turn."""

from detjax.cli.output import AbstractWriter
from detjax.serving.request import TokenEvent
from detjax.serving.text import CompletionText, TextBatch


class Transcript:
    """Writes the sequences of one run: each as far as it goes, after those before it."""

    def __init__(self, batch: TextBatch, writer: AbstractWriter):
        """Begin, with nothing written."""
        self._batch = batch
        self._writer = writer
        self._sequences = list(batch.sequences.values())
        self._num_written = 0  # sequences, to their end
        self._num_pieces = 0  # of the one after them
        self._has_begun = False

    def on_token(self, event: TokenEvent) -> bool:
        """Take a token; return True if a stop string is complete."""
        is_stopped = self._batch.on_token(event)
        while self._num_written < len(self._sequences):
            if not self._write(self._sequences[self._num_written]):
                break
            self._num_written += 1
            self._num_pieces, self._has_begun = 0, False
        return is_stopped

    def _write(self, sequence: CompletionText) -> bool:
        """Write what is new of a sequence; return True if it is now written to its end."""
        if sequence.num_tokens and not self._has_begun:
            self._has_begun = True
            self._writer.begin(*sequence.key)
        for text in sequence.pieces[self._num_pieces :]:
            self._writer.write(text)
        self._num_pieces = len(sequence.pieces)
        if sequence.finish_reason is None:
            return False
        self._writer.end(sequence.output())
        return True
