# SPDX-License-Identifier: Apache-2.0
"""Every claim in a kernel's docstring, on the backends of a CPU.

A case builds a function of rows; each claim is a way of calling it that must not matter. One test
requires that every `Claims:` line in the package has its cases here.
"""

import functools
import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import detjax.pallas_kernels
import detjax.parallel.collectives
from detjax.numerics import NumericsProfile, Reduction, tree_reduction
from detjax.pallas_kernels.attention.api import attention, rope_attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.delta_rule.api import delta_rule, delta_rule_gradient, gated_rms_norm
from detjax.pallas_kernels.embedding.api import embed
from detjax.pallas_kernels.fixed_blocks import add_leaves
from detjax.pallas_kernels.geglu.api import geglu
from detjax.pallas_kernels.gradients.api import attention_gradient, expert_token_sum, token_sum
from detjax.pallas_kernels.linear.api import (
    add_partials,
    combine_norm_linear,
    linear,
    linear_add,
    linear_add_rms_norm,
    linear_leaf_sums,
    linear_partial,
    linear_swiglu,
    norm_linear,
    norm_linear_swiglu,
)
from detjax.pallas_kernels.log_softmax.api import block_stats, log_probs, log_sum_exp
from detjax.pallas_kernels.lora.adapted import LowRankRows
from detjax.pallas_kernels.lora.api import (
    expert_lora_add,
    lora_add,
    lora_hidden,
    lora_linear,
    lora_linear_add_rms_norm,
    lora_linear_swiglu,
    lora_project,
)
from detjax.pallas_kernels.moe.api import (
    combine_experts_add_rms_norm,
    combine_experts_norm_linear,
    expert_linear,
    expert_mlp,
    route,
    route_by_sigmoid,
    route_mlp,
    route_mlp_add_rms_norm,
)
from detjax.pallas_kernels.moe.expert_weights import ExpertWeights, SharedRows
from detjax.pallas_kernels.output_gate.api import sigmoid_gate
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import add_rms_norm, combine_add_rms_norm, rms_norm
from detjax.pallas_kernels.rope.api import rope, rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.sampling.api import (
    adjust_logits,
    choose_token,
    gumbel_scores,
    nucleus_sums,
    stats_and_choice,
)
from detjax.pallas_kernels.softcap.api import softcap
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.mesh import make_mesh
from detjax.testing import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
    wide,
)
from detjax.testing.cases import quick_and_slow
from detjax.training.formulas import DeltaInputs, plain_delta_rule

ON = {"backend": Backend.REFERENCE}
"""Of the test that runs: the fixture `backend` changes it."""
M, K, N, C = 37, 192, 160, 16
NUM_EXPERTS, TOP_K = 8, 3
PROFILE = NumericsProfile()
BF16 = jnp.dtype(jnp.bfloat16)
LINEAR_HEADS, ROW_WIDTH = 8, 2 * C + 2 * (C + 2)
"""Heads of keys of gated DeltaNet, and numbers of one of two heads of values."""
LORA_SCALES = jnp.asarray([[0.5, 3.0, 1.3], [2.0, 0.7, 1.0]], jnp.float32)
"""Of two parts and three slots."""
ROW_COUNTS = [1, 33]
MORE_ROW_COUNTS = [2, 5, 15, 16, 17]


def bf16(rng, *shape) -> jax.Array:
    return jnp.asarray(wide(rng, shape, 0.7), jnp.bfloat16)


def f32(rng, *shape) -> jax.Array:
    return jnp.asarray(wide(rng, shape, 0.7))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel as a function of its row operands; anything else is closed over."""

    kernel: Callable
    call: Callable
    rows: tuple
    slices: Callable | None = None
    """(rank, number of ranks) -> (call on that share, how to cut the whole result alike)."""


def _both_halves(rows, num_ranks, rank):
    """A rank's share of gates, then of their ups."""
    halves = jnp.split(rows, 2)
    return jnp.concatenate([half[_columns(num_ranks, rank, len(half))] for half in halves])


def _columns(num_ranks, rank, width):
    return slice(rank * width // num_ranks, (rank + 1) * width // num_ranks)


def _choice(x, temperature, key_0, key_1, *, ranks):
    """Statistics of all blocks, the best score and its token, each rank on its columns."""
    parts = []
    for rank in range(ranks):
        cols = _columns(ranks, rank, x.shape[1])
        parts.append(
            stats_and_choice(
                x[:, cols], temperature, (key_0, key_1), first_token_id=cols.start,
                vocab_block=128, **ON,
            )
        )  # fmt: skip
    maxima, sums, best, token = (jnp.stack(part, axis=1) for part in zip(*parts, strict=True))
    winner = jnp.argmax(best, axis=1)[:, None]
    best = jnp.take_along_axis(best, winner, axis=1)
    token = jnp.take_along_axis(token, winner, axis=1).astype(jnp.float32)
    rows = x.shape[0]
    return jnp.concatenate([maxima.reshape(rows, -1), sums.reshape(rows, -1), best, token], axis=1)


def _token(x, temperature, key_0, key_1, *, ranks):
    """Token, log-probability and log-sum-exp; of several ranks, by the operations that gather."""
    if ranks == 1:
        token, logprob, lse = choose_token(x, temperature, (key_0, key_1), vocab_block=128, **ON)
        return jnp.stack([token.astype(jnp.float32), logprob, lse], axis=1)
    gathered = _choice(x, temperature, key_0, key_1, ranks=ranks)
    blocks = x.shape[1] // 128
    lse = log_sum_exp(gathered[:, :blocks], gathered[:, blocks : 2 * blocks], **ON)
    token = gathered[:, -1:].astype(jnp.int32)
    logprob = log_probs(jnp.take_along_axis(x, token, axis=1), lse, **ON)
    return jnp.concatenate([gathered[:, -1:], logprob, lse[:, None]], axis=1)


def _adjusted(x, bias, uses, above, below, per_use, once, cols=slice(None)):
    """Logits adjusted on one rank's columns."""
    wide_rows = (y[:, cols] for y in (x, bias, uses))
    return adjust_logits(*wide_rows, (above, below), (per_use, once), **ON)


def _cases() -> dict[str, Case]:
    rng = np.random.default_rng(7)
    w, bias, gain = bf16(rng, N, K), bf16(rng, N), bf16(rng, K)
    cos, sin = f32(rng, M, C // 2), f32(rng, M, C // 2)
    table = bf16(rng, 50, 64)
    gate_up, w_gate_up = bf16(rng, M, 1024), bf16(rng, 1024, K)
    gains = (bf16(rng, C), bf16(rng, C))
    logits = f32(rng, M, 1024)
    temperature = jnp.asarray(np.where(np.arange(M) % 3 == 0, 0.0, 0.7), jnp.float32)
    key = tuple(jnp.asarray(rng.integers(0, 2**32, M), jnp.uint32) for _ in range(2))
    ranked = jnp.sort(logits, axis=1, descending=True)
    top_k = jnp.asarray(rng.integers(1, 1024, M), jnp.int32)
    top_p = jnp.asarray(rng.uniform(0.1, 1, M), jnp.float32)
    maxima, sums = (jnp.abs(f32(rng, M, 24)) for _ in range(2))
    draw = np.random.default_rng(8)  # of its own: the other cases keep their values
    adjustments = (
        logits,
        f32(draw, M, 1024) * jnp.asarray(draw.random((M, 1024)) < 0.3, jnp.float32),
        jnp.asarray(draw.integers(0, 5, (M, 1024)), jnp.int32),
        *(jnp.asarray(draw.uniform(0.3, 1.9, M), jnp.float32) for _ in range(4)),
    )
    draw = np.random.default_rng(12)
    experts = ExpertWeights(bf16(draw, NUM_EXPERTS, 2 * 48, 64), bf16(draw, NUM_EXPERTS, 64, 48))
    expert_ids = jnp.asarray(
        draw.permuted(np.tile(np.arange(NUM_EXPERTS), (M, 1)), axis=1)[:, :TOP_K], jnp.int32
    )
    routed = bf16(draw, M, 64), expert_ids
    combined = bf16(draw, M, TOP_K, 64), jnp.abs(f32(draw, M, TOP_K)), bf16(draw, M, 64)
    router_logits = f32(draw, M, NUM_EXPERTS)
    wide_router = f32(np.random.default_rng(16), NUM_EXPERTS, K)
    leaf = tree_reduction(K, PROFILE)
    wide_w = bf16(rng, N, 8 * 32)
    eight = tree_reduction(8 * 32, PROFILE)
    draw = np.random.default_rng(13)
    lora_b, lora_slots = bf16(draw, 512, 192), jnp.asarray(draw.integers(-1, 3, M), jnp.int32)
    joined = np.random.default_rng(17)
    lora_a, joined_b = bf16(joined, 192, K), bf16(joined, N, 128)
    gated_b = bf16(joined, 1024, 256).at[:512, 128:].set(0).at[512:, :128].set(0)
    square, square_b = bf16(joined, K, K), bf16(joined, K, 128)
    of_experts = np.random.default_rng(15)
    expert_b = bf16(of_experts, NUM_EXPERTS, 96, 192)
    expert_of_row = jnp.asarray(of_experts.integers(0, NUM_EXPERTS, M), jnp.int32)
    hybrid = np.random.default_rng(14)
    gated, head_gain = (bf16(hybrid, M, 512), bf16(hybrid, M, 512)), f32(hybrid, 64)
    pages = bf16(rng, 2, 9, 2, 2, 128, C)
    pages_of = jnp.asarray([[3, 0, 7], [1, 8, 2]], jnp.int32)
    q_positions = jnp.asarray(rng.integers(0, 3 * 128, M), jnp.int32)

    def attend(q, positions, *, heads=slice(None)):
        out = attention(
            q[None], CachePlace(pages[:, :, :, heads], pages_of[:1], positions[None], layer=1),
            window=None, profile=PROFILE, **ON,
        )  # fmt: skip
        return out[0]

    def share_of(fn, operands, width):
        def share(rank, ranks):
            cols = _columns(ranks, rank, width)
            return lambda *_: fn(*(x[:, cols] for x in operands), **ON), cols

        return share

    def noise_share(rank, ranks):
        cols = _columns(ranks, rank, 1024)
        call = lambda x, t, a, b: gumbel_scores(  # noqa: E731
            x[:, cols], t, (a, b), first_token_id=cols.start, **ON
        )
        return call, cols

    def heads_share(width):
        def share(rank, ranks):
            heads = _columns(ranks, rank, width)
            return lambda x, c, s: rope(x[:, heads], c, s, **ON), heads

        return share

    def attention_share(rank, ranks):
        first = rank * 2 // ranks
        q_heads, kv_heads = _columns(ranks, rank, 8), slice(first, first + 1)
        return lambda q, p: attend(q[:, q_heads], p, heads=kv_heads), q_heads

    return {
        "linear": Case(
            kernel=linear,
            call=lambda x: linear(x, w, bias, out_dtype=x.dtype, **ON),
            rows=(bf16(rng, M, K),),
        ),
        "norm_linear": Case(
            kernel=norm_linear,
            call=lambda x: norm_linear(x, gain, w, bias, eps=1e-5, out_dtype=x.dtype, **ON),
            rows=(bf16(rng, M, K),),
        ),
        "norm_linear_swiglu": Case(
            kernel=norm_linear_swiglu,
            call=lambda x: norm_linear_swiglu(x, gain, w_gate_up, eps=1e-5, **ON),
            rows=(bf16(rng, M, K),),
            slices=lambda rank, ranks: (
                lambda x: norm_linear_swiglu(
                    x,
                    gain,
                    _both_halves(w_gate_up, ranks, rank),
                    eps=1e-5,
                    **ON,
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "linear_swiglu": Case(
            kernel=linear_swiglu,
            call=lambda x: linear_swiglu(x, w_gate_up, **ON),
            rows=(bf16(rng, M, K),),
            slices=lambda rank, ranks: (
                lambda x: linear_swiglu(
                    x,
                    _both_halves(w_gate_up, ranks, rank),
                    **ON,
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "linear_leaf_sums": Case(
            kernel=linear_leaf_sums,
            call=lambda x: add_leaves(linear_leaf_sums(x, w, reduction=leaf, **ON)),
            rows=(bf16(rng, M, K),),
        ),
        "linear_partial": Case(
            kernel=linear_partial,
            call=lambda x: linear_partial(x, w, reduction=leaf, **ON),
            rows=(bf16(rng, M, K),),
        ),
        "add_partials": Case(
            kernel=add_partials,
            call=lambda a, b: add_partials(a, b, **ON),
            rows=(f32(rng, M, 512), f32(rng, M, 512)),
            slices=lambda rank, ranks: (
                lambda a, b: add_partials(
                    *(x[:, _columns(ranks, rank, 512)] for x in (a, b)), **ON
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "rms_norm": Case(
            kernel=rms_norm,
            call=lambda x: rms_norm(x, gain, eps=1e-5, **ON),
            rows=(bf16(rng, M, K),),
        ),
        "add_rms_norm": Case(
            kernel=add_rms_norm,
            call=lambda p, r: jnp.stack(add_rms_norm(p, r, gain, gain, eps=1e-5, **ON), axis=1),
            rows=(f32(rng, M, K), bf16(rng, M, K)),
        ),
        "rope": Case(
            kernel=rope,
            call=lambda x, c, s: rope(x, c, s, **ON),
            rows=(bf16(rng, M, 8, C), cos, sin),
            slices=heads_share(8),
        ),
        "swiglu": Case(
            kernel=swiglu,
            call=lambda gate_up: swiglu(gate_up, **ON),
            rows=(gate_up,),
            slices=lambda rank, ranks: (
                lambda gate_up: swiglu(
                    jnp.concatenate(
                        [half[:, _columns(ranks, rank, 512)] for half in jnp.split(gate_up, 2, 1)],
                        axis=1,
                    ),
                    **ON,
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "geglu": Case(
            kernel=geglu,
            call=lambda gate_up: geglu(gate_up, **ON),
            rows=(gate_up,),
            slices=lambda rank, ranks: (
                lambda gate_up: geglu(
                    jnp.concatenate(
                        [half[:, _columns(ranks, rank, 512)] for half in jnp.split(gate_up, 2, 1)],
                        axis=1,
                    ),
                    **ON,
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "softcap": Case(
            kernel=softcap,
            call=lambda x: softcap(x, cap=3.0, **ON),
            rows=(f32(rng, M, 512),),
            slices=lambda rank, ranks: (
                lambda x: softcap(x[:, _columns(ranks, rank, 512)], cap=3.0, **ON),
                _columns(ranks, rank, 512),
            ),
        ),
        "embed": Case(
            kernel=embed,
            call=lambda i: embed(table, i, out_dtype=jnp.dtype(jnp.float32), **ON),
            rows=(jnp.asarray(rng.integers(0, 50, M), jnp.int32),),
            slices=lambda rank, ranks: (
                lambda i: embed(
                    table[:, _columns(ranks, rank, 64)], i, out_dtype=jnp.dtype(jnp.float32), **ON
                ),
                _columns(ranks, rank, 64),
            ),
        ),
        "attention": Case(
            kernel=attention,
            call=attend,
            rows=(bf16(rng, M, 8, C), q_positions),
            slices=attention_share,
        ),
        "block_stats": Case(
            kernel=block_stats,
            call=lambda x: jnp.stack(block_stats(x, vocab_block=128, **ON), axis=-1),
            rows=(logits,),
            slices=lambda rank, ranks: (
                lambda x: jnp.stack(
                    block_stats(x[:, _columns(ranks, rank, 1024)], vocab_block=128, **ON), axis=-1
                ),
                _columns(ranks, rank, 8),
            ),
        ),
        "log_sum_exp": Case(
            kernel=log_sum_exp,
            call=lambda m, s: log_sum_exp(m, s, **ON),
            rows=(maxima, sums),
            # What a mesh changes is how many blocks of padding follow.
            slices=lambda rank, ranks: (
                lambda m, s: log_sum_exp(
                    jnp.pad(m, ((0, 0), (0, 100 * rank)), constant_values=-jnp.inf),
                    jnp.pad(s, ((0, 0), (0, 100 * rank))),
                    **ON,
                ),
                slice(None),
            ),
        ),
        "log_probs": Case(
            kernel=log_probs,
            call=lambda x, s: log_probs(x, s, **ON),
            rows=(logits, f32(rng, M)),
            slices=lambda rank, ranks: (
                lambda x, s: log_probs(x[:, _columns(ranks, rank, 1024)], s, **ON),
                _columns(ranks, rank, 1024),
            ),
        ),
        "adjust_logits": Case(
            kernel=adjust_logits,
            call=lambda *rows: _adjusted(*rows),
            rows=adjustments,
            slices=lambda rank, ranks: (
                lambda *rows: _adjusted(*rows, cols=_columns(ranks, rank, 1024)),
                _columns(ranks, rank, 1024),
            ),
        ),
        "gumbel_scores": Case(
            kernel=gumbel_scores,
            call=lambda x, t, a, b: gumbel_scores(x, t, (a, b), first_token_id=0, **ON),
            rows=(logits, temperature, *key),
            slices=noise_share,
        ),
        "stats_and_choice": Case(
            kernel=stats_and_choice,
            call=lambda *rows: _choice(*rows, ranks=1),
            rows=(logits, temperature, *key),
            slices=lambda rank, ranks: (
                lambda *rows: _choice(*rows, ranks=ranks),
                slice(None),
            ),
        ),
        "choose_token": Case(
            kernel=choose_token,
            call=lambda *rows: _token(*rows, ranks=1),
            rows=(logits, temperature, *key),
            slices=lambda rank, ranks: (
                lambda *rows: _token(*rows, ranks=ranks),
                slice(None),
            ),
        ),
        "nucleus_sums": Case(
            kernel=nucleus_sums,
            call=lambda x, t, k, p: jnp.concatenate(
                [y if y.ndim == 2 else y[:, None] for y in nucleus_sums(x, t, k, p, **ON)], axis=1
            ),
            rows=(ranked, temperature, top_k, top_p),
            # Every rank sorts the whole gathered row: nothing is cut.
            slices=lambda rank, ranks: (
                lambda *rows: _cases_cache()["nucleus_sums"].call(*rows),
                slice(None),
            ),
        ),
        "combine_add_rms_norm": Case(
            kernel=combine_add_rms_norm,
            call=lambda leaves, r: _combine(leaves, r, gain),
            rows=(f32(rng, M, 8, K), bf16(rng, M, K)),
            # A rank, or a CTA, may have added its own subtree first.
            slices=lambda rank, ranks: (
                lambda leaves, r: _combine(_fold_leaves(leaves, ranks), r, gain),
                slice(None),
            ),
        ),
        "combine_norm_linear": Case(
            kernel=combine_norm_linear,
            call=lambda leaves, r: _combine_and_multiply(leaves, r, gain, w),
            rows=(f32(rng, M, 2, K), bf16(rng, M, K)),
        ),
        "combine_norm_linear, whole stream": Case(
            kernel=combine_norm_linear,
            call=lambda r: jnp.concatenate(
                combine_norm_linear(None, r, gain, w, eps=1e-5, out_dtype=r.dtype, **ON), axis=1
            ),
            rows=(bf16(rng, M, K),),
        ),
        "combine_norm_linear, with a bias": Case(
            kernel=combine_norm_linear,
            call=lambda leaves, r: _combine_and_multiply(leaves, r, gain, w, bias),
            rows=(f32(rng, M, 2, K), bf16(rng, M, K)),
        ),
        "combine_norm_linear, gated": Case(
            kernel=combine_norm_linear,
            call=lambda leaves, r: _combine_and_multiply(leaves, r, gain, w_gate_up, is_gated=True),
            rows=(f32(rng, M, 2, K), bf16(rng, M, K)),
        ),
        "linear_add": Case(
            kernel=linear_add,
            call=lambda x, r: linear_add(x, wide_w, r, bias, reduction=eight, **ON),
            rows=(bf16(rng, M, 8 * 32), bf16(rng, M, N)),
            slices=lambda rank, ranks: (
                lambda x, r: add_rms_norm(
                    _butterfly(x, wide_w, eight, tp=ranks), r, bias, bias, eps=1e-5, **ON
                )[0],
                slice(None),
            ),
        ),
        "linear_add_rms_norm": Case(
            kernel=linear_add_rms_norm,
            call=lambda x, r: jnp.stack(
                linear_add_rms_norm(x, wide_w, r, bias, bias, reduction=eight, eps=1e-5, **ON),
                axis=1,
            ),
            rows=(bf16(rng, M, 8 * 32), bf16(rng, M, N)),
            slices=lambda rank, ranks: (
                lambda x, r: jnp.stack(
                    add_rms_norm(
                        _butterfly(x, wide_w, eight, tp=ranks), r, bias, bias, eps=1e-5, **ON
                    ),
                    axis=1,
                ),
                slice(None),
            ),
        ),
        "rope_into_cache": Case(
            kernel=rope_into_cache,
            call=lambda x, c, s, p: _through_cache(x, c, s, p, gains),
            rows=(
                bf16(rng, M, 24, C),
                cos,
                sin,
                jnp.asarray(rng.integers(0, 128, M), jnp.int32),
            ),
            slices=lambda rank, ranks: (
                lambda x, c, s, p: _through_cache(
                    jnp.concatenate([y[:, rank::ranks] for y in jnp.split(x, 3, 1)], axis=1),
                    c,
                    s,
                    p,
                    gains,
                ),  # fmt: skip
                np.concatenate([np.arange(8) + 8 * i for i in range(3)])
                .reshape(3, 8)[:, rank::ranks]
                .reshape(-1),
            ),
        ),
        "rope_attention": Case(
            kernel=rope_attention,
            call=lambda x, c, s, p: _attend_through_cache(x, c, s, p, gains),
            rows=(bf16(rng, M, 24, C), cos, sin, jnp.asarray(rng.integers(0, 256, M), jnp.int32)),
            slices=lambda rank, ranks: (
                lambda x, c, s, p: _attend_through_cache(
                    jnp.concatenate([y[:, rank::ranks] for y in jnp.split(x, 3, 1)], axis=1),
                    c,
                    s,
                    p,
                    gains,
                ),
                np.arange(8)[rank::ranks],
            ),
        ),
        "route": Case(
            kernel=route,
            call=lambda x: jnp.concatenate([_routed(x, True), _routed(x, False)], axis=1),
            rows=(router_logits,),
        ),
        "route_by_sigmoid": Case(
            kernel=route_by_sigmoid,
            call=lambda x: jnp.concatenate(
                [
                    part.astype(jnp.float32)
                    for part in route_by_sigmoid(
                        linear(x, wide_router, out_dtype=jnp.dtype(jnp.float32), **ON),
                        wide_router[:, 0],
                        num_experts=NUM_EXPERTS,
                        top_k=TOP_K,
                        renormalise=True,
                        scale=2.5,
                        **ON,
                    )
                ],
                axis=1,
            ),
            rows=(bf16(np.random.default_rng(17), M, K),),
        ),
        "expert_mlp": Case(
            kernel=expert_mlp,
            call=lambda x, ids: expert_mlp(x, ids, experts, first_expert=0, **ON),
            rows=routed,
            slices=lambda rank, ranks: (
                lambda x, ids: _over_ranks(x, ids, experts, ranks=ranks),
                slice(None),
            ),
        ),
        "combine_experts_add_rms_norm": Case(
            kernel=combine_experts_add_rms_norm,
            call=lambda y, w, r: jnp.stack(
                combine_experts_add_rms_norm(y, w, r, gain[:64], eps=1e-5, **ON), axis=1
            ),
            rows=combined,
        ),
        "combine_experts_add_rms_norm, shared": Case(
            kernel=combine_experts_add_rms_norm,
            call=lambda y, w, r: jnp.stack(
                combine_experts_add_rms_norm(
                    y, w, r, gain[:64], eps=1e-5, shared=SharedRows(rows=y[:, 0], gate=w), **ON
                ),
                axis=1,
            ),
            rows=combined,
        ),
        "route_mlp_add_rms_norm": Case(
            kernel=route_mlp_add_rms_norm,
            call=lambda x, logits, r: jnp.stack(
                route_mlp_add_rms_norm(
                    x,
                    logits,
                    experts,
                    r,
                    gain[:64],
                    top_k=TOP_K,
                    renormalise=True,
                    eps=1e-5,
                    **ON,
                ),
                axis=1,
            ),
            rows=(routed[0], router_logits, combined[2]),
        ),
        "route_mlp": Case(
            kernel=route_mlp,
            call=lambda x, logits: _with_weights(
                *route_mlp(x, logits, experts, top_k=TOP_K, renormalise=True, **ON)
            ),
            rows=(routed[0], router_logits),
        ),
        "combine_experts_norm_linear": Case(
            kernel=combine_experts_norm_linear,
            call=lambda y, w, r: jnp.concatenate(
                combine_experts_norm_linear(
                    y, w, r, gain[:64], experts.down[0].T, eps=1e-5, out_dtype=r.dtype, **ON
                ),
                axis=1,
            ),
            rows=combined,
        ),
        "lora_hidden": Case(
            kernel=lora_hidden,
            call=lambda leaves, slots: lora_hidden(
                jnp.moveaxis(leaves, 1, 0), slots, LORA_SCALES, out_dtype=BF16, **ON
            ),
            rows=(f32(draw, M, 4, 192), lora_slots),
            slices=lambda rank, ranks: (
                lambda leaves, slots: lora_hidden(
                    jnp.moveaxis(_fold_leaves(leaves, ranks), 1, 0),
                    slots,
                    LORA_SCALES,
                    out_dtype=BF16,
                    **ON,
                ),
                slice(None),
            ),
        ),
        "lora_add": Case(
            kernel=lora_add,
            call=lambda base, h: lora_add(base, h, lora_b, out_dtype=BF16, **ON),
            rows=(f32(draw, M, 512), bf16(draw, M, 192)),
            slices=lambda rank, ranks: (
                lambda base, h: lora_add(
                    base[:, _columns(ranks, rank, 512)],
                    h,
                    lora_b[_columns(ranks, rank, 512)],
                    out_dtype=BF16,
                    **ON,
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "lora_project": Case(
            kernel=lora_project,
            call=lambda x, slots: lora_project(
                x, lora_a, slots, LORA_SCALES, reduction=leaf, out_dtype=BF16, **ON
            ),
            rows=(bf16(joined, M, K), lora_slots),
        ),
        "lora_linear": Case(
            kernel=lora_linear,
            call=lambda x, h: lora_linear(
                x, w, bias, LowRankRows(h=h, b=joined_b), out_dtype=BF16, **ON
            ),
            rows=(bf16(joined, M, K), bf16(joined, M, 128)),
            slices=lambda rank, ranks: (
                lambda x, h: lora_linear(
                    x,
                    w[_columns(ranks, rank, N)],
                    bias[_columns(ranks, rank, N)],
                    LowRankRows(h=h, b=joined_b[_columns(ranks, rank, N)]),
                    out_dtype=BF16,
                    **ON,
                ),
                _columns(ranks, rank, N),
            ),
        ),
        "lora_linear_swiglu": Case(
            kernel=lora_linear_swiglu,
            call=lambda x, h: lora_linear_swiglu(x, w_gate_up, LowRankRows(h=h, b=gated_b), **ON),
            rows=(bf16(joined, M, K), bf16(joined, M, 256)),
            slices=lambda rank, ranks: (
                lambda x, h: lora_linear_swiglu(
                    x,
                    _both_halves(w_gate_up, ranks, rank),
                    LowRankRows(h=h, b=_both_halves(gated_b, ranks, rank)),
                    **ON,
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "lora_linear_add_rms_norm": Case(
            kernel=lora_linear_add_rms_norm,
            call=lambda x, h, residual: jnp.stack(
                lora_linear_add_rms_norm(
                    x,
                    square,
                    LowRankRows(h=h, b=square_b),
                    residual,
                    gain,
                    gain,
                    reduction=leaf,
                    eps=1e-5,
                    **ON,
                ),
                axis=1,
            ),
            rows=(bf16(joined, M, K), bf16(joined, M, 128), bf16(joined, M, K)),
        ),
        "expert_lora_add": Case(
            kernel=expert_lora_add,
            call=lambda base, h, ids: expert_lora_add(base, h, ids, expert_b, out_dtype=BF16, **ON),
            rows=(f32(of_experts, M, 96), bf16(of_experts, M, 192), expert_of_row),
            slices=lambda rank, ranks: (
                lambda base, h, ids: expert_lora_add(
                    base[:, _columns(ranks, rank, 96)],
                    h,
                    ids,
                    expert_b[:, _columns(ranks, rank, 96)],
                    out_dtype=BF16,
                    **ON,
                ),
                _columns(ranks, rank, 96),
            ),
        ),
        "sigmoid_gate": Case(
            kernel=sigmoid_gate,
            call=lambda x, gate: sigmoid_gate(x, gate, **ON),
            rows=gated,
            slices=lambda rank, ranks: (
                lambda x, gate: sigmoid_gate(
                    *(part[:, _columns(ranks, rank, 512)] for part in (x, gate)), **ON
                ),
                _columns(ranks, rank, 512),
            ),
        ),
        "gated_rms_norm": Case(
            kernel=gated_rms_norm,
            call=lambda x, z: gated_rms_norm(x, z, head_gain, eps=1e-5, **ON),
            rows=(f32(hybrid, M, 64), bf16(hybrid, M, 64)),
            slices=lambda rank, ranks: (
                lambda x, z: gated_rms_norm(x, z, head_gain, eps=1e-5, **ON),
                slice(None),
            ),
        ),
        "delta_rule": Case(
            kernel=delta_rule,
            call=_one_more_token,
            rows=(
                bf16(hybrid, M, LINEAR_HEADS, ROW_WIDTH),
                jnp.asarray(hybrid.integers(0, 128, M), jnp.int32),
            ),
            slices=lambda rank, ranks: (
                lambda rows, positions: _one_more_token(
                    rows, positions, _columns(ranks, rank, LINEAR_HEADS)
                ),
                _columns(ranks, rank, 2 * LINEAR_HEADS),
            ),
        ),
        "butterfly_sum": Case(
            kernel=butterfly_sum,
            call=lambda x: _butterfly(x, wide_w, eight, tp=4),
            rows=(bf16(rng, M, 8 * 32),),
        ),
    }


def _routed(logits, renormalise: bool) -> jax.Array:
    """Ids and weights as one array."""
    ids, weights = route(
        logits, num_experts=NUM_EXPERTS, top_k=TOP_K, renormalise=renormalise, **ON
    )
    return jnp.concatenate([ids.astype(jnp.float32), weights], axis=1)


def _with_weights(y, weights) -> jax.Array:
    """Rows of experts and their weights as one array."""
    return jnp.concatenate([y.astype(jnp.float32).reshape(len(y), -1), weights], axis=1)


def _over_ranks(x, ids, experts, *, ranks: int) -> jax.Array:
    """Every slot's row from the rank that has its expert: the others give zero bits."""
    share, words = NUM_EXPERTS // ranks, jnp.uint16(0)
    for first in range(0, NUM_EXPERTS, share):
        own = ExpertWeights(*(w[first : first + share] for w in experts[:2]))
        rows = expert_mlp(x, ids, own, first_expert=first, **ON)
        words += jax.lax.bitcast_convert_type(rows, jnp.uint16)
    return jax.lax.bitcast_convert_type(words, x.dtype)


def _combine_and_multiply(leaves, residual, gain, w, bias=None, *, is_gated=False) -> jax.Array:
    """As `_combine`, with the product after it."""
    out = combine_norm_linear(
        jnp.moveaxis(leaves, 1, 0), residual, gain, w, bias,
        eps=1e-5, out_dtype=residual.dtype, is_gated=is_gated, **ON,
    )  # fmt: skip
    return jnp.concatenate(out, axis=1)


def _combine(leaves, residual, gain) -> jax.Array:
    """Leaves as [M, L, D], since cases have their rows first."""
    out = combine_add_rms_norm(jnp.moveaxis(leaves, 1, 0), residual, gain, gain, eps=1e-5, **ON)
    return jnp.stack(out, axis=1)


def _fold_leaves(leaves, ranks: int) -> jax.Array:
    """Add each of `ranks` subtrees of 8 leaves to one."""
    while leaves.shape[1] > ranks:
        leaves = leaves[:, 0::2] + leaves[:, 1::2]
    return leaves


def _through_cache(qkv, cos, sin, positions, gains) -> jax.Array:
    """Queries, and the keys and values that the cache holds, as heads of one array."""
    heads, page_ids = qkv.shape[1] // 3, jnp.arange(qkv.shape[0], dtype=jnp.int32)
    pages = jnp.full((2, M, 2, heads, 128, C), jnp.nan, jnp.bfloat16)
    place = CachePlace(pages, page_ids[:, None], positions[:, None], layer=1)
    q, pages = rope_into_cache(qkv, Rotation(cos, sin, gains), place, eps=1e-5, **ON)
    kv = pages[1, page_ids, :, :, positions]
    return jnp.concatenate([q, kv[:, 0], kv[:, 1]], axis=1)


def _attend_through_cache(qkv, cos, sin, positions, gains) -> jax.Array:
    """One new token a sequence, after keys and values that are the same for all and every head."""
    rows, heads = qkv.shape[0], qkv.shape[1] // 3
    page = bf16(np.random.default_rng(5), 1, 1, 2, 1, 128, C)
    pages = jnp.broadcast_to(page, (1, 2 * rows, 2, heads, 128, C))
    table = jnp.arange(2 * rows, dtype=jnp.int32).reshape(rows, 2)
    out, _ = rope_attention(
        qkv, Rotation(cos, sin, gains), CachePlace(pages, table, positions[:, None], layer=0),
        window=None, eps=1e-5, profile=PROFILE, **ON,
    )  # fmt: skip
    return out[:, 0]


def _delta_operands(heads: slice) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """A convolution, decays of a token to hundreds, and steps, of some heads of keys."""
    rng = np.random.default_rng(15)
    filters = bf16(rng, LINEAR_HEADS, 4, 4 * C)
    decays, steps = (rng.uniform(-6, 1, (LINEAR_HEADS, 2)) for _ in range(2))
    gates = tuple(jnp.asarray(x, jnp.float32)[heads] for x in (decays, steps))
    return filters[heads], gates


def _one_more_token(rows, positions, heads: slice = slice(None)) -> jax.Array:
    """One new token a sequence, after rows and a state that are the same for all."""
    count, rng = len(rows), np.random.default_rng(16)
    old = bf16(rng, 1, 1, 1, LINEAR_HEADS, 128, ROW_WIDTH)[:, :, :, heads]
    states = f32(rng, 1, 1, 2, LINEAR_HEADS, 2, C, C)[:, :, :, heads].reshape(1, 1, 2, -1, C, C)
    of_all = (jnp.broadcast_to(x, (1, count, *x.shape[2:])) for x in (old, states))
    table = jnp.arange(count, dtype=jnp.int32)[:, None]
    filters, gates = _delta_operands(heads)
    out, _, _ = delta_rule(
        rows[:, heads], filters, gates, *of_all, table, positions[:, None], layer=0, **ON
    )
    return out


OF_PORTABLE_ALONE = ("rope_into_cache", "rope_attention")
"""They normalise heads of 16 channels here, for which others have no sum."""
BACKENDS = quick_and_slow([Backend.REFERENCE], [Backend.PORTABLE])


@pytest.fixture(autouse=True, params=BACKENDS, ids=lambda backend: backend.value)
def backend(request) -> Backend:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    ON["backend"] = Backend.PORTABLE if name in OF_PORTABLE_ALONE else request.param
    return ON["backend"]


_cases_cache = functools.cache(_cases)


def _butterfly(x, w, reduction: Reduction, *, tp: int) -> jax.Array:
    def rank(x, w):
        partial = linear_partial(x, w, reduction=reduction, **ON)
        return butterfly_sum(partial, "tp", tp, **ON)

    return jax.shard_map(
        rank,
        mesh=make_mesh(1, tp),
        in_specs=(P(None, "tp"), P(None, "tp")),
        out_specs=P(),
        check_vma=False,
    )(x, w)


def _run(call, rows, *, program: str = "run") -> np.ndarray:
    """A program of another name is compiled anew, where the suite keeps what it has compiled."""

    def run(*operands):
        return call(*operands)

    run.__name__ = program
    return np.asarray(jax.jit(run)(*rows))


NAMES = tuple(_cases_cache())
COMPOSED = (
    "norm_linear_swiglu", "linear_add_rms_norm", "combine_add_rms_norm", "combine_norm_linear",
    "combine_norm_linear, with a bias", "combine_norm_linear, gated",
    "stats_and_choice", "choose_token", "rope_into_cache", "rope_attention", "expert_mlp",
    "route_mlp", "route_mlp_add_rms_norm", "combine_experts_add_rms_norm",
    "combine_experts_add_rms_norm, shared",
    "combine_experts_norm_linear", "delta_rule", "gated_rms_norm", "sigmoid_gate",
)  # fmt: skip
"""Made of the others, or compiled for long: the slow suite has them."""


def every(names: Iterable[str] = NAMES) -> pytest.MarkDecorator:
    """A test of each kernel."""
    quick = [name for name in names if name not in COMPOSED]
    return pytest.mark.parametrize("name", quick_and_slow(quick, names))


SAME_ON_EVERY_RANK = (
    "stats_and_choice", "choose_token", "nucleus_sums", "combine_add_rms_norm", "linear_add",
    "linear_add_rms_norm", "expert_mlp",
)  # fmt: skip
"""Cases whose call is that of all ranks together."""


@functools.cache
def _jitted(name: str, backend: Backend) -> Callable:
    call = _cases_cache()[name].call
    return jax.jit(lambda *rows: call(*rows))


def jitted(name: str) -> Callable:
    """A case as a program, compiled once for each number of rows."""
    return _jitted(name, ON["backend"])


@functools.cache
def _whole(name: str, backend: Backend) -> np.ndarray:
    return np.asarray(_jitted(name, backend)(*_cases_cache()[name].rows))


def whole(name: str) -> np.ndarray:
    """A case on all its rows, computed once."""
    return _whole(name, ON["backend"])


@pytest.mark.invariance
@pytest.mark.parametrize("name", quick_and_slow(["attention", "linear"], NAMES))
def test_kernel_is_bitwise_run_invariant(name):
    case = _cases_cache()[name]
    again = _run(case.call, case.rows, program="run_again")
    assert_bitwise_equal(again, whole(name), claim=f"{name}: compiled again, same bits")


@pytest.mark.invariance
@pytest.mark.parametrize("counts", quick_and_slow([ROW_COUNTS], [MORE_ROW_COUNTS]), ids=str)
@every()
def test_kernel_is_bitwise_batch_invariant(name, counts):
    rows = _host_rows(name)
    for count in counts:
        got = np.asarray(jitted(name)(*(x[:count] for x in rows)))
        assert_bitwise_equal(got, whole(name)[:count], claim=f"{name}: the first {count} rows")
    order = np.random.default_rng(1).permutation(M)
    got = np.asarray(jitted(name)(*(x[order] for x in rows)))
    assert_bitwise_equal(got, whole(name)[order], claim=f"{name}: rows in another order")
    for position in (0, 16, 36):  # row 20 among extreme neighbours
        loud = [_extreme(x) for x in rows]
        for x, of in zip(loud, rows, strict=True):
            x[position] = of[20]
        got = np.asarray(jitted(name)(*loud))[position]
        assert_bitwise_equal(got, whole(name)[20], claim=f"{name}: loud neighbours, {position}")


def _host_rows(name: str) -> list[np.ndarray]:
    """A case's rows; NumPy cuts them, as each cut of another shape by JAX is a program."""
    return [np.asarray(x) for x in _cases_cache()[name].rows]


def _extreme(x: np.ndarray) -> np.ndarray:
    """Neighbours of huge and tiny magnitude; integers stay valid indices."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.copy()
    factor = np.where(np.arange(x.shape[0]) % 2 == 0, 1e4, 1e-20).astype(x.dtype)
    return x * factor.reshape((-1,) + (1,) * (x.ndim - 1))


@pytest.mark.invariance
@every()
def test_kernel_is_bitwise_path_consistent(name):
    """One row inside another program, fused with whatever the compiler likes around it."""
    case, dtype = _cases_cache()[name], whole(name).dtype

    def surrounded(one, rows):
        scaled = [x * one.astype(x.dtype) for x in rows]
        return case.call(*scaled) * one.astype(dtype)

    program = jax.jit(surrounded)
    for row in (0, 9, 36):
        rows = [x[row : row + 1] for x in _host_rows(name)]
        got = np.asarray(program(np.float32(1), rows))
        assert_bitwise_equal(got, whole(name)[row : row + 1], claim=f"{name}: row {row} alone")


@pytest.mark.invariance
@every([name for name in NAMES if _cases_cache()[name].slices])
@pytest.mark.parametrize(
    ("ranks", "which"), quick_and_slow([(4, (3,))], [(2, (0, 1)), (4, (0, 1, 2)), (8, range(8))])
)
def test_kernel_is_bitwise_mesh_invariant(name, ranks, which):
    """Ranks that have the same share make the same call, which is enough once."""
    case = _cases_cache()[name]
    if name == "attention" and ranks == 8:
        ranks, which = 4, range(4)  # 8 ranks of one query head each read a slot as 4 do
    for rank in which:
        call, cols = case.slices(rank, ranks)
        if rank != which[0] and name in SAME_ON_EVERY_RANK:
            break
        got = _run(call, case.rows)
        want = whole(name)[:, cols] if whole(name).ndim > 1 else whole(name)
        assert_bitwise_equal(got, want, claim=f"{name}: rank {rank} of {ranks}")


def test_linear_swiglu_is_linear_then_swiglu():
    """Bit for bit; weights with an odd number of rows are refused."""
    rng = np.random.default_rng(9)
    x, w = bf16(rng, M, K), bf16(rng, 2 * 200, K)
    two = swiglu(linear(x, w, out_dtype=x.dtype, **ON), **ON)
    one = linear_swiglu(x, w, **ON)
    assert_bitwise_equal(one, two, claim="one operation has the bits of two")
    with pytest.raises(ValueError, match="as many rows of up"):
        linear_swiglu(x, w[:-1], **ON)


def test_norm_linear_is_rms_norm_then_linear():
    """Bit for bit, gated or not; what the sum left of the residual stream is the same as well."""
    rng = np.random.default_rng(10)
    x, w, gain, bias = bf16(rng, M, K), bf16(rng, N, K), bf16(rng, K), bf16(rng, N)
    normed = rms_norm(x, gain, eps=1e-5, **ON)
    two = linear(normed, w, bias, out_dtype=x.dtype, **ON)
    one = norm_linear(x, gain, w, bias, eps=1e-5, out_dtype=x.dtype, **ON)
    assert_bitwise_equal(one, two, claim="one operation has the bits of two")
    two = linear_swiglu(normed, w, **ON)
    one = norm_linear_swiglu(x, gain, w, eps=1e-5, **ON)
    assert_bitwise_equal(one, two, claim="one operation has the bits of three")
    residual, reduction = bf16(rng, M, N), tree_reduction(K, PROFILE)
    added = linear_add(x, w, residual, bias, reduction=reduction, **ON)
    both = linear_add_rms_norm(x, w, residual, bias, bias, reduction=reduction, eps=1e-5, **ON)
    assert_bitwise_equal(added, both[0], claim="the same residual stream, normalised or not")


@pytest.mark.invariance
@pytest.mark.parametrize("k_len", quick_and_slow((172, 11008), (6144, 14336, 25600)))
def test_linear_partial_is_bitwise_mesh_invariant(k_len):
    _assert_shares_add_up(k_len, linear_partial)


@pytest.mark.invariance
def test_linear_leaf_sums_is_bitwise_mesh_invariant():
    _assert_shares_add_up(6144, lambda *a, **options: add_leaves(linear_leaf_sums(*a, **options)))


def _assert_shares_add_up(k_len, share_of) -> None:
    """The tree over any number of ranks' shares has the bits of `linear_partial` of all of K."""
    if k_len % (8 * 16):
        ON["backend"] = Backend.PORTABLE  # others need leaves of whole steps of 16
    rng = np.random.default_rng(k_len)
    x, w = bf16(rng, 3, k_len), bf16(rng, 24, k_len)
    assert_order_sensitive(np.asarray(x[0], np.float32) * np.asarray(w, np.float32))
    reduction = tree_reduction(k_len, PROFILE)
    one = _run(lambda x, w: linear_partial(x, w, reduction=reduction, **ON), (x, w))
    x, w = np.asarray(x), np.asarray(w)
    tp = 2
    while tp <= reduction.num_leaves:
        shares = [
            _run(
                lambda x, w: share_of(x, w, reduction=reduction, **ON),
                (x[:, _columns(tp, r, k_len)], w[:, _columns(tp, r, k_len)]),
            )
            for r in range(tp)
        ]
        while len(shares) > 1:
            shares = [a + b for a, b in zip(shares[0::2], shares[1::2], strict=True)]
        assert_bitwise_equal(shares[0], one, claim=f"K={k_len} over {tp} ranks")
        tp *= 2


@pytest.mark.invariance
@pytest.mark.parametrize("tp", quick_and_slow([4], [2, 8]))
def test_butterfly_sum_is_bitwise_mesh_invariant(tp):
    rng = np.random.default_rng(tp)
    x, w = bf16(rng, 5, 8 * 48), bf16(rng, 70, 8 * 48)
    reduction = tree_reduction(8 * 48, PROFILE)
    assert_order_sensitive(np.asarray(x[0], np.float32) * np.asarray(w, np.float32))
    one = _run(lambda x, w: linear_partial(x, w, reduction=reduction, **ON), (x, w))
    got = _run(lambda x, w: _butterfly(x, w, reduction, tp=tp), (x, w))
    assert_bitwise_equal(got, one, claim=f"tp={tp} has the bits of tp=1")


@pytest.mark.control
def test_control_psum_is_not_mesh_invariant():
    rng = np.random.default_rng(0)
    x, w = bf16(rng, 64, 8 * 48), bf16(rng, 256, 8 * 48)

    def naive(tp):
        def rank(x, w):
            part = jnp.dot(x, w.T, preferred_element_type=jnp.float32)
            return jax.lax.psum(part, "tp")

        specs = (P(None, "tp"), P(None, "tp"))
        mesh = make_mesh(1, tp)
        return _run(
            lambda x, w: jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=P())(x, w), (x, w)
        )

    assert count_different_bits(naive(1), naive(8)) > 0


@pytest.mark.control
def test_control_jnp_dot_is_not_batch_invariant():
    x, w = (jnp.asarray(wide(np.random.default_rng(i), (70, 256))) for i in range(2))
    whole = _run(lambda x: jnp.dot(x, w.T), (x,))
    changed = [m for m in (1, 2, 3, 5, 7, 8, 16, 33, 69) if count_different_bits(
        _run(lambda x: jnp.dot(x, w.T), (x[:m],)), whole[:m])]  # fmt: skip
    assert changed


@pytest.mark.control
def test_control_xla_softmax_and_norm_are_not_batch_invariant():
    x = jnp.asarray(wide(np.random.default_rng(0), (70, 250)))
    functions = {
        "softmax": lambda x: jax.nn.softmax(x, axis=1),
        "rms_norm": lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-5),
    }
    for name, fn in functions.items():
        whole = _run(fn, (x,))
        changed = [m for m in (1, 2, 3, 7, 8, 15) if count_different_bits(
            _run(fn, (x[:m],)), whole[:m])]  # fmt: skip
        assert changed, name


@pytest.mark.slow
@pytest.mark.invariance
def test_attention_is_bitwise_schedule_invariant():
    """Chunks of any size, pages anywhere, and NaN in what is not written yet."""
    rng = np.random.default_rng(3)
    length, heads = 700, 4
    q, k, v = (bf16(rng, length, n, C) for n in (heads, 2, 2))
    assert_order_sensitive(np.asarray(q[-1, 0], np.float32) * np.asarray(k[:, 0], np.float32))

    def pages_with(written, placement):
        pages = np.full((1, 8, 2, 2, 128, C), np.nan, jnp.bfloat16)
        for pos in range(written):
            pages[0, placement[pos // 128], :, :, pos % 128] = np.stack([k[pos], v[pos]])
        return jnp.asarray(pages)

    def attend(low, high, placement):
        positions = jnp.arange(low, high, dtype=jnp.int32)[None]
        table = jnp.asarray(placement, jnp.int32)[None]
        return np.asarray(
            attention(
                q[None, low:high],
                CachePlace(pages_with(high, placement), table, positions, layer=0),
                window=None,
                profile=PROFILE,
                **ON,
            )
        )[0]

    forwards, backwards = list(range(6)), [7, 2, 5, 0, 3, 1]
    whole = attend(0, length, forwards)
    assert np.isfinite(whole.astype(np.float32)).all()
    for low, high in ((0, 1), (127, 128), (128, 129), (511, 513), (0, 512), (37, 74), (512, 700)):
        got = attend(low, high, backwards)
        assert_bitwise_equal(got, whole[low:high], claim=f"queries {low} to {high} in one chunk")


@pytest.mark.invariance
def test_attention_is_bitwise_batch_invariant_past_a_split():
    """Sequences longer than a split, alone and side by side."""
    rng = np.random.default_rng(5)
    lengths, heads = (700, 40, 1100), 2
    pages, table = bf16(rng, 1, 27, 2, 2, 128, C), jnp.arange(27, dtype=jnp.int32).reshape(3, 9)
    q, positions = bf16(rng, 3, 1, heads, C), jnp.asarray(lengths, jnp.int32)[:, None] - 1

    def attend(rows):
        place = CachePlace(pages, table[rows], positions[rows], layer=0)
        return attention(q[rows], place, window=None, profile=PROFILE, **ON)

    together = attend(slice(None))
    for row, length in enumerate(lengths):
        alone = attend(slice(row, row + 1))
        assert_bitwise_equal(together[row : row + 1], alone, claim=f"{length} keys, not alone")


@pytest.mark.slow
@pytest.mark.invariance
def test_rope_attention_is_bitwise_schedule_invariant():
    """Chunks of any size, and the cache that they leave."""
    rng = np.random.default_rng(8)
    length, heads, kv_heads = 300, 4, 2
    qkv = bf16(rng, length, heads + 2 * kv_heads, C)
    cos, sin = f32(rng, length, C // 2), f32(rng, length, C // 2)
    table = jnp.asarray([[2, 0, 1]], jnp.int32)

    def run(bounds):
        pages, parts = jnp.full((1, 3, 2, kv_heads, 128, C), jnp.nan, jnp.bfloat16), []
        for low, high in itertools.pairwise(bounds):
            at = slice(low, high)
            positions = jnp.arange(low, high, dtype=jnp.int32)[None]
            out, pages = rope_attention(
                qkv[at], Rotation(cos[at], sin[at]), CachePlace(pages, table, positions, layer=0),
                window=None, eps=1e-5, profile=PROFILE, **ON,
            )  # fmt: skip
            parts.append(out[0])
        return jnp.concatenate(parts), pages

    actual, whole = run([0, 100, 101, 102, 128, 129, 300]), run([0, length])
    for what, a, b in zip(("outputs", "cache"), actual, whole, strict=True):
        assert_bitwise_equal(a, b, claim=f"{what} of chunks of a prompt are the whole prompt's")


DELTA_LEN = 134
"""Two blocks of the grid and some tokens: a page, and a part of the next."""


def _delta_rows() -> jax.Array:
    return bf16(np.random.default_rng(17), DELTA_LEN, 1, ROW_WIDTH)


_one_delta_rule = jax.jit(delta_rule, static_argnames=("layer", "backend"))


def _recurrence(bounds, *, padded: int) -> tuple[np.ndarray, ...]:
    """The rows' results in chunks, each padded to a length, and the caches that they leave."""
    rows, (filters, gates) = np.asarray(_delta_rows()), _delta_operands(slice(0, 1))
    row_pages = jnp.full((1, 3, 1, 1, 128, ROW_WIDTH), jnp.nan, jnp.bfloat16)
    state_pages, parts = jnp.full((1, 3, 2, 2, C, C), jnp.nan, jnp.float32), []
    for low, high in itertools.pairwise(bounds):
        positions = np.full((1, padded), -1, np.int32)
        positions[0, : high - low] = np.arange(low, high)
        chunk = np.zeros((padded, 1, ROW_WIDTH), rows.dtype)
        chunk[: high - low] = rows[low:high]
        out, row_pages, state_pages = _one_delta_rule(
            chunk, filters, gates, row_pages, state_pages, jnp.asarray([[2, 0]], jnp.int32),
            jnp.asarray(positions), layer=0, **ON,
        )  # fmt: skip
        out = np.asarray(out)
        assert not out[high - low :].any()
        parts.append(out[: high - low])
    return np.concatenate(parts), np.asarray(row_pages), np.asarray(state_pages)


@pytest.mark.invariance
def test_delta_rule_is_bitwise_schedule_invariant():
    """Chunks that end before, at and behind ends of blocks, and rejected drafts between them.

    Rows, and states behind whole blocks, are those of one chunk, too.
    """
    whole = _recurrence([0, DELTA_LEN], padded=DELTA_LEN)
    assert np.isfinite(whole[0]).all() and np.abs(whole[0]).max() > 0.1
    assert_order_sensitive(whole[2][0, 2, 1, 0, :, 0])
    chunks = _recurrence([0, 63, 64, 65, 70, 128, 130, DELTA_LEN], padded=64)
    for what, got, want in zip(("results", "rows"), chunks, whole, strict=False):
        assert_bitwise_equal(got, want, claim=f"{what} of chunks are the whole prompt's")
    states = (x[2][:, 2] for x in (chunks, whole))
    assert_bitwise_equal(*states, claim="states behind blocks are the whole prompt's")


@pytest.mark.slow
@pytest.mark.invariance
def test_delta_rule_in_steps_of_one_token_is_the_whole_prompt():
    whole, steps = (
        _recurrence(bounds, padded=padded)
        for bounds, padded in (([0, DELTA_LEN], DELTA_LEN), (range(DELTA_LEN + 1), 1))
    )
    assert_bitwise_equal(steps[0], whole[0], claim="decode is prefill")


@functools.partial(jax.jit, static_argnames=("low", "high"))
def _chunk_form(y, beta, fading, state, *, low: int, high: int) -> tuple[jax.Array, jax.Array]:
    """Results of tokens from `low` to `high` of one head by products over the chunk.

    The state is that before the chunk's own first token, and the solve is of the chunk.
    """
    q, k, v = (y[low:high, at : at + C] for at in (0, C, 2 * C))
    q = q / jnp.sqrt(jnp.sum(q * q, axis=1, keepdims=True) + 1e-6) / C**0.5
    k = k / jnp.sqrt(jnp.sum(k * k, axis=1, keepdims=True) + 1e-6)
    beta, total = beta[low:high, None], jnp.cumsum(fading[low:high])
    ratio = jnp.tril(jnp.exp(jnp.minimum(total[:, None] - total[None, :], 0)))
    system = jnp.eye(high - low) + jnp.tril(beta * (k @ k.T) * ratio, -1)
    read = v - jnp.exp(total)[:, None] * (k @ state)
    added = jax.scipy.linalg.solve_triangular(system, beta * read, lower=True)
    out = jnp.exp(total)[:, None] * (q @ state) + ((q @ k.T) * ratio) @ added
    left = jnp.exp(total[-1] - total)[:, None]
    return out, jnp.exp(total[-1]) * state + (k * left).T @ added


@pytest.mark.slow
@pytest.mark.control
def test_control_a_state_from_the_start_of_the_chunk_depends_on_the_chunks():
    """The same rows by products over chunks: the same function, in bits of the schedule."""
    rows, (filters, gates) = _delta_rows()[:, 0].astype(jnp.float32), _delta_operands(slice(0, 1))
    before = jnp.pad(rows[:, : 4 * C], ((3, 0), (0, 0)))
    taps = filters[0].astype(jnp.float32)
    mixed = sum(taps[i][None] * before[i : i + DELTA_LEN] for i in range(4))
    y = (mixed * jax.nn.sigmoid(mixed)).astype(jnp.bfloat16).astype(jnp.float32)
    beta = jax.nn.sigmoid(rows[:, 4 * C])
    fading = -jnp.exp(gates[0][0, 0]) * jax.nn.softplus(rows[:, 4 * C + 2] + gates[1][0, 0])

    def run(bounds):
        state, parts = jnp.zeros((C, C), jnp.float32), []
        for low, high in itertools.pairwise(bounds):
            out, state = _chunk_form(y, beta, fading, state, low=low, high=high)
            parts.append(np.asarray(out))
        return np.concatenate(parts)

    whole, chunks = run([0, 64, 128, DELTA_LEN]), run([0, 63, 64, 65, 70, 128, 130, DELTA_LEN])
    assert count_different_bits(whole, chunks) > 0
    want = _recurrence([0, DELTA_LEN], padded=DELTA_LEN)[0][:, 0]
    # Tolerance: a state of 134 updates, each of sums of 16 terms: 2**-24 times some thousands.
    assert np.abs(whole - want).max() <= 2.0**-11 * np.abs(want).max()


@pytest.mark.control
def test_control_split_length_changes_attention():
    """The probe depends on order: another split length has other bits."""
    rng = np.random.default_rng(4)
    q, pages = bf16(rng, 1, 4, 4, C), bf16(rng, 1, 8, 2, 2, 128, C)
    positions = jnp.asarray([[600, 700, 900, 1000]], jnp.int32)
    table = jnp.arange(8, dtype=jnp.int32)[None]

    def attend(split):
        profile = NumericsProfile(attention_split=split, compute_dtype="bfloat16")
        return np.asarray(
            attention(
                q.astype(jnp.float32),
                CachePlace(pages.astype(jnp.float32), table, positions, layer=0),
                window=None,
                profile=profile,
                **ON,
            )
        )

    assert count_different_bits(attend(512), attend(128)) > 0


def _sequences(num_heads: int, width: int, lengths: tuple[int, ...], seed: int) -> jax.Array:
    """[B, heads, 128, width], zeros from the end of each sequence on."""
    rows = bf16(np.random.default_rng(seed), len(lengths), num_heads, 128, width)
    is_real = jnp.arange(128)[None, :] < jnp.asarray(lengths)[:, None]
    return jnp.where(is_real[:, None, :, None], rows, jnp.zeros_like(rows))


LENGTHS = (70, 5, 128, 64)


_one_token_sum = jax.jit(token_sum, static_argnames="backend")


def _token_sum(a, b, lengths):
    return _one_token_sum(a, b, lengths, **ON)


def _token_rows() -> tuple:
    a, b = (_sequences(1, width, LENGTHS, seed)[:, 0] for width, seed in ((70, 1), (130, 2)))
    return a, b, jnp.asarray(LENGTHS, jnp.int32)


@pytest.mark.slow
@pytest.mark.invariance
def test_token_sum_is_bitwise_run_invariant():
    rows = _token_rows()
    again = _run(_token_sum, rows, program="run_again")
    assert_bitwise_equal(again, _run(_token_sum, rows), claim="compiled again, same bits")


@pytest.mark.invariance
def test_token_sum_is_bitwise_batch_invariant():
    """Of sequences in any cut; in another order it is another sum, and so is XLA's of a cut."""
    rows = [np.asarray(x) for x in _token_rows()]
    whole = np.asarray(_token_sum(*rows))
    one = [np.asarray(_token_sum(*(x[i : i + 1] for x in rows))) for i in range(4)]
    assert_bitwise_equal((one[0] + one[1]) + (one[2] + one[3]), whole, claim="one by one")
    half = np.asarray(_token_sum(*(x[:2] for x in rows)))
    assert_bitwise_equal(half + (one[2] + one[3]), whole, claim="two and two")
    longer = tuple(np.pad(x, ((0, 0), (0, 128), (0, 0))) for x in rows[:2])
    padded = np.asarray(_token_sum(*longer, rows[2]))
    assert_bitwise_equal(padded, whole, claim="padded to more leaves")
    want = np.einsum("btx,bty->xy", *(np.asarray(x, np.float64) for x in rows[:2]))
    magnitude = np.einsum("btx,bty->xy", *(np.abs(np.asarray(x, np.float64)) for x in rows[:2]))
    # Tolerance: 267 float32 additions at most, each off by 2**-24 of the magnitudes.
    assert (np.abs(whole - want) <= 267 * 2.0**-24 * magnitude).all()
    turned = np.asarray(_token_sum(*(x[[0, 2, 1, 3]] for x in rows)))
    assert count_different_bits(turned, whole) > 0
    plain = jax.jit(lambda a, b: jnp.einsum("btx,bty->xy", a, b, precision="highest"))
    f32s = [x.astype(np.float32) for x in rows[:2]]
    cut = plain(*(x[:2] for x in f32s)) + plain(*(x[2:] for x in f32s))
    assert count_different_bits(np.asarray(cut), np.asarray(plain(*f32s))) > 0


def _slots() -> tuple:
    """Two factors of each pair of a token and an expert; five tokens of padding at the end."""
    rng = np.random.default_rng(4)
    real = [np.arange(length) + i * 128 for i, length in enumerate(LENGTHS)]
    places = np.concatenate([*real, np.arange(5) + 4 * 128])
    ids = np.argsort(rng.random((len(places), NUM_EXPERTS)), axis=1)[:, :TOP_K]
    factors = (bf16(rng, places.size * TOP_K, width) for width in (70, 130))
    integers = (jnp.asarray(x, jnp.int32) for x in (ids.reshape(-1), np.repeat(places, TOP_K)))
    return *factors, *integers


def _expert_token_sum(a, b, experts, places, *, num_places: int = 4 * 128):
    return expert_token_sum(
        a, b, experts, places, num_experts=NUM_EXPERTS, num_places=num_places, **ON
    )


@pytest.mark.slow
@pytest.mark.invariance
def test_expert_token_sum_is_bitwise_run_invariant():
    slots = _slots()
    again = _run(_expert_token_sum, slots, program="run_again")
    assert_bitwise_equal(again, _run(_expert_token_sum, slots), claim="compiled again, same bits")


def _own_rows(expert: int, x, experts, places) -> jax.Array:
    """An expert's tokens at their places, [4, 128, X], and zeros."""
    own = jnp.where(experts == expert, places, 4 * 128)
    return jnp.zeros((4 * 128, x.shape[1]), x.dtype).at[own].set(x, mode="drop").reshape(4, 128, -1)


@pytest.mark.slow
@pytest.mark.invariance
def test_expert_token_sum_is_bitwise_batch_invariant():
    """That of an expert is `token_sum` of its tokens at their places, whatever others chose.

    The control leaves no places empty: an expert's tokens close up, and other sums come out.
    """
    a, b, experts, places = _slots()
    whole = np.asarray(_expert_token_sum(a, b, experts, places))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    for expert in range(NUM_EXPERTS):
        rows = (_own_rows(expert, x, experts, places) for x in (a, b))
        alone = np.asarray(token_sum(*rows, lengths, **ON))
        assert_bitwise_equal(whole[expert], alone, claim=f"expert {expert} alone")
    cuts = [np.asarray(places) // 256 == i for i in range(2)]
    halves = [
        np.asarray(
            _expert_token_sum(
                *(x[jnp.asarray(cut)] for x in (a, b, experts)),
                places[jnp.asarray(cut)] - 256 * i,
                num_places=256,
            )
        )
        for i, cut in enumerate(cuts)
    ]
    assert_bitwise_equal(halves[0] + halves[1], whole, claim="two sequences and two")
    turned = jnp.arange(len(experts))[::-1]
    shuffled = _expert_token_sum(*(x[turned] for x in (a, b, experts, places)))
    assert_bitwise_equal(shuffled, whole, claim="slots in another order")
    closed = jnp.zeros_like(places)
    for expert in range(NUM_EXPERTS):
        own = (experts == expert) & (places < 4 * 128)
        closed = jnp.where(own, jnp.cumsum(own) - 1, closed)
    closed = jnp.where(places < 4 * 128, closed, places)
    other = _expert_token_sum(a, b, experts, closed.astype(jnp.int32))
    assert count_different_bits(np.asarray(other), whole) > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_expert_linear_is_bitwise_run_invariant():
    operands = _expert_rows()
    again = _run(_expert_linear, operands, program="run_again")
    assert_bitwise_equal(again, _run(_expert_linear, operands), claim="compiled again, same bits")


def _expert_linear(x, experts, w):
    return expert_linear(x, experts, w, out_dtype=x.dtype, **ON)


def _expert_rows() -> tuple:
    rng = np.random.default_rng(5)
    x, w = bf16(rng, 37, 96), bf16(rng, NUM_EXPERTS * 40, 96).reshape(NUM_EXPERTS, 40, 96)
    return x, jnp.asarray(rng.integers(0, NUM_EXPERTS - 1, 37), jnp.int32), w


@pytest.mark.slow
@pytest.mark.invariance
def test_expert_linear_is_bitwise_batch_invariant():
    """A row has the bits of `linear` by its expert's matrix; by halves of K it has others."""
    x, experts, w = _expert_rows()
    whole = np.asarray(_expert_linear(x, experts, w), np.float32)
    differs = 0
    for expert in range(NUM_EXPERTS):
        own = np.asarray(experts) == expert
        one = linear(x, w[expert], out_dtype=x.dtype, **ON)
        assert_bitwise_equal(
            whole[own], np.asarray(one, np.float32)[own], claim=f"rows of expert {expert}"
        )
        halves = (x[:, k] @ w[expert, :, k].T for k in (slice(0, 48), slice(48, 96)))
        by_halves = np.asarray(sum(halves), np.float32)
        differs += count_different_bits(by_halves[own], whole[own])
    assert differs > 0
    biases = bf16(np.random.default_rng(6), NUM_EXPERTS, 40)
    biased = expert_linear(x, experts, w, biases, out_dtype=x.dtype, **ON)
    alone = [
        linear(x[i : i + 1], w[e], biases[e], out_dtype=x.dtype, **ON)
        for i, e in enumerate(np.asarray(experts[:5]))
    ]
    assert_bitwise_equal(biased[:5], jnp.concatenate(alone), claim="with a bias")
    few = _expert_linear(x[:3], experts[:3], w)
    assert_bitwise_equal(np.asarray(few, np.float32), whole[:3], claim="three rows")


def test_expert_token_sum_refuses_what_has_no_tree():
    a, b, experts, places = _slots()
    with pytest.raises(ValueError, match="num_places=192 must be a power of two of leaves"):
        _expert_token_sum(a, b, experts, places, num_places=192)


def test_token_sum_refuses_what_has_no_tree():
    a, b, lengths = _token_rows()
    with pytest.raises(ValueError, match="must be a power of two of sequences"):
        token_sum(a[:3], b[:3], lengths[:3], **ON)


def _attention_gradient(q, k, v, out, of_out, lengths, *, softcap=None, sinks=None):
    """Of queries, keys, values and sinks, one after the other."""
    *found, of_sinks = attention_gradient(
        q, k, v, out, of_out, lengths, window=40, softcap=softcap, sinks=sinks, **ON
    )
    if of_sinks is not None:
        found.append(jnp.broadcast_to(of_sinks[..., None], found[0].shape))
    return jnp.concatenate(found, axis=1)


def _attention_rows() -> tuple:
    """Four query heads and two key heads of 16 channels."""
    heads = [_sequences(count, C, LENGTHS, seed) for seed, count in enumerate((4, 2, 2, 4, 4))]
    return *heads, jnp.asarray(LENGTHS, jnp.int32)


@pytest.mark.slow
@pytest.mark.invariance
def test_attention_gradient_is_bitwise_run_invariant():
    rows = _attention_rows()
    again = _run(_attention_gradient, rows, program="run_again")
    assert_bitwise_equal(again, _run(_attention_gradient, rows), claim="compiled again, same bits")


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("softcap", "sinks"), [(None, None), (2.0, (0.5, -1.0, 2.0, 0.0))],
    ids=["plain", "cap_and_sinks"],
)  # fmt: skip
def test_attention_gradient_is_bitwise_batch_invariant(softcap, sinks):
    """Each sequence alone, in one leaf where it fits; the control is XLA's derivative."""
    rows = _attention_rows()
    sinks = None if sinks is None else jnp.asarray(sinks)
    options = {"softcap": softcap, "sinks": sinks}
    whole = np.asarray(_attention_gradient(*rows, **options))
    for i, length in enumerate(LENGTHS):
        padded = 64 if length <= 64 else 128
        alone = [x[i : i + 1, :, :padded] for x in rows[:5]]
        got = _attention_gradient(*alone, rows[5][i : i + 1], **options)
        assert_bitwise_equal(got, whole[i : i + 1, :, :padded], claim=f"sequence {i} alone")

    @jax.jit
    def plain(q, k, v, of_out):
        def formula(q, k, v, sinks):
            k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
            scores = jnp.einsum("bhtc,bhsc->bhts", q, k, precision="highest") / C**0.5
            back = jnp.arange(128)[:, None] - jnp.arange(128)[None, :]
            is_seen = ((back >= 0) & (back < 40))[None, None]
            if softcap is not None:
                scores = jnp.tanh(scores / softcap) * softcap
            scores = jnp.where(is_seen, scores, -jnp.inf)
            if sinks is not None:  # each query by itself
                scores = jnp.concatenate([scores, sinks[..., None]], axis=3)
            weights = jax.nn.softmax(scores, axis=-1)[..., :128]
            return jnp.einsum("bhts,bhsc->bhtc", weights, v, precision="highest")

        of_rows = sinks if sinks is None else jnp.broadcast_to(sinks[:, None], q.shape[:3])
        out, pull = jax.vjp(formula, q, k, v, of_rows)
        *found, of_sinks = pull(of_out)
        if of_sinks is not None:
            found.append(jnp.broadcast_to(of_sinks[..., None], q.shape))
        return out, jnp.concatenate(found, axis=1)

    ON["backend"] = Backend.PORTABLE  # others have no float32 beside float32
    q, k, v, _, of_out = (x.astype(jnp.float32) for x in rows[:5])
    out, want = plain(q, k, v, of_out)
    got = _attention_gradient(q, k, v, out, of_out, rows[5], **options)
    # Tolerance: sums of at most 128 rounded terms, through three products: some 1e-6.
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
    assert count_different_bits(np.asarray(got), np.asarray(want)) > 0


def _delta_tokens(lengths: tuple[int, ...] = LENGTHS, num_rows: int = 128) -> list:
    """Two heads of keys with two of values each; what lies behind a sequence's end is NaN."""
    rng = np.random.default_rng(8)
    batch, keys, values = len(lengths), (2, 16), (4, 32)
    q, k, v, of_out = (
        rng.standard_normal((batch, num_rows, *tail)) for tail in (keys, keys, values, values)
    )
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay, beta = (rng.uniform(low, 1, (batch, num_rows, 4)) for low in (0.7, 0.1))
    is_real = np.arange(num_rows)[None] < np.asarray(lengths)[:, None]

    def hidden(x):
        is_there = is_real.reshape(*is_real.shape, *[1] * (x.ndim - 2))
        return np.where(is_there, x, np.nan).astype(np.float32)

    return [*map(hidden, (q, k, v, decay, beta, of_out)), np.asarray(lengths, np.int32)]


def _in_rows(found) -> jax.Array:
    """All cotangents of each token in a row."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in found], axis=2)


_one_delta_gradient = jax.jit(delta_rule_gradient, static_argnames="backend")


def _delta_gradient(*operands) -> jax.Array:
    return _in_rows(_one_delta_gradient(*operands, **ON))


@jax.jit
def _plain_delta_gradient(*operands) -> jax.Array:
    """XLA's derivative; of tokens that are not there nothing comes."""
    *inputs, of_out = (jnp.nan_to_num(x) for x in operands)

    def formula(q, k, *of_values):
        by_key = (x.reshape(*x.shape[:2], 2, 2, *x.shape[3:]) for x in of_values)
        return jax.vmap(plain_delta_rule)(DeltaInputs(q, k, *by_key)).reshape(of_out.shape)

    return _in_rows(jax.vjp(formula, *inputs)[1](of_out))


@pytest.mark.slow
@pytest.mark.invariance
def test_delta_rule_gradient_is_bitwise_run_invariant():
    rows = _delta_tokens()
    again = _run(_delta_gradient, rows, program="run_again")
    assert_bitwise_equal(again, _run(_delta_gradient, rows), claim="compiled again, same bits")


@pytest.mark.invariance
def test_delta_rule_gradient_is_bitwise_batch_invariant():
    """Sequences alone, in one block where they fit; the control is XLA's derivative."""
    *rows, lengths = _delta_tokens()
    whole = np.asarray(_delta_gradient(*rows, lengths))
    for i, length in enumerate(LENGTHS):
        assert not whole[i, length:].any()
        padded = 64 if length <= 64 else 128
        got = _delta_gradient(*(x[i : i + 1, :padded] for x in rows), lengths[i : i + 1])
        assert_bitwise_equal(got, whole[i : i + 1, :padded], claim=f"sequence {i} alone")
    assert_order_sensitive(rows[2][0, :64, 0].T * rows[5][0, :64, 0].T)
    assert count_different_bits(np.asarray(_plain_delta_gradient(*rows)), whole) > 0
    *long, lengths = _delta_tokens((200, 150), 256)
    whole = _delta_gradient(*long, lengths)
    got = _delta_gradient(*(x[:, :200] for x in long), lengths)
    assert_bitwise_equal(got, whole[:, :200], claim="rows that are no whole blocks")


@pytest.mark.slow
def test_delta_rule_gradient_is_that_of_float64():
    """Tolerance: a cotangent passes at most 128 tokens there and back, some ten roundings each.

    Their errors of 2**-24 add at random: 3e-6. Three times that.
    """
    *rows, lengths = _delta_tokens()
    found = np.asarray(_delta_gradient(*rows, lengths))
    with jax.enable_x64(True):
        wide = (jnp.asarray(x, jnp.float64) for x in rows)
        want = np.asarray(_plain_delta_gradient(*wide))
    assert want.dtype == np.float64
    assert np.linalg.norm(found - want) <= 1e-5 * np.linalg.norm(want)


def _public_claims():
    """(function, claims) of every public function that has a `Claims:` line."""
    modules = [detjax.parallel.collectives]
    for info in pkgutil.walk_packages(detjax.pallas_kernels.__path__, "detjax.pallas_kernels."):
        if info.name.endswith(".api"):
            modules.append(importlib.import_module(info.name))
    for module in modules:
        for name, fn in vars(module).items():
            if inspect.isfunction(fn) and fn.__module__ == module.__name__ and name[0] != "_":
                doc = re.sub(r"\s+", " ", inspect.getdoc(fn) or "")
                match = re.search(r"Claims: ([a-z, -]+)\.", doc)
                yield name, fn, tuple(match[1].split(", ")) if match else ()


def test_every_claim_has_its_test():
    """A kernel may not promise what no case here proves."""
    proven = {"run-invariant", "batch-invariant", "path-consistent"}
    missing = []
    for name, _, claims in _public_claims():
        for claim in claims:
            own = f"test_{name}_is_bitwise_{claim.replace('-', '_')}"
            case = _cases_cache().get(name)
            has_case = case is not None and (
                claim in proven or (claim == "mesh-invariant" and case.slices is not None)
            )
            if not has_case and own not in globals():
                missing.append((name, claim))
    assert not missing


NO_ARITHMETIC = (
    "gather_columns", "gather_expert_rows", "scatter_expert_rows",
    "defers_norm", "defers_sum", "defers_experts", "joins_experts", "joins_matrices",
)  # fmt: skip
"""Copies, and a choice; `tests/parallel/test_collectives.py` has the copies of experts' rows."""


def test_every_kernel_states_its_numerics():
    for name, fn, _ in _public_claims():
        if name in NO_ARITHMETIC:
            continue
        doc = inspect.getdoc(fn) or ""
        assert "Numerics:" in doc and "Claims:" in doc, name
