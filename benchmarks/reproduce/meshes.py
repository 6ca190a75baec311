# SPDX-License-Identifier: Apache-2.0
"""The same prompts on every (tp, batch size), for several shapes: how many different answers?"""

import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.reproduce.experiment import (
    RANDOM,
    Experiment,
    Lab,
    Part,
    Result,
    Row,
    answer_few_at_a_time,
    digest_of,
    largest_divergence,
    prompts,
)
from benchmarks.step import MODELS
from detjax.engine.outputs.completion import Completion
from detjax.models.loading import LoadedModel, random_model
from detjax.models.params import possible_tps
from detjax.numerics import NumericsProfile
from detjax.parallel.mesh import make_mesh
from detjax.plots import COLOURS, finish

MODES: tuple[str, ...] = ("fast", "invariant")
TRAINED = "trained"
SHAPES = ("qwen3_8b", "llama3_8b", "mistral_7b", "qwen25_7b")
"""Of random weights, with `LAYERS` of their layers."""
LAYERS = 4
LONGEST_PROMPT = 384
"""Tokens; longer problems are cut."""


def _texts(lab: Lab) -> list[str]:
    """Problems of the file that was given, or openings."""
    if lab.prompts:
        return list(lab.prompts[: lab.pick(6, 30)])
    return prompts(lab.pick(8, 100))


def _model(lab: Lab, shape: str, tp: int) -> LoadedModel:
    if shape == TRAINED:
        return lab.model(tp)
    config = MODELS[shape]
    return random_model(
        config.with_layers([i % config.num_layers for i in range(LAYERS)]),
        seed=0,
        profile=NumericsProfile(),
        mesh=make_mesh(1, tp, platform=lab.backend.platform),
        backend=lab.backend,
    )


def _tps(lab: Lab, shape: str) -> tuple[int, ...]:
    if shape == TRAINED:
        possible = lab.tps
    else:
        allowed = possible_tps(MODELS[shape])
        possible = tuple(tp for tp in allowed if tp <= min(lab.num_devices, 8))
    return lab.pick(possible[:3:2], possible[:3])


def _cut(token_ids: Sequence[int], vocab: int | None) -> tuple[int, ...]:
    """The first tokens of a prompt, modulo the vocabulary of a shape that has fewer."""
    return tuple(token if vocab is None else token % vocab for token in token_ids[:LONGEST_PROMPT])


def _answers(lab: Lab, shape: str, mode: str, tps: Sequence[int], batches, max_tokens: int):
    """The answers to all prompts by (tp, batch size), with engines compiled side by side."""
    texts = _texts(lab)
    asked = [
        lab.request(text, max_tokens=max_tokens, is_deterministic=mode != "fast") for text in texts
    ]
    vocab = MODELS[shape].vocab_size if shape != TRAINED else None
    asked = [replace(one, prompt_token_ids=_cut(one.prompt_token_ids, vocab)) for one in asked]
    longest = max(len(one.prompt_token_ids) for one in asked) + max_tokens
    engines = {
        tp: lab.engine(
            mode, model=_model(lab, shape, tp), batch_size=max(batches), max_len=longest,
            decode_batches=tuple(batches[:-1]), prefill=(min(8, batches[0]), 128),
            is_compiled=False,
        )
        for tp in tps
    }  # fmt: skip
    lab.compile_together(engines.values())
    return {
        (tp, batch): answer_few_at_a_time(engine, asked, most=batch)
        for tp, engine in engines.items()
        for batch in batches
    }


def _rows(lab: Lab, shape: str) -> list[Row]:
    """Unique outputs a prompt and the largest probability difference, over tp x batch size."""
    batches, max_tokens = lab.pick((1, 8), (8, 16, 32)), lab.pick(16, 128)
    tps = _tps(lab, shape)
    name = lab.folder.name if shape == TRAINED else f"{shape} (random weights, {LAYERS} layers)"
    weights = lab.weights if shape == TRAINED else RANDOM
    rows = []
    for mode in MODES:
        gc.collect()  # the caches of the engines before
        runs = _answers(lab, shape, mode, tps, batches, max_tokens)
        by_prompt: list[tuple[Completion, ...]] = list(zip(*runs.values(), strict=True))
        unique = [len({c.token_ids for c in answers}) for answers in by_prompt]
        bits = [len({c.digest() for c in answers}) for answers in by_prompt]
        divergence = [largest_divergence(answers) for answers in by_prompt]
        for (tp, batch), answers in runs.items():
            rows.append(
                {
                    "mode": mode, "model": name, "weights": weights, "gpu": lab.device_kind,
                    "tp": tp, "batch": batch,
                    "digest": digest_of(answers), "prompts": len(answers),
                    "prompts_of": "a file" if lab.prompts else "openings", "tokens": max_tokens,
                    "settings": len(runs),
                    "unique_outputs_mean": float(np.mean(unique)),
                    "unique_outputs_max": max(unique),
                    "unique_with_logprobs_mean": float(np.mean(bits)),
                    "unique_with_logprobs_max": max(bits),
                    "max_prob_divergence_mean": float(np.mean(divergence)),
                    "answers": "".join(one.digest()[:8] for one in answers),
                    "wrong": sum(n > 1 for n in bits) if mode == "invariant" else 0,
                }
            )  # fmt: skip
    return rows


def _equal_answers(rows: Sequence[Row]) -> int | None:
    """Prompts whose canonical answers have the same bits on all kinds of processor that ran.

    None for one kind, or for weights of two trainings.
    """
    by_gpu = {row["gpu"]: row["answers"] for row in rows if row["mode"] == "invariant"}
    if len(by_gpu) < 2 or len({row["weights"] for row in rows}) > 1:
        return None
    found = [[text[i : i + 8] for i in range(0, len(text), 8)] for text in by_gpu.values()]
    return sum(len(set(of_one)) == 1 for of_one in zip(*found, strict=True))


def _told_equal(rows: Sequence[Row]) -> str:
    """How many of the canonical answers of some models are equal between kinds of processor."""
    by_model = {row["model"]: [r for r in rows if r["model"] == row["model"]] for row in rows}
    same = [_equal_answers(own) for own in by_model.values()]
    if None in same:
        return ""
    asked = sum(own[0]["prompts"] for own in by_model.values())
    gpus = dict.fromkeys(row["gpu"] for row in rows)
    return (
        f"; {sum(filter(None, same))} of {asked} canonical answers have the same bits on "
        f"{' and '.join(gpus)}, which is not promised"
    )


def findings(rows: Sequence[Row]) -> list[str]:
    """For each model and kind of processor: unique outputs and divergence, in both modes."""
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        parts = []
        for gpu in dict.fromkeys(row["gpu"] for row in of_model):
            own = [row for row in of_model if row["gpu"] == gpu]
            tps, batches = (
                " and ".join(map(str, sorted({row[name] for row in own})))
                for name in ("tp", "batch")
            )
            by_mode = {row["mode"]: row for row in own}
            modes = [
                f"{mode} {by_mode[mode]['unique_outputs_mean']:.2f} unique outputs a prompt "
                f"({by_mode[mode]['unique_with_logprobs_mean']:.2f} with logprobs), divergence "
                f"{short_number(by_mode[mode]['max_prob_divergence_mean'])}"
                for mode in MODES
                if mode in by_mode
            ]
            parts.append(f"{gpu}, tp {tps} x batch {batches}: {', '.join(modes)}")
        told.append(f"{model}: {'; '.join(parts)}{_told_equal(of_model)}")
    return told


def plot(figure, rows: Sequence[Row]) -> None:
    """Unique outputs a prompt and the divergence, by model, processor and mode."""
    panels = figure.subplots(1, 2, sharey=True)
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row["model"], row["gpu"]), {})[row["mode"]] = row
    figure.set_size_inches(10, 1.6 + 0.5 * len(by_case))
    at = np.arange(len(by_case))
    columns = "unique_with_logprobs_mean", "max_prob_divergence_mean"
    labels = "Different answers a prompt, logprobs included", "Largest change of a probability"
    for axes, column, label in zip(panels, columns, labels, strict=True):
        for shift, mode in zip((-0.2, 0.2), MODES, strict=True):
            values = [found[mode][column] for found in by_case.values()]
            bars = axes.barh(at + shift, values, height=0.4, label=mode, color=COLOURS[mode])
            axes.bar_label(bars, fmt="%.2g", padding=3)
        axes.margins(x=0.15)
        finish(axes, title=label, x="mean over prompts", y="", legend=False)
    panels[0].set_yticks(at, [f"{model}\n{gpu}" for model, gpu in by_case])
    panels[0].invert_yaxis()
    panels[0].legend()


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title=f"{rows[0]['prompts']} prompts ({rows[0]['prompts_of']}), {rows[0]['tokens']} "
        "greedy tokens, by tp and batch size",
        setting=setting,
        columns=(
            "model", "gpu", "mode", "tp", "batch", "digest", "unique_outputs_mean",
            "unique_outputs_max", "unique_with_logprobs_mean", "max_prob_divergence_mean", "wrong",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def short_number(value: float) -> str:
    return f"{value:.2g}" if value else "0"


def _setting(lab: Lab, part: Part) -> str:
    if part.name == TRAINED:
        return lab.setting
    return f"the shapes: {LAYERS} layers of random weights, bfloat16, {lab.machine}"


def parts(lab: Lab) -> list[Part]:
    """A piece for each model."""
    return [
        Part(name=shape, seconds=40, run=lambda shape=shape: _rows(lab, shape))
        for shape in lab.pick((TRAINED, "tiny"), (TRAINED, *SHAPES))
    ]


EXPERIMENT = Experiment(
    question="Do tensor parallelism and batch size change the answer?",
    paper="Zhang et al. 2025 (TBIK, arXiv:2511.17826), tables 1 and 2: with bfloat16 kernels many "
    "unique outputs over tp {1, 2, 4, 8} x batch {8, 16, 32}; exactly 1, and divergence 0, with "
    "tree-based kernels, for 22 to 63 % more latency.",
    parts=parts,
    result=result,
    setting=_setting,
)
