# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: `base + B round(s A x)`, unmerged, each row with its own adapter or none.

`A x` is a product with the A of all resident adapters. A column that belongs to another adapter
than the row's becomes zero. Zeros change no bit of a sum, so a row meets no adapter but its own.
"""

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.numerics import Reduction
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.quantized import QuantizedMatrix
from detjax.pallas_kernels.lora.adapted import RANK_BLOCK, STACK_BLOCK, LowRankRows


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


def lora_project(
    x: Activation[Array, "M I"],
    a: Activation[Array, "X I"],
    slots: Int32[Array, " M"],
    scales: Float32[Array, "Y Z"],
    *,
    reduction: Reduction,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M X"]:
    """Project rows to the ranks of their adapters: `lora_hidden` of `linear_leaf_sums`.

    `h[m, x] = round(scales[part, slot] * tree(A x)[m, x])` if `slot == slots[m]`, else 0

    Args:
        x: Activations, with all of I.
        a: The A of all adapters.
        slots: As in `lora_hidden`.
        scales: As in `lora_hidden`.
        reduction: The leaves of I.
        out_dtype: What h is rounded to.
        backend: Which implementation runs.

    Raises:
        ValueError: If X is not a multiple of the number of scales, or I of `x` and `a` differ.

    Numerics:
        The bits of the two operations one after the other.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    if a.shape[0] % scales.size or x.shape[1] != a.shape[1]:
        raise ValueError(f"{x.shape=}, {a.shape=} and {scales.shape=} do not agree")
    return KERNELS[backend].lora_project(
        x, a, slots, scales, reduction=reduction, out_dtype=out_dtype
    )


def lora_linear(
    x: Activation[Array, "M I"],
    w: Activation[Array, "O I"] | QuantizedMatrix,
    bias: Activation[Array, " O"] | None,
    adapters: LowRankRows,
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M O"]:
    """Multiply by weights and add rows' adapters: `lora_add` of an unrounded `linear`.

    Args:
        x: Activations.
        w: Weights, (out, in).
        bias: Added in float32, before the adapters.
        adapters: h, of `lora_project`, and B.
        out_dtype: What the sum is rounded to.
        backend: Which implementation runs.

    Raises:
        ValueError: If the shapes do not agree, or X is not a multiple of `STACK_BLOCK`.

    Numerics:
        The bits of the two operations one after the other. sm90 joins them, so that no float32 sum
        is written.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    _check_low_rank(x, w, adapters)
    return KERNELS[backend].lora_linear(x, w, bias, adapters, out_dtype=out_dtype)


def _check_low_rank(x, w, adapters: LowRankRows) -> None:
    h, b = adapters.h, adapters.b
    shapes = (x.shape[1], h.shape, b.shape)
    if shapes != (w.shape[1], (x.shape[0], b.shape[1]), (w.shape[0], h.shape[1])):
        raise ValueError(f"{x.shape=}, {w.shape=}, {h.shape=} and {b.shape=} do not agree")
    if h.shape[1] % STACK_BLOCK:
        raise ValueError(f"{h.shape=} must have columns in blocks of {STACK_BLOCK}")


def lora_linear_swiglu(
    x: Activation[Array, "M I"],
    w_gate_up: Activation[Array, "E I"] | QuantizedMatrix,
    adapters: LowRankRows,
    *,
    backend: Backend,
) -> Activation[Array, "M F"]:
    """Gates and ups with rows' adapters: `swiglu` of `lora_linear`, rounded in between.

    Args:
        x: Activations.
        w_gate_up: This rank's rows of gate, then of up; E = 2 F.
        adapters: h, of `lora_project`, and B. The first half of the columns is of gates, and has
            zeros in rows of ups; the second likewise.
        backend: Which implementation runs.

    Raises:
        ValueError: If the shapes do not agree, E is odd, or X is no multiple of 2 `STACK_BLOCK`.

    Numerics:
        The bits of the two operations one after the other.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    _check_low_rank(x, w_gate_up, adapters)
    if w_gate_up.shape[0] % 2 or adapters.h.shape[1] % (2 * STACK_BLOCK):
        raise ValueError(
            f"{w_gate_up.shape=} and {adapters.h.shape=} must have as many ups as gates"
        )
    return KERNELS[backend].lora_linear_swiglu(x, w_gate_up, adapters)


def lora_linear_add_rms_norm(
    x: Activation[Array, "M I"],
    w: Activation[Array, "D I"] | QuantizedMatrix,
    adapters: LowRankRows,
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    *,
    reduction: Reduction,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Multiply with rows' adapters, add to the residual stream and normalise, on one rank.

    `total = round(residual + ((tree(W x) + B h) + bias))` and `out = rms_norm(total, gain)`

    Args:
        x: Activations.
        w: Weights, (out, in).
        adapters: h, of `lora_project`, and B.
        residual: The residual stream.
        bias: Added behind the adapters, or None.
        gain: Scale of each channel.
        reduction: The leaves of I.
        eps: Added to the mean square.
        backend: Which implementation runs.

    Returns:
        The residual stream, and its normalised rows.

    Raises:
        ValueError: If the shapes do not agree, or X is not a multiple of `STACK_BLOCK`.

    Numerics:
        The bits of `linear_partial`, `lora_add` to float32 and `add_rms_norm`.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    _check_low_rank(x, w, adapters)
    return KERNELS[backend].lora_linear_add_rms_norm(
        x, w, adapters, residual, bias, gain, reduction=reduction, eps=eps
    )


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
