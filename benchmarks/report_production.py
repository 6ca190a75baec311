# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.production` compared at the sizes that people run, as README tells it.

A row is a part of the suite: `gpu`, `gpu_bytes` (what JAX may use of the GPU), `free_bytes` (of it
beside the weights), `cache_bytes`, `num_pages`, `max_len`, `case`, `mode`, `longest_prompt`,
`most_rows`, `programs` (compiled for it), `compared_tokens`, and `different` (tokens whose id or
logprob has another bit). Mode `fast` makes no claim: it is the control.
"""

from benchmarks.report_rows import GPUS, rows, table

_BESIDES = {
    "loop": ", 8 tokens a launch",
    "adjusted": ", biases, penalties, masks; scored again",
    "yarn": ", YaRN",
}


def lines() -> list[str]:
    """A table for each GPU; nothing without rows."""
    found = [parts for gpu in GPUS if (parts := rows("production", "production", gpu))]
    lines = [line for parts in found for line in _of_gpu(parts)]
    return ["## At production sizes", "", *lines] if lines else []


def _of_gpu(parts: list[dict]) -> list[str]:
    largest = max(parts, key=lambda row: row["cache_bytes"])
    claims = sorted((r for r in parts if r["mode"] != "fast"), key=lambda row: row["max_len"])
    compared = sum(row["compared_tokens"] for row in claims)
    different = sum(row["different"] for row in claims)
    controls = [row for row in parts if row["mode"] == "fast"]
    control = "".join(
        f" The control, `fast`: {row['different']:,} of {row['compared_tokens']:,}."
        for row in controls
    )
    return [
        f"{largest['gpu']}, Llama-3.1-8B shapes: a cache of "
        f"{largest['cache_bytes'] / 1e9:.1f} of the {largest['free_bytes'] / 1e9:.1f} GB that",
        f"the weights leave ({largest['num_pages']:,} pages). Answers alone and in company, "
        "greedy and sampled, against the canonical choice at each position",
        "by another path on a small cache (`python -m benchmarks.production`): "
        f"{different:,} of {compared:,} tokens and logprobs different.{control}",
        "",
        *table(
            ["`max_len`", "mode", "cache", "longest prompt", "rows", "programs",
             "windows verified", "tokens compared", "different"],
            (
                [
                    f"{row['max_len']:,}",
                    f"`{row['mode']}`{_BESIDES.get(row['case'], '')}",
                    f"{row['cache_bytes'] / 1e9:.1f} GB",
                    f"{row['longest_prompt']:,}",
                    f"{row['most_rows']:,}",
                    str(row["programs"]),
                    f"{row['windows']:,}" if row["windows"] else "",
                    f"{row['compared_tokens']:,}",
                    f"{row['different']:,}",
                ]
                for row in claims
            ),
        ),
        "",
    ]  # fmt: skip
