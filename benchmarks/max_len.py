# SPDX-License-Identifier: Apache-2.0
"""Whether a decode step follows the lengths of its sequences, or the longest that is allowed.

python -m benchmarks.max_len --out max_len.jsonl
python -m benchmarks.max_len --model tiny --backend portable --max-len 256 1024 --prompt 100

Engines that differ in `max_len` alone answer the same requests, in turn. Wall time of a step of the
engine while all of a batch decode, medians; the answers are compared bit for bit.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import numpy as np

from benchmarks.common import Rows, environment
from benchmarks.step import MODELS
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.request_output import RequestOutput
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

TOKENS, SKIPPED = 60, 8


def decode_ms(engine: Engine, prompts: list[list[int]]) -> tuple[float, list]:
    """Median step with all prompts decoding, and what was released, in order of request."""
    sampling = SamplingParams(max_tokens=TOKENS)
    ids = [engine.add_request(prompt, sampling) for prompt in prompts]
    outputs: list[RequestOutput] = []
    while {o.request_id for o in outputs} < set(ids):
        outputs += engine.step()
    times = []
    for _ in range(TOKENS - 2 * SKIPPED):
        begin = time.perf_counter()
        outputs += engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    outputs += engine.drain()
    released = {i: [(o.token_ids, o.logprobs) for o in outputs if o.request_id == i] for i in ids}
    return statistics.median(times[SKIPPED:]), [sum(released[i], ()) for i in ids]


def measure(model: LoadedModel, args: argparse.Namespace, rows: Rows) -> bool:
    """Time every batch under every `max_len` in turn; False if an answer differed."""
    most = max(args.batch)
    rng = np.random.default_rng(0)
    vocab_size = model.config.vocab_size
    prompts = rng.integers(0, vocab_size, (most, args.prompt)).tolist()
    times: dict[tuple[int, int], list[float]] = {}
    answers: dict[int, list] = {}
    programs, is_right = None, True
    for _ in range(args.rounds):
        for max_len in args.max_len:
            config = EngineConfig(
                batch_size=most, decode_batches=tuple(b for b in args.batch if b < most),
                prefill_chunk=512, prefill_shapes=((8, 512),), max_len=max_len,
                num_pages=most * -(-min(args.max_len) // 128), has_prefix_cache=False,
            )  # fmt: skip
            # Only what runs is compiled: most programs of a long `max_len` are not needed here.
            engine = Engine(model, config, programs=programs)
            programs = engine.programs
            for batch in args.batch:
                ms, got = decode_ms(engine, prompts[:batch])
                times.setdefault((batch, max_len), []).append(ms)
                is_right &= answers.setdefault(batch, got) == got
            del engine
            gc.collect()
    for batch in args.batch:
        least = statistics.median(times[batch, min(args.max_len)])
        for max_len in args.max_len:
            ms = statistics.median(times[batch, max_len])
            rows.keep(
                subject="max_len", batch=batch, max_len=max_len, context=args.prompt + TOKENS // 2,
                ms_p50=ms, ratio_to_shortest=ms / least, same=is_right,
            )  # fmt: skip
    return is_right


def main() -> None:
    """Measure; exit 3 if an answer depends on `max_len`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-len", type=int, nargs="+", default=[1280, 4352, 131072])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    backend = Backend(args.backend)
    rows = Rows(environment(backend) | {"model": args.model, "backend": args.backend}, args.out)
    config = dataclasses.replace(
        MODELS[args.model], max_position_embeddings=max(8192, *args.max_len)
    )
    model = random_model(
        config, seed=0, profile=NumericsProfile(),
        mesh=make_mesh(1, 1, platform=backend.platform), backend=backend,
    )  # fmt: skip
    sys.exit(0 if measure(model, args, rows) else 3)


if __name__ == "__main__":
    main()
