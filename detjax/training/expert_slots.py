# SPDX-License-Identifier: Apache-2.0
"""What the gradients of a mixture's experts are made of, in canonical order or in XLA's.

A pair of a row and one of its experts is a slot. Both have rows of slots in an order of their own.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.pallas_kernels.fixed_blocks import pad_axis
from detjax.pallas_kernels.moe.api import expert_linear
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.training.formulas import plain_swiglu
from detjax.training.gradients import (
    COLUMN_AXIS,
    ROW_AXIS,
    STEP_DEPTH,
    CanonicalSums,
    GradientSums,
)

FLOAT32 = jnp.dtype(jnp.float32)


@runtime_checkable
class ExpertSlots(Protocol):
    """Products and sums of slots."""

    @property
    def experts(self) -> Int32[Array, " S"]:
        """The expert of each slot."""
        ...

    def rows(self, x: Activation[Array, "M D"]) -> Activation[Array, "S D"]:
        """Rows, one a slot."""
        ...

    def of_ranks(self, y: Activation[Array, "M Q D"]) -> Activation[Array, "S D"]:
        """What each row has for each of its experts."""
        ...

    def times(
        self, rows: jax.Array, w: jax.Array, bias: jax.Array | None = None,
        *, is_back: bool = False, out_dtype: jnp.dtype,
    ) -> Activation[Array, "S O"]:  # fmt: skip
        """Rows by the matrices of their experts [U, O, I], or back by their outputs."""
        ...

    def of_experts(self, a: jax.Array, b: jax.Array) -> Float32[Array, "U X Y"]:
        """The sum over the tokens of each expert of `a[t, x] * b[t, y]`."""
        ...

    def gated(self, gate_up: jax.Array, clamp: SwigluClamp | None) -> Activation[Array, "S F"]:
        """SwiGLU."""
        ...

    def of_gates(
        self, gate_up: jax.Array, of_gated: jax.Array, clamp: SwigluClamp | None
    ) -> Activation[Array, "S E"]:
        """Cotangents of what it takes."""
        ...

    def over_ranks(self, of_rows: jax.Array) -> Float32[Array, "M D"]:
        """The sum over the experts of each row."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalSlots:
    """Slot `row * top_k + rank`; a slot's row by its expert alone, K in order, as forward.

    Attributes:
        sums: Of the backward pass.
        expert_ids: int32 [M, Q].
        num_experts: U.
    """

    sums: CanonicalSums
    expert_ids: Any
    num_experts: int

    @property
    def experts(self):
        """See `ExpertSlots`, and of the other methods."""
        return self.expert_ids.reshape(-1)

    def rows(self, x):
        """Repeated."""
        return jnp.repeat(x, self.expert_ids.shape[1], axis=0)

    def of_ranks(self, y):
        """As they are."""
        return y.reshape(-1, y.shape[2])

    def times(self, rows, w, bias=None, *, is_back=False, out_dtype):
        """`moe.api.expert_linear`, whose inputs are padded with zeros to whole steps."""
        w = w.swapaxes(1, 2) if is_back else w
        rows, w = pad_axis(rows, 1, STEP_DEPTH), pad_axis(w, 2, STEP_DEPTH)
        return expert_linear(
            rows, self.experts, w, bias, out_dtype=out_dtype, backend=self.sums.backend
        )

    def of_experts(self, a, b):
        """`gradients.api.expert_token_sum`."""
        return self.sums.of_experts(a, b, self.expert_ids, num_experts=self.num_experts)

    def gated(self, gate_up, clamp):
        """The kernel."""
        return swiglu(gate_up, clamp=clamp, backend=self.sums.backend)

    def of_gates(self, gate_up, of_gated, clamp):
        """Rows of a leaf at a time."""
        shape = *self.expert_ids.shape, -1

        def formula(gate_up):  # [64, Q, E]
            flat = plain_swiglu(gate_up.reshape(-1, gate_up.shape[2]), clamp)
            return flat.reshape(*gate_up.shape[:2], -1)

        cut = gate_up.reshape(shape), of_gated.reshape(shape)
        ((of_gate_up,), _) = self.sums.of_formula(formula, cut[:1], (), cut[1])
        return of_gate_up.reshape(gate_up.shape)

    def over_ranks(self, of_rows):
        """# ORDER: ((r0 + r1) + r2) + ..., r = rank, float32."""
        wide = of_rows.astype(jnp.float32)
        ranks = jnp.moveaxis(wide.reshape(*self.expert_ids.shape, -1), 1, 0)
        return functools.reduce(operator.add, list(ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedSlots:
    """Slots sorted by expert, and ragged products of theirs in XLA's order.

    Attributes:
        order: Slot of each row, int32 [S].
        experts: Its expert, likewise.
        sizes: Rows of each expert, int32 [U].
        top_k: Q.
    """

    order: Any
    experts: Any
    sizes: Any
    top_k: int

    @classmethod
    def of(cls, expert_ids: Int32[Array, "M Q"], num_experts: int) -> "RaggedSlots":
        """Sort them."""
        experts = expert_ids.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
        return cls(order=order, experts=experts[order], sizes=sizes, top_k=expert_ids.shape[1])

    def rows(self, x):
        """Those of the slots."""
        return jnp.take(x, self.order // self.top_k, axis=0)

    def of_ranks(self, y):
        """Sorted."""
        return jnp.take(y.reshape(-1, y.shape[2]), self.order, axis=0)

    def times(self, rows, w, bias=None, *, is_back=False, out_dtype):
        """Contract the columns of each group of rows with an axis of its matrix."""
        axis = 1 + (ROW_AXIS if is_back else COLUMN_AXIS)
        out = self._product(rows, w.astype(rows.dtype), (((1,), (axis,)), ((), ())), [0])
        if bias is not None:
            out = out + bias.astype(jnp.float32)[self.experts]
        return out.astype(out_dtype)

    def of_experts(self, a, b):
        """Contract the rows of each group."""
        return self._product(a, b, (((0,), (0,)), ((), ())), [])

    def _product(self, a, b, axes: tuple, group_axes: list[int]) -> jax.Array:
        return lax.ragged_dot_general(
            a,
            b,
            self.sizes,
            lax.RaggedDotDimensionNumbers(axes, [0], group_axes),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def gated(self, gate_up, clamp):
        """The formula."""
        return plain_swiglu(gate_up, clamp)

    def of_gates(self, gate_up, of_gated, clamp):
        """Its derivative."""
        _, pull = jax.vjp(functools.partial(plain_swiglu, clamp=clamp), gate_up)
        return pull(of_gated)[0]

    def over_ranks(self, of_rows):
        """By XLA, of slots in their first order."""
        own = jnp.take(of_rows, jnp.argsort(self.order), axis=0)
        return jnp.sum(own.reshape(-1, self.top_k, own.shape[1]).astype(jnp.float32), axis=1)


def slots_of(sums: GradientSums, expert_ids: Int32[Array, "M Q"], num_experts: int) -> ExpertSlots:
    """The slots of rows, for such sums."""
    if isinstance(sums, CanonicalSums):
        return CanonicalSlots(sums=sums, expert_ids=expert_ids, num_experts=num_experts)
    return RaggedSlots.of(expert_ids, num_experts)
