# SPDX-License-Identifier: Apache-2.0
"""The sm90 kernels at the sizes of real models against whatever else runs there: bits, then time.

python -m benchmarks.kernels --out kernels.jsonl
python -m benchmarks.kernels linear moe --rows 8 64 2048 --no-torch

Bits: the rows of a case have the bits that they have among the rows of the largest case. A case
whose bits differ has no time. Then device time from CUPTI, medians, all in one run on random data.
Rivals: XLA (`jnp.dot` is the best of cuBLAS, cuBLASLt and XLA's own; `ragged_dot`), cuDNN,
`torch.mm`, and one fixed tile as in Thinking Machines' batch-invariant product.
"""

import argparse
import concurrent.futures
import json
import os
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from benchmarks.common import (
    COPY_BYTES_PER_S,
    Rows,
    copy_bytes_per_s,
    device_us,
    environment,
    num_different,
    run_rivals,
)
from benchmarks.kernels.cases import (
    MAX_LOGITS,
    PRODUCTS,
    ROW_COUNTS,
    SM90,
    SUBJECTS,
    Kernel,
    Operands,
    Rival,
)
from detjax.compilation.xla_flags import EXACT_OPTIONS


def compile_ours(run: Callable, operands: Operands) -> Callable:
    """Compile for operands of these shapes, with the options of the claims."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
    return jax.jit(run).lower(*shapes).compile(EXACT_OPTIONS)


def torch_rows(counts: list[int], timeout_s: float) -> tuple[dict, str]:
    """What `benchmarks.rivals_torch` says of each (product, rows), and why not more."""
    cases = [
        (name, *size, m, name == "lm_head")
        for name, size in PRODUCTS.items()
        for m in counts
        if name != "lm_head" or m <= MAX_LOGITS
    ]
    rows, why_not = run_rivals("linear", "--cases", json.dumps(cases), timeout_s=timeout_s)
    return {(row["shape"], row["m"]): row for row in rows}, why_not or "no row"


def time_rival(rival: Rival, calls: list[Operands]) -> float:
    """Device time of a rival, which is compiled alone, since XLA chooses by measuring."""
    prepared = [rival.prepare(*operands) for operands in calls]
    return device_us(jax.jit(rival.run), prepared)


def measure(kernel: Kernel, compiled: Callable, calls: list[Operands], num_rows: int) -> dict:
    """Times of one case, ours and those of its rivals."""
    us = device_us(compiled, calls, only=kernel.only)
    floor = kernel.floor_us(num_rows)
    row = {"us": us, "floor_us": floor, "share": floor / us}
    if flops := kernel.num_flops(num_rows):
        row |= {"ms": us / 1e3, "tflops": flops / us / 1e6}
    for name, rival in kernel.rivals.items():
        try:
            row[f"{name}_us"] = time_rival(rival, calls)
        except Exception as error:  # a rival's fault is its own
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
    return row


def measured(kernel: Kernel) -> Iterator[dict]:
    """A row for each number of rows, the largest first."""
    if not kernel.counts:
        return
    all_calls = kernel.draw(max(kernel.counts))
    calls = {n: [kernel.first_rows(operands, n) for operands in all_calls] for n in kernel.counts}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = {n: pool.submit(compile_ours, kernel.run, calls[n][0]) for n in kernel.counts}
    whole: list[jax.Array] = []
    for n in sorted(kernel.counts, reverse=True):
        row = {"subject": kernel.subject} | kernel.facts(n)
        try:
            compiled = programs[n].result()
            out = jax.tree.leaves(compiled(*calls[n][0]))
            whole = whole or out
            row["different_bits"] = sum(
                int(num_different(a, jax.lax.slice_in_dim(b, 0, n, axis=kernel.out_axis)))
                for a, b in zip(out, whole, strict=True)
            )
            if not row["different_bits"]:
                row |= measure(kernel, compiled, calls[n], n)
        except Exception as error:  # told in the row; the command fails at its end
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield row


def with_ratios(row: dict, copy: float, of_torch: dict, why_not: str) -> dict:
    """A row with the best rival's time over ours, and what the report needs by its own name."""
    if "us" not in row:
        return row
    if row["subject"] == "linear":
        row |= of_torch.get((row["shape"], row["m"]), {"torch_failed": why_not})
    if row["subject"] == "rows":
        row["copy_tb_per_s"] = copy / 1e12
        row["share_of_copy"] = row["share"] * COPY_BYTES_PER_S / copy
    rivals = [row[name] for name in row if name.endswith("_us") and name != "floor_us"]
    if rivals:
        row["ratio"] = min(rivals) / row["us"]
    if row["subject"] == "attention" and "ratio" in row:
        row["over_cudnn"] = row["ratio"]
    return row


def line(row: dict) -> str:
    """A row for the screen."""
    facts = ("shape", "case", "batch", "tokens", "m")
    name = " ".join(str(row[fact]) for fact in facts if fact in row)
    if "us" not in row:
        return f"{row['subject']:16}{name:28} NO TIME {row.get('failed', 'bits differ')}"
    rivals = "  ".join(
        f"{key.removesuffix('_us')} {value:.1f}"
        for key, value in row.items()
        if key.endswith("_us") and key != "floor_us"
    )
    return f"{row['subject']:16}{name:28}{row['us']:9.1f} us {row['share']:.2f} of limit  {rivals}"


def main() -> None:
    """Run some subjects; exit 3 if a bit differed or something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("subjects", nargs="*", metavar="|".join(SUBJECTS))
    parser.add_argument("--rows", type=int, nargs="*", default=ROW_COUNTS, help="rows of a case")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch and Triton")
    parser.add_argument("--torch-seconds", type=float, default=300.0, help="stop torch after this")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    subjects = args.subjects or list(SUBJECTS)
    if unknown := sorted(set(subjects) - set(SUBJECTS)):
        parser.error(f"{unknown} must be among {sorted(SUBJECTS)}")
    of_torch, why_not = {}, "left out"
    if "linear" in subjects and not args.no_torch:  # before JAX has taken the GPU's memory
        of_torch, why_not = torch_rows(list(args.rows), args.torch_seconds)
    rows = Rows(environment(SM90), args.out)
    copy = copy_bytes_per_s()
    for subject in subjects:
        for kernel in SUBJECTS[subject](args.rows):
            for row in measured(kernel):
                rows.keep(**with_ratios(row, copy, of_torch, why_not))
    print("\n".join(["", *map(line, rows.rows)]))
    is_good = all(row.get("different_bits", 0) == 0 and "failed" not in row for row in rows.rows)
    sys.exit(0 if is_good else 3)
