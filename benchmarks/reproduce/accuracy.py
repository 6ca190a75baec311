# SPDX-License-Identifier: Apache-2.0
"""The same benchmark, the same model, another batch size, mesh or dtype: another score?"""

import sys
from collections.abc import Sequence
from functools import cache

import numpy as np

from benchmarks.reproduce.experiment import (
    Experiment,
    Lab,
    Part,
    Result,
    Row,
    answer_few_at_a_time,
    digest_of,
)
from benchmarks.reproduce.problems import LEVELS, MOST_TOKENS, Problem
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.models.abstract import why_unsupported
from detjax.models.hf_config import load_config
from detjax.numerics import NumericsProfile
from detjax.plots import COLOURS, finish

MODES: tuple[str, ...] = ("invariant", "fast")
WANTED = 0.6
"""Accuracy at which a swing shows best: the set of problems is the one that comes nearest."""
SET = 30
"""Problems of AIME 2024: in sets of so many the papers count."""


def _batches(lab: Lab) -> tuple[int, ...]:
    return lab.pick((4, 16), (8, 32, 128))


def _longest(lab: Lab) -> int:
    """Tokens of a prompt and its answer."""
    return lab.pick(64, 16 + MOST_TOKENS)


def _engine(lab: Lab, mode: str, tp: int, dtype: str, batches: Sequence[int]) -> Engine:
    return lab.engine(
        mode,
        model=lab.model(tp, dtype),
        batch_size=max(batches),
        decode_batches=tuple(batches[:-1]),
        max_len=_longest(lab),
        prefill=(min(8, max(batches)), 16),
        has_long_answers=True,
        is_compiled=False,
    )


def _answers(
    lab: Lab, engine: Engine, mode: str, problems: Sequence[Problem], most: int
) -> list[Completion]:
    requests = [
        lab.request(
            one.prompt,
            max_tokens=min(2 * len(one.answer) + 8, _longest(lab) - len(one.prompt) - 1),
            is_deterministic=mode != "fast",
            stop="\n",
        )
        for one in problems
    ]
    return answer_few_at_a_time(engine, requests, most=most)


def _right(lab: Lab, answers: Sequence[Completion], problems: Sequence[Problem]) -> np.ndarray:
    texts = [lab.tokenizer.decode(one.token_ids) for one in answers]
    return np.asarray([text == one.answer for text, one in zip(texts, problems, strict=True)])


@cache
def _engines(lab: Lab, tp: int, dtype: str, batches: tuple[int, ...]) -> dict[str, Engine]:
    """Both modes, compiled side by side."""
    engines = {mode: _engine(lab, mode, tp, dtype, batches) for mode in MODES}
    lab.compile_together(engines.values())
    return engines


@cache
def scores_by_level(lab: Lab) -> dict[str, float]:
    """Share that the model gets right of some problems of each set, in canonical bfloat16.

    Sets with longer answers than the size allows are left out.
    """
    count = lab.pick(16, 64)
    sets = {name: make(count) for name, make in LEVELS.items()}
    sets = {
        name: problems
        for name, problems in sets.items()
        if max(len(p.prompt) + len(p.answer) for p in problems) + 2 <= _longest(lab)
    }
    batches = _batches(lab)
    engine = _engines(lab, 1, "bfloat16", batches)["invariant"]
    problems = [one for of_set in sets.values() for one in of_set]
    answers = _answers(lab, engine, "invariant", problems, max(batches))
    right = _right(lab, answers, problems).reshape(len(sets), count)
    return dict(zip(sets, right.mean(axis=1).tolist(), strict=True))


def chosen_level(lab: Lab) -> str:
    """The set of problems whose accuracy is nearest to `WANTED`."""
    scores = scores_by_level(lab)
    return min(scores, key=lambda name: abs(scores[name] - WANTED))


def _rows(lab: Lab, dtype: str, tp: int, batches: tuple[int, ...]) -> list[Row]:
    """Accuracy, changed answers and changed logprobs over batch sizes, in both modes.

    Changes are counted against the first batch size, here and in no other piece.
    """
    level = chosen_level(lab)
    problems = LEVELS[level](lab.pick(48, 1000))
    rows = []
    for mode, engine in _engines(lab, tp, dtype, batches).items():
        base: list[Completion] = []
        for batch in batches:
            answers = _answers(lab, engine, mode, problems, batch)
            base = base or answers
            right = _right(lab, answers, problems)
            lengths = [len(one.token_ids) for one in answers]
            longer = [abs(n - len(one.token_ids)) for n, one in zip(lengths, base, strict=True)]
            bits = sum(a.digest() != b.digest() for a, b in zip(answers, base, strict=True))
            rows.append(
                {
                    "mode": mode, "dtype": dtype, "tp": tp, "batch": batch, "problems": len(right),
                    "level": level, "level_scores": scores_by_level(lab),
                    "accuracy_percent": 100 * float(right.mean()),
                    "texts_changed": sum(
                        a.token_ids != b.token_ids for a, b in zip(answers, base, strict=True)
                    ),
                    "logprobs_changed": bits, "wrong": bits if mode == "invariant" else 0,
                    "length_mean": float(np.mean(lengths)),
                    "length_change_mean": float(np.mean(longer)),
                    "length_change_most": max(longer),
                    "digest": digest_of(answers),
                    "answers": "".join(one.digest()[:4] for one in answers),
                    "right": np.packbits(right).tobytes().hex(),
                }
            )  # fmt: skip
    return rows


def _right_of(row: Row) -> np.ndarray:
    """Of each problem, whether the answer was right."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(row["right"]), np.uint8))
    return bits[: row["problems"]].astype(bool)


def _swings(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Points from the worst to the best setting: of all problems, of sets of 30 on average, most.

    Problems that do not fill a set are left out.
    """
    right = 100 * np.stack([_right_of(row) for row in rows]).astype(float)
    whole = right.mean(axis=1)
    count = right.shape[1] // SET * SET
    sets = right[:, :count].reshape(len(rows), -1, SET).mean(axis=2)
    of_sets = np.ptp(sets, axis=0)
    return float(np.ptp(whole)), float(of_sets.mean()), float(of_sets.max())


def _num_changed(rows: Sequence[Row]) -> int:
    """Answers that do not have the same bits in all settings."""
    texts = [[row["answers"][i : i + 4] for i in range(0, len(row["answers"]), 4)] for row in rows]
    return sum(len(set(of_one)) > 1 for of_one in zip(*texts, strict=True))


def findings(rows: Sequence[Row]) -> list[str]:
    """For each mode and dtype how far the score moves over batch sizes and GPUs."""
    told = []
    for mode in MODES[::-1]:
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            own = [row for row in rows if (row["mode"], row["dtype"]) == (mode, dtype)]
            scores = [row["accuracy_percent"] for row in own]
            swing, of_set, most = _swings(own)
            meshes = " and ".join(str(tp) for tp in sorted({row["tp"] for row in own}))
            batches = ", ".join(str(n) for n in sorted({row["batch"] for row in own}))
            told.append(
                f"{mode}, {dtype}: {min(scores):.1f} to {max(scores):.1f} % right, a swing of "
                f"{swing:.1f} points; of {SET} problems {of_set:.1f} on average, {most:.1f} at "
                f"most. {_num_changed(own)} of {own[0]['problems']} answers change in a bit, "
                f"{max(row['texts_changed'] for row in own)} in a token; lengths by up to "
                f"{max(row['length_change_most'] for row in own)} tokens (batch {batches}, tp "
                f"{meshes})"
            )
    return told


def plot(figure, rows: Sequence[Row]) -> None:
    """Answers that change in a bit between settings, and the score in each of them."""
    left, right = figure.subplots(1, 2, sharey=True)
    cases = list(dict.fromkeys((row["mode"], row["dtype"]) for row in rows))[::-1]
    for at, (mode, dtype) in enumerate(cases):
        own = [row for row in rows if (row["mode"], row["dtype"]) == (mode, dtype)]
        bars = left.barh(at, _num_changed(own), color=COLOURS[mode])
        left.bar_label(bars, padding=3)
        scores = [row["accuracy_percent"] for row in own]
        right.plot([min(scores), max(scores)], [at, at], color=COLOURS[mode])
        right.plot(scores, [at] * len(scores), "o", color=COLOURS[mode], alpha=0.6)
    names = [f"{mode}, {dtype}" for mode, dtype in cases]
    left.set_yticks(range(len(cases)), names)
    left.margins(x=0.15)
    right.margins(x=0.15)
    one = f"answers of {rows[0]['problems']:,}"
    finish(left, title="Change in a bit between settings", x=one, y="", legend=False)
    title = "Score in each setting of batch size and tp"
    finish(right, title=title, x="right answers (%)", y="", legend=False)


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title=f"{rows[0]['problems']} problems, greedy ({rows[0]['level']}, of the sets the one "
        f"nearest to {WANTED:.0%} right), over batch sizes, meshes and dtypes",
        setting=setting,
        columns=(
            "mode", "dtype", "tp", "batch", "accuracy_percent", "texts_changed",
            "logprobs_changed", "length_mean", "length_change_mean", "digest", "wrong",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def _runs(lab: Lab, dtype: str, tp: int) -> bool:
    """Whether the kernels take the model with activations of a dtype, which is said if not."""
    profile = NumericsProfile(compute_dtype=dtype)
    refused = why_unsupported(load_config(lab.folder), profile, lab.backend, tp)
    if refused:
        print(f"accuracy: no piece of {dtype}, tp {tp}: {refused}", file=sys.stderr)
    return refused is None


def parts(lab: Lab) -> list[Part]:
    """A piece for each dtype and mesh; one request at a time, which takes longest, is the last."""
    tps, batches = lab.pick(lab.tps[:3:2], lab.tps[:3]), _batches(lab)
    pieces = [
        (dtype, tp, batches, 80)
        for tp in tps
        for dtype in ("bfloat16", "float32")
        if _runs(lab, dtype, tp)
    ]
    if lab.is_full:
        pieces.append(("bfloat16", 1, (1,), 150))
    return [
        Part(
            name=f"{dtype}, tp {tp}" + (", alone" if batches == (1,) else ""),
            seconds=seconds,
            run=lambda dtype=dtype, tp=tp, batches=batches: _rows(lab, dtype, tp, batches),
        )
        for dtype, tp, batches, seconds in pieces
    ]


EXPERIMENT = Experiment(
    question="How far does a benchmark score move with batch size, GPUs and dtype alone?",
    paper="Yuan et al. 2025 (arXiv:2506.09501): up to 9 % in accuracy and 9,000 tokens in length "
    "for DeepSeek-R1-Distill-Qwen-7B, greedy, bfloat16, over batch size and GPUs; float32 compute "
    "with 16-bit weights (LayerCast) takes most of it away. Zhang et al. 2025 (arXiv:2511.17826): "
    "over 4 % for Qwen3-8B on AIME24 by tp alone.",
    parts=parts,
    result=result,
    setting=lambda lab, _: lab.setting,
)
