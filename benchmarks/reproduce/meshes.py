# SPDX-License-Identifier: Apache-2.0
"""The same prompts on every (tp, batch size): how many different answers?"""

import numpy as np

from benchmarks.reproduce.experiment import (
    Lab,
    Result,
    WholeExperiment,
    digest_of,
    largest_divergence,
    prompts,
)
from detjax.serving.request import Completion

MODES: tuple[str, ...] = ("fast", "invariant")


def _answers(lab: Lab, mode: str, tp: int, batch: int, texts, max_tokens) -> list[Completion]:
    engine = lab.engine(mode, batch_size=batch, max_len=32 + max_tokens, tp=tp, prefill=(batch, 32))
    requests = [
        lab.request(text, max_tokens=max_tokens, is_deterministic=mode != "fast") for text in texts
    ]
    return engine.generate(requests)


def run(lab: Lab) -> Result:
    """Unique outputs a prompt and the largest probability difference, over tp x batch size."""
    texts, max_tokens = prompts(lab.pick(8, 100)), lab.pick(24, 200)
    batches, tps = lab.pick((1, 8), (8, 16, 32)), lab.pick(lab.tps[:3:2], lab.tps)
    rows, unique, bits = [], {}, {}
    for mode in MODES:
        runs = {
            (tp, batch): _answers(lab, mode, tp, batch, texts, max_tokens)
            for tp in tps
            for batch in batches
        }
        by_prompt = list(zip(*runs.values(), strict=True))
        unique[mode] = [len({c.token_ids for c in answers}) for answers in by_prompt]
        bits[mode] = [len({c.digest() for c in answers}) for answers in by_prompt]
        divergence = [largest_divergence(answers) for answers in by_prompt]
        for (tp, batch), answers in runs.items():
            rows.append(
                {"mode": mode, "tp": tp, "batch": batch, "digest": digest_of(answers),
                 "prompts": len(texts), "tokens": max_tokens,
                 "unique_outputs_mean": float(np.mean(unique[mode])),
                 "unique_outputs_max": max(unique[mode]),
                 "unique_with_logprobs_max": max(bits[mode]),
                 "max_prob_divergence_mean": float(np.mean(divergence))}
            )  # fmt: skip

    def plot(figure) -> None:
        axes = figure.subplots()
        width = 0.4
        edges = np.arange(1, len(tps) * len(batches) + 1)
        for shift, mode in zip((-width / 2, width / 2), MODES, strict=True):
            counts = [bits[mode].count(n) for n in edges]
            axes.bar(edges + shift, counts, width=width, label=mode)
        axes.set(xlabel=f"different answers, logprobs included, in {len(edges)} settings")
        axes.set(ylabel="prompts")
        axes.set_xticks(edges)
        axes.legend(frameon=False)

    summary = {row["mode"]: row for row in rows}
    return Result(
        title=f"{len(texts)} prompts, greedy, on tp {tps} x batch {batches}",
        setting=lab.setting,
        columns=tuple(rows[0]),
        rows=rows,
        findings=[
            f"{mode}: {summary[mode]['unique_outputs_mean']:.2f} unique outputs a prompt "
            f"({summary[mode]['unique_with_logprobs_max']} at most with logprobs), maximum "
            f"probability divergence {short_number(summary[mode]['max_prob_divergence_mean'])}"
            for mode in MODES
        ],
        plot=plot,
    )


def short_number(value: float) -> str:
    return f"{value:.2g}" if value else "0"


EXPERIMENT = WholeExperiment(
    question="Do tensor parallelism and batch size change the answer?",
    paper="Zhang et al. 2025 (TBIK, arXiv:2511.17826), tables 1 and 2: with bfloat16 kernels many "
    "unique outputs over tp {1, 2, 4, 8} x batch {8, 16, 32}; exactly 1, and divergence 0, with "
    "tree-based kernels, for 22 to 63 % more latency.",
    run=run,
    seconds=200.0,
)
