# SPDX-License-Identifier: Apache-2.0
"""What proof costs: audits beside generation, and self-checks at the start and while serving.

python -m benchmarks.proof --out proof.jsonl
python -m benchmarks.proof --model tiny --backend portable --num-pages 60 --max-len 640 \\
    --decode-batches 1 4 --batch-size 8 --batches 4 8 --receipts 8 --prompt 20 40 --answer 20 40 \\
    --seconds 4 --rate 4

One model with random weights and one set of programs. `audit`: answers are generated in batches of
each size, made receipts, and checked by one teacher-forced prefill each: no bit may differ, and a
receipt with one wrong bit of a logprob must be found (exit status 3 else). `start`: the check of
every program when it has been compiled, and once more with each launch timed. `serving`: a load
with idle time, with answers checked again and without.
"""

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import gc
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

from benchmarks.common import Rows, environment
from benchmarks.serving import open_model
from benchmarks.step import MODELS

# isort: split
import jax
import numpy as np

from detjax.engine.async_engine import AsyncEngine
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.metrics import EngineStats
from detjax.engine.outputs.completion import CollectedTokens, Completion
from detjax.engine.outputs.text_batch import TextBatch
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.program_key import ProgramKey, program_keys
from detjax.engine.running.programs import ProgramCache
from detjax.models.bundled import bundled_model_path
from detjax.models.tokenizer import Tokenizer
from detjax.pallas_kernels.backend import Backend
from detjax.proof.identity import Identifier, Identity
from detjax.proof.receipt import Receipt
from detjax.proof.rerun import ReceiptDifference, rerun
from detjax.proof.windows import audit_options, longest_first

PARTS = ("start", "serving", "audit")


class Bench:
    """A model and the programs that its engines share."""

    def __init__(self, args: argparse.Namespace):
        """Load the model."""
        self.args = args
        backend = Backend(args.backend)
        self.rows = Rows(environment(backend) | {"model": args.model}, args.out)
        self.model = open_model(args.model, backend)
        # Of random weights no text is of use, but receipts have one.
        self.tokenizer = Tokenizer.from_folder(bundled_model_path())
        self.audit_options = audit_options(
            [max(args.answer)] * args.receipts, [min(args.prompt)] * args.receipts
        )
        self._programs: ProgramCache | None = None

    def engine(self, **changes) -> Engine:
        """An engine of the command line's sizes; its programs are those of the one before."""
        gc.collect()  # the cache of the engine before
        args = self.args
        config = EngineConfig(
            batch_size=args.batch_size, num_pages=args.num_pages, max_len=args.max_len,
            decode_batches=tuple(b for b in args.decode_batches if b < args.batch_size),
            **{
                "prefill_chunk": args.prefill_chunk,
                "prefill_shapes": ((4, args.prefill_chunk),),
                "max_prefill_streak": 64,
                "verify_window": self.audit_options["verify_window"],
                "has_prefix_cache": False,
                "self_check": "off",
            } | changes,
        )  # fmt: skip
        engine = Engine(self.model, config, programs=self._programs)
        self._programs = engine.programs
        return engine

    def requests(self, count: int, *, seed: int) -> list[Request]:
        """Prompts and answers of lengths drawn from the given ranges; greedy and sampled."""
        rng, args = np.random.default_rng(seed), self.args
        prompts = rng.integers(args.prompt[0], args.prompt[1] + 1, count)
        answers = rng.integers(args.answer[0], args.answer[1] + 1, count)
        return [
            Request(
                prompt_token_ids=tuple(
                    rng.integers(0, self.model.config.vocab_size, prompt).tolist()
                ),
                sampling=SamplingParams(
                    max_tokens=int(answer), temperature=(1.0, 0.0, 0.8)[i % 3], seed=2**33 + i
                ),
            )
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]


# -------------------------------------------------------------------------------------------- audit


def generate(
    bench: Bench, requests: Sequence[Request], batch: int
) -> tuple[list[Completion], float]:
    """The completion of each request, and the seconds it took; `batch` run at once.

    As one ends the next begins. The programs have run before.
    """
    engine = bench.engine()
    _run(engine, requests[: 2 * batch : max(1, batch)], batch)
    begin_s = time.perf_counter()
    return _run(engine, requests, batch), time.perf_counter() - begin_s


def _run(engine: Engine, requests: Sequence[Request], batch: int) -> list[Completion]:
    answers: dict[int, tuple[int, CollectedTokens]] = {}
    completions: dict[int, Completion] = {}
    waiting, num_live = iter(enumerate(requests)), 0
    while True:
        while num_live < batch and (found := next(waiting, None)) is not None:
            index, request = found
            request_id = engine.add_request(request.prompt_token_ids, request.sampling)
            answers[request_id], num_live = (index, CollectedTokens()), num_live + 1
        if not engine.has_work:
            return [completions[i] for i in range(len(requests))]
        for output in engine.step():
            index, tokens = answers[output.request_id]
            tokens.extend(output)
            if output.finish_reason is not None:
                num_live -= 1
                completions[index] = tokens.completion(
                    requests[index].prompt_token_ids, request_idx=index, sequence_idx=0,
                    finish_reason=output.finish_reason,
                )  # fmt: skip


def receipts_of(
    bench: Bench,
    identity: Identity,
    requests: Sequence[Request],
    completions: Sequence[Completion],
) -> list[Receipt]:
    """Receipts as a server makes them."""
    ends = bench.model.config.eos_token_ids
    text = TextBatch(
        requests, bench.tokenizer, end_ids=ends, fingerprint=bench.model.fingerprint
    )  # fmt: skip
    for done in completions:
        for token_id in done.token_ids:
            text.sequences[done.request_idx, 0].push(token_id)
        text.on_completion(done)
    return [
        Receipt.of(identity, output, end_token_ids=ends) for output in text.outputs(completions)
    ]


def forged(receipt: Receipt) -> Receipt:
    """The lowest bit of the logprob in the middle is another."""
    logprobs = receipt.logprobs.copy()
    logprobs.view(np.uint32)[len(logprobs) // 2] ^= 1
    said = base64.b64encode(logprobs.tobytes()).decode()
    return dataclasses.replace(receipt, answer=receipt.answer | {"logprobs_f32": said})


def check(
    bench: Bench,
    auditor: Engine,
    identity: Identity,
    receipts: Sequence[Receipt],
    order: Sequence[int] | None = None,
) -> list[ReceiptDifference]:
    """What an audit finds."""
    return rerun(
        auditor, bench.tokenizer, receipts, identity=identity, config=bench.model.config,
        has_predictions=True, order=order,
    )  # fmt: skip


def audit(bench: Bench) -> bool:
    """Receipts of each batch size, and their audits; whether every bit was as it must be."""
    is_right = True
    begin_s = time.perf_counter()
    identity = Identifier(bench.model, bench.tokenizer, name=bench.args.model).identity()
    identity_s = time.perf_counter() - begin_s
    for batch in bench.args.batches:
        requests = bench.requests(max(bench.args.receipts, batch), seed=batch)
        answers, generate_s = generate(bench, requests, batch)
        receipts = receipts_of(bench, identity, requests, answers)
        auditor = bench.engine(**bench.audit_options)
        auditor.compile()
        check(bench, auditor, identity, receipts[:2])  # warms up
        before = dataclasses.replace(auditor.stats())
        order = longest_first([len(receipt.token_ids) for receipt in receipts])
        begin_s = time.perf_counter()
        found = check(bench, auditor, identity, receipts, order)
        audit_s = time.perf_counter() - begin_s
        control = check(bench, auditor, identity, [forged(receipts[0])])
        stats = auditor.stats()
        tokens = sum(len(receipt.token_ids) for receipt in receipts)
        bench.rows.keep(
            subject="proof", case="audit", batch=batch, receipts=len(receipts), tokens=tokens,
            prompt_tokens=sum(len(receipt.prompt_token_ids) for receipt in receipts),
            different=len(found), control_found=len(control), window=auditor._config.verify_window,
            verify_rows=auditor._config.verify_rows, windows=stats.num_windows - before.num_windows,
            launches=stats.num_launches - before.num_launches, generate_s=generate_s,
            audit_s=audit_s, share=audit_s / generate_s, generated_per_s=tokens / generate_s,
            audited_per_s=tokens / audit_s, identity_s=identity_s,
        )  # fmt: skip
        del auditor
        is_right &= not found and len(control) == 1
    return is_right


# ------------------------------------------------------------------------------------- self-checks


def start(bench: Bench) -> bool:
    """What the check of every program costs once they are compiled, and where the time goes.

    Checked three times: when all is new, again as a second engine of the process would, and with
    each launch waited for, which says what the device does of it and what the host.
    """
    engine = bench.engine(self_check="start")
    begin_s = time.perf_counter()
    with ThreadPoolExecutor() as pool:  # so that the first check finds all programs there
        deque(pool.map(engine._runner._ready._get, program_keys(engine._runner._config)), maxlen=0)
    compile_s = time.perf_counter() - begin_s
    engine.compile()
    checked = engine.stats().num_self_checked
    decodes = [key for key in engine.programs if key.kind == "decode"]
    seconds = [engine.stats().self_check_s]
    phases: dict[str, list[float]] = {}
    for is_waited_for in (False, True):
        before_s = engine.stats().self_check_s
        engine.programs.checked.clear()
        with _timed_launches(engine, phases) if is_waited_for else contextlib.nullcontext():
            engine.compile()
        seconds.append(engine.stats().self_check_s - before_s)
    launches_s = sum(map(sum, phases.values()))
    bench.rows.keep(
        subject="proof", case="start", programs=checked,
        decode_programs=len(decodes), compile_s=compile_s, self_check_s=seconds[0],
        again_s=seconds[1], differences=engine.stats().num_self_check_differences,
        pages=bench.args.num_pages,
        waited_for={
            "total_s": seconds[2], "host_s": seconds[2] - launches_s,
            "launches": {name: len(times) for name, times in phases.items()},
            "seconds": {name: sum(times) for name, times in phases.items()},
        },
    )  # fmt: skip
    return not engine.self_check_error


@contextlib.contextmanager
def _timed_launches(engine: Engine, phases: dict[str, list[float]]) -> Iterator[None]:
    """Wait for each launch of a self-check, and note its seconds by what it runs."""
    device, ready = engine._runner._device, engine._runner._ready

    def timed(run: Callable, name: Callable[..., str]) -> Callable:
        def runs(*operands, **options):
            jax.block_until_ready(device._arrays)
            begin_s = time.perf_counter()
            result = jax.block_until_ready(run(*operands, **options))
            phases.setdefault(name(*operands), []).append(time.perf_counter() - begin_s)
            return result

        return runs

    def program(key: ProgramKey, *_) -> str:
        return f"{key.kind} {key.rows}x{key.length}"

    run_check = timed(ready.run_check, program)
    checksums = timed(device.checksums, lambda *_: "checksums")
    with (
        mock.patch.object(ready, "run_check", run_check),
        mock.patch.object(device, "checksums", checksums),
    ):
        yield


async def _ask(engine: AsyncEngine, request: Request, at_s: float) -> list[float]:
    """When each output came, beginning with when the request was sent."""
    await asyncio.sleep(at_s)
    times = [time.perf_counter()]
    async for _ in engine.stream(request.prompt_token_ids, request.sampling):
        times.append(time.perf_counter())
    return times


def _serve(engine: Engine, requests: Sequence[Request], at_s: Sequence[float]) -> list[list[float]]:
    async def run() -> list[list[float]]:
        served = AsyncEngine(engine)
        asks = (_ask(served, request, at) for request, at in zip(requests, at_s, strict=True))
        return await asyncio.gather(*asks)

    return asyncio.run(run())


def serving(bench: Bench) -> bool:
    """The same load with answers checked again and without, in turn."""
    args, is_right = bench.args, True
    count = max(2, int(args.seconds * args.rate))
    requests = bench.requests(count, seed=3)
    at_s = np.cumsum(np.random.default_rng(4).exponential(1 / args.rate, count)).tolist()
    for self_check in ("start", "always", "start", "always"):
        engine = bench.engine(self_check=self_check, max_prefill_streak=0)
        _serve(engine, requests[:2], [0.0, 0.0])
        before: EngineStats = dataclasses.replace(engine.stats())
        step_s = engine.stats().step_s.total
        begin_s = time.perf_counter()
        told = _serve(engine, requests, at_s)
        wall_s = time.perf_counter() - begin_s
        stats = engine.stats()
        recheck_s = stats.recheck_s - before.recheck_s
        busy_s = stats.step_s.total - step_s
        bench.rows.keep(
            subject="proof", case="serving", self_check=self_check, requests=count, rate=args.rate,
            wall_s=wall_s, busy_s=busy_s, recheck_s=recheck_s, share_of_wall=recheck_s / wall_s,
            share_of_steps=recheck_s / busy_s, rechecked=stats.num_rechecked - before.num_rechecked,
            given_up=stats.num_rechecks_given_up - before.num_rechecks_given_up,
            first_token_p50_s=float(np.median([t[1] - t[0] for t in told])),
            first_token_p99_s=float(np.quantile([t[1] - t[0] for t in told], 0.99)),
            token_p50_s=statistics.median((t[-1] - t[1]) / max(1, len(t) - 2) for t in told),
            differences=stats.num_self_check_differences,
        )  # fmt: skip
        is_right &= not engine.self_check_error
        del engine
    return is_right


def main() -> None:
    """Run the parts; exit 3 if a bit differs, or a forged one is not found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--batch-size", type=int, default=256, help="slots of every engine")
    parser.add_argument("--decode-batches", type=int, nargs="*", default=[1, 8, 16, 64, 128])
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--num-pages", type=int, default=1600)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64],
                        help="requests at once while receipts are made")  # fmt: skip
    parser.add_argument("--receipts", type=int, default=64, help="at least a batch of them")
    parser.add_argument("--prompt", type=int, nargs=2, default=[32, 128], help="tokens, from, to")
    parser.add_argument("--answer", type=int, nargs=2, default=[128, 512], help="likewise")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a load")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of the load")
    parser.add_argument("--out", help="write JSON rows here")
    bench = Bench(parser.parse_args())
    parts = {"start": start, "serving": serving, "audit": audit}
    is_right = [parts[name](bench) for name in PARTS if name in bench.args.parts]
    sys.exit(0 if all(is_right) else 3)


if __name__ == "__main__":
    main()
