# SPDX-License-Identifier: Apache-2.0
"""What an experiment has found so far: rows of its pieces, in a file, and how they are shown."""

import json
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reproduce.experiment import (
    RANDOM,
    Experiment,
    Lab,
    Part,
    Result,
    Row,
    WholeExperiment,
    is_random,
    short,
)
from detjax.plots import SETTINGS

WHOLE = "whole"
"""The piece of an experiment that is not cut."""

LOAD_TP = "load_tp"
"""Over how many devices the servers of loads ran; a file without it is of one."""


@dataclass(kw_only=True, slots=True)
class Record:
    """An experiment's rows so far.

    Attributes:
        name: Of the experiment.
        experiment: It.
        lab: Where it runs.
        card: The machine and the build.
        wanted: Words of which a piece's name must have one; without any, all pieces are run.
        rows: Of the pieces that are done, each with the name of its piece, and its build.
        whole: The result of an experiment of one piece, once it has run here.
        setting: Of the rows, as the runs that made them said.
        has_new: Whether a piece has run here.
    """

    name: str
    experiment: Experiment | WholeExperiment
    lab: Lab
    card: dict[str, str]
    wanted: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    whole: Result | None = None
    setting: str = ""
    has_new: bool = False

    def read(self, folder: Path) -> None:
        """Take the rows that an earlier run of this size left there.

        Each row says its build, so they may be of several. A file of another GPU, size or tp of
        loads, or without pieces, is left alone, which is said.
        """
        path = folder / f"{self.name}.json"
        if not path.exists():
            return
        found = json.loads(path.read_text())
        now = {
            "size": self.lab.size.value, "gpu": self.card["gpu"], LOAD_TP: self.lab.load_tp,
        }  # fmt: skip
        found.setdefault(LOAD_TP, 1)
        other = [f"{k}={found.get(k)!r}" for k, v in now.items() if found.get(k) != v]
        other += [] if all("part" in row for row in found["rows"]) else ["rows without pieces"]
        if other:
            print(f"{path} is not resumed: it has {', '.join(other)}; here {now}", file=sys.stderr)
            return
        rows = [
            row
            for row in found["rows"]
            if is_random(row.get("weights", RANDOM)) or row["weights"] == self.lab.weights
        ]
        if len(rows) < len(found["rows"]):
            left = len(found["rows"]) - len(rows)
            print(f"{path}: {left} rows of other weights are not resumed", file=sys.stderr)
        new = [row for row in rows if not any(row["part"] == old["part"] for old in self.rows)]
        self.rows += new
        if new:
            self.setting = joined(self.setting, found["setting"])

    @property
    def parts(self) -> Sequence[Part]:
        """All pieces that are wanted, most wanted first."""
        if isinstance(self.experiment, WholeExperiment):
            seconds = self.experiment.seconds
            every = [Part(name=WHOLE, seconds=seconds, run=self._run_whole)]
        else:
            every = self.experiment.parts(self.lab)
        if not self.wanted:
            return every
        return [part for part in every if any(word in part.name for word in self.wanted)]

    def has(self, part: Part) -> bool:
        """Whether the rows of a piece are there, of this kind of GPU."""
        gpu = self.card["gpu"]
        return any(row["part"] == part.name and row.get("gpu", gpu) == gpu for row in self.rows)

    def run(self, part: Part) -> None:
        """Run a piece and keep its rows."""
        begin_s = time.perf_counter()
        found = part.run()
        facts = {
            "part": part.name,
            "part_s": round(time.perf_counter() - begin_s, 1),
            **{name: self.card[name] for name in ("commit", "date", "fingerprint")},
        }
        self.rows += [{"weights": self.lab.weights} | dict(row) | facts for row in found]
        self.has_new = True
        if isinstance(self.experiment, Experiment):
            self.setting = joined(self.setting, self.experiment.setting(self.lab, part))

    def _run_whole(self) -> Sequence[Row]:
        assert isinstance(self.experiment, WholeExperiment)
        self.whole = self.experiment.run(self.lab)
        self.setting = self.whole.setting
        return self.whole.rows

    @property
    def result(self) -> Result | None:
        """What the rows say; None where there are none, or they are of a run that said it."""
        if isinstance(self.experiment, WholeExperiment):
            return self.whole
        return self.experiment.result(self.rows, self.setting) if self.rows else None

    @property
    def num_wrong(self) -> int:
        """Answers that had another bit than they are promised to have."""
        return sum(row.get("wrong", 0) for row in self.rows)

    def show(self, console: Console) -> None:
        """Print the table, the paper's figure and ours."""
        result = self.result
        if result is None:
            return
        table = Table(*result.columns, title=f"{self.name}: {result.title}", title_justify="left")
        for row in result.rows:
            table.add_row(*(short(row.get(column)) for column in result.columns))
        console.print(table)
        console.print(f"paper: {self.experiment.paper}", highlight=False)
        for finding in result.findings:
            console.print(f"here:  {finding}", highlight=False, style="bold")
        console.print(f"with:  {result.setting}\n", highlight=False, style="dim")

    def write(self, folder: Path) -> None:
        """Write what was found, and the plot if matplotlib is there."""
        result = self.result
        if result is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "experiment": self.name, "question": self.experiment.question,
            "paper": self.experiment.paper,
            "title": result.title, "setting": result.setting,
            "findings": list(result.findings),
            "size": self.lab.size.value,
            LOAD_TP: self.lab.load_tp,
        }  # fmt: skip
        document = found | self.card | {"rows": self.rows}
        (folder / f"{self.name}.json").write_text(json.dumps(document, indent=1) + "\n")
        draw(result.plot, result.title, folder / f"{self.name}.png")


def draw(plot: Callable[[Any], None], title: str, path: Path) -> None:
    """Write the plot if matplotlib is there, or say that it is not."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no plot: matplotlib comes with pip install 'detjax[plots]'", file=sys.stderr)
        return
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        plot(figure)
        figure.suptitle("\n".join(textwrap.wrap(title, 120)), fontsize=10)
        figure.savefig(path, dpi=120)


def redraw(path: Path, experiment: Experiment | WholeExperiment) -> None:
    """Make sentences and plot of a written experiment anew from its rows; no device is needed.

    Of an experiment that is one piece the plot, and what the paper says.
    """
    found = json.loads(path.read_text())
    found |= {"question": experiment.question, "paper": experiment.paper}
    if isinstance(experiment, Experiment):
        result = experiment.result(found["rows"], found["setting"])
        found |= {"title": result.title, "findings": list(result.findings)}
    draw(_plot_of(experiment, found), found["title"], path.with_suffix(".png"))
    path.write_text(json.dumps(found, indent=1) + "\n")


def _plot_of(experiment: Experiment | WholeExperiment, found: dict) -> Callable[[Any], None]:
    """What draws the rows of a written experiment."""
    if isinstance(experiment, Experiment):
        return experiment.result(found["rows"], found["setting"]).plot
    return lambda figure: experiment.plot(figure, found["rows"])


def has_pieces(path: Path) -> bool:
    """Whether the rows of a written experiment say of which piece they are."""
    return all("part" in row for row in json.loads(path.read_text())["rows"])


def joined(setting: str, more: str) -> str:
    """Two settings in words, the second where the first does not say it."""
    if not setting or more in setting:
        return setting or more
    return f"{setting}; {more}"


def take_rows(path: Path, other: Path) -> int:
    """Put rows of another run into a written experiment, or take all where none is written.

    Of the same size and tp of loads alone. Of the same kind of GPU and the same weights: the pieces
    that are missing. Of another kind of GPU: rows that name it, in place of those there are of it
    and of the same pieces; those of experiments whose sentences would not tell two kinds apart do
    not.

    Returns:
        How many were taken.
    """
    more = json.loads(other.read_text())
    if not path.exists() or not has_pieces(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(more, indent=1) + "\n")
        return len(more["rows"])
    found = json.loads(path.read_text())
    if any(more.get(k, 1) != found.get(k, 1) for k in ("size", LOAD_TP)):
        return 0
    if more["gpu"] != found["gpu"]:
        taken = [row for row in more["rows"] if row.get("gpu") == more["gpu"]]
        again = {row["part"] for row in taken}
        kept = [
            row
            for row in found["rows"]
            if row.get("gpu") != more["gpu"] or row["part"] not in again
        ]
    else:
        kept = found["rows"]
        there = {row["part"] for row in kept if row.get("gpu", more["gpu"]) == more["gpu"]}
        weights = {row["weights"] for row in kept if not is_random(row.get("weights", RANDOM))}
        taken = [
            row
            for row in more["rows"]
            if row["part"] not in there
            and (not weights or is_random(row.get("weights", RANDOM)) or row["weights"] in weights)
        ]
    if taken:
        found["setting"] = joined(found["setting"], more["setting"])
    path.write_text(json.dumps(found | {"rows": kept + taken}, indent=1) + "\n")
    return len(taken)


def in_turn(records: Sequence[Record]) -> list[tuple[Record, Part]]:
    """The first piece of each experiment, then the second of each, and so on."""
    pieces = {record.name: list(record.parts) for record in records}
    most = max((len(parts) for parts in pieces.values()), default=0)
    return [
        (record, pieces[record.name][i])
        for i in range(most)
        for record in records
        if i < len(pieces[record.name])
    ]


def run_pieces(records: Sequence[Record], *, seconds: float, out: Path | None) -> list[str]:
    """Run the pieces that are not done, in turn, as far as the time goes.

    A piece is begun if the time left is as long as it takes, roughly. What a piece found is written
    before the next begins. A piece that raises is reported, and the others run.

    Returns:
        The pieces that raised, with their errors.
    """
    begin_s, failed = time.perf_counter(), []
    for record, part in in_turn(records):
        name, left_s = f"{record.name}: {part.name}", seconds - (time.perf_counter() - begin_s)
        if record.has(part):
            print(f"{name}: done before", flush=True)
            continue
        if part.seconds > left_s:
            print(f"{name}: not begun, {left_s:.0f} s left of about {part.seconds:.0f}", flush=True)
            continue
        at_s = time.perf_counter()
        try:
            record.run(part)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
            continue
        if out is not None:
            record.write(out)
        print(f"{name}: {time.perf_counter() - at_s:.0f} s, {record.num_wrong} wrong", flush=True)
    return failed
