# SPDX-License-Identifier: Apache-2.0
"""Several GPUs: docs/parallel.md, from rows of `benchmarks.mesh` and `benchmarks.answers`."""

import re

from benchmarks.report.rows import (
    FIRST_GPU,
    GPUS,
    Part,
    digits,
    latest,
    listed,
    model_name,
    ratio,
    rows,
)

OURS = ("exchange kernel", "scatter")
"""The forms of the ranks' sum that a model uses; no number of rows is timed with both."""

SUMS = (
    *OURS, "butterfly", "psum float32", "psum bfloat16", "psum bfloat16 in graphs",
)  # fmt: skip
BITS = ("tokens", "logprobs", "final hidden states", "keys and values of every layer")
"""What `mesh_step_bits` may compare: rows from 2026-11-22 on have no hidden states of their own."""


def read_impl(name: str) -> tuple[str, int, int, str]:
    """Read "invariant (1,2), no exchange kernel": mode, dp, tp, and what is special."""
    found = re.fullmatch(r"(\w+) \((\d+),(\d+)\)(?:, (.*))?", name)
    if found is None:
        raise ValueError(f"{name!r} is no implementation on a mesh")
    mode, dp, tp, note = found.groups()
    return mode, int(dp), int(tp), note or ""


def first_number(text: str) -> int:
    """The first number of a text."""
    return int(next(iter(re.findall(r"\d+", text))))


# ----------------------------------------------------------------------------------------- bits


def step_bits(subject: str, gpu: str) -> list[dict]:
    """For each mesh: how many bytes of whole steps differ from those of the reference."""
    compared: dict[str, list[dict]] = {}
    for (_, impl), row in latest(rows("mesh", subject, gpu), "case", "impl").items():
        if impl and read_impl(impl)[1:3] != (1, 1) and not read_impl(impl)[3]:
            compared.setdefault(impl.split(maxsplit=1)[1], []).append(row)
    model, reference = "Llama-3.1-8B", "(1,1)"
    if subject == "mesh_large_bits":
        model, reference = "Llama-3.1-70B", "sums in launches of their own"
    lines = []
    for mesh, found in sorted(compared.items()):
        what = [name for name in BITS if all(name in row for row in found)]
        cases = "; ".join(row["case"].replace(" 1 tokens", " 1 token") for row in found)
        lines.append({
            "what": f"steps of {model} on (dp, tp) = {mesh} against {reference}: {listed(what)}",
            "cases": cases, "different": f"{sum(row[n] for row in found for n in what)} bytes",
        })  # fmt: skip
    same = [row["same"] for row in rows("mesh", subject, gpu) if "same" in row]
    if lines and same:
        different = "0 rows" if same[-1] else "some rows"
        lines.append({"what": "a row of a step in batches of other sizes", "different": different})
    return lines


def sum_bits(gpu: str) -> list[dict]:
    """For each form of the ranks' sum and tp: how many elements differ from the butterfly's."""
    sums: dict[tuple[str, int], list[dict]] = {}
    for (case, impl), row in latest(rows("mesh", "mesh_bits", gpu), "case", "impl").items():
        sums.setdefault((impl, first_number(case.partition("tp ")[2])), []).append(row)
    return [
        {
            "what": f"the ranks' sum, {impl} against the butterfly at tp {tp}",
            "cases": f"{listed(sorted(row['num_rows'] for row in found))} rows",
            "different": f"{sum(row['different'] for row in found)} elements",
        }
        for (impl, tp), found in sums.items()
    ]


def answer_bits(gpu: str) -> list[dict]:
    """For each model and mode: how many different answers there are over meshes and batches."""
    found = rows("answers", "answers", gpu) or rows("mesh", "answers", gpu)
    if found:
        return [
            {
                "what": f"whole answers, {model_name(row['model'])}, `{row['mode']}`",
                "cases": f"{row['requests']} requests on {row['settings']} settings of mesh and "
                "batch size",
                "different": f"{row['unique_outputs_mean']:.2f} outputs a request, with logprobs "
                f"{row['unique_with_logprobs_max']} at most; a probability by at most "
                f"{row['max_prob_divergence']:.2g}",
            }
            for row in latest(found, "model", "mode").values()
        ]
    digests: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows("mesh", "answers_of", gpu):
        of_mode = digests.setdefault((row["model"], row["mode"]), {})
        of_mode[f"({row['mesh']}, {row['batch']})"] = row["digest"]
    return [
        {
            "what": f"tokens and logprobs of whole answers, {model_name(model)}, `{mode}`",
            "cases": f"(dp x tp, batch size) {', '.join(found)}",
            "different": f"{len(set(found.values()))} set(s) of bits",
        }
        for (model, mode), found in digests.items()
    ]


BITS_PART = Part(
    rows=lambda gpu: [
        step_bits("mesh_step_bits", gpu)
        + sum_bits(gpu)
        + answer_bits(gpu)
        + step_bits("mesh_large_bits", gpu)
    ],
    note=lambda found: "**Bits.** What was compared, and how much of it differs:",
    columns={"compared": "{what}", "cases": "{cases}", "different": "{different}"},
)


# ---------------------------------------------------------------------------------------- times


def steps(subject: str, gpu: str) -> list[dict]:
    """A row for each step, tp and special form, with the times of both modes.

    The speed over tp 1 is that of the same run: other machines and days have other clocks.
    """
    every = rows("mesh", subject, gpu)
    one_of_run = latest(every, "case", "impl", "date", "commit")
    cases: dict[tuple[str, int, int, str], dict] = {}
    for (case, impl), row in latest(every, "case", "impl").items():
        mode, dp, tp, note = read_impl(impl)
        if dp == 1 and "ms_p50" in row:
            found = cases.setdefault((case.split()[0], first_number(case), tp, note), {})
            found |= {mode: row["ms_p50"], f"{mode} launches": row.get("launches")}
            if mode == "invariant" and tp > 1:
                found["communication_ms"] = row.get("communication_ms")
                alone = case, "invariant (1,1)", row.get("date"), row.get("commit")
                found["one"] = one_of_run.get(alone, {}).get("ms_p50")
            if mode == "invariant":
                found["date"] = row.get("date", "")
    for (kind, count, tp, note), found in cases.items():
        name = f"decode, batch {count}" if kind == "decode" else f"prefill, {count} tokens"
        fast = cases.get((kind, count, tp, ""), {}).get("fast")
        found |= {
            "case": name, "kind": kind, "count": count, "tp": tp, "note": note,
            "shared": f"{tp}, {note}" if note else f"{tp}",
            "over_fast": ratio(fast, found.get("invariant")),
            "over_one": ratio(found.get("one"), found.get("invariant")),
        }  # fmt: skip
    return [cases[case] for case in sorted(cases)]


STEP_COLUMNS = {
    "step": "{case}", "tp": "{shared}", "invariant, ms": "{invariant:.2f}",
    "`fast`, ms": "{fast:.2f}", "speed over `fast`": "{over_fast}",
    "speed over tp 1": "{over_one}", "communication, ms": "{communication_ms:.2f}",
    "launches": lambda row: str(row.get("invariant launches") or ""),
    "launches of `fast`": lambda row: str(row.get("fast launches") or ""),
    "measured": lambda row: row.get("date", ""),
}  # fmt: skip
STEPS = Part(
    rows=lambda gpu: [steps("mesh_step", gpu)],
    note=lambda found: (
        "**Whole steps** of Llama-3.1-8B shapes with random weights. Wall time; decode at a "
        "context of 1024. `fast` is XLA's products and a psum of float32 partials, without a "
        "claim. Communication is device time of detjax's step in launches of its own (the exchange "
        "kernel, XLA's gathers), with waits for peers. Sums in the epilogue of a product are not "
        "included. 'Sums and choice apart' has no such sums, and only XLA gathers. Speed over "
        "tp 1 is that of the same run:"
    ),
    columns=STEP_COLUMNS,
    after="![Time of a decode step over the batch, by tp](docs/figures/mesh.svg)",
)


def sums(gpu: str) -> list[dict]:
    """A row for each tp and number of rows, with the microseconds of each form of the sum."""
    found: dict[tuple[int, int], dict] = {}
    for (case, impl), row in latest(rows("mesh", "mesh_sum", gpu), "case", "impl").items():
        if "us_p50" in row:
            tp = first_number(case.partition("tp ")[2])
            times = found.setdefault((tp, row["num_rows"]), {"tp": tp, "rows": row["num_rows"]})
            times[impl] = row["us_p50"]
    for times in found.values():
        ours = next((times[name] for name in OURS if name in times), None)
        times["over"] = ratio(ours, times.get("psum bfloat16"))
    return [found[place] for place in sorted(found)]


SUM_PART = Part(
    rows=lambda gpu: [sums(gpu)],
    note=lambda found: "**The ranks' sum** with residual and RMSNorm: microseconds a layer, "
    "launches included, of dependent calls in one program. detjax uses the exchange "
    "kernel, or scatter for prefill:",
    columns={
        "tp": "{tp}", "rows": "{rows}",
        **{name: lambda row, n=name: digits(row[n]) if n in row else "" for name in SUMS},
        "detjax over psum bfloat16": "{over}",
    },
)  # fmt: skip
LARGE_LOAD = Part(
    rows=lambda gpu: [list(latest(rows("mesh", "mesh_load", gpu), "case").values())],
    note=lambda found: "**A model that one GPU cannot hold**, Llama-3.1-70B shapes with random "
    "weights:",
    columns={
        "model": "{case}", "loaded in, s": "{load_s:.0f}", "weights a GPU, GB": "{share_gb:.1f}",
        "at the peak, GB": "{peak_gb:.1f}",
    },
)  # fmt: skip
LARGE_STEPS = Part(
    rows=lambda gpu: [steps("mesh_large", gpu)],
    note=lambda found: "Its steps:",
    columns=dict(list(STEP_COLUMNS.items())[:5]),
)
PARTS = (BITS_PART, STEPS, SUM_PART, LARGE_LOAD, LARGE_STEPS)
SUBJECTS = (
    "mesh_step", "mesh_step_bits", "mesh_sum", "mesh_bits", "mesh_load", "mesh_large",
    "mesh_large_bits", "answers_of", "answers",
)  # fmt: skip


def section() -> list[str]:
    """For each GPU bits first, then times."""
    lines = []
    for gpu in GPUS:
        found = [row for subject in SUBJECTS for row in rows("mesh", subject, gpu)]
        found = found or rows("answers", "answers", gpu)
        if found:
            lines += ["", f"{found[0]['gpu']}, jax {found[0]['jax']}, bfloat16, one process."]
            lines += [line for part in PARTS for line in part.lines(gpu)]
    return lines[1:]


def sum_experiment(gpu: str = FIRST_GPU) -> dict | None:
    """TBIK's cost of trees over ranks: the sum alone and whole decode steps; None without rows."""
    alone: dict[int, dict[int, str]] = {}
    for times in sums(gpu):
        if OURS[0] in times and times["over"]:
            alone.setdefault(times["tp"], {})[times["rows"]] = times["over"]
    whole: dict[int, dict[int, str]] = {}
    for row in steps("mesh_step", gpu):
        if row["kind"] == "decode" and row["tp"] > 1 and not row["note"] and "fast" in row:
            whole.setdefault(row["tp"], {})[row["count"]] = ratio(row["invariant"], row["fast"])
    if not alone or not whole:
        return None
    here = [
        f"tp {tp}: the sum with residual and norm takes {listed(of_rows.values())} of the time of "
        f"NCCL's in bfloat16 at {listed(of_rows)} rows"
        for tp, of_rows in alone.items()
    ]
    here += [
        f"a decode step on tp {tp} takes {listed(of_batch.values())} of the time of XLA's kernels "
        f"and NCCL's sums at batch {listed(of_batch)}"
        for tp, of_batch in whole.items()
    ]
    found = [row for subject in ("mesh_bits", "mesh_sum") for row in rows("mesh", subject, gpu)]
    different = sum(row.get("different", 0) for row in found)
    return {
        "question": "What does a sum over ranks cost where its order is a tree?",
        "paper": "Zhang et al. 2025 (TBIK, arXiv:2511.17826), which times kernels and whole "
        "answers by tp and rows (figures 6, 7 and 12): 22 to 63 % more latency with tree-based "
        "kernels.",
        "findings": [*here, f"{different} elements differ between the forms of the sum"],
        "setting": f"Llama-3.1-8B shapes with random weights, bfloat16, {found[0]['gpu']}, sums "
        "through peer memory",
        "made_by": "`benchmarks.mesh`, [figure](docs/figures/mesh.svg), [every "
        "time](docs/parallel.md#what-it-costs)",
    }
