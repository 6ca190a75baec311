# SPDX-License-Identifier: Apache-2.0
"""Get the same answers from another process, which compiles everything anew."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

LIMIT_S = 3600

Answers = list[tuple[tuple[int, int], ...]]
"""As `requests.AnswerBits`. That module imports JAX, and this one runs before it does."""


class NewProcess:
    """`python -m detjax.certify --answers ...`, which prints JAX's platform, then its answers."""

    def __init__(self, argv: Sequence[str], errors: IO[str]):
        """Start it; its errors are written to `errors`."""
        kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self._errors = errors
        self.process = subprocess.Popen(
            [sys.executable, "-m", "detjax.certify", "--answers", *argv],
            env=kept, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        self._answers: Answers | None = None

    def wait_for_memory(self) -> None:
        """Wait until this process may allocate: not on a CPU; on a GPU until the other has ended.

        Raises:
            ValueError: As `answers`.
        """
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "cpu":
            self.answers()

    def answers(self) -> Answers:
        """Wait for its end and return its answers.

        Raises:
            ValueError: If it fails, with the end of its output.
        """
        if self._answers is None:
            assert self.process.stdout is not None
            limit = threading.Timer(LIMIT_S, self.process.kill)
            limit.start()
            said = self.process.stdout.read()
            limit.cancel()
            if self.process.wait():
                self._errors.seek(0)
                why = self._errors.read()[-600:].strip()
                raise ValueError(f"a new process failed ({self.process.returncode}): {why}")
            found = json.loads(said.splitlines()[-1])
            self._answers = [tuple((token, bits) for token, bits in answer) for answer in found]
        return self._answers


@contextlib.contextmanager
def new_process(argv: Sequence[str]) -> Iterator[NewProcess]:
    """Start the command again with these arguments, and end it at the end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        started = NewProcess(argv, errors)
        with started.process as process:
            try:
                yield started
            finally:
                process.kill()
