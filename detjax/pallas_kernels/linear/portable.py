# SPDX-License-Identifier: Apache-2.0
"""Matrix products in blocks of 16 rows and 64 columns, one leaf of K at a time."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.numerics import Reduction
from detjax.pallas_kernels.fixed_blocks import (
    ROWS,
    add_leaves,
    num_blocks,
    pad_axis,
    round_to,
    run_blocks,
)
from detjax.pallas_kernels.linear.quantized import expanded
from detjax.pallas_kernels.rms_norm.portable import (
    add_rms_norm,
    combine_add_rms_norm,
    rms_norm,
)
from detjax.pallas_kernels.swiglu.portable import swiglu

COLS = 64
"""Output columns of a block. Divides every real width, so weights are not padded."""

MAX_STEP = 1024
"""Most of K in one product; longer leaves are cut into equal steps."""


def step_len(leaf_len: int) -> int:
    """The longest equal step of at most `MAX_STEP` that divides a leaf. A rule of K alone."""
    if leaf_len <= MAX_STEP:
        return leaf_len
    unit = 16 if leaf_len % 16 == 0 else 1
    return max(s for s in range(unit, MAX_STEP + 1, unit) if leaf_len % s == 0)


def leaf_sum(
    x_ref, w_ref, rows, cols, start, leaf_len: int, *, dtype=jnp.float32, step: int = 0
) -> jax.Array:
    """Sum one leaf for one block, in steps of `step`, or of `step_len` where that is 0.

    # ORDER: ((s0 + s1) + s2) + ..., s = step of K; inside a step, the one fixed-shape product.
    The steps of 8-bit integers are exact in float32, and so is their sum in an int32 `dtype`.
    """
    step = step or step_len(leaf_len)

    def add_step(i, total):
        k = pl.ds(start + i * step, step)
        x = x_ref[rows, k].astype(jnp.float32)  # [16, step]
        w = w_ref[cols, k].astype(jnp.float32)  # [64, step]
        product = lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        return total + product.astype(dtype)

    return lax.fori_loop(0, leaf_len // step, add_step, jnp.zeros((ROWS, COLS), dtype))


def _block(row_block, col_block):
    return pl.ds(row_block * ROWS, ROWS), pl.ds(col_block * COLS, COLS)


@partial(jax.jit, static_argnames=("out_dtype",))
def linear(x, w, bias, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.linear`."""
    w = expanded(w)
    num_rows, k_len = x.shape
    num_cols = w.shape[0]
    x, w = pad_axis(x, 0, ROWS), pad_axis(w, 0, COLS)
    operands = (x, w) if bias is None else (x, w, pad_axis(bias, 0, COLS))

    def body(x_ref, w_ref, *refs):
        rows, cols = _block(pl.program_id(1), pl.program_id(0))
        total = leaf_sum(x_ref, w_ref, rows, cols, 0, k_len)
        if bias is not None:
            total = total + refs[0][cols].astype(jnp.float32)[None, :]
        refs[-1][...] = total.astype(out_dtype)  # ROUND: once, to the output's dtype

    out = run_blocks(
        body,
        *operands,
        name="linear",
        grid=(w.shape[0] // COLS, x.shape[0] // ROWS),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), out_dtype),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda n, m: (m, n)),
    )
    return out[:num_rows, :num_cols]


def linear_swiglu(x, w_gate_up) -> jax.Array:
    """See `api.linear_swiglu`."""
    return swiglu(linear(x, w_gate_up, None, out_dtype=x.dtype))


def norm_linear(x, gain, w, bias, *, eps: float, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.norm_linear`."""
    return linear(rms_norm(x, gain, eps=eps), w, bias, out_dtype=out_dtype)


def norm_linear_swiglu(x, gain, w_gate_up, *, eps: float) -> jax.Array:
    """See `api.norm_linear_swiglu`."""
    return linear_swiglu(rms_norm(x, gain, eps=eps), w_gate_up)


def linear_leaves(x, w, *, reduction: Reduction) -> jax.Array:
    """Every leaf's sum, [leaves, rows, cols] padded to whole blocks."""
    w = expanded(w)
    leaf_len = reduction.leaf_len
    leaves = x.shape[1] // leaf_len
    x, w = pad_axis(x, 0, ROWS), pad_axis(w, 0, COLS)

    def body(x_ref, w_ref, out_ref):
        rows, cols = _block(pl.program_id(1), pl.program_id(0))
        start = pl.program_id(2) * leaf_len
        out_ref[...] = leaf_sum(x_ref, w_ref, rows, cols, start, leaf_len)[None]

    return run_blocks(
        body,
        x,
        w,
        name="linear_leaves",
        grid=(w.shape[0] // COLS, x.shape[0] // ROWS, leaves),
        out_shape=jax.ShapeDtypeStruct((leaves, x.shape[0], w.shape[0]), jnp.float32),
        out_specs=pl.BlockSpec((1, ROWS, COLS), lambda n, m, leaf: (leaf, m, n)),
    )


@partial(jax.jit, static_argnames=("reduction",))
def linear_partial(x, w, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_partial`."""
    return add_leaves(linear_leaves(x, w, reduction=reduction))[: x.shape[0], : w.shape[0]]


def linear_leaf_sums(x, w, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_leaf_sums`: the whole subtree, as one part."""
    return linear_partial(x, w, reduction=reduction)[None]


@jax.jit
def add_partials(a, b) -> jax.Array:
    """See `api.add_partials`."""
    num_rows, width = a.shape
    a, b = pad_axis(a, 0, ROWS), pad_axis(b, 0, ROWS)

    def body(a_ref, b_ref, out_ref):
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        out_ref[...] = a_ref[rows, :] + b_ref[rows, :]

    out = run_blocks(
        body,
        a,
        b,
        name="add_partials",
        grid=(num_blocks(num_rows, ROWS),),
        out_shape=jax.ShapeDtypeStruct(a.shape, jnp.float32),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return out[:num_rows]


def defers_norm(x, w, *, reduction: Reduction) -> bool:
    """See `api.defers_norm`: no, as launches cost nothing here."""
    return False


def joins_matrices(x, first, second, *, out_dtype: jnp.dtype) -> bool:
    """See `api.joins_matrices`: no, as launches cost nothing here."""
    return False


def defers_sum(x, w, *, reduction: Reduction) -> bool:
    """See `api.defers_sum`: no, as launches cost nothing here."""
    return False


def combine_norm_linear(
    leaf_sums, residual, gain, w, bias, *, eps: float, out_dtype: jnp.dtype, is_gated: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.combine_norm_linear`: the two operations, one after the other."""
    if leaf_sums is None:
        total, x = residual, rms_norm(residual, gain, eps=eps)
    else:
        total, x = combine_add_rms_norm(leaf_sums, residual, None, gain, eps=eps)
    out = linear_swiglu(x, w) if is_gated else linear(x, w, bias, out_dtype=out_dtype)
    return out, total, x


def linear_add(x, w, residual, bias, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_add`."""
    return _add_residual(linear_partial(x, w, reduction=reduction), residual, bias)


def linear_add_rms_norm(
    x, w, residual, bias, gain, *, reduction: Reduction, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.linear_add_rms_norm`."""
    total = linear_partial(x, w, reduction=reduction)
    return add_rms_norm(total, residual, bias, gain, eps=eps)


@jax.jit
def _add_residual(partial, residual, bias) -> jax.Array:
    num_rows, width = residual.shape
    dtype = residual.dtype
    partial, residual = pad_axis(partial, 0, ROWS), pad_axis(residual, 0, ROWS)
    biases = () if bias is None else (bias,)

    def body(partial_ref, residual_ref, *refs):
        *bias_refs, out_ref = refs
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        total = partial_ref[rows, :]
        for bias_ref in bias_refs:
            total = total + bias_ref[...].astype(jnp.float32)[None, :]
        # ROUND: once, to the residual's dtype.
        total = round_to(residual_ref[rows, :].astype(jnp.float32) + total, dtype)
        out_ref[...] = total.astype(dtype)

    out = run_blocks(
        body,
        partial,
        residual,
        *biases,
        name="add_residual",
        grid=(residual.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(residual.shape, dtype),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return out[:num_rows]
