# SPDX-License-Identifier: Apache-2.0
"""The weights of experts, and what the expert gives that every row has."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32
from detjax.pallas_kernels.linear.quantized import W8A8Matrix
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedExperts:
    """Biases of the experts of a rank, and the clamp of what they gate.

    Attributes:
        gate_up_bias: Of gates, then of ups, [u, E].
        down_bias: Of the second product, [u, D].
        clamp: Of the SwiGLU.
    """

    gate_up_bias: Any
    down_bias: Any
    clamp: SwigluClamp = field(metadata={"static": True})


class ExpertWeights(NamedTuple):
    """The matrices of the experts of a rank, (out, in), and what some have in addition.

    Attributes:
        gate_up: Rows of gate, then of up, of each expert; E = 2 F.
        down: The second matrix of each.
        extras: Biases, and the clamp of the SwiGLU; None has none.
    """

    gate_up: Activation[Array, "u E D"] | W8A8Matrix
    down: Activation[Array, "u D F"] | W8A8Matrix
    extras: ClampedExperts | None = None


class SharedExpert(NamedTuple):
    """The matrices of the expert that every row has, (out, in).

    Attributes:
        gate_up: Rows of gate, then of up; E = 2 F.
        down: The second matrix.
    """

    gate_up: Activation[Array, "E D"] | W8A8Matrix
    down: Activation[Array, "D F"] | W8A8Matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """What the expert of every row gives: one more of its experts, the last, of weight 1.

    Attributes:
        rows: [first + M, D]; what stands before `first` is of others.
        gate: [M, G], bfloat16 or float32; None where the rows have none. One column, rounded to the
            dtype of the rows, is what they are gated by (`output_gate.api.sigmoid_gate`).
        first: Where the rows begin.
        column: Of the gate.
    """

    rows: Any
    gate: Any = None
    first: int = field(default=0, metadata={"static": True})
    column: int = field(default=0, metadata={"static": True})


def shared_values(shared: SharedRows, num_rows: int, sigmoid_gate: Callable) -> jax.Array:
    """The rows [M, D], gated if they have a gate."""
    rows = shared.rows[shared.first : shared.first + num_rows]
    if shared.gate is None:
        return rows
    gate = shared.gate[:, shared.column, None].astype(rows.dtype)
    return sigmoid_gate(rows, jnp.broadcast_to(gate, rows.shape))


def with_shared(
    y: Activation[Array, "M E D"],
    weights: Float32[Array, "M Q"],
    shared: SharedRows | None,
    sigmoid_gate: Callable,
) -> tuple[Activation[Array, "M X D"], Float32[Array, "M X"]]:
    """Rows of experts with that of the shared one, and their weights."""
    if shared is None:
        return y, weights
    y, rows = y[:, : weights.shape[1]], shared_values(shared, len(y), sigmoid_gate)
    ones = jnp.ones((len(y), 1), jnp.float32)
    return (
        jnp.concatenate([y, rows[:, None]], axis=1),
        jnp.concatenate([weights, ones], axis=1),
    )
