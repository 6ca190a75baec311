# SPDX-License-Identifier: Apache-2.0
"""The sections that `benchmarks.report` writes say what the rows say."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import (
    report,
    report_experts,
    report_mesh,
    report_peers,
    report_production,
    report_rows,
    report_server,
    report_serving,
    report_training,
    serving,
)
from benchmarks.reproduce import completions, throughput
from benchmarks.reproduce.__main__ import EXPERIMENTS
from benchmarks.reproduce.experiment import Experiment
from detjax.models.bundled import bundled_model_path

ROOT = Path(__file__).parents[1]
CARD = {"gpu": "NVIDIA H200", "jax": "0.11.2"}
TIMES = {
    f"{name}_p{share}_ms": 1000.0 * i + share
    for i, name in enumerate(("first_token", "token", "end_to_end"))
    for share in (50, 90, 99)
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes rows of a command, which are then all that the report has."""
    monkeypatch.setattr(report_rows, "RESULTS", tmp_path)

    def write(command, *rows, date="2026-01-02", gpu="h200"):
        (tmp_path / gpu).mkdir(exist_ok=True)
        card = CARD | {"gpu": f"NVIDIA {gpu.upper()}"}
        lines = [json.dumps(card | row) + "\n" for row in rows]
        (tmp_path / gpu / f"{date}-{command}.jsonl").write_text("".join(lines))

    return write


def served(subject, mode, speed, **fields):
    """A row of requests that were answered at `speed` tokens a second."""
    given = {"subject": subject, "mode": mode, "model": "m", "output_tokens_per_s": speed}
    return given | TIMES | fields


def offline(mode, speed, **fields):
    lengths = {"requests": 4, "prompt_len": 8, "output_len": 16}
    return served("offline", mode, speed, **lengths, **fields)


def table_lines(section):
    """Cells of the lines below each table's rule."""
    lines = [line.strip("| ").split(" | ") for line in section if line.startswith("|")]
    return [cells for cells in lines if not set(cells[0]) <= {"-"}]


def test_nothing_is_written_without_rows(write):
    for part in (report_serving, report_mesh):
        assert part.section() == part.readme_lines() == []
    assert report_peers.lines() == report_production.lines() == []


def test_a_part_appears_only_with_its_rows(write):
    write("serving", offline("fast", 100.0))
    text = "\n".join(report_serving.section())
    assert "All at once" in text
    for absent in ("trace", "share", "Window", "8-bit", "under load", "engine adds", "figures/"):
        assert absent not in text


def test_the_newest_file_and_in_it_the_later_row_counts(write):
    write("serving", offline("invariant", 700.0), offline("fast", 100.0), date="2026-01-01")
    write("serving", offline("invariant", 50.0), offline("fast", 100.0), offline("invariant", 80.0))
    found = table_lines(report_serving.section())[1:]
    assert [cells[:3] for cells in found] == [
        ["`invariant`", "80", "0.80"],
        ["`fast`", "100", "1.00"],
    ]
    (line,) = report_serving.readme_lines()
    assert "4 requests of 8 + 16 tokens" in line and "80 generated" in line and "0.80 of" in line


def test_a_load_that_is_decoded_with_patience_says_so_and_stands_apart(write):
    write(
        "serving",
        offline("invariant", 100.0, max_prefill_streak=64),
        offline("fast", 50.0, max_prefill_streak=64),
        offline("invariant", 80.0, max_prefill_streak=0),
    )
    section = [line for line in report_serving.section() if "All at once" in line]
    assert [("`max_prefill_streak` 64" in line) for line in section] == [False, True]
    plain, patient = report_serving.readme_lines()
    assert (
        "80 generated" in plain and "max_prefill_streak" not in plain and " of `fast`" not in plain
    )
    assert "`max_prefill_streak` 64" in patient and "100 generated" in patient and "2.00" in patient


def test_quantiles_of_a_trace_by_rate(write):
    write(
        "serving",
        served("replay", "invariant", 50.0, rate_per_s=2.0, requests=9),
        served("replay", "invariant", 90.0, rate_per_s=0.0, requests=9),
        served("replay", "fast", 100.0, rate_per_s=2.0, requests=9),
    )
    header, at_once, ours, fast = table_lines(report_serving.section())
    quantiles = ["50.0 / 90.0 / 99.0", "1,050 / 1,090 / 1,099", "2,050 / 2,090 / 2,099"]
    assert header[-3:] == ["first token, ms", "a token, ms", "end to end, ms"]
    # `fast` was not measured with all at once, so there is no ratio.
    assert at_once == ["9", "at once", "`invariant`", "90", "", *quantiles]
    assert ours == ["9", "2", "`invariant`", "50", "0.50", *quantiles]
    assert fast == ["9", "2", "`fast`", "100", "1.00", *quantiles]


def test_shares_with_and_without_drafts_are_each_over_the_fast_row_of_their_run(write):
    drafts = {"verify_launches": 3, "acceptance": 0.9375, "num_rollbacks": 7}
    write(
        "serving",
        served("shares", "dvr", 50.0, deterministic_percent=10.0, num_steps=9),
        served("shares", "fast", 100.0, deterministic_percent=0.0),
        served("shares", "dvr", 60.0, deterministic_percent=10.0, **drafts),
        served("shares", "fast", 200.0, deterministic_percent=0.0),
    )
    _, fast, drafted, plain = table_lines(report_serving.section())
    assert fast[:4] == ["0", "`fast`", "200", "1.00"]
    assert drafted[:4] == ["10", "`dvr`, drafts", "60", "0.30"]
    assert drafted[-2:] == ["0.938", "7"]
    assert plain[:4] == ["10", "`dvr`, no drafts", "50", "0.50"]


def test_windows_by_group(write):
    row = {"draft_weights": "int8", "verify_launches": 1, "acceptance": 0.5, "num_rollbacks": 2}
    cases = ((16, 4, 30.0), (8, 1, 10.0), (8, 4, 20.0))
    write("serving", *(served("windows", "dvr", s, window=w, group=g, **row) for w, g, s in cases))
    assert table_lines(report_serving.section()) == [
        ["window (W)", "G 1", "G 4"],
        ["8", "10 / 0.500 / 2", "20 / 0.500 / 2"],
        ["16", "", "30 / 0.500 / 2"],
    ]


def test_narrow_names_the_drafts_and_the_folder_alone(write):
    write(
        "serving",
        served("narrow", "fast", 100.0, model="/a/b/small", batch=1, window=0),
        served(
            "narrow", "dvr", 90.0, model="/a/b/small", batch=1, window=8, verify_launches=2,
            draft_weights="int8", decode_steps=7,
        ),
    )  # fmt: skip
    section = report_serving.section()
    assert "`small`" in "\n".join(section) and "/a" not in "\n".join(section)
    found = [cells[:6] for cells in table_lines(section)[1:]]
    assert found == [
        ["1", "`fast`", "", "1", "100", "1.00"],
        ["1", "`dvr`, int8 drafts", "8", "7", "90", "0.90"],
    ]


@pytest.mark.parametrize("wrong", [0, 3])
def test_different_answers_under_load_are_told(write, wrong):
    row = {
        "subject": "stress", "model": "bundled", "mode": "dvr", "requests": 1000, "cancelled": 5,
        "num_pages": 9, "preempted": 6, "samples": 1200, "plain": 200, "plain_different": 9,
        "wrong": wrong,
        "lost": 1, "acceptance": 0.5, "rollbacks": 4, "draft_weights": "int8",
    }  # fmt: skip
    write("serving", row)
    _, cells = table_lines(report_serving.section())
    assert cells[2:5] == ["int8", "0.500", "4"]
    assert cells[-2:] == [f"{wrong + 1} of 1,000", "9 of 200"]
    (line,) = report_serving.readme_lines()
    assert "`dvr` (int8 drafts)" in line
    assert line.endswith(f"1,000 deterministic samples of 1,000 requests against the answer at "
                         f"batch size 1: {wrong + 1} different or lost.")  # fmt: skip


# ------------------------------------------------------------------------- what dvr rows may say


STRESS = {
    "subject": "stress", "model": "bundled", "mode": "dvr", "requests": 10, "cancelled": 0,
    "num_pages": 9, "preempted": 0, "samples": 12, "plain": 2, "plain_different": 1, "wrong": 0,
    "lost": 0, "draft_weights": "full",
}  # fmt: skip
NO_WINDOWS = {"acceptance": 0.0, "rollbacks": 0}


def test_answers_of_dvr_without_windows_are_told_as_such(write):
    write("serving", STRESS | NO_WINDOWS)
    _, cells = table_lines(report_serving.section())
    assert cells[2:5] == ["no drafts", "", ""]
    (line,) = report_serving.readme_lines()
    assert "`dvr` (no drafts): each token" in line


@pytest.mark.parametrize(
    ("counted", "says"),
    [
        ({"num_steps": 7}, "`dvr`, no drafts"),
        ({"verify_launches": 0}, "`dvr`, no drafts"),
        ({}, "`dvr`, drafts not recorded"),
        ({"verify_launches": 1, "acceptance": 0.5, "num_rollbacks": 3}, "`dvr`, drafts"),
    ],
)
def test_a_load_in_dvr_says_whether_it_drafted(write, counted, says):
    write("serving", offline("dvr", 90.0, **counted), offline("fast", 100.0))
    assert table_lines(report_serving.section())[1][0] == says


def test_windows_of_rows_that_verified_none_are_refused(write):
    row = served("windows", "dvr", 10.0, window=16, group=4, draft_weights="full", num_steps=5)
    del row["mode"]
    write("serving", row)
    with pytest.raises(ValueError, match=r"subject='windows'.*window=16, group=4.*: no drafts"):
        report_serving.section()
    write("serving", row | {"verify_launches": 2, "acceptance": 1.0})
    assert table_lines(report_serving.section())[-1] == ["16", "10 / 1.000 / 0"]


@pytest.mark.parametrize(
    ("row", "is_refused"),
    [
        ({"mode": "dvr", "windows": 0, "rollbacks": 0}, True),
        ({"mode": "dvr"}, True),
        ({"mode": "dvr", "windows": 3, "rollbacks": 0}, False),
        ({"mode": "invariant", "windows": 0}, False),
    ],
)
@pytest.mark.parametrize("case", [{}, {"case": "11, one deterministic, dvr"}])
def test_a_finding_about_dvr_needs_windows_or_the_words(row, is_refused, case):
    name = case.get("case", row["mode"])
    bare, honest = f"{name}: 1.04", f"{name} (no drafts, drafts not recorded): 1.04"
    assert report.told_finding("throughput", honest, [row | case]) == honest
    if is_refused:
        with pytest.raises(ValueError, match=r"row subject='throughput', mode='dvr'.*1\.04"):
            report.told_finding("throughput", bare, [row | case])
    else:
        assert report.told_finding("throughput", bare, [row | case]) == bare


def test_a_finding_about_no_case_answers_for_every_row_of_dvr():
    found = [{"mode": "dvr", "case": "a", "windows": 0}]
    with pytest.raises(ValueError, match="no drafts"):
        report.told_finding("x", "with dvr nothing is slower", found)
    assert report.told_finding("x", "nothing is slower", found)


@pytest.mark.parametrize("module", [throughput, completions])
def test_committed_findings_are_those_of_their_rows(module):
    name = module.__name__.rpartition(".")[2]
    files = list((ROOT / "benchmarks" / "results").glob(f"*/reproduce/{name}.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        assert found["findings"] == module.findings(found["rows"]), file


def test_latencies_of_the_server_stand_beside_the_papers(write):
    assert report_server.latency_experiment() is None
    row = served("serve_load", "dvr", 50.0, requests=9, canonical=3, wrong=0, num_rollbacks=0)
    loads = [row | {"rate_per_s": rate, "deterministic_percent": share, "requests": int(rate)}
             for rate in (2.0, 4.0) for share in (100.0, 0.0)]  # fmt: skip
    write("serve_load", *loads)
    told = report_server.latency_experiment()
    assert told is not None
    (sentence,) = told.here
    assert "4 requests a second, 0 and 100 % deterministic (dvr, no drafts): P99" in sentence
    assert sentence.endswith("0 of 12 canonical answers differ in a bit")
    assert "2 and 4 requests at 2 and 4 a second" in told.setting
    write("serve_load", *(load | {"num_rollbacks": 1} for load in loads))
    told = report_server.latency_experiment()
    assert told is not None and "(dvr, drafts)" in told.here[0]


def test_committed_findings_of_pieces_are_those_of_their_rows():
    for file in (ROOT / "benchmarks" / "results").glob("*/reproduce/*.json"):
        found, experiment = json.loads(file.read_text()), EXPERIMENTS[file.stem]
        if isinstance(experiment, Experiment) and all("part" in row for row in found["rows"]):
            result = experiment.result(found["rows"], found["setting"])
            assert found["findings"] == list(result.findings), file
            for name in ("question", "paper"):
                assert found[name] == getattr(experiment, name), file
            assert not any(row.get("wrong") for row in found["rows"])


def test_an_experiment_names_its_drafts():
    row = {"mode": "dvr", "case": "11, dvr", "deterministic": 1, "of_11_fast": 0.9}
    assert throughput.findings([row | {"windows": 0}]) == [
        "11, dvr (no drafts): 0.90 of 11 fast ones"
    ]
    assert throughput.findings([row | {"windows": 2}]) == ["11, dvr: 0.90 of 11 fast ones"]
    assert "(drafts not recorded)" in throughput.findings([row])[0]


# ----------------------------------------------------------------------- GPUs, rivals, production


def step_row(batch, ms, *, context=1024, impl="invariant", **fields):
    row = {"subject": "step", "impl": impl, "model": "llama3_8b", "floor_ms": 3.0,
           "floor_over_measured": 0.75}  # fmt: skip
    case = f"decode batch {batch} context {context}"
    return row | {"case": case, "batch": batch, "ms_p50": ms} | fields


LINEAR = {"subject": "linear", "shape": "o", "m": 8, "us": 10.0, "ratio": 1.1}


def test_without_rows_of_an_h100_the_section_says_so(write):
    write("kernels", LINEAR)
    write("step", step_row(8, 4.0))
    text = "\n".join(report.benchmarks_section())
    assert "One NVIDIA H200, jax" in text and "share of the limit" in text
    assert "There are no rows of kernels or steps of an H100." in text


def test_steps_of_an_h100_stand_under_its_name(write):
    write("kernels", LINEAR)
    write("step", step_row(8, 4.0), step_row(8, 5.0, impl="fast"))
    write("step", step_row(8, 6.0), step_row(8, 9.0, impl="fast"), gpu="h100")
    write("serving", offline("invariant", 70.0), gpu="h100")
    section = report.benchmarks_section()
    at = section.index("**H100.** One NVIDIA H100, jax 0.11.2, Llama-3.1-8B shapes, random data, "
                       "bfloat16.")  # fmt: skip
    assert "No rows of" not in "\n".join(section)
    header, cells = table_lines(section[at:])
    # The limit is of the H200, so the share of it means nothing here.
    assert header == ["step, ms", "invariant", "fast", "invariant over fast, speed"]
    assert cells == ["decode batch 8 context 1024", "6.00", "9.00", "1.50"]
    assert "70 generated tokens a second" in "\n".join(section[at:])
    assert "4.00" in "\n".join(section[:at]) and "6.00" not in "\n".join(section[:at])
    loads = report_serving.section()
    assert loads[0].startswith("NVIDIA H100, jax 0.11.2")


def test_a_row_in_the_folder_of_another_gpu_is_refused(write):
    write("step", step_row(8, 4.0) | {"gpu": "NVIDIA H100 80GB HBM3"}, gpu="h200")
    with pytest.raises(ValueError, match=r"case='decode batch 8.* is of NVIDIA H100 .*, not h200"):
        report.step_times()


def test_the_later_row_of_a_step_counts(write):
    write("step", step_row(8, 9.0), step_row(8, 4.0), step_row(8, 5.0, impl="fast"))
    assert table_lines(report.step_table())[1][1] == "4.00"


def test_a_step_of_an_unknown_name_is_refused(write):
    write("step", step_row(8, 4.0) | {"case": "decode 8"})
    with pytest.raises(ValueError, match=r"case='decode 8': no step is called"):
        report.step_times()


def test_kernels_of_each_gpu_stand_under_its_name(write):
    decode = {"subject": "attention", "case": "decode", "batch": 1, "tokens": 8, "us": 2.5}
    for gpu, us in (("h200", 10.0), ("h100", 12.0)):
        write("kernels", LINEAR | {"us": us}, decode | {"share": 0.5}, gpu=gpu)
    text = "\n".join(report.kernels_section())
    ours, other = text.split("One NVIDIA H100, jax 0.11.2")
    assert "One NVIDIA H200, jax" in ours and "10.0, 1.10" in ours
    assert "8 tokens: 2.5 us, 0.50 of 4.3 TB/s." in ours
    assert "12.0, 1.10" in other and "8 tokens: 2.5 us." in other


@pytest.mark.parametrize(
    ("machines", "taken"), [(("cpu", "h100", "h200"), "h200"), (("cpu", "h100"), "h100"),
                            (("cpu",), "cpu")],
)  # fmt: skip
def test_an_experiment_is_taken_from_the_first_gpu_that_has_it(write, machines, taken):
    for machine in machines:
        folder = report_rows.RESULTS / machine / "reproduce"
        folder.mkdir(parents=True)
        (folder / "accuracy.json").write_text("{}")
    assert report.experiments()["accuracy"].parts[-3] == taken


@pytest.mark.parametrize(
    ("with_pieces", "taken"), [("h100", "h100"), ("h200", "h200"), ("cpu", "h200")]
)
def test_a_result_in_pieces_goes_before_an_older_one_of_another_gpu(write, with_pieces, taken):
    for machine in ("cpu", "h100", "h200"):
        folder = report_rows.RESULTS / machine / "reproduce"
        folder.mkdir(parents=True)
        row = {"part": "a"} if machine == with_pieces else {}
        (folder / "shares.json").write_text(json.dumps({"rows": [row]}))
    assert report.experiments()["shares"].parts[-3] == taken


def test_production_adds_up_the_parts_of_a_cache_and_keeps_the_control_apart(write):
    row = {
        "subject": "production", "free_bytes": 64e9, "cache_bytes": 55e9, "num_pages": 3300,
        "mode": "invariant", "longest_prompt": 900, "most_rows": 8, "programs": 6, "windows": 0,
    }  # fmt: skip
    parts = (
        row | {"case": "b", "max_len": 4352, "compared_tokens": 1200, "different": 3},
        row | {"case": "loop", "max_len": 1280, "compared_tokens": 800, "different": 0},
        row | {"case": "control", "max_len": 1280, "mode": "fast", "compared_tokens": 50,
               "different": 49},
    )  # fmt: skip
    assert report_production.lines() == []
    for gpu in ("h100", "h200"):
        write("production", *parts, gpu=gpu)
    text = "\n".join(report_production.lines())
    assert (
        text.count("3 of 2,000 tokens and logprobs different. The control, `fast`: 49 of 50.") == 2
    )
    assert text.index("NVIDIA H200") < text.index("NVIDIA H100")
    assert text.count("a cache of 55.0 of the 64.0 GB") == 2
    own = [
        ["1,280", "`invariant`, 8 tokens a launch", "55.0 GB", "900", "8", "6", "", "800", "0"],
        ["4,352", "`invariant`", "55.0 GB", "900", "8", "6", "", "1,200", "3"],
    ]
    assert [c for c in table_lines(report_production.lines()) if c[0] != "`max_len`"] == own * 2


def test_the_engine_over_the_bare_step(write):
    sizes = {"subject": "engine_step", "model": "llama3_8b", "batch": 2, "context": 5}
    times = {"bare_ms": 4.0, "ratio": 1.25}
    write(
        "serving",
        sizes | times | {"mode": "invariant", "engine_ms": 5.0},
        sizes | times | {"mode": "fast", "engine_ms": 6.0},
    )
    _, ours, _ = table_lines(report_serving.section())
    assert ours[0] == "Llama-3.1-8B shapes with random weights, batch 2, context 5"
    assert ours[1:] == ["`invariant`", "5.00", "4.00", "1.25", "1.20"]


def step(impl, ms, case="decode batch 8", subject="mesh_step"):
    row = {"subject": subject, "case": case, "impl": impl, "ms_p50": ms}
    return row | {"launches": 7, "communication_ms": 0.5}


def test_steps_on_meshes_over_fast_and_over_one_gpu(write):
    write(
        "mesh",
        step("invariant (1,1)", 8.0),
        step("invariant (1,2)", 4.0),
        step("invariant (1,2), no exchange kernel", 5.0),
        step("fast (1,2)", 6.0),
        step("invariant (1,4)", 2.5),
        {"subject": "mesh_step", "case": "decode batch 8", "impl": "fast (1,4)", "failed": "x"},
        step("invariant (1,2)", 9.0, subject="mesh_large"),
    )
    found = [cells[1:7] for cells in table_lines(report_mesh.section())[1:]]
    assert found == [
        ["1", "8.00", "", "", "", ""],
        ["2", "4.00", "6.00", "1.50", "2.00", "0.50"],
        ["2, no exchange kernel", "5.00", "", "1.20", "1.60", "0.50"],
        ["4", "2.50", "", "", "3.20", "0.50"],
    ]
    assert "- decode, batch 8, tp 2: 9.00 ms a step." in report_mesh.section()
    assert set(report_mesh.decode_lines()) == {
        (1, "invariant"), (2, "invariant"), (2, "fast"), (4, "invariant"),
    }  # fmt: skip
    (line,) = report_mesh.readme_lines()
    assert "batch 8 take 4.00 ms" in line and "psum 6.00 ms: 1.50 times" in line


def test_a_large_model_over_fast(write):
    large = functools.partial(step, subject="mesh_large")
    write("mesh", large("invariant (1,2)", 9.0), large("fast (1,2)", 18.0))
    line = "- decode, batch 8, tp 2: 9.00 ms a step, `fast` 18.00 ms: 2.00."
    assert line in report_mesh.section()


def test_bits_of_a_large_model_are_told_apart_from_those_of_meshes(write):
    same = dict.fromkeys(report_mesh.BITS, 0)
    bits = {"subject": "mesh_large_bits", "case": "batch 8, 1 tokens at 9"}
    apart = "invariant (1,2), sums and choice apart"
    write(
        "mesh",
        bits | same | {"impl": apart},
        bits | same | {"impl": "invariant (1,2)", "tokens": 6},
        {"subject": "mesh_large_bits", "case": "rows in other batches", "same": True},
        step("invariant (1,2)", 9.0, subject="mesh_large"),
    )
    text = "\n".join(report_mesh.section())
    assert "6 bytes differ (batch 8, 1 token at 9)" in text
    assert "batches of other sizes: the same bits" in text
    assert "Whole steps on" not in text


def test_bits_that_differ_between_meshes_are_told(write):
    same = dict.fromkeys(report_mesh.BITS, 0)
    bits = {"subject": "mesh_step_bits", "case": "batch 2, 1 tokens at 9"}
    sums = {"subject": "mesh_bits", "impl": "exchange kernel"}
    write(
        "mesh",
        bits | same | {"impl": "invariant (1,1)"},
        bits | same | {"impl": "invariant (1,2)", "logprobs": 3, "tokens": 2},
        {"subject": "mesh_step_bits", "case": "rows in other batches", "same": False},
        sums | {"case": "1 rows of 4096, tp 2", "num_rows": 1, "different": 0},
        sums | {"case": "8 rows of 4096, tp 2", "num_rows": 8, "different": 4},
    )
    text = "\n".join(report_mesh.section())
    assert text.count("Whole steps on") == 1
    assert "(dp, tp) = (1,2) against (1,1)" in text
    assert "5 bytes differ (batch 2, 1 token at 9)" in text
    assert "batches of other sizes: other bits" in text
    assert "at tp 2: 4 elements differ (1 and 8 rows)" in text


def test_the_sum_of_the_ranks_over_psum(write):
    row = {"subject": "mesh_sum", "case": "8 rows of 4096, tp 2", "num_rows": 8}
    times = {"psum bfloat16": 10.0, "butterfly": 20.0, "exchange kernel": 12.5, "odd": 7.0}
    write("mesh", *(row | {"impl": name, "us_p50": us} for name, us in times.items()))
    header, cells = table_lines(report_mesh.section())
    assert header[2:6] == ["exchange kernel", "butterfly", "psum bfloat16", "odd"]
    assert cells == ["2", "8", "12.5", "20.0", "10.0", "7.00", "1.25"]


def test_the_cost_of_a_tree_over_ranks_stands_beside_the_papers(write):
    assert report_mesh.sum_experiment() is None
    of_sum = {"subject": "mesh_sum", "case": "8 rows of 4096, tp 2", "num_rows": 8, "gpu": "H200"}
    times = {"psum bfloat16": 10.0, "exchange kernel": 6.0}
    bits = {"subject": "mesh_bits", "impl": "exchange kernel", "case": "8 rows of 4096, tp 2"}
    write(
        "mesh",
        *(of_sum | {"impl": name, "us_p50": us} for name, us in times.items()),
        bits | {"num_rows": 8, "different": 3, "gpu": "H200"},
        step("invariant (1,2)", 4.0),
        step("fast (1,2)", 5.0),
    )
    told = report_mesh.sum_experiment()
    assert told is not None
    sums, steps, bits = told.here
    assert sums.startswith("tp 2: the sum with residual and norm takes 0.60 of")
    assert steps.startswith("a decode step on tp 2 takes 0.80 of the time")
    assert bits == "3 elements differ between the forms of the sum"


@pytest.mark.parametrize("command", ["answers", "mesh"])
def test_whole_answers_from_either_file(write, command):
    row = {
        "subject": "answers", "model": "qwen3_8b", "mode": "fast", "requests": 60, "settings": 9,
        "unique_outputs_mean": 2.5, "unique_with_logprobs_max": 9, "max_prob_divergence": 0.25,
    }  # fmt: skip
    write(command, row)
    (line,) = [line for line in report_mesh.section() if "Whole answers" in line]
    assert "Qwen3-8B shapes with random weights, `fast`: 60 requests on 9 settings" in line
    assert "2.50 different outputs each; with logprobs 9 at most" in line


def test_digests_tell_of_whole_answers_where_nothing_else_does(write):
    row = {"subject": "answers_of", "model": "qwen3_8b", "batch": 8}
    digests = [("invariant", "1x1", "a"), ("invariant", "1x2", "a"), ("fast", "1x1", "b"),
               ("fast", "1x2", "c")]  # fmt: skip
    write("mesh", *(row | {"mode": m, "mesh": where, "digest": d} for m, where, d in digests))
    first, second = [line for line in report_mesh.section() if "Whole answers" in line]
    assert "`invariant`" in first and "(1x1, 8), (1x2, 8): 1 different set of bits" in first
    assert "`fast`" in second and second.endswith(": 2 different sets of bits.")


def test_no_committed_row_says_where_a_model_lies():
    files = list((ROOT / "benchmarks" / "results").rglob("*.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    names = {row["model"] for row in found if "model" in row}
    assert names
    assert not [name for name in names if "/" in name]


def test_a_new_row_names_the_folder_of_its_model(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serving", "offline", "--model", str(bundled_model_path())])
    bench = serving.Bench(serving.parse_args())
    bench.rows.keep(subject="offline")
    assert bench.rows.rows[0]["model"] == bundled_model_path().name


@pytest.mark.parametrize(
    "name", ["README.md", "docs/serving.md", "docs/parallel.md", "docs/training.md"]
)
def test_figures_that_a_document_shows_are_there(name):
    document = ROOT / name
    figures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", document.read_text())
    assert figures
    for figure in figures:
        assert (document.parent / figure).exists(), figure


def test_training_tells_the_largest_gap_of_each_rollout(write):
    folder = report_rows.RESULTS / "h200"
    (folder / "grpo").mkdir(parents=True)
    run = {
        "model": "bundled", "rollout_tp": 4, "steps": 30, "reward_first": 0.5, "reward_last": 0.75,
        "accuracy_before": 0.6, "accuracy_after": 0.7, "num_tokens": 1000,
    }  # fmt: skip
    runs = [
        run | {"rollout": rollout, "seed": seed, "largest_kl": kl * seed, "num_different": int(kl)}
        for rollout, kl in (("invariant", 0.0), ("fast", 2.0))
        for seed in (1, 3)
    ]
    runs[1]["reward_last"] = 0.85
    (folder / "grpo" / "runs.json").write_text(json.dumps(runs))
    _, invariant, fast = table_lines(report_training.section())
    assert invariant[2] == "0.800 (0.750 to 0.850)"
    assert invariant[-2:] == ["0", "0 of 2,000"]
    assert fast[-2:] == ["6", "4 of 2,000"]


def test_a_step_under_another_max_len(write):
    row = {"subject": "max_len", "model": "llama3_8b", "batch": 8, "context": 1030}
    write(
        "serving",
        row | {"max_len": 131072, "ms_p50": 5.05, "ratio_to_shortest": 1.01},
        row | {"max_len": 1280, "ms_p50": 5.0, "ratio_to_shortest": 1.0},
    )
    head, line = table_lines(report_serving.section())
    assert head == ["decode step", "`max_len` 1,280", "`max_len` 131,072"]
    name = "Llama-3.1-8B shapes with random weights, batch 8, context 1030"
    assert line == [name, "5.00, 1.000", "5.05, 1.010"]


def test_a_load_over_http_is_told_with_its_drafts(write):
    load = {"subject": "serve_load", "mode": "dvr", "model": "llama3_8b", "max_len": 2048,
            "deterministic_percent": 50.0, "requests": 8, "canonical": 4, "wrong": 0, "plain": 4,
            "plain_different": 3, "lost": 0, "held": 0, "num_rollbacks": 0,
            "max_draft_fraction": None, "output_tokens_per_s": 100.0, **TIMES, **CARD}  # fmt: skip
    write("serve_load", load | {"rate_per_s": 4.0}, load | {"rate_per_s": 2.0})
    text = "\n".join(report_server.section())
    assert "(no drafts)" in text and "Of 8 canonical answers 0 differ" in text
    assert text.index("| 2 |") < text.index("| 4 |")
    write("serve_load", load | {"rate_per_s": 4.0, "num_rollbacks": 2})
    assert "(no drafts)" not in "\n".join(report_server.section())


def test_a_cost_of_other_bits_is_not_told(write):
    write("serve_cost", {"subject": "serve_cost", "same": False, **CARD})
    with pytest.raises(ValueError, match="other bits"):
        report_server.section()


def test_experts_of_other_bits_are_not_told(write):
    step = {"subject": "step", "impl": "invariant", "case": "decode batch 8 context 1024",
            "ms_p50": 8.0, "floor_over_measured": 0.75, **CARD}  # fmt: skip
    bits = {"subject": "step_bits", "case": step["case"], "same": True, **CARD}
    write("step_experts", bits, step, step | {"impl": "fast", "ms_p50": 48.0})
    assert (
        "| decode batch 8 context 1024 | 8.00 |  | 48.00 | 6.0 | 0.75 |" in report_experts.lines()
    )
    write("step_experts", bits | {"same": False}, step)
    with pytest.raises(ValueError, match="other bits"):
        report_experts.lines()


def peer(engine, scale, **fields):
    row = {"subject": "engine", "engine": engine, "version": "9", "date": "2026-02-03",
           "gpu": "NVIDIA H200", "prefill_4000_ms": 90 * scale,
           "decode_ms": {b: int(b) * scale for b in ("1", "8", "64", "256")},
           "offline_512x512_128_s": 9 * scale}  # fmt: skip
    return row | fields


def test_whole_engines_stand_beside_each_other_by_one_run(write):
    rows = [peer(name, i + 1) for i, name in enumerate(report_peers.SHORT)]
    write("peers", *rows, peer("vLLM fp8 (online)", 9), date="2026-02-03")
    first, *_ = report_peers.readme_lines()
    assert "NVIDIA H200" in first and "3 February 2026" in first and "commit 9:" in first
    header, *cells = table_lines(report_peers.readme_lines())
    assert header == ["|  | detjax".strip("| "), "vLLM 9", "vLLM 9, batch-invariant"]
    assert cells[1] == ["decode, batch 8, ms", "8.00", "16.00", "24.00"]
    assert cells[-1] == ["512 requests of 512 + 128 tokens, s", "9.0", "18.0", "27.0"]
    # Eight bits are other weights: the page has them, README does not.
    assert "fp8" in "".join(report_peers.lines())
    assert "fp8" not in "".join(report_peers.readme_lines())


def test_a_run_without_ours_is_no_table_of_readme(write):
    write("peers", peer("vLLM default bfloat16", 1))
    assert report_peers.readme_lines() == []


def test_answers_that_change_are_counted_over_all_settings():
    row = {"dtype": "bfloat16", "problems": 3}
    found = [
        row | {"mode": mode, "answers": answers}
        for mode, answers in (
            ("fast", "aaaabbbbcccc"), ("fast", "aaaaBBBBcccc"), ("fast", "aaaabbbbCCCC"),
            ("invariant", "aaaabbbbcccc"), ("invariant", "aaaabbbbcccc"),
        )
    ]  # fmt: skip
    assert report._changed_answers(found)[1:] == ["2", "0"]


def test_readme_is_short_and_names_the_hardware_first():
    text = re.sub(r"\]\([^)]*\)", "]", (report.ROOT / "README.md").read_text())
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 800
    assert "Hopper" in text.split("##")[0]
