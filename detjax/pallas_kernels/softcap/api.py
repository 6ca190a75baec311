# SPDX-License-Identifier: Apache-2.0
"""A soft bound on logits, as Gemma 2 has it."""

from detjax.array_types import Array, Float32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


def softcap(
    logits: Float32[Array, "M v"], *, cap: float, backend: Backend
) -> Float32[Array, "M v"]:
    """Bound logits.

    `out = float32(cap) * tanh(logits * float32(1 / cap))`

    Args:
        logits: Of this rank's tokens.
        cap: What magnitudes stay below; above 0.
        backend: Which implementation runs.

    Numerics:
        Elementwise in float32; tanh is the backend's.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    return KERNELS[backend].softcap(logits, cap=cap)
