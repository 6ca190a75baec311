# SPDX-License-Identifier: Apache-2.0
"""What the recurrence reads of one token, for one head of values: mixed where it is used.

A tile has the token's queries, keys and this head's values as rows 0, 1 and 2, as many threads to a
row as `sm90_rows.mix_rows` has, so that their bits are those. Rows behind them repeat the values.
"""

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
from detjax.pallas_kernels.delta_rule.operands import Filters, ProjectedRows
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.delta_rule.sm90_recurrence import LANES
from detjax.pallas_kernels.delta_rule.sm90_rows import (
    VEC_LEN,
    gates_of,
    index,
    inverse_lengths,
    mixed,
    one_register,
    source_column,
    vector_columns,
    whole_row,
)

QUERY, KEY, VALUE = range(3)
"""Rows of a tile."""

TURN = 2
"""What `turned` gives for half of the lanes."""


def turned(lane):
    """In which order a thread of the recurrence has its neighbouring channels of a key.

    At place e is channel `e ^ turned(lane)`, of a lane of `sm90_recurrence.LANES`. Sums are those
    of `sm90_recurrence.dot`, which adds the halves of four neighbours last. Lanes 2 and 3 would
    read from the banks of 0 and 1 else, as the swizzle repeats after 8 rows.
    """
    return arith.muli(arith.divui(lane, ptx.i32(LANES // 2)), ptx.i32(TURN))


class Numbers(NamedTuple):
    """What `OneToken.load` finds.

    Attributes:
        rows: Tiles, one a token that the convolution reads, the newest last.
        taps: Tiles, its numbers of each of these.
        gates: b, a, A and step, scalars.
    """

    rows: list
    taps: list
    gates: list


@dataclass(frozen=True, kw_only=True, slots=True)
class OneToken:
    """Where a warpgroup finds a token's numbers, and how it computes with them.

    Attributes:
        projected: Columns of new tokens, in device memory.
        filters: Of the convolution.
        gates: A and step, [K, G] each.
        pages: Rows of earlier tokens, [L, N, 1, K, P, X].
        of_last: The new token's page, the one before it, and the first position of that page.
        place: Sequence, layer, head of keys and head of values within its group, int32.
        tile: Arithmetic on rows.
        line: Arithmetic on one number a thread's channel of values, of the recurrence.
        line_shape: Its shape.
    """

    projected: ProjectedRows
    filters: Filters
    gates: tuple
    pages: Any
    of_last: tuple
    place: tuple
    tile: rows.Tile
    line: rows.Arithmetic
    line_shape: tuple[int]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and channels of a tile."""
        return self.tile.rows, self.projected.key_dim

    def load(self, position, *, is_new: bool) -> Numbers:
        """All that device memory has of the token at a position.

        Args:
            position: An int32 scalar.
            is_new: Whether it is the new token, whose row is in no page yet.
        """
        seq, layer, head, inner = self.place
        group, width = self.projected.group, self.filters.q.shape[2]
        kept = [self._kept(position - i) for i in range(width - 1, 0, -1)]
        if is_new:
            last, at = self._new(), head * group + inner
            own = [self.projected.columns[seq, s + at] for s in self.projected.part_starts[4:]]
        else:
            last = self._kept(position)
            column = vector_columns(self.projected) + inner
            page, offset = self._page_of(position)
            own = [self.pages[layer, page, 0, head, offset, column + i * group] for i in range(2)]
        of_head = [ref[head, inner] for ref in self.gates]
        return Numbers(rows=[*kept, last], taps=self._taps(), gates=[*own, *of_head])

    def mix(self, numbers: Numbers):
        """Queries, keys and values behind the convolution: a float32 tile.

        # ORDER: that of `sm90_rows.mixed` and `inverse_lengths`.

        Queries and keys of a thread of the recurrence are in the order of `turned`.
        """
        math = self.tile.whole
        taps, inputs = ([x.astype(jnp.float32) for x in part] for part in numbers[:2])
        y = mixed(taps, inputs, self.pages.dtype, math)
        keys = math.mul(y, inverse_lengths(y, self.tile))
        scale = float(np.float32(self.projected.key_dim**-0.5))
        return self._chosen(math.mul(keys, math.full(self.shape, scale)), keys, y)

    def gates_of(self, numbers: Numbers) -> tuple:
        """How the state fades and how much of the value is written, in all channels."""
        found = (self.line.full(self.line_shape, x.astype(jnp.float32)) for x in numbers.gates)
        return gates_of(*found, self.line)

    def keep(self, numbers: Numbers, position) -> None:
        """Put the new token's row in its page, as far as this head of values reads it.

        Heads that share a head of keys write the same queries and keys to the same places. What is
        behind b and a becomes zeros, but for what `sm90_rows.keep_count` writes, which is 1 in the
        row of a block's first token.
        """
        seq, layer, head, inner = self.place
        page, offset = self._page_of(position)
        new, group, width = numbers.rows[-1], self.projected.group, self.pages.shape[5]
        key_dim, in_vectors = self.projected.key_dim, vector_columns(self.projected)
        starts = [start + head * group + inner for start in self.projected.part_starts[4:]]
        count = (lax.rem(position, STATE_BLOCK) == 0).astype(self.pages.dtype)
        if self.tile.whole.is_interpreted:
            place = layer, page, 0, head, offset
            for row, unit in enumerate(self._units()):
                self.pages[(*place, pl.ds(unit * key_dim, key_dim))] = new[row]
            for i, start in enumerate(starts):
                self.pages[(*place, in_vectors + i * group + inner)] = self.projected.columns[
                    seq, start
                ]
            self.pages[(*place, width - 1 - inner)] = count
            for column in range(in_vectors + 2 * group, width - group):
                self.pages[(*place, column)] = jnp.zeros((), self.pages.dtype)
            return

        @plgpu.inline_mgpu(
            arg_types=(
                self.tile.whole.layout, plgpu.RefType(), plgpu.RefType(), *[ptx.SCALAR] * 9
            )
        )  # fmt: skip
        def emit(ctx, new, columns, pages, count, *scalars):
            seq, layer, page, head, offset, inner, *starts = (x.registers.item() for x in scalars)
            element = ir.MemRefType(pages.type).element_type
            place = [index(x) for x in (layer, page, ptx.i32(0), head, offset)]
            row, channel = self._row_and_channel()
            with mgpu.utils.when(ptx.below(row, ptx.i32(VALUE + 1))):
                column = arith.addi(self._unit_column(row, inner), channel)
                vector.store(new.registers.item(), pages, [*place, index(column)])
            first, zero = ptx.equals(ptx.thread(), ptx.i32(0)), mgpu.c(0.0, element)
            with mgpu.utils.when(first):
                for i, start in enumerate(starts):
                    value = memref.load(columns, [index(seq), index(start)])
                    column = arith.addi(inner, ptx.i32(in_vectors + i * group))
                    memref.store(value, pages, [*place, index(column)])
                own = arith.subi(ptx.i32(width - 1), inner)
                memref.store(count.registers.item(), pages, [*place, index(own)])
                for column in range(in_vectors + 2 * group, width - group):
                    memref.store(zero, pages, [*place, index(ptx.i32(column))])

        emit(
            new, self.projected.columns, self.pages, count, seq, layer, page, head, offset, inner,
            *starts,
        )  # fmt: skip

    def _units(self) -> list:
        """Of the rows of a tile: 0 for queries, 1 for keys, then heads of values."""
        inner = self.place[3]
        return [QUERY, KEY, *[VALUE + inner] * (self.tile.rows - VALUE)]

    def _row_and_channel(self) -> tuple:
        """Of this thread: its row, and the first of its neighbouring channels."""
        lanes = ptx.i32(self.projected.key_dim // VEC_LEN)
        row, lane = (op(ptx.thread(), lanes) for op in (arith.divui, arith.remui))
        return row, arith.muli(lane, ptx.i32(VEC_LEN))

    def _unit_column(self, row, inner):
        """Where a row of a tile begins in a row of a page."""
        is_value = arith.cmpi(arith.CmpIPredicate.uge, row, ptx.i32(VALUE))
        unit = arith.select(is_value, arith.addi(inner, ptx.i32(VALUE)), row)
        return arith.muli(unit, ptx.i32(self.projected.key_dim))

    def _page_of(self, position) -> tuple:
        """Page and offset of a position on the new token's page, or on the one before it."""
        page, before, first = self.of_last
        return jnp.where(position >= first, page, before), lax.rem(position, self.pages.shape[4])

    def _kept(self, position):
        """A row of a page; zeros before position 0."""
        _, layer, head, inner = self.place
        page, offset = self._page_of(jnp.maximum(position, 0))
        dim, math, is_there = self.projected.key_dim, self.tile.whole, position >= 0
        if math.is_interpreted:
            place = layer, page, 0, head, offset
            found = jnp.stack([self.pages[(*place, pl.ds(u * dim, dim))] for u in self._units()])
            return jnp.where(is_there, found, jnp.zeros_like(found))

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *[ptx.SCALAR] * 6),
            return_type=plgpu.ShapeDtypeStruct(self.shape, self.pages.dtype, layout=math.layout),
        )
        def emit(ctx, pages, *scalars):
            layer, page, head, offset, inner, is_there = (x.registers.item() for x in scalars)
            element = ir.MemRefType(pages.type).element_type
            kind = ir.VectorType.get((VEC_LEN,), element)
            row, channel = self._row_and_channel()
            column = arith.addi(self._unit_column(row, inner), channel)
            place = (layer, page, ptx.i32(0), head, offset, column)
            value = vector.load(kind, pages, [index(x) for x in place])
            zero = vector.broadcast(kind, mgpu.c(0.0, element))
            is_there = ptx.equals(is_there, ptx.i32(1))
            return one_register(arith.select(is_there, value, zero), self.shape, math)

        return emit(self.pages, layer, page, head, offset, inner, is_there.astype(jnp.int32))

    def _new(self):
        """The new token's row, of the columns of the product."""
        seq, _, head, inner = self.place
        dim, math, columns = self.projected.key_dim, self.tile.whole, self.projected.columns
        if math.is_interpreted:
            row = whole_row(self.projected, seq, head)
            return jnp.stack([lax.dynamic_slice(row, (u * dim,), (dim,)) for u in self._units()])

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *[ptx.SCALAR] * 3),
            return_type=plgpu.ShapeDtypeStruct(self.shape, columns.dtype, layout=math.layout),
        )
        def emit(ctx, columns, *scalars):
            seq, head, inner = (x.registers.item() for x in scalars)
            kind = ir.VectorType.get((VEC_LEN,), ir.MemRefType(columns.type).element_type)
            row, channel = self._row_and_channel()
            column = arith.addi(self._unit_column(row, inner), channel)
            found = source_column(self.projected, head, column)
            value = vector.load(kind, columns, [index(seq), index(found)])
            return one_register(value, self.shape, math)

        return emit(columns, seq, head, inner)

    def _taps(self) -> list:
        """Numbers of the filters, of each token that the convolution reads: float32 tiles."""
        _, _, head, inner = self.place
        dim, math, width = self.projected.key_dim, self.tile.whole, self.filters.q.shape[2]
        heads = head, head, head * self.projected.group + inner
        if math.is_interpreted:
            kinds = [*self.filters, *[self.filters.v] * (self.tile.rows - VALUE - 1)]
            heads = [*heads, *[heads[VALUE]] * (self.tile.rows - VALUE - 1)]
            found = [ref[pl.ds(h * dim, dim), 0] for ref, h in zip(kinds, heads, strict=True)]
            return [jnp.stack([f[:, i] for f in found]) for i in range(width)]

        dtype = self.filters.q.dtype

        @plgpu.inline_mgpu(
            arg_types=(*[plgpu.RefType()] * 3, *[ptx.SCALAR] * 3),
            return_type=[plgpu.ShapeDtypeStruct(self.shape, dtype, layout=math.layout)] * width,
        )
        def emit(ctx, q, k, v, *heads):
            element = ir.MemRefType(q.type).element_type
            row, channel = self._row_and_channel()
            offset = arith.muli(channel, ptx.i32(width))
            starts = [
                mgpu.utils.getelementptr(
                    mgpu.utils.memref_ptr(memory),
                    [arith.muli(h.registers.item(), ptx.i32(dim * width))],
                    element,
                )
                for memory, h in zip((q, k, v), heads, strict=True)
            ]
            start = starts[VALUE]
            for i in (KEY, QUERY):
                start = arith.select(ptx.equals(row, ptx.i32(i)), starts[i], start)
            start = mgpu.utils.getelementptr(start, [offset], element)
            # All numbers of a thread's channels are neighbours.
            kind, one = (ir.VectorType.get((n,), element) for n in (width, VEC_LEN))
            of_channel = [
                llvm.load(kind, mgpu.utils.getelementptr(start, [ptx.i32(i * width)], element))
                for i in range(VEC_LEN)
            ]
            return [
                one_register(
                    vector.from_elements(one, [ptx.element(c, tap) for c in of_channel]),
                    self.shape, math,
                )
                for tap in range(width)
            ]  # fmt: skip

        return emit(*self.filters, *heads)

    def _chosen(self, queries, keys, values):
        """Of each row of a tile its own; of queries and keys in the order of `turned`."""
        math = self.tile.whole
        if math.is_interpreted:
            return jnp.concatenate([queries[:1], keys[1:2], values[2:]])

        @plgpu.inline_mgpu(
            arg_types=(math.layout,) * 3,
            return_type=plgpu.ShapeDtypeStruct(self.shape, jnp.float32, layout=math.layout),
        )
        def emit(ctx, queries, keys, values):
            row, channel = self._row_and_channel()
            is_query, is_key = (ptx.equals(row, ptx.i32(i)) for i in (QUERY, KEY))
            lane = arith.remui(arith.divui(channel, ptx.i32(VEC_LEN)), ptx.i32(LANES))
            is_turned = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ne, turned(lane), ptx.i32(0)),
                arith.ori(is_query, is_key),
            )
            q, k, v = (ptx.scalars_of(x) for x in (queries, keys, values))
            own = [
                arith.select(is_query, q[i], arith.select(is_key, k[i], v[i]))
                for i in range(VEC_LEN)
            ]
            found = [arith.select(is_turned, own[i ^ TURN], own[i]) for i in range(VEC_LEN)]
            kind = ir.VectorType.get((VEC_LEN,), found[0].type)
            return one_register(vector.from_elements(kind, found), self.shape, math)

        return emit(queries, keys, values)
