# SPDX-License-Identifier: Apache-2.0
"""The gated activation of the feed-forward layer."""

from detjax.array_types import Activation, Array
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


def swiglu(
    gate_up: Activation[Array, "M E"], *, clamp: SwigluClamp | None = None, backend: Backend
) -> Activation[Array, "M F"]:
    """Gate the second half of the columns by the SiLU of the first.

    `out[m, f] = round(g / (1 + exp(-g)) * u)`, `g = gate_up[m, f]`, `u = gate_up[m, F + f]`

    With a clamp, `round(c / (1 + exp(-(alpha * c))) * (d + 1))`, `c = min(g, limit)`,
    `d = min(max(u, -limit), limit)`.

    Args:
        gate_up: This rank's columns of gate, then of up; E = 2 F.
        clamp: `alpha` and `limit`, rounded to float32; None does not clamp.
        backend: Which implementation runs.

    Numerics:
        Elementwise in float32, in this order; one rounding. A gate below -88 gives a zero.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Shazeer 2020, arXiv:2002.05202. Hugging Face rounds after the SiLU and after the product.
    """
    return KERNELS[backend].swiglu(gate_up, clamp=clamp)
