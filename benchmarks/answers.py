# SPDX-License-Identifier: Apache-2.0
"""The same prompts on every mesh and at every batch size: how many different answers?

python -m benchmarks.answers --model qwen3_8b --prompts aime24.jsonl --tokenizer qwen3
python -m benchmarks.answers --model tiny --backend portable --batch-sizes 2 8 --max-tokens 8

Tables 1 and 2 of TBIK (Zhang et al. 2025, arXiv:2511.17826), for models of random weights: greedy
and sampled, `invariant`, and `fast` as the control. Exits with 3 if a bit of `invariant` differs.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

from benchmarks.common import Rows, environment
from benchmarks.step import MODELS

# isort: split
import jax
import numpy as np
import rich.console
import rich.table

from benchmarks.reproduce.experiment import digest_of, largest_divergence
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.config import ModelConfig
from detjax.models.loading import LoadedModel, random_model
from detjax.models.tokenizer import Tokenizer
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import configure_virtual_devices, make_mesh

MODES = ("invariant", "fast")
MESHES = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1))


def read_prompts(args: argparse.Namespace, config: ModelConfig) -> list[tuple[int, ...]]:
    """Problems of a file of JSON lines, or random tokens."""
    if args.prompts is None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 200, args.num_prompts)
        return [tuple(rng.integers(0, config.vocab_size, n).tolist()) for n in lengths]
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    lines = args.prompts.read_text().splitlines()[: args.num_prompts]
    return [tuple(tokenizer.encode(json.loads(line)["problem"])) for line in lines]


def requests(
    prompts: Sequence[tuple[int, ...]], max_tokens: int, *, is_deterministic: bool
) -> list[Request]:
    """Each prompt greedy, then at temperature 0.8."""
    return [
        Request(
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i),
            is_deterministic=is_deterministic,
        )
        for temperature in (0.0, 0.8)
        for i, prompt in enumerate(prompts)
    ]


def answer(
    model: LoadedModel, asked: list[Request], mode: str, batch_size: int
) -> list[Completion]:
    """Run the requests on a fresh engine, `batch_size` at a time."""
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in asked)
    config = EngineConfig(
        batch_size=batch_size,
        prefill_chunk=256,
        max_len=-(-longest // 128) * 128,
        mode=mode,
        has_prefix_cache=False,
    )
    engine = Engine(model, config)
    engine.compile()
    return engine.generate(asked)


def compare(
    mode: str, found: dict[tuple[tuple[int, int], int], list[Completion]], rows: Rows
) -> bool:
    """Count different answers of each request over all settings; whether there is one of each."""
    by_request = list(zip(*found.values(), strict=True))
    unique = [len({c.token_ids for c in answers}) for answers in by_request]
    with_logprobs = [len({c.digest() for c in answers}) for answers in by_request]
    rows.keep(
        subject="answers", mode=mode, settings=len(found), requests=len(by_request),
        unique_outputs_mean=float(np.mean(unique)), unique_outputs_max=max(unique),
        unique_with_logprobs_max=max(with_logprobs),
        max_prob_divergence=max(map(largest_divergence, by_request)),
    )  # fmt: skip
    return max(with_logprobs) == 1


def parse_mesh(text: str) -> tuple[int, int]:
    """Read "2x4" as (dp, tp)."""
    dp, _, tp = text.partition("x")
    return int(dp), int(tp)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="tiny", help="shape; weights are random")
    add("--backend", choices=[b.value for b in Backend], default=Backend.SM90.value)
    add("--prompts", type=Path, help="JSON lines with a `problem` each; random tokens without")
    add("--tokenizer", type=Path, help="folder of the tokenizer that reads --prompts")
    add("--num-prompts", type=int, default=30)
    add("--meshes", type=parse_mesh, nargs="+", metavar="DPxTP",
        help="default: all of up to four devices that are there")  # fmt: skip
    add("--batch-sizes", type=int, nargs="+", default=[8, 16, 32])
    add("--max-tokens", type=int, default=64)
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--out", help="write JSON rows here")
    args = parser.parse_args()
    if (args.prompts is None) != (args.tokenizer is None):
        parser.error("--prompts and --tokenizer go together")
    return args


def main() -> int:
    """Ask on every mesh at every batch size; returns the exit code."""
    args = parse_args()
    backend, config = Backend(args.backend), MODELS[args.model]
    configure_virtual_devices(8)
    num_devices = len(jax.devices(backend.platform))
    meshes = args.meshes or [mesh for mesh in MESHES if mesh[0] * mesh[1] <= num_devices]
    rows = Rows(environment(backend) | {"model": args.model}, args.out)
    prompts = read_prompts(args, config)
    settings = {mode: {} for mode in args.modes}
    is_one: dict[str, bool] = {}
    for dp, tp in meshes:
        model = random_model(
            config, seed=0, profile=NumericsProfile(),
            mesh=make_mesh(dp, tp, platform=backend.platform), backend=backend,
        )  # fmt: skip
        for mode, batch_size in itertools.product(args.modes, args.batch_sizes):
            asked = requests(prompts, args.max_tokens, is_deterministic=mode == "invariant")
            begin_s = time.perf_counter()
            answers = answer(model, asked, mode, batch_size)
            settings[mode][(dp, tp), batch_size] = answers
            rows.keep(
                subject="answers_of", mode=mode, mesh=f"{dp}x{tp}", batch=batch_size,
                digest=digest_of(answers), seconds=time.perf_counter() - begin_s,
            )  # fmt: skip
        # After each mesh, so that a run cut short has found something too.
        is_one = {mode: compare(mode, found, rows) for mode, found in settings.items()}
    table = rich.table.Table("mode", "settings", "unique outputs, mean", "most", "with logprobs",
                             "largest divergence")  # fmt: skip
    summaries = [row for row in rows.rows if row["subject"] == "answers"]
    for row in summaries[-len(settings) :]:
        table.add_row(
            row["mode"], str(row["settings"]), f"{row['unique_outputs_mean']:.2f}",
            str(row["unique_outputs_max"]), str(row["unique_with_logprobs_max"]),
            f"{row['max_prob_divergence']:.3g}",
        )  # fmt: skip
    rich.console.Console(width=120).print(table)
    return 0 if is_one.get("invariant", True) else 3


if __name__ == "__main__":
    sys.exit(main())
