# SPDX-License-Identifier: Apache-2.0
"""A product of codes has the bits of the product of the matrix that they stand for."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.linear import sm90, sm90_flat_matmul
from detjax.pallas_kernels.linear.quantized import (
    SCALE_LIMITS,
    CodeType,
    QuantizedMatrix,
    are_small,
    can_pack,
    pack_codes,
    unpack_codes,
)
from detjax.pallas_kernels.linear.sm90_expand import expand
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import FlatTiles, Product, choose_tiles, smem_bytes
from detjax.pallas_kernels.rms_norm.sm90 import combine_add_rms_norm
from detjax.pallas_kernels.sm90_hardware import SMEM_BYTES
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
PROFILE, EPS = NumericsProfile(), 1e-5
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
KINDS = {
    "int4": (CodeType.INT4, 128, BF16, False, (0.001, 0.03)),
    "int4_zeros": (CodeType.INT4, 32, BF16, True, (0.001, 0.03)),
    "int4_float32": (CodeType.INT4, 64, F32, True, (0.001, 0.03)),
    "int4_any_scale": (CodeType.INT4, 128, BF16, False, (-0.5, 0.5)),
    "int8": (CodeType.INT8, 0, BF16, False, (0.001, 0.03)),
    "int8_any_scale": (CodeType.INT8, 128, BF16, False, (-0.5, 0.5)),
    "int8_float32": (CodeType.INT8, 0, F32, False, (0.001, 0.03)),
    "float8": (CodeType.FLOAT8, 0, BF16, False, (0.001, 0.03)),
    "float8_any_scale": (CodeType.FLOAT8, 16, BF16, False, (-0.5, 0.5)),
    "float8_float32": (CodeType.FLOAT8, 128, F32, False, (0.001, 0.03)),
}


def plain(kind: str, shape: tuple[int, int], tiny: float = 2.0**-90) -> tuple:
    """What `packed` takes: random codes, scales and zero points; every code is there.

    XLA flushes subnormal numbers on a CPU, so `tiny` is a normal one there.
    """
    code_type, group_len, dtype, has_zeros, (low, high) = KINDS[kind]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << code_type.num_bits, shape, dtype=np.uint8)
    if code_type is CodeType.FLOAT8:
        codes[codes & 0x7F == 0x7F] = 0x35
    num_groups = shape[1] // group_len if group_len else 1
    scales = rng.uniform(low, high, (shape[0], num_groups)).astype(dtype)
    if low < 0:
        scales[::5, 0] = np.resize([0, -0.0, tiny, 200, -3], len(scales[::5]))
    zeros = rng.integers(0, 17, scales.shape) if has_zeros else None
    return codes, scales, zeros, code_type, group_len


def packed(codes, scales, zeros, code_type: CodeType, group_len: int) -> QuantizedMatrix:
    """A matrix of plain arrays: codes uint8 [N, K], scales [N, G], zero points likewise or None."""
    return QuantizedMatrix(
        codes=jnp.asarray(pack_codes(codes, code_type)),
        scales=jnp.asarray(scales.T),
        zeros=None if zeros is None else jnp.asarray(zeros.T, BF16),
        code_type=code_type,
        group_len=group_len,
        has_small_scales=are_small(scales),
    )


def drawn(kind: str, shape: tuple[int, int], **options) -> QuantizedMatrix:
    return packed(*plain(kind, shape, **options))


def by_numpy(kind: str, shape: tuple[int, int], **options) -> np.ndarray:
    """The expansion, from the definition."""
    codes, scales, zeros, code_type, _ = plain(kind, shape, **options)
    if code_type is CodeType.FLOAT8:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        middle = np.full_like(scales, code_type.middle, np.int32) if zeros is None else zeros
        values = codes.astype(np.float32) - np.repeat(middle, shape[1] // middle.shape[1], axis=1)
    factors = np.repeat(scales.astype(np.float32), shape[1] // scales.shape[1], axis=1)
    return (values * factors).astype(ml_dtypes.bfloat16)


# --- without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("code_type", CodeType)
def test_codes_come_back(code_type):
    codes = np.random.default_rng(1).integers(
        0, 1 << code_type.num_bits, (192, 128), dtype=np.uint8
    )
    if code_type is CodeType.FLOAT8:
        codes &= 0xBF
    found = np.asarray(unpack_codes(pack_codes(codes, code_type), code_type))
    want = codes.view(ml_dtypes.float8_e4m3fn) if code_type is CodeType.FLOAT8 else codes
    assert np.array_equal(found, want.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_an_expansion_is_what_the_definition_says(kind):
    matrix = drawn(kind, (128, 256))
    assert matrix.shape == (128, 256) and matrix.dtype == BF16
    want = by_numpy(kind, (128, 256))
    assert_bitwise_equal(matrix.expand(), want, claim="the expansion")
    assert_bitwise_equal(jax.jit(QuantizedMatrix.expand)(matrix), want, claim="compiled by XLA")
    assert matrix.has_small_scales == (KINDS[kind][4][0] > 0)


def test_small_scales_are_told_by_their_limits():
    low, high = SCALE_LIMITS
    for scale, is_small in (
        (low, True), (np.nextafter(np.float32(high), np.float32(0)), True), (high, False),
        (low / 2, False), (0, False), (-0.01, False),
    ):  # fmt: skip
        assert are_small(np.float32([high / 2, scale])) == is_small


@pytest.mark.parametrize(
    ("shape", "group_len", "fits"),
    [
        ((64, 64), 0, True), ((64, 128), 16, True), ((128, 256), 256, True), ((96, 64), 0, False),
        ((64, 96), 0, False), ((64, 64), 8, False), ((64, 192), 96, False), ((64, 64), 128, False),
    ],
)  # fmt: skip
def test_what_can_be_packed(shape, group_len, fits):
    assert can_pack(shape, group_len) == fits


@pytest.fixture
def one_cta(monkeypatch):
    """Give every tile to one CTA: interpretation runs CTAs side by side on few threads."""
    monkeypatch.setattr(sm90_flat_matmul, "NUM_SMS", 1)
    matmul.clear_cache()
    yield
    matmul.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "leaf_len", "tiles"),
    [
        ("int4", 256, FlatTiles(cols=8, stages=2, k=64)),
        ("int4_float32", 128, FlatTiles(cols=8, stages=2, k=128, groups=2)),
        ("int8", 256, FlatTiles(cols=8, stages=3, k=64, is_gated=True, num_wgs=2)),
        ("float8_float32", 256, FlatTiles(cols=8, stages=2, k=256)),
    ],
)
def test_a_product_of_codes_in_interpret_mode(kind, leaf_len, tiles, one_cta):
    # Whole numbers and powers of two: a CPU's product rounds by place.
    code_type, group_len, dtype, has_zeros, _ = KINDS[kind]
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 1 << code_type.num_bits, (256, 256), dtype=np.uint8)
    if code_type is CodeType.FLOAT8:
        codes = rng.integers(-4, 5, codes.shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    shape = (256, 256 // group_len if group_len else 1)
    scales = (2.0 ** rng.integers(-8, -6, shape)).astype(dtype)
    zeros = rng.integers(0, 17, shape) if has_zeros else None
    matrix = packed(codes, scales, zeros, code_type, group_len)
    x = jnp.asarray(rng.integers(-8, 9, (5, 256)), BF16)
    run = functools.partial(
        matmul, leaf_len=leaf_len, out_dtype=BF16 if tiles.is_gated else F32, interpret=INTERPRET
    )
    out = run(x, matrix, None, None, tiles=dataclasses.replace(tiles, coding=matrix.coding))
    want = run(x, matrix.expand(), None, None, tiles=tiles)
    assert_bitwise_equal(out, want, claim="codes are the weights that they stand for")
    assert np.abs(np.asarray(want, np.float32)).max() > 0


def unadded(num_rows: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Subtrees, and a residual stream that nearly cancels them, so that the sum shows its order."""
    rng = np.random.default_rng(4)
    size = (4, num_rows, width)
    leaves = rng.normal(size=size) * np.exp(rng.normal(size=size))
    return jnp.asarray(leaves, F32), jnp.asarray(-leaves.sum(0), BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_rows", "is_gated"),
    [("int4", 1, False), ("int4", 2, True), ("int8", 1, True), ("int4_zeros", 2, False)],
)
def test_a_product_of_codes_adds_and_normalises_in_interpret_mode(
    kind, num_rows, is_gated, one_cta
):
    """The bits of two launches: one that adds and normalises, and one that multiplies."""
    width = 512
    matrix, gain = drawn(kind, (256, width)), jnp.asarray(np.linspace(0.5, 2, width), BF16)
    leaves, residual = unadded(num_rows, width)
    options: dict = {"eps": EPS, "out_dtype": BF16, "is_gated": is_gated}
    found = sm90.combine_norm_linear(leaves, residual, gain, matrix, interpret=INTERPRET, **options)
    two = {"eps": EPS, "interpret": True}
    total, x = combine_add_rms_norm(leaves, residual, None, gain, **two)
    plain = FlatTiles(
        cols=8, k=64 if is_gated else 256, stages=2, is_gated=is_gated, coding=matrix.coding
    )
    product = matmul(
        x, matrix, None, None, leaf_len=width, out_dtype=BF16, tiles=plain, interpret=INTERPRET
    )
    for a, b, what in zip(found, (product, total, x), ("product", "stream", "rows"), strict=True):
        assert_bitwise_equal(a, b, claim=f"{what}: added and normalised in the product's launch")
    # Subtrees in another order are another tree.
    other, _ = combine_add_rms_norm(leaves[jnp.array([0, 2, 1, 3])], residual, None, gain, **two)
    assert count_different_bits(other, total)


def test_few_rows_of_codes_are_added_where_they_are_multiplied(monkeypatch):
    """One launch for each product, and one more where registers would not do."""

    def names(num_rows: int, *, width: int = 512, is_gated=False, kind="int4") -> list[str]:
        matrix = drawn(kind, (256, width))
        leaves, residual = unadded(num_rows, width)
        run = functools.partial(
            sm90.combine_norm_linear, eps=EPS, out_dtype=BF16, is_gated=is_gated
        )
        jaxpr = jax.make_jaxpr(run)(leaves, residual, jnp.ones(width, BF16), matrix)
        return re.findall(r"name=(detjax_\w+)", str(jaxpr))

    for is_gated, product in ((False, "detjax_linear"), (True, "detjax_linear_swiglu")):
        assert names(2, is_gated=is_gated) == [product]
        assert names(3, is_gated=is_gated) == ["detjax_rms_norm_wide", product]
    two_launches = ["detjax_rms_norm_wide", "detjax_linear"]
    assert names(1, width=6144) == names(1, width=5120, kind="int4_zeros") == two_launches
    assert names(1, width=5120) == names(1, kind="int4_zeros") == ["detjax_linear"]
    for name, most in (("MAX_SUBTREES_BY_CODES", 3), ("MAX_ROWS_BY_CODES", 0)):
        assert names(1) == ["detjax_linear"]
        with monkeypatch.context() as patch:
            patch.setattr(sm90, name, most)
            assert names(1) == two_launches


def test_tiles_and_weights_must_be_of_one_coding():
    matrix = drawn("int4", (64, 128))
    with pytest.raises(ValueError, match="need tiles of the same, not None"):
        matmul(
            jnp.zeros((8, 128), BF16), matrix, None, None, leaf_len=128, out_dtype=F32,
            tiles=FlatTiles(cols=8, stages=2),
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 64, 65, 128, 300, 512])
def test_tiles_of_codes_fit_the_memory(kind, num_rows):
    coding = drawn(kind, (64, 128)).coding
    for num_out, k_len, leaves in ((6144, 4096, 1), (4096, 14336, 8), (57344, 8192, 1)):
        product = Product(
            num_rows=num_rows, num_out=num_out, num_leaves=leaves, leaf_len=k_len // leaves,
            out_bytes=4, is_gated=num_out == 57344, coding=coding,
        )  # fmt: skip
        tiles = choose_tiles(product)
        assert isinstance(tiles, FlatTiles) and tiles.coding == coding
        assert smem_bytes(tiles, out_bytes=4) <= SMEM_BYTES // tiles.ctas_per_sm


# --- on a Hopper GPU -------------------------------------------------------------------------

ROWS = (1, 8, 9, 64, 65, 300, 513)
SHAPES = {"qkv": (1536, 1024), "o": (1024, 1024), "gate_up": (4096, 1024), "down": (1024, 2048)}


def products(name: str, x, w, residual, gain) -> list:
    """The operations of a layer that read a matrix."""
    if name in ("o", "down"):
        reduction = tree_reduction(w.shape[1], PROFILE)
        out = sm90.linear_partial(x, w, reduction=reduction)
        added = sm90.linear_add(x, w, residual, None, reduction=reduction)
        both = sm90.linear_add_rms_norm(x, w, residual, None, gain, reduction=reduction, eps=EPS)
        return [out, added, *both]
    norm = jnp.ones(x.shape[1], BF16)
    if name == "gate_up":
        return [sm90.linear_swiglu(x, w), sm90.norm_linear_swiglu(x, norm, w, eps=EPS)]
    return [
        sm90.linear(x, w, None, out_dtype=BF16),
        sm90.norm_linear(x, norm, w, None, eps=EPS, out_dtype=BF16),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_expands_as_the_definition_says(kind):
    matrix = drawn(kind, (512, 1024), tiny=2.0**-130)
    want = by_numpy(kind, (512, 1024), tiny=2.0**-130)
    assert_bitwise_equal(expand(matrix), want, claim="widened in registers")
    assert_bitwise_equal(jax.jit(QuantizedMatrix.expand)(matrix), want, claim="by XLA")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_codes_on_a_gpu(kind, name):
    shape = SHAPES[name]
    matrix = drawn(kind, shape)
    if KINDS[kind][4][0] < 0:  # finite sums
        matrix = dataclasses.replace(matrix, scales=jnp.clip(matrix.scales, -0.5, 0.5))
    plain_matrix = matrix.expand()
    rng = np.random.default_rng(3)
    xs = jnp.asarray(rng.normal(size=(max(ROWS), shape[1])), BF16)
    residual = jnp.asarray(rng.normal(size=(max(ROWS), shape[0])), BF16)
    gain = jnp.asarray(rng.normal(size=shape[0]), BF16)
    run = jax.jit(functools.partial(products, name))
    wholes = run(xs, plain_matrix, residual, gain)
    for rows in ROWS:
        operands = xs[:rows], residual[:rows], gain
        found = run(operands[0], matrix, *operands[1:])
        for a, whole in zip(found, wholes, strict=True):
            want = whole[..., :rows, :]
            assert_bitwise_equal(a, want, claim=f"{rows} rows of codes")
    # Codes that are one off are seen.
    other = dataclasses.replace(matrix, codes=matrix.codes ^ 0x01010101)
    assert count_different_bits(run(xs[:8], other, residual[:8], gain)[0], wholes[0][..., :8, :])


@pytest.mark.gpu
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_codes_add_and_normalise_on_a_gpu(kind, is_gated):
    """The bits of two launches at every number of rows; rows alone have the bits of rows together.

    Sizes at which warpgroups help (several rows), and at which a row is several chunks.
    """
    width = 2048
    matrix = drawn(kind, (1024, width))
    if KINDS[kind][4][0] < 0:  # finite sums
        matrix = dataclasses.replace(matrix, scales=jnp.clip(matrix.scales, -0.5, 0.5))
    gain = jnp.asarray(np.linspace(0.5, 2, width), BF16)
    leaves, residual = unadded(8, width)

    @jax.jit
    def one_launch(leaves, residual):
        return sm90.combine_norm_linear(
            leaves, residual, gain, matrix, eps=EPS, out_dtype=BF16, is_gated=is_gated
        )

    @jax.jit
    def two_launches(leaves, residual):
        total, x = combine_add_rms_norm(leaves, residual, None, gain, eps=EPS)
        product = (
            sm90.linear_swiglu
            if is_gated
            else functools.partial(sm90.linear, bias=None, out_dtype=BF16)
        )
        return product(x, matrix), total, x

    whole = two_launches(leaves, residual)
    for rows in range(1, 9):
        found = one_launch(leaves[:, :rows], residual[:rows])
        for a, want in zip(found, whole, strict=True):
            assert_bitwise_equal(a, want[:rows], claim=f"{rows} rows added and normalised")
    other = one_launch(leaves[jnp.array([0, 2, 1, 3])][:, :2], residual[:2])
    assert count_different_bits(other[1], whole[1][:2])
