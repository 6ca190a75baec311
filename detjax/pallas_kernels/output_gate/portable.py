# SPDX-License-Identifier: Apache-2.0
"""Gates of attention on blocks of 16 rows and 128 columns."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.swiglu.portable import gate_columns


def _sigmoid(g: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-g))


def _own(gate, heads):
    """Gates without the columns before them."""
    return gate[:, gate.shape[1] - heads.shape[1] :]


@jax.jit
def sigmoid_gate(heads, gate) -> jax.Array:
    """See `api.sigmoid_gate`."""
    joined = jnp.concatenate([_own(gate, heads), heads], axis=1)
    return gate_columns(joined, _sigmoid, name="sigmoid_gate")
