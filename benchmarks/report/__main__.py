# SPDX-License-Identifier: Apache-2.0
"""Write the measured sections of README and docs, and docs/figures, from committed rows.

python -m benchmarks.report            # needs matplotlib: pip install -e ".[plots]"
python -m benchmarks.report --check    # is the text current? needs nothing

The rows are the newest `benchmarks/results/<gpu>/<date>-<command>.jsonl` of each command, for each
GPU of `rows.GPUS`; figures are of the first. A part appears if its rows are there, and where a case
occurs twice in a file the later row counts. Experiments are
`benchmarks/results/*/reproduce/NAME.json`, those of a GPU before those of a CPU. A row of `dvr`
that verified no draft is told as such, or refused.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import figures, findings, mesh, quality, serving, steps, verification

ROOT = Path(__file__).parents[2]
MARKERS = "<!-- {0}: begin -->", "<!-- {0}: end -->"
WIDTH = 140
SECTIONS: tuple[tuple[str, str, Callable[[], list[str]]], ...] = (
    ("README.md", "speed", steps.speed),
    ("README.md", "findings", findings.readme),
    ("docs/benchmarks.md", "benchmarks", steps.benchmarks),
    ("docs/experiments.md", "experiments", findings.experiments_section),
    ("docs/kernels.md", "benchmarks", steps.kernels),
    ("docs/serving.md", "benchmarks", serving.engine),
    ("docs/server.md", "load", serving.server),
    ("docs/parallel.md", "benchmarks", mesh.section),
    ("docs/training.md", "grpo", findings.training),
    ("docs/quantization.md", "quality", quality.section),
    ("docs/verification.md", "verification", verification.section),
)
"""Document, name of the markers, and what stands between them."""


def wrapped(line: str) -> list[str]:
    """A line of prose in lines of `WIDTH`; tables, figures and headings stay as they are."""
    if not line or line.startswith(("|", "#", "![")):
        return [line]
    # A sum at the beginning of a line would be an item of a list.
    glued = line.replace(" + ", "\0+\0")
    indent = "  " if line.startswith("- ") else ""
    lines = textwrap.wrap(
        glued, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [one.replace("\0", " ") for one in lines]


def updated(text: str, name: str, section: list[str], folder: str) -> str:
    """A document of a folder with the text between two markers replaced.

    Links of a section are written from the root.
    """
    begin, end = (marker.format(name) for marker in MARKERS)
    start, stop = text.index(begin), text.index(end)
    up = "../" * (folder.count("/") + 1) if folder else ""
    lines = []
    for line in section:
        if folder:
            line = re.sub(r"\]\((?!#|https?:)", f"]({up}", line)
            line = line.replace(f"]({up}{folder}/", "](")
        lines += wrapped(line)
    return text[:start] + "\n".join([begin, *lines, ""]) + text[stop:]


def main() -> None:
    """Rewrite the text and the figures, or with --check say whether the text is up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args()
    new: dict[Path, str] = {}
    for document, name, make in SECTIONS:
        path = ROOT / document
        folder = document.rpartition("/")[0]
        new[path] = updated(new.get(path) or path.read_text(), name, make(), folder)
    if args.check:
        stale = [path.name for path, text in new.items() if text != path.read_text()]
        sys.exit(f"{stale} are stale: run python -m benchmarks.report" if stale else 0)
    figures.draw_all()
    for path, text in new.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
