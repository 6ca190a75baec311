# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.production` compared at the sizes that people run, as README tells it.

A row is a case of an engine: `gpu`, `gpu_bytes` (memory of the GPU), `cache_bytes`, `num_pages`,
`max_len`, `case`, `programs` (how many compiled programs the engine ran), `compared_tokens`, and
`different` (tokens whose id or logprob has another bit).
"""

from benchmarks.report_rows import GPUS, rows, table

ENGINE = ("gpu", "gpu_bytes", "cache_bytes", "num_pages", "max_len")


def lines() -> list[str]:
    """A line for each engine, all its cases together; nothing without rows."""
    engines: dict[tuple, list[dict]] = {}
    for gpu in GPUS:
        for row in rows("production", "production", gpu):
            engines.setdefault(tuple(row[name] for name in ENGINE), []).append(row)
    if not engines:
        return []

    def cells(engine):
        name, gpu_bytes, cache_bytes, num_pages, max_len = engine
        found = engines[engine]
        return [
            name,
            f"{cache_bytes / 1e9:.1f} of {gpu_bytes / 1e9:.1f}",
            f"{num_pages:,}",
            f"{max_len:,}",
            str(max(row["programs"] for row in found)),
            str(len(found)),
            *(f"{sum(row[x] for row in found):,}" for x in ("compared_tokens", "different")),
        ]

    return [
        "**At production sizes.** Llama-3.1-8B shapes, a cache that fills the GPU: decode against",
        "prefill of the same tokens, and alone against company, every token and logprob",
        "(`python -m benchmarks.production`):",
        "",
        *table(
            ["GPU", "cache of memory, GB", "pages", "`max_len`", "programs", "cases",
             "tokens compared", "different"],
            map(cells, engines),
        ),
    ]  # fmt: skip
