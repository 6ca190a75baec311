# SPDX-License-Identifier: Apache-2.0
"""The new token of each sequence inside decode: rotated by the CTA that uses it, and kept.

The functions of `rope.sm90.qk_norm_rope_write`, hence its bits, without its launch.
"""

from dataclasses import dataclass

from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref
from jaxlib.mlir.dialects import llvm

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.rope import sm90 as rope

SPAN = 64
"""Channels of a swizzle span: 128 bytes, in 8 chunks of 8 channels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewToken:
    """What a CTA does with the new token of a sequence, for one key/value head.

    Heads of a token lie as queries, keys, values: [H + 2 K, C].

    Attributes:
        kv_heads: K.
        group: Query heads of a key/value head.
        channels: C, 64 or 128.
        eps: Of the norms.
        is_interpreted: Use plain indexing, for interpretation on CPU.
    """

    kv_heads: int
    group: int
    channels: int
    eps: float
    is_interpreted: bool

    def _tile(self, num_heads: int) -> rows.Tile:
        """Two heads or more: Mosaic has no layout for the sum of one row.

        The head after the last one of a group is another query or a key, that after the last key a
        value, so both can be read.
        """
        form = rope.row_form(self.channels)
        return rows.tile_of_rows(
            max(2, rows.most_rows(rows.LANES // form.lanes, num_heads)),
            lanes=form.lanes,
            vec_len=form.vec_len,
            is_interpreted=self.is_interpreted,
        )

    def rotate_queries(self, new, seq, kv_head, q_smem) -> None:
        """Put the head's queries in rows 0 to G - 1 of `q_smem`, for wgmma."""
        qkv, cos, sin, *gains = new
        tile = self._tile(self.group)
        for start in range(0, self.group, tile.rows):
            # The last tile starts early instead of ending late: rows written twice, alike.
            first = max(min(start, self.group - tile.rows), 0)
            heads = pl.ds(kv_head * self.group + first, tile.rows)
            gain = gains[0] if gains else None
            parts = rope.rotate_heads(qkv, heads, seq, cos, sin, gain, tile, eps=self.eps)
            for c, part in zip(rope.halves_of(self.channels), parts, strict=True):
                self._store(part, tile, q_smem, first, c)
        plgpu.commit_smem()

    def _store(self, part, tile, smem, first, columns) -> None:
        """Write a tile of heads to rows from `first` of a swizzled operand of wgmma."""
        if self.is_interpreted:
            smem[pl.ds(first, tile.rows), columns] = part
            return

        @plgpu.inline_mgpu(arg_types=(tile.whole.layout, plgpu.RefType(bits.swizzled(SPAN))))
        def emit(ctx, x, ref):
            for (row, col), register in zip(
                x.layout.thread_idxs(x.shape), x.registers.flat, strict=True
            ):
                row = arith.addi(row, _index(first))
                col = arith.addi(col, _index(columns.start))
                llvm.store(register, _swizzled_pointer(ref, row, col))

        emit(part, smem)

    def keep(self, new, seq, kv_head, kept_smem, k_row, v_row) -> None:
        """Rotate the key; put key and value in the cache's rows [C], and in rows 0 and 2 of SMEM.

        # WHY: later launches read the cache. This one reads shared memory (`patch`), for a page may
        be loaded before or after these stores: TMA is another proxy, and nothing orders the two.
        """
        qkv, cos, sin, *gains = new
        num_heads = self.kv_heads * self.group
        tile = self._tile(1)
        heads = pl.ds(num_heads + kv_head, tile.rows)
        gain = gains[1] if gains else None
        parts = rope.rotate_heads(qkv, heads, seq, cos, sin, gain, tile, eps=self.eps)
        for c, part in zip(rope.halves_of(self.channels), parts, strict=True):
            kept_smem[pl.ds(0, tile.rows), c] = part
        value = qkv.at[seq, num_heads + self.kv_heads + kv_head]
        self._copy_row(value, kept_smem.at[2])
        plgpu.commit_smem()
        self._copy_row(kept_smem.at[0], k_row)
        self._copy_row(kept_smem.at[2], v_row)

    def patch(self, kept_row, smem, offset) -> None:
        """Write a kept row over row `offset` of a page in shared memory, as an operand of wgmma."""
        if self.is_interpreted:
            smem[offset] = kept_row[...]
            return

        @plgpu.inline_mgpu(
            arg_types=(
                plgpu.RefType(),
                plgpu.RefType(bits.swizzled(SPAN)),
                plgpu.Layout.WG_SPLAT(()),
            )
        )
        def emit(ctx, source, ref, row):
            channel = _channel_of_thread(self.channels)
            row = arith.index_cast(ir.IndexType.get(), row.registers.item())
            llvm.store(memref.load(source, [channel]), _swizzled_pointer(ref, row, channel))

        emit(kept_row, smem, offset)
        plgpu.commit_smem()

    def _copy_row(self, source, target) -> None:
        """Copy [C], a channel a thread; where threads are left over, they write the same again."""
        if self.is_interpreted:
            target[...] = source[...]
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def emit(ctx, source, target):
            channel = _channel_of_thread(self.channels)
            memref.store(memref.load(source, [channel]), target, [channel])

        emit(source, target)


def _index(value: int):
    return mgpu.c(value, ir.IndexType.get())


def _channel_of_thread(channels: int):
    thread = arith.index_cast(ir.IndexType.get(), mgpu.thread_idx())
    return arith.remui(thread, _index(channels))


def _swizzled_pointer(ref, row, col):
    """Address of element (row, col) of an operand of wgmma in tiles of 8 rows and SPAN columns.

    Chunk i of 8 columns lies at chunk `i ^ row` of its row, as TMA's 128-byte swizzle puts it.
    """
    _, num_spans, tile_rows, span = ir.MemRefType(ref.type).shape
    in_tile = arith.remui(row, _index(tile_rows))
    in_span = arith.remui(col, _index(span))
    chunk = arith.xori(arith.divui(in_span, _index(8)), in_tile)
    tile = arith.addi(
        arith.muli(arith.divui(row, _index(tile_rows)), _index(num_spans)),
        arith.divui(col, _index(span)),
    )
    offset = arith.addi(
        arith.muli(
            arith.addi(arith.muli(tile, _index(tile_rows)), in_tile),
            _index(span),
        ),
        arith.addi(arith.muli(chunk, _index(8)), arith.remui(in_span, _index(8))),
    )
    offset = arith.index_cast(ir.IntegerType.get_signless(32), offset)
    element = ir.MemRefType(ref.type).element_type
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], element)
