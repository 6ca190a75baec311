# SPDX-License-Identifier: Apache-2.0
"""The sm90 linear kernels: bits on a Hopper GPU, logic in interpret mode, lowering everywhere."""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.numerics import NumericsProfile, Reduction, tree_reduction
from detjax.pallas_kernels.linear import portable, sm90, sm90_flat_matmul, sm90_tall_matmul
from detjax.pallas_kernels.linear.sm90_flat_matmul import InputNorm
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import (
    Added,
    FlatTiles,
    HeldRows,
    OperandType,
    Product,
    Rows,
    TallTiles,
    choose_tiles,
    smem_bytes,
)
from detjax.pallas_kernels.rms_norm.sm90 import combine_add_rms_norm, rms_norm
from detjax.pallas_kernels.sm90_hardware import SMEM_BYTES
from detjax.pallas_kernels.swiglu import sm90 as sm90_swiglu
from detjax.testing.bitwise import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.cases import quick_and_slow
from detjax.testing.shapes import GATE_WIDTHS, LINEAR_SHAPES

PROFILE = NumericsProfile()
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
ROWS = (1, 7, 8, 9, 16, 31, 64, 100, 128, 129, 192, 255, 256, 257, 512, 1000, 2048, 8192)
EVERY_ROW_COUNT = (*range(1, 258), 512, 1000, 2048, 8192)
GPU_SHAPES = [s for s in LINEAR_SHAPES if s.k_len % 16 == 0 and s.num_outputs >= 2048]
TALL = TallTiles(cols=64, stages=2)
FLAT = FlatTiles(cols=8, stages=2)
VARIANTS = {
    "tall": TALL,
    "tall_cluster_rows": dataclasses.replace(TALL, cluster=(2, 1)),
    "tall_cluster_cols": dataclasses.replace(TALL, cluster=(1, 2), cols=32),
    "tall_one_warpgroup": dataclasses.replace(TALL, num_wgs=1),
    "tall_three_warpgroups": dataclasses.replace(TALL, num_wgs=3),
    "tall_thin_steps": dataclasses.replace(TALL, k=16, stages=3),
    "tall_lag": dataclasses.replace(TALL, lag=1),
    "flat": FLAT,
    "flat_wide": dataclasses.replace(FLAT, cols=40),
    "flat_two_warpgroups": dataclasses.replace(FLAT, num_wgs=2, cols=40),
    "flat_deep_steps": dataclasses.replace(FLAT, k=128),
}
TREE_VARIANTS = {
    "tall": TALL,
    "tall_pairs": dataclasses.replace(TALL, is_paired=True),
    "tall_pending_in_smem": dataclasses.replace(TALL, smem_levels=1, is_paired=True),
    "tall_groups": dataclasses.replace(TALL, groups=2),
    "tall_one_warpgroup": dataclasses.replace(
        TALL, cols=128, num_wgs=1, smem_levels=1, is_paired=True
    ),
    "flat": FLAT,
    "flat_groups": dataclasses.replace(FLAT, groups=4),
    "flat_one_leaf_a_group": dataclasses.replace(FLAT, groups=8),
}
IN_SLOT = TallTiles(cols=128, stages=5, smem_levels=1, is_paired=True, lag=1, shares_slot=True)
GATED_TALL = TallTiles(cols=64, stages=3, is_gated=True)
GATED_FLAT = dataclasses.replace(FLAT, cols=40, is_gated=True)
GATED_VARIANTS = {
    "tall": GATED_TALL,
    "tall_widest": dataclasses.replace(GATED_TALL, cols=256),
    "tall_cluster_rows": dataclasses.replace(GATED_TALL, cluster=(2, 1)),
    "tall_one_warpgroup": dataclasses.replace(GATED_TALL, cols=224, num_wgs=1, out_span=64),
    "tall_three_warpgroups": dataclasses.replace(GATED_TALL, cols=192, num_wgs=3, out_span=64),
    "tall_lag": dataclasses.replace(GATED_TALL, lag=2),
    "flat": GATED_FLAT,
    "flat_two_warpgroups": dataclasses.replace(GATED_FLAT, num_wgs=2),
    "flat_deep_steps": dataclasses.replace(GATED_FLAT, k=128),
}


def held(channels: int = 1024, **rows) -> FlatTiles:
    return FlatTiles(cols=8, stages=3, held=HeldRows(channels=channels, **rows))


HELD_FLAT = held()
HELD_VARIANTS = {
    "one_warpgroup": HELD_FLAT,
    "helpers": held(helpers=3),
    "two_warpgroups_and_a_helper": dataclasses.replace(held(helpers=1), num_wgs=2),
    "deep_steps": dataclasses.replace(held(helpers=1), k=128),
    "early_stages": held(helpers=1, early_stages=2),
    "gated": dataclasses.replace(held(helpers=2, early_stages=1), is_gated=True),
    "gated_two_warpgroups": dataclasses.replace(HELD_FLAT, is_gated=True, num_wgs=2),
    "copied": held(helpers=1, copies_rows=True),
    "copied_deep_steps": dataclasses.replace(held(helpers=3, copies_rows=True), k=128),
    "copied_gated": dataclasses.replace(held(copies_rows=True), is_gated=True, num_wgs=2),
}
NORM_WIDTHS = (896, 1024, 1536, 2560, 4096, 5120, 6656, 8192)
"""Of real models whose rows a warpgroup adds: 1, 4 or 8 neighbouring channels a thread."""
EPS = 1e-5
GATED_WIDTHS = {**{k: v for k, v in GATE_WIDTHS.items() if v % 32 == 0}, "llama2_7b_tp8": 1376}


def reduction_of(shape) -> Reduction:
    if shape.is_row_parallel:
        return tree_reduction(shape.k_len, PROFILE)
    return Reduction(num_leaves=1, leaf_len=shape.k_len)


@functools.lru_cache(maxsize=2)
def operands(num_rows: int, num_out: int, k_len: int):
    """bf16 operands with wide exponents, so that the sums depend on their order."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, k_len), np.float32)
    x *= np.exp(rng.standard_normal((num_rows, k_len), np.float32))
    w = rng.standard_normal((num_out, k_len), np.float32) * np.float32(0.02)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)


def uneven_rows(num_rows: int, width: int, seed: int = 0):
    """bf16 rows of huge and tiny magnitude beside each other, wide exponents inside a row."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, width)) * np.exp(rng.standard_normal((num_rows, width)))
    x *= 2.0 ** (20 * (np.arange(num_rows)[:, None] % 3 - 1))
    return jnp.asarray(x, jnp.bfloat16)


def gains(width: int):
    return jnp.asarray(1 + np.random.default_rng(5).standard_normal(width) / 4, jnp.bfloat16)


def struct(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower_for_hopper(fn, *shapes) -> str:
    text = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text  # a kernel, and not XLA's own operations
    return text


def run(x, w, tiles, *, leaf_len, out_dtype=jnp.float32, interpret=None):
    out = matmul(
        x,
        w,
        None,
        None,
        leaf_len=leaf_len,
        out_dtype=jnp.float32 if tiles.groups > 1 else out_dtype,
        tiles=tiles,
        interpret=interpret,
    )
    if tiles.groups == 1:
        return out
    return sm90._combine((out,), None, None, out_dtype=jnp.float32, interpret=interpret)


# --- without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", quick_and_slow((8,), (1, 13, 64, 128, 257, 1000, 8192)))
@pytest.mark.parametrize(
    "shape", quick_and_slow(GPU_SHAPES[:4], GPU_SHAPES[4:]), ids=lambda s: s.name
)
def test_chosen_tiles_lower(shape, num_rows):
    reduction = reduction_of(shape)
    x, w = struct((num_rows, shape.k_len)), struct((shape.num_outputs, shape.k_len))
    bias = struct((shape.num_outputs,))
    residual = struct((num_rows, shape.num_outputs))
    if not shape.is_row_parallel:
        for out_dtype in (BF16, F32):
            lower_for_hopper(lambda x, w, o=out_dtype: sm90.linear(x, w, None, out_dtype=o), x, w)
        lower_for_hopper(lambda x, w, b: sm90.linear(x, w, b, out_dtype=BF16), x, w, bias)
        return
    lower_for_hopper(lambda x, w: sm90.linear_partial(x, w, reduction=reduction), x, w)
    lower_for_hopper(
        lambda x, w, r: sm90.linear_add(x, w, r, None, reduction=reduction), x, w, residual
    )


@pytest.mark.parametrize("num_rows", quick_and_slow((13,), (1, 64, 100, 257, 1000, 4000)))
@pytest.mark.parametrize("name", quick_and_slow(tuple(GATED_WIDTHS)[:1], tuple(GATED_WIDTHS)[1:]))
def test_gated_tiles_lower(name, num_rows):
    x, w = struct((num_rows, 1024)), struct((2 * GATED_WIDTHS[name], 1024))
    lower_for_hopper(sm90.linear_swiglu, x, w)


@pytest.fixture
def norms_on(monkeypatch):
    """Products of up to 8 rows normalise their input, whether they do by default or not."""
    monkeypatch.setattr(sm90, "MAX_NORM_ROWS", 8)


@pytest.mark.parametrize("num_rows", quick_and_slow((8,), (1, 2, 5)))
@pytest.mark.parametrize("width", quick_and_slow((4096,), [w for w in NORM_WIDTHS if w != 4096]))
def test_products_that_normalise_lower(width, num_rows, norms_on):
    x, gain, bias = struct((num_rows, width)), struct((width,)), struct((1280,))
    w, w_gate_up = struct((1280, width)), struct((3584, width))
    assert sm90.normalises_input(num_rows, width)
    lower_for_hopper(
        lambda x, g, w, b: sm90.norm_linear(x, g, w, b, eps=EPS, out_dtype=BF16), x, gain, w, bias
    )
    lower_for_hopper(lambda x, g, w: sm90.norm_linear_swiglu(x, g, w, eps=EPS), x, gain, w_gate_up)


def test_few_wide_rows_are_normalised_by_the_next_product(norms_on, monkeypatch):
    """At most 8 rows, as wide as a warpgroup, after a sum that is one launch."""
    reduction = Reduction(num_leaves=8, leaf_len=512)

    def defers(num_rows, width):
        x, w = struct((num_rows, 4096)), struct((width, 4096))
        return sm90.defers_norm(x, w, reduction=reduction)

    assert defers(1, 4096) and defers(8, 5120)
    assert not defers(9, 4096)
    assert not defers(8, 2048)  # CTAs share its trees, so a launch must follow anyway
    assert not sm90.normalises_input(8, 576)  # half a warpgroup's width is over
    monkeypatch.setattr(sm90, "MAX_NORM_ROWS", 0)
    assert not defers(1, 4096)


@pytest.mark.parametrize("local_leaves", quick_and_slow((2,), (1, 4, 8)))
@pytest.mark.parametrize("num_rows", quick_and_slow((64,), (1, 512, 4096)))
def test_a_ranks_leaves_lower(num_rows, local_leaves):
    reduction = Reduction(num_leaves=8, leaf_len=1792)
    x, w = struct((num_rows, 1792 * local_leaves)), struct((4096, 1792 * local_leaves))
    lower_for_hopper(lambda x, w: sm90.linear_partial(x, w, reduction=reduction), x, w)


@pytest.mark.parametrize("leaf_len", quick_and_slow((1792,), (3200, 1376, 768, 112)))
def test_leaf_lengths_of_real_models_lower(leaf_len):
    reduction = Reduction(num_leaves=8, leaf_len=leaf_len)
    for num_rows in (8, 2048):
        x, w = struct((num_rows, 8 * leaf_len)), struct((2048, 8 * leaf_len))
        lower_for_hopper(lambda x, w: sm90.linear_partial(x, w, reduction=reduction), x, w)


@pytest.mark.parametrize(
    ("x", "w", "leaf_len", "error", "says"),
    [
        (((8, 128), jnp.bfloat16), ((64, 128), jnp.float32), 128, NotImplementedError, "float32"),
        (((8, 172), jnp.bfloat16), ((64, 172), jnp.bfloat16), 172, NotImplementedError, "172"),
        (((8, 128), jnp.bfloat16), ((60, 128), jnp.bfloat16), 128, NotImplementedError, "60"),
        (((8, 128), jnp.bfloat16), ((64, 64), jnp.bfloat16), 64, ValueError, "agree"),
        (((8, 144), jnp.bfloat16), ((64, 144), jnp.bfloat16), 128, ValueError, "144"),
    ],
)
def test_refuses_with_the_reason(x, w, leaf_len, error, says):
    with pytest.raises(error, match=says):
        sm90.check_supported(struct(*x), struct(*w), leaf_len=leaf_len)


@pytest.mark.parametrize("name", quick_and_slow(("tall", "flat"), VARIANTS))
def test_one_leaf_in_interpret_mode(name):
    tiles = VARIANTS[name]
    num_rows = 8 if tiles.cols == 8 else 72
    x, w = operands(num_rows, 192, 256)
    out = run(
        x,
        w,
        tiles,
        leaf_len=256,
        interpret=plgpu.InterpretGPUParams(),
    )
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    error = np.abs(np.asarray(out, np.float64) - want).max() / np.abs(want).max()
    assert error < 2.0**-16


def of_one_leaf(tiles):
    """The same tiles without what only a tree has."""
    if isinstance(tiles, TallTiles):
        tiles = dataclasses.replace(tiles, smem_levels=0)
    return dataclasses.replace(tiles, groups=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_and_slow(("tall", "flat_groups"), TREE_VARIANTS))
def test_tree_in_interpret_mode_equals_leaves_folded(name):
    """Interpret mode's wgmma is not the tensor core's, but its tree is the kernel's."""
    tiles = TREE_VARIANTS[name]
    x, w = operands(8, 128, 8 * 64)
    interpret = plgpu.InterpretGPUParams()
    leaves = [
        run(
            x[:, k : k + 64],
            w[:, k : k + 64],
            tiles=of_one_leaf(tiles),
            leaf_len=64,
            interpret=interpret,
        )
        for k in range(0, 512, 64)
    ]
    while len(leaves) > 1:
        leaves = [
            np.asarray(a) + np.asarray(b) for a, b in zip(leaves[0::2], leaves[1::2], strict=True)
        ]
    out = run(x, w, tiles, leaf_len=64, interpret=interpret)
    assert_bitwise_equal(out, leaves[0], claim="the kernel adds leaves as the perfect binary tree")


def test_combine_in_interpret_mode_equals_the_portable_tree():
    sums = np.random.default_rng(2).standard_normal((8, 3, 256)).astype(np.float32)
    out = sm90._combine(
        (jnp.asarray(sums),),
        None,
        None,
        out_dtype=jnp.float32,
        interpret=plgpu.InterpretGPUParams(),
    )
    while sums.shape[0] > 1:
        sums = sums[0::2] + sums[1::2]
    assert_bitwise_equal(out, sums[0], claim="combine continues the tree")


@pytest.mark.parametrize("num_rows", (1, 3))
def test_combine_takes_rows_that_are_no_whole_blocks(num_rows):
    """Rows of SmolLM2-135M have 576 channels: a block of 128 crosses the end of a row."""
    rng = np.random.default_rng(2)
    sums, residual = (
        jnp.asarray(rng.standard_normal((*lead, num_rows, 576)), jnp.float32) for lead in ((4,), ())
    )
    bias = jnp.asarray(rng.standard_normal(576), BF16)
    interpret = plgpu.InterpretGPUParams()
    out = sm90._combine((sums,), residual, bias, out_dtype=BF16, interpret=interpret)
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    want = (residual + (total + bias.astype(jnp.float32)[None])).astype(BF16)
    assert_bitwise_equal(out, want, claim="narrow rows are combined as the specification says")


@pytest.mark.parametrize("num_rows", [1, 200, 300, 4000])
def test_a_product_with_a_bias_and_22_tiles_and_a_half_lowers(num_rows):
    """The output projection of gpt-oss: 2880 outputs, each with a bias."""
    reduction = Reduction(num_leaves=8, leaf_len=512)
    shapes = ((num_rows, 4096), (2880, 4096), (num_rows, 2880), (2880,))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    run = functools.partial(sm90.linear_add, reduction=reduction)
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def small_integers(num_rows: int, num_out: int, k_len: int):
    """bf16 operands whose every sum is exact, in eighths."""
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-2, 3, (n, k_len)) for n in (num_rows, num_out))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w / 8, jnp.bfloat16)


def gated_in_float64(x, w):
    """SwiGLU of exact sums that are rounded to bfloat16."""
    sums = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    gate, up = np.split(np.asarray(jnp.asarray(sums, jnp.bfloat16), np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def assert_rounded(out, want):
    """Half an ulp of bfloat16, and 2**-20 for exp, division and product in float32."""
    assert out.dtype == BF16
    half_ulp = np.ldexp(1.0, np.frexp(want)[1] - 9)
    assert (np.abs(np.asarray(out, np.float64) - want) <= half_ulp + np.abs(want) * 2.0**-20).all()


@pytest.mark.parametrize("name", quick_and_slow(("tall",), GATED_VARIANTS))
def test_gated_tiles_in_interpret_mode(name):
    x, w = small_integers(72, 2 * 160, 256)
    out = matmul(
        x,
        w,
        None,
        None,
        leaf_len=256,
        out_dtype=BF16,
        tiles=GATED_VARIANTS[name],
        interpret=plgpu.InterpretGPUParams(),
    )
    assert_rounded(out, gated_in_float64(x, w))


def residual_added(sums, residual, bias=None):
    """What a sum in float32 leaves of the residual stream, by NumPy."""
    total = np.asarray(sums)
    if bias is not None:
        total = total + np.asarray(bias, np.float32)[None]
    return jnp.asarray(np.asarray(residual, np.float32) + total).astype(jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "cols"), quick_and_slow(((5, 8),), ((1, 8), (8, 8), (16, 16), (40, 40)))
)
def test_a_residual_of_swapped_tiles_in_interpret_mode(num_rows, cols, one_cta):
    x, w = operands(num_rows, 128, 8 * 64)
    tiles = dataclasses.replace(FLAT, cols=cols)
    residual, bias = uneven_rows(num_rows, 128), gains(128)
    interpret = plgpu.InterpretGPUParams()
    sums = run(x, w, tiles, leaf_len=64, interpret=interpret)
    for b in (None, bias):
        out = matmul(
            x, w, b, residual, leaf_len=64, out_dtype=BF16, tiles=tiles, interpret=interpret
        )
        want = residual_added(sums, residual, b)
        assert_bitwise_equal(out, want, claim="the tree, then bias, then residual, one rounding")


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", quick_and_slow((3,), (8,)))
@pytest.mark.parametrize(
    "name", quick_and_slow(("one_warpgroup", "gated", "copied"), HELD_VARIANTS)
)
def test_a_product_that_normalises_in_interpret_mode(name, num_rows, one_cta):
    """The bits of the norm and the product apart; shared memory starts as NaN."""
    tiles = HELD_VARIANTS[name]
    x, gain = uneven_rows(num_rows, 1024), gains(1024)
    _, w = operands(num_rows, 256, 1024)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    product = functools.partial(matmul, leaf_len=1024, out_dtype=BF16, interpret=interpret)
    plain = dataclasses.replace(tiles, held=None)
    want = product(rms_norm(x, gain, eps=EPS, interpret=True), w, None, None, tiles=plain)
    out = product(x, w, None, None, InputNorm(gain=gain, eps=EPS), tiles=tiles)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert_bitwise_equal(out, want, claim=f"{name}: normalised in the product's prologue")


@pytest.mark.slow
@pytest.mark.parametrize("width", quick_and_slow((896,), (2560,)))
def test_chunks_of_a_normalised_row_in_interpret_mode(width, one_cta):
    """One channel a thread, and four."""
    x, gain = uneven_rows(3, width), gains(width)
    _, w = operands(3, 64, width)
    interpret = plgpu.InterpretGPUParams()
    product = functools.partial(matmul, leaf_len=width, out_dtype=BF16, interpret=interpret)
    want = product(rms_norm(x, gain, eps=EPS, interpret=True), w, None, None, tiles=FLAT)
    for copies_rows in (False, True):
        tiles = held(width, helpers=2, copies_rows=copies_rows)
        out = product(x, w, None, None, InputNorm(gain=gain, eps=EPS), tiles=tiles)
        assert_bitwise_equal(out, want, claim=f"rows of {width} normalised, {copies_rows=}")


@pytest.fixture
def one_cta(monkeypatch):
    """Give every tile to one CTA, so that its ring runs on from tile to tile."""
    for kernel in (sm90_flat_matmul, sm90_tall_matmul):
        monkeypatch.setattr(kernel, "NUM_SMS", 1)
    matmul.clear_cache()
    yield
    matmul.clear_cache()


def test_gated_tiles_in_turn_in_interpret_mode(one_cta):
    x, w = small_integers(200, 2 * 96, 128)
    interpret = plgpu.InterpretGPUParams()
    out = matmul(
        x, w, None, None, leaf_len=128, out_dtype=BF16, tiles=GATED_TALL, interpret=interpret
    )
    assert_rounded(out, gated_in_float64(x, w))


@pytest.mark.slow
def test_residual_in_a_slot_in_interpret_mode(one_cta):
    """Residual and output pass through the ring: the same bits as through memory of their own."""
    x, w = operands(200, 192, 8 * 64)
    residual = jnp.asarray(operands(200, 192, 192)[0])
    outs = [
        matmul(
            x,
            w,
            None,
            residual,
            leaf_len=64,
            out_dtype=BF16,
            tiles=tiles,
            interpret=plgpu.InterpretGPUParams(),
        )
        for tiles in (IN_SLOT, dataclasses.replace(IN_SLOT, shares_slot=False, stages=4))
    ]
    assert_bitwise_equal(outs[0], outs[1], claim="where a residual waits changes no bit")


def test_tiles_refuse_nonsense():
    with pytest.raises(ValueError, match="cols=12"):
        FlatTiles(cols=12, stages=2)
    with pytest.raises(ValueError, match="k=48"):
        TallTiles(cols=64, k=48, stages=2)
    with pytest.raises(ValueError, match="num_wgs=3"):
        FlatTiles(cols=8, num_wgs=3, stages=2)
    with pytest.raises(ValueError, match="stages=1"):
        FlatTiles(cols=8, stages=1)
    with pytest.raises(ValueError, match="cols=8"):
        TallTiles(cols=8, stages=2, is_gated=True)
    with pytest.raises(ValueError, match="cols=96"):
        dataclasses.replace(IN_SLOT, cols=96)
    x, w = struct((8, 128)), struct((128, 128))
    with pytest.raises(ValueError, match="one leaf"):
        lower_for_hopper(lambda x, w: run(x, w, GATED_TALL, leaf_len=64), x, w)
    with pytest.raises(ValueError, match="residual"):
        lower_for_hopper(lambda x, w: run(x, w, IN_SLOT, leaf_len=64, out_dtype=BF16), x, w)
    with pytest.raises(ValueError, match="8 columns"):
        dataclasses.replace(HELD_FLAT, cols=16)
    with pytest.raises(ValueError, match="early_stages=1 are before rows"):
        HeldRows(channels=1024, copies_rows=True, early_stages=1)
    with pytest.raises(ValueError, match="early_stages=3 must be less than self.stages=3"):
        held(early_stages=3)
    with pytest.raises(ValueError, match="channels=1024"):
        lower_for_hopper(lambda x, w: run(x, w, HELD_FLAT, leaf_len=128), x, w)
    with pytest.raises(ValueError, match="read_row"):
        InputNorm(gain=None, eps=EPS, terms=(x,))

    def product(tiles):
        def call(x, gain, w):
            norm = InputNorm(gain=gain, eps=EPS)
            return matmul(x, w, None, None, norm, leaf_len=1024, out_dtype=BF16, tiles=tiles)

        return call

    gain, w = struct((1024,)), struct((128, 1024))
    with pytest.raises(ValueError, match="at most 8 rows, not 9"):
        lower_for_hopper(product(HELD_FLAT), struct((9, 1024)), gain, w)
    with pytest.raises(ValueError, match="num_sharers=3 of self.rows_each=3 would take more"):
        lower_for_hopper(product(held(helpers=2, copies_rows=True)), struct((8, 1024)), gain, w)
    with pytest.raises(ValueError, match="only flat tiles normalise"):
        lower_for_hopper(product(TALL), struct((8, 1024)), gain, w)


@pytest.mark.slow
def test_chosen_tiles_fit():
    """Every choice divides a leaf and fits in shared memory, whatever M is."""
    for shape in GPU_SHAPES:
        reduction = reduction_of(shape)
        of_shape = functools.partial(
            Product,
            num_out=shape.num_outputs,
            num_leaves=reduction.num_leaves,
            leaf_len=reduction.leaf_len,
        )
        kinds = [{"out_bytes": 4}, {"out_bytes": 2}]
        kinds += [{"out_bytes": 2, "has_residual" if shape.is_row_parallel else "is_gated": True}]
        for num_rows in (*range(1, 300), 512, 1000, 4096, 8192):
            for kind in kinds:
                tiles = choose_tiles(of_shape(num_rows=num_rows, **kind))
                assert reduction.leaf_len % tiles.k == 0
                assert reduction.num_leaves % tiles.groups == 0
                out_bytes = 4 if tiles.groups > 1 else kind["out_bytes"]
                has_residual = "has_residual" in kind and tiles.groups == 1
                used = smem_bytes(tiles, out_bytes=out_bytes, has_residual=has_residual)
                assert used <= SMEM_BYTES // tiles.ctas_per_sm
                assert tiles.stages >= 2


@pytest.mark.parametrize("num_out", [64, 128, 192, 320, 8512, 10304])
def test_no_choice_leaves_a_warpgroup_without_outputs(num_out):
    """What it stores would land in those of the first one (`flat_matmul`, `tall_matmul`)."""
    kinds = (
        {"out_bytes": 4}, {"out_bytes": 2}, {"out_bytes": 2, "has_bias": True},
        {"out_bytes": 2, "is_gated": True}, {"out_bytes": 2, "num_leaves": 4},
        {"out_bytes": 2, "num_leaves": 4, "has_residual": True},
        {"out_bytes": 2, "added": Added.ADAPTERS}, {"out_bytes": 2, "operands": OperandType.INT8},
        {"out_bytes": 2, "operands": OperandType.FLOAT8, "is_gated": True},
    )  # fmt: skip
    for num_rows in (*range(1, 300), 512, 1000, 4096):
        for kind in kinds:
            if "is_gated" in kind and num_out % 128:
                continue
            sizes = {"num_leaves": 1, "leaf_len": 512} | kind
            tiles = choose_tiles(Product(num_rows=num_rows, num_out=num_out, **sizes))
            if isinstance(tiles, FlatTiles):
                of_one, all_of_it = tiles.rows, num_out
            else:
                of_one, all_of_it = 64, num_rows
            assert all_of_it > (tiles.num_wgs - 1) * of_one, (num_rows, kind, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 33, 64, 65, 66, 71, 72, 73, 80, 128, 129, 200, 300])
def test_products_of_64_outputs_are_those_of_more(num_rows):
    """72 rows gave zeros: a second warpgroup, which had no weights, stored them."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal((n, 1024)), BF16) for n in (num_rows, 256))
    options = {"out_dtype": BF16}
    want = sm90.linear(x, w, None, **options)
    for first in (0, 64):
        got = sm90.linear(x, w[first : first + 64], None, **options)
        assert_bitwise_equal(got, want[:, first : first + 64], claim=f"{num_rows} rows")
    own = jnp.concatenate([w[:64], w[128:192]])
    gated, more = sm90.linear_swiglu(x, own), sm90.linear_swiglu(x, w)
    assert_bitwise_equal(gated, more[:, :64], claim=f"gates and ups of {num_rows} rows")


@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_tiles_of_products_that_normalise_fit(width):
    for num_rows in range(1, 9):
        for kind in ({"out_bytes": 2}, {"out_bytes": 4}, {"out_bytes": 2, "is_gated": True}):
            product = Product(
                num_rows=num_rows,
                num_out=28672,
                num_leaves=1,
                leaf_len=width,
                rows=Rows.NORMALISED,
                **kind,
            )
            tiles = choose_tiles(product)
            assert smem_bytes(tiles, out_bytes=kind["out_bytes"]) <= SMEM_BYTES
            assert isinstance(tiles, FlatTiles) and tiles.held is not None
            assert tiles.held.channels == width
            # Enough in flight, on 96 CTAs, for the device memory's rate times its latency.
            assert 96 * tiles.stages * tiles.stage_bytes() >= 7 << 20


# --- on a Hopper GPU -------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=lambda s: s.name)
def test_rows_are_batch_invariant(shape):
    """A row's bits: the same for every M, at every position, in any company."""
    reduction = reduction_of(shape)
    x, w = operands(max(ROWS), shape.num_outputs, shape.k_len)
    terms = np.asarray(x[:4], np.float32) * np.asarray(w[:4], np.float32)
    assert_order_sensitive(terms)
    x = np.asarray(x)

    def forward(x, w):
        if shape.is_row_parallel:
            return sm90.linear_partial(x, w, reduction=reduction)
        return sm90.linear(x, w, None, out_dtype=BF16)

    def compiled(num_rows):
        return jax.jit(forward).lower(struct((num_rows, shape.k_len)), w).compile()

    counts = EVERY_ROW_COUNT if shape.name in ("llama3_8b_qkv", "llama3_8b_o") else ROWS
    with concurrent.futures.ThreadPoolExecutor() as pool:
        products = dict(zip(counts, pool.map(compiled, counts), strict=True))
    full = np.asarray(products[max(ROWS)](x, w))
    for num_rows, product in products.items():
        claim = f"{shape.name}: rows of M={num_rows} equal those of M={max(ROWS)}"
        assert_bitwise_equal(product(x[:num_rows], w), full[:num_rows], claim=claim)
    order = np.random.default_rng(1).permutation(129)
    moved = products[129](x[order], w)
    assert_bitwise_equal(moved, full[order], claim="rows move with a permutation")
    for magnitude in (2.0**40, 2.0**-40):
        company = x[:64] * np.where(np.arange(64) == 7, 1, magnitude)[:, None].astype(BF16)
        got = np.asarray(products[64](company, w))[7]
        assert_bitwise_equal(got, full[7], claim=f"neighbours {magnitude} times as large")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("local_leaves", (1, 2, 4))
def test_tree_is_mesh_invariant(local_leaves):
    """Subtrees of 1, 2 and 4 leaves, added as the tree, equal the 8-leaf kernel."""
    k_len = 14336
    reduction = tree_reduction(k_len, PROFILE)
    share = reduction.leaf_len * local_leaves
    for num_rows in (1, 64, 300, 2048):
        x, w = operands(num_rows, 4096, k_len)
        parts = [
            np.asarray(
                sm90.linear_partial(x[:, k : k + share], w[:, k : k + share], reduction=reduction)
            )
            for k in range(0, k_len, share)
        ]
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=True)]
        assert_bitwise_equal(
            sm90.linear_partial(x, w, reduction=reduction),
            parts[0],
            claim=f"{local_leaves} leaves a rank and 8 give the same bits at M={num_rows}",
        )


@pytest.mark.gpu
@pytest.mark.invariance
def test_every_tile_gives_the_same_bits():
    x, w = operands(64, 2048, 4096)
    one = [
        np.asarray(run(x[:8] if t.cols == 8 else x, w, t, leaf_len=4096))[:8]
        for t in VARIANTS.values()
    ]
    for out in one[1:]:
        assert_bitwise_equal(out, one[0], claim="no tile changes a bit of a one-leaf product")
    tree = [
        np.asarray(run(x[:8] if t.cols == 8 else x, w, t, leaf_len=512))[:8]
        for t in TREE_VARIANTS.values()
    ]
    for out in tree[1:]:
        assert_bitwise_equal(out, tree[0], claim="no tile changes a bit of a tree")


def linear_then_swiglu(x, w):
    return sm90_swiglu.swiglu(sm90.linear(x, w, None, out_dtype=BF16))


@pytest.mark.gpu
@pytest.mark.invariance
def test_gating_in_registers_changes_no_bit():
    """One kernel, at every M, has the bits of the product and SwiGLU one after the other."""
    x, w = operands(4000, 2 * 3584, 4096)
    assert_order_sensitive(np.asarray(x[:4], np.float32) * np.asarray(w[:4], np.float32))
    want = np.asarray(jax.jit(linear_then_swiglu)(x, w))
    for num_rows in (*range(1, 18), 31, 64, 100, 128, 129, 256, 333, 1000, 2048, 4000):
        out = jax.jit(sm90.linear_swiglu)(x[:num_rows], w)
        assert_bitwise_equal(out, want[:num_rows], claim=f"M={num_rows}: gated in registers")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("name", GATED_VARIANTS)
def test_every_gated_tile_gives_the_same_bits(name):
    x, w = operands(300, 2 * 1408, 4096)
    tiles = GATED_VARIANTS[name]
    out = matmul(x, w, None, None, leaf_len=4096, out_dtype=BF16, tiles=tiles)
    assert_bitwise_equal(out, linear_then_swiglu(x, w), claim=f"{name}: gated in registers")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", (512, 1000, 4000))
def test_a_residual_in_a_slot_changes_no_bit(num_rows):
    x, w = operands(num_rows, 4096, 4096)
    residual = jnp.roll(x, 1, axis=0)
    product = functools.partial(matmul, x, w, None, residual, leaf_len=512, out_dtype=BF16)
    in_slot = product(tiles=IN_SLOT)
    apart = product(tiles=dataclasses.replace(IN_SLOT, shares_slot=False, stages=4))
    assert_bitwise_equal(in_slot, apart, claim="where a residual waits changes no bit")


def poison_memory():
    """Leave NaN in device memory that is free, and in the shared memory of every SM."""
    junk = jnp.full((1 << 28,), -1, jnp.int32)
    nan = jnp.full((28672, 4096), jnp.nan, jnp.bfloat16)
    out = sm90.linear(nan[:8], nan, None, out_dtype=BF16)
    jax.block_until_ready((junk, out))


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_a_norm_in_the_prologue_changes_no_bit(width):
    """At 1 to 8 rows: the bits of the norm, the product and SwiGLU in launches of their own."""
    _, w = operands(8, 7168, width)
    gain, bias = gains(width), gains(7168)

    @jax.jit
    def apart(x, w):
        x = rms_norm(x, gain, eps=EPS)
        return sm90.linear(x, w, bias, out_dtype=BF16), sm90.linear_swiglu(x, w)

    @jax.jit
    def together(x, w):
        product = sm90.norm_linear(x, gain, w, bias, eps=EPS, out_dtype=BF16)
        return product, sm90.norm_linear_swiglu(x, gain, w, eps=EPS)

    whole = uneven_rows(8, width)
    assert_order_sensitive(np.asarray(whole[:4], np.float32) ** 2)
    for num_rows in range(1, 9):
        x = whole[:num_rows]
        want = apart(x, w)
        poison_memory()
        for _ in range(5):
            for got, expected in zip(together(x, w), want, strict=True):
                assert_bitwise_equal(got, expected, claim=f"{width} wide, M={num_rows}")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("name", HELD_VARIANTS)
def test_every_tile_that_holds_rows_gives_the_same_bits(name):
    tiles = HELD_VARIANTS[name]
    assert tiles.held is not None
    rows = dataclasses.replace(tiles.held, channels=4096)
    tiles = dataclasses.replace(tiles, held=rows, stages=max(2, rows.early_stages + 1))
    _, w = operands(8, 28672, 4096)
    gain = gains(4096)
    for num_rows in (1, 3, 7, 8):
        x = uneven_rows(num_rows, 4096)
        norm = InputNorm(gain=gain, eps=EPS)
        out = matmul(x, w, None, None, norm, leaf_len=4096, out_dtype=BF16, tiles=tiles)
        x = rms_norm(x, gain, eps=EPS)
        apart = sm90.linear_swiglu(x, w) if tiles.is_gated else None
        want = sm90.linear(x, w, None, out_dtype=BF16) if apart is None else apart
        assert_bitwise_equal(out, want, claim=f"{name}, M={num_rows}")


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize(
    "shape", ((4096, 4096), (4096, 14336), (5120, 17408), (1024, 3072), (576, 1536), (576, 576))
)
def test_a_residual_in_the_epilogue_changes_no_bit(shape):
    """As the kernel adds that normalises. Widths of SmolLM2-135M are no multiple of 128."""
    num_out, k_len = shape
    reduction = tree_reduction(k_len, PROFILE)
    x, w = operands(200, num_out, k_len)
    residual, gain = uneven_rows(200, num_out), gains(num_out)
    for num_rows in (*range(1, 9), 64, 131, 200):
        args = x[:num_rows], w, residual[:num_rows]
        for bias in (None, gain):
            sums = sm90.linear_leaf_sums(*args[:2], reduction=reduction)
            want, _ = combine_add_rms_norm(sums, args[2], bias, gain, eps=EPS)
            poison_memory()
            got = sm90.linear_add(*args, bias, reduction=reduction)
            assert_bitwise_equal(got, want, claim=f"{shape}, M={num_rows}")


@pytest.mark.gpu
@pytest.mark.control
def test_another_order_differs():
    """The same numbers in another leaf count, and cuBLAS at small M, give other bits."""
    x, w = operands(64, 4096, 14336)
    eight = run(x, w, TALL, leaf_len=1792)
    four = run(x, w, TALL, leaf_len=3584)
    assert count_different_bits(eight, four)
    small, large = x[:1] @ w.T, jnp.concatenate([x] * 32) @ w.T
    assert count_different_bits(small[0], large[0])


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", (1.0, 2.0**-60, 2.0**-70, 2.0**-100, 2.0**-126))
def test_wgmma_sums_are_never_negative_zero(magnitude):
    """Why a node of the tree may start from zero or not: 0 + x is x for every sum x."""
    x = jnp.full((64, 128), magnitude, jnp.bfloat16)
    w = jnp.full((64, 128), -magnitude, jnp.bfloat16)
    for left in (x, jnp.zeros_like(x)):
        out = np.asarray(run(left, w, TALL, leaf_len=128))
        assert not (np.signbit(out) & (out == 0)).any()


@pytest.mark.gpu
def test_close_to_float64():
    """Within K * 2**-22 of the sum of magnitudes: wgmma truncates inside a k16 block."""
    x, w = operands(64, 4096, 4096)
    out = sm90.linear(x, w, None, out_dtype=F32)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    bound = (np.abs(x64) @ np.abs(w64).T) * 4096 / 16 * 2.0**-22
    assert (np.abs(np.asarray(out, np.float64) - x64 @ w64.T) <= bound).all()


@pytest.mark.gpu
def test_agrees_with_portable():
    """Two backends of one specification: close, not identical (another multiplier)."""
    x, w = operands(32, 2048, 4096)
    reduction = tree_reduction(4096, PROFILE)
    ours = np.asarray(sm90.linear_partial(x, w, reduction=reduction))
    with jax.default_device(jax.devices("cpu")[0]):
        theirs = np.asarray(portable.linear_partial(x, w, reduction=reduction))
    assert np.abs(ours - theirs).max() <= 2.0**-14 * np.abs(theirs).max()


@pytest.mark.parametrize("num_rows", [1, 2, 8])
@pytest.mark.parametrize(
    ("num_out", "width", "num_ctas"),
    [
        (28672, 4096, 112),  # 224 tiles of 128 weights would be a wave and a bit
        (14336, 4096, 112),  # one wave as it is, of a rank of two
        (16384, 2048, 128),  # one wave as it is
    ],
)
def test_gates_and_ups_of_few_rows_come_in_one_wave(num_rows, num_out, width, num_ctas):
    product = Product(
        num_rows=num_rows, num_out=num_out, num_leaves=1, leaf_len=width, out_bytes=2,
        is_gated=True, rows=Rows.NORMALISED,
    )  # fmt: skip
    tiles = choose_tiles(product)
    assert isinstance(tiles, FlatTiles)
    assert num_out // (tiles.rows * tiles.num_wgs) == num_ctas


@pytest.mark.parametrize(("num_rows", "num_ctas"), [(1, 296), (8, 148)])
def test_gates_and_ups_that_no_wave_has_stay_as_they_were(num_rows, num_ctas):
    product = Product(
        num_rows=num_rows, num_out=37888, num_leaves=1, leaf_len=3584, out_bytes=2, is_gated=True,
        rows=Rows.NORMALISED,
    )  # fmt: skip
    tiles = choose_tiles(product)
    assert isinstance(tiles, FlatTiles)
    assert 37888 // (tiles.rows * tiles.num_wgs) == num_ctas


@pytest.mark.parametrize(
    ("num_rows", "num_out", "is_flat", "cols"),
    [
        (64, 28672, False, 224),  # one wave of 128
        (64, 14336, True, 64),  # one wave of 112, flat
        (65, 14336, False, 128),  # one wave of 112; of 224 columns it would be half of one
        (128, 28672, False, 224),
    ],
)
def test_gates_and_ups_of_more_rows_waste_little_of_a_wave(num_rows, num_out, is_flat, cols):
    product = Product(
        num_rows=num_rows, num_out=num_out, num_leaves=1, leaf_len=4096, out_bytes=2, is_gated=True
    )
    tiles = choose_tiles(product)
    assert (isinstance(tiles, FlatTiles), tiles.cols) == (is_flat, cols)
