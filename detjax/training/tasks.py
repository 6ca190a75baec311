# SPDX-License-Identifier: Apache-2.0
"""Problems whose answers a program can check."""

import abc
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NUM_HELD_OUT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What the model reads, and the answer that earns the reward."""

    prompt: str
    answer: str


class AbstractTask(abc.ABC):
    """A set of problems, some of them held out, and their reward.

    Attributes:
        stop: Text whose token ends an answer; empty leaves that to the model.
        held_out: Problems that `draw` never gives.
    """

    stop: str
    held_out: tuple[Problem, ...]

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator) -> Problem:
        """One problem to train on."""

    @abc.abstractmethod
    def reward(self, problem: Problem, text: str) -> float:
        """1.0 for a right answer, 0.0 for any other."""


class Arithmetic(AbstractTask):
    """Two-digit additions as the bundled model learnt them: `17+26=`, then `43` and a newline.

    A sum and its mirror image are one problem when some are held out.
    """

    stop = "\n"

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

    The reference ends with `#### 42`. An answer is right if the number after its last `####` is the
    same; commas and a currency sign are ignored. Cobbe et al. 2021, arXiv:2110.14168.
    """

    stop = ""
    _number = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")

    def __init__(self, path: Path):
        """Read a file; the last tenth, at most `NUM_HELD_OUT` problems, is held out.

        Raises:
            ValueError: If a line has no question, answer or final number, naming the line.
        """
        problems = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                question, answer = row["question"], self._final_number(row["answer"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a GSM8K problem: {error!r}"
                ) from error
            if answer is None:
                raise ValueError(f"{path}, line {number}: the answer has no final `#### number`")
            problems.append(Problem(prompt=f"Question: {question}\nAnswer:", answer=answer))
        num_held_out = min(NUM_HELD_OUT, len(problems) // 10)
        if num_held_out == 0:
            raise ValueError(f"{path} has {len(problems)} problems; give at least 10")
        self.held_out = tuple(problems[-num_held_out:])
        self._train = problems[:-num_held_out]

    def _final_number(self, text: str) -> str | None:
        found = self._number.findall(text)
        return f"{float(found[-1].replace(',', '')):g}" if found else None

    def draw(self, rng: np.random.Generator) -> Problem:
        """A random problem that is not held out."""
        return self._train[rng.integers(len(self._train))]

    def reward(self, problem: Problem, text: str) -> float:
        """Whether the final number is right."""
        return float(self._final_number(text) == problem.answer)
