# SPDX-License-Identifier: Apache-2.0
"""Grouped products on Hopper: tiles of one expert's rows, from a list made on the device.

The ring, the sum of a leaf and the gated epilogue are those of `linear`. A persistent grid of CTAs
walks tiles of rows and of weights. Few rows are the N operand of wgmma beside 64 weights, many are
the 64-row one. A tile that is not full multiplies its neighbours' rows too and never stores them.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.linear.sm90_sums import leaf_sum, put_transposed, tiled
from detjax.pallas_kernels.linear.tiles import NUM_SMS, SMEM_BYTES
from detjax.pallas_kernels.moe import sm90_lanes as lanes
from detjax.pallas_kernels.moe.sm90_route import route_rows
from detjax.pallas_kernels.moe.sm90_schedule import (
    COUNT,
    EXPERT,
    START,
    Work,
    few_memory,
    local_ids,
    schedule_few,
    work_shapes,
)
from detjax.pallas_kernels.swiglu.sm90 import gated_bf16

SPAN = 64
"""Channels of bfloat16 that are one swizzle span, 128 bytes."""

_OTHER_BYTES = 3072
"""Shared memory for barriers and alignment."""

_LIST_BYTES = 4096
"""Shared memory for the list of few rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedTiles:
    """How a grouped product is cut into CTAs. Free: no field changes the order of a sum.

    Attributes:
        is_swapped: Whether weights are the 64-row wgmma operand, so that rows may be few.
        is_gated: Whether half of the weights are gates and half their ups.
        cols: N of wgmma: rows of an expert if swapped, else weights.
        num_wgs: Compute warpgroups; each has 64 weights (128 if gated) if swapped, else 64 rows.
        k: Depth of a stage of the ring.
        stages: Stages in shared memory.
        delay: Stages whose products may still run when the next is issued.
    """

    is_swapped: bool
    is_gated: bool
    cols: int
    num_wgs: int
    k: int
    stages: int = 0
    delay: int = 0

    def __post_init__(self):
        """Refuse what wgmma or TMA cannot do."""
        if self.cols % 8 or not 8 <= self.cols <= 256:
            raise ValueError(f"{self.cols=} must be a multiple of 8 in 8..256")
        if not self.is_swapped and self.out_cols % SPAN:
            raise ValueError(f"{self.cols=} must leave outputs in sixty-fours")
        if self.num_wgs not in (1, 2):
            raise ValueError(f"{self.num_wgs=} must be 1 or 2")
        if self.k % SPAN:
            raise ValueError(f"{self.k=} must be a multiple of {SPAN}")

    @property
    def wg_rows(self) -> int:
        """Rows of a warpgroup's accumulator."""
        return 128 if self.is_swapped and self.is_gated else 64

    @property
    def tile_rows(self) -> int:
        """Most rows of an expert in a tile."""
        return self.cols if self.is_swapped else 64 * self.num_wgs

    @property
    def cta_weights(self) -> int:
        """Weights of a tile, gates and ups."""
        return self.wg_rows * self.num_wgs if self.is_swapped else self.cols

    @property
    def out_cols(self) -> int:
        """Outputs of a tile, of each row."""
        return self.cta_weights // 2 if self.is_gated else self.cta_weights

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return 2 * self.k * (self.tile_rows + self.cta_weights)

    @property
    def staged_bytes(self) -> int:
        """Shared memory of the outputs that wait for their store."""
        return 2 * (self.cols * self.out_cols if self.is_swapped else self.num_wgs * 2 * 64 * SPAN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Few:
    """How a product of few rows lists its tiles.

    Attributes:
        top_k: Experts of a row.
        routes: Whether it is given the router's logits, else ids and the first expert here.
        renormalise: See `api.route`.
    """

    top_k: int
    routes: bool = False
    renormalise: bool = False


def fill_stages(tiles: GroupedTiles, most: int = 12) -> GroupedTiles:
    """As many stages as fit."""
    room = SMEM_BYTES - tiles.staged_bytes - _OTHER_BYTES
    room -= _LIST_BYTES if tiles.is_swapped else 0
    fields = {f: getattr(tiles, f) for f in GroupedTiles.__dataclass_fields__}
    return GroupedTiles(**(fields | {"stages": min(most, room // tiles.stage_bytes)}))


def _rows_block(shape, is_interpreted: bool):
    """Rows of SPAN channels to multiply or fill, and the same memory as TMA must see it.

    # WHY: a TMA block tiled by 8 rows begins at a multiple of 8 rows. One swizzle span wide, it has
    the same bytes tiled by 1 row, and then it may begin at any row and have any number.
    """
    if is_interpreted:  # There the two of a union are apart.
        return plgpu.SMEM(shape, jnp.bfloat16)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled(SPAN, jnp.bfloat16)),
        plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled(SPAN, jnp.bfloat16, sublanes=1)),
    )


def _store_rows(staged, block, out_gmem, start, count, most: int, cols) -> None:
    """Store the first `count` of at most `most` rows, by powers of two, as boxes are static."""
    done, size = 0, 1 << (most.bit_length() - 1)
    while size:
        is_stored = (count & size) != 0 if size < most else count >= size

        @pl.when(is_stored)
        def _(done=done, size=size):
            plgpu.copy_smem_to_gmem(
                staged.at[*block, pl.ds(done, size)],
                out_gmem.at[pl.ds(start + done, size), cols],
                commit_group=False,
            )

        done = done + jnp.where(is_stored, jnp.int32(size), jnp.int32(0))
        size //= 2
    plgpu.commit_smem_to_gmem_group()


@functools.partial(jax.jit, static_argnames=("tiles", "by_slot", "interpret"))
def grouped_matmul(
    x, w, work: Work, ids=None, first_expert=None, *,
    tiles: GroupedTiles, by_slot: bool, interpret=None,
) -> jax.Array:  # fmt: skip
    """Multiply each expert's sorted rows with its weights: `round(x W^T)`, gated if tiles are.

    Args:
        x: Sorted rows, [S, K].
        w: [e, N, K], or [e, 2 F, K]: F rows of gates, then F of ups.
        work: Of `sort_rows`, for tiles of `tiles.tile_rows`.
        ids: int32 [S], the expert of each slot; None if every expert is here.
        first_expert: int32 [1], the first expert here; with ids.
        tiles: How to cut it; changes no bit.
        by_slot: Whether the output's rows lie in order of slot, and those of experts that are not
            here are zeros. Else in sorted order.
        interpret: How to interpret it, if so.

    Numerics:
        # ORDER: k16 block by k16 block in one f32 wgmma accumulator that starts at zero.
        # ROUND: as `linear`, or as `linear_swiglu`.
    """
    lists = [work.tiles, work.num_tiles, work.order]
    lists += [] if ids is None else [ids, first_expert]
    [out] = _grouped(x, w, lists, tiles=tiles, by_slot=by_slot, few=None, interpret=interpret)
    return out


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def one_row_matmul(x, w, ids, *, tiles: GroupedTiles, interpret=None) -> jax.Array:
    """`grouped_matmul` of a row's experts, in order of rank: row r of `x` by expert `ids[r]`.

    Args:
        x: A row an expert, [k, K].
        w: As for `grouped_matmul`, of every expert.
        ids: int32 [k], all different.
        tiles: Swapped, with 8 columns.
        interpret: How to interpret it, if so.
    """
    [out] = _grouped(
        x, w, [ids], tiles=tiles, by_slot=True, few=None, interpret=interpret, is_one_row=True
    )
    return out


@functools.partial(jax.jit, static_argnames=("top_k", "renormalise", "tiles", "interpret"))
def routed_matmul_one(
    x, w, logits, *, top_k: int, renormalise: bool, tiles: GroupedTiles, interpret=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`routed_matmul_few` of one row, in order of rank: no list is made, as none is needed.

    Args:
        x: A row, [1, K].
        w: As for `grouped_matmul`, of every expert.
        logits: float32 [1, e], or wider: what is behind the experts' is not read.
        top_k: Experts of the row.
        renormalise: Whether its weights add up to 1.
        tiles: Swapped, with 8 columns.
        interpret: How to interpret it, if so.

    Returns:
        The rows of outputs, [k, N], and the ids and weights of `route`, [1, k].
    """
    few = Few(top_k=top_k, routes=True, renormalise=renormalise)
    out, ids, weights = _grouped(
        x, w, [logits], tiles=tiles, by_slot=False, few=few, interpret=interpret, is_one_row=True
    )
    return out, ids, weights


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def grouped_matmul_few(
    x, w, expert_ids, first_expert, *, tiles: GroupedTiles, interpret=None
) -> tuple[jax.Array, Work]:
    """`sort_rows` and `grouped_matmul` of at most 8 rows and LANES slots in one launch.

    Every CTA lists the tiles itself. Every row is multiplied with every expert that has any, as
    the N operand has 8 rows in any case, and only the pairs that were asked for are stored.

    Args:
        x: Rows, [M, K].
        w: As for `grouped_matmul`.
        expert_ids: int32 [M, k].
        first_expert: int32 [1].
        tiles: Swapped, with 8 columns.
        interpret: How to interpret it, if so.

    Returns:
        The sorted rows of outputs, and the list.
    """
    lists = [expert_ids.reshape(-1), first_expert]
    out, *made = _grouped(
        x, w, lists, tiles=tiles, by_slot=False, few=Few(top_k=expert_ids.shape[1]),
        interpret=interpret,
    )  # fmt: skip
    return out, Work(tiles=made[0], num_tiles=made[1], order=made[2])


@functools.partial(jax.jit, static_argnames=("top_k", "renormalise", "tiles", "interpret"))
def routed_matmul_few(
    x, w, logits, *, top_k: int, renormalise: bool, tiles: GroupedTiles, interpret=None
) -> tuple[jax.Array, Work, jax.Array, jax.Array]:
    """`grouped_matmul_few` of all experts, and `route` before it in the same launch.

    Args:
        x: Rows, [M, K].
        w: As for `grouped_matmul`, of every expert.
        logits: float32 [M, e], or wider: columns behind the experts' are not read.
        top_k: Experts of a row.
        renormalise: Whether its weights add up to 1.
        tiles: Swapped, with 8 columns.
        interpret: How to interpret it, if so.

    Returns:
        The sorted rows of outputs, the list, and the ids and weights of `route`.

    Numerics:
        The instructions of `route` in every CTA, so its bits.
    """
    out, *made = _grouped(
        x, w, [logits], tiles=tiles, by_slot=False,
        few=Few(top_k=top_k, routes=True, renormalise=renormalise), interpret=interpret,
    )  # fmt: skip
    return out, Work(tiles=made[0], num_tiles=made[1], order=made[2]), made[3], made[4]


def _grouped(
    x, w, lists, *, tiles: GroupedTiles, by_slot: bool, few: Few | None, interpret,
    is_one_row: bool = False,
) -> list[jax.Array]:  # fmt: skip
    """The kernel; with `few` it makes the list of its tiles.

    With `is_one_row` rank r of one row is tile r, and a list is the experts of the ranks alone.
    """
    makes_list, top_k = few is not None, few.top_k if few else 0
    num_local, num_weights, k_len = w.shape
    num_out = num_weights // (2 if tiles.is_gated else 1)
    num_slots = x.shape[0] * top_k if makes_list else x.shape[0]
    if k_len % tiles.k:
        raise ValueError(f"{tiles.k=} must divide K={k_len}")
    if num_out % tiles.out_cols:
        raise ValueError(f"{tiles.out_cols=} must divide N={num_out}")
    if is_one_row and makes_list and x.shape[0] != 1:
        raise ValueError(f"{x.shape=} must be one row")
    if (makes_list or by_slot) and not tiles.is_swapped:
        raise ValueError("rows are placed one by one only by swapped tiles")
    steps, slabs, stages = k_len // tiles.k, tiles.k // SPAN, tiles.stages
    col_tiles = num_out // tiles.out_cols
    wg_out = tiles.out_cols // tiles.num_wgs if tiles.is_swapped else tiles.out_cols
    shapes = work_shapes(num_slots, num_local, tiles.tile_rows)
    list_shapes = [shapes.tiles, shapes.num_tiles, shapes.order]
    if is_one_row:
        list_shapes = [jax.ShapeDtypeStruct((num_slots,), jnp.int32)]
        num_ctas = min(NUM_SMS, num_slots * col_tiles)
    else:
        num_ctas = min(NUM_SMS, list_shapes[0].shape[1] * col_tiles)
    made_shapes = list_shapes if makes_list and not is_one_row else []
    if few is not None and few.routes:
        pairs = (x.shape[0], top_k)
        made_shapes = [
            *made_shapes,
            jax.ShapeDtypeStruct(pairs, jnp.int32),
            jax.ShapeDtypeStruct(pairs, jnp.float32),
        ]
    writes_zeros = by_slot and len(lists) > 3
    first_routed = len(made_shapes) - 2
    num_threads = tiles.num_wgs + 1
    has_register_shares = tiles.num_wgs > 1 and not makes_list
    is_interpreted = interpret is not None
    arithmetic = sm90_rows.Arithmetic(layout=plgpu.Layout.WGMMA, is_interpreted=is_interpreted)
    # Rows of a stage of weights, how many, and where they lie from the tile's first weight.
    w_pieces = [(0, tiles.cta_weights, 0)]
    if tiles.is_gated:
        half = wg_out
        w_pieces = [
            (2 * start + i * half, half, start + i * num_out)
            for start in range(0, tiles.out_cols, half)
            for i in range(2)
        ]
    zeros_span = next(s for s in (256, 128, 64) if num_out % s == 0)

    def body(*refs):
        refs = list(refs)
        x_gmem, w_gmem = refs.pop(0), refs.pop(0)
        inputs = [refs.pop(0) for _ in lists]
        out_gmem = refs.pop(0)
        made_gmem = [refs.pop(0) for _ in made_shapes]
        x_smem, w_smem, out_smem, zeros_smem, list_smem, few_smem, full, empty, listed = refs
        x_mma, x_tma = (x_smem, x_smem) if is_interpreted else x_smem
        out_reg, out_tma = (out_smem, out_smem) if is_interpreted else out_smem
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        if is_one_row:
            [experts_ref] = list_smem if makes_list else inputs[:1]
            tiles_ref = num_tiles_ref = order_ref = None
        else:
            tiles_ref, num_tiles_ref, order_ref = list_smem if makes_list else inputs[:3]

        def num_turns():
            num_tiles = jnp.int32(num_slots) if is_one_row else num_tiles_ref[0]
            items = num_tiles * col_tiles
            return lax.div(items - cta + (num_ctas - 1), jnp.int32(num_ctas))

        def locate(turn):
            """The entry of the list, and the first output of the tile."""
            item = turn * num_ctas + cta
            entry = lax.div(item, jnp.int32(col_tiles))
            return entry, lax.rem(item, jnp.int32(col_tiles)) * tiles.out_cols

        def expert_of(entry):
            return experts_ref[entry] if is_one_row else tiles_ref[EXPERT, entry]

        def rows_of(entry):
            """First sorted row of a tile, and how many."""
            if is_one_row:
                return entry, jnp.int32(1)
            return tiles_ref[START, entry], tiles_ref[COUNT, entry]

        def multiply(slot, acc):
            wg_rows = pl.ds(wg * tiles.wg_rows, tiles.wg_rows)
            for s in range(slabs):
                k = pl.ds(s * SPAN, SPAN)
                if tiles.is_swapped:
                    plgpu.wgmma(acc, w_smem.at[slot, wg_rows, k], x_mma.at[slot, s].T)
                else:
                    plgpu.wgmma(acc, x_mma.at[slot, s, wg_rows], w_smem.at[slot, :, k].T)

        def product(first):
            def slot_of(i):
                return lax.rem(first + i, stages)

            return leaf_sum(
                (tiles.wg_rows, tiles.cols), steps,
                take=lambda i: plgpu.barrier_wait(full.at[slot_of(i)]),
                multiply=lambda i, acc: multiply(slot_of(i), acc),
                give=lambda i: plgpu.barrier_arrive(empty.at[slot_of(i)]),
                in_flight=tiles.delay * slabs,
            )  # fmt: skip

        def pass_over(first):
            """Give back the steps of a tile in which this warpgroup has no row."""

            def step(i, _):
                slot = lax.rem(first + i, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_arrive(empty.at[slot])
                return ()

            lax.fori_loop(0, steps, step, ())

        def slots_of(start):
            """Slots of a tile's rows, read ahead of its product, as each would wait for memory."""
            if not (makes_list or by_slot):
                return []
            if is_one_row:
                return [start]
            places = [jnp.minimum(start + i, num_slots - 1) for i in range(tiles.cols)]
            if makes_list:
                return [order_ref[place] for place in places]
            return [lanes.read_now(order_ref, place, is_interpreted) for place in places]

        def store_swapped(total, start, count, col, slots):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out = gated_bf16(total[:64], total[64:], arithmetic) if tiles.is_gated else total
            put_transposed(out, out_reg.at[wg])
            cols = pl.ds(col + wg * wg_out, wg_out)
            if not (makes_list or by_slot):
                _store_rows(out_tma, (wg,), out_gmem, start, count, tiles.cols, cols)
                return

            for i, slot in enumerate(slots):
                source, row = (i, slot) if by_slot else (lax.div(slot, jnp.int32(top_k)), start + i)
                if is_one_row:
                    source, row = 0, slot

                @pl.when(i < count)
                def _(source=source, row=row):
                    plgpu.copy_smem_to_gmem(
                        out_tma.at[wg, pl.ds(source, 1)],
                        out_gmem.at[pl.ds(row, 1), cols],
                        commit_group=False,
                    )

            plgpu.commit_smem_to_gmem_group()

        def store_tall(total, start, count, col):
            for i, c in enumerate(range(0, tiles.out_cols, SPAN)):
                block = total[:, c : c + SPAN]
                if tiles.is_gated:
                    up = total[:, tiles.out_cols + c : tiles.out_cols + c + SPAN]
                    block = gated_bf16(block, up, arithmetic)
                staged = (wg, i % 2)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out_reg.at[*staged][...] = block.astype(jnp.bfloat16)  # ROUND: once
                plgpu.commit_smem()
                _store_rows(out_tma, staged, out_gmem, start, count, 64, pl.ds(col + c, SPAN))

        @pl.when(wg < tiles.num_wgs)
        def compute():
            if has_register_shares:
                plgpu.set_max_registers(232, action="increase")
            if makes_list and not is_one_row:
                plgpu.barrier_wait(listed)

            def one_tile(turn, _):
                entry, col = locate(turn)
                start, count = rows_of(entry)
                first = turn * steps
                if tiles.is_swapped:
                    slots = slots_of(start)
                    store_swapped(product(first), start, count, col, slots)
                    return ()
                mine = jnp.clip(count - wg * 64, 0, 64)

                @pl.when(mine > 0)
                def _():
                    store_tall(product(first), start + wg * 64, mine, col)

                pl.when(mine == 0)(lambda: pass_over(first))
                return ()

            lax.fori_loop(0, num_turns(), one_tile, ())
            plgpu.wait_smem_to_gmem(0)

        def route_into(ids_smem):
            assert few is not None
            route_rows(
                inputs[0], 0, tuple(made_gmem[first_routed:]), ids_smem, num_rows=x.shape[0],
                is_kept=cta == 0, num_experts=num_local, top_k=top_k,
                renormalise=few.renormalise, is_interpreted=is_interpreted,
            )  # fmt: skip

        def put_ids(ids_smem, math):
            """The experts of all slots, in shared memory."""
            assert few is not None
            if not few.routes:
                ids_smem[...] = local_ids(inputs[0], 0, inputs[1][0], num_local, math)
                return
            ids_smem[...] = math.full((sm90_rows.LANES,), -1, jnp.int32)
            plgpu.commit_smem()
            route_into(ids_smem)

        def write_zeros():
            """Zeros for the slots of experts that are not here."""
            ids_gmem, first_expert = inputs[3], inputs[4][0]
            zeros_smem[...] = jnp.zeros(zeros_smem.shape, zeros_smem.dtype)
            plgpu.commit_smem()

            def one_slot(turn, _):
                slot = turn * num_ctas + cta
                expert = ids_gmem[slot] - first_expert

                @pl.when((expert < 0) | (expert >= num_local))
                def _():
                    for c in range(0, num_out, zeros_span):
                        plgpu.copy_smem_to_gmem(
                            zeros_smem.at[pl.ds(0, zeros_span)],
                            out_gmem.at[slot, pl.ds(c, zeros_span)],
                        )

                return ()

            turns = lax.div(num_slots - cta + (num_ctas - 1), jnp.int32(num_ctas))
            lax.fori_loop(0, turns, one_slot, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == tiles.num_wgs)
        def load():
            if has_register_shares:
                plgpu.set_max_registers(40, action="decrease")
            if makes_list and is_one_row:
                route_into(experts_ref)
                plgpu.commit_smem()
            elif makes_list:
                made = Work(tiles=tiles_ref, num_tiles=num_tiles_ref, order=order_ref)
                schedule_few(
                    put_ids, num_slots, made, few_smem,
                    num_local=num_local, tile_rows=tiles.tile_rows, is_interpreted=is_interpreted,
                )  # fmt: skip
                plgpu.commit_smem()
                plgpu.barrier_arrive(listed)

            def one_tile(turn, _):
                entry, col = locate(turn)
                expert = expert_of(entry)
                row = jnp.int32(0) if makes_list else rows_of(entry)[0]
                first = turn * steps

                def step(i, _):
                    n = first + i
                    slot = lax.rem(n, stages)

                    @pl.when(n >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for piece, size, offset in w_pieces:
                        plgpu.copy_gmem_to_smem(
                            w_gmem.at[
                                expert, pl.ds(col + offset, size), pl.ds(i * tiles.k, tiles.k)
                            ],
                            w_smem.at[slot, pl.ds(piece, size)],
                            full.at[slot],
                        )
                    for s in range(slabs):
                        plgpu.copy_gmem_to_smem(
                            x_gmem.at[
                                pl.ds(row, tiles.tile_rows), pl.ds(i * tiles.k + s * SPAN, SPAN)
                            ],
                            x_tma.at[slot, s],
                            full.at[slot],
                        )
                    return ()

                lax.fori_loop(0, steps, step, ())
                return ()

            turns = num_turns()
            lax.fori_loop(0, turns, one_tile, ())
            if writes_zeros:
                write_zeros()
            if makes_list and not is_one_row:

                @pl.when(cta == 0)
                def _():
                    copy = functools.partial(lanes.copy, is_interpreted=is_interpreted)
                    for i in range(3):
                        copy(tiles_ref.at[i], made_gmem[0].at[i])
                    copy(num_tiles_ref, made_gmem[1])
                    copy(order_ref, made_gmem[2])

            used = lax.min(turns * steps, jnp.int32(stages))

            def drain(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(turns * steps - used + i, stages)])
                return ()

            lax.fori_loop(0, used, drain, ())

    bf16 = jnp.bfloat16
    out_block = (tiles.num_wgs, tiles.cols, wg_out) if tiles.is_swapped else (
        tiles.num_wgs, 2, 64, SPAN
    )  # fmt: skip
    smem_lists = [plgpu.SMEM(s.shape, s.dtype) for s in list_shapes]
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((num_slots, num_out), bf16), *made_shapes],
        scratch_types=(
            _rows_block((stages, slabs, tiles.tile_rows, SPAN), is_interpreted),
            plgpu.SMEM((stages, tiles.cta_weights, tiles.k), bf16, transforms=tiled(SPAN, bf16)),
            _rows_block(out_block, is_interpreted),
            plgpu.SMEM((256,), bf16) if writes_zeros else None,
            smem_lists if makes_list else None,
            few_memory(num_local) if makes_list and not is_one_row else None,
            plgpu.Barrier(num_arrivals=len(w_pieces) + slabs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tiles.num_wgs, num_barriers=stages),
            plgpu.Barrier(),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=num_threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=False,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # A thread reads back only what it wrote itself, in one layout; TMA has its own fences.
            unsafe_no_auto_barriers=True,
        ),
        kernel_name="detjax_experts_gate_up" if tiles.is_gated else "detjax_experts_down",
        interpret=interpret,
    )
    return kernel(x, w, *lists)
