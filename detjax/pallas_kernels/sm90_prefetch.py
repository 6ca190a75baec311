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
from jax.extend.mlir.dialects import arith

from detjax.pallas_kernels import sm90_ptx as ptx

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
    num_warps = ptx.LANES // ptx.WARP * num_shares

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR, ptx.SCALAR))
    def ask(ctx, array, share, turn):
        thread = ptx.thread()
        piece = arith.addi(
            arith.muli(share.registers.item(), ptx.i32(ptx.LANES // ptx.WARP)),
            arith.divui(thread, ptx.i32(ptx.WARP)),
        )
        piece = arith.addi(piece, arith.muli(turn.registers.item(), ptx.i32(num_warps)))
        is_first = ptx.equals(arith.remui(thread, ptx.i32(ptx.WARP)), ptx.i32(0))
        is_piece = ptx.below(piece, ptx.i32(num_pieces))
        with mgpu.utils.when(arith.andi(is_first, is_piece)):
            first = ptx.address(array, bits=64)
            offset = arith.muli(arith.extui(ptx.int_type(64), piece), ptx.i64(apart))
            ptx.asm(
                f"cp.async.bulk.prefetch.L2.global [$0], {PIECE};", [arith.addi(first, offset)],
                touches_memory=False,
            )  # fmt: skip

    def one_turn(turn, _):
        ask(w_gmem, share, turn)
        return ()

    lax.fori_loop(0, pl.cdiv(num_pieces, num_warps), one_turn, ())
