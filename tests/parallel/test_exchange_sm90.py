# SPDX-License-Identifier: Apache-2.0
"""The exchange kernel on two and four GPUs: the bits of the butterfly, also for ranks adrift."""

import functools
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P
from jaxlib.mlir.dialects import llvm

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.loading import load_model
from detjax.models.quantization.quantize import RECIPES, quantize_folder
from detjax.models.weights.load import ignore_progress
from detjax.models.weights.packed import has_packed
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear_add, linear_leaf_sums, linear_partial
from detjax.pallas_kernels.rms_norm.api import add_rms_norm, combine_add_rms_norm
from detjax.pallas_kernels.sampling.api import choose_token
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.exchange import (
    EXCHANGE_SPECS,
    Exchange,
    adds_tiles,
    exchange_add_rms_norm,
    exchange_choose_token,
    exchanges_choice,
    linear_exchange_add_rms_norm,
    open_exchange,
    scatter_add_rms_norm,
)
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.dummies import answers, dummy_config, dummy_model
from detjax.testing.folders import write_model_folder

pytestmark = pytest.mark.gpus(2)
FOUR = pytest.mark.gpus(4)
TPS = (2, pytest.param(4, marks=FOUR))

ON = {"backend": Backend.SM90}
EPS = 1e-5
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
CHAIN = 5
"""Exchanges of a program: each slot is used at least twice."""


def gpu_mesh(dp: int, tp: int):
    return make_mesh(dp, tp, platform="gpu")


@functools.cache
def exchange(width: int, dp: int = 1, tp: int = 2, dtype: jnp.dtype = BF16) -> Exchange:
    return open_exchange(gpu_mesh(dp, tp), width=width, dtype=dtype, max_tile_ranks=8, **ON)


def operands(num_rows: int, width: int, num_leaves: int, tp: int = 2, dtype: jnp.dtype = BF16):
    """Leaf sums [CHAIN, ranks, L, M, D] with wide exponents, residual, bias and gain.

    Of a float32 residual stream they are in three parts, [CHAIN, ranks, L, 3, M, D].
    """
    rng = np.random.default_rng([num_rows, width])
    parts = [3] if dtype == F32 else []
    leaves = rng.standard_normal((CHAIN, tp, num_leaves, *parts, num_rows, width), np.float32)
    leaves *= np.exp2(rng.integers(-12, 4, leaves.shape)).astype(np.float32)
    rest = [
        jnp.asarray(rng.standard_normal(shape, np.float32), kind)
        for shape, kind in (((num_rows, width), dtype), ((width,), BF16), ((width,), BF16))
    ]
    return jnp.asarray(leaves), *rest


def gather_ranks(x):
    """Every rank's value, by one of XLA's collectives, without which no program may exchange."""
    return lax.all_gather(x, "tp")


def chained(finish, leaves, residual, bias, gain, tp: int = 2):
    """Run `finish(exchange, leaf_sums, residual, bias, gain)` on every rank, CHAIN times."""

    def rank(shared, leaves, residual, bias, gain):
        outs = []
        for i in range(CHAIN):
            residual, out = finish(shared, leaves[i, 0], residual, bias, gain)
            outs.append(out)
        return gather_ranks(residual), gather_ranks(jnp.stack(outs))

    step = jax.shard_map(
        rank,
        mesh=gpu_mesh(1, tp),
        in_specs=(EXCHANGE_SPECS, P(None, "tp"), P(), P(), P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    shared = exchange(residual.shape[1], tp=tp, dtype=residual.dtype)
    return jax.tree.map(np.asarray, jax.jit(step)(shared, leaves, residual, bias, gain))


def by_kernel(shared, leaves, residual, bias, gain):
    return exchange_add_rms_norm(shared, leaves, residual, bias, gain, eps=EPS, **ON)


def by_butterfly(shared, leaves, residual, bias, gain):
    terms = [leaves[i] for i in range(leaves.shape[0])]
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=True)]
    total = butterfly_sum(terms[0], "tp", lax.axis_size("tp"), **ON)
    return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)


def assert_same(got, want, claim: str) -> None:
    for name, a, b in zip(("residual stream", "outputs"), got, want, strict=True):
        for rank in range(len(a)):
            assert_bitwise_equal(a[rank], b[0], claim=f"{claim}: {name} of rank {rank}")


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(
    ("num_rows", "width", "num_leaves"),
    [
        *((m, 4096, 1) for m in (1, 3, 8, 17, 64, 127, 128)),
        (5, 5120, 2),
        (33, 896, 1),
        (16, 2048, 4),
    ],
)
def test_exchange_add_rms_norm_is_bitwise_mesh_invariant(num_rows, width, num_leaves, tp):
    args = operands(num_rows, width, num_leaves, tp)
    if tp * num_leaves > 2:  # two terms, one a rank, have one order only
        assert_order_sensitive(
            np.moveaxis(np.asarray(args[0][0]).reshape(-1, num_rows, width), 0, -1)
        )
    want, got = chained(by_butterfly, *args, tp=tp), chained(by_kernel, *args, tp=tp)
    assert_same(got, want, f"{num_rows} rows of {width} on {tp} ranks")


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(("num_rows", "width", "num_leaves"), [(1, 4096, 4), (128, 1024, 1)])
def test_exchange_of_parts_is_bitwise_mesh_invariant(num_rows, width, num_leaves, tp):
    """Of float32 activations: by the kernel, by the butterfly, and on one rank."""
    args = operands(num_rows, width, num_leaves, tp, F32)
    leaves, residual, bias, gain = args
    own = np.asarray(leaves[0], np.float32)
    terms = own.reshape(-1, *own.shape[-2:])  # parts, and leaves of ranks
    assert_order_sensitive(np.moveaxis(terms, 0, -1))
    want, got = chained(by_butterfly, *args, tp=tp), chained(by_kernel, *args, tp=tp)
    assert_same(got, want, f"{num_rows} rows of {width} in parts on {tp} ranks")
    for i in range(CHAIN):
        whole = leaves[i].reshape(-1, *leaves.shape[3:])
        residual, out = combine_add_rms_norm(whole, residual, bias, gain, eps=EPS, **ON)
        assert_bitwise_equal(got[1][0, i], out, claim=f"exchange {i}: one rank's bits")
    early = leaves[:, :, :, 2] + leaves[:, :, :, 1] + leaves[:, :, :, 0]
    early = jnp.zeros_like(leaves).at[:, :, :, 0].set(early)
    assert count_different_bits(chained(by_kernel, early, *args[1:], tp=tp)[1], got[1])


@pytest.mark.invariance
def test_exchange_add_rms_norm_is_bitwise_batch_invariant():
    """A row alone has the bits that it has among others, with what others left in the slots."""
    leaves, residual, bias, gain = operands(128, 4096, 1)
    want = chained(by_kernel, leaves, residual, bias, gain)
    for low, high in ((0, 1), (127, 128), (60, 69)):
        part = (leaves[..., low:high, :], residual[low:high], bias, gain)
        got = chained(by_kernel, *part)
        assert_bitwise_equal(got[0], want[0][:, low:high], claim=f"rows {low} to {high} alone")
        assert_bitwise_equal(got[1], want[1][:, :, low:high], claim=f"rows {low} to {high} alone")


@pytest.mark.invariance
def test_every_value_can_be_exchanged():
    """Zeros of both signs, subnormals, infinities, and the NaN that marks an empty slot."""
    leaves, residual, bias, gain = operands(8, 1024, 1)
    words = np.array([0, 1 << 31, 1, 0x7F800000, 0xFFFFFFFF, 0x7FC00001, 0x007FFFFF], np.uint32)
    special = np.resize(words, leaves.shape).view(np.float32)
    special = np.where(np.arange(8)[:, None] < 4, special, np.asarray(leaves))
    args = (jnp.asarray(special), residual, bias, gain)
    assert_same(chained(by_kernel, *args), chained(by_butterfly, *args), "special values")


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("num_rows", [132, 512])
def test_scatter_add_rms_norm_is_bitwise_mesh_invariant(num_rows, dtype, tp):
    leaves, residual, bias, gain = operands(num_rows, 1024, 1, tp, dtype)
    first = leaves[0, :, 0]
    want = combine_add_rms_norm(first, residual, bias, gain, eps=EPS, **ON)
    step = jax.shard_map(
        lambda p, r, b, g: scatter_add_rms_norm(p[0], r, b, g, "tp", tp, eps=EPS, **ON),
        mesh=gpu_mesh(1, tp),
        in_specs=(P("tp"), P(), P(), P()),
        out_specs=(P("tp"), P()),
        check_vma=False,
    )
    got = jax.jit(step)(first, residual, bias, gain)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b, claim=f"{num_rows} rows shared out over {tp} GPUs")


@pytest.mark.control
def test_control_rounded_partials_are_not_mesh_invariant():
    """psum of two float32 partials is their sum in either order; of bfloat16 ones it is not."""
    args = operands(8, 4096, 1)

    def rounded(shared, leaves, residual, bias, gain):
        total = lax.psum(leaves[0].astype(jnp.bfloat16), "tp").astype(jnp.float32)
        return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)

    assert count_different_bits(chained(rounded, *args)[1], chained(by_kernel, *args)[1]) > 0


@FOUR
@pytest.mark.control
def test_control_psum_of_four_ranks_is_not_mesh_invariant():
    args = operands(8, 4096, 1, 4)

    def summed(shared, leaves, residual, bias, gain):
        total = lax.psum(leaves[0], "tp")
        return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)

    got, want = (chained(finish, *args, tp=4)[1] for finish in (summed, by_kernel))
    assert count_different_bits(got, want) > 0


# A product whose epilogue adds the ranks' sums: o's and down's, in turn over the same slots.
PRODUCTS = [
    (1, 4096, 4096, 14336, False),
    (3, 4096, 4096, 14336, True),
    (8, 4096, 4096, 14336, False),
    (9, 4096, 4096, 14336, False),
    (33, 4096, 4096, 14336, True),
    (64, 4096, 4096, 14336, False),
    (17, 5120, 5120, 13824, False),
    (5, 896, 1024, 4864, True),
    (64, 8192, 1024, 2048, False),
]
"""(rows, width, K of o, K of down, whether there is a bias)."""


@functools.cache
def drawn(*shape: int):
    """Values with wide exponents."""
    rng = np.random.default_rng(shape)
    values = rng.standard_normal(shape, np.float32)
    return jnp.asarray(values * np.exp2(rng.integers(-8, 3, shape)), BF16)


def product_operands(num_rows: int, width: int, *k_lens: int):
    """Activations and weights of each product; residual, bias and gain."""
    pairs = [(drawn(num_rows, k), drawn(width, k)) for k in k_lens]
    return pairs, drawn(num_rows, width), drawn(width), drawn(width) + 1


def chained_products(finish, pairs, residual, bias, gain, tp: int):
    """Run `finish(exchange, x, w, residual, bias, gain, reduction)` on every rank, CHAIN times."""

    def rank(shared, pairs, residual, bias, gain):
        totals = []
        for i in range(CHAIN * len(pairs)):
            x, w = pairs[i % len(pairs)]
            reduction = tree_reduction(x.shape[1] * tp, NumericsProfile())
            # A layer's activations come of the residual stream before it.
            x, residual = lax.optimization_barrier((x, residual))
            residual = finish(shared, x, w, residual, bias, gain, reduction)
            totals.append(residual)
        return gather_ranks(jnp.stack(totals))

    columns = P(None, "tp")
    step = jax.shard_map(
        rank,
        mesh=gpu_mesh(1, tp),
        in_specs=(EXCHANGE_SPECS, [(columns, columns)] * len(pairs), P(), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    shared = exchange(residual.shape[1], tp=tp)
    return np.asarray(jax.jit(step)(shared, pairs, residual, bias, gain))


def in_product(shared, x, w, residual, bias, gain, reduction):
    assert adds_tiles(shared, x, w, **ON)
    total, _ = linear_exchange_add_rms_norm(
        shared, x, w, residual, bias, gain, reduction=reduction, eps=EPS, **ON
    )
    return total


def behind_product(shared, x, w, residual, bias, gain, reduction):
    leaves = linear_leaf_sums(x, w, reduction=reduction, **ON)
    return exchange_add_rms_norm(shared, leaves, residual, bias, gain, eps=EPS, **ON)[0]


def by_turns(shared, x, w, residual, bias, gain, reduction):
    """Both kernels in one program: they share nothing but the order of launches."""
    finish = in_product if reduction.leaf_len <= 1024 else behind_product
    return finish(shared, x, w, residual, bias, gain, reduction)


def product_by_butterfly(shared, x, w, residual, bias, gain, reduction):
    partial = linear_partial(x, w, reduction=reduction, **ON)
    total = butterfly_sum(partial, "tp", lax.axis_size("tp"), **ON)
    return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)[0]


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(("num_rows", "width", "k_o", "k_down", "has_bias"), PRODUCTS)
def test_products_add_the_ranks_sums_bitwise(num_rows, width, k_o, k_down, has_bias, tp):
    """The bits of the butterfly, of one rank, and of the sum in a launch of its own."""
    pairs, residual, bias, gain = product_operands(num_rows, width, k_o, k_down)
    bias = bias if has_bias else None
    args = pairs, residual, bias, gain, tp
    x, w = (np.asarray(array[:64], np.float32) for array in pairs[1])
    assert_order_sensitive(x[:1] * w)
    want = chained_products(product_by_butterfly, *args)
    for finish in (in_product, by_turns):
        got = chained_products(finish, *args)
        for rank in range(tp):
            claim = f"{finish.__name__}, {num_rows} rows of {width}: rank {rank} of {tp}"
            assert_bitwise_equal(got[rank], want[0], claim=claim)
    alone = residual
    for i in range(CHAIN * len(pairs)):
        reduction = tree_reduction(pairs[i % 2][0].shape[1], NumericsProfile())
        alone = linear_add(*pairs[i % 2], alone, bias, reduction=reduction, **ON)
        assert_bitwise_equal(want[0, i], alone, claim=f"product {i}: one rank's bits")


@pytest.mark.invariance
def test_products_that_add_ranks_are_bitwise_batch_invariant():
    """A row alone has the bits that it has among others, with what others left in the slots."""
    pairs, residual, bias, gain = product_operands(64, 4096, 4096, 14336)
    want = chained_products(in_product, pairs, residual, bias, gain, 2)
    for low, high in ((0, 1), (63, 64), (20, 29)):
        part = [(x[low:high], w) for x, w in pairs], residual[low:high], bias, gain
        got = chained_products(in_product, *part, 2)
        assert_bitwise_equal(got, want[:, :, low:high], claim=f"rows {low} to {high} alone")


@pytest.mark.control
def test_control_rounded_subtrees_have_other_bits():
    """A product whose subtrees are rounded before they are added."""
    pairs, residual, bias, gain = product_operands(8, 4096, 4096, 14336)

    def rounded(shared, x, w, residual, bias, gain, reduction):
        partial = linear_partial(x, w, reduction=reduction, **ON)
        total = lax.psum(partial.astype(BF16), "tp").astype(F32)
        return add_rms_norm(total, residual, bias, gain, eps=EPS, **ON)[0]

    got, want = (
        chained_products(finish, pairs, residual, bias, gain, 2) for finish in (rounded, in_product)
    )
    assert count_different_bits(got, want) > 0


@pytest.mark.invariance
def test_values_that_mark_empty_slots_pass_through_products():
    """Rows of zeros, infinities and NaN: nobody waits for them for ever, and others keep theirs."""
    pairs, residual, bias, gain = product_operands(8, 1024, 1024)
    special = jnp.asarray([0.0, jnp.inf, jnp.nan, -jnp.inf], BF16)
    (x, w), *_ = pairs
    x = x.at[:4].set(special[:, None])
    args = [(x, w)], residual, bias, gain, 2
    got, want = (chained_products(f, *args) for f in (in_product, product_by_butterfly))
    assert_bitwise_equal(got[:, :, 4:], want[:, :, 4:], claim="rows beside special ones")
    assert_bitwise_equal(np.isnan(got), np.isnan(want), claim="which values are NaN")


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(("num_rows", "num_iterations"), [(3, 10000), (64, 3000)])
def test_products_hold_when_ranks_drift_apart(num_rows, num_iterations, tp):
    """Random delays on each rank, up to several products long; every result is checked."""
    width = k_len = 1024
    ((x, w),), residual, _, gain = product_operands(num_rows, width, k_len)
    reduction = tree_reduction(k_len, NumericsProfile())

    def rank(shared, x, w, residual, gain):
        me = lax.axis_index("tp")
        own = [lax.dynamic_slice_in_dim(a, me * (k_len // tp), k_len // tp, axis=1) for a in (x, w)]

        def one(i, carry):
            wrong, stream = carry
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(8), i), me)
            cycles = jax.random.randint(key, (1,), -20000, 20000, jnp.int32)
            stream = wait(jnp.maximum(cycles, 0), stream)
            # Other rows each time: a stale word would be another row's.
            turned = [jnp.roll(a, i, axis=0) for a in (x, own[0])]
            got = in_product(shared, turned[1], own[1], stream, None, gain, reduction)
            want = linear_add(turned[0], w, stream, None, reduction=reduction, **ON)
            a, b = (lax.bitcast_convert_type(v, jnp.uint16) for v in (got, want))
            # So that no sum runs out of range.
            return wrong + jnp.sum(a != b, dtype=jnp.int32), jnp.clip(got, -4, 4)

        wrong, _ = lax.fori_loop(0, num_iterations, one, (jnp.int32(0), residual))
        return gather_ranks(wrong)

    step = jax.shard_map(
        rank, mesh=gpu_mesh(1, tp), in_specs=(EXCHANGE_SPECS, P(), P(), P(), P()), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    wrong = np.asarray(jax.jit(step)(exchange(width, tp=tp), x, w, residual, gain))
    assert wrong.tolist() == [0] * tp, f"{wrong} elements in {num_iterations} products"


def choose_over_ranks(logits, temperature, key, tp: int, num_times: int = CHAIN):
    """Tokens, logprobs and log-sum-exps of every rank, of logits that are turned each time."""

    def rank(shared, logits, temperature, *key):
        found = []
        for i in range(num_times):
            turned = jnp.roll(logits, i, axis=0)
            found.append(exchange_choose_token(shared, turned, temperature, key, **CHOICE))
        return gather_ranks(jax.tree.map(lambda *of: jnp.stack(of), *found))

    step = jax.shard_map(
        rank,
        mesh=gpu_mesh(1, tp),
        in_specs=(EXCHANGE_SPECS, P(None, "tp"), P(), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    shared = open_exchange(
        gpu_mesh(1, tp), width=1024, dtype=BF16, padded_vocab=logits.shape[1], max_tile_ranks=8,
        **ON,
    )  # fmt: skip
    assert exchanges_choice(shared, len(logits))
    return jax.tree.map(np.asarray, jax.jit(step)(shared, logits, temperature, *key))


CHOICE = {"vocab_block": 128, **ON}


def rows_of_logits(num_rows: int, vocab: int):
    """Logits with ties and tokens past the vocabulary; half of the rows greedy; keys."""
    rng = np.random.default_rng([num_rows, vocab])
    logits = rng.standard_normal((num_rows, vocab)).astype(np.float32) * 4
    logits[0, :] = np.round(logits[0])  # its best tokens are many, on every rank
    logits[:, -100:] = -np.inf
    temperature = np.where(np.arange(num_rows) % 2, 0.8, 0.0).astype(np.float32)
    key = tuple(jnp.asarray(rng.integers(0, 2**32, num_rows, np.uint32)) for _ in range(2))
    return jnp.asarray(logits), jnp.asarray(temperature), key


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 128256), (5, 1024), (64, 151936), (300, 8192)])
def test_a_choice_over_ranks_is_that_of_one_rank(num_rows, vocab, tp):
    """Tokens, logprobs and log-sum-exps, of greedy rows and others, on every rank."""
    vocab = -(-vocab // (tp * 128)) * tp * 128
    logits, temperature, key = rows_of_logits(num_rows, vocab)
    got = choose_over_ranks(logits, temperature, key, tp)
    for i in range(CHAIN):
        want = choose_token(jnp.roll(logits, i, axis=0), temperature, key, **CHOICE)
        for name, a, b in zip(("tokens", "logprobs", "lse"), got, want, strict=True):
            for rank in range(tp):
                assert_bitwise_equal(a[rank, i], b, claim=f"{name} {i} of rank {rank} of {tp}")


@pytest.mark.control
def test_control_shares_in_another_order_have_other_bits():
    """What the order of the ranks' blocks is for."""
    logits, temperature, key = rows_of_logits(64, 128256)
    # One token stands out of each row, so that the sum is little more than 1, and its logarithm as
    # fine as the sum.
    logits = 2 * logits - 2 * jnp.max(logits, axis=1, keepdims=True)
    want = choose_token(logits, temperature, key, **CHOICE)
    half = logits.shape[1] // 2
    swapped = jnp.concatenate([logits[:, half:], logits[:, :half]], axis=1)
    got = choose_over_ranks(swapped, temperature, key, 2, num_times=1)
    assert count_different_bits(got[2][0, 0], want[2]) > 0


def wait(cycles, after):
    """Keep the GPU busy for so many clock cycles after `after` is there; returns `after`."""

    def body(cycles_gmem, after_gmem, out_gmem):
        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
        def emit(ctx, cycles):
            text = (
                "{ .reg .u32 start, now; .reg .pred early; mov.u32 start, %clock;\n"
                "WAIT: mov.u32 now, %clock; sub.u32 now, now, start;\n"
                "setp.lt.u32 early, now, $0; @early bra WAIT; }"
            )
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [cycles.registers.item()], text, "r", has_side_effects=True)

        emit(cycles_gmem[0])
        out_gmem[0] = cycles_gmem[0]

    token = rows.run_kernel(
        body,
        (cycles, after),
        out=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid={"cta": 1},
        name="wait",
        is_interpreted=False,
    )
    # XLA cannot know that no delay is negative, so what follows depends on the kernel.
    return jnp.where(token[0] < 0, jnp.zeros_like(after), after)


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(
    ("num_rows", "num_iterations", "dtype"),
    [(3, 10000, BF16), (128, 2000, BF16), (3, 5000, F32), (128, 1000, F32)],
)
def test_exchange_holds_when_ranks_drift_apart(num_rows, num_iterations, dtype, tp):
    """Random delays on each rank, up to several exchanges long; every result is checked."""
    width = 1024
    leaves, residual, bias, gain = operands(num_rows, width, 1, dtype=dtype)
    shape, word = leaves.shape[3:], jnp.dtype(f"uint{8 * dtype.itemsize}")

    def value(i, rank):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), i), rank)
        bits = jax.random.bits(key, shape, jnp.uint32)
        return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) - jnp.float32(0.5)

    def rank(shared, residual, bias, gain):
        me = lax.axis_index("tp")

        def one(i, carry):
            wrong, previous = carry
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(8), i), me)
            cycles = jax.random.randint(key, (1,), -20000, 20000, jnp.int32)
            delayed = wait(jnp.maximum(cycles, 0), previous)
            every = jnp.stack([value(i, rank) for rank in range(tp)])
            own = lax.dynamic_index_in_dim(every, me)
            got = exchange_add_rms_norm(shared, own, delayed, bias, gain, eps=EPS, **ON)
            want = combine_add_rms_norm(every, delayed, bias, gain, eps=EPS, **ON)
            for a, b in zip(got, want, strict=True):
                a, b = (lax.bitcast_convert_type(x, word) for x in (a, b))
                wrong += jnp.sum(a != b, dtype=jnp.int32)
            return wrong, got[1]

        wrong, _ = lax.fori_loop(0, num_iterations, one, (jnp.int32(0), residual))
        return gather_ranks(wrong)

    step = jax.shard_map(
        rank,
        mesh=gpu_mesh(1, tp),
        in_specs=(EXCHANGE_SPECS, P(), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    shared = exchange(width, tp=tp, dtype=dtype)
    wrong = np.asarray(jax.jit(step)(shared, residual, bias, gain))
    assert wrong.tolist() == [0] * tp, f"{wrong} elements in {num_iterations} exchanges"


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
def test_a_process_for_each_gpu_has_the_bits_of_one_gpu(tp):
    """Processes that exchange through NCCL, and one GPU of this process."""
    path = Path(__file__).with_name("worker.py")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    job = {"coordinator": f"localhost:{port}", "num_processes": tp, "devices": 1, "mesh": [1, tp]}
    processes = [
        subprocess.Popen(
            [sys.executable, str(path), json.dumps({**job, "process_id": i, "backend": "sm90"})],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # also of a plain checkout
                "CUDA_VISIBLE_DEVICES": str(i),
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(tp)
    ]
    worker = runpy.run_path(str(path))
    want = worker["make_engine"]((1, 1), "sm90").generate(worker["requests"](changed=False))
    try:
        (out, errors), *_ = (process.communicate(timeout=120) for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * tp, errors[-2000:]
    assert json.loads(out) == [completion.digest() for completion in want]


@pytest.mark.invariance
@pytest.mark.parametrize(
    "mesh",
    [(1, 2), (2, 1), *(pytest.param(mesh, marks=FOUR) for mesh in ((1, 4), (2, 2), (4, 1)))],
    ids=str,
)
@pytest.mark.parametrize(
    ("experts", "compute_dtype"),
    [(None, "bfloat16"), ((16, 4), "bfloat16"), (None, "float32")],
    ids=["dense", "experts", "float32"],
)
def test_answers_are_bitwise_mesh_invariant(mesh, experts, compute_dtype):
    """Whole answers, prompts longer and shorter than what is shared out over ranks."""
    dp, tp = mesh
    config = dummy_config(
        num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, intermediate_size=1536,
        vocab_size=1024, experts=experts, expert_width=256,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 1000, length)),
            sampling=SamplingParams(max_tokens=8, temperature=temperature, seed=length),
        )
        for length, temperature in ((5, 0.0), (130, 0.8), (300, 1.0), (1, 0.0), (64, 0.5))
    ]
    shape = {"prefill_chunk": 256, "max_len": 512}
    of = {"profile": NumericsProfile(compute_dtype=compute_dtype), **ON}
    want = answers(dummy_model(config, **of), asked, batch_size=1, **shape)
    got = answers(dummy_model(config, dp=dp, tp=tp, **of), asked, batch_size=4, **shape)
    assert [c.digest() for c in got] == [c.digest() for c in want]


PACKED = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 0,
}  # fmt: skip
"""Four ranks have whole groups of 128 of every matrix, so all of them stay packed."""

PACKED_EXPERTS = PACKED | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.invariance
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize(
    ("config", "scheme", "form"),
    [
        (PACKED, "int4-w4a16", "packed"), (PACKED, "int8-w8a16", "packed"),
        (PACKED, "int8-w8a8", "w8a8"), (PACKED, "fp8-dynamic", "w8a8"),
        (PACKED, "fp8-block", "w8a8"), (PACKED_EXPERTS, "fp8-block", "w8a8"),
        (PACKED_EXPERTS, "int8-w8a8", "w8a8"),
    ],
    ids=lambda it: it["model_type"] if isinstance(it, dict) else it,
)  # fmt: skip
def test_answers_of_quantized_models_are_bitwise_mesh_invariant(tmp_path, config, scheme, form, tp):
    """By steps, and by drafts that are verified."""
    write_model_folder(tmp_path / "bf16", config, scale=1024**-0.5)
    quantize_folder(tmp_path / "bf16", tmp_path / "q", RECIPES[scheme], progress=ignore_progress)

    def opened(folder: str, tp: int, form: str):
        return load_model(
            str(tmp_path / folder), profile=NumericsProfile(), mesh=gpu_mesh(1, tp),
            quantized_weights=form, **ON,
        )  # fmt: skip

    def digests(model, **changes) -> list[str]:
        config = EngineConfig(batch_size=4, prefill_chunk=256, max_len=512, **changes)
        return [one.digest() for one in Engine(model, config).generate(asked)]

    rng = np.random.default_rng(5)
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 1000, length)),
            sampling=SamplingParams(max_tokens=24, temperature=temperature, seed=length),
        )
        for length, temperature in ((5, 0.0), (130, 0.8), (300, 1.0), (64, 0.0))
    ]
    want = digests(opened("q", 1, "expanded" if form == "packed" else form))
    many = opened("q", tp, form)
    assert has_packed(many.params)
    assert digests(many) == want
    assert digests(many, has_prompt_lookup=True) == want
    assert digests(many, mode="dvr", draft_weights="full") == want
    # The model before it was quantised answers otherwise: the comparison can fail.
    assert digests(opened("bf16", tp, "auto")) != want
