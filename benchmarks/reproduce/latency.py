# SPDX-License-Identifier: Apache-2.0
"""Latencies online, by rate and by the share of requests whose drafts are verified."""

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.reproduce.experiment import Experiment, Lab, Part, Result, Row
from benchmarks.reproduce.loads import (
    GROUP,
    WINDOW,
    Server,
    large_server,
    load_servers,
    load_setting,
    num_different,
    piece_name,
    quantiles_ms,
    some_deterministic,
    window_facts,
)
from benchmarks.reproduce.shares import like
from benchmarks.serving import PlannedRequest, TimedAnswer
from detjax.plots import COLOURS, finish

CASES: tuple[tuple[str, int], ...] = (
    ("invariant", 100), ("fast", 0), ("dvr", 10), ("dvr", 50), ("dvr", 100),
)  # fmt: skip
"""Modes and percent of deterministic requests; the first one's answers are the canonical ones."""

PAPER = {
    ("fast", 0): (17.3, 29.7), ("invariant", 100): (70.1, 76.3), ("dvr", 10): (20.4, 31.8),
    ("dvr", 50): (52.9, 50.4), ("dvr", 100): (68.7, 55.7),
}  # fmt: skip
"""P99 end to end in seconds and median of the first token in milliseconds: LLM-42's 8B on an H100
at 18 requests a second, with SGLang's batch-invariant mode for `invariant`."""


def _rates(lab: Lab, *, is_large: bool) -> tuple[float, ...]:
    """Requests a second. Asked all at once, the trained model answers about 130 on an H200."""
    return lab.pick((20.0,), (4.0, 8.0, 12.0) if is_large else (40.0, 80.0, 120.0))


def _planned(lab: Lab, rate: float, percent: float, *, is_large: bool) -> list[PlannedRequest]:
    """Poisson arrivals of ShareGPT-like lengths; at each rate and share the same prompts."""
    count = lab.pick(8, 48 if is_large else 192)
    gaps_s = np.random.default_rng(1).exponential(1.0, count) / rate
    lengths = like(
        count, 200, 160, most=lab.pick((24, 40), (1024, 512) if is_large else (512, 448))
    )
    flags = some_deterministic(count, percent)
    return [
        PlannedRequest(at_s=float(at), prompt_len=p, output_len=g, is_deterministic=flag)
        for at, (p, g), flag in zip(np.cumsum(gaps_s), lengths, flags, strict=True)
    ]


def _rows(lab: Lab, make_server: Callable[[Lab], Server]) -> list[Row]:
    """Each case at each rate, in which a case keeps its engine."""
    is_large = make_server is large_server
    server, rows = make_server(lab), []
    canonical: list[TimedAnswer] = []
    for mode, percent in CASES:
        engine = server.engine(mode)
        for rate in _rates(lab, is_large=is_large):
            told = server.serve(engine, _planned(lab, rate, percent, is_large=is_large))
            canonical = canonical or told
            paper_s, paper_first_ms = PAPER[mode, percent]
            end_s = max(one.releases_s[-1] for one in told)
            rows.append(
                {
                    **server.facts, "mode": mode, "rate_per_s": rate,
                    "deterministic_percent": percent, "requests": len(told),
                    "deterministic": sum(one.plan.is_deterministic for one in told),
                    **quantiles_ms([one.first_token_s for one in told], "first_token"),
                    **quantiles_ms([one.token_s for one in told], "token"),
                    **quantiles_ms([one.end_to_end_s for one in told], "end_to_end"),
                    "tokens_per_s": sum(one.num_tokens for one in told) / end_s,
                    "wrong": num_different(told, canonical, claimed=True),
                    "plain_different": num_different(told, canonical, claimed=False),
                    "paper_p99_over_fast": paper_s / PAPER["fast", 0][0],
                    "paper_first_token_p50_ms": paper_first_ms,
                    "window": WINDOW, "group": GROUP, **window_facts(told),
                }
            )  # fmt: skip
        del engine  # its cache leaves room for the next one
    base = {row["rate_per_s"]: row for row in rows if row["mode"] == "fast"}
    for row in rows:
        fast = base[row["rate_per_s"]]
        row["p99_over_fast"] = row["end_to_end_p99_ms"] / fast["end_to_end_p99_ms"]
    return rows


def _case(row: Row) -> str:
    if row["mode"] != "dvr":
        return row["mode"]
    drafts = "drafts" if row["windows"] else "no drafts"
    return f"{drafts} at {row['deterministic_percent']} %"


def findings(rows: Sequence[Row]) -> list[str]:
    """For each model and rate every case beside `fast`, and the bits of all of them."""
    return [
        sentence
        for model in dict.fromkeys(row["model"] for row in rows)
        for sentence in _told_of(model, [row for row in rows if row["model"] == model])
    ]


def _told_of(model: str, rows: Sequence[Row]) -> list[str]:
    """A sentence for each rate, the paper beside the last, and one of the bits."""
    told = []
    rates = list(dict.fromkeys(row["rate_per_s"] for row in rows))
    for rate in rates:
        at_rate = [row for row in rows if row["rate_per_s"] == rate]
        (fast,) = [row for row in at_rate if row["mode"] == "fast"]
        cases = [
            f"{_case(row)} {row['p99_over_fast']:.2f}"
            + (f" ({row['paper_p99_over_fast']:.2f})" if rate == rates[-1] else "")
            for row in at_rate
            if row is not fast
        ]
        told.append(
            f"{model}, {rate:g} requests a second: P99 end to end of fast "
            f"{fast['end_to_end_p99_ms'] / 1e3:.2f} s, over it {', '.join(cases)}; first token "
            + ", ".join(f"{_case(r)} {r['first_token_p50_ms']:.1f}" for r in at_rate)
            + " ms (P50)"
        )
    exact = [row for row in rows if row["mode"] != "fast"]
    told.append(
        f"{model}: {sum(row['wrong'] for row in exact)} of "
        f"{sum(row['deterministic'] for row in exact)} deterministic answers have another bit than "
        f"the canonical one, {sum(row['plain_different'] for row in rows)} of the others"
    )
    return told


def plot(figure, rows: Sequence[Row]) -> None:
    """P99 end to end and median of the first token over the rate, a line for each case."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure.set_size_inches(10, 3.4 * len(models))
    panels = figure.subplots(len(models), 2, squeeze=False)
    columns = (
        ("end_to_end_p99_ms", "P99 end to end (ms)"),
        ("first_token_p50_ms", "P50 first token (ms)"),
    )
    markers = {10: "v", 50: "s", 100: "^"}
    for of_model, model in zip(panels, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        for axes, (column, label) in zip(of_model, columns, strict=True):
            for case in dict.fromkeys(_case(row) for row in own):
                of_case = [row for row in own if _case(row) == case]
                mode, share = of_case[0]["mode"], of_case[0]["deterministic_percent"]
                axes.plot(
                    [row["rate_per_s"] for row in of_case], [row[column] for row in of_case],
                    marker=markers.get(share, "o") if mode == "dvr" else "o",
                    color=COLOURS[mode], label=f"dvr, {case}" if mode == "dvr" else case,
                )  # fmt: skip
            axes.set_ylim(0, 1.1 * max(row[column] for row in own))
            finish(axes, title=model, x="requests a second", y=label, legend=False)
    panels[0][0].legend(fontsize=7)


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title="Latencies of requests that arrive at random, drafts made for each deterministic one",
        setting=setting,
        columns=(
            "model", "mode", "rate_per_s", "deterministic_percent", "first_token_p50_ms",
            "first_token_p99_ms", "token_p50_ms", "end_to_end_p50_ms", "end_to_end_p99_ms",
            "p99_over_fast", "paper_p99_over_fast", "rollbacks", "recomputed_percent", "wrong",
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
            name=piece_name("load", make),
            seconds=130 if make is large_server else 85,
            run=lambda make=make: _rows(lab, make),
        )
        for make in load_servers(lab)
    ]


EXPERIMENT = Experiment(
    question="How do latencies move with load and the share of deterministic requests?",
    paper="LLM-42 (arXiv:2601.17768), figure 11 and table 5, and its authors' data: at 18 requests "
    "a second P99 end to end is 17.3 s without determinism, 70.1 s with batch-invariant kernels; "
    "verified at 10, 50 and 100 % 20.4, 52.9 and 68.7 s; first token P50 29.7, 76.3, 31.8, 50.4 "
    "and 55.7 ms. Its figure over its own non-deterministic one in brackets.",
    parts=parts,
    result=result,
    setting=load_setting,
)
