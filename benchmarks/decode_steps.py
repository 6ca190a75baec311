# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of an engine by the steps of a launch and the sequences at once.

python -m benchmarks.decode_steps --shapes smollm2_135m --batch 1 8 64 256 --out steps.jsonl
python -m benchmarks.decode_steps --shapes tiny --backend portable --batch 2 --tokens 16

Random weights. Twice as many sampled requests as sequences run, of unlike prompts and lengths. The
engines answer in turn. Exits with 3 if an answer differs from that of one step a launch.
"""

import argparse
import statistics
import sys

import numpy as np

from benchmarks.common import Rows, environment
from benchmarks.speculation import num_different, rate_of, warmed_up
from benchmarks.step import MODELS
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

_BATCHES = 1, 8, 64, 128


def requests_of(model: LoadedModel, count: int, tokens: int) -> list[Request]:
    """Prompts of 32 to 95 tokens, answers of three to four quarters of `tokens`."""
    rng = np.random.default_rng(0)
    least = tokens * 3 // 4
    return [
        Request(
            prompt_token_ids=tuple(map(int, rng.integers(0, model.config.vocab_size, 32 + i % 64))),
            sampling=SamplingParams(
                max_tokens=least + i * 7 % (tokens - least), temperature=1.0, seed=i
            ),
        )
        for i in range(count)
    ]


def measure(model: LoadedModel, args: argparse.Namespace, batch: int, rows: Rows) -> bool:
    """Time engines of so many sequences in turn; False if a bit differs."""
    asked = requests_of(model, 2 * batch, args.tokens)
    max_len, chunk = 96 + args.tokens, 128
    pages = batch * -(-max_len // model.profile.attention_block)
    engines = [
        Engine(
            model,
            EngineConfig(
                batch_size=batch, prefill_chunk=chunk, max_len=max_len, num_pages=pages,
                decode_batches=tuple(n for n in _BATCHES if n < batch), max_prefill_streak=64,
                self_check="off", decode_steps=steps,
            ),
        )
        for steps in args.steps
    ]  # fmt: skip
    answers = [warmed_up(engine, asked) for engine in engines]
    times = [[rate_of(engine, asked) for engine in engines] for _ in range(args.rounds)]
    rates = [statistics.median(of_engine) for of_engine in zip(*times, strict=True)]
    for steps, rate, found in zip(args.steps, rates, answers, strict=True):
        rows.keep(
            subject="decode_steps", batch=batch, decode_steps=steps, tokens_per_s=rate,
            over_first=rate / rates[0], different=num_different(found, answers[0]),
            answers=len(found), tokens=sum(len(done.token_ids) for done in found),
        )  # fmt: skip
    return not any(num_different(found, answers[0]) for found in answers)


def main() -> None:
    """Measure every batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=MODELS, default="smollm2_135m")
    parser.add_argument("--backend", choices=[one.value for one in Backend], default="sm90")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 8], help="of a launch")
    parser.add_argument("--tokens", type=int, default=256, help="most of an answer; at least 4")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    backend = Backend(args.backend)
    card = environment(backend) | {"model": args.shapes, "backend": args.backend}
    model = random_model(
        MODELS[args.shapes], seed=0, profile=NumericsProfile(),
        mesh=make_mesh(1, 1, platform=backend.platform), backend=backend,
    )  # fmt: skip
    rows = Rows(card, args.out)
    sys.exit(0 if all([measure(model, args, batch, rows) for batch in args.batch]) else 3)


if __name__ == "__main__":
    main()
