# SPDX-License-Identifier: Apache-2.0
"""8-bit activations times 8-bit weights: no batch and no tile changes a bit; of int8, no order."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels import tensor_core
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear import (
    sm90_flat_matmul,
    sm90_quantize_rows,
    sm90_tall_matmul,
    sm90_w8a8,
    w8a8,
)
from detjax.pallas_kernels.linear.api import (
    linear,
    linear_add,
    linear_add_rms_norm,
    linear_partial,
    linear_swiglu,
    norm_linear,
    norm_linear_swiglu,
)
from detjax.pallas_kernels.linear.quantized import (
    FLOAT8_CHUNK,
    LARGEST,
    QuantizedRows,
    RowCoding,
    RowsToQuantize,
    W8A8Matrix,
    operands_of,
)
from detjax.pallas_kernels.linear.sm90_flat_matmul import InputNorm
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import (
    QUANTIZED_VALUES,
    FlatTiles,
    HeldRows,
    OperandType,
    Product,
    Rows,
    TallTiles,
    choose_tiles,
    smem_bytes,
)
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.pallas_kernels.sm90_hardware import SMEM_BYTES
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.parallel.mesh import make_mesh
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits
from detjax.testing.cases import quick_and_slow

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
INT8, FLOAT8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)
BLOCKS = "blocks"
"""float8 with scales of groups of 128 channels, and of blocks of weights."""
KINDS = [INT8, FLOAT8, BLOCKS]
DTYPES = [INT8, FLOAT8]
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
EPS = 1e-5
REDUCTION = tree_reduction(1024, NumericsProfile())
"""Of no account here: integers need no leaves."""
BACKENDS = [
    Backend.REFERENCE,
    pytest.param(Backend.PORTABLE, marks=pytest.mark.slow),
    pytest.param(Backend.SM90, marks=pytest.mark.gpu),
]


def drawn_rows(num_rows: int, width: int) -> np.ndarray:
    """Rows of several sizes: of zeros, tiny, with ties, and with a peak of each sign."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(num_rows, width)) * 2.0 ** rng.integers(-20, 20, (num_rows, 1))
    rows[0, : width // 2] = np.arange(width // 2) % 255 - 127  # each integer, as a peak is 127
    if num_rows > 4:
        rows[1] = 0
        rows[2] *= 2.0**-90
        rows[3, 5] = -np.abs(rows[3]).max() * 3
        rows[4, : width // 2] = (np.arange(width // 2) % 254 - 126.5) / 2
        rows[4, -1] = 63.5
    return rows.astype(ml_dtypes.bfloat16)


def operands_of_kind(kind) -> OperandType:
    return OperandType.FLOAT8_BLOCKS if kind == BLOCKS else OperandType(kind.name)


def dtype_of(kind) -> jnp.dtype:
    return FLOAT8 if kind == BLOCKS else kind


def coding_of(kind) -> RowCoding:
    return RowCoding(dtype=dtype_of(kind), group_len=FLOAT8_CHUNK if kind == BLOCKS else 0)


def drawn_weights(shape: tuple[int, int], kind=INT8, *, block_rows: int = 64) -> W8A8Matrix:
    rng = np.random.default_rng(1)
    values = rng.integers(-128, 128, shape, dtype=np.int8)
    if kind != INT8:
        values = (rng.normal(size=shape) * 2.0 ** rng.integers(-4, 6, shape)).clip(-448, 448)
        values = values.astype(ml_dtypes.float8_e4m3fn)
    size = (shape[0] // block_rows, shape[1] // FLOAT8_CHUNK) if kind == BLOCKS else shape[:1]
    scales = rng.uniform(0.001, 0.01, size).astype(np.float32)
    return W8A8Matrix(values=jnp.asarray(values), scales=jnp.asarray(scales))


def narrowed(scaled: np.ndarray, dtype) -> np.ndarray:
    if dtype == FLOAT8:
        return scaled.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return np.rint(scaled).clip(-128, 127).astype(np.int8)


def by_numpy(rows: np.ndarray, kind=INT8, bound=np.inf) -> tuple[np.ndarray, np.ndarray]:
    """Quantised rows and their scales, from the definition: [M], or [M, G] of blocks."""
    wide, largest = rows.astype(np.float32), np.float32(LARGEST[dtype_of(kind).name])
    if kind == BLOCKS:
        groups, scales = by_numpy(rows.reshape(-1, FLOAT8_CHUNK), FLOAT8)
        return groups.reshape(rows.shape), scales.reshape(len(rows), -1)
    peak = np.minimum(np.abs(wide).max(axis=1), np.float32(bound))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = largest / peak
    scaled = wide * np.where(np.isinf(inverse), np.float32(0), inverse)[:, None]
    return narrowed(scaled, kind), peak / largest


def float8_chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What wgmma adds of float8 products, 32 channels a step, from 0: [M, K] by [N, K].

    A step's products and the accumulator are aligned to the largest exponent, truncated at 13
    fraction bits and added exactly. The sum is truncated to 13 fraction bits (arXiv:2511.10909).
    """
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    total = np.zeros((len(a), len(b)))
    for start in range(0, a.shape[1], 32):
        columns = slice(start, start + 32)
        x, y = wide_a[:, None, columns], wide_b[None, :, columns]
        products = x * y
        # Exponents of operands as they are stored: -6 is the least, also of subnormal numbers.
        exponents = sum(np.maximum(np.frexp(it)[1] - 1, -6) for it in (x, y))
        largest = np.where(products == 0, -999, exponents).max(axis=2)
        largest = np.maximum(largest, np.where(total == 0, -999, np.frexp(total)[1] - 1))
        unit = 2.0 ** (np.where(largest == -999, 0, largest) - 13)
        total = np.trunc(products / unit[:, :, None]).sum(axis=2) + np.trunc(total / unit)
        mantissa, exponent = np.frexp(total * unit)
        total = np.ldexp(np.trunc(mantissa * 2.0**14), exponent - 14)
    return total.astype(np.float32)


def blocks_by_numpy(values: np.ndarray, scales: np.ndarray, w: W8A8Matrix) -> np.ndarray:
    """Chunks with scales, left to right by fma: a float64 has the whole product of float32."""
    weights, total = np.asarray(w.values), np.zeros((len(values), w.shape[0]), np.float32)
    of_weights = np.repeat(np.asarray(w.scales), w.block_rows, axis=0)
    for group in range(w.shape[1] // FLOAT8_CHUNK):
        columns = slice(group * FLOAT8_CHUNK, (group + 1) * FLOAT8_CHUNK)
        chunk = float8_chain(values[:, columns], weights[:, columns])
        scale = scales[:, group, None] * of_weights[None, :, group]
        assert scale.dtype == np.float32
        total = fma(chunk, scale, total)
    return total


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """`a * b + c` in float32, rounded once: the float64 sum is made odd where it is not exact."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # exact
    total = product + c
    other = total - product
    error = (product - (total - other)) + (c - other)
    is_even = total.view(np.int64) & 1 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & is_even, np.nextafter(total, toward), total)
    return odd.astype(np.float32)


def product_by_numpy(rows: np.ndarray, w: W8A8Matrix, bias=None, residual=None) -> np.ndarray:
    """The product, from the definition: float32."""
    weights = np.asarray(w.values)
    values, scales = by_numpy(rows, BLOCKS if w.group_len else w.values.dtype)
    if w.group_len:
        total = blocks_by_numpy(values, scales, w)
    elif w.values.dtype == INT8:
        sums = (values.astype(np.int64) @ weights.astype(np.int64).T).astype(np.float32)
    else:
        sums = np.zeros((len(values), len(weights)), np.float32)
        to_chunks = (0, 0), (0, -values.shape[1] % FLOAT8_CHUNK)
        values, weights = np.pad(values, to_chunks), np.pad(weights, to_chunks)
        for at in range(0, values.shape[1], FLOAT8_CHUNK):
            columns = slice(at, at + FLOAT8_CHUNK)
            sums += float8_chain(values[:, columns], weights[:, columns])
    if not w.group_len:
        total = scales[:, None] * (np.asarray(w.scales)[None] * sums)
    if bias is not None:
        total = total + np.asarray(bias).astype(np.float32)[None]
    return total if residual is None else np.asarray(residual).astype(np.float32) + total


@pytest.fixture
def one_cta(monkeypatch):
    """Give every tile to one CTA: interpretation runs CTAs side by side on few threads."""
    for module in (sm90_flat_matmul, sm90_tall_matmul):
        monkeypatch.setattr(module, "NUM_SMS", 1)
    matmul.clear_cache()
    yield
    matmul.clear_cache()


# ----------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", quick_and_slow([512, 4096], [14336]))
def test_rows_are_quantised_as_the_definition_says(backend, dtype, width):
    rows = drawn_rows(19, width)
    values, scales = by_numpy(rows, dtype)
    found = w8a8.quantize_rows(jnp.asarray(rows), coding_of(dtype), backend=backend)
    assert_bitwise_equal(found.values, values, claim="8-bit values")
    assert_bitwise_equal(found.scales[..., : len(rows)].T, scales, claim="scales")
    assert np.abs(values.astype(np.float32)).max() == LARGEST[dtype_of(dtype).name]
    assert (values[1].view(np.uint8) == 0).all() and (scales[1] == 0).all()


BOUNDED = [*BACKENDS, "interpreted"]


@pytest.mark.parametrize("backend", BOUNDED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bound_and_a_given_scale_take_the_place_of_a_row_s_peak(backend, dtype):
    rows = drawn_rows(9, 512)
    peaks = np.abs(rows.astype(np.float32)).max(axis=1)
    bound, scale = float(np.float32(np.median(peaks))), np.float32(0.3)
    codings = [
        RowCoding(dtype=dtype, bound=bound),
        RowCoding(dtype=dtype, scale=jnp.asarray(scale)),
    ]
    wants = [
        by_numpy(rows, dtype, bound),
        (narrowed(rows.astype(np.float32) * (1 / scale), dtype), np.full(9, scale)),
    ]
    assert (peaks > bound).any() and (peaks < bound).any()
    for coding, (values, scales) in zip(codings, wants, strict=True):
        if backend == "interpreted":
            found = sm90_quantize_rows.quantize_rows(jnp.asarray(rows), coding, interpret=True)
        else:
            found = w8a8.quantize_rows(jnp.asarray(rows), coding, backend=backend)
        assert_bitwise_equal(found.values, values, claim="8-bit values")
        assert_bitwise_equal(found.scales[:9], scales, claim="scales")
    with pytest.raises(ValueError, match="groups of channels have scales of their own"):
        coding = RowCoding(dtype=FLOAT8, group_len=FLOAT8_CHUNK, bound=1.0)
        w8a8.quantize_rows(jnp.asarray(rows), coding, backend=Backend.PORTABLE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_quotients_in_programs_of_several_devices(dtype):
    """XLA makes a division by a scalar a product with its reciprocal in such programs."""
    rows = drawn_rows(512, 256)
    peaks = np.abs(rows.astype(np.float32)).max(axis=1)
    largest = np.float32(LARGEST[dtype.name])
    quotients = peaks / largest
    step = jax.shard_map(
        lambda x: w8a8.quantize_rows(x, coding_of(dtype), backend=Backend.PORTABLE).scales,
        mesh=make_mesh(1, 2), in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    found = jax.jit(step)(jnp.asarray(rows))
    assert_bitwise_equal(found, quotients, claim="scales on two devices")
    # The comparison can fail.
    assert count_different_bits(peaks * (np.float32(1) / largest), quotients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", KINDS)
def test_a_row_that_is_not_finite_gives_nan_and_its_neighbours_do_not(backend, dtype):
    rows = drawn_rows(3, 512)
    rows[0, 3], rows[1, 4] = np.nan, -np.inf
    rows[2] = np.where(np.isfinite(rows[2]), rows[2], 1)
    w = drawn_weights((64, 512), dtype)
    out = linear(jnp.asarray(rows), w, out_dtype=F32, backend=backend)
    is_nan = np.isnan(np.asarray(out))
    assert is_nan[:2].all() and not is_nan[2].any()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (Backend.REFERENCE, INT8),
        (Backend.REFERENCE, FLOAT8),
        (Backend.REFERENCE, BLOCKS),
        pytest.param(Backend.PORTABLE, INT8, marks=pytest.mark.slow),
        pytest.param(Backend.SM90, INT8, marks=pytest.mark.gpu),
        pytest.param(Backend.SM90, FLOAT8, marks=pytest.mark.gpu),
        pytest.param(Backend.SM90, BLOCKS, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("num_rows", quick_and_slow([9], [1, 65]))
def test_a_product_is_what_the_definition_says(backend, dtype, num_rows):
    rows, w = drawn_rows(num_rows, 1024), drawn_weights((192, 1024), dtype)
    want = product_by_numpy(rows, w)
    found = linear(jnp.asarray(rows), w, out_dtype=F32, backend=backend)
    assert_bitwise_equal(found, want, claim="scaled sums")
    found = linear(jnp.asarray(rows), w, out_dtype=BF16, backend=backend)
    assert_bitwise_equal(found, want.astype(ml_dtypes.bfloat16), claim="rounded once")


@pytest.mark.parametrize("width", [576, 200])
def test_the_last_chunk_of_float8_may_be_short(width):
    rows, w = drawn_rows(9, width), drawn_weights((64, width), FLOAT8)
    want = product_by_numpy(rows, w)
    found = linear(jnp.asarray(rows), w, out_dtype=F32, backend=Backend.REFERENCE)
    assert_bitwise_equal(found, want, claim="scaled sums")
    values, scales = by_numpy(rows, FLOAT8)
    sums = tensor_core.float8_product(values, np.asarray(w.values))
    by_page = scales[:, None] * (np.asarray(w.scales)[None] * sums)
    assert_bitwise_equal(by_page, want, claim="the definition that one reads")
    # A short chunk in front, instead of behind, has other bits.
    in_front = np.pad(np.asarray(w.values), ((0, 0), (-width % FLOAT8_CHUNK, 0)))
    values = np.pad(values, ((0, 0), (-width % FLOAT8_CHUNK, 0)))
    assert count_different_bits(tensor_core.float8_product(values, in_front), sums)


def test_the_chain_of_float8_products_is_not_their_float32_sum():
    values, w = by_numpy(drawn_rows(9, 128), FLOAT8)[0], drawn_weights((64, 128), FLOAT8)
    weights = np.asarray(w.values)
    wide = values.astype(np.float32) @ weights.astype(np.float32).T
    chain = float8_chain(values, weights)
    assert count_different_bits(chain, wide) > 300
    assert (np.abs(chain - wide) <= 2.0**-7 * np.abs(wide).max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", KINDS)
def test_fused_operations_are_those_one_after_the_other(backend, dtype):
    rows, w = jnp.asarray(drawn_rows(17, 1024)), drawn_weights((256, 1024), dtype)
    rows = jnp.clip(rows, -1e4, 1e4)
    gain = jnp.asarray(np.random.default_rng(2).normal(size=1024), BF16)
    normed = rms_norm(rows, gain, eps=EPS, backend=backend)
    options: dict = {"backend": backend}
    plain = linear(normed, w, out_dtype=BF16, **options)
    found = norm_linear(rows, gain, w, eps=EPS, out_dtype=BF16, **options)
    assert_bitwise_equal(found, plain, claim="norm, then product")
    want = swiglu(plain, backend=backend)
    assert_bitwise_equal(linear_swiglu(normed, w, **options), want, claim="product, then gate")
    found = norm_linear_swiglu(rows, gain, w, eps=EPS, **options)
    assert_bitwise_equal(found, want, claim="norm, product, gate")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", KINDS)
def test_residual_and_norm_follow_the_product(backend, dtype):
    rows, w = drawn_rows(17, 1024), drawn_weights((256, 1024), dtype)
    rows = np.clip(rows.astype(np.float32), -100, 100).astype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(3)
    residual = jnp.asarray(rng.normal(size=(17, 256)) * 100, BF16)
    gain = jnp.asarray(rng.normal(size=256), BF16)
    options: dict = {"reduction": REDUCTION, "backend": backend}
    total = linear_add(jnp.asarray(rows), w, residual, None, **options)
    if backend is not Backend.PORTABLE:  # which may fuse the last two operations
        want = product_by_numpy(rows, w, residual=residual).astype(ml_dtypes.bfloat16)
        assert_bitwise_equal(total, want, claim="the residual is added last")
    again, normed = linear_add_rms_norm(
        jnp.asarray(rows), w, residual, None, gain, eps=EPS, **options
    )
    assert_bitwise_equal(again, total, claim="the same stream")
    want = rms_norm(total, gain, eps=EPS, backend=backend)
    assert_bitwise_equal(normed, want, claim="and its norm")


def test_a_rank_with_a_part_of_the_channels_is_refused():
    rows, w = jnp.asarray(drawn_rows(2, 512)), drawn_weights((64, 512))
    with pytest.raises(ValueError, match="one rank has all of I"):
        linear_partial(rows, w, reduction=REDUCTION, backend=Backend.PORTABLE)


@pytest.mark.parametrize("dtype", KINDS)
def test_the_expansion_is_that_of_the_codes(dtype):
    w = drawn_weights((64, 128), dtype)
    want = (np.asarray(w.values).astype(np.float32) * spread_scales(w)).astype(ml_dtypes.bfloat16)
    assert_bitwise_equal(w.expand(), want, claim="the bfloat16 matrix")


# ------------------------------------------------------------------------------ what is claimed


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_order_of_channels_changes_a_bit(backend):
    rows, w = jnp.asarray(drawn_rows(9, 2048)), drawn_weights((64, 2048))
    order = np.random.default_rng(4).permutation(2048)
    turned = W8A8Matrix(values=w.values[:, order], scales=w.scales)
    out = linear(rows, w, out_dtype=F32, backend=backend)
    again = linear(rows[:, order], turned, out_dtype=F32, backend=backend)
    assert_bitwise_equal(again, out, claim="sums of integers are exact")
    # Control: bfloat16 products of the same rows and weights depend on the order.
    plain = linear(rows, w.expand(), out_dtype=F32, backend=backend)
    other = linear(rows[:, order], w.expand()[:, order], out_dtype=F32, backend=backend)
    assert count_different_bits(plain, other) > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", KINDS)
def test_no_batchmate_changes_a_bit(backend, dtype):
    rows, w = drawn_rows(33, 1024), drawn_weights((128, 1024), dtype)
    whole = linear(jnp.asarray(rows), w, out_dtype=BF16, backend=backend)
    for chosen in ([7], [7, 1, 2], list(range(7, 30)), list(range(32, -1, -1))):
        part = linear(jnp.asarray(rows[chosen]), w, out_dtype=BF16, backend=backend)
        assert_bitwise_equal(part, np.asarray(whole)[chosen], claim=f"rows {chosen}")
    # Control: with one scale for all rows, a row's bits depend on the others.
    shared = rows.astype(np.float32)
    shared[:, 0] = np.abs(shared).max()
    apart = linear(jnp.asarray(shared, BF16), w, out_dtype=BF16, backend=backend)
    assert count_different_bits(apart[7:8], whole[7:8]) > 0


# -------------------------------------------------------------------------- kernels without a GPU


def spread_scales(w: W8A8Matrix) -> np.ndarray:
    """The scale of each weight."""
    scales = np.asarray(w.scales).reshape(w.scales.shape[0], -1)
    return np.repeat(scales, w.block_rows, axis=0).repeat(w.shape[1] // scales.shape[1], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "num_out", "has_residual", "tiles"),
    [
        (5, 128, False, FlatTiles(cols=8, stages=2, k=128)),
        (24, 128, True, FlatTiles(cols=16, stages=3, k=256)),
        (5, 256, False, FlatTiles(cols=8, stages=2, k=128, num_wgs=2, is_gated=True)),
        (72, 128, True, TallTiles(cols=64, stages=2, k=128)),
        (136, 256, False, TallTiles(cols=128, stages=2, k=128, is_gated=True, out_span=64)),
    ],
)
@pytest.mark.parametrize("dtype", KINDS)
def test_products_in_interpret_mode(num_rows, num_out, has_residual, tiles, dtype, one_cta):
    # Powers of two as scales: a CPU may fuse the last product with the sum that follows.
    w = drawn_weights((num_out, 512), BLOCKS if dtype == BLOCKS else INT8)
    exponents = np.random.default_rng(7).integers(-9, -6, w.scales.shape)
    values = np.random.default_rng(6).integers(-4, 5, w.shape)  # exact in every order
    values = jnp.asarray(values, dtype_of(dtype))
    w = W8A8Matrix(values=values, scales=jnp.asarray(2.0**exponents, F32))
    peak = 127 if dtype == INT8 else 112
    x = np.random.default_rng(8).integers(-peak, peak + 1, (num_rows, 512))
    x[:, 3::FLOAT8_CHUNK] = peak
    x = jnp.asarray(x * 2.0 ** (np.arange(num_rows)[:, None] % 3), BF16)
    rows = w8a8.quantize_rows(x, coding_of(dtype), backend=Backend.PORTABLE)
    spare = [(0, 0)] * (rows.scales.ndim - 1) + [(0, sm90_quantize_rows.SPARE_SCALES)]
    scales = jnp.pad(rows.scales, spare, constant_values=jnp.nan)
    rows = QuantizedRows(values=rows.values, scales=scales)
    residual = None
    if has_residual:
        values = np.random.default_rng(5).integers(-9, 9, (num_rows, num_out))
        residual = jnp.asarray(values, F32)
    found = matmul(
        rows, w, None, residual,
        leaf_len=512, out_dtype=BF16 if tiles.is_gated else F32, tiles=tiles, interpret=INTERPRET,
    )  # fmt: skip
    if tiles.is_gated:
        want = linear_swiglu(x, w, backend=Backend.PORTABLE)
        # A CPU's exp has other bits inside the kernel, so that a result may be rounded otherwise.
        error = np.abs(np.asarray(found, F32) - np.asarray(want, F32))
        assert (error <= 2.0**-7 * np.abs(np.asarray(want, F32))).all()
    else:
        of_groups = np.asarray(rows.scales[..., :num_rows]).T.reshape(num_rows, -1)
        wide = np.asarray(rows.values, np.float32) * of_groups.repeat(512 // of_groups.shape[1], 1)
        want = wide @ (np.asarray(w.values, np.float32) * spread_scales(w)).T
        want = want + (0 if residual is None else np.asarray(residual))
        assert_bitwise_equal(found, want, claim="the definition")


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("live_rows", [32, 16])
def test_tiles_of_part_of_a_block_in_interpret_mode(num_rows, live_rows, one_cta):
    x, w = drawn_rows(num_rows, 512), drawn_weights((96, 512))
    rows = w8a8.quantize_rows(jnp.asarray(x), coding_of(INT8), backend=Backend.PORTABLE)
    residual = jnp.asarray(np.random.default_rng(5).integers(-9, 9, (num_rows, 96)), BF16)
    want = w8a8.w8a8_product(rows, w, None, residual, out_dtype=BF16, backend=Backend.PORTABLE)
    scales = jnp.pad(rows.scales, (0, sm90_quantize_rows.SPARE_SCALES), constant_values=jnp.nan)
    found = matmul(
        QuantizedRows(values=rows.values, scales=scales), w, None, residual,
        leaf_len=512, out_dtype=BF16, interpret=INTERPRET,
        tiles=FlatTiles(cols=8, stages=2, k=128, live_rows=live_rows, out_span=2 * live_rows),
    )  # fmt: skip
    assert_bitwise_equal(found, want, claim="the definition")


@pytest.mark.parametrize(
    ("num_rows", "has_norm", "coding", "kind"),
    [
        *(
            (*case, kind)
            for kind in (INT8, FLOAT8)
            for case in (
                (1, True, {}), (5, True, {}), (3, False, {"bound": 2.0}), (2, True, {"scale": 0.03})
            )
        ),
        (1, True, {}, BLOCKS),
        (5, True, {}, BLOCKS),
        (3, False, {}, BLOCKS),
    ],
)  # fmt: skip
def test_products_quantise_few_rows_in_interpret_mode(num_rows, has_norm, coding, kind, one_cta):
    """In the launch that multiplies them, to the bits of the launch that only quantises."""
    x = jnp.asarray(drawn_rows(num_rows, 1024))
    w = drawn_weights((128, 1024), kind)
    if "scale" in coding:
        coding = {"scale": jnp.asarray([0.03], F32)}
    coding = dataclasses.replace(coding_of(kind), **coding)
    gain = jnp.asarray(np.random.default_rng(3).normal(size=1024), BF16) if has_norm else None
    rows = RowsToQuantize(values=x, coding=coding, gain=gain, eps=1e-5)
    assert sm90_w8a8.quantizes_rows(rows)

    def product(x, norm=None, held=None, live_rows=0) -> jax.Array:
        tiles = FlatTiles(
            cols=8, stages=3, k=128, held=held, live_rows=live_rows, out_span=4 * live_rows or 128
        )
        return matmul(
            x, w, None, None, norm, leaf_len=1024, out_dtype=F32, tiles=tiles, interpret=INTERPRET
        )

    held = HeldRows(channels=1024, dtype=coding.dtype, helpers=min(2, num_rows - 1))
    found = product(rows, InputNorm(gain=gain, coding=coding, eps=1e-5), held)
    quantised = sm90_w8a8.quantized(rows, interpret=True)
    want = product(quantised)
    assert_bitwise_equal(found, want, claim="the bits of two launches")
    if num_rows == 5:
        norm = InputNorm(gain=gain, coding=coding, eps=1e-5)
        found = product(rows, norm, held, live_rows=32)
        # WHY: on some processors XLA's products have other bits for other shapes, except of
        # integers.
        by_tile = want if kind == INT8 else product(quantised, live_rows=32)
        assert_bitwise_equal(found, by_tile, claim="the same by tiles of part of a block")
    # Control: another scale.
    if num_rows > 1 and not coding.bound and not coding.group_len:
        other = dataclasses.replace(coding, scale=jnp.asarray([0.02], F32))
        changed = product(rows, InputNorm(gain=gain, coding=other, eps=1e-5), held)
        assert (np.asarray(changed) != np.asarray(want)).any()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", quick_and_slow([768], [512, 3072]))
def test_quantising_in_interpret_mode(width, dtype):
    rows = drawn_rows(3, width)
    values, scales = by_numpy(rows, dtype)
    found = sm90_quantize_rows.quantize_rows(jnp.asarray(rows), coding_of(dtype), interpret=True)
    assert_bitwise_equal(found.values, values, claim="8-bit values")
    assert_bitwise_equal(found.scales[..., :3].T, scales, claim="scales")


def test_rows_that_no_kernel_takes_are_refused():
    with pytest.raises(NotImplementedError, match="512 channels or more, in fours, not 256"):
        sm90_quantize_rows.quantize_rows(jnp.zeros((1, 256), BF16), coding_of(INT8))
    with pytest.raises(ValueError, match="65536 is most"):
        w8a8.quantize_rows(jnp.zeros((1, 65544), BF16), coding_of(INT8), backend=Backend.PORTABLE)
    rows = QuantizedRows(values=jnp.zeros((1, 512), jnp.int8), scales=jnp.zeros(1))
    with pytest.raises(ValueError, match="must agree in their last axis"):
        w8a8.w8a8_product(rows, drawn_weights((64, 128)), out_dtype=F32, backend=Backend.PORTABLE)
    with pytest.raises(ValueError, match="int8 is not multiplied by float8_e4m3fn"):
        operands_of(rows, drawn_weights((64, 512), FLOAT8))
    with pytest.raises(ValueError, match="a QuantizedRows is not multiplied by a"):
        operands_of(rows, jnp.zeros((64, 512), BF16))


@pytest.mark.parametrize("num_rows", [1, 8, 64, 65, 128, 129, 256, 1000, 4000])
@pytest.mark.parametrize(
    ("num_out", "k_len", "is_gated"),
    [(6144, 4096, False), (4096, 14336, False), (28672, 4096, True), (4672, 3584, False)],
)
@pytest.mark.parametrize("dtype", KINDS)
def test_tiles_divide_the_product_and_fit_the_memory(num_rows, num_out, k_len, is_gated, dtype):
    is_quantized = num_rows * k_len <= QUANTIZED_VALUES
    product = Product(
        num_rows=num_rows, num_out=num_out, num_leaves=1, leaf_len=k_len, out_bytes=2,
        is_gated=is_gated, has_residual=not is_gated, operands=operands_of_kind(dtype),
        rows=Rows.QUANTIZED if is_quantized else Rows.GIVEN,
    )  # fmt: skip
    tiles = choose_tiles(product)
    assert tiles.groups == 1 and tiles.stages >= 2 and k_len % tiles.k == 0
    used = smem_bytes(tiles, out_bytes=2, has_residual=not is_gated, operands=product.operands)
    assert used <= SMEM_BYTES
    if dtype != INT8:  # a chunk and the sum of chunks, beside scales and addresses
        columns = tiles.cols if isinstance(tiles, TallTiles) else tiles.cols * tiles.rows // 64
        assert columns <= 128 and tiles.k % 128 == 0
    outputs = num_out // 2 if is_gated else num_out
    if isinstance(tiles, FlatTiles):
        assert outputs % (tiles.out_rows * tiles.num_wgs) == 0
    else:
        assert outputs % (tiles.out_cols * tiles.cluster[1]) == 0
        reach = tiles.cta_rows * tiles.cluster[0]
        assert -num_rows % reach <= sm90_quantize_rows.SPARE_SCALES


# ------------------------------------------------------------------------------ on a Hopper GPU

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336), "odd": (1088, 3584)}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_8_bit_products_of_whole_shapes_on_a_gpu(name, kind):
    shape = SHAPES[name]
    rows, w = drawn_rows(1030, shape[1]), drawn_weights(shape, kind)
    rows = np.clip(rows.astype(np.float32), -100, 100).astype(ml_dtypes.bfloat16)
    residual = jnp.asarray(np.random.default_rng(6).normal(size=(1030, shape[0])) * 50, BF16)
    gain = jnp.asarray(np.random.default_rng(9).normal(size=shape[1]), BF16)

    def of_norms(x, **options) -> list:
        found = [norm_linear(x, gain, w, eps=1e-5, out_dtype=BF16, **options)]
        if shape[0] % 128 == 0:
            found.append(norm_linear_swiglu(x, gain, w, eps=1e-5, **options))
        return found

    def run(num_rows: int) -> list:
        x, r = jnp.asarray(rows[:num_rows]), residual[:num_rows]
        options: dict = {"backend": Backend.SM90}
        return [
            linear(x, w, out_dtype=F32, **options),
            linear_add(x, w, r, None, reduction=REDUCTION, **options),
            *([linear_swiglu(x, w, **options)] if shape[0] % 128 == 0 else []),
            *(of_norms(x, **options) if shape[1] <= 4096 else []),
        ]

    whole = run(1030)
    if shape[1] <= 4096:
        normed = rms_norm(jnp.asarray(rows), gain, eps=1e-5, backend=Backend.SM90)
        want = linear(normed, w, out_dtype=BF16, backend=Backend.SM90)
        at = 2 + (shape[0] % 128 == 0)
        assert_bitwise_equal(whole[at], want, claim="a norm, then a product")
        assert count_different_bits(
            whole[at], linear(jnp.asarray(rows), w, out_dtype=BF16, backend=Backend.SM90)
        )
    few = W8A8Matrix(values=w.values[-64:], scales=w.scales[-64 // w.block_rows :])
    want = product_by_numpy(rows[:70], few)
    assert_bitwise_equal(whole[0][:70, -64:], want, claim="the model of the tensor core")
    for num_rows in (1, 2, 3, 4, 7, 8, 9, 33, 64, 65, 128, 200, 256, 511):
        for found, all_rows in zip(run(num_rows), whole, strict=True):
            assert_bitwise_equal(found, all_rows[:num_rows], claim=f"{num_rows} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_products_of_whole_shapes_on_a_gpu(name):
    shape = SHAPES[name]
    rows, w = drawn_rows(1030, shape[1]), drawn_weights(shape)
    rows = np.clip(rows.astype(np.float32), -100, 100).astype(ml_dtypes.bfloat16)
    residual = jnp.asarray(np.random.default_rng(6).normal(size=(1030, shape[0])) * 50, BF16)
    sums = jax.jit(_exact_sums)(jnp.asarray(by_numpy(rows)[0]), w.values)
    _, scales = by_numpy(rows)
    wide = np.asarray(sums).astype(np.float32)
    plain = scales[:, None] * (np.asarray(w.scales)[None] * wide)
    added = (np.asarray(residual).astype(np.float32) + plain).astype(ml_dtypes.bfloat16)
    for num_rows in (1, 2, 3, 4, 7, 8, 9, 33, 64, 65, 128, 200, 256, 511, 1030):
        x = jnp.asarray(rows[:num_rows])
        found = linear(x, w, out_dtype=F32, backend=Backend.SM90)
        assert_bitwise_equal(found, plain[:num_rows], claim=f"{num_rows} rows")
        found = linear_add(
            x, w, residual[:num_rows], None, reduction=REDUCTION, backend=Backend.SM90
        )
        assert_bitwise_equal(found, added[:num_rows], claim=f"{num_rows} rows with a residual")


def _exact_sums(values, weights):
    """By XLA, in int32."""
    return jax.lax.dot_general(
        values, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
