# SPDX-License-Identifier: Apache-2.0
"""What `python -m detjax.training.grpo --out` measured, as docs/training.md tells it."""

import json
from collections.abc import Sequence

from benchmarks import report_rows
from benchmarks.report_rows import model_name, table

PLACES = {"h200": "an H200", "h100": "an H100", "cpu": "a CPU"}


def _seeds(runs: Sequence[dict], name: str) -> str:
    """Mean over the seeds, and the range."""
    values = [run[name] for run in runs]
    mean = f"{sum(values) / len(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def runs_on(machine: str) -> list[dict]:
    """The committed runs of a machine, a rollout and seed each, or none."""
    path = report_rows.RESULTS / machine / "grpo" / "runs.json"
    return json.loads(path.read_text()) if path.exists() else []


def section() -> list[str]:
    """For each machine with results: a line a rollout, and the curves."""
    lines = []
    for machine, name in PLACES.items():
        runs = runs_on(machine)
        if not runs:
            continue
        first = runs[0]
        seeds = {run["seed"] for run in runs}
        lines += [
            f"On {name}, {model_name(first['model'])}, rollout at tp {first['rollout_tp']}, "
            f"trainer at tp 1, {first['steps']} steps; mean of {len(seeds)} seeds, and their "
            "range.",
            "",
            *table(
                [
                    "rollout", "reward, first 3 steps", "last 3", "held out, before", "after",
                    "largest KL", "logprobs that differ",
                ],
                (_cells(rollout, runs) for rollout in dict.fromkeys(r["rollout"] for r in runs)),
            ),
            "",
            f"![Reward and KL over the steps](benchmarks/results/{machine}/grpo/curves.png)",
            "",
        ]  # fmt: skip
    return lines[:-1]


def _cells(rollout: str, runs: Sequence[dict]) -> list[str]:
    own = [run for run in runs if run["rollout"] == rollout]
    names = ("reward_first", "reward_last", "accuracy_before", "accuracy_after")
    different, tokens = (sum(run[name] for run in own) for name in ("num_different", "num_tokens"))
    return [
        f"`{rollout}`",
        *(_seeds(own, name) for name in names),
        f"{max(run['largest_kl'] for run in own):.3g}",
        f"{different:,} of {tokens:,}",
    ]
