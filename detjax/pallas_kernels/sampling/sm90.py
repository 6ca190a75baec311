# SPDX-License-Identifier: Apache-2.0
"""Penalties, Gumbel-max scores and nucleus sums on Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jax.extend.mlir.dialects import math as mlir_math

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.hopper_sums import first_operand
from detjax.pallas_kernels.log_softmax.sm90 import LOGIT_BLOCK, block_tile
from detjax.pallas_kernels.sampling import noise


def num_blocks(width: int) -> int:
    """Blocks of a share of the vocabulary, which must be whole ones."""
    if width % LOGIT_BLOCK:
        raise ValueError(f"sm90 sampling needs whole blocks of {LOGIT_BLOCK} logits, not {width}")
    return width // LOGIT_BLOCK


def ids_of(tile: rows.Tile, first_id, shape):
    """Token ids of a tile of consecutive blocks."""
    math = tile.whole
    ids = math.iota(shape, 0) * LOGIT_BLOCK + math.iota(shape, 1)
    return ids + math.full(shape, first_id, jnp.int32)


def bits_of(ids, key: tuple, tile: rows.Tile):
    """32 random bits of each token under a row's key, as `noise` specifies."""
    key = tuple(tile.whole.full(ids.shape, k, jnp.uint32) for k in key)
    return noise.token_bits(key, ids)


def scores_of(x, bits, temperature, tile: rows.Tile):
    """`x / temperature + noise` of a tile of one row's blocks, for a temperature above 0.

    `u` is exactly the specification's; log1p and log are libdevice's.

    # ORDER: a correctly rounded division, then a rounded addition.
    """
    math = tile.whole
    log1p = math.apply(lambda v: mlir_math.log1p(v), jnp.log1p, -noise.uniform(bits))
    drawn = -jnp.log(-log1p)
    return math.add(math.divide(x, math.full(x.shape, temperature)), drawn)


@functools.partial(jax.jit, static_argnames=("interpret",))
def adjust_logits(logits, bias, uses, factors, penalties, *, interpret: bool = False) -> jax.Array:
    """See `api.adjust_logits`.

    Raises:
        ValueError: If the share is not whole blocks of 128.

    Numerics:
        Elementwise float32: add.rn, mul.rn, sub.rn, never fused.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = logits.shape
    blocks = num_blocks(width)
    held = rows.most_rows(4, blocks)
    math, shape = block_tile(held, interpret).whole, (held, LOGIT_BLOCK)

    def body(x_gmem, bias_gmem, uses_gmem, above_gmem, below_gmem, per_use_gmem, once_gmem, out):
        row = lax.axis_index("row")
        # The last tile starts early instead of ending late: some blocks are written twice, alike.
        here = pl.ds(jnp.minimum(lax.axis_index("tile") * held, blocks - held), held)
        x = math.load(x_gmem.at[row, here])
        added, used = math.load(bias_gmem.at[row, here]), math.load(uses_gmem.at[row, here])
        zero, one = math.full(shape, 0.0), math.full(shape, 1, jnp.int32)
        biased = jnp.where(added == zero, x, math.add(x, added))
        factor = jnp.where(
            biased > zero, math.full(shape, above_gmem[row]), math.full(shape, below_gmem[row])
        )
        scaled = jnp.where(used >= one, math.mul(biased, factor), biased)
        taken = math.mul(math.full(shape, per_use_gmem[row]), (used - one).astype(jnp.float32))
        lower = math.sub(math.sub(scaled, taken), math.full(shape, once_gmem[row]))
        out[row, here] = jnp.where(used > one, lower, scaled)

    wide = (x.reshape(num_rows, blocks, LOGIT_BLOCK) for x in (logits, bias, uses))
    return rows.run_kernel(
        body,
        (*wide, *factors, *penalties),
        out=jax.ShapeDtypeStruct((num_rows, blocks, LOGIT_BLOCK), jnp.float32),
        grid={"tile": pl.cdiv(blocks, held), "row": num_rows},
        name="detjax_adjust_logits",
        is_interpreted=interpret,
    ).reshape(num_rows, width)


@functools.partial(jax.jit, static_argnames=("interpret",))
def gumbel_scores(
    logits, temperature, key, *, first_token_id, interpret: bool = False
) -> jax.Array:
    """See `api.gumbel_scores`.

    Raises:
        ValueError: If the share is not whole blocks of 128.

    Numerics:
        Elementwise float32: div.rn, add.rn; the noise's bits and `u` exact, its two logarithms
        libdevice's. A row at temperature 0 is copied.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = logits.shape
    blocks = num_blocks(width)
    held = rows.most_rows(8, blocks)
    tile = block_tile(held, interpret)
    shape = (held, LOGIT_BLOCK)

    def body(logits_gmem, t_gmem, key0_gmem, key1_gmem, first_gmem, out_gmem):
        row = lax.axis_index("row")
        first = jnp.minimum(lax.axis_index("tile") * held, blocks - held)
        here = pl.ds(first, held)
        x = tile.whole.load(logits_gmem.at[row, here])
        t = t_gmem[row]

        @pl.when(t == 0.0)
        def _greedy():
            out_gmem[row, here] = x

        @pl.when(t != 0.0)
        def _sampled():
            ids = ids_of(tile, first_gmem[0] + first * LOGIT_BLOCK, shape)
            bits = bits_of(ids, (key0_gmem[row], key1_gmem[row]), tile)
            out_gmem[row, here] = scores_of(x, bits, t, tile)

    return rows.run_kernel(
        body,
        (
            logits.reshape(num_rows, blocks, LOGIT_BLOCK),
            temperature,
            *key,
            first_operand(first_token_id),
        ),
        out=jax.ShapeDtypeStruct((num_rows, blocks, LOGIT_BLOCK), jnp.float32),
        grid={"tile": pl.cdiv(blocks, held), "row": num_rows},
        name="detjax_gumbel_scores",
        is_interpreted=interpret,
    ).reshape(num_rows, width)


def _scan_blocks(x, tile: rows.Tile):
    """Sum of what stands before each element in its block, of a tile of blocks.

    # ORDER: a lane's 4 left to right; lane sums by a butterfly across distance 1, 2, 4, 8, 16,
    # where a lane whose bit is set adds the other side's sum in front of its own.
    """
    if tile.whole.is_interpreted:
        return jnp.cumsum(x, axis=1) - x

    @plgpu.inline_mgpu(
        arg_types=(tile.whole.layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=tile.whole.layout),
    )
    def emit(ctx, v):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        add = rows.instruction("add.rn.f32")
        lane = arith.remui(mgpu.thread_idx(), mgpu.c(32, i32))
        registers = np.empty_like(v.registers)
        for where, register in np.ndenumerate(v.registers):
            elements = [
                vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([i]),
                )
                for i in range(4)
            ]
            sums = [mgpu.c(0.0, f32), elements[0]]
            for element in elements[1:]:
                sums.append(add(sums[-1], element))
            total, before = sums.pop(), mgpu.c(0.0, f32)
            for distance in (1, 2, 4, 8, 16):
                other = mgpu.utils.shfl_bfly(total, distance)
                bit = arith.andi(lane, mgpu.c(distance, i32))
                is_second = arith.cmpi(arith.CmpIPredicate.ne, bit, mgpu.c(0, i32))
                before = arith.select(is_second, add(other, before), before)
                total = add(total, other)
            registers[where] = vector.from_elements(
                ir.VectorType.get((4,), f32), [add(before, s) for s in sums]
            )
        return mgpu.FragmentedArray(_registers=registers, _layout=v.layout, _is_signed=None)

    return emit(x)


def _chunk_starts(sums, top_p, interpret: bool):
    """Sum of what stands before each chunk [M, padded], and `top_p` of the total [M].

    # ORDER: ((0 + c0) + c1) + ..., one addition a chunk; zeros after the last one change nothing.
    """
    num_rows, count = sums.shape
    size = -(-count // rows.LANES) * rows.LANES
    math = rows.strided(size, 1, interpret)
    step = 16

    def body(sums_gmem, p_gmem, starts_gmem, limit_gmem, sums_smem, starts_smem):
        row = lax.axis_index("row")
        sums_smem[...] = rows.load_padded(sums_gmem.at[row], count, math, size=size, fill=0.0)
        plgpu.commit_smem()

        def some_chunks(i, carry):
            # WHY: loads before stores, which the compiler will not reorder.
            chunks = [sums_smem[i * step + k] for k in range(step)]
            for k, chunk in enumerate(chunks):
                starts_smem[i * step + k] = carry
                carry = carry + chunk
            return carry

        total = lax.fori_loop(0, size // step, some_chunks, jnp.float32(0.0))
        plgpu.commit_smem()
        starts_gmem[row] = math.load(starts_smem)
        limit_gmem[row] = p_gmem[row] * total

    return rows.run_kernel(
        body,
        (sums, top_p),
        out=[
            jax.ShapeDtypeStruct((num_rows, size), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ],
        grid={"row": num_rows},
        name="detjax_nucleus_chunk_starts",
        is_interpreted=interpret,
        scratch_types=[plgpu.SMEM((size,), jnp.float32)] * 2,
    )


@functools.partial(jax.jit, static_argnames=("interpret",))
def nucleus_sums(sorted_logits, temperature, top_k, top_p, *, interpret: bool = False):
    """See `api.nucleus_sums`; ranks up to a whole block of 128 weigh 0.

    Numerics:
        # ORDER: a chunk's sum as a lane's 4 ranks left to right, then 32 lanes by exchange; chunks
        # of 128 ranks left to right; inside a chunk, the scan of `_scan_blocks`, added to the
        # chunks' sum. `exp((x - x0) / T)`: sub.rn, div.rn, libdevice's exp.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = sorted_logits.shape
    padding = (0, 0), (0, -width % LOGIT_BLOCK)
    ranked = jnp.pad(sorted_logits, padding, constant_values=-jnp.inf)
    blocks = num_blocks(ranked.shape[1])
    held = rows.most_rows(4, blocks)
    tile = block_tile(held, interpret)
    math, shape = tile.whole, (held, LOGIT_BLOCK)
    grid = {"tile": pl.cdiv(blocks, held), "row": num_rows}
    ranked = ranked.reshape(num_rows, blocks, LOGIT_BLOCK)

    def weights_of(x_gmem, t_gmem, k_gmem):
        """First block of this CTA, its weights, and those that count."""
        row = lax.axis_index("row")
        first = jnp.minimum(lax.axis_index("tile") * held, blocks - held)
        t = t_gmem[row]
        t = jnp.where(t == 0.0, 1.0, t)
        x = math.load(x_gmem.at[row, pl.ds(first, held)])
        difference = math.sub(x, math.full(shape, x_gmem[row, 0, 0]))
        weight = jnp.exp(math.divide(difference, math.full(shape, t)))
        is_counted = ids_of(tile, first * LOGIT_BLOCK, shape) < math.full(
            shape, k_gmem[row], jnp.int32
        )
        return row, pl.ds(first, held), weight, jnp.where(is_counted, weight, math.full(shape, 0.0))

    def sum_chunks(x_gmem, t_gmem, k_gmem, sums_gmem):
        row, here, _, counted = weights_of(x_gmem, t_gmem, k_gmem)
        sums_gmem[row, here] = tile.sum_columns(counted)

    def write(x_gmem, t_gmem, k_gmem, starts_gmem, weight_gmem, before_gmem):
        row, here, weight, counted = weights_of(x_gmem, t_gmem, k_gmem)
        start = tile.over_columns(tile.per_row.load(starts_gmem.at[row, here]), shape)
        weight_gmem[row, here] = weight
        before_gmem[row, here] = math.add(start, _scan_blocks(counted, tile))

    operands = (ranked, temperature, top_k)
    run = functools.partial(rows.run_kernel, is_interpreted=interpret)
    sums = run(
        sum_chunks,
        operands,
        out=jax.ShapeDtypeStruct((num_rows, blocks), jnp.float32),
        grid=grid,
        name="detjax_nucleus_chunk_sums",
    )
    starts, limit = _chunk_starts(sums, top_p, interpret)
    wide = jax.ShapeDtypeStruct(ranked.shape, jnp.float32)
    weight, before = run(
        write, (*operands, starts), out=[wide, wide], grid=grid, name="detjax_nucleus_sums"
    )
    weight, before = (x.reshape(num_rows, -1)[:, :width] for x in (weight, before))
    return weight, before, limit
