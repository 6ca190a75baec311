# SPDX-License-Identifier: Apache-2.0
"""Products with an adapter, with gradients: kernels of serving forward, named sums backward.

The weights are frozen: they have no gradient. Numerics of gradients are those of `operations`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32
from detjax.models.adapters.stack import AdapterSizes
from detjax.models.layers import ForwardContext, adapted_linear, row_parallel_norm
from detjax.pallas_kernels.lora.adapted import AdaptedMatrix, AdapterStack
from detjax.training.formulas import plain_rms_norm
from detjax.training.gradients import GradientSums, with_gradient
from detjax.training.lora import AdaptedMaster
from detjax.training.rounding import stored_gain


def served(master: AdaptedMaster, dtype: jnp.dtype) -> AdaptedMatrix:
    """The matrix as an engine has it, all rows with the adapter in slot 0."""
    num_parts, (*lead, num_out, num_in) = len(master.parts), master.w.shape
    sizes = AdapterSizes(max_loras=1, max_lora_rank=master.rank)
    a = jnp.zeros((*lead, num_parts, sizes.num_slots, sizes.rank, num_in), dtype)
    b = jnp.zeros((*lead, num_out, num_parts, sizes.num_slots, sizes.rank), dtype)
    for part, one, rows in _parts(master):
        a = a.at[..., part, 0, : master.rank, :].set(one["a"].astype(dtype))
        b = b.at[..., rows, part, 0, : master.rank].set(one["b"].astype(dtype))
    scales = jnp.full((num_parts, sizes.num_slots), master.scale, jnp.float32)
    stack = AdapterStack(
        a=a.reshape(*lead, -1, num_in), b=b.reshape(*lead, num_out, -1), scales=scales
    )
    return AdaptedMatrix(base=master.w.astype(dtype), stack=stack, slots=jnp.zeros(1, jnp.int32))


def _parts(master: AdaptedMaster) -> Iterator[tuple[int, dict[str, Any], slice]]:
    """Of each tensor that has an adapter its number, its masters and its rows in the matrix."""
    stops = itertools.accumulate(master.widths)
    for part, (one, width, stop) in enumerate(zip(master.parts, master.widths, stops, strict=True)):
        if one is not None:
            yield part, one, slice(stop - width, stop)


class Products(NamedTuple):
    """What the gradients of an adapter are made of, float32.

    Attributes:
        by_a: Rows, and A: `A x`.
        by_outputs: Cotangents, a matrix (out, in), and the rows of each of its tensors: of W and B.
        by_ranks: Cotangents of `A x`, and A.
        of_weights: The sum over tokens of `a[t, x] * b[t, y]`.
    """

    by_a: Callable
    by_outputs: Callable
    by_ranks: Callable
    of_weights: Callable


def adapter_gradients(
    products: Products,
    x: jax.Array,
    master: AdaptedMaster,
    cotangent: jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, AdaptedMaster]:
    """Cotangents of the inputs, unrounded, and of the adapter.

    # ORDER: the cotangent of the inputs is that of the weights, then each part's, left to right.
    """
    of_x = products.by_outputs(cotangent, master.w.astype(dtype), master.widths)
    found: list[dict[str, Any] | None] = [None] * len(master.parts)
    for part, one, rows in _parts(master):
        a, b, of_part = one["a"].astype(dtype), one["b"].astype(dtype), cotangent[:, rows]
        h = (master.scale * products.by_a(x, a)).astype(x.dtype)
        of_h = (master.scale * products.by_outputs(of_part, b, ())).astype(x.dtype)
        of_x = of_x + products.by_ranks(of_h, a)
        of_a, of_b = products.of_weights(of_h, x), products.of_weights(of_part, h)
        found[part] = {"a": of_a, "b": of_b}
    frozen = jnp.zeros_like(master.w)
    return of_x, dataclasses.replace(master, w=frozen, parts=tuple(found))


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
    """

    def by_outputs(rows, w, widths):
        return sums.rows_times(rows, w.T, widths=widths, is_split=not splits_inputs)

    products = Products(
        by_a=functools.partial(sums.rows_times, is_split=splits_inputs),
        by_outputs=by_outputs,
        by_ranks=lambda rows, a: sums.rows_times(rows, a.T),
        of_weights=sums.of_weights,
    )
    of_x, of_master = adapter_gradients(products, x, master, cotangent, dtype)
    return of_x.astype(x.dtype), of_master


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
        return adapted_linear(ctx, x, served(w, dtype), own)

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
        adapted, stored = served(w, dtype), stored_gain(gain, ctx.config, dtype)
        return tuple(row_parallel_norm(ctx, x, adapted, residual, own, stored))

    def gradient(args, out, cotangents):
        x, w, _, _, gain = args

        def formula(total):
            return total, plain_rms_norm(total, gain[None], eps)

        ((of_total,), _) = sums.of_formula(formula, (out[0],), (), cotangents)
        found = _gradients(sums, x, w, of_total, dtype, splits_inputs=True)
        return *found, of_total, None, None

    return with_gradient(kernel, gradient)(x, w, residual, bias, gain)
