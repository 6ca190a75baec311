# SPDX-License-Identifier: Apache-2.0
"""The engine and the server under load: docs/serving.md and docs/server.md."""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable

from benchmarks.report.rows import (
    DRAFTS,
    FIRST_GPU,
    GPUS,
    NO_DRAFTS,
    Format,
    Part,
    digits,
    drafting,
    latest,
    model_name,
    rows,
)

MODES = ("invariant", "dvr", "fast")


# ------------------------------------------------------------------------------- rows and cells


def groups(found: Iterable[dict], key: Callable[[dict], Hashable]) -> list[list[dict]]:
    """Rows by what they have in common, in the order in which that comes first."""
    of_key: dict[Hashable, list[dict]] = {}
    for row in found:
        of_key.setdefault(key(row), []).append(row)
    return list(of_key.values())


def load_name(found: Collection[dict]) -> str:
    """Model, requests and their lengths, as far as the rows say and agree."""

    def common(name):
        values = {row.get(name) for row in found}
        return values.pop() if len(values) == 1 else None

    num, prompt_len, output_len = map(common, ("requests", "prompt_len", "output_len"))
    lengths = f" of {prompt_len} + {output_len} tokens" if prompt_len and output_len else ""
    asked = f", {num or ''} requests{lengths}".replace("  ", " ") if num or lengths else ""
    patience = common("max_prefill_streak")
    return (
        model_name(common("model"))
        + asked
        + (f", `max_prefill_streak` {patience}" if patience else "")
    )


def mode_name(row: dict) -> str:
    """The mode, and in `dvr` which drafts were made, if any."""
    if row["mode"] != "dvr":
        return f"`{row['mode']}`"
    if drafting(row) != DRAFTS:
        return f"`dvr`, {drafting(row)}"
    weights = row.get("draft_weights") or "full"
    return "`dvr`, drafts" if weights == "full" else f"`dvr`, {weights} drafts"


def served(subject: str, *keys: str, gpu: str) -> list[list[dict]]:
    """For each model a row for each case, which is what the keys hold and the mode: the last such.

    A row gets `over_fast`: its throughput over that of the `fast` row of its run, which is the next
    one behind it (`shares` ends with it), or else the last; none if that is of another build.
    """
    found = rows("serving", subject, gpu)
    # Drafts and shares are not for `fast` to have.
    of_drafts = ("window", "decode_steps", "deterministic_percent")
    place = ("model", *(key for key in keys if key not in of_drafts))
    last = latest((row for row in found if row["mode"] == "fast"), *place)
    following: dict[tuple, dict] = {}
    cases: dict[tuple, dict] = {}
    for row in reversed(found):
        where = tuple(row.get(key) for key in place)
        if row["mode"] == "fast":
            following[where] = row
        fast = following.get(where) or last.get(where)
        if fast and fast.get("fingerprint") == row.get("fingerprint"):
            row["over_fast"] = row["output_tokens_per_s"] / fast["output_tokens_per_s"]
        order = *(row.get(key, 0) for key in keys), MODES.index(row["mode"]), mode_name(row)
        cases.setdefault((row["model"], *order), row)
    return groups((cases[case] for case in sorted(cases)), lambda row: row["model"])


def quantiles(name: str, row: dict) -> str:
    """P50, P90 and P99 in milliseconds."""
    return " / ".join(digits(row[f"{name}_p{share}_ms"]) for share in (50, 90, 99))


def of_drafts(form: str, row: dict) -> str:
    """What a row says of its drafts: nothing where there were none."""
    counts = {"acceptance": 0.0, "rollbacks": row.get("num_rollbacks", 0)} | row
    return form.format_map(counts) if row["mode"] == "dvr" and drafting(row) == DRAFTS else ""


SPEED: dict[str, Format] = {
    "generated tokens/s": "{output_tokens_per_s:,.0f}", "over `fast`": "{over_fast:.2f}",
}  # fmt: skip
TIMES: dict[str, Format] = {
    "first token, ms": functools.partial(quantiles, "first_token"),
    "a token, ms": functools.partial(quantiles, "token"),
    "end to end, ms": functools.partial(quantiles, "end_to_end"),
}
ACCEPTED: dict[str, Format] = {
    "drafts accepted": functools.partial(of_drafts, "{acceptance:.3f}"),
    "rollbacks": functools.partial(of_drafts, "{rollbacks}"),
}


# ----------------------------------------------------------------------------------- the engine


def stress_drafts(row: dict) -> str:
    """The weights of the drafts of a row of `stress`."""
    if row["mode"] != "dvr":
        return "none"
    return (row.get("draft_weights") or "full") if drafting(row) == DRAFTS else drafting(row)


STRESS = Part(
    rows=lambda gpu: [
        list(
            latest(
                rows("serving", "stress", gpu), "model", "mode", "draft_weights", "num_pages"
            ).values()
        )
    ],
    note=lambda found: "**Answers under load.** Requests of every kind, with shared prefixes, in "
    "random company. Each token and logprob of a deterministic sample is compared with the answer "
    "that the request gets alone. A lost one counts as different. Plain samples have no claim and "
    "are the control:",
    columns={
        "model": lambda row: model_name(row["model"]), "mode": "`{mode}`", "drafts": stress_drafts,
        **ACCEPTED,
        "pages": "{num_pages:,}", "requests": "{requests:,}", "cancelled": "{cancelled:,}",
        "preempted": "{preempted:,}",
        "deterministic samples different":
            lambda row: f"{row['wrong'] + row['lost']} of {row['samples'] - row['plain']:,}",
        "plain ones different": "{plain_different:,} of {plain:,}",
    },
)  # fmt: skip


def engine_steps(gpu: str) -> list[list[dict]]:
    """The engine's decode steps, each with its speed over that of `fast`."""
    found = latest(rows("serving", "engine_step", gpu), "model", "batch", "context", "mode")
    for (*case, _), row in found.items():
        if fast := found.get((*case, "fast")):
            row["over_fast"] = fast["engine_ms"] / row["engine_ms"]
    return [list(found.values())]


def step_name(row: dict) -> str:
    """Model, batch and context of a decode step."""
    return f"{model_name(row['model'])}, batch {row['batch']}, context {row['context']}"


ENGINE = Part(
    rows=engine_steps,
    note=lambda found: "**What the engine adds.** Wall time of a decode step, with planning and "
    "results, and of the same program launched back to back:",
    columns={
        "decode step": step_name, "mode": "`{mode}`", "engine, ms": "{engine_ms:.2f}",
        "program, ms": "{bare_ms:.2f}", "ratio": "{ratio:.2f}",
        "speed over `fast`": "{over_fast:.2f}",
    },
)  # fmt: skip


def by_max_len(gpu: str) -> list[list[dict]]:
    """The last row of each model, batch and `max_len`, in this order."""
    found = latest(rows("serving", "max_len", gpu), "model", "batch", "max_len")
    return [[row for _, row in sorted(found.items())]]


MAX_LEN = Part(
    rows=by_max_len,
    note=lambda found: "**Another `max_len`, the same sequences.** Milliseconds of the engine's "
    "decode step, and its ratio to that of the shortest. Every bit of the answers is the same:",
    columns={
        "decode step": step_name, "`max_len`": "{max_len:,}", "ms": "{ms_p50:.2f}",
        "ratio": "{ratio_to_shortest:.3f}",
    },
)  # fmt: skip


def offline(gpu: str) -> list[list[dict]]:
    """For each model, load and `max_prefill_streak`: the last row of each mode."""
    keys = ("requests", "prompt_len", "output_len", "max_prefill_streak")
    found = [row for cases in served("offline", *keys, gpu=gpu) for row in cases]
    return groups(found, lambda row: (row["model"], *(row.get(key) for key in keys)))


OFFLINE = Part(
    rows=offline,
    note=lambda found: f"**All at once.** {load_name(found)}. Times are P50 / P90 / P99:",
    columns={"mode": mode_name, **SPEED, **TIMES},
)
REPLAY = Part(
    rows=lambda gpu: served("replay", "requests", "rate_per_s", gpu=gpu),
    note=lambda found: f"**The lengths of a trace**, at random times. {load_name(found)}. Times "
    "are P50 / P90 / P99:",
    columns={
        "requests": "{requests}",
        "a second": lambda row: f"{row['rate_per_s']:g}" if row["rate_per_s"] else "at once",
        "mode": mode_name, **SPEED, **TIMES,
    },
)  # fmt: skip
SHARES = Part(
    rows=lambda gpu: served("shares", "deterministic_percent", gpu=gpu),
    note=lambda found: f"**Against the share of deterministic requests.** {load_name(found)}. "
    "Without drafts a decode step with a deterministic sample is canonical as a whole. Each row is "
    "over the `fast` of its own run; times are P50 / P90 / P99:",
    columns={
        "deterministic, %": "{deterministic_percent:g}", "mode": mode_name, **SPEED,
        **dict(list(TIMES.items())[:2]), **ACCEPTED,
    },
)  # fmt: skip


def windows(gpu: str) -> list[list[dict]]:
    """For each model and weights of the drafts: the last row of each window and group."""
    keys = ("model", "draft_weights", "window", "group")
    found = latest(rows("serving", "windows", gpu), *keys)
    return groups(
        ({"mode": "dvr"} | row for _, row in sorted(found.items())),
        lambda row: (row["model"], row["draft_weights"]),
    )


WINDOWS = Part(
    rows=windows,
    note=lambda found: f"**Window and group.** {load_name(found)}, all deterministic, drafts of "
    f"{found[0]['draft_weights']} weights:",
    columns={
        "window (W)": "{window}", "group (G)": "{group}",
        "generated tokens/s": "{output_tokens_per_s:,.0f}", **ACCEPTED,
    },
)  # fmt: skip


def narrow(gpu: str) -> list[list[dict]]:
    """Small batches, each row over the quickest `fast` of its run and batch."""
    found = served("narrow", "batch", "window", "decode_steps", gpu=gpu)
    for cases in found:
        best: dict[tuple, float] = {}
        for row in cases:
            if row["mode"] == "fast":
                run = row["batch"], row.get("commit")
                best[run] = max(best.get(run, 0.0), row["output_tokens_per_s"])
        for row in cases:
            row.pop("over_fast", None)
            if fastest := best.get((row["batch"], row.get("commit"))):
                row["over_fast"] = row["output_tokens_per_s"] / fastest
    return found


def narrow_note(found: list[dict]) -> str:
    """Which `fast` the rows are over."""
    most: dict[int, int] = {}
    for row in found:
        if row["mode"] == "fast":
            most[row["batch"]] = max(most.get(row["batch"], 1), row.get("decode_steps") or 1)
    alone = ", ".join(str(batch) for batch, steps in sorted(most.items()) if steps == 1)
    note = f" (at {alone} with one token a launch alone)" if alone else ""
    return (
        f"**8-bit drafts, and several tokens a launch.** {load_name(found)}. Medians; `fast` is "
        f"the quickest of the same run and batch size{note}:"
    )


NARROW = Part(
    rows=narrow,
    note=narrow_note,
    columns={
        "batch": "{batch}", "mode": mode_name,
        "window (W)": lambda row: str(row.get("window") or ""),
        "tokens a launch": lambda row: str(row.get("decode_steps") or 1), **SPEED,
        "a token, ms": lambda row: digits(row["token_p50_ms"]), **ACCEPTED,
    },
)  # fmt: skip

PARTS = {
    "stress": STRESS, "engine_step": ENGINE, "max_len": MAX_LEN, "offline": OFFLINE,
    "replay": REPLAY, "shares": SHARES, "windows": WINDOWS, "narrow": NARROW,
}  # fmt: skip
"""Of the rows of a subject."""


def engine() -> list[str]:
    """docs/serving.md: for each GPU every part that has rows; the figure is of the first GPU."""
    lines = []
    for gpu in GPUS:
        own = [row for subject in PARTS for row in rows("serving", subject, gpu)]
        if not own:
            continue
        most = max(row.get("repeats", 1) for row in own)
        runs = "one run each" if most == 1 else f"one run each or the median of {most}"
        lines += ["", f"{own[0]['gpu']}, jax {own[0]['jax']}, bfloat16, {runs}."]
        lines += [line for part in PARTS.values() for line in part.lines(gpu)]
        if gpu == FIRST_GPU and (SHARES.rows(gpu) or WINDOWS.rows(gpu)):
            lines += ["", "![Throughput over the share and the window](docs/figures/serving.svg)"]
    return lines[1:]


# ----------------------------------------------------------------------------------- the server


def loads(gpu: str) -> list[dict]:
    """Loads over HTTP, by rate and share."""
    found = rows("serve_load", "serve_load", gpu)
    return sorted(found, key=lambda row: (row["rate_per_s"], row["deterministic_percent"]))


def load_note(found: list[dict]) -> str:
    """What was asked, and how many answers differ."""
    count = {
        name: sum(row[name] for row in found)
        for name in ("canonical", "wrong", "plain", "plain_different", "lost", "held")
    }
    how = "Drafts were verified."
    if not any(row["num_rollbacks"] or row.get("max_draft_fraction") for row in found):
        how = f"Deterministic requests decode by canonical steps ({NO_DRAFTS})."
    return (
        f"{found[0]['gpu']}, {model_name(found[0]['model'])}, mode `{found[0]['mode']}`, lengths "
        f"of the Azure conversation trace up to {found[0]['max_len']:,} tokens, Poisson arrivals "
        f"over HTTP, all streamed. {how} Of {count['canonical']:,} canonical answers "
        f"{count['wrong']} differ from the answer alone, of {count['plain']:,} others "
        f"{count['plain_different']:,}; {count['lost'] + count['held']} lost."
    )


LOAD = Part(
    rows=lambda gpu: [loads(gpu)],
    note=load_note,
    columns={
        "requests a second": "{rate_per_s:g}", "deterministic": "{deterministic_percent:g} %",
        "requests": "{requests}",
        **{name.replace(", ms", ", p50 / p90 / p99, ms"): form for name, form in TIMES.items()},
        "tokens a second": "{output_tokens_per_s:,.0f}", "canonical answers": "{canonical}",
        "different": "{wrong}",
    },
)  # fmt: skip


def cost_lines(gpu: str) -> list[str]:
    """What HTTP costs: of the runs of the newest build, the least and the most."""
    found = rows("serve_cost", "serve_cost", gpu)
    if not found:
        return []
    if not all(row["same"] for row in found):
        raise ValueError(f"a row of serve_cost on {found[-1]['gpu']} has answers with other bits")
    last = found[-1]
    runs = [row for row in found if row["commit"] == last["commit"]]

    def between(name: str) -> str:
        values = sorted(row[name] for row in runs)
        return " to ".join(dict.fromkeys(f"{value:,.1f}" for value in (values[0], values[-1])))

    return [
        "",
        f"{last['gpu']}, {model_name(last['model'])}, {last['batch']} requests at once, "
        f"{last['prompt_len']} + {last['output_len']} tokens, {len(runs)} run(s): the engine alone "
        f"gives {between('alone_tokens_per_s')} tokens a second. Over HTTP it is "
        f"{between('whole_cost_percent')} % less with answers in one piece, "
        f"{between('streamed_cost_percent')} % less streamed; the same bits.",
    ]


def server() -> list[str]:
    """docs/server.md: loads at several rates, and what HTTP costs."""
    return [line for gpu in GPUS for line in (*LOAD.lines(gpu), *cost_lines(gpu))][1:]
