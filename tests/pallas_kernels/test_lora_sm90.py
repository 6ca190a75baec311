# SPDX-License-Identifier: Apache-2.0
"""Adapters on Hopper: what a kernel computes, and that slots and other adapters have no effect."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.models.layers import ForwardContext, adapted_linear, row_parallel_norm
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear, linear_add_rms_norm
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import FlatTiles, TallTiles
from detjax.pallas_kernels.lora import sm90
from detjax.pallas_kernels.lora.adapted import AdaptedMatrix, AdapterStack, LowRankRows
from detjax.pallas_kernels.rms_norm.sm90 import add_rms_norm, combine_add_rms_norm
from detjax.testing import assert_bitwise_equal, count_different_bits, wide
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config

from .test_linear_sm90 import assert_rounded

BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)
SCALES = jnp.asarray([[0.5, 3.0, 1.3, 1.0], [2.0, 0.7, 1.0, 0.1]], jnp.float32)
PROFILE = NumericsProfile()
SM90 = Backend.SM90
K, N, RANK, SLOTS = 4096, 6144, 16, 8


@pytest.mark.parametrize(("width", "terms"), [(128, 1), (640, 4), (1024, 8)])
def test_hidden_is_the_tree_times_the_scale_in_columns_of_the_own_adapter(width, terms):
    """Interpreted: the formula and the shapes. The last piece of 640 columns starts early."""
    rng = np.random.default_rng(width)
    leaves = np.asarray(wide(rng, (terms, 5, width), 0.7), np.float32)
    slots = np.array([0, -1, 3, 2, 1], np.int32)
    got = sm90.lora_hidden(
        jnp.asarray(leaves), jnp.asarray(slots), SCALES, out_dtype=BF16, interpret=True
    )
    total = leaves
    while len(total) > 1:
        total = total[0::2] + total[1::2]
    rank = width // SCALES.size
    columns = np.arange(width)
    scale = np.asarray(SCALES).reshape(-1)[columns // rank]
    own = (columns // rank % 4)[None] == slots[:, None]
    want = np.where(own, total[0] * scale[None], np.float32(0)).astype(jnp.bfloat16)
    assert_bitwise_equal(np.asarray(got), want, claim="round(s * tree) or zero")
    assert not np.asarray(got)[1].astype(bool).any() and np.asarray(got)[0].astype(bool).any()


@pytest.mark.parametrize("width", [128, 960, 1536])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_sum_with_zero_leaves_the_base_as_it_is(width, dtype):
    rng = np.random.default_rng(width)
    base, added = (np.asarray(wide(rng, (3, width), 0.7), np.float32) for _ in range(2))
    base[:, 5], added[1], added[0, 5] = -0.0, 0.0, 0.0
    got = sm90.add_where_not_zero(
        jnp.asarray(base), jnp.asarray(added), out_dtype=dtype, interpret=True
    )
    want = np.where(added == 0, base, base + added).astype(dtype)
    assert_bitwise_equal(np.asarray(got), want, claim="round(base + added)")
    assert np.signbit(np.asarray(got, np.float32)[:2, 5]).all()


def test_rows_without_aligned_pieces_are_refused():
    with pytest.raises(NotImplementedError, match="a multiple of 4 columns from 128 up, not 64"):
        sm90.add_where_not_zero(jnp.zeros((1, 64)), jnp.zeros((1, 64)), out_dtype=BF16)


def _eighths(seed: int, *shape: int) -> np.ndarray:
    """Values whose every product and sum is exact in float32."""
    return np.random.default_rng(seed).integers(-4, 5, shape) / 8


FLAT = FlatTiles(cols=16, k=64, stages=3)
TALL = TallTiles(cols=128, k=64, stages=3)
TILES = {
    "flat": FLAT,
    "flat, two CTAs a tree": dataclasses.replace(FLAT, groups=2),
    "flat, one CTA a tree": FLAT,
    "flat, gated": dataclasses.replace(FLAT, is_gated=True),
    "flat, gated, two warpgroups": dataclasses.replace(FLAT, is_gated=True, num_wgs=2, k=128),
    "tall": TALL,
    "tall, two pieces": dataclasses.replace(TALL, cols=192, k=128, out_span=64),
    "tall, gated": dataclasses.replace(TALL, cols=64, is_gated=True, num_wgs=1, out_span=64),
}


@pytest.mark.parametrize("name", quick_and_slow(["flat, gated", "tall"], TILES))
def test_a_product_adds_the_adapters_of_its_rows(name):
    """Interpreted, exact sums: the formula, also in rows and columns past whole tiles."""
    tiles, num_rows, k_len = TILES[name], 40, 256
    has_tree = "tree" in name
    num_out = 320 if not tiles.is_gated else 384
    x, w = _eighths(0, num_rows, k_len), _eighths(1, num_out, k_len)
    bias = None if has_tree or tiles.is_gated else _eighths(2, num_out)
    if bias is not None and num_out % tiles.cols:
        bias = None  # whose tiles are whole
    h, b = _eighths(3, num_rows, 256), _eighths(4, num_out, 256)
    h[1::3] = 0
    if tiles.is_gated:
        b[: num_out // 2, 128:], b[num_out // 2 :, :128] = 0, 0
    base = x @ w.T + (0 if bias is None else bias)
    base[h.any(axis=1)] += (h @ b.T)[h.any(axis=1)]
    operands = [None if it is None else jnp.asarray(it, BF16) for it in (x, w, bias, h, b)]
    out = matmul(
        *operands[:3], None, LowRankRows(h=operands[3], b=operands[4]),
        leaf_len=64 if has_tree else k_len, tiles=tiles, interpret=plgpu.InterpretGPUParams(),
        out_dtype=BF16 if tiles.is_gated else F32,
    )  # fmt: skip
    if tiles.is_gated:
        gates, ups = np.split(np.asarray(jnp.asarray(base, BF16), np.float64), 2, axis=1)
        assert_rounded(out, gates / (1 + np.exp(-gates)) * ups)
        return
    if tiles.groups > 1:
        assert np.array_equal(np.asarray(out[-1]), (h @ b.T).astype(np.float32))
        out = np.asarray(out[:-1]).sum(axis=0) + np.asarray(out[-1])
    assert np.array_equal(np.asarray(out), base.astype(np.float32))


@pytest.mark.parametrize("width", [512, 128])
def test_the_rest_of_a_tree_takes_what_adapters_add_before_the_bias(width):
    rng = np.random.default_rng(width)
    leaves = np.asarray(wide(rng, (3, 5, width), 0.7), np.float32)
    leaves[2, ::2], leaves[:2, 0, 3] = 0.0, -0.0
    residual, bias, gain = (jnp.asarray(rng.standard_normal(n), BF16) for n in (
        (5, width), width, width,
    ))  # fmt: skip
    got = combine_add_rms_norm(
        jnp.asarray(leaves), residual, bias, gain, eps=1e-5, has_added=True, interpret=True
    )
    tree = leaves[0] + leaves[1]
    tree = np.where(leaves[2] == 0, tree, tree + leaves[2])
    want = add_rms_norm(jnp.asarray(tree), residual, bias, gain, eps=1e-5, interpret=True)
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(np.asarray(one), np.asarray(other), claim="(tree + B h) + bias")


# ------------------------------------------------------------------------------------ on a GPU


def _bf16(rng, *shape) -> jax.Array:
    return jnp.asarray(wide(rng, shape, 0.5) * shape[-1] ** -0.5, jnp.bfloat16)


def _adapter(seed: int, parts: int, num_out: int, num_in: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return _bf16(rng, parts, RANK, num_in), _bf16(rng, num_out, parts, RANK) * jnp.bfloat16(4)


def _stack(parts: int, num_out: int, num_in: int, placed: dict[int, int]) -> AdapterStack:
    """Adapters by slot, numbered by seed; other slots are zero."""
    a = jnp.zeros((parts, SLOTS, RANK, num_in), BF16)
    b = jnp.zeros((num_out, parts, SLOTS, RANK), BF16)
    scales = jnp.zeros((parts, SLOTS), F32)
    for slot, seed in placed.items():
        one = _adapter(seed, parts, num_out, num_in)
        a, b = a.at[:, slot].set(one[0]), b.at[:, :, slot].set(one[1])
        scales = scales.at[:, slot].set(1.0 + seed / 8)
    return AdapterStack(a=a.reshape(-1, num_in), b=b.reshape(num_out, -1), scales=scales)


def _context() -> ForwardContext:
    return ForwardContext(config=dummy_config(), profile=PROFILE, backend=SM90, tp=1)


@jax.jit
def _column(x, w, stack, slots):
    return adapted_linear(_context(), x, AdaptedMatrix(base=w, stack=stack, slots=slots), None)


@jax.jit
def _row(x, w, stack, slots, residual, gain):
    adapted = AdaptedMatrix(base=w, stack=stack, slots=slots)
    return tuple(row_parallel_norm(_context(), x, adapted, residual, None, gain))


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [1, 4, 8, 33, 64, 129, 600, 2048])
def test_a_row_meets_no_adapter_but_its_own(num_rows):
    """The same adapter in slot 0 alone, in slot 5 among seven others, at any batch size."""
    rng = np.random.default_rng(3)
    x, w = _bf16(rng, 2048, K) * jnp.bfloat16(8), _bf16(rng, N, K)
    alone = _stack(3, N, K, {0: 1})
    crowd = _stack(3, N, K, {slot: (1 if slot == 5 else slot + 2) for slot in range(SLOTS)})
    want = _column(x[:1], w, alone, jnp.zeros(1, jnp.int32))
    plain = linear(x, w, out_dtype=BF16, backend=SM90)
    slots = jnp.asarray(np.where(np.arange(num_rows) % 3 == 1, -1, np.arange(num_rows) % 8))
    slots = slots.astype(jnp.int32).at[0].set(5)
    got = _column(x[:num_rows], w, crowd, slots)
    assert_bitwise_equal(got[:1], want, claim="slot, neighbours and batch size have no effect")
    without = np.flatnonzero(np.asarray(slots) < 0)
    assert_bitwise_equal(
        np.asarray(got)[without], np.asarray(plain)[without], claim="rows without an adapter"
    )
    assert count_different_bits(np.asarray(got[:1]), np.asarray(plain[:1])) > N // 2


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [1, 8, 64, 500])
def test_row_parallel_rows_meet_no_adapter_but_their_own(num_rows):
    rng = np.random.default_rng(4)
    num_in, num_out = 14336, 4096
    x, w = _bf16(rng, 500, num_in) * jnp.bfloat16(8), _bf16(rng, num_out, num_in)
    residual, gain = _bf16(rng, 500, num_out) * jnp.bfloat16(64), jnp.ones(num_out, BF16)
    alone = _stack(1, num_out, num_in, {2: 1})
    crowd = _stack(1, num_out, num_in, {slot: (1 if slot == 7 else slot + 2) for slot in range(8)})
    want = _row(x[:1], w, alone, jnp.full(1, 2, jnp.int32), residual[:1], gain)
    slots = jnp.asarray(np.arange(num_rows) % 9 - 1, jnp.int32).at[0].set(7)
    got = _row(x[:num_rows], w, crowd, slots, residual[:num_rows], gain)
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one[:1], other, claim="slot, neighbours and batch size")
    reduction = tree_reduction(num_in, PROFILE)
    plain = linear_add_rms_norm(
        x, w, residual, None, gain, reduction=reduction, eps=1e-5, backend=SM90
    )
    without = np.flatnonzero(np.asarray(slots) < 0)
    for one, other in zip(got, plain, strict=True):
        assert_bitwise_equal(
            np.asarray(one)[without], np.asarray(other)[without], claim="without an adapter"
        )


@pytest.mark.gpu
def test_products_with_adapters_are_close_to_float64():
    """Tolerance: h and the result are rounded to bfloat16, 2**-9 each, and sums are float32."""
    rng = np.random.default_rng(5)
    x, w = _bf16(rng, 40, K) * jnp.bfloat16(8), _bf16(rng, N, K)
    stack = _stack(3, N, K, {slot: slot for slot in range(SLOTS)})
    slots = np.arange(40) % 8
    got = np.asarray(_column(x, w, stack, jnp.asarray(slots, jnp.int32)), np.float64)
    wide_x, a, b = (np.asarray(v, np.float64) for v in (x, stack.a, stack.b))
    h = wide_x @ a.T * np.repeat(np.asarray(stack.scales, np.float64).reshape(-1), RANK)
    own = (np.arange(3 * SLOTS * RANK) // RANK % SLOTS)[None] == slots[:, None]
    h = np.where(own, h, 0)
    exact = wide_x @ np.asarray(w, np.float64).T + h @ b.T
    bound = 2.0**-8 * (np.abs(exact) + np.abs(h) @ np.abs(b).T) + 1e-4
    assert (np.abs(got - exact) <= bound).all()
