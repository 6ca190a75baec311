# SPDX-License-Identifier: Apache-2.0
"""Cold and warm starts are measured in processes of their own, and give the same answer."""

import json
import subprocess
import sys

import pytest

from benchmarks import start
from detjax.testing.cases import quick_and_slow


@pytest.mark.slow
def test_a_cold_and_a_warm_start_give_the_same_answer(tmp_path):
    out = tmp_path / "rows.jsonl"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.start", "--model", "tiny", "--backend", "portable",
         "--warm", "1", "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "all answers equal: True" in run.stdout
    cold, warm = map(json.loads, out.read_text().splitlines())
    assert (cold["kind"], warm["kind"]) == ("cold", "warm")
    for row in (cold, warm):
        ends = [row[name] for name in start.PHASES]
        assert ends == sorted(ends) and ends[0] > 0 and row["programs"] > 0


@pytest.mark.slow
def test_an_answer_that_differs_is_told(monkeypatch, capsys):
    """The control: every start gives another answer."""
    times: dict = dict.fromkeys(start.PHASES, 1.0) | {"programs": 2, "backend": "portable"}
    digests = iter("abc")

    def found(*_):
        return {"found": times | {"digest": next(digests)}, "card": {"gpu": "none"}}

    monkeypatch.setattr(start, "start", found)
    monkeypatch.setattr(sys, "argv", ["start", "--backend", "portable", "--warm", "2"])
    with pytest.raises(SystemExit) as end:
        start.main()
    assert end.value.code == 3 and "all answers equal: False" in capsys.readouterr().out


@pytest.mark.parametrize("name", quick_and_slow(["no_such_model"], ["qwen3_8b", "tiny_experts"]))
def test_what_is_no_llama_and_no_folder_is_refused(monkeypatch, capsys, name):
    """Else a start would be of another model than its row says."""
    monkeypatch.setattr(sys, "argv", ["start", "--model", name])
    with pytest.raises(SystemExit) as end:
        start.main()
    assert end.value.code == 2 and f"--model {name} is no folder" in capsys.readouterr().err


def test_no_warm_start_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["start", "--warm", "0"])
    with pytest.raises(SystemExit) as end:
        start.main()
    assert end.value.code == 2 and "--warm 0 must be at least 1" in capsys.readouterr().err
