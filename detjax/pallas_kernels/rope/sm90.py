# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding on Hopper, alone or with the q/k norm before it and the cache write after it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.rms_norm import sm90 as rows


def _form(channels: int) -> rows.RowSum:
    """How a head lies in registers: as two halves, as the narrow rows of `rms_norm`.

    Raises:
        ValueError: If the head is not a multiple of 32 channels from 64 to 256.
    """
    if channels % 32 or not 64 <= channels <= 256:
        raise ValueError(
            f"sm90 rope needs heads of a multiple of 32 channels from 64 to 256, not {channels}"
        )
    return rows.row_sum(channels)


def _tile(num_heads: int, channels: int, interpret: bool) -> rows.Tile:
    form = _form(channels)
    return rows.tile_of_rows(
        rows.most_rows(rows.LANES // form.lanes, num_heads),
        lanes=form.lanes,
        vec_len=form.vec_len,
        is_interpreted=interpret,
    )


def _halves(channels: int) -> list:
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


def _load_heads(x_gmem, heads, token, tile: rows.Tile) -> list:
    """The two halves of some heads of a token."""
    return [tile.whole.load(x_gmem.at[token, heads, c]) for c in _halves(x_gmem.shape[2])]


def _rotated(parts, angles, gains, tile: rows.Tile, *, eps) -> list:
    """Normalise the halves of some heads if there are gains, rotate, and round."""
    dtype = parts[0].dtype
    parts = [p.astype(jnp.float32) for p in parts]
    if gains is not None:
        width = 2 * parts[0].shape[1]
        parts = rows.narrow_normalise(parts, gains, tile, width=width, eps=eps)
        # ROUND: the normalised head, as `rms_norm` alone does.
        parts = [p.astype(dtype).astype(jnp.float32) for p in parts]
    return [p.astype(dtype) for p in _rotate(*parts, *angles, tile)]  # ROUND: once


def _tokens(num_tokens: int, each: int) -> list:
    """This CTA's tokens; the last CTA starts early, and does some tokens again, alike."""
    first = jnp.minimum(lax.axis_index("token") * each, num_tokens - each)
    return [first + i for i in range(each)]


def _first_head(index, tile: rows.Tile, num_heads: int):
    """Where tile `index` of the heads starts; the last one starts early, not ends late."""
    return jnp.minimum(index * tile.rows, num_heads - tile.rows)


@functools.partial(jax.jit, static_argnames=("tokens_each", "interpret"))
def rope(x, cos, sin, *, tokens_each: int = 1, interpret: bool = False) -> jax.Array:
    """See `api.rope`.

    Args:
        x: Queries or keys.
        cos: Rows of the host's table, one a token.
        sin: Likewise.
        tokens_each: Tokens of a CTA; changes no bit.
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
    each = min(tokens_each, num_tokens)
    tile = _tile(num_heads, channels, interpret)

    def body(x_gmem, cos_gmem, sin_gmem, out_gmem):
        heads = pl.ds(_first_head(lax.axis_index("tile"), tile, num_heads), tile.rows)
        tokens = _tokens(num_tokens, each)
        loads = [_load_heads(x_gmem, heads, token, tile) for token in tokens]
        angles = [[tile.per_col.load(g.at[t]) for g in (cos_gmem, sin_gmem)] for t in tokens]
        for token, parts, angle in zip(tokens, loads, angles, strict=True):
            out = _rotated(parts, angle, None, tile, eps=None)
            for c, part in zip(_halves(channels), out, strict=True):
                out_gmem[token, heads, c] = part

    return rows.run_kernel(
        body,
        (x, cos, sin),
        out=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid={"tile": pl.cdiv(num_heads, tile.rows), "token": pl.cdiv(num_tokens, each)},
        name="detjax_rope",
        is_interpreted=interpret,
    )


def qk_norm_rope_write(
    qkv,
    cos,
    sin,
    q_gain,
    k_gain,
    pages_ref,
    page_table,
    positions,
    *,
    num_heads: int,
    layer,
    eps: float,
    tokens_each: int = 1,
    interpret: bool = False,
) -> jax.Array:
    """Normalise and rotate queries and keys, and put keys and values in their pages: one launch.

    `q' = rope(rms_norm(q))`, `pages[layer, page, 0, :, offset] = rope(rms_norm(k))` and
    `pages[layer, page, 1, :, offset] = v`, where `page = page_table[m // T, position // P]` and
    `offset = position % P`.

    Args:
        qkv: [M, H + 2 K, C]: queries, keys and values of each token, as one fused product has them;
            or a tuple of q, k and v.
        cos: float32 [M, C / 2].
        sin: Likewise.
        q_gain: [C], or None for no norm.
        k_gain: Likewise; both or neither.
        pages_ref: The cache [L, N, 2, K, P, C], a `jax.new_ref`; written in place.
        page_table: int32 [B, n].
        positions: int32 [B, T] or [M]; a negative one is padding, and nothing of it is written.
        num_heads: H.
        layer: Index into L; an operand, so that all layers share one compiled kernel.
        eps: Of the norm.
        tokens_each: Tokens of a CTA; changes no bit.
        interpret: Run in interpret mode.

    Returns:
        The queries [M, H, C]. Those of padding are computed like any other.

    Raises:
        ValueError: If shapes do not fit, or heads are not a multiple of 32 channels from 64 to 256.

    Numerics:
        The bits of `rms_norm` (heads as rows), `rope` and a scatter one after the other: the same
        functions on the same layout, with the norm rounded to the dtype in between.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    _, _, _, kv_heads, page_len, channels = pages_ref.shape
    qkv_parts = qkv if isinstance(qkv, tuple) else (qkv,)
    starts = (0, 0, 0) if len(qkv_parts) == 3 else (0, num_heads, num_heads + kv_heads)
    num_tokens = qkv_parts[0].shape[0]
    held = tuple(p.shape[1:] for p in qkv_parts)
    want = (num_heads, kv_heads, kv_heads) if len(qkv_parts) == 3 else (num_heads + 2 * kv_heads,)
    if held != tuple((h, channels) for h in want):
        raise ValueError(f"heads of qkv are {held}, not {want} of {channels} channels")
    if (q_gain is None) != (k_gain is None):
        raise ValueError("q_gain and k_gain must be given together")
    if num_tokens % page_table.shape[0] or positions.size != num_tokens:
        raise ValueError(
            f"{num_tokens} tokens, {positions.shape=} and {page_table.shape=} do not fit"
        )
    query_len = num_tokens // page_table.shape[0]
    each = min(tokens_each, num_tokens)
    q_tile, kv_tile = _tile(num_heads, channels, interpret), _tile(kv_heads, channels, interpret)
    q_tiles = pl.cdiv(num_heads, q_tile.rows)
    kv_tiles = pl.cdiv(kv_heads, kv_tile.rows)
    dtype = qkv_parts[0].dtype
    gains = () if q_gain is None else (q_gain, k_gain)

    def body(*refs):
        refs = list(refs)
        q_gmem, *kv_gmem = [refs.pop(0) for _ in qkv_parts]
        k_gmem, v_gmem = kv_gmem or (q_gmem, q_gmem)
        cos_gmem, sin_gmem = refs.pop(0), refs.pop(0)
        q_gain_gmem, k_gain_gmem = (refs.pop(0), refs.pop(0)) if gains else (None, None)
        pages_gmem, table_gmem, positions_gmem, layer_gmem, q_out = refs
        index, tokens = lax.axis_index("tile"), _tokens(num_tokens, each)
        halves = _halves(channels)

        def shared(tile, gain_gmem):
            """Angles of each token, and the gains."""
            loaded = None
            if gain_gmem is not None:
                loaded = [tile.per_col.load(gain_gmem.at[c]) for c in halves]
            angles = [[tile.per_col.load(g.at[t]) for g in (cos_gmem, sin_gmem)] for t in tokens]
            return angles, loaded

        @pl.when(index < q_tiles)
        def _queries():
            first = _first_head(index, q_tile, num_heads)
            heads = pl.ds(starts[0] + first, q_tile.rows)
            loads = [_load_heads(q_gmem, heads, token, q_tile) for token in tokens]
            angles, gains = shared(q_tile, q_gain_gmem)
            for token, load, angle in zip(tokens, loads, angles, strict=True):
                out = _rotated(load, angle, gains, q_tile, eps=eps)
                for c, part in zip(halves, out, strict=True):
                    q_out[token, pl.ds(first, q_tile.rows), c] = part

        @pl.when(index >= q_tiles)
        def _keys_and_values():
            first = _first_head(index - q_tiles, kv_tile, kv_heads)
            k_heads = pl.ds(starts[1] + first, kv_tile.rows)
            v_heads = pl.ds(starts[2] + first, kv_tile.rows)
            positions = [positions_gmem[token] for token in tokens]
            safe = [jnp.maximum(p, 0) for p in positions]
            pages = [
                table_gmem[lax.div(token, query_len), lax.div(p, page_len)]
                for token, p in zip(tokens, safe, strict=True)
            ]
            keys = [_load_heads(k_gmem, k_heads, token, kv_tile) for token in tokens]
            values = [_load_heads(v_gmem, v_heads, token, kv_tile) for token in tokens]
            angles, gains = shared(kv_tile, k_gain_gmem)
            heads = pl.ds(first, kv_tile.rows)
            for i, position in enumerate(positions):
                pairs = (_rotated(keys[i], angles[i], gains, kv_tile, eps=eps), values[i])

                @pl.when(position >= 0)
                def _store(i=i, pairs=pairs):
                    offset = lax.rem(safe[i], page_len)
                    for which, pair in enumerate(pairs):
                        for c, part in zip(halves, pair, strict=True):
                            pages_gmem[layer_gmem[0], pages[i], which, heads, offset, c] = part

    return rows.run_kernel(
        body,
        (
            *qkv_parts, cos, sin, *gains, pages_ref, page_table, positions.reshape(-1),
            jnp.asarray(layer, jnp.int32).reshape(1),
        ),
        out=jax.ShapeDtypeStruct((num_tokens, num_heads, channels), dtype),
        grid={"tile": q_tiles + kv_tiles, "token": pl.cdiv(num_tokens, each)},
        name="detjax_qk_norm_rope_write",
        is_interpreted=interpret,
    )  # fmt: skip
