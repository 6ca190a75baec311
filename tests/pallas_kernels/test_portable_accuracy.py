# SPDX-License-Identifier: Apache-2.0
"""Portable kernels on the shapes of real models, against float64 within derived bounds.

U is half an ulp of 1 in float32. A float32 sum of n terms, in any order, is within (n - 1) U of the
sum of their magnitudes to first order (Higham 2002, eq. 4.4); each bound says what it adds to that.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.embedding.api import embed
from detjax.pallas_kernels.linear.api import linear, linear_partial
from detjax.pallas_kernels.log_softmax.api import block_stats, log_sum_exp
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.pallas_kernels.rope.api import rope
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.testing import assert_bitwise_equal, wide
from detjax.testing.shapes import (
    GATE_WIDTHS,
    HEADS,
    LAYOUTS,
    LINEAR_SHAPES,
    NORM_WIDTHS,
    TABLES,
    VOCABULARIES,
)

ON = {"backend": Backend.PORTABLE}
F32 = jnp.dtype(jnp.float32)
U = 2.0**-24


def _draw(seed: int, *shape: int) -> np.ndarray:
    return wide(np.random.default_rng(seed), shape, 0.5)


def _assert_within(got, want: np.ndarray, bound, claim: str) -> None:
    error = np.abs(np.asarray(got, np.float64) - want)
    assert (error <= bound).all(), f"{claim}: {(error / bound).max():.2f} of the bound"


@pytest.mark.quick_cases("stories260k_down")
@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=lambda s: s.name)
def test_linear_is_within_its_bound(shape):
    x, w = _draw(0, 2, shape.k_len), _draw(1, 64, shape.k_len)
    if shape.is_row_parallel:
        reduction = tree_reduction(shape.k_len, NumericsProfile())
        got = linear_partial(jnp.asarray(x), jnp.asarray(w), reduction=reduction, **ON)
    else:
        got = linear(jnp.asarray(x), jnp.asarray(w), out_dtype=F32, **ON)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    # A rounded product for each term, then the sum.
    _assert_within(got, exact, shape.k_len * U * magnitude, shape.name)


@pytest.mark.parametrize("name", NORM_WIDTHS)
def test_rms_norm_is_within_its_bound(name):
    width = NORM_WIDTHS[name]
    x, gain = _draw(2, 3, width), _draw(3, width)
    got = rms_norm(jnp.asarray(x), jnp.asarray(gain), eps=1e-5, **ON)
    v = x.astype(np.float64)
    exact = v / np.sqrt((v * v).mean(1, keepdims=True) + 1e-5) * gain
    # Half of the sum's relative error, an rsqrt of 2 ulp, a division, and two products.
    _assert_within(got, exact, (width / 2 + 8) * U * np.abs(exact), name)


@pytest.mark.parametrize("name", GATE_WIDTHS)
def test_swiglu_is_within_its_bound(name):
    width = GATE_WIDTHS[name]
    gate_up = _draw(4, 3, 2 * width)
    got = swiglu(jnp.asarray(gate_up), **ON)
    g, u = (half.astype(np.float64) for half in np.split(gate_up, 2, axis=1))
    with np.errstate(over="ignore"):
        exact = g / (1 + np.exp(-g)) * u
    # exp within 2 ulp, an addition, a division, a product; below float32's range it is a zero.
    _assert_within(got, exact, 10 * U * np.abs(exact) + 2.0**-120, name)


@pytest.mark.parametrize("name", HEADS)
def test_rope_is_within_its_bound(name):
    heads, channels = HEADS[name]
    x = _draw(5, 3, heads, channels)
    angle = np.random.default_rng(6).uniform(0, 6.28, (3, channels // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    got = rope(jnp.asarray(x), jnp.asarray(cos), jnp.asarray(sin), **ON)
    a, b = np.split(x.astype(np.float64), 2, axis=2)
    c, s = (t.astype(np.float64)[:, None, :] for t in (cos, sin))
    exact = np.concatenate([a * c - b * s, b * c + a * s], axis=2)
    magnitude = np.tile(np.abs(a) + np.abs(b), (1, 1, 2))
    _assert_within(got, exact, 3 * U * magnitude, name)  # two products and a sum


@pytest.mark.quick_cases("llama2")
@pytest.mark.parametrize("name", VOCABULARIES)
def test_log_sum_exp_is_within_its_bound(name):
    vocab_size = VOCABULARIES[name]
    padded = -(-vocab_size // 128) * 128
    x = np.full((2, padded), -np.inf, np.float32)
    x[:, :vocab_size] = _draw(7, 2, vocab_size)
    stats = block_stats(jnp.asarray(x), vocab_block=128, **ON)
    got = log_sum_exp(*stats, **ON)
    v = x[:, :vocab_size].astype(np.float64)
    top = v.max(1)
    exact = top + np.log(np.exp(v - top[:, None]).sum(1))
    # Relative error of the sum: exp's argument is rounded (its magnitude is at most the spread),
    # exp within 2 ulp, 128 terms, a factor, and a tree of at most 11 levels. Then log and a sum.
    spread = np.abs(v).max() * 2
    _assert_within(got, exact, (spread + 128 + 20) * U + 4 * U * np.abs(exact), name)


@pytest.mark.parametrize("name", TABLES)
def test_embed_moves_bits(name):
    vocab_size, width = TABLES[name]
    table = _draw(8, 64, width)
    ids = jnp.asarray([0, 63, 5], jnp.int32)
    got = embed(jnp.asarray(table), ids, out_dtype=F32, **ON)
    assert_bitwise_equal(got, table[[0, 63, 5]], claim=f"{name} of {vocab_size} rows")


@pytest.mark.quick_cases("novels_6m-100")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_is_within_its_bound(name, window):
    layout = LAYOUTS[name]
    heads, kv_heads, channels = layout.num_heads, layout.num_kv_heads, layout.channels
    positions = np.array([[0, 127, 300, 639]], np.int32)
    q = _draw(9, 1, 4, heads, channels)
    pages = _draw(10, 1, 5, 2, kv_heads, 128, channels)
    got = attention(
        jnp.asarray(q),
        CachePlace(
            jnp.asarray(pages),
            jnp.arange(5, dtype=jnp.int32)[None],
            jnp.asarray(positions),
            layer=0,
        ),
        window=window,
        profile=NumericsProfile(compute_dtype="float32"),
        **ON,
    )
    k, v = (np.moveaxis(pages[0, :, i].astype(np.float64), 1, 0) for i in range(2))
    k, v = (x.reshape(kv_heads, -1, channels) for x in (k, v))
    for t, position in enumerate(positions[0]):
        low = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            keys, values = (x[head // (heads // kv_heads), low : position + 1] for x in (k, v))
            scores = keys @ q[0, t, head].astype(np.float64) * channels**-0.5
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            # A score's error is at most (C + 2) U times its terms' magnitudes, and so is a weight's
            # relative error, up and down; the sums add (number of keys) U; the rest is a few U.
            terms = np.abs(keys) @ np.abs(q[0, t, head]).astype(np.float64) * channels**-0.5
            relative = (2 * (channels + 4) * terms.max() + 2 * len(scores) + 30) * U
            bound = relative * (weights @ np.abs(values))
            _assert_within(np.asarray(got)[0, t, head], weights @ values, bound, f"{name} {t}")
