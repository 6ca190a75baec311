# SPDX-License-Identifier: Apache-2.0
"""The recurrence of gated DeltaNet on Hopper, one token after the other.

A CTA has `SLICE` channels of values of one head, of one sequence after the other that need each
other. Four threads share a channel of values and hold its state; what they do depends on no batch,
no chunk and no slice.
"""

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
from detjax.pallas_kernels.delta_rule.sm90_rows import VEC_LEN, MixedRows

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


def _dot(state, x, tile: rows.Tile):
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


def _state_place(i: int, first) -> tuple:
    """Channels of key and value of a thread's i-th number."""
    row = arith.addi(arith.divui(ptx.thread(), ptx.i32(LANES)), first)
    lane = arith.muli(arith.remui(ptx.thread(), ptx.i32(LANES)), ptx.i32(VEC_LEN))
    step, e = divmod(i, VEC_LEN)
    return arith.addi(lane, ptx.i32(step * LANES * VEC_LEN + e)), row


def _indices(scalars) -> list:
    return [arith.index_cast(ir.IndexType.get(), x) for x in scalars]


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
        kind = ir.VectorType.get((VEC_LEN,), f32)
        registers = [
            vector.from_elements(kind, values[i : i + VEC_LEN])
            for i in range(0, len(values), VEC_LEN)
        ]
        layout = math.layout.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(layout.registers_shape(shape)),
            _layout=layout, _is_signed=None,
        )  # fmt: skip

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


def read_states(
    rows_of: MixedRows, states_ref, page_table, plan, layer, *, num_tokens: int, page_len: int,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """Run the blocks of new tokens, keep the states behind them, and read the new tokens'.

    Args:
        rows_of: Of the tokens.
        states_ref: [L, N, Z, H, c, C], a `jax.new_ref`.
        page_table: [B, n].
        plan: Of `plan_sequences`.
        layer: An int32 scalar.
        num_tokens: T.
        page_len: Tokens of a page.
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
        q_gmem, k_gmem, v_gmem, gates_gmem, states_gmem, table_gmem, plan_gmem, layer_gmem,
        out_gmem, chunks,
    ):  # fmt: skip
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

        def scalar(slot, which, i, like):
            value = chunks.gates[slot, which, i]
            return jnp.full(like, value) if interpret else value

        def token(slot, i, state):
            k = tile.over_rows(tile.per_col.load(chunks.k.at[slot, i]), shape)
            v = line.load(chunks.v.at[slot, i]).astype(jnp.float32)
            state = math.mul(state, math.full(shape, chunks.gates[slot, 0, i]))
            found = _dot(state, k, tile)
            added = line.mul(line.sub(v, found), line.full((SLICE,), chunks.gates[slot, 1, i]))
            return math.fma(k, tile.over_columns(added, shape), state)

        def one_sequence(_, seq):
            first, last = plan_gmem[seq, FIRST], plan_gmem[seq, LAST]
            start = lax.div(jnp.maximum(first, 0), STATE_BLOCK) * STATE_BLOCK
            num_old, num_all = first - start, last + 1 - start
            num_all = jnp.where(last >= 0, num_all, 0)
            num_chunks = lax.div(num_all + (CHUNK - 1), CHUNK)
            first_block = lax.div(start, STATE_BLOCK)
            for ahead in range(STAGES - 1):

                @pl.when(ahead < num_chunks)
                def _start(ahead=ahead):
                    copy(seq, jnp.int32(ahead))

            state = _load_state(
                states_gmem, place_of(seq, jnp.maximum(first_block - 1, 0)), start > 0, shape,
                math,
            )  # fmt: skip

            def one_chunk(chunk, state):
                slot = lax.rem(chunk, STAGES)
                plgpu.barrier_wait(chunks.arrived.at[slot])
                # All have read the chunk before this, whose place the next one takes.
                plgpu.commit_smem()

                @pl.when(chunk + (STAGES - 1) < num_chunks)
                def _next():
                    copy(seq, chunk + (STAGES - 1))

                def one_token(i, state):
                    state = token(slot, i, state)
                    at = chunk * CHUNK + i

                    @pl.when(at >= num_old)
                    def _read():
                        q = tile.over_rows(tile.per_col.load(chunks.q.at[slot, i]), shape)
                        out_gmem[seq * num_tokens + (at - num_old), value_head, channels] = _dot(
                            state, q, tile
                        )

                    return state

                num_here = jnp.minimum(num_all - chunk * CHUNK, CHUNK)
                state = lax.fori_loop(0, num_here, one_token, state)
                done = (chunk + 1) * CHUNK

                @pl.when((lax.rem(done, STATE_BLOCK) == 0) & (done <= num_all))
                def _keep():
                    block = first_block + (lax.div(done, STATE_BLOCK) - 1)
                    _keep_state(state, states_gmem, place_of(seq, block), math)

                return state

            lax.fori_loop(0, num_chunks, one_chunk, state)
            num_new = jnp.where(last >= 0, last + 1 - first, 0)

            @pl.loop(num_new, num_tokens)
            def _padding(i):
                nothing = line.full((SLICE,), 0.0)
                out_gmem[seq * num_tokens + i, value_head, channels] = nothing

            # Nobody's copies begin while others read the last chunks.
            plgpu.commit_smem()
            return plan_gmem[seq, NEXT]

        lax.fori_loop(0, plan_gmem[seq, COUNT], one_sequence, seq)

    return rows.run_kernel(
        body,
        (
            rows_of.q, rows_of.k, rows_of.v, rows_of.gates, states_ref, page_table, plan,
            layer.reshape(1),
        ),
        out=jax.ShapeDtypeStruct((batch * num_tokens, num_keys * group, dim), jnp.float32),
        grid={"seq": batch, "head": num_keys * group, "slice": dim // SLICE},
        name="detjax_delta_rule",
        is_interpreted=interpret,
        scratch_types=[
            _Chunks(
                q=plgpu.SMEM((STAGES, CHUNK, dim), jnp.float32),
                k=plgpu.SMEM((STAGES, CHUNK, dim), jnp.float32),
                v=plgpu.SMEM((STAGES, CHUNK, SLICE), dtype),
                gates=plgpu.SMEM((STAGES, 2, CHUNK), jnp.float32),
                arrived=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
            )
        ],
    )  # fmt: skip
