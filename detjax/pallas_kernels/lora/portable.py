# SPDX-License-Identifier: Apache-2.0
"""Adapters in blocks of 16 rows: products of 16 ranks and 64 columns."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.fixed_blocks import ROWS, add_leaves, pad_axis, round_to, run_blocks
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.portable import COLS
from detjax.pallas_kernels.lora import composed
from detjax.pallas_kernels.lora.adapted import RANK_BLOCK, columns_of
from detjax.pallas_kernels.moe.portable import expert_linear


@partial(jax.jit, static_argnames=("out_dtype",))
def lora_hidden(leaf_sums, slots, scales, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_hidden`."""
    sums = add_leaves(leaf_sums)
    num_rows, width = sums.shape
    scale_of, slot_of = columns_of(scales, width)
    sums, slots = pad_axis(sums, 0, ROWS), pad_axis(slots, 0, ROWS)

    def body(sums_ref, slots_ref, scale_ref, column_ref, out_ref):
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        # ROUND: the product, then h. No addition follows, so nothing can fuse.
        h = round_to(sums_ref[rows, :] * scale_ref[...][None, :], out_dtype)
        is_own = column_ref[...][None, :] == slots_ref[rows][:, None]
        out_ref[...] = jnp.where(is_own, h, 0.0).astype(out_dtype)

    out = run_blocks(
        body,
        sums,
        slots,
        scale_of,
        slot_of,
        name="lora_hidden",
        grid=(sums.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(sums.shape, out_dtype),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return out[:num_rows]


@partial(jax.jit, static_argnames=("out_dtype",))
def lora_add(base, h, b, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_add`.

    # ORDER: ((r0 + r1) + r2) + ..., r = block of 16 ranks; inside one, a fixed-shape product.
    """
    num_rows, num_cols = base.shape
    base, b = pad_axis(pad_axis(base, 0, ROWS), 1, COLS), pad_axis(b, 0, COLS)
    h = pad_axis(h, 0, ROWS)
    # SHAPE: hidden, so that the loop is one body for every number of adapters.
    count = lax.optimization_barrier(jnp.full(1, h.shape[1] // RANK_BLOCK, jnp.int32))

    def body(base_ref, h_ref, b_ref, count_ref, out_ref):
        rows = pl.ds(pl.program_id(1) * ROWS, ROWS)
        cols = pl.ds(pl.program_id(0) * COLS, COLS)

        def add_block(i, total):
            ranks = pl.ds(i * RANK_BLOCK, RANK_BLOCK)
            left = h_ref[rows, ranks].astype(jnp.float32)  # [16, 16]
            right = b_ref[cols, ranks].astype(jnp.float32)  # [64, 16]
            dims = (((1,), (1,)), ((), ()))
            return total + lax.dot_general(left, right, dims, precision=lax.Precision.HIGHEST)

        added = lax.fori_loop(0, count_ref[0], add_block, jnp.zeros((ROWS, COLS), jnp.float32))
        out_ref[...] = _sum(base_ref[rows, cols], added, out_dtype)

    out = run_blocks(
        body,
        base,
        h,
        b,
        count,
        name="lora_add",
        grid=(b.shape[0] // COLS, base.shape[0] // ROWS),
        out_shape=jax.ShapeDtypeStruct(base.shape, out_dtype),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda n, m: (m, n)),
    )
    return out[:num_rows, :num_cols]


def _sum(base, added, out_dtype: jnp.dtype) -> jax.Array:
    """`round(base + added)`.

    # ROUND: once, to the output's dtype. Nothing is added where `added` is zero: -0 stays.
    """
    total = round_to(jnp.where(added == 0, base, base + added), out_dtype)
    return total.astype(out_dtype)


@partial(jax.jit, static_argnames=("out_dtype",))
def expert_lora_add(base, h, experts, b, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.expert_lora_add`.

    # ORDER: as `lora_add`: a step of `expert_linear` is a block of 16 ranks.
    """
    float32 = jnp.dtype(jnp.float32)
    added = expert_linear(h, experts, b, out_dtype=float32, step=RANK_BLOCK)
    num_rows, num_cols = base.shape
    base, added = (pad_axis(pad_axis(it, 0, ROWS), 1, COLS) for it in (base, added))

    def body(base_ref, added_ref, out_ref):
        here = pl.ds(pl.program_id(1) * ROWS, ROWS), pl.ds(pl.program_id(0) * COLS, COLS)
        out_ref[...] = _sum(base_ref[here], added_ref[here], out_dtype)

    out = run_blocks(
        body,
        base,
        added,
        name="expert_lora_add",
        grid=(base.shape[1] // COLS, base.shape[0] // ROWS),
        out_shape=jax.ShapeDtypeStruct(base.shape, out_dtype),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda n, m: (m, n)),
    )
    return out[:num_rows, :num_cols]


lora_project = partial(composed.lora_project, KERNELS[Backend.PORTABLE])
lora_linear = partial(composed.lora_linear, KERNELS[Backend.PORTABLE])
lora_linear_swiglu = partial(composed.lora_linear_swiglu, KERNELS[Backend.PORTABLE])
lora_linear_add_rms_norm = partial(composed.lora_linear_add_rms_norm, KERNELS[Backend.PORTABLE])
