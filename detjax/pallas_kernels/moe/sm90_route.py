# SPDX-License-Identifier: Apache-2.0
"""The router's choice on Hopper: a warp a row, its lanes neighbouring experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref
from jax.extend.mlir.dialects import math as mlir_math

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows

WARP = ptx.WARP
ROWS = rows.LANES // WARP
"""Rows of a CTA."""

MAX_EXPERTS = 1024
MAX_TOP_K = WARP
_USED = np.iinfo(np.int32).min
"""Below the key of every logit, -inf and NaN too."""

_LAST_ID = np.iinfo(np.int32).max


def redux(op: str, value):
    """The same value in all lanes of a warp: of the least or the greatest int32."""
    text = f"redux.sync.{op}.s32 $0, $1, 0xffffffff;"
    [result] = ptx.asm(text, [value], returns=[value.type], touches_memory=False)
    return result


def _flip(bits):
    """Bits of a float32 to an int32 in the same order, and back; NaN lies beyond the infinities."""
    i32 = bits.type
    low = arith.andi(arith.shrsi(bits, mgpu.c(31, i32)), mgpu.c(0x7FFFFFFF, i32))
    return arith.xori(bits, low)


def key_of(value, is_expert):
    """An int32 in the order of float32 values; below all others where there is no expert."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.select(is_expert, _flip(arith.bitcast(i32, value)), mgpu.c(_USED, i32))


def _packed(expert, key):
    """An int64 in the order of choice: the greater key first, then the lower id."""
    i64 = ir.IntegerType.get_signless(64)
    low = arith.extui(i64, arith.subi(mgpu.c(_LAST_ID, expert.type), expert))
    return arith.ori(arith.shli(arith.extsi(i64, key), mgpu.c(32, i64)), low)


def _in_order(experts: list, keys: list) -> list:
    """A lane's own experts in order of choice, `_packed`; by Batcher's odd-even merges."""
    found, size = [_packed(*it) for it in zip(experts, keys, strict=True)], len(keys)
    for merged in (1 << i for i in range((size - 1).bit_length())):
        for distance in (merged >> i for i in range(merged.bit_length())):
            first = distance % merged
            for start in range(first, size - distance, 2 * distance):
                for i in range(start, min(start + distance, size - distance)):
                    if i // (2 * merged) == (i + distance) // (2 * merged):
                        a, b = found[i], found[i + distance]
                        found[i], found[i + distance] = arith.maxsi(a, b), arith.minsi(a, b)
    return found


def _take_first(packed: list) -> tuple:
    """The first expert of a warp and its key, in all lanes, and a lane's own without it.

    Args:
        packed: A lane's own, in falling order.
    """
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    key = arith.trunci(i32, arith.shrsi(packed[0], mgpu.c(32, i64)))
    low = arith.trunci(i32, packed[0])
    best = redux("max", key)
    is_best = arith.cmpi(arith.CmpIPredicate.eq, key, best)
    first = redux("max", arith.select(is_best, low, mgpu.c(-1, i32)))
    is_mine = arith.cmpi(arith.CmpIPredicate.eq, low, first)
    rest = [*packed[1:], mgpu.c(_USED << 32, i64)]
    rest = [arith.select(is_mine, b, a) for a, b in zip(packed, rest, strict=True)]
    return arith.subi(mgpu.c(_LAST_ID, i32), first), best, rest


def choose(experts: list, keys: list, top_k: int) -> list:
    """The experts of the greatest keys of a warp, equal ones by id, and the values of the keys.

    Every lane gets all of them.
    """
    packed, chosen = _in_order(experts, keys)[:top_k], []
    for _ in range(top_k):
        found, best, packed = _take_first(packed)
        chosen.append((found, arith.bitcast(ir.F32Type.get(), _flip(best))))
    return chosen


def _read(logits, row, expert, num_experts: int) -> tuple:
    """The logit of an expert, and whether there is one; -inf if not."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    is_expert = arith.cmpi(arith.CmpIPredicate.ult, expert, mgpu.c(num_experts, i32))
    inside = arith.minui(expert, mgpu.c(num_experts - 1, i32))
    value = memref.load(logits, [row, arith.index_cast(ir.IndexType.get(), inside)])
    # Adding +0 makes -0 equal to it: a tie.
    value = rows.instruction("add.rn.f32")(value, mgpu.c(0.0, f32))
    return arith.select(is_expert, value, mgpu.c(-np.inf, f32)), is_expert


def _emit(logits, row, put, *, num_experts: int, top_k: int, renormalise: bool):
    """One row of a warp; every lane knows all ranks, and `put` gets the one of its own."""
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    add, sub = rows.instruction("add.rn.f32"), rows.instruction("sub.rn.f32")
    each = padded_experts(num_experts) // WARP
    lane = ptx.lane()
    row = arith.index_cast(index, row)
    first = arith.muli(lane, mgpu.c(each, i32))
    experts = [arith.addi(first, mgpu.c(i, i32)) for i in range(each)]
    read = [_read(logits, row, expert, num_experts) for expert in experts]
    values = [value for value, _ in read]
    chosen = choose(experts, [key_of(*it) for it in read], top_k)
    greatest = chosen[0][1]
    terms = [mlir_math.exp(sub(value, greatest)) for _, value in chosen]
    if renormalise:
        total = terms[0]
        for term in terms[1:]:
            total = add(total, term)
    else:
        total = rows.pairwise([mlir_math.exp(sub(v, greatest)) for v in values], add)
        for distance in (1, 2, 4, 8, 16):
            total = add(total, mgpu.utils.shfl_bfly(total, distance))
    mine, term = chosen[0][0], terms[0]
    for rank in range(1, top_k):
        is_mine = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.c(rank, i32))
        mine = arith.select(is_mine, chosen[rank][0], mine)
        term = arith.select(is_mine, terms[rank], term)
    weight = rows.instruction("div.rn.f32")(term, total)
    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, mgpu.c(top_k, i32))):
        put(arith.index_cast(index, lane), mine, weight)


def padded_experts(num_experts: int) -> int:
    """A power of two of at least a warp."""
    return max(WARP, 1 << (num_experts - 1).bit_length())


def _plain(logits, *, top_k: int, renormalise: bool):
    """The same of one row, interpreted."""
    order = jnp.argsort(logits + 0.0, descending=True, stable=True)[:top_k]
    exps = jnp.exp(logits - logits[order[0]])
    terms = exps[order]
    if renormalise:
        total = terms[0]
        for rank in range(1, top_k):
            total = total + terms[rank]
    else:
        sums = jnp.pad(exps, (0, padded_experts(logits.shape[0]) - logits.shape[0]))
        while sums.shape[0] > 1:
            sums = sums[0::2] + sums[1::2]
        total = sums[0]
    return order.astype(jnp.int32), terms / total


def route_rows(
    logits_gmem, first_row, outputs: tuple, ids_smem=None, *,
    num_rows: int, is_kept=None, num_experts: int, top_k: int, renormalise: bool,
    is_interpreted: bool,
) -> None:  # fmt: skip
    """Route rows by one warpgroup, a warp each in turn, inside any kernel.

    Args:
        logits_gmem: float32 [M, U], or wider: columns behind the experts' are not read.
        first_row: Of those to take.
        outputs: ids and weights, [M, k] in device memory.
        ids_smem: Where the ids go too, row by row, if anywhere.
        num_rows: How many to take; past the last of all it repeats that one, alike.
        is_kept: Whether outputs are written, a scalar; always if None.
        num_experts: U.
        top_k: Experts of a row.
        renormalise: Whether its weights add up to 1.
        is_interpreted: Whether the kernel is interpreted.
    """
    last = logits_gmem.shape[0] - 1
    options = {"top_k": top_k, "renormalise": renormalise}
    is_kept = jnp.bool_(True) if is_kept is None else is_kept
    if is_interpreted:
        for i in range(num_rows):
            row = jnp.minimum(first_row + i, last)
            ids, weights = _plain(logits_gmem[row][:num_experts], **options)
            if ids_smem is not None:
                for rank in range(top_k):
                    ids_smem[row * top_k + rank] = ids[rank]

            @pl.when(is_kept)
            def _(row=row, ids=ids, weights=weights):
                outputs[0][row], outputs[1][row] = ids, weights

        return
    scalar = plgpu.Layout.WG_SPLAT(())
    references = (logits_gmem, *outputs, *([] if ids_smem is None else [ids_smem]))

    @plgpu.inline_mgpu(arg_types=(scalar, scalar, *(plgpu.RefType() for _ in references)))
    def emit(ctx, first_row, is_kept, logits, ids, weights, *shared):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(rows.LANES, i32))
        warp = arith.divui(thread, mgpu.c(WARP, i32))
        for turn in range(0, num_rows, ROWS):
            row = arith.addi(first_row.registers.item(), mgpu.c(turn, i32))
            row = arith.minui(arith.addi(row, warp), mgpu.c(last, i32))

            def put(rank, expert, weight, row=row):
                row = arith.index_cast(index, row)
                for ref in shared:
                    slot = arith.addi(arith.muli(row, mgpu.c(top_k, index)), rank)
                    memref.store(expert, ref, [slot])
                with mgpu.utils.when(is_kept.registers.item()):
                    memref.store(expert, ids, [row, rank])
                    memref.store(weight, weights, [row, rank])

            _emit(logits, row, put, num_experts=num_experts, **options)

    emit(jnp.int32(first_row), is_kept, *references)


def find_experts(logits_gmem, last, ids_smem, *, num_experts: int, is_interpreted: bool) -> None:
    """The ids of `route_rows` alone, of the first row, by a warpgroup whose warps do the same.

    Each thread writes all of them. So it may read them, and a barrier at which any arrives shows
    them to others.

    Args:
        logits_gmem: As for `route_rows`.
        last: The last rank to find, an int32 scalar.
        ids_smem: int32 [k].
        num_experts: U.
        is_interpreted: Whether the kernel is interpreted.
    """
    if is_interpreted:
        top_k = ids_smem.shape[0]
        ids, _ = _plain(logits_gmem[0][:num_experts], top_k=top_k, renormalise=True)
        for rank in range(top_k):
            ids_smem[rank] = ids[rank]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ptx.SCALAR))
    def emit(ctx, logits, ids, last):
        i32, index = ptx.int_type(), ir.IndexType.get()
        row, [top_k] = mgpu.c(0, index), ir.MemRefType(ids.type).shape
        # Ids are in the order of choice, so lanes need not have neighbours: a line a load.
        experts = [arith.addi(ptx.lane(), ptx.i32(start)) for start in range(0, num_experts, WARP)]
        keys = [key_of(*_read(logits, row, expert, num_experts)) for expert in experts]

        def one_rank(rank, packed):
            found, _, packed = _take_first(packed)
            memref.store(found, ids, [arith.index_cast(index, rank)])
            return packed

        num_ranks = arith.addi(last.registers.item(), mgpu.c(1, i32))
        mgpu.utils.fori(num_ranks, _in_order(experts, keys)[:top_k])(one_rank)

    emit(logits_gmem, ids_smem, jnp.int32(last))


def check_supported(num_experts: int, top_k: int) -> None:
    """Refuse more than a warp holds.

    Raises:
        NotImplementedError: For more experts, or more of a row.
    """
    if num_experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        raise NotImplementedError(
            f"sm90 routes to at most {MAX_TOP_K} of {MAX_EXPERTS} experts, not {top_k} of "
            f"{num_experts}; use portable"
        )


@functools.partial(jax.jit, static_argnames=("num_experts", "top_k", "renormalise", "interpret"))
def route(
    logits, *, num_experts: int, top_k: int, renormalise: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `api.route`.

    Raises:
        NotImplementedError: For more experts, or more of a row, than a warp holds.

    Numerics:
        Comparisons are of integers, exact. sub.rn, libdevice's exp, add.rn, div.rn.
        # ORDER: ranks left to right, or experts as the perfect tree: a lane's neighbours pairwise,
        then lanes across distance 1, 2, 4, 8, 16.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    num_rows = logits.shape[0]
    check_supported(num_experts, top_k)

    def body(logits_gmem, ids_gmem, weights_gmem):
        route_rows(
            logits_gmem, lax.axis_index("cta") * ROWS, (ids_gmem, weights_gmem), num_rows=ROWS,
            num_experts=num_experts, top_k=top_k, renormalise=renormalise,
            is_interpreted=interpret,
        )  # fmt: skip

    ids, weights = rows.run_kernel(
        body,
        (logits,),
        out=[
            jax.ShapeDtypeStruct((num_rows, top_k), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, top_k), jnp.float32),
        ],
        grid={"cta": -(-num_rows // ROWS)},
        name="detjax_route",
        is_interpreted=interpret,
    )
    return ids, weights
