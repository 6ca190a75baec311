# SPDX-License-Identifier: Apache-2.0
"""The new tokens of each sequence inside decode: rotated by the CTA that uses them, and kept.

The functions of `rope.sm90.qk_norm_rope_write`, hence its bits, without its launch.
"""

import contextlib
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
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
from detjax.pallas_kernels.sm90_prefetch import LINE


@dataclass(frozen=True, kw_only=True, slots=True)
class NewToken:
    """What a CTA does with the new tokens of a sequence, for one key/value head.

    Heads of a token lie as queries, keys, values: [H + 2 K, C].

    Attributes:
        kv_heads: K.
        group: Query heads of a key/value head.
        channels: C: 64, 128 or 256.
        query_len: T, new tokens of a sequence.
        eps: Of the norms.
        is_float8: Whether the cache holds float8: key and value are rounded to it when they are
            kept.
        is_interpreted: Use plain indexing, for interpretation on CPU.
    """

    kv_heads: int
    group: int
    channels: int
    query_len: int = 1
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
        """Shape of the shared memory that keeps the key and the value of each token."""
        return 2 * self.query_len, self.channels

    def kept(self, kept_smem, half: int, token=0):
        """The kept key (half 0) or value (half 1) of a token: [C]."""
        return kept_smem.at[2 * token + half]

    def prepare(self, new, seq, kv_head, q_smem, kept_smem) -> None:
        """Rotate queries into `q_smem`, for wgmma; keep keys and values in `kept_smem`.

        All loads come first, so that the CTA waits for device memory once.

        Args:
            new: qkv [B T, J, C], cos and sin [B T, C / 2] or [B T, C] as `rope.Rotation` has
                them, and no gains or two [C], in memory.
            seq: Which sequence.
            kv_head: Which key/value head.
            q_smem: Gets the queries of each token, one token's G rows after another's.
            kept_smem: Gets what `kept` reads.
        """
        if self.query_len == 1:
            self._prepare_one(new, seq, kv_head, 0, q_smem, kept_smem)
        else:
            first = seq * self.query_len
            self._ask_ahead(new, first, kv_head)

            # WHY: a loop, as each further copy of its code takes seconds to compile.
            def one_token(token, _):
                self._prepare_one(new, first + token, kv_head, token, q_smem, kept_smem)
                return 0

            lax.fori_loop(0, self.query_len, one_token, 0)
        plgpu.commit_smem()

    def _ask_ahead(self, new, first_token, kv_head) -> None:
        """Ask what `prepare` will load of all tokens into the L1 cache, a line a thread."""
        if self.is_interpreted:
            return
        qkv, cos, sin, *_ = new
        first_query, num_heads = kv_head * self.group, self.kv_heads * self.group
        heads = (
            (first_query, self.group),
            (num_heads + kv_head, 1),
            (num_heads + self.kv_heads + kv_head, 1),
        )
        parts = [(qkv.at[first_token, head], qkv, count / qkv.shape[1]) for head, count in heads]
        parts += [(angles.at[first_token], angles, 1) for angles in (cos, sin)]
        for start, whole, share in parts:
            bytes_apart = whole[0].size * jnp.dtype(whole.dtype).itemsize
            lines = pl.cdiv(int(bytes_apart * share), LINE)
            for first in range(0, self.query_len * lines, rows.LANES):
                _ask_lines(start, first, lines, self.query_len * lines, bytes_apart)

    def _prepare_one(self, new, index, kv_head, token, q_smem, kept_smem) -> None:
        """`prepare` of one token, the `index`-th of all."""
        qkv, cos, sin, *gains = new
        q_gain, k_gain = gains or (None, None)
        tile = self.tile

        def load(first, gain, are_queries=False):
            return rope.load_heads(
                qkv, pl.ds(first, tile.rows), index, cos, sin, gain, tile, are_queries=are_queries
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
                self._store_queries(part, q_smem, token * self.group + start, c)
        for half, parts in enumerate(kept):
            for c, part in zip(halves, parts, strict=True):
                self._keep(part, kept_smem, 2 * token + half, c)

    def _store_queries(self, part, smem, first, columns) -> None:
        """Write a tile of heads to rows from `first` of an operand of wgmma.

        # WHY: of a group of one, not the head after it, whose row is the next token's: another warp
        writes that, and nothing orders the two.
        """
        count = min(self.tile.rows, self.group)
        if self.is_interpreted:
            smem[pl.ds(first, count), columns] = part[:count]
            return

        @plgpu.inline_mgpu(
            arg_types=(self.tile.whole.layout, plgpu.RefType(bits.swizzled(SPAN)), ptx.SCALAR)
        )
        def emit(ctx, x, ref, first):
            first = _as_index(first)
            for row, col, register in _elements(x):
                is_head = ptx.below(row, _index(count)) if count < self.tile.rows else None
                row = arith.addi(row, first)
                col = arith.addi(col, _index(columns.start))
                with contextlib.nullcontext() if is_head is None else mgpu.when(is_head):
                    llvm.store(register, _swizzled_pointer(ref, row, col))

        emit(part, smem, jnp.int32(first))

    def _keep(self, part, smem, row, columns) -> None:
        """Write the last head of a tile to a row that `kept` reads.

        # WHY: not the whole tile, as pages and queries take all but 3 KiB of shared memory.
        """
        last = self.tile.rows - 1
        if self.is_interpreted:
            kept = part[last]
            smem[row, columns] = widened(narrowed(kept), kept.dtype) if self.is_float8 else kept
            return

        @plgpu.inline_mgpu(arg_types=(self.tile.whole.layout, plgpu.RefType()))
        def emit(ctx, x, ref):
            for head, col, register in _elements(x):
                is_last = ptx.equals(head, _index(last))
                with mgpu.when(is_last):
                    col = arith.addi(col, _index(columns.start))
                    if self.is_float8:
                        register = _rounded(register)
                    llvm.store(register, _at(ref, col))

        emit(part, smem.at[row])

    def put(self, kept_smem, half: int, page_smem, page_gmem, offset, token=0) -> None:
        """Write the kept key or value to row `offset` of its page, here and in the cache.

        `plgpu.commit_smem` is left to the caller, who may put several.

        Args:
            kept_smem: What `prepare` kept.
            half: 0 for the key, 1 for the value.
            page_smem: The page, loaded already: an operand of wgmma.
            page_gmem: The page in the cache, for later launches.
            offset: Which row.
            token: Which of the sequence's new tokens.

        # WHY: the page has been loaded before the row is written, so that the CTA neither waits
        for its own write nor races with it: TMA reads through another proxy.
        """
        kept, row = self.kept(kept_smem, half, token), page_gmem.at[offset]
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
            offset = _as_index(offset)
            for first in range(0, self.channels, rows.LANES):
                channel = thread if not first else arith.addi(thread, _index(first))
                channel = arith.remui(channel, _index(self.channels))
                value = memref.load(source, [channel])
                llvm.store(value, _swizzled_pointer(page, offset, channel))
                self._store(value, row, channel)

        emit(kept, page_smem, row, offset)

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


def _ask_lines(start, first: int, lines: int, stop: int, bytes_apart: int) -> None:
    """Ask a line a thread: the `first`-th and on, below `stop`, so many of each token."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(ctx, start):
        line = arith.addi(ptx.thread(), ptx.i32(first))
        with mgpu.when(ptx.below(line, ptx.i32(stop))):
            token, line = arith.divui(line, ptx.i32(lines)), arith.remui(line, ptx.i32(lines))
            offset = arith.addi(
                arith.muli(token, ptx.i32(bytes_apart)), arith.muli(line, ptx.i32(LINE))
            )
            where = arith.addi(ptx.address(start, bits=64), arith.extui(ptx.int_type(64), offset))
            ptx.asm("prefetch.global.L1 [$0];", [where], touches_memory=False)

    emit(start)


def _as_index(scalar):
    return arith.index_cast(ir.IndexType.get(), scalar.registers.item())


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
