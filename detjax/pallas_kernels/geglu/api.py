# SPDX-License-Identifier: Apache-2.0
"""The activation of the feed-forward layer that is gated by a GELU."""

from detjax.array_types import Activation, Array
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


def geglu(gate_up: Activation[Array, "M E"], *, backend: Backend) -> Activation[Array, "M F"]:
    """Gate the second half of the columns by the GELU of the first, in its form with tanh.

    `out[m, f] = round(g / (1 + exp(-g * (a + b * (g * g)))) * u)`, `g = gate_up[m, f]`,
    `u = gate_up[m, F + f]`, `a = float32(sqrt(8 / pi))`, `b = float32(0.044715 * sqrt(8 / pi))`

    Args:
        gate_up: This rank's columns of gate, then of up; E = 2 F.
        backend: Which implementation runs.

    Numerics:
        Elementwise in float32, in this order; one rounding. The quotient is
        `g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3)))`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return KERNELS[backend].geglu(gate_up)
