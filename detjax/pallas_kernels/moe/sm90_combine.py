# SPDX-License-Identifier: Apache-2.0
"""A row's experts added to the residual stream by their weights, and the norm, in one launch."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.moe.expert_weights import SharedRows, shared_values
from detjax.pallas_kernels.output_gate.sm90 import gated, sigmoid_gate
from detjax.pallas_kernels.rms_norm.sm90 import (
    add_rms_norm,
    choose_schedule,
    joined,
    row_sum,
    wide_scale,
)


def _weighted(ys: list, weights: list, math: rows.Arithmetic):
    """`fma(w_r, y_r, acc)` from 0, in order of rank."""
    shape = ys[0].shape
    total = math.full(shape, 0.0)
    for y, weight in zip(ys, weights, strict=True):
        # ORDER: ranks left to right, one fma each, float32.
        total = math.fma(math.full(shape, weight), y.astype(jnp.float32), total)
    return total


def _with_shared(total, shared: SharedRows | None, row, columns, math: rows.Arithmetic):
    """The sum with what the expert of every row gives, gated by the pass of `sigmoid_gate`."""
    if shared is None:
        return total
    stored = math.load(shared.rows.at[shared.first + row, columns])
    value = stored.astype(jnp.float32)
    if shared.gate is not None:
        gate = shared.gate[row, shared.column].astype(stored.dtype).astype(jnp.float32)
        value = gated(math.full(total.shape, gate), value, math)
        value = value.astype(stored.dtype).astype(jnp.float32)  # ROUND: once
    # ORDER: behind the row's own experts, by an fma of weight 1.
    return math.fma(math.full(total.shape, 1.0), value, total)


HALF_CHUNK = rows.LANES // 2
RAGGED_VEC_LEN = 2
"""Neighbouring channels of a thread where a width is no multiple of a warpgroup's threads."""


def _vec_len(width: int, choices: tuple[int, ...]) -> int:
    """Neighbouring channels of a thread.

    Raises:
        NotImplementedError: If rows have no aligned pieces.
    """
    if width % HALF_CHUNK or width < rows.LANES * RAGGED_VEC_LEN and width % rows.LANES:
        raise NotImplementedError(
            f"sm90 moves and combines experts of a multiple of {HALF_CHUNK} channels, from "
            f"{rows.LANES * RAGGED_VEC_LEN} on if not of {rows.LANES}, not {width}; use portable"
        )
    return next((v for v in choices if width % (rows.LANES * v) == 0), RAGGED_VEC_LEN)


def _reader(y_gmem, places_gmem, weights_gmem, row, top_k: int):
    """The rows of `y` and the weights of one token."""
    weights = [weights_gmem[row, r] for r in range(top_k)]
    if places_gmem is None:
        of_row = y_gmem.shape[0] // weights_gmem.shape[0]  # more than k with a shared expert
        slots = [row * of_row + r for r in range(top_k)]
    else:
        slots = [places_gmem[row, r] for r in range(top_k)]
    return slots, weights


def read_experts(residual_gmem, terms_gmem, row, columns, math: rows.Arithmetic):
    """Channels of the residual stream with a row's experts added, which lie in order of slot.

    The instructions of `combine_rows_add_rms_norm`; for `linear.sm90.sum_norm_linear`.
    """
    y_gmem, weights_gmem, *shared = terms_gmem
    slots, scales = _reader(y_gmem, None, weights_gmem, row, weights_gmem.shape[1])
    ys = [math.load(y_gmem.at[slot, columns]) for slot in slots]
    total = _weighted(ys, scales, math)
    total = _with_shared(total, shared[0] if shared else None, row, columns, math)
    residual = math.load(residual_gmem.at[row, columns])
    return joined([total], residual, None, residual_gmem.dtype)


def _with_slot(y, places, weights, shared: SharedRows | None, *, interpret: bool) -> tuple:
    """Rows, places and weights with one more slot a row, the shared expert's."""
    if shared is None:
        return y, places, weights
    num_rows, top_k = weights.shape
    if places is None:
        places = jnp.arange(len(y), dtype=jnp.int32).reshape(num_rows, -1)[:, :top_k]
    gate = functools.partial(sigmoid_gate, interpret=interpret)
    last = len(y) + jnp.arange(num_rows, dtype=jnp.int32)
    return (
        jnp.concatenate([y, shared_values(shared, num_rows, gate)]),
        jnp.concatenate([places, last[:, None]], axis=1),
        jnp.concatenate([weights, jnp.ones((num_rows, 1), jnp.float32)], axis=1),
    )


def _combine(y, places, weights, *, interpret: bool) -> jax.Array:
    """The weighted sum of each row's experts, float32 [M, D]."""
    num_rows, top_k = weights.shape
    width = y.shape[-1]
    vec_len = _vec_len(width, (4, 2, 1))
    size = rows.LANES * vec_len
    math = rows.strided(size, vec_len, interpret)

    def body(
        y_gmem,  # [S, D]
        places_gmem,  # [M, k] int32, or None
        weights_gmem,  # [M, k] f32
        out_gmem,  # [M, D] f32
    ):
        row, start = lax.axis_index("row"), lax.axis_index("piece") * size
        if width % size:
            # The last piece starts early instead of ending late: some columns are written twice.
            start = pl.multiple_of(jnp.minimum(start, width - size), HALF_CHUNK)
        columns = pl.ds(start, size)
        slots, scales = _reader(y_gmem, places_gmem, weights_gmem, row, top_k)
        ys = [math.load(y_gmem.at[slot, columns]) for slot in slots]
        out_gmem[row, columns] = _weighted(ys, scales, math)

    return rows.run_kernel(
        body,
        (y, places, weights),
        out=jax.ShapeDtypeStruct((num_rows, width), jnp.float32),
        grid={"piece": pl.cdiv(width, size), "row": num_rows},
        name="detjax_moe_combine",
        is_interpreted=interpret,
    )


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def combine_rows_add_rms_norm(
    y, places, weights, residual, gain, *,
    eps: float, shared: SharedRows | None = None, interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`combine_experts_add_rms_norm` of rows [S, D] that lie where `places` says.

    Args:
        y: Rows of experts.
        places: int32 [M, k], the row of each slot; None if they lie in order of slot.
        weights: float32 [M, k].
        residual: [M, D].
        gain: [D].
        eps: Added to the mean square.
        shared: Of the expert that every row has, if one has.
        interpret: Run in interpret mode.

    Numerics:
        # ORDER: ranks left to right by fma.rn from 0; residual + sum; then as `add_rms_norm`.
        # ROUND: the residual stream once, and its normalised value once.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    num_rows, width = residual.shape
    top_k = weights.shape[1]
    form = row_sum(width)
    if not form.is_wide:
        y, places, weights = _with_slot(y, places, weights, shared, interpret=interpret)
        total = _combine(y, places, weights, interpret=interpret)
        return add_rms_norm(total, residual, None, gain, eps=eps, interpret=interpret)
    schedule = choose_schedule(num_rows=num_rows, num_chunks=form.num_parts, num_leaves=1)
    warpgroups = schedule.warpgroups
    chunk = rows.LANES * form.vec_len
    each = form.num_parts // warpgroups
    math = rows.strided(chunk, form.vec_len, interpret)
    dtype = residual.dtype

    def body(
        y_gmem,  # [S, D]
        places_gmem,  # [M, k] int32, or None
        weights_gmem,  # [M, k] f32
        shared_gmem,  # `SharedRows`, or None
        residual_gmem,  # [M, D]
        gain_gmem,  # [D]
        total_gmem,  # [M, D]
        out_gmem,  # [M, D]
        sums_smem,  # [chunks, LANES] f32
        ready,  # all warpgroups have added their squares; None for one warpgroup
    ):
        row = lax.axis_index("row")
        first_chunk = lax.axis_index("wg") * each if warpgroups > 1 else 0
        columns = [pl.ds((first_chunk + i) * chunk, chunk) for i in range(each)]
        slots, scales = _reader(y_gmem, places_gmem, weights_gmem, row, top_k)
        values = []
        for i, c in enumerate(columns):
            ys = [math.load(y_gmem.at[slot, c]) for slot in slots]
            added = _with_shared(_weighted(ys, scales, math), shared_gmem, row, c, math)
            value = joined([added], math.load(residual_gmem.at[row, c]), None, dtype)
            total_gmem[row, c] = value
            values.append(value.astype(jnp.float32))
            sums_smem[first_chunk + i, :] = rows.square_sums(values[-1], math)
        gains = [math.load(gain_gmem.at[c]) for c in columns]
        if warpgroups > 1:
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
        else:
            plgpu.commit_smem()
        scale = wide_scale(sums_smem, math, shape=(chunk,), width=width, eps=eps)
        for c, v, g in zip(columns, values, gains, strict=True):
            normed = math.mul(math.mul(v, scale), g.astype(jnp.float32))
            out_gmem[row, c] = normed.astype(dtype)  # ROUND: once

    shape = jax.ShapeDtypeStruct(residual.shape, dtype)
    options = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    total, out = rows.run_kernel(
        body,
        (y, places, weights, shared, residual, gain),
        out=[shape, shape],
        grid={"row": num_rows},
        name="detjax_moe_combine_rms_norm",
        is_interpreted=interpret,
        scratch_types=[
            plgpu.SMEM((form.num_parts, rows.LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups) if warpgroups > 1 else None,
        ],
        **options,
    )
    return total, out


@functools.partial(jax.jit, static_argnames=("interpret",))
def unsort_rows(y, places, *, interpret: bool = False) -> jax.Array:
    """Rows in order of slot, [S, D]; zeros where the place is -1.

    Args:
        y: Sorted rows, [S, D].
        places: int32 [S].
        interpret: Run in interpret mode.
    """
    num_slots, width = y.shape
    vec_len = _vec_len(width, (8, 4, 2, 1))
    size = rows.LANES * vec_len if width % rows.LANES else width
    math = rows.strided(size, vec_len, interpret)
    pieces = [(pl.ds(min(start, width - size), size),) for start in range(0, width, size)]
    pieces = pieces if width % rows.LANES else [()]

    def body(y_gmem, places_gmem, out_gmem):
        slot = lax.axis_index("slot")
        place = places_gmem[slot]

        @pl.when(place >= 0)
        def _():
            for columns in pieces:
                out_gmem[(slot, *columns)] = math.load(y_gmem.at[(place, *columns)])

        @pl.when(place < 0)
        def _():
            for columns in pieces:
                out_gmem[(slot, *columns)] = math.full((size,), 0, y.dtype)

    return rows.run_kernel(
        body,
        (y, places),
        out=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid={"slot": num_slots},
        name="detjax_moe_unsort",
        is_interpreted=interpret,
    )
