# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose activations and weights have 8 bits (W8A8): integers or float8.

A row of activations, or each group of its channels, is quantised by its own greatest value, so that
no batchmate changes it. The sum of products of integers is exact in int32. It has one value for
every order, tile, split and rank. Products of float8 are added in one order.
"""

import jax.numpy as jnp

from detjax.array_types import Activation, Array
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.quantized import (
    FLOAT8_CHUNK,
    QuantizedRows,
    RowCoding,
    RowsToQuantize,
    W8A8Matrix,
    operands_of,
)

MAX_CHANNELS = 2**16
"""Most input channels. The sum of so many products of -128 and -128 is 2**30."""


def quantize_rows(
    x: Activation[Array, "M K"], coding: RowCoding, *, backend: Backend
) -> QuantizedRows:
    """Turn each row into 8-bit values and a scale, or each group of its channels.

    `peak = max_k(abs(x[m, k]))`, `scale = peak / largest`,
    `q[m, k] = narrow(x[m, k] * (largest / peak))`

    Args:
        x: Activations.
        coding: Values are int8, of which `largest` is 127, or float8_e4m3fn, of which it is 448.
            A group of channels may have a peak and a scale, or a row. `min(peak, bound)` takes the
            place of the peak where there is a bound. With a scale, `q = narrow(x * (1 / scale))`.
        backend: Which implementation runs.

    Raises:
        ValueError: If K is more than `MAX_CHANNELS`, or is not whole groups of `FLOAT8_CHUNK`; or
            groups have a bound or a given scale.

    Numerics:
        Both quotients and the product are float32, each rounded to nearest. `narrow` is to the
        nearest value, ties to even, saturated. Where `largest / peak` is infinite, as that of
        zeros, q = 0. The products of a row with a NaN are NaN, and so are those of one with an
        infinity, unless a bound or a given scale makes it the largest value.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Dynamic quantisation by token: Yao et al. 2022, arXiv:2206.01861. E4M3: Micikevicius et al.
        2022, arXiv:2209.05433.
    """
    _check_coding(x, coding)
    return KERNELS[backend].quantize_rows(x, coding)


def w8a8_product(
    x: QuantizedRows | RowsToQuantize,
    w: W8A8Matrix,
    bias: Activation[Array, " O"] | None = None,
    residual: Activation[Array, "M O"] | None = None,
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M O"]:
    """Multiply rows by quantised weights of the same kind; the rows are quantised, or will be.

    `out[m, o] = round(residual[m, o] + (x_scale[m] * (w_scale[o] * sum_k(q[m, k] * v[o, k])) +
    bias[o]))`

    Where groups g of channels have scales, x_scale[g, m] and w_scale[o, g], the products with them
    are inside of the sum: `sum_g((x_scale[g, m] * w_scale[o, g]) * sum_{k in g}(q[m, k] *
    v[o, k]))`.

    Args:
        x: Of `quantize_rows`, or rows that become that first: `quantize_rows(x)`, or
            `quantize_rows(rms_norm(x, gain))` with a gain. On sm90 few of them need no launch.
        w: Weights, (out, in).
        bias: Added in float32.
        residual: Added last, in float32.
        out_dtype: What the result is rounded to; float32 keeps it.
        backend: Which implementation runs.

    Raises:
        ValueError: If K of `x` and `w` differ, or only one of them has scales of groups; or as
            `quantize_rows`.

    Numerics:
        The sum of integers is exact in int32 and rounded to float32. The sum of float8 on sm90 is
        `((c_0 + c_1) + c_2) + ...` in float32, c_i the sum of the 128 channels from 128 i on: four
        wgmma of 32 channels in one accumulator that starts at zero. The portable backend adds as
        its `linear` does. Each product with a scale and each sum is
        float32 and rounded on its own; the portable backend may fuse the last product with the sum
        that follows.
        Groups are added left to right in float32, `total = fma(c_g, x_scale * w_scale, total)` from
        0, c_g as above; bias and residual follow. The portable backend may round the product of the
        fma as well.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    _check_product(x, w)
    return KERNELS[backend].w8a8_product(x, w, bias, residual, out_dtype=out_dtype)


def w8a8_swiglu(
    x: QuantizedRows | RowsToQuantize,
    w_gate_up: W8A8Matrix,
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M F"]:
    """Multiply rows by gates and ups, and gate.

    `out = swiglu(w8a8_product(x, w_gate_up))`

    Args:
        x: As `w8a8_product` takes them.
        w_gate_up: Rows of gates, then of ups, (out, in).
        out_dtype: Of the result, and of gates and ups in between.
        backend: Which implementation runs.

    Raises:
        ValueError: If K of `x` and `w_gate_up` differ or there are not as many gates as ups.

    Numerics:
        The bits of the two operations one after the other; on sm90 one launch.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    _check_product(x, w_gate_up)
    if w_gate_up.shape[0] % 2:
        raise ValueError(f"{w_gate_up.shape=} must have as many rows of up as of gate")
    return KERNELS[backend].w8a8_swiglu(x, w_gate_up, out_dtype=out_dtype)


def _check_coding(x, coding: RowCoding) -> None:
    group_len = coding.group_len
    if group_len and (coding.bound or coding.scale is not None):
        raise ValueError("groups of channels have scales of their own, and no bound")
    if group_len not in (0, FLOAT8_CHUNK) or group_len and x.shape[1] % group_len:
        raise ValueError(f"{x.shape[1]} channels are not whole groups of {FLOAT8_CHUNK}")
    if x.shape[1] > MAX_CHANNELS:
        raise ValueError(
            f"{x.shape[1]} channels may sum to more than int32 holds; {MAX_CHANNELS} is most"
        )


def _check_product(x: QuantizedRows | RowsToQuantize, w: W8A8Matrix) -> None:
    if isinstance(x, RowsToQuantize):
        _check_coding(x.values, x.coding)
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"{x.shape=} and {w.shape=} must agree in their last axis, K")
    operands_of(x, w)
