# SPDX-License-Identifier: Apache-2.0
"""Linear layers with one operand of float32 on Hopper: three products of bfloat16.

A float32 is the sum of three bfloat16 values. They are three times the rows of one product, so that
the weights are read once; what comes out is added in one order, the smallest first.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.numerics import Reduction
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import Product, Rows, choose_tiles
from detjax.pallas_kernels.rms_norm.sm90 import rms_norm, rms_norm_parts
from detjax.pallas_kernels.swiglu.sm90 import gated


def _pieces(width: int) -> tuple[int, int]:
    """Columns of a piece of a row, and neighbouring columns of one thread.

    Raises:
        NotImplementedError: If a row is no piece.
    """
    if width < rows.LANES or width % 4:
        raise NotImplementedError(
            "sm90 float32 activations need rows, or a rank's share of them, of a multiple of 4 "
            f"columns from 128 up, not {width}: use a smaller --tp, or portable"
        )
    vec_len = next(v for v in (4, 2, 1) if rows.LANES * v <= width)
    return rows.LANES * vec_len, vec_len


def _first_column(size: int, width: int):
    """Where this CTA's piece starts; the last one starts early instead of ending late."""
    return pl.multiple_of(jnp.minimum(lax.axis_index("piece") * size, width - size), 4)


@functools.partial(jax.jit, static_argnames=("interpret",))
def split_rows(x, *, interpret: bool = False) -> jax.Array:
    """Cut float32 rows [M, K] into bfloat16 parts [3, M, K] that add up to them.

    Args:
        x: Rows.
        interpret: Run in interpret mode.

    Raises:
        NotImplementedError: If K is under 128 or no multiple of 4.

    Numerics:
        # ROUND: as `sm90_rows.split_bf16` says: exact from 2**-103 to under 2**128 - 2**119.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = x.shape
    size, vec_len = _pieces(width)
    math = rows.strided(size, vec_len, interpret)

    def body(x_gmem, out_gmem):
        row = lax.axis_index("row")
        here = pl.ds(_first_column(size, width), size)
        for i, part in enumerate(rows.split_bf16(math.load(x_gmem.at[row, here]), math)):
            out_gmem[i, row, here] = part

    return rows.run_kernel(
        body,
        (x,),
        out=jax.ShapeDtypeStruct((rows.NUM_PARTS, num_rows, width), jnp.bfloat16),
        grid={"piece": pl.cdiv(width, size), "row": num_rows},
        name="detjax_split_rows",
        is_interpreted=interpret,
    )


@functools.partial(jax.jit, static_argnames=("is_gated", "out_dtype", "interpret"))
def add_parts(
    sums, bias, residual, *, is_gated: bool = False, out_dtype=jnp.float32, interpret: bool = False
) -> jax.Array:
    """Add what the three parts of the activations gave: [A, 3, M, N] to [M, N].

    Args:
        sums: float32; A subtrees of each part's leaves, a power of two.
        bias: [N], or None.
        residual: float32 [M, N], or None.
        is_gated: Whether columns are F gates, then F ups, to be gated: [M, F].
        out_dtype: Of the result.
        interpret: Run in interpret mode.

    Raises:
        NotImplementedError: If the result's rows are under 128 or no multiple of 4.

    Numerics:
        # ORDER: each part's subtrees as ((g0 + g1) + (g2 + g3)) + ...; then the parts, smallest
        first, (p3 + p2) + p1; then the bias; then residual + all that. f32, each sum rounded on its
        own.
        # ROUND: once, to `out_dtype`. Gates and ups stay float32 and are gated as in `swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    groups, _, num_rows, num_out = sums.shape
    width = num_out // 2 if is_gated else num_out
    size, vec_len = _pieces(width)
    math = rows.strided(size, vec_len, interpret)

    def body(
        sums_gmem,  # [A, 3, M, N] f32
        bias_gmem,  # [N], or None
        residual_gmem,  # [M, N] f32, or None
        out_gmem,  # [M, N], or [M, F] if gated
    ):
        row = lax.axis_index("row")
        first = _first_column(size, width)

        def total_from(start):
            here = pl.ds(start, size)
            parts = [
                rows.pairwise(
                    [math.load(sums_gmem.at[g, part, row, here]) for g in range(groups)], math.add
                )
                for part in range(rows.NUM_PARTS)
            ]
            return rows.sum_parts(parts, math.add)

        total = total_from(first)
        here = pl.ds(first, size)
        if bias_gmem is not None:
            total = math.add(total, math.load(bias_gmem.at[here]).astype(jnp.float32))
        if residual_gmem is not None:
            total = math.add(math.load(residual_gmem.at[row, here]), total)
        if is_gated:
            total = gated(total, total_from(first + width), math)
        out_gmem[row, here] = total.astype(out_dtype)

    return rows.run_kernel(
        body,
        (sums, bias, residual),
        out=jax.ShapeDtypeStruct((num_rows, width), out_dtype),
        grid={"piece": pl.cdiv(width, size), "row": num_rows},
        name="detjax_add_parts",
        is_interpreted=interpret,
    )


def _products(parts, w, *, leaf_len: int) -> jax.Array:
    """Each part of the activations times the weights: float32 [A, 3, M, N], A subtrees."""
    _, num_rows, k_len = parts.shape
    product = Product(
        num_rows=rows.NUM_PARTS * num_rows,
        num_out=w.shape[0],
        num_leaves=k_len // leaf_len,
        leaf_len=leaf_len,
        out_bytes=4,
        rows=Rows.PARTS,
    )
    sums = matmul(
        parts.reshape(-1, k_len), w, None, None,
        leaf_len=leaf_len, out_dtype=jnp.float32, tiles=choose_tiles(product),
    )  # fmt: skip
    return sums.reshape(-1, rows.NUM_PARTS, num_rows, w.shape[0])


def linear(x, w, bias, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.linear`.

    Numerics:
        # ORDER: of each part k16 block by k16 block in one f32 wgmma accumulator; parts as in
        `add_parts`; then the bias.
        # ROUND: once, to `out_dtype`.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (K, dtypes, build).
    """
    sums = _products(split_rows(x), w, leaf_len=x.shape[1])
    return add_parts(sums, bias, None, out_dtype=out_dtype)


def add_weight_parts(sums, bias, *, out_dtype: jnp.dtype) -> jax.Array:
    """Add what the three parts of the weights gave, [M, 3 N], as `add_parts` does: [M, N]."""
    sums = sums.reshape(1, len(sums), rows.NUM_PARTS, -1)
    return add_parts(jnp.swapaxes(sums, 1, 2), bias, None, out_dtype=out_dtype)


def linear_swiglu(x, w_gate_up) -> jax.Array:
    """See `api.linear_swiglu`.

    Numerics:
        # ORDER: gate and up as in `linear`, each a float32; then the instructions of `swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return add_parts(
        _products(split_rows(x), w_gate_up, leaf_len=x.shape[1]), None, None, is_gated=True
    )


def norm_linear(x, gain, w, bias, *, eps: float, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.norm_linear`: the norm's kernel cuts its result into parts.

    Numerics:
        # ORDER, # ROUND: those of `rms_norm`, then of `linear`.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (K, dtypes, build).
    """
    sums = _products(rms_norm_parts(x, gain, eps=eps), w, leaf_len=x.shape[1])
    return add_parts(sums, bias, None, out_dtype=out_dtype)


def norm_linear_swiglu(x, gain, w_gate_up, *, eps: float) -> jax.Array:
    """See `api.norm_linear_swiglu`: the norm's kernel cuts its result into parts.

    Numerics:
        # ORDER, # ROUND: those of `rms_norm`, then of `linear_swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    sums = _products(rms_norm_parts(x, gain, eps=eps), w_gate_up, leaf_len=x.shape[1])
    return add_parts(sums, None, None, is_gated=True)


def linear_leaf_sums(x, w, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_leaf_sums`: [A, 3, M, O], the parts apart, as their trees are.

    Numerics:
        # ORDER: of each part the tree of `api.linear_partial`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant: of the trees' sums.
    """
    return _products(split_rows(x), w, leaf_len=reduction.leaf_len)


def linear_add(x, w, residual, bias, *, reduction: Reduction) -> jax.Array:
    """See `api.linear_add`.

    Numerics:
        # ORDER: of each part the tree of `api.linear_partial`; then as in `add_parts`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant. For tp = 1; at
        tp > 1 ranks add their trees of each part first, and the same sum comes out.
    """
    return add_parts(linear_leaf_sums(x, w, reduction=reduction), bias, residual)


def linear_add_rms_norm(
    x, w, residual, bias, gain, *, reduction: Reduction, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.linear_add_rms_norm`.

    Numerics:
        # ORDER: those of `linear_add`, then of `rms_norm`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    total = linear_add(x, w, residual, bias, reduction=reduction)
    return total, rms_norm(total, gain, eps=eps)
