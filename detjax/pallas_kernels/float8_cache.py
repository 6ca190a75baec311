# SPDX-License-Identifier: Apache-2.0
"""Keys and values of 8 bits in the cache: bits of float8_e4m3fn, stored as uint8.

They are rounded once, when they are written, and every query reads them widened, which is exact.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, run_blocks

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST_FLOAT8 = 448.0


def holds_float8(pages) -> bool:
    """Whether pages of a cache hold bits of float8."""
    return pages.dtype == jnp.uint8


def widened(entries, dtype: jnp.dtype) -> jax.Array:
    """Entries of the cache as they are read: exactly those of a float8, in `dtype`."""
    if holds_float8(entries):
        entries = lax.bitcast_convert_type(entries, FLOAT8)
    return entries.astype(dtype)


def narrowed(x) -> jax.Array:
    """Round activations to the bits of a float8.

    # ROUND: to nearest, ties to even; what is larger than 448 becomes 448, with its sign.
    """
    kept = jnp.clip(x.astype(jnp.float32), -LARGEST_FLOAT8, LARGEST_FLOAT8)
    return lax.bitcast_convert_type(kept.astype(FLOAT8), jnp.uint8)


@jax.jit
def narrow_rows(x) -> jax.Array:
    """`narrowed` in a kernel, of an array of any shape."""
    flat = pad_axis(x.reshape(-1, x.shape[-1]), 0, ROWS)
    width = x.shape[-1]

    def body(x_ref, out_ref):
        out_ref[...] = narrowed(x_ref[pl.ds(pl.program_id(0) * ROWS, ROWS), :])

    out = run_blocks(
        body, flat,
        name="narrow_rows", grid=(flat.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(flat.shape, jnp.uint8),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )  # fmt: skip
    return out[: x.size // width].reshape(x.shape)


def widened_pages(place, dtype: jnp.dtype):
    """The pages of some sequences, widened, one sequence after the other, and where they lie then.

    Args:
        place: Of tokens in a cache of float8.
        dtype: To widen to.
    """
    pages, page_table, _, layer = place
    wide = widened(pages[layer, page_table.reshape(-1)], dtype)[None]
    table = jnp.arange(page_table.size, dtype=jnp.int32).reshape(page_table.shape)
    return place._replace(pages=wide, page_table=table, layer=jnp.int32(0))
