# SPDX-License-Identifier: Apache-2.0
"""What some experts have beside two matrices."""

from dataclasses import dataclass, field
from typing import Any

import jax

from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedExperts:
    """Biases of the experts of a rank, and the clamp of what they gate.

    Attributes:
        gate_up_bias: Of gates, then of ups, [u, E].
        down_bias: Of the second product, [u, D].
        clamp: Of the SwiGLU.
    """

    gate_up_bias: Any
    down_bias: Any
    clamp: SwigluClamp = field(metadata={"static": True})
