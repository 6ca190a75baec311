# SPDX-License-Identifier: Apache-2.0
"""One prompt, many times, at temperature 0, while other requests come and go."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.reproduce.experiment import (
    Lab,
    Result,
    Row,
    WholeExperiment,
    first_difference,
    name_of,
    prompts,
    windows_since,
)
from detjax.serving.engine import Engine
from detjax.serving.request import Completion

PROMPT = "Her uncle came back in London without a word"
"""One of the openings whose answers part: of 48, six did between batches of 1 and 48 (CPU)."""
MODES: tuple[str, ...] = ("fast", "invariant", "dvr")


def _engine(lab: Lab, mode: str, max_tokens: int) -> Engine:
    """Decode steps come in several sizes, and the smallest that holds the rows runs.

    `dvr` is made to draft, also where canonical steps are quicker: it is what is asked about.
    """
    batch, decode_batches = lab.pick((16, (1, 4)), (64, (1, 8, 32)))
    return lab.engine(
        mode,
        batch_size=batch,
        max_len=32 + max_tokens,
        decode_batches=decode_batches,
        prefill=(8, 32),
        max_draft_fraction=1.0 if mode == "dvr" else None,
    )


def _alone(lab: Lab, engine: Engine, mode: str, max_tokens: int) -> Completion:
    """The prompt with nothing beside it."""
    request = lab.request(PROMPT, max_tokens=max_tokens, is_deterministic=mode != "fast")
    return engine.generate([request])[0]


def _under_load(
    lab: Lab, engine: Engine, mode: str, count: int, max_tokens: int
) -> list[Completion]:
    """The prompt `count` times, among others: as often few at a time as many."""
    rng, others, most = np.random.default_rng(1), prompts(200), lab.pick(16, 64)
    found: list[Completion] = []
    while len(found) < count:
        copies = min(round(most ** rng.random()), count - len(found))
        texts = [PROMPT] * copies
        texts += list(rng.choice(others, int(rng.integers(0, copies))))
        order = rng.permutation(len(texts))
        requests = [
            lab.request(
                texts[i],
                max_tokens=max_tokens if texts[i] == PROMPT else int(rng.integers(1, max_tokens)),
                is_deterministic=mode != "fast",
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
    fast, count = by_mode["fast"], by_mode["fast"]["requests"]
    parts = fast["first_difference"]
    told = [
        f"fast: {fast['texts']} different texts and {fast['with_logprobs']} different sets of "
        f"logprobs, alone and {count} times under load; {fast['as_alone']} of {count} are the "
        "answer that it gets alone"
        + ("" if parts is None else f", the first difference is at token {parts}")
    ]
    for row in (by_mode["invariant"], by_mode["dvr"]):
        windows = ""
        if row["mode"] == "dvr" and row.get("windows"):
            windows = f", {row['rollbacks']} of {row['windows']} windows rolled back"
        told.append(
            f"{name_of(row)}: {row['with_logprobs']} ({row['canonical']} of {count} are the "
            f"canonical answer, bit for bit{windows})"
        )
    return told


def run(lab: Lab) -> Result:
    """Unique completions, where they part from the answer alone, and for how long they agree."""
    count, max_tokens = lab.pick((32, 96), (1000, 256))
    rows, spans, canonical = [], {}, ""
    for mode in ("invariant", "fast", "dvr"):
        engine = _engine(lab, mode, max_tokens)
        alone = _alone(lab, engine, mode, max_tokens)
        canonical = canonical or alone.digest()
        answers = _under_load(lab, engine, mode, count, max_tokens)
        every = [alone, *answers]
        tokens = Counter(c.token_ids for c in every)
        parts = [first_difference(ids, alone.token_ids) for ids in tokens]
        windows, rollbacks = windows_since(engine)
        spans[mode] = [_spans(c.token_ids, alone.token_ids) for c in answers]
        rows.append(
            {
                "mode": mode,
                "requests": count,
                "tokens": max_tokens,
                "texts": len(tokens),
                "with_logprobs": len({c.digest() for c in every}),
                "most_common": tokens.most_common(1)[0][1],
                "first_difference": min((p for p in parts if p is not None), default=None),
                "as_alone": sum(c.digest() == alone.digest() for c in answers),
                "canonical": sum(c.digest() == canonical for c in answers),
                "first_span": float(np.median([a for a, _ in spans[mode]])),
                "second_span": float(np.median([b for _, b in spans[mode]])),
                "windows": windows,
                "rollbacks": rollbacks,
            }
        )
    by_mode = {row["mode"]: row for row in rows}

    def plot(figure) -> None:
        left, right = figure.subplots(1, 2)
        names = [name_of(by_mode[m]) for m in MODES]
        left.bar(names, [by_mode[m]["with_logprobs"] for m in MODES], color="tab:blue",
                 alpha=0.4, label="with logprobs")  # fmt: skip
        left.bar(names, [by_mode[m]["texts"] for m in MODES], color="tab:blue",
                 width=0.5, label="token ids")  # fmt: skip
        left.set(ylabel=f"unique completions of {count + 1}")
        if max(row["with_logprobs"] for row in rows) > 20:
            left.set_yscale("log")
        left.legend(frameon=False)
        for index, label in enumerate(("first span", "second span")):
            values = np.sort([pair[index] for pair in spans["fast"]])
            right.step(values, np.arange(1, len(values) + 1) / len(values), label=label)
        right.set(xlabel="tokens equal to the answer alone, fast", ylabel="share of requests",
                  ylim=(0, 1.02))  # fmt: skip
        right.legend(frameon=False)

    return Result(
        title=f"{PROMPT!r}, {count} times at temperature 0 under changing load",
        setting=lab.setting,
        columns=tuple(rows[0]),
        rows=rows,
        findings=findings(rows),
        plot=plot,
    )


EXPERIMENT = WholeExperiment(
    question="Does the same prompt get the same answer at temperature 0 when the load changes?",
    paper="He 2025 (Thinking Machines): Qwen3-235B, 1000 requests of 1000 tokens: 80 unique "
    "completions, the first difference at token 103 (992 against 8); all 1000 the same with "
    "batch-invariant kernels. Spans as in LLM-42 (arXiv:2601.17768), figure 6.",
    run=run,
    seconds=120.0,
)
