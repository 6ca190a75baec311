# SPDX-License-Identifier: Apache-2.0
"""What a tensor core of Hopper adds, in NumPy: the definition that the reference kernels follow."""

import numpy as np

DEPTH = 16
"""Products that a step adds to the accumulator."""
FRACTION_BITS = 25
"""What a step keeps of each term, below the largest exponent among them."""


def exponent_of(x: np.ndarray) -> np.ndarray:
    """Return exponents as float32 stores them: -126 is the least, also of subnormal numbers."""
    return np.maximum(np.frexp(x)[1] - 1, -126)


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
