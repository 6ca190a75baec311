# SPDX-License-Identifier: Apache-2.0
"""What differs between paired answers, and how likely chance gives a difference of scores."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detjax.compare.answers import ComparedAnswer

NUM_FLIPS = 20_000
"""Random signs that stand for chance, where scores are not 0 and 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of the same prompts in two sets.

    Attributes:
        mean_a: Mean of A.
        mean_b: Mean of B.
        num_better: Prompts at which B is better.
        num_worse: Prompts at which B is worse.
        p_value: How often chance alone gives a difference of the means as large as this, or larger,
            if A and B are equally good.
    """

    mean_a: float
    mean_b: float
    num_better: int
    num_worse: int
    p_value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences of two sets of answers; a count is None if no pair of lines has the field.

    Attributes:
        num_answers: Pairs of answers.
        num_texts: Pairs whose texts differ.
        num_finish_reasons: Pairs that ended for another reason.
        num_tokens: Pairs whose tokens differ.
        num_bits: Pairs with a different token or a different bit of a float32 logprob.
        num_with_finish_reasons: Pairs of which both say why they ended.
        num_with_tokens: Pairs of which both have token ids, or both have the tokens' texts.
        num_with_bits: Pairs of which both have logprobs too.
        first_tokens: The first token that differs, from 0, of each pair whose tokens differ.
        largest_gap: The largest difference of two logprobs before the tokens differ.
        scores: If a score was named.
    """

    num_answers: int
    num_texts: int
    num_finish_reasons: int | None
    num_tokens: int | None
    num_bits: int | None
    num_with_finish_reasons: int
    num_with_tokens: int
    num_with_bits: int
    first_tokens: tuple[int, ...]
    largest_gap: float | None
    scores: Scores | None

    @property
    def is_equal(self) -> bool:
        """Whether nothing that was compared differs: no field of an answer, and no score."""
        counts = self.num_texts, self.num_finish_reasons, self.num_tokens, self.num_bits
        scores = self.scores is not None and (self.scores.num_better or self.scores.num_worse)
        return not (any(counts) or scores)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return dataclasses.asdict(self)


def compare(pairs: Sequence[tuple[ComparedAnswer, ComparedAnswer]]) -> Comparison:
    """Compare paired answers."""
    ends = [(a.finish_reason, b.finish_reason) for a, b in pairs]
    ends = [pair for pair in ends if None not in pair]
    with_tokens = [pair for pair in pairs if _are_alike(*pair)]
    with_bits = [pair for pair in with_tokens if all(one.logprobs is not None for one in pair)]
    found = [_first_difference(a.tokens or (), b.tokens or ()) for a, b in with_tokens]
    firsts = tuple(first for first in found if first is not None)
    scored = [(a.score, b.score) for a, b in pairs if a.score is not None and b.score is not None]
    return Comparison(
        num_answers=len(pairs),
        num_texts=sum(a.text != b.text for a, b in pairs),
        num_finish_reasons=sum(a != b for a, b in ends) if ends else None,
        num_tokens=len(firsts) if with_tokens else None,
        num_bits=sum(_bits(a) != _bits(b) for a, b in with_bits) if with_bits else None,
        num_with_finish_reasons=len(ends),
        num_with_tokens=len(with_tokens),
        num_with_bits=len(with_bits),
        first_tokens=firsts,
        largest_gap=max(_gap(a, b) for a, b in with_bits) if with_bits else None,
        scores=_scores(np.array(scored)) if scored else None,
    )


def _are_alike(a: ComparedAnswer, b: ComparedAnswer) -> bool:
    """Whether both have token ids, or both have the tokens' texts."""
    if a.tokens is None or b.tokens is None:
        return False
    return len({type(token) for token in (*a.tokens, *b.tokens)}) <= 1


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Return the first place at which two sequences differ, or the end of the shorter one."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, None if len(a) == len(b) else min(len(a), len(b)))


def _bits(answer: ComparedAnswer) -> tuple[Any, bytes]:
    with np.errstate(over="ignore"):  # a logprob below -3.4e38 is -inf
        return answer.tokens, np.asarray(answer.logprobs, np.float32).tobytes()


def _gap(a: ComparedAnswer, b: ComparedAnswer) -> float:
    """The largest difference of two logprobs before the tokens differ; of numbers alone."""
    first = _first_difference(a.tokens or (), b.tokens or ())
    here, there = (np.asarray(one.logprobs or (), float)[:first] for one in (a, b))
    if len(here) != len(there):
        return 0.0
    is_number = np.isfinite(here) & np.isfinite(there)
    return float(np.max(np.abs(here - there)[is_number], initial=0.0))


def _scores(pairs: np.ndarray) -> Scores:
    change = pairs[:, 1] - pairs[:, 0]
    better, worse = int(np.sum(change > 0)), int(np.sum(change < 0))
    is_binary = bool(np.isin(pairs, (0.0, 1.0)).all())
    return Scores(
        mean_a=float(pairs[:, 0].mean()),
        mean_b=float(pairs[:, 1].mean()),
        num_better=better,
        num_worse=worse,
        p_value=sign_test(better, worse) if is_binary else flip_test(change),
    )


def sign_test(better: int, worse: int) -> float:
    """Return the p-value of McNemar's exact test, two-sided: a fair coin as uneven, or more."""
    total = better + worse
    tail = sum(math.comb(total, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**total)


def flip_test(change: np.ndarray) -> float:
    """Return the share of random signs of the changes whose sum is as large, or larger.

    A paired permutation test with `NUM_FLIPS` draws of a fixed seed; the observed signs count too.
    """
    rng = np.random.default_rng(0)
    moved = change[change != 0]
    if not len(moved):
        return 1.0
    limit = abs(moved.sum()) * (1 - 1e-12)
    as_large = 0
    for _ in range(NUM_FLIPS // 1000):
        signs = rng.integers(0, 2, (1000, len(moved))) * 2 - 1
        as_large += int(np.sum(np.abs(signs @ moved) >= limit))
    return (1 + as_large) / (1 + NUM_FLIPS)
