# SPDX-License-Identifier: Apache-2.0
"""Problems whose answers a program can check."""

import abc
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_HELD_OUT = 200
_NUMBER = re.compile(
    r"\s*(?P<sign>-?)\$?(?P<minus>-?)(?P<whole>[0-9][0-9,]*+)?(?P<part>\.[0-9]++)?"
    r"(?![.,]?[0-9]|[eE/:^*][-+]?[0-9])"
)
"""Of an answer, after its `####`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What the model reads, and the answer that earns the reward."""

    prompt: str
    answer: str


class AbstractTask(abc.ABC):
    """A set of problems, some of them held out, and their reward.

    Attributes:
        stop: Text whose token ends an answer; if empty, the model's end tokens do.
        held_out: Problems that `draw` never gives.
        file_sha256: Hash of the file of problems; None if they are generated.
        max_prompt: Tokens that its prompts take at most, with common tokenizers.
        max_tokens: Default limit of an answer's tokens.
    """

    stop: str
    held_out: tuple[Problem, ...]
    file_sha256: str | None
    max_prompt: int
    max_tokens: int

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator) -> Problem:
        """One problem to train on."""

    @abc.abstractmethod
    def reward(self, problem: Problem, text: str) -> float:
        """1.0 for a right answer, 0.0 for any other."""


class ArithmeticTask(AbstractTask):
    """Two-digit additions as the bundled model learnt them: `17+26=`, then `43` and a newline.

    A sum and its mirror image count as one problem when some are held out.
    """

    stop = "\n"
    file_sha256 = None
    max_prompt, max_tokens = 10, 5

    def __init__(self):
        """Hold out `NUM_HELD_OUT` sums, always the same ones."""
        pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
        order = np.random.default_rng(0).permutation(len(pairs))
        self.held_out = tuple(self._problem(*pairs[i]) for i in order[:NUM_HELD_OUT])
        self._train = [pairs[i] for i in order[NUM_HELD_OUT:]]

    def _problem(self, a: int, b: int) -> Problem:
        return Problem(prompt=f"{a}+{b}=", answer=f"{a + b}\n")

    def draw(self, rng: np.random.Generator) -> Problem:
        """A random sum that is not held out, either number first."""
        a, b = self._train[rng.integers(len(self._train))]
        return self._problem(a, b) if rng.random() < 0.5 else self._problem(b, a)

    def reward(self, problem: Problem, text: str) -> float:
        """The digits and the newline, and nothing else."""
        return float(text == problem.answer)


class Gsm8k(AbstractTask):
    """Word problems in the format of GSM8K: lines of JSON with `question` and `answer`.

    The reference ends with `#### 42`. An answer is right if the number right after its last `####`
    has the same value, all digits compared; commas and a currency sign are ignored. A fraction, a
    power of ten or a time is no number. Cobbe et al. 2021, arXiv:2110.14168.
    """

    stop = ""
    max_prompt, max_tokens = 256, 512  # GSM8K's longest: 235 tokens of novels-6m, 192 of Qwen3

    def __init__(self, path: Path):
        """Read a file; the last tenth, at most `NUM_HELD_OUT` problems, is held out.

        Blank lines are skipped.

        Raises:
            ValueError: If a line has no question, answer or final number, naming the line.
        """
        content = path.read_bytes()
        self.file_sha256 = hashlib.sha256(content).hexdigest()
        problems = [
            Problem(prompt=f"Question: {row['question']}\nAnswer:", answer=answer)
            for row, answer in gsm8k_rows(path, content)
        ]
        num_held_out = min(NUM_HELD_OUT, len(problems) // 10)
        if num_held_out == 0:
            raise ValueError(f"{path} has {len(problems)} problems; give at least 10")
        self.held_out = tuple(problems[-num_held_out:])
        self._train = problems[:-num_held_out]

    def draw(self, rng: np.random.Generator) -> Problem:
        """A random problem that is not held out."""
        return self._train[rng.integers(len(self._train))]

    def reward(self, problem: Problem, text: str) -> float:
        """Whether the final number is right."""
        return float(_final_number(text) == problem.answer)


def gsm8k_rows(path: Path, content: bytes) -> Iterator[tuple[dict[str, Any], str]]:
    """Check the lines of a file in the format of GSM8K; blank ones are skipped.

    Args:
        path: Named in errors.
        content: Of the file.

    Yields:
        Each row, and the final number of its answer in its one shortest spelling.

    Raises:
        ValueError: If a line has no question, answer or final number, naming the line.
    """
    # WHY: str.splitlines would also split at U+2028 and others that JSON allows in a text.
    for number, line in enumerate(content.decode("utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, answer = row["question"], _final_number(row["answer"])
            if not isinstance(question, str):
                raise TypeError(f"question must be text, not {question!r:.40}")
            question.encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not a GSM8K problem: {error!r}") from error
        if answer is None:
            raise ValueError(f"{path}, line {number}: the answer has no final `#### number`")
        yield row, answer


def _final_number(text: str) -> str | None:
    """The number after the last `####`, in its one shortest spelling; None if there is none."""
    _, mark, rest = text.rpartition("####")
    found = _NUMBER.match(rest)
    if not mark or found is None or not (found["whole"] or found["part"]):
        return None
    whole = (found["whole"] or "").replace(",", "").lstrip("0") or "0"
    digits = f"{whole}{found['part'] or ''}"
    if found["part"]:
        digits = digits.rstrip("0").rstrip(".")
    is_negative = bool(found["sign"] or found["minus"]) and digits != "0"
    return f"-{digits}" if is_negative else digits
