# SPDX-License-Identifier: Apache-2.0
"""Gates of attention in the bits of the Hopper kernel, on the CPU."""

import jax

from detjax.pallas_kernels.reference_library import call


def sigmoid_gate(heads, gate) -> jax.Array:
    """See `api.sigmoid_gate`."""
    return call("sigmoid_gate", jax.ShapeDtypeStruct(heads.shape, gate.dtype), heads, gate)
