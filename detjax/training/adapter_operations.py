# SPDX-License-Identifier: Apache-2.0
"""Products with an adapter, with gradients: kernels of serving forward, named sums backward.

The weights are frozen: they have no gradient. Numerics of gradients are those of `operations`.
"""

import functools

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32
from detjax.models.adapters.stack import AdapterSizes
from detjax.models.layers import ForwardContext, adapted_linear, row_parallel_norm
from detjax.pallas_kernels.lora.adapted import AdaptedMatrix, AdapterStack
from detjax.training.formulas import plain_rms_norm
from detjax.training.gradients import GradientSums, with_gradient
from detjax.training.lora import AdaptedMaster


def _served(master: AdaptedMaster, dtype: jnp.dtype) -> AdaptedMatrix:
    """The matrix as an engine has it, all rows with the adapter in slot 0."""
    num_parts, (num_out, num_in) = len(master.parts), master.w.shape
    sizes = AdapterSizes(max_loras=1, max_lora_rank=master.parts[0]["a"].shape[0])
    a = jnp.zeros((num_parts, sizes.num_slots, sizes.rank, num_in), dtype)
    b = jnp.zeros((num_out, num_parts, sizes.num_slots, sizes.rank), dtype)
    for part, (one, rows) in enumerate(zip(master.parts, _rows(master), strict=True)):
        rank = one["a"].shape[0]
        a = a.at[part, 0, :rank].set(one["a"].astype(dtype))
        b = b.at[rows, part, 0, :rank].set(one["b"].astype(dtype))
    scales = jnp.full((num_parts, sizes.num_slots), master.scale, jnp.float32)
    stack = AdapterStack(a=a.reshape(-1, num_in), b=b.reshape(num_out, -1), scales=scales)
    return AdaptedMatrix(base=master.w.astype(dtype), stack=stack, slots=jnp.zeros(1, jnp.int32))


def _rows(master: AdaptedMaster) -> list[slice]:
    """Of each tensor its rows in the matrix."""
    rows, start = [], 0
    for one in master.parts:
        rows.append(slice(start, start + one["b"].shape[0]))
        start = rows[-1].stop
    return rows


def _gradients(
    sums: GradientSums,
    x: jax.Array,
    master: AdaptedMaster,
    cotangent: jax.Array,
    dtype: jnp.dtype,
    *,
    splits_inputs: bool,
) -> tuple[jax.Array, AdaptedMaster]:
    """Cotangents of the inputs and of the adapter.

    Ranks that share the matrix have its inputs and columns of A, or its outputs and rows of B.

    # ORDER: the cotangent of the inputs is that of the weights, then each part's, left to right.
    """
    widths = tuple(one["b"].shape[0] for one in master.parts)
    over_outputs = functools.partial(sums.rows_times, is_split=not splits_inputs)
    of_x = over_outputs(cotangent, master.w.astype(dtype).T, widths=widths)
    parts = []
    for one, rows in zip(master.parts, _rows(master), strict=True):
        a, b, of_part = one["a"].astype(dtype), one["b"].astype(dtype), cotangent[:, rows]
        h = (master.scale * sums.rows_times(x, a, is_split=splits_inputs)).astype(x.dtype)
        of_h = (master.scale * over_outputs(of_part, b.T)).astype(x.dtype)
        of_x = of_x + sums.rows_times(of_h, a.T)
        parts.append({"a": sums.of_weights(of_h, x), "b": sums.of_weights(of_part, h)})
    frozen = AdaptedMaster(w=jnp.zeros_like(master.w), parts=tuple(parts), scale=master.scale)
    return of_x.astype(x.dtype), frozen


def linear(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Activation[Array, "M I"],
    w: AdaptedMaster,
    bias: Float32[Array, " O"] | None,
) -> Activation[Array, "M O"]:
    """Multiply, with an adapter: `models.layers.adapted_linear`."""
    dtype = ctx.profile.param_dtype

    def kernel(x, w, bias):
        own = None if bias is None else bias.astype(dtype)
        return adapted_linear(ctx, x, _served(w, dtype), own)

    def gradient(args, _, cotangent):
        x, w, _ = args
        return *_gradients(sums, x, w, cotangent, dtype, splits_inputs=False), None

    return with_gradient(kernel, gradient)(x, w, bias)


def linear_add_rms_norm(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Activation[Array, "M I"],
    w: AdaptedMaster,
    residual: Activation[Array, "M D"],
    bias: Float32[Array, " D"] | None,
    gain: Float32[Array, " D"],
) -> tuple[Activation[Array, "M D"], Activation[Array, "M D"]]:
    """Multiply with an adapter, add, normalise: `models.layers.row_parallel_norm`."""
    dtype, eps = ctx.profile.param_dtype, ctx.config.rms_norm_eps

    def kernel(x, w, residual, bias, gain):
        own = None if bias is None else bias.astype(dtype)
        adapted = _served(w, dtype)
        return tuple(row_parallel_norm(ctx, x, adapted, residual, own, gain.astype(dtype)))

    def gradient(args, out, cotangents):
        x, w, _, _, gain = args

        def formula(total):
            return total, plain_rms_norm(total, gain[None], eps)

        ((of_total,), _) = sums.of_formula(formula, (out[0],), (), cotangents)
        found = _gradients(sums, x, w, of_total, dtype, splits_inputs=True)
        return *found, of_total, None, None

    return with_gradient(kernel, gradient)(x, w, residual, bias, gain)
