# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache, on tiles of 16 query rows of one key/value head."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from detjax.numerics import LOG2_E, NumericsProfile
from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, round_to, run_blocks
from detjax.pallas_kernels.float8_cache import widened
from detjax.pallas_kernels.output_gate.portable import sigmoid_gate
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.portable import rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation, num_gated_heads


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
    q, place: CachePlace,
    *, window: int | None, profile: NumericsProfile, softcap: float | None = None, sinks=None,
) -> jax.Array:  # fmt: skip
    """See `api.attention`."""
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    place = place._replace(layer=jnp.int32(place.layer))
    return _attention(q, place, sinks, window=window, profile=profile, softcap=softcap)


class _Tile(NamedTuple):
    """Query rows of one key/value head, and what they may see.

    Attributes:
        query: [16, C] float32.
        pos: [16, 1] int32, positions; -1 where padded.
        load: Keys and values of a block, [P, C] float32 each.
        block: P, tokens of a block.
        window: Positions that a row sees; None for all.
        scaling: Makes products into exponents of two.
        dtype: Of the weights in the product with values.
    """

    query: jax.Array
    pos: jax.Array
    load: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    block: int
    window: int | None
    scaling: Callable[[jax.Array], jax.Array]
    dtype: jnp.dtype

    @property
    def is_row(self) -> jax.Array:
        return self.pos >= 0

    @property
    def last(self) -> jax.Array:
        return jnp.max(self.pos)

    @property
    def first(self) -> jax.Array:
        """The first position that any row sees."""
        if self.window is None:
            return jnp.int32(0)
        earliest = jnp.min(jnp.where(self.is_row, self.pos, jnp.iinfo(jnp.int32).max))
        return jnp.maximum(earliest - self.window + 1, 0)

    def softmax_step(self, i, state):
        """Fold block `i` into the (max, sum, output) of each row that sees a key of it."""
        m, weight_sum, out = state
        k, v = self.load(i)
        key_pos = i * self.block + lax.broadcasted_iota(jnp.int32, (1, self.block), 1)
        is_seen = key_pos <= self.pos
        if self.window is not None:
            is_seen = is_seen & (key_pos > self.pos - self.window)
        # What no row of the tile may see is not there yet: never let it meet a product.
        is_written = (key_pos <= self.last).reshape(self.block, 1)
        v = jnp.where(is_written, v, 0.0)
        scores = lax.dot_general(
            self.query, k, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        scores = jnp.where(is_seen, self.scaling(scores), -jnp.inf)
        new_m = jnp.maximum(m, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - new_m)
        decay = jnp.exp2(m - new_m)
        # ROUND: weights to the compute dtype for the product; their sum is not rounded.
        product = jnp.dot(round_to(weights, self.dtype), v, precision=lax.Precision.HIGHEST)
        new = (
            new_m,
            weight_sum * decay + jnp.sum(weights, axis=1, keepdims=True),
            out * decay + product,
        )
        is_live = jnp.any(is_seen, axis=1, keepdims=True)
        return tuple(jnp.where(is_live, n, o) for n, o in zip(new, state, strict=True))

    def fold_splits(self, split: int):
        """The state of all splits of `split` positions, each begun empty."""
        channels, per_split = self.query.shape[1], split // self.block

        def split_step(s, state):
            low = jnp.maximum(s * per_split, self.first // self.block)
            high = jnp.minimum((s + 1) * per_split, self.last // self.block + 1)
            part = lax.fori_loop(low, high, self.softmax_step, _empty(channels))
            return _merge(state, part, part[1] > 0)

        splits = (self.first // split, self.last // split + 1)
        return lax.fori_loop(*splits, split_step, _empty(channels))


@partial(jax.jit, static_argnames=("window", "profile", "softcap"))
def _attention(
    q, place: CachePlace, sinks, *, window, profile: NumericsProfile, softcap
) -> jax.Array:
    pages, page_table, positions, layer = place
    batch, query_len, num_heads, channels = q.shape
    kv_heads, block = pages.shape[3:5]
    group = num_heads // kv_heads

    # One row a (token, query head of the group), so a decode tile holds the group's heads.
    rows = q.reshape(batch, query_len, kv_heads, group, channels).transpose(0, 2, 1, 3, 4)
    rows = pad_axis(rows.reshape(batch * kv_heads, query_len * group, channels), 1, ROWS)
    pad = ((0, 0), (0, rows.shape[1] - query_len * group))
    row_positions = jnp.pad(jnp.repeat(positions, group, axis=1), pad, constant_values=-1)

    def body(q_ref, pages_ref, table_ref, positions_ref, layer_ref, *refs):
        *sink_refs, out_ref = refs
        seq, head = pl.program_id(0) // kv_heads, pl.program_id(0) % kv_heads
        tile_rows = pl.ds(pl.program_id(1) * ROWS, ROWS)

        def load(i):
            page, layer = table_ref[seq, i], layer_ref[0]
            k, v = (pages_ref[layer, page, which, head, :, :] for which in (0, 1))
            return widened(k, jnp.dtype(jnp.float32)), widened(v, jnp.dtype(jnp.float32))

        tile = _Tile(
            query=q_ref[pl.program_id(0), tile_rows, :].astype(jnp.float32),
            pos=positions_ref[seq, tile_rows][:, None], load=load, block=block, window=window,
            scaling=_scaling(channels, softcap), dtype=q_ref.dtype,
        )  # fmt: skip
        state = tile.fold_splits(profile.attention_split)
        for sinks_ref in sink_refs:
            state = _merge_sinks(state, sinks_ref[head, tile_rows][:, None], tile.is_row)
        _, weight_sum, out = state
        # ROUND: the reciprocal, once a row: XLA would divide by a broadcast sum so in any case.
        out = jnp.where(tile.is_row, out * (1.0 / weight_sum), 0.0)
        # An exact zero is +0: its sign could tell of keys that were masked.
        out = jnp.where(out == 0.0, 0.0, out)
        out_ref[...] = out.astype(out_ref.dtype)[None]

    operands = [] if sinks is None else [_sink_rows(sinks, kv_heads, query_len, pad)]
    out = run_blocks(
        body, rows, pages, page_table, row_positions, jnp.reshape(layer, 1), *operands,
        name="attention", grid=(batch * kv_heads, rows.shape[1] // ROWS),
        out_shape=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        out_specs=pl.BlockSpec((1, ROWS, channels), lambda b, t: (b, t, 0)),
    )  # fmt: skip
    out = out[:, : query_len * group].reshape(batch, kv_heads, query_len, group, channels)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def rope_attention(
    qkv, rotation: Rotation, place: CachePlace,
    *, window: int | None, eps: float, profile: NumericsProfile, prefetch=None, sinks=None,
    is_gated: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.rope_attention`."""
    del prefetch
    num_heads = num_gated_heads(qkv, place.pages, is_gated)
    q, pages = rope_into_cache(qkv, rotation, place, num_heads=num_heads, eps=eps)
    q = q.reshape(*place.positions.shape, *q.shape[1:])
    place = place._replace(pages=pages)
    out = attention(q, place, window=window, profile=profile, sinks=sinks)
    if is_gated:
        rows = sigmoid_gate(out.reshape(len(qkv), -1), qkv.reshape(len(qkv), -1))
        out = rows.reshape(out.shape)
    return out, pages
