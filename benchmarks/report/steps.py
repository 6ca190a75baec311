# SPDX-License-Identifier: Apache-2.0
"""Steps, kernels, experts, whole engines: README's speed, docs/benchmarks.md, docs/kernels.md."""

import datetime
from collections.abc import Callable

from benchmarks.common import COPY_BYTES_PER_S
from benchmarks.report.rows import (
    FIRST_GPU,
    GPUS,
    Part,
    latest,
    newest_rows,
    rows,
    runs,
    step_of,
    table,
)

SHAPES = ("qkv", "o", "gate_up", "down", "lm_head")
ROW_COUNTS = (1, 8, 64, 128, 512, 2048, 8192)
IMPLS = ("invariant", "fast", "transformers compiled", "transformers eager")
CONTEXT = 1024
"""Of the decode steps in the figures."""


# ---------------------------------------------------------------------------------- whole steps


def with_share(row: dict, copy: float | None) -> dict:
    """A step of ours with how near it comes to the limit: of an H200, else of its own memory."""
    limit = "share of the limit"
    share = row.get("floor_over_measured", row.get("share_of_790_tflop_per_s"))
    if copy is not None and "floor_ms" in row:
        limit = "share of the bandwidth of its own copy"
        share = row["floor_ms"] * COPY_BYTES_PER_S / copy / row["ms_p50"]
    elif copy is not None:
        share = None
    return {limit: share} if share is not None else {}


def steps(command: str, gpu: str) -> list[dict]:
    """A row for each step that has a time of ours, with those of others; decode first."""
    copies = rows(command, "copy", gpu)
    copy = copies[-1]["bytes_per_s"] if copies and gpu != FIRST_GPU else None
    differ = [row for row in rows(command, "step_bits", gpu) if not row["same"]]
    if differ:
        raise ValueError(f"a step has other bits: {differ[0]['case']}")
    cases: dict[str, dict] = {}
    for row in sorted(rows(command, "step", gpu), key=step_of):
        if "ms_p50" not in row:
            continue
        case = cases.setdefault(row["case"], {"case": row["case"]})
        case[row["impl"]] = row["ms_p50"]
        if row["impl"] == "invariant":
            case |= row | with_share(row, copy)
    found = [case for case in cases.values() if "invariant" in case]
    for case in found:
        if "fast" in case:
            case["speed"] = case["fast"] / case["invariant"]
    return found


STEP_COLUMNS = {
    "step, ms": "{case}",
    **{impl: f"{{{impl}:.2f}}" for impl in IMPLS},
    "least of three": "{least_ms:.2f}",
    "invariant over fast, speed": "{speed:.2f}",
    "share of the limit": "{share of the limit:.2f}",
    "share of the bandwidth of its own copy": "{share of the bandwidth of its own copy:.2f}",
    "date, commit": "{date}, {commit}",
}


def step_note(found: list[dict]) -> str:
    """What was measured on, and what the columns are."""
    note = card(found[0])
    if any("fast" in row for row in found):
        note += (
            " `fast` is the same model on XLA's products, norms and activations, without a claim. "
            "It was timed in the same run, and transformers in a run of its own."
        )
    if any("share of the limit" in row for row in found):
        note += (
            " The limit of decode is the sum over products of the larger of two: the weights' "
            "bytes at 4.3 TB/s, and the multiply-adds at 790 TFLOP/s. The cache's bytes are added. "
            "The limit of prefill is 790 TFLOP/s."
        )
    return note


STEPS = Part(
    rows=lambda gpu: [steps("step", gpu)],
    note=step_note,
    columns=STEP_COLUMNS,
    after="![Time of a decode step over the batch](docs/figures/step.svg)",
)
EXPERT_STEPS = Part(
    rows=lambda gpu: [steps("step_experts", gpu)],
    note=lambda found: (
        f"{found[0]['gpu']}, Qwen3-30B-A3B shapes (48 layers, 128 experts of width 768, 8 a "
        "token), random weights, bfloat16. `fast` is XLA's `ragged_dot`. The limits are those of "
        "the table above. Of experts, those that are hit count; in prefill, those that a token "
        "runs."
    ),
    columns=STEP_COLUMNS,
    after="![Time of a decode step over the batch](docs/figures/experts.svg)",
)


OSS_STEPS = Part(
    rows=lambda gpu: [steps("step_gpt_oss", gpu)],
    note=lambda found: (
        f"{found[0]['gpu']}, gpt-oss-20b shapes (24 layers, 32 experts of width 2880, 4 a token), "
        "random weights, expanded to bfloat16. The limits are those of the table above; a layer "
        "with a window reads 128 keys of a sequence."
    ),
    columns=STEP_COLUMNS,
)


def card(row: dict) -> str:
    """What was measured on."""
    return f"One {row['gpu']}, jax {row['jax']}, Llama-3.1-8B shapes, random data, bfloat16."


# -------------------------------------------------------------------------------------- kernels


def products(gpu: str = FIRST_GPU) -> dict[tuple[str, int], dict]:
    """The row of each product and number of rows that has a rival's time."""
    found = rows("kernels", "linear", gpu)
    return {(row["shape"], row["m"]): row for row in found if "ratio" in row}


def by_rows(gpu: str, form: str, counts: tuple[int, ...] = ()) -> list[list[dict]]:
    """A row for each number of rows, with what `form` says of each product."""
    found = products(gpu)
    lines: dict[int, dict] = {}
    for (shape, m), row in sorted(found.items(), key=lambda item: item[0][1]):
        if not counts or m in counts:
            line = lines.setdefault(m, {"m": m, "gpu": row["gpu"], "jax": row["jax"], "fixed": []})
            line[shape] = form.format_map(row)
            line["fixed"] += [row["fixed_us"] / row["us"]] if "fixed_us" in row else []
    return [list(lines.values())]


def fixed_note(found: list[dict]) -> str:
    """How a product of one fixed tile compares."""
    fixed = [ratio for line in found for ratio in line["fixed"]]
    if not fixed:
        return ""
    return (
        " One fixed tile of 128 x 128 x 64, unsplit, as in Thinking Machines' product, takes "
        f"{min(fixed):.2f} to {max(fixed):.2f} times as long."
    )


PRODUCTS = Part(
    rows=lambda gpu: by_rows(gpu, "{ratio:.2f}", ROW_COUNTS),
    note=lambda found: (
        "Linear layers: the time of the best rival over that of detjax, in the same run. Rivals "
        "are `jnp.dot` (cuBLAS or XLA's own) and, where it ran, `torch.mm`. They only multiply. "
        "In `o` and `down` detjax sums eight leaves as a tree and, above 128 rows, adds the "
        "residual. In `gate_up` it also gates."
    ),
    columns={"rows": "{m}", **{shape: f"{{{shape}}}" for shape in SHAPES}},
    after="![Speed of the linear layers over the number of rows](docs/figures/linear.svg)",
)
ALL_PRODUCTS = Part(
    rows=lambda gpu: by_rows(gpu, "{us:.1f}, {ratio:.2f}"),
    note=lambda found: (
        f"{card(found[0])} Microseconds of a product, and the best rival's time "
        f"over it.{fixed_note(found)}"
    ),
    columns={"M": "{m}", **{shape: f"{{{shape}}}" for shape in SHAPES}},
)


def other_kernels(gpu: str) -> list[list[dict]]:
    """Attention against cuDNN and the copy bandwidth; kernels bound by memory."""
    found = []
    for row in rows("kernels", "attention", gpu):
        name = "attention, prefill of {tokens} tokens, 32/8 heads of 128"
        if row["case"] == "prefill" and row["tokens"] == 8192:
            more = {"us": 1e3 * row["ms"], "tflops": row["tflops"], "rival": row["over_cudnn"]}
            found.append({"kernel": name.format_map(row)} | more)
        elif row["case"] == "decode":
            name = f"attention, decode of {row['batch']} x {row['tokens']} tokens"
            share = {"share": row["share"]} if gpu == FIRST_GPU else {}
            found.append({"kernel": name, "us": row["us"]} | share)
    for row in rows("kernels", "rows", gpu):
        if row["m"] == 8192 and row["case"] in ("add_rms_norm", "swiglu"):
            more = {"share": row["share_of_copy"], "rival": row["xla_us"] / row["us"]}
            found.append({"kernel": f"`{row['case']}`, 8192 rows", "us": row["us"]} | more)
    return [found]


OTHER_KERNELS = Part(
    rows=other_kernels,
    note=lambda found: "Other kernels. The rival is cuDNN for attention and XLA for the rest, in "
    "the same run:",
    columns={
        "kernel": "{kernel}", "us": "{us:.1f}", "TFLOP/s": "{tflops:.0f}",
        "share of the copy bandwidth": "{share:.2f}", "rival's time over ours": "{rival:.2f}",
    },
)  # fmt: skip


def expert_kernels(gpu: str) -> list[list[dict]]:
    """A row for each number of rows: ours with the chosen tiles, beside `ragged_dot`."""
    found = rows("moe", "moe", gpu) or rows("kernels", "moe", gpu)
    timed = latest((row for row in found if row["kind"] == "time"), "m", "tiles")
    checks = [row for row in found if row["kind"] == "bits"]
    counts = {"checks": len(checks), "wrong": sum(1 for row in checks if row["different"])}
    ours = [timed[m, tiles] for m, tiles in sorted(timed) if tiles == "chosen"]
    for row in ours:
        row |= counts
        if rival := timed.get((row["m"], "ragged_dot")):
            row["ragged_dot_us"] = rival["us"]
    return [ours]


EXPERT_KERNELS = Part(
    rows=expert_kernels,
    note=lambda found: "One layer's experts, from the router's logits to the next norm, in "
    f"microseconds of kernels ({found[0]['checks']} comparisons of bits, {found[0]['wrong']} "
    "different). `ragged_dot` does not include the combination and the norm.",
    columns={
        "rows": "{m}", "detjax": "{us:.1f}", "limit": "{floor_us:.1f}", "share": "{share:.2f}",
        "`ragged_dot`": "{ragged_dot_us:.0f}",
    },
)  # fmt: skip


# ------------------------------------------------------------------------------- whole engines

OURS = "detjax invariant bfloat16"
SHORT = (
    OURS, "vLLM default bfloat16", "vLLM batch-invariant bfloat16", "SGLang default bfloat16",
)  # fmt: skip
"""Engines of README's table: the same weights in the same number format."""

type EngineCase = tuple[str, Callable[[dict], float | None], int]
ENGINE_CASES: tuple[EngineCase, ...] = (
    ("decode, batch 1, ms", lambda row: row.get("decode_ms", {}).get("1"), 2),
    ("decode, batch 8, ms", lambda row: row.get("decode_ms", {}).get("8"), 2),
    ("decode, batch 64, ms", lambda row: row.get("decode_ms", {}).get("64"), 2),
    ("decode, batch 256, ms", lambda row: row.get("decode_ms", {}).get("256"), 2),
    ("prefill of 4000 tokens, ms", lambda row: row.get("prefill_4000_ms"), 1),
    ("512 requests of 512 + 128 tokens, s", lambda row: row.get("offline_512x512_128_s"), 1),
)


def engine_rows(gpu: str) -> list[dict]:
    """Whole engines of the newest run on a GPU, those that failed included."""
    return rows("peers", "engine", gpu)


def is_one_command(found: list[dict]) -> bool:
    """Whether rows are of `benchmarks.peers`, which says more than earlier ones do."""
    return bool(found) and "gpus" in found[0]


def engine_table(
    found: list[dict], names: tuple[str, ...] = (), cases: tuple[EngineCase, ...] = ENGINE_CASES
) -> list[str]:
    """A line for each case, a column for each engine."""
    measured = {(row.get("host", ""), row["engine"]): row for row in found if "error" not in row}
    shown = [row for (_, name), row in measured.items() if name in names or not names]
    lines = []
    for case, read, num_digits in cases:
        values = map(read, shown)
        cells = ["" if value is None else f"{value:.{num_digits}f}" for value in values]
        if any(cells):
            lines.append([case, *cells])
    columns = [
        f"{row['host']}: {engine_name(row)}" if "host" in row else engine_name(row) for row in shown
    ]
    return table(["", *columns], lines) if lines else []


def hosts_of(found: list[dict]) -> str:
    """The hosts that rows are of, such as "a and b"; empty if they do not tell."""
    return " and ".join(sorted({row["host"] for row in found if "host" in row}))


def engine_name(row: dict) -> str:
    """The engine with its version, as a column is called."""
    engine, _, rest = row["engine"].removesuffix(" bfloat16").partition(" ")
    is_ours = engine == "detjax"
    name = engine if is_ours else f"{engine} {row['version']}" if "version" in row else engine
    rest = rest.removeprefix("invariant").strip() if is_ours else rest
    return f"{name}, {rest}" if rest not in ("", "default") else name


def day_of(row: dict) -> str:
    """The day of a row."""
    day = datetime.date.fromisoformat(row["date"])
    return f"{day.day} {day:%B %Y}"


def of_bfloat16(found: list[dict]) -> list[dict]:
    """Rows of detjax in bfloat16 that have figures."""
    return [row for row in found if row["engine"] == OURS and "error" not in row]


def speed() -> list[str]:
    """README's table of speed, and what it was measured on; nothing without a row of ours."""
    of_command = (
        found
        for gpu in GPUS
        for found in runs("peers", "engine", gpu)
        if is_one_command(found) and of_bfloat16(found)
    )
    found = next(of_command, engine_rows(FIRST_GPU))
    ours = of_bfloat16(found)
    if not ours:
        return []
    each = " each of one host" if ours[-1].get("gpus", 2) > 1 else ", one after another"
    if hosts := hosts_of(found):
        each = f" of hosts {hosts}"
    return [
        f"Llama-3.1-8B shapes, bfloat16, whole engines, one {ours[-1]['gpu']}{each}, "
        f"{day_of(ours[-1])}, detjax at commit {ours[-1]['version']}:",
        "",
        *engine_table(found, SHORT, ENGINE_CASES[:1] + ENGINE_CASES[2:]),
    ]


HTTP = Part(
    rows=lambda gpu: [newest_rows("peers", "http", gpu)],
    note=lambda found: f"Over HTTP, {day_of(found[0])}, N clients of plain sockets send a request "
    "at once, each for 200 streamed tokens after 1000 random tokens. detjax ran on another host "
    "than vLLM, 20 minutes before, so differences below 2 % mean nothing.",
    columns={
        "server": engine_name, "clients": "{clients}", "tokens/s": "{tokens_per_s:,}",
        "TTFT p50, ms": "{ttft_p50_ms}", "TPOT p50, ms": "{tpot_p50_ms:.2f}",
    },
)  # fmt: skip

PROTOCOL = (
    "Decode is (time of 130 tokens less that of 2) / 128, through each engine's own `generate`, "
    "after prompts of {prompts} tokens. Prefill is the least of three calls, one after another. "
    "256 slots, no prefix cache, random weights. vLLM ran with CUDA graphs. Batch-invariant is "
    "`VLLM_BATCH_INVARIANT=1`."
)


def engine_note(found: list[dict]) -> str:
    """What engines were measured on and how, and which failed."""
    if not is_one_command(found):
        where = "one engine a GPU, GPUs of one host, within five minutes"
        return (
            f"{found[0]['gpu']}, Llama-3.1-8B shapes, {day_of(found[0])}, {where}. "
            f"{PROTOCOL.format(prompts='random')}"
        )
    row = found[0]
    count = row["gpus"]
    where = f"{count} at a time, a GPU of one host each" if count > 1 else "one after another"
    run = "one run of "
    versions = {}
    for one in found:
        versions |= one.get("versions", {})
    named = [f"{name} {versions[name]}" for name in ("jax", "torch", "triton") if name in versions]
    if hosts := hosts_of(found):
        run, where = "", f"{where}, of hosts {hosts}"
    note = (
        f"{row['gpu']}, driver {row['driver']}, Llama-3.1-8B shapes, {run}"
        f"`python -m benchmarks.peers`, {day_of(row)}, engines {where}. detjax at commit "
        f"{row['commit']}; {', '.join(named)}. {PROTOCOL.format(prompts='1000 random')}"
    )
    if any("W8A8" in one["engine"] for one in found):
        note += (
            " In W8A8 activations have a scale for each token. detjax's weights have one for each "
            "channel, those of vLLM's `fp8` one for each matrix."
        )
    if any(one["engine"].startswith("SGLang") for one in found):
        note += (
            " SGLang ran with FlashAttention 3 and CUDA graphs; its batch-invariant mode is "
            "`enable_deterministic_inference`."
        )
    note += "".join(
        f" {engine_name(one)} had no {one['without']}." for one in found if "without" in one
    )
    settings = {f"{k}={v}" for one in found for k, v in one.get("environment", {}).items()}
    note += "".join(f" detjax ran with {setting}." for setting in sorted(settings))
    measured = {one["engine"] for one in found if "error" not in one}
    failed = [
        f" {engine_name(one)} failed: {one['error']}"
        + (f" ({one['log'].split(' while')[0]})" if "log" in one else "")
        + "."
        for one in found
        if one["engine"] not in measured
    ]
    return note + "".join(failed)


def engines() -> list[str]:
    """The newest run on each GPU, earlier ones that had further engines, and rows over HTTP."""
    lines = []
    for gpu in GPUS:
        shown: set[str] = set()
        for found in runs("peers", "engine", gpu):
            names = {row["engine"] for row in found if "error" not in row}
            if names - shown or (found and not shown):
                lines += ["", engine_note(found), "", *engine_table(found)]
            shown |= names
    lines += HTTP.lines(FIRST_GPU)
    return ["", "### Compared with vLLM and SGLang", *lines] if lines else []


# ------------------------------------------------------------------------- at production sizes

_BESIDES = {
    "loop": ", 8 tokens a launch",
    "drafts": ", drafts of the answer itself",
    "adjusted": ", biases, penalties, masks; scored again",
    "yarn": ", YaRN",
}


def production(gpu: str) -> list[list[dict]]:
    """Parts of the suite that claim something, shortest first; each knows of the others."""
    parts = rows("production", "production", gpu)
    claims = sorted((r for r in parts if r["mode"] != "fast"), key=lambda row: row["max_len"])
    return [[row | {"parts": parts} for row in claims]]


def production_note(found: list[dict]) -> str:
    """What the parts add up to, and the control."""
    largest = max(found, key=lambda row: row["cache_bytes"])
    compared, different = (
        sum(row[name] for row in found) for name in ("compared_tokens", "different")
    )
    control = "".join(
        f" The control, `fast`: {row['different']:,} of {row['compared_tokens']:,}."
        for row in found[0]["parts"]
        if row["mode"] == "fast"
    )
    return (
        f"{largest['gpu']}, Llama-3.1-8B shapes: a cache of {largest['cache_bytes'] / 1e9:.1f} of "
        f"the {largest['free_bytes'] / 1e9:.1f} GB that the weights leave "
        f"({largest['num_pages']:,} pages). Answers alone and in company, greedy and sampled, "
        "against the canonical choice at each position by another path on a small cache "
        f"(`python -m benchmarks.production`): {different:,} of {compared:,} tokens and logprobs "
        f"different.{control}"
    )


PRODUCTION = Part(
    rows=production,
    note=production_note,
    columns={
        "`max_len`": "{max_len:,}",
        "mode": lambda row: f"`{row['mode']}`{_BESIDES.get(row['case'], '')}",
        "cache": lambda row: f"{row['cache_bytes'] / 1e9:.1f} GB",
        "longest prompt": "{longest_prompt:,}", "rows": "{most_rows:,}", "programs": "{programs}",
        "windows verified": lambda row: f"{row['windows']:,}" if row["windows"] else "",
        "tokens compared": "{compared_tokens:,}", "different": "{different:,}",
    },
)  # fmt: skip


def benchmarks() -> list[str]:
    """docs/benchmarks.md: steps and kernels of each GPU, whole engines, experts, production."""
    lines = []
    for gpu in GPUS:
        parts = STEPS.lines(gpu) + PRODUCTS.lines(gpu) + OTHER_KERNELS.lines(gpu)
        lines += ["", f"### {GPUS[gpu]}", *parts] if parts else []
    lines += engines()
    for title, parts in (
        ("Mixtures of experts", (EXPERT_STEPS, OSS_STEPS, EXPERT_KERNELS)),
        ("At production sizes", (PRODUCTION,)),
    ):
        found = [line for gpu in GPUS for part in parts for line in part.lines(gpu)]
        lines += ["", f"## {title}", *found] if found else []
    return lines[1:]


def kernels() -> list[str]:
    """docs/kernels.md: every product at every number of rows, and the other kernels."""
    return [
        line for gpu in GPUS for part in (ALL_PRODUCTS, OTHER_KERNELS) for line in part.lines(gpu)
    ][1:]
