# SPDX-License-Identifier: Apache-2.0
"""Text while it is made: whole characters, never a part of a stop string, and where it ends."""

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one token released.

    Attributes:
        text: New text, which is final; often none, sometimes that of several tokens.
        is_stopped: A stop string is complete: the sequence ends here, and no more text comes.
        own: What the token itself adds to the text, whether it is released, held back or behind
            the end. A character belongs to the token that completes it.
    """

    text: str
    is_stopped: bool
    own: str


class TextStream:
    """Turn the tokens of one completion into text, piece by piece.

    The pieces concatenate to `tokenizer.decode(ids, prompt_ids=prompt_ids)`, up to the first stop
    string. The work for a token depends on its own length and that of the stop strings, not on
    how much text there is.

    What is held back: the bytes of a character that is not whole yet, and the longest end of the
    text with which a stop string begins. `finish` releases both.

    Special tokens are not shown unless `shows_special` says so. A stop string with the text of one
    in it is compared with the text in which they are; the others with what is shown.

    With `min_tokens`, a stop string counts if a token behind the first `min_tokens` completes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        prompt_ids: Sequence[int] = (),
        min_tokens: int = 0,
        includes_stop: bool = False,
        shows_special: bool = False,
        end_ids: Collection[int] = (),
    ):
        """Begin a text that follows `prompt_ids`.

        Args:
            tokenizer: Of the model.
            stop_strings: Texts that end it.
            prompt_ids: What it follows.
            min_tokens: Tokens at the beginning that end nothing.
            includes_stop: The stop string that ends it is a part of it.
            shows_special: Special tokens are shown, as any other. Only then `end_ids` matter.
            end_ids: Tokens that end it; without `includes_stop` special ones are never shown.

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
        self._hidden: list[tuple[int, int]] = []  # where special tokens are in it, in order
        self._shown_ids = tokenizer.special_ids if shows_special else frozenset[int]()
        if not includes_stop:
            self._shown_ids = self._shown_ids.difference(end_ids)
        # Where special tokens are shown, stop strings with them are compared as any other.
        self._special_stops = [
            s for s in self._stop_strings if tokenizer.control.search(s) and not shows_special
        ]
        self._plain_stops = [s for s in self._stop_strings if s not in self._special_stops]
        self._is_stopped = False
        self._num_before_stops = min_tokens
        self._includes_stop = includes_stop

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        eos_ids: Iterable[int],
    ) -> "TextStream":
        """Begin the text of an answer.

        Args:
            sampling: Of its request.
            tokenizer: Of the model.
            prompt_ids: What it follows.
            eos_ids: The model's own end tokens: `ModelConfig.eos_token_ids`.
        """
        return cls(
            tokenizer,
            sampling.stop,
            prompt_ids=prompt_ids,
            min_tokens=sampling.min_tokens,
            includes_stop=sampling.include_stop_str_in_output,
            shows_special=not sampling.skip_special_tokens,
            end_ids=sampling.end_token_ids(eos_ids),
        )

    def push(self, token_id: int) -> TextDelta:
        """Take the next token. After a stop string nothing is released any more."""
        if self._is_stopped:
            return TextDelta(text="", is_stopped=True, own="")
        self._num_before_stops -= 1
        if self._special_stops and token_id in self._tokenizer.special_ids:
            # A character goes on behind it, so its text does not pass through the decoder.
            name = self._name(token_id)
            self._hidden.append((len(self._held), len(self._held) + len(name)))
            return self._release(name)._replace(own="")
        if token_id in self._shown_ids:
            return self._release(self._special_text(token_id))
        piece = self._tokenizer.token_bytes(token_id)
        if piece and self._drops_space:
            piece = piece.removeprefix(b" ")
            self._drops_space = False
        return self._release(self._characters.decode(piece))

    def _name(self, token_id: int) -> str:
        return self._tokenizer.backend.id_to_token(token_id) or ""

    def _special_text(self, token_id: int) -> str:
        """A special token that is shown; a character that is not whole ends before it."""
        self._drops_space = False
        rest = self._characters.decode(b"", final=True)
        self._characters.reset()
        return rest + self._name(token_id)

    def finish(self) -> str:
        """End the text: release what was held back. A character that is not whole is U+FFFD."""
        if self._is_stopped:
            return ""
        delta = self._release(self._characters.decode(b"", final=True))
        return delta.text + self._take(len(self._held))

    def _release(self, new: str) -> TextDelta:
        if not self._stop_strings:
            return TextDelta(text=new, is_stopped=False, own=new)
        before = len(self._held)
        self._held += new
        found, num_held = self._compared(before)
        if found is not None and self._num_before_stops < 0:
            begin, stop = found
            text = self._take(begin) + (stop if self._includes_stop else "")
            self._held, self._is_stopped = "", True
            return TextDelta(text=text, is_stopped=True, own=new)
        text = self._take(len(self._held) - num_held)
        return TextDelta(text=text, is_stopped=False, own=new)

    def _compared(self, before: int) -> tuple[tuple[int, str] | None, int]:
        """Where the stop string begins that is complete first, and which; how much to hold back.

        Args:
            before: Characters of what is held back in which none is complete.
        """
        held = self._held
        if not self._special_stops:
            found = find_stop(held, self._plain_stops, after=before)
            most = max(overlap(held, stop) for stop in self._plain_stops)
            return found and (found[0], held[found[0] : found[1]]), most
        hidden = {i for span in self._hidden for i in range(*span)}
        at = [i for i in range(len(held)) if i not in hidden]  # of each character that is shown
        shown, kinds = "".join(held[i] for i in at), []
        everything = range(len(held)), held, self._special_stops, before
        for places, text, stops, after in (
            everything, (at, shown, self._plain_stops, sum(i < before for i in at)),
        ):  # fmt: skip
            num = max((overlap(text, stop) for stop in stops), default=0)
            kept = len(held) - places[len(text) - num] if num else 0
            found = find_stop(text, stops, after=after)
            end = found and (places[found[1] - 1], places[found[0]], text[found[0] : found[1]])
            kinds.append((end, kept))
        complete = min((end for end, _ in kinds if end is not None), default=None)
        return complete and complete[1:], max(kept for _, kept in kinds)

    def _take(self, count: int) -> str:
        """The first characters of what is held back, without special tokens."""
        taken, self._held = self._held[:count], self._held[count:]
        shown, at = "", 0
        for begin, end in self._hidden:
            shown, at = shown + taken[at:begin], max(at, min(end, count))
        rest = [(max(0, a - count), b - count) for a, b in self._hidden if b > count]
        self._hidden = rest
        return shown + taken[at:]


def find_stop(text: str, stop_strings: Sequence[str], *, after: int = 0) -> tuple[int, int] | None:
    """Return where the stop string is that is complete first, as (begin, end); None without one.

    Of several that are complete at the same character the longest counts. So the answer is the
    same however the text is cut into tokens. Those that end in the first `after` characters do not
    count.
    """
    begins = ((text.find(stop, max(0, after - len(stop) + 1)), len(stop)) for stop in stop_strings)
    found = [(begin + length, -length) for begin, length in begins if begin >= 0]
    if not found:
        return None
    end, minus_len = min(found)
    return end + minus_len, end


def overlap(text: str, stop: str) -> int:
    """Return how many last characters of `text` are the first, but not all, of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
