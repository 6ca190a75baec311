# SPDX-License-Identifier: Apache-2.0
"""`--warm`: programs are compiled ahead and kept, and nothing is computed."""

import argparse
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import detjax
from detjax import serve
from detjax.cli import errors
from detjax.server import server


def test_it_compiles_everything_and_ends(command, capsys):
    def answer(request, seq):
        raise AssertionError("nothing is computed")

    options = ["--prompt", "a", "--warm", "--temperature", "1", "--top-k", "5", "--logprobs", "3"]
    assert command(*options, "--format", "json", answer=answer) == errors.OK
    out, err = capsys.readouterr()
    assert out == "" and "3 programs" in err
    for name in ("prefill", "decode", "choice"):
        assert name in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cache-dir", "none"], "--cache-dir none keeps none"),
        (["--check", "--repeat", "2"], "computes no answer to check"),
        (["--expect-digest", "0" * 64], "computes no answer to check"),
    ],
)
def test_what_does_not_go_with_it_is_refused(command, capsys, options, says):
    assert command("--prompt", "a", "--warm", *options) == errors.BAD_INPUT
    assert says in capsys.readouterr().err


def test_a_server_that_keeps_nothing_cannot_be_warmed(capsys):
    assert serve.main(["--warm", "--cache-dir", "none"]) == errors.BAD_INPUT
    assert "--warm compiles programs and keeps them" in capsys.readouterr().err


def test_a_server_that_is_warmed_says_how_far_it_is(monkeypatch):
    """Of both stages, beside the table that it prints."""

    class Compiled:
        def __init__(self):
            self.engine = self

        def compile(self, compiled, *, checked):
            compiled("decode 1x1", 1, 1)
            checked("decode 1x1", 1, 1)

    llm, stages = Compiled(), []

    @contextlib.contextmanager
    def show_stages(names, console, say):
        yield [lambda what, done, total, name=name: stages.append((name, what)) for name in names]

    monkeypatch.setattr(server, "open_llm", lambda args: llm)
    monkeypatch.setattr(server, "show_stages", show_stages)
    table = server.warm(argparse.Namespace(no_compile=False)).splitlines()
    assert [line.split("  ")[0] for line in table] == ["program", "decode 1x1", "1 programs"]
    assert stages == [("compiling programs", "decode 1x1"), ("checking programs", "decode 1x1")]


@pytest.mark.slow
def test_the_next_start_compiles_nothing(tmp_path):
    """Every program that the answer needs is there, of the same build, in another process."""

    def run(module: str, *options: str) -> str:
        env = os.environ | {"PYTHONPATH": str(Path(detjax.__file__).parents[1])}
        command = [sys.executable, "-m", module, "--cache-dir", str(tmp_path), *options]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    generate = "detjax.generate", "--prompt", "hi", "--max-tokens", "4"
    said = re.search(r"(\d+) programs", run(*generate, "--warm"))
    assert said is not None
    (folder,) = tmp_path.iterdir()
    before = {file.name for file in folder.iterdir()}
    executables = [name for name in before if name.startswith("executable-")]
    # Beside the programs that are listed, those that allocate, fill and check the cache.
    assert len(executables) > int(said[1]) >= 2
    assert run(*generate).count("digest") == 1
    assert {file.name for file in folder.iterdir()} == before
