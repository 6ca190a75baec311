# SPDX-License-Identifier: Apache-2.0
"""The weights of experts."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from detjax.array_types import Activation, Array
from detjax.pallas_kernels.linear.quantized import W8A8Matrix
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


class ExpertWeights(NamedTuple):
    """The matrices of the experts of a rank, (out, in), and what some have in addition.

    Attributes:
        gate_up: Rows of gate, then of up, of each expert; E = 2 F.
        down: The second matrix of each.
        extras: Biases, and the clamp of the SwiGLU; None has none.
    """

    gate_up: Activation[Array, "u E D"] | W8A8Matrix
    down: Activation[Array, "u D F"] | W8A8Matrix
    extras: ClampedExperts | None = None
