# SPDX-License-Identifier: Apache-2.0
"""Whole engines beside each other: one protocol, one machine, one day.

The rows are the newest `benchmarks/results/<gpu>/<date>-peers.jsonl`. They were measured by hand
with one protocol, which docs/benchmarks.md states. No other row stands in these tables.
"""

import datetime
from collections.abc import Callable

from benchmarks.report_rows import rows, table

OURS = "detjax invariant bfloat16"
DEFAULT, INVARIANT = "vLLM default bfloat16", "vLLM batch-invariant bfloat16"
SHORT = (OURS, DEFAULT, INVARIANT)
"""Engines of README's table: the same weights in the same number format."""

PROTOCOL = (
    "Decode is (time of 130 tokens less that of 2) / 128, through each engine's own `generate`, "
    "after prompts of random tokens. Prefill is the least of three calls, one after another. "
    "256 slots, no prefix cache, random weights."
)


def engines() -> dict[str, dict]:
    """The row of each engine that ran through its own Python interface, by name."""
    return {row["engine"]: row for row in rows("peers", "engine")}


CASES: tuple[tuple[str, Callable[[dict], float], int], ...] = (
    ("decode, batch 1, ms", lambda row: row["decode_ms"]["1"], 2),
    ("decode, batch 8, ms", lambda row: row["decode_ms"]["8"], 2),
    ("decode, batch 64, ms", lambda row: row["decode_ms"]["64"], 2),
    ("decode, batch 256, ms", lambda row: row["decode_ms"]["256"], 2),
    ("prefill of 4000 tokens, ms", lambda row: row["prefill_4000_ms"], 1),
    ("512 requests of 512 + 128 tokens, s", lambda row: row["offline_512x512_128_s"], 1),
)


def engine_table(names: tuple[str, ...]) -> list[str]:
    """A line for each case, a column for each engine."""
    found = engines()
    shown = [found[name] for name in names if name in found]
    if not shown:
        return []
    header = ["", *(name_of(row) for row in shown)]
    cells = [[case, *(f"{read(row):.{n}f}" for row in shown)] for case, read, n in CASES]
    return table(header, cells)


def name_of(row: dict) -> str:
    """The engine with its version, as a column is called."""
    rest = row["engine"].partition(" ")[2].removesuffix(" bfloat16")
    if row["engine"] == OURS:
        return "detjax"
    return f"vLLM {row['version']}" + (f", {rest}" if rest != "default" else "")


def readme_lines() -> list[str]:
    """README's table of speed, and what it was measured on."""
    found = engines()
    if OURS not in found:
        return []
    ours = found[OURS]
    day = datetime.date.fromisoformat(ours["date"])
    return [
        f"Llama-3.1-8B shapes, bfloat16, whole engines, one {ours['gpu']} each of one host, "
        f"{day.day} {day:%B %Y}, detjax at commit {ours['version']}:",
        "",
        *engine_table(SHORT),
    ]


def lines() -> list[str]:
    """Every engine in the same run, and what clients saw over HTTP."""
    found = engines()
    if not found:
        return []
    return [
        "### Compared with vLLM",
        "",
        f"{next(iter(found.values()))['gpu']}, Llama-3.1-8B shapes, one engine a GPU, GPUs of one "
        "host, within five minutes.",
        PROTOCOL,
        "vLLM ran with CUDA graphs. Batch-invariant is `VLLM_BATCH_INVARIANT=1`.",
        "",
        *engine_table(tuple(found)),
        "",
        *http_lines(),
    ]


def http_lines() -> list[str]:
    """Clients that ask at once over HTTP."""
    found = rows("peers", "http")
    if not found:
        return []
    cells = [
        [name_of(row), str(row["clients"]), f"{row['tokens_per_s']:,}", str(row["ttft_p50_ms"]),
         f"{row['tpot_p50_ms']:.2f}"]
        for row in found
    ]  # fmt: skip
    return [
        "Over HTTP, N clients of plain sockets send a request at once, each for 200 streamed "
        "tokens after 1000 random tokens.",
        "detjax ran on another host than vLLM, 20 minutes before, so differences below 2 % mean "
        "nothing.",
        "",
        *table(["server", "clients", "tokens/s", "TTFT p50, ms", "TPOT p50, ms"], cells),
    ]
