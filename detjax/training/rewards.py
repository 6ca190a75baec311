# SPDX-License-Identifier: Apache-2.0
"""Rewards written by users: `--reward module:function`."""

import hashlib
import importlib
import numbers
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from detjax.training.tasks import AbstractTask, Problem

MOST_REWARD = 1e30
"""The spread of a group is made of squares, which are no float64 from 1e154 on."""

RewardFunction = Callable[[Problem, str], float]
"""`reward(problem, text)`: what an answer earns, a number of at most `MOST_REWARD` in size.

`problem.prompt` is what the model read, `problem.answer` what the task holds for right, and `text`
the answer, the text that ended it included. It must depend on nothing else, or a run cannot be
repeated.
"""


class Rewarded(AbstractTask):
    """A task's problems with another reward.

    Attributes:
        reward_sha256: Hash of the function's file; None if it has no file.
    """

    reward_sha256: str | None

    def __init__(self, task: AbstractTask, name: str):
        """Find the function.

        Args:
            task: Gives the problems.
            name: `module:function`; the working folder is searched for the module too.

        Raises:
            ValueError: If there is no such function, naming what is missing.
        """
        self._task, self._name = task, name
        self.stop, self.held_out = task.stop, task.held_out
        self.file_sha256 = task.file_sha256
        self.max_prompt, self.max_tokens = task.max_prompt, task.max_tokens
        self._function, file = _find(name)
        content = None if file is None else Path(file).read_bytes()
        self.reward_sha256 = None if content is None else hashlib.sha256(content).hexdigest()

    def draw(self, rng: np.random.Generator) -> Problem:
        """One problem of the task."""
        return self._task.draw(rng)

    def reward(self, problem: Problem, text: str) -> float:
        """Return the function's value.

        Raises:
            ValueError: If it raises, or gives something other than a finite number, naming it.
        """
        asked = f"--reward {self._name}, asked about {text[:40]!r} as answer to "
        asked += f"{problem.prompt[:40]!r},"
        try:
            value: Any = self._function(problem, text)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{asked} raised {error!r}") from error
        is_number = isinstance(value, numbers.Real | np.bool)
        if not is_number or not abs(cast(float, value)) <= MOST_REWARD:
            raise ValueError(
                f"{asked} gave {value!r:.60}; it must give a finite number, at most "
                f"{MOST_REWARD:g} in size"
            )
        return float(value)


def _find(name: str) -> tuple[RewardFunction, str | None]:
    """The function, and the file of its module."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"--reward {name!r} must be module:function, such as my_rewards:length")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"--reward {name}: importing {module_name!r} raised {error!r}") from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise ValueError(
            f"--reward {name}: {module.__file__ or module_name} has no function "
            f"{function_name!r}; it must be reward(problem, text)"
        )
    return cast(RewardFunction, function), module.__file__
