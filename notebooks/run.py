# SPDX-License-Identifier: Apache-2.0
"""Run notebooks from top to bottom: python notebooks/run.py [--check] [FILE ...]"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parent


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python notebooks/run.py",
        description="Run notebooks from top to bottom, on the GPUs if there are any, and save what "
        "they printed and drew. Needs pip install 'detjax[notebooks]'.",
    )
    parser.add_argument("files", nargs="*", type=Path, help="notebooks; without any, all five")
    parser.add_argument("--check", action="store_true", help="save nothing; exit 1 if a cell fails")
    parser.add_argument("--timeout", type=int, default=600, help="most seconds of a cell")
    return parser.parse_args(argv)


def processor_of(notebook: nbformat.NotebookNode) -> str:
    """Where a notebook ran, as its last cell printed it.

    Raises:
        ValueError: If it did not.
    """
    text = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    found = re.search(r"^jax \S+ on (.+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"the last cell must print 'jax VERSION on PROCESSOR', not {text!r}")
    return "a CPU" if found[1] == "cpu" else f"an {found[1]}"


def note_processor(notebook: nbformat.NotebookNode) -> None:
    """Say in the first cell which processor the saved output is of."""
    first = notebook.cells[0]
    text = re.sub(r"\n\n\*The saved output is of .+\.\*$", "", first.source)
    first.source = f"{text}\n\n*The saved output is of {processor_of(notebook)}.*"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the notebooks; returns the exit code."""
    args = parse_args(argv)
    for path in args.files or sorted(FOLDER.glob("*.ipynb")):
        begin_s = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook,
            timeout=args.timeout,
            kernel_name="python3",
            # WHY: with the times of cells in it, no run would give the same file.
            record_timing=False,
            resources={"metadata": {"path": str(path.parent)}},
        )
        try:
            client.execute()
        except CellExecutionError as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 1
        if not args.check:
            note_processor(notebook)
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - begin_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
