# SPDX-License-Identifier: Apache-2.0
"""Text while it is made: whole characters, and never a part of a stop string."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from detjax.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """What one token released.

    Attributes:
        text: New text, which is final; often none, sometimes that of several tokens.
        is_stopped: A stop string is complete: the sequence ends here, and no more text comes.
    """

    text: str
    is_stopped: bool


class TextStream:
    """Turn the tokens of one completion into text, piece by piece.

    The pieces concatenate to `tokenizer.decode(ids, prompt_ids=prompt_ids)`, up to the first stop
    string. The work for a token depends on its own length and that of the stop strings, not on
    how much text there is.

    What is held back: the bytes of a character that is not whole yet, and the longest end of the
    text with which a stop string begins. `finish` releases both.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        prompt_ids: Sequence[int] = (),
    ):
        """Begin a text that follows `prompt_ids`.

        Raises:
            ValueError: If a stop string is empty.
        """
        if not all(stop_strings):
            raise ValueError("a stop string is empty; it would end every text before it begins")
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = tokenizer.drops_first_space(prompt_ids)
        self._held = ""  # released by no one yet; no stop string is whole in it
        self._is_stopped = False

    def push(self, token_id: int) -> TextDelta:
        """Take the next token. After a stop string nothing is released any more."""
        if self._is_stopped:
            return TextDelta(text="", is_stopped=True)
        piece = self._tokenizer.token_bytes(token_id)
        if piece and self._drops_space:
            piece = piece.removeprefix(b" ")
            self._drops_space = False
        return self._release(self._characters.decode(piece))

    def finish(self) -> str:
        """End the text: release what was held back. A character that is not whole is U+FFFD."""
        if self._is_stopped:
            return ""
        delta = self._release(self._characters.decode(b"", final=True))
        held, self._held = self._held, ""
        return delta.text + held

    def _release(self, text: str) -> TextDelta:
        text = self._held + text
        end = stop_begin(text, self._stop_strings)
        if end is not None:
            self._held, self._is_stopped = "", True
            return TextDelta(text=text[:end], is_stopped=True)
        num_held = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        released = text[: len(text) - num_held]
        self._held = text[len(released) :]
        return TextDelta(text=released, is_stopped=False)


def stop_begin(text: str, stop_strings: Sequence[str]) -> int | None:
    """Return where the stop string begins that is complete first; None where none is.

    Of several that are complete at the same character the longest counts. So the answer is the
    same however the text is cut into tokens.
    """
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stop_strings if stop in text]
    if not found:
        return None
    end, minus_len = min(found)
    return end + minus_len


def _overlap(text: str, stop: str) -> int:
    """Return how many last characters of `text` are the first, but not all, of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
