# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on GPUs: whole steps of Qwen3-30B-A3B, and the kernels of one layer.

Rows are `<date>-step_experts.jsonl` of `benchmarks.step --model qwen3_30b_a3b`, and those of
`benchmarks.moe`. A floor counts the bytes of the experts that are hit, where routing is uniform.
"""

from benchmarks.report_rows import FIRST_GPU, GPUS, latest, rows, table

CHOSEN, RIVAL = "chosen", "ragged_dot"
LIMIT = "bytes of the experts hit at 4.3 TB/s"


def lines() -> list[str]:
    """Steps and kernels of every GPU that has rows."""
    found = [line for gpu in GPUS for line in (*_steps(gpu), *_kernels(gpu))]
    return ["## Mixtures of experts", "", *found] if found else []


def steps(gpu: str) -> dict[tuple, dict]:
    """The last row of each case and implementation."""
    found = [row for row in rows("step_experts", "step", gpu) if "ms_p50" in row]
    return latest(found, "case", "impl")


def decode_lines(gpu: str = FIRST_GPU) -> dict[str, list[tuple[int, float]]]:
    """(batch, ms) of decode steps by implementation, and their limit."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (_, impl), row in steps(gpu).items():
        if "batch" in row:
            lines.setdefault(impl, []).append((row["batch"], row["ms_p50"]))
            if impl == "invariant":
                lines.setdefault(LIMIT, []).append((row["batch"], row["floor_ms"]))
    return {name: sorted(points) for name, points in lines.items()}


def _steps(gpu: str) -> list[str]:
    found = steps(gpu)
    ours = [row for (_, impl), row in found.items() if impl == "invariant"]
    if not ours:
        return []
    differ = [row for row in rows("step_experts", "step_bits", gpu) if not row["same"]]
    if differ:
        raise ValueError(f"a step of experts has other bits: {differ[0]['case']}")

    def cells(row):
        fast = found.get((row["case"], "fast"))
        share = row.get("floor_over_measured", row.get("share_of_790_tflop_per_s"))
        ratio = f"{fast['ms_p50'] / row['ms_p50']:.1f}" if fast else ""
        return [
            row["case"], f"{row['ms_p50']:.2f}",
            f"{row['least_ms']:.2f}" if "least_ms" in row else "",
            f"{fast['ms_p50']:.2f}" if fast else "", ratio, f"{share:.2f}",
        ]  # fmt: skip

    return [
        f"{ours[0]['gpu']}, Qwen3-30B-A3B shapes (48 layers, 128 experts of width 768, 8 a "
        "token), random weights, bfloat16. `fast` is XLA's `ragged_dot`.",
        "The limit of decode is the bytes of the experts that are hit, of other weights and of the "
        "cache at 4.3 TB/s. That of prefill is 790 TFLOP/s on what a token runs.",
        "",
        *table(
            ["step", "invariant, ms", "least of three, ms", "`fast`, ms",
             "invariant over fast, speed", "share of the limit"],
            map(cells, ours),
        ),
        "",
        *(["![Time of a decode step over the batch](docs/figures/experts.svg)", ""]
          if gpu == FIRST_GPU else []),
    ]  # fmt: skip


def _kernels(gpu: str) -> list[str]:
    found = [row for row in rows("moe", "moe", gpu) if row["kind"] == "time"]
    by_case = latest(found, "m", "tiles")
    ours = sorted(m for m, tiles in by_case if tiles == CHOSEN)
    if not ours:
        return []
    checks = [row for row in rows("moe", "moe", gpu) if row["kind"] == "bits"]
    wrong = sum(1 for row in checks if row["different"])

    def cells(m):
        row, rival = by_case[m, CHOSEN], by_case.get((m, RIVAL))
        return [
            str(m), f"{row['us']:.1f}", f"{row['floor_us']:.1f}", f"{row['share']:.2f}",
            f"{rival['us']:.0f}" if rival else "",
        ]  # fmt: skip

    return [
        "One layer's experts, from the router's logits to the next norm, in microseconds of "
        f"kernels (`benchmarks.moe`; {len(checks)} comparisons of bits, {wrong} different).",
        "`ragged_dot` does not include the combination and the norm.",
        "",
        *table(["rows", "detjax", "limit", "share", "`ragged_dot`"], map(cells, ours)),
        "",
    ]
