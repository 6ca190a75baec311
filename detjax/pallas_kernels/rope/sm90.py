# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding on Hopper, alone or with the q/k norm before it and the cache write after it."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels import sm90_rows as rows
from detjax.pallas_kernels.float8_cache import holds_float8
from detjax.pallas_kernels.hopper_sums import RowSum, row_sum
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm import sm90 as norm
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.sm90_float8 import narrowed


def row_form(channels: int) -> RowSum:
    """How a head lies in registers: as two halves, as the narrow rows of `rms_norm`.

    Raises:
        ValueError: If the head is not a multiple of 32 channels from 64 to 256.
    """
    if channels % 32 or not 64 <= channels <= 256:
        raise ValueError(
            f"sm90 rope needs heads of a multiple of 32 channels from 64 to 256, not {channels}"
        )
    return row_sum(channels)


def _tile(num_heads: int, channels: int, interpret: bool) -> rows.Tile:
    form = row_form(channels)
    return rows.tile_of_rows(
        rows.most_rows(rows.LANES // form.lanes, num_heads),
        lanes=form.lanes,
        vec_len=form.vec_len,
        is_interpreted=interpret,
    )


def halves_of(channels: int) -> list:
    """The channels of the two halves of a head."""
    half = channels // 2
    return [pl.ds(0, half), pl.ds(half, half)]


def _rotate(first, second, cos, sin, tile: rows.Tile) -> list:
    """Rotate the two halves of some heads of one token, in float32.

    # ORDER: two rounded products and one rounded difference or sum; nothing is fused, so that a
    # NumPy program of the formula gives the same bits.
    """
    math = tile.whole
    cos, sin = tile.over_rows(cos, first.shape), tile.over_rows(sin, first.shape)
    return [
        math.sub(math.mul(first, cos), math.mul(second, sin)),
        math.add(math.mul(second, cos), math.mul(first, sin)),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedHeads:
    """Some heads of a token and what turns them, in registers: loads before any arithmetic.

    Attributes:
        parts: The two halves of the channels.
        cos: Of the token.
        sin: Likewise.
        gains: Of the norm, by half; empty for no norm.
        tile: How the heads lie.
    """

    parts: list
    cos: Any
    sin: Any
    gains: list
    tile: rows.Tile

    def rotated(self, *, eps: float) -> list:
        """Normalise if there is a gain, rotate, and round: the two halves."""
        tile, dtype = self.tile, self.parts[0].dtype
        parts = [p.astype(jnp.float32) for p in self.parts]
        if self.gains:
            width = 2 * parts[0].shape[1]
            parts = norm.narrow_normalise(parts, self.gains, tile, width=width, eps=eps)
            # ROUND: the normalised head, as `rms_norm` alone does.
            parts = [p.astype(dtype).astype(jnp.float32) for p in parts]
        # ROUND: once.
        return [p.astype(dtype) for p in _rotate(*parts, self.cos, self.sin, tile)]


def load_heads(
    x_gmem, heads, token, cos_gmem, sin_gmem, gain_gmem, tile, *, are_queries: bool = False
) -> LoadedHeads:
    """Load heads of a token [M, J, C], its cosines and sines, and the gain unless it is None.

    Where a row has two kinds of angles, those of queries are the second.
    """
    channels, num_angles = x_gmem.shape[2], cos_gmem.shape[1]
    halves, angles = halves_of(channels), (token,)
    if num_angles != channels // 2:
        start = num_angles - channels // 2 if are_queries else 0
        angles = token, pl.ds(start, channels // 2)
    return LoadedHeads(
        parts=[tile.whole.load(x_gmem.at[token, heads, c]) for c in halves],
        cos=tile.per_col.load(cos_gmem.at[angles]),
        sin=tile.per_col.load(sin_gmem.at[angles]),
        gains=[] if gain_gmem is None else [tile.per_col.load(gain_gmem.at[c]) for c in halves],
        tile=tile,
    )


def _first_head(index, tile: rows.Tile, num_heads: int):
    """Where tile `index` of the heads starts; the last one starts early, not ends late."""
    return jnp.minimum(index * tile.rows, num_heads - tile.rows)


@functools.partial(jax.jit, static_argnames=("interpret",))
def rope(x, cos, sin, *, interpret: bool = False) -> jax.Array:
    """See `api.rope`.

    Args:
        x: Queries or keys.
        cos: Rows of the host's table, one a token.
        sin: Likewise.
        interpret: Run in interpret mode.

    Raises:
        ValueError: If the head is not a multiple of 32 channels from 64 to 256.

    Numerics:
        # ORDER: `x1 * cos - x2 * sin` and `x2 * cos + x1 * sin`, each product and sum rounded to
        float32, nothing fused.
        # ROUND: once, to the dtype of `x`.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_tokens, num_heads, channels = x.shape
    tile = _tile(num_heads, channels, interpret)

    def body(x_gmem, cos_gmem, sin_gmem, out_gmem):
        token = lax.axis_index("token")
        heads = pl.ds(_first_head(lax.axis_index("tile"), tile, num_heads), tile.rows)
        out = load_heads(x_gmem, heads, token, cos_gmem, sin_gmem, None, tile).rotated(eps=0.0)
        for c, part in zip(halves_of(channels), out, strict=True):
            out_gmem[token, heads, c] = part

    return rows.run_kernel(
        body,
        (x, cos, sin),
        out=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid={"tile": pl.cdiv(num_heads, tile.rows), "token": num_tokens},
        name="detjax_rope",
        is_interpreted=interpret,
    )


def rope_into_cache(
    qkv, rotation: Rotation, place: CachePlace, *, num_heads: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.rope_into_cache`."""
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    place = place._replace(layer=jnp.int32(place.layer))
    return _rope_into_cache(qkv, rotation, place, num_heads=num_heads, eps=eps)


@functools.partial(jax.jit, static_argnames=("num_heads", "eps"))
def _rope_into_cache(qkv, rotation: Rotation, place: CachePlace, *, num_heads: int, eps: float):
    pages_ref = jax.new_ref(place.pages)
    written = place._replace(pages=pages_ref)
    q = qk_norm_rope_write(qkv, rotation, written, num_heads=num_heads, eps=eps)
    return q, jax.freeze(pages_ref)


def qk_norm_rope_write(
    qkv,
    rotation: Rotation,
    place: CachePlace,
    *,
    num_heads: int,
    eps: float,
    interpret: bool = False,
) -> jax.Array:
    """Normalise and rotate queries and keys, and put keys and values in their pages: one launch.

    `q' = rope(rms_norm(q))`, `pages[layer, page, 0, :, offset] = rope(rms_norm(k))` and
    `pages[layer, page, 1, :, offset] = v`, where `page = page_table[m // T, position // P]` and
    `offset = position % P`.

    Args:
        qkv: [M, J, C]: queries, keys and values of each token, as one fused product has them, and
            what is not read behind them; or a tuple of q, k and v.
        rotation: Angles of the M tokens, and gains.
        place: Of the tokens in the cache, whose pages are a `jax.new_ref`, written in place.
            Positions are [B, T] or [M]; a negative one is padding, and nothing of it is written.
            The layer is an operand, so that all layers share one compiled kernel.
        num_heads: H.
        eps: Of the norm.
        interpret: Run in interpret mode.

    Returns:
        The queries [M, H, C]. Those of padding are computed like any other.

    Raises:
        ValueError: If shapes do not fit, or heads are not a multiple of 32 channels from 64 to 256.

    Numerics:
        The bits of `rms_norm` (heads as rows), `rope` and a scatter one after the other: the same
        functions on the same layout, with the norm rounded to the dtype in between. Pages of
        float8 take keys and values that are rounded once more.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    pages_ref, page_table, positions, layer = place
    _, _, _, kv_heads, page_len, channels = pages_ref.shape
    qkv_parts = qkv if isinstance(qkv, tuple) else (qkv,)
    starts = (0, 0, 0) if len(qkv_parts) == 3 else (0, num_heads, num_heads + kv_heads)
    num_tokens = qkv_parts[0].shape[0]
    held = tuple(p.shape[1:] for p in qkv_parts)
    want = (num_heads, kv_heads, kv_heads) if len(qkv_parts) == 3 else (num_heads + 2 * kv_heads,)
    fits = held[0][0] >= want[0] if len(held) == 1 else tuple(h for h, _ in held) == want
    if not fits or any(c != channels for _, c in held):
        raise ValueError(f"heads of qkv are {held}, not {want} of {channels} channels")
    if num_tokens % page_table.shape[0] or positions.size != num_tokens:
        raise ValueError(
            f"{num_tokens} tokens, {positions.shape=} and {page_table.shape=} do not fit"
        )
    query_len = num_tokens // page_table.shape[0]
    q_tile, kv_tile = _tile(num_heads, channels, interpret), _tile(kv_heads, channels, interpret)
    q_tiles = pl.cdiv(num_heads, q_tile.rows)
    kv_tiles = pl.cdiv(kv_heads, kv_tile.rows)
    dtype = qkv_parts[0].dtype

    def body(
        qkv_gmem,  # ([M, J, C],), or q, k and v
        rotation_gmem,  # `Rotation`: [M, C / 2] f32 twice, and two of [C], or None
        pages_gmem,  # [L, N, 2, K, P, C]
        table_gmem,  # [B, n] int32
        positions_gmem,  # [M] int32
        layer_gmem,  # [1] int32
        q_out,  # [M, H, C]
    ):
        q_gmem, k_gmem, v_gmem = qkv_gmem if len(qkv_gmem) == 3 else qkv_gmem * 3
        cos_gmem, sin_gmem, gains_gmem = rotation_gmem
        q_gain_gmem, k_gain_gmem = gains_gmem or (None, None)
        index, token = lax.axis_index("tile"), lax.axis_index("token")
        halves = halves_of(channels)

        @pl.when(index < q_tiles)
        def _queries():
            first = _first_head(index, q_tile, num_heads)
            queries = load_heads(
                q_gmem, pl.ds(starts[0] + first, q_tile.rows), token, cos_gmem, sin_gmem,
                q_gain_gmem, q_tile, are_queries=True,
            )  # fmt: skip
            for c, part in zip(halves, queries.rotated(eps=eps), strict=True):
                q_out[token, pl.ds(first, q_tile.rows), c] = part

        @pl.when(index >= q_tiles)
        def _keys_and_values():
            position = positions_gmem[token]
            safe = jnp.maximum(position, 0)
            page = table_gmem[lax.div(token, query_len), lax.div(safe, page_len)]
            offset = lax.rem(safe, page_len)
            first = _first_head(index - q_tiles, kv_tile, kv_heads)
            v_heads = pl.ds(starts[2] + first, kv_tile.rows)
            values = [kv_tile.whole.load(v_gmem.at[token, v_heads, c]) for c in halves]
            keys = load_heads(
                k_gmem, pl.ds(starts[1] + first, kv_tile.rows), token, cos_gmem, sin_gmem,
                k_gain_gmem, kv_tile,
            ).rotated(eps=eps)  # fmt: skip

            @pl.when(position >= 0)
            def _store():
                heads = pl.ds(first, kv_tile.rows)
                for which, pair in enumerate((keys, values)):
                    for c, part in zip(halves, pair, strict=True):
                        if holds_float8(pages_gmem):
                            part = narrowed(part.astype(jnp.float32), kv_tile.whole)
                        pages_gmem[layer_gmem[0], page, which, heads, offset, c] = part

    return rows.run_kernel(
        body,
        (
            qkv_parts, rotation, pages_ref, page_table, positions.reshape(-1),
            jnp.asarray(layer, jnp.int32).reshape(1),
        ),
        out=jax.ShapeDtypeStruct((num_tokens, num_heads, channels), dtype),
        grid={"tile": q_tiles + kv_tiles, "token": num_tokens},
        name="detjax_qk_norm_rope_write",
        is_interpreted=interpret,
    )  # fmt: skip
