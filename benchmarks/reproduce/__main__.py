# SPDX-License-Identifier: Apache-2.0
"""python -m benchmarks.reproduce NAME: run an experiment of the literature on detjax."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from benchmarks.common import environment
from benchmarks.reproduce import (
    accuracy,
    completions,
    kernels,
    latency,
    meshes,
    operators,
    policy,
    rollbacks,
    shares,
    throughput,
    windows,
)
from benchmarks.reproduce.experiment import Experiment, Lab, Size, WholeExperiment
from benchmarks.reproduce.record import Record, has_pieces, redraw, run_pieces, take_rows
from detjax.models.bundled import bundled_model_path
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import choose_backend
from detjax.parallel.mesh import configure_virtual_devices

EXPERIMENTS: dict[str, Experiment | WholeExperiment] = {
    "throughput": throughput.EXPERIMENT,
    "shares": shares.EXPERIMENT,
    "latency": latency.EXPERIMENT,
    "rollbacks": rollbacks.EXPERIMENT,
    "windows": windows.EXPERIMENT,
    "operators": operators.EXPERIMENT,
    "policy": policy.EXPERIMENT,
    "completions": completions.EXPERIMENT,
    "kernels": kernels.EXPERIMENT,
    "meshes": meshes.EXPERIMENT,
    "accuracy": accuracy.EXPERIMENT,
}
"""Those whose pieces share programs stand together."""

VIRTUAL_DEVICES = 4


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    listed = "\n".join(f"  {name:<12} {one.question}" for name, one in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description="Ask the literature's questions about nondeterminism again, with detjax's "
        "bundled model.\nEach experiment prints a table, what the paper found, and what this "
        "machine found.\nExit status: 3 if an answer had another bit than it is promised to have, "
        "1 if a piece failed.",
        epilog=f"experiments:\n{listed}\n\nexamples:\n"
        "  python -m benchmarks.reproduce completions\n"
        "  python -m benchmarks.reproduce all --size full --backend sm90 --out results\n"
        "  python -m benchmarks.reproduce throughput shares windows --seconds 240 --size full "
        "--done results --out results",
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
        help="kernels: reference and portable on CPUs, sm90 on Hopper GPUs; auto looks (default)",
    )
    add("--model", type=Path, default=bundled_model_path(), metavar="FOLDER",
        help="a model that tools/train_tiny.py made (default: the bundled one)")  # fmt: skip
    add("--prompts", type=Path, metavar="FILE",
        help="JSON lines with a `problem` or `question` each, for meshes")  # fmt: skip
    add("--tp", type=int, default=1, metavar="N",
        help="devices over which the servers of `throughput`, `shares`, `latency` and `windows` "
        "run, which the result names (default: 1)")  # fmt: skip
    add("--out", type=Path, help="folder for NAME.json, and NAME.png with matplotlib")
    add(
        "--parts",
        nargs="+",
        metavar="TEXT",
        help="only pieces that have one of these in their names",
    )
    add(
        "--done",
        type=Path,
        nargs="+",
        default=(),
        metavar="FOLDER",
        help="an earlier --out on this kind of GPU, or several: their pieces are not run again",
    )
    add(
        "--redraw",
        type=Path,
        metavar="FOLDER",
        help="run nothing: make sentences and plots of what FOLDER has anew from its rows, for "
        "experiments of several pieces",
    )
    add(
        "--beside",
        type=Path,
        nargs="+",
        default=(),
        metavar="FOLDER",
        help="with --redraw: first take up the pieces that another --out has, of the same weights; "
        "of another kind of GPU, rows that name it",
    )
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no piece that is likely to end later than this; all pieces by default",
    )
    return parser.parse_args(argv)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Problems of a file of JSON lines.

    Raises:
        ValueError: If it cannot be read, or a line has neither a `problem` nor a `question`.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row.get("problem") or row["question"]
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"--prompts {path}, line {number}: not JSON with a `problem` or a `question`"
            ) from error
        if not isinstance(text, str):
            raise ValueError(f"--prompts {path}, line {number}: {text!r:.40} is not text")
        found.append(text)
    if not found:
        raise ValueError(f"--prompts {path} has no line")
    return tuple(found)


def make_lab(size: Size, backend: str, folder: Path, prompts: Path | None, load_tp: int = 1) -> Lab:
    """Choose kernels, and let a CPU pose as several devices.

    Raises:
        ValueError: If the kernels cannot run here, the prompts cannot be read, or there are
            fewer devices than `load_tp`, or the model has no such tp.
    """
    texts = read_prompts(prompts) if prompts else ()
    configure_virtual_devices(VIRTUAL_DEVICES)
    choice = choose_backend(None if backend == "auto" else Backend(backend))
    lab = Lab(
        size=size,
        folder=folder,
        backend=choice.backend,
        num_devices=len(jax.devices(choice.backend.platform)),
        prompts=texts,
        load_tp=load_tp,
    )
    if load_tp not in lab.tps:
        allowed = ", ".join(map(str, lab.tps))
        raise ValueError(f"--tp {load_tp}: the model and the devices here allow {allowed}")
    return lab


def _redraw(folder: Path, beside: Sequence[Path], names: Sequence[str]) -> int:
    """What `--redraw` does; returns the exit code."""
    for name in names:
        path, experiment = folder / f"{name}.json", EXPERIMENTS[name]
        for other in beside:
            if (other / path.name).exists():
                print(f"{path}: {take_rows(path, other / path.name)} rows of {other} taken up")
        if not path.exists():
            continue
        if isinstance(experiment, Experiment) and not has_pieces(path):
            print(f"{path}: left as it is, its rows do not say of which piece they are")
            continue
        redraw(path, experiment)
        print(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments; returns the exit code."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    names = tuple(EXPERIMENTS) if "all" in args.names else tuple(dict.fromkeys(args.names))
    if args.redraw is not None:
        return _redraw(args.redraw, args.beside, names)
    if args.beside:
        print("error: --beside goes with --redraw", file=sys.stderr)
        return 2
    try:
        lab = make_lab(Size(args.size), args.backend, args.model, args.prompts, args.tp)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not args.seconds > 0:
        print(f"error: --seconds {args.seconds:g} must be above 0", file=sys.stderr)
        return 2
    card = environment(lab.backend)
    records = [
        Record(
            name=name,
            experiment=EXPERIMENTS[name],
            lab=lab,
            card=card,
            wanted=tuple(args.parts or ()),
        )
        for name in names
    ]
    if not any(record.parts for record in records):
        print(f"error: no piece has one of --parts {args.parts} in its name", file=sys.stderr)
        return 2
    for folder in args.done:
        for record in records:
            record.read(folder)
    failed = run_pieces(records, seconds=args.seconds, out=args.out)
    for record in records:
        if record.has_new:
            record.show(console)
    for message in failed:
        print(f"error: {message}", file=sys.stderr)
    if any(record.num_wrong for record in records):
        return 3
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
