# SPDX-License-Identifier: Apache-2.0
"""Documents of the task files beside this one, for lm-evaluation-harness."""

from pathlib import Path

import datasets
import numpy as np

from detjax.training.tasks import gsm8k_rows

WORD_PROBLEMS = Path(__file__).with_name("word_problems.jsonl")


def _test_split(documents: list[dict], of: str) -> dict[str, datasets.Dataset]:
    if not documents:
        raise ValueError(f"there is no problem in {of}; --metadata must ask for at least one")
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
    return _test_split(documents, f"{count=} sums")


def word_problems(
    file: str | None = None, count: int = 12, **_: object
) -> dict[str, datasets.Dataset]:
    """Problems in the form of GSM8K: JSON lines with `question` and `answer`.

    Args:
        file: GSM8K's own file; None takes a dozen problems that come with detjax.
        count: The first so many.

    Raises:
        ValueError: If a line is not such a problem, naming it, or there is none.
    """
    path = WORD_PROBLEMS if file is None else Path(file)
    rows = [row for row, _ in gsm8k_rows(path, path.read_bytes())]
    return _test_split(rows[: max(0, count)], f"the first {count} of {path}")
