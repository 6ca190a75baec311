# SPDX-License-Identifier: Apache-2.0
"""Bits and speed of the sm90 linear kernels on one GPU: `--tune`, `--bits` and `--final`."""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from detjax.numerics import Reduction
from detjax.pallas_kernels.linear import sm90
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import MatmulTiles

SHAPES = {  # name: (N, K, leaves)
    "qkv": (6144, 4096, 1),
    "o": (4096, 4096, 8),
    "gate_up": (28672, 4096, 1),
    "down": (4096, 14336, 8),
    "lm_head": (128256, 4096, 1),
    "o_1leaf": (4096, 4096, 1),
}
L2_BYTES = 256 << 20
OUT = Path(os.environ.get("OUT", "."))


def tall(cols, stages=4, **more):
    return MatmulTiles(is_swapped=False, cols=cols, stages=stages, **more)


def flat(cols, stages, **more):
    more = {"num_wgs": 1, "k": 128, "delay": 1, **more}
    return MatmulTiles(is_swapped=True, cols=cols, stages=stages, **more)


def label(tiles: MatmulTiles) -> str:
    changed = [
        f"{f.name}={getattr(tiles, f.name)}"
        for f in dataclasses.fields(tiles)
        if f.default is dataclasses.MISSING or getattr(tiles, f.name) != f.default
    ]
    return " ".join(changed).replace("is_swapped=True", "flat").replace("is_swapped=False", "tall")


def bits_of(x):
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)


@jax.jit
def count_different(a, b):
    return jnp.sum(bits_of(a) != bits_of(b[: a.shape[0]]))


def median_us(compiled, arguments, iterations):
    """Median device time; `arguments` are lists of operands used in turn."""
    turn = itertools.cycle(arguments)
    for _ in arguments:
        jax.block_until_ready(compiled(*next(turn)))
    ext = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    ext._cupti_init()
    try:
        outs = [compiled(*next(turn)) for _ in range(iterations)]
        jax.block_until_ready(outs)
    finally:
        timings = ext._cupti_get_timings(True)
    kernels, rest = divmod(len(timings), iterations)
    assert kernels and not rest, len(timings)
    times = [t for _, t in timings]
    return (
        statistics.median([sum(times[i * kernels : (i + 1) * kernels]) for i in range(iterations)])
        * 1e3
    )


class Bench:
    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(14)
        self.rows = []
        self.operands = {}

    def inputs(self, name, max_rows):
        n, k, _ = SHAPES[name]
        copies = max(1, -(-L2_BYTES // (2 * n * k)))
        x = (jax.random.normal(jax.random.key(1), (max_rows, k), jnp.float32)).astype(jnp.bfloat16)
        ws = [
            (jax.random.normal(jax.random.key(7 + i), (n, k), jnp.float32) * 0.02).astype(
                jnp.bfloat16
            )
            for i in range(copies)
        ]
        r = jax.random.normal(jax.random.key(3), (max_rows, n), jnp.bfloat16)
        return x, ws, r

    def compile_all(self, jobs):
        """jobs: (label, fn, shapes); returns futures of compiled functions."""

        def one(fn, shapes):
            return jax.jit(fn).lower(*shapes).compile()

        return [(name, self.pool.submit(one, fn, shapes)) for name, fn, shapes in jobs]


def ours(tiles, name, kind):
    """A function of (x, w, residual): `kind` is bf16, f32 or res."""
    n, k, leaves = SHAPES[name]
    out_dtype = jnp.float32 if kind == "f32" or tiles.groups > 1 else jnp.bfloat16

    def fn(x, w, r):
        out = matmul(
            x,
            w,
            None,
            r if kind == "res" and tiles.groups == 1 else None,
            leaf_len=k // leaves,
            out_dtype=out_dtype,
            tiles=tiles,
        )
        if tiles.groups == 1:
            return out
        if kind == "res":
            return sm90.combine_residual(out, r, None)
        return sm90.combine_partials(out)

    return fn


def cublas(kind):
    def fn(x, w, r):
        out = jnp.dot(x, w.T, preferred_element_type=jnp.float32 if kind == "f32" else None)
        return out + r if kind == "res" else out

    return fn


def run_shape(bench, name, cases, max_rows, iterations=12):
    """cases: (M, kind, tiles). Rivals are timed at each (M, kind) of plain output."""
    n, k, leaves = SHAPES[name]
    x, ws, r = bench.inputs(name, max_rows)
    jobs, keys = [], []
    for m in sorted({c[0] for c in cases}):
        shapes = [
            jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
            jax.ShapeDtypeStruct((n, k), jnp.bfloat16),
            jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        ]
        rival_kind = "f32" if name == "lm_head" else "bf16"
        jobs.append((f"cublas {m}", cublas(rival_kind), shapes))
        keys.append((m, "cublas", None))
        for mm, kind, tiles in cases:
            if mm == m:
                jobs.append((label(tiles), ours(tiles, name, kind), shapes))
                keys.append((m, kind, tiles))
    start = time.time()
    futures = bench.compile_all(jobs)
    for _, f in futures:
        try:
            f.result()
        except Exception:  # reported below, with its name
            pass
    print(
        f"== {name} N={n} K={k} leaves={leaves}: {len(jobs)} compiled "
        f"in {time.time() - start:.1f} s",
        flush=True,
    )
    reference, rival = {}, {}
    for (m, kind, _), (text, future) in zip(keys, futures, strict=True):
        row = {"shape": name, "n": n, "k": k, "leaves": leaves, "m": m, "kind": kind, "tiles": text}
        try:
            compiled = future.result()
            xm, rm = x[:m], r[:m]
            arguments = [(xm, w, rm) for w in ws]
            out = compiled(*arguments[0])
            if kind == "cublas":
                rival[m] = row["us"] = median_us(compiled, arguments, iterations)
                row["different_from_first"] = None
            else:
                if kind not in reference:
                    reference[kind] = out
                    row["error"] = error_of(xm, ws[0], rm if kind == "res" else None, out)
                ref = reference[kind]
                row["different"] = (
                    int(count_different(out, ref))
                    if ref.shape[0] >= m
                    else int(count_different(ref, out))
                )
                row["us"] = median_us(compiled, arguments, iterations)
                row["ratio"] = rival[m] / row["us"]
            row["tflops"] = 2 * m * n * k / row["us"] / 1e6
            row["gb_s"] = 2 * n * k / row["us"] / 1e3
        except Exception as e:
            row["failed"] = f"{type(e).__name__}: {str(e)[:300]}"
        bench.rows.append(row)
        print_row(row)
    with open(OUT / "rows.jsonl", "a") as f:
        for row in bench.rows:
            f.write(json.dumps(row) + "\n")
    done, bench.rows = bench.rows, []
    return done


def print_row(row):
    if "failed" in row:
        print(
            f"{row['shape']:8}{row['m']:6} {row['kind']:6} FAILED {row['tiles']}: "
            f"{row['failed'][:200]}",
            flush=True,
        )
        return
    extra = "" if row["kind"] == "cublas" else f"x{row['ratio']:.3f} diff={row['different']}"
    err = f" err={row['error']:.2e}" if "error" in row else ""
    print(
        f"{row['shape']:8}{row['m']:6} {row['kind']:6}{row['us']:9.2f} us {row['tflops']:5.0f} TF "
        f"{row['gb_s']:5.0f} GB/s {extra}{err} {row['tiles']}",
        flush=True,
    )


def error_of(x, w, residual, out):
    """Relative error of a few rows against float64."""
    rows = np.unique(np.linspace(0, x.shape[0] - 1, 4).astype(int))
    cols = np.arange(0, w.shape[0], 97)
    want = np.asarray(x[rows], np.float64) @ np.asarray(w[cols], np.float64).T
    if residual is not None:
        want = want + np.asarray(residual[rows][:, cols], np.float64)
    got = np.asarray(out[rows][:, cols], np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def tune(bench):
    p = dict(smem_levels=1, is_paired=True)
    lags = [
        tall(128, 4, **p),
        tall(128, 4, lag=1, **p),
        tall(128, 4, lag=2, **p),
        tall(128, 4, lag=3, **p),
        tall(128, 4, lag=2, smem_levels=1),
        tall(128, 8, lag=4, k=32, delay=1, **p),
    ]
    for name in ("o", "down"):
        run_shape(
            bench,
            name,
            [(8192, "res", t) for t in lags]
            + [(2048, "res", t) for t in lags[:4]]
            + [(512, "res", t) for t in lags[:3]],
            8192,
        )
    base = [
        tall(256, cluster_rows=2),
        tall(256, cluster_rows=2, lag=1),
        tall(256, cluster_rows=2, lag=2),
        tall(256, lag=2),
    ]
    run_shape(
        bench,
        "qkv",
        [(8192, "bf16", t) for t in base]
        + [(512, "bf16", t) for t in (tall(192, 5, out_span=64), tall(192, 5, out_span=64, lag=2))],
        8192,
    )


def public(name):
    """The public function of (x, w, residual) for a shape: what a model calls."""
    n, k, leaves = SHAPES[name]
    reduction = Reduction(num_leaves=leaves, leaf_len=k // leaves)

    def fn(x, w, r):
        if leaves == 1:
            out_dtype = jnp.float32 if name == "lm_head" else jnp.bfloat16
            return sm90.linear(x, w, None, out_dtype=jnp.dtype(out_dtype))
        if x.shape[0] <= 128:
            return sm90.linear_partial(x, w, reduction=reduction)
        return sm90.linear_residual(x, w, r, None, reduction=reduction)

    return fn


def fixed(name):
    """The control: Thinking Machines' way, one tile of 128x128x64 for every M and no split."""
    n, k, _ = SHAPES[name]
    out_dtype = jnp.float32 if name == "lm_head" else jnp.bfloat16

    def fn(x, w, r):
        tiles = tall(128, 4)
        return matmul(x, w, None, None, leaf_len=k, out_dtype=out_dtype, tiles=tiles)

    return fn


def final(bench):
    """Every shape at every M with the tiles the rules choose."""
    few, many = (1, 8, 16, 32, 64, 128), (256, 512, 1024, 2048, 4096, 8192)
    results = []
    for name in ("qkv", "o", "gate_up", "down", "lm_head"):
        n, k, leaves = SHAPES[name]
        counts = few if name == "lm_head" else few + many
        x, ws, r = bench.inputs(name, max(counts))
        futures = []
        for m in counts:
            shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (n, k), (m, n))]
            kinds = (
                ("cublas", cublas("f32" if name == "lm_head" else "bf16")),
                ("fixed", fixed(name)),
                ("ours", public(name)),
            )
            for kind, fn in kinds:
                futures.append((m, kind, bench.compile_all([(kind, fn, shapes)])[0][1]))
        rival = {}
        for m, kind, compiled in [(m, kind, f.result()) for m, kind, f in futures]:
            us = median_us(compiled, [(x[:m], w, r[:m]) for w in ws], 15)
            if kind != "ours":
                rival[m, kind] = us
                continue
            row = {
                "fixed_us": rival[m, "fixed"],
                "shape": name,
                "m": m,
                "us": us,
                "rival_us": rival[m, "cublas"],
                "ratio": rival[m, "cublas"] / us,
                "tflops": 2 * m * n * k / us / 1e6,
                "gb_s": 2 * n * k / us / 1e3,
            }
            results.append(row)
            print(
                f"final {name:8}{m:6} {us:9.2f} us, cuBLAS {row['rival_us']:9.2f} us, "
                f"fixed tiles {row['fixed_us']:9.2f} us, x{row['ratio']:.3f}",
                flush=True,
            )
    small = [math.log(row["ratio"]) for row in results if row["m"] <= 128]
    print(f"geometric mean, M 1..128: {math.exp(sum(small) / len(small)):.3f}")
    with open(OUT / "final.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in results)


BIT_ROWS = (
    1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 47, 48, 63, 64, 65, 80, 95, 97, 127, 128,
    129, 135, 160, 191, 192, 193, 200, 255, 256, 257, 300, 384, 512, 777, 1000, 2048, 8192,
)  # fmt: skip


def bits(bench):
    """Rows keep their bits for every M and position; leaves fold; controls differ."""
    for name in ("o", "qkv", "down"):
        n, k, leaves = SHAPES[name]
        x, ws, r = bench.inputs(name, 8192)
        w = ws[0]
        x = (
            x.astype(jnp.float32) * jnp.exp(2 * jax.random.normal(jax.random.key(5), x.shape))
        ).astype(jnp.bfloat16)
        reduction = Reduction(num_leaves=leaves, leaf_len=k // leaves)

        def forward(x, w, leaves=leaves, reduction=reduction):
            if leaves == 1:
                return sm90.linear(x, w, None, out_dtype=jnp.dtype(jnp.bfloat16))
            return sm90.linear_partial(x, w, reduction=reduction)

        shapes = [
            [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (n, k))] for m in BIT_ROWS
        ]
        jobs = bench.compile_all(
            [(str(m), forward, s) for m, s in zip(BIT_ROWS, shapes, strict=True)]
        )
        compiled = {m: f.result() for m, (_, f) in zip(BIT_ROWS, jobs, strict=True)}
        full = compiled[8192](x, w)
        bad = []
        for m in BIT_ROWS[:-1]:
            jnp.full((m, n), jnp.nan, full.dtype).block_until_ready()  # poisons the next output
            out = compiled[m](x[:m], w)
            if int(count_different(out, full)):
                bad.append(m)
        rolled = compiled[1000](jnp.roll(x[:1000], 333, axis=0), w)
        moved = int(count_different(jnp.roll(rolled, -333, axis=0), full))
        loud = compiled[129](x[:129].at[1:].multiply(jnp.bfloat16(2.0**30)), w)
        print(
            f"bits {name}: {len(BIT_ROWS)} row counts, different: {bad}; rolled: {moved}; "
            f"loud neighbours: {int(count_different(loud[:1], full))}",
            flush=True,
        )
        if leaves > 1:
            parts = [
                matmul(
                    x[:256, i : i + k // leaves],
                    w[:, i : i + k // leaves],
                    None,
                    None,
                    leaf_len=k // leaves,
                    out_dtype=jnp.float32,
                    tiles=tall(64, 4, num_wgs=1),
                )
                for i in range(0, k, k // leaves)
            ]
            parts = [np.asarray(p) for p in parts]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=True)]
            print(
                "  numpy fold of 8 leaves, different:",
                int(count_different(jnp.asarray(parts[0]), full)),
            )
            four = Reduction(num_leaves=4, leaf_len=k // 4)
            quarter_tree = functools.partial(sm90.linear_partial, reduction=four)
            other = jax.jit(quarter_tree)(x[:256], w)
            print(
                "  control, 4 leaves, different:",
                int(count_different(other, full)),
                "of",
                other.size,
            )
        dot = jax.jit(lambda x, w: jnp.dot(x, w.T))
        print(
            "  control, cuBLAS M=8 against 8192, different:",
            int(count_different(dot(x[:8], w), dot(x, w))),
            "of",
            8 * n,
        )


def negative_zero():
    """Does wgmma ever give -0 from an accumulator of +0?"""
    for magnitude in (1.0, 2.0**-60, 2.0**-70, 2.0**-100, 2.0**-126):
        x = jnp.full((64, 128), magnitude, jnp.bfloat16)
        w = jnp.full((64, 128), -magnitude, jnp.bfloat16)
        for zero in (False, True):
            xz = x * 0 if zero else x
            out = matmul(
                xz,
                w,
                None,
                None,
                leaf_len=128,
                out_dtype=jnp.float32,
                tiles=tall(64, 2, num_wgs=1),
            )
            flat_out = matmul(
                xz,
                w,
                None,
                None,
                leaf_len=128,
                out_dtype=jnp.float32,
                tiles=flat(64, 1, k=128, delay=0),
            )
            print(
                "negative zero?",
                magnitude,
                zero,
                np.asarray(out)[0, 0],
                hex(np.asarray(out).view(np.uint32)[0, 0]),
                hex(np.asarray(flat_out).view(np.uint32)[0, 0]),
            )


def main():
    parser = argparse.ArgumentParser()
    for name in ("tune", "bits", "final"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    print(jax.__version__, jax.devices(), flush=True)
    bench = Bench()
    if args.tune:
        tune(bench)
    if args.bits:
        negative_zero()
        bits(bench)
    if args.final:
        final(bench)


if __name__ == "__main__":
    main()
