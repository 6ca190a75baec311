# SPDX-License-Identifier: Apache-2.0
"""Bits and speed of the sm90 linear kernels on one GPU.

`--gated`: gate and up with SwiGLU in one kernel. `--trees`: eight leaves; `--middle`: those of 129
to 512 rows. `--layers`: the products of a prefill in a row. `--bits`, `--final`: every row count
and every shape with the tiles chosen.
"""

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
from detjax.pallas_kernels.linear.tiles import FlatTiles, TallTiles, fill_stages
from detjax.pallas_kernels.swiglu.sm90 import swiglu

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
    return TallTiles(cols=cols, stages=stages, **more)


def flat(cols, stages, **more):
    return FlatTiles(cols=cols, stages=stages, **{"k": 128, **more})


def bits_of(x):
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32)


@jax.jit
def count_different(a, b):
    return jnp.sum(bits_of(a) != bits_of(b[: a.shape[0]]))


def median_us(compiled, arguments, iterations=12):
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


def cublas(kind):
    def fn(x, w, r):
        out = jnp.dot(x, w.T, preferred_element_type=jnp.float32 if kind == "f32" else None)
        return out + r if kind == "res" else out

    return fn


def sustained_us(compiled, arguments, seconds=0.12):
    """Time of one call in a queue that is never empty, once clocks and power have settled."""
    turn = itertools.cycle(arguments)

    def run(calls):
        start = time.perf_counter()
        for _ in range(calls):
            out = compiled(*next(turn))
        out.block_until_ready()
        return (time.perf_counter() - start) / calls

    calls = max(8, int(seconds / run(4)))
    run(calls)
    return run(calls) * 1e6


def compare(bench, title, functions, arguments, timer, reference=None):
    """One line of times; `!n` marks n elements with other bits than `reference` or the first.

    Rivals, whose names start with a capital, promise no bits. Returns the first one's output.
    """
    jobs = bench.compile_all([(name, fn, arguments[0]) for name, fn in functions.items()])
    cells, first_us, row = [], None, {"compare": title}
    for name, future in jobs:
        try:
            compiled = future.result()
            out = np.asarray(compiled(*arguments[0]))
            us = timer(compiled, arguments)
        except Exception as e:
            cells.append(f"{name} FAILED {type(e).__name__} {str(e)[:120]}")
            continue
        different = 0
        if not name[0].isupper():
            reference = out if reference is None else reference
            size = min(len(out), len(reference))
            different = int((out[:size].view(np.uint16) != reference[:size].view(np.uint16)).sum())
        first_us = first_us or us
        row[name] = {"us": us, "different": different}
        mark = f" !{different}" if different else ""
        cells.append(f"{name} {us:.1f}" + (f" ({first_us / us:.3f})" if cells else "") + mark)
    print(f"{title}: " + ", ".join(cells), flush=True)
    with open(OUT / "compare.jsonl", "a") as f:
        f.write(json.dumps(row) + "\n")
    return reference


def with_tiles(tiles, leaf_len, **fit):
    """A product with its stages filled, of (x, w) or (x, w, residual)."""
    tiles = fill_stages(tiles, out_bytes=2, **fit)

    def fn(x, w, residual=None):
        return matmul(
            x, w, None, residual, leaf_len=leaf_len, out_dtype=jnp.bfloat16, tiles=tiles
        )  # fmt: skip

    return fn


def product(x, w):
    return sm90.linear(x, w, None, out_dtype=jnp.dtype(jnp.bfloat16))


def product_then_swiglu(x, w):
    return swiglu(product(x, w))


def xla_swiglu(x, w):
    """What XLA makes of it, with the activation in float32."""
    gate, up = jnp.split(jnp.dot(x, w.T), 2, axis=1)
    gate = gate.astype(jnp.float32)
    return (gate * jax.nn.sigmoid(gate) * up.astype(jnp.float32)).astype(x.dtype)


GATED_ROWS = (*range(1, 18), 31, 64, 100, 128, 129, 256, 333, 1000, 2048, 4000)


def gated_variants(num_rows):
    """Tiles of gates and ups worth a try at `num_rows`."""
    wide = tall(256, is_gated=True)
    if num_rows <= 32:
        rows = flat(-(-num_rows // 8) * 8, 2, is_gated=True)
        return {
            "two CTAs k64": dataclasses.replace(rows, k=64, ctas_per_sm=2),
            "one CTA": rows,
            "one CTA k256": dataclasses.replace(rows, k=256),
            "256 weights": dataclasses.replace(rows, num_wgs=2),
            "tall 224": tall(224, num_wgs=1, out_span=64, is_gated=True),
        }
    if num_rows <= 128:
        wgs = 1 if num_rows <= 64 else 2
        one_wave = tall(224, num_wgs=wgs, out_span=64, is_gated=True)
        return {
            "k128": dataclasses.replace(one_wave, k=128, stages=2),
            "256 weights": flat(num_rows, 2, num_wgs=2, k=64, is_gated=True),
        }
    if num_rows < 2048:
        return {
            "256": wide,
            "224": dataclasses.replace(wide, cols=224, out_span=64),
            "lag 2": dataclasses.replace(wide, lag=2),
        }
    pairs = dataclasses.replace(wide, cluster=(2, 1))
    three = dataclasses.replace(wide, num_wgs=3, cols=192, out_span=64)
    few = {
        "lag 2": dataclasses.replace(pairs, lag=2),
        "alone lag 2": dataclasses.replace(wide, lag=2),
        "192x192": three,
    }
    if num_rows > 4096:
        return few
    return {
        **few,
        "lag 1": dataclasses.replace(pairs, lag=1),
        "lag 3": dataclasses.replace(pairs, lag=3),
        "k32 lag 4": dataclasses.replace(pairs, k=32, stages=8, lag=4, out_span=64),
        "alone": wide,
        "columns": dataclasses.replace(wide, cluster=(1, 2)),
        "192x192 columns": dataclasses.replace(three, cluster=(1, 2)),
    }


def gated_bits(bench):
    """`linear_swiglu` at every row count against the product and SwiGLU one after the other."""
    x, ws, _ = bench.inputs("gate_up", 4000)
    x = (x.astype(jnp.float32) * jnp.exp(jax.random.normal(jax.random.key(5), x.shape))).astype(
        jnp.bfloat16
    )
    arguments = [(x[:m], ws[0]) for m in GATED_ROWS]
    jobs = bench.compile_all([(str(a[0].shape[0]), sm90.linear_swiglu, a) for a in arguments])
    want = np.asarray(jax.jit(product_then_swiglu)(x, ws[0])).view(np.uint16)
    bad = {}
    for (name, future), operands in zip(jobs, arguments, strict=True):
        shape = (operands[0].shape[0], want.shape[1])
        jnp.full(shape, jnp.nan, jnp.bfloat16).block_until_ready()  # poisons the next output
        out = np.asarray(future.result()(*operands)).view(np.uint16)
        different = int((out != want[: len(out)]).sum())
        if different:
            bad[name] = different
    print(f"gated bits: {len(jobs)} row counts, different: {bad}", flush=True)


def gated(bench):
    """One kernel against two, against XLA, and tiles against each other."""
    x, ws, _ = bench.inputs("gate_up", 8192)
    for m in (8, 1, 64, 4000, 1024, 8192, 512, 128):
        arguments = [(x[:m], w) for w in ws]
        timer = sustained_us if m >= 4000 else median_us
        functions = {
            "two kernels": product_then_swiglu,
            "one": sm90.linear_swiglu,
            "Product": product,
            "XLA": xla_swiglu,
        }
        reference = compare(bench, f"gated {m}", functions, arguments, timer)
        variants = {name: with_tiles(t, x.shape[1]) for name, t in gated_variants(m).items()}
        variants = {"one": sm90.linear_swiglu, **variants}
        compare(bench, f"  tiles {m}", variants, arguments, timer, reference)


def trees(bench):
    """Eight leaves with the residual inside, against cuBLAS without."""
    apart = tall(128, 4, smem_levels=1, is_paired=True, lag=1)
    in_slot = dataclasses.replace(apart, stages=5, shares_slot=True)
    variants = {
        "apart": apart,
        "in slot": in_slot,
        "lag 0": dataclasses.replace(in_slot, lag=0),
        "lag 2": dataclasses.replace(in_slot, lag=2),
        "pairs of CTAs": dataclasses.replace(in_slot, cluster=(2, 1)),
    }
    for name, m in (("o", 1024), ("o", 4000), ("down", 4000), ("o", 512), ("down", 1024)):
        x, ws, r = bench.inputs(name, 4000)
        arguments = [(x[:m], w, r[:m]) for w in ws]
        leaf_len = x.shape[1] // 8
        functions = {"Rival": cublas("bf16")}
        functions |= {
            name: with_tiles(tiles, leaf_len, has_residual=True) for name, tiles in variants.items()
        }
        compare(bench, f"tree {name} {m}", functions, arguments, median_us)


def middle(bench):
    """Eight leaves with the residual inside at 129 to 512 rows: the tiles chosen, and others."""
    few = tall(64, 2, k=128)
    alone = tall(128, 2, num_wgs=1, is_paired=True, smem_levels=1)
    many = tall(128, 5, smem_levels=1, is_paired=True, lag=1, shares_slot=True)
    variants = {
        "paired": dataclasses.replace(few, is_paired=True),
        "share rows": dataclasses.replace(few, cluster=(1, 2)),
        "share weights": dataclasses.replace(few, cluster=(2, 1)),
        "64x128": alone,
        "64x128 k128": dataclasses.replace(alone, k=128),
        "64x128 share rows": dataclasses.replace(alone, cluster=(1, 2)),
        "64x128 share weights": dataclasses.replace(alone, cluster=(2, 1)),
    }
    rows = [("down", 256), ("o", 256), ("down", 512), ("o", 512)]
    for name, m in rows + [("down", m) for m in (72, 96, 128, 136, 160, 192, 224)]:
        x, ws, r = bench.inputs(name, m)
        arguments = [(x, w, r) for w in ws]
        reduction = Reduction(leaf_len=x.shape[1] // 8, num_leaves=8)

        def chosen(x, w, r, reduction=reduction):
            return sm90.linear_add(x, w, r, None, reduction=reduction)

        tiles = {"share rows": dataclasses.replace(many, cluster=(1, 2))} if m > 256 else variants
        if m % 256:
            tiles = {label: variants[label] for label in ("64x128", "64x128 k128")}
            tiles |= {"64x64": tall(64, 2, k=128, num_wgs=1)}
        functions = {"chosen": chosen, "Rival": cublas("bf16")} | {
            label: with_tiles(t, reduction.leaf_len, has_residual=True)
            for label, t in tiles.items()
        }
        compare(bench, f"middle {name} {m}", functions, arguments, median_us)


def layers(bench, m=4000):
    """The products of 32 layers in a row, as in prefill: what power leaves of the clock."""
    operands = {name: bench.inputs(name, m) for name in ("qkv", "o", "gate_up", "down")}
    w = {name: ws[0] for name, (_, ws, _) in operands.items()}
    x, deep, r = operands["qkv"][0], operands["down"][0], operands["o"][2]
    kinds = {
        "two kernels": (public("qkv"), public("o"), product_then_swiglu, public("down")),
        "one": (public("qkv"), public("o"), sm90.linear_swiglu, public("down")),
        "cuBLAS": (cublas("bf16"), cublas("bf16"), xla_swiglu, cublas("bf16")),
    }
    cells = []
    for name, functions in kinds.items():
        arguments = [
            (x, w["qkv"], operands["qkv"][2]),
            (x, w["o"], r),
            (x, w["gate_up"]),
            (deep, w["down"], r),
        ]
        jobs = bench.compile_all(
            [(name, fn, a) for fn, a in zip(functions, arguments, strict=True)]
        )
        compiled = [future.result() for _, future in jobs]

        def layer(*_, compiled=compiled, arguments=arguments):
            for fn, operands in zip(compiled, arguments, strict=True):
                out = fn(*operands)
            return out

        cells.append(f"{name} {32e-3 * sustained_us(layer, [()], 0.4):.2f}")
    print(f"32 layers of products, {m} rows, ms: " + ", ".join(cells), flush=True)


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
        return sm90.linear_add(x, w, r, None, reduction=reduction)

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
                tiles=flat(64, 2, k=128),
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
    for name in ("gated", "trees", "middle", "layers", "bits", "final"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    print(jax.__version__, jax.devices(), flush=True)
    bench = Bench()
    if args.gated:
        gated_bits(bench)
        gated(bench)
    if args.layers:
        layers(bench)
    if args.trees:
        trees(bench)
    if args.middle:
        middle(bench)
    if args.bits:
        negative_zero()
        bits(bench)
    if args.final:
        final(bench)


if __name__ == "__main__":
    main()
