# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in the bits of the Hopper kernels, on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from detjax.pallas_kernels.delta_rule.operands import OutputNorm, arranged, normalised
from detjax.pallas_kernels.delta_rule.portable import NORM_EPS, write_rows
from detjax.pallas_kernels.delta_rule.portable import delta_rule_gradient as delta_rule_gradient
from detjax.pallas_kernels.hopper_sums import row_sum
from detjax.pallas_kernels.reference_library import call


def delta_rule(
    rows, filters, gates, row_pages, state_pages, page_table, positions, layer: int,
    norm: OutputNorm | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """See `api.delta_rule`.

    Raises:
        NotImplementedError: For channels that are no multiple of 16, and dtypes beside bfloat16 and
            float32.
    """
    num_states, num_heads, *dims = state_pages.shape[2:]
    if dims[0] % 16 or row_pages.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            "linear attention of the reference backend has bfloat16 or float32 and a multiple of "
            f"16 channels of keys, not {row_pages.dtype} and {dims[0]}; use portable"
        )
    projected = rows
    rows, filters = arranged(rows, filters)
    batch, num_tokens = positions.shape
    block_len = row_pages.shape[4] // num_states
    row_pages = write_rows(row_pages, rows, page_table, positions, layer)
    num_blocks = (num_tokens + 2 * block_len - 2) // block_len
    out, kept = call(
        "delta_rule",
        [
            jax.ShapeDtypeStruct((batch * num_tokens, num_heads, dims[1]), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_blocks, num_heads, *dims), jnp.float32),
        ],
        filters, *gates, row_pages, state_pages, page_table, positions,
        jnp.asarray(layer, jnp.int32).reshape(1),
        eps=np.float32(NORM_EPS), scale=np.float32(dims[0] ** -0.5),
    )  # fmt: skip
    first, last = jnp.maximum(positions[:, :1], 0), jnp.max(positions, axis=1, keepdims=True)
    blocks = first // block_len + jnp.arange(num_blocks, dtype=jnp.int32)[None]
    pages = jnp.minimum(blocks // num_states, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, pages, axis=1)
    pages = jnp.where((last >= 0) & (blocks <= last // block_len), pages, state_pages.shape[1])
    state_pages = state_pages.at[layer, pages, blocks % num_states].set(kept, mode="drop")
    if norm is not None:
        out = normalised(gated_rms_norm, out, projected, norm)
    return out, row_pages, state_pages


def gated_rms_norm(x, z, gain, *, eps: float) -> jax.Array:
    """See `api.gated_rms_norm`.

    Raises:
        ValueError: If `rms_norm.sm90.row_sum` defines no sum of narrow rows for C.
    """
    form = row_sum(x.shape[1])
    if form.is_wide:
        raise ValueError(f"a gated norm has at most 256 channels, not {x.shape[1]}")
    return call(
        "gated_rms_norm", jax.ShapeDtypeStruct(x.shape, z.dtype), x, z, gain,
        eps=np.float32(eps), vec_len=form.vec_len, lanes=form.lanes, num_parts=form.num_parts,
    )  # fmt: skip
