# SPDX-License-Identifier: Apache-2.0
"""GeGLU in the bits of the Hopper kernel, on the CPU."""

import jax
import numpy as np

from detjax.pallas_kernels.geglu.portable import CUBIC, LINEAR
from detjax.pallas_kernels.reference_library import call


def geglu(gate_up) -> jax.Array:
    """See `api.geglu`."""
    num_rows, width = gate_up.shape
    out = jax.ShapeDtypeStruct((num_rows, width // 2), gate_up.dtype)
    return call("geglu", out, gate_up, linear=np.float32(LINEAR), cubic=np.float32(CUBIC))
