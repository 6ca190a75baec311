# SPDX-License-Identifier: Apache-2.0
"""Sums in the forms that `tools/train_tiny.py` teaches, from easy to hard."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A line up to its question, and the rest of it, newline included."""

    prompt: str
    answer: str


def additions(count: int, *, digits: int) -> list[Problem]:
    """Different additions of two numbers of so many digits."""
    low, high = 10 ** (digits - 1), 10**digits
    width = high - low
    chosen = np.random.default_rng(0).permutation(width * width)[:count]
    pairs = [(int(low + i // width), int(low + i % width)) for i in chosen]
    return [Problem(prompt=f"{a}+{b}=", answer=f"{a + b}\n") for a, b in pairs]


def counts(count: int, *, digits: int, terms: tuple[int, int]) -> list[Problem]:
    """Different lines that count in steps until a number has one more digit.

    `955,+17:` goes on `972,989,1006`. The trainer shows none for which 7 start + step is a multiple
    of 10, and these are all such.

    Args:
        count: How many.
        digits: Of the start; the step has one less.
        terms: Least and most numbers of an answer.

    Raises:
        ValueError: If there are hardly so many.
    """
    bound, rng = 10**digits, np.random.default_rng([digits, *terms])
    found: dict[str, Problem] = {}
    for _ in range(500 * count):
        if len(found) == count:
            break
        step = int(rng.integers(bound // 100 + 1, bound // 10))
        num_terms = int(rng.integers(terms[0], terms[1] + 1))
        start = bound - num_terms * step + int(rng.integers(step))
        if start < bound // 100 or (7 * start + step) % 10:
            continue
        numbers = list(range(start + step, bound + step, step))
        numbers = numbers[: next(i for i, n in enumerate(numbers) if n >= bound) + 1]
        prompt = f"{start},+{step}:"
        found[prompt] = Problem(prompt=prompt, answer=",".join(map(str, numbers)) + "\n")
    if len(found) < count:
        raise ValueError(f"{count} such lines were not found, only {len(found)}: ask for fewer")
    return list(found.values())


LEVELS: dict[str, Callable[[int], list[Problem]]] = {
    "two-digit additions, most of them seen in training": lambda n: additions(n, digits=2),
    "three-digit additions": lambda n: additions(n, digits=3),
    "counting to 1000, 6 to 12 numbers": lambda n: counts(n, digits=3, terms=(6, 12)),
    "counting to 1000, 12 to 24 numbers": lambda n: counts(n, digits=3, terms=(12, 24)),
    "counting to 10000, 6 to 12 numbers": lambda n: counts(n, digits=4, terms=(6, 12)),
    "counting to 10000, 16 to 24 numbers": lambda n: counts(n, digits=4, terms=(16, 24)),
    "counting to 10000, 32 to 48 numbers": lambda n: counts(n, digits=4, terms=(32, 48)),
    "counting to 10000, 52 to 64 numbers": lambda n: counts(n, digits=4, terms=(52, 64)),
}
"""Sets of so many problems, by name. Of three-digit additions about 2 % were seen in training, of
lines that count none."""

MOST_TOKENS = 64 * 5 + 4
"""Of an answer, with a token for each digit and comma."""
