# SPDX-License-Identifier: Apache-2.0
"""The reference kernels: the C++ against the definition in NumPy, and the claims of the backend."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.certify.operands import PRODUCT_KINDS, draw_operands
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.abstract import why_unsupported
from detjax.models.hf_config import load_config
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels import reference, reference_library, tensor_core
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import choose_backend
from detjax.pallas_kernels.embedding.api import embed
from detjax.pallas_kernels.geglu.api import geglu
from detjax.pallas_kernels.hopper_sums import cap_factors
from detjax.pallas_kernels.linear import w8a8
from detjax.pallas_kernels.linear.api import linear, linear_leaf_sums, linear_swiglu
from detjax.pallas_kernels.linear.quantized import QuantizedRows, RowCoding, W8A8Matrix
from detjax.pallas_kernels.lora.api import lora_add, lora_hidden
from detjax.pallas_kernels.moe import api as moe
from detjax.pallas_kernels.moe.expert_weights import ClampedExperts, ExpertWeights
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.sm90 import row_sum
from detjax.pallas_kernels.sm90_rows import pairwise
from detjax.pallas_kernels.softcap.api import softcap
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import answers, dummy_config, dummy_model, mixed_requests
from detjax.testing.operation_cases import (
    answer_cases,
    digest_of,
    family_cases,
    operation_case,
)

BF16, F32 = ml_dtypes.bfloat16, jnp.dtype(jnp.float32)
ON: dict[str, Any] = {"backend": Backend.REFERENCE}
LANES = (4, 8, 16)
"""Of the vectors of SSE2 or NEON, AVX2 and AVX-512."""


@pytest.fixture(autouse=True, scope="module")
def compiler():
    """The kernels are compiled here."""
    try:
        reference_library.find_compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def lanes_of_the_machine():
    """Put back the vectors that a test has chosen."""
    yield
    reference_library.library().detjax_choose_lanes(max(LANES))


def multiply(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """[M, K] by [N, K] in float32."""
    return np.asarray(linear(jnp.asarray(x), jnp.asarray(w), out_dtype=F32, **ON))


def canonical(x: np.ndarray) -> np.ndarray:
    """The same with one bit pattern for NaN, as a GPU writes it."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF).view(np.float32), x)


# ------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("kind", PRODUCT_KINDS)
@pytest.mark.parametrize("lanes", LANES)
def test_products_have_the_bits_of_the_definition(kind, lanes, lanes_of_the_machine):
    """37,000 steps of 16 products a case: 1,000,000 in all."""
    if reference_library.library().detjax_choose_lanes(lanes) != lanes:
        pytest.skip(f"this processor has no vectors of {lanes} float32")
    for shape in ((49, 240, 50), (7, 48, 21), (1, 304, 50)):  # no multiple of a vector
        x, w = draw_operands(kind, *shape)
        assert_bitwise_equal(
            multiply(x, w),
            canonical(tensor_core.product(x, w)),
            claim=f"{kind} products of vectors of {lanes} have the bits of the definition",
        )


def test_rows_that_repeat_have_the_bits_of_each_alone():
    """Padding is one row many times, which is multiplied once."""
    x, w = draw_operands("normal", 5, 64, 24)
    rows = np.asarray([0, 0, 1, 3, 3, 3, 2, 4, 0, 0])
    assert count_different_bits(multiply(x[:1], w), multiply(x[1:2], w)) > 0
    alone = np.concatenate([multiply(x[i : i + 1], w) for i in range(5)])
    assert_bitwise_equal(
        multiply(x[rows], w), alone[rows], claim="a row that repeats has its own product"
    )
    gates = jnp.asarray(x.astype(np.float32))
    each = np.concatenate([np.asarray(swiglu(gates[i : i + 1], **ON)) for i in range(5)])
    assert_bitwise_equal(
        np.asarray(swiglu(gates[rows], **ON)), each[rows], claim="and so has its SwiGLU"
    )


@pytest.mark.parametrize("rows", [[0, 1, 1, 0, 1], [1, 1]])
@pytest.mark.parametrize("largest", [1.0, np.inf, np.nan])
def test_rows_of_zeros_have_the_bits_of_the_definition(rows, largest, lanes_of_the_machine):
    """Padding is zeros of either sign, which are not multiplied."""
    reference_library.library().detjax_choose_lanes(min(LANES))  # a thread takes several tiles
    x, w = draw_operands("normal", 2, 64, 2100)
    x[1] = np.where(np.arange(64) % 3 == 0, -0.0, 0.0)
    w[5, 7] = largest
    x = x[np.asarray(rows)]
    want = canonical(tensor_core.product(x, w))
    assert np.isnan(want[1, 5]) == (not np.isfinite(largest))
    claim = "rows of zeros have the bits of the definition"
    assert_bitwise_equal(multiply(x, w), want, claim=claim)


def test_padding_is_embedded_as_zeros():
    table, ids = jnp.arange(1, 13, dtype=jnp.bfloat16).reshape(4, 3), jnp.asarray([3, -1, 0])
    rows = np.asarray(embed(table, ids, out_dtype=F32, **ON))
    assert rows.tolist() == [[10, 11, 12], [0, 0, 0], [1, 2, 3]]


def test_the_definition_on_a_step_that_is_known():
    """2**25 + 15 * 0.75: each 0.75 lies under the last bit that is kept, 2**0."""
    x, w = np.ones((1, 16), BF16), np.full((1, 16), 0.75, BF16)
    x[0, 0], w[0, 0] = 2.0**13, 2.0**12
    assert tensor_core.product(x, w) == 2.0**25
    w[0, 1] = -1.0  # is kept in the sum, and cut where that is rounded toward zero
    assert tensor_core.product(x, w) == 2.0**25 - 2
    assert multiply(x, w) == 2.0**25 - 2


def test_the_order_inside_a_step_does_not_matter_and_that_of_steps_does():
    x, w = draw_operands("wide", 16, 256, 32)
    whole = multiply(x, w)
    rng = np.random.default_rng(0)
    inside = rng.permuted(np.arange(256).reshape(16, 16), axis=1).reshape(-1)
    assert_bitwise_equal(
        multiply(x[:, inside], w[:, inside]), whole, claim="a step adds exactly, in any order"
    )
    between = rng.permutation(np.arange(256).reshape(16, 16)).reshape(-1)
    assert count_different_bits(multiply(x[:, between], w[:, between]), whole) > 100


@pytest.mark.control
def test_control_float64_products_rounded_once_differ():
    x, w = draw_operands("normal", 16, 256, 32)
    exact = (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float32)
    assert count_different_bits(multiply(x, w), exact) > 100


# ------------------------------------------------------------------------------- other operations


def test_a_rows_sum_of_squares_is_that_of_the_structure():
    """RMSNorm of D = 640 from its definition, in NumPy, where the root is off by no bit."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 640)).astype(BF16)
    form = row_sum(640)
    assert form.is_wide and form.vec_len == 1
    wide = x.astype(np.float32)
    found = np.asarray(reference.rms_norm(x, jnp.ones(640, BF16), eps=1e-5))
    for row, out in zip(wide, found, strict=True):
        warps = [pairwise(list(warp), lambda a, b: a + b) for warp in (row * row).reshape(-1, 32)]
        mean = pairwise(warps, lambda a, b: a + b) / np.float32(640) + np.float32(1e-5)
        scale = np.float32(1) / np.sqrt(mean)
        expected = (row * scale).astype(BF16).astype(np.float32)
        assert (np.abs(out.astype(np.float32) - expected) <= np.abs(expected) * 2**-7).all()
        assert (out.astype(np.float32) == expected).mean() > 0.99


def test_geglu_is_within_float32_of_float64():
    rng = np.random.default_rng(7)
    gate, up = rng.standard_normal((2, 3, 256)).astype(np.float32)
    found = np.asarray(geglu(jnp.asarray(np.concatenate([gate, up], axis=1)), **ON))
    g = gate.astype(np.float64)
    exact = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * up
    assert np.abs(found - exact).max() < 2.0**-20


@pytest.mark.parametrize("function", ["ex2", "rcp", "rsqrt"])
def test_tables_are_within_two_ulp(function):
    bits = table_of(function)
    significand = 1 + np.arange(1 << 23) / (1 << 23)
    exact = {
        "ex2": lambda: np.exp2(significand - 1),
        "rcp": lambda: 1 / significand,
        "rsqrt": lambda: 1 / np.sqrt(np.concatenate([significand, 2 * significand])),
    }[function]()
    found = bits.view(np.float32)
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert np.abs((found - exact) / ulp).max() < 2
    assert found[0] == 1


def test_exponentials_and_logarithms_are_within_two_ulp():
    rng = np.random.default_rng(0)
    ranked = -np.sort(rng.exponential(6, (4, 1024)).clip(max=80).astype(np.float32), axis=1)
    ranked[:, 0] = 0
    ones = np.ones(4, np.float32)
    weight, _, _ = reference.nucleus_sums(ranked, ones, np.full(4, 9, np.int32), ones)
    exact = np.exp(ranked.astype(np.float64))
    assert np.abs(np.asarray(weight) / exact - 1).max() < 2.0**-22
    sums = rng.uniform(0.5, 90, (512, 1)).astype(np.float32)
    found = np.asarray(reference.log_sum_exp(np.zeros_like(sums), sums))
    exact = np.log(sums[:, 0].astype(np.float64))
    assert np.abs(found - exact).max() < 2.0**-21


# ------------------------------------------------------------------------------ experts and 8 bits

E4M3 = ml_dtypes.float8_e4m3fn


def draw_float8(*shape: int) -> np.ndarray:
    """Every exponent, subnormal numbers and zeros among them."""
    rng = np.random.default_rng(list(shape))
    drawn = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
    return drawn.clip(-448, 448).astype(np.float32).astype(E4M3)


def multiply_8_bits(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """[M, K] by [N, K] with scales of one, in float32."""
    rows = QuantizedRows(values=jnp.asarray(x), scales=jnp.ones(len(x), jnp.float32))
    weights = W8A8Matrix(values=jnp.asarray(w), scales=jnp.ones(len(w), jnp.float32))
    return np.asarray(w8a8.w8a8_product(rows, weights, out_dtype=F32, **ON))


def test_products_of_float8_have_the_bits_of_the_definition():
    x, w = draw_float8(33, 512), draw_float8(70, 512)
    assert_bitwise_equal(
        multiply_8_bits(x, w),
        tensor_core.float8_product(x, w),
        claim="float8 products have the bits of the definition",
    )
    x[3, 5] = np.nan
    assert np.isnan(multiply_8_bits(x, w)).all(axis=1).tolist() == [i == 3 for i in range(33)]


def test_a_step_of_float8_keeps_13_bits():
    """448 * 448 has the exponent 16 and is 3 * 2**16: terms are cut at 2**3, the sum at 2**4."""
    x, w = np.zeros((1, 128), E4M3), np.ones((1, 128), E4M3)
    x[0, 0] = w[0, 0] = 448
    x[0, 1:4] = 7
    assert multiply_8_bits(x, w) == 448**2
    x[0, 1:4] = 9
    assert multiply_8_bits(x, w) == 448**2 + 16
    x[0, 1:4], x[0, 32] = 0, 9  # another step
    assert multiply_8_bits(x, w) == 448**2
    x[0, 32] = 18
    assert multiply_8_bits(x, w) == 448**2 + 16


def test_products_of_integers_are_exact():
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-128, 128, (m, 300), dtype=np.int8) for m in (9, 21))
    exact = x.astype(np.int64) @ w.astype(np.int64).T
    assert_bitwise_equal(multiply_8_bits(x, w), exact.astype(np.float32), claim="int8 is exact")


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_rows_are_quantised_as_by_the_portable_kernels(dtype):
    """Both follow IEEE's rules in the range of normal numbers."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((65, 512)) * 2.0 ** rng.integers(-20, 20, (65, 1))).astype(BF16)
    x[3] = 0
    found, expected = (
        w8a8.quantize_rows(jnp.asarray(x), RowCoding(dtype=jnp.dtype(dtype)), backend=on)
        for on in (Backend.REFERENCE, Backend.PORTABLE)
    )
    assert_bitwise_equal(found.values, expected.values, claim="the same 8-bit values")
    assert_bitwise_equal(found.scales, expected.scales, claim="the same scales")


CODINGS = {
    "groups": RowCoding(dtype=jnp.dtype(E4M3), group_len=128),
    "bound": RowCoding(dtype=jnp.dtype(E4M3), bound=1.5),
    "static": RowCoding(dtype=jnp.dtype(jnp.int8), scale=jnp.float32(0.013)),
}


@pytest.mark.parametrize("kind", CODINGS)
def test_rows_of_other_scales_are_quantised_as_by_the_portable_kernels(kind):
    rng = np.random.default_rng(8)
    x = (rng.standard_normal((21, 512)) * 2.0 ** rng.integers(-9, 9, (21, 1))).astype(BF16)
    x[3] = 0
    found, expected = (
        w8a8.quantize_rows(jnp.asarray(x), CODINGS[kind], backend=on)
        for on in (Backend.REFERENCE, Backend.PORTABLE)
    )
    assert_bitwise_equal(found.values, expected.values, claim=f"{kind}: the same 8-bit values")
    assert_bitwise_equal(found.scales, expected.scales, claim=f"{kind}: the same scales")
    own = w8a8.quantize_rows(jnp.asarray(x), RowCoding(dtype=CODINGS[kind].dtype), **ON)
    assert count_different_bits(found.values, own.values) > 100  # control: scales of whole rows


def test_products_of_blocks_are_added_by_fused_products_of_scales():
    """A chunk has 14 bits and a scale 24, so a long double holds their product and most sums."""
    rng = np.random.default_rng(9)
    x, w = draw_float8(9, 384), draw_float8(32, 384)
    x_scales = rng.random((3, 9), np.float32)
    w_scales = rng.random((2, 3), np.float32)
    found = w8a8.w8a8_product(
        QuantizedRows(values=jnp.asarray(x), scales=jnp.asarray(x_scales)),
        W8A8Matrix(values=jnp.asarray(w), scales=jnp.asarray(w_scales)),
        out_dtype=F32, **ON,
    )  # fmt: skip
    total, rounded_twice = np.zeros((9, 32), np.float32), np.zeros((9, 32), np.float32)
    for g in range(3):
        columns = slice(128 * g, 128 * (g + 1))
        chunk = tensor_core.float8_product(x[:, columns], w[:, columns])
        scale = x_scales[g][:, None] * np.repeat(w_scales[:, g], 16)
        total = (np.longdouble(chunk) * scale + total).astype(np.float32)
        rounded_twice = chunk * scale + rounded_twice
    assert_bitwise_equal(found, total, claim="groups left to right, one rounding each")
    assert count_different_bits(found, rounded_twice) > 10  # control: without fma


# -------------------------------------------------------------------------------- linear attention


@functools.cache
def table_of(name: str) -> np.ndarray:
    """Float32 bits of ex2 on [0, 1), 1/x on [1, 2) or 1/sqrt(x) on [1, 4), by significand."""
    functions, steps = reference_library.FUNCTIONS, reference_library.special_function_steps()
    # Sums of integers wrap in 32 bits, so a negative step is a subtraction.
    of_function = dict(zip(functions, steps, strict=True))[name]
    return np.cumsum(of_function, dtype=np.uint32) + np.float32(1).view(np.uint32)


def ex2_of(x: np.ndarray) -> np.ndarray:
    """`ex2.approx.ftz` from the table, of numbers from -126 up; infinite from 128 up."""
    with np.errstate(over="ignore", invalid="ignore"):
        units = np.trunc(np.abs(np.clip(x, -127, 127)).astype(np.float64) * 2.0**23)
    units = units.astype(np.int64)
    units = np.where(x < 0, np.where(units % 2**23 != 0, ~units, -units), units)
    found = table_of("ex2")[units % 2**23].astype(np.int64) + (units >> 23) * 2**23
    power = found.astype(np.uint32).view(np.float32)
    return np.where(x >= 128, np.float32(np.inf), np.where(x < -126, np.float32(0), power))


def rcp_of(x: np.ndarray) -> np.ndarray:
    """`rcp.approx` of numbers from 1 up, from the table; 0 of infinity."""
    bits = x.view(np.uint32).astype(np.int64)
    found = table_of("rcp")[bits % 2**23].astype(np.int64) - ((bits >> 23) - 127) * 2**23
    share = np.maximum(found, 0).astype(np.uint32).view(np.float32)
    return np.where(np.isinf(x), np.float32(0), share)


def rsqrt_of(x: np.float32) -> np.float32:
    """`rsqrt.approx` of a normal number, from the table."""
    bits = int(np.float32(x).view(np.uint32))
    exponent = (bits >> 23) - 127
    found = int(table_of("rsqrt")[(exponent & 1) * (1 << 23) + (bits & ((1 << 23) - 1))])
    return np.uint32(found - (exponent >> 1) * (1 << 23)).view(np.float32)


def fused(a, b, c) -> np.ndarray:
    """An fma: of float32 a long double holds the product and nearly every sum."""
    return (np.longdouble(a) * b + c).astype(np.float32)


def normalised(x: np.ndarray) -> np.ndarray:
    squares = (x * x).reshape(-1, 4)
    sums = ((squares[:, 0] + squares[:, 1]) + squares[:, 2]) + squares[:, 3]
    return x * rsqrt_of(pairwise(list(sums), lambda a, b: a + b) + np.float32(1e-6))


def recurrence_of(rows: np.ndarray, dim: int, dot) -> np.ndarray:
    """Results of rows of q, k and v whose gates are 1, in NumPy; `dot` adds up over channels."""
    state, results = np.zeros((dim, dim), np.float32), []  # [channels of values, of keys]
    for row in rows:
        q, k, v = row[:dim], row[dim : 2 * dim], row[2 * dim : 3 * dim]
        q, k = normalised(q) * np.float32(dim**-0.5), normalised(k)
        state = fused(k[None], (v - dot(state, k))[:, None], state)
        results.append(dot(state, q))
    return np.stack(results)[:, None]


@pytest.mark.slow
def test_linear_attention_has_the_bits_of_the_definition():
    """Where gates are 1: values beyond 20, whose SiLU they are, b of 60 and a of -100.

    Two blocks, in chunks that end before, at and behind their end.
    """
    dim, length = 32, 67
    rng = np.random.default_rng(12)
    rows = np.zeros((length, 1, 3 * dim + 8), np.float32)
    rows[:, 0, : 3 * dim] = rng.uniform(20, 400, (length, 3 * dim)).astype(BF16)
    rows[:, 0, 3 * dim : 3 * dim + 2] = 60, -100
    filters = np.zeros((1, 4, 3 * dim), np.float32)
    filters[:, 3] = 1
    cache = [np.zeros((1, 2, 1, 1, 64, 3 * dim + 8)), np.zeros((1, 2, 1, 1, dim, dim))]
    cache, found = [jnp.asarray(x, F32) for x in cache], []
    for low, high in ((0, 5), (5, 63), (63, 66), (66, length)):
        out, *cache = reference.delta_rule(
            jnp.asarray(rows[low:high]), jnp.asarray(filters), (jnp.zeros((1, 1)),) * 2, *cache,
            jnp.asarray([[1, 0]]), jnp.arange(low, high)[None], 0,
        )  # fmt: skip
        found.append(np.asarray(out))

    def dot(state, x):
        sums = state[:, :16] * x[None, :16]
        for at in range(16, dim, 16):
            sums = fused(state[:, at : at + 16], x[None, at : at + 16], sums)
        return pairwise(list(sums.T), lambda a, b: a + b)

    expected = recurrence_of(rows[:, 0], dim, dot)
    assert_bitwise_equal(np.concatenate(found), expected, claim="the bits of the definition")
    left_to_right = recurrence_of(rows[:, 0], dim, lambda s, x: np.cumsum(s * x, axis=1)[:, -1])
    assert count_different_bits(left_to_right, expected) > expected.size // 2  # control


HYBRID_BITS = json.loads((Path(__file__).parents[1] / "golden" / "hybrid_bits.json").read_text())
HYBRID_CASES = HYBRID_BITS["cases"]
"""Digests of this backend, that `test_delta_rule_sm90.py` asks of a GPU."""


@pytest.mark.golden
@pytest.mark.parametrize("name", quick_and_slow(["gated rms_norm 128"], HYBRID_CASES))
def test_operations_of_hybrids_keep_their_bits(name):
    assert digest_of(operation_case(name)(Backend.REFERENCE)) == HYBRID_CASES[name]


WIDE_BITS = json.loads((Path(__file__).parents[1] / "golden" / "wide_heads_bits.json").read_text())
WIDE_CASES = WIDE_BITS["cases"]
"""Digests of this backend, that `test_attention_sm90.py` asks of a GPU."""


@pytest.mark.golden
@pytest.mark.parametrize("name", quick_and_slow(["softcap"], WIDE_CASES))
def test_wide_heads_and_soft_caps_keep_their_bits(name):
    assert digest_of(operation_case(name)(Backend.REFERENCE)) == WIDE_CASES[name]


def test_soft_caps_have_the_bits_of_the_definition():
    """A product, a power, a sum, a reciprocal of the table and one fma; infinite logits too."""
    logits = np.random.default_rng(3).uniform(-200, 200, (2, 40)).astype(np.float32)
    logits[0, :3] = np.inf, -np.inf, 3e38
    found = np.asarray(softcap(jnp.asarray(logits), cap=30.0, **ON))
    exponent, cap = cap_factors(30.0)
    power = ex2_of(logits * np.float32(exponent))
    share = rcp_of(power + np.float32(1))
    expected = fused(share, np.float32(-2 * cap), np.float32(cap))
    assert_bitwise_equal(found, expected, claim="the bits of the definition")
    by_tanh = np.float32(cap) * np.tanh(logits / np.float32(cap))
    assert count_different_bits(by_tanh.astype(np.float32), expected) > 20  # control
    assert np.abs(found - by_tanh).max() < 2.0**-14


# ---------------------------------------------------------------------------------------- adapters


def test_adapters_have_the_bits_of_the_definition():
    """Rows of two adapters and of none; columns of other adapters are zeros that change no bit."""
    rng = np.random.default_rng(10)
    x, a = (rng.standard_normal(shape).astype(BF16) for shape in ((6, 256), (128, 256)))
    b, scales = rng.standard_normal((48, 128)).astype(BF16), np.float32([[0.3, 1.7]])
    base = rng.standard_normal((6, 48)).astype(np.float32)
    base[:, 0] = -0.0
    slots = np.asarray([0, 1, -1, 1, 0, -1], np.int32)
    sums = linear_leaf_sums(
        jnp.asarray(x), jnp.asarray(a), reduction=tree_reduction(256, NumericsProfile()), **ON
    )
    h = lora_hidden(sums, jnp.asarray(slots), jnp.asarray(scales), out_dtype=jnp.dtype(BF16), **ON)
    out = lora_add(jnp.asarray(base), h, jnp.asarray(b), out_dtype=F32, **ON)
    leaves = [tensor_core.product(x[:, i : i + 32], a[:, i : i + 32]) for i in range(0, 256, 32)]
    tree = pairwise(leaves, lambda a, b: a + b)
    for slot in (0, 1):
        own = slice(64 * slot, 64 * (slot + 1))
        rows = slots == slot
        hidden = (tree[rows, own] * scales[0, slot]).astype(BF16)
        assert_bitwise_equal(h[rows, own], hidden, claim="the scale before the rounding")
        alone = base[rows] + tensor_core.product(hidden, b[:, own])
        assert_bitwise_equal(out[rows], alone, claim="an adapter among others")
        late = base[rows] + tensor_core.product(tree[rows, own].astype(BF16), b[:, own])
        assert count_different_bits(out[rows], late) > 10  # control: another place of the scale
    assert_bitwise_equal(out[slots < 0], base[slots < 0], claim="none: -0 stays")


# ------------------------------------------------------------------------------- sinks and clamps


def test_a_sink_takes_part_in_the_softmax_and_has_no_value():
    rng = np.random.default_rng(11)
    q = rng.standard_normal((1, 2, 4, 64)).astype(BF16)
    kv = rng.standard_normal((2, 150, 64)).astype(BF16)
    pages = np.zeros((1, 2, 2, 1, 128, 64), BF16)
    pages[0, 1, :, 0], pages[0, 0, :, 0, :22] = kv[:, :128], kv[:, 128:]
    sinks = np.asarray([-2, 0.5, 3, 6], BF16)
    places = map(jnp.asarray, (pages, np.int32([[1, 0]]), np.int32([[140, 149]])))
    place = jnp.asarray(q), CachePlace(*places, layer=0)
    options: dict[str, Any] = {"window": None, "profile": NumericsProfile(), **ON}
    found = np.asarray(attention(*place, sinks=jnp.asarray(sinks), **options), np.float64)
    keys, values = kv.astype(np.float64)
    for t, h in np.ndindex(2, 4):
        seen = (140, 149)[t] + 1
        scores = keys[:seen] @ q[0, t, h].astype(np.float64) / 8
        weights = np.exp(scores - scores.max())
        exact = (
            weights
            @ values[:seen]
            / (weights.sum() + np.exp(sinks[h].astype(np.float64) - scores.max()))
        )
        # The weights and the output are rounded to bfloat16.
        assert np.abs(found[0, t, h] - exact).max() < 2.0**-7 * max(1, np.abs(exact).max())
    without = np.asarray(attention(*place, **options), np.float64)
    assert np.abs(without[0, :, 3] - found[0, :, 3]).max() > 0.1


def test_a_clamped_swiglu_is_within_float32_of_float64():
    rng = np.random.default_rng(12)
    gate, up = (rng.standard_normal((2, 3, 256)) * 5).astype(np.float32)
    gate[0, 0], up[0, 1] = np.nan, np.nan
    clamp = SwigluClamp(alpha=1.702, limit=7.0)
    found = np.asarray(
        swiglu(jnp.asarray(np.concatenate([gate, up], axis=1)), clamp=clamp, **ON), np.float64
    )
    g, u = np.minimum(gate, 7).astype(np.float64), np.clip(up, -7, 7).astype(np.float64)
    exact = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    rest = ~np.isnan(exact)
    assert np.isnan(found[~rest]).all() and (~rest).sum() == 2
    # Four units in the last place of 56: two of the quotient, and one each of sum and product.
    assert np.abs(found - exact)[rest].max() < 2.0**-16
    plain = np.asarray(swiglu(jnp.asarray(np.concatenate([gate, up], axis=1)), **ON))
    assert np.abs(plain - exact)[rest].max() > 1


@pytest.fixture(scope="module")
def mixture():
    """Rows, logits and the weights of 24 experts, of which a row has 4."""
    rng = np.random.default_rng(3)
    shapes = ((13, 128), (24, 384, 128), (24, 128, 192))
    x, gate_up, down = (jnp.asarray((rng.standard_normal(s) * 0.3).astype(BF16)) for s in shapes)
    logits = rng.standard_normal((13, 32)).astype(np.float32)
    logits[2, 5] = logits[2, 9] = 9.0
    logits[4, 7] = np.nan
    return x, jnp.asarray(logits), gate_up, down


def test_experts_are_chosen_as_by_the_portable_kernels(mixture):
    """Ids to the bit, NaN first and ties by id; weights within the error of exp."""
    for renormalise in (True, False):
        options = {"num_experts": 24, "top_k": 4, "renormalise": renormalise}
        ids, weights = moe.route(mixture[1], **options, **ON)
        other, close = moe.route(mixture[1], **options, backend=Backend.PORTABLE)
        rows = np.arange(13) != 4
        assert_bitwise_equal(ids[rows], other[rows], claim="the same experts")
        np.testing.assert_allclose(weights[rows], close[rows], rtol=2.0**-20)
        assert ids[2, :2].tolist() == [5, 9] and ids[4, 0] == 7
        assert np.isnan(np.asarray(weights[4])).all()


def test_an_experts_rows_have_the_bits_of_its_own_layer(mixture):
    x, logits, gate_up, down = mixture
    ids, _ = moe.route(logits, num_experts=24, top_k=4, renormalise=True, **ON)
    ids = ids % 24
    experts = ExpertWeights(gate_up, down)
    y = moe.expert_mlp(x, ids, experts, first_expert=0, **ON)
    for m, r in np.ndindex(ids.shape):
        hidden = linear_swiglu(x[m : m + 1], gate_up[ids[m, r]], **ON)
        alone = linear(hidden, down[ids[m, r]], out_dtype=jnp.dtype(BF16), **ON)
        assert_bitwise_equal(y[m, r], alone[0], claim=f"row {m} of rank {r} as if alone")
    extras = ClampedExperts(
        gate_up_bias=gate_up[:, :, 0], down_bias=down[:, :, 0],
        clamp=SwigluClamp(alpha=1.702, limit=7.0),
    )  # fmt: skip
    with_extras = experts._replace(extras=extras)
    biased = moe.expert_mlp(x[:2], ids[:2], with_extras, first_expert=0, **ON)
    bf16 = jnp.dtype(BF16)
    for m, r in np.ndindex(ids[:2].shape):
        e = ids[m, r]
        hidden = linear(x[m : m + 1], gate_up[e], gate_up[e, :, 0], out_dtype=bf16, **ON)
        hidden = swiglu(hidden, clamp=extras.clamp, **ON)
        alone = linear(hidden, down[e], down[e, :, 0], out_dtype=bf16, **ON)
        assert_bitwise_equal(biased[m, r], alone[0], claim="with biases and a clamp as if alone")
    own = ExpertWeights(gate_up[8:16], down[8:16])
    part = np.asarray(moe.expert_mlp(x, ids, own, first_expert=8, num_ranks=3, **ON))
    is_here = (np.asarray(ids) >= 8) & (np.asarray(ids) < 16)
    assert_bitwise_equal(part[is_here], np.asarray(y)[is_here], claim="a rank's own experts")
    assert not part[~is_here].view(np.uint16).any()


EXPERTS_OF_8_BITS = {
    "integers": (jnp.int8, 127, None), "channels": (jnp.float8_e4m3fn, 448, None),
    "blocks": (jnp.float8_e4m3fn, 448, None), "static": (jnp.int8, 127, jnp.float32(0.02)),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPERTS_OF_8_BITS)
def test_rows_of_experts_of_8_bits_have_the_bits_of_their_own_layer(kind):
    """Control: with another expert's weights."""
    rng, (dtype, largest, row_scale) = np.random.default_rng(21), EXPERTS_OF_8_BITS[kind]

    def matrices(num_rows: int, k_len: int) -> W8A8Matrix:
        values = (rng.standard_normal((6, num_rows, k_len)) * 60).clip(-largest, largest)
        rows = (num_rows // 32, k_len // 128) if kind == "blocks" else (num_rows,)
        scales = rng.uniform(0.5, 2, (6, *rows)).astype(np.float32) / 500
        return W8A8Matrix(
            values=jnp.asarray(values).astype(dtype), scales=jnp.asarray(scales),
            row_scale=row_scale,
        )  # fmt: skip

    gate_up, down = matrices(256, 256), matrices(256, 128)
    x = jnp.asarray(rng.standard_normal((5, 256)), BF16)
    ids = jnp.asarray([rng.permutation(6)[:2] for _ in range(5)], jnp.int32)
    extras = ClampedExperts(
        gate_up_bias=jnp.asarray(rng.standard_normal((6, 256)), BF16),
        down_bias=jnp.asarray(rng.standard_normal((6, 256)), BF16),
        clamp=SwigluClamp(alpha=1.702, limit=7.0),
    )  # fmt: skip
    y = moe.expert_mlp(x, ids, ExpertWeights(gate_up, down), first_expert=0, **ON)
    biased = moe.expert_mlp(x, ids, ExpertWeights(gate_up, down, extras), first_expert=0, **ON)
    half = jnp.dtype(BF16)
    for m, r in np.ndindex(ids.shape):

        def alone(e: int, with_extras: bool, m: int = m) -> np.ndarray:
            first, second = (
                dataclasses.replace(w, values=w.values[e], scales=w.scales[e])
                for w in (gate_up, down)
            )
            given = (extras.gate_up_bias[e], extras.down_bias[e]) if with_extras else (None, None)
            rows = w8a8.quantize_rows(x[m : m + 1], first.row_coding, **ON)
            h = w8a8.w8a8_product(rows, first, given[0], out_dtype=half, **ON)
            h = swiglu(h, clamp=extras.clamp if with_extras else None, **ON)
            rows = w8a8.quantize_rows(h, second.row_coding, **ON)
            return w8a8.w8a8_product(rows, second, given[1], out_dtype=half, **ON)[0]

        e = int(ids[m, r])
        assert_bitwise_equal(y[m, r], alone(e, False), claim=f"row {m} of rank {r} as if alone")
        assert_bitwise_equal(biased[m, r], alone(e, True), claim="with biases as if alone")
        assert count_different_bits(y[m, r], alone((e + 1) % 6, False)) > 100
    own = jax.tree.map(lambda a: a[2:4] if a.ndim else a, ExpertWeights(gate_up, down))
    part = np.asarray(moe.expert_mlp(x, ids, own, first_expert=2, num_ranks=3, **ON))
    is_here = (np.asarray(ids) >= 2) & (np.asarray(ids) < 4)
    assert_bitwise_equal(part[is_here], np.asarray(y)[is_here], claim="a rank's own experts")
    assert is_here.any() and not part[~is_here].view(np.uint16).any()


def test_experts_are_added_in_order_of_rank_by_fused_products():
    rng = np.random.default_rng(4)
    y = rng.standard_normal((5, 3, 64)).astype(BF16)
    weights = rng.random((5, 3)).astype(np.float32)
    zeros, gain = jnp.zeros((5, 64), BF16), jnp.ones(64, BF16)
    total, _ = moe.combine_experts_add_rms_norm(
        jnp.asarray(y), jnp.asarray(weights), zeros, gain, eps=1e-5, **ON
    )
    expected = np.zeros((5, 64), np.float32)
    for r in range(3):  # a product has 32 bits, so float64 fuses it with the sum
        wide = weights[:, r, None].astype(np.float64) * y[:, r].astype(np.float64) + expected
        expected = wide.astype(np.float32)
    assert_bitwise_equal(total, expected.astype(BF16), claim="fused, left to right")


# ------------------------------------------------------------------------- float32 activations


def cut(x: np.ndarray) -> list[np.ndarray]:
    """Three bfloat16 parts that add up to a float32, the greatest first."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(BF16))
        x = x - parts[-1].astype(np.float32)
    return parts


def test_products_of_float32_are_those_of_its_parts():
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((9, 96)) * 2.0 ** rng.integers(-20, 20, (9, 96))).astype(np.float32)
    w = rng.standard_normal((21, 96)).astype(BF16)
    parts = cut(x)
    whole = np.sum([part.astype(np.float64) for part in parts], axis=0)
    assert (whole == x).all()  # nothing is lost
    first, second, third = (tensor_core.product(part, w) for part in parts)
    assert_bitwise_equal(
        multiply(x, w), (third + second) + first, claim="the parts, the smallest first"
    )


def test_attention_of_float32_is_within_float32_of_float64():
    """Two pages, of which the second is written in part; what follows is NaN and not read."""
    rng = np.random.default_rng(6)
    q = rng.standard_normal((1, 3, 2, 64)).astype(np.float32)
    pages = np.full((1, 2, 2, 1, 128, 64), np.nan, np.float32)
    kv = rng.standard_normal((2, 150, 64)).astype(np.float32)
    pages[0, 1, :, 0], pages[0, 0, :, 0, :22] = kv[:, :128], kv[:, 128:]
    positions = np.asarray([[147, 148, 149]], np.int32)
    found = attention(
        jnp.asarray(q),
        CachePlace(*map(jnp.asarray, (pages, np.int32([[1, 0]]), positions)), layer=0),
        window=None,
        profile=NumericsProfile(),
        **ON,
    )
    keys, values = kv.astype(np.float64)
    for t, h in np.ndindex(3, 2):
        seen = positions[0, t] + 1
        scores = keys[:seen] @ q[0, t, h].astype(np.float64) / 8
        weights = np.exp(scores - scores.max())
        exact = weights @ values[:seen] / weights.sum()
        assert np.abs(np.asarray(found[0, t, h]) - exact).max() < 2.0**-20


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"batch_size": 5, "prefill_chunk": 17}, {"batch_size": 3, "tp": 2}]
)
def test_answers_of_float32_depend_neither_on_batch_nor_on_mesh(options):
    config = dummy_config(num_kv_heads=2, window=100)
    profile = NumericsProfile(compute_dtype="float32")

    def digests(tp: int = 1, **sizes) -> list[str]:
        model = dummy_model(config, backend=Backend.REFERENCE, tp=tp, profile=profile)
        return [a.digest() for a in answers(model, requests(), **sizes)]

    assert digests(**options) == digests(batch_size=1, prefill_chunk=256)


GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "hopper_bits.json").read_text())
QUICK = ["layer 3x256x768", "rms_norm 576", "choose_token", "8 bits float8_e4m3fn 3x512x256"]


@pytest.mark.golden
@pytest.mark.parametrize("name", quick_and_slow(QUICK, GOLDEN["cases"]))
def test_operations_have_the_bits_of_a_gpu(name):
    """The digests are those of an H200, by `benchmarks/hopper_bits.py`."""
    assert digest_of(operation_case(name)(Backend.REFERENCE)) == GOLDEN["cases"][name]


ANSWERED = quick_and_slow(
    [("bundled", 2)],
    [
        ("experts", 2),
        ("bundled", 18),
        ("head 64, q/k norm", 8),
        ("head 128, biases, window", 8),
        ("experts", 8),
        ("float32 activations", 8),
        ("adapters", 8),
        ("w8a8 int8-w8a8", 8),
        ("w8a8 fp8-dynamic", 8),
        ("w8a8 fp8-block", 8),
        ("w8a8 experts int8-w8a8", 8),
        ("w8a8 experts fp8-dynamic", 8),
        ("w8a8 experts fp8-block", 8),
        ("family seed_oss", 8),
        ("family smollm3", 8),
        ("family exaone4", 8),
        ("family gemma3", 8),
        ("family glm4", 8),
        ("family granite", 8),
        ("family olmo2", 8),
        ("family olmo3", 8),
        ("family phi4_longrope", 8),
    ],
)


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize(("name", "count"), ANSWERED)
def test_whole_answers_have_the_bits_of_a_gpu(name, count):
    """Greedy and sampled, with filters and penalties, in another batch than on the GPU."""
    cases = answer_cases() | family_cases(GOLDEN_FOLDER / "hf")
    got = cases[name].answers(Backend.REFERENCE, count, batch_size=2, prefill_chunk=128)
    expected = [GOLDEN["answers"][f"{name} {i}"] for i in range(count)]
    assert [answer.digest()[:16] for answer in got] == expected


@pytest.mark.slow
@pytest.mark.golden
def test_whole_answers_with_sinks_have_the_bits_of_a_gpu():
    """Of gpt-oss's form: sinks, windows, experts with biases. The number is an H200's.

    It is the CRC-32 of all log-probabilities, of 8 tokens of each request.
    """
    config = load_config(GOLDEN_FOLDER / "hf" / "gpt_oss")
    experts = dataclasses.replace(config.experts, width=192)
    config = dataclasses.replace(
        config, head_dim=64, hidden_size=576, num_heads=16, num_kv_heads=2, experts=experts,
        eos_token_ids=(),
    )  # fmt: skip
    rng = np.random.default_rng(7)
    asked = [
        Request(
            prompt_token_ids=tuple(rng.integers(0, 320, length).tolist()),
            sampling=SamplingParams(max_tokens=8, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 127, 1, 130, 64, 33, 200, 23))
    ]
    sizes = {"batch_size": 3, "prefill_chunk": 128, "max_len": 256}
    got = answers(dummy_model(config, backend=Backend.REFERENCE), asked, **sizes)
    bits = b"".join(np.asarray(answer.logprobs, np.float32).tobytes() for answer in got)
    assert zlib.crc32(bits) == 2744263095


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize(("batch_size", "prefill_chunk"), [(4, 64), (8, 48)])
def test_whole_answers_of_a_hybrid_keep_their_bits(batch_size, prefill_chunk):
    """The CRC-32 that `test_families_sm90.py` asks of a GPU, of the same model and requests."""
    config = load_config(GOLDEN_FOLDER / "hf" / "qwen3_5")
    heads = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 64, "value_dim": 64}
    config = dataclasses.replace(
        config, head_dim=64, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=4,
        linear_attention=dataclasses.replace(config.linear_attention, **heads), eos_token_ids=(),
    )  # fmt: skip
    rng = np.random.default_rng(7)
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
            sampling=SamplingParams(max_tokens=8, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 127, 1, 130, 64, 33, 200, 23))
    ]
    model = dummy_model(config, backend=Backend.REFERENCE)
    sizes = {"batch_size": batch_size, "prefill_chunk": prefill_chunk, "max_len": 256}
    bits = b"".join(
        np.asarray(answer.logprobs, np.float32).tobytes()
        for answer in answers(model, asked, **sizes)
    )
    assert zlib.crc32(bits) == HYBRID_BITS["answers"]


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("case", WIDE_BITS["answers"])
def test_whole_answers_of_wide_heads_keep_their_bits(case):
    """The CRC-32 that `test_families_sm90.py` asks of a GPU, of the same model and requests."""
    name = case.removesuffix("_wide")
    config = load_config(GOLDEN_FOLDER / "hf" / name)
    config = dataclasses.replace(
        config, head_dim=64 if name == case else 256, hidden_size=512, intermediate_size=1024,
        num_heads=8, num_kv_heads=4, eos_token_ids=(),
    )  # fmt: skip
    if config.linear_attention is not None:
        heads = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 64, "value_dim": 64}
        linear = dataclasses.replace(config.linear_attention, **heads)
        config = dataclasses.replace(config, linear_attention=linear)
    rng = np.random.default_rng(7)
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
            sampling=SamplingParams(max_tokens=8, temperature=0.8 * (i % 2), seed=i),
        )
        for i, length in enumerate((5, 127, 1, 130, 64, 33, 200, 23))
    ]
    model = dummy_model(config, backend=Backend.REFERENCE)
    sizes = {"batch_size": 3, "prefill_chunk": 128, "max_len": 256}
    bits = b"".join(
        np.asarray(answer.logprobs, np.float32).tobytes()
        for answer in answers(model, asked, **sizes)
    )
    assert zlib.crc32(bits) == WIDE_BITS["answers"][case]


# ------------------------------------------------------------------------------------ the backend


@pytest.fixture(scope="module")
def model():
    return dummy_model(dummy_config(num_kv_heads=2), backend=Backend.REFERENCE)


@pytest.fixture(scope="module")
def alone(model):
    """Digests of answers one by one, with whole prompts."""
    return [a.digest() for a in answers(model, requests(), batch_size=1, prefill_chunk=256)]


def requests():
    return mixed_requests(7, vocab_size=320, max_tokens=5)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "prefill_chunk"), [(3, 64), (7, 17)])
def test_answers_do_not_depend_on_batch_and_chunks(model, alone, batch_size, prefill_chunk):
    got = answers(model, requests(), batch_size=batch_size, prefill_chunk=prefill_chunk)
    assert [a.digest() for a in got] == alone


@pytest.mark.slow
def test_answers_of_experts_depend_neither_on_batch_nor_on_mesh():
    config = dummy_config(num_kv_heads=2, experts=(8, 2))
    expected = None
    for tp, options in (
        (1, {"batch_size": 1, "prefill_chunk": 256}), (1, {"batch_size": 5, "prefill_chunk": 17}),
        (2, {"batch_size": 3}),
    ):  # fmt: skip
        model = dummy_model(config, backend=Backend.REFERENCE, tp=tp)
        got = [a.digest() for a in answers(model, requests(), **options)]
        expected = expected or got
        assert got == expected


@pytest.mark.slow
def test_answers_do_not_depend_on_the_mesh(alone):
    on_two = dummy_model(dummy_config(num_kv_heads=2), backend=Backend.REFERENCE, tp=2)
    got = answers(on_two, requests(), batch_size=3)
    assert [a.digest() for a in got] == alone


@pytest.mark.slow
@pytest.mark.control
def test_control_portable_answers_differ(alone):
    portable = dummy_model(dummy_config(num_kv_heads=2), backend=Backend.PORTABLE)
    got = answers(portable, requests(), batch_size=3)
    assert [a.digest() for a in got] != alone


def test_the_model_alone_decides_between_the_backends_of_a_cpu(monkeypatch):
    assert choose_backend().backend is Backend.REFERENCE
    refused = {Backend.REFERENCE: "it is made up"}
    choice = choose_backend(why_not_model=refused.get)
    assert choice.backend is Backend.PORTABLE and "it is made up" in choice.reason
    # What can be installed is asked for: another backend would have other bits.
    monkeypatch.setattr(reference, "what_to_install", lambda: "no compiler")
    with pytest.raises(ValueError, match="no compiler; --backend portable needs nothing"):
        choose_backend()
    with pytest.raises(ValueError, match="--backend reference cannot run here: no compiler"):
        choose_backend(Backend.REFERENCE)
    assert choose_backend(why_not_model=refused.get).backend is Backend.PORTABLE
    assert choose_backend(Backend.PORTABLE).backend is Backend.PORTABLE


def test_a_packaged_compiler_is_the_last_choice(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(reference_library.importlib.util, "find_spec", lambda name: name)
    assert "ziglang" not in reference_library.find_compiler()
    monkeypatch.setenv("PATH", "")
    assert reference_library.find_compiler()[1:4] == ["-m", "ziglang", "c++"]
    monkeypatch.setattr(reference_library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="looked for c.., g.., clang.., ziglang.*pip inst"):
        reference_library.find_compiler()
    monkeypatch.setenv("CXX", f"{sys.executable} -m another")
    assert reference_library.find_compiler() == [sys.executable, "-m", "another"]


def test_models_that_it_does_not_compute_are_refused_by_name():
    config = dummy_config()
    as_float32 = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    assert why_unsupported(config, NumericsProfile(), Backend.REFERENCE, 1) is None
    said = why_unsupported(config, as_float32, Backend.REFERENCE, 1)
    assert said and "with bfloat16 weights, not float32 with float32" in said
    as_float32 = NumericsProfile(compute_dtype="float32")
    assert why_unsupported(config, as_float32, Backend.REFERENCE, 1) is None
    experts = dummy_config(experts=(4, 2))
    assert why_unsupported(experts, NumericsProfile(), Backend.REFERENCE, 1) is None
    narrow = dummy_config(experts=(4, 2), expert_width=40)
    said = why_unsupported(narrow, NumericsProfile(), Backend.REFERENCE, 1)
    assert said and "widths of a multiple of 16" in said


PROBE = Path(__file__).parent / "reference_probe.cc"
COMPILED = {
    "c++": (["c++", "-march=native"], []),
    "c++ without AVX": (["c++"], []),
    "c++, 16 lanes without AVX-512": (["c++", "-march=native", "-DDETJAX_EVERY_WIDTH"], []),
    "clang": (["clang++-16", "-march=native"], []),
    "AArch64, emulated": (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64-static"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_the_headers_have_one_meaning_for_every_compiler_and_processor(name, tmp_path):
    """Vectors of 4, 8 and 16 against the definition on integers; one hash of all results."""
    compiler, emulator = COMPILED[name]
    if missing := [tool for tool in (compiler[0], *emulator) if not shutil.which(tool)]:
        pytest.skip(f"{missing} is not installed")
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wno-psabi"]
    options += ["-I", str(reference_library.SOURCES), str(PROBE), "-o", str(tmp_path / "probe")]
    subprocess.run([*compiler, *options], check=True)
    said = subprocess.run(
        [*emulator, str(tmp_path / "probe")], check=True, capture_output=True, text=True
    ).stdout.split()
    assert said == [
        *["products", "9a18e186ab315005"] * 3, "functions", "6d17bef9e9689b4c", "different", "0"
    ]  # fmt: skip


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(FileNotFoundError, match="CXX=no-such-compiler.*install g"):
        reference_library.find_compiler()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    reference_library.library.cache_clear()
    try:
        why = reference.what_to_install()
    finally:
        reference_library.library.cache_clear()
    assert why and "could not compile the reference kernels" in why


def test_compiling_is_said_and_happens_once(monkeypatch, tmp_path, caplog):
    """It takes a while in which nothing else is seen to happen."""
    commands: list[list[str]] = []
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(reference_library, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(reference_library, "_output_of", lambda c: commands.append([*c]) or "12.2")
    assert reference_library._compiled() == reference_library._compiled()
    compiled = {Path(c[c.index("-c") + 1]).name for c in commands if "-c" in c}
    assert compiled == {path.name for path in reference_library.SOURCES.glob("*.cc")}
    files = ["-std=c++17"] * (len(compiled) + 1)  # and what links them
    assert [command[1] for command in commands] == ["--version", *files, "--version"]
    (said,) = caplog.messages
    assert "compiling the reference kernels for this machine, once: some 10 s" in said


BROKEN_TABLES = """
from detjax.pallas_kernels import reference_library
def broken():
    raise OSError("gone")
if {is_broken}:
    reference_library.special_function_steps = broken
import jax.numpy as jnp
from detjax.pallas_kernels.rms_norm.reference import rms_norm
ones = jnp.ones((1, 64), jnp.bfloat16)
print(rms_norm(ones, ones[0], eps=1e-6)[0, 0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_operations_wait_for_the_tables_and_fail_where_they_cannot_be_read(is_broken):
    """They are filled by a thread, after the library is loaded."""
    code = BROKEN_TABLES.format(is_broken=is_broken)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if is_broken:
        assert run.returncode and "tables of special functions could not be read" in run.stderr
    else:
        assert run.stdout.strip() == "1", run.stderr
