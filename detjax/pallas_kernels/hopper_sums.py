# SPDX-License-Identifier: Apache-2.0
"""The structure of sums on Hopper that `sm90` and `reference` share. Imports no Mosaic."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from detjax.numerics import LOG2_E
from detjax.pallas_kernels.sm90_hardware import LANES

LOGIT_BLOCK = 128
"""Logits of a block: 32 lanes of 4."""

KEY_BLOCK = 128
"""Keys of one online-softmax step, and of one page."""

NUM_PARTS = 3
"""bfloat16 values whose sum is a float32: 8 significant bits each, of 24."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSum:
    """How a row of `width` channels is added up: of `width` alone.

    Attributes:
        is_wide: Whether a row is chunks of a whole warpgroup; else `lanes` threads have a row.
        vec_len: Neighbouring channels of one thread.
        lanes: Threads of a narrow row.
        num_parts: Chunks of a wide row; column parts of a narrow one (halves, as RoPE has them).
    """

    is_wide: bool
    vec_len: int
    lanes: int
    num_parts: int


def row_sum(width: int) -> RowSum:
    """The fixed structure of the sum over `width` channels.

    Raises:
        ValueError: If no structure is defined for this width.
    """
    if width < 64 or width > 8192 or width % (32 if width <= 256 else 64):
        raise ValueError(
            "sm90 RMSNorm needs a multiple of 32 channels from 64 to 256, or of 64 up to 8192, "
            f"not {width}"
        )
    if width <= 256:
        half = width // 2
        vec_len = next(v for v in (8, 4, 2) if half % (8 * v) == 0)
        return RowSum(is_wide=False, vec_len=vec_len, lanes=8, num_parts=2)
    if width % LANES == 0:
        vec_len = next(v for v in (8, 4, 2, 1) if width % (LANES * v) == 0)
        chunks = width // (LANES * vec_len)
        return RowSum(is_wide=True, vec_len=vec_len, lanes=LANES, num_parts=chunks)
    return RowSum(is_wide=False, vec_len=2, lanes=32, num_parts=1)


def score_scale(channels: int) -> float:
    """Multiply scores by this, then take exp2."""
    return float(np.float32(LOG2_E * channels**-0.5))


def cap_factors(cap: float, scale: float = 1.0) -> tuple[float, float]:
    """A and B of a soft cap, `B * tanh(x * scale / cap)` with `B = cap`, in float32.

    It is `fma(1 / (exp2(x * A) + 1), -2 B, B)`, as `tanh(y) = 1 - 2 / (exp(2 y) + 1)`.
    """
    return float(np.float32(2 * LOG2_E * scale / cap)), float(np.float32(cap))


def score_cap_factors(channels: int, cap: float) -> tuple[float, float]:
    """`cap_factors` of scores, of which exp2 is taken: B has the factor log2(e)."""
    exponent, _ = cap_factors(cap, channels**-0.5)
    return exponent, float(np.float32(cap * LOG2_E))


def first_operand(first_token_id) -> jax.Array:
    """The token of the first column, as an operand."""
    return jnp.asarray(first_token_id, jnp.int32).reshape(1)
