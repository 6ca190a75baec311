# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit activations and weights on Hopper, with tiles chosen by M."""

import dataclasses

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.linear.quantized import (
    BLOCK,
    FLOAT8_CHUNK,
    QuantizedRows,
    RowsToQuantize,
    W8A8Matrix,
)
from detjax.pallas_kernels.linear.sm90_flat_matmul import InputNorm
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.sm90_quantize_rows import quantize_rows, rms_norm_quantize
from detjax.pallas_kernels.linear.tiles import (
    NORMED_VALUES,
    QUANTIZED_VALUES,
    OperandType,
    Product,
    Rows,
    choose_tiles,
)
from detjax.pallas_kernels.rms_norm.sm90 import row_sum


def quantizes_rows(x: RowsToQuantize) -> bool:
    """Whether a product quantises its rows itself: few values."""
    num_rows, width = x.shape
    if num_rows > 8 or width % 512:
        return False
    if x.gain is None:
        return num_rows * width <= QUANTIZED_VALUES
    return num_rows * width <= NORMED_VALUES and row_sum(width).is_wide


def _multiply(
    x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, bias, residual, *,
    out_dtype, is_gated: bool = False, terms: tuple = (), read_row=None, interpret=None,
):  # fmt: skip
    """Quantise, multiply and scale: in one launch where rows are few.

    With terms, which only such rows may have, the product and the sum of rows and terms.

    Raises:
        NotImplementedError: If N is no multiple of 64, or of 128 where half of it are gates.
    """
    if x.dtype != jnp.int8 and x.shape[1] % FLOAT8_CHUNK:
        raise NotImplementedError(
            f"sm90 adds float8 by chunks of {FLOAT8_CHUNK} channels, not {x.shape[1]} channels; "
            "use quantized_weights='auto', or portable"
        )
    unit = 128 if is_gated else 64
    if w.shape[0] % unit:
        raise NotImplementedError(
            f"sm90 multiplies 8-bit weights of a multiple of {unit} rows, not {w.shape[0]}; use "
            "quantized_weights='auto', or portable"
        )
    if w.group_len and w.block_rows % BLOCK:
        raise NotImplementedError(
            f"sm90 takes blocks of a multiple of {BLOCK} outputs, not {w.block_rows} of a rank's; "
            "use quantized_weights='auto', or portable"
        )
    norm, rows = None, Rows.GIVEN
    if isinstance(x, RowsToQuantize):
        if quantizes_rows(x):
            coding = x.coding
            if coding.scale is not None:
                coding = dataclasses.replace(coding, scale=coding.scale.reshape(1))
            norm, rows = (
                InputNorm(gain=x.gain, coding=coding, eps=x.eps, terms=terms, read_row=read_row),
                Rows.QUANTIZED,
            )
        elif terms:
            raise ValueError(f"{x.shape=} are too many rows for a product that adds terms to them")
        else:
            x = quantized(x)
    product = Product(
        num_rows=x.shape[0],
        num_out=w.shape[0],
        num_leaves=1,
        leaf_len=x.shape[1],
        out_bytes=jnp.dtype(out_dtype).itemsize,
        has_bias=bias is not None,
        has_residual=residual is not None,
        is_gated=is_gated,
        rows=rows,
        operands=OperandType.FLOAT8_BLOCKS if x.group_len else OperandType(x.dtype.name),
    )
    return matmul(
        x, w, bias, residual, norm,
        leaf_len=x.shape[1], out_dtype=out_dtype, tiles=choose_tiles(product), interpret=interpret,
    )  # fmt: skip


def quantized(x: RowsToQuantize, *, interpret: bool = False) -> QuantizedRows:
    """The rows as 8-bit values, by a launch of its own."""
    if x.gain is None:
        return quantize_rows(x.values, x.coding, interpret=interpret)
    return rms_norm_quantize(x.values, x.gain, x.coding, eps=x.eps, interpret=interpret)


def w8a8_product(
    x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, bias, residual, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_product`.

    Numerics:
        # ORDER: of int8 free, as wgmma adds their products in int32 exactly. float8 by chunks of
        128 channels, k32 step by k32 step in one accumulator each; chunks left to right, f32. With
        scales of blocks, fma.rn(chunk, x_scale * w_scale, total) from 0.
        # ROUND: the sum of int8 to float32, its two products with scales, the sums with bias and
        residual, and the result, each once.
        Rows are quantised by the same instructions in this launch or in one before it.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return _multiply(x, w, bias, residual, out_dtype=out_dtype)


def sum_norm_product(
    residual, w: W8A8Matrix, bias, norm: InputNorm, *, out_dtype: jnp.dtype, interpret=None
) -> tuple[jax.Array, jax.Array]:
    """Add terms to rows, normalise, quantise and multiply in one launch: the product and the sum.

    Args:
        residual: [M, K], rows that `quantizes_rows`.
        w: Weights, (out, in).
        bias: Of the product, or None.
        norm: The terms, and the norm of the sum.
        out_dtype: Of the product.
        interpret: How to interpret it, if so.
    """
    rows = RowsToQuantize(values=residual, coding=w.row_coding, gain=norm.gain, eps=norm.eps)
    return _multiply(
        rows, w, bias, None, out_dtype=out_dtype, terms=norm.terms, read_row=norm.read_row,
        interpret=interpret,
    )  # fmt: skip


def w8a8_swiglu(
    x: QuantizedRows | RowsToQuantize, w: W8A8Matrix, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_swiglu`.

    Numerics:
        # ORDER, # ROUND: gates and ups as in `w8a8_product`, rounded to bfloat16; then the
        instructions of `swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return _multiply(x, w, None, None, out_dtype=out_dtype, is_gated=True)
