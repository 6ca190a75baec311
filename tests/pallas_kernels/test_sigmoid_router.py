# SPDX-License-Identifier: Apache-2.0
"""A router of sigmoids: what is chosen, how it is weighed, and float32 weights of its product.

The claims of the kernel are proven in tests/invariance/test_kernel_claims.py.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear import sm90
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.moe import sm90_route_sigmoid
from detjax.pallas_kernels.moe.api import route_by_sigmoid
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.operation_cases import digest_of, operation_case

BF16, F32 = jnp.dtype(ml_dtypes.bfloat16), jnp.dtype(jnp.float32)
NUM_EXPERTS, TOP_K, SCALE = 12, 4, 2.5
WANTED = json.loads((Path(__file__).parents[1] / "golden" / "sigmoid_router_bits.json").read_text())
"""Digests of the reference backend, of operations that no GPU has run yet."""
CPUS = pytest.mark.parametrize("backend", [Backend.PORTABLE, Backend.REFERENCE])

RNG = np.random.default_rng(5)
LOGITS = RNG.standard_normal((33, NUM_EXPERTS)).astype(np.float32) * 3
CORRECTION = RNG.standard_normal(NUM_EXPERTS).astype(np.float32) * 0.3


def chosen(logits, correction, *, renormalise: bool, backend: Backend, scale: float = SCALE):
    ids, weights = route_by_sigmoid(
        jnp.asarray(logits), jnp.asarray(correction), num_experts=NUM_EXPERTS, top_k=TOP_K,
        renormalise=renormalise, scale=scale, backend=backend,
    )  # fmt: skip
    return np.asarray(ids), np.asarray(weights)


def sigmoids(logits, backend: Backend) -> np.ndarray:
    """By the operation itself: all experts, weighed without a correction, in order of id."""
    ids, weights = route_by_sigmoid(
        jnp.asarray(logits), jnp.zeros(NUM_EXPERTS), num_experts=NUM_EXPERTS, top_k=NUM_EXPERTS,
        renormalise=False, scale=1.0, backend=backend,
    )  # fmt: skip
    return np.take_along_axis(np.asarray(weights), np.argsort(np.asarray(ids), axis=1), axis=1)


@CPUS
def test_the_choice_and_its_weights_are_as_specified(backend):
    """From the sigmoids on, against IEEE arithmetic on the host; other orders differ."""
    p = sigmoids(LOGITS, backend)
    exact = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    # exp is within two ulp, the sum and the quotient round once each: four halves of 2**-23.
    assert np.abs(p - exact).max() < 4 * 2.0**-24
    ranked = p + CORRECTION
    order = np.argsort(-ranked, axis=1, kind="stable")[:, :TOP_K]
    own = np.take_along_axis(p, order, axis=1)
    total = functools.reduce(np.add, own.T) + np.float32(1e-20)
    for renormalise in (True, False):
        ids, weights = chosen(LOGITS, CORRECTION, renormalise=renormalise, backend=backend)
        shares = own / total[:, None] if renormalise else own
        assert_bitwise_equal(ids, order.astype(np.int32), claim="the greatest corrected first")
        assert_bitwise_equal(weights, shares * np.float32(SCALE), claim=f"{renormalise=}")
    assert_order_sensitive(own)
    plain = np.argsort(-p, axis=1, kind="stable")[:, :TOP_K]
    assert (plain != order).any(), "the correction takes part in the choice"
    corrected = np.take_along_axis(ranked, order, axis=1)
    assert count_different_bits(corrected * np.float32(SCALE), weights) > 0, "and in no weight"
    fused = (own.astype(np.float64) / total[:, None] * SCALE).astype(np.float32)
    assert count_different_bits(fused, (own / total[:, None]) * np.float32(SCALE)) > 0


@CPUS
def test_ties_go_to_the_lower_expert_and_nan_stays_in_its_row(backend):
    logits = np.zeros((4, NUM_EXPERTS), np.float32)
    correction = np.zeros(NUM_EXPERTS, np.float32)
    correction[[9, 2]] = 0.25
    logits[1, 7] = np.nan
    logits[2] = -200.0  # sigmoids of 0
    ids, weights = chosen(logits, correction, renormalise=True, backend=backend)
    assert ids[0].tolist() == ids[2].tolist() == [2, 9, 0, 1]
    assert (weights[0] == np.float32(SCALE / 4)).all()
    assert not weights[2].any(), "0 / 1e-20, not 0 / 0"
    assert 0 <= ids[1].min() and ids[1].max() < NUM_EXPERTS
    assert_bitwise_equal(ids[3], ids[0], claim="a row knows no other")
    assert_bitwise_equal(weights[3], weights[0], claim="a row knows no other")


@CPUS
def test_padding_has_no_part(backend):
    wide = np.concatenate([LOGITS, np.full((33, 4), 50, np.float32)], axis=1)
    longer = np.concatenate([CORRECTION, np.full(4, np.nan, np.float32)])
    options = {"renormalise": True, "backend": backend}
    for got, want in zip(
        chosen(wide, longer, **options), chosen(LOGITS, CORRECTION, **options), strict=True
    ):
        assert_bitwise_equal(got, want, claim="padding is not read")


def test_what_is_not_possible_is_refused():
    with pytest.raises(ValueError, match=r"a column for each of num_experts=12"):
        chosen(LOGITS[:, :-1], CORRECTION[:-1], renormalise=True, backend=Backend.PORTABLE)


def test_kernels_for_hopper_choose_alike():
    """Interpreted; weights within the roundings of exp, which XLA computes otherwise when fused."""
    for renormalise in (True, False):
        ids, weights = sm90_route_sigmoid.route_by_sigmoid(
            jnp.asarray(LOGITS), jnp.asarray(CORRECTION), num_experts=NUM_EXPERTS, top_k=TOP_K,
            renormalise=renormalise, scale=SCALE, interpret=True,
        )  # fmt: skip
        options = {"renormalise": renormalise, "backend": Backend.REFERENCE}
        want_ids, want = chosen(LOGITS, CORRECTION, **options)
        assert_bitwise_equal(ids, want_ids, claim="the same experts")
        assert (np.abs(np.asarray(weights) - want) <= 8 * 2.0**-24 * want).all()


# ------------------------------------------------------------------------------- float32 weights


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((37, 256)).astype(BF16)
    return x, rng.standard_normal((128, 256)).astype(np.float32) / 16


@CPUS
def test_a_product_by_float32_weights_is_nearer_than_by_rounded_ones(backend):
    x, w = operands()
    got = np.asarray(linear(jnp.asarray(x), jnp.asarray(w), out_dtype=F32, backend=backend))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    # docs/numerics.md: K / 16 steps, each within 2**-19 of the sum of magnitudes.
    assert (np.abs(got - exact) <= (256 / 16 + 1) * 2.0**-19 * magnitude).all()
    rounded = jnp.asarray(w.astype(BF16))
    less = np.asarray(linear(jnp.asarray(x), rounded, out_dtype=F32, backend=backend))
    assert np.abs(got - exact).mean() * 30 < np.abs(less - exact).mean()
    assert_order_sensitive(x[:2].astype(np.float32) * w[:2])
    same = linear(jnp.asarray(x), rounded.astype(F32), out_dtype=F32, backend=backend)
    assert_bitwise_equal(same, less, claim="weights that bfloat16 has give the bits of bfloat16")


def test_products_by_float32_weights_lower_for_hopper():
    """Three parts of the weights, one product, one sum."""
    shapes = jax.ShapeDtypeStruct((8, 256), BF16), jax.ShapeDtypeStruct((192, 256), F32)
    run = functools.partial(sm90.linear, bias=None, out_dtype=F32)
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 3
    with pytest.raises(NotImplementedError, match="float32 by float32"):
        run(jnp.zeros((8, 256)), jnp.zeros((192, 256)))


# ------------------------------------------------------------------------------------------ bits


@pytest.mark.golden
@pytest.mark.parametrize("name", WANTED)
def test_the_reference_keeps_its_bits(name):
    assert digest_of(operation_case(name)(Backend.REFERENCE)) == WANTED[name]


@pytest.mark.gpu
@pytest.mark.golden
@pytest.mark.parametrize("name", WANTED)
def test_bits_are_those_of_the_reference(name):
    found = operation_case(name)(Backend.SM90)
    assert digest_of(found) == WANTED[name], [np.asarray(x).ravel()[:4] for x in found]


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_experts", [12, 128, 160])
def test_the_kernel_knows_no_batch(num_experts):
    rng = np.random.default_rng(num_experts)
    logits = jnp.asarray(rng.standard_normal((257, num_experts)), jnp.float32)
    correction = jnp.asarray(rng.standard_normal(num_experts) * 0.2, jnp.float32)
    run = functools.partial(
        sm90_route_sigmoid.route_by_sigmoid, correction=correction, num_experts=num_experts,
        top_k=TOP_K, renormalise=True, scale=SCALE,
    )  # fmt: skip
    whole = run(logits)
    for count in (1, 2, 6, 100):
        for found, want in zip(run(logits[-count:]), whole, strict=True):
            assert_bitwise_equal(found, want[-count:], claim="a route knows no batch")
    shifted = run(logits, correction=correction + 0.01 * jnp.arange(num_experts, dtype=F32))
    assert count_different_bits(shifted[0], whole[0]) > 0, "the control"
