# SPDX-License-Identifier: Apache-2.0
"""Write the measured sections of README and docs, and docs/figures, from committed rows.

python -m benchmarks.report            # needs matplotlib: pip install -e ".[plots]"
python -m benchmarks.report --check    # is the text current? needs nothing

The rows are `benchmarks/results/h200/<date>-<command>.jsonl`, of the newest date, where command is
kernels, step, serving, mesh or answers. A part whose rows are not there is left out, and where a
serving or mesh case occurs twice in a file, the later row counts. Experiments are `benchmarks/results/*/reproduce/NAME.json`, those of a GPU before those of a CPU.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
FIGURES = ROOT / "docs" / "figures"
MARKERS = "<!-- {0}: begin -->", "<!-- {0}: end -->"
SHAPES = ("qkv", "o", "gate_up", "down", "lm_head")
ROW_COUNTS = (1, 8, 64, 128, 512, 2048, 8192)
FLOOR = "bytes at 4.3 TB/s"
IMPLS = ("invariant", "fast", "transformers compiled", "transformers eager")
MODES = ("invariant", "dvr", "fast")
SUM_FORMS = ("exchange kernel", "scatter", "butterfly", "psum float32", "psum bfloat16")
BITS = ("tokens", "logprobs", "final hidden states", "keys and values of every layer")
"""What `mesh_step_bits` compares."""


def rows(command: str, subject: str) -> list[dict]:
    """Rows of a subject in the newest committed run of a command, or none."""
    files = sorted(RESULTS.glob(f"*-{command}.jsonl"))
    found = map(json.loads, files[-1].read_text().splitlines()) if files else ()
    return [row for row in found if row["subject"] == subject]


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table."""
    header = list(header)
    rule = ["---"] * len(header)
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


def short(value: float) -> str:
    """Three digits or so, as a table wants them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio_of(value: float, rival: float | None) -> str:
    """A ratio, or nothing where there is no rival."""
    return f"{value / rival:.2f}" if rival else ""


def listed(values: Iterable[object]) -> str:
    """Such as "1, 8 and 64"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def latest(found: Iterable[dict], *keys: str) -> dict[tuple, dict]:
    """The last row of each case, which is what the keys hold."""
    return {tuple(row.get(key) for key in keys): row for row in found}


def linear_ratios() -> dict[tuple[str, int], float]:
    """Time of the best rival over ours, by shape and number of rows."""
    found = rows("kernels", "linear")
    return {(row["shape"], row["m"]): row["ratio"] for row in found if "ratio" in row}


def linear_table() -> list[str]:
    """The ratios at some numbers of rows."""
    ratio = linear_ratios()

    def cells(count):
        values = [ratio.get((shape, count)) for shape in SHAPES]
        return [str(count), *(f"{value:.2f}" if value else "" for value in values)]

    return table(["rows", *SHAPES], map(cells, ROW_COUNTS))


def kernel_lines() -> list[str]:
    """Attention against cuDNN and the copy bandwidth; kernels bound by memory."""
    lines = []
    for row in rows("kernels", "attention"):
        if row["case"] == "prefill" and row["tokens"] == 8192:
            lines.append(
                f"Attention, prefill of 8192 tokens, 32/8 heads of 128: {row['ms']:.3f} ms, "
                f"{row['tflops']:.0f} TFLOP/s, {row['over_cudnn']:.2f} of cuDNN's speed in the "
                "same run."
            )
        elif row["case"] == "decode":
            lines.append(
                f"Attention, decode of {row['batch']} x {row['tokens']} tokens: {row['us']:.1f} us,"
                f" {row['share']:.2f} of 4.3 TB/s."
            )
    for row in rows("kernels", "rows"):
        if row["m"] == 8192 and row["case"] in ("add_rms_norm", "swiglu"):
            lines.append(
                f"`{row['case']}`, 8192 rows: {row['us']:.1f} us, {row['share_of_copy']:.2f} of "
                f"the copy bandwidth (XLA {row['xla_us']:.1f} us)."
            )
    return [f"- {line}" for line in lines]


def step_times() -> dict[str, dict[str, float]]:
    """Milliseconds of each implementation, by case; decode first, small ones first."""
    times: dict[str, dict[str, float]] = {}
    for row in rows("step", "step"):
        if "ms_p50" in row:
            times.setdefault(row["case"], {})[row["impl"]] = row["ms_p50"]

    def order(case):
        kind = case.split()[0]
        return kind, int(re.search(r"\d+", case)[0])

    return {case: times[case] for case in sorted(times, key=order)}


def decode_lines() -> dict[str, list[tuple[int, float]]]:
    """(batch, milliseconds) of decode steps, by implementation, and the floor of the bandwidth."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows("step", "step"):
        batch = re.fullmatch(r"decode batch (\d+) context \d+", row["case"])
        if batch and "ms_p50" in row:
            lines.setdefault(row["impl"], []).append((int(batch[1]), row["ms_p50"]))
            if row["impl"] == "invariant":
                lines.setdefault(FLOOR, []).append((int(batch[1]), row["floor_ms"]))
    return {name: sorted(points) for name, points in lines.items()}


def step_table() -> list[str]:
    """Whole steps: ours, the same without claims, transformers, and the bandwidth's share."""
    times = step_times()
    share = {
        row["case"]: row.get("floor_over_measured", row.get("share_of_790_tflop_per_s"))
        for row in rows("step", "step")
        if row["impl"] == "invariant" and "ms_p50" in row
    }
    impls = [impl for impl in IMPLS if any(impl in found for found in times.values())]

    def cells(case):
        found = times[case]
        speed = found["fast"] / found["invariant"] if "fast" in found else None
        return [
            case,
            *(f"{found[impl]:.2f}" if impl in found else "" for impl in impls),
            *([f"{speed:.2f}" if speed else ""] if "fast" in impls else []),
            f"{share[case]:.2f}",
        ]

    ratio = ["invariant over fast, speed"] if "fast" in impls else []
    header = ["step, ms", *impls, *ratio, "share of the limit"]
    return table(header, (cells(case) for case in times if case in share))


def card() -> str:
    """What was measured on."""
    row = rows("kernels", "linear")[0]
    return f"One {row['gpu']}, jax {row['jax']}, Llama-3.1-8B shapes, random data, bfloat16."


def readme_section() -> list[str]:
    """Whole steps, the linear layers in short, and the other kernels."""
    is_gated = any(row.get("is_gated") for row in rows("kernels", "linear"))
    gating = "; in `gate_up` they gate." if is_gated else "."
    return [
        card(),
        "How the kernels work and what was tried: [docs/kernels.md](docs/kernels.md).",
        "",
        *step_table(),
        "",
        "The limit is weight and cache bytes at 4.3 TB/s for decode, 790 TFLOP/s for prefill.",
        "`fast` is the same model on XLA's products, norms and activations, without any claim.",
        "",
        "![Time of a decode step over the batch](docs/figures/step.svg)",
        "",
        "Linear layers: time of the best rival (`jnp.dot`, which is cuBLAS or XLA's own, and",
        "`torch.mm` where it ran) over ours in the same run. Rivals only multiply. In `o` and",
        "`down` ours sum eight leaves as a tree and, above 128 rows, add the residual" + gating,
        "",
        *linear_table(),
        "",
        "![Speed of the linear layers over the number of rows](docs/figures/linear.svg)",
        "",
        *kernel_lines(),
        *system_lines(),
    ]


def system_lines() -> list[str]:
    """The engine, its answers under load, and two GPUs, for the README."""
    lines = []
    for case, found in offline_cases().items():
        us = found.get("`invariant`")
        if us:
            fast = found.get("`fast`", {}).get("output_tokens_per_s")
            ratio = f", {us['output_tokens_per_s'] / fast:.2f} of `fast`" if fast else ""
            lines.append(
                f"[Serving](docs/serving.md#measured), {load_name(case)}, all at once: "
                f"{us['output_tokens_per_s']:,.0f} generated tokens a second{ratio}."
            )
    checked = list(latest(rows("serving", "stress"), "model", "mode", "draft_weights").values())
    if checked:
        samples = sum(row["samples"] - row["plain"] for row in checked)
        asked = sum(row["requests"] for row in checked)
        wrong = sum(row["wrong"] + row["lost"] for row in checked)
        models = listed(sorted({model_name(row["model"]) for row in checked}))
        lines.append(
            f"Under load, {models}: {samples:,} deterministic samples of {asked:,} requests against "
            f"their answers at batch size 1, every token and logprob: {wrong} different or lost."
        )
    for tp in sorted({tp for _, tp, _ in mesh_steps()} - {1}):
        found = {
            batch: step
            for (kind, batch), step in by_step(tp).items()
            if kind == "decode" and {"invariant", "fast"} <= step.keys()
        }
        if found:
            ms = listed(f"{step['invariant']['ms_p50']:.2f}" for step in found.values())
            fast = listed(f"{step['fast']['ms_p50']:.2f}" for step in found.values())
            lines.append(
                f"[Tensor parallelism](docs/parallel.md#what-it-costs), tp {tp}: a decode step of "
                f"{listed(found)} rows takes {ms} ms, `fast` with psum {fast} ms."
            )
    return [f"- {line}" for line in lines]


# -------------------------------------------------------------------------------------- serving


def model_name(name: str) -> str:
    """Which model a row was measured with; never where it lies."""
    if name == "llama3_8b":
        return "Llama-3.1-8B shapes with random weights"
    return "`novels-6m` (bundled)" if name == "bundled" else f"`{Path(name).name}`"


def load_name(case: tuple) -> str:
    """Model, requests and their lengths, as far as the rows say."""
    model, requests, prompt_len, output_len = case
    lengths = f" of {prompt_len} + {output_len} tokens" if prompt_len else ""
    asked = f", {requests} requests{lengths}" if requests else ""
    return model_name(model) + asked


def mode_name(row: dict) -> str:
    """The mode, and in `dvr` which drafts were made, if any: only drafts need a verification."""
    if row["mode"] != "dvr":
        return f"`{row['mode']}`"
    if not row.get("verify_launches"):
        return "`dvr`, no drafts"
    weights = row.get("draft_weights") or "full"
    return "`dvr`, drafts" if weights == "full" else f"`dvr`, {weights} drafts"


def mode_order(name: str) -> tuple[int, str]:
    """Our modes first."""
    return MODES.index(name.split("`")[1]), name


LOAD = ("model", "requests", "prompt_len", "output_len")


def served(subject: str, *keys: str) -> dict[tuple, dict[tuple, dict]]:
    """The last row of each mode and case, by load.

    A row gets `over_fast`: its throughput over that of the `fast` row of its run, which is the next
    one of its load (`shares` ends with it), or else the last. `keys` of a case that `fast` need not
    share are those of a draft or of a share.
    """
    common = [key for key in keys if key in ("batch", "rate_per_s")]
    found = rows("serving", subject)
    fast = latest((row for row in found if row["mode"] == "fast"), *LOAD, *common)
    loads: dict[tuple, dict[tuple, dict]] = {}
    following: dict[tuple, dict] = {}
    for row in reversed(found):
        load = tuple(row.get(key) for key in LOAD)
        place = load + tuple(row.get(key) for key in common)
        if row["mode"] == "fast":
            following[place] = row
        rival = following.get(place) or fast.get(place)
        speed = row["output_tokens_per_s"]
        over = {"over_fast": speed / rival["output_tokens_per_s"]} if rival else {}
        case = (*(row.get(key) for key in keys), mode_name(row))
        loads.setdefault(load, {}).setdefault(case, row | over)

    def order(case):
        return *case[:-1], mode_order(case[-1])

    return {
        load: {case: cases[case] for case in sorted(cases, key=order)}
        for load, cases in sorted(loads.items(), key=lambda item: str(item[0]))
    }


def offline_cases() -> dict[tuple, dict[str, dict]]:
    """Rows of requests that all come at once: by load, then by mode."""
    return {
        load: {name: row for (name,), row in cases.items()}
        for load, cases in served("offline").items()
    }


def quantiles(row: dict, name: str) -> str:
    """P50, P90 and P99 of a time of the requests."""
    return " / ".join(short(row[f"{name}_p{share}_ms"]) for share in (50, 90, 99))


def over_fast(row: dict) -> str:
    """Throughput over that of `fast`."""
    return f"{row['over_fast']:.2f}" if "over_fast" in row else ""


def drafts(row: dict) -> list[str]:
    """Drafts that were accepted, and rollbacks; nothing where there were none."""
    if not row.get("verify_launches"):
        return ["", ""]
    return [f"{row.get('acceptance', 0.0):.3f}", str(row.get("num_rollbacks", 0))]


SPEED = ("generated tokens/s", "over `fast`")
TIMES = ("first token, ms", "a token, ms", "end to end, ms")
DRAFTS = ("drafts accepted", "rollbacks")


def speed(row: dict) -> list[str]:
    """The cells under SPEED."""
    return [f"{row['output_tokens_per_s']:,.0f}", over_fast(row)]


def times(row: dict) -> list[str]:
    """The cells under TIMES."""
    return [quantiles(row, name) for name in ("first_token", "token", "end_to_end")]


def engine_part() -> list[str]:
    """The engine's decode step against the jitted step alone."""
    found = latest(rows("serving", "engine_step"), "model", "mode", "batch", "context")
    rivals = {
        (model, batch, context): row["engine_ms"]
        for (model, mode, batch, context), row in found.items()
        if mode == "fast"
    }
    lines = [
        [
            f"{model_name(model)}, {batch} rows, context {context}",
            f"`{mode}`",
            *(f"{row[name]:.2f}" for name in ("engine_ms", "bare_ms", "ratio")),
            ratio_of(row["engine_ms"], rivals.get((model, batch, context))),
        ]
        for (model, mode, batch, context), row in found.items()
    ]
    header = ["decode step", "mode", "engine, ms", "jitted step alone, ms", "ratio", "over `fast`"]
    return [
        "**What the engine adds.** Wall time of a decode step with planning, results and all, and of",
        "the same program launched back to back:",
        "",
        *table(header, lines),
    ]


def offline_part() -> list[str]:
    """Throughput of requests that all come at once."""
    lines = []
    for load, cases in offline_cases().items():
        lines += [
            "",
            f"**All at once.** {load_name(load)}. Times are P50 / P90 / P99 from the arrival of all:",
            "",
            *table(
                ["mode", *SPEED, *TIMES],
                ([name, *speed(row), *times(row)] for name, row in cases.items()),
            ),
        ]
    return lines[1:]


def replay_part() -> list[str]:
    """A trace's lengths, at several rates."""
    lines = []
    for load, cases in served("replay", "rate_per_s").items():
        lines += [
            "",
            f"**A trace's lengths.** {load_name(load)}, arriving at random. Times are P50 / P90 / P99:",
            "",
            *table(
                ["requests/s", "mode", *SPEED, *TIMES],
                (
                    [f"{rate:g}" if rate else "all at once", name, *speed(row), *times(row)]
                    for (rate, name), row in cases.items()
                ),
            ),
        ]
    return lines[1:]


def shares_part() -> list[str]:
    """Throughput against the share of deterministic requests."""
    lines = []
    for load, cases in served("shares", "deterministic_percent").items():
        lines += [
            "",
            f"**Throughput against the share of deterministic requests.** {load_name(load)}. Without",
            "drafts every decode step that has a deterministic sample is canonical; each row is over the",
            "`fast` of its own run:",
            "",
            *table(
                ["deterministic, %", "mode", *SPEED, *TIMES[:2], *DRAFTS],
                (
                    [f"{share:g}", name, *speed(row), *times(row)[:2], *drafts(row)]
                    for (share, name), row in cases.items()
                ),
            ),
        ]
    return lines[1:]


def windows_by_load() -> dict[tuple, dict[tuple[int, int], dict]]:
    """Rows of (window, group), by load and the weights of the drafts."""
    loads: dict[tuple, dict[tuple[int, int], dict]] = {}
    found = latest(rows("serving", "windows"), *LOAD, "draft_weights", "window", "group")
    for (*load, window, group), row in sorted(found.items(), key=lambda item: item[0][-2:]):
        loads.setdefault(tuple(load), {})[window, group] = row
    return loads


def windows_part() -> list[str]:
    """Throughput, acceptance and rollbacks by window and group."""
    lines = []
    for (*load, weights), cases in windows_by_load().items():
        groups = sorted({group for _, group in cases})

        def cell(row):
            return " / ".join([f"{row['output_tokens_per_s']:,.0f}", *drafts(row)]) if row else ""

        lines += [
            "",
            f"**Window and group.** {load_name(tuple(load))}, all deterministic, drafts of {weights}",
            "weights. Generated tokens a second / share of the drafts accepted / rollbacks:",
            "",
            *table(
                ["window (W)", *(f"G {group}" for group in groups)],
                (
                    [str(window), *(cell(cases.get((window, group))) for group in groups)]
                    for window in sorted({window for window, _ in cases})
                ),
            ),
        ]
    return lines[1:]


def narrow_part() -> list[str]:
    """Drafts of 8-bit weights at small batches."""
    lines = []
    for load, cases in served("narrow", "batch", "window").items():
        lines += [
            "",
            f"**Drafts of 8-bit weights at small batches.** {load_name(load)}. Medians:",
            "",
            *table(
                ["batch", "mode", "window (W)", *SPEED, "a token, ms", *DRAFTS],
                (
                    [
                        *(str(batch), name, str(window or "")),
                        *speed(row),
                        short(row["token_p50_ms"]),
                        *drafts(row),
                    ]
                    for (batch, window, name), row in cases.items()
                ),
            ),
        ]
    return lines[1:]


def stress_part() -> list[str]:
    """Answers under load against the answers alone."""
    found = latest(rows("serving", "stress"), "model", "mode", "draft_weights")

    def drafted(row):
        # This row has no `verify_launches`; without drafts nothing is accepted or rolled back.
        if row["mode"] != "dvr" or not (row["acceptance"] or row["rollbacks"]):
            return ["none", "", ""]
        return [
            row.get("draft_weights") or "full",
            f"{row['acceptance']:.3f}",
            str(row["rollbacks"]),
        ]

    lines = [
        [
            *(model_name(model), f"`{mode}`", *drafted(row)),
            *(f"{row[name]:,}" for name in ("requests", "cancelled", "preempted")),
            f"{row['wrong'] + row['lost']} of {row['samples'] - row['plain']:,}",
            f"{row['plain_different']:,} of {row['plain']:,}",
        ]
        for (model, mode, _), row in found.items()
    ]
    header = ["model", "mode", "drafts", "accepted", "rollbacks", "requests", "cancelled",
              "preempted", "deterministic samples different", "plain samples different"]  # fmt: skip
    return [
        "**Answers under load.** Requests of every kind, with shared prefixes, cancelled, preempted, in",
        "random company. Every token and logprob of a deterministic sample against the answer at batch",
        "size 1 (lost ones count as different); plain samples ask for no claim and are the control:",
        "",
        *table(header, lines),
    ]


SERVING_PARTS = {
    "stress": stress_part, "engine_step": engine_part, "offline": offline_part,
    "replay": replay_part, "shares": shares_part, "windows": windows_part, "narrow": narrow_part,
}  # fmt: skip
"""What writes the rows of a subject."""


def hardware(row: dict, note: str) -> str:
    """What a run was measured on."""
    return f"{row['gpu']}, jax {row['jax']}, bfloat16{note}"


def serving_section() -> list[str]:
    """The engine under load."""
    lines: list[str] = []
    for subject, part in SERVING_PARTS.items():
        found = rows("serving", subject)
        if found:
            lines += (
                ["", *part()] if lines else [hardware(found[0], ". One run each."), "", *part()]
            )
    if has_serving_figure():
        lines += [
            "",
            "![Throughput against the share of deterministic requests](figures/serving.svg)",
        ]
    return lines


def has_serving_figure() -> bool:
    """Whether there is anything to draw."""
    return any(rows("serving", subject) for subject in ("shares", "windows"))


# --------------------------------------------------------------------------------------- meshes


def mesh_impl(name: str) -> tuple[str, int, int, str]:
    """Read "invariant (1,2), no exchange kernel": mode, dp, tp, and what differs."""
    mode, dp, tp, note = re.fullmatch(r"(\w+) \((\d+),(\d+)\)(?:, (.*))?", name).groups()
    return mode, int(dp), int(tp), note or ""


def mesh_steps(subject: str = "mesh_step") -> dict[tuple[tuple[str, int], int, str], dict]:
    """By ((decode or prefill, rows or tokens), tp, note): the row of each mode."""
    steps: dict[tuple[tuple[str, int], int, str], dict] = {}
    for (case, impl), row in latest(rows("mesh", subject), "case", "impl").items():
        mode, dp, tp, note = mesh_impl(impl)
        if dp == 1 and "ms_p50" in row:
            place = (case.split()[0], int(re.search(r"\d+", case)[0])), tp, note
            steps.setdefault(place, {})[mode] = row
    return dict(sorted(steps.items()))


def by_step(tp: int) -> dict[tuple[str, int], dict]:
    """The plain steps of a tp: by (decode or prefill, rows or tokens)."""
    return {
        case: step for (case, size, note), step in mesh_steps().items() if (size, note) == (tp, "")
    }


def mesh_bits_lines() -> list[str]:
    """What was compared bit for bit."""
    lines = []
    compared: dict[str, list[dict]] = {}
    for (case, impl), row in latest(rows("mesh", "mesh_step_bits"), "case", "impl").items():
        if impl is not None and mesh_impl(impl)[1:3] != (1, 1):
            compared.setdefault(impl.split(maxsplit=1)[1], []).append(row | {"case": case})
    for mesh, found in sorted(compared.items()):
        wrong = sum(row[what] for row in found for what in BITS)
        cases = "; ".join(row["case"].replace(" 1 tokens", " 1 token") for row in found)
        lines.append(
            f"Whole steps on (dp, tp) = {mesh} against (1,1): {wrong} bytes differ ({cases})."
        )
    same = [row["same"] for row in rows("mesh", "mesh_step_bits") if "same" in row]
    if same:
        answer = "the same bits" if same[-1] else "other bits"
        lines.append(f"A row in batches of other sizes, on (1,1): {answer}.")
    sums: dict[str, list[dict]] = {}
    for (impl, _), row in latest(rows("mesh", "mesh_bits"), "impl", "case").items():
        sums.setdefault(impl, []).append(row)
    for impl, found in sums.items():
        wrong = sum(row["different"] for row in found)
        cases = "; ".join(row["case"] for row in found)
        lines.append(
            f"The ranks' sum, {impl} against the butterfly: {wrong} elements differ ({cases})."
        )
    answers = rows("answers", "answers") or rows("mesh", "answers")
    for (model, mode), row in latest(answers, "model", "mode").items():
        most = row["unique_with_logprobs_max"]
        lines.append(
            f"Whole answers, {model_name(model)}, `{mode}`: {row['requests']} requests in "
            f"{row['settings']} settings of mesh and batch size: {row['unique_outputs_mean']:.2f} "
            f"different outputs each, {most} at most with logprobs, largest divergence "
            f"{row['max_prob_divergence']:.2g}."
        )
    if not lines:
        return []
    what = "Compared are tokens, logprobs, final hidden states, and keys and values of every layer."
    return ["**Bits.** " + what, "", *(f"- {line}" for line in lines)]


def mesh_step_part() -> list[str]:
    """Whole steps on meshes."""
    steps = mesh_steps()
    if not steps:
        return []
    lines = []
    for (case, tp, note), found in steps.items():
        us = found.get("invariant")
        fast = found.get("fast") or steps.get((case, tp, ""), {}).get("fast")
        one = steps.get((case, 1, ""), {}).get("invariant")
        lines.append(
            [
                f"{case[0]}, {case[1]} {'rows' if case[0] == 'decode' else 'tokens'}",
                f"{tp}, {note}" if note else str(tp),
                f"{us['ms_p50']:.2f}" if us else "",
                f"{found['fast']['ms_p50']:.2f}" if "fast" in found else "",
                ratio_of(fast["ms_p50"], us["ms_p50"]) if us and fast else "",
                ratio_of(one["ms_p50"], us["ms_p50"]) if us and one else "",
                f"{us['communication_ms']:.2f}" if us and tp > 1 and "communication_ms" in us else "",
                *(str(found[mode].get("launches", "")) if mode in found else ""
                  for mode in ("invariant", "fast")),
            ]
        )  # fmt: skip
    header = ["step", "tp", "invariant, ms", "`fast` with psum, ms", "our speed over `fast`",
              "over tp 1", "communication, ms", "launches", "of `fast`"]  # fmt: skip
    return [
        "**Whole steps.** Wall time, contexts of 1024 tokens in decode. `fast` is XLA's products and a",
        "psum of float32 partials, without any claim. Communication is device time of a step in the",
        "exchange kernel, which adds and normalises too, and in gathers, waiting for the peer included:",
        "",
        *table(header, lines),
        "",
        "![Time of a decode step on 1, 2 and 4 GPUs](figures/mesh.svg)"
        if len({tp for _, tp, _ in steps}) > 2
        else "![Time of a decode step on meshes](figures/mesh.svg)",
    ]


def mesh_sum_part() -> list[str]:
    """The ranks' sum in its forms."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for (case, impl), row in latest(rows("mesh", "mesh_sum"), "case", "impl").items():
        if "us_p50" in row:
            place = int(re.search(r"tp (\d+)", case)[1]), row["num_rows"]
            found.setdefault(place, {})[impl] = row["us_p50"]
    if not found:
        return []
    names = [*SUM_FORMS, *sorted({name for us in found.values() for name in us} - {*SUM_FORMS})]
    names = [name for name in names if any(name in us for us in found.values())]

    def cells(place):
        us = found[place]
        ours = min((us[name] for name in SUM_FORMS[:2] if name in us), default=None)
        over = ratio_of(ours, us.get("psum bfloat16")) if ours else ""
        return [*map(str, place), *(short(us[name]) if name in us else "" for name in names), over]

    header = ["tp", "rows of 4096", *names, "ours over psum bfloat16"]
    return [
        "**The ranks' sum** with residual and RMSNorm: microseconds a layer, launches included, of",
        "dependent calls in one program. Ours is the exchange kernel, or scatter at prefill's sizes:",
        "",
        *table(header, map(cells, sorted(found))),
    ]


def mesh_large_part() -> list[str]:
    """A model that no single GPU holds."""
    lines = [
        f"{case}: loaded in {row['load_s']:.0f} s, {row['share_gb']:.1f} GB of weights a GPU, "
        f"{row['peak_gb']:.1f} GB at the peak."
        for (case,), row in latest(rows("mesh", "mesh_load"), "case").items()
    ]
    for ((kind, size), tp, _), found in mesh_steps("mesh_large").items():
        unit = "rows" if kind == "decode" else "tokens"
        lines.append(f"{kind} of {size} {unit} at tp {tp}: {found['invariant']['ms_p50']:.2f} ms.")
    if not lines:
        return []
    head = "**A model that one GPU cannot hold**, the shape of Llama-3.1-70B with random weights:"
    return [head, "", *(f"- {line}" for line in lines)]


def mesh_section() -> list[str]:
    """Several GPUs: bits first, then times."""
    parts = [mesh_bits_lines(), mesh_step_part(), mesh_sum_part(), mesh_large_part()]
    found = [
        row
        for subject in ("mesh_step", "mesh_step_bits", "mesh_sum", "mesh_bits", "mesh_load")
        for row in rows("mesh", subject)
    ]
    if not found:
        return []
    note = ". Steps are of Llama-3.1-8B shapes with random weights, in one process."
    lines = [hardware(found[0], note)]
    for part in filter(None, parts):
        lines += ["", *part]
    return lines


# ------------------------------------------------------------------------- kernels, experiments


def kernels_section() -> list[str]:
    """Every product at every M, and the kernels' own figures."""
    found = {(r["shape"], r["m"]): r for r in rows("kernels", "linear") if "ratio" in r}
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
            "One fixed tile of 128 x 128 x 64, unsplit, as Thinking Machines' product: "
            f"{min(fixed):.2f} to {max(fixed):.2f} times our time.",
        ]
    return [
        card(),
        "",
        "Microseconds of a product, and the best rival's time over it:",
        "",
        *table(["M", *SHAPES], lines),
        *control,
        "",
        *kernel_lines(),
    ]


def experiments() -> dict[str, Path]:
    """The newest kind of machine's result of each experiment, by name."""
    machines = sorted(RESULTS.parent.iterdir(), key=lambda path: path == RESULTS)
    return {
        path.stem: path for machine in machines for path in (machine / "reproduce").glob("*.json")
    }


def experiments_section() -> list[str]:
    """Each experiment: the question, what the paper found, what was found here, and the figure."""
    lines = []
    for name, path in sorted(experiments().items()):
        found = json.loads(path.read_text())
        figure = path.with_suffix(".png").relative_to(ROOT)
        here = "; ".join(found["findings"])
        lines += [
            f"**{found['question']}** `benchmarks.reproduce {name}`, [figure]({figure})",
            "",
            f"- {found['paper']}",
            f"- Here: {here}. With {found['setting']}.",
            "",
        ]
    return lines[:-1]


SECTIONS = (
    ("README.md", "benchmarks", readme_section),
    ("README.md", "experiments", experiments_section),
    ("docs/kernels.md", "benchmarks", kernels_section),
    ("docs/serving.md", "benchmarks", serving_section),
    ("docs/parallel.md", "benchmarks", mesh_section),
)
"""Document, name of the markers, and what stands between them."""


def updated(text: str, name: str, section: list[str]) -> str:
    """A document with the text between two markers replaced."""
    begin, end = (marker.format(name) for marker in MARKERS)
    start, stop = text.index(begin), text.index(end)
    return text[:start] + "\n".join([begin, *section, ""]) + text[stop:]


def draw_figures() -> None:
    """Products over M, decode steps over the batch and on meshes, and throughput of the engine."""
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
        style = {"linestyle": "--", "color": "0.5"} if name == FLOOR else {}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
    axes.set_ylim(bottom=0)
    save("step.svg", axes, x_label="batch", y_label="ms a decode step, context 1024")

    decode: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for ((kind, batch), tp, note), found in mesh_steps().items():
        for mode, row in found.items():
            if kind == "decode" and not note:
                decode.setdefault((tp, mode), []).append((batch, row["ms_p50"]))
    if decode:
        _, axes = pyplot.subplots(figsize=(6, 3.2))
        colours = {tp: f"C{i}" for i, tp in enumerate(sorted({tp for tp, _ in decode}))}
        for (tp, mode), points in sorted(decode.items()):
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=3, label=f"{mode}, tp {tp}",
                color=colours[tp], linestyle="--" if mode == "fast" else "-",
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        save("mesh.svg", axes, x_label="batch", y_label="ms a decode step, context 1024")

    panels = [subject for subject in ("shares", "windows") if rows("serving", subject)]
    if panels:
        size = (4 * len(panels) + 2, 3.2)
        figure, places = pyplot.subplots(1, len(panels), figsize=size, squeeze=False)
        for subject, axes in zip(panels, places[0], strict=True):
            {"shares": draw_shares, "windows": draw_windows}[subject](axes)
            is_log = subject == "windows"
            x_label = "window (W)" if is_log else "deterministic requests, %"
            y_label = "generated tokens/s" if is_log else "throughput over `fast`"
            finish(axes, x_label=x_label, y_label=y_label, is_log=is_log)
        figure.tight_layout()
        write("serving.svg", figure)


def draw_shares(axes) -> None:
    """Throughput over that of `fast` against the share of deterministic requests."""
    for load, cases in served("shares", "deterministic_percent").items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for (share, name), row in cases.items():
            if "over_fast" in row and row["mode"] != "fast":
                lines.setdefault(name.replace("`", ""), []).append((share, row["over_fast"]))
        for name, points in lines.items():
            label = f"{name}, {Path(load[0]).name}"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_ylim(bottom=0)


def draw_windows(axes) -> None:
    """Throughput over the window, a line for each group."""
    for (model, *_, weights), cases in windows_by_load().items():
        for group in sorted({group for _, group in cases}):
            points = [
                (w, row["output_tokens_per_s"]) for (w, g), row in cases.items() if g == group
            ]
            label = f"G {group}, {weights}, {Path(model).name}"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set_ylim(bottom=0)


def main() -> None:
    """Rewrite the text and the figures, or with --check say whether the text is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args()
    new: dict[Path, str] = {}
    for document, name, make in SECTIONS:
        path = ROOT / document
        new[path] = updated(new.get(path) or path.read_text(), name, make())
    if args.check:
        stale = [path.name for path, text in new.items() if text != path.read_text()]
        sys.exit(f"{stale} are stale: run python -m benchmarks.report" if stale else 0)
    draw_figures()
    for path, text in new.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
