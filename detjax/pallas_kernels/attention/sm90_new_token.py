# SPDX-License-Identifier: Apache-2.0
"""The new tokens of each sequence inside decode: rotated by the CTA that uses them, and kept.

The functions of `rope.sm90.qk_norm_rope_write`, hence its bits, without its launch.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
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

ROWS_AT_ONCE = 32
"""Heads that a warpgroup loads, normalises and rotates at once.

With 16 a window of 4 tokens with norms and 6 heads a CTA takes 11.9 us, with 32 10.9 (H200).
"""


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
    def num_heads(self) -> int:
        """Heads of a token that a CTA loads: its queries, a key and a value."""
        return self.group + 2

    @property
    def num_rows(self) -> int:
        """Heads of all tokens: the rows of `prepare`."""
        return self.query_len * self.num_heads

    @property
    def tile(self) -> rows.Tile:
        """How rows lie in registers: at least two, for Mosaic has no layout of the sum of one."""
        form = rope.row_form(self.channels)
        at_once = 2
        while at_once < min(self.num_rows, ROWS_AT_ONCE):
            at_once *= 2
        return rows.tile_of_rows(
            at_once, lanes=form.lanes, vec_len=form.vec_len, is_interpreted=self.is_interpreted
        )

    @property
    def kept_shape(self) -> tuple[int, int]:
        """Shape of the shared memory that keeps the key and the value of each token."""
        return 2 * self.query_len, self.channels

    def kept(self, kept_smem, half: int):
        """The kept key (half 0) or value (half 1) of a sequence's only token: [C]."""
        return kept_smem.at[half]

    def prepare(self, new, seq, kv_head, q_smem, kept_smem) -> None:
        """Rotate queries into `q_smem`, for wgmma; keep keys and values in `kept_smem`.

        A tile's loads come first, so that the CTA waits for device memory once.

        Args:
            new: qkv [B T, J, C], cos and sin [B T, C / 2] or [B T, C] as `rope.Rotation` has
                them, and no gains or two [C], in memory.
            seq: Which sequence.
            kv_head: Which key/value head.
            q_smem: Gets the queries of each token, one token's G rows after another's.
            kept_smem: Gets the key and the value of each token, one token's after another's.
        """
        first = seq * self.query_len
        at_once = self.tile.rows
        num_tiles = pl.cdiv(self.num_rows, at_once)

        def one_tile(index, _):
            place = _Rows(new_token=self, token=first, kv_head=kv_head, row=index * at_once)
            self._prepare_tile(new, place, q_smem, kept_smem)
            return 0

        if num_tiles == 1 or self.is_interpreted:
            for index in range(num_tiles):
                one_tile(index, 0)
        else:
            self._ask_ahead(new, first, kv_head)
            # WHY: a loop, as each further copy of its code takes seconds to compile.
            lax.fori_loop(0, num_tiles, one_tile, 0)
        plgpu.commit_smem()

    def _ask_ahead(self, new, first_token, kv_head) -> None:
        """Ask what `prepare` will load of all tokens into the L1 cache, a line a thread."""
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

    def _prepare_tile(self, new, place: "_Rows", q_smem, kept_smem) -> None:
        """`prepare` of some rows: a row is a head of a token."""
        qkv, cos, sin, *gains = new
        halves = rope.halves_of(self.channels)
        heads = rope.LoadedHeads(
            parts=[place.heads(qkv, c) for c in halves],
            cos=place.angles(cos),
            sin=place.angles(sin),
            gains=[place.gains(*gains, c) for c in halves] if gains else [],
            tile=self.tile,
        )
        for c, whole, turned in zip(halves, heads.parts, heads.rotated(eps=self.eps), strict=True):
            place.store(whole, turned, q_smem, kept_smem, c)

    def put(self, kept_smem, half: int, page_smem, page_gmem, offset, stop=None) -> None:
        """Write kept keys or values to their rows of a page, here and in the cache.

        `plgpu.commit_smem` is left to the caller, who may put several.

        Args:
            kept_smem: What `prepare` kept.
            half: 0 for the keys, 1 for the values.
            page_smem: The page, loaded already: an operand of wgmma.
            page_gmem: The page in the cache, for later launches.
            offset: Row of the first token; those of others follow. It may be negative.
            stop: Of several tokens, the row behind the last. What is on other pages is left out.

        # WHY: the page has been loaded before the row is written, so that the CTA neither waits
        for its own write nor races with it: TMA reads through another proxy.
        """
        count = self.query_len * self.channels
        if self.is_interpreted:
            self._put_interpreted(kept_smem, half, page_smem, page_gmem, offset, stop)
            return

        @plgpu.inline_mgpu(
            arg_types=(
                plgpu.RefType(), plgpu.RefType(bits.swizzled(SPAN)), plgpu.RefType(),
                ptx.SCALAR, ptx.SCALAR,
            )
        )  # fmt: skip
        def emit(ctx, kept, page, page_gmem, offset, stop):
            # A channel a thread; threads that are left over write the same again.
            thread = arith.index_cast(ir.IndexType.get(), mgpu.thread_idx())
            offset, stop = _as_index(offset), _as_index(stop)
            found = []
            for first in range(0, count, rows.LANES):
                place = arith.addi(thread, _index(first)) if first else thread
                place = arith.remui(place, _index(count))
                token = arith.divui(place, _index(self.channels))
                channel = arith.remui(place, _index(self.channels))
                row = arith.addi(arith.muli(token, _index(2)), _index(half))
                found.append((token, channel, memref.load(kept, [row, channel])))
            for token, channel, value in found:
                row = arith.addi(offset, token)
                is_here = None
                if self.query_len > 1:
                    is_new = arith.cmpi(arith.CmpIPredicate.slt, row, stop)
                    is_here = arith.andi(is_new, ptx.below(row, _index(bits.BLOCK)))
                with contextlib.nullcontext() if is_here is None else mgpu.when(is_here):
                    llvm.store(value, _swizzled_pointer(page, row, channel))
                    in_page = arith.addi(arith.muli(row, _index(self.channels)), channel)
                    self._store(value, page_gmem, in_page)

        emit(
            kept_smem,
            page_smem,
            page_gmem,
            jnp.int32(offset),
            jnp.int32(0 if stop is None else stop),
        )

    def _put_interpreted(self, kept_smem, half, page_smem, page_gmem, offset, stop) -> None:
        """`put` by plain indexing, token by token."""
        for token in range(self.query_len):
            kept, row = kept_smem.at[2 * token + half], offset + token

            def put(kept=kept, row=row):
                page_smem[row] = kept[...]
                self.put_row(kept, page_gmem.at[row])

            if self.query_len == 1:
                put()
            else:
                pl.when((row >= 0) & (row < bits.BLOCK) & (row < stop))(put)

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


class _Row(NamedTuple):
    """Which head of which token a thread's row is; MLIR."""

    token: Any  # among all
    here: Any  # among the sequence's
    head: Any  # among the token's: queries, key, value
    is_query: Any
    is_value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """A tile of the rows of `NewToken.prepare`: heads of a token, then those of the next.

    Each thread computes where its rows lie. Rows behind the last load it again and store nothing.

    Attributes:
        new_token: What they are of.
        token: The sequence's first token, among all.
        kv_head: Which key/value head.
        row: The tile's first row.
    """

    new_token: NewToken
    token: Any
    kv_head: Any
    row: Any

    def heads(self, qkv, columns):
        """Queries, keys and values."""
        new, per_token = self.new_token, qkv.shape[1]
        num_heads = new.kv_heads * new.group

        def plain(token, head):
            first = self.kv_head * new.group, num_heads + self.kv_head
            behind = head - new.group
            head = first[0] + head if behind < 0 else first[1] + behind * new.kv_heads
            return qkv[self.token + token, head, columns]

        def where(refs, row: _Row, kv_head):
            query = arith.addi(arith.muli(kv_head, _index(new.group)), row.head)
            key = arith.addi(kv_head, _index(num_heads))
            value = arith.addi(key, _index(new.kv_heads))
            head = arith.select(row.is_query, query, arith.select(row.is_value, value, key))
            head = arith.addi(arith.muli(row.token, _index(per_token)), head)
            return refs[0], arith.muli(head, _index(new.channels))

        return self._load([qkv], columns, where, plain)

    def angles(self, table):
        """Cosines or sines; where a token has two kinds, those of queries are the second."""
        new, width = self.new_token, table.shape[1]
        half = new.channels // 2
        of_queries = width - half

        def plain(token, head):
            start = of_queries if head < new.group else 0
            return table[self.token + token, pl.ds(start, half)]

        def where(refs, row: _Row, kv_head):
            start = arith.muli(row.token, _index(width))
            first = arith.select(row.is_query, _index(of_queries), _index(0))
            return refs[0], arith.addi(start, first)

        return self._load([table], pl.ds(0, half), where, plain)

    def gains(self, of_queries, of_keys, columns):
        """Gains of the norms; a value, which is not normalised, has those of a key."""

        def plain(token, head):
            return (of_queries if head < self.new_token.group else of_keys)[columns]

        def where(refs, row: _Row, kv_head):
            queries, keys = (mgpu.utils.memref_ptr(ref) for ref in refs)
            return arith.select(row.is_query, queries, keys), _index(0)

        return self._load([of_queries, of_keys], columns, where, plain)

    def _load(self, refs: list, columns, where: Callable, plain: Callable):
        """Columns of all rows: [rows, columns].

        Args:
            refs: Device memory, whose last axis is columns.
            columns: Which.
            where: `where(refs, row, kv_head)` says in which memory, and how many elements behind
                its beginning, a row's columns begin; MLIR.
            plain: `plain(token, head)` reads a row of the sequence's tokens, if interpreted.
        """
        new, tile = self.new_token, self.new_token.tile
        shape, dtype = (tile.rows, columns.size), refs[0].dtype
        if new.is_interpreted:
            last = new.num_rows - 1
            found = [min(self.row + i, last) for i in range(tile.rows)]
            return jnp.stack([plain(*divmod(row, new.num_heads)) for row in found])
        layout = tile.whole.layout

        @plgpu.inline_mgpu(
            arg_types=(*[plgpu.RefType()] * len(refs), *[ptx.SCALAR] * 3),
            return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
        )
        def emit(ctx, *args):
            refs, (token, kv_head, first) = args[:-3], map(_as_index, args[-3:])
            kind = ir.MemRefType(refs[0].type).element_type
            into = layout.to_mgpu()
            vectors = ir.VectorType.get((into.vector_length,), kind)
            registers = []
            for row, col in into.thread_idxs(shape):
                memory, start = where(refs, self._row_at(token, first, row), kv_head)
                if isinstance(memory.type, ir.MemRefType):
                    memory = mgpu.utils.memref_ptr(memory)
                offset = arith.addi(start, arith.addi(col, _index(columns.start)))
                registers.append(llvm.load(vectors, _element_at(memory, offset, kind)))
            held = np.array(registers, dtype=object).reshape(into.registers_shape(shape))
            return mgpu.FragmentedArray(_registers=held, _layout=into, _is_signed=None)

        return emit(*refs, *(jnp.int32(i) for i in (self.token, self.kv_head, self.row)))

    def _row_at(self, token, first, row) -> _Row:
        """The `row`-th row from `first`, or the last of all if that is behind it; MLIR."""
        new = self.new_token
        row = arith.minui(arith.addi(first, row), _index(new.num_rows - 1))
        here, head = (op(row, _index(new.num_heads)) for op in (arith.divui, arith.remui))
        return _Row(
            token=arith.addi(token, here), here=here, head=head,
            is_query=ptx.below(head, _index(new.group)),
            is_value=ptx.equals(head, _index(new.group + 1)),
        )  # fmt: skip

    def store(self, whole, turned, q_smem, kept_smem, columns) -> None:
        """Write columns of rotated queries and keys, and of values as they are."""
        new, layout = self.new_token, self.new_token.tile.whole.layout
        if new.is_interpreted:
            for i in range(min(new.tile.rows, new.num_rows - self.row)):
                token, head = divmod(self.row + i, new.num_heads)
                if head < new.group:
                    q_smem[token * new.group + head, columns] = turned[i]
                    continue
                half = head - new.group
                kept = (turned, whole)[half][i]
                kept = widened(narrowed(kept), kept.dtype) if new.is_float8 else kept
                kept_smem[2 * token + half, columns] = kept
            return

        @plgpu.inline_mgpu(
            arg_types=(
                layout, layout, plgpu.RefType(bits.swizzled(SPAN)), plgpu.RefType(), ptx.SCALAR,
            )
        )  # fmt: skip
        def emit(ctx, whole, turned, q, kept, first):
            first = _as_index(first)
            for (row, col, as_loaded), (_, _, register) in zip(
                _elements(whole), _elements(turned), strict=True
            ):
                col = arith.addi(col, _index(columns.start))
                is_row = ptx.below(arith.addi(first, row), _index(new.num_rows))
                at = self._row_at(_index(0), first, row)
                with mgpu.when(arith.andi(is_row, at.is_query)):
                    query = arith.addi(arith.muli(at.here, _index(new.group)), at.head)
                    llvm.store(register, _swizzled_pointer(q, query, col))
                is_kept = arith.andi(is_row, arith.xori(at.is_query, mgpu.c(True, ptx.int_type(1))))
                with mgpu.when(is_kept):
                    register = arith.select(at.is_value, as_loaded, register)
                    if new.is_float8:
                        register = _rounded(register)
                    half = arith.subi(at.head, _index(new.group))
                    kept_row = arith.addi(arith.muli(at.here, _index(2)), half)
                    offset = arith.addi(arith.muli(kept_row, _index(new.channels)), col)
                    llvm.store(register, _at(kept, offset))

        emit(whole, turned, q_smem, kept_smem, jnp.int32(self.row))


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


def _element_at(start, offset, kind):
    """A pointer to an element behind a pointer."""
    offset = arith.index_cast(ptx.int_type(), offset)
    return mgpu.utils.getelementptr(start, [offset], kind)
