# SPDX-License-Identifier: Apache-2.0
"""The experiments of `benchmarks.reproduce` run, and what must be zero is."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce import shares, windows
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
from benchmarks.reproduce.record import Record, redraw, run_pieces
from detjax.pallas_kernels.backend import Backend


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
    by_mode = {row["mode"]: row for row in rows}
    assert by_mode["invariant"]["unique_with_logprobs_max"] == 1
    assert by_mode["invariant"]["max_prob_divergence_mean"] == 0.0
    assert by_mode["fast"]["unique_with_logprobs_max"] > 1
    assert by_mode["fast"]["max_prob_divergence_mean"] > 0
    assert len({row["digest"] for row in rows if row["mode"] == "invariant"}) == 1
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


@pytest.mark.nightly
@pytest.mark.invariance
@pytest.mark.parametrize("name", ["throughput", "shares", "windows", "rollbacks"])
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
            question="q", paper="p", parts=parts, result=result, setting=lambda _: "here"
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
    document = json.loads((tmp_path / "a.json").read_text())
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
