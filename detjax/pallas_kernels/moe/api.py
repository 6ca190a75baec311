# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts. A row's bits depend on its own experts, never on who shares them."""

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.quantized import QuantizedMatrix, W8A8Matrix
from detjax.pallas_kernels.moe.expert_weights import (
    ClampedExperts,
    ExpertWeights,
    SharedExpert,
    SharedRows,
)


def route(
    logits: Float32[Array, "M O"],
    *,
    num_experts: int,
    top_k: int,
    renormalise: bool,
    backend: Backend,
) -> tuple[Int32[Array, "M Q"], Float32[Array, "M Q"]]:
    """Choose each row's experts, and weigh them by a softmax.

    `p[m, e] = exp(logits[m, e] - max(logits[m]))`, `w[m, r] = p[m, ids[m, r]] / s[m]`,
    `s[m] = tree(p[m])`, or with `renormalise` `s[m] = p[m, ids[m, 0]] + p[m, ids[m, 1]] + ...`

    Args:
        logits: Of every expert of the model, and of a router's padding (`params.PRODUCT_BLOCK`),
            whose columns come last and are not read.
        num_experts: Of the model, U.
        top_k: Experts of a row, Q.
        renormalise: Whether a row's weights add up to 1.
        backend: Which implementation runs.

    Returns:
        Ids of a row's experts in order of rank (the greatest logit first, equal ones by id), and
        their weights.

    Raises:
        ValueError: If `top_k` is not from 1 to U, or there are less than U logits.

    Numerics:
        float32 throughout, nothing rounded below it. `tree` is the perfect binary tree over experts
        in order of id, padded with zeros to a power of two; the other sum runs left to right. One
        division a weight, correctly rounded on portable. A row with NaN gets ids in range, and
        meets no other row. Padding has no part in any of it.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (U, Q, build).

    Reference:
        Shazeer et al. 2017, arXiv:1701.06538. transformers rounds the weights to the dtype of the
        activations; here they stay float32.
    """
    _check_logits(logits, num_experts, top_k)
    return KERNELS[backend].route(
        logits, num_experts=num_experts, top_k=top_k, renormalise=renormalise
    )


def route_by_sigmoid(
    logits: Float32[Array, "M O"],
    correction: Float32[Array, " O"],
    *,
    num_experts: int,
    top_k: int,
    renormalise: bool,
    scale: float,
    backend: Backend,
) -> tuple[Int32[Array, "M Q"], Float32[Array, "M Q"]]:
    """Choose each row's experts by corrected sigmoids, and weigh them by the sigmoids alone.

    `p[m, e] = 1 / (1 + exp(-logits[m, e]))`, `c[m, e] = p[m, e] + correction[e]`,
    `w[m, r] = p[m, ids[m, r]] * scale`, or with `renormalise`
    `w[m, r] = p[m, ids[m, r]] / s[m] * scale`,
    `s[m] = (p[m, ids[m, 0]] + p[m, ids[m, 1]] + ...) + 1e-20`

    Args:
        logits: As in `route`.
        correction: Of every expert, and of the router's padding, which is not read.
        num_experts: Of the model, U.
        top_k: Experts of a row, Q.
        renormalise: Whether a row's weights add up to `scale`.
        scale: Factor on the weights.
        backend: Which implementation runs.

    Returns:
        Ids of a row's experts in order of rank (the greatest c first, equal ones by id), and their
        weights.

    Raises:
        ValueError: If `top_k` is not from 1 to U, or there are less than U logits.

    Numerics:
        float32 throughout, each sum, quotient and product rounded on its own; `scale` and 1e-20 are
        rounded to float32. The sum runs left to right. A row with NaN gets ids in range, and meets
        no other row. Padding has no part in any of it.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (U, Q, build).

    Reference:
        DeepSeek-AI 2024, arXiv:2412.19437, with one group of experts.
    """
    _check_logits(logits, num_experts, top_k)
    return KERNELS[backend].route_by_sigmoid(
        logits, correction, num_experts=num_experts, top_k=top_k, renormalise=renormalise,
        scale=scale,
    )  # fmt: skip


def _check_logits(logits, num_experts: int, top_k: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{top_k=} must be from 1 to the {num_experts} experts")
    if logits.shape[1] < num_experts:
        raise ValueError(f"{logits.shape=} must have a column for each of {num_experts=}")


def expert_mlp(
    x: Activation[Array, "M D"],
    expert_ids: Int32[Array, "M Q"],
    experts: ExpertWeights,
    *,
    first_expert: Int32[Array, ""] | int,
    num_ranks: int = 1,
    backend: Backend,
) -> Activation[Array, "M Q D"]:
    """Run each row through those of its experts that are here.

    `h = linear_swiglu(x[m], gate_up[e])`, `y[m, r] = round(sum_f(h[f] * down[e, :, f]))`,
    `e = expert_ids[m, r] - first_expert`

    With `extras`, `h = swiglu(round(x[m] . gate_up[e] + gate_up_bias[e]), clamp)` and
    `y[m, r] = round(sum_f(h[f] * down[e, :, f]) + down_bias[e])`.

    Args:
        x: Normalised rows.
        expert_ids: Each row's experts, over all ranks, in order of rank.
        experts: The weights of each expert here.
        first_expert: Id of the first expert here.
        num_ranks: That share the experts alike: an expert gets M Q / (u num_ranks) rows on average,
            which decides how the work is cut, and no bit.
        backend: Which implementation runs.

    Returns:
        Rounded rows; all bits zero where the expert is on another rank.

    Raises:
        ValueError: If the shapes do not agree, or `num_ranks` is below 1.

    Numerics:
        The bits of `linear_swiglu`, then of `linear` rounded to the dtype of `x`: one leaf, K in
        order, for each row and expert alone. Neither how many rows an expert gets nor which of
        them share a tile changes a bit. A bias is added last, in float32, before the rounding.
        A `W8A8Matrix` is multiplied as `linear.w8a8.w8a8_product` says, with rows of `x`, and of h,
        as `linear.w8a8.quantize_rows` makes them.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    _check_experts(x, *experts)
    if num_ranks < 1:
        raise ValueError(f"{num_ranks=} must be at least 1")
    return KERNELS[backend].expert_mlp(
        x, expert_ids, experts, first_expert=first_expert, num_ranks=num_ranks
    )


def _check_experts(
    x: Activation[Array, "M D"],
    w_gate_up: Activation[Array, "u E D"] | W8A8Matrix,
    w_down: Activation[Array, "u D F"] | W8A8Matrix,
    extras: ClampedExperts | None,
) -> None:
    """Matrices are of the rows' width, and biases one a row of each matrix."""
    num_local, num_gate_up, width = w_gate_up.shape
    if x.shape[1] != width or w_down.shape != (num_local, width, num_gate_up // 2):
        raise ValueError(
            f"{x.shape=}, {w_gate_up.shape=} and {w_down.shape=} must be [M, D], [u, 2 F, D] and "
            "[u, D, F]"
        )
    if num_gate_up % 2:
        raise ValueError(f"{w_gate_up.shape=} must have as many rows of up as of gate")
    if extras is None:
        return
    shapes = extras.gate_up_bias.shape, extras.down_bias.shape
    if shapes != (w_gate_up.shape[:2], w_down.shape[:2]):
        raise ValueError(
            f"biases of shapes {shapes} must be one a row of {w_gate_up.shape=} and {w_down.shape=}"
        )


def expert_linear(
    x: Activation[Array, "M I"],
    experts: Int32[Array, " S"],
    w: Activation[Array, "U O I"],
    bias: Activation[Array, "U O"] | None = None,
    *,
    out_dtype: jnp.dtype,
    backend: Backend,
) -> Activation[Array, "S O"]:
    """Multiply each row by the matrices of its experts.

    `out[s, o] = round(sum_i(x[s // q, i] * w[experts[s], o, i]) + bias[experts[s], o])`, q = S / M

    Args:
        x: Rows, each for q neighbouring pairs of a token and an expert.
        experts: The expert of each pair. Of one that is not from 0 to U - 1, all bits are zero.
        w: The matrix of each expert, (out, in).
        bias: Of each expert, added last, in float32; None adds none.
        out_dtype: What the sum is rounded to: that of `x`, or float32, which keeps it.
        backend: Which implementation runs.

    Raises:
        ValueError: If S is not a multiple of M.

    Numerics:
        A row's bits are those of `linear` by its expert's matrix alone: I in order, one rounding.
        As many products as there are pairs are made, for any number of experts.
        Claims: run-invariant, batch-invariant. Bits depend on (I, dtypes, build).
    """
    if experts.size % x.shape[0]:
        raise ValueError(f"{experts.shape=} must be a multiple of the rows of {x.shape=}")
    return KERNELS[backend].expert_linear(x, experts, w, bias, out_dtype=out_dtype)


def combine_experts_add_rms_norm(
    y: Activation[Array, "M X D"],
    weights: Float32[Array, "M Q"],
    residual: Activation[Array, "M D"],
    gain: Activation[Array, " D"],
    *,
    eps: float,
    backend: Backend,
    shared: SharedRows | None = None,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Add a row's experts by their weights to the residual stream, and normalise.

    `acc = 0`, then for each rank r `acc = fma(weights[m, r], y[m, r], acc)`, then for the shared
    expert `acc = fma(1, shared[m], acc)`; `total = round(residual + acc)`, `out = rms_norm(total)`

    Args:
        y: Rows of `expert_mlp`, from whichever rank has the expert; Q of X, as `route_mlp` may
            leave that of the shared expert behind them.
        weights: Of `route`.
        residual: The residual stream.
        gain: Scale of each channel.
        eps: Added to the mean square, in units of total**2.
        backend: Which implementation runs.
        shared: Of the expert that every row has; None if there is none.

    Returns:
        The new residual stream, and its normalised rows.

    Numerics:
        float32, experts in order of rank, each by one fused multiply-add (on portable where the
        processor has one); the residual stream is rounded once, and its rounded value normalised
        as `rms_norm` does.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return KERNELS[backend].combine_experts_add_rms_norm(
        y, weights, residual, gain, eps=eps, shared=shared
    )


def route_mlp(
    x: Activation[Array, "M D"],
    logits: Float32[Array, "M O"],
    experts: ExpertWeights,
    *,
    top_k: int,
    renormalise: bool,
    backend: Backend,
    shared: SharedExpert | None = None,
) -> tuple[Activation[Array, "M X D"], Float32[Array, "M Q"]]:
    """`route` and `expert_mlp` where every expert is here.

    Args:
        x: Normalised rows.
        logits: Of every expert, and of padding, as in `route`.
        experts: The weights of each expert.
        top_k: Experts of a row, Q.
        renormalise: Whether a row's weights add up to 1.
        backend: Which implementation runs.
        shared: The expert that every row has, if it `joins_experts`.

    Returns:
        The rows of `expert_mlp`, then with `shared` that of the shared expert without its gate
        (X is Q, or Q + 1), and the weights of `route`.

    Raises:
        ValueError: If `top_k` is not from 1 to u, or the shapes do not agree.

    Numerics:
        The bits of the two, one after the other.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    _check_logits(logits, experts.gate_up.shape[0], top_k)
    _check_experts(x, *experts)
    return KERNELS[backend].route_mlp(
        x, logits, experts, top_k=top_k, renormalise=renormalise, shared=shared
    )


def joins_experts(
    num_rows: int, experts: ExpertWeights, shared: SharedExpert, *, backend: Backend
) -> bool:
    """Whether `route_mlp` multiplies so many rows by the shared expert too, in its launches."""
    return KERNELS[backend].joins_experts(num_rows, experts, shared)


def defers_experts(num_rows: int, width: int, *, backend: Backend) -> bool:
    """Whether `route_mlp`, then `combine_experts_norm_linear`, beats `route_mlp_add_rms_norm`.

    For so many rows of so many channels, and by launches: both change no bit.
    """
    return KERNELS[backend].defers_experts(num_rows, width)


def combine_experts_norm_linear(
    y: Activation[Array, "M X D"],
    weights: Float32[Array, "M Q"],
    residual: Activation[Array, "M D"],
    gain: Activation[Array, " D"],
    w: Activation[Array, "O D"] | QuantizedMatrix | W8A8Matrix,
    bias: Activation[Array, " O"] | None = None,
    *,
    eps: float,
    out_dtype: jnp.dtype,
    backend: Backend,
    shared: SharedRows | None = None,
) -> tuple[Activation[Array, "M O"], Activation[Array, "M D"]]:
    """Add a row's experts to the residual stream, normalise, and multiply.

    `total, x = combine_experts_add_rms_norm(y, weights, residual, gain, shared)` and
    `out = linear(x, w, bias)`

    Args:
        y: Rows of `expert_mlp`, or of `route_mlp`, as in `combine_experts_add_rms_norm`.
        weights: Of `route`.
        residual: The residual stream.
        gain: Of the norm.
        w: Weights, (out, in).
        bias: Added in float32 before the rounding.
        eps: Of the norm.
        out_dtype: What the product is rounded to; float32 keeps it.
        backend: Which implementation runs.
        shared: Of the expert that every row has; None if there is none.

    Returns:
        The product, and the new residual stream.

    Raises:
        ValueError: If D of the arrays differ.

    Numerics:
        The bits of `combine_experts_add_rms_norm` and `linear` one after the other; on sm90 few
        rows in one launch.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (D, dtypes, build).
    """
    if not y.shape[2] == residual.shape[1] == w.shape[1]:
        raise ValueError(f"{y.shape=}, {residual.shape=} and {w.shape=} must end with the same D")
    return KERNELS[backend].combine_experts_norm_linear(
        y, weights, residual, gain, w, bias, eps=eps, out_dtype=out_dtype, shared=shared
    )


def route_mlp_add_rms_norm(
    x: Activation[Array, "M D"],
    logits: Float32[Array, "M O"],
    experts: ExpertWeights,
    residual: Activation[Array, "M D"],
    gain: Activation[Array, " D"],
    *,
    top_k: int,
    renormalise: bool,
    eps: float,
    backend: Backend,
    shared: SharedRows | None = None,
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """`route`, `expert_mlp` and `combine_experts_add_rms_norm` where every expert is here.

    Rows of experts need not be put in order of slot, and few rows are routed in the launch of their
    first product.

    Args:
        x: Normalised rows.
        logits: Of every expert, and of padding, as in `route`.
        experts: The weights of each expert.
        residual: The residual stream.
        gain: Scale of each channel.
        top_k: Experts of a row.
        renormalise: Whether a row's weights add up to 1.
        eps: Added to the mean square, in units of total**2.
        backend: Which implementation runs.
        shared: Of the expert that every row has; None if there is none.

    Returns:
        The new residual stream, and its normalised rows.

    Raises:
        ValueError: If `top_k` is not from 1 to u, or the shapes do not agree.

    Numerics:
        The bits of the three, one after the other.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    _check_logits(logits, experts.gate_up.shape[0], top_k)
    _check_experts(x, *experts)
    return KERNELS[backend].route_mlp_add_rms_norm(
        x, logits, experts, residual, gain, top_k=top_k, renormalise=renormalise, eps=eps,
        shared=shared,
    )  # fmt: skip
