# SPDX-License-Identifier: Apache-2.0
"""What a tensor core of Hopper adds, in NumPy: the definition that the reference kernels follow."""

import numpy as np

DEPTH = 16
"""Products that a step adds to the accumulator."""
FRACTION_BITS = 25
"""What a step keeps of each term, below the largest exponent among them."""

FLOAT8_DEPTH, FLOAT8_FRACTION_BITS, FLOAT8_LEAST = 32, 13, -6
"""The like of float8 (e4m3fn), and the exponent of its subnormal numbers."""


def exponent_of(x: np.ndarray, least: int = -126) -> np.ndarray:
    """Return exponents as the format stores them: `least` is that of subnormal numbers, too."""
    return np.maximum(np.frexp(x)[1] - 1, least)


def add_products(total: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Add one step of products: float32 `total` [M, N], bfloat16 `x` [M, 16] and `w` [N, 16].

    All terms are cut at 25 bits below the largest exponent and added exactly; the sum is rounded
    toward zero to float32. Infinities and NaN follow IEEE's rules.
    """
    x, w = x.astype(np.float64)[:, None], w.astype(np.float64)[None]
    terms = np.concatenate([x * w, total.astype(np.float64)[..., None]], axis=2)
    of_terms = [exponent_of(x) + exponent_of(w), exponent_of(total)[..., None]]
    exponents = np.where(terms == 0, -1000, np.concatenate(of_terms, axis=2)).max(axis=2)
    unit = 2.0 ** (np.where(exponents == -1000, 0, exponents) - FRACTION_BITS)
    added = np.trunc(terms / unit[..., None]).sum(axis=2) * unit
    last_bit = 2.0 ** np.maximum(np.frexp(added)[1] - 24, -149)
    return (np.trunc(added / last_bit) * last_bit).astype(np.float32) + np.float32(0)


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Multiply bfloat16 rows [M, K] by weights [N, K], K in order: float32 [M, N]."""
    total = np.zeros((len(x), len(w)), np.float32)
    with np.errstate(all="ignore"):
        for k in range(0, x.shape[1], DEPTH):
            total = add_products(total, x[:, k : k + DEPTH], w[:, k : k + DEPTH])
    return total


def add_float8_products(total: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Add one step of products: float32 `total` [M, N], float8 `x` [M, 32] and `w` [N, 32].

    As `add_products`, with 13 bits kept of each term and of the sum.
    """
    x, w = x.astype(np.float64)[:, None], w.astype(np.float64)[None]
    terms = np.concatenate([x * w, total.astype(np.float64)[..., None]], axis=2)
    of_products = exponent_of(x, FLOAT8_LEAST) + exponent_of(w, FLOAT8_LEAST)
    exponents = np.concatenate([of_products, exponent_of(total)[..., None]], axis=2)
    exponents = np.where(terms == 0, -1000, exponents).max(axis=2)
    unit = 2.0 ** (np.where(exponents == -1000, 0, exponents) - FLOAT8_FRACTION_BITS)
    added = np.trunc(terms / unit[..., None]).sum(axis=2) * unit
    last_bit = 2.0 ** (np.frexp(added)[1] - 1 - FLOAT8_FRACTION_BITS)
    return (np.trunc(added / last_bit) * last_bit).astype(np.float32) + np.float32(0)


def float8_product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Multiply float8 rows [M, K] by weights [N, K]: chunks of 128 of K, added in float32.

    The last chunk may be shorter. Steps of zeros behind it would change nothing.
    """
    total = np.zeros((len(x), len(w)), np.float32)
    with np.errstate(all="ignore"):
        for chunk in range(0, x.shape[1], 128):
            own = np.zeros_like(total)
            for k in range(chunk, chunk + 128, FLOAT8_DEPTH):
                own = add_float8_products(own, x[:, k : k + 32], w[:, k : k + 32])
            total = total + own
    return total
