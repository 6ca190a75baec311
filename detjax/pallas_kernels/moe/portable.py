# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in blocks of 16 rows of one expert. Which rows share one is no matter."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import COLS, ROWS, num_blocks, pad_axis, run_blocks
from detjax.pallas_kernels.linear.portable import COLS as PRODUCT_COLS
from detjax.pallas_kernels.linear.portable import leaf_sum, linear
from detjax.pallas_kernels.linear.portable_w8a8 import quantize_rows, scaled_sum, w8a8_product
from detjax.pallas_kernels.linear.quantized import RowsToQuantize, W8A8Matrix
from detjax.pallas_kernels.moe.expert_weights import (
    ExpertWeights,
    SharedExpert,
    SharedRows,
    with_shared,
)
from detjax.pallas_kernels.moe.sigmoid_router import SMALLEST_SUM
from detjax.pallas_kernels.output_gate.portable import sigmoid_gate
from detjax.pallas_kernels.rms_norm.portable import add_rms_norm
from detjax.pallas_kernels.swiglu.portable import swiglu


def _row_block():
    return pl.ds(pl.program_id(0) * ROWS, ROWS)


@jax.jit
def exp_below(logits, row_max) -> jax.Array:
    """`exp(logits - row_max)`, through memory, so that nothing fuses with it.

    Columns are padded to a power of two of at least `COLS`, with zeros.
    """
    num_rows, num_experts = logits.shape
    width = COLS
    while width < num_experts:
        width *= 2
    extra = ((0, -num_rows % ROWS), (0, width - num_experts))
    logits = jnp.pad(logits, extra, constant_values=-jnp.inf)
    row_max = pad_axis(row_max, 0, ROWS)

    def body(logits_ref, row_max_ref, out_ref):
        rows = _row_block()
        x = logits_ref[rows, pl.ds(pl.program_id(1) * COLS, COLS)]
        out_ref[...] = jnp.exp(x - row_max_ref[rows, :])

    out = run_blocks(
        body,
        logits,
        row_max,
        name="route_exp",
        grid=(logits.shape[0] // ROWS, width // COLS),
        out_shape=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda m, e: (m, e)),
    )
    return out[:num_rows]


@partial(jax.jit, static_argnames=("num_experts", "top_k", "renormalise"))
def route(
    logits, *, num_experts: int, top_k: int, renormalise: bool
) -> tuple[jax.Array, jax.Array]:
    """See `api.route`."""
    num_rows, logits = logits.shape[0], logits[:, :num_experts]
    order = jnp.argsort(logits, axis=1, descending=True, stable=True)
    expert_ids = order[:, :top_k].astype(jnp.int32)
    terms = exp_below(logits, jnp.max(logits, axis=1, keepdims=True))
    chosen = jnp.take_along_axis(terms, expert_ids, axis=1)
    terms, chosen = pad_axis(terms, 0, ROWS), pad_axis(pad_axis(chosen, 0, ROWS), 1, COLS)

    def body(terms_ref, chosen_ref, out_ref):
        rows = _row_block()
        if renormalise:
            # ORDER: ((t0 + t1) + t2) + ..., t = rank.
            total = chosen_ref[rows, pl.ds(0, 1)]
            for rank in range(1, top_k):
                total = total + chosen_ref[rows, pl.ds(rank, 1)]
        else:
            total = terms_ref[rows, :]
            # ORDER: ((p0 + p1) + (p2 + p3)) + ..., p = expert; zeros pad the end.
            while total.shape[1] > 1:
                total = total[:, 0::2] + total[:, 1::2]
        out_ref[...] = jnp.broadcast_to(total, out_ref.shape)

    # ROUND: sums go through memory, once for each term: XLA would turn the division by a broadcast
    # sum into a product with its rounded reciprocal.
    blocks = {
        "grid": (terms.shape[0] // ROWS,),
        "out_shape": jax.ShapeDtypeStruct(chosen.shape, jnp.float32),
        "out_specs": pl.BlockSpec((ROWS, chosen.shape[1]), lambda m: (m, 0)),
    }
    totals = run_blocks(body, terms, chosen, name="route_sums", **blocks)

    def divide(chosen_ref, totals_ref, out_ref):
        rows = _row_block()
        out_ref[...] = chosen_ref[rows, :] / totals_ref[rows, :]  # ROUND: once, correctly

    weights = run_blocks(divide, chosen, totals, name="route_weights", **blocks)
    return expert_ids, weights[:num_rows, :top_k]


def _by_rows(body, *operands, width: int, name: str) -> jax.Array:
    """A kernel of whole rows, [M, width] of float32; it gets its rows, then the references."""
    num_rows = operands[0].shape[0]

    def on_block(*refs):
        refs[-1][...] = body(_row_block(), *refs[:-1])

    return run_blocks(
        on_block,
        *operands,
        name=name,
        grid=(num_rows // ROWS,),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), jnp.float32),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )


@partial(jax.jit, static_argnames=("num_experts", "top_k", "renormalise", "scale"))
def route_by_sigmoid(
    logits, correction, *, num_experts: int, top_k: int, renormalise: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.route_by_sigmoid`. Each result goes through memory, so that nothing fuses."""
    num_rows = logits.shape[0]
    logits = pad_axis(pad_axis(logits[:, :num_experts], 0, ROWS), 1, COLS)
    correction = pad_axis(correction[:num_experts], 0, COLS)[None]
    width = logits.shape[1]

    def sigmoid(rows, logits_ref):
        return 1.0 / (1.0 + jnp.exp(-logits_ref[rows, :]))

    def corrected(rows, scores_ref, correction_ref):
        return scores_ref[rows, :] + correction_ref[...]

    scores = _by_rows(sigmoid, logits, width=width, name="route_sigmoid")
    ranked = _by_rows(corrected, scores, correction, width=width, name="route_corrected")
    ranked = ranked[:num_rows, :num_experts]
    expert_ids = jnp.argsort(ranked, axis=1, descending=True, stable=True)[:, :top_k]
    chosen = jnp.take_along_axis(scores[:num_rows], expert_ids, axis=1)
    chosen = pad_axis(pad_axis(chosen, 0, ROWS), 1, COLS)

    def total(rows, chosen_ref):
        # ORDER: (((p0 + p1) + p2) + ...) + 1e-20, p = rank.
        total = chosen_ref[rows, pl.ds(0, 1)]
        for rank in range(1, top_k):
            total = total + chosen_ref[rows, pl.ds(rank, 1)]
        return jnp.broadcast_to(total + SMALLEST_SUM, (ROWS, chosen.shape[1]))

    def quotient(rows, chosen_ref, totals_ref):
        return chosen_ref[rows, :] / totals_ref[rows, :]  # ROUND: once, correctly

    def scaled(rows, weights_ref):
        return weights_ref[rows, :] * jnp.float32(scale)

    sizes, weights = {"width": chosen.shape[1]}, chosen
    if renormalise:
        totals = _by_rows(total, chosen, name="route_sigmoid_sums", **sizes)
        weights = _by_rows(quotient, chosen, totals, name="route_sigmoid_quotients", **sizes)
    weights = _by_rows(scaled, weights, name="route_sigmoid_weights", **sizes)
    return expert_ids.astype(jnp.int32), weights[:num_rows, :top_k]


def _tiles(expert_ids, first_expert, num_local: int):
    """Sort slots by expert into tiles of `ROWS` rows of one expert. Integers alone.

    Returns:
        The tile row of each slot, past the last one where its expert is on another rank; the expert
        of each tile; the number of tiles in use; how many there may be.
    """
    slots = expert_ids.reshape(-1) - first_expert
    is_local = (slots >= 0) & (slots < num_local)
    slots = jnp.where(is_local, slots, num_local)
    most = min(num_local, slots.size) + num_blocks(slots.size, ROWS)
    counts = jnp.zeros(num_local + 1, jnp.int32).at[slots].add(1)
    first_slot = jnp.cumsum(counts) - counts
    tiles = -(-counts[:num_local] // ROWS)
    ends = jnp.cumsum(tiles)
    first_row = jnp.append((ends - tiles) * ROWS, most * ROWS)
    order = jnp.argsort(slots, stable=True)
    experts = slots[order]
    places = first_row[experts] + jnp.arange(slots.size, dtype=jnp.int32) - first_slot[experts]
    rows = jnp.zeros_like(slots).at[order].set(jnp.where(experts < num_local, places, most * ROWS))
    owners = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right")
    return rows, jnp.minimum(owners, num_local - 1).astype(jnp.int32), ends[-1], most


@partial(jax.jit, static_argnames=("name", "out_dtype", "step"))
def _grouped_linear(
    x, w, owners, num_tiles, bias=None, *, name: str, out_dtype: jnp.dtype, step: int = 0
) -> jax.Array:
    """`linear` of each tile of rows with its expert's weights, [T * ROWS, I] and [u, O, I].

    # ORDER: the body of `linear`, so its bits where `step` is 0; of 8-bit weights that of
    `w8a8_product`. Rows of tiles that are not in use are undefined.
    """
    num_cols, k_len = w.shape[1:]
    padded_cols = num_blocks(num_cols, PRODUCT_COLS) * PRODUCT_COLS
    is_w8a8 = isinstance(w, W8A8Matrix)
    if not is_w8a8:
        operands = (x, pad_axis(w, 1, PRODUCT_COLS))
    else:
        rows = quantize_rows(x, w.row_coding)
        values, scales = (pad_axis(it, 1, PRODUCT_COLS) for it in (w.values, w.row_scales()))
        operands = (rows.values, values, rows.scales.T.reshape(x.shape[0], -1), scales)
    biases = () if bias is None else (pad_axis(bias, 1, PRODUCT_COLS),)

    def body(x_ref, w_ref, *refs):
        scale_refs, (owners_ref, *bias_refs, out_ref) = refs[: 2 * is_w8a8], refs[2 * is_w8a8 :]
        tile = pl.program_id(0)
        rows = pl.ds(tile * ROWS, ROWS)
        cols = pl.ds(pl.program_id(1) * PRODUCT_COLS, PRODUCT_COLS)
        owner = owners_ref[tile]
        expert_ref = w_ref.at[owner]
        if is_w8a8:
            x_scales_ref, w_scales_ref = scale_refs
            scales = (x_scales_ref, w_scales_ref.at[owner])
            total = scaled_sum(x_ref, expert_ref, *scales, rows, cols, k_len, group_len=w.group_len)
        else:
            total = leaf_sum(x_ref, expert_ref, rows, cols, 0, k_len, step=step)
        for bias_ref in bias_refs:
            total = total + bias_ref[owner, cols].astype(jnp.float32)[None, :]
        out_ref[...] = total.astype(out_ref.dtype)  # ROUND: once

    out = run_blocks(
        body,
        *operands,
        owners,
        *biases,
        name=name,
        grid=(num_tiles, padded_cols // PRODUCT_COLS),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], padded_cols), out_dtype),
        out_specs=pl.BlockSpec((ROWS, PRODUCT_COLS), lambda t, n: (t, n)),
    )
    return out[:, :num_cols]


@partial(jax.jit, static_argnames=("out_dtype", "step"))
def expert_linear(x, experts, w, bias=None, *, out_dtype: jnp.dtype, step: int = 0) -> jax.Array:
    """See `api.expert_linear`; `step` is of `leaf_sum`."""
    tiled, rows, tiles = _tiled(x, experts.reshape(x.shape[0], -1), 0, w.shape[0])
    options = {"out_dtype": out_dtype, "step": step, "name": "expert_linear"}
    out = _grouped_linear(tiled, w, *tiles, bias, **options)
    return jnp.take(out, rows, axis=0, mode="fill", fill_value=0)


def _tiled(x, expert_ids, first_expert, num_local: int) -> tuple:
    """Rows in tiles of one expert, where the row of each slot lies, and owners and number of tiles.

    Copies alone.
    """
    num_rows, top_k = expert_ids.shape
    rows, owners, num_tiles, most = _tiles(expert_ids, first_expert, num_local)
    sources = jnp.full(most * ROWS, num_rows, jnp.int32)
    slot_rows = jnp.arange(num_rows * top_k, dtype=jnp.int32) // top_k
    sources = sources.at[rows].set(slot_rows, mode="drop", unique_indices=True)
    return jnp.take(x, sources, axis=0, mode="fill", fill_value=0), rows, (owners, num_tiles)


@partial(jax.jit, static_argnames="num_ranks")
def expert_mlp(
    x, expert_ids, experts: ExpertWeights, *, first_expert, num_ranks: int = 1
) -> jax.Array:
    """See `api.expert_mlp`. Tiles are of one size, for any number of ranks."""
    w_gate_up, w_down, extras = experts
    tiled, rows, tiles = _tiled(x, expert_ids, first_expert, w_gate_up.shape[0])
    biases, clamp = (None, None), None
    if extras is not None:
        biases, clamp = (extras.gate_up_bias, extras.down_bias), extras.clamp
    multiply = partial(_grouped_linear, out_dtype=x.dtype)
    gate_up = multiply(tiled, w_gate_up, *tiles, biases[0], name="experts_gate_up")
    hidden = swiglu(gate_up, clamp=clamp)
    out = multiply(hidden, w_down, *tiles, biases[1], name="experts_down")
    out = jnp.take(out, rows, axis=0, mode="fill", fill_value=0)
    return out.reshape(*expert_ids.shape, x.shape[1])


@partial(jax.jit, static_argnames=("eps",))
def combine_experts_add_rms_norm(
    y, weights, residual, gain, *, eps: float, shared: SharedRows | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `api.combine_experts_add_rms_norm`."""
    y, weights = with_shared(y, weights, shared, sigmoid_gate)
    num_rows, top_k, width = y.shape
    y, weights = pad_axis(y, 0, ROWS), pad_axis(weights, 0, ROWS)
    # SHAPE: hidden from the compiler, so a sum of one is still a loop that starts from zero.
    bound = lax.optimization_barrier(jnp.full((1,), top_k, jnp.int32))

    def body(y_ref, weights_ref, bound_ref, out_ref):
        rows = _row_block()

        def add_expert(rank, total):
            # ORDER: ranks left to right. ROUND: one fused multiply-add, where there is one.
            wide = y_ref[rows, pl.ds(rank, 1), :].astype(jnp.float32)[:, 0]
            return weights_ref[rows, pl.ds(rank, 1)] * wide + total

        zeros = jnp.zeros((ROWS, width), jnp.float32)
        out_ref[...] = lax.fori_loop(0, bound_ref[0], add_expert, zeros)

    total = run_blocks(
        body,
        y,
        weights,
        bound,
        name="combine_experts",
        grid=(y.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct((y.shape[0], width), jnp.float32),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return add_rms_norm(total[:num_rows], residual, None, gain, eps=eps)


def route_mlp(
    x, logits, experts: ExpertWeights, *,
    top_k: int, renormalise: bool, shared: SharedExpert | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.route_mlp`: the two operations, one after the other."""
    assert shared is None  # `joins_experts` says so
    expert_ids, weights = route(
        logits, num_experts=experts.gate_up.shape[0], top_k=top_k, renormalise=renormalise
    )
    return expert_mlp(x, expert_ids, experts, first_expert=0), weights


def joins_experts(num_rows: int, experts: ExpertWeights, shared: SharedExpert) -> bool:
    """See `api.joins_experts`: no, as launches cost nothing here."""
    return False


def defers_experts(num_rows: int, width: int) -> bool:
    """See `api.defers_experts`: no, as launches cost nothing here."""
    return False


def combine_experts_norm_linear(
    y, weights, residual, gain, w, bias, *,
    eps: float, out_dtype: jnp.dtype, shared: SharedRows | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.combine_experts_norm_linear`: the two operations, one after the other."""
    total, x = combine_experts_add_rms_norm(y, weights, residual, gain, eps=eps, shared=shared)
    if isinstance(w, W8A8Matrix):
        rows = RowsToQuantize(values=x, coding=w.row_coding)
        return w8a8_product(rows, w, bias, None, out_dtype=out_dtype), total
    return linear(x, w, bias, out_dtype=out_dtype), total


def route_mlp_add_rms_norm(
    x, logits, experts: ExpertWeights, residual, gain, *,
    top_k: int, renormalise: bool, eps: float, shared: SharedRows | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.route_mlp_add_rms_norm`: the operations, one after the other."""
    y, weights = route_mlp(x, logits, experts, top_k=top_k, renormalise=renormalise)
    return combine_experts_add_rms_norm(y, weights, residual, gain, eps=eps, shared=shared)
