# SPDX-License-Identifier: Apache-2.0
"""float32 activations with bfloat16 weights (LayerCast) on one GPU: bits first, then its cost.

python -m benchmarks.float32 --out float32.jsonl
python -m benchmarks.float32 --model tiny --backend portable --decode 1 3 --prefill 64

Bits: products of few and many rows, a small model's logits by prefill, in chunks, in windows and
token by token, and each row of the timed steps in batches of every size. Then the steps of layers
of a model of 8B parameters in both profiles. `--kernels`: products alone, beside XLA's in float32
and TF32. `--tiles`: products of 48 and 64 rows in two kinds of tiles, bits first.
"""

import argparse
import concurrent.futures
import functools
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Rows, device_us, environment, num_different, random_bf16
from benchmarks.step import MODELS, BitsOfRows, Runner, decode_case, prefill_case
from detjax.engine.running.device_arrays import empty_pages
from detjax.models.loading import random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.linear.sm90 import combine_partials
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import Product, choose_tiles
from detjax.parallel.mesh import make_mesh
from detjax.testing.bitwise import count_different_bits
from detjax.testing.dummies import batch_of, dummy_config, scoring_step

PROFILES = {
    "bfloat16": NumericsProfile(),
    "float32": NumericsProfile(compute_dtype="float32"),
}
SMALL = dummy_config(
    num_heads=8, num_kv_heads=2, head_dim=128, hidden_size=512, intermediate_size=1536,
    vocab_size=1024,
)  # fmt: skip
PIECES = ([700], [128, 572], [572, *[8] * 16], [572, *[8] * 15, *[1] * 8])
"""Lengths in which the tokens of a sequence arrive: a prompt, chunks, windows, single tokens. More
than a split of 512, so that windows and single tokens go by splits."""
SHAPES = {"qkv": (6144, 4096), "gate_up": (28672, 4096)}
COMPARED_ROWS = (1, 3, 64)
TILED = {**SHAPES, "lm_head": (128256, 4096), "o": (4096, 4096), "down": (4096, 14336)}
TILED_ROWS = (48, 64)
"""Three times as many are multiplied: more than 128, and no whole blocks of 128."""


def check_paths(backend: Backend, rows: Rows) -> bool:
    """A position's logits by every path."""
    model = random_model(
        SMALL, seed=0, profile=PROFILES["float32"], backend=backend,
        mesh=make_mesh(1, 1, platform=backend.platform),
    )  # fmt: skip
    tokens = np.random.default_rng(3).integers(0, 1000, 700).astype(np.int32)
    table = np.asarray([[2, 0, 3, 1, 5, 4]], np.int32)
    step, by_pieces = scoring_step(model), []

    def compile_length(length: int) -> None:
        jax.block_until_ready(step(empty_pages(model, 6), batch_of([(tokens[:length], 0)], table)))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_length, {n for pieces in PIECES for n in pieces}))
    for pieces in PIECES:
        pages, out, start = empty_pages(model, 6), [], 0
        for length in pieces:
            pages, logits = step(pages, batch_of([(tokens[start : start + length], start)], table))
            out.append(np.asarray(logits)[0])
            start += length
        by_pieces.append(np.concatenate(out))
    differ = [int(count_different_bits(logits, by_pieces[0])) for logits in by_pieces[1:]]
    finite = bool(np.isfinite(by_pieces[0]).all())
    rows.keep(subject="float32_paths", different=differ, finite=finite)
    return finite and not any(differ)


def check_products(backend: Backend, rows: Rows) -> bool:
    """Rows alone and in company; and how far from float64 a product is, in units of its terms."""
    num_out, k_len = SHAPES["qkv"]
    w = random_bf16((num_out, k_len), 1, 0.02)
    x = jax.random.normal(jax.random.key(2), (257, k_len), jnp.float32)
    run = functools.partial(linear, w=w, out_dtype=jnp.dtype(jnp.float32), backend=backend)
    many = run(x)
    differ = [int(num_different(run(x[:n]), many[:n])) for n in COMPARED_ROWS]
    exact = np.asarray(x[:16], np.float64) @ np.asarray(w, np.float64).T
    terms = np.abs(np.asarray(x[:16], np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    errors = {
        "error": many[:16],
        "error_of_rounded": run(x[:16].astype(jnp.bfloat16).astype(jnp.float32)),
        "error_of_xla": jnp.dot(x[:16], w.astype(jnp.float32).T, precision="highest"),
    }
    worst = {
        name: float((np.abs(np.asarray(out, np.float64) - exact) / terms).max())
        for name, out in errors.items()
    }
    rows.keep(subject="float32_rows", different=differ, **worst)
    return not any(differ)


def time_products(backend: Backend, rows: Rows, table: list[str]) -> None:
    """A product in both profiles, and XLA's of float32 operands."""
    for name, (num_out, k_len) in SHAPES.items():
        ws = [random_bf16((num_out, k_len), i, 0.02) for i in range(2)]
        wide = [w.astype(jnp.float32) for w in ws]
        for num_rows in (1, 64, 1000):
            x = jax.random.normal(jax.random.key(3), (num_rows, k_len), jnp.float32)
            ours = jax.jit(
                functools.partial(linear, out_dtype=jnp.dtype(jnp.float32), backend=backend)
            )
            us = {
                "bfloat16": device_us(ours, [(x.astype(jnp.bfloat16), w) for w in ws]),
                "float32": device_us(ours, [(x, w) for w in ws]),
            }
            for kind, precision in (("xla_float32", "highest"), ("xla_tf32", "default")):
                dot = jax.jit(lambda x, w, p=precision: jnp.dot(x, w.T, precision=p))
                us[kind] = device_us(dot, [(x, w) for w in wide])
            rows.keep(subject="float32_product", product=name, rows=num_rows, us=us)
            times = "  ".join(f"{kind} {value:7.1f}" for kind, value in us.items())
            table.append(f"{name:8} {num_rows:5} rows, us: {times}")


def time_tiles(rows: Rows, table: list[str]) -> bool:
    """Products of 129 to 192 parts: blocks of 64 rows beside those of 128, bits first."""
    same = True
    for name, (num_out, k_len) in TILED.items():
        leaf_len = k_len // (8 if name in ("o", "down") else 1)
        ws = [random_bf16((num_out, k_len), i, 0.02) for i in range(2)]
        for num_rows in (3 * n for n in TILED_ROWS):
            x = random_bf16((num_rows, k_len), 3)
            us, outs = {}, {}
            for kind, has_parts in (("blocks_of_128", False), ("blocks_of_64", True)):
                product = Product(
                    num_rows=num_rows, num_out=num_out, num_leaves=k_len // leaf_len,
                    leaf_len=leaf_len, out_bytes=4, has_parts=has_parts,
                )  # fmt: skip
                run = jax.jit(
                    functools.partial(
                        matmul,
                        bias=None,
                        residual=None,
                        leaf_len=leaf_len,
                        out_dtype=jnp.dtype(jnp.float32),
                        tiles=choose_tiles(product),
                    )  # fmt: skip
                )
                out = run(x, ws[0])
                outs[kind] = combine_partials(out) if out.ndim == 3 else out
                us[kind] = device_us(run, [(x, w) for w in ws])
            differ = int(num_different(*outs.values()))
            same &= differ == 0
            rows.keep(subject="float32_tiles", product=name, rows=num_rows, us=us, different=differ)
            times = "  ".join(f"{kind} {value:7.1f}" for kind, value in us.items())
            table.append(f"{name:8} {num_rows:5} parts, us: {times}, {differ} different")
    return same


def time_steps(args: argparse.Namespace, rows: Rows, table: list[str]) -> bool:
    """Whole steps of both profiles, one after the other: a cache of each fits no GPU beside."""
    config = MODELS[args.model]
    num_layers = min(args.layers, config.num_layers)
    table.append(f"{args.model}, {num_layers} of {config.num_layers} layers and lm_head:")
    config = config.with_layers(list(range(num_layers)))
    cases = [decode_case(b) for b in args.decode] + [prefill_case(n) for n in args.prefill]
    times: dict[tuple[str, str], float] = {}
    same = True
    for name, profile in PROFILES.items():
        runner = Runner(config, cases, Backend(args.backend), 0, profile=profile)
        runner.compile_ahead(cases)
        seen = BitsOfRows()
        for case in cases:
            runs = [runner.choices("invariant", case) for _ in range(2)]
            if case.length == 1:
                agrees = all([seen.agree(case, *run) for run in runs])
            else:
                agrees = count_different_bits(runs[0][1], runs[1][1]) == 0
            same &= agrees
            ms = times[name, case.name] = runner.wall_ms("invariant", case)
            rows.keep(
                subject="float32_step",
                profile=name,
                case=case.name,
                layers=num_layers,
                ms_p50=ms,
                steps=case.repeats,
                same=agrees,
            )
        del runner
    for case in cases:
        bf16, f32 = (times[name, case.name] for name in PROFILES)
        table.append(
            f"{case.name:32} bfloat16 {bf16:8.3f} ms, float32 {f32:8.3f} ms, {f32 / bf16:.2f} x"
        )
    return same


def main() -> None:
    """Check bits, time, and print a table last; exit 3 if a bit differed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--backend", choices=[b.value for b in Backend], default="sm90")
    parser.add_argument(
        "--layers", type=int, default=8, help="most layers; compiling takes longest"
    )
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[1000])
    parser.add_argument("--kernels", action="store_true", help="time products alone too")
    parser.add_argument("--tiles", action="store_true", help="and tiles of 129 to 192 parts (sm90)")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    backend, begin = Backend(args.backend), time.perf_counter()
    if args.tiles and backend is not Backend.SM90:
        parser.error(f"--tiles compares tiles of sm90, not of {args.backend}; use --backend sm90")
    rows = Rows(environment(backend) | {"model": args.model, "backend": args.backend}, args.out)
    table: list[str] = []
    same = check_products(backend, rows)
    same = check_paths(backend, rows) and same
    if not same:
        print("BITS DIFFER: no time is taken")
        sys.exit(3)
    if args.kernels:
        time_products(backend, rows, table)
    if args.tiles:
        same = time_tiles(rows, table)
    same = time_steps(args, rows, table) and same
    print(f"\nbits {'agree' if same else 'DIFFER'}; {time.perf_counter() - begin:.0f} s")
    print("\n".join(table))
    sys.exit(0 if same else 3)


if __name__ == "__main__":
    main()
