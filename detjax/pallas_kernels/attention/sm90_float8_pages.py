# SPDX-License-Identifier: Apache-2.0
"""Pages of float8 on their way to wgmma: the warpgroup that loads widens them in shared memory.

TMA brings pages as they are stored. Some pages later the same warpgroup reads them, and writes
bfloat16 where a cache of bfloat16 would have been loaded. The warpgroups that compute see no
difference, so they do the same products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
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

AT_ONCE = 32  # keys of a page are loaded, and widened, up to a multiple of this
_TILE_ROWS = 8
_AHEAD = 2  # reads of a thread that are on their way while it writes


def pages_that_fit(num_bytes: int, channels: int) -> int:
    """How many pages of float8 lie in so many bytes."""
    return num_bytes // (bits.BLOCK * channels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """How far a loading warpgroup is: scalars of a loop.

    Attributes:
        done: How many pages it has widened.
        sizes: Groups of `AT_ONCE` keys of the pages in flight, less one: 2 bits a slot.
    """

    done: Any
    sizes: Any


jax.tree_util.register_dataclass(Asked)


def nothing_asked() -> Asked:
    """Before the first page."""
    return Asked(done=jnp.int32(0), sizes=jnp.int32(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Widening:
    """The pages of float8 in flight of one loading warpgroup, and where it widens them.

    Pages have numbers in the order in which they are asked for: keys before values, of one block
    after the other.

    Attributes:
        codes: uint8 [slots, BLOCK, C] in shared memory.
        filled: Their barriers.
        first: The warpgroup's first slot.
        num_slots: How many it has.
        load: `load(num_written, page, smem, barrier)` loads the written keys of a page, or more.
        with_page: `with_page(n, fill)` calls `fill` with the place of page n, an operand of wgmma,
            the barrier that says it is filled, and what waits until it is free.
        is_interpreted: Whether a CPU interprets the kernel.
    """

    codes: Any
    filled: Any
    first: Any
    num_slots: int
    load: Callable
    with_page: Callable
    is_interpreted: bool

    def ask(self, number, asked: Asked, page_gmem, num_written) -> Asked:
        """Ask for page `number`, and widen the oldest one in flight if there is no room.

        Args:
            number: Of the page.
            asked: How far the warpgroup is.
            page_gmem: The page.
            num_written: Keys of it that are written, one or more. What lies behind them in shared
                memory is older: their scores are masked, and their values cleared.
        """
        done, sizes = asked.done, asked.sizes
        is_full = number - done >= self.num_slots
        pl.when(is_full)(lambda: self.widen(asked))
        done = done + is_full.astype(jnp.int32)
        slot = self._slot(number)
        self.load(num_written, page_gmem, self.codes.at[slot], self.filled.at[slot])
        groups = lax.div(jnp.minimum(num_written, bits.BLOCK) - 1, jnp.int32(AT_ONCE))
        place = 2 * (slot - self.first)
        sizes = (sizes & ~lax.shift_left(jnp.int32(3), place)) | lax.shift_left(groups, place)
        return Asked(done=done, sizes=sizes)

    def widen_all(self, number, asked: Asked) -> Asked:
        """Widen all pages before `number`."""

        def one(done, sizes):
            self.widen(Asked(done=done, sizes=sizes))
            return sizes

        lax.fori_loop(asked.done, number, one, asked.sizes)
        return Asked(done=jnp.int32(number), sizes=asked.sizes)

    def widen(self, asked: Asked) -> None:
        """Widen the oldest page in flight."""
        slot = self._slot(asked.done)
        last_group = lax.shift_right_logical(asked.sizes, 2 * (slot - self.first)) & 3

        def fill(page_smem, page_filled, claim):
            claim()
            plgpu.barrier_wait(self.filled.at[slot])
            widen_page(self.codes.at[slot], page_smem, last_group, self.is_interpreted)
            plgpu.barrier_arrive(page_filled)

        self.with_page(asked.done, fill)

    def _slot(self, number):
        return self.first + lax.rem(number, jnp.int32(self.num_slots))


def widen_page(codes_smem, page_smem, last_group, is_interpreted: bool) -> None:
    """Write float8 [BLOCK, C], as they are stored, as bfloat16 rows of an operand of wgmma.

    Called by one warpgroup, all of whose threads then arrive at the barrier of the page.

    Args:
        codes_smem: The float8. Before TMA may write there again, the warpgroup must meet, as it
            does in each of Mosaic's copies.
        page_smem: The operand.
        last_group: Groups of `AT_ONCE` keys that are widened, less one.
        is_interpreted: Whether a CPU interprets the kernel.
    """
    whole = bits.BLOCK // AT_ONCE - 1

    def widen_group(group) -> None:
        rows = pl.ds(group * AT_ONCE, AT_ONCE)
        if is_interpreted:
            page_smem[rows] = widened(codes_smem[rows], page_smem.dtype)
        else:
            _widen_rows(codes_smem.at[rows], page_smem.at[rows])

    if is_interpreted:
        lax.fori_loop(0, last_group + 1, lambda group, _: widen_group(group), None)
        return

    @pl.when(last_group == whole)
    def _whole():
        _widen_rows(codes_smem, page_smem)

    @pl.when(last_group < whole)
    def _groups():
        lax.fori_loop(0, last_group + 1, lambda group, _: widen_group(group), None)

    _fence()


def _fence() -> None:
    """Let wgmma see what this thread wrote, once the thread has arrived at a barrier."""

    @plgpu.inline_mgpu()
    def emit(ctx):
        ptx.asm("fence.proxy.async.shared::cta;")

    emit()


def _widen_rows(codes_smem, rows_smem) -> None:
    num_rows, channels = codes_smem.shape
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
            steps = num_rows // (side_by_side * _TILE_ROWS)

            def read(i: int) -> list:
                return _load(arith.addi(source, ptx.i32(i * source_step)))

            words = [read(i) for i in range(min(_AHEAD, steps))]
            for i in range(steps):
                if i + _AHEAD < steps:
                    words.append(read(i + _AHEAD))
                values = [value for word in words[i] for value in float8_values(word)]
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
