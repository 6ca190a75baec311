# SPDX-License-Identifier: Apache-2.0
"""Attention of float32 queries, keys and values on Hopper: products of bfloat16 parts.

A float32 is the sum of three bfloat16 values, so a product of two is nine; the six greatest are
kept. Of a CTA's two warpgroups one has half pages copied to shared memory, some ahead, cuts them
into parts and puts these into a ring there; the other multiplies. A CTA takes a tile of 64 query
rows and 64 channels of their output: all splits of it, or, where rows are few, one split, and the
merge of decode adds them up.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.attention import sm90_arithmetic as bits
from detjax.pallas_kernels.attention.sm90_decode_job import DecodeConfig, Job
from detjax.pallas_kernels.attention.sm90_decode_listed import merge_splits
from detjax.pallas_kernels.hopper_sums import score_scale
from detjax.pallas_kernels.linear.sm90_float32 import split_rows
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.sm90_hardware import LANES, NUM_SMS
from detjax.pallas_kernels.sm90_ring import Ring

HALF = 64
"""Keys of a slot of the ring: half a block."""

F32_SWIZZLED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

STAGED = 4
"""Pieces of 64 keys or values and up to 64 channels that are here or on their way, uncut."""

PRODUCTS = ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0))
"""Which part of the first operand meets which of the second, in order: the greatest last. Left out
are those whose factors are both small: together under 2**-24 of abs(a) abs(b)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """What a launch attends to: static.

    Attributes:
        batch: Sequences.
        kv_heads: Key/value heads.
        channels: Of a head.
        num_tiles: Tiles of 64 rows of a sequence and a kv head.
        rows: Rows of a tile that are loaded and stored: 64, or fewer of a single tile.
        num_pages: Of a layer of the cache.
        table_len: Blocks of the page table.
        per_split: Blocks of a split.
        window: As in `api.attention`.
        is_split: Whether a CTA takes one split and leaves its state for the merge.
        is_interpreted: Use plain operations, for interpretation on CPU.
    """

    batch: int
    kv_heads: int
    channels: int
    num_tiles: int
    rows: int
    num_pages: int
    table_len: int
    per_split: int
    window: int | None
    is_split: bool
    is_interpreted: bool

    @property
    def num_splits(self) -> int:
        """Splits that the page table has room for."""
        return -(-self.table_len // self.per_split)

    @property
    def slots(self) -> int:
        """Of the ring: as many as fit."""
        return 2 if self.channels >= 128 else 3

    @property
    def value_channels(self) -> int:
        """Channels of the output that a CTA takes, so that its registers suffice."""
        return bits.channel_span(self.channels)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a CTA's output."""
        return bits.ROWS, self.value_channels


class Arrays(NamedTuple):
    """Operands of the kernel, in device memory."""

    q: Any  # [3, rows, C] bf16, parts of the queries
    pages: Any  # [L N 2 K, 128, C] f32
    table: Any  # [B, n] int32
    positions: Any  # [B, rows of a sequence] int32
    limits: Any  # [B, tiles, 3] int32
    layer: Any  # [1] int32


class Shared(NamedTuple):
    """Shared memory of a CTA, and its barriers; None where a launch has none."""

    q: Any  # [3, 64, C] bf16, parts of a tile's queries
    staged: Any  # [STAGED, 64, value channels] f32, pieces of half blocks
    ring: Any  # [slots, 3, 64, C] bf16, parts of half blocks of keys or values
    o: Any  # [64, value channels] f32, the output
    ml: Any  # [2, 64] f32, maxima and sums of a split
    weights: Any  # [3, 64, 64] bf16, if interpreted: else weights stay in registers
    q_filled: Any
    arrived: Any  # [STAGED]
    filled: Any  # [slots]
    free: Any  # [slots]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refs:
    """The references of the kernel.

    Attributes:
        arrays: Operands.
        results: The output; or of each split the output, and the maximum and sum.
        shared: Shared memory and barriers.
        ring: Who may touch the slots of `shared.ring`.
    """

    arrays: Arrays
    results: list
    shared: Shared
    ring: Ring


@dataclass(frozen=True, kw_only=True, slots=True)
class TileWork:
    """What both warpgroups of a CTA know: scalars.

    Attributes:
        seq: Which sequence.
        kv_head: Which key/value head.
        first_row: Of the tile, among all rows.
        columns: Channels of the output.
        entry: Which partial result it writes, if any.
        first: First block.
        end: Behind its last block.
        last: Position of the tile's last token.
    """

    seq: Any
    kv_head: Any
    first_row: Any
    columns: Any
    entry: Any
    first: Any
    end: Any
    last: Any


def attention(
    q, place: CachePlace, *, window: int | None, per_split: int,
    is_split: bool | None = None, is_interpreted: bool = False,
) -> jax.Array:  # fmt: skip
    """See `sm90.attention`, of float32.

    Args:
        q: Queries.
        place: Of the queries in the cache; the layer is an int32 scalar.
        window: How many tokens back a query sees; None sees all.
        per_split: Blocks of 128 keys in a split.
        is_split: Overrides, for tests, whether a CTA takes one split; changes no bit.
        is_interpreted: Interpret on a CPU.

    Numerics:
        # ORDER: a product of two float32 matrices is `PRODUCTS` of their parts, one after the other
        in one f32 wgmma accumulator, each with K in order, 16 at a time.
        Scores, weights, sums and merges are those of the bfloat16 kernels, with a block's weights
        added half by half. The weights are not rounded. Products of halves with their values begin
        at zero: `out = fma(out, decay, product of the first) + product of the second`.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent.
    """
    kv_heads, table_len = place.pages.shape[3], place.page_table.shape[1]
    num_rows = q.shape[1] * q.shape[2] // kv_heads
    if is_split is None:
        pairs = q.shape[0] * kv_heads
        has_one_tile = num_rows <= bits.ROWS and LANES % q.shape[3] == 0 and window is None
        is_few = pairs < 2 * NUM_SMS
        is_split = has_one_tile and is_few and table_len > per_split
    return _attention(
        q, place,
        window=window, per_split=per_split, is_split=is_split, is_interpreted=is_interpreted,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("window", "per_split", "is_split", "is_interpreted"))
def _attention(
    q, place: CachePlace, *, window, per_split: int, is_split: bool, is_interpreted: bool
) -> jax.Array:
    pages, page_table, positions, layer = place
    batch, query_len, num_heads, channels = q.shape
    kv_heads = pages.shape[3]
    group = num_heads // kv_heads
    num_rows = query_len * group
    num_tiles = -(-num_rows // bits.ROWS)
    # A copy moves rows in eights.
    padded = -(-num_rows // 8) * 8 if num_tiles == 1 else num_tiles * bits.ROWS
    tiles = Tiles(
        batch=batch, kv_heads=kv_heads, channels=channels, num_tiles=num_tiles,
        rows=min(padded, bits.ROWS), num_pages=pages.shape[1], table_len=page_table.shape[1],
        per_split=per_split, window=window, is_split=is_split, is_interpreted=is_interpreted,
    )  # fmt: skip
    rows = q.reshape(batch, query_len, kv_heads, group, channels).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch * kv_heads, num_rows, channels)
    rows = jnp.pad(rows, ((0, 0), (0, padded - num_rows), (0, 0)))
    parts = split_rows(rows.reshape(-1, 8 * channels), interpret=is_interpreted)
    parts = parts.reshape(sm90_rows.NUM_PARTS, -1, channels)
    row_positions = jnp.pad(
        jnp.repeat(positions, group, axis=1),
        ((0, 0), (0, num_tiles * bits.ROWS - num_rows)),
        constant_values=-1,
    )
    limits = _tile_limits(row_positions, window)
    operands = Arrays(
        q=parts, pages=bits.page_rows(pages), table=page_table, positions=row_positions,
        limits=limits, layer=layer.reshape(1),
    )  # fmt: skip
    if is_split:
        out = _merged(tiles, *_launch(tiles, operands), limits, row_positions, q.dtype)
    else:
        [out] = _launch(tiles, operands)
    out = out.reshape(batch, kv_heads, padded, channels)[:, :, :num_rows]
    out = out.reshape(batch, kv_heads, query_len, group, channels)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _tile_limits(row_positions: jax.Array, window: int | None) -> jax.Array:
    """First block, the one behind the last, and the last position of each tile: [B, tiles, 3]."""
    tiled = row_positions.reshape(row_positions.shape[0], -1, bits.ROWS)
    last = tiled.max(axis=2)
    first = jnp.zeros_like(last)
    if window is not None:
        earliest = jnp.where(tiled >= 0, tiled, jnp.iinfo(jnp.int32).max).min(axis=2)
        first = jnp.maximum(jnp.minimum(earliest, last) - (window - 1), 0) // bits.BLOCK
    return jnp.stack([first, last // bits.BLOCK + 1, last], axis=-1)


def _merged(tiles: Tiles, o, ml, limits, row_positions, dtype) -> jax.Array:
    """The splits of all sequences, added up."""
    job = Job(
        batch=tiles.batch, query_len=1, kv_heads=tiles.kv_heads, group=tiles.rows,
        channels=tiles.channels, num_pages=tiles.num_pages, padded_rows=tiles.rows,
        rows_apart=tiles.rows, dtype=dtype, new_token=None, config=DecodeConfig(),
        is_interpreted=tiles.is_interpreted,
    )  # fmt: skip
    ends = limits[:, 0, 1]
    counts = jnp.stack(
        [
            jnp.arange(tiles.batch, dtype=jnp.int32) * tiles.num_splits,
            jnp.maximum(-(-ends // tiles.per_split), 1),
        ],
        axis=-1,
    )
    return merge_splits(job, o, ml, counts, row_positions, query_len=1, group=tiles.rows)


def _locate(tiles: Tiles, limits_ref) -> TileWork:
    """What this CTA does; the longest tiles first."""
    item = lax.axis_index("cta")
    shares = tiles.channels // tiles.value_channels
    share, item = lax.rem(item, shares), lax.div(item, shares)
    split = jnp.int32(0)
    if tiles.is_split:
        split, item = lax.rem(item, tiles.num_splits), lax.div(item, tiles.num_splits)
    kv_head, item = lax.rem(item, tiles.kv_heads), lax.div(item, tiles.kv_heads)
    seq, tile = lax.rem(item, tiles.batch), tiles.num_tiles - 1 - lax.div(item, tiles.batch)
    first, end, last = (limits_ref[seq, tile, i] for i in range(3))
    if tiles.is_split:
        first, end = split * tiles.per_split, jnp.minimum(end, (split + 1) * tiles.per_split)
    return TileWork(
        seq=seq,
        kv_head=kv_head,
        first_row=((seq * tiles.kv_heads + kv_head) * tiles.num_tiles + tile) * tiles.rows,
        columns=pl.ds(share * tiles.value_channels, tiles.value_channels),
        entry=(seq * tiles.num_splits + split) * tiles.kv_heads + kv_head,
        first=first,
        end=jnp.maximum(end, first),
        last=last,
    )


def _load(tiles: Tiles, work: TileWork, refs) -> None:
    """The loading warpgroup: queries, then half pages in parts, keys and values in turn."""
    for part in range(sm90_rows.NUM_PARTS):
        plgpu.copy_gmem_to_smem(
            refs.arrays.q.at[part, pl.ds(work.first_row, tiles.rows)],
            refs.shared.q.at[part, pl.ds(0, tiles.rows)],
            refs.shared.q_filled,
        )
    plain = _plain(tiles)
    first_page = refs.arrays.layer[0] * tiles.num_pages

    span = tiles.value_channels
    # Which half page of a block, keys first, and which of its channels.
    pieces = [(n, c) for n in range(2) for c in range(0, tiles.channels, span)] + [(2, 0), (3, 0)]

    def place(j, n: int):
        """Where piece `n` of a block waits to be cut."""
        return lax.rem((j - work.first) * len(pieces) + n, jnp.int32(STAGED))

    def page_of(j):
        return first_page + refs.arrays.table[work.seq, jnp.minimum(j, work.end - 1)]

    def ask_for(page, j, n: int) -> None:
        """Have a piece of block `j` copied, if there is such a block."""
        (which, half), column = divmod(pieces[n][0], 2), pieces[n][1]

        @pl.when(j < work.end)
        def _copy():
            at = (page * 2 + which) * tiles.kv_heads + work.kv_head
            columns = work.columns if which else pl.ds(column, span)
            source = refs.arrays.pages.at[at, pl.ds(half * HALF, HALF), columns]
            to = place(j, n)
            plgpu.copy_gmem_to_smem(source, refs.shared.staged.at[to], refs.shared.arrived.at[to])

    def piece_of(j, n: int):
        """Some channels of half a page, float32 in registers."""
        at = place(j, n)
        plgpu.barrier_wait(refs.shared.arrived.at[at])
        if tiles.is_interpreted:
            return refs.shared.staged[at]
        return plgpu.load(refs.shared.staged.at[at], layout=plgpu.Layout.WGMMA)

    def put(x, j, piece: tuple[int, int]) -> None:
        """Put the parts of a piece into the ring; the last of a half page hands it over."""
        (which, half), column = divmod(piece[0], 2), piece[1]
        if which:
            # What is not written yet may be NaN, and must not meet a weight of 0.
            keys = plain.iota(x.shape, 0) + (j * bits.BLOCK + half * HALF)
            x = jnp.where(keys <= work.last, x, jnp.zeros_like(x))
        index = (j - work.first) * 4 + piece[0]
        slot = lax.rem(index, jnp.int32(tiles.slots))

        @pl.when((index >= tiles.slots) & (column == 0))
        def _is_free():
            plgpu.barrier_wait(refs.shared.free.at[slot])

        for i, part in enumerate(sm90_rows.split_bf16(x, plain)):
            refs.shared.ring[slot, i, :, pl.ds(column, span)] = part
        # All threads have read the piece by now, too: another may be copied there.
        plgpu.commit_smem()
        if which or column + span == tiles.channels:
            plgpu.barrier_arrive(refs.shared.filled.at[slot])

    @pl.when(work.end > work.first)
    def _first_pieces():
        page = page_of(work.first)
        for n in range(STAGED):
            ask_for(page, work.first, n)

    @pl.loop(work.first, work.end)
    def _one_block(j):
        pages = page_of(j), page_of(j + 1)
        for n, piece in enumerate(pieces):
            put(piece_of(j, n), j, piece)
            later, which = divmod(n + STAGED, len(pieces))
            ask_for(pages[later], j + later, which)

    bits.drain(refs.shared.free, (work.end - work.first) * 4)


def _scores(tiles: Tiles, refs, index):
    """Scores of a half block of keys, [64, 64]."""
    slot = refs.ring.wait(index)

    def issue(acc):
        def multiply(of_q, of_k):
            plgpu.wgmma(acc, refs.shared.q.at[of_q], refs.shared.ring.at[slot, of_k].T)

        if tiles.is_interpreted:  # where loops that call the interpreter may wait for a thread
            for pair in PRODUCTS:
                multiply(*pair)
            return acc[...]

        # WHY: a loop. Unrolled, the addresses of all parts wait in registers, of which 12 bytes a
        # thread spill.
        def one_product(n, _):
            multiply(
                *(
                    sum(jnp.where(n == i, pair[which], 0) for i, pair in enumerate(PRODUCTS))
                    for which in range(2)
                )
            )
            plgpu.wgmma_wait(0)
            return ()

        lax.fori_loop(0, len(PRODUCTS), one_product, ())
        return acc[...]

    scores = pl.run_scoped(issue, plgpu.ACC((bits.ROWS, HALF), jnp.float32))
    refs.ring.release(index)
    return scores


def _values(tiles: Tiles, refs, index, weights):
    """The weights of a half block times its values, [64, value channels]."""
    parts = sm90_rows.split_bf16(weights, _plain(tiles))
    if tiles.is_interpreted:
        for i, part in enumerate(parts):
            refs.shared.weights[i] = part
        parts = [refs.shared.weights.at[i] for i in range(len(parts))]
    slot = refs.ring.wait(index)

    def issue(acc):
        for of_w, of_v in PRODUCTS:
            v = refs.shared.ring.at[slot, of_v, :, pl.ds(0, tiles.value_channels)]
            plgpu.wgmma(acc, parts[of_w], v)
        return acc[...]

    out = pl.run_scoped(issue, plgpu.ACC(tiles.shape, jnp.float32))
    refs.ring.release(index)
    return out


def _plain(tiles: Tiles) -> sm90_rows.Arithmetic:
    """Sums and differences of tiles."""
    return sm90_rows.Arithmetic(layout=plgpu.Layout.WGMMA, is_interpreted=tiles.is_interpreted)


def _softmax_step(math: bits.AttentionArithmetic, scores: list, m, weight_sum, scale: float):
    """`bits.AttentionArithmetic.softmax_step` of a block in halves.

    # ORDER: the sum of a block's weights is that of its first half and that of its second.
    """
    block_max = jnp.maximum(*(jnp.max(s, axis=1) for s in scores))
    new_m = jnp.maximum(m, math.mul(block_max, math.full(m.shape, scale)))
    decay = math.exp2_difference(m, new_m)
    negative_max = math.spread(-new_m, scores[0].shape)
    weights = [math.exp2_scaled(s, negative_max, scale) for s in scores]
    per_row = sm90_rows.Arithmetic(layout=math.row_layout, is_interpreted=math.is_interpreted)
    block_sum = per_row.add(*(math.row_sum(w) for w in weights))
    return new_m, math.fma(weight_sum, decay, block_sum), decay, weights


def _compute(tiles: Tiles, work: TileWork, refs) -> None:
    """The multiplying warpgroup: blocks of a split in order, splits left to right."""
    math = bits.accumulator_arithmetic(tiles.is_interpreted)
    scale = score_scale(tiles.channels)
    tile_row = lax.div(work.first_row, jnp.int32(tiles.rows))
    tile = lax.rem(tile_row, jnp.int32(tiles.num_tiles))
    row_pos = math.load(refs.arrays.positions.at[work.seq, pl.ds(tile * bits.ROWS, bits.ROWS)])
    plgpu.barrier_wait(refs.shared.q_filled)
    one_a_row = (bits.ROWS,)
    empty = (math.full(one_a_row, bits.EMPTY_MAX), math.full(one_a_row, 0.0))

    def one_block(j, state):
        out, m, weight_sum = state
        index = (j - work.first) * 4
        scores = []
        for half in range(2):
            of_half = _scores(tiles, refs, index + half)
            first_key = j * bits.BLOCK + half * HALF
            scores.append(math.mask(of_half, row_pos, first_key, tiles.window))
        m, weight_sum, decay, weights = _softmax_step(math, scores, m, weight_sum, scale)
        product = _values(tiles, refs, index + 2, weights[0])
        out = math.fma(out, math.spread(decay, out.shape), product)
        product = _values(tiles, refs, index + 3, weights[1])
        return _plain(tiles).add(out, product), m, weight_sum

    def one_split(start, stop):
        return lax.fori_loop(start, stop, one_block, (math.full(tiles.shape, 0.0), *empty))

    def store(out_gmem):
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.shared.o.at[pl.ds(0, tiles.rows)], out_gmem)

    if tiles.is_split:
        refs.shared.o[...], refs.shared.ml[0, :], refs.shared.ml[1, :] = one_split(
            work.first, work.end
        )
        store(refs.results[0].at[work.entry, pl.ds(0, tiles.rows), work.columns])
        plgpu.copy_smem_to_gmem(refs.shared.ml, refs.results[1].at[work.entry])
        plgpu.wait_smem_to_gmem(0)
        return

    # The state of the splits before waits in shared memory: registers have no room for it.
    refs.shared.o[...] = math.full(tiles.shape, 0.0)
    per_split = jnp.int32(tiles.per_split)

    def fold(s, state):
        stop = jnp.minimum(work.end, (s + 1) * per_split)
        out, *other = one_split(jnp.maximum(work.first, s * per_split), stop)
        m, weight_sum, a, b = math.merge_scales(*state, *other)
        before = refs.shared.o[...]
        if not tiles.is_interpreted:
            before = plgpu.load(refs.shared.o, layout=plgpu.Layout.WGMMA)
        refs.shared.o[...] = math.merge_outputs(before, a, out, b)
        return m, weight_sum

    splits = lax.div(work.first, per_split), lax.div(work.end + (per_split - 1), per_split)
    _, weight_sum = lax.fori_loop(*splits, fold, empty)
    out = refs.shared.o[...]
    if not tiles.is_interpreted:
        out = plgpu.load(refs.shared.o, layout=plgpu.Layout.WGMMA)
    refs.shared.o[...] = math.finish(out, weight_sum, row_pos >= 0, jnp.float32)
    store(refs.results[0].at[pl.ds(work.first_row, tiles.rows), work.columns])
    plgpu.wait_smem_to_gmem(0)


def _launch(tiles: Tiles, operands: Arrays) -> list[jax.Array]:
    """The output of all rows; or of each split, what the merge reads."""
    pairs = tiles.batch * tiles.kv_heads
    num_items = pairs * (tiles.num_splits if tiles.is_split else tiles.num_tiles)
    shares = tiles.channels // tiles.value_channels
    f32, bf16 = jnp.float32, jnp.bfloat16
    out_type = [jax.ShapeDtypeStruct((pairs * tiles.num_tiles * tiles.rows, tiles.channels), f32)]
    if tiles.is_split:
        out_type = [
            jax.ShapeDtypeStruct((num_items, tiles.rows, tiles.channels), f32),
            jax.ShapeDtypeStruct((num_items, 2, bits.ROWS), f32),
        ]

    def body(arrays: Arrays, results: list, shared: Shared):
        ring = Ring(full=shared.filled, empty=shared.free, num_slots=tiles.slots)
        refs = Refs(arrays=arrays, results=results, shared=shared, ring=ring)
        work = _locate(tiles, arrays.limits)
        wg = lax.axis_index("wg")
        pl.when(wg == 0)(lambda: _compute(tiles, work, refs))
        pl.when(wg == 1)(lambda: _load(tiles, work, refs))

    parts = sm90_rows.NUM_PARTS
    swizzled = bits.swizzled(bits.channel_span(tiles.channels))
    of_slots = plgpu.Barrier(num_barriers=tiles.slots)
    shared = Shared(
        q=plgpu.SMEM((parts, bits.ROWS, tiles.channels), bf16, transforms=swizzled),
        staged=plgpu.SMEM((STAGED, HALF, tiles.value_channels), f32, transforms=F32_SWIZZLED),
        ring=plgpu.SMEM((tiles.slots, parts, HALF, tiles.channels), bf16, transforms=swizzled),
        o=plgpu.SMEM(tiles.shape, f32, transforms=F32_SWIZZLED),
        ml=plgpu.SMEM((2, bits.ROWS), f32) if tiles.is_split else None,
        weights=plgpu.SMEM((parts, bits.ROWS, HALF), bf16) if tiles.is_interpreted else None,
        q_filled=plgpu.Barrier(num_arrivals=parts),
        arrived=plgpu.Barrier(num_barriers=STAGED),
        filled=of_slots,
        free=of_slots,
    )
    [results] = plgpu.kernel(
        body,
        out_type=[out_type],
        scratch_types=[shared],
        grid=(num_items * shares,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        kernel_name="attention_float32_sm90",
        compiler_params=bits.COMPILER_PARAMS,
        interpret=plgpu.InterpretGPUParams() if tiles.is_interpreted else None,
    )(operands)
    return results
