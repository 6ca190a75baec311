# SPDX-License-Identifier: Apache-2.0
"""How long a verified window should be, and how many are verified at once."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from benchmarks.reproduce.experiment import Experiment, Lab, Part, Result, Row
from benchmarks.reproduce.loads import (
    WINDOW,
    Server,
    large_server,
    load_servers,
    load_setting,
    num_different,
    piece_name,
    quantiles_ms,
    window_facts,
)
from benchmarks.reproduce.shares import like
from benchmarks.serving import PlannedRequest, TimedAnswer
from detjax.engine.engine import Engine
from detjax.engine.running.device_arrays import BY_ROW, Slots, empty_pages, sampling_shape
from detjax.engine.running.launch_operands import VerifyOperands
from detjax.engine.running.program_key import ProgramKey
from detjax.plots import COLOURS, REFERENCE, finish
from detjax.testing.programs import launches

PAPER_MS = {16: 12.19, 32: 12.20, 64: 12.23, 128: 12.12, 256: 13.43, 512: 21.36}
"""Milliseconds of a forward pass of so many tokens: LLM-42's 8B on an H100."""

PAPER_CELLS = {
    (16, 1): (615.9, 3.44), (16, 2): (302.1, 3.31), (16, 4): (97.8, 2.97), (16, 8): (36.9, 3.11),
    (16, 16): (34.3, 3.09), (16, 32): (46.4, 2.82), (32, 1): (316.1, 6.81), (32, 2): (113.2, 6.03),
    (32, 4): (38.6, 6.47), (32, 8): (34.2, 6.49), (32, 16): (45.9, 6.40), (64, 1): (155.7, 12.42),
    (64, 2): (44.2, 13.86), (64, 4): (35.5, 14.09), (64, 8): (46.2, 13.83), (128, 1): (56.2, 24.92),
    (128, 2): (43.1, 28.96), (128, 4): (54.0, 27.85), (256, 1): (65.6, 46.41),
    (256, 2): (65.3, 42.28), (512, 1): (99.9, 42.33),
}  # fmt: skip
"""LLM-42's P99 latency in seconds and recomputed tokens in percent, by (window, group)."""

FULL = {
    64: ((1, 8), 30), 16: ((1, 8, 32), 60), 256: ((1, 2), 50), 32: ((1, 16), 50), 512: ((1,), 40),
    128: ((1, 4), 50),
}  # fmt: skip
"""Groups and seconds on a GPU of each window, most wanted first. The paper has all up to 512
tokens a verification; the programs of each cell have to be compiled here."""

SMALL = {8: ((1, 2), 60)}
RATE_PER_S, REQUESTS = 12.0, 64
"""The paper's rate; it has 4,096 requests."""


TRAINED = {64: ((1, 8), 40), 16: ((1, 8), 40), 256: ((1,), 30), 32: ((1, 8), 40)}
"""Of a trained model, whose rate is higher, as it is smaller."""
TRAINED_RATE_PER_S = 60.0


def _planned(lab: Lab, *, is_large: bool) -> list[PlannedRequest]:
    """Poisson arrivals of ShareGPT-like lengths, all deterministic."""
    count, rate = lab.pick((6, 50.0), (REQUESTS, RATE_PER_S if is_large else TRAINED_RATE_PER_S))
    rng = np.random.default_rng(1)
    at_s = np.cumsum(rng.exponential(1 / rate, count))
    lengths = like(
        count, 200, 160, most=lab.pick((24, 40), (1024, 512) if is_large else (512, 448))
    )
    return [
        PlannedRequest(at_s=float(at), prompt_len=p, output_len=g, is_deterministic=True)
        for at, (p, g) in zip(at_s, lengths, strict=True)
    ]


def _verify_ms(server: Server, engine: Engine, key: ProgramKey, context: int) -> float:
    """A verification of full windows behind `context` tokens, launched back to back.

    Median of five runs of eight launches.
    """
    model, programs = server.model, engine.programs
    program = programs.get(key, model.params)
    rng = np.random.default_rng(3)
    vocab, slots, length = model.config.vocab_size, programs.num_slots, key.length
    page_len = model.profile.attention_block
    pages_of_row = -(-(context + length) // page_len)
    tables = np.zeros((key.rows, key.table_len), np.int32)
    used = np.arange(key.rows * pages_of_row) % programs.num_pages
    tables[:, :pages_of_row] = used.reshape(key.rows, pages_of_row)
    operands = VerifyOperands(
        slot=np.arange(key.rows, dtype=np.int32),
        num_drafts=np.full(key.rows, length - 1, np.int32),
        is_given=np.zeros(key.rows, np.int32),
        page_table=tables,
        token_ids=np.zeros((key.rows, length), np.int32),
    )
    state = (
        Slots.without_drafts(
            rng.integers(0, vocab, (slots, length)).astype(np.int32),
            np.full(slots, context, np.int32),
        ),
        jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), sampling_shape(model, slots)),
        operands.pack(),
    )
    on_device = jax.device_put(state, NamedSharding(model.mesh, BY_ROW))
    pages, times = empty_pages(model, programs.num_pages), []
    for _ in range(6):
        of_launches = jax.block_until_ready(launches(on_device, 8))
        begin_s = time.perf_counter()
        for arguments in of_launches:
            pages, _, out = program(model.params, model.rope_tables, pages, *arguments)
        jax.block_until_ready((pages, out))
        times.append((time.perf_counter() - begin_s) / 8 * 1e3)
    return statistics.median(times[1:])


def _rows(
    lab: Lab, window: int, groups: Sequence[int], make_server: Callable[[Lab], Server]
) -> list[Row]:
    """The cost of a verification by group, then the load in each group.

    The default window also has the canonical answers of `invariant`.
    """
    is_large = make_server is large_server
    server, planned = make_server(lab), _planned(lab, is_large=is_large)
    of_model = server.facts
    others = tuple(group for group in groups if group < max(groups))
    engine = server.engine("dvr", window=window, group=max(groups), other_groups=others)
    context = lab.pick(40, 512)
    rows = []
    for key in sorted((k for k in engine.programs if k.kind == "verify"), key=lambda k: k.rows):
        if key.rows not in groups:
            continue
        tokens = key.rows * window
        ms = _verify_ms(server, engine, key, context)
        rows.append(
            {
                **of_model, "what": "verification", "window": window, "group": key.rows,
                "context": context, "ms": ms, "ms_per_token": ms / tokens,
                "paper_ms": PAPER_MS.get(tokens) if is_large else None,
            }
        )  # fmt: skip
    canonical: list[TimedAnswer] = []
    modes = ["invariant"] if window in (WINDOW, *SMALL) else []
    for mode, group in [*((m, 0) for m in modes), *(("dvr", g) for g in groups)]:
        del engine  # its cache leaves room for the next one
        engine = server.engine(mode, window=window, group=group or max(groups))
        told = server.serve(engine, planned)
        canonical = canonical or told
        paper_s, paper_percent = PAPER_CELLS.get((window, group), (None, None))
        paper_s = paper_s if is_large else None  # the paper's model has that one's size
        end_s = max(one.releases_s[-1] for one in told)
        rows.append(
            {
                **of_model, "what": "load", "mode": mode,
                "window": window if group else 0, "group": group,
                "requests": len(planned), "digests": [one.digest[:12] for one in told],
                **quantiles_ms([one.first_token_s for one in told], "first_token"),
                **quantiles_ms([one.end_to_end_s for one in told], "end_to_end"),
                "tokens_per_s": sum(one.num_tokens for one in told) / end_s,
                "wrong": num_different(told, canonical, claimed=True),
                "paper_p99_s": paper_s, "paper_recomputed_percent": paper_percent,
                **window_facts(told),
            }
        )  # fmt: skip
    return rows


def num_unlike(loads: Sequence[Row]) -> int:
    """Requests whose answers differ between any two settings of one build."""
    by_build: dict[str, list[list[str]]] = {}
    for row in loads:
        by_build.setdefault(row.get("fingerprint", ""), []).append(row["digests"])
    of_builds = [zip(*answers, strict=True) for answers in by_build.values()]
    differs = [[len(set(of_one)) > 1 for of_one in answers] for answers in of_builds]
    return sum(any(of_one) for of_one in zip(*differs, strict=True))


LARGE_MODEL = "llama3_8b"


def _of_models(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by model; the first ones did not say that theirs was the large one."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.get("model", LARGE_MODEL), []).append(row)
    return found


def findings(rows: Sequence[Row]) -> list[str]:
    """For each model what a verification costs, the best cell, and that no cell changes a bit."""
    told = []
    for model, own in _of_models(rows).items():
        name = "" if model == LARGE_MODEL else f"{model}: "
        told += [f"{name}{sentence}" for sentence in _findings_of_model(own)]
    return told


def _findings_of_model(rows: Sequence[Row]) -> list[str]:
    told = []
    costs = {row["window"]: row["ms"] for row in rows
             if row["what"] == "verification" and row["group"] == 1}  # fmt: skip
    if costs:
        listed = ", ".join(f"{w}: {costs[w]:.1f}" for w in sorted(costs))
        told.append(f"ms to verify one window of so many tokens: {listed}")
    every = [row for row in rows if row["what"] == "load"]
    loads = [row for row in every if row["mode"] == "dvr"]
    if loads:
        best, worst = (f(loads, key=lambda r: r["end_to_end_p99_ms"]) for f in (min, max))

        def cell(row):
            paper = f" (paper {row['paper_p99_s']:.0f} s)" if row["paper_p99_s"] else ""
            p99_s = row["end_to_end_p99_ms"] / 1e3
            return f"{p99_s:.1f} s at {row['window']} x {row['group']}{paper}"

        for row in every:
            if row["mode"] == "invariant":
                told.append(f"P99 of invariant {row['end_to_end_p99_ms'] / 1e3:.1f} s")
        told.append(f"P99 latency under load from {cell(best)} to {cell(worst)}")
        listed = ", ".join(
            f"{w}: {max(r['recomputed_percent'] for r in loads if r['window'] == w):.2f}"
            for w in sorted({row["window"] for row in loads})
        )
        told.append(f"percent of tokens computed again by window, at most: {listed}")
        told.append(
            f"{num_unlike(every)} of {loads[0]['requests']} answers differ between "
            f"{len(every)} settings"
        )
    return told


def _cell_name(row: Row) -> str:
    model = row.get("model", LARGE_MODEL)
    cell = f"{row['window']} x {row['group']}"
    return cell if model == LARGE_MODEL else f"{model}, {cell}"


def plot(figure, rows: Sequence[Row]) -> None:
    """Cost of a verification by tokens; latency and recomputed tokens of the load by cell."""
    left, middle, right = figure.subplots(1, 3)
    for (model, own), marker in zip(_of_models(rows).items(), "os^D", strict=False):
        costs = sorted((r["group"] * r["window"], r["ms"]) for r in own if r["what"] != "load")
        if costs:
            style = {"marker": marker, "linestyle": "", "color": COLOURS["dvr"]}
            left.plot(*zip(*costs, strict=True), label=f"dvr, {model}", **style)
    left.plot(
        *zip(*PAPER_MS.items(), strict=True), "x--", color=REFERENCE,
        label="LLM-42, forward pass of 8B",
    )  # fmt: skip
    left.set(xscale="log", ylim=(0, 1.4 * max(PAPER_MS.values())))
    left.set_xticks(list(PAPER_MS), map(str, PAPER_MS))
    left.set_xticks([], minor=True)
    finish(left, title="Cost of a verification", x="tokens", y="ms")
    loads = [row for row in rows if row["what"] == "load" and row["mode"] == "dvr"]
    models = list(_of_models(loads))
    loads.sort(
        key=lambda row: (models.index(row.get("model", LARGE_MODEL)), row["window"], row["group"])
    )
    names = [_cell_name(row) for row in loads]
    latencies = [row["end_to_end_p99_ms"] / 1e3 for row in loads]
    middle.barh(names, latencies, color=COLOURS["dvr"])
    finish(middle, title="Latency of the load", x="P99 end to end (s)", y="window x group",
           legend=False)  # fmt: skip
    right.barh(names, [row["recomputed_percent"] for row in loads], color=COLOURS["dvr"])
    paper = [(row["paper_recomputed_percent"], name) for row, name in zip(loads, names, strict=True)
             if row["paper_recomputed_percent"]]  # fmt: skip
    if paper:
        right.plot(*zip(*paper, strict=True), "D", color=REFERENCE, label="LLM-42")
    finish(right, title="Tokens computed again", x="share of tokens (%)", y="", legend=bool(paper))


def result(rows: Sequence[Row], setting: str) -> Result:
    """Tables and sentences of the rows."""
    return Result(
        title="Windows and groups: cost of a verification, and a load of all deterministic "
        "requests",
        setting=setting,
        columns=(
            "model", "what", "mode", "window", "group", "ms", "paper_ms", "first_token_p50_ms",
            "end_to_end_p50_ms", "end_to_end_p99_ms", "paper_p99_s", "rollbacks",
            "recomputed_percent", "paper_recomputed_percent", "wrong",
        ),
        rows=rows,
        findings=findings(rows),
        plot=lambda figure: plot(figure, rows),
    )  # fmt: skip


def parts(lab: Lab) -> list[Part]:
    """A piece for each model and window, as its programs are compiled for it alone."""
    large = lab.pick(SMALL, FULL)
    return [
        Part(
            name=piece_name(f"window {window}", make),
            seconds=seconds,
            run=lambda window=window, groups=groups, make=make: _rows(lab, window, groups, make),
        )
        for make in load_servers(lab)
        for window, (groups, seconds) in (large if make is large_server else TRAINED).items()
    ]


EXPERIMENT = Experiment(
    question="How long should a verified window be, and how many are verified at once?",
    paper="LLM-42 (arXiv:2601.17768), figures 9 and 12, and its authors' data: a pass over 16 to "
    "128 tokens takes 12.2 ms, over 512 21.4 ms; at 12 requests/s P99 is 34 s at 16 x 16 and 616 s "
    "at 16 x 1; 3 % of the tokens are computed again with windows of 16, 46 % with 256.",
    parts=parts,
    result=result,
    setting=load_setting,
)
