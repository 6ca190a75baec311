# SPDX-License-Identifier: Apache-2.0
"""Log-sum-exp over fixed blocks of the vocabulary, added as a tree."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import COLS, ROWS, num_blocks, pad_axis, run_blocks


@partial(jax.jit, static_argnames=("vocab_block",))
def block_stats(logits, *, vocab_block: int) -> tuple[jax.Array, jax.Array]:
    """See `api.block_stats`."""
    num_rows, width = logits.shape
    blocks = width // vocab_block
    logits = pad_axis(logits, 0, ROWS)

    def body(logits_ref, max_ref, sum_ref):
        cols = pl.ds(pl.program_id(1) * vocab_block, vocab_block)
        x = logits_ref[pl.ds(pl.program_id(0) * ROWS, ROWS), cols]
        m = jnp.max(x, axis=1, keepdims=True)
        is_empty = m == -jnp.inf
        # ORDER: one fixed-shape row sum.
        total = jnp.sum(jnp.exp(x - jnp.where(is_empty, 0.0, m)), axis=1, keepdims=True)
        max_ref[...] = m
        sum_ref[...] = jnp.where(is_empty, 0.0, total)

    shape = jax.ShapeDtypeStruct((logits.shape[0], blocks), jnp.float32)
    spec = pl.BlockSpec((ROWS, 1), lambda m, v: (m, v))
    maxima, sums = run_blocks(
        body,
        logits,
        name="log_softmax_blocks",
        grid=(logits.shape[0] // ROWS, blocks),
        out_shape=[shape, shape],
        out_specs=[spec, spec],
    )
    return maxima[:num_rows], sums[:num_rows]


@jax.jit
def log_sum_exp(maxima, sums) -> jax.Array:
    """See `api.log_sum_exp`."""
    num_rows, blocks = maxima.shape
    width = COLS
    while width < blocks:
        width *= 2
    extra = ((0, -num_rows % ROWS), (0, width - blocks))
    maxima = jnp.pad(maxima, extra, constant_values=-jnp.inf)
    sums = jnp.pad(sums, extra)
    row_max = jnp.max(maxima, axis=1, keepdims=True)

    def scale(maxima_ref, sums_ref, row_max_ref, out_ref):
        block = pl.ds(pl.program_id(0) * ROWS, ROWS), pl.ds(pl.program_id(1) * COLS, COLS)
        out_ref[...] = sums_ref[block] * jnp.exp(maxima_ref[block] - row_max_ref[block[0], :])

    # The products go through memory, so none can fuse with an addition of the tree.
    terms = run_blocks(
        scale,
        maxima,
        sums,
        row_max,
        name="log_softmax_scale",
        grid=(maxima.shape[0] // ROWS, width // COLS),
        out_shape=jax.ShapeDtypeStruct(maxima.shape, jnp.float32),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda m, v: (m, v)),
    )

    def tree(terms_ref, row_max_ref, out_ref):
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        total = terms_ref[rows, :]
        # ORDER: ((t0 + t1) + (t2 + t3)) + ..., t = block of the vocabulary; zeros pad the end.
        while total.shape[1] > 1:
            total = total[:, 0::2] + total[:, 1::2]
        out_ref[...] = row_max_ref[rows, :] + jnp.log(total)

    out = run_blocks(
        tree,
        terms,
        row_max,
        name="log_softmax_tree",
        grid=(num_blocks(num_rows, ROWS),),
        out_shape=jax.ShapeDtypeStruct((maxima.shape[0], 1), jnp.float32),
        out_specs=pl.BlockSpec((ROWS, 1), lambda m: (m, 0)),
    )
    return out[:num_rows, 0]


@jax.jit
def log_probs(logits, lse) -> jax.Array:
    """See `api.log_probs`."""
    num_rows, width = logits.shape
    logits, lse = pad_axis(logits, 0, ROWS), pad_axis(lse[:, None], 0, ROWS)

    def body(logits_ref, lse_ref, out_ref):
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        out_ref[...] = logits_ref[rows, :] - lse_ref[rows, :]

    out = run_blocks(
        body,
        logits,
        lse,
        name="log_probs",
        grid=(logits.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return out[:num_rows]
