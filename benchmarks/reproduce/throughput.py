# SPDX-License-Identifier: Apache-2.0
"""What one deterministic request costs everybody else."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.reproduce.experiment import Experiment, Lab, Part, Result, Row, name_of
from benchmarks.reproduce.loads import (
    GROUP,
    WINDOW,
    Server,
    large_server,
    load_servers,
    load_setting,
    num_different,
    piece_name,
    window_facts,
)
from benchmarks.serving import PlannedRequest
from detjax.plots import COLOURS, REFERENCE, finish

CASES: tuple[tuple[str, str, int, int, float | None], ...] = (
    ("11, all deterministic, invariant", "invariant", 11, 11, 413.41),
    ("10, none deterministic", "fast", 10, 0, 837.84),
    ("11, none deterministic", "fast", 11, 0, 937.96),
    ("11, one deterministic, dvr that always drafts", "dvr", 11, 1, 912.99),
    ("11, all deterministic, dvr that always drafts", "dvr", 11, 11, None),
)
"""Name, mode, requests, deterministic ones, and the paper's tokens a second.

The first gives the canonical answers. Without drafts `dvr` decodes as `invariant` does. Tokens a
second are of all requests until the last one ends: a window that rolls back delays its own request,
which then goes on alone. `plain_tokens_per_s` is of each that is not deterministic, until the last
of those ends; `first_tokens_s` is when every prompt was computed.
"""


def findings(rows: Sequence[Row]) -> list[str]:
    """Each mixture with a deterministic request against 11 requests of `fast`."""
    told = []
    for row in rows:
        if not row["deterministic"]:
            continue
        told.append(f"{name_of(row)}: {row['of_11_fast']:.2f} of 11 fast ones")
        if row.get("paper_of_11"):
            told[-1] += f" (paper {row['paper_of_11']:.2f})"
        if row.get("plain_of_11_fast"):
            told[-1] += f", {row['plain_of_11_fast']:.2f} for those that are not deterministic"
    return told


def plot(figure, rows: Sequence[Row]) -> None:
    """Throughput of each mixture over that of 11 fast ones, with its range, and the paper's."""
    axes = figure.subplots()
    names = [name_of(row) for row in rows][::-1]
    values, low, high = (
        [row[name] / row["tokens_per_s"] * row["of_11_fast"] for row in rows][::-1]
        for name in ("tokens_per_s", "slowest", "fastest")
    )
    spread = [[v - a for v, a in zip(values, low, strict=True)],
              [b - v for v, b in zip(values, high, strict=True)]]  # fmt: skip
    colours = [COLOURS[row["mode"]] for row in rows][::-1]
    axes.barh(names, values, xerr=spread, color=colours)
    paper = [(row.get("paper_of_11"), name_of(row)) for row in rows if row.get("paper_of_11")]
    if paper:
        axes.plot(*zip(*paper, strict=True), "D", color=REFERENCE, label="LLM-42, SGLang")
    finish(
        axes, title="Median, and the range of the runs",
        x="generated tokens a second over those of 11 fast requests", y="", legend=bool(paper),
    )  # fmt: skip
    if paper:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _lengths(lab: Lab) -> tuple[int, int]:
    return lab.pick((24, 32), (512, 256))


def _rows(lab: Lab, make_server: Callable[[Lab], Server]) -> list[Row]:
    """Tokens a second, wall time, prefill included, of each mixture."""
    server, repeats = make_server(lab), lab.pick(2, 3)
    suffix = "" if make_server is large_server else f", {server.name}"
    prompt_len, output_len = _lengths(lab)
    rows, canonical = [], []
    for name, mode, count, num_det, paper in CASES:
        planned = [
            PlannedRequest(
                at_s=0.0, prompt_len=prompt_len, output_len=output_len, is_deterministic=i < num_det
            )
            for i in range(count)
        ]
        # The window of one sequence is verified as one row: answers do not depend on the group.
        engine = server.engine(mode, max_prefill_streak=64, other_groups=(1,))
        rates, plain_rates, first_s, wrong, changed = [], [], [], 0, 0
        for _ in range(repeats):
            told, counts = server.counted(engine, planned)
            canonical = canonical or told
            wrong += num_different(told, canonical[:count], claimed=True)
            changed += num_different(told, canonical[:count], claimed=False)
            end_s = max(one.releases_s[-1] for one in told)
            rates.append(sum(one.num_tokens for one in told) / end_s)
            first_s.append(max(one.releases_s[0] for one in told))
            plain_ends_s = [t.releases_s[-1] for t in told if not t.plan.is_deterministic]
            if plain_ends_s:
                plain_rates.append(output_len / max(plain_ends_s))
        del engine  # its cache leaves room for the next one
        rows.append(
            {
                "case": name + suffix, **server.facts, "mode": mode,
                "requests": count, "deterministic": num_det,
                "prompt_len": prompt_len, "output_len": output_len,
                "window": WINDOW, "group": GROUP, "repeats": repeats,
                "tokens_per_s": statistics.median(rates), "slowest": min(rates),
                "fastest": max(rates), "wrong": wrong, "plain_different": changed,
                "paper_tokens_per_s": paper, **window_facts(told), **counts,
                "first_tokens_s": statistics.median(first_s),
                "plain_tokens_per_s": statistics.median(plain_rates) if plain_rates else None,
            }
        )  # fmt: skip
    at = [name for name, *_ in CASES].index("11, none deterministic")
    base, paper_base = rows[at]["tokens_per_s"], CASES[at][-1]
    plain_base = rows[at]["plain_tokens_per_s"]
    for row in rows:
        row["of_11_fast"] = row["tokens_per_s"] / base
        plain = row["plain_tokens_per_s"]
        row["plain_of_11_fast"] = plain / plain_base if plain else None
        paper = row["paper_tokens_per_s"]
        row["paper_of_11"] = paper / paper_base if paper and paper_base else None
    return rows


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    lengths = f"{rows[0]['prompt_len']} + {rows[0]['output_len']}"
    return Result(
        title=f"Throughput of 10 and 11 requests of {lengths} tokens, windows of "
        f"{rows[0]['window']} x {rows[0]['group']}",
        setting=setting,
        columns=(
            "case", "tokens_per_s", "of_11_fast", "plain_of_11_fast", "paper_of_11",
            "first_tokens_s", "windows", "rollbacks", "num_launches", "decode_transfers", "wrong",
            "plain_different",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def parts(lab: Lab) -> list[Part]:
    """A piece for each model."""
    return [
        Part(
            name=piece_name("mixtures", make),
            seconds=95 if make is large_server else 50,
            run=lambda make=make: _rows(lab, make),
        )
        for make in load_servers(lab)
    ]


EXPERIMENT = Experiment(
    question="Does one deterministic request slow the others?",
    paper="LLM-42 (arXiv:2601.17768), figure 5, and its authors' data (github.com/microsoft/"
    "llm-42): 8B, 11 requests of 512 + 256 tokens on an H100: 938 tokens/s with none "
    "deterministic, 413 with batch-invariant kernels, 913 with one of them verified.",
    parts=parts,
    result=result,
    setting=load_setting,
)
