# SPDX-License-Identifier: Apache-2.0
"""The recurrence of gated DeltaNet on Hopper, one token after the other.

A CTA has `SLICE` channels of values of one head, of one sequence after the other that need each
other. Four threads share a channel of values and hold its state; what they do depends on no batch,
no chunk and no slice.
"""

import functools
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

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.delta_rule.sm90_plan import COUNT, FIRST, LAST, NEXT
from detjax.pallas_kernels.delta_rule.sm90_rows import VEC_LEN, MixedRows, keep_count

SLICE = 32
"""Channels of values of a CTA."""

LANES = 4
"""Threads of a channel of values."""

CHUNK = 16
"""Tokens that are copied to shared memory at once."""

STAGES = 2
"""Chunks on their way or in use."""


class _Chunks(NamedTuple):
    """Shared memory of the chunks on their way, `STAGES` of each.

    Attributes:
        q: [CHUNK, c] float32.
        k: [CHUNK, c] float32.
        v: [CHUNK, SLICE].
        gates: [2, CHUNK] float32.
        arrived: Barriers.
    """

    q: Any
    k: Any
    v: Any
    gates: Any
    arrived: Any


def _chunks(dim: int, dtype: jnp.dtype) -> _Chunks:
    """Shared memory for heads of `dim` channels."""
    return _Chunks(
        q=plgpu.SMEM((STAGES, CHUNK, dim), jnp.float32),
        k=plgpu.SMEM((STAGES, CHUNK, dim), jnp.float32),
        v=plgpu.SMEM((STAGES, CHUNK, SLICE), dtype),
        gates=plgpu.SMEM((STAGES, 2, CHUNK), jnp.float32),
        arrived=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
    )


def dot(state, x, tile: rows.Tile):
    """Sums over the channels of a key, one a channel of values: [SLICE].

    # ORDER: channel `c = 16 i + 4 p + e`. Of each (p, e) `s x` rounded for i = 0, then
    # `fma(s, x, sum)`; e in pairs, then p in pairs.
    """
    math = tile.whole
    if math.is_interpreted:
        s, y = (a.reshape(a.shape[0], -1, LANES, VEC_LEN) for a in (state, x))
        total = s[:, 0] * y[:, 0]
        for i in range(1, s.shape[1]):
            total = s[:, i] * y[:, i] + total
        for _ in range(2):
            total = total[..., 0::2] + total[..., 1::2]
        total = total[..., 0]
        for _ in range(2):
            total = total[:, 0::2] + total[:, 1::2]
        return total[:, 0]

    @plgpu.inline_mgpu(
        arg_types=(math.layout, math.layout),
        return_type=plgpu.ShapeDtypeStruct(
            state.shape[:1], jnp.float32, layout=tile.per_row.layout
        ),
    )
    def emit(ctx, state, x):
        add = rows.instruction("add.rn.f32")
        mul, fma = rows.instruction("mul.rn.f32"), rows.instruction("fma.rn.f32")
        pairs = [ptx.scalars_of(a) for a in (state, x)]
        totals = [mul(s, y) for s, y in zip(*(p[:VEC_LEN] for p in pairs), strict=True)]
        for at in range(VEC_LEN, len(pairs[0])):
            e = at % VEC_LEN
            totals[e] = fma(pairs[0][at], pairs[1][at], totals[e])
        total = rows.pairwise(totals, add)
        for distance in (1, 2):
            total = add(total, mgpu.utils.shfl_bfly(total, distance))
        layout = tile.per_row.layout.to_mgpu()
        return mgpu.FragmentedArray.splat(total, (SLICE,), layout=layout)

    return emit(state, x)


def update(tile: rows.Tile, state, k, v, decay, written):
    """The state [SLICE, c] behind a token, of its key and value in memory, and of its gates.

    # ORDER: `r = decay * dot(S, k)`, `S decay` and `(v - r) * beta`, each rounded; then
    # `fma(k, added, S decay)`.
    """
    math, line, shape = tile.whole, tile.per_row, state.shape
    k = tile.over_rows(tile.per_col.load(k), shape)
    v = line.load(v).astype(jnp.float32)
    found = line.mul(dot(state, k, tile), decay)
    faded = math.mul(state, tile.over_columns(decay, shape))
    added = line.mul(line.sub(v, found), written)
    return math.fma(k, tile.over_columns(added, shape), faded)


def _state_place(i: int, first) -> tuple:
    """Channels of key and value of a thread's i-th number."""
    row = arith.addi(arith.divui(ptx.thread(), ptx.i32(LANES)), first)
    lane = arith.muli(arith.remui(ptx.thread(), ptx.i32(LANES)), ptx.i32(VEC_LEN))
    step, e = divmod(i, VEC_LEN)
    return arith.addi(lane, ptx.i32(step * LANES * VEC_LEN + e)), row


def _indices(scalars) -> list:
    return [arith.index_cast(ir.IndexType.get(), x) for x in scalars]


def in_registers(values: list, shape: tuple[int, int], math: rows.Arithmetic):
    """A state [SLICE, c] of a thread's numbers, in order of channels of the key."""
    kind = ir.VectorType.get((VEC_LEN,), values[0].type)
    registers = [
        vector.from_elements(kind, values[i : i + VEC_LEN]) for i in range(0, len(values), VEC_LEN)
    ]
    layout = math.layout.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(layout.registers_shape(shape)),
        _layout=layout, _is_signed=None,
    )  # fmt: skip


def _load_state(states, place: tuple, is_there, shape: tuple[int, int], math: rows.Arithmetic):
    """Channels of a state [c, C] in memory, turned: [SLICE, c]; zeros if it is not there."""
    layer, page, block, head, first = place
    if math.is_interpreted:
        found = states[layer, page, block, head, :, pl.ds(first, SLICE)].T
        return jnp.where(is_there, found, jnp.zeros_like(found))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[ptx.SCALAR] * 6),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=math.layout),
    )
    def emit(ctx, memory, is_there, *scalars):
        *place, first = (x.registers.item() for x in scalars)
        f32 = ir.F32Type.get()
        values = []
        for i in range(shape[0] * shape[1] // rows.LANES):
            value = memref.load(memory, _indices((*place, *_state_place(i, first))))
            values.append(arith.select(is_there.registers.item(), value, mgpu.c(0.0, f32)))
        return in_registers(values, shape, math)

    return emit(states, is_there, *(jnp.int32(x) for x in place))


def _keep_state(state, states, place: tuple, math: rows.Arithmetic) -> None:
    """Write what `_load_state` reads."""
    layer, page, block, head, first = place
    if math.is_interpreted:
        states[layer, page, block, head, :, pl.ds(first, SLICE)] = state.T
        return

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(), *[ptx.SCALAR] * 5))
    def emit(ctx, state, memory, *scalars):
        *place, first = (x.registers.item() for x in scalars)
        for i, value in enumerate(ptx.scalars_of(state)):
            memref.store(value, memory, _indices((*place, *_state_place(i, first))))

    emit(state, states, *(jnp.int32(x) for x in place))


def keep_result(values, ref, place: tuple, math: rows.Arithmetic) -> None:
    """Write numbers of `SLICE` channels behind `place`."""
    if math.is_interpreted:
        *place, first = place
        ref[(*place, pl.ds(first, SLICE))] = values
        return

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(), *[ptx.SCALAR] * len(place)))
    def emit(ctx, values, memory, *scalars):
        *place, first = (x.registers.item() for x in scalars)
        row = arith.divui(ptx.thread(), ptx.i32(LANES))
        # A channel's threads write the same number to the same place.
        memref.store(ptx.scalars_of(values)[0], memory, _indices((*place, arith.addi(first, row))))

    emit(values, ref, *(jnp.int32(x) for x in place))


def read_states(
    rows_of: MixedRows, pages_ref, states_ref, page_table, plan, layer, *, num_tokens: int,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """Run the blocks of new tokens, keep the states behind them, and read the new tokens'.

    Args:
        rows_of: Of the tokens.
        pages_ref: Of rows, a `jax.new_ref`, in which is kept how far the last state has come.
        states_ref: [L, N, Z, H, c, C], a `jax.new_ref`.
        page_table: [B, n].
        plan: Of `plan_sequences`.
        layer: An int32 scalar.
        num_tokens: T.
        interpret: Run in interpret mode.

    Returns:
        float32 [B T, H, C]; zeros of padding.
    """
    batch, num_keys, _, dim = rows_of.k.shape
    group, dtype = rows_of.v.shape[2], rows_of.v.dtype
    num_states = states_ref.shape[2]
    tile = rows.tile_of_rows(SLICE, lanes=LANES, vec_len=VEC_LEN, is_interpreted=interpret)
    math, line, shape = tile.whole, tile.per_row, (SLICE, dim)

    def body(
        mixed_gmem, pages_gmem, states_gmem, table_gmem, plan_gmem, layer_gmem, out_gmem, chunks,
    ):  # fmt: skip
        q_gmem, k_gmem, v_gmem, gates_gmem, begin_gmem = mixed_gmem
        seq, value_head = lax.axis_index("seq"), lax.axis_index("head")
        head, inner = lax.div(value_head, group), lax.rem(value_head, group)
        first_channel = lax.axis_index("slice") * SLICE
        channels = pl.ds(first_channel, SLICE)
        layer = layer_gmem[0]

        def place_of(seq, block):
            page = table_gmem[seq, lax.div(block, num_states)]
            return layer, page, lax.rem(block, num_states), value_head, first_channel

        def copy(seq, chunk):
            slot, at = lax.rem(chunk, STAGES), pl.ds(chunk * CHUNK, CHUNK)
            for source, target in (
                (q_gmem.at[seq, head, at], chunks.q),
                (k_gmem.at[seq, head, at], chunks.k),
                (v_gmem.at[seq, head, inner, at, channels], chunks.v),
                (gates_gmem.at[seq, head, inner, :, at], chunks.gates),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], chunks.arrived.at[slot])

        def run(slot, i, state):
            """The state behind a token."""
            gates = (line.full((SLICE,), chunks.gates[slot, which, i]) for which in range(2))
            return update(tile, state, chunks.k.at[slot, i], chunks.v.at[slot, i], *gates)

        def read(slot, i, state, token):
            """What the token before reads."""
            q = tile.over_rows(tile.per_col.load(chunks.q.at[slot, i]), shape)
            keep_result(dot(state, q, tile), out_gmem, (token, value_head, first_channel), line)

        def keep(seq, state, block, count):
            """Put the state behind `count` tokens of a block in its place."""
            _keep_state(state, states_gmem, place_of(seq, block), math)

            @pl.when(first_channel == 0)
            def _count():
                page = table_gmem[seq, lax.div(block, num_states)]
                keep_count(pages_gmem, page, (layer, head, inner), block, count)

        def one_sequence(_, seq):
            first, last = plan_gmem[seq, FIRST], plan_gmem[seq, LAST]

            @pl.when(last >= 0)
            def _tokens():
                run_tokens(seq, first, last, begin_gmem[seq, head])

            @pl.loop(jnp.where(last >= 0, last + 1 - first, 0), num_tokens)
            def _padding(i):
                place = seq * num_tokens + i, value_head, first_channel
                keep_result(line.full((SLICE,), 0.0), out_gmem, place, line)

            return plan_gmem[seq, NEXT]

        def run_tokens(seq, first, last, begin):
            base = lax.div(begin, CHUNK) * CHUNK
            stop = last + 1  # where the last query lies
            num_chunks = lax.div(stop - base, CHUNK) + 1
            for ahead in range(STAGES - 1):

                @pl.when(ahead < num_chunks)
                def _start(ahead=ahead):
                    copy(seq, jnp.int32(ahead))

            before = lax.div(jnp.maximum(begin - 1, 0), STATE_BLOCK)
            state = _load_state(states_gmem, place_of(seq, before), begin > 0, shape, math)

            def one_chunk(chunk, state):
                slot, start = lax.rem(chunk, STAGES), base + chunk * CHUNK
                plgpu.barrier_wait(chunks.arrived.at[slot])
                # All have read the chunk before this, whose place the next one takes.
                plgpu.commit_smem()

                @pl.when(chunk + (STAGES - 1) < num_chunks)
                def _next():
                    copy(seq, chunk + (STAGES - 1))

                def read_and_run(i, state):
                    # Nothing else has to wait for what the token before reads.
                    read(slot, i, state, seq * num_tokens + (start + i - 1 - first))
                    return run(slot, i, state)

                def inside(position):
                    return jnp.clip(position - start, 0, CHUNK)

                # Up to the first new token there is nothing to read.
                bounds = [inside(x) for x in (begin, jnp.minimum(first + 1, stop), stop)]
                state = lax.fori_loop(bounds[0], bounds[1], functools.partial(run, slot), state)
                state = lax.fori_loop(bounds[1], bounds[2], read_and_run, state)
                done = start + CHUNK

                @pl.when((lax.rem(done, STATE_BLOCK) == 0) & (done <= stop))
                def _keep():
                    keep(seq, state, lax.div(done, STATE_BLOCK) - 1, jnp.int32(STATE_BLOCK))

                return state

            state = lax.fori_loop(0, num_chunks, one_chunk, state)
            slot, i = lax.rem(num_chunks - 1, STAGES), lax.rem(stop, CHUNK)
            read(slot, i, state, seq * num_tokens + (last - first))

            @pl.when(lax.rem(stop, STATE_BLOCK) > 0)
            def _keep_last():
                keep(seq, state, lax.div(stop, STATE_BLOCK), lax.rem(stop, STATE_BLOCK))

            # Nobody's copies begin while others read the last chunks.
            plgpu.commit_smem()

        lax.fori_loop(0, plan_gmem[seq, COUNT], one_sequence, seq)

    return rows.run_kernel(
        body,
        (rows_of, pages_ref, states_ref, page_table, plan, layer.reshape(1)),
        out=jax.ShapeDtypeStruct((batch * num_tokens, num_keys * group, dim), jnp.float32),
        grid={"seq": batch, "head": num_keys * group, "slice": dim // SLICE},
        name="detjax_delta_rule",
        is_interpreted=interpret,
        scratch_types=[
            _chunks(dim, dtype),
        ],
    )  # fmt: skip
