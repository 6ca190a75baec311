# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/tree.svg and docs/figures/architecture.svg.

python tools/draw_figures.py     # needs matplotlib: pip install -e ".[plots]"
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
# The same program gives the same file.
matplotlib.rcParams.update({"svg.hashsalt": "detjax", "font.size": 9, "svg.fonttype": "none"})
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
GREY, LEAVES = "0.35", 8


def draw_tree() -> None:
    """Eight leaves of a row-parallel sum, with tp 4: two leaves and their node belong to a rank."""
    figure, axes = pyplot.subplots(figsize=(7, 2.9))
    xs = [float(i) for i in range(LEAVES)]
    for level in range(4):
        for i, x in enumerate(xs):
            color = RANKS[int(x // 2)] if level < 2 else GREY
            axes.scatter([x], [level], s=190, color=color, zorder=3)
            axes.text(x, level, f"{i}" if level == 0 else "+", color="white", ha="center",
                      va="center", zorder=4)  # fmt: skip
        pairs = list(zip(xs[::2], xs[1::2], strict=False))
        for x, parent in ((x, sum(pair) / 2) for pair in pairs for x in pair):
            color = RANKS[int(x // 2)] if level < 1 else GREY
            axes.plot([x, parent], [level, level + 1], color=color, linewidth=1.2, zorder=1)
        xs = [sum(pair) / 2 for pair in pairs]
    for rank, color in enumerate(RANKS):
        axes.text(2 * rank + 0.5, -0.62, f"rank {rank}", color=color, ha="center", va="center")
    texts = {
        0.0: "leaves: K / 8 inputs each,\nin order of k, float32",
        1.0: "a rank's subtree,\nin its own kernel",
        2.5: "the rest of the same tree:\na butterfly between ranks,\nor none on one GPU",
    }
    for height, text in texts.items():
        axes.text(8.0, height, text, ha="left", va="center", color=GREY)
    axes.set_xlim(-0.5, 11.0)
    axes.set_ylim(-0.9, 3.4)
    axes.axis("off")
    save("tree.svg", figure)


BOXES = {
    # name: (x, y, width, text)
    "llm": (0.0, 5.0, 3.0, "LLM, detjax.generate\ntext in, text out"),
    "engine": (0.0, 4.0, 3.0, "Engine\nrequests in, tokens out"),
    "scheduler": (-1.75, 3.0, 3.0, "Scheduler\nwhich rows the next step runs"),
    "pages": (-1.75, 2.0, 3.0, "PagePool, prefix cache\nwhose pages"),
    "runner": (1.75, 3.0, 3.0, "ModelRunner\nrows become arrays"),
    "programs": (1.75, 2.0, 3.0, "ProgramCache\nprefill, decode, verify"),
    "decoder": (0.0, 1.0, 3.0, "decoder, sampling\nlayers, choice of a token"),
    "kernels": (-1.75, 0.0, 3.0, "kernels: portable, sm90\nevery rounding"),
    "mesh": (1.75, 0.0, 3.0, "mesh, exchange\nthe ranks' tree"),
    "training": (4.6, 1.0, 2.2, "training\nthe same bits,\nwith gradients"),
}
ARROWS = (
    ("llm", "engine"), ("engine", "scheduler"), ("engine", "runner"), ("scheduler", "pages"),
    ("runner", "programs"), ("programs", "decoder"), ("decoder", "kernels"), ("decoder", "mesh"),
    ("training", "decoder"),
)  # fmt: skip
HEIGHT = 0.62


def draw_architecture() -> None:
    """The way of a request, from text to kernels: an arrow from who calls to who is called."""
    figure, axes = pyplot.subplots(figsize=(7, 5.2))
    for name, (x, y, width, text) in BOXES.items():
        color = "#dbe7f3" if name not in ("kernels", "mesh") else "#f3e5d3"
        box = FancyBboxPatch((x - width / 2, y - HEIGHT / 2), width, HEIGHT, facecolor=color,
                             edgecolor=GREY, boxstyle="round,pad=0.02")  # fmt: skip
        axes.add_patch(box)
        first, _, rest = text.partition("\n")
        lift = 0.14 if rest.count("\n") == 0 else 0.2
        axes.text(x, y + lift, first, ha="center", va="center", weight="bold", fontsize=8.5)
        axes.text(x, y - 0.12, rest, ha="center", va="center", fontsize=7.5, color="0.25")
    for start, end in ARROWS:
        (x0, y0, w0, _), (x1, y1, w1, _) = BOXES[start], BOXES[end]
        if y0 == y1:
            begin, stop = (x0 - w0 / 2, y0), (x1 + w1 / 2, y1)
        else:
            begin, stop = (x0, y0 - HEIGHT / 2), (x1, y1 + HEIGHT / 2)
        style = {"arrowstyle": "->", "color": GREY, "shrinkA": 2, "shrinkB": 2}
        axes.annotate("", xy=stop, xytext=begin, arrowprops=style)
    axes.set_xlim(-3.4, 5.8)
    axes.set_ylim(-0.45, 5.45)
    axes.axis("off")
    save("architecture.svg", figure)


def save(name: str, figure) -> None:
    """Write a figure without a date."""
    figure.savefig(FIGURES / name, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    draw_tree()
    draw_architecture()
