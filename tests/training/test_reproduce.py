# SPDX-License-Identifier: Apache-2.0
"""The experiments of `benchmarks.reproduce` run, and what must be zero is."""

import json

import jax
import pytest

from benchmarks.reproduce import __main__ as reproduce
from benchmarks.reproduce.completions import _spans
from benchmarks.reproduce.experiment import first_difference, prompts, short


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
    assert any(r["batch_invariant"] == "no" for r in rows if r["library"] == "XLA")
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
