# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.production` compared at the sizes that people run, as README tells it.

A row is a part of the suite: `gpu`, `gpu_bytes` (what JAX may use of the GPU), `free_bytes` (of it
beside the weights), `cache_bytes`, `num_pages`, `max_len`, `case`, `mode`, `longest_prompt`,
`most_rows`, `programs` (compiled for it), `compared_tokens`, and `different` (tokens whose id or
logprob has another bit). Mode `fast` makes no claim: it is the control.
"""

from benchmarks.report_rows import GPUS, rows, table

CACHE = ("gpu", "cache_bytes", "num_pages")


def lines() -> list[str]:
    """A table for each GPU and cache; nothing without rows."""
    caches: dict[tuple, list[dict]] = {}
    for gpu in GPUS:
        for row in rows("production", "production", gpu):
            caches.setdefault(tuple(row[name] for name in CACHE), []).append(row)
    return [line for cache, parts in caches.items() for line in _of_cache(cache, parts)]


def _of_cache(cache: tuple, parts: list[dict]) -> list[str]:
    gpu, cache_bytes, num_pages = cache
    free_bytes = max(row["free_bytes"] for row in parts)
    claims = sorted((r for r in parts if r["mode"] != "fast"), key=lambda row: row["max_len"])
    compared = sum(row["compared_tokens"] for row in claims)
    different = sum(row["different"] for row in claims)
    controls = [row for row in parts if row["mode"] == "fast"]
    control = "".join(
        f" The control, `fast`: {row['different']:,} of {row['compared_tokens']:,}."
        for row in controls
    )
    return [
        f"**At production sizes**, {gpu}, Llama-3.1-8B shapes: a cache of {cache_bytes / 1e9:.1f} "
        f"of the {free_bytes / 1e9:.1f} GB that",
        f"the weights leave ({num_pages:,} pages). Answers alone and in company, greedy and "
        "sampled, against the canonical choice at each position",
        "by another path on a small cache (`python -m benchmarks.production`): "
        f"{different:,} of {compared:,} tokens and logprobs different.{control}",
        "",
        *table(
            ["`max_len`", "mode", "longest prompt", "rows", "programs", "windows verified",
             "tokens compared", "different"],
            (
                [
                    f"{row['max_len']:,}",
                    f"`{row['mode']}`" + (", 8 tokens a launch" if row["case"] == "loop" else ""),
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
