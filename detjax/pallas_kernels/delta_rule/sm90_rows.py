# SPDX-License-Identifier: Apache-2.0
"""Rows of new tokens into their pages on Hopper, and what the recurrence reads of all rows."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jax.extend.mlir.dialects import math as mlir_math

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.delta_rule.operands import Filters, ProjectedRows
from detjax.pallas_kernels.delta_rule.portable import NORM_EPS
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.delta_rule.sm90_plan import FIRST, LAST, begin_of
from detjax.pallas_kernels.swiglu.sm90 import over_decay

VEC_LEN = 4
"""Neighbouring channels of a thread."""

GROUP = 16
"""Tokens of a CTA that mixes rows; changes no bit."""


def index(value):
    """An integer of MLIR as an index."""
    return arith.index_cast(ir.IndexType.get(), value)


def write_rows(new_rows, pages_ref, page_table, positions, layer, *, interpret: bool) -> None:
    """Put rows of new tokens, [M, K, X] or `ProjectedRows`, in their pages; padding is dropped.

    Args:
        new_rows: The rows.
        pages_ref: A `jax.new_ref`.
        page_table: [B, n].
        positions: [B, T].
        layer: An int32 scalar.
        interpret: Run in interpret mode.
    """
    num_heads, page_len, width = pages_ref.shape[3:]
    num_tokens, dtype = positions.size, pages_ref.dtype
    each = 16 // dtype.itemsize
    if width % each:
        raise ValueError(f"sm90 needs rows of a multiple of {each} numbers, not {width}")
    query_len = num_tokens // page_table.shape[0]

    def body(rows_gmem, table_gmem, positions_gmem, layer_gmem, pages_gmem, _):
        token, head = lax.axis_index("token"), lax.axis_index("head")
        position = positions_gmem[token]

        @pl.when(position >= 0)
        def _copy():
            page = table_gmem[lax.div(token, query_len), lax.div(position, page_len)]
            offset = lax.rem(position, page_len)
            if interpret:
                pages_gmem[layer_gmem[0], page, 0, head, offset, :] = whole_row(
                    rows_gmem, token, head
                )
                return

            is_projected = isinstance(rows_gmem, ProjectedRows)
            source_gmem = rows_gmem.columns if is_projected else rows_gmem

            @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[ptx.SCALAR] * 5))
            def emit(ctx, source, target, *scalars):
                token, head, *place = (x.registers.item() for x in scalars)
                layer, page, offset = map(index, place)
                element = ir.MemRefType(source.type).element_type
                kind, zero = ir.VectorType.get((each,), element), index(ptx.i32(0))

                def store(value, column):
                    column = index(column)
                    vector.store(value, target, [layer, page, zero, index(head), offset, column])

                def copied(column):
                    """The numbers of a row from a column on, none of them b or a."""
                    if not is_projected:
                        return vector.load(kind, source, [*map(index, (token, head, column))])
                    found = source_column(rows_gmem, head, column)
                    return vector.load(kind, source, [index(token), index(found)])

                in_vectors = vector_columns(rows_gmem) if is_projected else width
                for first in range(0, in_vectors // each, rows.LANES):
                    at = arith.addi(ptx.thread(), ptx.i32(first))
                    with mgpu.utils.when(ptx.below(at, ptx.i32(in_vectors // each))):
                        column = arith.muli(at, ptx.i32(each))
                        store(copied(column), column)
                for column in range(in_vectors, width, each):
                    thread = ptx.i32((column - in_vectors) // each)
                    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, ptx.thread(), thread)):
                        numbers = _last_numbers(rows_gmem, source, token, head, column, each)
                        store(vector.from_elements(kind, numbers), ptx.i32(column))

            emit(source_gmem, pages_gmem, token, head, layer_gmem[0], page, offset)

    rows.run_kernel(
        body,
        (new_rows, page_table, positions.reshape(-1), layer.reshape(1), pages_ref),
        out=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid={"token": num_tokens, "head": num_heads},
        name="detjax_delta_rows",
        is_interpreted=interpret,
    )


def whole_row(rows_ref, token, head):
    """A row of a token and a head of keys, interpreted."""
    if not isinstance(rows_ref, ProjectedRows):
        return rows_ref[token, head]
    found = []
    for i in (0, 1, 2, 4, 5):
        width = rows_ref.part_widths[i] // rows_ref.num_heads
        start = rows_ref.part_starts[i] + head * width
        found.append(rows_ref.columns[token, pl.ds(start, width)])
    row = jnp.concatenate(found)
    return jnp.pad(row, (0, rows_ref.width - len(row)))


def vector_columns(projected: ProjectedRows) -> int:
    """Numbers of a row before b: whole vectors of a queries', a key's and values' channels."""
    return 2 * projected.key_dim + projected.group * projected.value_dim


def source_column(projected: ProjectedRows, head, column):
    """Where the product has what a row of a head has at a column, as int32 values of MLIR."""
    q, k, v = projected.part_starts[:3]
    dim, group_dim = projected.key_dim, projected.group * projected.value_dim
    found = arith.addi(arith.muli(head, ptx.i32(dim)), column)
    for bound, start, width in ((dim, k, dim), (2 * dim, v, group_dim)):
        own = arith.addi(arith.muli(head, ptx.i32(width)), ptx.i32(start - bound))
        is_before = ptx.below(column, ptx.i32(bound))
        found = arith.select(is_before, found, arith.addi(own, column))
    return arith.addi(found, ptx.i32(q))


def _last_numbers(projected: ProjectedRows, source, token, head, column: int, count: int) -> list:
    """b, a and zeros of a row from a column on."""
    group, element = projected.group, ir.MemRefType(source.type).element_type
    found = []
    for i in range(column - vector_columns(projected), column - vector_columns(projected) + count):
        if i >= 2 * group:
            found.append(mgpu.c(0.0, element))
            continue
        start = projected.part_starts[4 + i // group] + i % group
        own = arith.addi(arith.muli(head, ptx.i32(group)), ptx.i32(start))
        found.append(memref.load(source, [index(token), index(own)]))
    return found


def _count_place(pages, page, place: tuple, block) -> tuple:
    """Where it is written behind how many tokens of a block a head of values has its state.

    Behind the row of the block's first token, with which it is written over. A head of its own has
    it, as a step of decode reads and writes it by head.
    """
    layer, head, inner = place
    page_len, width = pages.shape[4:]
    return layer, page, 0, head, lax.rem(block * STATE_BLOCK, page_len), width - 1 - inner


def read_count(pages, page, place: tuple, block):
    """Behind how many tokens of a block, which is on a page, the state of a head of values is.

    `place` is the layer, the head of keys, and the head of values of its group.
    """
    return pages[_count_place(pages, page, place, block)]


def keep_count(pages, page, place: tuple, block, count) -> None:
    """Write what `read_count` reads."""
    pages[_count_place(pages, page, place, block)] = count.astype(pages.dtype)  # exact


class MixedRows(NamedTuple):
    """What the recurrence reads of each token, float32 but for the values.

    Tokens are counted from the last multiple of `GROUP` before the first of a sequence that is run;
    what lies before that one and behind the last one is not written.

    Attributes:
        q: [B, K, S, c], one place later: that of the token before. Of new tokens.
        k: [B, K, S, c].
        v: [B, K, G, S, C], in the compute dtype.
        gates: [B, K, G, 2, S]: how the state fades, and how much of the value is written.
        begin: [B, K] int32: position of the first token that is run.
    """

    q: Any
    k: Any
    v: Any
    gates: Any
    begin: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a CTA finds rows.

    Attributes:
        pages: [L, N, 1, K, P, X].
        table: [B, n].
        scalars: Sequence, layer and head, int32.
        is_interpreted: Whether the kernel is interpreted.
    """

    pages: Any
    table: Any
    scalars: tuple
    is_interpreted: bool

    def load(
        self, position, shift: int, last, column: Any, shape: tuple[int, int],
        math: rows.Arithmetic,
    ):  # fmt: skip
        """Rows `shift` before those from a position on: [rows, columns], zeros before position 0.

        Behind the last position it is repeated, and read by nobody.
        """
        seq, layer, head = self.scalars
        page_len, (count, width) = self.pages.shape[4], shape
        if self.is_interpreted:
            found = []
            for i in range(count):
                there = jnp.minimum(position + i, last) - shift
                at = jnp.maximum(there, 0)
                row = self.pages[
                    layer, self.table[seq, at // page_len], 0, head, at % page_len,
                    pl.ds(column, width),
                ]  # fmt: skip
                found.append(jnp.where(there >= 0, row, jnp.zeros_like(row)))
            return jnp.stack(found)

        lanes = width // VEC_LEN

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), *[ptx.SCALAR] * 6),
            return_type=plgpu.ShapeDtypeStruct(shape, self.pages.dtype, layout=math.layout),
        )
        def emit(ctx, pages, table, *scalars):
            seq, layer, head, position, last, column = (x.registers.item() for x in scalars)
            row = arith.divui(ptx.thread(), ptx.i32(lanes))
            inner = arith.muli(arith.remui(ptx.thread(), ptx.i32(lanes)), ptx.i32(VEC_LEN))
            position = arith.minsi(arith.addi(position, row), last)
            position = arith.subi(position, ptx.i32(shift))
            at = arith.maxsi(position, ptx.i32(0))
            page, offset = (op(at, ptx.i32(page_len)) for op in (arith.divui, arith.remui))
            page = memref.load(table, [index(seq), index(page)])
            place = (layer, page, ptx.i32(0), head, offset, arith.addi(column, inner))
            element = ir.MemRefType(pages.type).element_type
            kind = ir.VectorType.get((VEC_LEN,), element)
            value = vector.load(kind, pages, [index(x) for x in place])
            zero = vector.broadcast(kind, mgpu.c(0.0, element))
            is_there = arith.cmpi(arith.CmpIPredicate.sge, position, ptx.i32(0))
            return one_register(arith.select(is_there, value, zero), shape, math)

        return emit(self.pages, self.table, seq, layer, head, position, last, column)

    def begin(self, first):
        """Where the sequence begins: `begin_of`, which all heads of values of a head agree on."""
        seq, layer, head = self.scalars
        block = lax.div(jnp.maximum(first, 0), STATE_BLOCK)
        page = self.table[seq, lax.div(block * STATE_BLOCK, self.pages.shape[4])]
        return begin_of(first, read_count(self.pages, page, (layer, head, 0), block))

    def load_gates(self, position, last, column: int, group: int, math: rows.Arithmetic):
        """One number of each token and head of values, a thread each: float32 [LANES]."""
        seq, layer, head = self.scalars
        page_len = self.pages.shape[4]
        if self.is_interpreted:
            found = []
            for i in range(GROUP * group):
                at = jnp.minimum(position + i // group, last)
                page, offset = self.table[seq, at // page_len], at % page_len
                found.append(self.pages[layer, page, 0, head, offset, column + i % group])
            found += [jnp.zeros_like(found[0])] * (rows.LANES - len(found))
            return jnp.stack(found).astype(jnp.float32)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), *[ptx.SCALAR] * 5),
            return_type=plgpu.ShapeDtypeStruct((rows.LANES,), jnp.float32, layout=math.layout),
        )
        def emit(ctx, pages, table, *scalars):
            seq, layer, head, position, last = (x.registers.item() for x in scalars)
            token, inner = (op(ptx.thread(), ptx.i32(group)) for op in (arith.divui, arith.remui))
            at = arith.minsi(arith.addi(position, token), last)
            page, offset = (op(at, ptx.i32(page_len)) for op in (arith.divui, arith.remui))
            page = memref.load(table, [index(seq), index(page)])
            place = (layer, page, ptx.i32(0), head, offset, arith.addi(inner, ptx.i32(column)))
            value = memref.load(pages, [index(x) for x in place])
            if value.type != ir.F32Type.get():
                value = arith.extf(ir.F32Type.get(), value)
            return rows.one_a_thread(value)

        return emit(self.pages, self.table, seq, layer, head, position, last)


def _tap(ref, first, tap: int, shape: tuple[int, int], math: rows.Arithmetic):
    """A number of the filters [channels, 1, W] of each channel from the first on, in every row."""
    if math.is_interpreted:
        return jnp.broadcast_to(ref[pl.ds(first, shape[1]), 0, tap], shape)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=math.layout),
    )
    def emit(ctx, numbers, first):
        inner = arith.muli(
            arith.remui(ptx.thread(), ptx.i32(shape[1] // VEC_LEN)), ptx.i32(VEC_LEN)
        )
        channel = arith.addi(first.registers.item(), inner)
        places = [index(arith.addi(channel, ptx.i32(i))) for i in range(VEC_LEN)]
        zero, which = index(ptx.i32(0)), index(ptx.i32(tap))
        found = [memref.load(numbers, [place, zero, which]) for place in places]
        kind = ir.VectorType.get((VEC_LEN,), ir.MemRefType(numbers.type).element_type)
        return one_register(vector.from_elements(kind, found), shape, math)

    return emit(ref, first)


def one_register(value, shape: tuple[int, int], math: rows.Arithmetic) -> mgpu.FragmentedArray:
    """An array of which a thread has one register."""
    layout = math.layout.to_mgpu()
    registers = np.array([value], dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _of_heads(ref, head, group: int, math: rows.Arithmetic):
    """A number of each head of values of a head of keys, as `_Place.load_gates` has them."""
    if math.is_interpreted:
        return jnp.tile(ref[head], rows.LANES // group + 1)[: rows.LANES]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.SCALAR),
        return_type=plgpu.ShapeDtypeStruct((rows.LANES,), jnp.float32, layout=math.layout),
    )
    def emit(ctx, numbers, head):
        inner = arith.remui(ptx.thread(), ptx.i32(group))
        place = [index(head.registers.item()), index(inner)]
        return rows.one_a_thread(memref.load(numbers, place))

    return emit(ref, head)


def _keep_gates(values, ref, which: int, place: tuple, group: int, math: rows.Arithmetic) -> None:
    """Write what `_Place.load_gates` became: [B, K, G, 2, S]."""
    seq, head, token = place
    if math.is_interpreted:
        by_token = values[: GROUP * group].reshape(GROUP, group)
        for g in range(group):
            ref[seq, head, g, which, pl.ds(token, GROUP)] = by_token[:, g]
        return

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(), *[ptx.SCALAR] * 3))
    def emit(ctx, values, memory, *scalars):
        seq, head, first = (x.registers.item() for x in scalars)
        token, inner = (op(ptx.thread(), ptx.i32(group)) for op in (arith.divui, arith.remui))
        with mgpu.utils.when(ptx.below(ptx.thread(), ptx.i32(GROUP * group))):
            place = (seq, head, inner, ptx.i32(which), arith.addi(first, token))
            (value,) = ptx.scalars_of(values)
            memref.store(value, memory, [index(x) for x in place])

    emit(values, ref, seq, head, token)


def gates_of(b, a, decay, step, math: rows.Arithmetic) -> tuple:
    """How a state fades, and how much of a value is written.

    # ORDER: `u = a + step`; `max(u, 0) + log1p(exp(-|u|))`; times exp(A), each rounded; exp of
    # minus that. `1 / (1 + exp(-b))` as SwiGLU's. exp and log1p are libdevice's.
    """
    written = over_decay(math.full(b.shape, 1.0), b, math)
    raw = math.add(a, step)
    size = jnp.maximum(raw, -raw)
    small = math.apply(lambda v: mlir_math.log1p(v), jnp.log1p, jnp.exp(-size))
    softplus = math.add(jnp.maximum(raw, math.full(b.shape, 0.0)), small)
    return jnp.exp(-math.mul(jnp.exp(decay), softplus)), written


def mixed(taps: list, inputs: list, dtype, math: rows.Arithmetic):
    """The convolution and its SiLU, rounded to `dtype`, float32.

    # ORDER: `f0 x0` rounded, then `fma(f, x, sum)`, the oldest token first.
    """
    y = math.mul(taps[0], inputs[0])
    for tap, x in zip(taps[1:], inputs[1:], strict=True):
        y = math.fma(tap, x, y)
    y = over_decay(y, y, math)
    if dtype == jnp.float32:
        return y
    if math.is_interpreted:  # XLA may drop a pair of converts
        return lax.reduce_precision(y, exponent_bits=8, mantissa_bits=7)
    return y.astype(dtype).astype(jnp.float32)  # ROUND: once


def inverse_lengths(y, tile: rows.Tile):
    """`rsqrt(sum(y * y) + eps)` of each row of a tile, in all its columns.

    # ORDER: squares rounded, a thread's four neighbours left to right, then lanes in pairs.
    """
    math = tile.per_row
    total = tile.sum_columns(tile.whole.mul(y, y))
    found = math.reciprocal_root(math.add(total, math.full(total.shape, NORM_EPS)))
    return tile.over_columns(found, y.shape)


def scratch_len(num_tokens: int) -> int:
    """Places for new tokens, those before them in a block, and one for the last query."""
    return pl.cdiv(num_tokens + STATE_BLOCK, GROUP) * GROUP


def mix_rows(
    filters, gates, pages_ref, page_table, plan, layer, *, num_tokens: int, dim: int,
    interpret: bool,
) -> MixedRows:  # fmt: skip
    """Convolve, normalise and gate the rows of the blocks of new tokens, which are in their pages.

    Args:
        filters: [K, W, 2 c + G C], or `Filters`.
        gates: A and step, [K, G].
        pages_ref: Of rows, a `jax.new_ref`.
        page_table: [B, n].
        plan: Of `plan_sequences`.
        layer: An int32 scalar.
        num_tokens: T.
        dim: c, and C.
        interpret: Run in interpret mode.
    """
    batch, (num_keys, group), dtype = len(plan), gates[0].shape, pages_ref.dtype
    is_weights = isinstance(filters, Filters)
    width, length = filters.q.shape[2] if is_weights else filters.shape[1], scratch_len(num_tokens)
    ctas = pl.cdiv(num_tokens, GROUP)  # of a sequence, a head and a unit; each takes groups in turn
    lanes = dim // VEC_LEN
    tile_rows = rows.LANES // lanes
    tile = rows.tile_of_rows(tile_rows, lanes=lanes, vec_len=VEC_LEN, is_interpreted=interpret)
    line = rows.strided(rows.LANES, 1, interpret)
    shape = tile_rows, dim
    scale = float(np.float32(dim**-0.5))

    def body(
        filters_gmem, gates_gmem, pages_gmem, table_gmem, plan_gmem, layer_gmem, *mixed_gmem
    ):  # fmt: skip
        q_gmem, k_gmem, v_gmem, gates_out, begin_gmem = mixed_gmem
        seq, head = lax.axis_index("seq"), lax.axis_index("head")
        unit, own = lax.axis_index("unit"), lax.axis_index("group")
        first, last = plan_gmem[seq, FIRST], plan_gmem[seq, LAST]
        place = _Place(
            pages=pages_gmem, table=table_gmem, scalars=(seq, layer_gmem[0], head),
            is_interpreted=interpret,
        )  # fmt: skip
        begin = place.begin(first)
        base = lax.div(begin, GROUP) * GROUP
        num_groups = jnp.where(last >= 0, lax.div(last - base, GROUP) + 1, 0)

        @pl.when((own == 0) & (unit == 0))
        def _begin():
            begin_gmem[seq, head] = begin

        def one_group(token):
            def channels(turn, kind: str):
                """Some tokens' channels of this unit, behind the convolution."""
                inputs = []
                for i in range(width):
                    at = base + token + turn * tile_rows
                    x = place.load(at, width - 1 - i, last, unit * dim, shape, tile.whole)
                    inputs.append(x.astype(jnp.float32))
                return mixed(taps(kind), inputs, dtype, tile.whole)

            def taps(kind: str):
                if is_weights:
                    own = head if kind != "v" else head * group + unit - 2
                    of_kind = getattr(filters_gmem, kind)
                    found = [_tap(of_kind, own * dim, i, shape, tile.whole) for i in range(width)]
                    return [f.astype(jnp.float32) for f in found]
                columns = pl.ds(unit * dim, dim)
                found = [tile.per_col.load(filters_gmem.at[head, i, columns]) for i in range(width)]
                return [tile.over_rows(f.astype(jnp.float32), shape) for f in found]

            def each_turn(put, kind: str, first_read=begin):
                for turn in range(GROUP // tile_rows):
                    at = token + turn * tile_rows

                    @pl.when((base + at <= last) & (base + at + tile_rows > first_read))
                    def _turn(turn=turn, at=at):
                        put(channels(turn, kind), at)

            @pl.when((unit == 0) & (base + token + GROUP > first))
            def _queries():
                def put(y, at):
                    y = tile.whole.mul(y, inverse_lengths(y, tile))
                    y = tile.whole.mul(y, tile.whole.full(shape, scale))
                    q_gmem[seq, head, pl.ds(at + 1, tile_rows), :] = y

                each_turn(put, "q", first)

            @pl.when(unit == 1)
            def _keys():
                def put(y, at):
                    k_gmem[seq, head, pl.ds(at, tile_rows), :] = tile.whole.mul(
                        y, inverse_lengths(y, tile)
                    )

                each_turn(put, "k")

            @pl.when((unit >= 2) & (unit < 2 + group))
            def _values():
                def put(y, at):
                    v_gmem[seq, head, unit - 2, pl.ds(at, tile_rows), :] = y.astype(dtype)  # exact

                each_turn(put, "v")

            @pl.when(unit == 2 + group)
            def _gates():
                columns = (2 + group) * dim
                b, a = (
                    place.load_gates(base + token, last, columns + i * group, group, line)
                    for i in range(2)
                )
                decay, step = (_of_heads(ref, head, group, line) for ref in gates_gmem)
                for which, values in enumerate(gates_of(b, a, decay, step, line)):
                    _keep_gates(values, gates_out, which, (seq, head, token), group, line)

        @pl.loop(0, lax.div(num_groups - own + (ctas - 1), jnp.int32(ctas)))
        def _groups(turn):
            one_group((own + turn * ctas) * GROUP)

    if GROUP * group > rows.LANES:
        raise ValueError(f"sm90 has at most {rows.LANES // GROUP} heads of values a head of keys")
    of_heads = batch, num_keys
    shapes = MixedRows(
        q=jax.ShapeDtypeStruct((*of_heads, length, dim), jnp.float32),
        k=jax.ShapeDtypeStruct((*of_heads, length, dim), jnp.float32),
        v=jax.ShapeDtypeStruct((*of_heads, group, length, dim), dtype),
        gates=jax.ShapeDtypeStruct((*of_heads, group, 2, length), jnp.float32),
        begin=jax.ShapeDtypeStruct(of_heads, jnp.int32),
    )
    return MixedRows(
        *rows.run_kernel(
            body,
            (filters, gates, pages_ref, page_table, plan, layer.reshape(1)),
            out=list(shapes),
            grid={"seq": batch, "group": ctas, "head": num_keys, "unit": 3 + group},
            name="detjax_delta_mix",
            is_interpreted=interpret,
        )
    )
