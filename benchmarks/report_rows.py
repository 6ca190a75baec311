# SPDX-License-Identifier: Apache-2.0
"""Committed rows, and how the report writes numbers and tables."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
"""A folder for each kind of machine."""

GPUS = {"h200": "H200", "h100": "H100"}
"""Folders of GPUs, that of the headline first, and what `gpu` of their rows contains."""

FIRST_GPU = "h200"
DRAFTS, NO_DRAFTS, NOT_RECORDED = "drafts", "no drafts", "drafts not recorded"

RANDOM = {
    "llama3_8b": "Llama-3.1-8B", "qwen3_8b": "Qwen3-8B", "mistral_7b": "Mistral-7B",
    "novels_130m": "novels-130m", "novels_500m": "novels-500m",
}  # fmt: skip
"""Models whose weights are random; other names are those of folders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A question of the literature that a benchmark's rows answer; texts for a table.

    Attributes:
        question: As a reader would ask it.
        paper: What was found there.
        here: What was found here, a sentence each.
        setting: With which model and hardware.
        command: That made the rows.
        links: To the figure and to every number.
    """

    question: str
    paper: str
    here: list[str]
    setting: str
    command: str
    links: str


def rows(command: str, subject: str, gpu: str = FIRST_GPU) -> list[dict]:
    """Rows of a subject in the newest committed run of a command on a GPU, or none.

    Raises:
        ValueError: If a row is not of the GPU whose folder it stands in.
    """
    files = sorted((RESULTS / gpu).glob(f"*-{command}.jsonl"))
    found = map(json.loads, files[-1].read_text().splitlines()) if files else ()
    of_subject = [row for row in found if row["subject"] == subject]
    for row in of_subject:
        if GPUS[gpu] not in row["gpu"]:
            raise ValueError(f"{row_name(row)} in {files[-1].name} is of {row['gpu']}, not {gpu}")
    return of_subject


def step_of(row: dict) -> tuple[str, int, int]:
    """The step that a row's case is: ("decode", batch, context) or ("prefill", 1, tokens)."""
    decode = re.fullmatch(r"decode batch (\d+) context (\d+)", row["case"])
    prefill = re.fullmatch(r"prefill (\d+) tokens", row["case"])
    if decode:
        return "decode", int(decode[1]), int(decode[2])
    if prefill:
        return "prefill", 1, int(prefill[1])
    raise ValueError(f"{row_name(row)}: no step is called {row['case']!r}")


def row_name(row: dict) -> str:
    """Which row: what tells it from others, as far as it says so."""
    facts = ("subject", "mode", "model", "case", "deterministic_percent", "window", "group",
             "commit", "date")  # fmt: skip
    return "row " + ", ".join(f"{name}={row[name]!r}" for name in facts if name in row)


def drafting(row: dict) -> str:
    """What a row of `dvr` says of drafts: only drafts need windows, and each window is verified."""
    names = ("verify_launches", "windows", "acceptance", "rollbacks", "num_rollbacks")
    counts = [row[name] for name in names if name in row]
    # `benchmarks.serving` keeps what its engine counted where it is not zero.
    if not counts and "num_steps" not in row:
        return NOT_RECORDED
    return DRAFTS if any(counts) else NO_DRAFTS


def told(sentence: str, found: Iterable[dict]) -> str:
    """A sentence about rows, which must not pass for one about drafts where none were verified.

    Raises:
        ValueError: If a row of `dvr` had no windows, or does not say, and the sentence hides it.
    """
    for row in found:
        if row.get("mode") == "dvr" and drafting(row) not in (DRAFTS, *_said(sentence)):
            raise ValueError(
                f"{row_name(row)}: {drafting(row)}, but the report would say {sentence!r}"
            )
    return sentence


def _said(sentence: str) -> list[str]:
    return [words for words in (NO_DRAFTS, NOT_RECORDED) if words in sentence]


def told_cells(cells: Sequence[str], row: dict) -> Sequence[str]:
    """`told`, of a line of a table."""
    told(" ".join(cells), [row])
    return cells


def latest(found: Iterable[dict], *keys: str) -> dict[tuple, dict]:
    """The last row of each case, which is what the keys hold."""
    return {tuple(row.get(key) for key in keys): row for row in found}


def model_name(name: str) -> str:
    """Which model a row was measured with; never where it lies."""
    if name in RANDOM:
        return f"{RANDOM[name]} shapes with random weights"
    return "`novels-6m` (bundled)" if name == "bundled" else f"`{Path(name).name}`"


def hardware(row: dict, note: str) -> str:
    """What a row was measured on."""
    return f"{row['gpu']}, jax {row['jax']}, bfloat16{note}"


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table."""
    header = list(header)
    rule = ["---"] * len(header)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


def digits(value: float) -> str:
    """Three digits or so, as a table wants them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(value: float | None, over: float | None) -> str:
    """A ratio, or nothing where one of the two is missing."""
    return f"{value / over:.2f}" if value and over else ""


def listed(values: Iterable[object]) -> str:
    """Such as "1, 8 and 64"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
