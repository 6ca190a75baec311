# SPDX-License-Identifier: Apache-2.0
"""The serving engine under load: the equality of answers, and what serving costs.

python -m benchmarks.serving stress --model bundled --num 20000
python -m benchmarks.serving overhead --model llama3_8b --batch 64
python -m benchmarks.serving offline --model llama3_8b --modes invariant dvr fast
python -m benchmarks.serving offline --model llama3_8b --modes invariant --defaults
python -m benchmarks.serving replay --model llama3_8b --trace azure_conv.csv --rates 2 4 8
python -m benchmarks.serving shares --model llama3_8b --shares 2 5 10 20 50 100
python -m benchmarks.serving windows --model bundled --windows 8 16 32 64 --groups 1 4 8 16
python -m benchmarks.serving narrow --model novels-500m --text novels.txt.gz --batches 1 4 16

Weights of `llama3_8b` and `tiny` are random; any other name is a folder. Prompts are random tokens,
or pieces of `--text` for a model with a tokenizer. `stress` compares every token and logprob bit
with the answer at batch size 1, and fails if one differs.
"""

import argparse
import csv
import dataclasses
import gc
import gzip
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

from benchmarks.common import Rows, environment
from benchmarks.step import MODELS

# isort: split
import jax
import numpy as np
import rich.console
import rich.table

from detjax.defaults import GPU_MEMORY_UTILIZATION
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.heap import frozen_heap
from detjax.engine.outputs.request_output import NO_WINDOWS, WindowCounts
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages
from detjax.engine.running.programs import ProgramCache
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel, load_model, random_model
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.sizing import choose_sizes
from detjax.testing.load import LoadReport, lone_answers, make_load, run_load
from detjax.testing.programs import launches, operands_for, plain_key, programs_for


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """A request of a load: when it comes, and its lengths."""

    at_s: float
    prompt_len: int
    output_len: int
    is_deterministic: bool


@dataclass(kw_only=True, slots=True)
class TimedAnswer:
    """When a request was asked and answered, and with which bits."""

    plan: PlannedRequest
    releases_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.float32] = field(default_factory=list)
    windows: WindowCounts = NO_WINDOWS

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def digest(self) -> str:
        """Of all tokens and the bits of their logprobs."""
        arrays = np.asarray(self.token_ids, np.int32), np.asarray(self.logprobs, np.float32)
        return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()

    @property
    def first_token_s(self) -> float:
        return self.releases_s[0] - self.plan.at_s

    @property
    def end_to_end_s(self) -> float:
        return self.releases_s[-1] - self.plan.at_s

    @property
    def token_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.releases_s[-1] - self.releases_s[0]) / max(1, self.num_tokens - 1)


def open_model(name: str, backend: Backend) -> LoadedModel:
    """A configuration with random weights, or the model of a folder."""
    given = {
        "profile": NumericsProfile(),
        "mesh": make_mesh(1, 1, platform=backend.platform),
        "backend": backend,
    }
    if name in MODELS:
        return random_model(MODELS[name], seed=0, **given)
    return load_model(str(folder_of(name)), **given)


def folder_of(name: str) -> Path:
    """Where a model lies that is not random."""
    return bundled_model_path() if name == "bundled" else Path(name)


def read_text(path: str, folder: Path, *, num_bytes: int = 1_000_000) -> list[int]:
    """Tokens of the beginning of a text file, which may be gzipped."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        text = file.read(num_bytes).decode(errors="ignore")
    return Tokenizer.from_folder(folder).encode(text)


class Bench:
    """A model and the programs its engines share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.backend = Backend(args.backend)
        # The name alone: where a folder lies on this machine says nothing to a reader of the rows.
        card = environment(self.backend) | {"model": Path(args.model).resolve().name}
        self.rows = Rows(card, args.out)
        self.model = open_model(args.model, self.backend)
        self._programs: dict[object, ProgramCache] = {}
        # The free memory that they follow is that before the first engine.
        self._default_sizes: EngineConfig | None = None
        self._text = read_text(args.text, folder_of(args.model)) if args.text else []

    def engine(self, mode: str, **changes) -> Engine:
        """An engine of the command line's sizes, everything compiled."""
        gc.collect()  # the cache of the engine before
        args = self.args
        if args.defaults:
            return self._engine_of_defaults(mode, **changes)
        sizes = {
            "batch_size": args.batch_size,
            "decode_batches": tuple(b for b in args.decode_batches if b < args.batch_size),
            "prefill_chunk": args.prefill_chunk,
            "prefill_shapes": tuple((r, args.prefill_chunk) for r in args.prefill_rows if r > 1),
            "max_prefill_streak": args.max_prefill_streak,
            "max_len": args.max_len,
            "num_pages": args.num_pages,
            "verify_rows": args.verify_rows,
            "verify_window": args.verify_window,
            "verify_batches": tuple(b for b in args.verify_batches if b < args.verify_rows),
            "max_draft_fraction": args.max_draft_fraction,
            "draft_weights": args.draft_weights if mode == "dvr" else "full",
            "has_prefix_cache": False,
        }
        config = EngineConfig(mode=mode, **(sizes | changes))
        key = (config.batch_size, config.max_len, config.num_pages, config.verify_window)
        engine = Engine(self.model, config, programs=self._programs.get(key))
        self._programs[key] = engine.programs
        engine.compile()
        return engine

    @property
    def max_prefill_streak(self) -> int:
        """Of the engines that were made."""
        sizes = self._default_sizes
        return self.args.max_prefill_streak if sizes is None else sizes.max_prefill_streak

    def _engine_of_defaults(self, mode: str, **changes) -> Engine:
        """An engine as `LLM` makes it, for every length of the model; compiled as it runs."""
        asked = {"mode": mode, **changes}
        if self._default_sizes is None:
            self._default_sizes = choose_sizes(
                self.model, asked, gpu_memory_utilization=GPU_MEMORY_UTILIZATION
            )
        config = dataclasses.replace(self._default_sizes, **asked)
        engine = Engine(self.model, config, programs=self._programs.get("defaults"))
        self._programs["defaults"] = engine.programs
        return engine

    def prompt(self, rng: np.random.Generator, length: int) -> list[int]:
        """A piece of the text, or random tokens."""
        if self._text:
            start = int(rng.integers(len(self._text) - length))
            return self._text[start : start + length]
        return rng.integers(0, self.model.config.vocab_size, length).tolist()


class Prompts(Protocol):
    """What prompts come from."""

    def prompt(self, rng: np.random.Generator, length: int) -> list[int]:
        """Tokens of a prompt of about this length."""
        ...


@frozen_heap()  # as `Engine.generate` and the server do
def serve(
    source: Prompts,
    engine: Engine,
    planned: Sequence[PlannedRequest],
    *,
    seed: int = 0,
    temperature: float = 0.8,
    ignore_eos: bool = False,
) -> list[TimedAnswer]:
    """Ask each in its time and step until all is answered."""
    rng = np.random.default_rng(seed)
    prompts = [source.prompt(rng, plan.prompt_len) for plan in planned]
    told: dict[int, TimedAnswer] = {}
    begin_s, left = time.perf_counter(), 0
    while left < len(planned) or engine.has_work:
        now_s = time.perf_counter() - begin_s
        while left < len(planned) and planned[left].at_s <= now_s:
            plan = planned[left]
            sampling = SamplingParams(
                max_tokens=plan.output_len,
                temperature=temperature,
                seed=left,
                ignore_eos=ignore_eos,
            )
            request_id = engine.add_request(
                prompts[left], sampling, is_deterministic=plan.is_deterministic
            )
            told[request_id] = TimedAnswer(plan=plan)
            left += 1
        if not engine.has_work:
            time.sleep(max(0.0, planned[left].at_s - (time.perf_counter() - begin_s)))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - begin_s
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            entry = told[output.request_id]
            entry.token_ids += output.token_ids
            entry.logprobs += output.logprobs
            entry.windows = output.windows
            entry.releases_s.append(now_s)
    return list(told.values())


def summary(told: Sequence[TimedAnswer]) -> dict[str, float]:
    """Quantiles over requests, and throughput."""
    facts = {}
    for name in ("first_token_s", "token_s", "end_to_end_s"):
        values = [getattr(t, name) for t in told]
        for share in (50, 90, 99):
            facts[f"{name[:-2]}_p{share}_ms"] = float(np.percentile(values, share)) * 1e3
    gaps = np.concatenate([np.diff(t.releases_s) for t in told] or [[]])
    if len(gaps):
        facts["between_releases_p99_ms"] = float(np.percentile(gaps, 99)) * 1e3
    end_s = max(t.releases_s[-1] for t in told)
    facts["wall_s"] = end_s
    facts["output_tokens_per_s"] = sum(t.num_tokens for t in told) / end_s
    facts["tokens_per_s"] = sum(t.num_tokens + t.plan.prompt_len for t in told) / end_s
    return facts


def counted(engine: Engine) -> dict[str, float]:
    """What the engine counted that explains a time."""
    numbers = engine.stats().numbers()
    names = (
        "num_steps", "plan_s", "launch_s", "wait_s", "dispatch_s", "commit_s", "num_preempted",
        "verify_launches", "windows_per_verify", "draft_tokens", "acceptance", "num_rollbacks",
        "surplus_tokens",
    )  # fmt: skip
    always = "verify_launches", "num_rollbacks"  # so that a row says that nothing was drafted
    return {name: numbers[name] for name in names if numbers[name] or name in always}


def measured(
    bench: Bench, mode: str, planned: Sequence[PlannedRequest], **sizes
) -> tuple[list[TimedAnswer], dict[str, float]]:
    """Serve on a new engine `--repeats` times: the run of median wall time, and its numbers."""
    runs: list[tuple[list[TimedAnswer], dict[str, float]]] = []
    for _ in range(bench.args.repeats):
        engine = bench.engine(mode, **sizes)
        told = serve(bench, engine, planned)
        runs.append((told, {**summary(told), **counted(engine), "repeats": bench.args.repeats}))
        del engine  # its cache leaves room for the next one
    runs.sort(key=lambda run: run[1]["wall_s"])
    return runs[len(runs) // 2]


def stress(bench: Bench) -> bool:
    """Every deterministic answer under load equals the one at batch size 1."""
    args = bench.args
    vocab = bench.model.config.vocab_size
    longest = args.longest_prompt or args.max_len - 48
    questions = make_load(
        args.questions, seed=3, vocab_size=vocab, longest_prompt=longest,
        most_tokens=args.most_tokens, long_every=args.long_every,
    )  # fmt: skip
    begin_s = time.perf_counter()
    expected = lone_answers(bench.model, questions, max_len=args.max_len)
    bench.rows.keep(
        subject="stress_reference", samples=sum(map(len, expected)),
        seconds=time.perf_counter() - begin_s,
    )  # fmt: skip
    good = True
    table_len = -(-args.max_len // 128)
    tight = args.num_pages or args.batch_size * table_len // 3
    loads = (
        ("dvr", "full", 0.3),
        ("dvr", "int8", 0.2),
        ("invariant", "full", 0.4),
        ("fast", "full", 0.1),
    )
    for i, (mode, weights, share) in enumerate(loads):
        engine = bench.engine(
            mode, num_pages=tight, has_prefix_cache=True, prefill_shapes=((4, 64),),
            prefill_chunk=128, draft_weights=weights, max_draft_fraction=1.0,
        )  # fmt: skip
        begin_s, report = time.perf_counter(), LoadReport()
        until_s = begin_s + args.seconds * share
        while report.num_requests < args.num * share and time.perf_counter() < until_s:
            part = run_load(
                engine, questions, expected, num_requests=min(500, args.num),
                seed=100 * i + report.num_requests, plain_share=1.0 if mode == "fast" else 0.3,
                max_waiting=2 * args.batch_size,
            )  # fmt: skip
            _add(report, part)
        stats = engine.stats()
        held = stats.num_pages_held
        same = report.num_requests > 0 and not (report.wrong or report.lost or held)
        good = good and same
        bench.rows.keep(
            subject="stress", mode=mode, draft_weights=weights if mode == "dvr" else "", same=same,
            num_pages=tight, requests=report.num_requests,
            samples=report.num_sequences, cancelled=report.num_cancelled, plain=report.num_plain,
            plain_different=report.num_plain_different, wrong=len(report.wrong),
            lost=len(report.lost), pages_held=held, preempted=stats.num_preempted,
            prefix_tokens=stats.prefix_tokens, rollbacks=stats.num_rollbacks,
            acceptance=stats.acceptance, seconds=time.perf_counter() - begin_s,
        )  # fmt: skip
        for line in (*report.wrong[:3], *report.lost[:3]):
            print("  " + line[:300])
    return good


def _add(total: LoadReport, part: LoadReport) -> None:
    for name in (
        "num_requests",
        "num_sequences",
        "num_cancelled",
        "num_plain",
        "num_plain_different",
    ):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    total.wrong += part.wrong
    total.lost += part.lost


def overhead(bench: Bench) -> bool:
    """Wall time of the engine's decode step over that of the bare jitted step."""
    args = bench.args
    batch = args.batch
    prompt_len = args.max_len - 160
    for mode in (m for m in args.modes if m != "dvr"):  # whose decode step is that of `fast`
        engine = bench.engine(mode)
        rng = np.random.default_rng(0)
        for i in range(batch):
            engine.add_request(
                bench.prompt(rng, prompt_len),
                SamplingParams(max_tokens=159, temperature=0.8, seed=i),
                is_deterministic=mode == "invariant",
            )
        while engine.stats().decode_tokens < 2 * batch or engine.stats().num_running < batch:
            engine.step()
        times = []
        before = engine.stats().numbers()
        for _ in range(5):
            begin_s = time.perf_counter()
            for _ in range(20):
                engine.step()
            times.append((time.perf_counter() - begin_s) / 20 * 1e3)
        after = engine.stats().numbers()
        host = {
            name[:-2] + "_ms": (after[name] - before[name]) / 100 * 1e3
            for name in ("plan_s", "launch_s", "wait_s", "dispatch_s", "commit_s")
        }
        engine.drain()
        del engine
        bare = _bare_step_ms(bench, mode, batch, prompt_len + 60)
        bench.rows.keep(
            subject="engine_step", mode=mode, batch=batch, context=prompt_len + 60,
            engine_ms=statistics.median(times), bare_ms=bare,
            ratio=statistics.median(times) / bare, **host,
        )  # fmt: skip
    return True


def _bare_step_ms(bench: Bench, mode: str, batch: int, context: int) -> float:
    """The engine's own program alone, launched back to back: median of five runs of 20."""
    model, table_len = bench.model, -(-bench.args.max_len // 128)
    key = plain_key(
        "decode", rows=batch, table_len=table_len,
        mode="invariant" if mode == "invariant" else "fast",
    )  # fmt: skip
    program = programs_for(model, num_pages=batch * table_len, num_slots=batch).get(
        key, model.params
    )
    pages = empty_pages(model, batch * table_len)
    operands = operands_for(
        model, key,
        ids=np.full((batch, 1), 7, np.int32),
        start=np.full(batch, context, np.int32),
        table=np.arange(batch * table_len, dtype=np.int32).reshape(batch, table_len),
        sampling=[
            (SamplingParams(temperature=0.8, seed=r, noise="common"), 0) for r in range(batch)
        ],
    )  # fmt: skip
    times = []
    for _ in range(6):
        of_launches = jax.block_until_ready(launches(operands, 20))
        begin_s = time.perf_counter()
        for arguments in of_launches:
            pages, _, result = program(model.params, model.rope_tables, pages, *arguments)
        jax.block_until_ready((pages, result))
        times.append((time.perf_counter() - begin_s) / 20 * 1e3)
    return statistics.median(times[1:])


def offline(bench: Bench) -> bool:
    """All requests at once, of one length."""
    args = bench.args
    for mode in args.modes:
        planned = [
            PlannedRequest(
                at_s=0.0, prompt_len=args.prompt_len, output_len=args.output_len,
                is_deterministic=mode != "fast",
            )
            for _ in range(args.num)
        ]  # fmt: skip
        _, numbers = measured(bench, mode, planned)
        bench.rows.keep(
            subject="offline", mode=mode, requests=args.num, prompt_len=args.prompt_len,
            output_len=args.output_len, draft_weights=args.draft_weights if mode == "dvr" else "",
            max_prefill_streak=bench.max_prefill_streak, has_defaults=args.defaults, **numbers,
        )  # fmt: skip
    return True


def read_trace(path: str, *, max_len: int, count: int) -> list[tuple[int, int]]:
    """(prompt tokens, generated tokens) of the first requests that fit `max_len`."""
    with open(path, newline="") as file:
        pairs = [
            (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)
        ]
    fitting = [(p, g) for p, g in pairs if p >= 1 and g >= 1 and p + g <= max_len]
    return fitting[:count]


def replay(bench: Bench) -> bool:
    """A trace's lengths, offline (rate 0) and arriving at random at fixed rates."""
    args = bench.args
    lengths = read_trace(args.trace, max_len=args.max_len, count=args.num)
    for mode in args.modes:
        for rate in args.rates:
            planned = list(_arrivals(lengths, rate, share=100.0 if mode != "fast" else 0.0))
            engine = bench.engine(mode)
            told = serve(bench, engine, planned)
            bench.rows.keep(
                subject="replay", mode=mode, rate_per_s=rate, requests=len(planned),
                draft_weights=args.draft_weights if mode == "dvr" else "",
                **summary(told), **counted(engine),
            )  # fmt: skip
            del engine
    return True


def _arrivals(
    lengths: Sequence[tuple[int, int]], rate: float, *, share: float
) -> Iterator[PlannedRequest]:
    """Poisson arrivals; `share` percent of them deterministic."""
    rng = np.random.default_rng(1)
    at_s = 0.0
    for prompt_len, output_len in lengths:
        at_s += rng.exponential(1 / rate) if rate else 0.0
        yield PlannedRequest(
            at_s=at_s, prompt_len=prompt_len, output_len=output_len,
            is_deterministic=bool(rng.random() * 100 < share),
        )  # fmt: skip


def shares(bench: Bench) -> bool:
    """Throughput of `dvr` against the share of deterministic requests."""
    args = bench.args
    lengths = [(args.prompt_len, args.output_len)] * args.num
    for share in (*args.shares, -1.0):
        mode = "fast" if share < 0 else "dvr"
        told, numbers = measured(bench, mode, list(_arrivals(lengths, 0.0, share=share)))
        plain = [t for t in told if not t.plan.is_deterministic]
        facts = {f"plain_{k}": v for k, v in summary(plain).items() if "p99" in k} if plain else {}
        bench.rows.keep(
            subject="shares", mode=mode, deterministic_percent=max(share, 0.0),
            max_draft_fraction=args.max_draft_fraction,
            draft_weights=args.draft_weights if mode == "dvr" else "",
            requests=args.num, prompt_len=args.prompt_len, output_len=args.output_len,
            max_prefill_streak=bench.max_prefill_streak, **numbers, **facts,
        )  # fmt: skip
    return True


def windows(bench: Bench) -> bool:
    """The verified window (W) and how many are verified at once (G)."""
    args = bench.args
    lengths = [(args.prompt_len, args.output_len)] * args.num
    for window in args.windows:
        for group in args.groups:
            _, numbers = measured(
                bench, "dvr", list(_arrivals(lengths, 0.0, share=100.0)),
                verify_window=window, verify_rows=group, verify_batches=(),
            )  # fmt: skip
            bench.rows.keep(
                subject="windows", window=window, group=group, draft_weights=args.draft_weights,
                requests=args.num, prompt_len=args.prompt_len, output_len=args.output_len,
                **numbers,
            )  # fmt: skip
    return True


def narrow(bench: Bench) -> bool:
    """Drafts of 8-bit weights, if any are asked for, and plain decoding at small batches.

    One token a launch, and as many as a window has drafts.
    """
    args = bench.args
    for batch in args.batches:
        lengths = [(args.prompt_len, args.output_len)] * (4 * batch)
        sizes = {"batch_size": batch, "verify_rows": batch, "decode_batches": ()}
        several = sorted({1, *(window - 1 for window in args.windows)})
        cases = [(mode, "full", 0, steps) for mode in ("invariant", "fast") for steps in several]
        cases += [
            ("dvr", name, window, steps)
            for name in args.narrow
            for window in args.windows
            for steps in (1, window - 1)
        ]
        for mode, weights, window, steps in cases:
            share = 0.0 if mode == "fast" else 100.0
            _, numbers = measured(
                bench, mode, list(_arrivals(lengths, 0.0, share=share)),
                **sizes, draft_weights=weights, decode_steps=steps,
                verify_window=window or args.verify_window,
            )  # fmt: skip
            bench.rows.keep(
                subject="narrow", mode=mode, draft_weights=weights, batch=batch, window=window,
                decode_steps=steps, requests=4 * batch, prompt_len=args.prompt_len,
                output_len=args.output_len,
                **numbers,
            )  # fmt: skip
    return True


COLUMNS = {
    "subject": "subject", "mode": "mode", "same": "same", "draft_weights": "drafts",
    "batch": "batch", "requests": "requests",
    "deterministic_percent": "determ. %", "window": "W", "decode_steps": "a launch", "group": "G",
    "rate_per_s": "rate/s",
    "wall_s": "wall s", "output_tokens_per_s": "tokens/s", "first_token_p50_ms": "TTFT p50 ms",
    "first_token_p99_ms": "p99", "token_p50_ms": "TPOT p50 ms", "token_p99_ms": "p99",
    "acceptance": "accepted", "engine_ms": "engine ms", "bare_ms": "bare ms", "ratio": "ratio",
}  # fmt: skip


def show(rows: Sequence[dict]) -> None:
    """Print rows without their card as a table, last."""
    shown = [key for key in COLUMNS if any(key in row for row in rows)]
    table = rich.table.Table(*(COLUMNS[key] for key in shown))
    for row in rows:
        values = [row.get(key, "") for key in shown]
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    rich.console.Console(width=150).print(table)


COMMANDS = {
    "stress": stress, "overhead": overhead, "offline": offline, "replay": replay,
    "shares": shares, "windows": windows, "narrow": narrow,
}  # fmt: skip


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="+", choices=COMMANDS)
    names = f"{', '.join(MODELS)} (random weights), bundled, or a folder"
    parser.add_argument("--model", default="bundled", help=names)
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="portable")
    parser.add_argument("--modes", nargs="+", default=["invariant", "dvr", "fast"])
    parser.add_argument("--num", type=int, default=512, help="requests")
    parser.add_argument(
        "--repeats", type=int, default=3,
        help="of a load that comes at once: the run of median time counts",
    )  # fmt: skip
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--trace", help="CSV with ContextTokens and GeneratedTokens")
    parser.add_argument("--text", help="text file to cut prompts from, of a model with a tokenizer")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0], help="requests a second")
    parser.add_argument("--shares", type=float, nargs="+", default=[2, 5, 10, 20, 50, 100])
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--batch", type=int, default=64, help="rows of `overhead`")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="of `narrow`")
    parser.add_argument(
        "--narrow", nargs="*", default=["int8", "float8_e4m3fn"],
        help="draft weights of `narrow`; none: no drafts"
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--decode-batches", type=int, nargs="*", default=[])
    parser.add_argument("--max-prefill-streak", type=int, default=0, help="see EngineConfig")
    parser.add_argument(
        "--defaults", action="store_true",
        help="sizes as LLM chooses them, in place of those below and above",
    )  # fmt: skip
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--prefill-rows", type=int, nargs="*", default=[4])
    parser.add_argument("--max-len", type=int, default=640)
    parser.add_argument("--num-pages", type=int, default=0)
    parser.add_argument("--verify-rows", type=int, default=8)
    parser.add_argument("--verify-window", type=int, default=32)
    parser.add_argument("--verify-batches", type=int, nargs="*", default=[])
    parser.add_argument("--max-draft-fraction", type=float, help="see EngineConfig")
    parser.add_argument("--draft-weights", default="full")
    parser.add_argument("--questions", type=int, default=250, help="different ones of `stress`")
    parser.add_argument("--longest-prompt", type=int, default=0, help="of `stress`")
    parser.add_argument("--most-tokens", type=int, default=40, help="of an answer of `stress`")
    parser.add_argument(
        "--long-every", type=int, default=12,
        help="of `stress`: one answer in so many is five times as long. Short prompts, long "
        "answers and few pages force preemption",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1e9, help="most that `stress` asks")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    if "replay" in args.commands and not args.trace:
        parser.error("replay needs --trace")
    if args.text and args.model in MODELS:
        parser.error(f"--text needs a model with a tokenizer, and {args.model} has none")
    if args.model not in MODELS and not folder_of(args.model).is_dir():
        parser.error(f"--model {args.model} is no folder; choose {names}")
    return args


def main() -> None:
    """Run the commands; exit with 3 if a bit differs."""
    args = parse_args()
    bench = Bench(args)
    good = [COMMANDS[name](bench) for name in args.commands]
    show(bench.rows.rows)
    sys.exit(0 if all(good) else 3)


if __name__ == "__main__":
    main()
