# SPDX-License-Identifier: Apache-2.0
"""Pages of float8 on their way to wgmma: the warpgroup that loads widens them in shared memory.

TMA brings pieces of a page as they are stored. Some pieces later the same warpgroup reads them,
and writes bfloat16 where a cache of bfloat16 would have been loaded. The warpgroups that compute
see no difference, so they do the same products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.float8_cache import widened
from detjax.pallas_kernels.sm90_float8 import float8_values
from detjax.pallas_kernels.sm90_hardware import LANES

PIECE = 64  # keys that one copy brings
PIECES = bits.BLOCK // PIECE  # of a page
_TILE_ROWS = 8
_AT_ONCE = 4  # chunks of 8 channels that a thread reads before it writes them


def pieces_that_fit(num_bytes: int, channels: int) -> int:
    """How many pieces lie in so many bytes."""
    return num_bytes // (PIECE * channels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Widening:
    """The pieces in flight of one loading warpgroup, and the pages that it fills from them.

    Pieces have numbers in the order in which they are asked for: those of keys before those of
    values, of one block after the other.

    Attributes:
        codes: uint8 [slots, PIECE, C] in shared memory.
        filled: Their barriers.
        first: The warpgroup's first slot.
        num_slots: How many it has.
        with_page: `with_page(n, fill)` calls `fill` with the place of page n, an operand of wgmma,
            the barrier that says it is filled, and what waits until it is free.
        is_interpreted: Whether a CPU interprets the kernel.
    """

    codes: Any
    filled: Any
    first: Any
    num_slots: int
    with_page: Callable
    is_interpreted: bool

    def ask(self, number, done, page_gmem, num_written):
        """Ask for a page, in pieces of which `done` are widened already; return the new number.

        Args:
            number: Of the page's first piece.
            done: How many pieces have been widened.
            page_gmem: The page.
            num_written: Keys of it that are written, or more: pieces behind them are not loaded.
        """
        for piece in range(PIECES):
            is_full = number + piece - done >= self.num_slots
            pl.when(is_full)(lambda done=done: self.widen(done))
            done = done + is_full.astype(jnp.int32)
            slot = self._slot(number + piece)
            is_written = num_written > piece * PIECE

            @pl.when(is_written)
            def _load(slot=slot, piece=piece):
                plgpu.copy_gmem_to_smem(
                    page_gmem.at[pl.ds(piece * PIECE, PIECE)],
                    self.codes.at[slot],
                    self.filled.at[slot],
                )

            @pl.when(jnp.logical_not(is_written))
            def _skip(slot=slot):
                # What an older piece left there: its keys are masked, and its values cleared.
                plgpu.barrier_arrive(self.filled.at[slot])

        return done

    def widen_all(self, number, done):
        """Widen all pieces before `number`; return it."""
        lax.fori_loop(done, number, lambda i, carry: (self.widen(i), carry)[1], jnp.int32(0))
        return number

    def widen(self, number) -> None:
        """Widen a piece, and say so if it is the last of its page."""
        piece, slot = lax.rem(number, jnp.int32(PIECES)), self._slot(number)

        def fill(page_smem, page_filled, claim):
            pl.when(piece == 0)(claim)
            plgpu.barrier_wait(self.filled.at[slot])
            rows = page_smem.at[pl.ds(piece * PIECE, PIECE)]
            widen_piece(self.codes.at[slot], rows, self.is_interpreted)
            # All threads are through with the piece, and TMA and wgmma see what they wrote.
            plgpu.commit_smem()
            pl.when(piece == PIECES - 1)(lambda: plgpu.barrier_arrive(page_filled))

        self.with_page(lax.div(number, jnp.int32(PIECES)), fill)

    def _slot(self, number):
        return self.first + lax.rem(number, jnp.int32(self.num_slots))


def widen_piece(codes_smem, rows_smem, is_interpreted: bool) -> None:
    """Write float8 [PIECE, C], as they are stored, as bfloat16 rows of an operand of wgmma."""
    if is_interpreted:
        rows_smem[...] = widened(codes_smem[...], rows_smem.dtype)
        return
    channels = codes_smem.shape[1]
    transforms = bits.swizzled(bits.channel_span(channels))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms)))
    def emit(ctx, codes, rows):
        chunks = channels // 8  # of 8 channels: 8 bytes here, 16 there
        side_by_side = max(1, LANES // (_TILE_ROWS * chunks))  # tiles of rows at once
        thread = ptx.thread()
        is_busy = ptx.below(thread, ptx.i32(side_by_side * _TILE_ROWS * chunks))
        with mgpu.utils.when(is_busy):
            source = arith.addi(ptx.address(codes), arith.muli(thread, ptx.i32(8)))
            target = arith.addi(ptx.address(rows), _offset(thread, chunks, rows))
            source_step = side_by_side * _TILE_ROWS * channels
            target_step = 2 * side_by_side * _strides(rows)[0]
            steps = PIECE // (side_by_side * _TILE_ROWS)
            for start in range(0, steps, _AT_ONCE):
                turns = range(start, min(start + _AT_ONCE, steps))
                words = [_load(arith.addi(source, ptx.i32(i * source_step))) for i in turns]
                for i, pair in zip(turns, words, strict=True):
                    values = [value for word in pair for value in float8_values(word)]
                    where = arith.addi(target, ptx.i32(i * target_step))
                    ptx.asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [where, *values])

    emit(codes_smem, rows_smem)


def _load(address) -> list:
    return ptx.asm("ld.shared.v2.b32 {$0, $1}, [$2];", [address], returns=[ptx.int_type()] * 2)


def _strides(rows) -> list[int]:
    strides, _ = ir.MemRefType(rows.type).get_strides_and_offset()
    return list(strides)


def _offset(thread, chunks: int, rows):
    """In bytes, where the first chunk of a thread lies in an operand of wgmma.

    Threads take the chunks of a row, then the rows of a tile of 8, then the next tile. TMA's
    swizzle exchanges chunks of 16 bytes of a row by the number of its row of 128 bytes.
    """
    span = ir.MemRefType(rows.type).shape[3]
    tile_stride, span_stride, row_stride, _ = _strides(rows)

    def split(index, size: int) -> tuple:
        return arith.divui(index, ptx.i32(size)), arith.remui(index, ptx.i32(size))

    row, chunk = split(thread, chunks)
    tile, row = split(row, _TILE_ROWS)
    span_index, chunk = split(chunk, span // 8)
    offset = arith.muli(chunk, ptx.i32(16))
    for index, stride in ((row, row_stride), (span_index, span_stride), (tile, tile_stride)):
        offset = arith.addi(offset, arith.muli(index, ptx.i32(2 * stride)))
    exchange = arith.andi(arith.shrui(offset, ptx.i32(7)), ptx.i32(span // 8 - 1))
    return arith.xori(offset, arith.shli(exchange, ptx.i32(4)))
