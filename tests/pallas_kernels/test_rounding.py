# SPDX-License-Identifier: Apache-2.0
"""What is rounded, to what and how often: exactly, against IEEE arithmetic on the host."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear_add, linear_partial
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import add_rms_norm
from detjax.testing import assert_bitwise_equal, count_different_bits, wide

ON = {"backend": Backend.PORTABLE}
BF16 = ml_dtypes.bfloat16
ROWS, WIDTH = 5, 192


def draw(seed: int, *shape: int) -> np.ndarray:
    return wide(np.random.default_rng(seed), shape, 0.7)


def rounded_once(partial, residual, bias) -> np.ndarray:
    """The residual stream: float32 sums in the order of the specification, then one rounding."""
    return (residual.astype(np.float32) + (partial + bias.astype(np.float32))).astype(BF16)


def rounded_twice(partial, residual, bias) -> np.ndarray:
    """The control: the product is rounded before it is added."""
    total = (partial + bias.astype(np.float32)).astype(BF16)
    return (residual.astype(np.float32) + total.astype(np.float32)).astype(BF16)


def assert_rounds_once(found, partial, residual, bias) -> None:
    want, control = (f(partial, residual, bias) for f in (rounded_once, rounded_twice))
    assert count_different_bits(want, control) > 0
    assert_bitwise_equal(np.asarray(found), want, claim="the residual stream is rounded once")


def test_a_norm_rounds_the_residual_stream_once():
    partial, residual = draw(1, ROWS, WIDTH), draw(2, ROWS, WIDTH).astype(BF16)
    bias, gain = (draw(seed, WIDTH).astype(BF16) for seed in (3, 4))
    found, _ = add_rms_norm(
        jnp.asarray(partial), jnp.asarray(residual), jnp.asarray(bias), jnp.asarray(gain),
        eps=1e-5, **ON,
    )  # fmt: skip
    assert_rounds_once(found, partial, residual, bias)


def test_a_product_rounds_the_residual_stream_once():
    k_len = 64
    x, w = (jnp.asarray(draw(seed, n, k_len), jnp.bfloat16) for seed, n in ((5, ROWS), (6, WIDTH)))
    residual, bias = draw(7, ROWS, WIDTH).astype(BF16), draw(8, WIDTH).astype(BF16)
    reduction = tree_reduction(k_len, NumericsProfile())
    partial = np.asarray(linear_partial(x, w, reduction=reduction, **ON))
    found = linear_add(x, w, jnp.asarray(residual), jnp.asarray(bias), reduction=reduction, **ON)
    assert_rounds_once(found, partial, residual, bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_softmax_weights_are_rounded_to_the_compute_dtype_and_their_sum_is_not(dtype):
    """Two keys of weights 1 and w, with values -r and 1 where r is w in bfloat16.

    The numerator `r - r` is 0 if the second weight was rounded, and `w - r` if not.
    """
    channels, block = 16, 128
    profile = NumericsProfile(compute_dtype=dtype)
    score = -0.7310585
    q = np.zeros((1, 1, 1, channels), np.float32)
    q[..., 0] = 1.0
    pages = np.zeros((1, 1, 2, 1, block, channels), np.float32)
    pages[0, 0, 0, 0, 1, 0] = score * 4  # scores are divided by the root of 16
    pages = pages.astype(BF16).astype(np.float32)
    exact = np.exp(np.float64(pages[0, 0, 0, 0, 1, 0]) / 4)
    weight = np.float32(exact).astype(BF16).astype(np.float32)
    assert abs(weight - exact) > 2.0**-11  # far from bfloat16, on either side
    pages[0, 0, 1, 0, :2, 0] = -weight, 1.0
    out = attention(
        jnp.asarray(q, profile.activation_dtype),
        CachePlace(
            jnp.asarray(pages, profile.activation_dtype),
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones((1, 1), jnp.int32),
            layer=0,
        ),
        window=None,
        profile=profile,
        **ON,
    )
    found = float(np.asarray(out, np.float64)[0, 0, 0, 0])
    if dtype == "bfloat16":
        assert found == 0.0
    else:
        assert found == pytest.approx((exact - weight) / (1 + exact), rel=1e-2)
