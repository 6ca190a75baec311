# SPDX-License-Identifier: Apache-2.0
"""Our steps beside those of vLLM on the same kind of GPU, where the protocols match.

vLLM's rows stand in `benchmarks/results/<gpu>/vllm-<version>.jsonl`, a figure each, with the
protocol. They were measured once and by hand, so no command of detjax takes them again. Ours are
the newest rows of `benchmarks.step` and `benchmarks.serving`.
"""

import json

from benchmarks import report_rows
from benchmarks.report_rows import FIRST_GPU, model_name, ratio, rows, step_of, table


def vllm_rows() -> list[dict]:
    """The figures of the newest version, or none."""
    files = sorted((report_rows.RESULTS / FIRST_GPU).glob("vllm-*.jsonl"))
    return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []


def our_times(vllm: dict) -> dict[str, float | None]:
    """What ours takes at the same shape, size, GPU and protocol, in the row's unit, if measured.

    By what is special about the engine: "" is its default, which is listed also without a row.
    """
    if "requests" in vllm:
        times: dict[str, float | None] = {"": None}
        for row in rows("serving", "offline"):
            is_same = all(row[x] == vllm[x] for x in ("requests", "prompt_len", "output_len"))
            if is_same and _is_rival(row, vllm, row["mode"]):
                patience = row.get("max_prefill_streak")
                is_default = not patience or row.get("has_defaults")
                times["" if is_default else f"`max_prefill_streak` {patience}"] = row["wall_s"]
        return times
    statistic = "ms_p50" if step_of(vllm)[0] == "decode" else "least_ms"
    found = [
        row[statistic]
        for row in rows("step", "step")
        if statistic in row and _is_rival(row, vllm, row["impl"]) and step_of(row) == step_of(vllm)
    ]
    return {"": found[-1] if found else None}


def _is_rival(row: dict, vllm: dict, impl: str) -> bool:
    same = all(row.get(name) == vllm[name] for name in ("gpu", "model"))
    return same and impl == "invariant"


def case_name(row: dict) -> str:
    """The case with its protocol and unit, as the table begins."""
    if "requests" in row:
        return (
            f"{row['requests']} requests of {row['prompt_len']} + {row['output_len']} tokens, "
            "all at once, s"
        )
    is_decode = step_of(row)[0] == "decode"
    return f"{row['case']}, ms" if is_decode else f"{row['case']}, {row['protocol']}, ms"


def by_case() -> dict[str, dict[bool, dict]]:
    """Rows of a case: vLLM by default (False), and batch-invariant (True)."""
    found: dict[str, dict[bool, dict]] = {}
    for row in vllm_rows():
        found.setdefault(case_name(row), {})[row["batch_invariant"]] = row
    return found


def headline_lines(limits_ms: dict[str, float]) -> list[str]:
    """The table of README: ours by default, theirs, and our share of the limit of a step."""

    def cells(name, default, invariant):
        ours, decimals = our_times(default)[""], default["decimals"]
        limit_ms = limits_ms.get(default.get("case", ""))
        return [
            name,
            f"**{ours:.{decimals}f}**" if ours else "",
            f"{default['time']:.{decimals}f}",
            f"{invariant['time']:.{decimals}f}",
            f"{limit_ms / ours:.2f}" if ours and limit_ms else "",
        ]

    found = by_case()
    if not found:
        return []
    vllm = f"vLLM {vllm_rows()[0]['vllm']}"
    header = ["", "detjax", vllm, f"{vllm}, batch-invariant", "our share of the limit"]
    return table(header, (cells(name, rows[False], rows[True]) for name, rows in found.items()))


def lines() -> list[str]:
    """The table, and what was compared; nothing without rows of vLLM."""
    found = vllm_rows()
    if not found:
        return []
    cases = by_case()

    def lines_of(case):
        default, invariant = cases[case][False], cases[case][True]
        decimals = default["decimals"]  # as many as were noted
        for special, ours in our_times(default).items():
            yield [
                f"{case}, ours with {special}" if special else case,
                f"{ours:.{decimals}f}" if ours else "",
                f"{default['time']:.{decimals}f}",
                f"{invariant['time']:.{decimals}f}",
                ratio(default["time"], ours),
                ratio(invariant["time"], ours),
            ]

    first = found[0]
    vllm = f"vLLM {first['vllm']}"
    header = ["", "detjax `invariant`", vllm, f"{vllm}, batch-invariant", "speed over vLLM",
              "over batch-invariant"]  # fmt: skip
    return [
        f"Beside {vllm}, by default and with `VLLM_BATCH_INVARIANT=1`; we measured it on an",
        f"{first['gpu']}, {model_name(first['model'])}, {first['attention']}, CUDA graphs, in",
        "runs of its own. Which statistic its decode steps are was not noted; ours are medians.",
        "A cell of ours is empty where no row follows the same protocol:",
        "",
        *table(header, (cells for case in cases for cells in lines_of(case))),
    ]
