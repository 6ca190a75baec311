# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts on one Hopper GPU: bits first, then each kernel's time against its floor.

    python -m benchmarks.moe [--out moe.jsonl]

The shape is Qwen3-30B-A3B's. Bits: `expert_mlp` by every tile against the sm90 `linear_swiglu` and
`linear`, expert by expert; exit status 3 if one differs. Times: the layer's kernels at M rows of
uniform routing, other experts in every call, so that weights come from memory; the floor is the
bytes of the experts hit over 4.3 TB/s or the flops over 790 TFLOP/s, whichever takes longer.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from benchmarks.common import (
    COPY_BYTES_PER_S,
    MATRIX_FLOP_PER_S,
    Rows,
    by_kernel,
    device_us,
    environment,
    kernel_events,
    num_different,
    random_bf16,
)
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear import sm90 as sm90_linear
from detjax.pallas_kernels.moe import sm90
from detjax.pallas_kernels.moe.shapes import SHAPES
from detjax.pallas_kernels.moe.sm90_tiles import GroupedTiles, MlpTiles, choose_tiles, fill_stages
from detjax.pallas_kernels.rms_norm.sm90 import rms_norm

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
EPS = 1e-6
SHAPE = SHAPES[0]
ROW_COUNTS = (1, 8, 64, 256, 4000)
BIT_ROWS = (1, 2, 7, 8, 9, 16, 33, 64, 128, 257)
MOST = 257
NUM_ROUTES = 12
"""Sets of experts in rotation: at one row they take 0.9 GB, more than the L2 holds."""


# ----------------------------------------------------------------------------------------- tiles


def swapped(cols: int, *, k: tuple[int, int], wgs: int = 1, by_slot: bool = False) -> MlpTiles:
    """Weights as the 64-row operand; `k` of the two products."""

    def product(is_gated: bool) -> GroupedTiles:
        return fill_stages(
            GroupedTiles(
                is_swapped=True, is_gated=is_gated, cols=cols, num_wgs=wgs,
                k=k[0 if is_gated else 1], delay=1,
            )
        )  # fmt: skip

    return MlpTiles(gate_up=product(True), down=product(False), is_few=False, by_slot=by_slot)


def few(*, k: tuple[int, int], wgs: int) -> MlpTiles:
    """The first product lists its tiles."""
    tiles = swapped(8, k=k, wgs=wgs, by_slot=True)
    return dataclasses.replace(tiles, is_few=True)


def tall(*, cols: tuple[int, int] = (256, 256), delay: int = 0) -> MlpTiles:
    """Rows as the 64-row operand."""

    def product(is_gated: bool) -> GroupedTiles:
        return fill_stages(
            GroupedTiles(
                is_swapped=False, is_gated=is_gated, cols=cols[0 if is_gated else 1], num_wgs=2,
                k=64, delay=delay,
            )
        )  # fmt: skip

    return MlpTiles(gate_up=product(True), down=product(False), is_few=False, by_slot=False)


def chosen(num_rows: int) -> MlpTiles:
    """What a model gets."""
    return choose_tiles(
        num_rows=num_rows, top_k=SHAPE.top_k, num_experts=SHAPE.num_experts,
        width=SHAPE.width, hidden=SHAPE.hidden_size,
    )  # fmt: skip


VARIANTS = {
    1: {
        "few_k64": few(k=(64, 128), wgs=1),
        "few_wgs2": few(k=(64, 128), wgs=2),
        "sorted_8": swapped(8, k=(128, 256), by_slot=True),
    },
    8: {
        "few_k64": few(k=(64, 128), wgs=1),
        "few_wgs2": few(k=(64, 128), wgs=2),
        "sorted_8": swapped(8, k=(128, 256), by_slot=True),
    },
    64: {
        "placed_8": swapped(8, k=(128, 256), by_slot=True),
        "placed_16_wgs2": swapped(16, k=(64, 128), wgs=2, by_slot=True),
        "sorted_16": swapped(16, k=(128, 256)),
        "sorted_24_wgs2": swapped(24, k=(64, 128), wgs=2),
    },
    256: {
        "sorted_32": swapped(32, k=(64, 128)),
        "sorted_24_wgs2": swapped(24, k=(64, 128), wgs=2),
        "sorted_48_wgs2": swapped(48, k=(64, 64), wgs=2),
        "sorted_32_wgs2": swapped(32, k=(64, 128), wgs=2),
    },
    4000: {
        "tall_delay": tall(delay=1),
        "tall_down_128": tall(cols=(256, 128)),
        "sorted_128": swapped(128, k=(64, 64), wgs=2),
    },
}
BIT_TILES = {
    "few_wgs2": (8, few(k=(128, 128), wgs=2)),
    "sorted_8": (8, swapped(8, k=(128, 256), by_slot=True)),
    "placed_8": (MOST, swapped(8, k=(64, 64), by_slot=True)),
    "sorted_40_wgs2": (MOST, swapped(40, k=(64, 64), wgs=2)),
    "sorted_128": (MOST, swapped(128, k=(64, 64), wgs=2)),
    "tall": (MOST, tall()),
    "tall_delay": (MOST, tall(delay=1)),
}
"""Variants whose bits are compared, at so many rows."""


# ------------------------------------------------------------------------------------------ data


def uniform_ids(num_rows: int, seed: int) -> np.ndarray:
    """Distinct experts of each row, in no order."""
    rng = np.random.default_rng(seed)
    keys = rng.random((num_rows, SHAPE.num_experts))
    return np.argsort(keys, axis=1)[:, : SHAPE.top_k].astype(np.int32)


@functools.cache
def weights() -> tuple[jax.Array, jax.Array]:
    """One layer's experts."""
    num, width, hidden = SHAPE.num_experts, SHAPE.width, SHAPE.hidden_size
    return random_bf16((num, 2 * width, hidden), 1, 0.04), random_bf16(
        (num, hidden, width), 2, 0.06
    )


def wide_rows(num_rows: int) -> jax.Array:
    """Rows of wide exponents, so that sums depend on their order."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((num_rows, SHAPE.hidden_size), np.float32)
    return jnp.asarray(x * np.exp(rng.standard_normal(x.shape, np.float32)), BF16)


def shapes_of(arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def compiled(fn: Callable, arguments) -> Callable:
    return jax.jit(fn).lower(*shapes_of(arguments)).compile()


# ------------------------------------------------------------------------------------------ bits


@jax.jit
def every_expert(x, w_gate_up, w_down) -> jax.Array:
    """Each row by each expert with the dense sm90 products, [E, M, D]."""

    def one(pair):
        hidden = sm90_linear.linear_swiglu(x, pair[0])
        return sm90_linear.linear(hidden, pair[1], None, out_dtype=BF16)

    return lax.map(one, (w_gate_up, w_down))


def mlp(tiles: MlpTiles | None, first_expert: int = 0) -> Callable:
    def run(x, ids, w_gate_up, w_down):
        return sm90.expert_mlp(x, ids, w_gate_up, w_down, first_expert=first_expert, tiles=tiles)

    return run


class Bits:
    """Comparisons, each a row; `failed` counts those that do not hold."""

    def __init__(self, rows: Rows):
        self.rows, self.failed, self.lines = rows, 0, []

    def check(self, case: str, found: int, *, must_differ: bool = False) -> None:
        good = (found > 0) == must_differ
        self.failed += not good
        kind = "control" if must_differ else "bits"
        self.rows.keep(subject="moe", kind=kind, case=case, different=found, holds=good)
        self.lines.append(f"{kind:8}{case:34}{found:10d} different  {'ok' if good else 'FAILED'}")

    def tell(self, case: str, found: int) -> None:
        """Of a rival: nothing holds or fails."""
        self.rows.keep(subject="moe", kind="rival", case=case, different=found)
        self.lines.append(f"{'rival':8}{case:34}{found:10d} different")


def check_experts(bits: Bits, pool) -> None:
    w_gate_up, w_down = weights()
    x, ids = wide_rows(MOST), uniform_ids(MOST, 4)
    local = (w_gate_up[32:64], w_down[32:64])

    def submit(num_rows, tiles=None, **kwargs):
        ws = local if kwargs else (w_gate_up, w_down)
        return pool.submit(compiled, mlp(tiles, **kwargs), (x[:num_rows], ids[:num_rows], *ws))

    jobs = {m: submit(m) for m in BIT_ROWS}
    variants = {name: submit(m, tiles) for name, (m, tiles) in BIT_TILES.items()}
    ranks = {m: submit(m, first_expert=32) for m in (8, 64, MOST)}
    everything = every_expert(x, w_gate_up, w_down)

    def expected(ids, rows):
        return everything[ids, np.asarray(rows)[:, None]]

    def compare(case, job, rows, ids):
        try:
            y = job.result()(x[np.asarray(rows)], jnp.asarray(ids), w_gate_up, w_down)
            bits.check(case, int(num_different(y, expected(ids, rows))))
        except Exception as error:
            bits.check(f"{case}: {type(error).__name__} {error}"[:300], 1)

    for m, job in jobs.items():
        compare(f"M={m}", job, range(m), ids[:m])
    for name, job in variants.items():
        m = BIT_TILES[name][0]
        compare(f"{name} M={m}", job, range(m), ids[:m])
    for m in (8, 64, MOST):
        rolled = np.roll(np.arange(m), 1)
        compare(f"derangement M={m}", jobs[m], rolled, ids[rolled])
        one = np.tile(np.arange(SHAPE.top_k, dtype=np.int32) * 3 + 5, (m, 1))
        compare(f"8 experts take all rows, M={m}", jobs[m], range(m), one)
        same = np.full((m, SHAPE.top_k), 77, np.int32)
        compare(f"one expert takes all slots, M={m}", jobs[m], range(m), same)
    for m, job in ranks.items():
        y = job.result()(x[:m], jnp.asarray(ids[:m]), *local)
        is_local = (ids[:m] >= 32) & (ids[:m] < 64)
        want = jnp.where(is_local[..., None], expected(ids[:m], range(m)), jnp.zeros((), BF16))
        bits.check(f"rank 1 of 4, M={m}", int(num_different(y, want)))
    nan = x.at[3].set(jnp.nan)
    y = jobs[64].result()(nan[:64], jnp.asarray(ids[:64]), w_gate_up, w_down)
    others = np.delete(np.arange(64), 3)
    bits.check("NaN in row 3 of 64", int(num_different(y[others], expected(ids[others], others))))
    transposed = (w_gate_up.swapaxes(1, 2), w_down.swapaxes(1, 2))
    y = jax.jit(ragged)(x[:64], jnp.asarray(ids[:64]), *transposed)
    for m in (1, 8, 33):
        # Told, not asked for: on an H200 XLA's product gave 8 rows of 64 the same bits alone.
        alone = jax.jit(ragged)(x[:m], jnp.asarray(ids[:m]), *transposed)
        bits.tell(f"ragged_dot: {m} rows of 64", int(num_different(y[:m], alone)))
    found = int(num_different(y, expected(ids[:64], range(64))))
    bits.check("ragged_dot and ours", found, must_differ=True)


def check_route(bits: Bits) -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((MOST, SHAPE.num_experts)).astype(np.float32)
    logits[::2] = np.round(logits[::2] * 2) / 2  # ties
    logits[::4, 7] = -0.0
    for renormalise in (True, False):
        run = functools.partial(
            sm90.route,
            num_experts=SHAPE.num_experts,
            top_k=SHAPE.top_k,
            renormalise=renormalise,
        )
        ids, ws = run(jnp.asarray(logits))
        want = np.argsort(-logits, axis=1, kind="stable")[:, : SHAPE.top_k]
        bits.check(f"route ids, {renormalise=}", int((np.asarray(ids) != want).sum()))
        exact = np.exp(logits.astype(np.float64))
        terms = np.take_along_axis(exact, want, 1)
        exact = terms / (terms if renormalise else exact).sum(1, keepdims=True)
        error = np.abs(np.asarray(ws) / exact - 1).max()
        bits.check(f"route weights within 1e-6: {error:.1e}", int(error > 1e-6))
        for m in (1, 6, 100):
            found = sum(
                int(num_different(a, b[-m:]))
                for a, b in zip(run(jnp.asarray(logits[-m:])), (ids, ws), strict=True)
            )
            bits.check(f"route of the last {m} rows", found)


def check_combine(bits: Bits) -> None:
    m, hidden = 64, SHAPE.hidden_size
    y = random_bf16((m, SHAPE.top_k, hidden), 6) * jnp.exp(random_bf16((m, SHAPE.top_k, hidden), 7))
    ws = jax.nn.softmax(random_bf16((m, SHAPE.top_k), 8).astype(F32))
    residual, gain = random_bf16((m, hidden), 9), random_bf16((hidden,), 10)
    total, out = sm90.combine_experts_add_rms_norm(y, ws, residual, gain, eps=EPS)
    acc = np.zeros((m, hidden), np.float32)
    for r in range(SHAPE.top_k):
        wide = np.asarray(y[:, r]).astype(np.float64) * np.asarray(ws)[:, r, None]
        acc = (wide + acc).astype(np.float32)  # products of 32 bits are exact: an fma
    want = (np.asarray(residual).astype(np.float32) + acc).astype(ml_dtypes.bfloat16)
    bits.check("combine: residual stream", int(num_different(total, jnp.asarray(want))))
    bits.check("combine: normalised rows", int(num_different(out, rms_norm(total, gain, eps=EPS))))
    for n in (1, 7):
        part = sm90.combine_experts_add_rms_norm(y[:n], ws[:n], residual[:n], gain, eps=EPS)
        found = int(num_different(part[0], total[:n])) + int(num_different(part[1], out[:n]))
        bits.check(f"combine: the first {n} rows", found)
    order = np.argsort(uniform_ids(m, 11), axis=1)
    pairs = [(jnp.asarray(np.arange(m)), jnp.asarray(order[:, r])) for r in range(SHAPE.top_k)]
    added = jnp.zeros((m, hidden), F32)
    for i, r in pairs:
        added = added.at[i].add(ws[i, r][:, None] * y[i, r].astype(F32))
    scattered = (residual.astype(F32) + added).astype(BF16)
    bits.check(
        "scatter-add in order of expert", int(num_different(scattered, total)), must_differ=True
    )


def check_merged(bits: Bits) -> None:
    w_gate_up, w_down = weights()
    for m in (1, 8, MOST):
        x, ids = wide_rows(m), jnp.asarray(uniform_ids(m, 12))
        ws = jax.nn.softmax(random_bf16((m, SHAPE.top_k), 13).astype(F32))
        residual, gain = (
            random_bf16((m, SHAPE.hidden_size), 14),
            random_bf16((SHAPE.hidden_size,), 15),
        )
        apart = sm90.combine_experts_add_rms_norm(
            sm90.expert_mlp(x, ids, w_gate_up, w_down, first_expert=0), ws, residual, gain, eps=EPS
        )
        matrices = (w_gate_up, w_down, residual, gain)
        merged = sm90.expert_mlp_add_rms_norm(x, ids, ws, *matrices, eps=EPS)
        found = sum(int(num_different(a, b)) for a, b in zip(apart, merged, strict=True))
        bits.check(f"expert_mlp_add_rms_norm M={m}", found)
        logits = random_bf16((m, SHAPE.num_experts), 16).astype(F32)
        options = {"top_k": SHAPE.top_k, "renormalise": True}
        routes = sm90.route(logits, num_experts=SHAPE.num_experts, **options)
        apart = sm90.expert_mlp_add_rms_norm(x, *routes, *matrices, eps=EPS)
        merged = sm90.route_mlp_add_rms_norm(x, logits, *matrices, **options, eps=EPS)
        found = sum(int(num_different(a, b)) for a, b in zip(apart, merged, strict=True))
        bits.check(f"route_mlp_add_rms_norm M={m}", found)


# ----------------------------------------------------------------------------------------- times


def ragged(x, ids, w_gate_up, w_down):
    """The same by XLA's `ragged_dot`, with weights (in, out): [M, k, D]."""
    num_rows, top_k = ids.shape
    slots = ids.reshape(-1)
    order = jnp.argsort(slots, stable=True)
    sizes = jnp.bincount(slots, length=w_gate_up.shape[0]).astype(I32)
    both = lax.ragged_dot(x[order // top_k], w_gate_up, sizes)
    gate, up = jnp.split(both, 2, axis=1)
    y = lax.ragged_dot(jax.nn.silu(gate) * up, w_down, sizes)
    return jnp.zeros_like(y).at[order].set(y).reshape(num_rows, top_k, -1)


def layer(tiles: MlpTiles | None) -> Callable:
    """Route, experts, combine and norm, as a layer calls them on one rank."""

    def run(x, logits, w_gate_up, w_down, residual, gain):
        return sm90.route_mlp_add_rms_norm(
            x, logits, w_gate_up, w_down, residual, gain,
            top_k=SHAPE.top_k, renormalise=True, eps=EPS, tiles=tiles,
        )  # fmt: skip

    return run


def floor_us(ids: np.ndarray) -> float:
    num_bytes = 6 * SHAPE.width * SHAPE.hidden_size * len(np.unique(ids))
    flops = 6 * SHAPE.width * SHAPE.hidden_size * ids.size
    return max(num_bytes / COPY_BYTES_PER_S, flops / MATRIX_FLOP_PER_S) * 1e6


def run_all(fn: Callable, calls: list[tuple]) -> None:
    """Each call once."""
    jax.block_until_ready([fn(*arguments) for arguments in calls])


def time_layer(rows: Rows, pool, counts, with_ragged: bool) -> list[str]:
    w_gate_up, w_down = weights()
    gain = random_bf16((SHAPE.hidden_size,), 20)
    calls, jobs, ids = {}, {}, {}
    for m in counts:
        x, residual = (
            random_bf16((m, SHAPE.hidden_size), 21),
            random_bf16((m, SHAPE.hidden_size), 22),
        )
        rng = np.random.default_rng(m)
        count = NUM_ROUTES if m <= 64 else 2
        logits = rng.standard_normal((count, m, SHAPE.num_experts)).astype(np.float32)
        ids[m] = np.argsort(-logits, axis=2)[:, :, : SHAPE.top_k].astype(np.int32)
        calls[m] = [(x, jnp.asarray(v), w_gate_up, w_down, residual, gain) for v in logits]
        for name, tiles in {"chosen": chosen(m)}.items() | VARIANTS.get(m, {}).items():
            jobs[m, name] = pool.submit(compiled, layer(tiles), calls[m][0])
    lines = [f"{'M':>5} {'tiles':16}{'us':>8}{'floor':>8}{'share':>7}  by kernel, us"]
    for (m, name), job in sorted(
        jobs.items(), key=lambda item: (item[0][0], item[0][1] != "chosen")
    ):
        floor = float(np.mean([floor_us(found) for found in ids[m]]))
        row = {"subject": "moe", "kind": "time", "m": m, "tiles": name, "floor_us": floor}
        try:
            fn = job.result()
            us = device_us(fn, calls[m])
            events = kernel_events(functools.partial(run_all, fn, calls[m]))
            parts = by_kernel(events, repeats=len(calls[m]))
            row |= {"us": us, "share": floor / us}
            row |= {"kernels": {kernel: round(t, 2) for kernel, _, t in parts}}
            short = "  ".join(
                f"{k.replace('detjax_', '').replace('_kernel', '')[:24]} {t:.1f}"
                for k, _, t in parts
            )
            lines.append(f"{m:5} {name:16}{us:8.1f}{floor:8.1f}{floor / us:7.2f}  {short}")
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            lines.append(f"{m:5} {name:16} FAILED {row['failed'][:160]}")
        rows.keep(**row)
    for m in counts:
        logits = random_bf16((m, SHAPE.num_experts), 23).astype(F32)
        run = compiled(functools.partial(sm90.route, top_k=8, renormalise=True), (logits,))
        us = device_us(run, [(logits,)])
        rows.keep(subject="moe", kind="time", m=m, tiles="route", us=us)
        lines.append(f"{m:5} {'route':16}{us:8.1f}")
    if with_ragged:
        transposed = (w_gate_up.swapaxes(1, 2), w_down.swapaxes(1, 2))
        for m in counts:
            arguments = [(calls[m][0][0], jnp.asarray(found), *transposed) for found in ids[m]]
            row = {"subject": "moe", "kind": "time", "m": m, "tiles": "ragged_dot"}
            try:
                us = device_us(compiled(ragged, arguments[0]), arguments, repeats=5)
                rows.keep(**row, us=us)
                lines.append(f"{m:5} {'ragged_dot':16}{us:8.1f}  without combine and norm")
            except Exception as error:
                rows.keep(**row, failed=f"{type(error).__name__}: {error}"[:300])
                lines.append(f"{m:5} ragged_dot FAILED {str(error)[:120]}")
    return lines


def main() -> None:
    """Check, then time; exit 3 if a bit differed."""
    parser = argparse.ArgumentParser(
        description="Mixture of experts on one Hopper GPU: bits, then times."
    )
    parser.add_argument("--out", help="write rows of JSON there")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROW_COUNTS), help="M to time")
    parser.add_argument("--only", choices=("bits", "times"), help="one of the two parts")
    parser.add_argument("--no-ragged-dot", action="store_true", help="skip the rival")
    options = parser.parse_args()
    start = time.time()
    rows = Rows(environment(Backend.SM90), options.out)
    pool = concurrent.futures.ThreadPoolExecutor(8)
    bits, lines = Bits(rows), []
    if options.only != "times":
        for check in (check_route, check_combine, check_merged):
            check(bits)
        check_experts(bits, pool)
    if options.only != "bits":
        lines = time_layer(rows, pool, options.rows, not options.no_ragged_dot)
    print("\n" + "\n".join(line for line in bits.lines + lines))
    print(f"{bits.failed} checks failed, {time.time() - start:.0f} s")
    sys.exit(3 if bits.failed else 0)


if __name__ == "__main__":
    main()
