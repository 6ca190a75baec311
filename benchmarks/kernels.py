# SPDX-License-Identifier: Apache-2.0
"""The sm90 kernels at the shapes of Llama-3.1-8B against whatever else runs there: bits, then time.

python -m benchmarks.kernels [linear attention rows] --out kernels.jsonl
python -m benchmarks.kernels linear --rows 8 64 2048 --no-torch

Device time from CUPTI, medians, all in one run on random data. A row whose bits are wrong has no
time. Rivals: `jnp.dot` (the best of cuBLAS, cuBLASLt and XLA's own), `torch.mm`, one fixed tile as
in Thinking Machines' batch-invariant product, cuDNN, XLA.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import os
import sys
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    COPY_BYTES_PER_S,
    Rows,
    copy_bytes_per_s,
    device_us,
    environment,
    num_different,
    random_bf16,
    run_rivals,
)
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear, linear_add_rms_norm, linear_swiglu
from detjax.pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.sampling import noise
from detjax.pallas_kernels.sampling.api import stats_and_choice
from detjax.pallas_kernels.swiglu.api import swiglu

PROFILE, SM90, EPS = NumericsProfile(), Backend.SM90, 1e-5
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    "lm_head": (128256, 4096),
}  # fmt: skip
"""(N, K) of the five products."""

TREES = ("o", "down")
"""Products that sum eight leaves as a tree, and add the residual stream and a norm."""

ROW_COUNTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_LOGITS = 128
"""Most rows of lm_head: one a sequence."""

L2_BYTES = 256 << 20
"""Weights in rotation take at least this much, so that each product reads them from memory."""


def _shapes(arrays) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def _compile(fn: Callable, arguments) -> Callable:
    return jax.jit(fn).lower(*_shapes(arguments)).compile()


# ------------------------------------------------------------------------------------ products


def _ours(name: str) -> Callable:
    """What a model calls, of (x, w, residual, gain)."""
    reduction = tree_reduction(SHAPES[name][1], PROFILE)

    def tree(x, w, residual, gain):
        return linear_add_rms_norm(
            x, w, residual, None, gain, reduction=reduction, eps=EPS, backend=SM90
        )

    def one_leaf(x, w, residual, gain):
        return linear(x, w, out_dtype=F32 if name == "lm_head" else BF16, backend=SM90)

    def gated(x, w, residual, gain):
        return linear_swiglu(x, w, backend=SM90)

    if name in TREES:
        return tree
    return gated if name == "gate_up" else one_leaf


def _dot(name: str) -> Callable:
    dtype = F32 if name == "lm_head" else BF16

    def run(x, w):
        return jnp.dot(x, w.T, preferred_element_type=dtype)

    return run


def linear_cases(counts: list[int]) -> list[tuple[str, int]]:
    """(shape, M), shape by shape."""
    return [(n, m) for n in SHAPES for m in counts if n != "lm_head" or m <= MAX_LOGITS]


def torch_times(counts: list[int], timeout_s: float) -> tuple[dict, str | None]:
    """What `benchmarks.rivals_torch` says of each (shape, M), and why not more."""
    cases = [(name, *SHAPES[name], m, name == "lm_head") for name, m in linear_cases(counts)]
    rows, why_not = run_rivals("linear", "--cases", json.dumps(cases), timeout_s=timeout_s)
    return {(row["shape"], row["m"]): row for row in rows}, why_not


def time_linear(rows: Rows, counts: list[int], torch_rows: dict, why_not: str | None) -> None:
    """Each product at each M, as a model calls it.

    Kernels named `detjax_linear` count. gate_up's also gate; those of the trees write float32 leaf
    sums, or add the residual and round. The norm after a tree is another row. Rivals only multiply.
    """
    pool = concurrent.futures.ThreadPoolExecutor(8)
    for name, (num_out, k_len) in SHAPES.items():
        mine = [m for shape, m in linear_cases(counts) if shape == name]
        if not mine:
            continue
        copies = -(-L2_BYTES // (2 * num_out * k_len))
        ws = [random_bf16((num_out, k_len), 7 + i, 0.02) for i in range(copies)]
        x = random_bf16((max(mine), k_len), 1)
        residual, gain = random_bf16((max(mine), num_out), 2), random_bf16((num_out,), 3)
        operands = {m: [(x[:m], w, residual[:m], gain) for w in ws] for m in mine}
        jobs = {m: pool.submit(_compile, _ours(name), operands[m][0]) for m in mine}
        whole = None
        for m in sorted(mine, reverse=True):
            row = {"subject": "linear", "shape": name, "m": m}
            row["leaves"] = tree_reduction(k_len, PROFILE).num_leaves if name in TREES else 1
            row["is_gated"] = name == "gate_up"
            try:
                ours = jobs[m].result()
                out = jax.tree.leaves(ours(*operands[m][0]))
                whole = whole or out
                row["different_bits"] = sum(
                    int(num_different(a, b[:m])) for a, b in zip(out, whole, strict=True)
                )
                if row["different_bits"] == 0:
                    row |= _linear_row(name, m, ours, operands[m])
                    row |= torch_rows.get((name, m), {"torch_failed": why_not or "no row"})
                    rivals = [row[k] for k in ("jnp_us", "torch_us", "fixed_us") if k in row]
                    row["ratio"] = min(rivals) / row["us"]
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            rows.keep(**row)


def _linear_row(name: str, m: int, ours: Callable, operands: list[tuple]) -> dict:
    us = device_us(ours, operands, only="detjax_linear")
    # Compiled alone, since XLA chooses by measuring.
    rival = _compile(_dot(name), operands[0][:2])
    jnp_us = device_us(rival, [o[:2] for o in operands])
    num_out, k_len = SHAPES[name]
    return {
        "us": us,
        "jnp_us": jnp_us,
        "tflop_per_s": 2 * m * num_out * k_len / us / 1e6,
        "weight_gb_per_s": 2 * num_out * k_len / us / 1e3,
    }


# ----------------------------------------------------------------------------------- attention

HEADS, KV_HEADS, CHANNELS, PAGE = 32, 8, 128, 128


def _paged_cache(batch: int, context: int) -> tuple[jax.Array, jax.Array]:
    num_pages = context // PAGE
    pages = random_bf16((1, batch * num_pages, 2, KV_HEADS, PAGE, CHANNELS), 11)
    order = np.random.default_rng(0).permutation(batch * num_pages).astype(np.int32)
    return pages, jnp.asarray(order.reshape(batch, num_pages))


def _attend(q, pages, table, positions):
    return attention(
        q, pages, table, positions, layer=0, window=None, profile=PROFILE, backend=SM90
    )


def time_prefill(rows: Rows, length: int) -> None:
    """Causal attention of one whole prompt, against cuDNN on contiguous keys and values."""
    pages, table = _paged_cache(1, length)
    q = random_bf16((1, length, HEADS, CHANNELS), 12)
    k, v = (random_bf16((1, length, KV_HEADS, CHANNELS), seed) for seed in (13, 14))
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    whole = jax.jit(_attend)(q, pages, table, positions)
    last = jax.jit(_attend)(q[:, -1:], pages, table, positions[:, -1:])
    row = {"subject": "attention", "case": "prefill", "tokens": length}
    row["different_bits"] = int(num_different(last, whole[:, -1:]))
    if row["different_bits"] == 0:
        us = device_us(jax.jit(_attend), [(q, pages, table, positions)], only="attention")
        cudnn_us = device_us(jax.jit(cudnn), [(q, k, v)])
        flop = 4 * HEADS * CHANNELS * length * (length + 1) / 2
        row |= {
            "ms": us / 1e3, "cudnn_ms": cudnn_us / 1e3, "tflops": flop / us / 1e6,
            "over_cudnn": cudnn_us / us,
        }  # fmt: skip
    rows.keep(**row)


def _cudnn_decode(q, k, v, lengths):
    """Contiguous keys and values [B, S, K, C]."""
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def _cudnn_paged_decode(q, k, v, lengths, table):
    """Pages [N, K, P, C] of keys and of values."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    batch = q.shape[0]
    out = cudnn.paged_attention(
        q.transpose(0, 2, 1, 3), k, v, jnp.ones((batch,), jnp.int32), lengths,
        table.reshape(batch, 1, -1, 1), table.reshape(batch, 1, -1, 1),
        scale=CHANNELS**-0.5, mask_type=cudnn.MaskType.PADDING, qkv_layout="BNTH",
    )  # fmt: skip
    return out.transpose(0, 2, 1, 3)


def time_decode(rows: Rows, batch: int, context: int) -> None:
    """One new token a sequence. Kernels of XLA that list the splits serve all layers of a step."""
    pages, table = _paged_cache(batch, context)
    q = random_bf16((batch, 1, HEADS, CHANNELS), 12)
    positions = jnp.full((batch, 1), context - 1, jnp.int32)
    run = jax.jit(_attend)
    out = run(q, pages, table, positions)
    alone = run(q[-1:], pages, table[-1:], positions[-1:])
    row = {"subject": "attention", "case": "decode", "batch": batch, "tokens": context}
    row["different_bits"] = int(num_different(alone, out[-1:]))
    if row["different_bits"]:
        rows.keep(**row)
        return
    us = device_us(run, [(q, pages, table, positions)], only="attention")
    num_bytes = 4 * batch * context * KV_HEADS * CHANNELS
    row |= {"us": us, "share": num_bytes / us * 1e6 / COPY_BYTES_PER_S}
    lengths = jnp.full((batch,), context, jnp.int32)
    paged = [pages[0, :, i] for i in (0, 1)]
    contiguous = [jnp.swapaxes(p, 1, 2).reshape(batch, context, KV_HEADS, -1) for p in paged]
    del pages
    rivals = {
        "cudnn_paged": (_cudnn_paged_decode, (q, *paged, lengths, table)),
        "cudnn": (_cudnn_decode, (q, *contiguous, lengths)),
    }
    for name, (rival, arguments) in rivals.items():
        try:
            row[f"{name}_us"] = device_us(jax.jit(rival), [arguments])
        except Exception as error:
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
    times = [row[f"{name}_us"] for name in rivals if f"{name}_us" in row]
    if times:
        row["over_cudnn"] = min(times) / us
    rows.keep(**row)


# ----------------------------------------------------------------------------- bound by memory


def _xla_norm(x, gain):
    wide = x.astype(F32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + EPS)
    return (wide * scale * gain.astype(F32)[None]).astype(x.dtype)


def _xla_add_norm(partial, x, gain):
    total = (x.astype(F32) + partial).astype(x.dtype)
    return total, _xla_norm(total, gain)


def _xla_swiglu(gate_up):
    gate, up = jnp.split(gate_up.astype(F32), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _xla_choice(logits, temperature, a, b):
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    scores = logits / temperature[:, None] + noise.gumbel(
        noise.token_bits((a[:, None], b[:, None]), ids)
    )
    return jax.nn.logsumexp(logits, axis=1), jnp.argmax(scores, axis=1)


def _time_rows(
    rows: Rows, copy: float, case: str, num_bytes: int, ours, xla, arguments, axes
) -> None:
    """Time one operation. `axes` says which axis of each operand holds the rows, None for none."""
    m = next(a.shape[axis] for a, axis in zip(arguments, axes, strict=True) if axis is not None)
    row = {"subject": "rows", "case": case, "m": m}
    try:
        run = jax.jit(ours)
        some = [
            a if axis is None else jnp.take(a, jnp.arange(m // 2, m), axis=axis)
            for a, axis in zip(arguments, axes, strict=True)
        ]
        outs = zip(jax.tree.leaves(run(*arguments)), jax.tree.leaves(run(*some)), strict=True)
        row["different_bits"] = sum(int(num_different(a[m // 2 :], b)) for a, b in outs)
        if row["different_bits"] == 0:
            us = device_us(run, [arguments])
            row |= {"us": us, "copy_tb_per_s": copy / 1e12}
            row |= {"share_of_copy": num_bytes / us * 1e6 / copy}
            row |= {"xla_us": device_us(jax.jit(xla), [arguments])}
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    rows.keep(**row)


def time_rows(rows: Rows) -> None:
    """Norms, SwiGLU and the choice of a token; at few rows the data lies in the L2."""
    copy = max(copy_bytes_per_s(), 1.0)
    add = functools.partial(_time_rows, rows, copy)
    gain = random_bf16((4096,), 1)
    for m in (8192, 1024, 64, 8):
        x, partial = random_bf16((m, 4096), 2), random_bf16((m, 4096), 3).astype(F32)
        add(
            "add_rms_norm", m * 4096 * 10,
            lambda p, x, g: add_rms_norm(p, x, None, g, eps=EPS, backend=SM90),
            _xla_add_norm, (partial, x, gain), (0, 0, None),
        )  # fmt: skip
        add(
            "rms_norm", m * 4096 * 4, lambda x, g: rms_norm(x, g, eps=EPS, backend=SM90),
            _xla_norm, (x, gain), (0, None),
        )  # fmt: skip
        gate_up = random_bf16((m, 2 * 14336), 4)
        add(
            "swiglu", m * 14336 * 6, lambda x: swiglu(x, backend=SM90), _xla_swiglu,
            (gate_up,), (0,),
        )  # fmt: skip
    for m in (64, 8):
        logits = 3 * random_bf16((m, 128256), 5).astype(F32)
        key = [jax.random.bits(jax.random.key(i), (m,), jnp.uint32) for i in (6, 7)]
        add(
            "stats_and_choice", m * 128256 * 4,
            lambda x, t, a, b: stats_and_choice(
                x, t, (a, b), first_token_id=0, vocab_block=PROFILE.vocab_block, backend=SM90
            ),
            _xla_choice, (logits, jnp.full((m,), 0.8, F32), *key), (0, 0, 0, 0),
        )  # fmt: skip
    for m in (8192, 64, 8):
        time_cache_write(rows, copy, m)


def time_cache_write(rows: Rows, copy: float, m: int) -> None:
    """Rotation and the write into a donated cache, m sequences of one token each."""
    channels = CHANNELS
    qkv = random_bf16((m, HEADS + 2 * KV_HEADS, channels), 1)
    cos, sin = (random_bf16((m, channels // 2), seed).astype(F32) for seed in (2, 3))
    pages = random_bf16((1, m // PAGE + 1, 2, KV_HEADS, PAGE, channels), 4)
    table = jnp.broadcast_to(jnp.arange(pages.shape[1], dtype=jnp.int32)[None], (m, pages.shape[1]))
    positions = jnp.arange(m, dtype=jnp.int32)[:, None]

    def run(pages, qkv, cos, sin, table, positions):
        q, pages = rope_into_cache(
            qkv, cos, sin, None, pages, table, positions, layer=0, eps=EPS, backend=SM90
        )
        return pages, q

    step = jax.jit(run, donate_argnums=0)
    state = [pages]

    def call(*arguments):
        state[0], q = step(state[0], *arguments)
        return q

    us = device_us(call, [(qkv, cos, sin, table, positions)], only="detjax")
    num_bytes = qkv.size * 4 + cos.size * 8
    rows.keep(
        subject="rows", case="rope_into_cache", m=m, us=us, copy_tb_per_s=copy / 1e12,
        share_of_copy=num_bytes / us * 1e6 / copy,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- main


def summary(rows: list[dict]) -> list[str]:
    """One table a subject, for the screen."""
    lines = []
    for row in rows:
        if row["subject"] == "linear" and "ratio" in row:
            rivals = " ".join(f"{k} {row[k + '_us']:.1f}" for k in ("jnp", "torch", "fixed")
                              if k + "_us" in row)  # fmt: skip
            lines.append(
                f"{row['shape']:8}{row['m']:6}{row['us']:9.1f} us  x{row['ratio']:.3f}  {rivals}"
            )
        elif row["subject"] == "attention" and "over_cudnn" in row:
            speed = (
                f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"share {row['share']:.3f}"
            )
            size = f"{row.get('batch', 1)} x {row['tokens']}"
            lines.append(f"{row['case']:8} {size:12} {speed}, {row['over_cudnn']:.3f} of cuDNN")
        elif row["subject"] == "rows" and "us" in row:
            xla = f", XLA {row['xla_us']:.1f} us" if "xla_us" in row else ""
            lines.append(
                f"{row['case']:18}{row['m']:6}{row['us']:8.1f} us, "
                f"{row['share_of_copy']:.2f} of copy{xla}"
            )
        else:
            lines.append(f"NO TIME: { {k: row[k] for k in list(row)[:6]} } {row.get('failed', '')}")
    few = [row["ratio"] for row in rows if row.get("m", 999) <= 128 and "ratio" in row]
    if few:
        mean = math.exp(sum(map(math.log, few)) / len(few))
        lines.append(f"linear, M to 128: geometric mean {mean:.3f}, least {min(few):.3f}")
    return lines


def main() -> None:
    """Run some subjects; exit 3 if a bit differed or something failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    subjects = ("linear", "attention", "rows")
    parser.add_argument("subjects", nargs="*", default=subjects, metavar="|".join(subjects))
    parser.add_argument("--rows", type=int, nargs="*", default=ROW_COUNTS, help="M of products")
    parser.add_argument("--no-torch", action="store_true", help="leave out torch and Triton")
    parser.add_argument("--torch-seconds", type=float, default=300.0, help="stop torch after this")
    parser.add_argument("--out", help="write JSON rows here")
    args = parser.parse_args()
    unknown = sorted(set(args.subjects) - set(subjects))
    if unknown:
        parser.error(f"{unknown} must be among {subjects}")
    torch_rows, why_not = {}, "left out"
    if "linear" in args.subjects and not args.no_torch:
        torch_rows, why_not = torch_times(args.rows, args.torch_seconds)
    rows = Rows(environment(SM90), args.out)
    if "linear" in args.subjects:
        time_linear(rows, args.rows, torch_rows, why_not)
    if "attention" in args.subjects:
        for length in (8192, 2048):
            time_prefill(rows, length)
        for batch, context in ((64, 4096), (256, 1024), (1, 32768), (8, 1024)):
            time_decode(rows, batch, context)
    if "rows" in args.subjects:
        time_rows(rows)
    print("\n".join(["", *summary(rows.rows)]))
    is_good = all(row.get("different_bits", 0) == 0 and "failed" not in row for row in rows.rows)
    sys.exit(0 if is_good else 3)


if __name__ == "__main__":
    main()
