# SPDX-License-Identifier: Apache-2.0
"""The same answers from a process of its own, which compiles everything anew."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from detjax.certify.asks import Answer

LIMIT_S = 3600


def answers_of_new_process(argv: Sequence[str]) -> list[Answer]:
    """What `python -m detjax.certify --answers ...` writes.

    It runs before this process takes any memory of a GPU.

    Raises:
        ValueError: If it fails, with the end of what it said.
    """
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "detjax.certify", "--answers", *argv],
        env=kept, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"a new process failed ({done.returncode}): {done.stderr[-600:].strip()}")
    found = json.loads(done.stdout.splitlines()[-1])
    return [tuple((token, bits) for token, bits in answer) for answer in found]
