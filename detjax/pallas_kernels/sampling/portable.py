# SPDX-License-Identifier: Apache-2.0
"""Biases and penalties, Gumbel-max scores and nucleus sums on fixed blocks."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import COLS, ROWS, pad_axis, run_blocks
from detjax.pallas_kernels.log_softmax.portable import block_stats, log_probs, log_sum_exp
from detjax.pallas_kernels.sampling import noise


def _row_block():
    return pl.ds(pl.program_id(0) * ROWS, ROWS)


def _reciprocal(temperature):
    """Of a temperature; 1 where it is 0."""
    return 1.0 / jnp.where(temperature == 0.0, 1.0, temperature)


@jax.jit
def adjust_logits(logits, bias, uses, factors, penalties) -> jax.Array:
    """See `api.adjust_logits`."""
    num_rows, width = logits.shape
    logits, bias, uses = (pad_axis(pad_axis(x, 0, ROWS), 1, COLS) for x in (logits, bias, uses))
    columns = [pad_axis(x[:, None], 0, ROWS) for x in (*factors, *penalties)]
    above, below, per_use, once = columns
    grid = logits.shape[0] // ROWS, logits.shape[1] // COLS
    shape = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    spec = pl.BlockSpec((ROWS, COLS), lambda m, v: (m, v))

    def scale(x_ref, bias_ref, uses_ref, above_ref, below_ref, per_use_ref, out_ref, taken_ref):
        rows = _row_block()
        here = rows, pl.ds(pl.program_id(1) * COLS, COLS)
        x, added, used = x_ref[here], bias_ref[here], uses_ref[here]
        biased = jnp.where(added == 0.0, x, x + added)
        factor = jnp.where(biased > 0.0, above_ref[rows, :], below_ref[rows, :])
        out_ref[...] = jnp.where(used > 0, biased * factor, biased)
        taken_ref[...] = per_use_ref[rows, :] * jnp.maximum(used - 1, 0).astype(jnp.float32)

    # ROUND: the products go through memory, so none can fuse with a subtraction.
    scaled, taken = run_blocks(
        scale,
        logits,
        bias,
        uses,
        above,
        below,
        per_use,
        name="scale_logits",
        grid=grid,
        out_shape=[shape, shape],
        out_specs=[spec, spec],
    )

    def subtract(scaled_ref, taken_ref, uses_ref, once_ref, out_ref):
        rows = _row_block()
        here = rows, pl.ds(pl.program_id(1) * COLS, COLS)
        b = scaled_ref[here]
        # ORDER: the penalty of its uses first, then that of any.
        lower = (b - taken_ref[here]) - once_ref[rows, :]
        out_ref[...] = jnp.where(uses_ref[here] > 1, lower, b)

    out = run_blocks(
        subtract,
        scaled,
        taken,
        uses,
        once,
        name="penalise_logits",
        grid=grid,
        out_shape=shape,
        out_specs=spec,
    )
    return out[:num_rows, :width]


@jax.jit
def gumbel_scores(logits, temperature, key, *, first_token_id) -> jax.Array:
    """See `api.gumbel_scores`."""
    num_rows, width = logits.shape
    logits = pad_axis(pad_axis(logits, 0, ROWS), 1, COLS)
    columns = [pad_axis(x[:, None], 0, ROWS) for x in (temperature, *key)]
    first = jnp.asarray(first_token_id, jnp.int32).reshape(1)

    def body(logits_ref, temperature_ref, key0_ref, key1_ref, first_ref, out_ref):
        rows = _row_block()
        x = logits_ref[rows, pl.ds(pl.program_id(1) * COLS, COLS)]
        t = temperature_ref[rows, :]
        offset = first_ref[0] + pl.program_id(1) * COLS
        token_ids = offset + lax.broadcasted_iota(jnp.int32, (ROWS, COLS), 1)
        bits = noise.token_bits((key0_ref[rows, :], key1_ref[rows, :]), token_ids)
        # ROUND: the reciprocal, once a row; then one fused multiply-add.
        scores = x * _reciprocal(t) + noise.gumbel(bits)
        # What is impossible stays so: padding past the vocabulary cannot win.
        out_ref[...] = jnp.where((t == 0.0) | (x == -jnp.inf), x, scores)

    out = run_blocks(
        body,
        logits,
        *columns,
        first,
        name="gumbel_scores",
        grid=(logits.shape[0] // ROWS, logits.shape[1] // COLS),
        out_shape=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        out_specs=pl.BlockSpec((ROWS, COLS), lambda m, v: (m, v)),
    )
    return out[:num_rows, :width]


@jax.jit
def nucleus_sums(sorted_logits, temperature, top_k, top_p):
    """See `api.nucleus_sums`."""
    num_rows, width = sorted_logits.shape
    padded = pad_axis(sorted_logits, 0, ROWS)
    extra = -width % COLS
    padded = jnp.pad(padded, ((0, 0), (0, extra)), constant_values=-jnp.inf)
    chunks = padded.shape[1] // COLS
    columns = [pad_axis(x[:, None], 0, ROWS) for x in (temperature, top_k, top_p)]
    # SHAPE: hidden from the compiler, so one chunk is still a loop.
    bound = lax.optimization_barrier(jnp.full((1,), chunks, jnp.int32))

    def body(x_ref, t_ref, k_ref, p_ref, bound_ref, weight_ref, before_ref, limit_ref):
        rows = _row_block()
        reciprocal, k = _reciprocal(t_ref[rows, :]), k_ref[rows, :]
        top = x_ref[rows, pl.ds(0, 1)]

        def chunk(i, carry):
            cols = pl.ds(i * COLS, COLS)
            rank = i * COLS + lax.broadcasted_iota(jnp.int32, (ROWS, COLS), 1)
            weight = jnp.exp((x_ref[rows, cols] - top) * reciprocal)
            counted = jnp.where(rank < k, weight, 0.0)
            # ORDER: a fixed-shape scan inside a chunk, chunks left to right.
            inclusive = jnp.cumsum(counted, axis=1)
            exclusive = jnp.concatenate(
                [jnp.zeros((ROWS, 1), jnp.float32), inclusive[:, :-1]], axis=1
            )
            weight_ref[:, cols] = weight
            before_ref[:, cols] = carry + exclusive
            return carry + inclusive[:, -1:]

        total = lax.fori_loop(0, bound_ref[0], chunk, jnp.zeros((ROWS, 1), jnp.float32))
        limit_ref[...] = p_ref[rows, :] * total

    wide = jax.ShapeDtypeStruct(padded.shape, jnp.float32)
    wide_spec = pl.BlockSpec((ROWS, padded.shape[1]), lambda m: (m, 0))
    weight, before, limit = run_blocks(
        body,
        padded,
        *columns,
        bound,
        name="nucleus_sums",
        grid=(padded.shape[0] // ROWS,),
        out_shape=[wide, wide, jax.ShapeDtypeStruct((padded.shape[0], 1), jnp.float32)],
        out_specs=[wide_spec, wide_spec, pl.BlockSpec((ROWS, 1), lambda m: (m, 0))],
    )
    return weight[:num_rows, :width], before[:num_rows, :width], limit[:num_rows, 0]


def stats_and_choice(
    logits, temperature, key, *, first_token_id, vocab_block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `api.stats_and_choice`."""
    maxima, sums = block_stats(logits, vocab_block=vocab_block)
    scores = gumbel_scores(logits, temperature, key, first_token_id=first_token_id)
    token = jnp.argmax(scores, axis=1).astype(jnp.int32)
    best = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
    return maxima, sums, best, first_token_id + token


def choose_token(
    logits, temperature, key, *, vocab_block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.choose_token`."""
    maxima, sums, _, token = stats_and_choice(
        logits, temperature, key, first_token_id=0, vocab_block=vocab_block
    )
    lse = log_sum_exp(maxima, sums)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)
    return token, log_probs(chosen, lse)[:, 0], lse
