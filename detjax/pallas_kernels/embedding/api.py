# SPDX-License-Identifier: Apache-2.0
"""Token embeddings."""

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Int32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


def embed(
    table: Activation[Array, "V d"],
    token_ids: Int32[Array, " M"],
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M d"]:
    """Look up one row a token.

    `out[m] = table[token_ids[m]]`

    Args:
        table: This rank's columns of the embedding table.
        token_ids: In [0, V); checked at the boundary, clipped here. A number below 0 is padding,
            of which nobody reads what comes of it: any row of the table, or zeros.
        out_dtype: The profile's activation dtype; at least as wide as the table's, so exact.
        backend: Which implementation runs.

    Numerics:
        Moves and widens bits; no rounding.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return KERNELS[backend].embed(table, token_ids, out_dtype=out_dtype)
