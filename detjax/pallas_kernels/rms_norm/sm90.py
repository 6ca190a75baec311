# SPDX-License-Identifier: Apache-2.0
"""RMSNorm on Hopper.

Wide rows (D > 256, a multiple of 128) are cut into chunks of 128 * v channels. A warpgroup takes
one chunk or all of a row's: which of them is chosen by M for speed and changes no bit. Other rows
lie in tiles of up to 16, a few lanes to a row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import memref

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.hopper_sums import row_sum
from detjax.pallas_kernels.sm90_hardware import NUM_SMS


def narrow_scale(parts: list, tile: rows.Tile, *, width: int, eps: float):
    """`rsqrt(mean square + eps)` of each row of a tile, over all column parts: [rows].

    # ORDER: `fma(second, second, first * first)` of the halves, element by element; then a thread's
    # elements left to right, then a row's lanes across distance 1, 2, 4, ....
    """
    squares = tile.whole.mul(parts[0], parts[0])
    for part in parts[1:]:
        squares = tile.whole.fma(part, part, squares)
    math = tile.per_row
    total = tile.sum_columns(squares)
    mean = math.divide(total, math.full(total.shape, width))
    return math.reciprocal_root(math.add(mean, math.full(total.shape, eps)))


def narrow_normalise(parts: list, gains: list, tile: rows.Tile, *, width: int, eps: float) -> list:
    """`(v * r) * gain` in float32, of each column part of a tile of rows."""
    shape = parts[0].shape
    scale = tile.over_columns(narrow_scale(parts, tile, width=width, eps=eps), shape)
    gains = [tile.over_rows(g.astype(jnp.float32), shape) for g in gains]
    return [tile.whole.mul(tile.whole.mul(v, scale), g) for v, g in zip(parts, gains, strict=True)]


def wide_scale(sums_ref, math: rows.Arithmetic, *, shape, width: int, eps: float):
    """`rsqrt(mean square + eps)` from the sums of all warps [chunks, 4 or LANES], in all elements.

    # ORDER: warp sums pairwise in order of channel, ((w0 + w1) + (w2 + w3)) + ....
    """
    num_chunks, apart = sums_ref.shape[0], sums_ref.shape[1] // 4
    if math.is_interpreted:
        sums = sums_ref[...][:, ::apart].reshape(-1)
        total = rows.pairwise([sums[i] for i in range(4 * num_chunks)], lambda a, b: a + b)
        return jnp.full(shape, lax.rsqrt(total / jnp.float32(width) + jnp.float32(eps)))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=math.layout),
    )
    def emit(ctx, ref):
        index = ir.IndexType.get()
        f32 = ir.F32Type.get()
        sums = [
            memref.load(ref, [mgpu.c(chunk, index), mgpu.c(apart * warp, index)])
            for chunk in range(num_chunks)
            for warp in range(4)
        ]
        total = rows.pairwise(sums, lambda a, b: rows.instruction("add.rn.f32")(a, b))
        mean = rows.instruction("div.rn.f32")(total, mgpu.c(float(width), f32))
        value = rows.instruction("rsqrt.approx.f32")(
            rows.instruction("add.rn.f32")(mean, mgpu.c(float(np.float32(eps)), f32))
        )
        return mgpu.FragmentedArray.splat(value, shape, layout=math.layout.to_mgpu())

    return emit(sums_ref)


def num_terms(leaf_sums) -> tuple[int, int]:
    """Leaves of each tree, and trees: one, or three if [L, 3, M, D] is of float32 in parts."""
    if leaf_sums is None:
        return 0, 0
    num_leaves, *num_parts, _, _ = leaf_sums.shape
    return (num_leaves, *(num_parts or [1]))


def load_leaves(leaves_gmem, part: int, place: tuple, load) -> list:
    """The leaves at `place`, rows and columns, of a tree."""
    num_leaves, _ = num_terms(leaves_gmem)
    which = () if len(leaves_gmem.shape) == 3 else (part,)
    return [load(leaves_gmem.at[k, *which, *place]) for k in range(num_leaves)]


def trees_sum(parts: list):
    """Add the leaves of each tree, and the trees.

    # ORDER: ((l0 + l1) + (l2 + l3)) + ... of each; then the smallest part first, (p3 + p2) + p1.
    """
    trees = [rows.pairwise(leaves, lambda a, b: a + b) for leaves in parts]
    return rows.sum_parts(trees, lambda a, b: a + b)


def _whole_sum(parts: list, has_added: bool, math: rows.Arithmetic):
    """`trees_sum`, with what is last of the leaves added where it is not zero."""
    if not has_added:
        return trees_sum(parts)
    [(*leaves, added)] = parts
    return rows.add_unless_zero(trees_sum([leaves]), added, math)


def joined(leaves: list, residual, bias, dtype):
    """Add leaves, bias and residual, and round: the new residual stream in `dtype`.

    # ORDER: residual + (((l0 + l1) + (l2 + l3)) + ... + bias), f32; additions only: nothing fuses.
    """
    total = rows.pairwise(leaves, lambda a, b: a + b)
    if bias is not None:
        total = total + bias
    # ROUND: the residual stream, once.
    return (residual.astype(jnp.float32) + total).astype(dtype)


def _store_normed(out_gmem, place: tuple, normed, dtype, math: rows.Arithmetic, in_parts: bool):
    """Write normalised channels at `place`: rounded once to `dtype`, or as bfloat16 parts."""
    if not in_parts:
        out_gmem[place] = normed.astype(dtype)  # ROUND: once
        return
    for i, part in enumerate(rows.split_bf16(normed, math)):
        out_gmem[(i, *place)] = part


def _normed_shape(x, in_parts: bool) -> jax.ShapeDtypeStruct:
    if in_parts:
        return jax.ShapeDtypeStruct((rows.NUM_PARTS, *x.shape), jnp.bfloat16)
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _wide(
    leaf_sums, x, bias, gain, *, eps: float, warpgroups: int, num_ctas: int, in_parts: bool,
    has_added: bool, interpret: bool,
):  # fmt: skip
    """Normalise wide rows; a CTA has one row at a time, its chunks spread over warpgroups."""
    num_rows, width = x.shape
    form = row_sum(width)
    chunk = rows.LANES * form.vec_len
    each = form.num_parts // warpgroups
    if each * warpgroups != form.num_parts:
        raise ValueError(f"{warpgroups=} must divide the {form.num_parts} chunks of {width=}")
    math = rows.strided(chunk, form.vec_len, interpret)
    dtype = x.dtype
    num_leaves, num_parts = num_terms(leaf_sums)
    num_ctas = min(num_ctas, num_rows)
    has_turns = num_ctas < num_rows

    def body(
        leaves_gmem,  # [L, M, D] or [L, 3, M, D] f32, or None
        x_gmem,  # [M, D]
        bias_gmem,  # [D], or None
        gain_gmem,  # [D]
        total_gmem,  # [M, D], or None without leaves
        out_gmem,  # [M, D], or [3, M, D] bf16 in parts
        sums_smem,  # [1 or 2, chunks, LANES] f32
        ready,  # all warpgroups have added their squares; None for one warpgroup
    ):
        cta = lax.axis_index("cta")
        first_chunk = lax.axis_index("wg") * each if warpgroups > 1 else 0
        columns = [pl.ds((first_chunk + i) * chunk, chunk) for i in range(each)]

        def load_row(row):
            return [
                (
                    [load_leaves(leaves_gmem, p, (row, c), math.load) for p in range(num_parts)],
                    math.load(x_gmem.at[row, c]),
                )
                for c in columns
            ]

        def value(i, parts, x):
            if not num_leaves:
                return x
            b = None
            if bias is not None:
                b = math.load(bias_gmem.at[columns[i]]).astype(jnp.float32)
            return joined([_whole_sum(parts, has_added, math)], x, b, dtype)

        # WHY: first, as they are not in the L2 where weights stream between two norms; behind the
        # stores of a row their load could not be moved up.
        gains = [math.load(gain_gmem.at[c]) for c in columns]

        def one_row(turn, row):
            slot = lax.rem(turn, 2) if has_turns else 0
            loads = load_row(row)
            values = []
            for i, c in enumerate(columns):
                v = value(i, *loads[i])
                if num_leaves:
                    total_gmem[row, c] = v
                values.append(v.astype(jnp.float32))
                sums_smem[slot, first_chunk + i, :] = rows.square_sums(values[-1], math)
            if warpgroups > 1:
                plgpu.barrier_arrive(ready)
                plgpu.barrier_wait(ready)
            else:
                plgpu.commit_smem()
            scale = wide_scale(sums_smem.at[slot], math, shape=(chunk,), width=width, eps=eps)
            for c, v, g in zip(columns, values, gains, strict=True):
                normed = math.mul(math.mul(v, scale), g.astype(jnp.float32))
                _store_normed(out_gmem, (row, c), normed, dtype, math, in_parts)

        if not has_turns:
            one_row(jnp.int32(0), cta)
            return
        num_turns = lax.div(num_rows - cta + (num_ctas - 1), jnp.int32(num_ctas))

        @pl.loop(0, num_turns)
        def _turns(turn):
            one_row(turn, cta + turn * num_ctas)

    total_shape = jax.ShapeDtypeStruct(x.shape, dtype) if num_leaves else None
    options = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    return rows.run_kernel(
        body,
        (leaf_sums, x, bias, gain),
        out=[total_shape, _normed_shape(x, in_parts)],
        grid={"cta": num_ctas},
        name="detjax_rms_norm_wide",
        is_interpreted=interpret,
        scratch_types=[
            plgpu.SMEM((2 if has_turns else 1, form.num_parts, rows.LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups) if warpgroups > 1 else None,
        ],
        **options,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WideRows:
    """Rows that a kernel normalises before it multiplies them: where they come from and go to.

    Attributes:
        width: D, channels of a row.
        dtype: Of the rows, before and after.
        read: Gives the channels `columns` of row `row`, called as `read(row, columns, math)`.
        store: Takes a chunk's normalised channels, called as `store(values, row, start, math)`.
        keep: Called as `store`, with channels as they were read.
        ready: Called before rows are read, when gains are on their way.
        arrived: Called when all rows have been read.
        is_read_again: Whether `read` reads shared memory, so that no values need wait in registers.
    """

    width: int
    dtype: jnp.dtype
    read: Callable
    store: Callable
    keep: Callable
    ready: Callable[[], None]
    arrived: Callable[[], None]
    is_read_again: bool


def normalise_wide_rows(
    source: WideRows, gain_gmem, row_ids: list, sums_smem, *,
    eps: float, num_registers: int, is_interpreted: bool,
) -> None:  # fmt: skip
    """Normalise a few wide rows inside a kernel that multiplies them: one warpgroup's share.

    Args:
        source: The rows.
        gain_gmem: Scale of each channel.
        row_ids: The rows to take.
        sums_smem: float32 [len(row_ids), chunks, 4], this warpgroup's own.
        eps: Added to the mean square.
        num_registers: Of a thread; they bound the rows that are read at once.
        is_interpreted: Whether the kernel is interpreted.

    Numerics:
        The instructions of `rms_norm`, in its order, so its bits.
    """
    form = row_sum(source.width)
    chunk = rows.LANES * form.vec_len
    math = rows.strided(chunk, form.vec_len, is_interpreted)
    starts = range(0, source.width, chunk)
    gains = [math.load(gain_gmem.at[pl.ds(s, chunk)]) for s in starts]
    source.ready()
    of_row = form.num_parts * pl.cdiv(form.vec_len, 2)
    at_once = max(1, (num_registers - 56) * 4 // 5 // of_row)
    for first in range(0, len(row_ids), at_once):
        taken = list(enumerate(row_ids))[first : first + at_once]
        values = [[source.read(row, pl.ds(s, chunk), math) for s in starts] for _, row in taken]
        for (i, _), row_values in zip(taken, values, strict=True):
            for c, v in enumerate(row_values):
                sums = rows.square_sums(v.astype(jnp.float32), math)
                rows.keep_warp_values(sums, sums_smem.at[i, c], math)
        plgpu.commit_smem()
        if first + at_once >= len(row_ids):
            source.arrived()
        if form.vec_len > 1 and not source.is_read_again:
            # WHY: else values wait for their second use as float32, in twice the registers.
            values = lax.optimization_barrier(values)
        for (i, row), row_values in zip(taken, values, strict=True):
            scale = wide_scale(sums_smem.at[i], math, shape=(chunk,), width=source.width, eps=eps)
            for start, v, g in zip(starts, row_values, gains, strict=True):
                if source.is_read_again:
                    v = source.read(row, pl.ds(start, chunk), math)
                source.keep(v, row, start, math)
                normed = math.mul(math.mul(v.astype(jnp.float32), scale), g.astype(jnp.float32))
                source.store(normed.astype(source.dtype), row, start, math)  # ROUND: once


def _narrow(
    leaf_sums, x, bias, gain, *, eps: float, in_parts: bool, has_added: bool, interpret: bool
):
    """Normalise narrow rows, up to 16 or 4 to a CTA."""
    num_rows, width = x.shape
    form = row_sum(width)
    tile_rows = rows.most_rows(rows.LANES // form.lanes, num_rows)
    tile = rows.tile_of_rows(
        tile_rows, lanes=form.lanes, vec_len=form.vec_len, is_interpreted=interpret
    )
    part_len = width // form.num_parts
    shape = (tile_rows, part_len)
    dtype = x.dtype
    num_leaves, num_parts = num_terms(leaf_sums)

    def body(
        leaves_gmem,  # [L, M, D] or [L, 3, M, D] f32, or None
        x_gmem,  # [M, D]
        bias_gmem,  # [D], or None
        gain_gmem,  # [D]
        total_gmem,  # [M, D], or None without leaves
        out_gmem,  # [M, D], or [3, M, D] bf16 in parts
    ):
        # The last tile starts early instead of ending late: some rows are written twice, alike.
        first = jnp.minimum(lax.axis_index("cta") * tile_rows, num_rows - tile_rows)
        here = pl.ds(first, tile_rows)
        values = []
        for p in range(form.num_parts):
            columns = pl.ds(p * part_len, part_len)
            v = tile.whole.load(x_gmem.at[here, columns])
            if num_leaves:
                leaves = [
                    load_leaves(leaves_gmem, part, (here, columns), tile.whole.load)
                    for part in range(num_parts)
                ]
                b = None
                if bias is not None:
                    b = tile.per_col.load(bias_gmem.at[columns]).astype(jnp.float32)
                    b = tile.over_rows(b, shape)
                v = joined([_whole_sum(leaves, has_added, tile.whole)], v, b, dtype)
                total_gmem[here, columns] = v
            values.append(v.astype(jnp.float32))
        gains = [
            tile.per_col.load(gain_gmem.at[pl.ds(p * part_len, part_len)])
            for p in range(form.num_parts)
        ]
        out = narrow_normalise(values, gains, tile, width=width, eps=eps)
        for p in range(form.num_parts):
            place = (here, pl.ds(p * part_len, part_len))
            _store_normed(out_gmem, place, out[p], dtype, tile.whole, in_parts)

    total_shape = jax.ShapeDtypeStruct(x.shape, dtype) if num_leaves else None
    return rows.run_kernel(
        body,
        (leaf_sums, x, bias, gain),
        out=[total_shape, _normed_shape(x, in_parts)],
        grid={"cta": pl.cdiv(num_rows, tile_rows)},
        name="detjax_rms_norm_narrow",
        is_interpreted=interpret,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSchedule:
    """How wide rows are spread over the GPU; changes no bit.

    Attributes:
        warpgroups: Of a CTA; they share a row.
        num_ctas: Most CTAs; each takes rows in turn.
    """

    warpgroups: int
    num_ctas: int


def choose_schedule(*, num_rows: int, num_chunks: int, num_leaves: int) -> NormSchedule:
    """Spread a row over many warpgroups where rows are few, for the latency of one row."""
    many = max(w for w in range(1, 9) if num_chunks % w == 0)
    if num_rows <= 2 * NUM_SMS or num_leaves > 1:
        return NormSchedule(warpgroups=many, num_ctas=2**30)
    return NormSchedule(warpgroups=1, num_ctas=2**30)


def _normalise(
    leaf_sums, x, bias, gain, *, eps, schedule, interpret, in_parts=False, has_added=False
):
    form = row_sum(x.shape[1])
    num_leaves = 0 if leaf_sums is None else leaf_sums.shape[0] - has_added
    if num_leaves & (num_leaves - 1):
        raise ValueError(f"{num_leaves} leaf sums must be a power of two")
    options = {"eps": eps, "in_parts": in_parts, "has_added": has_added, "interpret": interpret}
    if not form.is_wide:
        return _narrow(leaf_sums, x, bias, gain, **options)
    num_leaves, num_parts = num_terms(leaf_sums)
    schedule = schedule or choose_schedule(
        num_rows=x.shape[0],
        num_chunks=form.num_parts,
        num_leaves=num_leaves * num_parts,
    )
    return _wide(
        leaf_sums,
        x,
        bias,
        gain,
        warpgroups=schedule.warpgroups,
        num_ctas=schedule.num_ctas,
        **options,
    )


_STATIC = ("eps", "schedule", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def rms_norm(
    x, gain, *, eps: float, schedule: NormSchedule | None = None, interpret: bool = False
) -> jax.Array:
    """See `api.rms_norm`.

    Args:
        x: Rows.
        gain: Scale of each channel.
        eps: Added to the mean square.
        schedule: Overrides the choice by M, for tests and benchmarks; changes no bit.
        interpret: Run in interpret mode.

    Raises:
        ValueError: If `row_sum` defines no sum for D.

    Numerics:
        # ORDER: `row_sum(D)` fixes the sum: chunks of 128 * v channels, v in a thread by fma left
        # to right, 32 lanes by exchange, then all warps of the row pairwise (D > 256, a multiple of
        # 128); else halves by fma, then a row's 8 or 32 lanes. Then `/ D`, `+ eps`, rsqrt.approx.
        # ROUND: `(x * r) * gain` in float32, once to the dtype.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (D, dtypes, build).

    Reference:
        Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    _, out = _normalise(None, x, None, gain, eps=eps, schedule=schedule, interpret=interpret)
    return out


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm_parts(x, gain, *, eps: float, interpret: bool = False) -> jax.Array:
    """Normalise float32 rows and cut the result for products of bfloat16: [3, M, D] bfloat16.

    `sum(rms_norm_parts(x, gain)) = rms_norm(x, gain)`

    Args:
        x: Rows, float32.
        gain: Scale of each channel.
        eps: Added to the mean square.
        interpret: Run in interpret mode.

    Raises:
        ValueError: If `row_sum` defines no sum for D.

    Numerics:
        # ORDER: that of `rms_norm`.
        # ROUND: `sm90_rows.split_bf16` of `rms_norm`'s float32 result: nothing is lost.
        Claims: run-invariant, batch-invariant, path-consistent. Bits depend on (D, dtypes, build).
    """
    _, out = _normalise(
        None, x, None, gain, eps=eps, schedule=None, interpret=interpret, in_parts=True
    )
    return out


@functools.partial(jax.jit, static_argnames=(*_STATIC, "has_added"))
def combine_add_rms_norm(
    leaf_sums,
    residual,
    bias,
    gain,
    *,
    eps: float,
    schedule: NormSchedule | None = None,
    has_added: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Add the leaves of a row-parallel product, then as `add_rms_norm`, in one launch.

    `partial = tree(leaf_sums)`, `total = round(residual + (partial + bias))` and
    `out = rms_norm(total)`

    Args:
        leaf_sums: float32 [L, M, D] or, in parts, [L, 3, M, D], of `linear_leaf_sums`; L a power
            of two, and one more with `has_added`.
        residual: The residual stream.
        bias: The product's bias, or None.
        gain: Scale of each channel.
        eps: Added to the mean square.
        schedule: Overrides the choice by M, for tests and benchmarks; changes no bit.
        has_added: Whether the last of `leaf_sums` is what adapters add to the tree, where it is not
            zero (`lora.api.lora_add`).
        interpret: Run in interpret mode.

    Raises:
        ValueError: If L is no power of two, or `row_sum` defines no sum for D.

    Numerics:
        # ORDER: leaves as the perfect binary tree ((l0 + l1) + (l2 + l3)) + ..., float32, then the
        # bias, then the residual: the bits of `add_rms_norm` of the tree. Parts are added behind
        # their trees, (p3 + p2) + p1: the bits of `linear.sm90_float32.add_parts`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    total, out = _normalise(
        leaf_sums, residual, bias, gain, eps=eps, schedule=schedule, has_added=has_added,
        interpret=interpret,
    )  # fmt: skip
    return total, out


def add_rms_norm(
    partial,
    residual,
    bias,
    gain,
    *,
    eps: float,
    schedule: NormSchedule | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_rms_norm`: `combine_add_rms_norm` of one leaf.

    Numerics:
        # ROUND: the residual stream once; its rounded value is normalised as `rms_norm` does.
        Claims: run-invariant, batch-invariant, path-consistent.
    """
    return combine_add_rms_norm(
        partial[None], residual, bias, gain, eps=eps, schedule=schedule, interpret=interpret
    )
