# SPDX-License-Identifier: Apache-2.0
"""Launches that a few rows of a mixture of experts save on sm90: the same bits as with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.linear import sm90 as linear_sm90
from detjax.pallas_kernels.linear import sm90_flat_matmul, sm90_w8a8, tiles
from detjax.pallas_kernels.linear.quantized import RowsToQuantize, W8A8Matrix
from detjax.pallas_kernels.linear.sm90_flat_matmul import InputNorm
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import FlatTiles, Product, choose_tiles
from detjax.pallas_kernels.moe import sm90 as moe_sm90
from detjax.pallas_kernels.moe import sm90_tiles
from detjax.pallas_kernels.moe.expert_weights import ExpertWeights
from detjax.pallas_kernels.moe.sm90_combine import read_experts
from detjax.pallas_kernels.rms_norm.sm90 import combine_add_rms_norm, rms_norm
from detjax.testing.bitwise import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.cases import quick_and_slow
from detjax.testing.shapes import MOE_SHAPES

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
EPS = 1e-6
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
QWEN = MOE_SHAPES[0]
TOP_K = 4


def drawn(seed: int, *dims: int, dtype=BF16, scale: float = 1.0) -> jax.Array:
    """Wide exponents, so that sums depend on their order."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(dims, np.float32) * np.exp(rng.standard_normal(dims, np.float32))
    return jnp.asarray(x * np.float32(scale), dtype)


@pytest.fixture
def few_launches(monkeypatch):
    """Every saving on, whether it is by default or not."""
    monkeypatch.setattr(linear_sm90, "MAX_ADDED_ROWS", 8)
    monkeypatch.setattr(sm90_tiles, "MAX_LATE_ROWS", 8)
    monkeypatch.setattr(tiles, "NARROW_ROWS", 16)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def one_cta(monkeypatch):
    """Give every tile to one CTA: interpretation runs CTAs side by side on few threads."""
    monkeypatch.setattr(sm90_flat_matmul, "NUM_SMS", 1)
    matmul.clear_cache()
    yield
    matmul.clear_cache()


# --- without a GPU ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("live_rows", quick_and_slow((16,), (8, 32)))
def test_narrow_tiles_in_interpret_mode(live_rows, one_cta):
    # Whole numbers: a CPU's product rounds by place, and what is tested is who is multiplied.
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-8, 9, shape), BF16) for shape in ((3, 256), (128, 256)))
    product = functools.partial(matmul, leaf_len=256, out_dtype=F32, interpret=INTERPRET)
    whole = FlatTiles(cols=8, stages=3)
    narrow = FlatTiles(cols=8, stages=3, live_rows=live_rows, out_span=4 * live_rows)
    out = product(x, w, None, None, tiles=narrow)
    want = product(x, w, None, None, tiles=whole)
    assert_bitwise_equal(out, want, claim="how many weights a tile has changes no bit")


def test_narrow_tiles_of_many_rows_in_interpret_mode(one_cta):
    """As a router of 24 rows has them: three tiles of rows by four of weights."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-8, 9, shape), BF16) for shape in ((24, 256), (64, 256)))
    product = functools.partial(matmul, leaf_len=256, out_dtype=F32, interpret=INTERPRET)
    chosen = choose_tiles(Product(num_rows=24, num_out=64, num_leaves=1, leaf_len=256, out_bytes=4))
    assert isinstance(chosen, FlatTiles) and (chosen.cols, chosen.live_rows) == (8, 16)
    out = product(x, w, None, None, tiles=chosen)
    want = product(x, w, None, None, tiles=FlatTiles(cols=24, stages=3))
    assert_bitwise_equal(out, want, claim="how many weights and rows a tile has changes no bit")


def test_narrow_tiles_refuse_nonsense():
    with pytest.raises(ValueError, match="self.live_rows=24"):
        FlatTiles(cols=8, stages=3, live_rows=24)
    with pytest.raises(ValueError, match="self.live_rows=16"):
        FlatTiles(cols=8, num_wgs=2, stages=3, live_rows=16)


def test_a_router_is_cut_into_narrow_tiles(few_launches):
    def chosen(num_rows, num_out):
        product = Product(
            num_rows=num_rows, num_out=num_out, num_leaves=1, leaf_len=2048, out_bytes=4
        )
        found = choose_tiles(product)
        assert isinstance(found, FlatTiles)
        return found

    assert chosen(1, 128).live_rows == chosen(8, 512).live_rows == 16
    assert chosen(64, 128).live_rows == chosen(128, 512).live_rows == 16
    assert not chosen(9, 128).live_rows and not chosen(1, 5120).live_rows


def add_apart(kind: str, terms: tuple, residual, gain):
    """The sum of a kind of terms and its normalised rows, in the launch that did it before."""
    options = {"eps": EPS, "interpret": True}
    if kind == "subtrees":
        return combine_add_rms_norm(*terms, residual, None, gain, **options)
    return moe_sm90.combine_experts_add_rms_norm(*terms, residual, gain, **options)


def late_terms(kind: str, num_rows: int, width: int) -> tuple[tuple, jax.Array]:
    """Terms, and a residual stream that nearly cancels them, so that the sum shows its order."""
    if kind == "subtrees":
        leaves = drawn(4, 4, num_rows, width, dtype=F32)
        return (leaves,), (-leaves.sum(0)).astype(BF16)
    y, weights = drawn(5, num_rows, TOP_K, width), jax.nn.softmax(drawn(6, num_rows, TOP_K))
    weights = weights.astype(F32)
    return (y, weights), (-(y.astype(F32) * weights[..., None]).sum(1)).astype(BF16)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", quick_and_slow((3, 8), (1,)))
@pytest.mark.parametrize("kind", ["subtrees", "experts"])
def test_a_product_that_adds_to_its_input_in_interpret_mode(kind, num_rows, few_launches, one_cta):
    width = 512
    terms, residual = late_terms(kind, num_rows, width)
    gain, w = drawn(3, width), drawn(7, 64, width, scale=0.05)
    total, x = add_apart(kind, terms, residual, gain)
    if kind == "subtrees":
        reader = linear_sm90._read_leaves
    else:
        reader, terms = read_experts, (terms[0].reshape(-1, width), terms[1])
    norm = InputNorm(gain=gain, terms=tuple(terms), eps=EPS, read_row=reader, keeps_rows=True)
    found = linear_sm90.sum_norm_linear(residual, w, None, norm, out_dtype=F32, interpret=INTERPRET)
    plain = FlatTiles(cols=8, k=256, stages=2, live_rows=16, out_span=64)
    product = matmul(
        x, w, None, None, leaf_len=width, out_dtype=F32, tiles=plain, interpret=INTERPRET
    )
    for a, b, what in zip(found, (product, total, x), ("product", "sum", "rows"), strict=True):
        assert_bitwise_equal(a, b, claim=f"{what}: added and normalised in the product's launch")


def test_a_product_that_keeps_its_normalised_rows_in_interpret_mode(one_cta):
    """Those of a router, whose experts take them too.

    # WHY: each sum has two terms that are not zero, and so one rounding. XLA's products of a CPU
    # have other bits for other shapes on some processors.
    """
    x, gain = drawn(2, 3, 512), drawn(3, 512)
    rng, w = np.random.default_rng(7), np.zeros((64, 512), np.float32)
    for row in w:
        row[rng.choice(512, 2, replace=False)] = 2.0 ** rng.integers(-2, 2, 2)
    w = jnp.asarray(w, BF16)
    out, total, rows = linear_sm90.combine_norm_linear(
        None, x, gain, w, eps=EPS, out_dtype=F32, interpret=INTERPRET
    )
    want = rms_norm(x, gain, eps=EPS, interpret=True)
    assert_bitwise_equal(rows, want, claim="the rows of a norm of its own")
    assert_bitwise_equal(total, x, claim="the residual stream as it was")
    product = np.asarray(want, np.float64) @ np.asarray(w, np.float64).T
    assert_bitwise_equal(out, product.astype(np.float32), claim="the product of these rows")


def eight_bits(kind: str, *dims: int) -> W8A8Matrix:
    """Weights of 8 bits, with a scale an output or a block of 128 x 128."""
    dtype = jnp.dtype(jnp.int8 if kind == "int8" else jnp.float8_e4m3fn)
    values = jnp.clip(drawn(8, *dims, scale=20.0).astype(F32), -127, 127)
    values = (jnp.round(values) if kind == "int8" else values).astype(dtype)
    *leading, num_out, num_in = dims
    shape = (num_out // 128, num_in // 128) if kind == "blocks" else (num_out,)
    scales = np.random.default_rng(9).uniform(0.5, 1.5, (*leading, *shape)) / 500
    return W8A8Matrix(values=values, scales=jnp.asarray(scales, F32))


@pytest.mark.parametrize("kind", quick_and_slow(("blocks",), ("int8",)))
def test_a_product_of_8_bits_adds_experts_in_interpret_mode(kind, monkeypatch, one_cta):
    terms, residual = late_terms("experts", 2, 512)
    gain, w = drawn(3, 512), eight_bits(kind, 128, 512)

    def run():
        return moe_sm90.combine_experts_norm_linear(
            *terms, residual, gain, w, None, eps=EPS, out_dtype=F32, interpret=INTERPRET
        )

    out, total = run()
    want_total, x = add_apart("experts", terms, residual, gain)
    rows = sm90_w8a8.quantized(RowsToQuantize(values=x, coding=w.row_coding), interpret=True)
    plain = FlatTiles(cols=8, k=128, stages=2)
    want = matmul(
        rows, w, None, None, leaf_len=512, out_dtype=F32, tiles=plain, interpret=INTERPRET
    )
    assert_bitwise_equal(total, want_total, claim="the sum of a launch of its own")
    assert_bitwise_equal(out, want, claim="the product of four launches")


@pytest.mark.parametrize("kind", ["subtrees", "experts"])
def test_control_terms_in_another_order_give_another_sum(kind):
    terms, residual = late_terms(kind, 8, 512)
    want, _ = add_apart(kind, terms, residual, drawn(3, 512))
    if kind == "subtrees":
        terms = (terms[0][jnp.array([0, 2, 1, 3])],)
    else:
        terms = tuple(term[:, ::-1] for term in terms)
    found, _ = add_apart(kind, terms, residual, drawn(3, 512))
    assert count_different_bits(found, want) > 0


@pytest.mark.slow
def test_one_row_needs_no_list_in_interpret_mode():
    x, logits = drawn(0, 1, 128), drawn(1, 1, 4, dtype=F32)
    experts = ExpertWeights(drawn(2, 4, 256, 128, scale=0.05), drawn(3, 4, 128, 128, scale=0.05))

    def run(num_rows):
        return moe_sm90.route_mlp(
            jnp.tile(x, (num_rows, 1)), jnp.tile(logits, (num_rows, 1)), experts,
            top_k=2, renormalise=True, interpret=plgpu.InterpretGPUParams(),
        )  # fmt: skip

    for a, b in zip(run(1), run(2), strict=True):
        assert_bitwise_equal(a, b[:1], claim="a row's tiles in order of rank, or of expert")


# --- on a Hopper GPU -------------------------------------------------------------------------


@functools.cache
def layer_weights(kind: str):
    num, width, hidden = QWEN.num_experts, QWEN.width, QWEN.hidden_size
    w = {"router": drawn(10, num, hidden, scale=0.02), "gain": drawn(14, hidden)}
    dims = {"qkv": (5120, hidden), "gate_up": (num, 2 * width, hidden)}
    dims["down"] = num, hidden, width
    if kind != "bfloat16":
        return w | {name: eight_bits(kind, *shape) for name, shape in dims.items()}
    scales = {"qkv": 0.02, "gate_up": 0.04, "down": 0.06}
    return w | {
        name: drawn(11 + i, *shape, scale=scales[name])
        for i, (name, shape) in enumerate(dims.items())
    }


def layer(leaf_sums, residual, kind: str) -> dict[str, jax.Array]:
    """A layer from the subtrees of o, or the residual stream, to the next q, k and v."""
    w = layer_weights(kind)
    logits, total, x = linear_sm90.combine_norm_linear(
        leaf_sums, residual, w["gain"], w["router"], eps=EPS, out_dtype=F32
    )
    experts = ExpertWeights(w["gate_up"], w["down"])
    y, weights = moe_sm90.route_mlp(x, logits, experts, top_k=QWEN.top_k, renormalise=True)
    qkv, after = moe_sm90.combine_experts_norm_linear(
        y, weights, total, w["gain"], w["qkv"], None, eps=EPS, out_dtype=BF16
    )
    return {
        "logits": logits, "total": total, "x": x, "y": y, "weights": weights, "qkv": qkv,
        "after": after,
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("groups", "kind"),
    [(2, "bfloat16"), (4, "bfloat16"), (0, "bfloat16"), (0, "int8"), (0, "fp8"), (0, "blocks")],
)
def test_fewer_launches_have_the_bits_of_more(groups, kind, request):
    """Every number of rows that saves launches, against one row more, which saves none."""
    leaf_sums = drawn(20, groups or 1, 9, QWEN.hidden_size, dtype=F32)
    residual = (-leaf_sums.sum(0)).astype(BF16)  # what is left shows the order of the sum
    assert_order_sensitive(np.square(np.asarray(residual[0], np.float32)))
    want = layer(leaf_sums if groups else None, residual, kind)
    request.getfixturevalue("few_launches")
    for m in range(1, 9):
        found = layer(leaf_sums[:, :m] if groups else None, residual[:m], kind)
        for name, value in found.items():
            assert_bitwise_equal(value, want[name][:m], claim=f"{name} of {m} rows of 9")
