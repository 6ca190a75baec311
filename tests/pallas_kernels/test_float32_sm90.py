# SPDX-License-Identifier: Apache-2.0
"""float32 activations on sm90: their logic on a CPU, their bits on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention import portable as attention_portable
from detjax.pallas_kernels.attention import sm90 as attention_sm90
from detjax.pallas_kernels.attention import sm90_float32 as attention_float32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear import sm90, sm90_float32, sm90_tall_matmul
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import TallTiles
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.sm90 import (
    add_rms_norm,
    combine_add_rms_norm,
    rms_norm,
    rms_norm_parts,
)
from detjax.pallas_kernels.swiglu.sm90 import swiglu
from detjax.testing.bitwise import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config

PROFILE = NumericsProfile(compute_dtype="float32")
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
EPS = 1e-5


def uneven(shape, seed=0, spread=3.0):
    """float32 of all 24 bits, huge and tiny beside each other."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))
    return x.astype(np.float32)


def weights(num_out, k_len, seed=1):
    w = np.random.default_rng(seed).standard_normal((num_out, k_len)).astype(np.float32)
    return jnp.asarray(w * np.float32(0.02), BF16)


def lower_for_hopper(fn, *shapes) -> str:
    text = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text  # a kernel, and not XLA's own operations
    return text


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


# On a CPU.


def test_three_bfloat16_are_a_float32():
    x = uneven((3, 256), spread=8.0)
    x[0, :6] = [0.0, -0.0, 2.0**-103, 1 + 2.0**-23, np.float32(2.0**127 * 1.99), -1 / 3]
    parts = np.asarray(sm90_float32.split_rows(jnp.asarray(x), interpret=True), np.float64)
    assert np.all(parts.sum(axis=0) == x)
    sizes = np.abs(parts)
    assert np.all(sizes[1] <= sizes[0] * 2.0**-8) and np.all(sizes[2] <= sizes[0] * 2.0**-16)
    control = np.asarray(jnp.asarray(x, BF16), np.float64) + parts[1]
    assert np.mean(control != x) > 0.5, "two parts are not enough, so the third is seen"


def test_what_three_bfloat16_lose_below_their_range():
    x = np.float32([1.0 + 2.0**-23, 2.0 - 2.0**-23] * 64) * np.float32(2.0**-110)
    parts = np.asarray(sm90_float32.split_rows(jnp.asarray(x)[None], interpret=True), np.float64)
    assert np.all(np.abs(parts.sum(axis=0) - x) < 2.0**-126)


@pytest.mark.parametrize("width", quick_and_slow((256,), (128, 768, 4096)))
def test_normalised_parts_add_up_to_the_norm(width):
    x = jnp.asarray(uneven((5, width)))
    gain = jnp.asarray(1 + uneven(width, 3, 0.1) / 8, BF16)
    want = rms_norm(x, gain, eps=EPS, interpret=True)
    parts = np.asarray(rms_norm_parts(x, gain, eps=EPS, interpret=True), np.float64)
    assert_bitwise_equal(
        parts.sum(axis=0).astype(np.float32), np.asarray(want), claim="parts are the norm"
    )


@pytest.mark.parametrize("groups", quick_and_slow((2,), (1, 8)))
def test_parts_are_added_in_one_order(groups):
    sums = uneven((groups, 3, 5, 640))
    bias, residual = jnp.asarray(uneven(640, 7), BF16), uneven((5, 640), 8)
    out = sm90_float32.add_parts(jnp.asarray(sums), bias, jnp.asarray(residual), interpret=True)
    trees = sums
    while len(trees) > 1:
        trees = trees[0::2] + trees[1::2]
    p1, p2, p3 = trees[0]
    wide_bias = np.asarray(bias, np.float32)
    want = residual + (((p3 + p2) + p1) + wide_bias)
    assert_bitwise_equal(out, want, claim="smallest part first, then bias, then residual")
    other = residual + (((p1 + p2) + p3) + wide_bias)
    assert count_different_bits(out, other), "the order is seen"


INTERPRET = plgpu.InterpretGPUParams()
ROWS, WIDTH, LEAF_LEN = 8, 384, 64


def row_parallel(parts, w):
    """What a rank multiplies: [A, 3, M, D], A CTAs of a tile's tree."""
    _, num_rows, k_len = parts.shape
    groups = min(2, k_len // LEAF_LEN)
    tiles = TallTiles(cols=64, num_wgs=1, k=32, stages=2, groups=groups)
    sums = matmul(
        parts.reshape(-1, k_len), w, None, None,
        leaf_len=LEAF_LEN, out_dtype=F32, tiles=tiles, interpret=INTERPRET,
    )  # fmt: skip
    return sums.reshape(-1, 3, num_rows, w.shape[0])


@pytest.fixture
def one_cta(monkeypatch):
    """Give every tile to one CTA: interpretation runs CTAs side by side on few threads."""
    monkeypatch.setattr(sm90_tall_matmul, "NUM_SMS", 1)
    matmul.clear_cache()
    yield
    matmul.clear_cache()


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("tp", quick_and_slow((2,), (4, 8)))
def test_row_parallel_sums_are_bitwise_mesh_invariant(tp, one_cta):
    """A rank's trees of each part are subtrees of one rank's: the kernels one after the other."""
    k_len = 8 * LEAF_LEN
    x, w = jnp.asarray(uneven((ROWS, k_len), spread=1.0)), weights(WIDTH, k_len)
    residual = jnp.asarray(uneven((ROWS, WIDTH), 5, 1.0))
    bias, gain = jnp.asarray(uneven(WIDTH, 6), BF16), jnp.asarray(1 + uneven(WIDTH, 7), BF16)
    parts = sm90_float32.split_rows(x, interpret=True)
    combine = functools.partial(sm90._combine, residual=None, bias=None, out_dtype=F32)
    combine = functools.partial(combine, interpret=INTERPRET)

    def trees(ranks: int):
        share = k_len // ranks
        sums = [
            row_parallel(parts[:, :, k : k + share], w[:, k : k + share])
            for k in range(0, k_len, share)
        ]
        return [s[0] if len(s) == 1 else combine((s,)) for s in sums]

    def finished(trees):
        return combine_add_rms_norm(trees, residual, bias, gain, eps=EPS, interpret=True)

    whole = row_parallel(parts, w)
    total = sm90_float32.add_parts(whole, bias, residual, interpret=True)
    want = total, rms_norm(total, gain, eps=EPS, interpret=True)
    assert np.isfinite(want[1]).all()
    partials = trees(tp)
    leaves = np.stack(trees(8))
    assert_order_sensitive(np.moveaxis(leaves.sum(axis=1), 0, -1))
    scattered = finished(jnp.stack(partials))
    butterfly = partials
    while len(butterfly) > 1:
        butterfly = [
            combine((a[None], b[None]))
            for a, b in zip(butterfly[0::2], butterfly[1::2], strict=True)
        ]
    summed = add_rms_norm(butterfly[0], residual, bias, gain, eps=EPS, interpret=True)
    for name, a, b, c in zip(("residual", "normed"), want, scattered, summed, strict=True):
        assert_bitwise_equal(b, a, claim=f"{name}: scatter on {tp} ranks has the bits of one")
        assert_bitwise_equal(c, a, claim=f"{name}: so has the butterfly")
    early = jnp.stack([(p[2] + p[1]) + p[0] for p in partials])
    assert count_different_bits(finished(early)[0], total), "parts joined by each rank are not"


def test_parts_of_a_narrow_row_are_added_in_the_same_order():
    sums, residual = uneven((2, 3, 5, 192)), uneven((5, 192), 8)
    gain = jnp.asarray(1 + uneven(192, 9), BF16)
    total, _ = combine_add_rms_norm(
        jnp.asarray(sums), jnp.asarray(residual), None, gain, eps=EPS, interpret=True
    )
    p1, p2, p3 = sums[0] + sums[1]
    assert_bitwise_equal(total, residual + ((p3 + p2) + p1), claim="smallest part first")


def test_gated_parts_are_those_of_swiglu():
    sums = jnp.asarray(uneven((1, 3, 4, 512), spread=1.0))
    out = sm90_float32.add_parts(sums, None, None, is_gated=True, interpret=True)
    added = sm90_float32.add_parts(sums, None, None, interpret=True)
    assert_bitwise_equal(out, swiglu(added, interpret=True), claim="gated as swiglu does")


def test_linear_refuses_what_it_does_not_do():
    with pytest.raises(NotImplementedError, match="float32 by float32"):
        sm90.check_supported(struct(4, 256), struct(128, 256), leaf_len=256)
    with pytest.raises(NotImplementedError, match="128"):
        sm90_float32.split_rows(jnp.zeros((1, 64)))


@pytest.mark.parametrize("num_rows", quick_and_slow((3,), (1, 8, 64, 200, 1000)))
def test_products_lower(num_rows):
    x, residual = struct(num_rows, 4096), struct(num_rows, 1024)
    w, gain = struct(1024, 4096, dtype=BF16), struct(4096, dtype=BF16)
    bias = struct(1024, dtype=BF16)
    reduction = tree_reduction(4096, PROFILE)
    text = lower_for_hopper(
        lambda x, gain, w: sm90.norm_linear(x, gain, w, None, eps=EPS, out_dtype=F32), x, gain, w
    )
    assert text.count("mosaic_gpu_v2") >= 3
    lower_for_hopper(lambda x, g, w: sm90.norm_linear_swiglu(x, g, w, eps=EPS), x, gain, w)
    lower_for_hopper(
        lambda x, w, r, b: sm90.linear_add(x, w, r, b, reduction=reduction), x, w, residual, bias
    )


def config_of(**changes) -> ModelConfig:
    return dummy_config(
        num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, intermediate_size=1536,
        vocab_size=1024, **changes,
    )  # fmt: skip


@pytest.mark.slow
def test_sm90_takes_float32_with_bfloat16_weights_alone():
    take = functools.partial(why_unsupported, backend=Backend.SM90)
    assert take(config_of(), PROFILE, tp=1) is None
    assert take(config_of(window=64), PROFILE, tp=1) is None
    assert take(config_of(), PROFILE, tp=2) is None
    float32_weights = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    assert "float32 by float32" in str(take(config_of(), float32_weights, tp=1))


def attention_case(positions, *, kv_heads, group, channels, seed=0):
    """Operands, with NaN wherever nothing has been written."""
    positions = np.asarray(positions, np.int32)
    batch, query_len = positions.shape
    blocks = int(positions.max()) // 128 + 1
    rng = np.random.default_rng(seed)
    order = rng.permutation(batch * blocks + 1).astype(np.int32)
    table = order[:-1].reshape(batch, blocks)
    pages = rng.standard_normal((1, len(order), 2, kv_heads, 128, channels)).astype(np.float32)
    pages[0, order[-1]] = np.nan
    at = np.arange(blocks * 128).reshape(blocks, 128)
    for row, last in zip(table, positions.max(axis=1), strict=True):
        pages[0, row] = np.where((at <= last)[:, None, None, :, None], pages[0, row], np.nan)
    q = rng.standard_normal((batch, query_len, kv_heads * group, channels)).astype(np.float32)
    return tuple(map(jnp.asarray, (q, pages, table, positions)))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("positions", "kv_heads", "group", "channels", "window", "split"),
    [
        pytest.param([[130, 131], [5, -1]], 1, 3, 64, None, 128, id="verify-odd-group", marks=SLOW),
        pytest.param([[600], [100]], 1, 2, 128, None, 512, id="decode", marks=SLOW),
        pytest.param([[700], [1290]], 1, 4, 64, 300, 512, id="decode-window", marks=SLOW),
        pytest.param([[*range(100, 170)]], 1, 1, 96, None, 128, id="two-tiles", marks=SLOW),
        pytest.param([[-1], [3]], 2, 3, 64, None, 512, id="padding", marks=SLOW),
    ],
)
def test_attention_agrees_with_portable(positions, kv_heads, group, channels, window, split):
    profile = NumericsProfile(compute_dtype="float32", attention_split=split)
    q, pages, table, positions = attention_case(
        positions, kv_heads=kv_heads, group=group, channels=channels
    )
    place = CachePlace(pages, table, positions, layer=jnp.int32(0))
    portable = functools.partial(attention_portable.attention, window=window, profile=profile)
    want = portable(q, place)
    attend = functools.partial(
        attention_float32.attention, q, place,
        window=window, per_split=split // 128, is_interpreted=True,
    )  # fmt: skip
    out = np.asarray(attend(is_split=False))
    assert np.abs(out - np.asarray(want)).max() < 2.0**-20
    if q.shape[1] * group <= 64 and window is None:
        assert_bitwise_equal(attend(is_split=True), out, claim="splits merged as they are folded")
    lost = jnp.asarray(np.asarray(jnp.asarray(q, BF16), np.float32))
    rounded = portable(lost, place)
    assert np.abs(np.asarray(rounded) - np.asarray(want)).max() > 2.0**-12, "parts are seen"


def test_attention_of_mixed_dtypes_is_refused():
    q, pages, table, positions = attention_case([[3]], kv_heads=1, group=1, channels=64)
    with pytest.raises(NotImplementedError, match="float32 with bfloat16"):
        place = CachePlace(pages.astype(BF16), table, positions, layer=0)
        attention_sm90.attention(q, place, window=None, profile=PROFILE)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "query_len"), quick_and_slow([(2, 1)], [(64, 1), (1, 300)]))
def test_attention_lowers(batch, query_len):
    shapes = (
        struct(batch, query_len, 32, 128), struct(2, 40, 2, 8, 128, 128),
        struct(batch, 9, dtype=jnp.int32), struct(batch, query_len, dtype=jnp.int32),
    )  # fmt: skip

    def attend(q, *place):
        place = CachePlace(*place, layer=1)
        return attention_sm90.attention(q, place, window=None, profile=PROFILE)

    text = lower_for_hopper(attend, *shapes)
    assert "attention_float32_sm90" in text
    assert ("attention_merge_sm90" in text) == (batch == 2)


# On a GPU.

SHAPES = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (1024, 512)}


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_bitwise_batch_invariant_and_within_their_bound(name):
    num_out, k_len = SHAPES[name]
    x, w = jnp.asarray(uneven((1000, k_len), spread=1.0)), weights(num_out, k_len)
    residual = jnp.asarray(uneven((1000, num_out), 5, 1.0))
    assert_order_sensitive(np.asarray(x[:2], np.float32) * np.asarray(w[:1], np.float32))
    reduction = tree_reduction(k_len, PROFILE)
    linear = functools.partial(sm90.linear, w=w, bias=None, out_dtype=F32)

    def add(x):
        return sm90.linear_add(x, w, residual[: len(x)], None, reduction=reduction)

    for claim, run in (("one leaf", linear), ("tree", add)):
        many = np.asarray(run(x))
        for n in (1, 2, 3, 5, 8, 9, 21, 33, 64, 129, 257):
            assert_bitwise_equal(run(x[:n]), many[:n], claim=f"{claim}, {n} rows")
        exact = np.asarray(x[:64], np.float64) @ np.asarray(w, np.float64).T
        if run is add:
            exact += np.asarray(residual[:64], np.float64)
        magnitude = np.abs(np.asarray(x[:64], np.float64)) @ np.abs(np.asarray(w, np.float64)).T
        magnitude += np.abs(np.asarray(residual[:64], np.float64)) if run is add else 0
        errors = np.abs(many[:64] - exact)
        # docs/numerics.md: K / 16 steps, each within 2**-19 of the sum of magnitudes.
        assert (errors <= ((k_len / 16 + 1) * 2.0**-19 * magnitude)).all()
        rounded = np.asarray(run(x.astype(BF16).astype(F32)))
        assert errors.mean() * 30 < np.abs(rounded[:64] - exact).mean(), "nearer than bfloat16"
        assert count_different_bits(rounded, many) > many.size // 2, "parts are seen"


@pytest.mark.gpu
@pytest.mark.control
def test_float32_products_of_xla_depend_on_the_batch():
    x, w = jnp.asarray(uneven((512, 4096), spread=1.0)), weights(6144, 4096).astype(F32)
    product = jax.jit(functools.partial(jnp.dot, precision="highest"))
    many = np.asarray(product(x, w.T))
    counts = [count_different_bits(product(x[:n], w.T), many[:n]) for n in (1, 2, 8, 33, 100)]
    assert any(counts)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize(("group", "channels"), [(4, 128), (7, 64), (1, 96)])
@pytest.mark.parametrize("window", [None, 300])
def test_attention_is_bitwise_path_consistent(group, channels, window):
    """Prefill at once, chunks, verify windows and single tokens, in company and alone."""
    length = 1300
    q, pages, table, positions = attention_case(
        [[*range(length)]], kv_heads=2, group=group, channels=channels
    )
    assert_order_sensitive(np.asarray(pages[0, table[0, 0], 1, 0]).T)
    attend = functools.partial(attention_float32.attention, window=window, per_split=4)
    whole = np.asarray(attend(q, CachePlace(pages, table, positions, jnp.int32(0))))
    for start, stop in ((0, 1), (127, 129), (511, 514), (1292, 1300), (600, 900), (1299, 1300)):
        for is_split in {False, None}:
            part = attend(
                q[:, start:stop],
                CachePlace(pages, table, positions[:, start:stop], jnp.int32(0)),
                is_split=is_split,
            )  # fmt: skip
            claim = f"rows {start} to {stop}, {is_split=}"
            assert_bitwise_equal(part, whole[:, start:stop], claim=claim)
    at = np.asarray([5, 700, 128, 1299, 1024, 640, 1, 511])
    alone = q[0, at][:, None], jnp.asarray(at[:, None], jnp.int32)
    tables = jnp.repeat(table, len(at), axis=0)
    together = attend(alone[0], CachePlace(pages, tables, alone[1], jnp.int32(0)))
    assert_bitwise_equal(np.asarray(together)[:, 0], whole[0, at], claim="eight in company")


@pytest.mark.gpu
@pytest.mark.control
def test_another_split_of_attention_differs():
    q, pages, table, positions = attention_case([[1290]], kv_heads=2, group=4, channels=128)
    four, two = (
        attention_float32.attention(
            q, CachePlace(pages, table, positions, jnp.int32(0)), window=None, per_split=n
        )
        for n in (4, 2)
    )
    assert count_different_bits(four, two)


@pytest.mark.gpu
def test_attention_is_within_its_bound_of_float64():
    q, pages, table, positions = attention_case([[1290]], kv_heads=2, group=4, channels=128)
    place = CachePlace(pages, table, positions, jnp.int32(0))
    out = attention_float32.attention(q, place, window=None, per_split=4)
    keys = np.asarray(pages, np.float64)[0, np.asarray(table)[0]]  # [n, 2, K, P, C]
    k, v = (keys[:, i].transpose(1, 0, 2, 3).reshape(2, -1, 128)[:, :1291] for i in range(2))
    rows = np.asarray(q, np.float64)[0, 0].reshape(2, 4, 128)
    scores = np.einsum("kgc,ksc->kgs", rows, k) / np.sqrt(128)
    p = np.exp(scores - scores.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    want = np.einsum("kgs,ksc->kgc", p, v)
    scale = np.einsum("kgs,ksc->kgc", p, np.abs(v))
    error = np.abs(np.asarray(out, np.float64)[0, 0].reshape(2, 4, 128) - want)
    assert (error <= 2.0**-16 * scale).all()
