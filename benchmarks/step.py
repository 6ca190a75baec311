# SPDX-License-Identifier: Apache-2.0
"""The whole decode and prefill step of a model: bits first, then time.

python -m benchmarks.step --model llama3_8b --backend sm90 --decode 1 8 64 --prefill 4096
python -m benchmarks.step --model tiny --backend portable --decode 1 3 --prefill 64
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np

from detjax.models.config import ModelConfig, RopeConfig
from detjax.models.layers import Tokens
from detjax.models.loading import random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.serving.request import SamplingParams
from detjax.serving.sampling import SamplingRows
from detjax.serving.steps import StepShape, compile_step, pages_shape

COPY_BYTES_PER_S = 4.3e12
MATRIX_FLOP_PER_S = 790e12
CONTEXT = 1024


def _config(**sizes) -> ModelConfig:
    return ModelConfig(
        family="llama",
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
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
    "tiny": _config(
        vocab_size=1024, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=64, intermediate_size=384,
    ),
}  # fmt: skip


class Runner:
    """A model, its cache, and compiled steps by shape."""

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
        self.steps = {}

    def step(self, rows: int, length: int):
        """The compiled step, and how long it took to compile."""
        start = time.perf_counter()
        if (rows, length) not in self.steps:
            table_len = max(self.table_len, -(-length // 128))
            shape = StepShape(
                batch=rows, length=length, table_len=table_len, num_pages=self.num_pages,
                num_top=0, with_filters=False,
            )  # fmt: skip
            self.steps[rows, length] = compile_step(self.model, shape)
        return self.steps[rows, length], time.perf_counter() - start

    def arguments(self, rows: list[int], length: int, start: int):
        """Tokens at `start` of each row; the same token for the same row and position."""
        positions = np.tile(np.arange(start, start + length, dtype=np.int32), (len(rows), 1))
        ids = (np.asarray(rows)[:, None] * 977 + positions * 31) % self.model.config.vocab_size
        table_len = max(self.table_len, -(-length // 128))
        pages = np.asarray(rows)[:, None] * self.table_len + np.arange(table_len)[None]
        tokens = Tokens(
            ids=ids.astype(np.int32), positions=positions,
            page_table=np.minimum(pages, self.num_pages - 1).astype(np.int32),
        )  # fmt: skip
        sampling = [(SamplingParams(temperature=0.7, seed=r), 0) for r in rows]
        return jax.device_put((tokens, SamplingRows.pack(sampling)))

    def run(self, rows: list[int], length: int, start: int):
        """One step; gives (token ids, logprob bits)."""
        step, _ = self.step(len(rows), length)
        self.pages, choice = step(
            self.model.params, self.model.rope_tables, self.pages,
            *self.arguments(rows, length, start),
        )  # fmt: skip
        return np.asarray(choice.token_ids), np.asarray(choice.logprobs).view(np.uint32)

    def wall_ms(self, rows: list[int], length: int, start: int, *, repeats: int) -> float:
        """Median over five runs of the mean wall time of `repeats` dependent steps."""
        step, _ = self.step(len(rows), length)
        args = self.arguments(rows, length, start)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(repeats):
                self.pages, choice = step(
                    self.model.params, self.model.rope_tables, self.pages, *args
                )
            jax.block_until_ready((self.pages, choice))
            times.append((time.perf_counter() - begin) / repeats * 1e3)
        return statistics.median(times)

    def kernel_times(self, rows: list[int], length: int, start: int, *, repeats: int = 3) -> list:
        """(kernel, launches a step, microseconds a step), longest first, from CUPTI."""
        from jax.experimental.mosaic.gpu import profiler

        step, _ = self.step(len(rows), length)
        args = self.arguments(rows, length, start)
        ext = profiler.mosaic_gpu_lib._mosaic_gpu_ext
        ext._cupti_init()
        try:
            for _ in range(repeats):
                self.pages, choice = step(
                    self.model.params, self.model.rope_tables, self.pages, *args
                )
            jax.block_until_ready((self.pages, choice))
        finally:
            timings = ext._cupti_get_timings(True)
        total = collections.defaultdict(lambda: [0, 0.0])
        for name, milliseconds in timings:
            total[name][0] += 1
            total[name][1] += milliseconds * 1e3
        rows = [(name, n / repeats, us / repeats) for name, (n, us) in total.items()]
        return sorted(rows, key=lambda row: -row[2])


def decode_floor_ms(model, rows: int) -> float:
    """Weight and cache bytes over the copy bandwidth."""
    weights = sum(x.nbytes for x in jax.tree.leaves(model.params)) - model.params["embed"].nbytes
    config = model.config
    kv = 4 * config.num_layers * rows * config.num_kv_heads * CONTEXT * config.head_dim
    return (weights + kv) / COPY_BYTES_PER_S * 1e3


def prefill_flop(model, length: int) -> float:
    """Multiply-adds of the layers' products and of causal attention, two operations each."""
    weights = sum(x.size for layer in model.params["layers"] for x in jax.tree.leaves(layer))
    config = model.config
    scores = config.num_layers * config.num_heads * config.head_dim * length**2
    return 2 * weights * length + 2 * scores


def show_kernels(times: list) -> None:
    """Print what takes a step's time on the device."""
    print(
        f"  {sum(us for _, _, us in times):10.1f} us in {sum(n for _, n, _ in times):.0f} launches"
    )
    for name, launches, us in times[:24]:
        print(f"  {us:10.1f} us {launches:6.0f} x {us / launches:8.2f}  {name[:70]}")


def main():
    """Check, time, and print rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096])
    parser.add_argument("--kernels", action="store_true", help="list the time of each kernel")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    backend = Backend(args.backend)
    device = jax.devices(backend.platform)[0]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(f"{device.device_kind}, jax {jax.__version__}, commit {commit or 'unknown'}", flush=True)
    most = max(args.decode, default=1)
    most = max(most, -(-max(args.prefill, default=1) // CONTEXT))
    runner = Runner(MODELS[args.model], most, backend)
    card = {
        "gpu": device.device_kind, "jax": jax.__version__, "commit": commit,
        "fingerprint": runner.model.fingerprint, "data": "random weights and cache, uniform",
        "model": args.model, "backend": args.backend, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    rows, failed = [], False

    def keep(**row):
        rows.append(row | card)
        print(json.dumps(row), flush=True)
        if args.out:
            with open(args.out, "w") as file:
                file.writelines(json.dumps(r) + "\n" for r in rows)

    alone = {}
    for count in args.decode:
        _, compile_s = runner.step(count, 1)
        ids, bits = runner.run(list(range(count)), 1, CONTEXT - 1)
        again = runner.run(list(range(count)), 1, CONTEXT - 1)
        same = bool((ids == again[0]).all() and (bits == again[1]).all())
        for row in range(count):
            alone.setdefault(row, (ids[row], bits[row]))
            same = same and alone[row] == (ids[row], bits[row])
        failed = failed or not same
        keep(subject="step_bits", case=f"decode batch {count}", same=same, compile_s=compile_s)
        if same:
            ms = runner.wall_ms(list(range(count)), 1, CONTEXT - 1, repeats=20)
            floor = decode_floor_ms(runner.model, count)
            keep(
                subject="step", impl="invariant", case=f"decode batch {count} context {CONTEXT}",
                ms_p50=ms, floor_ms=floor, floor_over_measured=floor / ms,
            )  # fmt: skip
            if args.kernels:
                show_kernels(runner.kernel_times(list(range(count)), 1, CONTEXT - 1))
    for length in args.prefill:
        _, compile_s = runner.step(1, length)
        ms = runner.wall_ms([0], length, 0, repeats=3)
        share = prefill_flop(runner.model, length) / (ms * 1e-3) / MATRIX_FLOP_PER_S
        keep(
            subject="step", impl="invariant", case=f"prefill {length} tokens", ms_p50=ms,
            share_of_790_tflop_per_s=share, compile_s=compile_s,
        )  # fmt: skip
        if args.kernels:
            show_kernels(runner.kernel_times([0], length, 0))
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
