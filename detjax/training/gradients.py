# SPDX-License-Identifier: Apache-2.0
"""Gradients of operations whose values are those of kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Array, Float32

ROW_AXIS, COLUMN_AXIS = 0, 1


def with_gradient(kernel: Callable, gradient: Callable[..., tuple]) -> Callable:
    """`kernel`, whose arguments get the cotangents that `gradient(args, out, cotangent)` gives."""
    op = jax.custom_vjp(kernel)

    def forward(*args):
        out = kernel(*args)
        return out, (args, out)

    def backward(saved, cotangent):
        return gradient(*saved, cotangent)

    op.defvjp(forward, backward)
    return op


def gradient_of(formula: Callable) -> Callable[..., tuple]:
    """The gradient of a plain formula."""

    def gradient(args, _, cotangent):
        return jax.vjp(formula, *args)[1](cotangent)

    return gradient


def product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> Float32[Array, "X Y"]:
    """Contract an axis of each matrix, in float32."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(
        a, b, axes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def linear_gradients(x, w, cotangent, param_dtype):
    """Cotangents of the inputs and the weights of `x @ w.T`."""
    of_x = product(cotangent, w.astype(param_dtype).astype(x.dtype), COLUMN_AXIS, ROW_AXIS)
    return of_x.astype(x.dtype), product(cotangent, x, ROW_AXIS, ROW_AXIS)
