# SPDX-License-Identifier: Apache-2.0
"""The gated activation of the feed-forward layer."""

from detjax.array_types import Activation, Array
from detjax.pallas_kernels.backend import Backend, refuse
from detjax.pallas_kernels.swiglu import portable


def swiglu(
    gate: Activation[Array, "M F"], up: Activation[Array, "M F"], *, backend: Backend
) -> Activation[Array, "M F"]:
    """Gate `up` by the SiLU of `gate`.

    `out[m, f] = round(gate[m, f] / (1 + exp(-gate[m, f])) * up[m, f])`

    Numerics:
        Elementwise in float32, in this order; one rounding. A gate below -88 gives a zero.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Shazeer 2020, arXiv:2002.05202. Hugging Face rounds after the SiLU and after the product.
    """
    if backend is not Backend.PORTABLE:
        refuse("swiglu", backend)
    return portable.swiglu(gate, up)
