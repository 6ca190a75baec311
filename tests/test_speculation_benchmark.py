# SPDX-License-Identifier: Apache-2.0
"""The benchmark of speculation counts answers that differ, and one fails it."""

import dataclasses
import json
import sys

import pytest

from benchmarks import speculation

SMALL = (
    "--shapes tiny --backend portable --layers 1 --noise 0 --batch 2 --tokens 12 --prompt 9"
    " --max-len 128 --rounds 1"
)


def measured(monkeypatch, tmp_path, *more: str) -> tuple[object, list[dict]]:
    out = tmp_path / "rows.jsonl"
    argv = ["speculation", *SMALL.split(), *more, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        speculation.main()
    return ended.value.code, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_every_source_is_timed_and_compared(monkeypatch, tmp_path):
    code, rows = measured(monkeypatch, tmp_path)
    assert code == 0
    assert [row["source"] for row in rows] == ["ngram", "suffix", "draft_model"]
    assert all(row["different"] == 0 and row["tokens_per_s"] > 0 for row in rows)
    assert all(row["none_tokens_per_s"] > 0 for row in rows)
    assert rows[-1]["acceptance"] > 0.9, "the layers behind the first add nothing"


@pytest.mark.slow
@pytest.mark.control
def test_control_an_answer_that_differs_fails_the_benchmark(monkeypatch, tmp_path):
    class Unlike(speculation.Engine):
        def generate(self, requests, **given):
            if self._config.draft_weights == "draft_model":
                requests = [
                    dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[1:])
                    for request in requests
                ]
            return super().generate(requests, **given)

    monkeypatch.setattr(speculation, "Engine", Unlike)
    code, rows = measured(monkeypatch, tmp_path)
    assert code == 3 and rows[-1]["different"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_head_is_timed_with_an_acceptance_that_is_given(monkeypatch, tmp_path, weights):
    code, rows = measured(monkeypatch, tmp_path, "--replay", "1", "--head-weights", weights)
    assert code == 0
    assert [row["head_weights"] for row in rows] == [weights]
    assert [row["source"] for row in rows] == ["eagle3"]
    assert rows[0]["none_tokens_per_s"] > 0
    assert rows[-1]["acceptance"] == 1 and rows[-1]["different"] == 0


def test_weights_of_a_head_without_a_head_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speculation", "--head-weights", "int8"])
    with pytest.raises(SystemExit):
        speculation.main()
    assert "--head-weights needs --replay or --head" in capsys.readouterr().err


@pytest.mark.slow
def test_every_mode_is_compared_and_its_control_differs(monkeypatch, tmp_path):
    code, rows = measured(
        monkeypatch, tmp_path, "--mode", "invariant", "dvr", "--temperature", "0.8", "--noise", "1",
        "--control", "--requests", "3",
    )  # fmt: skip
    assert code == 0
    found = [(row["mode"], row["source"], row["is_control"]) for row in rows]
    own = ("full", "int8", "float8_e4m3fn")
    assert found == [
        *[("invariant", name, False) for name in ("ngram", "suffix", "draft_model")],
        ("invariant", "draft_model", True),
        *[("dvr", name, False) for name in (*own, "draft_model")],
        ("dvr", "draft_model", True),
    ]
    assert all(row["answers"] == 3 and row["temperature"] == 0.8 for row in rows)
    assert all((row["different"] > 0) is row["is_control"] for row in rows)
