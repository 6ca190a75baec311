# SPDX-License-Identifier: Apache-2.0
"""The sections that `benchmarks.report` writes say what the rows say."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import serving as serving_benchmark
from benchmarks.report import figures, findings, mesh, quality, rows, serving, steps, verification
from benchmarks.report.__main__ import updated, wrapped
from benchmarks.reproduce import completions, throughput
from benchmarks.reproduce.__main__ import EXPERIMENTS
from benchmarks.reproduce.experiment import Experiment
from detjax.models.bundled import bundled_model_path
from detjax.plots import COLOURS

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
    monkeypatch.setattr(rows, "RESULTS", tmp_path)

    def write(command, *found, date="2026-01-02", gpu="h200"):
        (tmp_path / gpu).mkdir(exist_ok=True)
        card = CARD | {"gpu": f"NVIDIA {gpu.upper()}"}
        lines = [json.dumps(card | row) + "\n" for row in found]
        (tmp_path / gpu / f"{date}-{command}.jsonl").write_text("".join(lines))

    return write


def served(subject, mode, speed, **fields):
    """A row of requests that were answered at `speed` tokens a second."""
    given = {"subject": subject, "mode": mode, "model": "m", "output_tokens_per_s": speed}
    return given | TIMES | fields


def offline(mode, speed, **fields):
    lengths = {"requests": 4, "prompt_len": 8, "output_len": 16}
    return served("offline", mode, speed, **lengths, **fields)


def tables(section):
    """For each table its lines, by header."""
    found, header = [], None
    for line in section:
        cells = line.strip("|").split("|") if line.startswith("|") else None
        cells = cells and [one.strip() for one in cells]
        if cells is None:
            header = None
        elif header is None:
            header = cells
            found.append([])
        elif cells[0] != "---":
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


# --------------------------------------------------------------------------------- parts and text


def test_nothing_is_written_without_rows(write):
    for section in (serving.engine, serving.server, mesh.section, steps.benchmarks, steps.kernels,
                    steps.speed, findings.training):  # fmt: skip
        assert section() == []
    assert mesh.sum_experiment() is None


def test_a_part_appears_only_with_its_rows(write):
    write("serving", offline("fast", 100.0))
    text = "\n".join(serving.engine())
    assert "All at once" in text
    for absent in ("trace", "share", "Window", "8-bit", "under load", "engine adds", "figures/"):
        assert absent not in text


def test_a_column_without_a_value_is_left_out():
    found = rows.table(["a", "b", "c"], [["1", "", "x"], ["2", "", ""]])
    assert found == ["| a | c |", "| --- | --- |", "| 1 | x |", "| 2 |  |"]
    assert rows.table(["a"], []) == []


def test_long_lines_are_wrapped_and_no_line_becomes_a_list():
    prose = "- " + "some words " * 20 + "512 + 128 tokens " * 10
    lines = wrapped(prose)
    assert len(lines) > 1 and all(len(line) <= 140 for line in lines)
    assert " ".join(line.strip() for line in lines) == prose.strip()
    assert not any(re.match(r"\s*([-+*]|\d+\.) ", line) for line in lines[1:])
    for whole in ("| a | b |" * 40, "## " + "word " * 60, "![" + "word " * 60):
        assert wrapped(whole) == [whole]


def test_links_are_written_for_the_folder_of_the_document():
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb"
    section = ["[p](docs/p.md#q) [r](benchmarks/r.png) [s](https://s) [t](#t)"]
    new = updated(text, "x", section, "docs")
    assert "[p](p.md#q) [r](../benchmarks/r.png) [s](https://s) [t](#t)" in new
    assert new.startswith("a\n") and new.endswith("\nb") and "old" not in new
    assert "[p](docs/p.md#q)" in updated(text, "x", section, "")


def test_every_figure_is_drawn_from_the_committed_rows(tmp_path):
    figures.draw_all(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step.svg", "experts.svg", "linear.svg", "mesh.svg", "serving.svg"}
    for name in names:
        drawn, committed = (
            re.findall(r">([^<>]+)</text>", (folder / name).read_text())
            for folder in (tmp_path, ROOT / "docs" / "figures")
        )
        assert drawn == committed and len(drawn) > 10


def test_a_mode_has_one_colour():
    for source in (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "detjax").rglob("*.py"),
                   *(ROOT / "notebooks").glob("*.ipynb")):  # fmt: skip
        if source.name != "plots.py":
            text = source.read_text()
            for colour in COLOURS.values():
                assert colour not in text, f"{source} names {colour}; take it from detjax.plots"


# -------------------------------------------------------------------------------------- serving


def test_the_newest_file_and_in_it_the_later_row_counts(write):
    write("serving", offline("invariant", 700.0), offline("fast", 100.0), date="2026-01-01")
    write("serving", offline("invariant", 50.0), offline("fast", 100.0), offline("invariant", 80.0))
    section = serving.engine()
    (found,) = tables(section)
    assert [(r["mode"], r["generated tokens/s"], r["over `fast`"]) for r in found] == [
        ("`invariant`", "80", "0.80"), ("`fast`", "100", "1.00"),
    ]  # fmt: skip
    assert "4 requests of 8 + 16 tokens" in "\n".join(section)


def test_a_load_that_is_decoded_with_patience_says_so_and_stands_apart(write):
    write(
        "serving",
        offline("invariant", 100.0, max_prefill_streak=64),
        offline("fast", 50.0, max_prefill_streak=64),
        offline("invariant", 80.0, max_prefill_streak=0),
    )
    section = serving.engine()
    notes = [line for line in section if "All at once" in line]
    assert [("`max_prefill_streak` 64" in note) for note in notes] == [False, True]
    plain, patient = tables(section)
    assert plain[0]["generated tokens/s"] == "80" and "over `fast`" not in plain[0]
    assert patient[0]["generated tokens/s"] == "100" and patient[0]["over `fast`"] == "2.00"


def test_quantiles_of_a_trace_by_rate(write):
    write(
        "serving",
        served("replay", "invariant", 50.0, rate_per_s=2.0, requests=9),
        served("replay", "invariant", 90.0, rate_per_s=0.0, requests=9),
        served("replay", "fast", 100.0, rate_per_s=2.0, requests=9),
    )
    (found,) = tables(serving.engine())
    # `fast` was not measured with all at once, so there is no ratio.
    assert [(r["a second"], r["mode"], r["over `fast`"]) for r in found] == [
        ("at once", "`invariant`", ""), ("2", "`invariant`", "0.50"), ("2", "`fast`", "1.00"),
    ]  # fmt: skip
    assert [found[0][f"{name}, ms"] for name in ("first token", "a token", "end to end")] == [
        "50.0 / 90.0 / 99.0", "1,050 / 1,090 / 1,099", "2,050 / 2,090 / 2,099",
    ]  # fmt: skip


def test_shares_with_and_without_drafts_are_each_over_the_fast_row_of_their_run(write):
    drafts = {"verify_launches": 3, "acceptance": 0.9375, "num_rollbacks": 7}
    write(
        "serving",
        served("shares", "dvr", 50.0, deterministic_percent=10.0, num_steps=9),
        served("shares", "fast", 100.0, deterministic_percent=0.0),
        served("shares", "dvr", 60.0, deterministic_percent=10.0, **drafts),
        served("shares", "fast", 200.0, deterministic_percent=0.0),
    )
    (found,) = tables(serving.engine())
    names = ("deterministic, %", "mode", "generated tokens/s", "over `fast`", "drafts accepted",
             "rollbacks")  # fmt: skip
    assert [[row[name] for name in names] for row in found] == [
        ["0", "`fast`", "200", "1.00", "", ""],
        ["10", "`dvr`, drafts", "60", "0.30", "0.938", "7"],
        ["10", "`dvr`, no drafts", "50", "0.50", "", ""],
    ]


def test_windows_by_group(write):
    row = {"draft_weights": "int8", "verify_launches": 1, "acceptance": 0.5, "num_rollbacks": 2}
    cases = ((16, 4, 30.0), (8, 1, 10.0), (8, 4, 20.0))
    write("serving", *(served("windows", "dvr", s, window=w, group=g, **row) for w, g, s in cases))
    (found,) = tables(serving.engine())
    assert [list(row.values()) for row in found] == [
        ["8", "1", "10", "0.500", "2"], ["8", "4", "20", "0.500", "2"],
        ["16", "4", "30", "0.500", "2"],
    ]  # fmt: skip


def test_narrow_names_the_drafts_and_the_folder_alone(write):
    write(
        "serving",
        served("narrow", "fast", 100.0, model="/a/b/small", batch=1, window=0),
        served(
            "narrow", "dvr", 90.0, model="/a/b/small", batch=1, window=8, verify_launches=2,
            draft_weights="int8", decode_steps=7,
        ),
    )  # fmt: skip
    section = serving.engine()
    assert "`small`" in "\n".join(section) and "/a" not in "\n".join(section)
    (found,) = tables(section)
    assert [list(row.values())[:6] for row in found] == [
        ["1", "`fast`", "", "1", "100", "1.00"],
        ["1", "`dvr`, int8 drafts", "8", "7", "90", "0.90"],
    ]


STRESS = {
    "subject": "stress", "model": "bundled", "mode": "dvr", "requests": 1000, "cancelled": 5,
    "num_pages": 9, "preempted": 6, "samples": 1200, "plain": 200, "plain_different": 9, "wrong": 0,
    "lost": 1, "draft_weights": "int8",
}  # fmt: skip


@pytest.mark.parametrize("wrong", [0, 3])
def test_different_answers_under_load_are_told(write, wrong):
    write("serving", STRESS | {"wrong": wrong, "acceptance": 0.5, "rollbacks": 4})
    ((row,),) = tables(serving.engine())
    assert (row["drafts"], row["drafts accepted"], row["rollbacks"]) == ("int8", "0.500", "4")
    assert row["deterministic samples different"] == f"{wrong + 1} of 1,000"
    assert row["plain ones different"] == "9 of 200"


def test_the_engine_over_the_bare_step(write):
    sizes = {"subject": "engine_step", "model": "llama3_8b", "batch": 2, "context": 5}
    times = {"bare_ms": 4.0, "ratio": 1.25}
    write(
        "serving",
        sizes | times | {"mode": "invariant", "engine_ms": 5.0},
        sizes | times | {"mode": "fast", "engine_ms": 6.0},
    )
    ((ours, _),) = tables(serving.engine())
    assert list(ours.values()) == [
        "Llama-3.1-8B shapes with random weights, batch 2, context 5", "`invariant`", "5.00",
        "4.00", "1.25", "1.20",
    ]  # fmt: skip


def test_a_step_under_another_max_len(write):
    row = {"subject": "max_len", "model": "llama3_8b", "batch": 8, "context": 1030}
    write(
        "serving",
        row | {"max_len": 131072, "ms_p50": 5.05, "ratio_to_shortest": 1.01},
        row | {"max_len": 1280, "ms_p50": 5.0, "ratio_to_shortest": 1.0},
    )
    (found,) = tables(serving.engine())
    assert [list(line.values())[1:] for line in found] == [
        ["1,280", "5.00", "1.000"], ["131,072", "5.05", "1.010"],
    ]  # fmt: skip


def test_a_load_over_http_is_told_with_its_drafts(write):
    load = {"subject": "serve_load", "mode": "dvr", "model": "llama3_8b", "max_len": 2048,
            "deterministic_percent": 50.0, "requests": 8, "canonical": 4, "wrong": 0, "plain": 4,
            "plain_different": 3, "lost": 0, "held": 0, "num_rollbacks": 0,
            "max_draft_fraction": None, "output_tokens_per_s": 100.0, **TIMES}  # fmt: skip
    write("serve_load", load | {"rate_per_s": 4.0}, load | {"rate_per_s": 2.0})
    text = "\n".join(serving.server())
    assert "(no drafts)" in text and "Of 8 canonical answers 0 differ" in text
    assert text.index("| 2 |") < text.index("| 4 |")
    write("serve_load", load | {"rate_per_s": 4.0, "num_rollbacks": 2})
    assert "(no drafts)" not in "\n".join(serving.server())


def test_a_cost_of_other_bits_is_not_told(write):
    write("serve_cost", {"subject": "serve_cost", "same": False})
    with pytest.raises(ValueError, match="other bits"):
        serving.server()


# ------------------------------------------------------------------------- what dvr rows may say


def test_answers_of_dvr_without_windows_are_told_as_such(write):
    write("serving", STRESS | {"acceptance": 0.0, "rollbacks": 0})
    ((row,),) = tables(serving.engine())
    assert row["drafts"] == "no drafts" and "drafts accepted" not in row


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
    assert tables(serving.engine())[0][0]["mode"] == says


def test_windows_of_rows_that_verified_none_are_refused(write):
    row = served("windows", "dvr", 10.0, window=16, group=4, draft_weights="full", num_steps=5)
    del row["mode"]
    write("serving", row)
    with pytest.raises(ValueError, match=r"subject='windows'.*window=16, group=4.*: no drafts"):
        serving.engine()
    write("serving", row | {"verify_launches": 2, "acceptance": 1.0})
    assert tables(serving.engine())[0][0]["drafts accepted"] == "1.000"


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
    told = functools.partial(findings.told_finding, "throughput")
    assert told(honest, [row | case]) == honest
    if is_refused:
        with pytest.raises(ValueError, match=r"row subject='throughput', mode='dvr'.*1\.04"):
            told(bare, [row | case])
    else:
        assert told(bare, [row | case]) == bare


def test_a_finding_about_no_case_answers_for_every_row_of_dvr():
    found = [{"mode": "dvr", "case": "a", "windows": 0}]
    with pytest.raises(ValueError, match="no drafts"):
        findings.told_finding("x", "with dvr nothing is slower", found)
    assert findings.told_finding("x", "nothing is slower", found)


def test_an_experiment_names_its_drafts():
    row = {"mode": "dvr", "case": "11, dvr", "deterministic": 1, "of_11_fast": 0.9}
    for windows, said in (({"windows": 0}, " (no drafts)"), ({"windows": 2}, ""),
                          ({}, " (drafts not recorded)")):  # fmt: skip
        (sentence,) = throughput.findings([row | windows])
        assert sentence == f"11, dvr{said}: 0.90 of 11 fast ones"


# ---------------------------------------------------------------------------- steps and kernels


def step_row(batch, ms, *, context=1024, impl="invariant", **fields):
    row = {"subject": "step", "impl": impl, "model": "llama3_8b", "floor_ms": 3.0,
           "floor_over_measured": 0.75}  # fmt: skip
    case = f"decode batch {batch} context {context}"
    return row | {"case": case, "batch": batch, "ms_p50": ms} | fields


def test_steps_stand_under_their_gpu_with_the_limit_that_is_its_own(write):
    write("step", step_row(8, 4.0), step_row(8, 5.0, impl="fast"))
    copy = {"subject": "copy", "bytes_per_s": 2.15e12}
    write("step", copy, step_row(8, 7.5), step_row(8, 9.0, impl="fast"), gpu="h100")
    section = steps.benchmarks()
    assert section.index("### H200") < section.index("### H100")
    assert "One NVIDIA H100, jax 0.11.2, Llama-3.1-8B shapes" in "\n".join(section)
    (first,), (second,) = tables(section)
    assert first == {
        "step, ms": "decode batch 8 context 1024", "invariant": "4.00", "fast": "5.00",
        "invariant over fast, speed": "1.25", "share of the limit": "0.75",
    }  # fmt: skip
    # An H100's copies move half the bytes of an H200's, so 3.0 ms of those are 6.0.
    assert second["share of the bandwidth of its own copy"] == "0.80"
    assert "share of the limit" not in second


def test_a_row_in_the_folder_of_another_gpu_is_refused(write):
    write("step", step_row(8, 4.0) | {"gpu": "NVIDIA H100 80GB HBM3"}, gpu="h200")
    with pytest.raises(ValueError, match=r"case='decode batch 8.* is of NVIDIA H100 .*, not h200"):
        steps.benchmarks()


def test_steps_are_in_the_order_of_their_sizes(write):
    prefill = step_row(1, 90.0) | {"case": "prefill 4096 tokens"}
    write("step", prefill, step_row(64, 6.0), step_row(8, 4.0), step_row(64, 5.0, context=576))
    (found,) = tables(steps.benchmarks())
    assert [row["step, ms"] for row in found] == [
        "decode batch 8 context 1024", "decode batch 64 context 576",
        "decode batch 64 context 1024", "prefill 4096 tokens",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no step is called 'odd'"):
        rows.step_of({"subject": "step", "case": "odd"})


def test_products_and_other_kernels(write):
    linear = {"subject": "linear", "shape": "o", "m": 8, "us": 10.0, "ratio": 1.1, "fixed_us": 25.0}
    attention = {"subject": "attention", "case": "prefill", "tokens": 8192, "ms": 0.9,
                 "tflops": 600.0, "over_cudnn": 1.02}  # fmt: skip
    decode = {"subject": "attention", "case": "decode", "batch": 4, "tokens": 9, "us": 2.0,
              "share": 0.9}  # fmt: skip
    norm = {"subject": "rows", "case": "add_rms_norm", "m": 8192, "us": 80.0, "share_of_copy": 0.96,
            "xla_us": 100.0}  # fmt: skip
    write("kernels", linear, linear | {"shape": "down", "ratio": 0.9}, attention, decode, norm)
    products, others = tables(steps.benchmarks())
    assert products == [{"rows": "8", "o": "1.10", "down": "0.90"}]
    assert [row["us"] for row in others] == ["900.0", "2.0", "80.0"]
    assert others[2]["rival's time over ours"] == "1.25"
    assert tables(steps.kernels())[0] == [{"M": "8", "o": "10.0, 1.10", "down": "10.0, 0.90"}]
    assert "as in Thinking Machines' product, takes 2.50 to 2.50" in "\n".join(steps.kernels())


def test_steps_of_other_bits_are_not_told(write):
    bits = {"subject": "step_bits", "case": "decode batch 8 context 1024", "same": True}
    write("step_experts", bits, step_row(8, 8.0), step_row(8, 48.0, impl="fast"))
    ((row,),) = tables(steps.benchmarks())
    assert (row["invariant"], row["fast"]) == ("8.00", "48.00")
    assert row["invariant over fast, speed"] == "6.00" and row["share of the limit"] == "0.75"
    write("step_gpt_oss", bits, step_row(8, 4.0))
    assert [row["invariant"] for (row,) in tables(steps.benchmarks())] == ["8.00", "4.00"]
    write("step_experts", bits | {"same": False}, step_row(8, 8.0))
    with pytest.raises(ValueError, match="other bits"):
        steps.benchmarks()


@pytest.mark.parametrize("command", ["moe", "kernels"])
def test_experts_beside_ragged_dot(write, command):
    time = {"subject": "moe", "kind": "time", "tiles": "chosen", "m": 8, "us": 120.0,
            "floor_us": 108.0, "share": 0.9}  # fmt: skip
    rival = {"ragged_dot_us": 340.0} if command == "kernels" else {}
    apart = {"subject": "moe", "kind": "time", "tiles": "ragged_dot", "m": 8, "us": 340.0}
    bits = {"subject": "moe", "kind": "bits", "different": 3}
    write(command, time | rival, *([] if rival else [apart, bits]))
    ((row,),) = tables(steps.benchmarks())
    assert list(row.values()) == ["8", "120.0", "108.0", "0.90", "340"]
    if not rival:
        assert "(1 comparisons of bits, 1 different)" in "\n".join(steps.benchmarks())


def peer(engine, scale, **fields):
    row = {"subject": "engine", "engine": engine, "version": "9", "date": "2026-02-03",
           "prefill_4000_ms": 90 * scale,
           "decode_ms": {b: int(b) * scale for b in ("1", "8", "64", "256")},
           "offline_512x512_128_s": 9 * scale}  # fmt: skip
    return row | fields


def test_whole_engines_stand_beside_each_other_by_one_run(write):
    found = [peer(name, i + 1) for i, name in enumerate(steps.SHORT)]
    write("peers", *found, peer("vLLM fp8 (online)", 9), date="2026-02-03")
    first, *_ = steps.speed()
    assert "NVIDIA H200" in first and "3 February 2026" in first and "commit 9:" in first
    (cells,) = tables(steps.speed())
    assert list(cells[0].values()) == ["decode, batch 1, ms", "1.00", "2.00", "3.00", "4.00"]
    assert list(cells[-1])[1:] == ["detjax", "vLLM 9", "vLLM 9, batch-invariant", "SGLang 9"]
    assert list(cells[-1].values())[1:] == ["9.0", "18.0", "27.0", "36.0"]
    # Eight bits are other weights: the page has them, README does not.
    assert "fp8" in "".join(steps.engines()) and "fp8" not in "".join(steps.speed())
    write("peers", peer("vLLM default bfloat16", 1), date="2026-02-04")
    assert steps.speed() == []


def test_engines_of_two_hosts_name_theirs(write):
    """One engine was measured on both, and each stands beside what ran where it did."""
    a = [
        measured_peer(steps.OURS, 1, host="a"),
        measured_peer("vLLM default bfloat16", 2, host="a"),
    ]
    sglang = measured_peer("SGLang default bfloat16", 4, host="b", without="x, so it was slow")
    b = [measured_peer(steps.OURS, 3, host="b"), sglang]
    write("peers", *a, *b)
    (cells,) = tables(steps.speed())
    assert cells[0] == {
        "": "decode, batch 1, ms", "a: detjax": "1.00", "a: vLLM 9": "2.00", "b: detjax": "3.00",
        "b: SGLang 9": "4.00",
    }  # fmt: skip
    assert "of hosts a and b" in steps.speed()[0]
    text = "\n".join(steps.engines())
    assert "of hosts a and b" in text and "one run" not in text
    assert "enable_deterministic_inference" in text and "W8A8" not in text
    assert "SGLang 9 had no x, so it was slow." in text


def measured_peer(engine, scale, **fields):
    """A row of `benchmarks.peers`."""
    versions = {"jax": "0.11.2"} if "detjax" in engine else {"torch": "2.11.0"}
    return peer(engine, scale, gpus=2, driver="580", commit="abc", versions=versions, **fields)


def test_engines_of_one_command_say_how_they_ran_and_which_failed(write):
    part = measured_peer("vLLM fp8 (online, W8A8)", 4)
    del part["prefill_4000_ms"], part["decode_ms"]
    failed = {"subject": "engine", "gpus": 2}
    error = failed | {"engine": "vLLM fp8 batch-invariant", "error": "stopped after 9 s"}
    retried = failed | {"engine": steps.SHORT[1], "error": "was late"}
    found = [measured_peer(name, i + 1) for i, name in enumerate(steps.SHORT)]
    ours = measured_peer("detjax invariant int8 (W8A8)", 5)
    http = {"subject": "http", "engine": steps.OURS, "date": "2026-01-09", "clients": 8,
            "ttft_p50_ms": 1, "tpot_p50_ms": 2.0, "tokens_per_s": 3}  # fmt: skip
    write("peers", peer(steps.OURS, 7), http, date="2026-01-09")
    write("peers", found[0], retried, *found[1:], part, ours, error, gpu="h100")
    text = "\n".join(steps.engines())
    told = "one run of `python -m benchmarks.peers`, 3 February 2026, engines 2 at a time"
    assert text.count(told) == 1 and "jax 0.11.2, torch 2.11.0" in text
    assert "vLLM, fp8 batch-invariant failed: stopped after 9 s." in text and "late" not in text
    earlier, engines, clients = tables(steps.engines())
    assert list(engines[0])[1:] == [
        "detjax", "vLLM 9", "vLLM 9, batch-invariant", "SGLang 9", "vLLM 9, fp8 (online, W8A8)",
        "detjax, int8 (W8A8)",
    ]  # fmt: skip
    # What was not measured is empty, and a run without clients hides no earlier one.
    found = ["9.0", "18.0", "27.0", "36.0", "36.0", "45.0"]
    assert list(engines[-1].values())[1:] == found
    assert engines[0]["vLLM 9, fp8 (online, W8A8)"] == "" and earlier[0]["detjax"] == "7.00"
    assert clients[0]["server"] == "detjax" and "Over HTTP, 9 January 2026" in text
    # README has the run of one command, whatever the GPU.
    assert "one NVIDIA H100 each of one host, 3 February 2026" in steps.speed()[0]
    write("peers", measured_peer(steps.OURS, 1) | {"gpus": 1}, date="2026-02-04")
    assert "one NVIDIA H200, one after another" in steps.speed()[0]


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
    for gpu in ("h100", "h200"):
        write("production", *parts, gpu=gpu)
    text = "\n".join(steps.benchmarks())
    told = "3 of 2,000 tokens and logprobs different. The control, `fast`: 49 of 50."
    assert text.count(told) == 2 and text.count("a cache of 55.0 of the 64.0 GB") == 2
    assert text.index("NVIDIA H200") < text.index("NVIDIA H100")
    for found in tables(steps.benchmarks()):
        assert [list(line.values()) for line in found] == [
            ["1,280", "`invariant`, 8 tokens a launch", "55.0 GB", "900", "8", "6", "800", "0"],
            ["4,352", "`invariant`", "55.0 GB", "900", "8", "6", "1,200", "3"],
        ]


# --------------------------------------------------------------------------------- several GPUs


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
        step("fast (1,2)", 18.0, subject="mesh_large"),
    )
    found, large = tables(mesh.section())
    assert [list(row.values())[1:7] for row in found] == [
        ["1", "8.00", "", "", "", ""],
        ["2", "4.00", "6.00", "1.50", "2.00", "0.50"],
        ["2, no exchange kernel", "5.00", "", "1.20", "1.60", "0.50"],
        ["4", "2.50", "", "", "3.20", "0.50"],
    ]
    assert [list(row.values()) for row in large] == [
        ["decode, batch 8", "2", "9.00", "18.00", "2.00"]
    ]


def test_bits_that_differ_between_meshes_are_told(write):
    same = dict.fromkeys(mesh.BITS, 0)
    bits = {"subject": "mesh_step_bits", "case": "batch 2, 1 tokens at 9"}
    sums = {"subject": "mesh_bits", "impl": "exchange kernel"}
    large = {"subject": "mesh_large_bits", "case": "batch 8, 1 tokens at 9"}
    write(
        "mesh",
        bits | same | {"impl": "invariant (1,1)"},
        bits | same | {"impl": "invariant (1,2)", "logprobs": 3, "tokens": 2},
        {"subject": "mesh_step_bits", "case": "rows in other batches", "same": False},
        sums | {"case": "1 rows of 4096, tp 2", "num_rows": 1, "different": 0},
        sums | {"case": "8 rows of 4096, tp 2", "num_rows": 8, "different": 4},
        large | same | {"impl": "invariant (1,2), sums and choice apart"},
        large | same | {"impl": "invariant (1,2)", "tokens": 6},
        {"subject": "mesh_large_bits", "case": "rows in other batches", "same": True},
    )
    (found,) = tables(mesh.section())
    assert [(row["cases"], row["different"]) for row in found] == [
        ("batch 2, 1 token at 9", "5 bytes"), ("", "some rows"), ("1 and 8 rows", "4 elements"),
        ("batch 8, 1 token at 9", "6 bytes"), ("", "0 rows"),
    ]  # fmt: skip
    assert "(dp, tp) = (1,2) against (1,1)" in found[0]["compared"]
    assert "Llama-3.1-70B" in found[3]["compared"] and "at tp 2" in found[2]["compared"]


def test_the_sum_of_the_ranks_over_psum(write):
    row = {"subject": "mesh_sum", "case": "8 rows of 4096, tp 2", "num_rows": 8}
    times = {"psum bfloat16": 10.0, "butterfly": 20.0, "exchange kernel": 12.5}
    write("mesh", *(row | {"impl": name, "us_p50": us} for name, us in times.items()))
    ((found,),) = tables(mesh.section())
    assert found == {
        "tp": "2", "rows": "8", "exchange kernel": "12.5", "butterfly": "20.0",
        "psum bfloat16": "10.0", "detjax over psum bfloat16": "1.25",
    }  # fmt: skip


def test_the_cost_of_a_tree_over_ranks_stands_beside_the_papers(write):
    of_sum = {"subject": "mesh_sum", "case": "8 rows of 4096, tp 2", "num_rows": 8}
    times = {"psum bfloat16": 10.0, "exchange kernel": 6.0}
    bits = {"subject": "mesh_bits", "impl": "exchange kernel", "case": "8 rows of 4096, tp 2"}
    write(
        "mesh",
        *(of_sum | {"impl": name, "us_p50": us} for name, us in times.items()),
        bits | {"num_rows": 8, "different": 3},
        step("invariant (1,2)", 4.0),
        step("fast (1,2)", 5.0),
    )
    told = mesh.sum_experiment()
    assert told is not None
    sums, whole, different = told["findings"]
    assert sums.startswith("tp 2: the sum with residual and norm takes 0.60 of")
    assert whole.startswith("a decode step on tp 2 takes 0.80 of the time")
    assert different == "3 elements differ between the forms of the sum"


@pytest.mark.parametrize("command", ["answers", "mesh"])
def test_whole_answers_from_either_file(write, command):
    row = {
        "subject": "answers", "model": "qwen3_8b", "mode": "fast", "requests": 60, "settings": 9,
        "unique_outputs_mean": 2.5, "unique_with_logprobs_max": 9, "max_prob_divergence": 0.25,
    }  # fmt: skip
    write(command, row)
    ((found,),) = tables(mesh.section())
    assert "Qwen3-8B shapes with random weights, `fast`" in found["compared"]
    assert found["cases"] == "60 requests on 9 settings of mesh and batch size"
    assert "2.50 outputs a request, with logprobs 9 at most" in found["different"]


def test_digests_tell_of_whole_answers_where_nothing_else_does(write):
    row = {"subject": "answers_of", "model": "qwen3_8b", "batch": 8}
    digests = [("invariant", "1x1", "a"), ("invariant", "1x2", "a"), ("fast", "1x1", "b"),
               ("fast", "1x2", "c")]  # fmt: skip
    write("mesh", *(row | {"mode": m, "mesh": where, "digest": d} for m, where, d in digests))
    ((first, second),) = tables(mesh.section())
    assert "`invariant`" in first["compared"] and first["different"] == "1 set(s) of bits"
    assert first["cases"].endswith("(1x1, 8), (1x2, 8)")
    assert "`fast`" in second["compared"] and second["different"] == "2 set(s) of bits"


# --------------------------------------------------------------------------- experiments, training


@pytest.mark.parametrize("module", [throughput, completions])
def test_committed_findings_are_those_of_their_rows(module):
    name = module.__name__.rpartition(".")[2]
    files = list((ROOT / "benchmarks" / "results").glob(f"*/reproduce/{name}.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        assert found["findings"] == module.findings(found["rows"]), file


def test_committed_findings_of_pieces_are_those_of_their_rows():
    for file in (ROOT / "benchmarks" / "results").glob("*/reproduce/*.json"):
        found, experiment = json.loads(file.read_text()), EXPERIMENTS[file.stem]
        if isinstance(experiment, Experiment) and all("part" in row for row in found["rows"]):
            result = experiment.result(found["rows"], found["setting"])
            assert found["findings"] == list(result.findings), file
            for name in ("question", "paper"):
                assert found[name] == getattr(experiment, name), file
            assert not any(row.get("wrong") for row in found["rows"])


@pytest.mark.parametrize(
    ("machines", "taken"),
    [(("cpu",), "cpu"), (("cpu", "h100"), "h100"), (("cpu", "h100", "h200"), "h200")],
)
def test_an_experiment_is_told_from_a_gpu_if_there_is_one(write, machines, taken):
    for machine in machines:
        folder = rows.RESULTS / machine / "reproduce"
        folder.mkdir(parents=True)
        (folder / "accuracy.json").write_text("{}")
    assert findings.experiments()["accuracy"].parts[-3] == taken


@pytest.mark.parametrize(
    ("with_pieces", "taken"), [("h100", "h100"), ("h200", "h200"), ("cpu", "h200")]
)
def test_a_result_in_pieces_goes_before_an_older_one_of_another_gpu(write, with_pieces, taken):
    for machine in ("cpu", "h100", "h200"):
        folder = rows.RESULTS / machine / "reproduce"
        folder.mkdir(parents=True)
        row = {"part": "a"} if machine == with_pieces else {}
        (folder / "shares.json").write_text(json.dumps({"rows": [row]}))
    assert findings.experiments()["shares"].parts[-3] == taken


def test_training_tells_the_largest_gap_of_each_rollout(write):
    folder = rows.RESULTS / "h200"
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
    section = findings.training()
    ((invariant, fast),) = tables(section)
    assert "On an H200" in section[0] and "30 steps; mean of 2 seeds" in section[0]
    assert invariant["last 3"] == "0.800 (0.750 to 0.850)"
    assert [*invariant.values()][-2:] == ["0", "0 of 2,000"]
    assert [*fast.values()][-2:] == ["6", "4 of 2,000"]


def test_answers_that_change_are_counted_over_all_settings():
    row = {"dtype": "bfloat16", "problems": 3, "texts_changed": 1}
    found = [
        row | {"mode": mode, "answers": answers}
        for mode, answers in (
            ("fast", "aaaabbbbcccc"), ("fast", "aaaaBBBBcccc"), ("fast", "aaaabbbbCCCC"),
            ("invariant", "aaaabbbbcccc"), ("invariant", "aaaabbbbcccc"),
        )
    ]  # fmt: skip
    assert findings._changed_answers(found)[1:] == ["2; 1", "0; 1"]


# ----------------------------------------------------------------------------------- verification


def produced(case, **fields):
    facts = {"subject": "production", "case": case, "mode": "invariant", "model": "llama3_8b",
             "compared_tokens": 40, "different": 0, "self_check_differences": 0,
             "longest_prompt": 7, "most_rows": 2, "windows": 0, "rollbacks": 0,
             "date": "2026-01-02", "commit": "abc"}  # fmt: skip
    return facts | fields


def of_claim(name):
    (found,) = [row for row in tables(verification.section())[0] if row["claim"] == name]
    return found


def test_a_claim_without_rows_says_that_no_gpu_ran_it(write):
    assert {row["compared on a GPU"] for row in tables(verification.section())[0]} == {
        "not run on a GPU"
    }


def test_a_claim_has_the_rows_of_the_last_commit_of_the_last_day(write):
    write("production", produced("a", date="2026-01-01"), produced("b", commit="old"),
          produced("c", longest_prompt=9), produced("d", most_rows=5),
          produced("control", mode="fast", different=40))  # fmt: skip
    found = of_claim("batch-invariant")
    assert "80 tokens" in found["compared on a GPU"] and "up to 5 seq" in found["compared on a GPU"]
    assert (found["GPU"], found["date"], found["commit"]) == ("H200", "2026-01-02", "abc")
    assert of_claim("dvr")["compared on a GPU"] == "not run on a GPU"
    write("production", produced("e", date="2026-01-03"), gpu="h100", date="2026-01-03")
    assert of_claim("batch-invariant")["GPU"] == "H100"


def test_a_newer_run_of_something_else_hides_no_evidence(write):
    write("production", produced("a", mode="dvr", windows=3, rollbacks=1))
    write("production", produced("b", date="2026-01-03"), date="2026-01-03")
    assert of_claim("dvr")["date"] == "2026-01-02"
    assert of_claim("batch-invariant")["date"] == "2026-01-03"


@pytest.mark.parametrize("name", ["different", "self_check_differences"])
def test_a_row_in_which_a_bit_differs_is_refused(write, name):
    write("production", produced("a"), produced("b", **{name: 1}))
    with pytest.raises(ValueError, match=f"bits differ in .*'{name}': 1"):
        verification.section()


def test_starts_with_two_digests_are_refused(write):
    start = {"subject": "start", "kind": "cold", "model": "m", "tp": 1, "date": "2026-01-02",
             "commit": "abc"}  # fmt: skip
    write("start", start | {"digest": "a"}, start | {"digest": "b"})
    with pytest.raises(ValueError, match="gave 2 digests"):
        verification.section()


def test_quality_has_a_line_for_each_scheme_and_form(write):
    assert quality.section() == []
    row = {"model": "m", "windows": 2, "length": 8, "bytes": 50, "text": "t.txt", "gpu": "cpu",
           "date": "2026-01-02", "commit": "abc", "scheme": "int4-w4a16", "weights": "auto",
           "group_size": 64, "kv_cache_dtype": "auto", "nats_per_token": 2.5, "bits_per_byte": 1.25,
           "difference_nats": 0.5, "difference_se": 0.125, "same_greedy": 0.75}  # fmt: skip
    other = row | {"weights": "w8a8", "group_size": 0, "kv_cache_dtype": "fp8_e4m3"}
    write("quality", row, other, gpu="cpu")
    (path,) = (rows.RESULTS / "cpu").iterdir()
    path.write_text(path.read_text().replace("NVIDIA CPU", "cpu"))
    four, eight = tables(quality.section())[0]
    assert four == {
        "scheme": "`int4-w4a16`, groups of 64", "activations": "bfloat16",
        "cache": "bfloat16", "nats a token": "2.5000",
        "bits a byte": "1.2500", "worse by, nats a token": "0.5000 ± 0.1250",
        "same greedy token": "75.0%",
    }  # fmt: skip
    assert eight["scheme"] == "`int4-w4a16`" and eight["activations"].startswith("8 bits")
    assert eight["cache"].startswith("8 bits")


def test_every_test_of_a_claim_is_there():
    for claim in verification.CLAIMS:
        assert claim.tests
        for test in claim.tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(), test


# ------------------------------------------------------------------------- rows and documents


def test_no_committed_row_says_where_a_model_lies():
    files = list((ROOT / "benchmarks" / "results").rglob("*.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    names = {row["model"] for row in found if "model" in row}
    assert names
    assert not [name for name in names if "/" in name]


def test_a_new_row_names_the_folder_of_its_model(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serving", "offline", "--model", str(bundled_model_path())])
    bench = serving_benchmark.Bench(serving_benchmark.parse_args())
    bench.rows.keep(subject="offline")
    assert bench.rows.rows[0]["model"] == bundled_model_path().name


@pytest.mark.parametrize(
    "name", ["docs/benchmarks.md", "docs/serving.md", "docs/parallel.md", "docs/training.md"]
)
def test_figures_that_a_document_shows_are_there(name):
    document = ROOT / name
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", document.read_text())
    assert shown
    for figure in shown:
        assert (document.parent / figure).exists(), figure


def test_readme_is_short_and_names_the_hardware_first():
    text = re.sub(r"\]\([^)]*\)", "]", (ROOT / "README.md").read_text())
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 800
    assert "Hopper" in text.split("##")[0]
