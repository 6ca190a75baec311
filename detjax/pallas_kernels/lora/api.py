# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: `base + B round(s A x)`, unmerged, each row with its own adapter or none.

`A x` is a product of `linear.api.linear_leaf_sums` with the A of all resident adapters. A column
that belongs to another adapter than the row's becomes zero. Zeros change no bit of a sum, so a row
meets no adapter but its own.
"""

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.lora.adapted import RANK_BLOCK


def lora_hidden(
    leaf_sums: Float32[Array, "A M X"],
    slots: Int32[Array, " M"],
    scales: Float32[Array, "Y Z"],
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M X"]:
    """Finish `A x`, scale it, and keep of each row the columns of its adapter.

    `h[m, x] = round(scales[part, slot] * tree(leaf_sums[:, m, x]))` if `slot == slots[m]`, else 0

    Args:
        leaf_sums: Of `linear.api.linear_leaf_sums`, or the whole sum as one part.
        slots: Of each row's adapter; -1 has none.
        scales: Of each part and slot; part and slot of a column are as `AdapterStack` has them.
        out_dtype: What h is rounded to.
        backend: Which implementation runs.

    Raises:
        ValueError: If X is not a multiple of the number of scales.

    Numerics:
        The rest of the tree as `linear_partial` adds it, one float32 product, one rounding.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Hu et al. 2021, arXiv:2106.09685. PEFT multiplies by s after B; s is a power of two in most
        adapters, and then both have the same bits.
    """
    if leaf_sums.shape[-1] % scales.size:
        raise ValueError(f"{leaf_sums.shape=} must have whole adapters for {scales.shape=}")
    return KERNELS[backend].lora_hidden(leaf_sums, slots, scales, out_dtype=out_dtype)


def lora_add(
    base: Float32[Array, "M O"],
    h: Activation[Array, "M X"],
    b: Activation[Array, "O X"],
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M O"]:
    """Add `B h` to an unrounded product. Where `B h` is zero, the product stays as it is.

    `out[m, o] = round(base[m, o] + p)` if `p != 0`, else `round(base[m, o])`;
    `p = sum_x(h[m, x] * b[o, x])`

    Args:
        base: float32, the bias included.
        h: Of `lora_hidden`.
        b: The B of all adapters.
        out_dtype: What the sum is rounded to; float32 keeps it.
        backend: Which implementation runs.

    Raises:
        ValueError: If the shapes do not agree, or X is not a multiple of `RANK_BLOCK`.

    Numerics:
        Blocks of 16 columns are added left to right from zero in float32; the blocks of other
        adapters add zeros, which change no bit. Then one float32 addition and one rounding. A row
        of zeros in h has the bits of `round(base)`, the sign of a zero included.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if h.shape[1] != b.shape[1] or base.shape != (h.shape[0], b.shape[0]):
        raise ValueError(f"{base.shape=}, {h.shape=} and {b.shape=} do not agree")
    if h.shape[1] % RANK_BLOCK:
        raise ValueError(f"{h.shape=} must have columns in blocks of {RANK_BLOCK}")
    return KERNELS[backend].lora_add(base, h, b, out_dtype=out_dtype)


def expert_lora_add(
    base: Float32[Array, "S O"],
    h: Activation[Array, "S X"],
    experts: Int32[Array, " S"],
    b: Activation[Array, "U O X"],
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "S O"]:
    """`lora_add` where the B of a row is that of its expert.

    `out[s, o] = round(base[s, o] + p)` if `p != 0`, else `round(base[s, o])`;
    `p = sum_x(h[s, x] * b[experts[s], o, x])`

    Args:
        base: float32, of `moe.api.expert_linear`.
        h: Of `lora_hidden`.
        experts: The expert of each row. Where it is not from 0 to U - 1, p is zero.
        b: The B of all adapters, for each expert.
        out_dtype: What the sum is rounded to; float32 keeps it.
        backend: Which implementation runs.

    Raises:
        ValueError: If the shapes do not agree, or X is not a multiple of `RANK_BLOCK`.

    Numerics:
        As `lora_add`, a row and its expert alone.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if (h.shape[1], base.shape, experts.shape) != (b.shape[2], (len(h), b.shape[1]), (len(h),)):
        raise ValueError(f"{base.shape=}, {h.shape=}, {experts.shape=}, {b.shape=} do not agree")
    if h.shape[1] % RANK_BLOCK:
        raise ValueError(f"{h.shape=} must have columns in blocks of {RANK_BLOCK}")
    return KERNELS[backend].expert_lora_add(base, h, experts, b, out_dtype=out_dtype)
