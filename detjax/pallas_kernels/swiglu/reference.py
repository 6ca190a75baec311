# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the bits of the Hopper kernel, on the CPU."""

import jax
import numpy as np

from detjax.pallas_kernels.reference_library import call
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


def swiglu(gate_up, *, clamp: SwigluClamp | None = None) -> jax.Array:
    """See `api.swiglu`."""
    num_rows, width = gate_up.shape
    out = jax.ShapeDtypeStruct((num_rows, width // 2), gate_up.dtype)
    alpha, limit, shift = (1.0, np.inf, 0.0) if clamp is None else (clamp.alpha, clamp.limit, 1.0)
    numbers = {"alpha": alpha, "limit": limit, "shift": shift}
    return call("swiglu", out, gate_up, **{k: np.float32(v) for k, v in numbers.items()})
