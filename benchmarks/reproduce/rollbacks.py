# SPDX-License-Identifier: Apache-2.0
"""How often drafts of a trained model are rolled back, and how much is computed again."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.reproduce.experiment import Experiment, Lab, Part, Result, Row
from benchmarks.reproduce.loads import GROUP, WINDOW, num_different, trained_server, window_facts
from benchmarks.serving import PlannedRequest
from detjax.plots import COLOURS, finish

TEMPERATURES = (0.0, 0.8)


def _rows(lab: Lab, window: int) -> list[Row]:
    """All deterministic requests at once: `invariant` for the bits, `fast` as control, `dvr`."""
    server = trained_server(lab)
    count, output_len = lab.pick((12, 40), (256, 384))
    rows = []
    exact = {t: [] for t in TEMPERATURES}
    for mode in ("invariant", "fast", "dvr"):
        engine = server.engine(mode, window=window, max_prefill_streak=64)
        planned = [
            PlannedRequest(
                at_s=0.0, prompt_len=16, output_len=output_len, is_deterministic=mode != "fast"
            )
            for _ in range(count)
        ]
        for temperature in TEMPERATURES:
            told = server.serve(engine, planned, temperature=temperature)
            exact[temperature] = exact[temperature] or told
            canonical = exact[temperature]
            row = {
                "mode": mode, "temperature": temperature, "window": window, "group": GROUP,
                "requests": count, "output_len": output_len,
                "wrong": num_different(told, canonical, claimed=True),
                "plain_different": num_different(told, canonical, claimed=False),
                **window_facts(told),
            }  # fmt: skip
            if mode == "dvr":
                row["of_rollbacks"] = _distribution(one.windows.num_rollbacks for one in told)
                row["of_recomputed"] = _distribution(one.windows.num_rolled_back for one in told)
            rows.append(row)
        del engine
    return rows


def _distribution(values) -> list[list[int]]:
    """(value, requests) pairs, ascending."""
    return [list(pair) for pair in sorted(Counter(values).items())]


def _expanded(pairs: Sequence[Sequence[int]]) -> np.ndarray:
    return np.repeat([value for value, _ in pairs], [count for _, count in pairs])


def findings(rows: Sequence[Row]) -> list[str]:
    """Rollbacks of a request, recomputed tokens, and the bits."""
    told = []
    for row in rows:
        if row["mode"] != "dvr":
            continue
        rollbacks, tokens = (_expanded(row[name]) for name in ("of_rollbacks", "of_recomputed"))
        told.append(
            f"windows of {row['window']}, temperature {row['temperature']:g}: "
            f"{row['none_percent']:.0f} % of {row['requests']} requests roll nothing back, the "
            f"others up to {rollbacks.max()} times; {row['recomputed_percent']:.1f} % of the "
            f"tokens are computed again, at P99 {np.percentile(tokens, 99):.0f} of a request's "
            f"{row['output_len']}; {row['wrong']} answers have another bit than the canonical one"
        )
    return told


def plot(figure, rows: Sequence[Row]) -> None:
    """Share of the requests with at most so many rollbacks, and so many recomputed tokens."""
    left, right = figure.subplots(1, 2, sharey=True)
    own = [row for row in rows if row["mode"] == "dvr"]
    windows = sorted({row["window"] for row in own})
    temperatures = sorted({row["temperature"] for row in own})
    for row in own:
        style = {
            "color": COLOURS["dvr"],
            "linestyle": ("-", "--", ":", "-.")[windows.index(row["window"]) % 4],
            "alpha": 1.0 if row["temperature"] == temperatures[0] else 0.5,
            "label": f"dvr, window {row['window']}, temperature {row['temperature']:g}",
        }
        for axes, name in ((left, "of_rollbacks"), (right, "of_recomputed")):
            values = np.sort(_expanded(row[name]))
            axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", **style)
    left.set_ylim(0, 1.02)
    finish(left, title="Rollbacks of a request", x="rollbacks, at most", y="share of requests")
    title = "Tokens of a request computed again"
    finish(right, title=title, x="tokens, at most", y="", legend=False)


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title="Rollbacks of deterministic requests",
        setting=setting,
        columns=(
            "mode", "window", "temperature", "requests", "windows", "rollbacks", "none_percent",
            "recomputed_tokens", "recomputed_percent", "wrong", "plain_different",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def parts(lab: Lab) -> list[Part]:
    """A piece for each window."""
    return [
        Part(name=f"window {window}", seconds=55, run=lambda window=window: _rows(lab, window))
        for window in lab.pick((8,), (WINDOW, 256))
    ]


EXPERIMENT = Experiment(
    question="How often are drafts rolled back, and how much is computed again?",
    paper="LLM-42 (arXiv:2601.17768), figure 9 and table 4, and its authors' data: 8B, windows of "
    "64 x 8, 4,096 deterministic requests: 96 rollbacks and 0.32 % of the tokens again on "
    "ShareGPT, 3,351 and 10.97 % on arXiv; online at 12 requests/s 13.8 %.",
    parts=parts,
    result=result,
    setting=lambda lab, _: trained_server(lab).setting,
)
