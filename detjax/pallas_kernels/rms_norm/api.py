# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, alone and fused with the residual addition that comes before it."""

from detjax.array_types import Activation, Array, Float32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS


def rms_norm(
    x: Activation[Array, "M D"],
    gain: Activation[Array, " D"],
    *,
    eps: float,
    backend: Backend,
) -> Activation[Array, "M D"]:
    """Divide each row by its root mean square.

    `out[m, d] = round(x[m, d] * rsqrt(mean(x[m]**2) + eps) * gain[d])`

    Args:
        x: Rows; per-head q/k norm passes one row a head, with D the head's channels.
        gain: Scale of each channel.
        eps: Added to the mean square, in units of x**2.
        backend: Which implementation runs.

    Numerics:
        float32 throughout: one row sum of fixed shape, multiplied left to right, rounded once.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (D, dtypes, build).

    Reference:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. Hugging Face rounds before the gain;
        here the gain is applied in float32.
    """
    return KERNELS[backend].rms_norm(x, gain, eps=eps)


def add_rms_norm(
    partial: Float32[Array, "... M D"],
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    *,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add a row-parallel product to the residual stream, and normalise the result.

    `total = round(residual + (partial + bias))`, `out = rms_norm(total)`

    Args:
        partial: The whole tree of `linear_partial`, unrounded; of float32 activations on sm90
            three, [3, M, D], added the smallest first before all else.
        residual: The residual stream.
        bias: The product's bias, added after the tree.
        gain: Scale of each channel.
        eps: Added to the mean square, in units of total**2.
        backend: Which implementation runs.

    Returns:
        The new residual stream, and its normalised rows.

    Numerics:
        float32 throughout; the residual stream is rounded once and its rounded value normalised,
        as `rms_norm` does.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return KERNELS[backend].add_rms_norm(partial, residual, bias, gain, eps=eps)


def combine_add_rms_norm(
    leaf_sums: Float32[Array, "A ... M D"],
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    *,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add the subtrees of a row-parallel product, then as `add_rms_norm`.

    `total = round(residual + (tree(leaf_sums) + bias))`, `out = rms_norm(total)`

    Args:
        leaf_sums: Subtrees in order; A is a power of two. Of float32 activations on sm90 three
            trees' side by side, [A, 3, M, D], whose sums are added the smallest first.
        residual: The residual stream.
        bias: The product's bias, added after the tree.
        gain: Scale of each channel.
        eps: Added to the mean square, in units of total**2.
        backend: Which implementation runs.

    Returns:
        The new residual stream, and its normalised rows.

    Numerics:
        The perfect binary tree over the first axis in float32, then the bits of `add_rms_norm`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return KERNELS[backend].combine_add_rms_norm(leaf_sums, residual, bias, gain, eps=eps)
