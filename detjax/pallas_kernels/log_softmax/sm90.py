# SPDX-License-Identifier: Apache-2.0
"""Log-softmax on Hopper: a warp to each block of 128 logits, then one CTA to a row's tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from detjax.pallas_kernels import sm90_ptx as ptx
from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.hopper_sums import LOGIT_BLOCK
from detjax.pallas_kernels.sm90_hardware import NUM_SMS


def block_tile(num_blocks: int, interpret: bool) -> rows.Tile:
    """Lay out blocks, one to a warp; a warp may hold several."""
    return rows.tile_of_rows(num_blocks, lanes=32, vec_len=4, is_interpreted=interpret)


def stats_of(x, tile: rows.Tile) -> tuple:
    """Maximum and sum of exponentials of each block of a tile: two values a row.

    # ORDER: a lane's 4 logits left to right, then lanes across distance 1, 2, 4, 8, 16. The same
    # for every number of blocks in the tile.
    """
    m = jnp.max(x, axis=1)
    is_empty = m == -jnp.inf
    base = jnp.where(is_empty, tile.per_row.full(m.shape, 0.0), m)
    weights = jnp.exp(tile.whole.sub(x, tile.over_columns(base, x.shape)))
    total = tile.sum_columns(weights)
    return m, jnp.where(is_empty, tile.per_row.full(m.shape, 0.0), total)


@functools.partial(jax.jit, static_argnames=("vocab_block", "interpret"))
def block_stats(
    logits, *, vocab_block: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `api.block_stats`.

    Raises:
        ValueError: If `vocab_block` is not 128.

    Numerics:
        # ORDER: a lane's 4 exponentials left to right, then 32 lanes by exchange; libdevice's exp.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    if vocab_block != LOGIT_BLOCK:
        raise ValueError(f"sm90 log-softmax has blocks of {LOGIT_BLOCK} logits, not {vocab_block}")
    num_rows, width = logits.shape
    total = num_rows * (width // LOGIT_BLOCK)
    held = rows.most_rows(16 if total >= 16 * 4 * NUM_SMS else 4, total)
    tile = block_tile(held, interpret)

    def body(logits_gmem, max_gmem, sum_gmem):
        # The last tile starts early instead of ending late: some blocks are written twice, alike.
        first = jnp.minimum(lax.axis_index("cta") * held, total - held)
        here = pl.ds(first, held)
        max_gmem[here], sum_gmem[here] = stats_of(tile.whole.load(logits_gmem.at[here]), tile)

    out = jax.ShapeDtypeStruct((total,), jnp.float32)
    maxima, sums = rows.run_kernel(
        body,
        (logits.reshape(total, LOGIT_BLOCK),),
        out=[out, out],
        grid={"cta": pl.cdiv(total, held)},
        name="detjax_block_stats",
        is_interpreted=interpret,
    )
    return maxima.reshape(num_rows, -1), sums.reshape(num_rows, -1)


def _pairs(scalars: list, add):
    return rows.pairwise(scalars, add)


def row_maximum(x, math: rows.Arithmetic, smem):
    """Largest element of a padded row, as a scalar; through shared memory [LANES]."""
    smem[...] = rows.reduce_warps(
        x,
        math,
        first=lambda s: _pairs(s, lambda a, b: rows.instruction("max.NaN.f32")(a, b)),
        fold=lambda a, b: rows.instruction("max.NaN.f32")(a, b),
        plain=(lambda t: jnp.max(t, axis=1), jnp.maximum),
    )
    plgpu.commit_smem()
    return _pairs(rows.first_of_warps(smem), jnp.maximum)


def row_tree(x, math: rows.Arithmetic, smem):
    """Sum of a row of a power of two of elements, as a scalar.

    # ORDER: the perfect binary tree in order: a thread's neighbours, then lanes across distance
    # 1, 2, 4, 8, 16, then warps (w0 + w1) + (w2 + w3).
    """

    def plain_tree(t):
        while t.shape[1] > 1:
            t = t[:, 0::2] + t[:, 1::2]
        return t[:, 0]

    smem[...] = rows.reduce_warps(
        x,
        math,
        first=lambda s: _pairs(s, lambda a, b: rows.instruction("add.rn.f32")(a, b)),
        fold=lambda a, b: rows.instruction("add.rn.f32")(a, b),
        plain=(plain_tree, lambda a, b: a + b),
    )
    plgpu.commit_smem()
    return _pairs(rows.first_of_warps(smem), lambda a, b: a + b)


ROW_SCRATCH = [plgpu.SMEM((rows.LANES,), jnp.float32)] * 3
"""What `row_log_sum_exp` needs."""


def row_log_sum_exp(maxima, sums, smem, interpret: bool):
    """Combine the blocks of one row, in memory, by one warpgroup: a scalar."""
    (count,), (max_smem, sum_smem, out_smem) = maxima.shape, smem
    size = rows.LANES
    while size < count:
        size *= 2
    math = rows.strided(size, size // rows.LANES, interpret)
    one, shape = rows.strided(rows.LANES, 1, interpret), (rows.LANES,)
    m = rows.load_padded(maxima, count, math, size=size, fill=-np.inf)
    s = rows.load_padded(sums, count, math, size=size, fill=0.0)
    top = row_maximum(m, math, max_smem)
    terms = math.mul(s, jnp.exp(math.sub(m, math.full(m.shape, top))))
    total = row_tree(terms, math, sum_smem)
    out_smem[...] = one.add(one.full(shape, top), jnp.log(one.full(shape, total)))
    plgpu.commit_smem()
    return out_smem[0]


@functools.partial(jax.jit, static_argnames=("interpret",))
def log_sum_exp(maxima, sums, *, interpret: bool = False) -> jax.Array:
    """See `api.log_sum_exp`.

    Numerics:
        # ORDER: ((t0 + t1) + (t2 + t3)) + ..., t = block of the vocabulary, zeros to the next power
        of two (at least 128). Each product `sum * exp(max - m)` and the last `m + log(total)` are
        rounded on their own; exp and log are libdevice's.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows = maxima.shape[0]

    def body(maxima_gmem, sums_gmem, out_gmem, *smem):
        row = lax.axis_index("row")
        out_gmem[row] = row_log_sum_exp(maxima_gmem.at[row], sums_gmem.at[row], smem, interpret)

    return rows.run_kernel(
        body,
        (maxima, sums),
        out=jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        grid={"row": num_rows},
        name="detjax_log_sum_exp",
        is_interpreted=interpret,
        scratch_types=ROW_SCRATCH,
    )


@functools.partial(jax.jit, static_argnames=("interpret",))
def log_probs(logits, lse, *, interpret: bool = False) -> jax.Array:
    """See `api.log_probs`.

    Numerics:
        One rounded float32 subtraction an element.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = logits.shape
    total = num_rows * width

    def body(logits_gmem, lse_gmem, out_gmem):
        if interpret:
            out_gmem[...] = logits_gmem[...] - lse_gmem[...][:, None]
            return
        cta = lax.axis_index("cta")

        @plgpu.inline_mgpu(
            arg_types=(
                plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), ptx.SCALAR,
            )
        )  # fmt: skip
        def emit(ctx, logits_ref, lse_ref, out_ref, cta):
            index = ir.IndexType.get()
            thread = arith.remui(
                mgpu.thread_idx(), mgpu.c(rows.LANES, ir.IntegerType.get_signless(32))
            )
            block = arith.muli(
                cta.registers.item(), mgpu.c(rows.LANES, ir.IntegerType.get_signless(32))
            )
            at = arith.index_cast(index, arith.addi(block, thread))
            # Threads past the end do the last element again: the same value to the same place.
            at = arith.minui(at, mgpu.c(total - 1, index))
            row = arith.divui(at, mgpu.c(width, index))
            col = arith.remui(at, mgpu.c(width, index))
            value = rows.instruction("sub.rn.f32")(
                memref.load(logits_ref, [row, col]), memref.load(lse_ref, [row])
            )
            memref.store(value, out_ref, [row, col])

        emit(logits_gmem, lse_gmem, out_gmem, cta)

    return rows.run_kernel(
        body,
        (logits, lse),
        out=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        grid={"cta": 1 if interpret else pl.cdiv(total, rows.LANES)},
        name="detjax_log_probs",
        is_interpreted=interpret,
    )
