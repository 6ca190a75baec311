# SPDX-License-Identifier: Apache-2.0
"""Adapters on Hopper: the products are those of linear layers, the rest is one pass over rows.

Where a product adds adapters itself (`linear.sm90.adds_adapters`), `B h` is more steps of the ring
that its weights stream through. Elsewhere it is a product of its own, and one pass adds it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.numerics import Reduction
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.fixed_blocks import pad_axis
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.sm90 import (
    MAX_ADDED_TO_TREES,
    adds_adapters,
    linear,
    linear_leaf_sums,
    linear_with_adapters,
)
from detjax.pallas_kernels.lora import composed, sm90_project
from detjax.pallas_kernels.lora.adapted import LowRankRows, columns_of
from detjax.pallas_kernels.rms_norm.sm90 import combine_add_rms_norm

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
    if (width := base.shape[1]) < rows.LANES:
        base, added = (pad_axis(it, 1, rows.LANES) for it in (base, added))
    return add_where_not_zero(base, added, out_dtype=out_dtype)[:, :width]


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
        out_gmem[row, here] = rows.add_unless_zero(own, more, math).astype(out_dtype)

    return rows.run_kernel(
        body,
        (base, added),
        out=jax.ShapeDtypeStruct((num_rows, width), out_dtype),
        grid={"piece": pl.cdiv(width, size), "row": num_rows},
        name="detjax_lora_add",
        is_interpreted=interpret,
    )


_SM90 = KERNELS[Backend.SM90]


def lora_project(x, a, slots, scales, *, reduction: Reduction, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_project`: one launch of few rows."""
    if sm90_project.is_supported(x, a, reduction):
        project = sm90_project.lora_project
    else:
        project = functools.partial(composed.lora_project, _SM90)
    return project(x, a, slots, scales, reduction=reduction, out_dtype=out_dtype)


def lora_linear(x, w, bias, adapters: LowRankRows, *, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_linear`: one launch where the product adds adapters."""
    if not adds_adapters(x, w):
        return composed.lora_linear(_SM90, x, w, bias, adapters, out_dtype=out_dtype)
    return linear_with_adapters(x, w, bias, adapters, out_dtype=out_dtype)


def lora_linear_swiglu(x, w_gate_up, adapters: LowRankRows) -> jax.Array:
    """See `api.lora_linear_swiglu`: one launch where the product adds adapters."""
    if not adds_adapters(x, w_gate_up):
        return composed.lora_linear_swiglu(_SM90, x, w_gate_up, adapters)
    return linear_with_adapters(x, w_gate_up, None, adapters, out_dtype=x.dtype, is_gated=True)


def lora_linear_add_rms_norm(
    x, w, adapters: LowRankRows, residual, bias, gain, *, reduction: Reduction, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.lora_linear_add_rms_norm`: two launches where few rows are multiplied.

    Numerics:
        # ORDER: residual + ((tree + B h) + bias): of `combine_add_rms_norm`.
        # ROUND: as `add_rms_norm`.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    if not adds_adapters(x, w) or x.shape[0] > MAX_ADDED_TO_TREES:
        return composed.lora_linear_add_rms_norm(
            _SM90, x, w, adapters, residual, bias, gain, reduction=reduction, eps=eps
        )
    terms = linear_leaf_sums(x, w, reduction=reduction, adapters=adapters)
    has_added = terms.shape[0] > 1
    return combine_add_rms_norm(terms, residual, bias, gain, eps=eps, has_added=has_added)
