# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.reproduce NAME: run an experiment of the literature on detjax."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.common import environment
from benchmarks.reproduce import accuracy, completions, kernels, meshes, operators, throughput
from benchmarks.reproduce.experiment import Experiment, Lab, Result, Size, short
from detjax.models.bundled import bundled_model_path
from detjax.pallas_kernels.backend import Backend, choose_backend
from detjax.parallel.mesh import configure_virtual_devices

EXPERIMENTS: dict[str, Experiment] = {
    "completions": completions.EXPERIMENT,
    "operators": operators.EXPERIMENT,
    "kernels": kernels.EXPERIMENT,
    "throughput": throughput.EXPERIMENT,
    "meshes": meshes.EXPERIMENT,
    "accuracy": accuracy.EXPERIMENT,
}
VIRTUAL_DEVICES = 4


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    listed = "\n".join(f"  {name:<12} {one.question}" for name, one in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description="Ask the literature's questions about nondeterminism again, with detjax's "
        "bundled model.\nEach experiment prints a table, what the paper found, and what this "
        "machine found.",
        epilog=f"experiments:\n{listed}\n\nexamples:\n"
        "  python -m benchmarks.reproduce completions\n"
        "  python -m benchmarks.reproduce all --size full --backend sm90 --out results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="NAME",
        choices=(*EXPERIMENTS, "all"),
        help="an experiment of the list below, several, or all",
    )
    add(
        "--size",
        choices=[size.value for size in Size],
        default=Size.SMALL.value,
        help="small: a minute or two on a laptop (default); full: the papers' counts, on a GPU",
    )
    add(
        "--backend",
        choices=("auto", *(b.value for b in Backend)),
        default="auto",
        help="kernels: portable on CPUs, sm90 on Hopper GPUs; auto looks (default)",
    )
    add("--model", type=Path, default=bundled_model_path(), metavar="FOLDER",
        help="a model that tools/train_tiny.py made (default: the bundled one)")  # fmt: skip
    add("--out", type=Path, help="folder for NAME.json, and NAME.png with matplotlib")  # fmt: skip
    return parser.parse_args(argv)


def show(console: Console, name: str, experiment: Experiment, result: Result) -> None:
    """Print the table, the paper's figure and ours."""
    table = Table(*result.columns, title=f"{name}: {result.title}", title_justify="left")
    for row in result.rows:
        table.add_row(*(short(row.get(column)) for column in result.columns))
    console.print(table)
    console.print(f"paper: {experiment.paper}", highlight=False)
    for finding in result.findings:
        console.print(f"here:  {finding}", highlight=False, style="bold")
    console.print(f"with:  {result.setting}\n", highlight=False, style="dim")


def keep(folder: Path, name: str, experiment: Experiment, result: Result, card: dict) -> None:
    """Write what was found, and the plot if matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "experiment": name, "question": experiment.question, "paper": experiment.paper,
        "title": result.title, "setting": result.setting, "findings": list(result.findings),
    }  # fmt: skip
    document = found | card | {"rows": list(result.rows)}
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no plot: matplotlib comes with pip install 'detjax[plots]'", file=sys.stderr)
        return
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    result.plot(figure)
    figure.savefig(folder / f"{name}.png", dpi=120)


def make_lab(size: Size, backend: str, folder: Path) -> Lab:
    """Choose kernels, and let a CPU pose as several devices.

    Raises:
        ValueError: If the kernels cannot run here.
    """
    configure_virtual_devices(VIRTUAL_DEVICES)
    choice = choose_backend(None if backend == "auto" else Backend(backend))
    return Lab(
        size=size,
        folder=folder,
        backend=choice.backend,
        num_devices=len(jax.devices(choice.backend.platform)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments; returns the exit code."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        lab = make_lab(Size(args.size), args.backend, args.model)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    card = environment(lab.backend)
    names = tuple(EXPERIMENTS) if "all" in args.names else dict.fromkeys(args.names)
    for name in names:
        result = EXPERIMENTS[name].run(lab)
        show(console, name, EXPERIMENTS[name], result)
        if args.out is not None:
            keep(args.out, name, EXPERIMENTS[name], result, card)
    return 0


if __name__ == "__main__":
    sys.exit(main())
