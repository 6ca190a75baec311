# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens in blocks of one shape."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.fixed_blocks import pad_axis, round_to, run_blocks
from detjax.pallas_kernels.gradients.leaves import TOKEN_LEAF, TOKEN_STEP

BLOCK = (64, 128)
"""Rows and columns of a block of a weight matrix's gradient."""


def _dot(a, b, a_axis: int, b_axis: int) -> jax.Array:
    """One fixed-shape product of the backend, in float32."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    wide = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(*wide, axes, precision=lax.Precision.HIGHEST)


def _tree_of_leaves(num_leaves: int, leaf_sum: Callable) -> jax.Array:
    """Add the blocks `leaf_sum(leaf)` of a power of two of leaves.

    # ORDER: a binary counter: equal subtrees are added, the earlier one first.
    """

    def add_leaf(leaf, subtrees):
        def add(state):
            level, total = state
            return level + 1, subtrees[level] + total

        def is_pair(state):
            return (leaf >> state[0]) & 1 == 1

        level, total = lax.while_loop(is_pair, add, (jnp.int32(0), leaf_sum(leaf)))
        return lax.dynamic_update_index_in_dim(subtrees, total, level, 0)

    levels = num_leaves.bit_length()
    empty = jnp.zeros((levels, *BLOCK), jnp.float32)
    return lax.fori_loop(0, num_leaves, add_leaf, empty)[levels - 1]


@jax.jit
def token_sum(a, b, lengths) -> jax.Array:
    """See `api.token_sum`."""
    batch, length, num_x = a.shape
    num_y, per_sequence = b.shape[2], length // TOKEN_LEAF
    num_leaves = batch * per_sequence
    a = pad_axis(a.reshape(batch * length, num_x), 1, BLOCK[0])
    b = pad_axis(b.reshape(batch * length, num_y), 1, BLOCK[1])

    def body(a_ref, b_ref, lengths_ref, out_ref):
        columns = [pl.ds(pl.program_id(i) * size, size) for i, size in enumerate(BLOCK)]

        def leaf_sum(leaf):
            def add_step(step, total):
                rows = pl.ds(leaf * TOKEN_LEAF + step * TOKEN_STEP, TOKEN_STEP)
                return total + _dot(a_ref[rows, columns[0]], b_ref[rows, columns[1]], 0, 0)

            # Steps of zeros would change no bit.
            first = leaf % per_sequence * TOKEN_LEAF
            real = jnp.clip(lengths_ref[leaf // per_sequence] - first, 0, TOKEN_LEAF)
            steps = (real + TOKEN_STEP - 1) // TOKEN_STEP
            return lax.fori_loop(0, steps, add_step, jnp.zeros(BLOCK, jnp.float32))

        out_ref[...] = _tree_of_leaves(num_leaves, leaf_sum)

    out = run_blocks(
        body,
        a,
        b,
        lengths,
        name="token_sum",
        grid=(a.shape[1] // BLOCK[0], b.shape[1] // BLOCK[1]),
        out_shape=jax.ShapeDtypeStruct((a.shape[1], b.shape[1]), jnp.float32),
        out_specs=pl.BlockSpec(BLOCK, lambda x, y: (x, y)),
    )
    return out[:num_x, :num_y]


def _sorted_by_step(experts, places, num_experts: int, num_places: int) -> tuple:
    """Sort pairs by expert, then by place. Integers alone.

    Returns:
        The order of the pairs; the place of each within its step, [S]; the first pair of each step
        of each expert, and of what comes after the last, [U num_places / step + 1].
    """
    is_real = (places < num_places) & (experts < num_experts)
    keys = jnp.where(is_real, experts * num_places + places, num_experts * num_places)
    order = jnp.argsort(keys, stable=True)
    keys = keys[order]
    firsts = jnp.arange(num_experts * num_places // TOKEN_STEP + 1, dtype=jnp.int32) * TOKEN_STEP
    starts = jnp.searchsorted(keys, firsts).astype(jnp.int32)
    return order, keys % TOKEN_STEP, starts


@partial(jax.jit, static_argnames=("num_experts", "num_places"))
def expert_token_sum(a, b, experts, places, *, num_experts: int, num_places: int) -> jax.Array:
    """See `api.expert_token_sum`. A step without a token of the expert is not multiplied."""
    num_x, num_y = a.shape[1], b.shape[1]
    order, within, starts = _sorted_by_step(experts, places, num_experts, num_places)
    a, b = (
        # SHAPE: a step is read as whole, also that of the last pairs.
        jnp.pad(pad_axis(jnp.take(x, order, axis=0), 1, size), ((0, TOKEN_STEP), (0, 0)))
        for x, size in zip((a, b), BLOCK, strict=True)
    )
    within = jnp.pad(within, (0, TOKEN_STEP))
    steps_of_leaf, steps_of_expert = TOKEN_LEAF // TOKEN_STEP, num_places // TOKEN_STEP

    def body(a_ref, b_ref, within_ref, starts_ref, out_ref):
        expert = pl.program_id(0)
        columns = [pl.ds(pl.program_id(i + 1) * size, size) for i, size in enumerate(BLOCK)]

        def placed(ref, own, sources, is_there):
            rows = ref[own, :].astype(jnp.float32)
            return jnp.where(is_there, jnp.take(rows, sources, axis=0), 0.0)

        def add_step(step, total):
            start, stop = starts_ref[step], starts_ref[step + 1]

            def add(total):
                own = pl.ds(start, TOKEN_STEP)
                index = lax.broadcasted_iota(jnp.int32, (TOKEN_STEP, TOKEN_STEP), 1)
                place = lax.broadcasted_iota(jnp.int32, (TOKEN_STEP, TOKEN_STEP), 0)
                is_source = (within_ref[own][None, :] == place) & (index < stop - start)
                sources, is_there = jnp.argmax(is_source, axis=1), jnp.any(is_source, axis=1)
                a_rows, b_rows = (
                    placed(ref.at[:, cols], own, sources, is_there[:, None])
                    for ref, cols in zip((a_ref, b_ref), columns, strict=True)
                )
                return total + _dot(a_rows, b_rows, 0, 0)

            return lax.cond(stop > start, add, lambda total: total, total)

        def leaf_sum(leaf):
            first = expert * steps_of_expert + leaf * steps_of_leaf
            zeros = jnp.zeros(BLOCK, jnp.float32)
            return lax.fori_loop(first, first + steps_of_leaf, add_step, zeros)

        out_ref[...] = _tree_of_leaves(num_places // TOKEN_LEAF, leaf_sum)[None]

    out = run_blocks(
        body,
        a,
        b,
        within,
        starts,
        name="expert_token_sum",
        grid=(num_experts, a.shape[1] // BLOCK[0], b.shape[1] // BLOCK[1]),
        out_shape=jax.ShapeDtypeStruct((num_experts, a.shape[1], b.shape[1]), jnp.float32),
        out_specs=pl.BlockSpec((1, *BLOCK), lambda e, x, y: (e, x, y)),
    )
    return out[:, :num_x, :num_y]


@partial(jax.jit, static_argnames=("window", "softcap"))
def attention_gradient(
    q, k, v, out, of_out, lengths,
    *, window: int | None, softcap: float | None = None, sinks=None,
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    """See `api.attention_gradient`; keys and values have a result for each query head."""
    batch, num_heads, num_rows, channels = q.shape
    # SHAPE: two blocks at least; of one the compiler knows the index.
    length = max(num_rows, 2 * TOKEN_LEAF)
    by_head = [
        pad_axis(x.reshape(-1, num_rows, channels), 1, length) for x in (q, k, v, out, of_out)
    ]
    body = _attention_body(
        num_heads=num_heads, group=num_heads // k.shape[1], window=window or length,
        softcap=softcap, dtype=q.dtype,
    )  # fmt: skip
    # A sink of -inf changes no bit.
    of_heads = jnp.full(num_heads, -jnp.inf, jnp.float32) if sinks is None else sinks
    sizes = [(batch * num_heads, length, width) for width in (channels, channels, channels, 1)]
    *found, of_sinks = run_blocks(
        body,
        *by_head,
        lengths,
        of_heads,
        name="attention_gradient",
        grid=(batch * num_heads,),
        out_shape=[jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes],
        out_specs=[pl.BlockSpec((1, *size[1:]), lambda head: (head, 0, 0)) for size in sizes],
    )
    found = (x[:, :num_rows].reshape(q.shape) for x in found)
    return *found, None if sinks is None else of_sinks[:, :num_rows].reshape(q.shape[:3])


def _capped(scores, softcap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """Scores below a cap, and the derivative of each."""
    if softcap is None:
        return scores, None
    tangents = jnp.tanh(scores * float(np.float32(1 / softcap)))
    return tangents * softcap, 1.0 - tangents * tangents


def _attention_body(
    *, num_heads: int, group: int, window: int, softcap: float | None, dtype: jnp.dtype
):
    """The gradient of one query head of one sequence.

    # ORDER: blocks of `TOKEN_LEAF` positions left to right; inside a block, fixed-shape products
    # and row sums. In lse a sink comes before the first key.
    """

    def body(q_ref, k_ref, v_ref, out_ref, of_out_ref, lengths_ref, sinks_ref, *results):
        head = pl.program_id(0)
        sink = sinks_ref[head % num_heads]
        num_blocks = (lengths_ref[head // num_heads] + TOKEN_LEAF - 1) // TOKEN_LEAF
        scale = float(np.float32(q_ref.shape[2] ** -0.5))

        def block(ref, head, i):
            return ref[head, pl.ds(i * TOKEN_LEAF, TOKEN_LEAF), :].astype(jnp.float32)

        def scores(q, i, j):
            place = lax.broadcasted_iota(jnp.int32, (TOKEN_LEAF, TOKEN_LEAF), 0)
            back = (i - j) * TOKEN_LEAF + place - place.T
            s = _dot(q, block(k_ref, head // group, j), 1, 1) * scale
            s, slope = _capped(s, softcap)
            return jnp.where((back >= 0) & (back < window), s, -jnp.inf), slope

        def log_sum_exp(q, i):
            def largest(j, m):
                return jnp.maximum(m, jnp.max(scores(q, i, j)[0], axis=1, keepdims=True))

            def weigh(j, total):
                return total + jnp.sum(jnp.exp(scores(q, i, j)[0] - m), axis=1, keepdims=True)

            m = lax.fori_loop(0, i + 1, largest, jnp.full((TOKEN_LEAF, 1), sink))
            return m + jnp.log(lax.fori_loop(0, i + 1, weigh, jnp.exp(sink - m)))

        def query_block(i, _):
            q, of_row = block(q_ref, head, i), block(of_out_ref, head, i)
            lse = log_sum_exp(q, i)
            delta = jnp.sum(of_row * block(out_ref, head, i), axis=1, keepdims=True)
            own = pl.ds(i * TOKEN_LEAF, TOKEN_LEAF)
            results[3][0, own, :] = jnp.exp(sink - lse) * -delta

            def key_block(j, _):
                keys, values = (block(ref, head // group, j) for ref in (k_ref, v_ref))
                s, slope = scores(q, i, j)
                p = jnp.exp(s - lse)
                ds = p * (_dot(of_row, values, 1, 1) - delta)
                # ROUND: weights and cotangents of scores to the compute dtype, for the products.
                ds = round_to(ds if slope is None else ds * slope, dtype)
                of_v = _dot(round_to(p, dtype), of_row, 0, 0)
                parts = _dot(ds, keys, 1, 0), _dot(ds, q, 0, 0), of_v
                for ref, part, place in zip(results[:3], parts, (i, j, j), strict=True):
                    rows = pl.ds(place * TOKEN_LEAF, TOKEN_LEAF)
                    ref[0, rows, :] = ref[0, rows, :] + part

            lax.fori_loop(0, i + 1, key_block, None)

        for ref in results:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        lax.fori_loop(0, num_blocks, query_block, None)
        for ref in results[:2]:
            ref[...] = ref[...] * scale

    return body
