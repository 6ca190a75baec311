# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper for one new token a sequence, in one launch.

Such a step moves states and does little else. So a CTA has a head of values: it asks for the
head's state, mixes the token meanwhile, and TMA brings the state to shared memory, a slice of
channels at a time, and takes it back. The bits are those of `sm90_rows.mix_rows`,
`sm90_recurrence` and `sm90_gated_norm`.
"""

import functools
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
from detjax.pallas_kernels.delta_rule.operands import Filters, OutputNorm, ProjectedRows
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.delta_rule.sm90_gated_norm import gated
from detjax.pallas_kernels.delta_rule.sm90_one_token import (
    KEY,
    QUERY,
    VALUE,
    OneToken,
    turned,
)
from detjax.pallas_kernels.delta_rule.sm90_plan import BEFORE, COUNT, LAST, NEXT, PAGE, begin_of
from detjax.pallas_kernels.delta_rule.sm90_recurrence import (
    LANES,
    SLICE,
    dot,
    in_registers,
    keep_result,
    update,
)
from detjax.pallas_kernels.delta_rule.sm90_rows import VEC_LEN, index, keep_count, read_count
from detjax.pallas_kernels.hopper_sums import row_sum
from detjax.pallas_kernels.sm90_hardware import NUM_SMS
from detjax.pallas_kernels.sm90_prefetch import ask_for

PREFETCHED = 6 << 20
"""Bytes that a launch asks into the L2 cache of each matrix behind it, if its CTAs are one wave.

Decode of one sequence, Qwen3.5-35B-A3B, two matrices: 2.309 ms a step, 2.328 without.
"""

SWIZZLED_ROWS = 8
"""Rows of a slice after which the swizzle of 128 bytes repeats."""

TRANSFORMS = (plgpu.TilingTransform((SWIZZLED_ROWS, SLICE)), plgpu.SwizzleTransform(4 * SLICE))


class _Memory(NamedTuple):
    """Shared memory of a CTA.

    Attributes:
        states: [slices, c, SLICE] float32, of the head.
        token: [rows, c] float32: `one_token.OneToken.mix`.
        results: [1, C] float32, what the token reads.
        arrived: A barrier a slice.
    """

    states: Any
    token: Any
    results: Any
    arrived: Any


def _memory(dim: int) -> _Memory:
    num_slices = dim // SLICE
    return _Memory(
        states=plgpu.SMEM((num_slices, dim, SLICE), jnp.float32, transforms=TRANSFORMS),
        token=plgpu.SMEM((rows.LANES * VEC_LEN // dim, dim), jnp.float32),
        results=plgpu.SMEM((1, dim), jnp.float32),
        arrived=plgpu.Barrier(num_barriers=num_slices),
    )


def _places(count: int) -> list:
    """Where a thread's numbers of a slice lie, as Mosaic tiles and swizzles it.

    In the order of `turned`, in which a warp's threads read from all banks at once.
    """
    i32, as_index = ptx.i32, index
    column = arith.divui(ptx.thread(), i32(LANES))
    lane = arith.remui(ptx.thread(), i32(LANES))
    # Channel of key `16 i + 4 lane + e`: row `4 (lane % 2) + e` of block `2 i + lane / 2`.
    in_block = SWIZZLED_ROWS // VEC_LEN
    block = as_index(arith.divui(lane, i32(in_block)))
    first = arith.muli(arith.remui(lane, i32(in_block)), i32(VEC_LEN))
    turn = turned(lane)
    of_step = []
    for e in range(VEC_LEN):
        row = arith.addi(first, arith.xori(i32(e), turn))
        # The swizzle: in row r the 16 bytes of place p are those of place p ^ r.
        swizzled = arith.xori(column, arith.muli(row, i32(VEC_LEN)))
        of_step.append((as_index(i32(0)), as_index(row), as_index(swizzled)))
    # Only a constant tells steps apart, so that they share their addresses.
    kind = ir.IndexType.get()
    steps = [mgpu.c(i * LANES // in_block, kind) for i in range(count // VEC_LEN)]
    return [(arith.addi(block, step), *place) for step in steps for place in of_step]


def _load_slice(ref, is_there, tile: rows.Tile):
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


def _store_slice(ref, state, tile: rows.Tile) -> None:
    """Put back what `_load_slice` reads."""
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


def step_states(
    projected: ProjectedRows, filters: Filters, gates: tuple, norm: OutputNorm, pages_ref,
    states_ref, plan, layer, *, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Put one new token a sequence in its page, run and keep its state, and read and normalise it.

    Args:
        projected: Of the tokens.
        filters: Of the convolution.
        gates: A and step, [K, G].
        norm: Of the results.
        pages_ref: Of rows, a `jax.new_ref`.
        states_ref: [L, N, Z, H, c, C], a `jax.new_ref`.
        plan: Of `plan_sequences`.
        layer: An int32 scalar.
        interpret: Run in interpret mode.

    Returns:
        [B, H C]: `api.gated_rms_norm` of what the tokens read; zeros of padding.
    """
    batch, num_states, dim = len(plan), states_ref.shape[2], projected.key_dim
    num_heads, dtype = projected.num_heads * projected.group, pages_ref.dtype
    num_ctas, num_slices, page_len = batch * num_heads, dim // SLICE, pages_ref.shape[4]
    make = functools.partial(rows.tile_of_rows, is_interpreted=interpret)
    tile = make(SLICE, lanes=LANES, vec_len=VEC_LEN)
    token_tile = make(rows.LANES * VEC_LEN // dim, lanes=dim // VEC_LEN, vec_len=VEC_LEN)
    line, shape = tile.per_row, (SLICE, dim)
    asked = norm.prefetch if num_ctas <= NUM_SMS and not interpret else ()
    form = row_sum(dim)
    norm_tile = make(1, lanes=form.lanes, vec_len=form.vec_len)

    def body(of_token, of_norm, pages_gmem, states_gmem, plan_gmem, layer_gmem, out_gmem, memory):
        gain_gmem, next_gmem = of_norm
        projected_gmem, filters_gmem, gates_gmem = of_token
        value_head, layer = lax.axis_index("head"), layer_gmem[0]
        head, inner = lax.div(value_head, projected.group), lax.rem(value_head, projected.group)

        def states_of(page, block, channels):
            return states_gmem.at[layer, page, lax.rem(block, num_states), value_head, :, channels]

        def one_sequence(_, seq):
            position = plan_gmem[seq, LAST]

            @pl.when(position >= 0)
            def _token():
                run_token(seq, position)

            @pl.when(position < 0)
            def _padding():
                for columns in norm_columns(value_head * dim):
                    zeros = norm_tile.whole.full((1, columns.size), 0.0, dtype)
                    out_gmem[pl.ds(seq, 1), columns] = zeros

            return plan_gmem[seq, NEXT]

        def run_token(seq, position):
            page, page_before = plan_gmem[seq, PAGE], plan_gmem[seq, BEFORE]
            of_last = page, page_before, lax.div(position, page_len) * page_len
            token = OneToken(
                projected=projected_gmem, filters=filters_gmem, gates=gates_gmem,
                pages=pages_gmem, of_last=of_last, place=(seq, layer, head, inner),
                tile=token_tile, line=line, line_shape=(SLICE,),
            )  # fmt: skip
            block = lax.div(position, STATE_BLOCK)
            start = block * STATE_BLOCK
            before = jnp.maximum(block - 1, 0)
            of_before = jnp.where(lax.rem(block, num_states) == 0, page_before, page), before
            of_count = layer, head, inner

            def slice_of(i):
                """Its place in shared memory, and its channels."""
                return memory.states.at[i], memory.arrived.at[i], pl.ds(i * SLICE, SLICE)

            def ask(i, page, block):
                held, arrived, channels = slice_of(i)
                plgpu.copy_gmem_to_smem(states_of(page, block, channels), held, arrived)

            # WHY: before it is known whether the block's state is that of the token before. It
            # nearly always is, and nobody waits for the number that says so.
            both = zip((page, block), of_before, strict=True)
            expected = [jnp.where(position > start, here, there) for here, there in both]
            pl.loop(0, num_slices)(lambda i: ask(i, *expected))

            # WHY: all loads first; what is computed between two of them would wait for the first.
            count = read_count(pages_gmem, page, of_count, block)
            numbers = token.load(position, is_new=True)
            begin = begin_of(position, count)
            for w_gmem in next_gmem:
                ask_for(w_gmem, seq * num_heads + value_head, num_ctas, num_bytes=PREFETCHED)

            @pl.when(begin < position)
            def _from_the_start():
                @pl.loop(0, num_slices)
                def _slice(i):
                    plgpu.barrier_wait(slice_of(i)[1])
                    ask(i, *of_before)

            @pl.loop(begin, position + 1)
            def _token(at):
                """The new token, behind those of a block that begins anew."""
                is_new = at == position
                earlier = functools.partial(token.load, at, is_new=False)
                found = lax.cond(is_new, lambda: numbers, earlier)
                memory.token[...] = token.mix(found)
                gates = token.gates_of(found)
                plgpu.commit_smem()

                @pl.loop(0, num_slices)
                def _slice(i):
                    held, arrived, channels = slice_of(i)

                    @pl.when(at == begin)
                    def _arrived():
                        plgpu.barrier_wait(arrived)

                    k, v = memory.token.at[KEY], memory.token.at[VALUE, channels]
                    state = update(tile, _load_slice(held, at > 0, tile), k, v, *gates)
                    _store_slice(held, state, tile)

                    @pl.when(is_new)
                    def _read():
                        q = tile.over_rows(tile.per_col.load(memory.token.at[QUERY]), shape)
                        place = 0, channels.start
                        keep_result(dot(state, q, tile), memory.results, place, line)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(held, states_of(page, block, channels))

                plgpu.commit_smem()

            token.keep(numbers, position)
            keep_count(pages_gmem, page, of_count, block, position + 1 - start)
            normalise(seq)
            # The next sequence of this CTA may begin with these states, and with this row.
            plgpu.commit_smem()
            plgpu.wait_smem_to_gmem(0)

        def norm_columns(first):
            part = dim // form.num_parts
            return [pl.ds(first + p * part, part) for p in range(form.num_parts)]

        def normalise(seq):
            whole, here = norm_tile.whole, pl.ds(seq, 1)
            of_gates = norm_columns(projected.part_starts[3] + value_head * dim)
            z = [whole.load(projected_gmem.columns.at[here, c]) for c in of_gates]
            gains = [norm_tile.per_col.load(gain_gmem.at[c]) for c in norm_columns(0)]
            parts = [whole.load(memory.results.at[:, c]) for c in norm_columns(0)]
            normed = gated(parts, z, gains, norm_tile, width=dim, eps=norm.eps)
            for c, value in zip(norm_columns(value_head * dim), normed, strict=True):
                out_gmem[here, c] = value.astype(dtype)  # ROUND: once

        seq = lax.axis_index("seq")
        lax.fori_loop(0, plan_gmem[seq, COUNT], one_sequence, seq)

    return rows.run_kernel(
        body,
        (
            (projected, filters, gates), (norm.gain, asked), pages_ref, states_ref,
            plan, layer.reshape(1),
        ),
        out=jax.ShapeDtypeStruct((batch, num_heads * dim), dtype),
        grid={"seq": batch, "head": num_heads},
        name="detjax_delta_step",
        is_interpreted=interpret,
        scratch_types=[_memory(dim)],
    )  # fmt: skip
