# SPDX-License-Identifier: Apache-2.0
"""What proof costs is measured by a benchmark that finds forgeries, and 8B has one shape."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import proof
from benchmarks.step import MODELS
from detjax.models.hf_config import config_from_hf

SHAPE = Path(__file__).parents[1] / "benchmarks" / "shapes" / "llama3_8b.json"
SMALL = (
    "--model tiny --backend portable --num-pages 24 --max-len 256 --batch-size 2 --prefill-chunk 32"
    " --decode-batches --batches 2 --receipts 3 --prompt 5 20 --answer 20 40 --seconds 1 --rate 4"
)


def test_the_shape_that_is_certified_is_the_one_that_is_timed():
    shape = config_from_hf(json.loads(SHAPE.read_text()))
    timed = MODELS["llama3_8b"]
    others = {"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_ids": (2,)}
    assert shape == dataclasses.replace(timed, **others)


@pytest.mark.slow
def test_receipts_are_audited_and_self_checks_timed(monkeypatch, tmp_path):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["proof", *SMALL.split(), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        proof.main()
    assert ended.value.code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == ["start", *["serving"] * 4, "audit"]
    waited = rows[0]["waited_for"]
    assert {"checksums", "prefill 1x32", "decode 2x1"} <= set(waited["launches"])
    spent_s = sum(waited["seconds"].values()) + waited["host_s"]
    assert waited["host_s"] > 0 and spent_s == pytest.approx(waited["total_s"])
    (audited,) = [row for row in rows if row["case"] == "audit"]
    assert (audited["different"], audited["control_found"], audited["receipts"]) == (0, 1, 3)
    assert all(row["rechecked"] == 0 for row in rows if row.get("self_check") == "start")


@pytest.mark.slow
@pytest.mark.control
def test_control_a_bit_that_differs_fails_the_benchmark(monkeypatch):
    found = proof.rerun
    monkeypatch.setattr(proof, "rerun", lambda *args, **kind: found(*args, **kind)[:0])
    argv = ["proof", *SMALL.split(), "--parts", "audit"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        proof.main()
    assert ended.value.code == 3
