# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.mesh` and `benchmarks.answers` found, as docs/parallel.md and README tell it."""

import re

from benchmarks.report_rows import (
    FIRST_GPU,
    GPUS,
    Experiment,
    digits,
    hardware,
    latest,
    listed,
    model_name,
    ratio,
    rows,
    table,
)

MODES = ("invariant", "fast")
OURS = ("exchange kernel", "scatter")
"""The forms of the ranks' sum that a model uses; no number of rows is timed with both."""

SUMS = (*OURS, "butterfly", "psum float32", "psum bfloat16")
BITS = ("tokens", "logprobs", "final hidden states", "keys and values of every layer")
"""What `mesh_step_bits` may compare: rows from 2026-11-22 on have no hidden states of their own."""

Case = tuple[str, int]
"""decode and a batch, or prefill and a number of tokens."""


def read_impl(name: str) -> tuple[str, int, int, str]:
    """Read "invariant (1,2), no exchange kernel": mode, dp, tp, and what is special."""
    mode, dp, tp, note = re.fullmatch(r"(\w+) \((\d+),(\d+)\)(?:, (.*))?", name).groups()
    return mode, int(dp), int(tp), note or ""


def steps(
    subject: str = "mesh_step", gpu: str = FIRST_GPU
) -> dict[tuple[Case, int, str], dict[str, dict]]:
    """By (case, tp, what is special): the row of each mode that was timed."""
    found: dict[tuple[Case, int, str], dict[str, dict]] = {}
    for (case, impl), row in latest(rows("mesh", subject, gpu), "case", "impl").items():
        mode, dp, tp, note = read_impl(impl)
        if dp == 1 and "ms_p50" in row:
            place = case.split()[0], int(re.search(r"\d+", case)[0])
            found.setdefault((place, tp, note), {})[mode] = row
    return dict(sorted(found.items()))


def case_name(case: Case) -> str:
    """Such as "decode, batch 8"."""
    kind, count = case
    return f"decode, batch {count}" if kind == "decode" else f"prefill, {count} tokens"


def decode_lines(gpu: str = FIRST_GPU) -> dict[tuple[int, str], list[tuple[int, float]]]:
    """(batch, milliseconds) of decode steps, by (tp, mode)."""
    lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for ((kind, batch), tp, note), found in steps(gpu=gpu).items():
        for mode, row in found.items():
            if kind == "decode" and not note:
                lines.setdefault((tp, mode), []).append((batch, row["ms_p50"]))
    return dict(sorted(lines.items()))


def step_bits_lines(gpu: str = FIRST_GPU) -> list[str]:
    """Whole steps on a mesh against one GPU."""
    compared: dict[str, list[dict]] = {}
    for (_, impl), row in latest(rows("mesh", "mesh_step_bits", gpu), "case", "impl").items():
        if impl and read_impl(impl)[1:3] != (1, 1):
            compared.setdefault(impl.split(maxsplit=1)[1], []).append(row)
    lines = []
    for mesh, found in sorted(compared.items()):
        compared_bits = [what for what in BITS if all(what in row for row in found)]
        wrong = sum(row[what] for row in found for what in compared_bits)
        cases = "; ".join(row["case"].replace(" 1 tokens", " 1 token") for row in found)
        lines.append(
            f"Whole steps on (dp, tp) = {mesh} against (1,1), {listed(compared_bits)}: {wrong} "
            f"bytes differ ({cases})."
        )
    same = [row["same"] for row in rows("mesh", "mesh_step_bits", gpu) if "same" in row]
    if same:
        lines.append(
            f"A row in batches of other sizes: {'the same' if same[-1] else 'other'} bits."
        )
    return lines


def sum_bits_lines(gpu: str = FIRST_GPU) -> list[str]:
    """The forms of the ranks' sum against the reference."""
    sums: dict[tuple[str, int], list[dict]] = {}
    for (case, impl), row in latest(rows("mesh", "mesh_bits", gpu), "case", "impl").items():
        sums.setdefault((impl, int(re.search(r"tp (\d+)", case)[1])), []).append(row)
    return [
        f"The ranks' sum, {impl} against the butterfly at tp {tp}: "
        f"{sum(row['different'] for row in found)} elements differ "
        f"({listed(sorted(row['num_rows'] for row in found))} rows)."
        for (impl, tp), found in sums.items()
    ]


def answer_rows(gpu: str = FIRST_GPU) -> list[dict]:
    """Rows of whole answers: a run of their own, or beside those of the mesh."""
    return rows("answers", "answers", gpu) or rows("mesh", "answers", gpu)


def answer_lines(gpu: str = FIRST_GPU) -> list[str]:
    """Whole answers over meshes and batch sizes."""
    lines = [
        f"Whole answers, {model_name(model)}, `{mode}`: {row['requests']} requests on "
        f"{row['settings']} settings of mesh and batch size, {row['unique_outputs_mean']:.2f} "
        f"different outputs each; with logprobs {row['unique_with_logprobs_max']} at most, largest "
        f"divergence of a probability {row['max_prob_divergence']:.2g}."
        for (model, mode), row in latest(answer_rows(gpu), "model", "mode").items()
    ]
    return lines or digest_lines(gpu)


def digest_lines(gpu: str = FIRST_GPU) -> list[str]:
    """The same of a run that was cut short: digests of all answers of a setting."""
    digests: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for row in rows("mesh", "answers_of", gpu):
        found = digests.setdefault((row["model"], row["mode"]), {})
        found[row["mesh"], row["batch"]] = row["digest"]
    return [
        f"Whole answers, {model_name(model)}, `{mode}`: tokens and logprobs of all requests on "
        f"(dp x tp, batch size) {', '.join(f'({mesh}, {batch})' for mesh, batch in found)}: "
        f"{len(set(found.values()))} different "
        f"{'set' if len(set(found.values())) == 1 else 'sets'} of bits."
        for (model, mode), found in digests.items()
    ]


def bits_part(gpu: str = FIRST_GPU) -> list[str]:
    """What was compared bit for bit."""
    lines = [*step_bits_lines(gpu), *sum_bits_lines(gpu), *answer_lines(gpu)]
    return ["**Bits.**", "", *(f"- {line}" for line in lines)] if lines else []


def step_part(gpu: str = FIRST_GPU) -> list[str]:
    """Whole steps on meshes, and the figure."""
    found = steps(gpu=gpu)
    if not found:
        return []

    def cells(place):
        case, tp, note = place
        ms = {mode: row["ms_p50"] for mode, row in found[place].items()}
        fast, one = (
            found.get((case, size, ""), {}).get(mode, {}).get("ms_p50")
            for mode, size in (("fast", tp), ("invariant", 1))
        )
        ours = found[place].get("invariant", {})
        shared = ours.get("communication_ms") if tp > 1 else None
        return [
            case_name(case),
            f"{tp}, {note}" if note else str(tp),
            *(f"{ms[mode]:.2f}" if mode in ms else "" for mode in MODES),
            ratio(fast, ms.get("invariant")),
            ratio(one, ms.get("invariant")) if tp > 1 else "",
            f"{shared:.2f}" if shared else "",
            *(str(found[place].get(mode, {}).get("launches", "")) for mode in MODES),
        ]

    header = ["step", "tp", "invariant, ms", "`fast`, ms", "speed over `fast`", "speed over tp 1",
              "communication, ms", "launches", "launches of `fast`"]  # fmt: skip
    lines = [
        "**Whole steps.** Wall time; decode at a context of 1024. `fast` is XLA's products and a",
        "psum of float32 partials, without a claim. Communication is device time of detjax's step",
        "in launches of its own (the exchange kernel, XLA's gathers), with waits for peers. Sums",
        "in the epilogue of a product are not included. 'Sums and choice apart' has no such sums,",
        "and only XLA gathers:",
        "",
        *table(header, map(cells, found)),
    ]
    if gpu == FIRST_GPU and decode_lines():
        lines += ["", "![Time of a decode step over the batch, by tp](docs/figures/mesh.svg)"]
    return lines


def sums(gpu: str = FIRST_GPU) -> dict[tuple[int, int], dict[str, float]]:
    """Microseconds of the ranks' sum by (tp, rows), then by form."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for (case, impl), row in latest(rows("mesh", "mesh_sum", gpu), "case", "impl").items():
        if "us_p50" in row:
            place = int(re.search(r"tp (\d+)", case)[1]), row["num_rows"]
            found.setdefault(place, {})[impl] = row["us_p50"]
    return dict(sorted(found.items()))


def sum_part(gpu: str = FIRST_GPU) -> list[str]:
    """The ranks' sum in its forms."""
    found = sums(gpu)
    if not found:
        return []
    seen = {name for us in found.values() for name in us}
    names = [*(name for name in SUMS if name in seen), *sorted(seen.difference(SUMS))]

    def cells(place):
        us = found[place]
        ours = next((us[name] for name in OURS if name in us), None)
        times = (digits(us[name]) if name in us else "" for name in names)
        return [*map(str, place), *times, ratio(ours, us.get("psum bfloat16"))]

    return [
        "**The ranks' sum** with residual and RMSNorm: microseconds a layer, launches included, of",
        f"dependent calls in one program. detjax uses the {OURS[0]}, or {OURS[1]} for prefill:",
        "",
        *table(
            ["tp", "rows", *names, "detjax over psum bfloat16"],
            map(cells, sorted(found)),
        ),
    ]


def sum_experiment(gpu: str = FIRST_GPU) -> Experiment | None:
    """TBIK's cost of trees over ranks: the sum alone and whole decode steps; None without rows."""
    alone: dict[int, dict[int, str]] = {}
    for (tp, num_rows), us in sums(gpu).items():
        if OURS[0] in us and "psum bfloat16" in us:
            alone.setdefault(tp, {})[num_rows] = ratio(us[OURS[0]], us["psum bfloat16"])
    whole: dict[int, dict[int, str]] = {}
    for ((kind, batch), tp, note), found in steps(gpu=gpu).items():
        if kind == "decode" and tp > 1 and not note and found.keys() >= set(MODES):
            ours, fast = (found[mode]["ms_p50"] for mode in MODES)
            whole.setdefault(tp, {})[batch] = ratio(ours, fast)
    if not alone or not whole:
        return None
    told = [
        f"tp {tp}: the sum with residual and norm takes {listed(of_rows.values())} of the time of "
        f"NCCL's in bfloat16 at {listed(of_rows)} rows"
        for tp, of_rows in alone.items()
    ]
    told += [
        f"a decode step on tp {tp} takes {listed(of_batch.values())} of the time of XLA's kernels "
        f"and NCCL's sums at batch {listed(of_batch)}"
        for tp, of_batch in whole.items()
    ]
    found = [row for subject in ("mesh_bits", "mesh_sum") for row in rows("mesh", subject, gpu)]
    different = sum(row.get("different", 0) for row in found)
    return Experiment(
        question="What does a sum over ranks cost where its order is a tree?",
        paper="Zhang et al. 2025 (TBIK, arXiv:2511.17826), which times kernels and whole answers "
        "by tp and rows (figures 6, 7 and 12): 22 to 63 % more latency with tree-based kernels.",
        here=[*told, f"{different} elements differ between the forms of the sum"],
        setting=f"Llama-3.1-8B shapes with random weights, bfloat16, {found[0]['gpu']}, sums "
        "through peer memory",
        command="benchmarks.mesh",
        links="[figure](docs/figures/mesh.svg), [every time](docs/parallel.md#what-it-costs)",
    )


def large_bits_lines(gpu: str = FIRST_GPU) -> list[str]:
    """Steps of it with the ranks' sums in their products, against sums in launches of their own."""
    found = rows("mesh", "mesh_large_bits", gpu)
    compared = [
        row for row in latest(found, "case", "impl").values()
        if row.get("impl") and not read_impl(row["impl"])[3]
    ]  # fmt: skip
    if not compared:
        return []
    what = [name for name in BITS if all(name in row for row in compared)]
    wrong = sum(row[name] for row in compared for name in what)
    cases = "; ".join(row["case"].replace(" 1 tokens", " 1 token") for row in compared)
    same = [row["same"] for row in found if "same" in row][-1]
    return [
        f"Sums in the products against sums in launches of their own, {listed(what)}: {wrong} "
        f"bytes differ ({cases}). A row in batches of other sizes: "
        f"{'the same' if same else 'other'} bits."
    ]


def large_part(gpu: str = FIRST_GPU) -> list[str]:
    """A model that no single GPU holds."""
    lines = [
        f"{case}: loaded in {row['load_s']:.0f} s, {row['share_gb']:.1f} GB of weights a GPU, "
        f"{row['peak_gb']:.1f} GB at the peak."
        for (case,), row in latest(rows("mesh", "mesh_load", gpu), "case").items()
    ]
    for (case, tp, _), found in steps("mesh_large", gpu).items():
        ms = {mode: row["ms_p50"] for mode, row in found.items()}
        line = f"{case_name(case)}, tp {tp}: {ms['invariant']:.2f} ms a step"
        if "fast" in ms:
            line += f", `fast` {ms['fast']:.2f} ms: {ratio(ms['fast'], ms['invariant'])}"
        lines.append(line + ".")
    lines += large_bits_lines(gpu)
    if not lines:
        return []
    return [
        "**A model that one GPU cannot hold**, Llama-3.1-70B shapes with random weights:",
        "",
        *(f"- {line}" for line in lines),
    ]


def section() -> list[str]:
    """For each GPU bits first, then times."""
    lines = []
    for gpu in GPUS:
        lines += _section_of(gpu)
    return lines[1:]


def _section_of(gpu: str) -> list[str]:
    """What was measured on a GPU, behind an empty line, or nothing."""
    lines = []
    for part in filter(None, (bits_part(gpu), step_part(gpu), sum_part(gpu), large_part(gpu))):
        lines += ["", *part]
    if not lines:
        return []
    subjects = ("mesh_step", "mesh_step_bits", "mesh_sum", "mesh_bits", "mesh_load", "mesh_large",
                "mesh_large_bits", "answers_of")  # fmt: skip
    found = [row for subject in subjects for row in rows("mesh", subject, gpu)] or answer_rows(gpu)
    note = ", one process. Steps are of Llama-3.1-8B shapes with random weights."
    return ["", hardware(found[0], note), *lines]


def readme_lines(gpu: str = FIRST_GPU) -> list[str]:
    """Decode steps of each tp against `fast`."""
    lines = []
    both: dict[int, dict[int, dict[str, float]]] = {}
    for ((kind, batch), tp, note), found in steps(gpu=gpu).items():
        if kind == "decode" and tp > 1 and not note and found.keys() >= set(MODES):
            both.setdefault(tp, {})[batch] = {mode: r["ms_p50"] for mode, r in found.items()}
    for tp, found in sorted(both.items()):
        ours, fast = (listed(f"{ms[mode]:.2f}" for ms in found.values()) for mode in MODES)
        over = listed(ratio(ms["fast"], ms["invariant"]) for ms in found.values())
        lines.append(
            f"[Tensor parallelism](docs/parallel.md#what-it-costs), tp {tp}: decode steps of batch "
            f"{listed(found)} take {ours} ms; `fast` with psum {fast} ms: {over} times as long."
        )
    return [f"- {line}" for line in lines]


def draw(axes) -> None:
    """Decode steps over the batch: a colour for each tp, dashes for `fast`."""
    lines = decode_lines()
    colours = {tp: f"C{i}" for i, tp in enumerate(sorted({tp for tp, _ in lines}))}
    for (tp, mode), points in lines.items():
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=3, label=f"{mode}, tp {tp}",
            color=colours[tp], linestyle="--" if mode == "fast" else "-",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
