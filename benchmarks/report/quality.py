# SPDX-License-Identifier: Apache-2.0
"""What quantisation costs in quality: docs/quantization.md, from rows of `benchmarks.quality`.

The rows are of a CPU: they are sums of logprobs, not times.
"""

import json

from benchmarks.report import rows as committed
from benchmarks.report.rows import Format, cell, table
from detjax.defaults import AUTO, FP8_CACHE

MADE_WITH = {"auto": "bfloat16", "w8a8": "8 bits (`--quantized-weights w8a8`)"}

CACHES = {AUTO: "bfloat16", FP8_CACHE: "8 bits (`--kv-cache-dtype fp8`)"}


def _scheme(row: dict) -> str:
    groups = f", groups of {row['group_size']}" if row["group_size"] else ""
    return f"`{row['scheme']}`{groups}"


COLUMNS: dict[str, Format] = {
    "scheme": _scheme,
    "activations": lambda row: MADE_WITH[row["weights"]],
    "cache": lambda row: CACHES[row["kv_cache_dtype"]],
    "nats a token": "{nats_per_token:.4f}",
    "bits a byte": "{bits_per_byte:.4f}",
    "worse by, nats a token": "{difference_nats:.4f} ± {difference_se:.4f}",
    "same greedy token": "{same_greedy:.1%}",
}


def section() -> list[str]:
    """A row for each scheme of the newest run; nothing without one."""
    files = sorted((committed.RESULTS / "cpu").glob("*-quality.jsonl"))
    if not files:
        return []
    found = [json.loads(line) for line in files[-1].read_text().splitlines()]
    first = found[0]
    return [
        f"`{first['model']}`, {first['windows']} windows of {first['length']} tokens "
        f"({first['bytes']:,} bytes) of `{first['text']}`, on a {first['gpu'].upper()}, "
        f"{first['date']}, commit {first['commit']}:",
        "",
        *table(COLUMNS, [[cell(form, row) for form in COLUMNS.values()] for row in found]),
    ]
