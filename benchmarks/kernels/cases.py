# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.kernels` runs: each operation with its operands, its rivals and its limit."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.common import COPY_BYTES_PER_S, MATRIX_FLOP_PER_S, random_bf16
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.delta_rule.api import delta_rule
from detjax.pallas_kernels.delta_rule.operands import Filters, OutputNorm, ProjectedRows
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.linear.api import linear, linear_add_rms_norm, linear_swiglu
from detjax.pallas_kernels.moe.api import route_mlp_add_rms_norm
from detjax.pallas_kernels.moe.expert_weights import ExpertWeights
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from detjax.pallas_kernels.sampling import noise
from detjax.pallas_kernels.sampling.api import stats_and_choice
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.testing.shapes import LAYOUTS, LINEAR_SHAPES, MOE_SHAPES, HeadLayout

PROFILE, SM90, EPS = NumericsProfile(), Backend.SM90, 1e-5
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
PRODUCTS = {
    shape.name.removeprefix("llama3_8b_"): (shape.num_outputs, shape.k_len)
    for shape in LINEAR_SHAPES
    if shape.name.startswith("llama3_8b_")
} | {"lm_head": (128256, 4096)}
"""(N, K) of the five products of Llama-3.1-8B."""

TREES = ("o", "down")
"""Products that sum eight leaves as a tree, and add the residual stream and a norm."""

MAX_LOGITS = 128
"""Most rows of lm_head: one a sequence."""

L2_BYTES = 256 << 20
"""Weights in rotation take at least this much, so that each product reads them from memory."""

LAYOUT, PAGE = LAYOUTS["llama3_8b"], PROFILE.attention_block
WIDE_LAYOUT = LAYOUTS["gemma3_4b"]
"""Heads of 256 channels."""
EXPERTS = MOE_SHAPES[0]
VOCAB, WIDTH, CHANNELS = 128256, 4096, 14336
ROW_COUNTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

Operands = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Another implementation, of operands that `prepare` makes of ours before the time is taken."""

    run: Callable
    prepare: Callable[..., Operands] = lambda *operands: operands


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One operation at several numbers of rows.

    Attributes:
        subject: Of its rows of results.
        facts: What a row of results has beside the subject: names the case at a number of rows.
        counts: Numbers of rows.
        draw: Operands of several calls at the largest number of rows.
        axes: The axis of each operand that has the rows; None where there is none.
        run: Ours.
        out_axis: The axis of each result that has the rows.
        only: Part of the names of the kernels whose time counts.
        rivals: By name.
        num_bytes: That have to be read and written at a number of rows.
        num_flops: Likewise, of products; 0 where memory is the limit.
    """

    subject: str
    facts: Callable[[int], Mapping[str, Any]]
    counts: Sequence[int]
    draw: Callable[[int], list[Operands]]
    axes: Sequence[int | None]
    run: Callable
    out_axis: int = 0
    only: str = ""
    rivals: Mapping[str, Rival] = field(default_factory=lambda: types.MappingProxyType({}))
    num_bytes: Callable[[int], float]
    num_flops: Callable[[int], float] = lambda num_rows: 0.0

    def first_rows(self, operands: Operands, count: int) -> Operands:
        """The operands of the first `count` rows."""
        return tuple(
            a if axis is None else lax.slice_in_dim(a, 0, count, axis=axis)
            for a, axis in zip(operands, self.axes, strict=True)
        )

    def floor_us(self, num_rows: int) -> float:
        """The least time that an H200's memory and tensor cores allow."""
        seconds = self.num_bytes(num_rows) / COPY_BYTES_PER_S
        return max(seconds, self.num_flops(num_rows) / MATRIX_FLOP_PER_S) * 1e6


def rows_of(counts: Sequence[int], most: int) -> list[int]:
    """Those of the numbers of rows that a case has."""
    return sorted(n for n in counts if n <= most)


# ------------------------------------------------------------------------------------ products


def products(counts: Sequence[int]) -> Iterator[Kernel]:
    """Each product as a model calls it; gate_up's also gates, a tree's adds residual and norm."""
    for name, (num_out, k_len) in PRODUCTS.items():
        reduction = tree_reduction(k_len, PROFILE)
        is_wide = name == "lm_head"

        def draw(most, num_out=num_out, k_len=k_len):
            copies = -(-L2_BYTES // (2 * num_out * k_len))
            x, residual = random_bf16((most, k_len), 1), random_bf16((most, num_out), 2)
            gain = random_bf16((num_out,), 3)
            return [
                (x, random_bf16((num_out, k_len), 7 + i, 0.02), residual, gain)
                for i in range(copies)
            ]

        def run(x, w, residual, gain, name=name, reduction=reduction):
            if name in TREES:
                return linear_add_rms_norm(
                    x, w, residual, None, gain, reduction=reduction, eps=EPS, backend=SM90
                )
            if name == "gate_up":
                return linear_swiglu(x, w, backend=SM90)
            return linear(x, w, out_dtype=F32 if name == "lm_head" else BF16, backend=SM90)

        def dot(x, w, dtype=F32 if is_wide else BF16):
            return jnp.dot(x, w.T, preferred_element_type=dtype)

        def facts(num_rows, name=name, reduction=reduction):
            leaves = reduction.num_leaves if name in TREES else 1
            return {"shape": name, "m": num_rows, "leaves": leaves, "is_gated": name == "gate_up"}

        yield Kernel(
            subject="linear", facts=facts, draw=draw, axes=(0, None, 0, None), run=run,
            counts=rows_of(counts, MAX_LOGITS if is_wide else max(counts, default=0)),
            only="detjax_linear",
            rivals={"jnp": Rival(run=dot, prepare=lambda x, w, *_: (x, w))},
            num_bytes=lambda m, size=num_out * k_len: 2.0 * size,
            num_flops=lambda m, size=num_out * k_len: 2.0 * m * size,
        )  # fmt: skip


def float32_products(counts: Sequence[int]) -> Iterator[Kernel]:
    """Products of float32 activations; rivals: ours in bfloat16, XLA's in float32 and TF32."""
    for name in ("qkv", "gate_up"):
        num_out, k_len = PRODUCTS[name]
        ours = functools.partial(linear, out_dtype=F32, backend=SM90)

        def draw(most, num_out=num_out, k_len=k_len):
            x = jax.random.normal(jax.random.key(3), (most, k_len), F32)
            return [(x, random_bf16((num_out, k_len), i, 0.02)) for i in range(2)]

        def dot(x, w, precision):
            return jnp.dot(x, w.T, precision=precision)

        def widen(x, w):
            return x, w.astype(F32)

        yield Kernel(
            subject="float32_product", facts=lambda m, name=name: {"shape": name, "m": m},
            counts=rows_of(counts, 1024), draw=draw, axes=(0, None), run=ours,
            rivals={
                "bfloat16": Rival(run=ours, prepare=lambda x, w: (x.astype(BF16), w)),
                "xla_float32": Rival(
                    run=functools.partial(dot, precision="highest"), prepare=widen
                ),
                "xla_tf32": Rival(run=functools.partial(dot, precision="default"), prepare=widen),
            },
            num_bytes=lambda m, size=num_out * k_len: 2.0 * size,
            num_flops=lambda m, size=num_out * k_len: 6.0 * m * size,
        )  # fmt: skip


# ----------------------------------------------------------------------------------- attention


def attend(q, pages, table, positions):
    """Attention of the first layer of a cache."""
    place = CachePlace(pages, table, positions, layer=0)
    return attention(q, place, window=None, profile=PROFILE, backend=SM90)


def paged_cache(batch: int, context: int, layout: HeadLayout) -> tuple[jax.Array, jax.Array]:
    """Random pages, in random order."""
    shape = (1, batch * -(-context // PAGE), 2, layout.num_kv_heads, PAGE, layout.channels)
    order = np.random.default_rng(0).permutation(shape[1]).astype(np.int32)
    return random_bf16(shape, 11), jnp.asarray(order.reshape(batch, -1))


def _contiguous(q, pages, table, positions) -> Operands:
    """Keys and values of [B, S, K, C], and the lengths, for cuDNN."""
    shape = (len(table), -1, pages.shape[3], pages.shape[5])
    k, v = (jnp.swapaxes(pages[0, table, i], 2, 3).reshape(shape) for i in (0, 1))
    return q, k, v, positions[:, -1] + 1


def prefill(
    counts: Sequence[int], layout: HeadLayout = LAYOUT, subject: str = "attention"
) -> Iterator[Kernel]:
    """Causal attention of a whole prompt, against cuDNN on contiguous keys and values."""

    def draw(most):
        q = random_bf16((1, most, layout.num_heads, layout.channels), 12)
        return [(q, *paged_cache(1, most, layout), jnp.arange(most, dtype=jnp.int32)[None])]

    def cudnn(q, k, v, lengths):
        return jax.nn.dot_product_attention(
            q, k[:, : q.shape[1]], v[:, : q.shape[1]], is_causal=True, implementation="cudnn"
        )

    yield Kernel(
        subject=subject, facts=lambda m: {"case": "prefill", "tokens": m},
        counts=[n for n in counts if n >= 2048], draw=draw, axes=(1, None, None, 1), run=attend,
        out_axis=1, only="attention", rivals={"cudnn": Rival(run=cudnn, prepare=_contiguous)},
        num_bytes=lambda m: 4.0 * m * layout.num_kv_heads * layout.channels,
        num_flops=lambda m: 2.0 * layout.num_heads * layout.channels * m * (m + 1),
    )  # fmt: skip


def decode(
    counts: Sequence[int], layout: HeadLayout = LAYOUT, subject: str = "attention"
) -> Iterator[Kernel]:
    """One new token a sequence, at contexts that real batches have."""
    for context, batches in ((1024, (1, 8, 64, 256)), (4096, (64,)), (32768, (1,))):

        def draw(most, context=context):
            q = random_bf16((most, 1, layout.num_heads, layout.channels), 12)
            positions = jnp.full((most, 1), context - 1, jnp.int32)
            return [(q, *paged_cache(most, context, layout), positions)]

        def cudnn(q, k, v, lengths):
            return jax.nn.dot_product_attention(
                q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
            )

        yield Kernel(
            subject=subject,
            facts=lambda m, context=context: {"case": "decode", "batch": m, "tokens": context},
            counts=sorted(set(batches) & set(counts)), draw=draw, axes=(0, None, 0, 0),
            run=attend, only="attention",
            rivals={"cudnn": Rival(run=cudnn, prepare=_contiguous)},
            num_bytes=lambda m, n=context: 4.0 * m * n * layout.num_kv_heads * layout.channels,
        )  # fmt: skip


# ------------------------------------------------------------------------------ bound by memory


def _xla_norm(x, gain):
    wide = x.astype(F32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + EPS)
    return (wide * scale * gain.astype(F32)[None]).astype(x.dtype)


def _xla_add_norm(partial, x, gain):
    total = (x.astype(F32) + partial).astype(x.dtype)
    return total, _xla_norm(total, gain)


def _xla_swiglu(gate_up):
    gate, up = jnp.split(gate_up.astype(F32), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _xla_choice(logits, temperature, a, b):
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    bits = noise.token_bits((a[:, None], b[:, None]), ids)
    scores = logits / temperature[:, None] + noise.gumbel(bits)
    return jax.nn.logsumexp(logits, axis=1), jnp.argmax(scores, axis=1)


def row_operations(counts: Sequence[int]) -> Iterator[Kernel]:
    """Norms and SwiGLU; at few rows the data lies in the L2."""
    gain = random_bf16((WIDTH,), 1)

    def case(name, axes, draw, run, xla, row_bytes):
        return Kernel(
            subject="rows", facts=lambda m: {"case": name, "m": m}, counts=rows_of(counts, 8192),
            draw=lambda most: [draw(most)], axes=axes, run=run, rivals={"xla": Rival(run=xla)},
            num_bytes=lambda m: float(m * row_bytes),
        )  # fmt: skip

    yield case(
        "add_rms_norm", (0, 0, None),
        lambda m: (random_bf16((m, WIDTH), 3).astype(F32), random_bf16((m, WIDTH), 2), gain),
        lambda p, x, g: add_rms_norm(p, x, None, g, eps=EPS, backend=SM90), _xla_add_norm,
        WIDTH * 10,
    )  # fmt: skip
    yield case(
        "rms_norm", (0, None), lambda m: (random_bf16((m, WIDTH), 2), gain),
        lambda x, g: rms_norm(x, g, eps=EPS, backend=SM90), _xla_norm, WIDTH * 4,
    )  # fmt: skip
    yield case(
        "swiglu", (0,), lambda m: (random_bf16((m, 2 * CHANNELS), 4),),
        lambda x: swiglu(x, backend=SM90), _xla_swiglu, CHANNELS * 6,
    )  # fmt: skip


def choices(counts: Sequence[int]) -> Iterator[Kernel]:
    """Block statistics and the token of each row: greedy, sampled, and of a model that is sure."""

    def run(logits, temperature, a, b):
        return stats_and_choice(
            logits, temperature, (a, b), first_token_id=0, vocab_block=PROFILE.vocab_block,
            backend=SM90,
        )  # fmt: skip

    for name, temperature, width, peak in (
        ("greedy", 0.0, 1.0, 0.0), ("sampled", 0.8, 1.0, 0.0), ("sampled, wide", 0.8, 3.0, 0.0),
        ("sampled, sure", 0.8, 2.5, 30.0),
    ):  # fmt: skip

        def draw(most, temperature=temperature, width=width, peak=peak):
            logits = width * jax.random.normal(jax.random.key(5), (most, VOCAB), F32)
            if peak:
                logits = logits.at[jnp.arange(most), 7].set(peak)
            keys = [jax.random.bits(jax.random.key(i), (most,), jnp.uint32) for i in (6, 7)]
            return [(logits, jnp.full((most,), temperature, F32), *keys)]

        yield Kernel(
            subject="choice", facts=lambda m, name=name: {"case": name, "m": m},
            counts=rows_of(counts, 256), draw=draw, axes=(0, 0, 0, 0), run=run,
            rivals={"xla": Rival(run=_xla_choice)} if temperature else {},
            num_bytes=lambda m: 4.0 * m * VOCAB,
        )  # fmt: skip


# ------------------------------------------------------------------------------------- experts


def _ragged(x, logits, w_gate_up, w_down):
    """The experts by XLA's `ragged_dot`, with weights (in, out): [M, k, D], not combined."""
    ids = lax.top_k(logits, EXPERTS.top_k)[1]
    slots = ids.reshape(-1)
    order = jnp.argsort(slots, stable=True)
    sizes = jnp.bincount(slots, length=w_gate_up.shape[0]).astype(jnp.int32)
    both = lax.ragged_dot(x[order // EXPERTS.top_k], w_gate_up, sizes)
    gate, up = jnp.split(both, 2, axis=1)
    y = lax.ragged_dot(jax.nn.silu(gate) * up, w_down, sizes)
    return jnp.zeros_like(y).at[order].set(y).reshape(*ids.shape, -1)


def experts(counts: Sequence[int]) -> Iterator[Kernel]:
    """One layer of Qwen3-30B-A3B, from the router's logits to the next norm; uniform routing."""
    num, width, hidden = EXPERTS.num_experts, EXPERTS.width, EXPERTS.hidden_size

    def draw(most):
        weights = (
            random_bf16((num, 2 * width, hidden), 1, 0.04),
            random_bf16((num, hidden, width), 2, 0.06),
        )
        x, residual = random_bf16((most, hidden), 21), random_bf16((most, hidden), 22)
        gain = random_bf16((hidden,), 20)
        # Other experts in every call, so that at few rows their weights come from memory.
        return [
            (x, jax.random.normal(jax.random.key(i), (most, num), F32), *weights, residual, gain)
            for i in range(12 if most <= 64 else 2)
        ]

    def run(x, logits, w_gate_up, w_down, residual, gain):
        return route_mlp_add_rms_norm(
            x, logits, ExpertWeights(w_gate_up, w_down), residual, gain,
            top_k=EXPERTS.top_k, renormalise=True, eps=EPS, backend=SM90,
        )  # fmt: skip

    def num_hit(m):
        return num * (1 - (1 - EXPERTS.top_k / num) ** m)

    ragged = Rival(
        run=_ragged,
        prepare=lambda x, logits, w_gate_up, w_down, *_: (
            x, logits, w_gate_up.swapaxes(1, 2), w_down.swapaxes(1, 2)
        ),
    )  # fmt: skip
    for few in (True, False):
        yield Kernel(
            subject="moe", facts=lambda m: {"kind": "time", "tiles": "chosen", "m": m},
            counts=[n for n in rows_of(counts, 4096) if (n <= 64) == few], draw=draw,
            axes=(0, 0, None, None, 0, None), run=run, rivals={"ragged_dot": ragged},
            num_bytes=lambda m: 6.0 * width * hidden * num_hit(m),
            num_flops=lambda m: 6.0 * width * hidden * m * EXPERTS.top_k,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ recurrence


def recurrence(counts: Sequence[int]) -> Iterator[Kernel]:
    """Gated DeltaNet of Qwen3.5 35B-A3B: a new token a sequence, in the middle of a block."""
    num_keys, group, dim, taps, behind = 16, 2, 128, 4, 32
    row = -(-((2 + group) * dim + 3 * group) // 8) * 8
    projected = functools.partial(
        ProjectedRows, num_heads=num_keys, key_dim=dim, value_dim=dim, group=group, width=row
    )
    num_columns = -(-sum(projected(columns=None).part_widths) // 64) * 64

    def draw(most):
        kept = random_bf16((1, most, 1, num_keys, PAGE, row), 31)
        # How many tokens a state has behind it.
        kept = kept.at[:, :, :, :, 0, -group:].set(behind)
        shape = 1, most, PAGE // STATE_BLOCK, num_keys * group, dim, dim
        gates = jnp.zeros((num_keys, group), F32)
        filters = [random_bf16((n * num_keys * dim, 1, taps), 34) for n in (1, 1, group)]
        return [
            (
                random_bf16((most, num_columns), 32), kept,
                jax.random.normal(jax.random.key(33), shape, F32), *filters, gates, gates,
                jnp.arange(most, dtype=jnp.int32)[:, None], jnp.full((most, 1), behind, jnp.int32),
            )
        ]  # fmt: skip

    def run(columns, kept, states, q, k, v, decay, step, table, positions):
        of_layer = projected(columns=columns), Filters(q, k, v), (decay, step)
        norm = OutputNorm(gain=jnp.ones(dim, F32), eps=1e-6)
        return delta_rule(
            *of_layer, kept, states, table, positions, layer=0, backend=SM90, norm=norm
        )[0]

    yield Kernel(
        subject="delta", facts=lambda m: {"case": "detjax_delta_step", "batch": m},
        counts=rows_of(counts, 256), draw=draw, axes=(0, *[None] * 7, 0, 0),
        run=run, only="detjax_delta", num_bytes=lambda m: 8.0 * m * num_keys * group * dim * dim,
    )  # fmt: skip


SUBJECTS: dict[str, Callable[[Sequence[int]], Iterator[Kernel]]] = {
    "linear": products, "prefill": prefill, "decode": decode, "rows": row_operations,
    "choice": choices, "moe": experts, "float32": float32_products, "delta": recurrence,
    "prefill_256": functools.partial(prefill, layout=WIDE_LAYOUT, subject="attention_256"),
    "decode_256": functools.partial(decode, layout=WIDE_LAYOUT, subject="attention_256"),
}  # fmt: skip
