# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from detjax.testing import assert_bitwise_equal, assert_order_sensitive, assert_within_ulp, wide

F = np.float32


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (F(0.0), F(-0.0), "0x00000000"),
        (np.array([1, -0.0], F), np.array([1, 0.0], F), r"first at \(1,\)"),
        (np.zeros(3, F), np.zeros(3, np.float64), "float64"),
        (np.zeros(3, F), np.zeros((1, 3), F), "is not float32"),
        (np.zeros(3, F), F(0), "is not float32"),
        (np.array([0x7FC00000], "u4").view(F), np.array([0x7FC00001], "u4").view(F), "7fc00001"),
        (np.array([[1, 2], [3, 4]], F), np.array([[1, 2], [3, 5]], F), r"at \(1, 1\)"),
    ],
)
def test_bitwise_assertion_fails_on_any_difference(actual, expected, message):
    with pytest.raises(AssertionError, match=message) as caught:
        assert_bitwise_equal(actual, expected, claim="the claim")
    assert str(caught.value).startswith("the claim")


def test_bitwise_assertion_accepts_equal_bits_of_every_kind():
    nan = np.array([0x7FC00001, 0x80000000], "u4").view(F)
    for x in (nan, F(-0.0), np.zeros((0, 3), F), np.array([True, False]), np.arange(4)):
        assert_bitwise_equal(x, x.copy(), claim="itself")


def test_order_sensitivity_tells_wide_from_integer_terms():
    rng = np.random.default_rng(0)
    assert_order_sensitive(wide(rng, (4, 64)))
    with pytest.raises(AssertionError, match="proves nothing"):
        assert_order_sensitive(rng.integers(0, 9, (4, 64)).astype(F))


def test_ulp_bound_is_a_bound():
    x = np.array([1.0, 1000.0], F)
    one_up = np.nextafter(x, F(np.inf))
    assert_within_ulp(one_up, x.astype(np.float64), max_ulp=1.0, claim="one up")
    with pytest.raises(AssertionError, match="the bound is 0.5"):
        assert_within_ulp(one_up, x.astype(np.float64), max_ulp=0.5, claim="one up")
    with pytest.raises(AssertionError, match="nan"):
        assert_within_ulp(np.array([np.nan], F), np.ones(1), max_ulp=9.0, claim="nan")
