# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs from top to bottom on a CPU, and was saved with what it printed."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMIT_S = 300
"""Of one notebook; about 40 s on two idle cores."""


def cells(path: Path) -> list:
    return nbformat.read(path, as_version=4).cells


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def test_there_is_one_for_each_question():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_asks_a_question_and_was_saved_after_it_ran(path):
    first, *_, last = cells(path)
    assert first.cell_type == "markdown"
    assert first.source.splitlines()[0].endswith("?")
    assert "fingerprint " in printed(last)
    where = printed(last).partition(" on ")[2].partition("\n")[0]
    assert first.source.endswith(f"of {'a CPU' if where == 'cpu' else f'an {where}'}.*")
    code = [cell for cell in cells(path) if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "not run from top to bottom"
    pictures = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert pictures, "no plot was saved"
    complaints = [o for cell in code for o in cell.outputs if o.get("name") == "stderr"]
    assert not complaints, complaints[0].text


def test_the_longer_run_has_rows():
    text = "".join(printed(cell) for cell in cells(FOLDER / "05_zero_kl.ipynb"))
    assert "160 updates on h200" in text


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_on_a_cpu(path):
    command = [sys.executable, str(FOLDER / "run.py"), "--check", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
