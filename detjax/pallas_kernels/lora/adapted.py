# SPDX-License-Identifier: Apache-2.0
"""A matrix with the low-rank adapters that rows may add to its product."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from detjax.array_types import Array, Float32, Int32

RANK_BLOCK = 16
"""Ranks are padded with zeros to whole blocks of this, the depth of one wgmma."""

STACK_BLOCK = 128
"""Columns of all adapters of a tensor are whole blocks of this, as sm90 adds partial sums so."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterStack:
    """The resident adapters of one matrix, side by side. Leaves are arrays, or JAX's stand-ins.

    A matrix is made of `parts` tensors (q, k and v). Column x of `parts * slots * rank` belongs to
    part `x // (slots * rank)` and slot `x // rank % slots`. Ranks that an adapter does not have,
    and rows of `b` of another part than the column's, are zero.

    Attributes:
        a: [X, I]; [U, X, I] of the matrices of experts.
        b: [O, X]; [U, O, X] likewise.
        scales: float32 [parts, slots].
    """

    a: Any
    b: Any
    scales: Any

    @property
    def rank(self) -> int:
        """Columns of an adapter in one part."""
        return self.a.shape[-2] // self.scales.size


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedMatrix:
    """A matrix, and which adapter each sequence adds to its product.

    Attributes:
        base: Weights, (out, in), or those of each expert.
        stack: The adapters.
        slots: int32 [B], the slot of each sequence's adapter; -1 where it has none.
    """

    base: Any
    stack: AdapterStack
    slots: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankRows:
    """What a product adds to its sums for each row: `B h`, where it is not zero.

    Attributes:
        h: Of `lora.api.lora_project`, [M, X].
        b: The B of all adapters, [O, X], as `AdapterStack` has them.
    """

    h: Any
    b: Any


def columns_of(
    scales: Float32[Array, "Y Z"], width: int
) -> tuple[Float32[Array, " X"], Int32[Array, " X"]]:
    """Return the scale and the slot of each of `width` columns of a stack."""
    num_parts, num_slots = scales.shape
    rank = width // scales.size
    slots = jnp.tile(jnp.repeat(jnp.arange(num_slots, dtype=jnp.int32), rank), num_parts)
    return jnp.repeat(scales.reshape(-1), rank), slots
