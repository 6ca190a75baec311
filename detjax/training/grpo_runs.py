# SPDX-License-Identifier: Apache-2.0
"""All GRPO runs of one command, with their rows, their table and their files."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from detjax.training.checkpoint import check_can_save, check_no_state
from detjax.training.grpo import (
    FIRST,
    LAST,
    ROWS_FILE,
    GrpoArgs,
    GrpoRun,
    GrpoSetup,
    read_rows,
    run_one,
    save_folder,
    save_stops,
)
from detjax.training.plot import save_plot

RUNS_FILE = "runs.json"


@contextlib.contextmanager
def claimed_files(args: GrpoArgs) -> Iterator[TextIO | None]:
    """Take the folders of `--save` and `--output` for this command, before a model is loaded.

    A run that resumes adds to what is there. A new one writes over nothing, and a second one that
    is started beside it is refused. At the end the folders and the file that this made are
    removed if they are still empty; `--save` and `--output` themselves stay.

    Yields:
        `rows.jsonl`, open to append to; None without `--output`.

    Raises:
        ValueError: If a new run would write where another one has written or still writes.
        OSError: If a folder cannot be made or written to.
    """
    with contextlib.ExitStack() as stack:
        if args.save is not None:
            stack.enter_context(_claimed_states(args))
        yield None if args.output is None else stack.enter_context(_claimed_rows(args, args.output))


@contextlib.contextmanager
def _claimed_states(args: GrpoArgs) -> Iterator[None]:
    made = []
    try:
        for stop in save_stops(args, 0) if args.resume is None else ():
            folder = save_folder(args, stop, args.seeds[0])
            check_no_state(folder)
            try:
                # WHY: it makes the folder or fails, so that of two commands at once one is refused.
                folder.mkdir(parents=True)
            except FileExistsError as error:
                raise ValueError(
                    f"{folder} exists: an earlier or a running run saves there. Give another "
                    "--save, delete what an ended run has left, or continue it with --resume "
                    f"{args.save}"
                ) from error
            made.append(folder)
        last = save_folder(args, args.steps, args.seeds[0])
        made += [] if last.exists() else [last]
        check_can_save(last)
        yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it holds a state, as it should
                folder.rmdir()


@contextlib.contextmanager
def _claimed_rows(args: GrpoArgs, out: Path) -> Iterator[TextIO]:
    out.mkdir(parents=True, exist_ok=True)
    path = out / ROWS_FILE
    if args.resume is None and (out / RUNS_FILE).exists():
        raise ValueError(_taken(out, RUNS_FILE))
    was_there = path.exists()
    try:
        # WHY: "x" makes the file or fails, so that of two commands at once one is refused.
        file = path.open("x" if args.resume is None else "a", encoding="utf-8")
    except FileExistsError as error:
        raise ValueError(_taken(out, ROWS_FILE)) from error
    try:
        with file:
            yield file
    finally:
        if not was_there and path.is_file() and not path.stat().st_size:
            path.unlink()


def _taken(out: Path, name: str) -> str:
    return (
        f"--output {out} holds {name} of an earlier or a running run; give another --output, "
        "delete what an ended run has left, or continue it with --resume"
    )


def run_all(setup: GrpoSetup, console: Console, file: TextIO | None) -> list[GrpoRun]:
    """Train with every requested rollout and seed, and write rows to `file` as they come."""
    args, runs = setup.args, []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        )
        rollouts = {mode: setup.rollout(mode) for mode in args.modes}
        for seed in args.seeds:
            for mode, rollout in rollouts.items():
                task = bar.add_task(f"{mode} rollout, seed {seed}", total=args.steps)

                def show(row: dict, task=task) -> None:
                    bar.update(task, completed=row["step"] + 1)
                    console.print(_row_text(row), style="dim", highlight=False, soft_wrap=True)
                    if file is not None:
                        file.write(json.dumps(row) + "\n")
                        file.flush()

                runs.append(run_one(setup, rollout, mode, seed, show))
    return runs


def _row_text(row: dict[str, Any]) -> str:
    return (
        f"{row['rollout']:<9} seed {row['seed']}  step {row['step']:>3}  reward "
        f"{row['reward']:.3f}  entropy {row['entropy']:.3f}  KL {row['kl']:.3g}  "
        f"{row['num_different']} of {row['num_tokens']} logprobs differ  "
        f"{row['rollout_s']:.1f} + {row['train_s']:.1f} s"
    )


def summary(runs: Sequence[GrpoRun]) -> Table:
    """A line for each run, and one for the seeds of each rollout together."""
    table = Table(
        "rollout", "seed", "reward, first 3", "last 3", "held out, before", "after",
        "largest KL", "logprobs that differ",
        title="Reward of sampled answers, accuracy of greedy ones, and the gap to the trainer",
        title_justify="left",
    )  # fmt: skip
    for run in sorted(runs, key=lambda run: (run.mode, run.seed)):
        facts = run.facts()
        table.add_row(
            run.mode, str(run.seed), f"{facts['reward_first']:.3f}", f"{facts['reward_last']:.3f}",
            f"{run.accuracy_before:.3f}", f"{run.accuracy_after:.3f}", f"{facts['largest_kl']:.3g}",
            f"{facts['num_different']:,} of {facts['num_tokens']:,}",
        )  # fmt: skip
    for mode in dict.fromkeys(run.mode for run in runs):
        own = [run for run in runs if run.mode == mode]
        if len(own) > 1:
            cells = (
                _spread([run.reward(FIRST) for run in own]),
                _spread([run.reward(LAST) for run in own]),
                _spread([run.accuracy_before for run in own]),
                _spread([run.accuracy_after for run in own]),
            )
            table.add_row(mode, f"{len(own)} seeds", *cells, "", "", style="bold")
    return table


def _spread(values: Sequence[float]) -> str:
    """Return the mean and the range over seeds."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def write_results(setup: GrpoSetup, runs: list[GrpoRun], out: Path, console: Console) -> None:
    """Write the final table and the curves, those of a continued `--output` included."""
    args, path = setup.args, out / RUNS_FILE
    kind = {"model": args.model, "backend": setup.backend.value, "rollout_tp": args.rollout_tp}
    facts = [run.facts() | kind for run in runs]
    if args.resume is not None and path.is_file():
        facts = json.loads(path.read_text(encoding="utf-8")) + facts
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if not save_plot(read_rows(out), out / "curves.png"):
        console.print("no curves.png: matplotlib comes with pip install 'detjax[plots]'")
