# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper with exp2 by `ex2.approx`, as it is, and by a polynomial of fma.

python -m benchmarks.kernels.exp2 --out exp2.jsonl

The polynomial replaces the instruction where a kernel emits it, and nowhere but here. Degree 5 is a
whole replacement: as accurate as the instruction, whose results under 2**-126, minus infinity and
NaN it keeps. Degree 3 is accurate enough for weights in bfloat16, and cheaper, as in
FlashAttention-4: it adds the exponent as an integer, and keeps neither subnormal results as zeros
nor NaN. Both take numbers below 127, and attention has none above 0.

A case is a process. It compiles all variants while others do so, then runs them in turn, alone on
the GPU. Device time from CUPTI, medians, random data.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

from benchmarks.common import Rows, environment, kernel_events, num_different, random_bf16
from benchmarks.kernels.cases import LAYOUT, SM90, Operands, attend, paged_cache
from benchmarks.kernels.run import compile_ours
from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows

DEGREES = (0, 5, 3)
"""Of the variants; 0 is the instruction."""
MAGIC = 1.5 * 2**23
"""Added to a small number it leaves the nearest integer in the low bits of the sum."""
BIAS = 127
"""Of a float32's exponent; also minus the number below which exp2 is 0."""
COEFFICIENTS = {
    5: (0.69314700, 0.24022242, 0.055507336, 0.0096715130, 0.0013264727),
    3: (0.69328290, 0.24221095, 0.055008930),
}
"""Of exp2 on [-0.5, 0.5] without its constant 1, by degree: least relative error, 2**-23.4 and
2**-13.3, found by linear programming. 1 is exact, so what is scaled by exp2(0) keeps its bits."""

SCALE = "shl.b32 $0, $1, 23;"
ADD_EXPONENT = (
    "{.reg .b32 n, p; mov.b32 n, $1; mov.b32 p, $2; shl.b32 n, n, 23; "
    "add.s32 n, n, p; mov.b32 $0, n;}"
)
CASES = (("prefill", 1, 4096), ("prefill", 1, 8192), ("decode", 1, 8192),
         ("decode", 8, 1024), ("decode", 64, 1024), ("decode", 256, 576))  # fmt: skip
"""Kind, sequences and tokens of each, in the heads of Llama-3.1-8B."""
TURNS = 21


def polynomial(run: Callable, x, degree: int):
    """`exp2(x)` by operations that `run` takes by their name in PTX, or by their text."""
    x = run("max.NaN.f32", x, float(-BIAS))
    magic = MAGIC + (BIAS if degree == 5 else 0)
    whole = run("add.rn.f32", x, magic)
    rest = run("sub.rn.f32", x, run("sub.rn.f32", whole, magic))
    power, *coefficients = reversed(COEFFICIENTS[degree])
    for coefficient in (*coefficients, 1.0):
        power = run("fma.rn.f32", power, rest, coefficient)
    if degree == 5:  # by a product, which flushes
        return run("mul.rn.ftz.f32", power, run(SCALE, whole))
    return run(ADD_EXPONENT, whole, power)


def emit(op: str, *operands):
    """Emit one operation on float32 scalars of MLIR and numbers."""
    f32 = ir.F32Type.get()
    operands = [mgpu.c(x, f32) if isinstance(x, float) else x for x in operands]
    if "$" not in op:
        op += " " + ", ".join(f"${i}" for i in range(len(operands) + 1)) + ";"
    return ptx.asm(op, operands, returns=[f32], touches_memory=False, has_side_effects=False)[0]


@contextlib.contextmanager
def exp2_by(degree: int) -> Iterator[None]:
    """Let kernels that are lowered here take a polynomial of this degree; 0: nothing changes."""
    kept = sm90_rows.instruction

    def instruction(op: str):
        if not degree or op != "ex2.approx.ftz.f32":
            return kept(op)
        return mgpu.FragmentedArray._lift_fast_instr(
            functools.partial(polynomial, emit, degree=degree)
        )

    sm90_rows.instruction = instruction
    jax.clear_caches()
    try:
        yield
    finally:
        sm90_rows.instruction = kept
        jax.clear_caches()


def operands_of(kind: str, batch: int, tokens: int) -> Operands:
    """A whole prompt, or a new token of each sequence."""
    count = tokens if kind == "prefill" else 1
    q = random_bf16((batch, count, LAYOUT.num_heads, LAYOUT.channels), 12)
    positions = jnp.arange(tokens - count, tokens, dtype=jnp.int32)
    return q, *paged_cache(batch, tokens, LAYOUT), jnp.broadcast_to(positions, (batch, count))


def times_in_turn(programs: list[Callable], operands: Operands) -> list[float]:
    """The median device time of a call of each program, which run one after the other."""

    def run():
        for _ in range(TURNS):
            jax.block_until_ready([program(*operands) for program in programs])

    times = [us for _, us in kernel_events(run)]
    num_kernels, rest = divmod(len(times), TURNS * len(programs))
    if rest:
        raise RuntimeError(f"{len(times)} kernels in {TURNS} turns of {len(programs)} programs")
    calls = [sum(times[i : i + num_kernels]) for i in range(0, len(times), num_kernels)]
    return [statistics.median(calls[i :: len(programs)]) for i in range(len(programs))]


def measure(case: tuple[str, int, int], gpu: threading.Lock) -> list[dict]:
    """What a process does: a row for each variant, and how its results differ from the first's."""
    shapes = jax.eval_shape(lambda: operands_of(*case))
    programs = []
    for degree in DEGREES:
        with exp2_by(degree):
            programs.append(compile_ours(attend, shapes))
    with gpu:
        operands = operands_of(*case)
        outs = [program(*operands) for program in programs]
        times = times_in_turn(programs, operands)
    wide = [out.astype(jnp.float32) for out in outs]
    return [
        {
            "exp2": f"degree {degree}" if degree else "ex2.approx", "us": us,
            "ratio": us / times[0],
            "share_of_other_bits": int(num_different(outs[i], outs[0])) / outs[i].size,
            "largest_difference": float(jnp.abs(wide[i] - wide[0]).max()),
        }
        for i, (degree, us) in enumerate(zip(DEGREES, times, strict=True))
    ]  # fmt: skip


def main() -> None:
    """Measure every case, and print the table; exit 3 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.exp2", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    rows = Rows(environment(SM90), args.out)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, futures.ProcessPoolExecutor(len(CASES), spawn) as pool:
        gpu = manager.Lock()
        for case, found in [(case, pool.submit(measure, case, gpu)) for case in CASES]:
            facts = dict(zip(("case", "batch", "tokens"), case, strict=True))
            try:
                for row in found.result():
                    rows.keep(subject="exp2", **facts, **row)
            except Exception as error:  # told in the row; the command fails at its end
                rows.keep(subject="exp2", **facts, failed=f"{type(error).__name__}: {error}"[:300])
    print()
    for row in rows.rows:
        name = "{case} {batch} x {tokens}".format(**row)
        result = row.get("failed") or "{exp2:12}{us:9.2f} us{ratio:8.4f}".format(**row)
        print(f"{name:20}{result}")
    sys.exit(3 if any("failed" in row for row in rows.rows) else 0)


if __name__ == "__main__":
    main()
