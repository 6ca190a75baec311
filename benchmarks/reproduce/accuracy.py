# SPDX-License-Identifier: Apache-2.0
"""The same benchmark, the same model, another batch size or mesh: another score?"""

import numpy as np

from benchmarks.reproduce.experiment import Lab, Result, WholeExperiment, digest_of
from detjax.serving.request import Completion

MODES: tuple[str, ...] = ("fast", "invariant")


def _sums(count: int) -> list[tuple[str, str]]:
    """Different two-digit additions and their answers."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    order = np.random.default_rng(0).permutation(len(pairs))
    return [(f"{a}+{b}=", f"{a + b}\n") for a, b in (pairs[i] for i in order[:count])]


def _answers(lab: Lab, mode: str, tp: int, batch: int, sums) -> list[Completion]:
    engine = lab.engine(mode, batch_size=batch, max_len=16, tp=tp, prefill=(batch, 8))
    requests = [
        lab.request(prompt, max_tokens=5, is_deterministic=mode != "fast", stop="\n")
        for prompt, _ in sums
    ]
    return engine.generate(requests)


def run(lab: Lab) -> Result:
    """Accuracy, changed answers and changed logprobs over tp and batch size."""
    sums = _sums(lab.pick(96, 1000))
    batches = lab.pick((1, 48), (1, 8, 64, 256))
    tps = lab.pick(lab.tps[:3:2], lab.tps)
    rows, first = [], {}
    for mode in MODES:
        for tp in tps:
            for batch in batches:
                answers = _answers(lab, mode, tp, batch, sums)
                texts = [lab.tokenizer.decode(c.token_ids) for c in answers]
                right = [text == want for text, (_, want) in zip(texts, sums, strict=True)]
                base = first.setdefault(mode, (texts, answers))
                rows.append(
                    {
                        "mode": mode,
                        "tp": tp,
                        "batch": batch,
                        "sums": len(sums),
                        "accuracy_percent": 100 * float(np.mean(right)),
                        "answers_changed": sum(a != b for a, b in zip(texts, base[0], strict=True)),
                        "logprobs_changed": sum(
                            a.digest() != b.digest() for a, b in zip(answers, base[1], strict=True)
                        ),
                        "digest": digest_of(answers),
                    }
                )

    def swing(mode: str) -> float:
        scores = [row["accuracy_percent"] for row in rows if row["mode"] == mode]
        return max(scores) - min(scores)

    def plot(figure) -> None:
        panels = figure.subplots(1, 2)
        names = ("accuracy_percent", "logprobs_changed")
        labels = ("accuracy, percent", f"answers of {len(sums)} with another bit")
        for axes, name, label in zip(panels, names, labels, strict=True):
            for mode, marker in zip(MODES, "ox", strict=True):
                own = [row for row in rows if row["mode"] == mode]
                axes.plot(
                    [f"{r['tp']}\n{r['batch']}" for r in own],
                    [r[name] for r in own],
                    marker=marker,
                    label=mode,
                )
            axes.set(xlabel="tp, and batch size below it", ylabel=label)
        panels[0].legend(frameon=False)

    return Result(
        title="Two-digit additions, greedy, over batch sizes and meshes",
        setting=lab.setting,
        columns=tuple(rows[0]),
        rows=rows,
        findings=[
            f"{mode}: accuracy swings by {swing(mode):.2f} points, "
            f"{max(r['logprobs_changed'] for r in rows if r['mode'] == mode)} of {len(sums)} "
            "answers change in a bit"
            for mode in MODES
        ],
        plot=plot,
    )


EXPERIMENT = WholeExperiment(
    question="How far does a benchmark score move with batch size and mesh alone?",
    paper="Yuan et al. 2025 (arXiv:2506.09501): up to 9 % in accuracy for "
    "DeepSeek-R1-Distill-Qwen-7B, greedy, bfloat16, over batch size and GPUs. Zhang et al. 2025 "
    "(arXiv:2511.17826): over 4 % for Qwen3-8B on AIME24 by tp alone.",
    run=run,
    seconds=150.0,
)
