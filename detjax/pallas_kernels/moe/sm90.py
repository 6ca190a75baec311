# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts on Hopper: rows sorted by expert, grouped products, rows combined."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.linear.quantized import (
    BLOCK,
    RowsToQuantize,
    W8A8Matrix,
)
from detjax.pallas_kernels.linear.sm90 import linear, sum_norm_linear
from detjax.pallas_kernels.linear.sm90_flat_matmul import InputNorm
from detjax.pallas_kernels.linear.sm90_quantize_rows import quantize_rows
from detjax.pallas_kernels.linear.sm90_w8a8 import quantizes_rows, sum_norm_product, w8a8_product
from detjax.pallas_kernels.linear.tiles import MAX_NORM_ROWS, OperandType
from detjax.pallas_kernels.moe import sm90_tiles
from detjax.pallas_kernels.moe.expert_weights import (
    ClampedExperts,
    ExpertWeights,
    SharedExpert,
    SharedRows,
)
from detjax.pallas_kernels.moe.sm90_combine import (
    combine_rows_add_rms_norm,
    read_experts,
    unsort_rows,
)
from detjax.pallas_kernels.moe.sm90_grouped import (
    grouped_matmul,
    grouped_matmul_few,
    one_row_matmul,
    one_row_turns,
    routed_matmul_few,
    routed_matmul_one,
)
from detjax.pallas_kernels.moe.sm90_route import check_supported as check_routes
from detjax.pallas_kernels.moe.sm90_route import route as route
from detjax.pallas_kernels.moe.sm90_schedule import sort_rows
from detjax.pallas_kernels.moe.sm90_tiles import GroupedTiles, MlpTiles, choose_tiles, fill_stages
from detjax.pallas_kernels.rms_norm.sm90 import row_sum


def _check_supported(x, w_gate_up, w_down) -> None:
    for w in (w_gate_up, w_down):
        if isinstance(w, W8A8Matrix) and w.group_len and w.block_rows % BLOCK:
            raise NotImplementedError(
                f"sm90 takes blocks of a multiple of {BLOCK} outputs, not {w.block_rows}; use "
                "quantized_weights='auto', or portable"
            )
    dtypes = {x.dtype, w_gate_up.dtype, w_down.dtype}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        raise NotImplementedError(
            f"sm90 experts multiply bfloat16 by bfloat16, not {x.dtype} by {w_gate_up.dtype} and "
            f"{w_down.dtype}; use portable"
        )


def _rows_for(x, w, tiles: GroupedTiles, interpret):
    """Rows as the products of an expert's matrix take them."""
    if not isinstance(w, W8A8Matrix):
        return x
    if tiles.held:
        return RowsToQuantize(values=x, coding=w.row_coding)
    return quantize_rows(x, w.row_coding, interpret=interpret is not None)


def expert_rows(
    x, expert_ids, experts: ExpertWeights, *, first_expert, tiles: MlpTiles, interpret=None
) -> tuple[jax.Array, jax.Array | None]:
    """The rows of `expert_mlp`, [M k, D], and where each slot's row lies; None in order of slot.

    Args:
        x: [M, D].
        expert_ids: int32 [M, k].
        experts: Of [e, 2 F, D] and [e, D, F].
        first_expert: Id of the first expert here; None if every expert is.
        tiles: How to cut the products; changes no bit.
        interpret: How to interpret the kernels, if so.
    """
    w_gate_up, w_down, extras = experts
    _check_supported(x, w_gate_up, w_down)
    gate_up_bias, down_bias, clamp = _parts(extras)
    is_whole = first_expert is None
    first_expert = jnp.asarray(0 if is_whole else first_expert, jnp.int32).reshape(1)
    places = None
    if tiles.is_few:
        given = _rows_for(x, w_gate_up, tiles.gate_up, interpret)
        hidden, work = grouped_matmul_few(
            given, w_gate_up, expert_ids, first_expert, gate_up_bias,
            tiles=tiles.gate_up, clamp=clamp, interpret=interpret,
        )  # fmt: skip
    else:
        # WHY: quantised before it is copied, once for all experts, and half as much to copy.
        rows, places, work = sort_rows(
            _rows_for(x, w_gate_up, tiles.gate_up, interpret), expert_ids, first_expert,
            num_local=w_gate_up.shape[0], tile_rows=tiles.gate_up.tile_rows,
            interpret=interpret is not None,
        )  # fmt: skip
        hidden = grouped_matmul(
            rows, w_gate_up, work, bias=gate_up_bias, tiles=tiles.gate_up,
            by_slot=False, clamp=clamp, interpret=interpret,
        )  # fmt: skip
    others = () if is_whole or not tiles.by_slot else (expert_ids.reshape(-1), first_expert)
    # Rows of a list of tiles are not held: they are of many tiles.
    down = fill_stages(dataclasses.replace(tiles.down, held=0)) if tiles.down.held else tiles.down
    out = grouped_matmul(
        _rows_for(hidden, w_down, down, interpret), w_down, work, *others, bias=down_bias,
        tiles=down, by_slot=tiles.by_slot, interpret=interpret,
    )  # fmt: skip
    return out, None if tiles.by_slot else places


@functools.partial(jax.jit, static_argnames=("out_dtype", "interpret"))
def expert_linear(x, experts, w, bias=None, *, out_dtype: jnp.dtype, interpret=None) -> jax.Array:
    """See `api.expert_linear`: rows sorted by expert, the second product of `expert_mlp`, put back.

    Args:
        x: [M, I].
        experts: int32 [S].
        w: [U, O, I].
        bias: [U, O], or None.
        out_dtype: Of the result: bfloat16.
        interpret: How to interpret the kernels, if so.

    Raises:
        NotImplementedError: For dtypes or widths that the kernels do not have.

    Numerics:
        # ORDER: k16 block by k16 block in one f32 wgmma accumulator, a row's own.
        # ROUND: once, to bfloat16.
        Claims: run-invariant, batch-invariant.
    """
    _check_supported(x, w, w)
    if out_dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"sm90 products of experts are rounded to bfloat16, not {out_dtype}; use portable"
        )
    num_experts, num_out, width = w.shape
    num_rows = x.shape[0]
    tiles = choose_tiles(
        num_rows=num_rows,
        top_k=experts.size // num_rows,
        num_experts=num_experts,
        width=width,
        hidden=num_out,
    ).down
    rows, places, work = sort_rows(
        x, experts.reshape(num_rows, -1), jnp.zeros(1, jnp.int32), num_local=num_experts,
        tile_rows=tiles.tile_rows, interpret=interpret is not None,
    )  # fmt: skip
    y = grouped_matmul(rows, w, work, bias=bias, tiles=tiles, by_slot=False, interpret=interpret)
    return unsort_rows(y, places, interpret=interpret is not None)


def _parts(extras: ClampedExperts | None) -> tuple:
    """Biases of the two products, and the clamp; None where there is none."""
    if extras is None:
        return None, None, None
    return extras.gate_up_bias, extras.down_bias, extras.clamp


def _tiles_for(x, top_k: int, w_gate_up, num_ranks: int = 1) -> MlpTiles:
    return choose_tiles(
        num_rows=x.shape[0],
        top_k=top_k,
        num_experts=w_gate_up.shape[0] * num_ranks,
        width=w_gate_up.shape[1] // 2,
        hidden=x.shape[1],
        operands=_operand_type(w_gate_up),
    )


def _operand_type(w) -> OperandType:
    if not isinstance(w, W8A8Matrix):
        return OperandType.BFLOAT16
    return OperandType.FLOAT8_BLOCKS if w.group_len else OperandType(w.values.dtype.name)


@functools.partial(jax.jit, static_argnames=("num_ranks", "tiles", "interpret"))
def expert_mlp(
    x, expert_ids, experts: ExpertWeights, *, first_expert, num_ranks: int = 1,
    tiles: MlpTiles | None = None, interpret=None,
) -> jax.Array:  # fmt: skip
    """See `api.expert_mlp`.

    Args:
        x: Rows.
        expert_ids: Each row's experts.
        experts: The weights of each expert here.
        first_expert: Id of the first of them.
        num_ranks: That share the experts.
        tiles: Overrides the choice by M, for tests and benchmarks; changes no bit.
        interpret: How to interpret the kernels, if so.

    Raises:
        NotImplementedError: For dtypes or widths that the kernels do not have.

    Numerics:
        # ORDER: gate, up and down each k16 block by k16 block in one f32 wgmma accumulator, a row's
        own; sorting and tiles move rows and change no sum. Of float8 as `sm90_w8a8.w8a8_product`.
        # ROUND: gate and up to bfloat16, SwiGLU to bfloat16, the second product to bfloat16: the
        bits of `linear_swiglu` and `linear`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    tiles = tiles or _tiles_for(x, expert_ids.shape[1], experts.gate_up, num_ranks)
    y, places = expert_rows(
        x, expert_ids, experts, first_expert=first_expert, tiles=tiles, interpret=interpret
    )
    if places is not None:
        y = unsort_rows(y, places, interpret=interpret is not None)
    return y.reshape(*expert_ids.shape, x.shape[1])


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def combine_experts_add_rms_norm(
    y, weights, residual, gain, *,
    eps: float, shared: SharedRows | None = None, interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.combine_experts_add_rms_norm`.

    Numerics:
        # ORDER: ranks left to right by fma.rn from 0; residual + sum; then as `add_rms_norm`.
        # ROUND: the residual stream once, and its normalised value once.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return combine_rows_add_rms_norm(
        y.reshape(-1, y.shape[-1]), None, weights, residual, gain,
        eps=eps, shared=shared, interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("eps", "tiles", "interpret"))
def expert_mlp_add_rms_norm(
    x, expert_ids, weights, experts: ExpertWeights, residual, gain, *,
    eps: float, shared: SharedRows | None = None, tiles: MlpTiles | None = None, interpret=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`expert_mlp` of all experts, then `combine_experts_add_rms_norm`: no row is put in order.

    Numerics:
        The bits of the two, one after the other.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    tiles = tiles or _tiles_for(x, expert_ids.shape[1], experts.gate_up)
    y, places = expert_rows(
        x, expert_ids, experts, first_expert=None, tiles=tiles, interpret=interpret
    )
    if places is not None:
        places = places.reshape(expert_ids.shape)
    return combine_rows_add_rms_norm(
        y, places, weights, residual, gain, eps=eps, shared=shared, interpret=interpret is not None
    )


@functools.partial(jax.jit, static_argnames=("top_k", "renormalise", "eps", "interpret"))
def route_mlp_add_rms_norm(
    x, logits, experts: ExpertWeights, residual, gain, *,
    top_k: int, renormalise: bool, eps: float, shared: SharedRows | None = None, interpret=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.route_mlp_add_rms_norm`: few rows are routed in the launch of the first product.

    Args:
        x: Normalised rows.
        logits: Of every expert, [M, U] or wider: the first U columns are read.
        experts: The weights of each.
        residual: The residual stream.
        gain: Scale of each channel.
        top_k: Experts of a row.
        renormalise: Whether a row's weights add up to 1.
        eps: Added to the mean square.
        shared: Of the expert that every row has, if one has.
        interpret: How to interpret the kernels, if so.

    Numerics:
        The bits of `route`, `expert_mlp` and `combine_experts_add_rms_norm`: the same instructions.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    tiles = _tiles_for(x, top_k, experts.gate_up)
    if not tiles.is_few:
        ids, weights = route(
            logits, num_experts=experts.gate_up.shape[0], top_k=top_k, renormalise=renormalise,
            interpret=interpret is not None,
        )  # fmt: skip
        return expert_mlp_add_rms_norm(
            x, ids, weights, experts, residual, gain,
            eps=eps, shared=shared, tiles=tiles, interpret=interpret,
        )  # fmt: skip
    y, weights = route_mlp(
        x, logits, experts, top_k=top_k, renormalise=renormalise, tiles=tiles, interpret=interpret
    )
    return combine_experts_add_rms_norm(
        y, weights, residual, gain, eps=eps, shared=shared, interpret=interpret is not None
    )


@functools.partial(jax.jit, static_argnames=("top_k", "renormalise", "tiles", "interpret"))
def route_mlp(
    x, logits, experts: ExpertWeights, *, top_k: int, renormalise: bool,
    shared: SharedExpert | None = None, tiles: MlpTiles | None = None, interpret=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.route_mlp`: few rows are routed in the launch of the first product.

    Args:
        x: Normalised rows.
        logits: Of every expert, [M, U] or wider: the first U columns are read.
        experts: The weights of each.
        top_k: Experts of a row.
        renormalise: Whether a row's weights add up to 1.
        shared: The expert that every row has, if it `joins_experts`; its row comes last.
        tiles: Overrides the choice by M, for tests and benchmarks; changes no bit.
        interpret: How to interpret the kernels, if so.

    Numerics:
        The bits of `route` and `expert_mlp`: the same instructions. Those of the shared row are of
        `linear_swiglu` and `linear`, which experts have as well.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    w_gate_up, w_down, extras = experts
    tiles = tiles or _tiles_for(x, top_k, w_gate_up)
    options = {"top_k": top_k, "renormalise": renormalise}
    num_experts = w_gate_up.shape[0]
    if not tiles.is_few:
        ids, weights = route(
            logits, num_experts=num_experts, **options, interpret=interpret is not None
        )
        y = expert_mlp(x, ids, experts, first_expert=0, tiles=tiles, interpret=interpret)
        return y, weights
    _check_supported(x, w_gate_up, w_down)
    check_routes(num_experts, top_k)
    gate_up_bias, down_bias, clamp = _parts(extras)
    first = (_rows_for(x, w_gate_up, tiles.gate_up, interpret), w_gate_up, logits, gate_up_bias)
    options |= {"tiles": tiles.gate_up, "clamp": clamp, "interpret": interpret}
    if x.shape[0] == 1:
        of_shared = (None, None) if shared is None else (shared.gate_up, shared.down)
        hidden, ids, weights = routed_matmul_one(*first, of_shared[0], **options)
        down = tiles.down
        turns = one_row_turns(top_k + (shared is not None), w_down.shape[1] // down.out_cols)
        if down.held and turns > MAX_NORM_ROWS:
            down = fill_stages(dataclasses.replace(down, held=0))
        rows = _rows_for(hidden, w_down, down, interpret)
        y = one_row_matmul(
            rows, w_down, ids[0], down_bias, of_shared[1], tiles=down, interpret=interpret
        )
    else:
        hidden, work, _, weights = routed_matmul_few(*first, **options)
        y = grouped_matmul(
            _rows_for(hidden, w_down, tiles.down, interpret), w_down, work, bias=down_bias,
            tiles=tiles.down, by_slot=True, interpret=interpret,
        )  # fmt: skip
    return y.reshape(x.shape[0], -1, x.shape[1]), weights


def joins_experts(num_rows: int, experts: ExpertWeights, shared: SharedExpert) -> bool:
    """See `api.joins_experts`: one row, and matrices like those of an expert."""
    if num_rows > 1 or experts.extras is not None:
        return False
    pairs = zip(shared, experts[:2], strict=True)
    return all(_is_like_an_expert(own, of_all) for own, of_all in pairs)


def _is_like_an_expert(own, of_all) -> bool:
    """Whether a matrix has the shape, and is quantised, as that of each expert; if so by rows."""
    if own.shape != of_all.shape[1:] or type(own) is not type(of_all):
        return False
    if not isinstance(own, W8A8Matrix):
        return isinstance(own, jax.Array) and own.dtype == of_all.dtype == jnp.bfloat16
    has_own_scales = own.row_scale is None and of_all.row_scale is None
    kinds = [(m.values.dtype, m.group_len, m.block_rows, m.row_bound) for m in (own, of_all)]
    return has_own_scales and kinds[0] == kinds[1]


def defers_experts(num_rows: int, width: int) -> bool:
    """See `api.defers_experts`: few rows, each a warpgroup wide."""
    return num_rows <= sm90_tiles.MAX_LATE_ROWS and row_sum(width).is_wide


def combine_experts_norm_linear(
    y, weights, residual, gain, w, bias, *,
    eps: float, out_dtype, shared: SharedRows | None = None, interpret=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.combine_experts_norm_linear`: one launch for rows that `defers_experts` says.

    Numerics:
        # ORDER, # ROUND: those of `combine_experts_add_rms_norm`, by the same instructions in every
        CTA; then those of `linear`, or of `w8a8_product`.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (K, dtypes, build).
    """
    is_late, is_w8a8 = defers_experts(*residual.shape), isinstance(w, W8A8Matrix)
    if is_w8a8:
        rows = RowsToQuantize(values=residual, coding=w.row_coding, gain=gain, eps=eps)
        is_late = is_late and quantizes_rows(rows)
    if not is_late:
        total, x = combine_experts_add_rms_norm(
            y, weights, residual, gain, eps=eps, shared=shared, interpret=interpret is not None
        )
        if is_w8a8:
            rows = RowsToQuantize(values=x, coding=w.row_coding)
            return w8a8_product(rows, w, bias, None, out_dtype=out_dtype), total
        return linear(x, w, bias, out_dtype=out_dtype), total
    terms = (y.reshape(-1, y.shape[-1]), weights, *([] if shared is None else [shared]))
    norm = InputNorm(gain=gain, terms=terms, eps=eps, read_row=read_experts)
    multiply = sum_norm_product if is_w8a8 else sum_norm_linear
    out, total = multiply(residual, w, bias, norm, out_dtype=out_dtype, interpret=interpret)
    return out, total
