# SPDX-License-Identifier: Apache-2.0
"""Experiments and training: README's findings, docs/experiments.md and docs/training.md."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import mesh
from benchmarks.report import rows as committed
from benchmarks.report.rows import GPUS, Part, model_name, table, told

ROOT = Path(__file__).parents[2]
PLACES = {"h200": "an H200", "h100": "an H100", "cpu": "a CPU"}


# ---------------------------------------------------------------------------------- experiments


def experiments() -> dict[str, Path]:
    """Which result of each experiment is told, by name.

    That of a GPU, or else of a CPU; of the first GPU that has it. One that was made in pieces goes
    before those from before there were pieces, which have other settings.
    """
    taken: dict[str, Path] = {}
    for machine in ["cpu", *reversed(GPUS)]:
        for path in (committed.RESULTS / machine / "reproduce").glob("*.json"):
            older = taken.get(path.stem)
            if older is None or older.parts[-3] == "cpu" or has_pieces(path) >= has_pieces(older):
                taken[path.stem] = path
    return taken


def has_pieces(path: Path) -> bool:
    """Whether the rows of an experiment say of which piece they are."""
    return any("part" in row for row in json.loads(path.read_text()).get("rows", ()))


def told_finding(experiment: str, finding: str, found: list[dict]) -> str:
    """A finding, which begins with the case or the mode of its row, or else is about all rows."""

    def is_named(row):
        name = row.get("case", row.get("mode"))
        return finding.startswith((f"{name}:", f"{name} ("))

    about = [row for row in found if is_named(row)] or ("dvr" in finding) * found
    return told(finding, [{"subject": experiment} | row for row in about])


def experiments_section() -> list[str]:
    """Each experiment: the question, what the paper found, what was found here, and the figure."""
    told_ones = []
    for name, path in sorted(experiments().items()):
        found = json.loads(path.read_text())
        figure = path.with_suffix(".png").relative_to(ROOT)
        sentences = [told_finding(name, finding, found["rows"]) for finding in found["findings"]]
        made_by = f"`benchmarks.reproduce {name}`, [figure]({figure})"
        told_ones.append(found | {"findings": sentences, "made_by": made_by})
    lines = []
    for its in filter(None, [*told_ones, mesh.sum_experiment()]):
        lines += [
            "",
            f"**{its['question']}** {its['made_by']}",
            "",
            f"- Paper: {its['paper']}",
            *(f"- Here: {sentence}." for sentence in its["findings"]),
            f"- With {its['setting']}.",
        ]
    return lines[1:]


# ------------------------------------------------------------------------------ README's table


def _changed_answers(found: list[dict]) -> list[str]:
    """Answers that differ in a bit between any two settings of bfloat16."""

    def changed(mode: str) -> int:
        answers = [
            [row["answers"][i : i + 4] for i in range(0, len(row["answers"]), 4)]
            for row in found
            if (row["mode"], row["dtype"]) == (mode, "bfloat16")
        ]
        return sum(len(set(of_one)) > 1 for of_one in zip(*answers, strict=True))

    one = next(row for row in found if row["mode"] == "fast")
    name = (
        f"answers to {one['problems']:,} additions that change in a bit; in a token (greedy, "
        "batch 8, 32, 128, tp 1, 2)"
    )

    def cell(mode: str) -> str:
        own = (row for row in found if (row["mode"], row["dtype"]) == (mode, "bfloat16"))
        return f"{changed(mode):,}; {max(row['texts_changed'] for row in own)}"

    return [name, cell("fast"), cell("invariant")]


def _different_texts(found: list[dict]) -> list[str]:
    """Texts that one prompt gets at temperature 0."""
    of_mode = {row["mode"]: row for row in found}
    name = f"different texts among {of_mode['fast']['requests']:,} greedy answers to one prompt"
    return [name, str(of_mode["fast"]["texts"]), str(of_mode["invariant"]["texts"])]


def _unique_outputs(found: list[dict]) -> list[str]:
    """Answers a prompt gets over meshes and batches, of the trained model."""
    mean = {
        row["mode"]: row["unique_outputs_mean"] for row in found if row["model"] == "novels-130m"
    }
    name = "different answers a prompt, 30 prompts, tp 1, 2 x batch 8, 16, 32"
    return [name, f"{mean['fast']:.2f}", f"{mean['invariant']:.2f}"]


def _rollouts() -> list[list[str]]:
    """README's line on training: how many logprobs a rollout and the trainer do not share."""
    for rollouts in runs_on("h200"):
        of_name = {one["rollout"]: one for one in rollouts}
        run = of_name["fast"]["runs"][0]
        name = (
            f"logprobs of a rollout that are not the trainer's, {run['steps']} updates of GRPO, "
            f"{len(of_name['fast']['runs'])} seeds"
        )
        cells = [of_name[mode]["different"] for mode in ("fast", "invariant")]
        where = (
            f"{run['model']}, {PLACES['h200'].removeprefix('an ')}, {run['date']}, {run['commit']}"
        )
        return [[name, *cells, where]]
    return []


FINDINGS = {
    "accuracy": _changed_answers, "completions": _different_texts, "meshes": _unique_outputs,
}  # fmt: skip
"""What README tells of an experiment."""


def readme() -> list[str]:
    """README's findings: what changes without the claims, what does not, and where it was seen."""
    paths = experiments()
    lines = []
    for name, cells_of in FINDINGS.items():
        if name in paths:
            found = json.loads(paths[name].read_text())
            facts = (
                found["setting"].split(" (")[0],
                *(found[n] for n in ("gpu", "date", "commit")),
            )
            lines.append([*cells_of(found["rows"]), ", ".join(facts)])
    lines += _rollouts()
    return table(["", "`fast`", "`invariant`", "model, machine, date, commit"], lines)


# ------------------------------------------------------------------------------------- training


def _seeds(runs: Sequence[dict], name: str) -> str:
    """Mean over the seeds, and the range."""
    values = [run[name] for run in runs]
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def _rollout(runs: Sequence[dict]) -> dict:
    """What the seeds of a rollout add up to."""
    different, tokens = (sum(run[n] for run in runs) for n in ("num_different", "num_tokens"))
    return {
        "rollout": runs[0]["rollout"], "runs": runs,
        "largest_kl": max(run["largest_kl"] for run in runs),
        "different": f"{different:,} of {tokens:,}",
    }  # fmt: skip


def runs_on(machine: str) -> list[list[dict]]:
    """What was committed of a machine: a row for each rollout."""
    path = committed.RESULTS / machine / "grpo" / "runs.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    rollouts = dict.fromkeys(run["rollout"] for run in runs)
    return [[_rollout([run for run in runs if run["rollout"] == name]) for name in rollouts]]


def _training_note(found: list[dict]) -> str:
    first = found[0]["runs"][0]
    seeds = {run["seed"] for run in found[0]["runs"]}
    return (
        f"{model_name(first['model'])}, rollout at tp {first['rollout_tp']}, trainer at tp 1, "
        f"{first['steps']} steps; mean of {len(seeds)} seeds, and their range."
    )


TRAINING = Part(
    rows=runs_on,
    note=_training_note,
    columns={
        "rollout": "`{rollout}`",
        **{
            header: lambda row, name=name: _seeds(row["runs"], name)
            for header, name in (
                ("reward, first 3 steps", "reward_first"), ("last 3", "reward_last"),
                ("held out, before", "accuracy_before"), ("after", "accuracy_after"),
            )
        },
        "largest KL": "{largest_kl:.3g}", "logprobs that differ": "{different}",
    },
)  # fmt: skip


def training() -> list[str]:
    """docs/training.md: for each machine with results a line a rollout, and the curves."""
    lines = []
    for machine, name in PLACES.items():
        if found := TRAINING.lines(machine):
            curves = f"benchmarks/results/{machine}/grpo/curves.png"
            lines += ["", f"On {name}, {found[1]}", *found[2:], ""]
            lines += [f"![Reward and KL over the steps]({curves})"]
    return lines[1:]
