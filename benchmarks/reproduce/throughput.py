# SPDX-License-Identifier: Apache-2.0
"""What one deterministic request costs everybody else."""

import statistics
import time
from collections.abc import Sequence

from benchmarks.reproduce.experiment import (
    Experiment,
    Lab,
    Result,
    Row,
    name_of,
    prompts,
    windows_since,
)
from benchmarks.step import MODELS
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.serving.engine import Engine

CASES: tuple[tuple[str, str, float | None, int, int], ...] = (
    ("10, none deterministic", "fast", None, 10, 0),
    ("11, none deterministic", "fast", None, 11, 0),
    ("11, one deterministic, dvr", "dvr", None, 11, 1),
    ("11, all deterministic, dvr", "dvr", None, 11, 11),
    ("11, one deterministic, dvr that always drafts", "dvr", 1.0, 11, 1),
    ("11, all deterministic, dvr that always drafts", "dvr", 1.0, 11, 11),
    ("11, all deterministic, invariant", "invariant", None, 11, 11),
)
"""Name, mode, share of deterministic samples up to which it drafts, requests, deterministic ones.

Without a share `dvr` drafts where the engine holds that to be quicker; the row says if it did.
"""


def _tokens_per_s(lab: Lab, engine: Engine, count: int, num_det: int, max_tokens: int) -> float:
    requests = [
        lab.request(text, max_tokens=max_tokens, is_deterministic=i < num_det)
        for i, text in enumerate(prompts(count))
    ]
    start = time.perf_counter()
    answers = engine.generate(requests)
    return sum(len(c.token_ids) for c in answers) / (time.perf_counter() - start)


def _model(lab: Lab) -> tuple[LoadedModel, str]:
    """Where the bandwidth is the limit, as in the paper: 8B parameters; and what to call it."""
    if not lab.is_full or lab.backend is not Backend.SM90:
        note = "a model this small measures the host and launches, not bandwidth"
        return lab.model(1), f"{lab.setting}; {note}"
    model = random_model(
        MODELS["llama3_8b"],
        seed=0,
        profile=NumericsProfile(),
        mesh=make_mesh(1, 1, platform=lab.backend.platform),
        backend=lab.backend,
    )
    return model, f"Llama-3.1-8B shapes with random weights, bfloat16, {lab.machine}"


def findings(rows: Sequence[Row]) -> list[str]:
    """Each mixture with a deterministic request against 11 requests of `fast`."""
    return [
        f"{name_of(row)}: {row['of_11_fast']:.2f} of 11 fast ones"
        for row in rows
        if row["deterministic"]
    ]


def plot(figure, rows: Sequence[Row]) -> None:
    """Throughput of each mixture, with its range."""
    axes = figure.subplots()
    names = [name_of(row) for row in rows][::-1]
    values = [row["tokens_per_s"] for row in rows][::-1]
    low = [row["tokens_per_s"] - row["slowest"] for row in rows][::-1]
    high = [row["fastest"] - row["tokens_per_s"] for row in rows][::-1]
    axes.barh(names, values, xerr=(low, high), color="tab:blue", alpha=0.7)
    axes.set(xlabel="generated tokens a second (median; bars: range)")


def run(lab: Lab) -> Result:
    """Tokens a second, wall time, prefill included, for each mixture; the mixtures in turn."""
    max_tokens, repeats = lab.pick((32, 3), (256, 5))
    model, setting = _model(lab)
    engines = {
        which: lab.engine(
            which[0], batch_size=11, max_len=32 + max_tokens, prefill=(11, 32), model=model,
            max_draft_fraction=which[1],
        )
        for which in dict.fromkeys((mode, share) for _, mode, share, _, _ in CASES)
    }  # fmt: skip
    rates = {name: [] for name, *_ in CASES}
    drafts = {name: (0, 0) for name, *_ in CASES}
    for _ in range(1 + repeats):
        for name, mode, share, count, num_det in CASES:
            engine = engines[mode, share]
            before = windows_since(engine)
            rates[name].append(_tokens_per_s(lab, engine, count, num_det, max_tokens))
            drafts[name] = windows_since(engine, before)
    rows = []
    for name, mode, _, count, num_det in CASES:
        timed = rates[name][1:]  # the first compiles
        rows.append(
            {
                "case": name,
                "mode": mode,
                "requests": count,
                "deterministic": num_det,
                "tokens_per_s": statistics.median(timed),
                "slowest": min(timed),
                "fastest": max(timed),
                "windows": drafts[name][0],
                "rollbacks": drafts[name][1],
            }
        )
    base = rows[1]["tokens_per_s"]
    for row in rows:
        row["of_11_fast"] = row["tokens_per_s"] / base
    return Result(
        title=f"Throughput of 10 and 11 requests of {max_tokens} tokens",
        setting=setting,
        columns=(
            "case",
            "tokens_per_s",
            "slowest",
            "fastest",
            "of_11_fast",
            "windows",
            "rollbacks",
        ),  # fmt: skip
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )


EXPERIMENT = Experiment(
    question="Does one deterministic request slow the others?",
    paper="LLM-42 (arXiv:2601.17768), figure 5: with batch-invariant kernels one deterministic "
    "request slows the whole batch, with decode-verify-rollback it does not; over 94 % of the "
    "throughput is kept with half of the traffic deterministic. SGLang's deterministic mode: "
    "34 % slower on average (its authors, 2025).",
    run=run,
)
