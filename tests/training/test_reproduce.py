# SPDX-License-Identifier: Apache-2.0
"""The experiments of `benchmarks.reproduce` run, and what must be zero is."""

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce import accuracy, latency, loads, meshes, problems, shares, windows
from benchmarks.reproduce.completions import _spans
from benchmarks.reproduce.experiment import (
    Experiment,
    Lab,
    Part,
    Result,
    Size,
    first_difference,
    prompts,
    short,
)
from benchmarks.reproduce.loads import some_deterministic
from benchmarks.reproduce.record import Record, redraw, run_pieces, take_rows
from benchmarks.step import MODELS
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh


def run(name: str, folder, capsys) -> tuple[list[dict], str]:
    # The rivals, XLA's own functions, rely on implicit promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert reproduce.main([name, "--backend", "portable", "--out", str(folder)]) == 0
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["fingerprint"] and found["findings"]
    assert (folder / f"{name}.png").stat().st_size > 1000
    return found["rows"], capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.invariance
def test_operators_of_detjax_do_not_change_and_one_of_xla_does(tmp_path, capsys):
    rows, out = run("operators", tmp_path, capsys)
    ours = [row for row in rows if row["library"] == "detjax"]
    assert len(ours) >= 7
    assert all((r["elements_changed"], r["batch_invariant"]) == (0, "yes") for r in ours)
    assert all(
        (r["rows_changed_by_place"][0], r["position_invariant"]) == ("0", "yes") for r in ours
    )
    assert any(r["batch_invariant"] == "no" for r in rows if r["library"] == "XLA")
    (control,) = [row for row in rows if row["library"] == "control"]
    assert (control["batch_invariant"], control["position_invariant"]) == ("yes", "no")
    assert "paper: LLM-42" in out


@pytest.mark.nightly
@pytest.mark.invariance
def test_answers_on_meshes_are_one_and_the_fast_path_has_more(tmp_path, capsys):
    rows, out = run("meshes", tmp_path, capsys)
    assert len({row["model"] for row in rows}) == 2
    for model in {row["model"] for row in rows}:
        own = [row for row in rows if row["model"] == model]
        by_mode = {row["mode"]: row for row in own}
        assert by_mode["invariant"]["unique_with_logprobs_max"] == 1
        assert by_mode["invariant"]["max_prob_divergence_mean"] == 0.0
        assert by_mode["fast"]["unique_with_logprobs_max"] > 1
        assert by_mode["fast"]["max_prob_divergence_mean"] > 0
        assert len({row["digest"] for row in own if row["mode"] == "invariant"}) == 1
    assert "paper: Zhang et al. 2025" in out


@pytest.mark.nightly
@pytest.mark.invariance
@pytest.mark.parametrize("name", ["completions", "accuracy"])
def test_the_other_experiments_find_nothing_in_invariant_mode(name, tmp_path, capsys):
    rows, _ = run(name, tmp_path, capsys)
    exact = [row for row in rows if row["mode"] != "fast"]
    assert exact
    for row in exact:
        if name == "completions":
            assert row["canonical"] == row["requests"]
        else:
            assert row["logprobs_changed"] == 0
    if name == "accuracy":
        assert any(row["logprobs_changed"] for row in rows if row["mode"] == "fast")
        assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}


@pytest.mark.nightly
@pytest.mark.invariance
@pytest.mark.parametrize("name", ["throughput", "shares", "latency", "windows", "rollbacks"])
def test_drafts_are_made_and_change_no_answer_while_plain_answers_do(name, tmp_path, capsys):
    rows, _ = run(name, tmp_path / "out", capsys)
    assert all(row.get("wrong", 0) == 0 for row in rows)
    drafted = [row for row in rows if row.get("mode") == "dvr"]
    assert drafted and all(row["windows"] > 0 for row in drafted)
    if name != "windows":  # which has no plain request
        assert any(row["plain_different"] for row in rows if row["mode"] == "fast")
    again = tmp_path / "again"
    done = ["--done", str(tmp_path / "out"), "--out", str(again)]
    assert reproduce.main([name, "--backend", "portable", *done]) == 0
    assert "done before" in capsys.readouterr().out
    assert not again.exists()


# ------------------------------------------------------------------------------- pieces in turn


@pytest.fixture
def make_record():
    """Makes a record of an experiment whose pieces do what they are told."""
    lab = Lab(size=Size.SMALL, folder=Path("m"), backend=Backend.PORTABLE, num_devices=1)

    def make(name, seconds=1.0, **pieces):
        def parts(_):
            return [Part(name=n, seconds=seconds, run=run) for n, run in pieces.items()]

        def result(rows, setting):
            return Result(
                title="t", setting=setting, columns=("part", "x"), rows=rows,
                findings=[f"{len(rows)} rows"], plot=lambda figure: figure.subplots(),
            )  # fmt: skip

        experiment = Experiment(
            question="q",
            paper="p",
            parts=parts,
            result=result,
            setting=lambda _, part: "here",
        )
        card = {"fingerprint": "f", "commit": "c", "date": "d", "gpu": "g"}
        return Record(name=name, experiment=experiment, lab=lab, card=card)

    return make


def test_pieces_run_in_turn_and_not_twice(make_record, tmp_path, capsys):
    ran = []

    def piece(name, wrong=0):
        return lambda: ran.append(name) or [{"x": name, "wrong": wrong}]

    a = make_record("a", first=piece("a1"), second=piece("a2"))
    b = make_record("b", first=piece("b1", wrong=2))
    assert run_pieces([a, b], seconds=10.0, out=tmp_path) == []
    assert ran == ["a1", "b1", "a2"] and (a.num_wrong, b.num_wrong) == (0, 2)
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(row["part"], row["x"], row["commit"]) for row in found["rows"]] == [
        ("first", "a1", "c"), ("second", "a2", "c"),
    ]  # fmt: skip
    assert found["findings"] == ["2 rows"] and found["setting"] == "here"
    again = make_record("a", first=piece("a1"), third=piece("a3"))
    again.read(tmp_path)
    run_pieces([again], seconds=10.0, out=tmp_path)
    assert ran[3:] == ["a3"] and len(again.rows) == 3
    assert "a: first: done before" in capsys.readouterr().out


def test_rows_of_another_gpu_or_without_pieces_are_not_resumed(make_record, tmp_path, capsys):
    record = make_record("a", first=lambda: [{"x": 1}])
    run_pieces([record], seconds=10.0, out=tmp_path)
    other = make_record("a", first=lambda: [])
    other.card["gpu"] = "h"
    other.read(tmp_path)
    assert not other.rows and "gpu='g'" in capsys.readouterr().err
    on_two = make_record("a", first=lambda: [])
    on_two.lab = dataclasses.replace(on_two.lab, load_tp=2)
    on_two.read(tmp_path)
    assert not on_two.rows and "load_tp=1" in capsys.readouterr().err
    document = json.loads((tmp_path / "a.json").read_text())
    del document["load_tp"]  # as before loads ran on several devices
    (tmp_path / "a.json").write_text(json.dumps(document))
    again = make_record("a", first=lambda: [])
    again.read(tmp_path)
    assert len(again.rows) == 1
    del document["rows"][0]["part"]
    (tmp_path / "a.json").write_text(json.dumps(document))
    record.rows = []
    record.read(tmp_path)
    assert not record.rows and "rows without pieces" in capsys.readouterr().err


def test_sentences_and_plots_are_made_anew_from_rows(make_record, tmp_path):
    record = make_record("a", first=lambda: [{"x": 1}, {"x": 2}])
    run_pieces([record], seconds=10.0, out=tmp_path)
    path = tmp_path / "a.json"
    written = path.read_text()
    path.write_text(written.replace("2 rows", "old words"))
    (tmp_path / "a.png").unlink()
    redraw(path, record.experiment)
    assert path.read_text() == written and (tmp_path / "a.png").exists()
    assert reproduce.main(["all", "--redraw", str(tmp_path)]) == 0  # which has no other file


def test_a_piece_that_does_not_fit_is_not_begun_and_one_that_raises_costs_no_other(
    make_record, tmp_path, capsys
):
    def fail():
        raise ValueError("no memory")

    a = make_record("a", first=fail, second=lambda: [{"x": 1}])
    b = make_record("b", seconds=99.0, first=lambda: [{"x": 1}])
    assert run_pieces([a, b], seconds=10.0, out=tmp_path) == ["a: first: ValueError: no memory"]
    assert [row["part"] for row in a.rows] == ["second"] and not b.rows
    assert "b: first: not begun, 10 s left of about 99" in capsys.readouterr().out


def test_findings_put_the_papers_figure_beside_ours():
    cell = {"what": "load", "requests": 2, "windows": 3, "wrong": 0, "fingerprint": "f"}
    rows = [
        {"what": "verification", "window": 16, "group": 1, "ms": 4.0},
        cell | {"mode": "invariant", "window": 0, "group": 0, "digests": ["a", "b"],
                "end_to_end_p99_ms": 900.0},
        cell | {"mode": "dvr", "window": 16, "group": 1, "digests": ["a", "b"],
                "end_to_end_p99_ms": 1500.0, "paper_p99_s": 615.9, "recomputed_percent": 3.0},
        cell | {"mode": "dvr", "window": 64, "group": 8, "digests": ["a", "c"],
                "end_to_end_p99_ms": 1200.0, "paper_p99_s": 46.2, "recomputed_percent": 13.0},
    ]  # fmt: skip
    told = windows.findings(rows)
    assert "from 1.2 s at 64 x 8 (paper 46 s) to 1.5 s at 16 x 1 (paper 616 s)" in told[2]
    assert told[-1] == "1 of 2 answers differ between 3 settings"
    trained = [row | {"model": "m", "paper_p99_s": None} for row in rows]
    assert windows.findings(rows + trained) == [*told, *windows.findings(trained)]
    assert all(one.startswith("m: ") for one in windows.findings(trained))
    rows[-1] |= {"fingerprint": "g"}
    assert windows.findings(rows)[-1] == "0 of 2 answers differ between 3 settings"
    share = {"workload": "w", "over_fast": 0.9, "paper_over_fast": 0.5, "windows": 1}
    rows = [share | {"mode": "dvr", "deterministic_percent": p} for p in (2, 50)]
    rows += [share | {"mode": "dvr", "deterministic_percent": 100, "windows": 0}]
    assert shares.findings(rows) == [
        "w: drafts at 50 % 0.90 (0.50), no drafts at 100 % 0.90 (0.50) of fast"
    ]


def test_some_requests_are_deterministic_and_at_least_one():
    assert [sum(some_deterministic(64, p)) for p in (0, 1, 50, 100)] == [0, 1, 32, 64]


def test_help_and_mistakes(capsys):
    with pytest.raises(SystemExit) as end:
        reproduce.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in reproduce.EXPERIMENTS)
    with pytest.raises(SystemExit):
        reproduce.main(["competions"])
    assert "invalid choice" in capsys.readouterr().err


def test_differences_and_spans_are_counted_from_the_right_token():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
    assert _spans((1, 2, 3, 4), (1, 2, 3, 4)) == (4, 0)
    assert _spans((1, 9, 3, 4), (1, 2, 3, 4)) == (1, 2)
    assert _spans((9, 2, 9, 4), (1, 2, 3, 4)) == (0, 1)
    assert len(set(prompts(300))) == 300
    assert [short(v) for v in (0.0, 0.00123, 1234, None, "a")] == [
        "0",
        "0.00123",
        "1,234",
        "-",
        "a",
    ]


# ------------------------------------------------------------------------------ a trained model


@pytest.fixture(scope="module")
def train_tiny():
    """The trainer, which is a script."""
    path = Path(__file__).parents[2] / "tools" / "train_tiny.py"
    spec = importlib.util.spec_from_file_location("train_tiny", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_tiny"]


@pytest.mark.slow
def test_every_set_has_a_thousand_problems():
    for name, make in problems.LEVELS.items():
        found = make(1000)
        assert len({one.prompt for one in found}) == 1000, name
        assert max(len(one.answer) for one in found) <= problems.MOST_TOKENS
    with pytest.raises(ValueError, match="5000 such lines were not found"):
        problems.counts(5000, digits=3, terms=(38, 40))


@pytest.mark.parametrize("digits", [3, 4])
def test_problems_that_count_are_lines_of_the_trainer_which_it_does_not_show(train_tiny, digits):
    found = problems.counts(200, digits=digits, terms=(6, 24))
    assert len({one.prompt for one in found}) == 200
    for one in found:
        start, step = map(int, one.prompt.rstrip(":").split(",+"))
        line = train_tiny.Count(start=start, step=step, bound=10**digits)
        assert one.prompt + one.answer == line.line
        assert line.is_unseen and 6 <= line.num_terms <= 24
    shown = "".join(train_tiny.count_documents(3000, seed=0)).splitlines()
    assert len(shown) > 2000
    assert not {one.prompt for one in found} & {line.partition(":")[0] + ":" for line in shown}
    for line in shown[:300]:  # which stop where they should
        numbers = [int(n) for n in line.partition(":")[2].split(",")]
        bound = 10 ** (len(str(numbers[-1])) - 1)
        assert numbers[-1] >= bound and all(n < bound for n in numbers[:-1])
        assert len(numbers) <= train_tiny.MAX_TERMS


@pytest.mark.slow
def test_drafts_of_chained_weights_are_right_where_those_of_random_ones_are_not():
    """The control: plain random weights, whose windows roll back."""
    config = dataclasses.replace(
        MODELS["tiny"], num_layers=4, sliding_windows=(None,) * 4, hidden_size=512, head_dim=128,
        intermediate_size=1024,
    )  # fmt: skip
    drawn = random_model(
        config, seed=0, profile=NumericsProfile(), mesh=make_mesh(1, 1, platform="cpu"),
        backend=Backend.PORTABLE,
    )  # fmt: skip
    rollbacks, answers = {}, {}
    for name, model in (("random", drawn), ("chained", loads.chained(drawn))):
        sizes = EngineConfig(
            mode="dvr", batch_size=4, max_len=128, num_pages=8, prefill_chunk=32,
            verify_window=16, verify_rows=4, max_draft_fraction=1.0, self_check="off",
        )  # fmt: skip
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        requests = [Request(prompt_token_ids=(10 + i,) * 20, sampling=sampling) for i in range(4)]
        engine = Engine(model, sizes)
        answers[name] = [one.token_ids for one in engine.generate(requests)]
        rollbacks[name] = engine.stats().num_rollbacks
        assert engine.stats().num_windows >= 3 * 4 - 1
    assert rollbacks["chained"] == 0 < rollbacks["random"]
    # Token x + 1 follows x nearly always, and nearly never in the other model.
    follows = {
        name: np.mean([np.diff(one) == 1 for one in answers[name]])
        for name in ("chained", "random")
    }
    assert follows["chained"] > 0.9 and follows["random"] < 0.1, follows


def test_rates_follow_the_time_that_is_over(train_tiny, monkeypatch):
    now = 0.0
    monkeypatch.setattr(train_tiny.time, "perf_counter", lambda: now)
    args = argparse.Namespace(seconds=110.0, learning_rate=1.0, eval_every=4)
    now = 10.0  # compiling
    rates, ends = [], []
    for chunk in train_tiny.Clock(args, 0.0).chunks():
        rates += chunk.tolist()
        now += 7.0
        ends.append(now)
    assert 103.0 < ends[-1] <= 110.0
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) > 0.9 and rates[-1] == pytest.approx(0.02)
    now = 120.0
    with pytest.raises(ValueError, match="--seconds 110 is over when all is compiled"):
        next(train_tiny.Clock(args, 0.0).chunks())


def score_row(mode, right, answers, **fields):
    bits = np.packbits(np.asarray(right, bool)).tobytes().hex()
    row = {"mode": mode, "dtype": "bfloat16", "tp": 1, "batch": 8, "problems": len(right),
           "accuracy_percent": 100 * sum(right) / len(right), "right": bits, "answers": answers,
           "texts_changed": 0, "length_change_most": 0}  # fmt: skip
    return row | fields


def test_a_swing_is_counted_of_all_problems_and_of_sets_of_thirty():
    first = [1] * 30 + [0] * 30
    other = [1] * 27 + [0] * 3 + [1] * 6 + [0] * 24
    rows = [
        score_row("fast", first, "aaaa" * 60),
        score_row("fast", other, "bbbb" * 3 + "aaaa" * 57, batch=32, texts_changed=9),
        score_row("invariant", first, "cccc" * 60),
        score_row("invariant", first, "cccc" * 60, batch=32),
    ]
    fast, invariant = accuracy.findings(rows)
    assert fast.startswith("fast, bfloat16: 50.0 to 55.0 % right, a swing of 5.0 points; of 30 ")
    assert "problems 15.0 on average, 20.0 at most. 3 of 60 answers change in a bit, 9 " in fast
    assert fast.endswith("(batch 8, 32, tp 1)")
    assert "a swing of 0.0 points" in invariant and "0 of 60 answers change" in invariant


def mesh_row(gpu, mode, answers, **fields):
    row = {"model": "m", "gpu": gpu, "mode": mode, "tp": 1, "batch": 8, "answers": answers,
           "weights": "w", "unique_outputs_mean": 1.0, "unique_with_logprobs_mean": 1.0,
           "max_prob_divergence_mean": 0.0, "part": "trained",
           "prompts": 2}  # fmt: skip
    return row | fields


def test_rows_of_two_kinds_of_gpu_stand_side_by_side(tmp_path):
    ours = [mesh_row("H200", mode, "a" * 8 + "b" * 8) for mode in meshes.MODES]
    others = [mesh_row("H100", mode, "a" * 8 + "c" * 8) for mode in meshes.MODES]
    (told,) = meshes.findings(ours + others)
    assert "H200, tp 1 x batch 8: fast 1.00 unique" in told and "; H100, tp 1 x batch 8" in told
    assert "1 of 2 canonical answers have the same bits on H200 and H100" in told
    (told,) = meshes.findings(ours + [row | {"weights": "v"} for row in others])
    assert "same bits" not in told
    card = {"question": "", "paper": "", "title": "", "setting": "s", "findings": [],
            "size": "full"}  # fmt: skip
    for folder, gpu, rows in (("a", "H200", ours), ("b", "H100", others)):
        (tmp_path / folder).mkdir()
        prompted = [row | {"prompts": 2, "prompts_of": "a file", "tokens": 4} for row in rows]
        document = card | {"gpu": gpu, "rows": prompted}
        (tmp_path / folder / "meshes.json").write_text(json.dumps(document))
    (tmp_path / "c").mkdir()  # another piece of the same kind of GPU takes no place of the first's
    more = [row | {"part": "tiny", "model": "n"} for row in document["rows"]]
    (tmp_path / "c" / "meshes.json").write_text(json.dumps(document | {"rows": more}))
    folders = [str(tmp_path / name) for name in "bc"]
    beside = ["meshes", "--redraw", str(tmp_path / "a"), "--beside", *folders]
    for _ in range(2):  # the second time nothing more
        assert reproduce.main(beside) == 0
        found = json.loads((tmp_path / "a" / "meshes.json").read_text())
        assert [row["gpu"] for row in found["rows"]] == ["H200"] * 2 + ["H100"] * 4
        assert [row["part"] for row in found["rows"]].count("tiny") == 2
    assert "1 of 2 canonical answers" in found["findings"][0]
    assert reproduce.main(["meshes", "--beside", str(tmp_path)]) == 2


def latency_row(mode, percent, rate, **fields):
    row = {"model": "m", "mode": mode, "deterministic_percent": percent, "rate_per_s": rate,
           "deterministic": percent // 10, "first_token_p50_ms": 5.0, "end_to_end_p99_ms": 1500.0,
           "p99_over_fast": 1.0, "paper_p99_over_fast": 3.0, "windows": 4 * (mode == "dvr"),
           "wrong": 0, "plain_different": 0}  # fmt: skip
    return row | fields


def test_latencies_are_told_by_rate_and_the_paper_beside_the_highest():
    rows = [
        latency_row(mode, percent, rate, p99_over_fast=1 + rate / 100, plain_different=percent == 0)
        for mode, percent in latency.CASES
        for rate in (10.0, 20.0)
    ]
    low, high, bits = latency.findings(rows)
    assert "10 requests a second: P99 end to end of fast 1.50 s, over it invariant 1.10, " in low
    assert "invariant 1.20 (3.00), drafts at 10 % 1.20 (3.00)" in high and "(3.00)" not in low
    assert bits.startswith("m: 0 of 52 deterministic answers have another bit")
    assert bits.endswith(", 2 of the others")
    without = [latency_row("dvr", 10, 10.0, windows=0), latency_row("fast", 0, 10.0)]
    assert ", over it no drafts at 10 % 1.00 (3.00)" in latency.findings(without)[0]


def test_a_setting_names_what_ran_and_no_other_model():
    lab = Lab(size=Size.SMALL, folder=bundled_model_path(), backend=Backend.PORTABLE, num_devices=1)
    names = ("load", "load" + loads.OF_TRAINED)
    large, trained = (
        loads.load_setting(lab, Part(name=name, seconds=1.0, run=list)) for name in names
    )
    assert large.endswith("8 slots, chunks of 32 tokens") and "rows that name it" not in large
    assert trained.startswith("rows that name it: novels-6m ")


def test_pieces_of_two_runs_of_the_same_weights_are_put_together(make_record, tmp_path):
    for name, weights in (("one", "w"), ("two", "w"), ("three", "v")):
        record = make_record("a", **{name: lambda weights=weights: [{"x": 1, "weights": weights}]})
        run_pieces([record], seconds=10.0, out=tmp_path / name)
    path = tmp_path / "all" / "a.json"
    assert [take_rows(path, tmp_path / n / "a.json") for n in ("one", "two", "three")] == [1, 1, 0]
    found = json.loads(path.read_text())
    assert [row["part"] for row in found["rows"]] == ["one", "two"]
    some = make_record("a", one=lambda: [], two=lambda: [])
    some.wanted = ("tw",)
    assert [part.name for part in some.parts] == ["two"]


def test_prompts_of_a_file_are_read_or_refused_by_line(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text('{"problem": "a"}\n\n{"question": "b"}\n')
    assert reproduce.read_prompts(path) == ("a", "b")
    for text, said in (("", "has no line"), ('{"x": 1}', "line 1: not JSON with"),
                       ('{"problem": 3}', "line 1: 3 is not text")):  # fmt: skip
        path.write_text(text)
        assert reproduce.main(["meshes", "--prompts", str(path)]) == 2
        assert said in capsys.readouterr().err
