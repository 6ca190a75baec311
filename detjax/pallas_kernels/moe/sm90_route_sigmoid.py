# SPDX-License-Identifier: Apache-2.0
"""The choice of a router of sigmoids on Hopper: a warp a row, its lanes neighbouring experts."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref
from jax.extend.mlir.dialects import math as mlir_math

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.moe.sigmoid_router import SMALLEST_SUM
from detjax.pallas_kernels.moe.sm90_route import (
    ROWS,
    WARP,
    check_supported,
    choose,
    key_of,
    padded_experts,
    redux,
)


def _scores(logits, correction, row, num_experts: int):
    """This lane's experts: ids, sigmoids, and keys of the corrected ones."""
    index, i32, f32 = ir.IndexType.get(), ir.IntegerType.get_signless(32), ir.F32Type.get()
    add, div = rows.instruction("add.rn.f32"), rows.instruction("div.rn.f32")
    each = padded_experts(num_experts) // WARP
    first = arith.muli(ptx.lane(), mgpu.c(each, i32))
    experts, scores, keys = [], [], []
    for i in range(each):
        expert = arith.addi(first, mgpu.c(i, i32))
        is_expert = arith.cmpi(arith.CmpIPredicate.ult, expert, mgpu.c(num_experts, i32))
        inside = arith.index_cast(index, arith.minui(expert, mgpu.c(num_experts - 1, i32)))
        power = mlir_math.exp(arith.negf(memref.load(logits, [row, inside])))
        score = div(mgpu.c(1.0, f32), add(power, mgpu.c(1.0, f32)))
        corrected = add(score, memref.load(correction, [inside]))
        experts.append(expert)
        scores.append(score)
        # Adding +0 makes -0 equal to it: a tie.
        keys.append(key_of(add(corrected, mgpu.c(0.0, f32)), is_expert))
    return experts, scores, keys


def _score_of(found, experts: list, scores: list):
    """The sigmoid of one expert, in all lanes: its bits are the greatest that any lane gives."""
    i32 = found.type
    own = mgpu.c(-(2**31), i32)
    for expert, score in zip(experts, scores, strict=True):
        is_found = arith.cmpi(arith.CmpIPredicate.eq, expert, found)
        own = arith.select(is_found, arith.bitcast(i32, score), own)
    return arith.bitcast(ir.F32Type.get(), redux("max", own))


def _emit(logits, correction, row, put, *, num_experts: int, top_k: int, renormalise: bool, scale):
    """One row of a warp; every lane knows all ranks, and `put` gets the one of its own."""
    index, i32, f32 = ir.IndexType.get(), ir.IntegerType.get_signless(32), ir.F32Type.get()
    add, mul = rows.instruction("add.rn.f32"), rows.instruction("mul.rn.f32")
    lane = ptx.lane()
    experts, scores, keys = _scores(logits, correction, row, num_experts)
    chosen = [found for found, _ in choose(experts, keys, top_k)]
    terms = [_score_of(found, experts, scores) for found in chosen]
    mine, weight = chosen[0], terms[0]
    for rank in range(1, top_k):
        is_mine = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.c(rank, i32))
        mine = arith.select(is_mine, chosen[rank], mine)
        weight = arith.select(is_mine, terms[rank], weight)
    if renormalise:
        total = terms[0]
        for term in terms[1:]:
            total = add(total, term)
        total = add(total, mgpu.c(SMALLEST_SUM, f32))
        weight = rows.instruction("div.rn.f32")(weight, total)
    weight = mul(weight, mgpu.c(scale, f32))
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, mgpu.c(top_k, i32))):
        put(arith.index_cast(index, lane), mine, weight)


def _plain(logits, correction, *, top_k: int, renormalise: bool, scale: float):
    """The same of one row, interpreted."""
    scores = 1.0 / (jnp.exp(-logits) + 1.0)
    order = jnp.argsort(scores + correction + 0.0, descending=True, stable=True)[:top_k]
    terms = scores[order]
    if renormalise:
        total = terms[0]
        for rank in range(1, top_k):
            total = total + terms[rank]
        terms = terms / (total + SMALLEST_SUM)
    return order.astype(jnp.int32), terms * jnp.float32(scale)


@functools.partial(
    jax.jit, static_argnames=("num_experts", "top_k", "renormalise", "scale", "interpret")
)
def route_by_sigmoid(
    logits, correction, *, num_experts: int, top_k: int, renormalise: bool, scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.route_by_sigmoid`.

    Raises:
        NotImplementedError: For more experts, or more of a row, than a warp holds.

    Numerics:
        Comparisons are of integers, exact. libdevice's exp, add.rn, div.rn, mul.rn.
        # ORDER: ranks left to right, then 1e-20.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    num_rows = logits.shape[0]
    check_supported(num_experts, top_k)
    options = {"top_k": top_k, "renormalise": renormalise, "scale": scale}

    def body(logits_gmem, correction_gmem, ids_gmem, weights_gmem):
        first_row = lax.axis_index("cta") * ROWS
        if interpret:
            correction = correction_gmem[...][:num_experts]
            for i in range(ROWS):
                row = jnp.minimum(first_row + i, num_rows - 1)
                ids, weights = _plain(logits_gmem[row][:num_experts], correction, **options)
                ids_gmem[row], weights_gmem[row] = ids, weights
            return
        references = logits_gmem, correction_gmem, ids_gmem, weights_gmem

        @plgpu.inline_mgpu(
            arg_types=(plgpu.Layout.WG_SPLAT(()), *(plgpu.RefType() for _ in references))
        )
        def emit(ctx, first_row, logits, correction, ids, weights):
            i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
            thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(rows.LANES, i32))
            warp = arith.divui(thread, mgpu.c(WARP, i32))
            row = arith.addi(first_row.registers.item(), warp)
            row = arith.index_cast(index, arith.minui(row, mgpu.c(num_rows - 1, i32)))

            def put(rank, expert, weight):
                memref.store(expert, ids, [row, rank])
                memref.store(weight, weights, [row, rank])

            _emit(logits, correction, row, put, num_experts=num_experts, **options)

        emit(jnp.int32(first_row), *references)

    ids, weights = rows.run_kernel(
        body,
        (logits, correction),
        out=[
            jax.ShapeDtypeStruct((num_rows, top_k), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, top_k), jnp.float32),
        ],
        grid={"cta": -(-num_rows // ROWS)},
        name="detjax_route_by_sigmoid",
        is_interpreted=interpret,
    )
    return ids, weights
