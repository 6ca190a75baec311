# SPDX-License-Identifier: Apache-2.0
"""The command as a whole: its help, and the exit codes that are not about bad input."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from detjax import generate
from detjax.cli import errors
from detjax.cli.arguments import GenerateArgs
from detjax.serving.request import Request


def failing(error: BaseException):
    def answer(request: Request, sample: int) -> list[int]:
        raise error

    return answer


def test_a_fault_of_ours_is_reported_with_its_lines(command, capsys):
    answer = failing(ZeroDivisionError("here"))
    assert command("--prompt", "a", answer=answer) == errors.INTERNAL_ERROR
    err = capsys.readouterr().err
    assert "ZeroDivisionError: here" in err and "please report" in err


def test_nan_in_the_weights_is_bad_input(command, capsys):
    answer = failing(FloatingPointError("request 0 has a NaN logit"))
    assert command("--prompt", "a", answer=answer) == errors.BAD_INPUT
    assert capsys.readouterr().err.endswith("error: request 0 has a NaN logit\n")


def test_an_interrupt_ends_with_130(command, capsys):
    answer = failing(KeyboardInterrupt())
    assert command("--prompt", "a", answer=answer) == errors.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


class JaxRuntimeError(RuntimeError):
    """As JAX names it."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "error: out of memory; there is not enough memory"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nmore"), "error: RESOURCE_EXHAUSTED: 9 by"),
        (
            OSError(28, "No space left on device"),
            "output or error cannot be written: No space left",
        ),
        (OSError(28, "No space left on device", "file"), "error: file cannot be written: No space"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(command, capsys, error, says):
    assert command("--prompt", "a", answer=failing(error)) == errors.BAD_INPUT
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        (
            ">/dev/full",
            errors.BAD_INPUT,
            "output or error cannot be written: No space left on device",
        ),
        (">&-", errors.BAD_INPUT, "error: standard output is closed"),
        ("2>&-", errors.OK, ""),
        ("2>/dev/full", errors.BAD_INPUT, ""),
        ("<&-", errors.OK, ""),
    ],
)
def test_streams_that_are_full_or_closed(redirection, code, says, tmp_path):
    """In a process of its own, as Python flushes once more at its end."""
    script = tmp_path / "script.py"
    script.write_text(STREAMS)
    done = subprocess.run(
        f"{sys.executable} {script} {redirection}",
        shell=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(generate.__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("error:")) == (code, bool(says)), done.stderr
    assert says in done.stderr and "Exception" not in done.stderr


STREAMS = """
import sys
from detjax import generate
from detjax.cli.display import Display

def run(args, *, open_model):
    Display().line("a fact")
    print("an answer")
    return 0

generate.run = run
sys.exit(generate.main(["--prompt", "a"]))
"""


def test_a_cache_folder_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    argv = ["--prompt", "17+26=", "--max-tokens", "1", "--cache-dir", str(tmp_path / "file" / "a")]
    assert generate.main(argv) == errors.OK
    err = capsys.readouterr().err
    assert err.startswith("warning: --cache-dir ") and "programs are not kept" in err


def test_a_reader_that_goes_away_is_no_fault(command, tmp_path, monkeypatch):
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        answer = failing(BrokenPipeError())
        assert command("--prompt", "a", answer=answer) == errors.READER_GONE


def test_help_explains_every_option_and_does_not_start_jax():
    script = (
        "import sys\n"
        "from detjax.generate import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as e:\n    assert e.code == 0\n"
        "assert main(['--prompt', 'a', '--top-p', '2']) == 2\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in dataclasses.fields(GenerateArgs):
        assert "--" + option.name.replace("_", "-") + " " in done.stdout
    assert "exit codes" in done.stdout and "examples" in done.stdout
