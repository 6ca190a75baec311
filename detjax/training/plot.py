# SPDX-License-Identifier: Apache-2.0
"""The curves of a run. matplotlib comes with the `notebooks` extra and is imported only here."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detjax.plots import COLOURS, SETTINGS, finish


def plot_curves(rows: Sequence[dict[str, Any]]):
    """Reward and KL by step, a line for each seed, a colour for each kind of rollout.

    Args:
        rows: Of `python -m detjax.grpo`: `rollout`, `seed`, `step`, `reward`, `kl`.

    Returns:
        A matplotlib figure.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        reward_axes, kl_axes = figure.subplots(1, 2)
    runs = defaultdict(list)
    for row in rows:
        runs[row["rollout"], row["seed"]].append(row)
    named = set()
    for (mode, _), run in sorted(runs.items()):
        steps = [row["step"] for row in run]
        label = None if mode in named else f"{mode} rollout"
        named.add(mode)
        style = {"color": COLOURS[mode], "linewidth": 1, "alpha": 0.8}
        reward_axes.plot(steps, [row["reward"] for row in run], label=label, **style)
        kl_axes.plot(steps, [row["kl"] for row in run], marker=".", label=label, **style)
    reward_axes.set_ylim(0, 1)
    finish(reward_axes, title="Reward of sampled answers", x="update", y="mean reward")
    # Linear from 0 to 1e-6, so that an exact zero has a place.
    kl_axes.set_yscale("symlog", linthresh=1e-6)
    finish(kl_axes, title="KL(rollout || trainer)", x="update", y="nats a token", legend=False)
    kl_axes.set_ylim(bottom=-2e-7)
    for axes in (reward_axes, kl_axes):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def save_plot(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Write the figure; False, and nothing written, without matplotlib."""
    try:
        figure = plot_curves(rows)
    except ModuleNotFoundError:
        return False
    figure.savefig(path, dpi=150)
    return True
