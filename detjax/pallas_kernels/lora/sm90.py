# SPDX-License-Identifier: Apache-2.0
"""Adapters on Hopper: the products are those of linear layers, the rest is one pass over rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.linear.sm90 import linear
from detjax.pallas_kernels.lora.adapted import columns_of

_VECTOR = 4
"""Neighbouring float32 of one thread: accesses of 16 bytes."""


def _piece_size(width: int) -> int:
    """Columns of a piece of a row.

    Raises:
        NotImplementedError: If a row has no aligned pieces.
    """
    if width < rows.LANES or width % _VECTOR:
        raise NotImplementedError(
            f"sm90 adapters need a multiple of {_VECTOR} columns from {rows.LANES} up, not {width}"
        )
    return rows.LANES * (_VECTOR if width >= rows.LANES * _VECTOR else 1)


def _first_column(size: int, width: int):
    """Where a piece begins. The last one starts early: some columns are written twice, alike."""
    first = jnp.minimum(lax.axis_index("piece") * size, width - size)
    return pl.multiple_of(first, _VECTOR)


@functools.partial(jax.jit, static_argnames=("out_dtype", "interpret"))
def lora_hidden(
    leaf_sums, slots, scales, *, out_dtype: jnp.dtype, interpret: bool = False
) -> jax.Array:
    """See `api.lora_hidden`.

    Numerics:
        # ORDER: ((t0 + t1) + (t2 + t3)) + ..., f32, as `linear_partial` continues the tree.
        # ROUND: the product with the scale, then h.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_terms, num_rows, width = leaf_sums.shape
    size = _piece_size(width)
    math = rows.strided(size, size // rows.LANES, interpret)

    def body(terms_gmem, slots_gmem, scale_gmem, slot_gmem, out_gmem):
        row = lax.axis_index("row")
        here = pl.ds(_first_column(size, width), size)
        terms = [math.load(terms_gmem.at[term, row, here]) for term in range(num_terms)]
        h = math.mul(rows.pairwise(terms, math.add), math.load(scale_gmem.at[here]))
        own = math.load(slot_gmem.at[here]) == math.full((size,), slots_gmem[row], jnp.int32)
        out_gmem[row, here] = jnp.where(own, h, math.full((size,), 0.0)).astype(out_dtype)

    return rows.run_kernel(
        body,
        (leaf_sums, slots, *columns_of(scales, width)),
        out=jax.ShapeDtypeStruct((num_rows, width), out_dtype),
        grid={"piece": pl.cdiv(width, size), "row": num_rows},
        name="detjax_lora_hidden",
        is_interpreted=interpret,
    )


def lora_add(base, h, b, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_add`.

    Numerics:
        # ORDER: k16 block by k16 block of ranks in one f32 wgmma accumulator, then one addition.
        # ROUND: once, to `out_dtype`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    added = linear(h, b, None, out_dtype=jnp.dtype(jnp.float32))
    return add_where_not_zero(base, added, out_dtype=out_dtype)


def expert_lora_add(base, h, experts, b, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.expert_lora_add`.

    Raises:
        NotImplementedError: Always: no product of experts keeps float32. `open_adapters` refuses
            before it comes to this.
    """
    raise NotImplementedError("adapters of experts are for backends reference and portable")


@functools.partial(jax.jit, static_argnames=("out_dtype", "interpret"))
def add_where_not_zero(base, added, *, out_dtype: jnp.dtype, interpret: bool = False) -> jax.Array:
    """`round(base + added)`, and `round(base)` where `added` is zero, so that -0 stays.

    Args:
        base: float32 [M, N].
        added: float32 [M, N].
        out_dtype: Of the result.
        interpret: Interpret the kernel on a CPU.
    """
    num_rows, width = base.shape
    size = _piece_size(width)
    math = rows.strided(size, size // rows.LANES, interpret)

    def body(base_gmem, added_gmem, out_gmem):
        row = lax.axis_index("row")
        here = pl.ds(_first_column(size, width), size)
        own, more = math.load(base_gmem.at[row, here]), math.load(added_gmem.at[row, here])
        total = jnp.where(more == math.full((size,), 0.0), own, math.add(own, more))
        out_gmem[row, here] = total.astype(out_dtype)

    return rows.run_kernel(
        body,
        (base, added),
        out=jax.ShapeDtypeStruct((num_rows, width), out_dtype),
        grid={"piece": pl.cdiv(width, size), "row": num_rows},
        name="detjax_lora_add",
        is_interpreted=interpret,
    )
