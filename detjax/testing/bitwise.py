# SPDX-License-Identifier: Apache-2.0
"""Equality of raw bits, and a guard against tests whose sums do not depend on order."""

import numpy as np


def raw_bits(x) -> np.ndarray:
    """View an array's elements as unsigned integers of the same width."""
    array = np.asarray(x)
    if array.dtype == bool:
        return array.astype(np.uint8)
    return (
        np.ascontiguousarray(array)
        .reshape(-1)
        .view(f"u{array.dtype.itemsize}")
        .reshape(array.shape)
    )


def assert_bitwise_equal(actual, expected, *, claim: str) -> None:
    """Require the same shape, dtype and bits: -0.0 is not 0.0, and each NaN is its own payload.

    Args:
        actual: An array, or anything NumPy can make one of.
        expected: Likewise.
        claim: The sentence that is false if this fails; printed first.

    Raises:
        AssertionError: With the count, the first index and both values in hexadecimal.
    """
    a, b = np.asarray(actual), np.asarray(expected)
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"{claim}\n{a.dtype}{list(a.shape)} is not {b.dtype}{list(b.shape)}")
    bits_a, bits_b = raw_bits(a), raw_bits(b)
    different = bits_a != bits_b
    if not different.any():
        return
    first = tuple(int(i[0]) for i in np.nonzero(different.reshape(a.shape or (1,))))
    where = first if a.shape else ()
    width = 2 * a.dtype.itemsize
    raise AssertionError(
        f"{claim}\n{int(different.sum())} of {a.size} elements differ, first at {where}: "
        f"{a[where]} (0x{int(bits_a[where]):0{width}x}) is not "
        f"{b[where]} (0x{int(bits_b[where]):0{width}x})"
    )


def count_different_bits(actual, expected) -> int:
    """How many elements differ in any bit; for controls that must differ."""
    return int((raw_bits(actual) != raw_bits(expected)).sum())


def assert_order_sensitive(terms: np.ndarray) -> None:
    """Require that a float32 sum over the last axis depends on its order.

    Args:
        terms: The terms a probe adds; at least one row must change when added backwards.

    Raises:
        AssertionError: If no row does, so the probe could not fail.
    """
    forward = np.zeros(terms.shape[:-1], np.float32)
    backward = np.zeros(terms.shape[:-1], np.float32)
    for k in range(terms.shape[-1]):
        forward = forward + terms[..., k].astype(np.float32)
        backward = backward + terms[..., -1 - k].astype(np.float32)
    if (raw_bits(forward) == raw_bits(backward)).all():
        raise AssertionError("no sum here depends on its order, so this probe proves nothing")


def assert_within_ulp(actual, reference, *, max_ulp: float, claim: str) -> None:
    """Require closeness to a float64 reference, in units of the last place of `actual`'s dtype.

    Args:
        actual: float32 values.
        reference: float64 values of the same shape.
        max_ulp: The bound, with its derivation beside the call.
        claim: The sentence that is false if this fails.

    Raises:
        AssertionError: With the worst element.
    """
    a, r = np.asarray(actual), np.asarray(reference, np.float64)
    error = np.abs(a.astype(np.float64) - r) / np.spacing(np.abs(r).astype(a.dtype))
    worst = np.unravel_index(np.argmax(error), error.shape)
    if not error[worst] <= max_ulp:
        raise AssertionError(
            f"{claim}\n{a[worst]} is {error[worst]:.1f} ulp from {r[worst]} at {worst}; "
            f"the bound is {max_ulp}"
        )


def wide(rng: np.random.Generator, shape: tuple[int, ...], spread: float = 2.0) -> np.ndarray:
    """Random float32 values whose exponents vary, so that sums of them depend on order."""
    return (rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape))).astype(
        np.float32
    )
