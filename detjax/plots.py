# SPDX-License-Identifier: Apache-2.0
"""How plots look: one colour for one mode everywhere, a title, and readable axes.

matplotlib is not imported here; it comes with the `plots` extra.
"""

from typing import Any

COLOURS = {
    "invariant": "tab:blue", "dvr": "tab:green", "fast": "tab:orange", "merged": "tab:orange",
}  # fmt: skip
"""Of each mode of the engine, and of training whose rollout has it."""

OTHERS = ("tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "tab:red")
"""Of lines that are no modes."""

REFERENCE = "0.45"
"""The colour of limits and of what papers found."""

CHANGED, UNCHANGED = (0.97, 0.80, 0.77), (0.93, 0.95, 0.93)
"""Red, green and blue behind a count of what differs, and behind a count of 0."""

SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.markersize": 4,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "detjax",
}
"""Of matplotlib, for `rc_context`. The same rows give the same file."""


def finish(axes: Any, *, title: str, x: str, y: str, legend: bool = True) -> None:
    """Give axes their title, labels with units, and a legend.

    Args:
        axes: Of matplotlib.
        title: What is shown, in a few words.
        x: What the horizontal axis is, with its unit.
        y: Likewise, of the vertical axis.
        legend: Whether lines have names.
    """
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        axes.legend()


def over_powers_of_two(axes: Any) -> None:
    """Count along the horizontal axis by powers of two, written as numbers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
