# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/tree.svg, architecture.svg and tensor_core.svg.

python tools/draw_figures.py     # needs matplotlib: pip install -e ".[plots]"
"""

from pathlib import Path

import matplotlib
import ml_dtypes
import numpy as np

from detjax.pallas_kernels import tensor_core

matplotlib.use("svg")
# The same program gives the same file.
matplotlib.rcParams.update({"svg.hashsalt": "detjax", "font.size": 9, "svg.fonttype": "none"})
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

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


SHOWN = 44
"""Columns of bits of a step of a tensor core, from the greatest that a sum may have."""


def bits_of(value: float, left: int) -> list[int]:
    """The bits of a number's size, of weights 2**left, 2**(left - 1) and on."""
    return [int(abs(value) * 2.0**-exponent) % 2 for exponent in range(left, left - SHOWN, -1)]


def draw_tensor_core() -> None:
    """One step of one output: 16 products and the accumulator, their sum, and its rounding."""
    rng = np.random.default_rng(131)
    x, w = (
        (rng.standard_normal((1, tensor_core.DEPTH)) * 2.0 ** rng.integers(-5, 3, 16)).astype(
            ml_dtypes.bfloat16
        )
        for _ in range(2)
    )
    total = np.float32([[rng.standard_normal() * 8]])
    products = (x.astype(np.float64) * w.astype(np.float64))[0]
    result = float(tensor_core.add_products(total, x, w)[0, 0])
    exponents = tensor_core.exponent_of(x)[0] + tensor_core.exponent_of(w)[0]
    top = int(max(exponents.max(), tensor_core.exponent_of(total)[0, 0]))
    last = top - tensor_core.FRACTION_BITS
    added = sum(float(np.trunc(term * 2.0**-last)) for term in (*products, total[0, 0])) * 2.0**last
    rows = [float(total[0, 0]), *map(float, products), added, result]
    names = ["accumulator", *(f"product {i}" for i in range(tensor_core.DEPTH)), "exact sum",
             "rounded toward zero"]  # fmt: skip
    left = top + 3
    figure, axes = pyplot.subplots(figsize=(7.2, 4.3))
    for i, (name, value) in enumerate(zip(names, rows, strict=True)):
        y = -i - (0.7 if i > tensor_core.DEPTH else 0.0) - (0.7 if i > tensor_core.DEPTH + 1 else 0)
        axes.text(-0.6, y, f"{name}  {'-' if value < 0 else '+'}", ha="right", va="center", size=7)
        bits = bits_of(value, left)
        ones = [column for column, bit in enumerate(bits) if bit]
        for column in range(ones[0], ones[-1] + 1):
            is_cut = left - column < last
            color = ("#d0d0d0" if is_cut else RANKS[0]) if bits[column] else "white"
            edge = "#d0d0d0" if is_cut else RANKS[0]
            axes.add_patch(
                Rectangle((column - 0.42, y - 0.36), 0.84, 0.72, facecolor=color, edgecolor=edge,
                          linewidth=0.5)
            )  # fmt: skip
    cut = left - last + 0.5
    axes.axvline(cut, color=RANKS[1], linewidth=1.2)
    axes.text(cut + 0.3, 1.0, "cut away", color=RANKS[1], size=8, va="center")
    axes.text(left - top, 1.0, "the largest exponent and 25 bits below it", color=RANKS[1], size=8,
              va="center")  # fmt: skip
    axes.set_xlim(-9.5, SHOWN)
    axes.set_ylim(-len(names) - 1.2, 1.7)
    axes.axis("off")
    save("tensor_core.svg", figure)


def save(name: str, figure) -> None:
    """Write a figure without a date."""
    figure.savefig(FIGURES / name, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    draw_tree()
    draw_architecture()
    draw_tensor_core()
