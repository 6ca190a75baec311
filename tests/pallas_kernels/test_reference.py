# SPDX-License-Identifier: Apache-2.0
"""The reference kernels: the C++ against the definition in NumPy, and the claims of the backend."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.certify.operands import PRODUCT_KINDS, draw_operands
from detjax.models.abstract import why_unsupported
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import reference, reference_library, tensor_core
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.backend_choice import choose_backend
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.reference_tables import FIRST, special_function_tables
from detjax.pallas_kernels.rms_norm.sm90 import row_sum
from detjax.pallas_kernels.sm90_rows import pairwise
from detjax.testing.bitwise import assert_bitwise_equal, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import answers, dummy_config, dummy_model, mixed_requests
from detjax.testing.operation_cases import (
    answer_cases,
    digest_of,
    operation_cases,
)

BF16, F32 = ml_dtypes.bfloat16, jnp.dtype(jnp.float32)
ON = {"backend": Backend.REFERENCE}
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
    for shape in ((49, 240, 50), (7, 48, 21)):  # no multiple of a vector
        x, w = draw_operands(kind, *shape)
        assert_bitwise_equal(
            multiply(x, w),
            canonical(tensor_core.product(x, w)),
            claim=f"{kind} products of vectors of {lanes} have the bits of the definition",
        )


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


@pytest.mark.parametrize("function", ["ex2", "rcp", "rsqrt"])
def test_tables_are_within_two_ulp(function):
    bits = dict(zip(FIRST, special_function_tables(), strict=True))[function]
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


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "hopper_bits.json").read_text())
QUICK = ["product wide 64x256x64", "layer 3x256x768", "rms_norm 576", "choose_token", "noise"]


@pytest.mark.golden
@pytest.mark.parametrize("name", quick_and_slow(QUICK, GOLDEN["cases"]))
def test_operations_have_the_bits_of_a_gpu(name):
    """The digests are those of an H200, by `benchmarks/hopper_bits.py`."""
    assert digest_of(operation_cases()[name](Backend.REFERENCE)) == GOLDEN["cases"][name]


ANSWERED = quick_and_slow(
    [("bundled", 2)], [("bundled", 18), ("head 64, q/k norm", 8), ("head 128, biases, window", 8)]
)


@pytest.mark.golden
@pytest.mark.parametrize(("name", "count"), ANSWERED)
def test_whole_answers_have_the_bits_of_a_gpu(name, count):
    """Greedy and sampled, with filters and penalties, in another batch than on the GPU."""
    make, requests = answer_cases()[name]
    got = answers(make(Backend.REFERENCE), requests[:count], batch_size=2, prefill_chunk=128)
    expected = [GOLDEN["answers"][f"{name} {i}"] for i in range(count)]
    assert [answer.digest()[:16] for answer in got] == expected


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


@pytest.mark.parametrize(("batch_size", "prefill_chunk"), [(3, 64), (7, 17)])
def test_answers_do_not_depend_on_batch_and_chunks(model, alone, batch_size, prefill_chunk):
    got = answers(model, requests(), batch_size=batch_size, prefill_chunk=prefill_chunk)
    assert [a.digest() for a in got] == alone


def test_answers_do_not_depend_on_the_mesh(alone):
    on_two = dummy_model(dummy_config(num_kv_heads=2), backend=Backend.REFERENCE, tp=2)
    got = answers(on_two, requests(), batch_size=3)
    assert [a.digest() for a in got] == alone


@pytest.mark.control
def test_control_portable_answers_differ(alone):
    got = answers(dummy_model(dummy_config(num_kv_heads=2)), requests(), batch_size=3)
    assert [a.digest() for a in got] != alone


def test_it_is_used_only_if_it_is_asked_for():
    assert choose_backend(Backend.REFERENCE).backend is Backend.REFERENCE
    assert choose_backend().backend is not Backend.REFERENCE


def test_models_that_it_does_not_compute_are_refused_by_name():
    config = dummy_config()
    as_float32 = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    assert why_unsupported(config, NumericsProfile(), Backend.REFERENCE, 1) is None
    said = why_unsupported(config, as_float32, Backend.REFERENCE, 1)
    assert said and "bfloat16, not float32" in said
    said = why_unsupported(dummy_config(experts=(4, 2)), NumericsProfile(), Backend.REFERENCE, 1)
    assert said and "no mixtures of experts" in said


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(FileNotFoundError, match="CXX=no-such-compiler.*install g"):
        reference_library.find_compiler()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    reference_library.library.cache_clear()
    try:
        why = reference.why_not_here()
    finally:
        reference_library.library.cache_clear()
    assert why and "could not compile the reference kernels" in why
