# SPDX-License-Identifier: Apache-2.0
"""A soft bound on logits, on blocks of 16 rows and 128 columns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import COLS, ROWS, pad_axis, run_blocks


@partial(jax.jit, static_argnames=("cap",))
def softcap(logits, *, cap: float) -> jax.Array:
    """See `api.softcap`."""
    num_rows, width = logits.shape
    padded = pad_axis(pad_axis(logits, 0, ROWS), 1, COLS)
    largest, inverse = float(np.float32(cap)), float(np.float32(1 / cap))

    def body(logits_ref, out_ref):
        block = pl.ds(pl.program_id(0) * ROWS, ROWS), pl.ds(pl.program_id(1) * COLS, COLS)
        out_ref[...] = jnp.tanh(logits_ref[block] * inverse) * largest

    out = run_blocks(
        body,
        padded,
        name="softcap",
        grid=(padded.shape[0] // ROWS, padded.shape[1] // COLS),
        out_shape=jax.ShapeDtypeStruct(padded.shape, jnp.float32),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda m, v: (m, v)),
    )
    return out[:num_rows, :width]
