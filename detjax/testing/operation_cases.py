# SPDX-License-Identifier: Apache-2.0
"""Operations on small drawn inputs, and whole answers, to compare the bits of two backends.

The inputs come from seeds alone, so that two machines need exchange results only. Shapes are such
as every backend takes: channels of 64 and 128, widths of several forms of the row sum.
"""

import dataclasses
import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from detjax.certify.operands import PRODUCT_KINDS, draw_operands
from detjax.defaults import FP8_CACHE
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.bundled import bundled_model_path
from detjax.models.config import ModelConfig
from detjax.models.hf_config import load_config
from detjax.models.loading import LoadedModel
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.weights.load import ignore_progress
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.opening import load_on_devices
from detjax.pallas_kernels.attention.api import attention, rope_attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.delta_rule.api import delta_rule, gated_rms_norm
from detjax.pallas_kernels.geglu.api import geglu
from detjax.pallas_kernels.linear import api as linear
from detjax.pallas_kernels.linear import w8a8
from detjax.pallas_kernels.linear.quantized import (
    QuantizedRows,
    RowCoding,
    W8A8Matrix,
)
from detjax.pallas_kernels.log_softmax.api import block_stats, log_probs, log_sum_exp
from detjax.pallas_kernels.lora import api as lora
from detjax.pallas_kernels.moe import api as moe
from detjax.pallas_kernels.moe.expert_weights import ClampedExperts, ExpertWeights
from detjax.pallas_kernels.output_gate.api import sigmoid_gate
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import combine_add_rms_norm, rms_norm
from detjax.pallas_kernels.rope.api import rope, rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.sampling import api as sampling
from detjax.pallas_kernels.softcap.api import softcap
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.testing.adapters import random_adapter
from detjax.testing.dummies import (
    adjusted_requests,
    answers,
    dummy_config,
    dummy_model,
    mixed_requests,
)
from detjax.testing.folders import write_model_folder

BF16, F32 = ml_dtypes.bfloat16, jnp.dtype(jnp.float32)
PROFILE = NumericsProfile()
FLOAT8_CACHE = NumericsProfile(kv_cache_dtype=FP8_CACHE)
FAMILY_FOLDERS = (
    "exaone4",
    "gemma3",
    "glm4",
    "granite",
    "olmo2",
    "olmo3",
    "phi4_longrope",
    "seed_oss",
    "smollm3",
)
"""Of tests/golden/hf: families that `sm90` computes."""
EPS = 1e-5
Run = Callable[[Backend], tuple]


def _product_cases(_: np.random.Generator) -> Iterator[tuple[str, Run]]:
    shapes = [(kind, 64, 256, 64) for kind in PRODUCT_KINDS]
    shapes += [(kind, 64, 1024, 256) for kind in PRODUCT_KINDS[:-1]]  # 2**20 steps each
    shapes += [("normal", 3, 64, 128), ("normal", 200, 576, 192), ("wide", 16, 4096, 64)]
    for kind, m, k, n in shapes:
        x, w = map(jnp.asarray, draw_operands(kind, m, k, n))
        run = lambda on, x=x, w=w: (linear.linear(x, w, out_dtype=F32, backend=on),)  # noqa: E731
        yield f"product {kind} {m}x{k}x{n}", run


def _layer_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Products with what surrounds them, few rows and many."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for m, d, f in ((3, 256, 768), (40, 256, 768), (2, 1024, 2816), (24, 640, 1536)):
        x, gain, residual = bf16(m, d), bf16(d), bf16(m, d, scale=4.0)
        w, gate_up = bf16(f, d, scale=d**-0.5), bf16(2 * f, d, scale=2 * d**-0.5)
        down, h, bias = bf16(d, f, scale=f**-0.5), bf16(m, f), bf16(f)
        reduction = tree_reduction(f, PROFILE)

        def run(on, x=x, gain=gain, residual=residual, w=w, gate_up=gate_up, down=down, h=h,
                bias=bias, reduction=reduction):  # fmt: skip
            options = {"eps": EPS, "backend": on}
            total, out = linear.linear_add_rms_norm(
                h, down, residual, None, gain, reduction=reduction, **options
            )
            return (
                linear.norm_linear(x, gain, w, bias, out_dtype=jnp.dtype(BF16), **options),
                linear.linear_swiglu(x, gate_up, backend=on),
                linear.norm_linear_swiglu(residual, gain, gate_up, **options),
                linear.linear_partial(h, down, reduction=reduction, backend=on),
                linear.linear_add(h, down, residual, gain, reduction=reduction, backend=on),
                total,
                out,
            )

        yield f"layer {m}x{d}x{f}", run


def _row_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for width in (64, 96, 128, 192, 256, 320, 384, 512, 576, 896, 1024, 2048, 3072, 4096, 5120):
        x, gain = bf16(37, width, scale=3.0), bf16(width)
        run = lambda on, x=x, gain=gain: (rms_norm(x, gain, eps=EPS, backend=on),)  # noqa: E731
        yield f"rms_norm {width}", run
    leaves = jnp.asarray(rng.standard_normal((8, 9, 512)).astype(np.float32))
    residual, gain, bias = bf16(9, 512), bf16(512), bf16(512)
    yield (
        "combine_add_rms_norm",
        lambda on: combine_add_rms_norm(leaves, residual, bias, gain, eps=EPS, backend=on),
    )
    patterns = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    finite = jnp.asarray(np.where(np.isfinite(patterns.astype(np.float32)), patterns, BF16(1)))
    up = bf16(1 << 16)
    for name, dtype in (("bfloat16", jnp.bfloat16), ("float32", jnp.float32)):
        gate_up = jnp.concatenate([finite, up])[None].astype(dtype)
        yield f"swiglu {name}", lambda on, x=gate_up: (swiglu(x, backend=on),)
        yield f"geglu {name}", lambda on, x=gate_up: (geglu(x, backend=on),)


def _attention_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for channels, heads, kv_heads, window in (
        (64, 8, 2, None), (128, 4, 2, None), (64, 4, 1, 100), (96, 4, 2, None),
    ):  # fmt: skip
        pages = bf16(2, 12, 2, kv_heads, 128, channels)
        table = jnp.asarray([[3, 0, 7, 9, 11, 5], [1, 8, 2, 10, 4, 6]], jnp.int32)
        gains = (bf16(channels), bf16(channels))
        shape = {"window": window, "profile": PROFILE}
        for query_len, starts in ((1, (700, 64)), (70, (600, 0)), (140, (0, 450))):
            positions = np.arange(query_len)[None] + np.asarray(starts)[:, None]
            positions[1, 65:70] = -1
            positions = jnp.asarray(positions, jnp.int32)
            angles = rng.uniform(0, 6, (2 * query_len, channels // 2))
            cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
            q = bf16(2, query_len, heads, channels, scale=2.0)
            qkv = bf16(2 * query_len, heads + 2 * kv_heads, channels, scale=2.0)

            def run(on, q=q, qkv=qkv, cos=cos, sin=sin, positions=positions, pages=pages,
                    table=table, gains=gains, shape=shape):  # fmt: skip
                place = CachePlace(pages, table, positions, layer=1)
                rotation, options = Rotation(cos, sin, gains), {"eps": EPS, "backend": on}
                first = place._replace(layer=0)
                queries, written = rope_into_cache(qkv, rotation, first, **options)
                return (
                    attention(q, place, **shape, backend=on),
                    rope(qkv, cos, sin, backend=on),
                    queries,
                    written[0],
                    rope_attention(qkv, rotation, place, **shape, **options)[0],
                    rope_attention(qkv, Rotation(cos, sin), place, **shape, **options)[0],
                )

            yield f"attention {channels} window {window} queries {query_len}", run


def _float8_cache_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Attention over a cache of float8: decode steps of few and many sequences, and chunks."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for channels, batch, query_len, window in (
        (128, 1, 1, None), (128, 8, 1, None), (64, 8, 1, None), (128, 80, 1, None),
        (128, 128, 1, None), (128, 2, 5, None), (64, 2, 70, None), (96, 2, 70, 100),
        (128, 2, 140, None),
    ):  # fmt: skip
        heads, kv_heads, table_len = 8, 2, 8 if batch <= 8 else 5
        shape = 1, table_len * batch, 2, kv_heads, 128, channels
        # Magnitudes from 2**-6 to 8, with signs.
        codes = rng.integers(0x08, 0x50, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        pages = jnp.asarray(codes.astype(np.uint8))
        table = rng.permutation(shape[1]).reshape(batch, table_len)
        last_start = table_len * 128 - query_len
        starts = np.asarray([800, 5, 0, 127, 128, 511, 512, 640])[:batch]
        if batch > len(starts):
            starts = rng.integers(0, last_start, batch)
        positions = jnp.asarray(starts[:, None] + np.arange(query_len), jnp.int32)
        angles = rng.uniform(0, 6, (batch * query_len, channels // 2))
        cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        qkv = bf16(batch * query_len, heads + 2 * kv_heads, channels, scale=2.0)
        gains = bf16(channels), bf16(channels)

        def run(on, qkv=qkv, cos=cos, sin=sin, gains=gains, pages=pages, table=table,
                positions=positions, window=window):  # fmt: skip
            place = CachePlace(pages, jnp.asarray(table, jnp.int32), positions, layer=0)
            return rope_attention(
                qkv, Rotation(cos, sin, gains), place,
                window=window, eps=EPS, profile=FLOAT8_CACHE, backend=on,
            )  # fmt: skip

        yield f"float8 cache {channels} batch {batch} queries {query_len} window {window}", run


def _sink_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Attention with sinks: decode steps of one to eight sequences, and a chunk."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    heads, kv_heads, channels = 16, 2, 64
    pages, sinks = bf16(1, 64, 2, kv_heads, 128, channels), bf16(heads, scale=3.0)
    for batch, query_len, window in (
        (1, 1, None), (2, 1, None), (2, 1, 128), (8, 1, None), (2, 70, None), (2, 70, 128),
    ):  # fmt: skip
        table = jnp.asarray(rng.permutation(64)[: 8 * batch].reshape(batch, 8), jnp.int32)
        starts = np.asarray([900, 5, 0, 127, 128, 511, 512, 640])[:batch]
        positions = jnp.asarray(starts[:, None] + np.arange(query_len), jnp.int32)
        angles = rng.uniform(0, 6, (batch * query_len, channels // 2))
        cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        q = bf16(batch, query_len, heads, channels, scale=2.0)
        qkv = bf16(batch * query_len, heads + 2 * kv_heads, channels, scale=2.0)

        def run(on, q=q, qkv=qkv, cos=cos, sin=sin, table=table, positions=positions,
                window=window):  # fmt: skip
            place = CachePlace(pages, table, positions, layer=0)
            options = {"window": window, "profile": PROFILE, "sinks": sinks, "backend": on}
            rotated, _ = rope_attention(qkv, Rotation(cos, sin), place, eps=EPS, **options)
            return attention(q, place, **options), rotated

        yield f"sinks batch {batch} queries {query_len} window {window}", run


def _choice_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    m, v = 48, 4096
    logits = jnp.asarray((rng.standard_normal((m, v)) * 6).astype(np.float32))
    padded = logits.at[:, 4000:].set(-jnp.inf)
    temperature = np.where(np.arange(m) % 3 == 0, 0.0, rng.uniform(0.1, 3, m))
    temperature = jnp.asarray(temperature, jnp.float32)
    key_0, key_1 = (jnp.asarray(rng.integers(0, 2**32, m), jnp.uint32) for _ in range(2))
    key = key_0, key_1
    ones, zeros = jnp.ones(m, jnp.float32), jnp.zeros((m, v), jnp.float32)
    ranked = jnp.asarray(-np.sort(rng.exponential(15, (m, v)).astype(np.float32), axis=1))
    top_k = jnp.asarray(rng.integers(1, v, m), jnp.int32)
    top_p = jnp.asarray(rng.uniform(0.1, 1, m), jnp.float32)
    sums = rng.integers(1 << 23, 0x7F800000, (1 << 16, 1), dtype=np.uint32).view(np.float32)
    bias = jnp.asarray(rng.standard_normal((m, v)) * (rng.random((m, v)) < 0.3), jnp.float32)
    uses = jnp.asarray(rng.integers(0, 5, (m, v)), jnp.int32)
    above, below, per_use, once = (
        jnp.asarray(rng.uniform(0.3, 1.9, m), jnp.float32) for _ in range(4)
    )

    def lse(on):
        return log_sum_exp(*block_stats(padded, vocab_block=128, backend=on), backend=on)

    yield "block_stats", lambda on: block_stats(padded, vocab_block=128, backend=on)
    yield "log_sum_exp", lambda on: (lse(on), log_probs(padded[:, :5], lse(on), backend=on))
    yield (
        "log",
        lambda on: (log_sum_exp(jnp.zeros(sums.shape), jnp.asarray(sums), backend=on),),
    )
    for name, x, t in (("noise", zeros, ones), ("scores", padded, temperature)):
        yield (
            name,
            lambda on, x=x, t=t: (
                sampling.gumbel_scores(x, t, key, first_token_id=256, backend=on),
            ),
        )
    yield (
        "stats_and_choice",
        lambda on: sampling.stats_and_choice(
            padded, temperature, key, first_token_id=128, vocab_block=128, backend=on
        ),
    )
    yield (
        "choose_token",
        lambda on: sampling.choose_token(padded, temperature, key, vocab_block=128, backend=on),
    )
    for name, t in (("exp", ones), ("nucleus_sums", temperature)):
        yield name, lambda on, t=t: sampling.nucleus_sums(ranked, t, top_k, top_p, backend=on)
    yield (
        "adjust_logits",
        lambda on: (
            sampling.adjust_logits(logits, bias, uses, (above, below), (per_use, once), backend=on),
        ),
    )


def _expert_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Mixtures of experts: one row, few and many, of narrow and wide rows."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for width, hidden, num_experts, top_k in ((256, 128, 24, 4), (2048, 768, 16, 8)):
        gate_up = bf16(num_experts, 2 * hidden, width, scale=2 * width**-0.5)
        down, gain = bf16(num_experts, width, hidden, scale=hidden**-0.5), bf16(width)
        next_w = bf16(192, width, scale=width**-0.5)
        for m in (1, 7, 40, 300):
            x, residual = bf16(m, width), bf16(m, width, scale=4.0)
            logits = jnp.asarray(rng.standard_normal((m, 32)).astype(np.float32) * 2)
            logits = logits.at[0, 3].set(logits[0, 5])  # a tie

            def run(on, x=x, residual=residual, logits=logits, gate_up=gate_up, down=down,
                    gain=gain, next_w=next_w, top_k=top_k, num_experts=num_experts):  # fmt: skip
                experts = ExpertWeights(gate_up, down)
                routed = {"num_experts": num_experts, "top_k": top_k}
                shared = moe.route(logits, **routed, renormalise=False, backend=on)
                ids, weights = moe.route(logits, **routed, renormalise=True, backend=on)
                y = moe.expert_mlp(x, ids, experts, first_expert=0, backend=on)
                half = num_experts // 2
                own = ExpertWeights(gate_up[half:], down[half:])
                mine = moe.expert_mlp(x, ids, own, first_expert=half, num_ranks=2, backend=on)
                norm = {"eps": EPS, "backend": on}
                whole = moe.route_mlp_add_rms_norm(
                    x, logits, experts, residual, gain, top_k=top_k, renormalise=True, **norm
                )
                late = moe.combine_experts_norm_linear(
                    y, weights, residual, gain, next_w, out_dtype=F32, **norm
                )
                return (*shared, ids, weights, y, mine, *whole, *late)

            yield f"experts {m}x{width}x{hidden}, {top_k} of {num_experts}", run


def _clamped_expert_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Experts with biases and a clamped SwiGLU, of widths that are no multiples of 128."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    width, hidden, num_experts, top_k = 576, 192, 32, 4
    gate_up = bf16(num_experts, 2 * hidden, width, scale=4 * width**-0.5)
    down, gain = bf16(num_experts, width, hidden, scale=hidden**-0.5), bf16(width)
    extras = ClampedExperts(
        gate_up_bias=bf16(num_experts, 2 * hidden), down_bias=bf16(num_experts, width),
        clamp=SwigluClamp(alpha=1.702, limit=7.0),
    )  # fmt: skip
    experts = ExpertWeights(gate_up, down, extras)
    for m in (1, 7, 40, 300):
        x, residual = bf16(m, width), bf16(m, width, scale=4.0)
        logits = jnp.asarray(rng.standard_normal((m, 64)).astype(np.float32) * 2)

        def run(on, x=x, residual=residual, logits=logits):
            ids, weights = moe.route(
                logits, num_experts=num_experts, top_k=top_k, renormalise=True, backend=on
            )
            y = moe.expert_mlp(x, ids, experts, first_expert=0, backend=on)
            options = {"top_k": top_k, "renormalise": True, "backend": on}
            whole = moe.route_mlp_add_rms_norm(
                x, logits, experts, residual, gain, eps=EPS, **options
            )
            routed = moe.route_mlp(x, logits, experts, **options)
            return ids, weights, y, *whole, *routed

        yield f"clamped experts {m}x{width}x{hidden}, {top_k} of {num_experts}", run


def _sigmoid_router_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Routers of float32 weights that choose by corrected sigmoids; few rows and many."""
    width = 512
    for num_experts, top_k in ((72, 4), (160, 8)):
        num_rows = -(-num_experts // 64) * 64
        router = rng.standard_normal((num_rows, width)).astype(np.float32) * width**-0.5
        router = jnp.asarray(router).at[num_experts:].set(0)
        correction = jnp.asarray(rng.standard_normal(num_rows).astype(np.float32) * 0.2)
        router = router.at[5].set(router[3])  # ties
        correction = correction.at[5].set(correction[3])
        for m in (1, 7, 40, 300):
            x = jnp.asarray(rng.standard_normal((m, width)).astype(BF16))

            def run(on, x=x, router=router, correction=correction, top_k=top_k,
                    num_experts=num_experts):  # fmt: skip
                logits = linear.linear(x, router, out_dtype=F32, backend=on)
                sizes = {"num_experts": num_experts, "top_k": top_k, "backend": on}
                shares = [
                    array
                    for renormalise, scale in ((True, 2.5), (False, 1.0))
                    for array in moe.route_by_sigmoid(
                        logits, correction, **sizes, renormalise=renormalise, scale=scale
                    )
                ]
                return logits, *shares

            yield f"sigmoid router {m}x{width}, {top_k} of {num_experts}", run


def _adapter_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Low-rank adapters of three parts and of one, few rows and many, some without an adapter."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for m, k, n, parts, rank in (
        (1, 256, 384, 3, 16), (7, 1024, 512, 1, 32), (40, 640, 384, 3, 64),
        (200, 2816, 1024, 1, 16),
    ):  # fmt: skip
        slots = 128 // rank
        width = parts * slots * rank
        x, a, b = bf16(m, k), bf16(width, k, scale=k**-0.5), bf16(n, width)
        base = jnp.asarray(rng.standard_normal((m, n)).astype(np.float32)).at[:, 0].set(-0.0)
        of_rows = np.arange(m) % (slots + 1)
        of_rows = jnp.asarray(np.where(of_rows == slots, -1, of_rows), jnp.int32)
        scales = jnp.asarray(rng.uniform(0.1, 3, (parts, slots)), jnp.float32)
        reduction = tree_reduction(k, PROFILE)

        def run(on, x=x, a=a, b=b, base=base, of_rows=of_rows, scales=scales,
                reduction=reduction):  # fmt: skip
            half = jnp.dtype(BF16)
            sums = linear.linear_leaf_sums(x, a, reduction=reduction, backend=on)
            h = lora.lora_hidden(sums, of_rows, scales, out_dtype=half, backend=on)
            return (
                h,
                lora.lora_add(base, h, b, out_dtype=half, backend=on),
                lora.lora_add(base, h, b, out_dtype=F32, backend=on),
            )

        yield f"adapters {m}x{k}x{n}, {parts} x {slots} of rank {rank}", run


def _eight_bit_scale_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Scales of blocks, a bound of the peak, and a scale that the checkpoint holds."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    float8, half = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(BF16)
    for m, k, n in ((3, 512, 256), (40, 4096, 256), (200, 1024, 512)):
        wide = np.exp2(rng.integers(-8, 9, (m, k))).astype(BF16)
        rows, gain, bias = bf16(m, k) * jnp.asarray(wide), bf16(k), bf16(n)
        residual = bf16(m, n, scale=4.0)
        values = jnp.asarray((rng.standard_normal((n, k)) * 90).clip(-448, 448).astype(float8))
        of_rows = jnp.asarray(rng.random(n, np.float32) * 0.1)
        kinds = {
            "blocks": W8A8Matrix(
                values=values, scales=jnp.asarray(rng.random((n // 128, k // 128), np.float32))
            ),
            "bound": W8A8Matrix(values=values, scales=of_rows, row_bound=12.5),
            "static": W8A8Matrix(
                values=values, scales=of_rows, row_scale=jnp.float32(rng.uniform(0.01, 0.02))
            ),
        }
        for kind, w in kinds.items():

            def run(on, rows=rows, gain=gain, bias=bias, residual=residual, w=w, m=m):
                x = w8a8.quantize_rows(rows, w.row_coding, backend=on)
                normed = _normed(on, rows, gain, w.row_coding)
                return (
                    x.values, x.scales[..., :m], normed.values, normed.scales[..., :m],
                    w8a8.w8a8_product(x, w, out_dtype=F32, backend=on),
                    w8a8.w8a8_product(x, w, bias, residual, out_dtype=half, backend=on),
                    w8a8.w8a8_swiglu(normed, w, out_dtype=half, backend=on),
                )  # fmt: skip

            yield f"8 bits {kind} {m}x{k}x{n}", run


def _normed(on: Backend, rows, gain, coding: RowCoding) -> QuantizedRows:
    """Rows, normalised and quantised."""
    return w8a8.quantize_rows(rms_norm(rows, gain, eps=EPS, backend=on), coding, backend=on)


def _family_row_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Gains of float32, and the clamped SwiGLU of every finite bfloat16."""
    for width in (64, 256, 640, 2048):
        x = jnp.asarray((rng.standard_normal((37, width)) * 3).astype(BF16))
        gain = jnp.asarray(rng.uniform(0.5, 2, width), jnp.float32)
        run = lambda on, x=x, gain=gain: (rms_norm(x, gain, eps=EPS, backend=on),)  # noqa: E731
        yield f"rms_norm {width} float32 gain", run
    patterns = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    finite = np.where(np.isfinite(patterns.astype(np.float32)), patterns, BF16(1))
    up = (rng.standard_normal(1 << 16) * 8).astype(BF16)
    gate_up = jnp.asarray(np.concatenate([finite, up])[None])
    clamp = SwigluClamp(alpha=1.702, limit=7.0)
    yield "clamped swiglu", lambda on: (swiglu(gate_up, clamp=clamp, backend=on),)


def _eight_bit_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """8-bit activations and weights, few rows and many."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for dtype in map(jnp.dtype, (jnp.int8, jnp.float8_e4m3fn)):
        for m, k, n in ((3, 512, 256), (40, 4096, 256), (200, 1024, 512)):
            wide = np.exp2(rng.integers(-8, 9, (m, k))).astype(BF16)
            rows, gain, bias = bf16(m, k) * jnp.asarray(wide), bf16(k), bf16(n)
            values = rng.standard_normal((n, k), np.float32) * 50
            w = W8A8Matrix(
                values=jnp.asarray(values.clip(-127, 127).astype(dtype)),
                scales=jnp.asarray(rng.random(n, np.float32) * 0.1),
            )
            residual = bf16(m, n, scale=4.0)

            def run(
                on,
                rows=rows,
                gain=gain,
                bias=bias,
                w=w,
                residual=residual,
                dtype=dtype,
                m=m,
            ):
                coding = RowCoding(dtype=dtype)
                x = w8a8.quantize_rows(rows, coding, backend=on)
                normed = _normed(on, rows, gain, coding)
                half = jnp.dtype(BF16)
                return (
                    x.values, x.scales[:m], normed.values, normed.scales[:m],
                    w8a8.w8a8_product(x, w, out_dtype=F32, backend=on),
                    w8a8.w8a8_product(x, w, bias, residual, out_dtype=half, backend=on),
                    w8a8.w8a8_swiglu(x, w, out_dtype=half, backend=on),
                )  # fmt: skip

            yield f"8 bits {dtype.name} {m}x{k}x{n}", run


def _float32_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Float32 activations and bfloat16 weights: products, norms, and attention over the cache."""

    def f32(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(scale))

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for m, d, f in ((3, 256, 768), (40, 1024, 2816), (200, 640, 1536)):
        x, h, residual = f32(m, d), f32(m, f), f32(m, d, scale=4.0)
        w, gate_up = bf16(f, d, scale=d**-0.5), bf16(2 * f, d, scale=2 * d**-0.5)
        down, gain, bias = bf16(d, f, scale=f**-0.5), bf16(d), bf16(f)
        reduction = tree_reduction(f, PROFILE)

        def run(on, x=x, h=h, residual=residual, w=w, gate_up=gate_up, down=down, gain=gain,
                bias=bias, reduction=reduction):  # fmt: skip
            options = {"eps": EPS, "backend": on}
            total, out = linear.linear_add_rms_norm(
                h, down, residual, None, gain, reduction=reduction, **options
            )
            return (
                rms_norm(x, gain, **options),
                linear.linear(x, w, bias, out_dtype=F32, backend=on),
                linear.norm_linear(x, gain, w, out_dtype=F32, **options),
                linear.norm_linear_swiglu(residual, gain, gate_up, **options),
                total,
                out,
            )

        yield f"float32 layer {m}x{d}x{f}", run
    for channels, window in ((64, None), (128, 100)):
        pages, gains = f32(2, 12, 2, 2, 128, channels), (bf16(channels), bf16(channels))
        table = jnp.asarray([[3, 0, 7, 9, 11, 5], [1, 8, 2, 10, 4, 6]], jnp.int32)
        for query_len, starts in ((1, (700, 64)), (70, (600, 0))):
            positions = np.arange(query_len)[None] + np.asarray(starts)[:, None]
            positions = jnp.asarray(positions, jnp.int32)
            angles = rng.uniform(0, 6, (2 * query_len, channels // 2))
            cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
            q, qkv = f32(2, query_len, 4, channels, scale=2.0), f32(2 * query_len, 8, channels)

            def attend(on, q=q, qkv=qkv, cos=cos, sin=sin, gains=gains, pages=pages, table=table,
                       positions=positions, window=window):  # fmt: skip
                place = CachePlace(pages, table, positions, layer=1)
                queries, written = rope_into_cache(
                    qkv, Rotation(cos, sin, gains), place._replace(layer=0), eps=EPS, backend=on
                )
                shape = {"window": window, "profile": PROFILE, "backend": on}
                return attention(q, place, **shape), queries, written[0]

            yield f"float32 attention {channels} window {window} queries {query_len}", attend


def _linear_attention_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Gated DeltaNet over prompts, then token by token; its norm, and the gate of attention.

    Gates reach from those that keep nothing to those that keep all.
    """
    for dtype, keys, group, dim in ((BF16, 16, 2, 128), (BF16, 3, 3, 64), (F32, 2, 1, 128)):
        mixed = (2 + group) * dim
        numbers = -(-(mixed + 2 * group + 1) // 8) * 8
        filters = jnp.asarray(rng.standard_normal((keys, 4, mixed)).astype(dtype))
        of_heads = (rng.uniform(-8, 3, (keys, group)), rng.uniform(-9, 3, (keys, group)))
        gates = tuple(jnp.asarray(x, jnp.float32) for x in of_heads)
        lengths, table = (131, 70), jnp.asarray([[4, 1], [2, 0]], jnp.int32)
        drawn = rng.standard_normal((2, 140, keys, numbers))
        drawn[..., mixed:] *= 6
        own = -(-(mixed + 3 * group) // 8) * 8 - numbers  # rows of sm90 have more of their own
        tokens = np.pad(drawn, ((0, 0), (0, 0), (0, 0), (0, own))).astype(dtype)

        def run(on, tokens=tokens, filters=filters, gates=gates, table=table, lengths=lengths,
                mixed=mixed, keys=keys, group=group, dim=dim):  # fmt: skip
            numbers = tokens.shape[-1]
            rows = jnp.zeros((2, 5, 1, keys, 128, numbers), tokens.dtype)
            states = jnp.zeros((2, 5, 2, keys * group, dim, dim), jnp.float32)
            steps = [(0, 131), (1, 1), (2, 3)]  # from behind the prompts on, and how many
            results = []
            for start, count in steps:
                at = np.full((2, count), -1)
                for row, length in enumerate(lengths):
                    first, new = (length + start - 1, count) if start else (0, length)
                    at[row, :new] = np.arange(first, first + new)
                new_rows = np.take_along_axis(tokens, np.maximum(at, 0)[..., None, None], axis=1)
                out, rows, states = delta_rule(
                    jnp.asarray(new_rows.reshape(-1, keys, numbers)), filters, gates, rows, states,
                    table, jnp.asarray(at, jnp.int32), layer=1, backend=on,
                )  # fmt: skip
                results.append(out)
            return *results, rows[..., : mixed + 2 * group], states

        yield f"delta rule {np.dtype(dtype).name} {keys}x{group}x{dim}", run
    patterns = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    finite = np.where(np.isfinite(patterns.astype(np.float32)), patterns, BF16(1))
    gate = jnp.asarray(finite.reshape(64, 1024))
    heads = jnp.asarray((rng.standard_normal((64, 1024)) * 3).astype(BF16))
    yield "sigmoid gate", lambda on: (sigmoid_gate(heads, gate, backend=on),)
    for width in (64, 128, 256):
        x = jnp.asarray(rng.standard_normal((37, width), np.float32))
        z = jnp.asarray((rng.standard_normal((37, width)) * 4).astype(BF16))
        gain = jnp.asarray(rng.uniform(0.5, 2, width), jnp.float32)
        run_norm = lambda on, x=x, z=z, gain=gain: (  # noqa: E731
            gated_rms_norm(x, z, gain, eps=1e-6, backend=on),
        )
        yield f"gated rms_norm {width}", run_norm


def _wide_head_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Heads of 256 channels, and soft caps: decode, windows of drafts, and chunks."""

    def bf16(*shape, scale=1.0):
        return jnp.asarray((rng.standard_normal(shape) * scale).astype(BF16))

    for channels, heads, kv_heads, window, cap in (
        (256, 8, 2, None, None), (256, 4, 2, 200, None), (256, 4, 2, None, 50.0),
        (256, 4, 2, 200, 50.0), (64, 4, 2, None, 30.0), (128, 4, 1, 150, 30.0),
    ):  # fmt: skip
        pages = bf16(2, 12, 2, kv_heads, 128, channels)
        table = jnp.asarray([[3, 0, 7, 9, 11, 5], [1, 8, 2, 10, 4, 6]], jnp.int32)
        gains = jnp.asarray(rng.uniform(0.5, 2, (2, channels)).astype(np.float32))
        gains = gains[0], gains[1]
        shape = {"window": window, "profile": PROFILE}
        for query_len, starts in ((1, (700, 64)), (5, (509, 0)), (140, (520, 450))):
            positions = np.arange(query_len)[None] + np.asarray(starts)[:, None]
            positions[1, 65:70] = -1
            positions = jnp.asarray(positions, jnp.int32)
            angles = rng.uniform(0, 6, (2 * query_len, channels // 2))
            cos, sin = (jnp.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
            q = bf16(2, query_len, heads, channels, scale=4.0)
            qkv = bf16(2 * query_len, heads + 2 * kv_heads, channels, scale=2.0)
            sinks = bf16(heads, scale=3.0)

            place = CachePlace(pages, table, positions, layer=1)

            rotation = Rotation(cos, sin, gains)

            def run(on, q=q, qkv=qkv, rotation=rotation, place=place, shape=shape, sinks=sinks,
                    cap=cap):  # fmt: skip
                options = {"eps": EPS, "backend": on}
                out, written = rope_attention(qkv, rotation, place, **shape, **options)
                plain, _ = rope_attention(
                    qkv, rotation._replace(gains=None), place, sinks=sinks, **shape, **options
                )
                shape = shape | {"softcap": cap, "backend": on}
                return (
                    attention(q, place, **shape),
                    attention(q, place, sinks=sinks, **shape),
                    out,
                    written[1],
                    plain,
                )

            yield f"heads of {channels}, window {window}, cap {cap}, queries {query_len}", run
    logits = jnp.asarray((rng.standard_normal((9, 4000)) * 60).astype(np.float32))
    logits = logits.at[0, :4].set(jnp.asarray([jnp.inf, -jnp.inf, 1e30, 1e-40]))
    yield "softcap", lambda on: (softcap(logits, cap=30.0, backend=on),)


def _eight_bit_expert_cases(rng: np.random.Generator) -> Iterator[tuple[str, Run]]:
    """Experts of 8 bits: of integers, of float8 with scales of channels and of blocks."""
    width, hidden, num_experts, top_k = 512, 512, 16, 4

    def matrices(kind: str, num_rows: int, k_len: int) -> W8A8Matrix:
        values = rng.standard_normal((num_experts, num_rows, k_len)) * k_len**-0.5
        if kind == "int8":
            codes = jnp.asarray((values * 2000).clip(-127, 127).astype(np.int8))
        else:
            codes = jnp.asarray((values * 2000).clip(-448, 448), jnp.float8_e4m3fn)
        of_blocks = (num_rows // 128, k_len // 128) if kind == "blocks" else (num_rows,)
        scales = rng.uniform(0.5, 2, (num_experts, *of_blocks)) / 2000
        return W8A8Matrix(values=codes, scales=jnp.asarray(scales, jnp.float32))

    for kind in ("int8", "float8", "blocks"):
        experts = ExpertWeights(matrices(kind, 2 * hidden, width), matrices(kind, width, hidden))
        for m in (1, 9, 200):
            x = jnp.asarray(rng.standard_normal((m, width)), jnp.bfloat16)
            ids = jnp.asarray([rng.permutation(num_experts)[:top_k] for _ in range(m)], jnp.int32)

            def run(on: Backend, *, x=x, ids=ids, experts=experts) -> tuple:
                half = jax.tree.map(lambda w: w[4:12], experts)
                return (
                    moe.expert_mlp(x, ids, experts, first_expert=0, backend=on),
                    moe.expert_mlp(x, ids, half, first_expert=4, num_ranks=2, backend=on),
                )

            yield f"experts of {kind} {m}x{width}x{hidden}, {top_k} of {num_experts}", run


_GROUPS: tuple[tuple[Callable[[np.random.Generator], Iterator[tuple[str, Run]]], int], ...] = (
    (_family_row_cases, 12), (_eight_bit_scale_cases, 11), (_linear_attention_cases, 13),
    (_sink_cases, 8), (_sigmoid_router_cases, 16),
    (_wide_head_cases, 15), (_product_cases, 0), (_choice_cases, 4),
    (_clamped_expert_cases, 9),
    (_eight_bit_cases, 6), (_row_cases, 2), (_attention_cases, 3), (_layer_cases, 1),
    (_float32_cases, 7), (_adapter_cases, 10), (_eight_bit_expert_cases, 14), (_expert_cases, 5),
    (_float8_cache_cases, 14),
)  # fmt: skip
"""Makers of cases and the seeds of their numbers; those that draw more are later."""


@functools.cache
def _group(index: int) -> dict[str, Run]:
    make, seed = _GROUPS[index]
    return dict(make(np.random.default_rng(seed)))


def operation_cases() -> dict[str, Run]:
    """Return all cases by name: each takes a backend and returns arrays."""
    return {name: run for i in range(len(_GROUPS)) for name, run in _group(i).items()}


def operation_case(name: str) -> Run:
    """Return one of `operation_cases`, and draw no more numbers than it takes to find it."""
    return next(_group(i)[name] for i in range(len(_GROUPS)) if name in _group(i))


def _bundled(backend: Backend) -> LoadedModel:
    model, _ = load_on_devices(
        bundled_model_path(), profile=PROFILE, backend=backend.value, dp=1, tp=1
    )
    return model


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnswerCase:
    """Whole answers of a model.

    Attributes:
        make: Makes the model with a backend.
        requests: What is asked.
        adapters: That requests name; the model has room for them.
    """

    make: Callable[[Backend], LoadedModel]
    requests: list[Request]
    adapters: tuple[Adapter, ...] = ()

    def answers(self, backend: Backend, count: int | None = None, **sizes: int) -> list[Completion]:
        """Answers to the first `count` requests, or all, by a fresh engine of these sizes."""
        model = self.make(backend)
        max_len = min(384, model.config.max_position_embeddings)
        options: dict[str, Any] = {"adapters": self.adapters, "max_len": max_len, **sizes}
        return answers(model, self.requests[:count], **options)


def answer_cases() -> dict[str, AnswerCase]:
    """Return models by name, each with its requests: bundled, and of random weights."""
    small: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 384}
    configs = {
        "head 64, q/k norm": dummy_config(
            hidden_size=256, intermediate_size=384, head_dim=64, qk_norm=True, **small
        ),
        "head 128, biases, window": dummy_config(
            hidden_size=512, intermediate_size=1024, head_dim=128, qkv_bias=True, o_bias=True,
            window=100, **small,
        ),
        "experts": dummy_config(
            hidden_size=256, intermediate_size=384, head_dim=64, qk_norm=True, num_layers=3,
            experts=(16, 4), expert_width=128, **small,
        ),
        "two layers of 8B": dummy_config(
            hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
            vocab_size=4096,
        ),
    }  # fmt: skip
    cases = {name: _dummy_case(config) for name, config in configs.items()}
    float32 = dataclasses.replace(PROFILE, compute_dtype="float32")
    cases["float32 activations"] = _dummy_case(configs["head 64, q/k norm"], float32)
    for name in ("head 64, q/k norm", "experts"):
        cases[f"float8 cache, {name}"] = _dummy_case(configs[name], FLOAT8_CACHE)
    requests = mixed_requests(12, vocab_size=4096, max_tokens=48)
    requests += adjusted_requests(vocab_size=4096, max_tokens=24)
    cases = {"bundled": AnswerCase(make=_bundled, requests=requests), **cases}
    cases["adapters"] = _adapted_case(configs["head 128, biases, window"])
    for scheme in ("int8-w8a8", "fp8-dynamic", "fp8-block"):
        for name, config in (("w8a8", _DENSE), ("w8a8 experts", _MIXTURE)):
            cases[f"{name} {scheme}"] = AnswerCase(
                make=functools.partial(_eight_bit_model, scheme, config),
                requests=mixed_requests(8, vocab_size=256, max_tokens=24),
            )
    return cases


def family_cases(folder: Path) -> dict[str, AnswerCase]:
    """Return a model of each family that differs from Llama in more than sizes, by name.

    Args:
        folder: Has `<family>/config.json`, of which features are taken; sizes are the usual ones.
    """
    cases = {}
    for name in FAMILY_FOLDERS:
        config = dataclasses.replace(
            load_config(folder / name), head_dim=64, eos_token_ids=(), hidden_size=512,
            intermediate_size=1024, num_heads=8, num_kv_heads=4, vocab_size=384,
        )  # fmt: skip
        cases[f"family {name}"] = _dummy_case(config)
    return cases


def _dummy_case(config: ModelConfig, profile: NumericsProfile = PROFILE) -> AnswerCase:
    return AnswerCase(
        make=lambda backend: dummy_model(config, backend=backend, profile=profile),
        requests=mixed_requests(8, vocab_size=config.vocab_size, max_tokens=24),
    )


def _adapted_case(config: ModelConfig) -> AnswerCase:
    """Adapters of ranks below, at and above one block of 16; every fourth request has none."""
    adapters = tuple(
        random_adapter(config, seed=i, rank=rank) for i, rank in enumerate((3, 16, 24))
    )
    plain = mixed_requests(8, vocab_size=config.vocab_size, max_tokens=24)
    names = [*(adapter.sha256 for adapter in adapters), ""]
    return AnswerCase(
        make=lambda backend: open_adapters(
            dummy_model(config, backend=backend), AdapterSizes(max_loras=4, max_lora_rank=32)
        ),
        requests=[
            dataclasses.replace(one, adapter=names[i % len(names)]) for i, one in enumerate(plain)
        ],
        adapters=adapters,
    )


_DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_MIXTURE = _DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def _eight_bit_model(scheme: str, config: dict[str, Any], backend: Backend) -> LoadedModel:
    """A model whose weights and activations have 8 bits, read from a folder that is made here."""
    with tempfile.TemporaryDirectory() as folder:
        plain = write_model_folder(Path(folder) / "plain", config, scale=0.06)
        made = Path(folder) / "quantised"
        quantize_folder(plain, made, RECIPES[scheme], progress=ignore_progress)
        model, _ = load_on_devices(
            made, profile=PROFILE, backend=backend.value, dp=1, tp=1, quantized_weights="w8a8"
        )
    return model


def as_bits(array) -> np.ndarray:
    """Return the bits of an array as unsigned integers."""
    array = np.asarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def digest_of(arrays: tuple) -> str:
    """Return 16 hexadecimal digits over shapes, dtypes and bits."""
    total = hashlib.sha256()
    for array in map(np.asarray, arrays):
        total.update(f"{array.dtype.name} {array.shape}\n".encode())
        total.update(as_bits(array).tobytes())
    return total.hexdigest()[:16]
