# SPDX-License-Identifier: Apache-2.0
"""What invariance costs a matrix product and a norm."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.common import device_us, random_bf16
from benchmarks.reproduce.experiment import Lab, Result, Row, WholeExperiment
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.linear.api import linear, linear_partial
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.plots import OTHERS, REFERENCE, finish, over_powers_of_two

EPS = 1e-5


def _microseconds(lab: Lab, run: Callable, operands: tuple) -> float:
    """Median device time on a GPU; the shortest wall time elsewhere."""
    compiled = jax.jit(run)
    if lab.backend.platform == "gpu":
        return device_us(compiled, [operands])
    times = []
    for _ in range(12):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        times.append((time.perf_counter() - start) * 1e6)
    return min(times[1:])


def _matmul(lab: Lab, count: int, k: int, n: int, num_leaves: int) -> Row:
    """A product summed in order (one leaf), or as the tree of a row-parallel layer."""
    x, w = random_bf16((count, k), 0), random_bf16((n, k), 1, k**-0.5)
    reduction = tree_reduction(k, NumericsProfile(num_leaves=num_leaves))

    def ours(x, w):
        if num_leaves > 1:
            return linear_partial(x, w, reduction=reduction, backend=lab.backend)
        return linear(x, w, out_dtype=jnp.dtype(jnp.float32), backend=lab.backend)

    def rival(x, w):
        return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

    rival_us, ours_us = (_microseconds(lab, f, (x, w)) for f in (rival, ours))
    flop, order = 2 * count * k * n, "a tree" if num_leaves > 1 else "in order"
    return {
        "operator": "matmul", "shape": f"K {k}, N {n}, {order}", "rows": count,
        "rival_us": rival_us, "ours_us": ours_us,
        "rival_tflop_per_s": flop / rival_us * 1e-6, "ours_tflop_per_s": flop / ours_us * 1e-6,
        "lost_percent": 100 * (1 - rival_us / ours_us),
    }  # fmt: skip


def _rms_norm(lab: Lab, count: int, width: int) -> Row:
    x, gain = random_bf16((count, width), 0), random_bf16((width,), 1)

    def rival(x, gain):
        v = x.astype(jnp.float32)
        out = v * lax.rsqrt(jnp.mean(v * v, axis=1, keepdims=True) + EPS)
        return (out * gain.astype(jnp.float32)[None]).astype(x.dtype)

    def ours(x, gain):
        return rms_norm(x, gain, eps=EPS, backend=lab.backend)

    rival_us, ours_us = (_microseconds(lab, f, (x, gain)) for f in (rival, ours))
    return {
        "operator": "RMSNorm", "shape": f"D {width}", "rows": count, "rival_us": rival_us,
        "ours_us": ours_us, "lost_percent": 100 * (1 - rival_us / ours_us),
    }  # fmt: skip


def _mean(rows: list[Row], operator: str, column: str) -> float:
    return float(np.mean([row[column] for row in rows if row["operator"] == operator]))


def plot(figure, rows: Sequence[Row]) -> None:
    """Throughput lost to XLA's choice by the number of rows, a line for each operator."""
    axes = figure.subplots()
    cases = list(dict.fromkeys((row["operator"], row["shape"]) for row in rows))
    for (operator, shape), colour in zip(cases, OTHERS, strict=False):
        own = [row for row in rows if (row["operator"], row["shape"]) == (operator, shape)]
        values = [row["lost_percent"] for row in own]
        at = [row["rows"] for row in own]
        axes.plot(at, values, marker="o", color=colour, label=f"{operator}, {shape}")
        for x, value in zip(at, values, strict=True):
            axes.annotate(f"{value:.0f}", (x, value), xytext=(0, 5), textcoords="offset points",
                          ha="center", fontsize=7)  # fmt: skip
    axes.axhline(0, color=REFERENCE, linewidth=0.8)
    over_powers_of_two(axes)
    axes.set_xticks(sorted({row["rows"] for row in rows}))
    title = "Below 0 the fixed order is the faster one"
    finish(axes, title=title, x="rows", y="throughput lost to XLA's choice (%)")


def run(lab: Lab) -> Result:
    """Time our kernels beside XLA's choice, cuBLAS where there is a GPU."""
    counts = lab.pick((1, 64, 512), (8, 64, 512, 4096))
    shapes = lab.pick(((768, 256, 1), (768, 256, 8)), ((4096, 6144, 1), (14336, 4096, 8)))
    width = lab.pick(768, 4096)
    rows = [_matmul(lab, count, *shape) for shape in shapes for count in counts]
    rows += [_rms_norm(lab, count, width) for count in counts]
    worst = {name: max(r["lost_percent"] for r in rows if r["operator"] == name)
             for name in ("matmul", "RMSNorm")}  # fmt: skip

    clock = "device time" if lab.backend.platform == "gpu" else "wall time"
    note = "" if lab.is_full else "; the portable backend is made to be right, not fast"
    return Result(
        title="Cost of a fixed order of summation",
        setting=f"{clock}, bfloat16, {lab.machine}{note}",
        columns=(
            "operator",
            "shape",
            "rows",
            "rival_us",
            "ours_us",
            "rival_tflop_per_s",
            "ours_tflop_per_s",
            "lost_percent",
        ),  # fmt: skip
        rows=rows,
        findings=[
            f"{name}: {_mean(rows, name, 'lost_percent'):.0f} % of the throughput lost on average, "
            f"{value:.0f} % at most"
            for name, value in worst.items()
        ],
        plot=lambda figure: plot(figure, rows),
    )


EXPERIMENT = WholeExperiment(
    question="How much slower are products and norms in a fixed order?",
    paper="LLM-42 (arXiv:2601.17768), figure 4: batch-invariant Triton GEMM 194 TFLOP/s against "
    "527 of cuBLAS, 63 % slower; RMSNorm up to 50 % slower than the fused CUDA kernel.",
    run=run,
    plot=plot,
    seconds=90.0,
)
