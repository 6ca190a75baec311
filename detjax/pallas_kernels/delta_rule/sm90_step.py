# SPDX-License-Identifier: Apache-2.0
"""The recurrence of gated DeltaNet on Hopper for one new token a sequence.

Such a step moves states and does little else. So TMA brings the states of a head to shared memory,
a slice of channels at a time, and takes them back. The bits are those of `sm90_recurrence`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.delta_rule.sm90_plan import COUNT, LAST, NEXT
from detjax.pallas_kernels.delta_rule.sm90_recurrence import (
    LANES,
    SLICE,
    dot,
    in_registers,
    keep_count,
    keep_result,
    update,
)
from detjax.pallas_kernels.delta_rule.sm90_rows import GROUP, VEC_LEN, MixedRows
from detjax.pallas_kernels.sm90_hardware import NUM_SMS

SWIZZLED_ROWS = 8
"""Rows of a slice after which the swizzle of 128 bytes repeats."""

TRANSFORMS = (plgpu.TilingTransform((SWIZZLED_ROWS, SLICE)), plgpu.SwizzleTransform(4 * SLICE))

COPIED = 2
"""Rows of values that TMA brings: of one token and the place behind it, 128 bytes at least."""


class _Memory(NamedTuple):
    """Shared memory of a CTA.

    Attributes:
        states: [n, c, SLICE] float32, slices of a head's state.
        q: [c] float32, of the new token.
        k: [c] float32.
        v: [COPIED, C].
        arrived: A barrier a slice.
        row_arrived: A barrier, of the token's row.
    """

    states: Any
    q: Any
    k: Any
    v: Any
    arrived: Any
    row_arrived: Any


def _memory(count: int, dim: int, dtype: jnp.dtype) -> _Memory:
    return _Memory(
        states=plgpu.SMEM((count, dim, SLICE), jnp.float32, transforms=TRANSFORMS),
        q=plgpu.SMEM((dim,), jnp.float32),
        k=plgpu.SMEM((dim,), jnp.float32),
        v=plgpu.SMEM((COPIED, dim), dtype),
        arrived=plgpu.Barrier(num_barriers=count),
        row_arrived=plgpu.Barrier(num_arrivals=3),
    )


def _places(count: int) -> list:
    """Where a thread's numbers of a slice lie, as Mosaic tiles and swizzles it."""
    i32, index = ptx.i32, ir.IndexType.get()

    def as_index(x):
        return arith.index_cast(index, x)

    column = arith.divui(ptx.thread(), i32(LANES))
    lane = arith.remui(ptx.thread(), i32(LANES))
    # Channel of key `16 i + 4 lane + e`: row `4 (lane % 2) + e` of block `2 i + lane / 2`.
    in_block = SWIZZLED_ROWS // VEC_LEN
    block = as_index(arith.divui(lane, i32(in_block)))
    first = arith.muli(arith.remui(lane, i32(in_block)), i32(VEC_LEN))
    of_step = []
    for e in range(VEC_LEN):
        row = arith.addi(first, i32(e))
        # The swizzle: in row r the 16 bytes of place p are those of place p ^ r.
        swizzled = arith.xori(column, arith.muli(row, i32(VEC_LEN)))
        of_step.append((as_index(i32(0)), as_index(row), as_index(swizzled)))
    # Only a constant tells steps apart, so that they share their addresses.
    steps = [mgpu.c(i * LANES // in_block, index) for i in range(count // VEC_LEN)]
    return [(arith.addi(block, step), *place) for step in steps for place in of_step]


def _load(ref, is_there, tile: rows.Tile):
    """A slice [c, SLICE] in shared memory, turned: [SLICE, c]; zeros if it is not there."""
    math, shape = tile.whole, (SLICE, ref.shape[0])
    if math.is_interpreted:
        return jnp.where(is_there, ref[...].T, jnp.zeros(shape, jnp.float32))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(TRANSFORMS), ptx.SCALAR),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=math.layout),
    )
    def emit(ctx, memory, is_there):
        f32, is_there = ir.F32Type.get(), is_there.registers.item()
        values = [
            arith.select(is_there, memref.load(memory, at), mgpu.c(0.0, f32))
            for at in _places(shape[0] * shape[1] // rows.LANES)
        ]
        return in_registers(values, shape, math)

    return emit(ref, is_there)


def _store(ref, state, tile: rows.Tile) -> None:
    """Put back what `_load` reads."""
    math = tile.whole
    if math.is_interpreted:
        ref[...] = state.T
        return

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(TRANSFORMS)))
    def emit(ctx, state, memory):
        values = ptx.scalars_of(state)
        for value, at in zip(values, _places(len(values)), strict=True):
            memref.store(value, memory, at)

    emit(state, ref)


def slices_together(num_states: int, dim: int) -> int:
    """Slices of a CTA: a whole head where that leaves each SM two; changes no bit."""
    return dim // SLICE if num_states >= 2 * NUM_SMS else 1


def step_states(
    rows_of: MixedRows, pages_ref, states_ref, page_table, plan, layer, *, interpret: bool
) -> jax.Array:  # fmt: skip
    """See `sm90_recurrence.read_states`, of one new token a sequence: float32 [B, H, C]."""
    batch, num_keys, _, dim = rows_of.k.shape
    group, num_states = rows_of.v.shape[2], states_ref.shape[2]
    together = slices_together(batch * num_keys * group, dim)
    tile = rows.tile_of_rows(SLICE, lanes=LANES, vec_len=VEC_LEN, is_interpreted=interpret)
    line, shape = tile.per_row, (SLICE, dim)

    def body(
        mixed_gmem, pages_gmem, states_gmem, table_gmem, plan_gmem, layer_gmem, out_gmem, memory
    ):  # fmt: skip
        q_gmem, k_gmem, v_gmem, gates_gmem, begin_gmem = mixed_gmem
        seq, value_head = lax.axis_index("seq"), lax.axis_index("head")
        head, inner = lax.div(value_head, group), lax.rem(value_head, group)
        part, layer = lax.axis_index("part"), layer_gmem[0]

        def states_of(seq, block, channels):
            page = table_gmem[seq, lax.div(block, num_states)]
            return states_gmem.at[layer, page, lax.rem(block, num_states), value_head, :, channels]

        def one_sequence(_, seq):
            position = plan_gmem[seq, LAST]

            @pl.when(position >= 0)
            def _token():
                run_token(seq, position, begin_gmem[seq, head])

            @pl.when(position < 0)
            def _padding():
                for i in range(together):
                    place = seq, value_head, (part * together + i) * SLICE
                    keep_result(line.full((SLICE,), 0.0), out_gmem, place, line)

            return plan_gmem[seq, NEXT]

        def run_token(seq, position, begin):
            base = lax.div(begin, GROUP) * GROUP  # `MixedRows`
            at = position - base
            before = lax.div(jnp.maximum(begin - 1, 0), STATE_BLOCK)
            block = lax.div(position, STATE_BLOCK)

            def channels_of(i):
                return pl.ds((part * together + i) * SLICE, SLICE)

            for source, target in (
                (q_gmem.at[seq, head, at + 1], memory.q),
                (k_gmem.at[seq, head, at], memory.k),
                (v_gmem.at[seq, head, inner, pl.ds(at, COPIED)], memory.v),
            ):
                plgpu.copy_gmem_to_smem(source, target, memory.row_arrived)
            for i in range(together):
                plgpu.copy_gmem_to_smem(
                    states_of(seq, before, channels_of(i)), memory.states.at[i],
                    memory.arrived.at[i],
                )  # fmt: skip

            def gates_of(at):
                return [gates_gmem[seq, head, inner, which, at] for which in range(2)]

            gates = gates_of(at)
            plgpu.barrier_wait(memory.row_arrived)

            @pl.loop(0, together)
            def _slice(i):
                channels, held = channels_of(i), memory.states.at[i]

                def one_before(at, state):
                    v = v_gmem.at[seq, head, inner, at, channels]
                    return update(tile, state, k_gmem.at[seq, head, at], v, *gates_of(at))

                plgpu.barrier_wait(memory.arrived.at[i])
                state = _load(held, begin > 0, tile)
                # Of a block that begins anew, all its tokens.
                state = lax.fori_loop(begin - base, at, one_before, state)
                state = update(tile, state, memory.k, memory.v.at[0, channels], *gates)
                q = tile.over_rows(tile.per_col.load(memory.q), shape)
                place = seq, value_head, channels.start
                keep_result(dot(state, q, tile), out_gmem, place, line)
                _store(held, state, tile)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(held, states_of(seq, block, channels))

            @pl.when((inner == 0) & (part == 0))
            def _count():
                count = position + 1 - block * STATE_BLOCK
                keep_count(pages_gmem, table_gmem, (seq, layer, head), block, count)

            # The next sequence of this CTA may begin with these states.
            plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, plan_gmem[seq, COUNT], one_sequence, seq)

    return rows.run_kernel(
        body,
        (rows_of, pages_ref, states_ref, page_table, plan, layer.reshape(1)),
        out=jax.ShapeDtypeStruct((batch, num_keys * group, dim), jnp.float32),
        grid={"seq": batch, "head": num_keys * group, "part": dim // SLICE // together},
        name="detjax_delta_rule",
        is_interpreted=interpret,
        scratch_types=[_memory(together, dim, rows_of.v.dtype)],
    )  # fmt: skip
