# SPDX-License-Identifier: Apache-2.0
"""The new token of each sequence inside decode: rotated by the CTA that uses it, and kept.

The functions of `rope.sm90.qk_norm_rope_write`, hence its bits, without its launch.
"""

from dataclasses import dataclass

from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import llvm

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.float8_cache import narrowed, widened
from detjax.pallas_kernels.rope import sm90 as rope
from detjax.pallas_kernels.sm90_float8 import float8_values, rounded_pair
from detjax.pallas_kernels.sm90_hardware import SPAN


@dataclass(frozen=True, kw_only=True, slots=True)
class NewToken:
    """What a CTA does with the new token of a sequence, for one key/value head.

    Heads of a token lie as queries, keys, values: [H + 2 K, C].

    Attributes:
        kv_heads: K.
        group: Query heads of a key/value head.
        channels: C: 64, 128 or 256.
        eps: Of the norms.
        is_float8: Whether the cache holds float8: key and value are rounded to it when they are
            kept.
        is_interpreted: Use plain indexing, for interpretation on CPU.
    """

    kv_heads: int
    group: int
    channels: int
    eps: float
    is_float8: bool
    is_interpreted: bool

    @property
    def tile(self) -> rows.Tile:
        """How heads lie in registers: two or more, for Mosaic has no layout of the sum of one row.

        The same for queries, key and value, so that they share the loads of cosines and sines.
        """
        form = rope.row_form(self.channels)
        return rows.tile_of_rows(
            max(2, rows.most_rows(rows.LANES // form.lanes, self.group)),
            lanes=form.lanes,
            vec_len=form.vec_len,
            is_interpreted=self.is_interpreted,
        )

    @property
    def kept_shape(self) -> tuple[int, int]:
        """Shape of the shared memory that keeps key and value."""
        return 2, self.channels

    def kept(self, kept_smem, half: int):
        """The kept key (half 0) or value (half 1): [C]."""
        return kept_smem.at[half]

    def prepare(self, new, seq, kv_head, q_smem, kept_smem) -> None:
        """Rotate queries into `q_smem`, for wgmma; keep the key and the value in `kept_smem`.

        All loads come first, so that the CTA waits for device memory once.

        Args:
            new: qkv [B, H + 2 K, C], cos and sin [B, C / 2] or [B, C] as `rope.Rotation` has them,
                and no gains or two [C], in memory.
            seq: Which token.
            kv_head: Which key/value head.
            q_smem: Gets the queries in rows 0 to G - 1.
            kept_smem: Gets what `kept` reads.
        """
        qkv, cos, sin, *gains = new
        q_gain, k_gain = gains or (None, None)
        tile = self.tile

        def load(first, gain, are_queries=False):
            return rope.load_heads(
                qkv, pl.ds(first, tile.rows), seq, cos, sin, gain, tile, are_queries=are_queries
            )

        # The last tile starts early instead of ending late: rows written twice, alike. A group of
        # one reads the head after it too.
        starts = [max(min(i, self.group - tile.rows), 0) for i in range(0, self.group, tile.rows)]
        queries = [load(kv_head * self.group + i, q_gain, are_queries=True) for i in starts]
        # Key and value are the last rows of their tiles: there are heads enough before them.
        first_key = self.kv_heads * self.group + kv_head - (tile.rows - 1)
        key, value = load(first_key, k_gain), load(first_key + self.kv_heads, None)
        kept = [key.rotated(eps=self.eps), value.parts]
        halves = rope.halves_of(self.channels)
        for start, heads in zip(starts, queries, strict=True):
            for c, part in zip(halves, heads.rotated(eps=self.eps), strict=True):
                self._store_queries(part, q_smem, start, c)
        for half, parts in enumerate(kept):
            for c, part in zip(halves, parts, strict=True):
                self._keep(part, kept_smem, half, c)
        plgpu.commit_smem()

    def _store_queries(self, part, smem, first, columns) -> None:
        """Write a tile of heads to rows from `first` of an operand of wgmma."""
        if self.is_interpreted:
            smem[pl.ds(first, self.tile.rows), columns] = part
            return

        @plgpu.inline_mgpu(arg_types=(self.tile.whole.layout, plgpu.RefType(bits.swizzled(SPAN))))
        def emit(ctx, x, ref):
            for row, col, register in _elements(x):
                row = arith.addi(row, _index(first))
                col = arith.addi(col, _index(columns.start))
                llvm.store(register, _swizzled_pointer(ref, row, col))

        emit(part, smem)

    def _keep(self, part, smem, half: int, columns) -> None:
        """Write the last head of a tile where `kept` reads it.

        # WHY: not the whole tile, as pages and queries take all but 3 KiB of shared memory.
        """
        last = self.tile.rows - 1
        if self.is_interpreted:
            kept = part[last]
            smem[half, columns] = widened(narrowed(kept), kept.dtype) if self.is_float8 else kept
            return

        @plgpu.inline_mgpu(arg_types=(self.tile.whole.layout, plgpu.RefType()))
        def emit(ctx, x, ref):
            for row, col, register in _elements(x):
                is_last = ptx.equals(row, _index(last))
                with mgpu.when(is_last):
                    col = arith.addi(col, _index(columns.start))
                    if self.is_float8:
                        register = _rounded(register)
                    llvm.store(register, _at(ref, arith.addi(_index(half * self.channels), col)))

        emit(part, smem)

    def put(self, kept_smem, half: int, page_smem, page_gmem, offset) -> None:
        """Write the kept key or value to row `offset` of its page, here and in the cache.

        Args:
            kept_smem: What `prepare` kept.
            half: 0 for the key, 1 for the value.
            page_smem: The page, loaded already: an operand of wgmma.
            page_gmem: The page in the cache, for later launches.
            offset: Which row.

        # WHY: the page has been loaded before the row is written, so that the CTA neither waits
        for its own write nor races with it: TMA reads through another proxy.
        """
        kept, row = self.kept(kept_smem, half), page_gmem.at[offset]
        if self.is_interpreted:
            page_smem[offset] = kept[...]
            self.put_row(kept, row)
            return

        @plgpu.inline_mgpu(
            arg_types=(
                plgpu.RefType(), plgpu.RefType(bits.swizzled(SPAN)), plgpu.RefType(),
                ptx.SCALAR,
            )
        )  # fmt: skip
        def emit(ctx, source, page, row, offset):
            # A channel a thread; threads that are left over write the same again.
            thread = arith.index_cast(ir.IndexType.get(), mgpu.thread_idx())
            offset = arith.index_cast(ir.IndexType.get(), offset.registers.item())
            for first in range(0, self.channels, rows.LANES):
                channel = thread if not first else arith.addi(thread, _index(first))
                channel = arith.remui(channel, _index(self.channels))
                value = memref.load(source, [channel])
                llvm.store(value, _swizzled_pointer(page, offset, channel))
                self._store(value, row, channel)

        emit(kept, page_smem, row, offset)
        plgpu.commit_smem()

    def put_row(self, kept, row) -> None:
        """Put the kept key or value, or a share of its channels, in its row of the cache."""
        if self.is_interpreted:
            row[...] = narrowed(kept[...]) if self.is_float8 else kept[...]
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def emit(ctx, source, row):
            thread = arith.index_cast(ir.IndexType.get(), mgpu.thread_idx())
            channel = arith.remui(thread, _index(kept.shape[0]))
            self._store(memref.load(source, [channel]), row, channel)

        emit(kept, row)

    def _store(self, value, row, channel) -> None:
        """Store a channel of what is kept as the cache has it; MLIR."""
        if self.is_float8:  # exact, as it has been rounded
            value = arith.trunci(ptx.int_type(8), _float8_bits(value))
        llvm.store(value, _at(row, channel))


def _elements(x):
    """Row, column and register of what a thread holds of an array."""
    places = x.layout.thread_idxs(x.shape)
    return [(*place, register) for place, register in zip(places, x.registers.flat, strict=True)]


def _float8_bits(value):
    """The bits of a bfloat16 rounded to float8, in the lowest byte of a word."""
    f32 = ir.F32Type.get()
    return rounded_pair(arith.extf(f32, value), mgpu.c(0.0, f32))


def _rounded(register):
    """A vector of an even number of bfloat16, rounded to float8 and widened again."""
    count, f32 = ir.VectorType(register.type).shape[0], ir.F32Type.get()
    values = [arith.extf(f32, ptx.element(register, i)) for i in range(count)]
    pairs = [rounded_pair(*values[i : i + 2]) for i in range(0, count, 2)]
    kind = ir.VectorType.get((len(pairs),), ptx.int_type())
    words = vector.from_elements(kind, [float8_values(pair)[0] for pair in pairs])
    return vector.bitcast(register.type, words)


def _index(value: int):
    return mgpu.c(value, ir.IndexType.get())


def _swizzled_pointer(ref, row, col):
    """Address of element (row, col) of an operand of wgmma in tiles of 8 rows and SPAN columns.

    Chunk i of 8 columns lies at chunk `i ^ row` of its row, as TMA's 128-byte swizzle puts it.
    """
    kind = ir.MemRefType(ref.type)
    _, num_spans, tile_rows, span = kind.shape
    strides, _ = kind.get_strides_and_offset()
    assert list(strides) == [num_spans * tile_rows * span, tile_rows * span, span, 1], strides
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
    return _at(ref, offset)


def _at(ref, offset):
    offset = arith.index_cast(ptx.int_type(), offset)
    element = ir.MemRefType(ref.type).element_type
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], element)
