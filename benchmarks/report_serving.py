# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.serving` measured, as docs/serving.md and README tell it."""

from collections.abc import Collection
from pathlib import Path

from benchmarks.report_rows import (
    DRAFTS,
    FIRST_GPU,
    GPUS,
    digits,
    drafting,
    hardware,
    latest,
    listed,
    model_name,
    ratio,
    rows,
    table,
    told,
    told_cells,
)

MODES = ("invariant", "dvr", "fast")
SPEED = ("generated tokens/s", "over `fast`")
TIMES = ("first token, ms", "a token, ms", "end to end, ms")
DRAFT_CELLS = ("drafts accepted", "rollbacks")


# ------------------------------------------------------------------------------- rows and cells


def load_name(found: Collection[dict]) -> str:
    """Model, requests and their lengths, as far as the rows say and agree."""

    def common(name):
        values = {row.get(name) for row in found}
        return values.pop() if len(values) == 1 else None

    model, num = common("model"), common("requests")
    prompt_len, output_len = common("prompt_len"), common("output_len")
    lengths = f" of {prompt_len} + {output_len} tokens" if prompt_len and output_len else ""
    asked = f", {num or ''} requests{lengths}".replace("  ", " ") if num or lengths else ""
    patience = common("max_prefill_streak")
    return model_name(model) + asked + (f", `max_prefill_streak` {patience}" if patience else "")


def mode_name(row: dict) -> str:
    """The mode, and in `dvr` which drafts were made, if any."""
    if row["mode"] != "dvr":
        return f"`{row['mode']}`"
    if drafting(row) != DRAFTS:
        return f"`dvr`, {drafting(row)}"
    weights = row.get("draft_weights") or "full"
    return "`dvr`, drafts" if weights == "full" else f"`dvr`, {weights} drafts"


def mode_order(name: str) -> tuple[int, str]:
    """The order of MODES."""
    return MODES.index(name.split("`")[1]), name


def served(subject: str, *keys: str, gpu: str = FIRST_GPU) -> dict[str, dict[tuple, dict]]:
    """By model, by the keys and the name of the mode: the last such row.

    A row gets `over_fast`: its throughput over that of the `fast` row of its run, which is the next
    one behind it (`shares` ends with it), or else the last; none if that is of another build.
    """
    found = rows("serving", subject, gpu)
    # Drafts and shares are not for `fast` to have.
    of_drafts = ("window", "decode_steps", "deterministic_percent")
    place = ("model", *(key for key in keys if key not in of_drafts))
    last = latest((row for row in found if row["mode"] == "fast"), *place)
    following: dict[tuple, dict] = {}
    models: dict[str, dict[tuple, dict]] = {}
    for row in reversed(found):
        where = tuple(row.get(key) for key in place)
        if row["mode"] == "fast":
            following[where] = row
        fast = following.get(where) or last.get(where)
        if fast and fast.get("fingerprint") == row.get("fingerprint"):
            row["over_fast"] = row["output_tokens_per_s"] / fast["output_tokens_per_s"]
        case = (*(row.get(key, 0) for key in keys), mode_name(row))
        models.setdefault(row["model"], {}).setdefault(case, row)

    def order(case):
        return *case[:-1], mode_order(case[-1])

    return {
        model: {case: models[model][case] for case in sorted(models[model], key=order)}
        for model in sorted(models)
    }


def windows(gpu: str = FIRST_GPU) -> dict[tuple[str, str], dict[tuple[int, int], dict]]:
    """By model and weights of the drafts, by (window, group): the last such row."""
    found: dict[tuple[str, str], dict[tuple[int, int], dict]] = {}
    cases = latest(rows("serving", "windows", gpu), "model", "draft_weights", "window", "group")
    for (model, weights, window, group), row in cases.items():
        found.setdefault((model, weights), {})[window, group] = {"mode": "dvr"} | row
    return {which: dict(sorted(by_size.items())) for which, by_size in found.items()}


def offline(gpu: str = FIRST_GPU) -> list[dict[str, dict]]:
    """Of each model, load and `max_prefill_streak`, the last row by the name of the mode."""
    loads: dict[tuple, dict[str, dict]] = {}
    keys = ("requests", "prompt_len", "output_len", "max_prefill_streak")
    for model, cases in served("offline", *keys, gpu=gpu).items():
        for (*load, name), row in cases.items():
            loads.setdefault((model, *load), {})[name] = row
    return list(loads.values())


def speed(row: dict) -> list[str]:
    """The cells under SPEED."""
    over = f"{row['over_fast']:.2f}" if "over_fast" in row else ""
    return [f"{row['output_tokens_per_s']:,.0f}", over]


def times(row: dict) -> list[str]:
    """The cells under TIMES: P50, P90 and P99."""
    return [
        " / ".join(digits(row[f"{name}_p{share}_ms"]) for share in (50, 90, 99))
        for name in ("first_token", "token", "end_to_end")
    ]


def drafts(row: dict) -> list[str]:
    """The cells under DRAFT_CELLS: empty where there were none."""
    if drafting(row) != DRAFTS:
        return ["", ""]
    return [f"{row.get('acceptance', 0.0):.3f}", str(row.get("num_rollbacks", 0))]


def stress_drafts(row: dict) -> list[str]:
    """The weights of the drafts of a row of `stress`, and the cells under DRAFT_CELLS."""
    if row["mode"] != "dvr":
        return ["none", "", ""]
    if drafting(row) != DRAFTS:
        return [drafting(row), "", ""]
    return [row.get("draft_weights") or "full", f"{row['acceptance']:.3f}", str(row["rollbacks"])]


def stressed(gpu: str = FIRST_GPU) -> list[dict]:
    """The last row of each model, mode, weights of the drafts and size of the cache."""
    by = "model", "mode", "draft_weights", "num_pages"
    return list(latest(rows("serving", "stress", gpu), *by).values())


# ------------------------------------------------------------------------------------ the parts


def stress_part(gpu: str = FIRST_GPU) -> list[str]:
    """Answers under load against the answers alone."""
    lines = [
        told_cells(
            [
                *(model_name(row["model"]), f"`{row['mode']}`", *stress_drafts(row)),
                *(f"{row[name]:,}" for name in ("num_pages", "requests", "cancelled", "preempted")),
                f"{row['wrong'] + row['lost']} of {row['samples'] - row['plain']:,}",
                f"{row['plain_different']:,} of {row['plain']:,}",
            ],
            row,
        )
        for row in stressed(gpu)
    ]
    different = "deterministic samples different", "plain ones different"
    counts = "pages", "requests", "cancelled", "preempted"
    return [
        "**Answers under load.** Requests of every kind, with shared prefixes, in random company.",
        "Each token and logprob of a deterministic sample is compared with the answer that the",
        "request gets alone. A lost one counts as different. Plain samples have no claim and are",
        "the control:",
        "",
        *table(["model", "mode", "drafts", *DRAFT_CELLS, *counts, *different], lines),
    ]


def engine_part(gpu: str = FIRST_GPU) -> list[str]:
    """The engine's decode step against the jitted step alone."""
    found = latest(rows("serving", "engine_step", gpu), "model", "batch", "context", "mode")
    lines = []
    for (model, batch, context, mode), row in found.items():
        fast = found.get((model, batch, context, "fast"), {})
        lines.append(
            [
                f"{model_name(model)}, batch {batch}, context {context}",
                f"`{mode}`",
                *(f"{row[name]:.2f}" for name in ("engine_ms", "bare_ms", "ratio")),
                ratio(fast.get("engine_ms"), row["engine_ms"]),
            ]
        )
    return [
        "**What the engine adds.** Wall time of a decode step, with planning and results, and of",
        "the same program launched back to back:",
        "",
        *table(
            ["decode step", "mode", "engine, ms", "program, ms", "ratio", "speed over `fast`"],
            lines,
        ),
    ]


def max_len_part(gpu: str = FIRST_GPU) -> list[str]:
    """A decode step of the same sequences under another `max_len`."""
    found = latest(rows("serving", "max_len", gpu), "model", "batch", "max_len")
    longest = sorted({row["max_len"] for row in found.values()})
    batches = sorted({(row["model"], row["batch"], row["context"]) for row in found.values()})
    lines = []
    for model, batch, context in batches:
        cells = [found[model, batch, max_len] for max_len in longest]
        lines.append(
            [
                f"{model_name(model)}, batch {batch}, context {context}",
                *(f"{row['ms_p50']:.2f}, {row['ratio_to_shortest']:.3f}" for row in cells),
            ]
        )
    return [
        "**Another `max_len`, the same sequences.** Milliseconds of the engine's decode step, and",
        "its ratio to that of the shortest. Every bit of the answers is the same:",
        "",
        *table(["decode step", *(f"`max_len` {n:,}" for n in longest)], lines),
    ]


def offline_part(gpu: str = FIRST_GPU) -> list[str]:
    """Throughput of requests that all come at once."""
    lines = []
    for cases in offline(gpu):
        lines += [
            "",
            f"**All at once.** {load_name(cases.values())}. Times are P50 / P90 / P99:",
            "",
            *table(
                ["mode", *SPEED, *TIMES],
                (told_cells([name, *speed(row), *times(row)], row) for name, row in cases.items()),
            ),
        ]
    return lines[1:]


def replay_part(gpu: str = FIRST_GPU) -> list[str]:
    """A trace's lengths, at several rates."""
    lines = []
    for cases in served("replay", "requests", "rate_per_s", gpu=gpu).values():
        lines += [
            "",
            f"**The lengths of a trace**, at random times. {load_name(cases.values())}. Times are",
            "P50 / P90 / P99:",
            "",
            *table(
                ["requests", "a second", "mode", *SPEED, *TIMES],
                (
                    told_cells(
                        [
                            str(num),
                            f"{rate:g}" if rate else "at once",
                            name,
                            *speed(row),
                            *times(row),
                        ],
                        row,
                    )
                    for (num, rate, name), row in cases.items()
                ),
            ),
        ]
    return lines[1:]


def shares_part(gpu: str = FIRST_GPU) -> list[str]:
    """Throughput against the share of deterministic requests."""
    lines = []
    for cases in served("shares", "deterministic_percent", gpu=gpu).values():
        lines += [
            "",
            f"**Against the share of deterministic requests.** {load_name(cases.values())}.",
            "Without drafts a decode step with a deterministic sample is canonical as a whole.",
            "Each row is over the `fast` of its own run; times are P50 / P90 / P99:",
            "",
            *table(
                ["deterministic, %", "mode", *SPEED, *TIMES[:2], *DRAFT_CELLS],
                (
                    told_cells(
                        [f"{share:g}", name, *speed(row), *times(row)[:2], *drafts(row)], row
                    )
                    for (share, name), row in cases.items()
                ),
            ),
        ]
    return lines[1:]


def windows_part(gpu: str = FIRST_GPU) -> list[str]:
    """Throughput, acceptance and rollbacks by window and group."""
    lines = []
    for (_, weights), cases in windows(gpu).items():
        groups = sorted({group for _, group in cases})
        cells = {case: " / ".join([speed(row)[0], *drafts(row)]) for case, row in cases.items()}
        all_drafts = f"all deterministic, drafts of {weights} weights"
        told(all_drafts, cases.values())
        lines += [
            "",
            f"**Window and group.** {load_name(cases.values())}, all deterministic, drafts of",
            f"{weights} weights. Generated tokens/s / share of the drafts accepted / rollbacks:",
            "",
            *table(
                ["window (W)", *(f"G {group}" for group in groups)],
                (
                    [str(window), *(cells.get((window, group), "") for group in groups)]
                    for window in sorted({window for window, _ in cases})
                ),
            ),
        ]
    return lines[1:]


def narrow_part(gpu: str = FIRST_GPU) -> list[str]:
    """Drafts of 8-bit weights at small batches; against a run's quickest `fast` of a batch."""
    lines = []
    for cases in served("narrow", "batch", "window", "decode_steps", gpu=gpu).values():
        best: dict[tuple, float] = {}
        most_steps = dict.fromkeys((batch for batch, *_ in cases), 1)
        for (batch, _, steps, _), row in cases.items():
            if row["mode"] == "fast":
                run = batch, row.get("commit")
                best[run] = max(best.get(run, 0.0), row["output_tokens_per_s"])
                most_steps[batch] = max(most_steps[batch], steps or 1)
        for (batch, *_), row in cases.items():
            row.pop("over_fast", None)
            if (batch, row.get("commit")) in best:
                fastest = best[batch, row.get("commit")]
                row["over_fast"] = row["output_tokens_per_s"] / fastest
        alone = sorted(batch for batch, steps in most_steps.items() if steps == 1)
        note = f" (at {', '.join(map(str, alone))} with one token a launch alone)" if alone else ""
        lines += [
            "",
            f"**8-bit drafts, and several tokens a launch.** {load_name(cases.values())}. Medians;",
            f"`fast` is the quickest of the same run and batch size{note}:",
            "",
            *table(
                [
                    "batch",
                    "mode",
                    "window (W)",
                    "tokens a launch",
                    *SPEED,
                    "a token, ms",
                    *DRAFT_CELLS,
                ],
                (
                    told_cells(
                        [
                            *(str(batch), name, str(window or ""), str(steps or 1)),
                            *(*speed(row), digits(row["token_p50_ms"]), *drafts(row)),
                        ],
                        row,
                    )
                    for (batch, window, steps, name), row in cases.items()
                ),
            ),
        ]
    return lines[1:]


PARTS = {
    "stress": stress_part, "engine_step": engine_part, "max_len": max_len_part,
    "offline": offline_part, "replay": replay_part, "shares": shares_part,
    "windows": windows_part, "narrow": narrow_part,
}  # fmt: skip
"""What writes the rows of a subject."""

DRAWN = ("shares", "windows")


def runs_note(gpu: str = FIRST_GPU) -> str:
    """How often a load was run."""
    most = max(row.get("repeats", 1) for subject in PARTS for row in rows("serving", subject, gpu))
    return ", one run each." if most == 1 else f", one run each or the median of {most}."


def section() -> list[str]:
    """For each GPU every part whose rows are there; the figure is of the first GPU."""
    lines = []
    for gpu in GPUS:
        found = {subject: rows("serving", subject, gpu) for subject in PARTS}
        own = [row for subject in PARTS for row in found[subject]]
        if not own:
            continue
        lines += [*([""] if lines else []), hardware(own[0], runs_note(gpu))]
        for subject, part in PARTS.items():
            if found[subject]:
                lines += ["", *part(gpu)]
        if gpu == FIRST_GPU and any(found[subject] for subject in DRAWN):
            lines += ["", "![Throughput over the share and the window](docs/figures/serving.svg)"]
    return lines


def readme_lines(gpu: str = FIRST_GPU) -> list[str]:
    """Throughput, and answers under load."""
    lines = []
    for cases in offline(gpu):
        row = cases.get("`invariant`")
        if row:
            tokens, over = speed(row)
            lines.append(
                f"[Serving](docs/serving.md#measured), {load_name([row])}, all at once: {tokens} "
                f"generated tokens a second{f', {over} of `fast`' if over else ''}."
            )
    checked = [row for row in stressed(gpu) if row["samples"] > row["plain"]]
    if checked:
        samples = sum(row["samples"] - row["plain"] for row in checked)
        asked = sum(row["requests"] for row in checked)
        wrong = sum(row["wrong"] + row["lost"] for row in checked)
        modes = {_checked_mode(row) for row in checked}
        models = listed(sorted({model_name(row["model"]) for row in checked}))
        line = (
            f"Under load, {models}, {listed(sorted(modes))}: each token and "
            f"logprob of {samples:,} deterministic samples of {asked:,} requests against the "
            f"answer at batch size 1: {wrong} different or lost."
        )
        lines.append(told(line, checked))
    return [f"- {line}" for line in lines]


def _checked_mode(row: dict) -> str:
    """The mode of a row of `stress`, and in `dvr` its drafts."""
    if row["mode"] != "dvr":
        return f"`{row['mode']}`"
    drafts = stress_drafts(row)[0]
    return f"`dvr` ({drafts} drafts)" if drafting(row) == DRAFTS else f"`dvr` ({drafts})"


# ----------------------------------------------------------------------------------- the figure


def draw_shares(axes) -> None:
    """Throughput over that of `fast`, over the share of deterministic requests."""
    for model, cases in served("shares", "deterministic_percent").items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for (share, name), row in cases.items():
            if "over_fast" in row and row["mode"] != "fast":
                lines.setdefault(name.replace("`", ""), []).append((share, row["over_fast"]))
        for name, points in lines.items():
            label = f"{name}, {Path(model).name}"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_ylim(bottom=0)


def draw_windows(axes) -> None:
    """Throughput over the window, a line for each group."""
    for (model, weights), cases in windows().items():
        for group in sorted({group for _, group in cases}):
            points = [(w, r["output_tokens_per_s"]) for (w, g), r in cases.items() if g == group]
            label = f"G {group}, {weights}, {Path(model).name}"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set_ylim(bottom=0)
