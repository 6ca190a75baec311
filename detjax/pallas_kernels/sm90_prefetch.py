# SPDX-License-Identifier: Apache-2.0
"""Asks weights into the L2 cache from a kernel that leaves the memory idle.

Attention of few rows waits for latency, not for bytes, and the weights that the product after it
reads are known. A request returns at once and moves no bit.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from detjax.pallas_kernels.sm90_rows import LANES

PIECE = 16 << 10
"""Bytes of a request. An SM passes on about 240 GB/s of them, in order with its other copies."""
LINE = 128


def ask_for(w_gmem, share, num_shares: int, *, num_bytes: int) -> None:
    """Ask for a share of an array's bytes; called by all threads of a warpgroup.

    The pieces lie evenly in the array, so that every CTA of a product finds as much of its own.

    Args:
        w_gmem: The array, in device memory, contiguous.
        share: Which share, an int32 scalar.
        num_shares: How many: warpgroups that call this.
        num_bytes: Of all shares; all of the array if it has less.
    """
    total = w_gmem.size * jnp.dtype(w_gmem.dtype).itemsize
    num_pieces = min(num_bytes, total) // PIECE
    if num_pieces == 0:
        return
    apart = total // num_pieces // LINE * LINE
    num_warps = LANES // 32 * num_shares

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(()))
    )
    def ask(ctx, array, share, turn):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)

        def const(value, kind=i32):
            return mgpu.c(value, kind)

        lane = arith.remui(mgpu.utils.thread_idx(), const(LANES))
        piece = arith.addi(
            arith.muli(share.registers.item(), const(LANES // 32)), arith.divui(lane, const(32))
        )
        piece = arith.addi(piece, arith.muli(turn.registers.item(), const(num_warps)))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, const(32)), const(0))
        is_piece = arith.cmpi(arith.CmpIPredicate.ult, piece, const(num_pieces))
        with mgpu.utils.when(arith.andi(is_first, is_piece)):
            first = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(array))
            offset = arith.muli(arith.extui(i64, piece), const(apart, i64))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [arith.addi(first, offset)],
                f"cp.async.bulk.prefetch.L2.global [$0], {PIECE};", "l", has_side_effects=True,
            )  # fmt: skip

    def one_turn(turn, _):
        ask(w_gmem, share, turn)
        return ()

    lax.fori_loop(0, pl.cdiv(num_pieces, num_warps), one_turn, ())
