# SPDX-License-Identifier: Apache-2.0
"""The sigmoid that gates the results of attention."""

from detjax.array_types import Activation, Array
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


def sigmoid_gate(
    heads: Activation[Array, "M i"], gate: Activation[Array, "M o"], *, backend: Backend
) -> Activation[Array, "M i"]:
    """Multiply results of attention by the sigmoids of their gates.

    `out[m, i] = round(1 / (1 + exp(-gate[m, O - I + i])) * heads[m, i])`

    Args:
        heads: This rank's heads.
        gate: Of each channel in its last columns; those before are not read.
        backend: Which implementation runs.

    Raises:
        ValueError: If `gate` has other rows or fewer columns.
        NotImplementedError: If the backend does not do it.

    Numerics:
        Elementwise in float32, in this order; one rounding.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Qiu et al. 2025, arXiv:2505.06708.
    """
    if len(gate) != len(heads) or gate.shape[1] < heads.shape[1]:
        raise ValueError(f"{gate.shape=} must have a gate for each of {heads.shape=}")
    return KERNELS[backend].sigmoid_gate(heads, gate)
