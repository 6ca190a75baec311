# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the bits of the Hopper kernel, on the CPU."""

import jax

from detjax.pallas_kernels.reference_library import call


def swiglu(gate_up) -> jax.Array:
    """See `api.swiglu`."""
    num_rows, width = gate_up.shape
    return call("swiglu", jax.ShapeDtypeStruct((num_rows, width // 2), gate_up.dtype), gate_up)
