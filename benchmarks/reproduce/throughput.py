# SPDX-License-Identifier: Apache-2.0
"""What one deterministic request costs everybody else."""

import statistics
import time

from benchmarks.reproduce.experiment import Experiment, Lab, Result, prompts
from detjax.serving.engine import Engine

CASES: tuple[tuple[str, str, int, int], ...] = (
    ("10, none deterministic", "fast", 10, 0),
    ("11, none deterministic", "fast", 11, 0),
    ("11, one deterministic, dvr", "dvr", 11, 1),
    ("11, all deterministic, dvr", "dvr", 11, 11),
    ("11, all deterministic, invariant", "invariant", 11, 11),
)


def _tokens_per_s(lab: Lab, engine: Engine, count: int, num_det: int, max_tokens: int) -> float:
    requests = [
        lab.request(text, max_tokens=max_tokens, is_deterministic=i < num_det)
        for i, text in enumerate(prompts(count))
    ]
    start = time.perf_counter()
    answers = engine.generate(requests)
    return sum(len(c.token_ids) for c in answers) / (time.perf_counter() - start)


def run(lab: Lab) -> Result:
    """Tokens a second, wall time, prefill included, for each mixture."""
    max_tokens, repeats = lab.pick((32, 3), (256, 5))
    rows, engines = [], {}
    for name, mode, count, num_det in CASES:
        if mode not in engines:
            engines[mode] = lab.engine(
                mode, batch_size=11, max_len=32 + max_tokens, prefill=(11, 32)
            )
        engine = engines[mode]
        _tokens_per_s(lab, engine, count, num_det, max_tokens)  # compiles
        before = engine.stats().num_windows, engine.stats().num_rollbacks
        rates = [_tokens_per_s(lab, engine, count, num_det, max_tokens) for _ in range(repeats)]
        stats = engine.stats()
        rows.append(
            {
                "case": name,
                "mode": mode,
                "requests": count,
                "deterministic": num_det,
                "tokens_per_s": statistics.median(rates),
                "slowest": min(rates),
                "fastest": max(rates),
                "windows": stats.num_windows - before[0],
                "rollbacks": stats.num_rollbacks - before[1],
            }
        )
    base = rows[1]["tokens_per_s"]
    for row in rows:
        row["of_11_fast"] = row["tokens_per_s"] / base

    def plot(figure) -> None:
        axes = figure.subplots()
        names = [row["case"] for row in rows][::-1]
        values = [row["tokens_per_s"] for row in rows][::-1]
        low = [row["tokens_per_s"] - row["slowest"] for row in rows][::-1]
        high = [row["fastest"] - row["tokens_per_s"] for row in rows][::-1]
        axes.barh(names, values, xerr=(low, high), color="tab:blue", alpha=0.7)
        axes.set(xlabel="generated tokens a second (median; bars: range)")

    return Result(
        title=f"Throughput of 10 and 11 requests of {max_tokens} tokens",
        setting=f"{lab.setting}; a model this small measures the host and launches, not bandwidth",
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
        findings=[f"{row['case']}: {row['of_11_fast']:.2f} of 11 fast ones" for row in rows[2:]],
        plot=plot,
    )


EXPERIMENT = Experiment(
    question="Does one deterministic request slow the others?",
    paper="LLM-42 (arXiv:2601.17768), figure 5: with batch-invariant kernels one deterministic "
    "request slows the whole batch, with decode-verify-rollback it does not; over 94 % of the "
    "throughput is kept with half of the traffic deterministic. SGLang's deterministic mode: "
    "34 % slower on average (its authors, 2025).",
    run=run,
)
