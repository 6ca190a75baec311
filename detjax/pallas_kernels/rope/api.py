# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding."""

from detjax.array_types import Activation, Array, Float32
from detjax.pallas_kernels.backend import Backend, refuse
from detjax.pallas_kernels.rope import portable


def rope(
    x: Activation[Array, "M H C"],
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    *,
    backend: Backend,
) -> Activation[Array, "M H C"]:
    """Rotate each pair of channels (c, c + C/2) by its token's angle.

    `out[m, h, c] = round(x[m, h, c] * cos[m, c] - x[m, h, c + C/2] * sin[m, c])`
    `out[m, h, c + C/2] = round(x[m, h, c + C/2] * cos[m, c] + x[m, h, c] * sin[m, c])`

    Args:
        x: Queries or keys.
        cos: Rows of the host's table, one a token.
        sin: Likewise.
        backend: Which implementation runs.

    Numerics:
        float32, rounded once. The tables are float64 on the host, rounded to float32.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Su et al. 2021, arXiv:2104.09864, in Hugging Face's half-split layout. Hugging Face rounds
        the tables to bfloat16 in a bfloat16 model; here they stay float32.
    """
    if backend is not Backend.PORTABLE:
        refuse("rope", backend)
    return portable.rope(x, cos, sin)
