# SPDX-License-Identifier: Apache-2.0
"""`python -m detjax`: lists the commands, and runs them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import detjax
from detjax.__main__ import main
from detjax.cli import errors
from detjax.cli.verbs import VERBS

PACKAGE = Path(detjax.__file__).parent
NO_VERBS = {
    "detjax.server.text_process",
    "detjax.engine.running.compile_workers",
    "detjax.models.template_process",
}
"""Modules that a process of ours runs, and nobody else."""


def commands() -> set[str]:
    """Every module that can be run."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if re.search(r'^if __name__ == "__main__"', path.read_text(), re.MULTILINE):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            found.add(name.removesuffix(".__main__"))
    return found - {"detjax"}


def test_every_command_is_a_verb():
    assert {verb.module for verb in VERBS.values()} == commands() - NO_VERBS


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_verbs_are_listed_with_a_line_each(capsys, argv):
    assert main(argv) == errors.OK
    out = capsys.readouterr().out
    for name, verb in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(verb.does)}$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("generat", "did you mean generate?"),
        ("gen", "did you mean generate?"),
        ("server", "did you mean serve?"),
        ("evaluate", "did you mean eval?"),
        ("xyzzy", "commands are generate, serve"),
        ("--port", "commands are generate, serve"),
    ],
)
def test_the_nearest_verb_is_named(capsys, given, says):
    assert main([given]) == errors.BAD_INPUT
    assert f"error: {given!r} is not a command" in (err := capsys.readouterr().err) and says in err


def test_a_verb_is_run_as_its_module_is_and_ends_with_its_code():
    for argv, code, says in (
        (["generate", "--version"], 0, f"detjax {detjax.__version__}"),
        (["serve", "--port", "-1"], 2, "--port -1 must be from 0"),
        (["diverge"], 2, "there is no prompt"),
        (["generate", "--help"], 0, "usage: python -m detjax.generate"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "detjax", *argv], capture_output=True, text=True
        )
        assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr


def test_scripts_of_the_package_are_verbs():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    scripts = dict(project["scripts"])
    assert scripts.pop("detjax") == "detjax.__main__:main"
    for name, target in scripts.items():
        assert target == f"{VERBS[name.removeprefix('detjax-')].module}:main"
