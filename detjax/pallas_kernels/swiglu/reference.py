# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the bits of the Hopper kernel, on the CPU."""

import jax

from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


def swiglu(gate_up, *, clamp: SwigluClamp | None = None) -> jax.Array:
    """See `api.swiglu`.

    Raises:
        NotImplementedError: With a clamp.
    """
    if clamp is not None:
        raise NotImplementedError(f"the reference backend has no {clamp}; use portable")
    num_rows, width = gate_up.shape
    return call("swiglu", jax.ShapeDtypeStruct((num_rows, width // 2), gate_up.dtype), gate_up)
