# SPDX-License-Identifier: Apache-2.0
"""Write the measured sections of README and docs, and docs/figures, from committed rows.

python -m benchmarks.report            # needs matplotlib: pip install -e ".[plots]"
python -m benchmarks.report --check    # is the text current? needs nothing

The rows are the newest `benchmarks/results/<gpu>/<date>-<command>.jsonl` of each command, for each
GPU of `report_rows.GPUS`; figures are of the first. A part appears if its rows are there, and where
a case occurs twice in a file the later row counts. Experiments are
`benchmarks/results/*/reproduce/NAME.json`, those of a GPU before those of a CPU. A row of `dvr`
that verified no draft is told as such, or refused.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks import (
    report_experts,
    report_mesh,
    report_peers,
    report_production,
    report_rows,
    report_server,
    report_serving,
    report_training,
)
from benchmarks.common import COPY_BYTES_PER_S
from benchmarks.report_rows import (
    FIRST_GPU,
    GPUS,
    Experiment,
    latest,
    listed,
    rows,
    step_of,
    table,
    told,
)

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
MARKERS = "<!-- {0}: begin -->", "<!-- {0}: end -->"
SHAPES = ("qkv", "o", "gate_up", "down", "lm_head")
ROW_COUNTS = (1, 8, 64, 128, 512, 2048, 8192)
FLOOR = "bytes at 4.3 TB/s"
CONTEXT = 1024
"""Of the decode steps in the headline and the figure."""

SUBJECTS = (("step", "step"), ("kernels", "linear"), ("kernels", "attention"), ("kernels", "rows"),
            ("serving", "offline"), ("serving", "stress"), ("mesh", "mesh_step"))  # fmt: skip
"""Commands and subjects of what README tells of a GPU."""

IMPLS = ("invariant", "fast", "transformers compiled", "transformers eager")


def linear_ratios(gpu: str = FIRST_GPU) -> dict[tuple[str, int], float]:
    """Time of the best rival over ours, by shape and number of rows."""
    found = rows("kernels", "linear", gpu)
    return {(row["shape"], row["m"]): row["ratio"] for row in found if "ratio" in row}


def linear_table() -> list[str]:
    """The ratios at some numbers of rows."""
    ratio = linear_ratios()

    def cells(count):
        values = [ratio.get((shape, count)) for shape in SHAPES]
        return [str(count), *(f"{value:.2f}" if value else "" for value in values)]

    return table(["rows", *SHAPES], map(cells, ROW_COUNTS))


def kernel_lines(gpu: str = FIRST_GPU) -> list[str]:
    """Attention against cuDNN and the copy bandwidth; kernels bound by memory."""
    lines = []
    for row in rows("kernels", "attention", gpu):
        if row["case"] == "prefill" and row["tokens"] == 8192:
            lines.append(
                f"Attention, prefill of 8192 tokens, 32/8 heads of 128: {row['ms']:.3f} ms, "
                f"{row['tflops']:.0f} TFLOP/s, {row['over_cudnn']:.2f} of cuDNN's speed in the "
                "same run."
            )
        elif row["case"] == "decode":
            share = f", {row['share']:.2f} of 4.3 TB/s" if gpu == FIRST_GPU else ""
            lines.append(
                f"Attention, decode of {row['batch']} x {row['tokens']} tokens: "
                f"{row['us']:.1f} us{share}."
            )
    for row in rows("kernels", "rows", gpu):
        if row["m"] == 8192 and row["case"] in ("add_rms_norm", "swiglu"):
            lines.append(
                f"`{row['case']}`, 8192 rows: {row['us']:.1f} us, {row['share_of_copy']:.2f} of "
                f"the copy bandwidth (XLA {row['xla_us']:.1f} us)."
            )
    return [f"- {line}" for line in lines]


def step_times(gpu: str = FIRST_GPU) -> dict[str, dict[str, float]]:
    """Milliseconds of each implementation, by case; decode first, small ones first."""
    times: dict[str, dict[str, float]] = {}
    for row in sorted(timed_steps(gpu), key=step_of):
        times.setdefault(row["case"], {})[row["impl"]] = row["ms_p50"]
    return times


def timed_steps(gpu: str = FIRST_GPU) -> list[dict]:
    """Rows of steps that ran."""
    return [row for row in rows("step", "step", gpu) if "ms_p50" in row]


def decode_lines() -> dict[str, list[tuple[int, float]]]:
    """(batch, ms) of decode steps at CONTEXT, by implementation, and the floor of the bandwidth."""
    lines: dict[str, dict[int, float]] = {}
    for row in timed_steps():
        kind, batch, context = step_of(row)
        if (kind, context) == ("decode", CONTEXT):
            lines.setdefault(row["impl"], {})[batch] = row["ms_p50"]
            if row["impl"] == "invariant" and "floor_ms" in row:
                lines.setdefault(FLOOR, {})[batch] = row["floor_ms"]
    return {name: sorted(points.items()) for name, points in lines.items()}


def step_table(gpu: str = FIRST_GPU) -> list[str]:
    """Whole steps: ours, the same without claims, transformers, and the bandwidth's share.

    The share is of what the first GPU can do, so others have no such column.
    """
    times = step_times(gpu)
    share = {row["case"]: limit_share(row) for row in timed_steps(gpu) if is_ours(row)}
    impls = [impl for impl in IMPLS if any(impl in found for found in times.values())]
    has_share = gpu == FIRST_GPU

    def cells(case):
        found = times[case]
        speed = found["fast"] / found["invariant"] if "fast" in found else None
        return [
            case,
            *(f"{found[impl]:.2f}" if impl in found else "" for impl in impls),
            *([f"{speed:.2f}" if speed else ""] if "fast" in impls else []),
            *([f"{share[case]:.2f}" if share[case] else ""] if has_share else []),
        ]

    ratio = ["invariant over fast, speed"] if "fast" in impls else []
    limit = ["share of the limit"] if has_share else []
    header = ["step, ms", *impls, *ratio, *limit]
    return table(header, (cells(case) for case in times if case in share))


def card(row: dict) -> str:
    """What was measured on."""
    return f"One {row['gpu']}, jax {row['jax']}, Llama-3.1-8B shapes, random data, bfloat16."


def other_gpus_lines() -> list[str]:
    """The same steps, kernels and loads on other GPUs, or that there are none."""
    lines = []
    for gpu, name in GPUS.items():
        if gpu == FIRST_GPU:
            continue
        bullets = [*kernel_lines(gpu), *report_serving.readme_lines(gpu)]
        bullets += report_mesh.readme_lines(gpu)
        found = [row for where in SUBJECTS for row in rows(*where, gpu)]
        if not found:
            lines += ["", f"There are no rows of kernels or steps of an {name}."]
            continue
        lines += ["", f"**{name}.** {card(found[0])}"]
        if step_times(gpu):
            lines += ["", *step_table(gpu)]
        if shares := copy_shares(gpu):
            lines += ["", shares]
        if bullets:
            lines += ["", *bullets]
    return lines


def copy_shares(gpu: str) -> str:
    """Decode against the GPU's own copy bandwidth, if that was measured in the same run."""
    copies = rows("step", "copy", gpu)
    if not copies:
        return ""
    own = copies[-1]["bytes_per_s"]
    steps = latest(
        (
            row
            for row in rows("step", "step", gpu)
            if row["impl"] == "invariant" and "floor_ms" in row
        ),
        "case",
    ).values()
    batches = listed([str(row["batch"]) for row in steps])
    shares = listed(
        [f"{row['floor_ms'] * COPY_BYTES_PER_S / own / row['ms_p50']:.2f}" for row in steps]
    )
    return (
        f"In the same run a copy moves {own / 1e12:.2f} TB/s. Decode at batch {batches} reads its "
        f"bytes at {shares} of that rate."
    )


def is_ours(row: dict) -> bool:
    """Whether a row of a step is of the kernels that make the claim."""
    return row["impl"] == "invariant"


def limit_share(row: dict) -> float | None:
    """How near a step of ours comes to what the GPU can do; None for others."""
    if not is_ours(row):
        return None
    return row.get("floor_over_measured", row.get("share_of_790_tflop_per_s"))


def benchmarks_section() -> list[str]:
    """Whole steps, the linear layers in short, the other kernels, the engine, and several GPUs."""
    is_gated = any(row.get("is_gated") for row in rows("kernels", "linear"))
    gating = " In `gate_up` it also gates." if is_gated else ""
    return [
        card(rows("kernels", "linear")[0]),
        f"Figures without the name of a GPU are of the {GPUS[FIRST_GPU]}.",
        "[Kernels](docs/kernels.md) says how they work, and [tried](docs/tried.md) what failed.",
        "",
        *step_table(),
        "",
        "The limit of decode is the bytes of weights and cache at 4.3 TB/s; that of prefill is",
        "790 TFLOP/s. `fast` is the same model on XLA's products, norms and activations, without a",
        "claim. It was timed in the same run, and transformers in a run of its own.",
        "",
        "![Time of a decode step over the batch](docs/figures/step.svg)",
        "",
        *behind(report_peers.lines()),
        "Linear layers: the time of the best rival over that of detjax, in the same run. Rivals",
        "are `jnp.dot` (cuBLAS or XLA's own) and, where it ran, `torch.mm`. They only multiply. In",
        "`o` and `down` detjax sums eight leaves as a tree and, above 128 rows, adds the",
        "residual." + gating,
        "",
        *linear_table(),
        "",
        "![Speed of the linear layers over the number of rows](docs/figures/linear.svg)",
        "",
        *kernel_lines(),
        *report_serving.readme_lines(),
        *report_mesh.readme_lines(),
        *other_gpus_lines(),
        *before(report_experts.lines()),
        *before(report_production.lines()),
    ]


def behind(lines: list[str]) -> list[str]:
    """Lines and an empty one, or nothing."""
    return [*lines, ""] if lines else []


def before(lines: list[str]) -> list[str]:
    """An empty line and the lines, or nothing."""
    return ["", *lines] if lines else []


def kernels_section() -> list[str]:
    """For each GPU every product at every M, and the kernels' own figures."""
    lines = []
    for gpu in GPUS:
        lines += before(_kernels_of(gpu))
    return lines[1:]


def _kernels_of(gpu: str) -> list[str]:
    all_rows = rows("kernels", "linear", gpu)
    found = {(r["shape"], r["m"]): r for r in all_rows if "ratio" in r}
    if not found:
        return []
    counts = sorted({m for _, m in found})

    def cell(shape, m):
        row = found.get((shape, m))
        return f"{row['us']:.1f}, {row['ratio']:.2f}" if row else ""

    lines = [[str(m), *(cell(shape, m) for shape in SHAPES)] for m in counts]
    fixed = [row["fixed_us"] / row["us"] for row in found.values() if "fixed_us" in row]
    control = []
    if fixed:
        control = [
            "",
            "One fixed tile of 128 x 128 x 64, unsplit, as in Thinking Machines' product, takes "
            f"{min(fixed):.2f} to {max(fixed):.2f} times as long.",
        ]
    return [
        card(all_rows[0]),
        "",
        "Microseconds of a product, and the time of the best rival divided by it:",
        "",
        *table(["M", *SHAPES], lines),
        *control,
        "",
        *kernel_lines(gpu),
    ]


def experiments() -> dict[str, Path]:
    """Which result of each experiment is told, by name.

    That of a GPU, or else of a CPU; of the first GPU that has it. One that was made in pieces goes
    before those from before there were pieces, which have other settings.
    """
    order = ["cpu", *reversed(GPUS)]
    taken: dict[str, Path] = {}
    for machine in order:
        for path in (report_rows.RESULTS / machine / "reproduce").glob("*.json"):
            before = taken.get(path.stem)
            if (
                before is None
                or before.parts[-3] == "cpu"
                or has_pieces(path) >= has_pieces(before)
            ):
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


def findings(name: str, found: dict) -> list[str]:
    """What an experiment found here, a sentence each."""
    return [told_finding(name, finding, found["rows"]) for finding in found["findings"]]


def experiments_of_rows() -> list[Experiment]:
    """Questions that other benchmarks answer."""
    found = report_mesh.sum_experiment(), report_server.latency_experiment()
    return [experiment for experiment in found if experiment]


def findings_section() -> list[str]:
    """README's findings: what changes without the claims, what does not, and where it was seen."""
    paths = experiments()
    cells = []
    for name, cells_of in (
        ("accuracy", _changed_answers),
        ("completions", _different_texts),
        ("meshes", _unique_outputs),
        ("policy", _held_out),
    ):
        if name not in paths:
            continue
        found = json.loads(paths[name].read_text())
        where = (found["setting"].split(" (")[0], found["gpu"], found["date"], found["commit"])
        cells.append([*cells_of(found["rows"]), ", ".join(where)])
    return table(["", "`fast`", "`invariant`", "model, machine, date, commit"], cells)


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
        f"greedy answers to {one['problems']:,} additions that change in a bit, "
        "batch 8, 32, 128, tp 1, 2"
    )
    return [name, f"{changed('fast'):,}", f"{changed('invariant'):,}"]


def _different_texts(found: list[dict]) -> list[str]:
    of_mode = {row["mode"]: row for row in found}
    name = f"different texts among {of_mode['fast']['requests']:,} greedy answers to one prompt"
    return [name, str(of_mode["fast"]["texts"]), str(of_mode["invariant"]["texts"])]


def _unique_outputs(found: list[dict]) -> list[str]:
    """Of the trained model."""
    mean = {
        row["mode"]: row["unique_outputs_mean"] for row in found if row["model"] == "novels-130m"
    }
    name = "different answers a prompt, 30 prompts, tp 1, 2 x batch 8, 16, 32"
    return [name, f"{mean['fast']:.2f}", f"{mean['invariant']:.2f}"]


def _held_out(found: list[dict]) -> list[str]:
    """GRPO: the run whose rollout has the trainer's bits, and the worst that does not correct."""
    exact = next(row for row in found if row["kind"] == "exact")
    worst = min((r for r in found if r["kind"] == "uncorrected"), key=lambda r: r["held_out"])
    name = f"held-out sums right after {exact['steps']} updates of GRPO"
    return [
        name,
        f"{worst['held_out']:.3f} (rollout with {worst['bits']}-bit weights)",
        f"{exact['held_out']:.3f}",
    ]


def experiments_section() -> list[str]:
    """Each experiment: the question, what the paper found, what was found here, and the figure."""
    lines = []
    for name, path in sorted(experiments().items()):
        found = json.loads(path.read_text())
        figure = path.with_suffix(".png").relative_to(ROOT)
        lines += [
            f"**{found['question']}** `benchmarks.reproduce {name}`, [figure]({figure})",
            "",
            f"- Paper: {found['paper']}",
            *(f"- Here: {told}." for told in findings(name, found)),
            f"- With {found['setting']}.",
            "",
        ]
    for its in experiments_of_rows():
        lines += [
            f"**{its.question}** `{its.command}`, {its.links}",
            "",
            f"- Paper: {its.paper}",
            *(f"- Here: {told}." for told in its.here),
            f"- With {its.setting}.",
            "",
        ]
    return lines[:-1]


SECTIONS = (
    ("README.md", "speed", report_peers.readme_lines),
    ("README.md", "findings", findings_section),
    ("docs/benchmarks.md", "benchmarks", benchmarks_section),
    ("docs/experiments.md", "experiments", experiments_section),
    ("docs/kernels.md", "benchmarks", kernels_section),
    ("docs/serving.md", "benchmarks", report_serving.section),
    ("docs/server.md", "load", report_server.section),
    ("docs/parallel.md", "benchmarks", report_mesh.section),
    ("docs/training.md", "grpo", report_training.section),
)
"""Document, name of the markers, and what stands between them."""


def updated(text: str, name: str, section: list[str], folder: str) -> str:
    """A document of a folder with the text between two markers replaced.

    Links of a section are written from the root.
    """
    begin, end = (marker.format(name) for marker in MARKERS)
    start, stop = text.index(begin), text.index(end)
    lines = "\n".join([begin, *section, ""])
    if folder:
        lines = re.sub(r"\]\((?!#|https?:)", "](" + "../" * (folder.count("/") + 1), lines)
        lines = lines.replace(f"](../{folder}/", "](")
    return text[:start] + lines + text[stop:]


def draw_figures() -> None:
    """Products over M, decode steps over the batch and by tp, and throughput of the engine."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('matplotlib is missing: pip install -e ".[plots]"') from error
    matplotlib.use("svg")
    # The same rows give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "detjax", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    def finish(axes, *, x_label, y_label, is_log=True):
        if is_log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)

    def write(name, figure):
        figure.savefig(FIGURES / name, metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)

    def save(name, axes, **labels):
        finish(axes, **labels)
        write(name, axes.figure)

    FIGURES.mkdir(exist_ok=True)
    ratio = linear_ratios()
    _, axes = pyplot.subplots(figsize=(6, 3.2))
    for shape in SHAPES:
        points = sorted((m, value) for (name, m), value in ratio.items() if name == shape)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=shape)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    save("linear.svg", axes, x_label="rows (M)", y_label="speed over the best rival")

    _, axes = pyplot.subplots(figsize=(6, 3.2))
    for name, points in decode_lines().items():
        if name == "transformers eager":
            continue  # ten times as long: it is in the table
        style = {"linestyle": "--", "color": "0.5"} if name == FLOOR else {}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
    axes.set_ylim(bottom=0)
    save("step.svg", axes, x_label="batch", y_label="ms a decode step, context 1024")

    if report_server.latency_rows():
        _, axes = pyplot.subplots(figsize=(6, 3.2))
        report_server.draw_latency(axes)
        labels = {"x_label": "requests a second", "y_label": "P99 end to end, s"}
        save("latency.svg", axes, **labels, is_log=False)

    if report_experts.decode_lines():
        _, axes = pyplot.subplots(figsize=(6, 3.2))
        for name, points in report_experts.decode_lines().items():
            style = {"linestyle": "--", "color": "0.5"} if name == report_experts.LIMIT else {}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
        axes.set_ylim(bottom=0)
        save("experts.svg", axes, x_label="batch", y_label="ms a decode step, context 1024")

    if report_mesh.decode_lines():
        _, axes = pyplot.subplots(figsize=(6, 3.2))
        report_mesh.draw(axes)
        save("mesh.svg", axes, x_label="batch", y_label="ms a decode step, context 1024")

    shares, windows = (bool(rows("serving", subject)) for subject in report_serving.DRAWN)
    if shares or windows:
        panels = shares + windows
        figure, (places,) = pyplot.subplots(1, panels, figsize=(6 * panels, 3.2), squeeze=False)
        if shares:
            report_serving.draw_shares(places[0])
            labels = {"x_label": "deterministic requests, %", "y_label": "throughput over fast"}
            finish(places[0], **labels, is_log=False)
        if windows:
            report_serving.draw_windows(places[-1])
            finish(places[-1], x_label="window (W)", y_label="generated tokens/s")
        write("serving.svg", figure)


def main() -> None:
    """Rewrite the text and the figures, or with --check say whether the text is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args()
    new: dict[Path, str] = {}
    for document, name, make in SECTIONS:
        path = ROOT / document
        folder = document.rpartition("/")[0]
        new[path] = updated(new.get(path) or path.read_text(), name, make(), folder)
    if args.check:
        stale = [path.name for path, text in new.items() if text != path.read_text()]
        sys.exit(f"{stale} are stale: run python -m benchmarks.report" if stale else 0)
    draw_figures()
    for path, text in new.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
