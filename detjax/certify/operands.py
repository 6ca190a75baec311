# SPDX-License-Identifier: Apache-2.0
"""Operands of products that reach every part of what a tensor core does."""

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16

PRODUCT_KINDS = (
    "normal", "wide", "subnormal", "tiny", "huge", "overflow", "cancelling", "zeros", "special"
)  # fmt: skip
"""Magnitudes of the operands of a product."""


def draw_operands(kind: str, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw bfloat16 operands [M, K] and [N, K] of one of `PRODUCT_KINDS`."""
    rng = np.random.default_rng([*kind.encode(), m, k, n])
    x, w = rng.standard_normal((m, k)), rng.standard_normal((n, k)) * 0.02
    if kind in ("wide", "special"):
        x, w = (a * 2.0 ** rng.integers(-20, 20, a.shape) for a in (x, w))
    if kind == "subnormal":
        x, w = x * 2.0**-130, w * 50
    if kind == "tiny":
        x, w = x * 2.0**-70, w * 50 * 2.0**-60
    if kind == "huge":
        x, w = x * 2.0**60, w * 50 * 2.0**62
    if kind == "overflow":
        x, w = (
            x * 2.0 ** rng.integers(60, 66, x.shape),
            w * 50 * 2.0 ** rng.integers(58, 64, w.shape),
        )
    if kind == "cancelling":  # pairs whose products cancel, also above the largest float32
        x, w = x * 2.0**100, w * 2.0 ** rng.integers(-100, 100, (1, k // 2)).repeat(2, axis=1)
        x[:, 1::2], w[:, 1::2] = -x[:, ::2], w[:, ::2]
        x[:, ::16] *= 1 + 2.0**-6  # of each step one pair leaves a rest
    if kind == "zeros":
        x, w = rng.integers(-1, 2, x.shape) * 2.0**-90, rng.integers(-1, 2, w.shape) * 2.0**-55
        x, w = x * rng.choice([1, -1], x.shape), w * rng.choice([1, -1], w.shape)
    if kind == "special":
        for a in (x, w):
            a[rng.random(a.shape) < 0.002] = np.inf
            a[rng.random(a.shape) < 0.002] = -np.inf
            a[rng.random(a.shape) < 0.001] = np.nan
            a[rng.random(a.shape) < 0.2] = 0
    return x.astype(BF16), w.astype(BF16)
