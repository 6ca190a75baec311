# SPDX-License-Identifier: Apache-2.0
"""Committed rows, and how the report writes them: a part is rows, a note and columns."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from detjax.models.bundled import BUNDLED, BUNDLED_NAME

RESULTS = Path(__file__).parents[1] / "results"
"""A folder for each kind of machine."""

GPUS = {"h200": "H200", "h100": "H100"}
"""Folders of GPUs, that of the headline first, and what `gpu` of their rows contains."""

MACHINES = GPUS | {"cpu": "cpu"}
"""All folders that rows are read from."""

FIRST_GPU = "h200"
DRAFTS, NO_DRAFTS, NOT_RECORDED = "drafts", "no drafts", "drafts not recorded"

RANDOM = {
    "llama3_8b": "Llama-3.1-8B", "qwen3_8b": "Qwen3-8B", "mistral_7b": "Mistral-7B",
    "novels_130m": "novels-130m", "novels_500m": "novels-500m",
}  # fmt: skip
"""Models whose weights are random; other names are those of folders."""


def rows(command: str, subject: str, gpu: str = FIRST_GPU) -> list[dict]:
    """Rows of a subject in the newest committed run of a command on a GPU, or none.

    Raises:
        ValueError: If a row is not of the machine whose folder it stands in.
    """
    return next(runs(command, subject, gpu), [])


def newest_rows(command: str, subject: str, gpu: str = FIRST_GPU) -> list[dict]:
    """As `rows`, of the newest run that has such rows."""
    return next(filter(None, runs(command, subject, gpu)), [])


def runs(command: str, subject: str, gpu: str = FIRST_GPU) -> Iterator[list[dict]]:
    """Rows of a subject in each run of a command on a GPU, newest first."""
    for file in sorted((RESULTS / gpu).glob(f"*-{command}.jsonl"), reverse=True):
        found = map(json.loads, file.read_text().splitlines())
        of_subject = [row for row in found if row["subject"] == subject]
        for row in of_subject:
            if MACHINES[gpu] not in row["gpu"]:
                raise ValueError(f"{row_name(row)} in {file.name} is of {row['gpu']}, not {gpu}")
        yield of_subject


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


def latest(found: Iterable[dict], *keys: str) -> dict[tuple, dict]:
    """The last row of each case, which is what the keys hold."""
    return {tuple(row.get(key) for key in keys): row for row in found}


def model_name(name: str) -> str:
    """Which model a row was measured with; never where it lies."""
    if name in RANDOM:
        return f"{RANDOM[name]} shapes with random weights"
    if name in (BUNDLED, BUNDLED_NAME):
        return f"`{BUNDLED_NAME}` (bundled)"
    return f"`{Path(name).name}`"


def table(header: Iterable[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, without the columns in which no line says anything."""
    columns = [column for column in zip(header, *lines, strict=True) if any(column[1:])]
    if not columns:
        return []
    header, *lines = zip(*columns, strict=True)
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)]


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


Format = str | Callable[[dict], str]
"""A format string of a row's fields, empty where one is missing; or a function of the row."""


def cell(form: Format, row: dict) -> str:
    """What a column says of a row."""
    if callable(form):
        return form(row)
    try:
        return form.format_map(row)
    except (KeyError, TypeError):  # it is missing, or None
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A note and a table about some rows.

    Attributes:
        rows: Of a GPU: those of each table.
        note: What stands before a table.
        columns: Of a table, by header.
        after: What stands behind all tables of the first GPU, if there is one.
    """

    rows: Callable[[str], list[list[dict]]]
    note: Callable[[list[dict]], str]
    columns: Mapping[str, Format]
    after: str = ""

    def lines(self, gpu: str) -> list[str]:
        """All of it, each paragraph and table behind an empty line; nothing without rows."""
        lines = []
        for found in filter(None, self.rows(gpu)):
            note = self.note(found)
            cells = [[cell(form, row) for form in self.columns.values()] for row in found]
            for row, of_row in zip(found, cells, strict=True):
                told(" ".join([note, *of_row]), [row])
            lines += ["", note, "", *table(self.columns, cells)]
        return [*lines, "", self.after] if lines and self.after and gpu == FIRST_GPU else lines
