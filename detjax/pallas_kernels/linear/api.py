# SPDX-License-Identifier: Apache-2.0
"""Linear layers: `x @ w.T`, the order of its inputs fixed by I alone. Weights are (out, in)."""

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32
from detjax.numerics import Reduction
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear import w8a8
from detjax.pallas_kernels.linear.joined import JoinedMatrix
from detjax.pallas_kernels.linear.quantized import QuantizedMatrix, RowsToQuantize, W8A8Matrix
from detjax.pallas_kernels.rms_norm.api import combine_add_rms_norm, rms_norm


def linear(
    x: Activation[Array, "M I"],
    w: Activation[Array, "O I"] | QuantizedMatrix | W8A8Matrix | JoinedMatrix,
    bias: Activation[Array, " O"] | None = None,
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M O"]:
    """Multiply by a weight matrix whose outputs are split over ranks, if at all.

    `out[m, o] = round(sum_i(x[m, i] * w[o, i]) + bias[o])`

    Here and below, a `W8A8Matrix` is multiplied as `w8a8.w8a8_product` says, with rows of
    `w8a8.quantize_rows`.

    Args:
        x: Activations.
        w: Weights, (out, in); two matrices only where the backend `joins_matrices`.
        bias: Added in float32 before the rounding.
        out_dtype: What the sum is rounded to; float32 keeps it.
        backend: Which implementation runs.

    Raises:
        ValueError: If I of `x` and `w` differ.

    Numerics:
        Operands are widened to float32 exactly; products and sums are float32. I is summed in
        order, in the steps `portable.step_len` gives; the bias is added last; one rounding. sm90
        cuts float32 activations, or float32 weights of bfloat16 activations, into three parts.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (I, dtypes, build).
    """
    _check_inputs(x, w)
    if isinstance(w, W8A8Matrix):
        rows = RowsToQuantize(values=x, coding=w.row_coding)
        return w8a8.w8a8_product(rows, w, bias, out_dtype=out_dtype, backend=backend)
    return KERNELS[backend].linear(x, w, bias, out_dtype=out_dtype)


def joins_matrices(
    x: Activation[Array, "M I"],
    first: Activation[Array, "O I"],
    second: Activation[Array, "P I"],
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> bool:
    """Whether `linear` and `combine_norm_linear` take a `JoinedMatrix` of the two for these rows.

    An output has the bits that it has in the product of its matrix alone.
    """
    return KERNELS[backend].joins_matrices(x, first, second, out_dtype=out_dtype)


def _check_inputs(x, w) -> None:
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"{x.shape=} and {w.shape=} must agree in their last axis, I")


def _check_gate_up(x, w_gate_up) -> None:
    _check_inputs(x, w_gate_up)
    if w_gate_up.shape[0] % 2:
        raise ValueError(f"{w_gate_up.shape=} must have as many rows of up as of gate")


def linear_swiglu(
    x: Activation[Array, "M I"],
    w_gate_up: Activation[Array, "E I"] | QuantizedMatrix | W8A8Matrix,
    *,
    backend: Backend,
) -> Activation[Array, "M F"]:
    """Multiply by gates and ups, and gate: the feed-forward layer up to its row-parallel product.

    `out[m, f] = round(g / (1 + exp(-g)) * u)`, `g = round(sum_i(x[m, i] * w_gate_up[f, i]))`,
    `u = round(sum_i(x[m, i] * w_gate_up[F + f, i]))`

    Args:
        x: Activations.
        w_gate_up: This rank's rows of gate, then of up, (out, in); E = 2 F.
        backend: Which implementation runs.

    Raises:
        ValueError: If I of `x` and `w_gate_up` differ or E is odd.

    Numerics:
        The bits of `linear`, rounded to the dtype of `x`, and `swiglu` one after the other. sm90
        keeps gate and up in registers, so E columns are never written.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Shazeer 2020, arXiv:2002.05202.
    """
    _check_gate_up(x, w_gate_up)
    if isinstance(w_gate_up, W8A8Matrix):
        rows = RowsToQuantize(values=x, coding=w_gate_up.row_coding)
        return w8a8.w8a8_swiglu(rows, w_gate_up, out_dtype=x.dtype, backend=backend)
    return KERNELS[backend].linear_swiglu(x, w_gate_up)


def norm_linear(
    x: Activation[Array, "M I"],
    gain: Activation[Array, " I"],
    w: Activation[Array, "O I"] | QuantizedMatrix | W8A8Matrix,
    bias: Activation[Array, " O"] | None = None,
    *,
    eps: float,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "M O"]:
    """Normalise rows of the residual stream, and multiply.

    `out = linear(rms_norm(x, gain), w, bias)`

    Args:
        x: The residual stream.
        gain: Of the norm.
        w: Weights, (out, in).
        bias: Added in float32 before the rounding.
        eps: Of the norm.
        out_dtype: What the sum is rounded to; float32 keeps it.
        backend: Which implementation runs.

    Raises:
        ValueError: If I of `x` and `w` differ.

    Numerics:
        The bits of `rms_norm` and `linear` one after the other, normalised rows rounded to the
        dtype of `x`; on sm90 up to 8 rows in one launch.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (I, dtypes, build).
    """
    _check_inputs(x, w)
    if isinstance(w, W8A8Matrix):
        rows = RowsToQuantize(values=x, coding=w.row_coding, gain=gain, eps=eps)
        return w8a8.w8a8_product(rows, w, bias, out_dtype=out_dtype, backend=backend)
    return KERNELS[backend].norm_linear(x, gain, w, bias, eps=eps, out_dtype=out_dtype)


def norm_linear_swiglu(
    x: Activation[Array, "M I"],
    gain: Activation[Array, " I"],
    w_gate_up: Activation[Array, "E I"] | QuantizedMatrix | W8A8Matrix,
    *,
    eps: float,
    backend: Backend,
) -> Activation[Array, "M F"]:
    """Normalise rows of the residual stream, multiply by gates and ups, and gate.

    `out = linear_swiglu(rms_norm(x, gain), w_gate_up)`

    Args:
        x: The residual stream.
        gain: Of the norm.
        w_gate_up: This rank's rows of gate, then of up, (out, in); E = 2 F.
        eps: Of the norm.
        backend: Which implementation runs.

    Raises:
        ValueError: If I of `x` and `w_gate_up` differ or E is odd.

    Numerics:
        The bits of `rms_norm` and `linear_swiglu` one after the other; on sm90 up to 8 rows
        in one launch.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    _check_gate_up(x, w_gate_up)
    if isinstance(w_gate_up, W8A8Matrix):
        rows = RowsToQuantize(values=x, coding=w_gate_up.row_coding, gain=gain, eps=eps)
        return w8a8.w8a8_swiglu(rows, w_gate_up, out_dtype=x.dtype, backend=backend)
    return KERNELS[backend].norm_linear_swiglu(x, gain, w_gate_up, eps=eps)


def _check_leaves(x, w, reduction: Reduction) -> None:
    _check_inputs(x, w)
    if isinstance(w, W8A8Matrix):
        raise ValueError("a product of 8-bit activations has no leaves: one rank has all of I")
    leaves, rest = divmod(x.shape[1], reduction.leaf_len)
    if rest or leaves < 1 or leaves & (leaves - 1):
        raise ValueError(
            f"a rank's share of I, {x.shape[1]}, must be a power-of-two number of leaves of "
            f"{reduction.leaf_len}"
        )


def linear_leaf_sums(
    x: Activation[Array, "M i"],
    w: Activation[Array, "O i"] | QuantizedMatrix | W8A8Matrix,
    *,
    reduction: Reduction,
    backend: Backend,
) -> Float32[Array, "A ... M O"]:
    """This rank's subtree of a row-parallel product in A parts, for a kernel that adds the rest.

    `tree(out) = linear_partial(x, w)`, also in what lies between A and M

    Args:
        x: This rank's columns of the activations: whole leaves.
        w: The same columns of the weights, (out, in).
        reduction: The leaves of the whole I, from `numerics.tree_reduction`.
        backend: Which implementation runs. It chooses A, a power of two, by M and O for speed.

    Raises:
        ValueError: As `linear_partial`.

    Numerics:
        Each part is a subtree of `linear_partial`. Any kernel that continues the tree over the
        first axis, ((p0 + p1) + (p2 + p3)) + ..., gets its bits.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant. They are of the
        tree's sum; A may vary with M.
    """
    _check_leaves(x, w, reduction)
    return KERNELS[backend].linear_leaf_sums(x, w, reduction=reduction)


def linear_partial(
    x: Activation[Array, "M i"],
    w: Activation[Array, "O i"] | QuantizedMatrix | W8A8Matrix,
    *,
    reduction: Reduction,
    backend: Backend,
) -> Float32[Array, "... M O"]:
    """This rank's subtree of a row-parallel product, unrounded.

    `out[m, o] = tree(sum_{i in leaf}(x[m, i] * w[o, i]) for leaf in this rank's leaves)`

    On sm90 float32 activations have three trees, [3, M, O]: one of each of their bfloat16 parts,
    which are added behind the whole trees. Between ranks they are three sums.

    Args:
        x: This rank's columns of the activations: whole leaves.
        w: The same columns of the weights, (out, in).
        reduction: The leaves of the whole I, from `numerics.tree_reduction`.
        backend: Which implementation runs.

    Raises:
        ValueError: If `i` is not a power-of-two number of leaves, so that the ranks' sums would
            not be subtrees of the profile's tree.

    Numerics:
        Each leaf is summed in order in float32. Leaves are added as the perfect binary tree
        ((l0 + l1) + (l2 + l3)) + ...; no rounding below float32. The ranks' butterfly
        (`detjax.parallel.collectives`) continues the tree.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Tree-based invariant kernels: Zhang et al. 2025, arXiv:2511.17826. There the tree is added
        in bfloat16, here in float32.
    """
    _check_leaves(x, w, reduction)
    return KERNELS[backend].linear_partial(x, w, reduction=reduction)


def add_partials(
    a: Float32[Array, "... M O"], b: Float32[Array, "... M O"], *, backend: Backend
) -> Float32[Array, "... M O"]:
    """Add two subtrees: one node of the tree.

    `out = a + b`

    Numerics:
        One float32 addition an element; commutative, so both ranks of a pair get the same bits.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    return KERNELS[backend].add_partials(a, b)


def defers_norm(
    x: Activation[Array, "M I"],
    w: Activation[Array, "D I"] | QuantizedMatrix | W8A8Matrix,
    *,
    reduction: Reduction,
    backend: Backend,
) -> bool:
    """Whether `linear_add`, then a product that normalises its input, beats `linear_add_rms_norm`.

    By launches: both change no bit.
    """
    if isinstance(w, W8A8Matrix):
        return True  # what normalises quantises as well
    return KERNELS[backend].defers_norm(x, w, reduction=reduction)


def defers_sum(
    x: Activation[Array, "M I"],
    w: Activation[Array, "D I"] | QuantizedMatrix | W8A8Matrix,
    *,
    reduction: Reduction,
    backend: Backend,
) -> bool:
    """Whether `linear_leaf_sums`, then `combine_norm_linear`, beats `linear_add_rms_norm`.

    By launches: both change no bit.
    """
    if isinstance(w, W8A8Matrix):
        return False
    return KERNELS[backend].defers_sum(x, w, reduction=reduction)


def combine_norm_linear(
    leaf_sums: Float32[Array, "L M I"] | None,
    residual: Activation[Array, "M I"],
    gain: Activation[Array, " I"],
    w: Activation[Array, "O I"] | QuantizedMatrix | W8A8Matrix | JoinedMatrix,
    bias: Activation[Array, " O"] | None = None,
    *,
    eps: float,
    out_dtype: jnp.dtype,
    is_gated: bool = False,
    backend: Backend,
) -> tuple[Activation[Array, "M X"], Activation[Array, "M I"], Activation[Array, "M I"]]:
    """Finish a row-parallel product of tp = 1, normalise, and multiply.

    `total, x = combine_add_rms_norm(leaf_sums, residual, None, gain)`, `out = linear(x, w, bias)`,
    or `linear_swiglu(x, w)`

    Without `leaf_sums`, `total = residual` and `x = rms_norm(residual, gain)`.

    Args:
        leaf_sums: Of `linear_leaf_sums`; None where the residual stream is whole.
        residual: The residual stream.
        gain: Of the norm.
        w: Weights of the second product, (out, in).
        bias: Of the second product; None if it is gated.
        eps: Of the norm.
        out_dtype: What the second product is rounded to; float32 keeps it. If it is gated, that of
            `residual`.
        is_gated: Whether `w` is gates, then ups.
        backend: Which implementation runs.

    Returns:
        The second product, the new residual stream, and its normalised rows.

    Raises:
        ValueError: If I of the arrays differ.

    Numerics:
        The bits of `combine_add_rms_norm`, or `rms_norm`, and `linear` or `linear_swiglu`, one
        after the other; on sm90 few rows in one launch.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (I, dtypes, build).
    """
    (_check_gate_up if is_gated else _check_inputs)(residual, w)
    if leaf_sums is not None and leaf_sums.shape[1:] != residual.shape:
        raise ValueError(f"{leaf_sums.shape=} must be [L, M, I] of {residual.shape=}")
    if isinstance(w, W8A8Matrix) and leaf_sums is not None:
        total, x = combine_add_rms_norm(leaf_sums, residual, None, gain, eps=eps, backend=backend)
        if is_gated:
            return linear_swiglu(x, w, backend=backend), total, x
        return linear(x, w, bias, out_dtype=out_dtype, backend=backend), total, x
    return KERNELS[backend].combine_norm_linear(
        leaf_sums, residual, gain, w, bias, eps=eps, out_dtype=out_dtype, is_gated=is_gated
    )


def linear_add(
    x: Activation[Array, "M I"],
    w: Activation[Array, "D I"] | QuantizedMatrix | W8A8Matrix,
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    *,
    reduction: Reduction,
    backend: Backend,
) -> Activation[Array, "M D"]:
    """A whole row-parallel product of tp = 1, added to the residual stream.

    `out = round(residual + (tree(x @ w.T) + bias))`

    Args:
        x: Activations, all of K.
        w: Weights, (out, in).
        residual: The residual stream.
        bias: Added after the tree.
        reduction: The leaves of I.
        backend: Which implementation runs.

    Numerics:
        The residual stream that `linear_add_rms_norm` returns: the tree, the bias and the residual
        are added in float32 and rounded once.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if isinstance(w, W8A8Matrix):
        rows = RowsToQuantize(values=x, coding=w.row_coding)
        return w8a8.w8a8_product(rows, w, bias, residual, out_dtype=residual.dtype, backend=backend)
    return KERNELS[backend].linear_add(x, w, residual, bias, reduction=reduction)


def linear_add_rms_norm(
    x: Activation[Array, "M I"],
    w: Activation[Array, "D I"] | QuantizedMatrix | W8A8Matrix,
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    *,
    reduction: Reduction,
    eps: float,
    backend: Backend,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """A whole row-parallel layer of tp = 1: multiply, add the residual stream, normalise.

    `total = round(residual + (tree(x @ w.T) + bias))`, `out = rms_norm(total)`

    Args:
        x: Activations, all of K.
        w: Weights, (out, in).
        residual: The residual stream.
        bias: Added after the tree.
        gain: Of the norm.
        reduction: The leaves of I.
        eps: Of the norm.
        backend: Which implementation runs.

    Returns:
        The new residual stream, and its normalised rows.

    Numerics:
        The bits of `linear_partial` and `add_rms_norm` one after the other, in fewer launches.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if isinstance(w, W8A8Matrix):
        total = linear_add(x, w, residual, bias, reduction=reduction, backend=backend)
        return total, rms_norm(total, gain, eps=eps, backend=backend)
    return KERNELS[backend].linear_add_rms_norm(
        x, w, residual, bias, gain, reduction=reduction, eps=eps
    )
