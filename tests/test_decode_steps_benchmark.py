# SPDX-License-Identifier: Apache-2.0
"""The benchmark of steps a launch times each number, and an answer that differs fails it."""

import dataclasses
import json
import sys

import pytest

from benchmarks import decode_steps

pytestmark = pytest.mark.slow

SMALL = "--shapes tiny --backend portable --batch 1 2 --tokens 12 --steps 1 4 --rounds 1"


def measured(monkeypatch, tmp_path) -> tuple[object, list[dict]]:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["decode_steps", *SMALL.split(), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        decode_steps.main()
    return ended.value.code, [json.loads(line) for line in out.read_text().splitlines()]


def test_every_batch_and_number_of_steps_is_timed_and_compared(monkeypatch, tmp_path):
    code, rows = measured(monkeypatch, tmp_path)
    assert code == 0
    assert [(row["batch"], row["decode_steps"]) for row in rows] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert all(row["different"] == 0 and row["tokens_per_s"] > 0 for row in rows)
    assert [row["answers"] for row in rows] == [2, 2, 4, 4]
    assert rows[0]["over_first"] == 1


@pytest.mark.control
def test_control_an_answer_that_differs_fails_the_benchmark(monkeypatch, tmp_path):
    class Unlike(decode_steps.Engine):
        def generate(self, requests, **given):
            if self._config.decode_steps > 1:
                requests = [
                    dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids[1:])
                    for request in requests
                ]
            return super().generate(requests, **given)

    monkeypatch.setattr(decode_steps, "Engine", Unlike)
    code, rows = measured(monkeypatch, tmp_path)
    assert code == 3 and [row["different"] for row in rows] == [0, 2, 0, 4]
