# SPDX-License-Identifier: Apache-2.0
"""The whole decode and prefill step of a model: bits first, then time, beside what rivals it.

python -m benchmarks.step --mode both --transformers --decode 1 8 64 --prefill 4000 --out step.jsonl
python -m benchmarks.step --kernels --decode 8 --prefill
python -m benchmarks.step --model tiny --backend portable --mode both --decode 1 3 --prefill 64

Wall time of dependent steps, median of five runs. `fast` is the same model without claims
(`detjax.models.fast`), compiled with every liberty that XLA takes by default.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    COPY_BYTES_PER_S,
    MATRIX_FLOP_PER_S,
    Rows,
    by_kernel,
    environment,
    kernel_events,
    run_rivals,
)
from detjax.models.config import ModelConfig, RopeConfig
from detjax.models.fast import LARGEST, quantise_params, quantised_specs
from detjax.models.layers import Tokens
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.serving.request import SamplingParams
from detjax.serving.sampling import SamplingRows
from detjax.serving.steps import pages_shape, step_function
from detjax.xla_flags import EXACT_OPTIONS, FAST_OPTIONS

CONTEXT = 1024
"""Tokens of each sequence at a decode step, the new one included."""


def _config(*, qk_norm: bool = False, **sizes) -> ModelConfig:
    return ModelConfig(
        family="llama",
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        qk_norm=qk_norm,
        sliding_windows=(None,) * sizes["num_layers"],
        bos_token_id=None,
        eos_token_ids=(),
        **sizes,
    )


MODELS = {
    "llama3_8b": _config(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=14336,
    ),
    "qwen3_8b": _config(
        vocab_size=151936, hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=12288, qk_norm=True,
    ),
    "mistral_7b": _config(
        vocab_size=32768, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate_size=14336,
    ),
    "tiny": _config(
        vocab_size=1024, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=64, intermediate_size=384,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One step: which rows of the cache get `length` tokens from position `start` on."""

    name: str
    rows: Sequence[int]
    length: int
    start: int
    repeats: int


def decode_case(batch: int) -> Case:
    """One token for each of `batch` sequences."""
    name = f"decode batch {batch} context {CONTEXT}"
    return Case(name, range(batch), length=1, start=CONTEXT - 1, repeats=20)


def prefill_case(length: int) -> Case:
    """One whole prompt."""
    return Case(f"prefill {length} tokens", [0], length=length, start=0, repeats=3)


class Runner:
    """Models by implementation over one cache, and their compiled steps."""

    def __init__(self, config: ModelConfig, most_rows: int, backend: Backend):
        """Draw random weights and a random cache of CONTEXT tokens a row."""
        self.model = random_model(
            config,
            seed=0,
            profile=NumericsProfile(),
            mesh=make_mesh(1, 1, platform=backend.platform),
            backend=backend,
        )
        self.table_len = CONTEXT // 128 + 1
        self.num_pages = most_rows * self.table_len
        shape = pages_shape(self.model, self.num_pages)

        def draw():
            bits = jax.random.bits(jax.random.key(1), shape.shape, jnp.uint16)
            return (bits.astype(jnp.float32) / 2.0**15 - 1.0).astype(shape.dtype)

        self.pages = jax.jit(draw, out_shardings=shape.sharding)()
        self.models = {"invariant": self.model, "fast": self.model}
        self._steps = {}

    def add_draft(self, dtype: str) -> str:
        """Quantise the model; gives the name of the implementation."""
        self.models[f"fast {dtype}"] = dataclasses.replace(
            self.model,
            params=quantise_params(self.model.params, jnp.dtype(dtype)),
            partition_specs=quantised_specs(self.model.partition_specs),
        )
        return f"fast {dtype}"

    def arguments(self, case: Case) -> tuple:
        """Tokens, the same for the same row and position, and sampling parameters."""
        positions = np.arange(case.start, case.start + case.length, dtype=np.int32)
        positions = np.tile(positions, (len(case.rows), 1))
        rows = np.asarray(case.rows)[:, None]
        ids = (rows * 977 + positions * 31) % self.model.config.vocab_size
        table_len = max(self.table_len, -(-case.length // 128))
        pages = rows * self.table_len + np.arange(table_len)[None]
        tokens = Tokens(
            ids=ids.astype(np.int32), positions=positions,
            page_table=np.minimum(pages, self.num_pages - 1).astype(np.int32),
        )  # fmt: skip
        sampling = [(SamplingParams(temperature=0.7, seed=r), 0) for r in case.rows]
        return jax.device_put((tokens, SamplingRows.pack(sampling)))

    def compiled(self, impl: str, case: Case) -> tuple[Callable, float]:
        """The step with its weights, of (pages, tokens, rows), and the seconds compiling took."""
        key = (impl, len(case.rows), case.length)
        model = self.models[impl]
        if key not in self._steps:
            start = time.perf_counter()
            mode, _, _ = impl.partition(" ")
            step = step_function(model, num_top=0, with_filters=False, mode=mode)
            options = EXACT_OPTIONS if mode == "invariant" else FAST_OPTIONS
            lowered = jax.jit(step, donate_argnums=2).lower(
                model.params, model.rope_tables, self.pages, *self.arguments(case)
            )
            compiled = lowered.compile(compiler_options=options)
            self._steps[key] = compiled, time.perf_counter() - start
        step, seconds = self._steps[key]

        def run(pages, *arguments):
            return step(model.params, model.rope_tables, pages, *arguments)

        return run, seconds

    def compile_ahead(self, cases: list[Case]) -> None:
        """Compile the invariant steps side by side; not XLA's, which it tunes by measuring."""
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda case: self.compiled("invariant", case), cases))

    def choices(self, impl: str, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and logprobs of one step."""
        step, _ = self.compiled(impl, case)
        self.pages, choice = step(self.pages, *self.arguments(case))
        return np.asarray(choice.token_ids), np.asarray(choice.logprobs)

    def run(self, impl: str, case: Case, repeats: int) -> float:
        """Run dependent steps; milliseconds of wall time a step."""
        step, _ = self.compiled(impl, case)
        arguments = self.arguments(case)
        jax.block_until_ready((self.pages, arguments))
        begin = time.perf_counter()
        for _ in range(repeats):
            self.pages, choice = step(self.pages, *arguments)
        jax.block_until_ready((self.pages, choice))
        return (time.perf_counter() - begin) / repeats * 1e3

    def wall_ms(self, impl: str, case: Case) -> float:
        """Median of five runs, after one that warms up."""
        return statistics.median([self.run(impl, case, case.repeats) for _ in range(6)][1:])


def decode_floor_ms(model: LoadedModel, batch: int) -> float:
    """Weight and cache bytes over the copy bandwidth."""
    weights = sum(x.nbytes for x in jax.tree.leaves(model.params)) - model.params["embed"].nbytes
    config = model.config
    kv = 4 * config.num_layers * batch * config.num_kv_heads * CONTEXT * config.head_dim
    return (weights + kv) / COPY_BYTES_PER_S * 1e3


def prefill_flop(model: LoadedModel, length: int) -> float:
    """Multiply-adds of the layers' products and of causal attention, two operations each."""
    weights = sum(x.size for layer in model.params["layers"] for x in jax.tree.leaves(layer))
    config = model.config
    scores = config.num_layers * config.num_heads * config.head_dim * length**2
    return 2 * weights * length + 2 * scores


def show_kernels(runner: Runner, impl: str, case: Case) -> None:
    """Print what takes a step's time on the device."""
    times = by_kernel(kernel_events(lambda: runner.run(impl, case, 3)), repeats=3)
    total = sum(us for _, _, us in times)
    print(f"  {impl}: {total:10.1f} us in {sum(n for _, n, _ in times):.0f} launches")
    for name, launches, us in times[:24]:
        print(f"  {us:10.1f} us {launches:6.0f} x {us / launches:8.2f}  {name[:70]}")


class BitsOfRows:
    """Whether each row of the cache always gets the bits that it first got."""

    def __init__(self):
        """Nothing is known yet."""
        self._first: dict[int, tuple] = {}

    def agree(self, case: Case, ids: np.ndarray, logprobs: np.ndarray) -> bool:
        """Compare a step's rows with earlier ones; rows not seen before are kept."""
        same = True
        for row, token, bits in zip(case.rows, ids, logprobs.view(np.uint32), strict=True):
            same = self._first.setdefault(row, (token, bits)) == (token, bits) and same
        return same


def check_bits(runner: Runner, seen: BitsOfRows, case: Case, rows: Rows) -> bool:
    """Run the invariant step twice and compare every row with every batch before."""
    _, compile_s = runner.compiled("invariant", case)
    runs = [runner.choices("invariant", case) for _ in range(2)]
    same = all([seen.agree(case, *run) for run in runs])
    rows.keep(subject="step_bits", case=case.name, same=same, compile_s=compile_s)
    return same


def time_case(runner: Runner, impls: list[str], case: Case, rows: Rows, *, kernels: bool) -> None:
    """Time every implementation of one step, one after the other, and what they are to another."""
    times, chosen = {}, {}
    for impl in impls:
        try:
            _, compile_s = runner.compiled(impl, case)
            chosen[impl] = runner.choices(impl, case)
            ms = times[impl] = runner.wall_ms(impl, case)
        except Exception as error:
            rows.keep(
                subject="step", impl=impl, case=case.name,
                failed=f"{type(error).__name__}: {error}"[:300],
            )  # fmt: skip
            continue
        row = {"subject": "step", "impl": impl, "case": case.name, "ms_p50": ms}
        if case.length == 1:
            floor = decode_floor_ms(runner.models[impl], len(case.rows))
            row |= {"batch": len(case.rows), "floor_ms": floor, "floor_over_measured": floor / ms}
        else:
            share = prefill_flop(runner.model, case.length) / (ms * 1e-3) / MATRIX_FLOP_PER_S
            row |= {"tokens": case.length, "share_of_790_tflop_per_s": share}
        rows.keep(**row, compile_s=compile_s)
        if kernels:
            show_kernels(runner, impl, case)
    for impl in [i for i in times if i != "invariant" and "invariant" in times]:
        (ids, logprobs), (fast_ids, fast_logprobs) = chosen["invariant"], chosen[impl]
        rows.keep(
            subject="step_ratio", case=case.name, over=impl,
            speed_of_invariant=times[impl] / times["invariant"],
            same_tokens=float((ids == fast_ids).mean()),
            logprob_difference=float(np.abs(logprobs - fast_logprobs).max()),
        )  # fmt: skip


def transformers_rows(config: ModelConfig, batches: list[int], seconds: float) -> list[dict]:
    """Decode steps of Hugging Face transformers on a model of this shape, in its own process."""
    sizes = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    found, why_not = run_rivals(
        "transformers", "--model", json.dumps(sizes), "--context", str(CONTEXT),
        "--seconds", str(seconds), "--batch", *map(str, batches), timeout_s=seconds + 40,
    )  # fmt: skip
    rows = [{"subject": "step", "case": decode_case(row["batch"]).name} | row for row in found]
    if why_not:
        rows.append(
            {"subject": "step", "impl": "transformers", "case": "decode", "failed": why_not}
        )
    return rows


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument(
        "--mode", choices=["invariant", "fast", "both"], nargs="*", default=["invariant"],
        help="with none, only transformers runs",
    )  # fmt: skip
    parser.add_argument(
        "--drafts", choices=LARGEST, nargs="*", default=[], help="time 8-bit weights too, fast"
    )
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096])
    parser.add_argument("--transformers", action="store_true", help="time transformers too")
    parser.add_argument("--transformers-seconds", type=float, default=300.0, help="stop it then")
    parser.add_argument("--kernels", action="store_true", help="list the time of each kernel")
    parser.add_argument("--out", help="write JSON rows here")
    return parser.parse_args()


def main() -> None:
    """Check, time, and write rows; exit 3 if a bit differed."""
    args = parse_args()
    backend, config = Backend(args.backend), MODELS[args.model]
    # First, while the GPU's memory is free.
    rivals = []
    if args.transformers:
        rivals = transformers_rows(config, args.decode, args.transformers_seconds)
    card = environment(backend) | {
        "model": args.model, "backend": args.backend, "data": "random weights and cache, uniform",
    }  # fmt: skip
    rows = Rows(card, args.out)
    for row in rivals:
        rows.keep(**row)
    impls = [m for m in ("invariant", "fast") if m in args.mode or "both" in args.mode]
    if not impls and not args.drafts:
        return
    most = max([1, *args.decode, *(-(-length // CONTEXT) for length in args.prefill)])
    runner = Runner(config, most, backend)
    cases = [decode_case(b) for b in args.decode] + [prefill_case(n) for n in args.prefill]
    if "invariant" in impls:
        runner.compile_ahead(cases)
    impls += [runner.add_draft(dtype) for dtype in args.drafts]
    seen, failed = BitsOfRows(), False
    for case in cases:
        if "invariant" in impls and case.length == 1 and not check_bits(runner, seen, case, rows):
            failed = True
            continue
        time_case(runner, impls, case, rows, kernels=args.kernels)
    failed |= any(row.get("impl") == "invariant" and "failed" in row for row in rows.rows)
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
