# SPDX-License-Identifier: Apache-2.0
"""GeGLU on blocks of 16 rows and 128 columns."""

import jax
import jax.numpy as jnp
import numpy as np

from detjax.pallas_kernels.swiglu.portable import gate_columns

LINEAR = float(np.float32(1.5957691216057308))
"""`sqrt(8 / pi)`"""

CUBIC = float(np.float32(0.07135481282553225))
"""`0.044715 * sqrt(8 / pi)`"""


def _gelu(g: jax.Array) -> jax.Array:
    return g / (1.0 + jnp.exp(-g * (LINEAR + CUBIC * (g * g))))


@jax.jit
def geglu(gate_up) -> jax.Array:
    """See `api.geglu`."""
    return gate_columns(gate_up, _gelu, name="geglu")
