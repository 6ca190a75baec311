# SPDX-License-Identifier: Apache-2.0
"""Committed rows, and how the report writes numbers and tables."""

import json
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "h200"

RANDOM = {"llama3_8b": "Llama-3.1-8B", "qwen3_8b": "Qwen3-8B", "mistral_7b": "Mistral-7B"}
"""Models whose weights are random; other names are those of folders."""


def rows(command: str, subject: str) -> list[dict]:
    """Rows of a subject in the newest committed run of a command, or none."""
    files = sorted(RESULTS.glob(f"*-{command}.jsonl"))
    found = map(json.loads, files[-1].read_text().splitlines()) if files else ()
    return [row for row in found if row["subject"] == subject]


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
