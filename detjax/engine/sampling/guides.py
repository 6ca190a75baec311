# SPDX-License-Identifier: Apache-2.0
"""What says which tokens may follow a completion that has a form. This imports no JAX.

Masks are functions of the request and its tokens so far alone. Bits of a mask are those of tokens
that may not follow: int32 words, bit i mod 32 of word i div 32 for token i.
"""

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from detjax.engine.errors import StructuredOutputError
from detjax.engine.requests.sampling_params import SamplingParams


@runtime_checkable
class GuidesTokens(Protocol):
    """What a form says of one completion."""

    def banned(self, output_ids: Sequence[int]) -> np.ndarray:
        """Bits of the tokens that may not follow the completion so far: int32 [n].

        Called with ever longer completions of one sequence.
        """
        ...


def bits_of_all_but(token_ids: Collection[int], vocab_size: int) -> np.ndarray:
    """Bits of all tokens but these, those past the vocabulary among them: int32 [n]."""
    flags = np.ones(-(-vocab_size // 32) * 32, np.uint8)
    flags[[i for i in token_ids if 0 <= i < vocab_size]] = 0
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


class MatcherGuide:
    """The form of one completion by llguidance, and how far it is."""

    def __init__(self, matcher: Any, past: np.ndarray):
        """Begin with no token. `past` has the bits past the vocabulary."""
        self._matcher, self._past = matcher, past
        self._num_seen = 0

    def banned(self, output_ids: Sequence[int]) -> np.ndarray:
        """Bits of the tokens that may not follow the completion so far: int32 [n].

        Raises:
            StructuredOutputError: If the completion is not of the form, or a limit is passed.
        """
        new, self._num_seen = list(output_ids[self._num_seen :]), len(output_ids)
        allowed = np.zeros(0, np.int32)
        if self._matcher.consume_tokens(new):
            allowed = np.frombuffer(self._matcher.compute_bitmask(), "<i4")
        if self._matcher.is_error():
            why, seen = self._matcher.get_error(), self._num_seen
            if why.startswith("NoExtension"):  # as llguidance calls it
                why = f"no text goes on after these {seen} tokens" if seen else "no text has it"
            raise StructuredOutputError(
                f"its structured output cannot go on: {why.splitlines()[0]}"
            )
        return ~allowed[: len(self._past)] | self._past


class MaskedGuide:
    """A form together with the other masks of its request.

    Where these leave no token of a form that is complete, it ends there: its end tokens are
    possible, whatever the masks say.
    """

    def __init__(
        self,
        guide: GuidesTokens,
        sampling: SamplingParams,
        *,
        vocab_size: int,
        form_ends: Collection[int],
        ends: Collection[int],
    ):
        """Begin with no token.

        Args:
            guide: Of the form.
            sampling: Of the request, without texts.
            vocab_size: Of the model.
            form_ends: What ends a completion whose form is complete.
            ends: End tokens of the request, which `min_tokens` forbids at first.
        """
        self._guide, self._min_tokens = guide, sampling.min_tokens
        self._all_but_ends = bits_of_all_but(form_ends, vocab_size)
        self._early = ~bits_of_all_but(ends, vocab_size)
        words = sampling.bad_words_token_ids
        self._words = [word for word in words if len(word) > 1]
        self._always = ~bits_of_all_but([word[0] for word in words if len(word) == 1], vocab_size)
        if sampling.allowed_token_ids:
            self._always |= bits_of_all_but(sampling.allowed_token_ids, vocab_size)
        self._vocab_size = vocab_size

    def banned(self, output_ids: Sequence[int]) -> np.ndarray:
        """Bits of the tokens that may not follow the completion so far: int32 [n].

        Raises:
            ValueError: As the guide of the form does.
        """
        of_form = self._guide.banned(output_ids)
        banned = of_form | self._always
        if len(output_ids) < self._min_tokens:
            banned = banned | self._early
        last = [
            word[-1]
            for word in self._words
            if tuple(output_ids[max(0, len(output_ids) - len(word) + 1) :]) == tuple(word[:-1])
        ]
        if last:
            banned = banned | ~bits_of_all_but(last, self._vocab_size)
        ends = of_form | self._all_but_ends
        return ends if is_everything(banned) and not is_everything(ends) else banned


def is_everything(banned: np.ndarray) -> bool:
    """Whether a mask leaves no token."""
    return bool((banned == -1).all())


SEEN_TO: dict[str, Any] = {"min_tokens": 0, "allowed_token_ids": (), "bad_words_token_ids": ()}
"""The fields of a sampling that `MaskedGuide` sees to, at the values that ask for nothing."""
