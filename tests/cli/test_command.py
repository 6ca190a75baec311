# SPDX-License-Identifier: Apache-2.0
"""The command as a whole: its help, and the exit codes that are not about bad input."""

import dataclasses
import subprocess
import sys

from detjax import numerics
from detjax.cli import arguments, errors
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


def test_a_reader_that_goes_away_is_no_fault(command, tmp_path, monkeypatch):
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        answer = failing(BrokenPipeError())
        assert command("--prompt", "a", answer=answer) == errors.READER_GONE


def test_the_option_and_the_numerics_call_no_cast_the_same():
    assert arguments.NO_CAST == numerics.NO_CAST


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
