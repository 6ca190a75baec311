# SPDX-License-Identifier: Apache-2.0
"""The documented example: TRL trains in torch on rollouts of a server, whose bits come again."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
