# SPDX-License-Identifier: Apache-2.0
"""Which rows which expert multiplies: a stable sort of slots by expert, and a list of tiles.

Integers alone, and copies. A slot is a row and one of its experts, `m * k + rank`.
"""

import functools
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.linear.quantized import QuantizedRows
from detjax.pallas_kernels.linear.sm90_quantize_rows import scales_shape
from detjax.pallas_kernels.moe import sm90_lanes as lanes

EXPERT, START, COUNT = range(3)
"""Rows of the list of tiles: whose they are, their first row in sorted order, how many rows."""

MAX_COUNTED_SLOTS = 1024
"""Up to here every CTA counts all slots; above, a kernel counts those of each block first."""

BUFFER_BYTES = 131072
"""Shared memory for the rows that a CTA sorts."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GroupedWork:
    """What the grouped products walk: arrays, or inside a kernel their references.

    Attributes:
        tiles: int32 [3, T]: see `EXPERT`.
        num_tiles: int32 [1]: how many of them there are.
        order: int32 [S]: the slot of each sorted row; sorted rows of experts that are not here do
            not exist, and their places at the end are undefined.
    """

    tiles: Any
    num_tiles: Any
    order: Any


def most_tiles(num_slots: int, num_local: int, tile_rows: int) -> int:
    """The longest list: a full tile for every `tile_rows` slots, and a part of one an expert."""
    return min(num_slots, num_local + num_slots // tile_rows)


def work_shapes(num_slots: int, num_local: int, tile_rows: int) -> GroupedWork:
    """Shapes of a `GroupedWork`."""
    return GroupedWork(
        tiles=jax.ShapeDtypeStruct((3, most_tiles(num_slots, num_local, tile_rows)), jnp.int32),
        num_tiles=jax.ShapeDtypeStruct((1,), jnp.int32),
        order=jax.ShapeDtypeStruct((num_slots,), jnp.int32),
    )


def local_ids(ids_gmem, first, first_expert, num_local: int, math):
    """The experts of a warpgroup's slots from `first`, counted from the first one here; else -1."""
    size = rows.LANES
    ids = lanes.load_from(ids_gmem, first, -1, size, math)
    ids = ids - math.full((size,), first_expert, jnp.int32)
    none = math.full((size,), -1, jnp.int32)
    is_local = (ids >= math.full((size,), 0, jnp.int32)) & (
        ids < math.full((size,), num_local, jnp.int32)
    )
    return jnp.where(is_local, ids, none)


def count_experts(ids: list, counts_smem, math, *, stop=None) -> list:
    """How many slots each expert has, and how many of those before slot `stop`, if that is given.

    Args:
        ids: Of LANES slots each, from the first on: their experts, or -1.
        counts_smem: int32 [1 or 2, experts] of shared memory.
        math: Arithmetic of [LANES].
        stop: See above.
    """
    size = counts_smem.shape[1]
    of_experts, shape = lanes.integers(size, math.is_interpreted), (rows.LANES,)
    for i in range(counts_smem.shape[0]):
        counts_smem[i, :] = of_experts.full((size,), 0, jnp.int32)
    plgpu.commit_smem()
    none = math.full(shape, -1, jnp.int32)
    for i, some in enumerate(ids):
        lanes.add_one(counts_smem.at[0], some, math)
        if stop is not None:
            is_before = math.iota(shape, 0) < math.full(shape, stop - i * rows.LANES, jnp.int32)
            lanes.add_one(counts_smem.at[1], jnp.where(is_before, some, none), math)
    plgpu.commit_smem()
    return [of_experts.load(counts_smem.at[i]) for i in range(counts_smem.shape[0])]


def write_tiles(total, starts, work: GroupedWork, scratch, *, tile_rows: int, math):
    """Cut each expert's sorted rows into tiles, and list them in order of expert."""
    size = total.shape[0]

    def full(value):
        return math.full((size,), value, jnp.int32)

    experts = math.iota((size,), 0)
    num_tiles = lax.div(total + full(tile_rows - 1), full(tile_rows))
    first = lanes.sums_before(num_tiles, scratch.at[1], math)
    is_last = experts == full(size - 1)
    lanes.scatter(work.num_tiles, jnp.where(is_last, full(0), full(-1)), first + num_tiles, math)

    def one_each(turn, _):
        index = jnp.where(num_tiles > full(turn), first + full(turn), full(-1))
        done = full(turn * tile_rows)
        lanes.scatter(work.tiles.at[EXPERT], index, experts, math)
        lanes.scatter(work.tiles.at[START], index, starts + done, math)
        lanes.scatter(work.tiles.at[COUNT], index, jnp.minimum(total - done, full(tile_rows)), math)
        return ()

    lax.fori_loop(0, lanes.greatest(num_tiles, scratch.at[2], math), one_each, ())


def sort_block(ids, ids_smem, starts_smem, block: int, math):
    """Sorted rows of a block's slots, -1 where the expert is not here.

    Args:
        ids: Their experts, [LANES].
        ids_smem: The same in shared memory, of which the first `block` count.
        starts_smem: The sorted row of each expert's first slot of this block.
        block: Slots of a block, a multiple of `lanes.UNROLL`.
        math: Arithmetic of [LANES].
    """
    shape = (rows.LANES,)
    slots, zeros = math.iota(shape, 0), math.full(shape, 0, jnp.int32)

    def step(before, expert, slot):
        is_same = (ids == math.full(shape, expert, jnp.int32)) & (
            slots > math.full(shape, slot, jnp.int32)
        )
        return before + jnp.where(is_same, zeros + 1, zeros)

    before = lanes.over(ids_smem, block, step, zeros)
    places = lanes.gather(starts_smem, jnp.maximum(ids, zeros), math) + before
    is_slot = (ids >= zeros) & (slots < math.full(shape, block, jnp.int32))
    return jnp.where(is_slot, places, zeros - 1)


def schedule_few(
    put_ids, num_slots: int, work: GroupedWork, memory, *, tile_rows: int, is_interpreted: bool
) -> None:  # fmt: skip
    """Fill `work` for up to LANES slots: one warpgroup, inside the kernel that needs it.

    `put_ids` writes the expert of each slot, counted from the first one here or -1, to [LANES]
    integers of shared memory, all of them.
    """
    ids_smem, counts_smem, starts_smem, scratch = memory
    math = lanes.integers(rows.LANES, is_interpreted)
    put_ids(ids_smem, math)
    plgpu.commit_smem()
    ids = math.load(ids_smem)
    counted = min(rows.LANES, -(-num_slots // lanes.UNROLL) * lanes.UNROLL)
    [total] = count_experts([ids], counts_smem, math)
    of_experts = lanes.integers(total.shape[0], is_interpreted)
    starts = lanes.sums_before(total, scratch.at[0], of_experts)
    starts_smem[...] = starts
    write_tiles(total, starts, work, scratch, tile_rows=tile_rows, math=of_experts)
    plgpu.commit_smem()
    places = sort_block(ids, ids_smem, starts_smem, counted, math)
    lanes.scatter(work.order, places, math.iota((rows.LANES,), 0), math)


def few_memory(num_local: int) -> list:
    """Shared memory of `schedule_few`."""
    return [
        plgpu.SMEM((rows.LANES,), jnp.int32),
        plgpu.SMEM((1, lanes.padded(num_local)), jnp.int32),
        plgpu.SMEM((lanes.padded(num_local),), jnp.int32),
        plgpu.SMEM((3, 4), jnp.int32),
    ]


def block_tokens(num_tokens: int, top_k: int, width: int) -> int:
    """Rows of `x` whose slots a CTA sorts: at most LANES slots, a multiple of `lanes.UNROLL`.

    Where each CTA counts all slots, the fewest rows with such a multiple: as many CTAs as can be.

    Raises:
        NotImplementedError: If not even `lanes.UNROLL` rows fit.
    """
    most = min(rows.LANES // top_k, BUFFER_BYTES // (2 * width))
    most = most // lanes.UNROLL * lanes.UNROLL
    if most == 0:
        raise NotImplementedError(
            f"sm90 sorts rows of up to {BUFFER_BYTES // 2 // lanes.UNROLL} channels to at most "
            f"{rows.LANES // lanes.UNROLL} experts each, not {width=}, {top_k=}; use portable"
        )
    if num_tokens * top_k <= MAX_COUNTED_SLOTS:
        return min(most, lanes.UNROLL // gcd(lanes.UNROLL, top_k))
    return min(most, -(-num_tokens // lanes.UNROLL) * lanes.UNROLL)


def _count_blocks(ids, first_expert, *, block: int, num_blocks: int, num_local: int, interpret):
    """How many slots each expert has in each block, int32 [blocks, experts]."""
    size = lanes.padded(num_local)
    math = lanes.integers(rows.LANES, interpret)

    def body(ids_gmem, first_expert_gmem, counts_gmem, counts_smem):
        cta, none = lax.axis_index("cta"), math.full((rows.LANES,), -1, jnp.int32)
        is_in_block = math.iota((rows.LANES,), 0) < math.full((rows.LANES,), block, jnp.int32)
        ids = local_ids(ids_gmem, cta * block, first_expert_gmem[0], num_local, math)
        [total] = count_experts([jnp.where(is_in_block, ids, none)], counts_smem, math)
        counts_gmem[cta] = total

    return rows.run_kernel(
        body,
        (ids, first_expert),
        out=jax.ShapeDtypeStruct((num_blocks, size), jnp.int32),
        grid={"cta": num_blocks},
        name="detjax_moe_count",
        is_interpreted=interpret,
        scratch_types=[plgpu.SMEM((1, size), jnp.int32)],
    )


_SCALES_AT_ONCE = 16


def _sort_scales(scales_gmem, sorted_gmem, places, slots, *, top_k: int, math) -> None:
    """Copy the scales of each slot's row to its place, where it has one."""
    last = math.full(places.shape, scales_gmem.shape[1] - 1, jnp.int32)
    tokens = jnp.minimum(lax.div(slots, math.full(places.shape, top_k, jnp.int32)), last)
    groups = range(scales_gmem.shape[0])
    for first in groups[::_SCALES_AT_ONCE]:
        some = groups[first : first + _SCALES_AT_ONCE]
        # WHY: all loads first, as none may pass a store.
        found = [lanes.gather(scales_gmem.at[i], tokens, math) for i in some]
        for i, values in zip(some, found, strict=True):
            lanes.scatter(sorted_gmem.at[i], places, values, math)


_BLOCKS_AT_ONCE = 32


class _SortMemory(NamedTuple):
    """Shared memory of a CTA that sorts rows, and its barrier."""

    rows: Any  # [tokens, D / span, span]
    counts: Any  # [2, size] int32: slots of each expert, and of those before this CTA's
    ids: Any  # [LANES] int32: of this CTA's slots
    starts: Any  # [size] int32: sorted row of each expert's first slot of this CTA
    places: Any  # [LANES] int32: sorted row of each of its slots, or -1
    scratch: Any  # [3, 4] int32: of sums over a warpgroup
    arrived: Any  # the rows are there


@functools.partial(jax.jit, static_argnames=("num_local", "tile_rows", "interpret"))
def sort_rows(
    x, expert_ids, first_expert, *, num_local: int, tile_rows: int, interpret: bool = False
) -> tuple[Any, jax.Array, GroupedWork]:
    """Copy each row once for each of its experts here, in order of expert, then of slot.

    Args:
        x: [M, D], or `QuantizedRows`, whose scales go with them.
        expert_ids: int32 [M, k].
        first_expert: int32 [1].
        num_local: Experts here.
        tile_rows: Most rows of a tile of the list.
        interpret: Run in interpret mode.

    Returns:
        The sorted rows [M k, D], of which those past the last local slot are undefined, as `x`; the
        sorted row of each slot [M k], -1 where its expert is not here; the list of tiles.
    """
    x, scales = (x.values, x.scales) if isinstance(x, QuantizedRows) else (x, None)
    num_tokens, width = x.shape
    top_k = expert_ids.shape[1]
    num_slots = num_tokens * top_k
    sorted_scales = None
    if scales is not None:
        num_groups = scales.shape[0] if scales.ndim > 1 else 0
        of_scales = scales_shape(num_slots, num_groups)
        scales = scales.reshape(-1, scales.shape[-1])
        sorted_scales = jax.ShapeDtypeStruct((len(scales), of_scales[-1]), jnp.float32)
    tokens = block_tokens(num_tokens, top_k, width)
    block = tokens * top_k
    num_blocks = -(-num_tokens // tokens)
    is_counted_here = num_slots <= MAX_COUNTED_SLOTS
    ids = expert_ids.reshape(num_slots)
    size = lanes.padded(num_local)
    span = next(s for s in (128, 64, 32, 16, 8) if width % s == 0)
    math = lanes.integers(rows.LANES, interpret)
    of_experts = lanes.integers(size, interpret)
    counts = None
    if not is_counted_here:
        padded_blocks = -(-num_blocks // _BLOCKS_AT_ONCE) * _BLOCKS_AT_ONCE
        counts = _count_blocks(
            ids, first_expert, block=block, num_blocks=padded_blocks, num_local=num_local,
            interpret=interpret,
        )  # fmt: skip

    def add_blocks(counts_gmem, cta):
        zeros = of_experts.full((size,), 0, jnp.int32)

        def some(turn, carry):
            first = turn * _BLOCKS_AT_ONCE
            found = [of_experts.load(counts_gmem.at[first + i]) for i in range(_BLOCKS_AT_ONCE)]
            total, before = carry
            for i, counts in enumerate(found):
                is_before = (first + i < cta).astype(jnp.int32)
                total = total + counts
                before = before + counts * of_experts.full((size,), is_before, jnp.int32)
            return total, before

        return lax.fori_loop(0, counts_gmem.shape[0] // _BLOCKS_AT_ONCE, some, (zeros, zeros))

    def body(
        given,  # [M, D / span, span]; scales [groups or 1, >= M] f32, or None
        ids_gmem,  # [S] int32
        first_expert_gmem,  # [1] int32
        counts_gmem,  # [blocks, size] int32, or None where each CTA counts
        found,  # the like of S sorted rows
        places_gmem,  # [S] int32
        work,  # `GroupedWork`
        memory: _SortMemory,
    ):
        rows_smem, counts_smem, ids_smem, starts_smem, places_smem, scratch, arrived = memory
        (x_gmem, scales_gmem), (sorted_gmem, sorted_scales) = given, found
        cta = lax.axis_index("cta")
        first_slot = cta * block

        def fetch(i, _):
            token = jnp.minimum(cta * tokens + i, num_tokens - 1)
            plgpu.copy_gmem_to_smem(x_gmem.at[token], rows_smem.at[i], arrived)
            return ()

        lax.fori_loop(0, tokens, fetch, ())
        first_expert = first_expert_gmem[0]
        ids = local_ids(ids_gmem, first_slot, first_expert, num_local, math)
        ids_smem[...] = ids
        if is_counted_here:
            all_ids = [
                local_ids(ids_gmem, start, first_expert, num_local, math)
                for start in range(0, num_slots, rows.LANES)
            ]
            total, before = count_experts(all_ids, counts_smem, math, stop=first_slot)
        else:
            plgpu.commit_smem()
            total, before = add_blocks(counts_gmem, cta)
        starts = lanes.sums_before(total, scratch.at[0], of_experts)
        starts_smem[...] = starts + before
        plgpu.commit_smem()
        places = sort_block(ids, ids_smem, starts_smem, block, math)
        slots = math.iota((rows.LANES,), 0) + math.full((rows.LANES,), first_slot, jnp.int32)
        inside = math.iota((rows.LANES,), 0) < math.full((rows.LANES,), block, jnp.int32)
        none = math.full((rows.LANES,), -1, jnp.int32)
        places_smem[...] = places
        lanes.scatter(places_gmem, jnp.where(inside, slots, none), places, math)
        lanes.scatter(work.order, places, slots, math)
        if scales_gmem is not None:
            _sort_scales(scales_gmem, sorted_scales, places, slots, top_k=top_k, math=math)
        plgpu.commit_smem()
        plgpu.barrier_wait(arrived)

        def put(slot, _):
            place = places_smem[slot]

            @pl.when(place >= 0)
            def _():
                row = rows_smem.at[lax.div(slot, jnp.int32(top_k))]
                plgpu.copy_smem_to_gmem(row, sorted_gmem.at[place])

            return ()

        lax.fori_loop(0, block, put, ())

        @pl.when(cta == 0)
        def _():
            write_tiles(total, starts, work, scratch, tile_rows=tile_rows, math=of_experts)

        plgpu.wait_smem_to_gmem(0)

    (sorted_rows, sorted_scales), places, work = rows.run_kernel(
        body,
        ((x.reshape(num_tokens, width // span, span), scales), ids, first_expert, counts),
        out=[
            (jax.ShapeDtypeStruct((num_slots, width // span, span), x.dtype), sorted_scales),
            jax.ShapeDtypeStruct((num_slots,), jnp.int32),
            work_shapes(num_slots, num_local, tile_rows),
        ],
        grid={"cta": num_blocks},
        name="detjax_moe_sort",
        is_interpreted=interpret,
        scratch_types=[
            _SortMemory(
                rows=plgpu.SMEM((tokens, width // span, span), x.dtype),
                counts=plgpu.SMEM((2, size), jnp.int32) if is_counted_here else None,
                ids=plgpu.SMEM((rows.LANES,), jnp.int32),
                starts=plgpu.SMEM((size,), jnp.int32),
                places=plgpu.SMEM((rows.LANES,), jnp.int32),
                scratch=plgpu.SMEM((3, 4), jnp.int32),
                arrived=plgpu.Barrier(num_arrivals=tokens),
            )
        ],
    )
    found = sorted_rows.reshape(num_slots, width)
    if sorted_scales is not None:
        found = QuantizedRows(values=found, scales=sorted_scales.reshape(of_scales))
    return found, places, work
