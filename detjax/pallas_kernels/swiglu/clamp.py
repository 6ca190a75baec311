# SPDX-License-Identifier: Apache-2.0
"""The numbers of a clamped SwiGLU."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SwigluClamp:
    """SwiGLU of clamped operands, `min(g, limit) * sigmoid(alpha * min(g, limit)) * (u + 1)`.

    Attributes:
        alpha: Factor inside the sigmoid.
        limit: Gates are at most this; ups are between its negative and this.
    """

    alpha: float
    limit: float
