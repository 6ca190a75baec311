# SPDX-License-Identifier: Apache-2.0
"""What HTTP costs: an engine alone, and the same work over the server, streamed and whole.

python -m benchmarks.serve_cost engine --model llama3_8b --backend sm90 --batch 64
python -m benchmarks.serve_cost wire --batch 64 --step-ms 6.5 --host-ms 1.8
python -m benchmarks.serve_cost wire --profile

`engine` runs a real engine. `wire` needs no GPU: its device takes `--step-ms` a step and works a
step behind the host, as a GPU does; `--host-ms` of the step are Python of the engine's own, which
holds the interpreter. So it shows whether the server's Python hides behind the device. The client
is a process of its own. Each variant runs `--repeats` times in turn; medians count. The exit status
is 3 if an answer over HTTP has other bits than that of the engine alone.
"""

import argparse
import cProfile
import itertools
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

from benchmarks.common import Rows, environment
from benchmarks.http_client import Plan, run_plans
from benchmarks.serve_load import listening, make_service
from benchmarks.serving import open_model
from benchmarks.step import MODELS

# isort: split
import numpy as np
import rich.console
import rich.table

from detjax.engine.async_engine import StepsRequests
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.heap import frozen_heap
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason, RequestOutput, TokenEvent
from detjax.engine.outputs_lease import OutputsLease
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.requests.sequence import OnToken, ignore_token
from detjax.pallas_kernels.backend import Backend
from detjax.proof.identity import Identity
from detjax.server.service import Service


@dataclass(kw_only=True, slots=True)
class _Paced:
    """A sequence of the engine without a model."""

    request_id: int
    num_left: int
    on_token: OnToken
    token_ids: itertools.cycle = field(default_factory=lambda: itertools.cycle(range(300, 900)))


class PacedEngine(StepsRequests):
    """An engine whose device takes a fixed time for a step, and computes nothing.

    Whatever else a server asks of an engine does nothing, as the protocol has it.
    """

    def __init__(self, *, step_ms: float, host_ms: float):
        self._step_s, self._host_s = step_ms / 1e3, host_ms / 1e3
        self._live: dict[int, _Paced] = {}
        self._ids = itertools.count()
        self._lease = OutputsLease()
        self._free_s = self._due_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def outputs_lease(self) -> OutputsLease:
        return self._lease

    def add_request(
        self, prompt_token_ids, sampling, *, on_token: OnToken = ignore_token, **options
    ) -> int:
        request_id = next(self._ids)
        self._live[request_id] = _Paced(
            request_id=request_id, num_left=sampling.max_tokens, on_token=on_token
        )
        return request_id

    def cancel(self, request_id: int) -> None:
        self._live.pop(request_id, None)

    @property
    def self_check_error(self) -> str:
        """Nothing is checked."""
        return ""

    def stats(self) -> EngineStats:
        """Nothing is counted."""
        return EngineStats(num_pages=0)

    def step(self) -> list[RequestOutput]:
        """Launch a step, and read the one before."""
        until_s = time.perf_counter() + self._host_s
        while time.perf_counter() < until_s:
            pass
        due_s = self._due_s
        self._due_s = self._free_s = max(time.perf_counter(), self._free_s) + self._step_s
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return [self._commit(seq) for seq in tuple(self._live.values())]

    def _commit(self, seq: _Paced) -> RequestOutput:
        token_id, logprob = next(seq.token_ids), np.float32(-1.25)
        seq.num_left -= 1
        if seq.on_token is not ignore_token:
            seq.on_token(TokenEvent(
                request_idx=0, sequence_idx=0, token_id=token_id, logprob=logprob, top_logprobs=()
            ))  # fmt: skip
        if not seq.num_left:
            del self._live[seq.request_id]
        return RequestOutput(
            request_id=seq.request_id, sequence_idx=0, token_ids=(token_id,), logprobs=(logprob,),
            top_logprobs=((),), exception=None, weight_version=0,
            finish_reason=None if seq.num_left else FinishReason.LENGTH,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CostCase:
    """Requests that come at once."""

    prompts: list[list[int]]
    num_tokens: int

    @property
    def num_all(self) -> int:
        return len(self.prompts) * self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What a run took, and the digest of each answer."""

    seconds: float
    cpu_s: float
    digests: tuple[str, ...]


def alone(engine: Any, case: CostCase) -> Timing:
    """Without a server: from the first request to the last token; CPU is the process's."""
    outputs: dict[int, list[RequestOutput]] = {}
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    for i, prompt in enumerate(case.prompts):
        request_id = engine.add_request(
            prompt, SamplingParams(max_tokens=case.num_tokens, temperature=0.8, seed=i)
        )
        outputs[request_id] = []
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    return Timing(seconds=seconds, cpu_s=cpu_s, digests=tuple(map(_digest, outputs.values())))


def _digest(outputs: Sequence[RequestOutput]) -> str:
    return Completion(
        request_idx=0, sequence_idx=0, prompt_token_ids=(), finish_reason=FinishReason.LENGTH,
        token_ids=tuple(i for output in outputs for i in output.token_ids),
        logprobs=tuple(p for output in outputs for p in output.logprobs), top_logprobs=(),
    ).digest()  # fmt: skip


def over_http(service: Service, case: CostCase, *, is_streamed: bool) -> Timing:
    """The same over HTTP; from the first request to the last event."""
    form = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    plans = [
        Plan(at_s=0.5, body={  # once the client is there
            "model": "load", "prompt": prompt, "max_tokens": case.num_tokens, "temperature": 0.8,
            "seed": i, **form,
        })
        for i, prompt in enumerate(case.prompts)
    ]  # fmt: skip
    with listening(service) as (host, port):
        cpu_s = time.process_time()
        found = run_plans(host, port, plans)
        cpu_s = time.process_time() - cpu_s
    assert all(one.num_tokens == case.num_tokens for one in found), [one.error for one in found]
    begin_s = min(one.asked_s for one in found)
    return Timing(
        seconds=max(one.pieces_s[-1] for one in found) - begin_s,
        cpu_s=cpu_s,
        digests=tuple(one.digest for one in found),
    )


VARIANTS = ("alone", "streamed", "whole")


def compare(
    rows: Rows, make: Callable[[], tuple[Any, Service]], case: CostCase, *, repeats: int, **facts
) -> bool:
    """Each in turn, a row, and a table; whether all have the same bits."""
    took: dict[str, list[Timing]] = {name: [] for name in VARIANTS}
    for _ in range(repeats):
        engine, service = make()
        took["alone"].append(alone(engine, case))
        took["streamed"].append(over_http(service, case, is_streamed=True))
        took["whole"].append(over_http(service, case, is_streamed=False))
    is_same = len({one.digests for some in took.values() for one in some}) == 1
    seconds = {name: statistics.median(t.seconds for t in some) for name, some in took.items()}
    cpu_s = {name: statistics.median(t.cpu_s for t in some) for name, some in took.items()}
    measured = {}
    for name in VARIANTS:
        measured[f"{name}_tokens_per_s"] = case.num_all / seconds[name]
        measured[f"{name}_cpu_us_per_token"] = 1e6 * cpu_s[name] / case.num_all
        measured[f"{name}_s"] = [t.seconds for t in took[name]]
    for name in VARIANTS[1:]:
        measured[f"{name}_cost_percent"] = 100 * (1 - seconds["alone"] / seconds[name])
    rows.keep(
        subject="serve_cost", **facts, requests=len(case.prompts), output_len=case.num_tokens,
        repeats=repeats, same=is_same, **measured,
    )  # fmt: skip
    print_table(rows.rows[-1])
    return is_same


def print_table(row: dict) -> None:
    """Throughput and cost of each variant."""
    table = rich.table.Table(
        "", "tokens/s", "cost, %", "CPU of the process a token, us", "seconds of each run"
    )
    for name in VARIANTS:
        table.add_row(
            name, f"{row[f'{name}_tokens_per_s']:.0f}", f"{row.get(f'{name}_cost_percent', 0):.2f}",
            f"{row[f'{name}_cpu_us_per_token']:.1f}",
            " ".join(f"{seconds:.3f}" for seconds in row[f"{name}_s"]),
        )  # fmt: skip
    rich.console.Console(width=120).print(table)
    print("same bits in every run" if row["same"] else "WRONG: bits differ between runs")


def engine_cost(args: argparse.Namespace) -> bool:
    """A real engine; whether all runs have the same bits."""
    backend = Backend(args.backend)
    rows = Rows(environment(backend) | {"model": args.model, "data": "random"}, args.out)
    model = open_model(args.model, backend)
    max_len = args.prompt_len + args.output_len
    engine = Engine(model, EngineConfig(
        batch_size=args.batch, max_len=max_len, prefill_chunk=args.prefill_chunk,
        prefill_shapes=tuple((r, args.prefill_chunk) for r in args.prefill_rows if r > 1),
        has_prefix_cache=False,
    ))  # fmt: skip
    engine.compile()
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, model.config.vocab_size, (args.batch, args.prompt_len)).tolist()
    service = make_service(
        model, engine, mode="invariant", max_len=max_len, stream_interval=args.stream_interval
    )

    def make() -> tuple[Engine, Service]:
        service.open(service.model)  # its last loop has ended
        return engine, service

    case = CostCase(prompts=prompts, num_tokens=args.output_len)
    alone(engine, case)
    with frozen_heap():  # as the server and `Engine.generate` do
        return compare(rows, make, case, repeats=args.repeats, impl="engine", batch=args.batch,
                       stream_interval=args.stream_interval,
                       prompt_len=args.prompt_len)  # fmt: skip


def wire_cost(args: argparse.Namespace) -> bool:
    """An engine of a fixed pace; whether all runs have the same bits."""
    rows = Rows(environment(Backend.PORTABLE) | {"model": "none", "data": "none"}, args.out)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(vocab_size=4096, eos_token_ids=()), fingerprint="none"
    )
    identity = Identity(model={"name": "none", "weights": None}, numerics={}, build={})

    def make() -> tuple[PacedEngine, Service]:
        engine: Any = PacedEngine(step_ms=args.step_ms, host_ms=args.host_ms)
        return engine, make_service(
            model, engine, mode="invariant", max_len=1 << 20, identity=identity,
            stream_interval=args.stream_interval,
        )  # fmt: skip

    case = CostCase(prompts=[[5, 6, 7]] * args.batch, num_tokens=args.output_len)
    if args.profile:
        profile_wire(make()[1], case)
        return True
    return compare(rows, make, case, repeats=args.repeats, impl="wire", batch=args.batch,
                   stream_interval=args.stream_interval, step_ms=args.step_ms,
                   host_ms=args.host_ms)  # fmt: skip


def profile_wire(service: Service, case: CostCase) -> None:
    """Where the time of the loop's thread goes."""
    from benchmarks import serve_load

    profile, serve = cProfile.Profile(), serve_load.uvicorn.Server.run

    def run(*args, **kwargs):
        profile.enable()
        serve(*args, **kwargs)
        profile.disable()

    serve_load.uvicorn.Server.run = run
    over_http(service, case, is_streamed=True)
    pstats.Stats(profile).sort_stats("tottime").print_stats(35)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("engine", "wire"))
    parser.add_argument("--model", choices=MODELS, default="tiny", help="random weights")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="portable")
    parser.add_argument("--batch", type=int, default=64, help="streams at once")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--prefill-rows", type=int, nargs="*", default=[], help="besides 1")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=6.5, help="of the device of `wire`")
    parser.add_argument("--host-ms", type=float, default=1.8, help="of its engine's Python")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of an event")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="of `wire`: where the time goes")
    parser.add_argument("--out", help="write JSON rows here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    is_same = {"engine": engine_cost, "wire": wire_cost}[args.command](args)
    return 0 if is_same else 3


if __name__ == "__main__":
    sys.exit(main())
