# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit activations and weights on Hopper, with tiles chosen by M."""

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.linear.quantized import (
    BLOCK,
    FLOAT8_CHUNK,
    QuantizedRows,
    W8A8Matrix,
)
from detjax.pallas_kernels.linear.sm90_matmul import matmul
from detjax.pallas_kernels.linear.tiles import OperandType, Product, choose_tiles


def _multiply(
    x: QuantizedRows, w: W8A8Matrix, bias, residual, *, out_dtype, is_gated: bool = False
) -> jax.Array:
    """Multiply and scale, in one launch.

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
    product = Product(
        num_rows=x.shape[0],
        num_out=w.shape[0],
        num_leaves=1,
        leaf_len=x.shape[1],
        out_bytes=jnp.dtype(out_dtype).itemsize,
        has_bias=bias is not None,
        has_residual=residual is not None,
        is_gated=is_gated,
        operands=OperandType.FLOAT8_BLOCKS if x.group_len else OperandType(x.dtype.name),
    )
    return matmul(
        x, w, bias, residual,
        leaf_len=x.shape[1], out_dtype=out_dtype, tiles=choose_tiles(product),
    )  # fmt: skip


def w8a8_product(
    x: QuantizedRows, w: W8A8Matrix, bias, residual, *, out_dtype: jnp.dtype
) -> jax.Array:
    """See `w8a8.w8a8_product`.

    Numerics:
        # ORDER: of int8 free, as wgmma adds their products in int32 exactly. float8 by chunks of
        128 channels, k32 step by k32 step in one accumulator each; chunks left to right, f32. With
        scales of blocks, fma.rn(chunk, x_scale * w_scale, total) from 0.
        # ROUND: the sum of int8 to float32, its two products with scales, the sums with bias and
        residual, and the result, each once.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return _multiply(x, w, bias, residual, out_dtype=out_dtype)


def w8a8_swiglu(x: QuantizedRows, w: W8A8Matrix, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `w8a8.w8a8_swiglu`.

    Numerics:
        # ORDER, # ROUND: gates and ups as in `w8a8_product`, rounded to bfloat16; then the
        instructions of `swiglu`.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return _multiply(x, w, None, None, out_dtype=out_dtype, is_gated=True)
