# SPDX-License-Identifier: Apache-2.0
"""What is missing or wrong is said before JAX is imported, by every command."""

import json
import shutil
import socket
import subprocess
import sys

import pytest

from detjax.cli import errors
from detjax.models.bundled import bundled_model_path

CASES = {
    "serve-port": ("serve", "--port {port}", "--port {port}: Address already in use"),
    "serve-model": ("serve", "--port 0 --model nope", "looked for {cwd}/nope"),
    "serve-folder": ("serve", "--port 0 --model {tmp}/none", "looked for {tmp}/none"),
    "serve-empty": ("serve", "--port 0 --model {tmp}/empty", "neither model.safetensors nor"),
    "serve-key": ("serve", "--port 0 --sign {tmp}/key", "--sign {tmp}/key cannot be read"),
    "serve-bad-key": ("serve", "--port 0 --sign {tmp}/some", "--sign: {tmp}/some holds no"),
    "serve-template": ("serve", "--port 0 --chat-template {tmp}/none", "--chat-template: {tmp}"),
    "serve-job": ("serve", "--port 0 --process-id 0", "--num-processes must be given too"),
    "serve-sizes": ("serve", "--port 0 --max-len 99999999", "must be below 2**31"),
    "serve-batches": ("serve", "--batch-size 4 --decode-batches 8", "must be below --batch-size 4"),
    "generate-model": ("generate", "--prompt a --model nope", "looked for {cwd}/nope"),
    "generate-template": (
        "generate", "--prompt a --chat --chat-template {tmp}/none", "--chat-template: {tmp}/none",
    ),
    "generate-id": ("generate", "--prompt a --model a/b/c", "nor a repository id (owner/name)"),
    "generate-file": ("generate", "--prompts-file {tmp}/no.txt", "{tmp}/no.txt cannot be read"),
    "generate-key": (
        "generate",
        "--prompt a --receipts {tmp}/r --sign {tmp}/key",
        "--sign {tmp}/key cannot be read: No such file",
    ),
    "generate-weights": (
        "generate", "--prompt a --model {tmp}/weightless", "has neither model.safetensors nor",
    ),
    "generate-shard": (
        "generate", "--prompt a --model {tmp}/sharded", "is named in model.safetensors.index",
    ),
    "generate-job": ("generate", "--prompt a --num-processes 2", "--coordinator and"),
    "generate-option": ("generate", "--prompt a --verify-window 0", "must be at least 1"),
    "certify-model": ("certify", "--model nope", "looked for {cwd}/nope"),
    "certify-config": ("certify", "--random-weights {tmp}/none", "No such file or directory"),
    "certify-option": ("certify", "--batch-size 0", "--batch-size 0 must be at least 1"),
    "diverge-model": ("diverge", "--prompt a --model nope", "looked for {cwd}/nope"),
    "diverge-answer": (
        "diverge", "--answer {tmp}/none", "--answer {tmp}/none: No such file or directory",
    ),
    "diverge-receipt": (
        "diverge", "--receipt {tmp}/none", "--receipt {tmp}/none: No such file or directory",
    ),
    "diverge-evidence": (
        "diverge", "--evidence {tmp}/none", "--evidence {tmp}/none: No such file or directory",
    ),
    "diverge-setting": ("diverge", "--prompt a --b pt=2", "--b: "),
    "grpo-model": ("grpo", "--model nope", "looked for {cwd}/nope"),
    "grpo-option": ("grpo", "--steps 0", "--steps 0 must be at least 1"),
    "grpo-task": ("grpo", "--task gsm8k", "--task gsm8k and --problems FILE go together"),
    "replay-file": ("replay", "{tmp}/none", "{tmp}/none: No such file or directory"),
    "replay-model": ("replay", "{tmp}/some --model nope", "looked for {cwd}/nope"),
    "replay-key": ("replay", "{tmp}/some --trust {tmp}/none", "No such file or directory"),
    "replay-report": ("replay", "{tmp}/some --report {tmp}/no/f", "a folder that does not exist"),
    "audit-file": ("audit", "{tmp}/none", "{tmp}/none: No such file or directory"),
    "audit-option": ("audit", "{tmp}/some --tp 0", "--tp 0 must be at least 1"),
    "eval-model": ("eval", "--tasks x --model_args model=nope,tp=2", "looked for {cwd}/nope"),
    "eval-folder": ("eval", "run --tasks x -a tp=1 model={tmp}/none", "looked for {tmp}/none"),
}  # fmt: skip
"""Command, arguments, and what is said."""

SCRIPT = """
import contextlib, importlib, io, json, sys
told = {}
for name, (module, argv) in json.load(sys.stdin).items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = importlib.import_module(f"detjax.{module}").main(argv)
        except SystemExit as end:
            code = end.code
    told[name] = code, said.getvalue(), "jax" in sys.modules
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, tuple[int, str, bool, str]]:
    """Of each case: exit code, standard error, whether JAX was imported, what it should say."""
    tmp = tmp_path_factory.mktemp("early")
    (tmp / "empty").mkdir()
    for name in ("weightless", "sharded"):
        shutil.copytree(bundled_model_path(), tmp / name)
        (tmp / name / "model.safetensors").unlink()
    index = json.dumps({"weight_map": {"a": "b.safetensors"}})
    (tmp / "sharded" / "model.safetensors.index.json").write_text(index)
    (tmp / "some").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"tmp": str(tmp), "cwd": str(tmp), "port": taken.getsockname()[1]}
        asked = {
            name: (
                f"{module}.__main__" if module in ("certify", "diverge") else module,
                argv.format(**values).split(),
            )
            for name, (module, argv, _) in CASES.items()
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], input=json.dumps(asked), cwd=tmp, text=True,
            capture_output=True,
        )  # fmt: skip
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout)
    return {name: (*told[name], CASES[name][2].format(**values)) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_before_jax_is_imported(told, name):
    code, said, has_jax, wanted = told[name]
    assert code == errors.BAD_INPUT and wanted in said, said
    assert not has_jax
