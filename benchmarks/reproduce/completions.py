# SPDX-License-Identifier: Apache-2.0
"""One prompt, many times, at temperature 0, while other requests come and go."""

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.reproduce.experiment import (
    Experiment,
    Lab,
    Part,
    Result,
    Row,
    first_difference,
    name_of,
    prompts,
    windows_since,
)
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.plots import COLOURS, finish

PROMPT = "Her uncle came back in London without a word"
"""One of the openings whose answers part: of 48, six did between batches of 1 and 48 (CPU)."""
MODES: tuple[str, ...] = ("fast", "invariant", "dvr")
MOST_S = 30.0
"""Of a mode under load."""


def _engine(lab: Lab, mode: str, max_tokens: int) -> Engine:
    """Decode steps come in several sizes, and the smallest that holds the rows runs.

    `dvr` is made to draft, also where canonical steps are quicker: it is what is asked about.
    """
    batch, decode_batches = lab.pick((16, (1, 4)), (64, (1, 8, 32)))
    return lab.engine(
        mode,
        batch_size=batch,
        max_len=24 + max_tokens,
        decode_batches=decode_batches,
        prefill=(8, 16),
        max_draft_fraction=1.0 if mode == "dvr" else None,
        has_long_answers=True,
    )


def _alone(lab: Lab, engine: Engine, mode: str, max_tokens: int) -> Completion:
    """The prompt with nothing beside it."""
    request = lab.request(
        PROMPT, max_tokens=max_tokens, is_deterministic=mode != "fast", ignore_eos=True
    )
    return engine.generate([request])[0]


def _under_load(
    lab: Lab, engine: Engine, mode: str, count: int, max_tokens: int
) -> list[Completion]:
    """The prompt `count` times, among others: as often few at a time as many.

    Fewer times where `MOST_S` are over: what then runs is finished, and no more is asked.
    """
    rng, others, most = np.random.default_rng(1), prompts(200), lab.pick(16, 64)
    found: list[Completion] = []
    end_s = time.perf_counter() + MOST_S
    while len(found) < count and time.perf_counter() < end_s:
        copies = min(round(most ** rng.random()), count - len(found))
        texts = [PROMPT] * copies
        texts += list(rng.choice(others, int(rng.integers(0, copies))))
        order = rng.permutation(len(texts))
        requests = [
            lab.request(
                texts[i],
                max_tokens=max_tokens if texts[i] == PROMPT else int(rng.integers(1, max_tokens)),
                is_deterministic=mode != "fast",
                ignore_eos=True,
            )
            for i in order
        ]
        answers = engine.generate(requests)
        found += [c for i, c in zip(order, answers, strict=True) if texts[i] == PROMPT]
    return found


def _spans(answer: tuple[int, ...], expected: tuple[int, ...]) -> tuple[int, int]:
    """Tokens before the first difference, and from there to the second."""
    first = first_difference(answer, expected)
    if first is None:
        return len(expected), 0
    rest = first_difference(answer[first + 1 :], expected[first + 1 :])
    return first, len(expected) - first - 1 if rest is None else rest


def findings(rows: Sequence[Row]) -> list[str]:
    """How many answers there were in each mode, and how many are the canonical one."""
    by_mode = {row["mode"]: row for row in rows}
    told = []
    if fast := by_mode.get("fast"):
        count, parts = fast["requests"], fast["first_difference"]
        told.append(
            f"fast: {fast['texts']} different texts and {fast['with_logprobs']} different sets of "
            f"logprobs, alone and {count} times under load; {fast['as_alone']} of {count} are the "
            "answer that it gets alone"
            + ("" if parts is None else f", the first difference is at token {parts}")
        )
    for mode in ("invariant", "dvr"):
        if (row := by_mode.get(mode)) is None:
            continue
        windows = ""
        if mode == "dvr" and row.get("windows"):
            windows = f", {row['rollbacks']} of {row['windows']} windows rolled back"
        told.append(
            f"{name_of(row)}: {row['with_logprobs']} ({_num_canonical(row, by_mode)} of "
            f"{row['requests']} are the canonical answer, bit for bit{windows})"
        )
    return told


def _num_canonical(row: Row, by_mode: dict[str, Row]) -> int:
    """Answers that are the one that `invariant` gives alone, where both say which it is."""
    canonical = by_mode.get("invariant", row)
    if row.get("alone") == canonical.get("alone"):
        return row["canonical"]
    return row["digests"].get(canonical["alone"], 0)


def _rows(lab: Lab, mode: str) -> list[Row]:
    """Unique completions, where they part from the answer alone, and for how long they agree."""
    count, max_tokens = lab.pick((32, 96), (1000, 1000))
    engine = _engine(lab, mode, max_tokens)
    alone = _alone(lab, engine, mode, max_tokens)
    begin_s = time.perf_counter()
    answers = _under_load(lab, engine, mode, count, max_tokens)
    seconds = time.perf_counter() - begin_s
    every = [alone, *answers]
    tokens = Counter(c.token_ids for c in every)
    parts = [first_difference(ids, alone.token_ids) for ids in tokens]
    windows, rollbacks = windows_since(engine)
    spans = [_spans(c.token_ids, alone.token_ids) for c in answers]
    as_alone = sum(c.digest() == alone.digest() for c in answers)
    return [
        {
            "mode": mode, "requests": len(answers), "wanted": count, "tokens": max_tokens,
            "texts": len(tokens), "with_logprobs": len({c.digest() for c in every}),
            "most_common": tokens.most_common(1)[0][1],
            "first_difference": min((p for p in parts if p is not None), default=None),
            "as_alone": as_alone, "canonical": as_alone, "alone": alone.digest()[:12],
            "digests": dict(Counter(c.digest()[:12] for c in answers)),
            "first_span": float(np.median([a for a, _ in spans])),
            "second_span": float(np.median([b for _, b in spans])),
            "spans": [[list(pair), n] for pair, n in sorted(Counter(spans).items())],
            "windows": windows, "rollbacks": rollbacks, "seconds": round(seconds, 1),
            "wrong": 0 if mode == "fast" else len(answers) - as_alone,
        }
    ]  # fmt: skip


def plot(figure, rows: Sequence[Row]) -> None:
    """Different answers of each mode, and how many are the one that the prompt gets alone."""
    panels = figure.subplots(1, 3, sharey=True)
    columns = (
        ("Different texts", lambda row: row["texts"]),
        ("Different texts and logprobs", lambda row: row["with_logprobs"]),
        ("Bits of the answer alone, %",
         lambda row: 100 * row["canonical"] / row["requests"]),
    )  # fmt: skip
    own = [row for mode in reversed(MODES) for row in rows if row["mode"] == mode]
    names = [f"{name_of(row)}\n{row['requests']:,} answers" for row in own]
    for axes, (title, value) in zip(panels, columns, strict=True):
        for at, row in enumerate(own):
            bars = axes.barh(at, value(row), color=COLOURS[row["mode"]], height=0.6)
            axes.bar_label(bars, fmt="{:g}", padding=3)
        axes.margins(x=0.2)
        finish(axes, title=title, x="", y="", legend=False)
    panels[0].set_yticks(range(len(own)), names)


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title=f"{PROMPT!r} at temperature 0 under changing load, {rows[0]['tokens']} tokens each, "
        f"as often as {MOST_S:.0f} s allow, {rows[0]['wanted']} times at most",
        setting=setting,
        columns=(
            "mode", "requests", "texts", "with_logprobs", "most_common", "first_difference",
            "as_alone", "first_span", "second_span", "windows", "rollbacks", "wrong",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def parts(lab: Lab) -> list[Part]:
    """A piece for each mode."""
    return [
        Part(name=mode, seconds=50, run=lambda mode=mode: _rows(lab, mode))
        for mode in ("fast", "invariant", "dvr")
    ]


EXPERIMENT = Experiment(
    question="Does the same prompt get the same answer at temperature 0 when the load changes?",
    paper="He 2025 (Thinking Machines): Qwen3-235B, 1000 requests of 1000 tokens: 80 unique "
    "completions, the first difference at token 103 (992 against 8); all 1000 the same with "
    "batch-invariant kernels. Spans as in LLM-42 (arXiv:2601.17768), figure 6.",
    parts=parts,
    result=result,
    setting=lambda lab, _: lab.setting,
)
