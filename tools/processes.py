# SPDX-License-Identifier: Apache-2.0
"""A script's settings measured, each in a process of its own: they start at once and share a lock.

Each process compiles, takes the lock while it measures, and prints one line of JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_settings(
    script: str,
    flags: Mapping[str, str],
    *,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str],
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Run `script --measure NAME --lock FILE *arguments` for each name of `flags`.

    Args:
        script: A Python file, run in the folder of the repository.
        flags: What each setting adds to `XLA_FLAGS`, by its name.
        arguments: Of every process.
        environ: Of every process, besides this one's.
        seconds: Processes that run longer are stopped.

    Returns:
        What each setting printed last. Of one that printed nothing the end of its errors is shown.
    """
    folder = Path(tempfile.mkdtemp())
    paths = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    running = {
        name: subprocess.Popen(
            [sys.executable, script, "--measure", name, "--lock", str(folder / "lock"), *arguments],
            env=os.environ
            | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {added}".strip()}
            | {"PYTHONPATH": paths, **environ},
            stdout=(folder / name).open("w"),
            stderr=(folder / f"{name}.err").open("w"),
        )
        for name, added in flags.items()
    }
    end, found = time.monotonic() + seconds, {}
    for name, process in running.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
        lines = [x for x in (folder / name).read_text().splitlines() if x.startswith("{")]
        if lines:
            found[name] = json.loads(lines[-1])
            continue
        print(f"{name}: no result, status {process.returncode}")
        errors = (folder / f"{name}.err").read_text().splitlines()
        fatal = [line for line in errors if line.startswith("F")]  # of what XLA gave up
        print("\n".join([*fatal, *errors[-6:]]))
    return found
