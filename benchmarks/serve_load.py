# SPDX-License-Identifier: Apache-2.0
"""The server under a real load, over HTTP: times, and every canonical answer against itself alone.

python -m benchmarks.serve_load --model tiny --trace azure_conv.csv --scale 0.1 --max-len 256 \\
    --num 10000 --rates 20 --shares 100
python -m benchmarks.serve_load --model llama3_8b --backend sm90 --trace azure_conv.csv \\
    --mode dvr --num 1000 --rates 2 4 8 16 --shares 0 10 50 100

Requests come at random (Poisson) with the lengths of the trace. Some clients leave at once, some in
the middle, some read slowly. Prompts are random tokens, weights of the named models random; no
request finds its prompt in the prefix cache. The exit status is 3 if a canonical answer differs
from the one that its request gets alone, if a request is lost, or if the server holds anything
afterwards. With `--most-s` cells that would begin later are not run, and named.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

from benchmarks.common import Rows, environment
from benchmarks.http_client import HttpExchange, Plan, run_plans
from benchmarks.serving import folder_of, open_model, read_trace
from benchmarks.step import MODELS

# isort: split
import numpy as np
import rich.console
import rich.table
import uvicorn

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.models.bundled import bundled_model_path
from detjax.models.loading import LoadedModel
from detjax.models.tokenizer import Tokenizer
from detjax.pallas_kernels.backend import Backend
from detjax.proof.identity import Identifier, Identity
from detjax.server.app import make_app
from detjax.server.served_model import Limits, ServedModel
from detjax.server.service import Service

BEHAVIOURS = ("stays", "leaves at once", "leaves within", "reads slowly")


@contextlib.contextmanager
def listening(service: Service) -> Iterator[tuple[str, int]]:
    """Serve in a thread of this process; where."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=4096,
        loop="asyncio",  # that of `python -m detjax.serve`
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join()


def make_service(
    model: LoadedModel,
    engine: Engine,
    *,
    mode: str,
    max_len: int,
    identity: Identity | None = None,
    stream_interval: int = 1,
) -> Service:
    """A service of a model with the bundled tokenizer: of random weights no text is of use."""
    tokenizer = Tokenizer.from_folder(bundled_model_path())
    served = ServedModel(
        name="load", engine=engine, tokenizer=tokenizer,
        vocab_size=model.config.vocab_size, max_len=max_len, mode=mode,
        fingerprint=model.fingerprint, end_token_ids=model.config.eos_token_ids,
        identity=identity or Identifier(model, tokenizer, name="load").identity(),
    )  # fmt: skip
    return Service(served, Limits(stream_interval=stream_interval))


def make_load(args: argparse.Namespace, vocab_size: int) -> list[dict]:
    """Bodies of different requests, with lengths of the trace: drawn from all that fit."""
    rng = np.random.default_rng(args.seed)
    fitting = read_trace(args.trace, max_len=int(args.max_len / args.scale), count=1 << 30)
    chosen = rng.permutation(len(fitting))[: args.questions]
    lengths = [fitting[i] for i in chosen]
    return [
        {
            "model": "load",
            "prompt": rng.integers(2, vocab_size, max(1, int(prompt * args.scale))).tolist(),
            "max_tokens": max(1, int(output * args.scale)),
            "temperature": float(rng.choice([0.0, 0.8])),
            "seed": i,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i, (prompt, output) in enumerate(lengths)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SentRequest:
    """A request of a load: which question, how its client behaves, whether it is canonical."""

    question: int
    behaviour: str
    is_deterministic: bool
    plan: Plan


def draw_load(
    questions: Sequence[dict],
    *,
    num: int,
    rate: float,
    share: float,
    odd_share: float,
    seed: int,
    within_s: float = math.inf,
) -> list[SentRequest]:
    """Requests that come at `rate` a second, at most `num` and those of `within_s` seconds.

    `share` percent of them are canonical. Each has a cache salt of its own.
    """
    rng = np.random.default_rng(seed)
    at_s, asked = 0.0, []
    for i in range(num):
        at_s += rng.exponential(1 / rate)
        if at_s > within_s:
            break
        question = int(rng.integers(len(questions)))
        is_odd = rng.random() < odd_share
        behaviour = BEHAVIOURS[int(rng.integers(1, 4)) if is_odd else 0]
        is_deterministic = bool(rng.random() * 100 < share)
        leaves = {"leaves at once": 0, "leaves within": int(rng.integers(1, 12))}.get(behaviour)
        body = questions[question] | {
            "is_deterministic": is_deterministic,
            "cache_salt": f"{rate} {share} {i}",
        }
        plan = Plan(at_s=at_s, body=body, leaves_after=leaves, is_slow=behaviour == "reads slowly")
        asked.append(SentRequest(
            question=question, behaviour=behaviour, is_deterministic=is_deterministic, plan=plan,
        ))  # fmt: skip
    return asked


def judge(
    asked: Sequence[SentRequest], found: Sequence[HttpExchange], alone: Sequence[HttpExchange]
) -> dict[str, float]:
    """Count what became of the requests, and the times of those whose client stays."""
    facts: dict[str, float] = dict.fromkeys(
        ("whole", "left", "lost", "canonical", "wrong", "plain", "plain_different"), 0
    )
    times = {"first_token": [], "token": [], "end_to_end": []}
    for one, got in zip(asked, found, strict=True):
        if one.plan.leaves_after is not None and not got.digest:
            facts["left"] += 1
            continue
        if not got.digest or got.error:
            facts["lost"] += 1
            print(f"  lost: {one.behaviour}: {got.status} {got.error[:300]}")
            continue
        facts["whole"] += 1
        is_other = got.digest != alone[one.question].digest
        facts["canonical" if one.is_deterministic else "plain"] += 1
        facts["wrong" if one.is_deterministic else "plain_different"] += is_other
        if one.behaviour == "stays":
            times["first_token"].append(got.pieces_s[0] - got.asked_s)
            times["end_to_end"].append(got.pieces_s[-1] - got.asked_s)
            if got.num_tokens > 1:
                span_s = got.pieces_s[-1] - got.pieces_s[0]
                times["token"].append(span_s / (got.num_tokens - 1))
    for name, values in times.items():
        for percent in (50, 90, 99) if values else ():
            facts[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent)) * 1e3
    begin_s = min((got.asked_s for got in found if got.asked_s), default=0.0)
    end_s = max((got.pieces_s[-1] for got in found if got.pieces_s), default=begin_s)
    facts["wall_s"] = end_s - begin_s
    facts["output_tokens_per_s"] = sum(got.num_tokens for got in found) / max(1e-9, end_s - begin_s)
    return facts


def run(args: argparse.Namespace, rows: Rows, model: LoadedModel) -> bool:
    """Every rate and share; whether all is as it should be."""
    engine = Engine(model, EngineConfig(
        mode=args.mode, batch_size=args.batch_size, max_len=args.max_len,
        prefill_chunk=args.prefill_chunk, num_pages=args.num_pages, max_waiting=1 << 20,
        prefill_shapes=tuple((r, args.prefill_chunk) for r in args.prefill_rows if r > 1),
        decode_batches=tuple(b for b in args.decode_batches if b < args.batch_size),
        max_draft_fraction=args.draft_share,
    ))  # fmt: skip
    begin_s = time.perf_counter()
    engine.compile()
    print(f"compiled in {time.perf_counter() - begin_s:.0f} s", flush=True)
    service = make_service(model, engine, mode=args.mode, max_len=args.max_len)
    questions, good, num_cells = make_load(args, model.config.vocab_size), True, 0
    canonical = {} if args.mode == "fast" else {"is_deterministic": True}
    with listening(service) as (host, port):
        begin_s = time.perf_counter()
        plans = [Plan(at_s=0.0, body=question | canonical) for question in questions]
        alone = run_plans(host, port, plans, in_turn=True)
        assert all(one.digest for one in alone), alone
        rows.keep(
            subject="serve_load_reference", mode=args.mode, questions=len(questions),
            seconds=time.perf_counter() - begin_s,
        )  # fmt: skip
        for rate, share in itertools.product(args.rates, args.shares):
            if time.perf_counter() > args.until_s:
                print(f"not run, as --most-s {args.most_s:g} are over: {rate:g}/s, {share:g} %")
                continue
            asked = draw_load(
                questions, num=args.num, rate=rate, share=share, odd_share=args.odd_share,
                seed=args.seed + 1, within_s=args.cell_s,
            )  # fmt: skip
            before = engine.stats().numbers()
            found = run_plans(host, port, [one.plan for one in asked])
            held = wait_until_quiet(service, host, port)
            after = engine.stats().numbers()
            facts = judge(asked, found, alone)
            names = ("num_preempted", "num_rollbacks", "num_cancelled", "decode_tokens")
            rows.keep(
                subject="serve_load", mode=args.mode, rate_per_s=rate,
                deterministic_percent=share, requests=len(asked),
                same=not (facts["wrong"] or facts["lost"] or held), held=held,
                odd_clients=args.odd_share, batch_size=args.batch_size, max_len=args.max_len,
                scale=args.scale, max_draft_fraction=args.draft_share, **facts,
                **{name: after[name] - before[name] for name in names},
            )  # fmt: skip
            good = good and not (facts["wrong"] or facts["lost"] or held)
            num_cells += 1
    return good and num_cells > 0


def wait_until_quiet(service: Service, host: str, port: int, *, most_s: float = 60.0) -> int:
    """Wait until nothing runs or is held; how much is, if that does not come: pages and requests.

    Clients may have left before the server has heard of them. It takes connections in their order,
    so it has when a request that comes after them is answered.
    """
    with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=most_s):
        pass
    until_s = time.perf_counter() + most_s
    while True:
        # WHY: a check of an answer again, which an idle server makes, has pages for a while.
        stats = service.stats()
        left = stats.num_running + stats.num_waiting + service.num_open + stats.num_pages_held
        if not left or time.perf_counter() > until_s:
            return left
        time.sleep(0.05)


COLUMNS = ("first_token", "token", "end_to_end")


def print_table(rows: Sequence[dict]) -> None:
    """The cells that ran: percentiles in milliseconds, and what became of the requests."""
    table = rich.table.Table(
        "requests/s", "canonical, %", "requests", "first token p50 p90 p99, ms",
        "a token p50 p90 p99, ms", "end to end p50 p90 p99, ms", "tokens/s", "canonical answers",
        "wrong", "lost", "held", "rollbacks",
    )  # fmt: skip
    for row in rows:
        if row["subject"] != "serve_load":
            continue
        percentiles = (
            " ".join(f"{row.get(f'{name}_p{p}_ms', math.nan):.4g}" for p in (50, 90, 99))
            for name in COLUMNS
        )
        counts = ("canonical", "wrong", "lost", "held", "num_rollbacks")
        table.add_row(
            f"{row['rate_per_s']:g}", f"{row['deterministic_percent']:g}", str(row["requests"]),
            *percentiles, f"{row['output_tokens_per_s']:.0f}", *(str(row[name]) for name in counts),
        )  # fmt: skip
    rich.console.Console(width=180).print(table)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = f"{', '.join(MODELS)} (random weights), bundled, or a folder"
    parser.add_argument("--model", default="tiny", help=names)
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="portable")
    parser.add_argument("--mode", choices=("invariant", "dvr", "fast"), default="invariant")
    parser.add_argument("--trace", required=True, help="CSV: ContextTokens, GeneratedTokens")
    parser.add_argument("--scale", type=float, default=1.0, help="of the trace's lengths")
    parser.add_argument("--num", type=int, default=1000, help="requests of a rate and share")
    parser.add_argument("--questions", type=int, default=100, help="different requests")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0], help="requests a second")
    parser.add_argument("--shares", type=float, nargs="+", default=[100.0],
                        help="percent of requests that are deterministic")  # fmt: skip
    parser.add_argument("--odd-share", type=float, default=0.15,
                        help="clients that leave or read slowly")  # fmt: skip
    parser.add_argument("--cell-s", type=float, default=math.inf,
                        help="seconds within which the requests of a rate and share come, "
                        "if --num are not there before")  # fmt: skip
    parser.add_argument("--most-s", type=float, default=math.inf,
                        help="after which no other rate and share begins")  # fmt: skip
    parser.add_argument("--draft-share", type=float, help="see EngineConfig.max_draft_fraction")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--decode-batches", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--prefill-rows", type=int, nargs="*", default=[], help="besides 1")
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--num-pages", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args(argv)
    if not 0 < args.scale <= 1:
        parser.error(f"--scale {args.scale} must be above 0 and at most 1")
    if args.mode == "fast" and any(args.shares):
        parser.error("--mode fast refuses deterministic requests: give --shares 0")
    if not all(rate > 0 for rate in args.rates):
        parser.error(f"--rates {args.rates} must be above 0")
    if args.model not in MODELS and not folder_of(args.model).is_dir():
        parser.error(f"--model {args.model} is no folder; choose {names}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load; 3 if a bit differs or anything is lost or held."""
    begin_s = time.perf_counter()
    args = parse_args(argv)
    args.until_s = begin_s + args.most_s
    backend = Backend(args.backend)
    card = environment(backend) | {"model": Path(args.model).resolve().name, "data": "random"}
    rows = Rows(card, args.out)
    good = run(args, rows, open_model(args.model, backend))
    print_table(rows.rows)
    print("all canonical answers are the same bits; nothing lost or held" if good else "FAILED")
    return 0 if good else 3


if __name__ == "__main__":
    sys.exit(main())
