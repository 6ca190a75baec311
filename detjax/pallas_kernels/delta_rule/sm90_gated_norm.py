# SPDX-License-Identifier: Apache-2.0
"""The norm of heads of linear attention on Hopper, and its gate."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.hopper_sums import row_sum
from detjax.pallas_kernels.rms_norm.sm90 import narrow_normalise
from detjax.pallas_kernels.swiglu.sm90 import over_decay


def gated(parts: list, gates: list, gains: list, tile: sm90_rows.Tile, *, width: int, eps: float):
    """Heads normalised and multiplied by the SiLU of their gates, float32, part by part."""
    normed = narrow_normalise(parts, gains, tile, width=width, eps=eps)
    gates = [gate.astype(jnp.float32) for gate in gates]
    return [
        tile.whole.mul(value, over_decay(gate, gate, tile.whole))
        for value, gate in zip(normed, gates, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def gated_rms_norm(x, z, gain, *, eps: float, interpret: bool = False) -> jax.Array:
    """See `api.gated_rms_norm`.

    Raises:
        ValueError: If `hopper_sums.row_sum` defines no sum of narrow rows for C.

    Numerics:
        # ORDER: `(x * r) * gain` as `rms_norm` has it, not rounded to the dtype; SwiGLU's gate of z
        # by it.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = x.shape
    form = row_sum(width)
    if form.is_wide:
        raise ValueError(f"sm90 has a gated norm of at most 256 channels, not of {width}")
    tile_rows = sm90_rows.most_rows(sm90_rows.LANES // form.lanes, num_rows)
    tile = sm90_rows.tile_of_rows(
        tile_rows, lanes=form.lanes, vec_len=form.vec_len, is_interpreted=interpret
    )
    part_len = width // form.num_parts
    columns = [pl.ds(p * part_len, part_len) for p in range(form.num_parts)]

    def body(x_gmem, z_gmem, gain_gmem, out_gmem):
        # The last tile starts early instead of ending late: some rows are written twice, alike.
        first = jnp.minimum(lax.axis_index("cta") * tile_rows, num_rows - tile_rows)
        here = pl.ds(first, tile_rows)
        parts = [tile.whole.load(x_gmem.at[here, c]) for c in columns]
        of_z = [tile.whole.load(z_gmem.at[here, c]) for c in columns]
        gains = [tile.per_col.load(gain_gmem.at[c]) for c in columns]
        for c, value in zip(
            columns, gated(parts, of_z, gains, tile, width=width, eps=eps), strict=True
        ):
            out_gmem[here, c] = value.astype(z.dtype)  # ROUND: once

    return sm90_rows.run_kernel(
        body,
        (x, z, gain),
        out=jax.ShapeDtypeStruct(x.shape, z.dtype),
        grid={"cta": pl.cdiv(num_rows, tile_rows)},
        name="detjax_gated_rms_norm",
        is_interpreted=interpret,
    )
