# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache, on tiles of 16 query rows of one key/value head."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from detjax.numerics import LOG2_E, NumericsProfile
from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, round_to, run_blocks
from detjax.pallas_kernels.rope.portable import rope_into_cache


def _merge(state, other, is_live):
    """Fold (max, sum, output) of `other` into `state` where it has seen a key.

    # ORDER: this recurrence, left to right; a row that saw nothing keeps its bits.
    """
    m, weight_sum, out = state
    other_m, other_sum, other_out = other
    new_m = jnp.maximum(m, other_m)
    scale, other_scale = jnp.exp2(m - new_m), jnp.exp2(other_m - new_m)
    merged = (
        new_m,
        weight_sum * scale + other_sum * other_scale,
        out * scale + other_out * other_scale,
    )
    return tuple(jnp.where(is_live, new, old) for new, old in zip(merged, state, strict=True))


def _empty(channels: int):
    return (
        jnp.full((ROWS, 1), -jnp.inf, jnp.float32),
        jnp.zeros((ROWS, 1), jnp.float32),
        jnp.zeros((ROWS, channels), jnp.float32),
    )


def _merge_sinks(state, sinks, is_row):
    """Fold the sink of each row into `state`: a split of that score alone, without a value."""
    score = sinks.astype(jnp.float32) * np.float32(LOG2_E)
    return _merge(state, (score, jnp.ones_like(score), jnp.zeros_like(state[2])), is_row)


def _first_seen(pos, is_row, window: int):
    """The first position that a row of a tile sees."""
    earliest = jnp.min(jnp.where(is_row, pos, jnp.iinfo(jnp.int32).max))
    return jnp.maximum(earliest - window + 1, 0)


def _sink_rows(sinks, kv_heads: int, query_len: int, pad: tuple) -> jax.Array:
    """The sink of each row of queries, [K, rows]."""
    of_head = sinks.reshape(kv_heads, 1, -1)
    rows = jnp.broadcast_to(of_head, (kv_heads, query_len, of_head.shape[2]))
    return jnp.pad(rows.reshape(kv_heads, -1), pad)


def _scaling(channels: int, softcap: float | None) -> Callable[[jax.Array], jax.Array]:
    """What makes products of queries and keys into exponents of two."""
    scale = float(np.float32(LOG2_E * channels**-0.5))
    if softcap is None:
        return lambda scores: scores * scale
    inner, outer = float(np.float32(channels**-0.5 / softcap)), float(np.float32(LOG2_E * softcap))
    return lambda scores: jnp.tanh(scores * inner) * outer


def attention(
    q, pages, page_table, positions, layer: int,
    *, window: int | None, profile: NumericsProfile, softcap: float | None = None, sinks=None,
) -> jax.Array:  # fmt: skip
    """See `api.attention`."""
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    return _attention(
        q, pages, page_table, positions, jnp.int32(layer), sinks,
        window=window, profile=profile, softcap=softcap,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("window", "profile", "softcap"))
def _attention(
    q, pages, page_table, positions, layer, sinks, *, window, profile: NumericsProfile, softcap
) -> jax.Array:
    batch, query_len, num_heads, channels = q.shape
    kv_heads, block = pages.shape[3:5]
    group = num_heads // kv_heads
    blocks_per_split = profile.attention_split // block

    # One row a (token, query head of the group), so a decode tile holds the group's heads.
    rows = q.reshape(batch, query_len, kv_heads, group, channels).transpose(0, 2, 1, 3, 4)
    rows = pad_axis(rows.reshape(batch * kv_heads, query_len * group, channels), 1, ROWS)
    pad = ((0, 0), (0, rows.shape[1] - query_len * group))
    row_positions = jnp.pad(jnp.repeat(positions, group, axis=1), pad, constant_values=-1)

    def body(q_ref, pages_ref, table_ref, positions_ref, layer_ref, *refs):
        *sink_refs, out_ref = refs
        seq, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
        tile = pl.ds(pl.program_id(1) * ROWS, ROWS)
        query = q_ref[pl.program_id(0), tile, :].astype(jnp.float32)  # [16, C]
        pos = positions_ref[seq, tile][:, None]  # [16, 1], -1 where padded
        last = jnp.max(pos)
        is_row = pos >= 0
        first = jnp.int32(0) if window is None else _first_seen(pos, is_row, window)

        def softmax_step(i, state):
            m, weight_sum, out = state
            page, layer = table_ref[seq, i], layer_ref[0]
            k = pages_ref[layer, page, 0, head, :, :].astype(jnp.float32)  # [P, C]
            v = pages_ref[layer, page, 1, head, :, :].astype(jnp.float32)  # [P, C]
            key_pos = i * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
            is_seen = key_pos <= pos
            if window is not None:
                is_seen = is_seen & (key_pos > pos - window)
            # What no row of the tile may see is not there yet: never let it meet a product.
            is_written = (key_pos <= last).reshape(block, 1)
            v = jnp.where(is_written, v, 0.0)
            scores = lax.dot_general(
                query, k, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
            )
            scores = jnp.where(is_seen, _scaling(channels, softcap)(scores), -jnp.inf)
            new_m = jnp.maximum(m, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2(scores - new_m)
            decay = jnp.exp2(m - new_m)
            # ROUND: weights to the compute dtype for the product; their sum is not rounded.
            product = jnp.dot(round_to(weights, q_ref.dtype), v, precision=lax.Precision.HIGHEST)
            new = (
                new_m,
                weight_sum * decay + jnp.sum(weights, axis=1, keepdims=True),
                out * decay + product,
            )
            is_live = jnp.any(is_seen, axis=1, keepdims=True)
            return tuple(jnp.where(is_live, n, o) for n, o in zip(new, state, strict=True))

        def split_step(s, state):
            low = jnp.maximum(s * blocks_per_split, first // block)
            high = jnp.minimum((s + 1) * blocks_per_split, last // block + 1)
            part = lax.fori_loop(low, high, softmax_step, _empty(channels))
            return _merge(state, part, part[1] > 0)

        splits = (first // profile.attention_split, last // profile.attention_split + 1)
        state = lax.fori_loop(*splits, split_step, _empty(channels))
        for sinks_ref in sink_refs:
            state = _merge_sinks(state, sinks_ref[head, tile][:, None], is_row)
        _, weight_sum, out = state
        # ROUND: the reciprocal, once a row: XLA would divide by a broadcast sum so in any case.
        out = jnp.where(is_row, out * (1.0 / weight_sum), 0.0)
        # An exact zero is +0: its sign could tell of keys that were masked.
        out = jnp.where(out == 0.0, 0.0, out)
        out_ref[...] = out.astype(out_ref.dtype)[None]

    out = run_blocks(
        body,
        rows,
        pages,
        page_table,
        row_positions,
        layer.reshape(1),
        *([] if sinks is None else [_sink_rows(sinks, kv_heads, query_len, pad)]),
        name="attention",
        grid=(batch * kv_heads, rows.shape[1] // ROWS),
        out_shape=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        out_specs=pl.BlockSpec((1, ROWS, channels), lambda b, t: (b, t, 0)),
    )
    out = out[:, : query_len * group].reshape(batch, kv_heads, query_len, group, channels)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def rope_attention(
    qkv, cos, sin, gains, pages, page_table, positions, layer: int,
    *, window: int | None, eps: float, profile: NumericsProfile, prefetch=None, sinks=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.rope_attention`."""
    del prefetch
    q, pages = rope_into_cache(qkv, cos, sin, gains, pages, page_table, positions, layer, eps=eps)
    q = q.reshape(*positions.shape, *q.shape[1:])
    out = attention(
        q, pages, page_table, positions, layer, window=window, profile=profile, sinks=sinks
    )
    return out, pages
