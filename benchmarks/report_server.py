# SPDX-License-Identifier: Apache-2.0
"""The server on GPUs, as docs/server.md tells it: loads at several rates, and what HTTP costs.

Rows are those of `benchmarks.serve_load` and `benchmarks.serve_cost`. Where canonical steps are the
quicker ones nothing is drafted in `dvr`: the text says so where no row has a rollback or a share of
drafts that was asked for.
"""

from benchmarks.report_rows import (
    DRAFTS,
    GPUS,
    NO_DRAFTS,
    Experiment,
    drafting,
    listed,
    model_name,
    rows,
    table,
)

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


def latency_rows() -> list[dict]:
    """Rows of the first GPU that has any, by rate and share."""
    for gpu in GPUS:
        if found := rows("serve_load", "serve_load", gpu):
            return sorted(found, key=lambda r: (r["rate_per_s"], r["deterministic_percent"]))
    return []


def latency_experiment() -> Experiment | None:
    """LLM-42's online experiment at the highest rate, share by share; None without rows."""
    found = latency_rows()
    if not found:
        return None
    most = [row for row in found if row["rate_per_s"] == found[-1]["rate_per_s"]]
    first = found[0]
    drafts = "drafts" if any(drafting(row) == DRAFTS for row in found) else NO_DRAFTS

    def times(name, p, scale, digits):
        values = (row[f"{name}_p{p}_ms"] * scale for row in most)
        return listed(f"{value:.{digits}f}" for value in values)

    shares = listed(f"{row['deterministic_percent']:g}" for row in most)
    wrong, canonical = (sum(row[name] for row in found) for name in ("wrong", "canonical"))
    of_one_share = [row for row in found if row["deterministic_percent"] == 100]
    counts = listed(str(row["requests"]) for row in of_one_share)
    rates = listed(f"{row['rate_per_s']:g}" for row in of_one_share)
    told = (
        f"{most[0]['rate_per_s']:g} requests a second, {shares} % deterministic (dvr, {drafts}): "
        f"P99 end to end {times('end_to_end', 99, 1e-3, 1)} s, first token P50 "
        f"{times('first_token', 50, 1, 1)} ms; {wrong} of {canonical} canonical answers differ in "
        "a bit"
    )
    return Experiment(
        question="How do latencies move with load and the share of deterministic requests?",
        paper="LLM-42 (arXiv:2601.17768), figure 11 and table 5, and its authors' data: at 18 "
        "requests a second P99 end to end is 17.3 s without determinism, 70.1 s with "
        "batch-invariant kernels; verified at 10, 50 and 100 % 20.4, 52.9 and 68.7 s; first token "
        "P50 29.7, 76.3, 31.8, 50.4 and 55.7 ms.",
        here=[told],
        setting=f"{model_name(first['model'])}, {first['gpu']}, over HTTP, lengths of the Azure "
        f"trace, {counts} requests at {rates} a second (the paper: ShareGPT, 4,096 requests at 12 "
        "to 18)",
        command="benchmarks.serve_load",
        links="[figure](docs/figures/latency.svg), [every time](docs/server.md#on-a-gpu)",
    )


def draw_latency(axes) -> None:
    """P99 end to end over the rate, a line for each share."""
    found = latency_rows()
    for share in sorted({row["deterministic_percent"] for row in found}):
        points = [(r["rate_per_s"], r["end_to_end_p99_ms"] / 1e3) for r in found
                  if r["deterministic_percent"] == share]  # fmt: skip
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{share:g} % deterministic")
    axes.set_ylim(bottom=0)


def _cost(gpu: str) -> list[str]:
    found = rows("serve_cost", "serve_cost", gpu)
    if not found:
        return []
    if not all(row["same"] for row in found):
        raise ValueError(f"a row of serve_cost on {found[-1]['gpu']} has answers with other bits")
    last = found[-1]
    runs = [row for row in found if row["commit"] == last["commit"]]

    def between(name: str) -> str:
        """Of the runs of the newest build, the least and the most."""
        values = sorted(row[name] for row in runs)
        return " to ".join(dict.fromkeys(f"{value:,.1f}" for value in (values[0], values[-1])))

    return [
        f"{last['gpu']}, {model_name(last['model'])}, {last['batch']} requests at once, "
        f"{last['prompt_len']} + {last['output_len']} tokens, {len(runs)} run(s):",
        f"the engine alone gives {between('alone_tokens_per_s')} tokens a second; over HTTP "
        f"{between('whole_cost_percent')} % less with answers in one piece,",
        f"{between('streamed_cost_percent')} % less streamed; the same bits.",
        "",
    ]
