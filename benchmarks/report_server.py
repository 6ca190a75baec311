# SPDX-License-Identifier: Apache-2.0
"""The server on GPUs, as docs/server.md tells it: loads at several rates, and what HTTP costs.

Rows are those of `benchmarks.serve_load` and `benchmarks.serve_cost`. Where canonical steps are the
quicker ones nothing is drafted in `dvr`: the text says so where no row has a rollback or a share of
drafts that was asked for.
"""

from benchmarks.report_rows import GPUS, model_name, rows, table

PERCENTILES = (50, 90, 99)
TIMES = (("first_token", "first token"), ("token", "each token"), ("end_to_end", "end to end"))


def section() -> list[str]:
    """Every GPU that has rows."""
    return [line for gpu in GPUS for line in (*_load(gpu), *_cost(gpu))][:-1]


def _load(gpu: str) -> list[str]:
    found = rows("serve_load", "serve_load", gpu)
    if not found:
        return []
    canonical, wrong = sum(r["canonical"] for r in found), sum(r["wrong"] for r in found)
    plain, other = sum(r["plain"] for r in found), sum(r["plain_different"] for r in found)
    lost = sum(r["lost"] + r["held"] for r in found)
    drafted = any(r["num_rollbacks"] or r.get("max_draft_fraction") for r in found)
    how = (
        "Drafts were verified."
        if drafted
        else "Deterministic requests decode by canonical steps (no drafts)."
    )
    found = sorted(found, key=lambda r: (r["rate_per_s"], r["deterministic_percent"]))

    def cells(row):
        times = (
            " / ".join(f"{row[f'{name}_p{p}_ms']:.3g}" for p in PERCENTILES)
            if name == "token"
            else " / ".join(f"{row[f'{name}_p{p}_ms']:.0f}" for p in PERCENTILES)
            for name, _ in TIMES
        )
        return [
            f"{row['rate_per_s']:g}", f"{row['deterministic_percent']:g} %", str(row["requests"]),
            *times, f"{row['output_tokens_per_s']:,.0f}", str(row["canonical"]), str(row["wrong"]),
        ]  # fmt: skip

    names = (f"{told}, p50 / p90 / p99, ms" for _, told in TIMES)
    first = found[0]
    return [
        f"{first['gpu']}, {model_name(first['model'])}, mode `{first['mode']}`, lengths of the "
        f"Azure conversation trace up to {first['max_len']:,} tokens,",
        f"Poisson arrivals over HTTP, all streamed. {how} Of {canonical:,} canonical answers "
        f"{wrong} differ from the answer alone,",
        f"of {plain:,} others {other:,}; {lost} lost.",
        "",
        *table(
            ["requests a second", "deterministic", "requests", *names, "tokens a second",
             "canonical answers", "different"],
            map(cells, found),
        ),
        "",
    ]  # fmt: skip


def _cost(gpu: str) -> list[str]:
    lines = []
    for row in rows("serve_cost", "serve_cost", gpu)[-1:]:
        if not row["same"]:
            raise ValueError(f"a row of serve_cost on {row['gpu']} has answers with other bits")
        lines += [
            f"{row['gpu']}, {model_name(row['model'])}, {row['batch']} requests at once, "
            f"{row['prompt_len']} + {row['output_len']} tokens: the engine alone",
            f"{row['alone_tokens_per_s']:,.0f} tokens a second; over HTTP "
            f"{row['whole_tokens_per_s']:,.0f} whole ({row['whole_cost_percent']:.1f} % less), "
            f"{row['streamed_tokens_per_s']:,.0f} streamed",
            f"({row['streamed_cost_percent']:.1f} % less); the same bits.",
            "",
        ]
    return lines
