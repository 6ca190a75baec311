# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a loaded server: what it counts, and that it finds an answer that differs."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from benchmarks import serve_load
from benchmarks.http_client import HttpExchange, Plan, exchange, run_plans
from benchmarks.serve_cost import main as cost_main
from detjax.engine.metrics import EngineStats


def got(digest="a", **fields):
    return HttpExchange(**{"asked_s": 1.0, "pieces_s": [1.5, 2.0, 3.0], "status": 200,
                       "digest": digest, "num_tokens": 3} | fields)  # fmt: skip


def asked(*, is_deterministic=True, leaves_after=None, behaviour="stays"):
    plan = Plan(at_s=0.0, body={}, leaves_after=leaves_after)
    return serve_load.SentRequest(
        question=0, behaviour=behaviour, is_deterministic=is_deterministic, plan=plan
    )


def test_a_canonical_answer_that_differs_is_wrong_and_a_plain_one_is_not():
    alone = [got("a")]
    facts = serve_load.judge(
        [asked(), asked(), asked(is_deterministic=False), asked(leaves_after=3), asked()],
        [got("a"), got("b"), got("b"), got(""), got("", status=0)],
        alone,
    )
    names = ("whole", "left", "lost", "canonical", "wrong", "plain", "plain_different")
    assert [facts[name] for name in names] == [3, 1, 1, 2, 1, 1, 1]
    assert facts["first_token_p50_ms"] == 500 and facts["token_p50_ms"] == 750


def test_a_load_has_the_share_and_the_rate_that_was_asked_for():
    drawn = serve_load.draw_load(
        [{"prompt": [i]} for i in range(9)], num=2000, rate=50, share=50, odd_share=0.2, seed=3
    )
    assert 0.45 < sum(one.is_deterministic for one in drawn) / 2000 < 0.55
    assert 36 < drawn[-1].plan.at_s < 44
    odd = [one for one in drawn if one.behaviour != "stays"]
    assert {one.behaviour for one in odd} == set(serve_load.BEHAVIOURS[1:])
    assert 0.15 < len(odd) / 2000 < 0.25


@pytest.mark.parametrize(("pages", "held"), [((3, 2, 0), 0), ((3, 2), 2)])
def test_pages_of_a_check_are_waited_for_and_lost_ones_are_held(monkeypatch, pages, held):
    """The engine's thread checks answers again when the load is over, on pages of its own."""
    answered = contextlib.nullcontext()
    monkeypatch.setattr(serve_load.urllib.request, "urlopen", lambda *_, **__: answered)
    left = iter(pages)
    last = [0]

    def stats():
        last[0] = next(left, last[0])
        return EngineStats(num_pages=9, num_pages_held=last[0])

    service = SimpleNamespace(stats=stats, num_open=0)
    assert serve_load.wait_until_quiet(service, "", 0, most_s=0.3) == held


@pytest.mark.slow
def test_a_small_load_over_http_is_judged_and_a_wrong_answer_found(tmp_path, monkeypatch):
    trace, out = tmp_path / "trace.csv", tmp_path / "rows.jsonl"
    lines = [f"{i},{40 + 7 * i},{5 + i % 9}" for i in range(6)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    argv = [
        "--model", "tiny", "--trace", str(trace), "--max-len", "128", "--batch-size", "4",
        "--decode-batches", "--prefill-chunk", "64", "--questions", "6", "--num", "40",
        "--rates", "50", "--mode", "dvr", "--shares", "60", "--out", str(out),
    ]  # fmt: skip
    assert serve_load.main(argv) == 0
    _, row = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["same"] and row["canonical"] and row["plain"] and not row["lost"]

    def spoilt(host, port, plans, *, in_turn=False):
        return [got("0" * 64)] * len(plans) if in_turn else run_plans(host, port, plans)

    monkeypatch.setattr(serve_load, "run_plans", spoilt)
    assert serve_load.main(argv) == 3


@pytest.mark.slow
def test_the_cost_of_http_is_measured_over_all_streams(tmp_path):
    out = tmp_path / "rows.jsonl"
    argv = ["wire", "--batch", "4", "--output-len", "20", "--repeats", "1", "--step-ms", "1"]
    assert cost_main([*argv, "--out", str(out)]) == 0
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["requests"] == 4 and row["same"]
    for name in ("streamed", "whole"):
        assert 0 < row[f"{name}_tokens_per_s"] < 4000
        assert row[f"{name}_cpu_us_per_token"] > 0 < row["alone_cpu_us_per_token"]


@pytest.mark.slow
def test_the_client_reads_what_another_client_reads(running, client):
    body = {"model": "novels-6m", "prompt": "It was late", "max_tokens": 9, "temperature": 0}
    want = client.post("/v1/completions", json=body).json()["choices"][0]["detjax"]["digest"]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    host, port = running.url.removeprefix("http://").split(":")
    for is_slow in (False, True):
        found = asyncio.run(exchange(host, int(port), streamed, is_slow=is_slow))
        assert (found.digest, found.num_tokens, found.error) == (want, 9, "")
        assert len(found.pieces_s) == 9
    refused = asyncio.run(exchange(host, int(port), streamed | {"model": "other"}))
    assert refused.status == 404 and "not served" in refused.error
