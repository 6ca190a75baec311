# SPDX-License-Identifier: Apache-2.0
"""Time to first token, time a token and throughput of any OpenAI server, over HTTP.

python -m benchmarks.serve_http --url http://127.0.0.1:8000 --clients 1 64 256
python -m benchmarks.serve_http --serve llama3_8b --clients 1 64 256 --mixed 288 --out rows.jsonl

The client is a process of plain sockets. N clients ask at once, each for a streamed
`/v1/completions` of `--max-tokens` tokens behind `--prompt-tokens` random token ids, which no
prefix cache knows. TTFT: from sending a request to its first event. TPOT: from the first event to
the last, over the tokens after the first. Throughput: all tokens from the first request sent to the
last event. `--mixed M` sends M requests of ordinary mixtures of parameters (temperature, top-p,
penalties, top logprobs) in waves of 64, twice: what the first time takes longer
is compiled or warmed up while clients wait. With `--serve` a folder of that shape with random
weights is written, and `python -m detjax.serve` started on it; `ready_s` is its start.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rich.console
import rich.table

from benchmarks.http_client import HttpExchange, Plan, run_plans

MIXED_CLIENTS = 64
MIXTURES: tuple[dict, ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.4},
    {"temperature": 0.8, "presence_penalty": 0.6},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.8, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 3, "frequency_penalty": 0.2},
)
"""Parameters that every OpenAI server takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where a server listens, and what it serves."""

    host: str
    port: int
    model: str
    ready_s: float | None = None


def ask(url: str) -> dict:
    """The JSON of a route."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Server]:
    """The server that was named, or one that runs as long as this does.

    Raises:
        RuntimeError: If it ends before it is ready.
    """
    if args.url:
        parts = urllib.parse.urlsplit(args.url)
        model = ask(f"{args.url.rstrip('/')}/v1/models")["data"][0]["id"]
        yield Server(host=parts.hostname or "127.0.0.1", port=parts.port or 80, model=model)
        return
    from benchmarks.start import write_random  # imports JAX in a process of its own

    with tempfile.TemporaryDirectory() as folder:
        is_model = args.serve == "bundled" or Path(args.serve).is_dir()
        path = args.serve if is_model else write_random(args.serve, Path(folder) / args.serve)
        command = [sys.executable, "-m", "detjax.serve", "--model", path, "--port", str(args.port),
                   "--cache-dir", args.cache_dir, *args.serve_options]  # fmt: skip
        begin_s = time.perf_counter()
        server = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        try:
            wait_until_ready(server, f"http://127.0.0.1:{args.port}/health")
            ready_s = time.perf_counter() - begin_s
            name = ask(f"http://127.0.0.1:{args.port}/v1/models")["data"][0]["id"]
            yield Server(host="127.0.0.1", port=args.port, model=name, ready_s=ready_s)
        finally:
            server.terminate()
            server.wait(60)


def wait_until_ready(server: subprocess.Popen, url: str) -> None:
    """Ask for a server's health until it is well.

    Raises:
        RuntimeError: If the server ends first.
    """
    while server.poll() is None:
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            ask(url)
            return
        time.sleep(0.1)
    raise RuntimeError(f"the server has ended with exit status {server.returncode}")


def make_body(server: Server, prompt: Sequence[int], max_tokens: int, **parameters) -> dict:
    """A streamed request of token ids."""
    return {
        "model": server.model, "prompt": list(prompt), "max_tokens": max_tokens, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, **parameters,
    }  # fmt: skip


def figures(found: Sequence[HttpExchange]) -> dict[str, float | int]:
    """What a load took.

    Raises:
        RuntimeError: If a request was not answered whole.
    """
    failed = [one for one in found if one.status != 200 or one.error or not one.pieces_s]
    if failed:
        first = failed[0]
        raise RuntimeError(
            f"{len(failed)} of {len(found)} requests failed; the first: status {first.status}, "
            f"{first.error[:300]}"
        )
    first_s = [one.pieces_s[0] - one.asked_s for one in found]
    token_s = [
        (one.pieces_s[-1] - one.pieces_s[0]) / (one.num_tokens - 1)
        for one in found
        if one.num_tokens > 1
    ]
    tokens = sum(one.num_tokens for one in found)
    wall_s = max(one.pieces_s[-1] for one in found) - min(one.asked_s for one in found)
    return {
        "requests": len(found),
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "ttft_p50_ms": 1e3 * statistics.median(first_s),
        "ttft_p99_ms": 1e3 * float(np.quantile(first_s, 0.99)),
        "tpot_p50_ms": 1e3 * statistics.median(token_s) if token_s else 0.0,
        "tpot_p99_ms": 1e3 * float(np.quantile(token_s, 0.99)) if token_s else 0.0,
    }


def at_once(server: Server, args: argparse.Namespace, count: int, rng) -> dict:
    """So many clients, all at once."""
    prompts = rng.integers(10, args.vocab_size, (count, args.prompt_tokens)).tolist()
    bodies = [make_body(server, p, args.max_tokens, temperature=0.0) for p in prompts]
    plans = [Plan(at_s=0.0, body=body) for body in bodies]
    return {"case": f"x{count}"} | figures(run_plans(server.host, server.port, plans))


def mixed(server: Server, args: argparse.Namespace, which: str, rng) -> dict:
    """Requests of ordinary mixtures, in waves of `MIXED_CLIENTS` at once."""
    found: list[HttpExchange] = []
    for first in range(0, args.mixed, MIXED_CLIENTS):
        plans = []
        for i in range(first, min(first + MIXED_CLIENTS, args.mixed)):
            prompt = rng.integers(10, args.vocab_size, int(rng.integers(50, 500))).tolist()
            parameters = MIXTURES[i % len(MIXTURES)] | {"seed": i}
            most = int(rng.integers(20, 200))
            plans.append(Plan(at_s=0.0, body=make_body(server, prompt, most, **parameters)))
        found += run_plans(server.host, server.port, plans)
    return {"case": f"mixed, {which} time"} | figures(found)


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a server that listens")
    where.add_argument(
        "--serve", metavar="SHAPE",
        help="start a server of a shape of benchmarks.step, a folder, or the bundled model",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8123, help="of the server that is started")
    parser.add_argument("--cache-dir", default="none", help="of the server that is started")
    parser.add_argument("--serve-options", nargs=argparse.REMAINDER, default=[],
                        help="the rest is for the server that is started")  # fmt: skip
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--mixed", type=int, default=0, metavar="M")
    parser.add_argument("--vocab-size", type=int, default=32000,
                        help="token ids are drawn below this")  # fmt: skip
    parser.add_argument("--card", default="{}", help="JSON that every row has, such as the GPU")
    parser.add_argument("--out", help="write the rows to this file")
    return parser


def main() -> int:
    """Load a server; 1 if a request failed."""
    args = make_parser().parse_args()
    rng = np.random.default_rng(0)
    rows: list[dict] = []
    with started(args) as server:
        card = {"subject": "serve_http", "model": server.model, "date": time.strftime("%Y-%m-%d"),
                "ready_s": server.ready_s, "prompt_tokens": args.prompt_tokens,
                "max_tokens": args.max_tokens, **json.loads(args.card)}  # fmt: skip
        steps = [("first", mixed), ("second", mixed)] if args.mixed else []
        for which, run in steps:
            rows.append(card | run(server, args, which, rng))
        for count in args.clients:
            at_once(server, args, min(count, 4), rng)  # connections, the client's own modules
            rows.append(card | at_once(server, args, count, rng))
    table = rich.table.Table(title=f"{server.model} on port {server.port}")
    columns = ("case", "requests", "tokens_per_s", "wall_s", "ttft_p50_ms", "ttft_p99_ms",
               "tpot_p50_ms", "tpot_p99_ms")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v := row[c], float) else str(v) for c in columns))
    rich.console.Console(width=120).print(table)
    if server.ready_s is not None:
        print(f"ready after {server.ready_s:.1f} s")
    if args.out:
        Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
