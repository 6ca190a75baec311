# SPDX-License-Identifier: Apache-2.0
"""Attention on sm90: its logic on a CPU, its bits on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import portable, sm90, sm90_prefill
from detjax.pallas_kernels.attention.shapes import LAYOUTS
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits

PROFILE = NumericsProfile()
HOPPER_LAYOUTS = [name for name, layout in LAYOUTS.items() if layout.channels in sm90.CHANNELS]
CONTEXTS = (1, 127, 128, 129, 511, 512, 513, 4096, 20000)


def normal(shape, seed, scale=1.0):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return jnp.asarray(x, jnp.bfloat16)


def make_cache(num_pages, kv_heads, channels, seed=0):
    """One sequence's pages in random order, and a page of NaN that belongs to nobody."""
    order = np.random.default_rng(seed).permutation(num_pages + 1)
    pages = normal((1, num_pages + 1, 2, kv_heads, 128, channels), seed + 1)
    pages = pages.at[0, order[-1]].set(jnp.nan)
    return pages, jnp.asarray(order[None, :-1], jnp.int32)


def without_future(pages, table, length):
    """NaN wherever nothing has been written yet."""
    page, offset = divmod(length, 128)
    if offset:
        pages = pages.at[0, table[0, page], :, :, offset:].set(jnp.nan)
        page += 1
    return pages.at[0, table[0, page:]].set(jnp.nan)


def attend(q, pages, table, positions, is_interpreted=False):
    return sm90.attention(
        q, pages, table, jnp.asarray(positions, jnp.int32),
        layer=0, window=None, profile=PROFILE, is_interpreted=is_interpreted,
    )  # fmt: skip


def prefill(q, pages, table, positions, **options):
    config = sm90_prefill.PrefillConfig(**options)
    return sm90_prefill.prefill(
        q, pages, table, jnp.asarray(positions, jnp.int32),
        layer=0, config=config, is_interpreted=False,
    )  # fmt: skip


# On a CPU.


@pytest.mark.parametrize("layout", HOPPER_LAYOUTS)
@pytest.mark.parametrize("query_len", [1, 4, 100, 2048])
def test_every_variant_lowers_for_hopper(layout, query_len):
    dims = LAYOUTS[layout]
    shapes = (
        jax.ShapeDtypeStruct((2, query_len, dims.num_heads, dims.channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 40, 2, dims.num_kv_heads, 128, dims.channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 16), jnp.int32),
        jax.ShapeDtypeStruct((2, query_len), jnp.int32),
    )

    def f(q, pages, table, positions):
        return sm90.attention(q, pages, table, positions, layer=1, window=None, profile=PROFILE)

    text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    is_decode = sm90.is_decode(query_len, dims.num_heads // dims.num_kv_heads)
    assert ("attention_splits_sm90" if is_decode else "attention_prefill_sm90") in text


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize(
    "positions",
    [[[600], [100]], [[510, 511, 512], [5, 6, -1]], [[-1], [0]]],
    ids=["decode", "verify", "padding"],
)
def test_decode_agrees_with_portable(group, positions):
    kv_heads, channels = 2, 64
    pages = normal((1, 13, 2, kv_heads, 128, channels), 1)
    table = jnp.asarray(np.random.default_rng(0).permutation(12).reshape(2, 6), jnp.int32)
    positions = jnp.asarray(positions, jnp.int32)
    q = normal((*positions.shape, kv_heads * group, channels), 2)
    actual = attend(q, pages, table, positions, is_interpreted=True)
    expected = portable.attention(q, pages, table, positions, layer=0, window=None, profile=PROFILE)
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(b) > 0
    assert np.linalg.norm(a - b) <= 2**-8 * np.linalg.norm(b)
    assert (a[np.asarray(positions) < 0] == 0).all()


def test_prefill_agrees_with_portable():
    kv_heads, group, channels, query_len = 1, 2, 64, 70
    pages = normal((1, 13, 2, kv_heads, 128, channels), 1)
    table = jnp.asarray(np.random.default_rng(0).permutation(12).reshape(2, 6), jnp.int32)
    steps = np.arange(query_len)
    positions = np.stack([steps + 500, np.where(steps < 40, steps + 100, -1)])
    q = normal((2, query_len, kv_heads * group, channels), 2)
    actual = attend(q, pages, table, positions, is_interpreted=True)
    expected = portable.attention(
        q, pages, table, jnp.asarray(positions, jnp.int32),
        layer=0, window=None, profile=PROFILE,
    )  # fmt: skip
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(a - b) <= 2**-8 * np.linalg.norm(b)
    assert (a[positions < 0] == 0).all()


def test_unsupported_combinations_are_refused():
    pages, table = make_cache(1, 1, 64)
    positions = jnp.zeros((1, 1), jnp.int32)
    q = normal((1, 1, 1, 64), 0)
    options = {"layer": 0, "profile": PROFILE}
    with pytest.raises(NotImplementedError, match="window"):
        sm90.attention(q, pages, table, positions, window=128, **options)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        sm90.attention(q.astype(jnp.float32), pages, table, positions, window=None, **options)
    with pytest.raises(NotImplementedError, match="channels"):
        sm90.attention(q[..., :8], pages[..., :8], table, positions, window=None, **options)


# On a GPU.


@pytest.fixture(scope="module", params=["llama3_8b", "qwen2_0b5"])
def whole(request):
    """A prompt of the longest context, prefilled at once."""
    dims = LAYOUTS[request.param]
    longest = CONTEXTS[-1]
    pages, table = make_cache(-(-longest // 128), dims.num_kv_heads, dims.channels)
    pages = without_future(pages, table, longest)
    q = normal((1, longest, dims.num_heads, dims.channels), 7, 2.0)
    positions = np.arange(longest)[None]
    out = prefill(q, pages, table, positions)
    return q, pages, table, positions, out


@pytest.mark.gpu
@pytest.mark.invariance
def test_prefill_is_bitwise_run_invariant(whole):
    q, pages, table, positions, out = whole
    again = prefill(q, pages, table, positions)
    assert_bitwise_equal(again, out, claim="the same prefill twice has the same bits")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("window", [1, 5])
def test_decode_and_verify_are_bitwise_path_consistent(whole, context, window):
    q, pages, table, positions, out = whole
    at = slice(max(context - window, 0), context)
    cut = without_future(pages, table, context)
    actual = attend(q[:, at], cut, table, positions[:, at])
    assert_bitwise_equal(
        actual, out[:, at], claim=f"{window} rows ending at {context} are the prefill's rows"
    )


@pytest.mark.gpu
@pytest.mark.invariance
def test_prefill_is_bitwise_schedule_invariant(whole):
    q, pages, table, positions, out = whole
    parts, start = [], 0
    for size in (100, 33, 256, 1000, 17, 6000, out.shape[1]):
        stop = min(start + size, out.shape[1])
        cut = without_future(pages, table, stop)
        parts.append(attend(q[:, start:stop], cut, table, positions[:, start:stop]))
        start = stop
    assert_bitwise_equal(
        jnp.concatenate(parts, axis=1), out, claim="chunks of a prompt are the whole prompt"
    )


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("order", [range(8), (3, 6, 0, 7, 1, 5, 2, 4)], ids=["sorted", "mixed"])
def test_decode_is_bitwise_batch_invariant(whole, order):
    q, pages, table, _, out = whole
    at = np.array([1, 4096, 129, 700, 512, 513, 20000, 2000])[list(order)] - 1
    actual = attend(q[0, at][:, None], pages, jnp.repeat(table, 8, 0), at[:, None])
    assert_bitwise_equal(actual[:, 0], out[0, at], claim="a row alone is the row in a batch")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("query_len", [4, 90])
def test_padding_leaves_no_trace(whole, query_len):
    q, pages, table, _, out = whole
    at = np.stack([np.arange(x - query_len, x) for x in (600, 5000, 128, 515)])
    positions = at.copy()
    positions[1, query_len // 2 :] = -1
    positions[2] = -1
    actual = attend(q[0, at], pages, jnp.repeat(table, 4, 0), positions)
    expected = jnp.where((positions >= 0)[:, :, None, None], out[0, at], jnp.zeros_like(out[0, at]))
    assert_bitwise_equal(actual, expected, claim="padded rows are +0 and change no other row")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("options", [{"num_stages": 3}, {"num_ctas": 132, "query_buffers": 2}])
def test_schedules_have_the_same_bits(whole, options):
    q, pages, table, positions, out = whole
    actual = prefill(q, pages, table, positions, **options)
    assert_bitwise_equal(actual, out, claim=f"{options} is a choice for speed alone")


@pytest.mark.gpu
@pytest.mark.control
def test_control_another_split_length_differs(whole):
    q, pages, table, positions, out = whole
    other = prefill(q[:, :4096], pages, table, positions[:, :4096], blocks_per_split=8)
    assert count_different_bits(other, out[:, :4096]) > 0


@pytest.mark.gpu
def test_prefill_is_close_to_float64(whole):
    q, pages, table, _, out = whole
    keys, values = (
        np.concatenate(
            [np.asarray(pages[0, p, i], np.float64) for p in np.asarray(table[0, :12])], axis=1
        )
        for i in range(2)
    )
    group = q.shape[2] // keys.shape[0]
    rows = np.array([0, 5, 127, 128, 130, 511, 512, 700, 1500])
    query, expected = np.asarray(q[0, rows], np.float64), np.zeros((9, *q.shape[2:]))
    for i, row in enumerate(rows):
        for h in range(q.shape[2]):
            scores = keys[h // group, : row + 1] @ query[i, h] / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max())
            expected[i, h] = weights @ values[h // group, : row + 1] / weights.sum()
    error = np.linalg.norm(np.asarray(out[0, rows], np.float64) - expected)
    # Measured 1.3e-3: weights and output rounded to 8 bits, 2**-9 at most, each once.
    assert error <= 2.5e-3 * np.linalg.norm(expected)
