# SPDX-License-Identifier: Apache-2.0
"""Text while it is made: whole characters, never a part of a stop string, and where it ends."""

import codecs
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from detjax.engine.requests.request import (
    NO_TEXT,
    TEXT_FIELDS,
    Completion,
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    Request,
    SamplingParams,
    TokenEvent,
    TopLogprobs,
    last_tokens,
)
from detjax.engine.requests.sampling_checks import check_token_ids
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


# -------------------------------------------------------------------------------------- completions


TEXT_SHOWN, DIGEST_SHOWN = 60, 16
"""Characters of a text and of a digest in the `repr` of an output."""


def shortened(text: str) -> str:
    """Return the text, cut to `TEXT_SHOWN` characters, the last three of which then are dots."""
    return text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN - 3]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """A finished sequence and its text.

    Attributes:
        completion: Token ids, float32 logprobs and the reason of its end, as the engine has them.
        text: Of the tokens, up to the first stop string; special tokens are not shown unless
            `sampling` says so.
        fingerprint: Of numerics, build and hardware: equal for every model. `detjax.proof` says
            which model it was.
        sampling: As it was used, `max_tokens` being no more than fitted.
        is_deterministic: Whether the answer is the canonical one.
    """

    completion: Completion
    text: str
    fingerprint: str
    sampling: SamplingParams
    is_deterministic: bool

    def __repr__(self) -> str:
        """One short line, for notebooks; `as_dict` has every field."""
        return (
            f"CompletionOutput(index={self.index}, text={shortened(self.text)!r}, "
            f"num_tokens={len(self.token_ids)}, finish_reason={self.finish_reason.value!r}, "
            f"digest={self.digest()[:DIGEST_SHOWN]!r})"
        )

    @property
    def index(self) -> int:
        """Which of the prompt's `n` sequences."""
        return self.completion.sequence_idx

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every generated token, those that ended it included."""
        return self.completion.token_ids

    @property
    def logprobs(self) -> tuple[np.float32, ...]:
        """Of each token, at temperature 1 and before any filter."""
        return self.completion.logprobs

    @property
    def top_logprobs(self) -> tuple[TopLogprobs, ...]:
        """Of each token's position, as many as were asked for."""
        return self.completion.top_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.completion.finish_reason

    def digest(self) -> str:
        """Sha256 over the token ids (int32) and the logprobs (float32), little-endian."""
        return self.completion.digest()

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, losing no bit.

        A logprob is a float whose float32 is the logprob: round it, and its bits are back.
        """
        done = self.completion
        entry = {
            "index": done.request_idx,
            "sequence": done.sequence_idx,
            "prompt_token_ids": list(done.prompt_token_ids),
            "token_ids": list(done.token_ids),
            "text": self.text,
            "finish_reason": done.finish_reason.value,
            "sampling": self.sampling.as_dict(),
            "is_deterministic": self.is_deterministic,
            # ROUND: none; float32 to float64 is exact, and JSON's decimal names that float64.
            "logprobs": [float(logprob) for logprob in done.logprobs],
        }
        if any(done.top_logprobs):
            entry["top_logprobs"] = [
                [[token_id, float(logprob)] for token_id, logprob in top]
                for top in done.top_logprobs
            ]
        if done.prompt_logprobs is not None:
            entry["prompt_logprobs"] = [
                [float(one.logprob), one.rank, [[i, float(p)] for i, p in one.top_logprobs]]
                for one in done.prompt_logprobs
            ]
        return {**entry, "digest": done.digest(), "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "CompletionOutput":
        """Return what `as_dict` made the entry of; other keys of it are not read.

        Raises:
            KeyError: If a key is missing.
            ValueError: If the digest is not that of the token ids and logprobs.
        """
        none = [[] for _ in entry["token_ids"]]
        completion = Completion(
            request_idx=entry["index"],
            sequence_idx=entry["sequence"],
            prompt_token_ids=tuple(entry["prompt_token_ids"]),
            token_ids=tuple(entry["token_ids"]),
            logprobs=tuple(map(np.float32, entry["logprobs"])),
            top_logprobs=tuple(
                tuple((token_id, np.float32(logprob)) for token_id, logprob in top)
                for top in entry.get("top_logprobs", none)
            ),
            finish_reason=FinishReason(entry["finish_reason"]),
            prompt_logprobs=_prompt_logprobs(entry.get("prompt_logprobs")),
        )
        if completion.digest() != entry["digest"]:
            raise ValueError(
                f"digest {entry['digest']!r} is not that of the token ids and logprobs beside it, "
                f"{completion.digest()}; the record was changed"
            )
        return cls(
            completion=completion,
            text=entry["text"],
            fingerprint=entry["fingerprint"],
            sampling=SamplingParams.from_dict(entry["sampling"]),
            is_deterministic=entry["is_deterministic"],
        )


def _prompt_logprobs(entry: Sequence[Any] | None) -> PromptLogprobs | None:
    """What `CompletionOutput.as_dict` made an entry of."""
    if entry is None:
        return None
    return tuple(
        PromptLogprob(np.float32(logprob), rank, tuple((i, np.float32(p)) for i, p in top))
        for logprob, rank, top in entry
    )


class CompletionText:
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
            (i, s): CompletionText(
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


def token_sampling(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the sampling as an engine, which knows no text, can run it.

    Bad words become token sequences: of the word alone, and of the word after a space. Other ways
    to cut the same text into tokens stay possible.

    Raises:
        ValueError: If a bad word has too many tokens.
    """
    bare = [word.lstrip(" ") or word for word in sampling.bad_words]
    spaced = [prefix + word for word in bare for prefix in ("", " ")]
    words = (tokenizer.backend.encode(w, add_special_tokens=False).ids for w in spaced)
    return dataclasses.replace(
        sampling,
        **{name: getattr(NO_TEXT, name) for name in TEXT_FIELDS},
        bad_words_token_ids=(*sampling.bad_words_token_ids, *map(tuple, words)),
    )


def text_request(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    what: str,
    vocab_size: int,
    max_len: int,
    limit: str,
    is_deterministic: bool,
    tokenizer: Tokenizer,
    eos_token_ids: Iterable[int],
) -> Request:
    """Return the request for a prompt, with `max_tokens` no more than fits behind it.

    Its prompt is truncated as the sampling says, and its sampling says so no more.

    Args:
        token_ids: Of the prompt.
        sampling: May have `stop` strings.
        what: Names the prompt in errors.
        vocab_size: Of the model.
        max_len: Most tokens of a prompt and its completion.
        limit: Names `max_len` in errors.
        is_deterministic: As `Request` has it.
        tokenizer: Of the model.
        eos_token_ids: Of the model.

    Raises:
        ValueError: If the prompt has no tokens, too many, or some that the model does not know, or
            its sampling does.
    """
    check_token_ids(
        token_sampling(sampling, tokenizer), what, vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )  # fmt: skip
    try:
        request = Request(
            prompt_token_ids=tuple(token_ids), sampling=sampling, is_deterministic=is_deterministic
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is neither a text nor token ids: {error}") from error
    token_ids, sampling = request.prompt_token_ids, request.sampling
    if not token_ids:
        raise ValueError(f"{what} has no tokens; give some text")
    token_ids = last_tokens(
        token_ids, sampling.truncate_prompt_tokens, max_tokens=sampling.max_tokens, max_len=max_len
    )
    if len(token_ids) + min(sampling.max_tokens, 1) > max_len:
        left = " and one must be left to generate" if sampling.max_tokens else ""
        raise ValueError(
            f"{what} has {len(token_ids)} tokens, but {limit} is {max_len}{left}; shorten it"
        )
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{what} has token id {token_id}, but the model's vocabulary is {vocab_size}; the "
                "tokenizer is of another model"
            )
    room = min(sampling.max_tokens, max_len - len(token_ids))
    if sampling.min_tokens > room:
        raise ValueError(
            f"{what} has min_tokens={sampling.min_tokens}, and {limit} leaves room for {room} "
            "tokens behind it; lower it, or shorten the prompt"
        )
    used = dataclasses.replace(sampling, max_tokens=room, truncate_prompt_tokens=None)
    return dataclasses.replace(request, prompt_token_ids=token_ids, sampling=used)
