# SPDX-License-Identifier: Apache-2.0
"""Documents of the task files beside this one, for lm-evaluation-harness."""

import json
from pathlib import Path

import datasets
import numpy as np

WORD_PROBLEMS = Path(__file__).with_name("word_problems.jsonl")


def _test_split(documents: list[dict]) -> dict[str, datasets.Dataset]:
    return {"test": datasets.Dataset.from_list(documents)}


def sums(count: int = 32, seed: int = 0, **_: object) -> dict[str, datasets.Dataset]:
    """Two-digit additions with four choices each, the right one and three near it."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        a, b = (int(n) for n in rng.integers(10, 100, 2))
        wrong = rng.choice([-11, -10, -9, -1, 1, 9, 10, 11], 3, replace=False)
        choices = [str(a + b), *(str(a + b + int(by)) for by in wrong)]
        gold = int(rng.integers(4))
        choices[0], choices[gold] = choices[gold], choices[0]
        documents.append({"question": f"{a}+{b}=", "choices": choices, "gold": gold})
    return _test_split(documents)


def word_problems(
    file: str | None = None, count: int = 12, **_: object
) -> dict[str, datasets.Dataset]:
    """Problems in the form of GSM8K: JSON lines with `question` and `answer`.

    Args:
        file: GSM8K's own file; None takes a dozen problems that come with detjax.
        count: The first so many.
    """
    lines = (WORD_PROBLEMS if file is None else Path(file)).read_text().splitlines()
    return _test_split([json.loads(line) for line in lines[:count]])
