# SPDX-License-Identifier: Apache-2.0
"""docs/figures, of the first GPU's rows."""

from pathlib import Path

from benchmarks.report import mesh, serving, steps
from benchmarks.report.rows import FIRST_GPU, step_of
from detjax.plots import COLOURS, OTHERS, REFERENCE, SETTINGS, finish, over_powers_of_two

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
BATCH = "batch (sequences)"
LIMITS = {"step": "bytes at 4.3 TB/s", "step_experts": "bytes of the experts hit at 4.3 TB/s"}


def decode_lines(command: str) -> dict[str, list[tuple[int, float]]]:
    """(batch, ms) of decode steps at one context, by implementation, and the limit."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in steps.steps(command, FIRST_GPU):
        kind, batch, context = step_of(row)
        if (kind, context) != ("decode", steps.CONTEXT):
            continue
        # Transformers without compiling takes ten times as long: it is in the table.
        for impl in steps.IMPLS[:3]:
            if impl in row:
                lines.setdefault(impl, []).append((batch, row[impl]))
        if "floor_ms" in row:
            lines.setdefault(LIMITS[command], []).append((batch, row["floor_ms"]))
    return lines


def draw_steps(axes, command: str, title: str) -> None:
    """Time of a decode step over the batch."""
    for name, points in decode_lines(command).items():
        style = {"color": COLOURS.get(name, OTHERS[0])}
        if name == LIMITS[command]:
            style = {"color": REFERENCE, "linestyle": "--"}
        axes.plot(*zip(*points, strict=True), marker="o", label=name, **style)
    axes.set_ylim(bottom=0)
    over_powers_of_two(axes)
    finish(axes, title=title, x=BATCH, y="decode step (ms)")


def draw_products(axes) -> None:
    """Speed of the linear layers over the number of rows."""
    found = steps.products()
    for shape, colour in zip(steps.SHAPES, OTHERS, strict=False):
        points = sorted((m, row["ratio"]) for (name, m), row in found.items() if name == shape)
        axes.plot(*zip(*points, strict=True), marker="o", label=shape, color=colour)
    axes.axhline(1.0, color=REFERENCE, linewidth=0.8)
    over_powers_of_two(axes)
    finish(
        axes, title="Linear layers of Llama-3.1-8B against the best rival", x="rows (M)",
        y="rival's time over ours",
    )  # fmt: skip


def draw_meshes(axes) -> None:
    """Decode steps over the batch: a colour for each mode, a marker for each tp."""
    markers = {1: "o", 2: "s", 4: "^", 8: "D"}
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in mesh.steps("mesh_step", FIRST_GPU):
        for mode in ("invariant", "fast"):
            if row["kind"] == "decode" and not row["note"] and mode in row:
                lines.setdefault((mode, row["tp"]), []).append((row["count"], row[mode]))
    for (mode, tp), points in sorted(lines.items(), key=lambda item: item[0][::-1]):
        axes.plot(
            *zip(*points, strict=True), marker=markers[tp], color=COLOURS[mode],
            linestyle="-" if tp == 1 else "--", label=f"{mode}, tp {tp}",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    over_powers_of_two(axes)
    title = "Decode steps of Llama-3.1-8B, context 1024"
    finish(axes, title=title, x=BATCH, y="decode step (ms)")


def draw_shares(axes) -> None:
    """Throughput over that of `fast`, over the share of deterministic requests."""
    for cases, marker in zip(serving.SHARES.rows(FIRST_GPU), "osD^", strict=False):
        points = [
            (row["deterministic_percent"], row["over_fast"])
            for row in cases
            if "over_fast" in row and row["mode"] == "dvr"
        ]
        label = f"dvr, {cases[0]['model']}"
        axes.plot(*zip(*points, strict=True), marker=marker, color=COLOURS["dvr"], label=label)
    axes.axhline(1.0, color=COLOURS["fast"], linewidth=0.8, label="fast")
    axes.set_ylim(bottom=0)
    finish(
        axes, title="Throughput by share of deterministic requests",
        x="deterministic requests (%)", y="throughput over fast",
    )  # fmt: skip


def draw_windows(axes) -> None:
    """Throughput over the window, a line for each group."""
    for cases in serving.WINDOWS.rows(FIRST_GPU):
        for group, marker in zip(sorted({row["group"] for row in cases}), "osD^", strict=False):
            points = [
                (row["window"], row["output_tokens_per_s"])
                for row in cases
                if row["group"] == group
            ]
            label = f"dvr, group of {group}, {cases[0]['draft_weights']} weights"
            axes.plot(*zip(*points, strict=True), marker=marker, color=COLOURS["dvr"], label=label)
    axes.set_ylim(bottom=0)
    finish(
        axes, title="Throughput by window, all deterministic", x="window (tokens)",
        y="generated tokens a second",
    )  # fmt: skip


def draw_all(folder: Path = FIGURES) -> None:
    """Write every figure whose rows there are.

    Raises:
        SystemExit: If matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit('matplotlib is missing: pip install -e ".[plots]"') from error
    step_titles = {
        "step": "Decode steps of Llama-3.1-8B, context 1024",
        "step_experts": "Decode steps of Qwen3-30B-A3B, context 1024",
    }
    figures = {
        "step.svg": [lambda axes: draw_steps(axes, "step", step_titles["step"])],
        "experts.svg": [lambda axes: draw_steps(axes, "step_experts", step_titles["step_experts"])],
        "linear.svg": [draw_products], "mesh.svg": [draw_meshes],
        "serving.svg": [draw_shares, draw_windows],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        for name, panels in figures.items():
            figure = Figure(figsize=(6 * len(panels), 3.4), layout="constrained")
            for axes, draw in zip(
                figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
            ):
                draw(axes)
            figure.savefig(folder / name, metadata={"Date": None}, format="svg")
