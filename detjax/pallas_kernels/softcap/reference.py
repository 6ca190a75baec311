# SPDX-License-Identifier: Apache-2.0
"""A soft bound on logits in the bits of the Hopper kernel, on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from detjax.pallas_kernels.hopper_sums import cap_factors
from detjax.pallas_kernels.reference_library import call


def softcap(logits, *, cap: float) -> jax.Array:
    """See `api.softcap`."""
    exponent, largest = cap_factors(cap)
    shape = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    return call("softcap", shape, logits, exponent=np.float32(exponent), cap=np.float32(largest))
