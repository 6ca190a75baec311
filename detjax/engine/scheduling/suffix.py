# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding: drafts of what most often followed the longest suffix of a text before.

Reference:
    Oliaro et al. 2024, arXiv:2411.04975. It keeps suffix trees; here an index of pairs of tokens
    finds the places, and the longest match among them counts, so a token costs one entry.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEY_LEN = 2
"""Tokens by which places are found; shorter suffixes are not matched."""

MOST_PLACES = 32
"""Newest places of a pair that are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixOptions:
    """What suffix decoding drafts.

    Attributes:
        max_depth: Longest suffix that is matched, in tokens.
        max_cached: Earlier answers that are matched too; 0 matches the own text alone.
        max_factor: Most drafts, in lengths of the suffix that was found.
        min_share: Least share of the places that continue as a draft does, over all its tokens.
    """

    max_depth: int = 24
    max_cached: int = 1000
    max_factor: float = 1.0
    min_share: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A draft, with the sum of its shares.

    Attributes:
        token_ids: The draft.
        score: Tokens that are expected to be right.
    """

    token_ids: tuple[int, ...] = ()
    score: float = 0.0


class TextIndex:
    """Texts, one behind the other, in which the places of a suffix are found."""

    def __init__(self):
        """Begin without a text."""
        self._tokens: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._start = 0  # of the newest text: no place spans two

    def __len__(self) -> int:
        """Tokens, those between texts included."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the newest text."""
        for token in token_ids:
            self._tokens.append(token)
            end = len(self._tokens)
            if end - self._start >= KEY_LEN:
                places = self._places[tuple(self._tokens[end - KEY_LEN :])]
                places.append(end)
                if len(places) > 2 * MOST_PLACES:
                    del places[:MOST_PLACES]

    def end_text(self) -> None:
        """Let a new text begin."""
        self._tokens.append(-1)  # which no suffix has
        self._start = len(self._tokens)

    def continuation(self, text: Sequence[int], most: int, options: SuffixOptions) -> Continuation:
        """Return what most often follows the longest suffix of a text.

        Args:
            text: Token ids; its own end, if this index has it, is no place.
            most: Tokens at most.
            options: As `SuffixOptions` has them.
        """
        own_end = len(self._tokens)
        found = self._places.get(tuple(text[-KEY_LEN:]), ())[-MOST_PLACES:]
        matched = [(self._match_len(text, at, options.max_depth), at) for at in found]
        matched = [(length, at) for length, at in matched if at < own_end]
        if not matched:
            return Continuation()
        longest = max(length for length, _ in matched)
        places = [at for length, at in matched if length == longest]
        most = min(most, int(options.max_factor * longest))
        return self._follow(places, most, options.min_share)

    def _match_len(self, text: Sequence[int], at: int, max_depth: int) -> int:
        """Tokens before `at` that are those at the end of a text."""
        most = min(len(text), at, max_depth)
        length = KEY_LEN
        while length < most and text[-length - 1] == self._tokens[at - length - 1]:
            length += 1
        return length

    def _follow(self, places: list[int], most: int, min_share: float) -> Continuation:
        """Follow the most frequent token from place to place; the newest of equals."""
        drafts: list[int] = []
        share, score = 1.0, 0.0
        while len(drafts) < most:
            at = len(drafts)
            nexts = [self._tokens[p + at] for p in reversed(places) if p + at < len(self._tokens)]
            counts = Counter(token for token in nexts if token >= 0)
            if not counts:
                break
            token, count = counts.most_common(1)[0]
            share *= count / len(places)
            if share < min_share:
                break
            score += share
            drafts.append(token)
            places = [p for p in places if self._has(p + at, token)]
        return Continuation(token_ids=tuple(drafts), score=score)

    def _has(self, at: int, token: int) -> bool:
        return at < len(self._tokens) and self._tokens[at] == token
