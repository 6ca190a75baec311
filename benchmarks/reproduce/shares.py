# SPDX-License-Identifier: Apache-2.0
"""Throughput while more and more of the traffic is deterministic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    some_deterministic,
    window_facts,
)
from benchmarks.serving import PlannedRequest
from detjax.engine.engine import Engine
from detjax.plots import COLOURS, REFERENCE, finish

PERCENTS = (2, 5, 10, 20, 50, 100)
CANONICAL = -1
"""Stands for `invariant`: canonical kernels for everybody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Lengths of requests, and what the paper found with the like.

    Attributes:
        name: As the paper calls it.
        requests: How many; the paper has 4,096.
        lengths: (prompt, answer) of each, or of all.
        paper: Tokens a second, prompts and answers, of no deterministic requests, of canonical
            kernels for all, and at each of `PERCENTS`.
        paper_rollbacks: Of 4,096 requests, all deterministic.
        paper_recomputed_percent: Of generated tokens, all deterministic.
        seconds: On a GPU.
    """

    name: str
    requests: int
    lengths: tuple[tuple[int, int], ...]
    paper: tuple[float, ...]
    paper_rollbacks: int
    paper_recomputed_percent: float
    seconds: float


def like(
    count: int, prompt_median: int, output_median: int, *, most: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Lengths drawn log-normally around these medians, spread by 0.9 and 0.7, at most `most`."""
    rng = np.random.default_rng(4)
    drawn = zip(
        prompt_median * np.exp(0.9 * rng.standard_normal(count)),
        output_median * np.exp(0.7 * rng.standard_normal(count)),
        strict=True,
    )
    return tuple((int(min(max(p, 4), most[0])), int(min(max(g, 4), most[1]))) for p, g in drawn)


FULL = (
    Workload(
        name="ShareGPT-like", requests=96, lengths=like(96, 200, 160, most=(1024, 512)),
        paper=(15400, 9877, 14861, 13876, 13101, 12053, 10598, 8873), paper_rollbacks=96,
        paper_recomputed_percent=0.32, seconds=65,
    ),
    Workload(
        name="512 + 256", requests=64, lengths=((512, 256),),
        paper=(17350, 11182, 17130, 16884, 16552, 15976, 14439, 12430), paper_rollbacks=0,
        paper_recomputed_percent=0.0, seconds=35,
    ),
    Workload(
        name="arXiv-like", requests=24, lengths=like(24, 3600, 180, most=(3712, 320)),
        paper=(15925, 11122, 15920, 15839, 15758, 15546, 14586, 13400), paper_rollbacks=3351,
        paper_recomputed_percent=10.97, seconds=45,
    ),
    Workload(
        name="1024 + 256", requests=48, lengths=((1024, 256),),
        paper=(17237, 12382, 17061, 16936, 16715, 16341, 15348, 13912), paper_rollbacks=24,
        paper_recomputed_percent=0.07, seconds=40,
    ),
    Workload(
        name="2048 + 256", requests=32, lengths=((2048, 256),),
        paper=(16452, 10877, 16384, 16291, 16137, 15886, 15139, 13893), paper_rollbacks=724,
        paper_recomputed_percent=2.08, seconds=40,
    ),
)  # fmt: skip
TRAINED = (
    Workload(
        name="512 + 256", requests=128, lengths=((512, 256),),
        paper=(17350, 11182, 17130, 16884, 16552, 15976, 14439, 12430), paper_rollbacks=0,
        paper_recomputed_percent=0.0, seconds=50,
    ),
    Workload(
        name="ShareGPT-like to 512 + 448", requests=192,
        lengths=like(192, 200, 160, most=(512, 448)),
        paper=(15400, 9877, 14861, 13876, 13101, 12053, 10598, 8873), paper_rollbacks=96,
        paper_recomputed_percent=0.32, seconds=50,
    ),
)  # fmt: skip
"""Of a trained model, whose context is 1024 tokens."""

SMALL = (
    Workload(
        name="24 + 32", requests=12, lengths=((24, 32),), paper=(), paper_rollbacks=0,
        paper_recomputed_percent=0.0, seconds=60,
    ),
)  # fmt: skip


def _planned(workload: Workload, percent: float) -> list[PlannedRequest]:
    flags = some_deterministic(workload.requests, percent)
    return [
        PlannedRequest(
            at_s=0.0, prompt_len=workload.lengths[i % len(workload.lengths)][0],
            output_len=workload.lengths[i % len(workload.lengths)][1], is_deterministic=flag,
        )
        for i, flag in enumerate(flags)
    ]  # fmt: skip


def _rows(lab: Lab, workload: Workload, make_server: Callable[[Lab], Server]) -> list[Row]:
    """`invariant` first, whose answers are the canonical ones; then `fast`, then each share."""
    server, rows, canonical = make_server(lab), [], []
    suffix = "" if make_server is large_server else f", {server.name}"
    percents = lab.pick((10, 100), PERCENTS)
    engine: Engine | None = None
    for percent in (CANONICAL, 0, *percents):
        mode = {CANONICAL: "invariant", 0: "fast"}.get(percent, "dvr")
        if engine is None or percent in (0, percents[0]):
            engine = None  # its cache leaves room for the next one
            engine = server.engine(mode, max_prefill_streak=64)
        told = server.serve(engine, _planned(workload, 100 if percent < 0 else percent))
        canonical = canonical or told
        end_s = max(one.releases_s[-1] for one in told)
        place = {0: 0, CANONICAL: 1}.get(percent, 2 + percents.index(percent) if percent > 0 else 0)
        paper = workload.paper
        rows.append(
            {
                "workload": workload.name + suffix, **server.facts, "mode": mode,
                "requests": workload.requests,
                "deterministic_percent": 100 if percent < 0 else percent,
                "prompt_tokens": sum(one.plan.prompt_len for one in told),
                "output_tokens": sum(one.num_tokens for one in told),
                "tokens_per_s": sum(one.num_tokens + one.plan.prompt_len for one in told) / end_s,
                "output_tokens_per_s": sum(one.num_tokens for one in told) / end_s,
                "wrong": num_different(told, canonical, claimed=True),
                "plain_different": num_different(told, canonical, claimed=False),
                "window": WINDOW, "group": GROUP,
                "paper_over_fast": paper[place] / paper[0] if paper else None,
                "paper_rollbacks_of_4096": workload.paper_rollbacks if percent == 100 else None,
                "paper_recomputed_percent": (
                    workload.paper_recomputed_percent if percent == 100 else None
                ),
                **window_facts(told),
            }
        )  # fmt: skip
    base = next(row["tokens_per_s"] for row in rows if row["mode"] == "fast")
    for row in rows:
        row["over_fast"] = row["tokens_per_s"] / base
    return rows


def findings(rows: Sequence[Row]) -> list[str]:
    """For each workload, canonical kernels and drafts at half and all of the traffic."""
    told = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == name]
        parts = []
        for row in own:
            if row["mode"] == "fast" or row["mode"] == "dvr" and row["deterministic_percent"] < 50:
                continue
            drafts = "drafts" if row["windows"] else "no drafts"
            what = f"{drafts} at {row['deterministic_percent']} %"
            if row["mode"] == "invariant":
                what = "invariant"
            paper = row["paper_over_fast"]
            parts.append(f"{what} {row['over_fast']:.2f}" + (f" ({paper:.2f})" if paper else ""))
        told.append(f"{name}: {', '.join(parts)} of fast")
    return told


def plot(figure, rows: Sequence[Row]) -> None:
    """Throughput over the share, ours and the paper's, a panel for each workload."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    num_columns = min(4, len(names))
    num_lines = -(-len(names) // num_columns)
    figure.set_size_inches(10, 3.8 if num_lines == 1 else 3.0 * num_lines)
    grid = figure.subplots(num_lines, num_columns, sharey=True, squeeze=False)
    panels = grid.ravel()
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(panels, names, strict=False):
        own = [row for row in rows if row["workload"] == name]
        dvr = [row for row in own if row["mode"] == "dvr"]
        at = [str(row["deterministic_percent"]) for row in dvr]
        axes.plot(at, [row["over_fast"] for row in dvr], "o-", color=COLOURS["dvr"],
                  label="dvr, drafts")  # fmt: skip
        if dvr[0]["paper_over_fast"]:
            axes.plot(at, [row["paper_over_fast"] for row in dvr], "x--", color=REFERENCE,
                      label="LLM-42")  # fmt: skip
        (ours,) = [row for row in own if row["mode"] == "invariant"]
        axes.axhline(ours["over_fast"], color=COLOURS["invariant"], label="invariant")
        if ours["paper_over_fast"]:
            axes.axhline(ours["paper_over_fast"], color=REFERENCE, linestyle=":",
                         label="SGLang, batch-invariant")  # fmt: skip
        finish(axes, title=name, x="deterministic requests (%)", y="", legend=False)
        axes.title.set_fontsize(8)
    panels[0].set(ylim=(0, None))
    for axes in grid[:, 0]:
        axes.set(ylabel="throughput over fast")
    handles, labels = panels[0].get_legend_handles_labels()
    has_room = len(names) < len(panels)
    (panels[-1] if has_room else panels[0]).legend(
        handles, labels, fontsize=8 if has_room else 7,
        loc="center" if has_room else "lower left",
    )  # fmt: skip


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title="Throughput by share of deterministic requests, drafts made for each of them",
        setting=setting,
        columns=(
            "workload", "mode", "deterministic_percent", "tokens_per_s", "over_fast",
            "paper_over_fast", "rollbacks", "recomputed_percent", "paper_recomputed_percent",
            "wrong", "plain_different",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def parts(lab: Lab) -> list[Part]:
    """A piece for each model and workload."""
    large = lab.pick(SMALL, FULL)
    return [
        Part(
            name=piece_name(workload.name, make),
            seconds=workload.seconds,
            run=lambda workload=workload, make=make: _rows(lab, workload, make),
        )
        for make in load_servers(lab)
        for workload in (large if make is large_server else TRAINED)
    ]


EXPERIMENT = Experiment(
    question="What does determinism cost as more of the traffic asks for it?",
    paper="LLM-42 (arXiv:2601.17768), figure 10 and table 4, and its authors' data: 4,096 requests "
    "a cell on an H100, windows of 64 x 8; its figure over SGLang's non-deterministic one in "
    "brackets, with SGLang's batch-invariant mode for `invariant`.",
    parts=parts,
    result=result,
    setting=load_setting,
)
