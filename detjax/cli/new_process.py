# SPDX-License-Identifier: Apache-2.0
"""`--check-process`: the same prompts in a process of its own, which compiles everything anew."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import detjax
from detjax.cli.arguments import OPTIONS, GenerateArgs
from detjax.cli.errors import InputError, bad_input
from detjax.cli.options import NO_CACHE
from detjax.cli.prompts import PromptEntry
from detjax.engine.outputs.completion import CompletionOutput
from detjax.parallel.job_spec import find_job

_NOT_PASSED = frozenset(
    """
    cache_dir chat check check_process expect_digest format output prompt prompts_file quiet
    receipts repeat sign stats system_prompt trace warm
    """.split()
)
"""Options of this process alone, or of which what came of them is passed: the prompts."""


def run_in_new_process(
    args: GenerateArgs, prompts: Sequence[PromptEntry]
) -> tuple[CompletionOutput, ...]:
    """Compute the prompts in a new process without any compiled program, and wait for it.

    Called before this process takes the devices, so that the other one has them for itself.

    Raises:
        InputError: If this is one of several processes, or the other fails, with its last words.
    """
    with bad_input():
        job = find_job(args.coordinator, args.num_processes, args.process_id)
    if job is not None:
        raise InputError(
            f"--check-process has no place in a job of {job.num_processes} processes; leave it out"
        )
    env = {name: value for name, value in os.environ.items() if name != _CACHE_VARIABLE}
    root = str(Path(detjax.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(json.dumps(prompt.entry()) + "\n" for prompt in prompts))
        argv = [*_argv(args), "--prompts-file", str(file), "--format", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "detjax.generate", *argv, "--cache-dir", NO_CACHE],
            capture_output=True,
            env=env,
            check=False,
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()[-1:]
        raise InputError(
            f"--check-process: the other process ended with {done.returncode}: {' '.join(said)}"
        )
    return tuple(map(CompletionOutput.from_dict, json.loads(done.stdout)["completions"]))


_CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def _argv(args: GenerateArgs) -> list[str]:
    """The options that decide the answers, as they are written."""
    argv = []
    for name, option in OPTIONS.items():
        value = getattr(args, name)
        if name in _NOT_PASSED or value is None:
            continue
        if isinstance(value, bool):
            if value or option.default:
                argv.append(option.flag if value else option.off_flag)
        else:
            values = value if isinstance(value, tuple) else (value,)
            argv += [f"{option.flag}={one}" for one in values]
    return argv
