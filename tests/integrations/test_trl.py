# SPDX-License-Identifier: Apache-2.0
"""The documented example: TRL trains in torch on rollouts of a server, whose bits come again."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trl_python() -> str:
    """A Python with TRL, which need not have detjax: `DETJAX_TRL_PYTHON`, or this one."""
    python = os.environ.get("DETJAX_TRL_PYTHON") or sys.executable
    has_trl = subprocess.run([python, "-c", "import trl"], capture_output=True, check=False)
    if has_trl.returncode:
        pytest.skip(f"{python} has no TRL; name one that has in DETJAX_TRL_PYTHON")
    return python


@pytest.mark.slow
@pytest.mark.invariance
def test_trl_trains_on_rollouts_that_can_be_asked_again(trl_python):
    """Control: after later updates the same request has other answers; torch's bits differ."""
    command = [trl_python, "examples/trl_grpo.py", "--server-python", sys.executable]
    done = subprocess.run(
        [*command, "--updates", "3"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told = done.stdout
    assert "asked again one prompt at a time: 0 answers differ" in told
    replayed = re.search(r"checkpoint: (\d+) of 64 differ, weights equal; .* (\d+) differ", told)
    assert replayed is not None, told
    assert int(replayed[1]) == 0 < int(replayed[2])
    apart = re.search(r"(\d+) of (\d+) differ, by at most (\S+), mean KL (\S+)", told)
    assert apart is not None, told
    assert 0 < int(apart[1]) <= int(apart[2])
    assert float(apart[3]) > 0 and float(apart[4]) >= 0


@pytest.mark.parametrize(
    ("ends", "reason"),
    [(None, "No such file"), ("echo 'No module named detjax' >&2; exit 1", "No module named det")],
)
def test_a_python_without_detjax_is_named(ends, reason, tmp_path, monkeypatch, capsys):
    for name in ("torch", "datasets", "safetensors.torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOTrainer=object, GRPOConfig=object))
    python = tmp_path / "python"
    if ends is not None:
        python.write_text(f"#!/bin/sh\n{ends}\n")
        python.chmod(0o755)
    for more in ((), ("--model", "some/folder")):
        monkeypatch.setattr(sys, "argv", ["trl_grpo.py", "--server-python", str(python), *more])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"), run_name="__main__")
        assert end.value.code == 2
        told = capsys.readouterr().err
        assert f"--server-python {python} must be a Python that has detjax: " in told
        assert reason in told
