# SPDX-License-Identifier: Apache-2.0
"""The table of quality: its windows, its figures, and a run of the bundled model."""

import gzip
import json
import math

import numpy as np
import pytest

import detjax
from benchmarks import quality
from benchmarks.quality import Scores, Window
from detjax.models.hub import find_model
from detjax.models.tokenizer import Tokenizer

TEXT = "".join(f"Line {i}: it was a dark night, and the café was shut.\n" for i in range(400))


def test_windows_begin_at_line_ends_and_their_bytes_are_those_of_the_text():
    tokenizer = Tokenizer.from_folder(find_model("novels-6m"))
    windows = quality.windows_of(TEXT, tokenizer, count=3, length=40)
    for i, window in enumerate(windows):
        start = TEXT.index("\n", len(TEXT) * i // 3) + 1
        first = tokenizer.decode(window.ids[:1])
        whole = tokenizer.decode(window.ids)
        assert TEXT.startswith(whole, start) and whole.startswith("Line") and len(window.ids) == 40
        assert window.num_bytes == len(whole.encode()) - len(first.encode())
    with pytest.raises(ValueError, match="too few for 9 windows of 4000 tokens"):
        quality.windows_of(TEXT, tokenizer, count=9, length=4000)


def test_figures_are_means_over_tokens_bytes_and_windows():
    windows = [Window(ids=(1, 2, 3), num_bytes=4), Window(ids=(4, 5, 6), num_bytes=8)]
    exact = Scores(nats=np.array([2.0, 4.0]), greedy_ids=((1, 2), (3, 4)))
    got = Scores(nats=np.array([3.0, 6.0]), greedy_ids=((1, 2), (3, 9)))
    row = quality.row_of(windows, got, exact)
    assert row["nats_per_token"] == 9 / 4
    assert row["bits_per_byte"] == pytest.approx(9 / 12 / math.log(2), rel=1e-15)
    # The windows' changes are 0.5 and 1 nats a token, so their mean has the error 0.25.
    assert row["difference_nats"] == 0.75
    assert row["difference_se"] == pytest.approx(0.25, rel=1e-15)
    assert row["same_greedy"] == 0.75


@pytest.mark.slow
def test_a_run_scores_the_model_and_each_copy(tmp_path):
    """int8 changes less than int4, and the model's own figures are those of `LLM.score`."""
    (tmp_path / "text.gz").write_bytes(gzip.compress(TEXT.encode()))
    quality.main(
        [
            *("--model", "novels-6m", "--text", str(tmp_path / "text.gz")),
            *("--windows", "2", "--length", "32", "--schemes", "int8-w8a16", "int4-w4a16"),
            *("--group-size", "64", "--out", str(tmp_path / "rows.jsonl")),
        ]
    )
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    plain, cached, int8, int4 = (json.loads(line) for line in lines)
    assert (cached["scheme"], cached["kv_cache_dtype"]) == ("bfloat16", "fp8_e4m3")
    assert cached["difference_nats"] != 0 and plain["kv_cache_dtype"] == "auto"
    assert [row["scheme"] for row in (plain, int8, int4)] == [
        "bfloat16",
        "int8-w8a16",
        "int4-w4a16",
    ]
    assert [row["group_size"] for row in (plain, int8, int4)] == [0, 0, 64]
    llm = detjax.LLM("novels-6m", max_len=64)
    windows = quality.windows_of(TEXT, llm.tokenizer, count=2, length=32)
    scored = llm.engine.score([window.ids for window in windows])
    logprobs = [float(token.logprob) for tokens in scored for token in tokens]
    assert plain["nats_per_token"] == pytest.approx(-math.fsum(logprobs) / 62, rel=1e-12)
    assert plain["difference_nats"] == 0 and plain["same_greedy"] == 1
    assert 0 < abs(int8["difference_nats"]) < abs(int4["difference_nats"])
    assert int4["same_greedy"] <= int8["same_greedy"] <= 1
