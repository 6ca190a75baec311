# SPDX-License-Identifier: Apache-2.0
"""The end of a row-parallel layer on Hopper in one launch: exchange, add, and normalise.

Every rank writes its partial into slots of its peers' memory and waits for theirs in its own. A CTA
owns one row; how words travel, and why none is lost or read twice, says `sm90_slots`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.rms_norm import sm90 as norm
from detjax.parallel.sm90_slots import (
    address_of,
    i32,
    i64,
    join_words,
    receive,
    send,
    vector_of,
    words_to_send,
)


def _remote_slots(peers, distance: int):
    """Address of the slots of the rank whose index differs from this one's by `distance`, in XOR.

    `peers` is [tp - 1, 2]: the low and the high word of each.
    """
    index = ir.IndexType.get()
    return join_words(
        *(memref.load(peers, [mgpu.c(distance - 1, index), mgpu.c(i, index)]) for i in range(2))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slots:
    """Where the words of one thread, of one chunk of one row, are in slots [2, R, tp - 1, D].

    Attributes:
        max_rows: R.
        num_peers: tp - 1.
        width: D, of all parts of a row.
        vec_len: Words of a thread.
    """

    max_rows: int
    num_peers: int
    width: int
    vec_len: int

    @property
    def words(self) -> int:
        """Words of one load or store: 16 bytes at most."""
        return min(4, self.vec_len)

    def offsets(self, parity, row, chunk) -> list:
        """Bytes from the first slot to each run of `words`, a list for each peer.

        Runs of a warp stand side by side, so a store of a warp is one contiguous piece.
        """
        lane = arith.remui(mgpu.thread_idx(), i32(rows.LANES))
        first = arith.addi(arith.muli(parity, i32(self.max_rows)), row)
        first = arith.muli(first, i32(self.num_peers * self.width))
        first = arith.addi(first, arith.muli(chunk, i32(rows.LANES * self.vec_len)))
        first = arith.addi(first, arith.muli(lane, i32(self.words)))
        first = arith.muli(arith.extui(ir.IntegerType.get_signless(64), first), i64(4))
        return [
            [
                arith.addi(first, i64(4 * (peer * self.width + run * rows.LANES)))
                for run in range(0, self.vec_len, self.words)
            ]
            for peer in range(self.num_peers)
        ]


def _send(values, math: rows.Arithmetic, slots: _Slots, peers_gmem, parity, row, chunk) -> None:
    """Write a chunk of this rank's partial into the slots of every peer."""
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(math.layout, plgpu.RefType(), splat, splat, splat))
    def emit(ctx, values, peers, *place):
        (register,) = values.registers.flat
        words = words_to_send(register)
        offsets = slots.offsets(*(value.registers.item() for value in place))
        count = slots.words
        for distance, runs in enumerate(offsets, start=1):
            base = _remote_slots(peers, distance)
            for i, offset in enumerate(runs):
                send(words[i * count : (i + 1) * count], arith.addi(base, offset))

    emit(values, peers_gmem, parity, row, chunk)


def _receive(
    distances: range, math: rows.Arithmetic, slots: _Slots, shape, slots_gmem, parity, row, chunk
) -> list:
    """Wait for the same chunk of the peers at these distances, and empty their slots."""
    splat = plgpu.Layout.WG_SPLAT(())
    layout: Any = math.layout
    kind = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), splat, splat, splat), return_type=[kind] * len(distances)
    )
    def emit(ctx, memory, *place):
        base = address_of(memory)
        offsets = slots.offsets(*(value.registers.item() for value in place))
        runs = [(arith.addi(base, offset), 0) for d in distances for offset in offsets[d - 1]]
        words = receive(runs, slots.words)
        return [
            _array(words[i * slots.vec_len : (i + 1) * slots.vec_len], math, shape)
            for i in range(len(distances))
        ]

    return emit(slots_gmem, parity, row, chunk)


def _array(words: list, math: rows.Arithmetic, shape) -> mgpu.FragmentedArray:
    """A vector of float32 from the words of each thread."""
    layout: Any = math.layout
    layout = layout.to_mgpu()
    out = mgpu.FragmentedArray.splat(mgpu.c(0.0, ir.F32Type.get()), shape, layout=layout)
    registers = out.registers.copy()
    registers.flat[0] = vector_of(words)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _flip_parity(parities_gmem, row, parity) -> None:
    """Count an exchange of a row; every thread of the CTA writes the same word."""
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat))
    def emit(ctx, parities, *scalars):
        row, parity = (value.registers.item() for value in scalars)
        where = arith.index_cast(ir.IndexType.get(), row)
        memref.store(arith.xori(parity, i32(1)), parities, [where])

    emit(parities_gmem, row, parity)


def slot_words(width: int, dtype: jnp.dtype) -> int:
    """Words of a row that a rank sends another: a float32 residual stream has parts."""
    return width * (rows.NUM_PARTS if dtype == jnp.float32 else 1)


def takes_width(width: int) -> bool:
    """Whether rows of so many channels are whole warpgroups."""
    return norm.row_sum(width).is_wide


@functools.partial(jax.jit, static_argnames=("eps",))
def exchange_add_rms_norm(
    leaf_sums, residual, bias, gain, peers, slots, parities, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `exchange.exchange_add_rms_norm`.

    Args:
        leaf_sums: This rank's subtrees, float32 [L, M, D] or [L, 3, M, D].
        residual: The residual stream.
        bias: The product's bias, or None.
        gain: Scale of each channel.
        peers: uint32 [tp - 1, 2], addresses of the other ranks' slots by XOR distance from 1.
        slots: uint32 [2, R, tp - 1, D or 3 D], this rank's, written by its peers.
        parities: int32 [R], of the next exchange of each row.
        eps: Added to the mean square.

    Raises:
        ValueError: If the rows are narrow or too many.

    Numerics:
        # ORDER: this rank's leaves as a tree, then the ranks' subtrees in order of XOR distance,
        ((d0 + d1) + (d2 + d3)) + ...: additions commute, so this is the tree in order of rank.
        Parts so one by one; then they are added, the smallest first.
        # ROUND: the residual stream once; then as `rms_norm` does, by its own functions.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = residual.shape
    num_leaves, num_parts = norm.num_terms(leaf_sums)
    _, max_rows, num_peers, _ = slots.shape
    form = norm.row_sum(width)
    if not takes_width(width):
        raise ValueError(f"the exchange kernel takes wide rows only, not {width=}")
    if num_rows > max_rows:
        raise ValueError(f"{num_rows} rows are more than the {max_rows} that have slots")
    if slots.shape[3] != num_parts * width:
        raise ValueError(f"{slots.shape=} are not slots of {num_parts} rows of {width=}")
    chunk = rows.LANES * form.vec_len
    warpgroups = norm.choose_schedule(
        num_rows=num_rows, num_chunks=form.num_parts, num_leaves=num_leaves * num_parts
    ).warpgroups
    if num_parts > 1 and warpgroups == 8:
        warpgroups = 4  # eight have 64 registers a thread, 232 bytes too few on 8 ranks
    each = form.num_parts // warpgroups
    math = rows.strided(chunk, form.vec_len, False)
    places = _Slots(
        max_rows=max_rows, num_peers=num_peers, width=num_parts * width, vec_len=form.vec_len
    )

    def body(leaves_gmem, residual_gmem, *refs):
        refs = list(refs)
        bias_gmem = refs.pop(0) if bias is not None else None
        gain_gmem, peers_gmem, slots_gmem, parities_gmem, *refs = refs
        total_gmem, out_gmem, sums_smem, ready = refs
        row = lax.axis_index("cta")
        first_chunk = lax.axis_index("wg") * each if warpgroups > 1 else jnp.int32(0)
        columns = [pl.ds((first_chunk + i) * chunk, chunk) for i in range(each)]

        parity = parities_gmem[row]

        def own_tree(part, i):
            leaves = norm.load_leaves(leaves_gmem, part, (row, columns[i]), math.load)
            return rows.pairwise(leaves, lambda a, b: a + b)

        def load_rest():
            return (
                [math.load(residual_gmem.at[row, c]) for c in columns],
                [math.load(gain_gmem.at[c]) for c in columns],
            )

        own = []
        for i in range(each):
            for part in range(num_parts):
                own.append(own_tree(part, i))
                place = (parity, row, first_chunk + (part * form.num_parts + i))
                _send(own[-1], math, places, peers_gmem, *place)
        # WHY: parts read all of it behind the wait: what would wait for it does not fit in
        # registers (5120 channels on 4 ranks spilled 120 bytes, 8192 on 8 720; 2026-11).
        is_late = num_parts > 1
        residuals, gains = ([], []) if is_late else load_rest()

        def ranks_sum(part, i):
            partial = own_tree(part, i) if is_late else own[i]
            at = part * form.num_parts + i
            for level in range(num_peers.bit_length()):
                # ORDER: level by level, as the butterfly: distance 1, then 2 and 3, then 4 to 7.
                distances = range(1 << level, 2 << level)
                others = _receive(
                    distances, math, places, (chunk,), slots_gmem, parity, row, first_chunk + at
                )
                partial = partial + rows.pairwise(others, lambda a, b: a + b)
            return partial

        values = []
        for i, c in enumerate(columns):
            partial = ranks_sum(num_parts - 1, i)
            for part in reversed(range(num_parts - 1)):
                # ORDER: the smallest part first, (p3 + p2) + p1.
                partial = partial + ranks_sum(part, i)
            if is_late and i == 0:
                residuals, gains = load_rest()
            b = None if bias_gmem is None else math.load(bias_gmem.at[c]).astype(jnp.float32)
            v = norm.joined([partial], residuals[i], b, residual.dtype)
            total_gmem[row, c] = v
            values.append(v.astype(jnp.float32))
            sums_smem[first_chunk + i, :] = rows.square_sums(values[-1], math)
        if warpgroups > 1:
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
        else:
            plgpu.commit_smem()
        # All threads of the CTA have read it by now.
        _flip_parity(parities_gmem, row, parity)
        scale = norm.wide_scale(sums_smem, math, shape=(chunk,), width=width, eps=eps)
        for c, v, g in zip(columns, values, gains, strict=True):
            normed = math.mul(math.mul(v, scale), g.astype(jnp.float32))
            out_gmem[row, c] = normed.astype(residual.dtype)  # ROUND: once

    shape = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    options = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    biases = [] if bias is None else [bias]
    total, out = rows.run_kernel(
        body,
        [leaf_sums, residual, *biases, gain, peers, slots, parities],
        out=[shape, shape],
        grid={"cta": num_rows},
        name="detjax_exchange_add_rms_norm",
        is_interpreted=False,
        scratch_types=[
            plgpu.SMEM((form.num_parts, rows.LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups) if warpgroups > 1 else None,
        ],
        **options,
    )
    return total, out
