# SPDX-License-Identifier: Apache-2.0
"""`h = round(s * tree(A x))` of few rows on Hopper, in one launch.

The A of all adapters are 64-row operands of wgmma and rows of activations its N, as in
`linear.sm90_flat_matmul`. The CTAs of a cluster share the leaves of a tile. Each sends its subtree
to the shared memory of the first, which adds them, scales, rounds, and clears the columns of other
adapters than the row's.
"""

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
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from detjax.numerics import Reduction
from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.sm90_sums import (
    COMPILER_PARAMS,
    leaf_sum,
    put_transposed,
    ragged,
    tree_sum,
    views,
)
from detjax.pallas_kernels.sm90_hardware import LANES
from detjax.pallas_kernels.sm90_ring import Ring

MAX_ROWS = 64
"""Up to here rows are projected in one launch."""

_COLS = 32
"""Most rows of a tile: more CTAs take a leaf's weights, of which each CTA has one leaf at least."""

_TILE = 64
"""Columns of h of a tile."""

_CLUSTER = 8
"""Most CTAs that share a tile's leaves."""

_FULL_CLUSTER = 4
"""The like for more than `_FULL_ROWS` rows where leaves have at most `_SHORT_LEAF` channels.

64 rows of 4096 channels take 4.1, 3.9 and 3.9 us for 384, 256 and 128 columns, by eight CTAs 4.7,
4.2 and 4.1. Of 14336 channels they take 7.4, by eight 5.9. 8 rows of 4096 take 3.3, by eight 3.0
(one H200, 2026-11).
"""

_FULL_ROWS, _SHORT_LEAF = 32, 512

_SPAN = 64
"""Columns of one swizzle span."""


class _Operands(NamedTuple):
    """Arrays in device memory."""

    x: Any  # [M, I] bf16
    a: Any  # [X, I] bf16
    slots: Any  # [M] int32
    scales: Any  # [parts * slots] f32


class _Memory(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    x: Any  # [stages, slabs, cols, 64] bf16
    a: Any  # [stages, 64, k] bf16
    slots: Any  # [_COLS] int32: a copy has whole 128 bytes
    sums: Any  # [cluster, 64 * cols] f32, of the first CTA: the subtrees
    out: Any  # [cols, 64] bf16
    full: Any  # [stages]
    empty: Any  # [stages]
    known: Any  # the slots are there


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The numbers of a launch.

    Attributes:
        num_rows: M.
        width: X.
        rank: Columns of an adapter.
        num_slots: Adapters of a part.
        reduction: The leaves of I.
    """

    num_rows: int
    width: int
    rank: int
    num_slots: int
    reduction: Reduction

    @property
    def row_tiles(self) -> int:
        """Tiles of rows."""
        return pl.cdiv(self.num_rows, _COLS)

    @property
    def cols(self) -> int:
        """Rows of a tile."""
        return pl.cdiv(self.num_rows, 8 * self.row_tiles) * 8

    @property
    def cluster(self) -> int:
        """CTAs that share a tile's leaves."""
        is_short = self.num_rows > _FULL_ROWS and self.reduction.leaf_len <= _SHORT_LEAF
        return min(_FULL_CLUSTER if is_short else _CLUSTER, self.reduction.num_leaves)

    @property
    def k(self) -> int:
        """Depth of a stage."""
        return 2 * _SPAN if self.reduction.leaf_len % (2 * _SPAN) == 0 else _SPAN

    @property
    def slabs(self) -> int:
        """Swizzle spans of a stage."""
        return self.k // _SPAN

    @property
    def leaf_steps(self) -> int:
        """Stages of a leaf."""
        return self.reduction.leaf_len // self.k

    @property
    def own_leaves(self) -> int:
        """Leaves of a CTA."""
        return self.reduction.num_leaves // self.cluster

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as 128 KiB hold."""
        return 131072 // (2 * self.k * (_TILE + self.cols))

    @property
    def is_ragged(self) -> bool:
        """Whether TMA must see blocks of rows tiled by 1 row (`ragged`)."""
        return self.num_rows > 8 and self.num_rows % 8 != 0

    @property
    def owners(self) -> int:
        """Adapters of a tile."""
        return max(1, _TILE // self.rank)


def is_supported(x, a, reduction: Reduction) -> bool:
    """Whether `lora_project` takes operands: few rows of bfloat16, leaves of whole spans."""
    has_whole_tiles = a.shape[0] % _TILE == 0 and reduction.leaf_len % _SPAN == 0
    return x.dtype == jnp.bfloat16 and x.shape[0] <= MAX_ROWS and has_whole_tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cta:
    """What the warpgroups of a CTA do."""

    plan: _Plan
    operands: _Operands
    out: Any  # [M, X] bf16
    memory: _Memory

    @property
    def ring(self) -> Ring:
        return Ring(full=self.memory.full, empty=self.memory.empty, num_slots=self.plan.stages)

    @property
    def rank(self):
        """This CTA's place in its cluster."""
        return lax.axis_index("rank") if self.plan.cluster > 1 else jnp.int32(0)

    @property
    def row(self):
        """The first row of the tile."""
        return lax.axis_index("rows") * self.plan.cols

    @property
    def column(self):
        """The first column of h of the tile."""
        return lax.axis_index("tile") * _TILE

    def load(self) -> None:
        """Fill the ring with this CTA's leaves."""
        plan, x_tma = self.plan, views(self.memory.x, self.plan.is_ragged)[1]
        num_steps = plan.own_leaves * plan.leaf_steps
        first = self.rank * num_steps

        def step(i, _):
            slot, k = self.ring.claim(i), (first + i) * plan.k
            full = self.memory.full.at[slot]
            weights = self.operands.a.at[pl.ds(self.column, _TILE), pl.ds(k, plan.k)]
            plgpu.copy_gmem_to_smem(weights, self.memory.a.at[slot], full)
            for s in range(plan.slabs):
                place = (pl.ds(self.row, plan.cols), pl.ds(k + s * _SPAN, _SPAN))
                plgpu.copy_gmem_to_smem(self.operands.x.at[place], x_tma.at[slot, s], full)
            return ()

        lax.fori_loop(0, num_steps, step, ())
        self.ring.drain(jnp.int32(num_steps))

    def compute(self) -> None:
        """Add this CTA's subtree, and send it to the first CTA of the cluster."""
        plan, ring = self.plan, self.ring
        x_smem = views(self.memory.x, plan.is_ragged)[0]
        levels = plan.own_leaves.bit_length() - 1
        slots = self.operands.slots.at[pl.ds(self.row, _COLS)]
        plgpu.copy_gmem_to_smem(slots, self.memory.slots, self.memory.known)

        def leaf(first):
            def multiply(i, acc):
                slot = ring.slot(first + i)
                for s in range(plan.slabs):
                    weights = self.memory.a.at[slot, :, pl.ds(s * _SPAN, _SPAN)]
                    plgpu.wgmma(acc, weights, x_smem.at[slot, s].T)

            return leaf_sum(
                (_TILE, plan.cols),
                plan.leaf_steps,
                take=lambda i: ring.wait(first + i),
                multiply=multiply,
                give=lambda i: ring.release(first + i),
                in_flight=plan.slabs,
            )

        total = tree_sum((_TILE, plan.cols), levels, plan.leaf_steps, leaf, jnp.int32(0))
        _send(total, self.memory.sums, self.rank, to_leader=plan.cluster > 1)
        plgpu.barrier_wait(self.memory.known)

    def read_scales(self) -> list:
        """The scales of the tile's adapters, early: nothing waits for them at the end."""
        first = lax.div(self.column, jnp.int32(self.plan.rank))
        return [
            ptx.read_now(self.operands.scales, first + i, is_interpreted=False)
            for i in range(self.plan.owners)
        ]

    def finish(self, scales: list) -> None:
        """Add the subtrees of the cluster, scale, round, clear and store."""
        plan, shape = self.plan, (_TILE, self.plan.cols)
        math = sm90_rows.Arithmetic(layout=plgpu.Layout.WGMMA, is_interpreted=False)
        like = math.full(shape, 0.0)
        # ORDER: ((t0 + t1) + (t2 + t3)) + ..., f32, as `linear_partial` continues the tree.
        sums = [_receive(like, self.memory.sums, i) for i in range(plan.cluster)]
        total = sm90_rows.pairwise(sums, math.add)
        owner = lax.div(math.iota(shape, 0), jnp.int32(plan.rank)) if plan.owners > 1 else None
        first = lax.div(self.column, jnp.int32(plan.rank))
        scale, slot = like, math.full(shape, -1, jnp.int32)
        for i, own_scale in enumerate(scales):
            scale_of = math.full(shape, own_scale)
            slot_of = math.full(shape, lax.rem(first + i, plan.num_slots), jnp.int32)
            if owner is not None:
                is_own = owner == math.full(shape, i, jnp.int32)
                scale_of = jnp.where(is_own, scale_of, scale)
                slot_of = jnp.where(is_own, slot_of, slot)
            scale, slot = scale_of, slot_of
        layout = plgpu.Layout.WGMMA.reduce(0)
        slots = self.memory.slots.at[pl.ds(0, plan.cols)]
        of_row = plgpu.load(slots, layout=layout, optimized=False)
        of_row = math.cast(lax.broadcast_in_dim(of_row, shape, (1,)))
        h = jnp.where(slot == of_row, math.mul(total, scale), like)
        reg, tma = views(self.memory.out, plan.is_ragged)
        put_transposed(h, reg)  # ROUND: once, to bfloat16
        place = (pl.ds(self.row, plan.cols), pl.ds(self.column, _TILE))
        plgpu.copy_smem_to_gmem(tma, self.out.at[place])
        plgpu.wait_smem_to_gmem(0)


def _places(registers: np.ndarray):
    """Each register, and where a thread finds it behind those of the others, in its elements."""
    for number, (at, register) in enumerate(np.ndenumerate(registers)):
        is_vector = isinstance(register.type, ir.VectorType)
        count = ir.VectorType(register.type).shape[0] if is_vector else 1
        offset = arith.addi(
            ptx.i32(number * LANES * count), arith.muli(ptx.thread(), ptx.i32(count))
        )
        yield at, register, offset


def _send(total, sums_smem, rank, *, to_leader: bool) -> None:
    """Write a subtree to its place in the first CTA's memory.

    # WHY: plain stores, a fresh place for each CTA, and plain loads behind `ptx.meet_cluster`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def emit(ctx, total, ref):
        start = mgpu.utils.memref_ptr(ref)
        if to_leader:
            start = mgpu.utils.get_cluster_ptr(start, ptx.i32(0))
        for _, register, offset in _places(total.registers):
            llvm.store(register, mgpu.utils.getelementptr(start, [offset], ir.F32Type.get()))

    emit(total, sums_smem.at[rank])


def _receive(like, sums_smem, rank: int):
    """The subtree of a CTA, as it was sent; `like` has its shape and layout."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(like.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def emit(ctx, like, ref):
        start = mgpu.utils.memref_ptr(ref)
        found = np.empty(like.registers.shape, object)
        for at, register, offset in _places(like.registers):
            where = mgpu.utils.getelementptr(start, [offset], ir.F32Type.get())
            found[at] = llvm.load(register.type, where)
        return mgpu.FragmentedArray(_registers=found, _layout=like.layout, _is_signed=None)

    return emit(like, sums_smem.at[rank])


def lora_project(x, a, slots, scales, *, reduction: Reduction, out_dtype: jnp.dtype) -> jax.Array:
    """See `api.lora_project`; operands as `is_supported` says.

    Numerics:
        # ORDER: each leaf k16 block by k16 block in its own f32 wgmma accumulator; then
        ((l0 + l1) + (l2 + l3)) + ..., f32.
        # ROUND: the product with the scale, then h.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    plan = _Plan(
        num_rows=x.shape[0], width=a.shape[0], rank=a.shape[0] // scales.size,
        num_slots=scales.shape[1], reduction=reduction,
    )  # fmt: skip

    def body(operands: _Operands, out, memory: _Memory):
        cta = _Cta(plan=plan, operands=operands, out=out, memory=memory)
        wg, own_scales = lax.axis_index("wg"), cta.read_scales()
        pl.when(wg == 0)(cta.compute)
        pl.when(wg == 1)(cta.load)
        if plan.cluster > 1:
            ptx.meet_cluster()
        pl.when((wg == 0) & (cta.rank == 0))(lambda: cta.finish(own_scales))

    block = (plan.stages, plan.slabs, plan.cols, _SPAN)
    memory = _Memory(
        x=ragged(block, _SPAN, jnp.bfloat16, plan.is_ragged),
        a=ragged((plan.stages, _TILE, plan.k), _SPAN, jnp.bfloat16, False),
        slots=plgpu.SMEM((_COLS,), jnp.int32),
        sums=plgpu.SMEM((plan.cluster, _TILE * plan.cols), jnp.float32),
        out=ragged((plan.cols, _TILE), _SPAN, out_dtype, plan.is_ragged),
        full=plgpu.Barrier(num_arrivals=1 + plan.slabs, num_barriers=plan.stages),
        empty=plgpu.Barrier(num_barriers=plan.stages),
        known=plgpu.Barrier(),
    )
    is_clustered = plan.cluster > 1
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.num_rows, plan.width), out_dtype),
        scratch_types=[memory],
        grid=(plan.width // _TILE, plan.row_tiles),
        grid_names=("tile", "rows"),
        cluster=(plan.cluster,) if is_clustered else (),
        cluster_names=("rank",) if is_clustered else (),
        num_threads=2,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
        kernel_name="detjax_lora_project",
    )(_Operands(x=x, a=a, slots=slots, scales=scales.reshape(-1)))
