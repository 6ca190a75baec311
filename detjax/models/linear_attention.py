# SPDX-License-Identifier: Apache-2.0
"""A layer of gated DeltaNet, on this rank's heads. No arithmetic of its own.

A rank has whole heads of keys, with the heads of values that share them. Training arranges rows,
filters and gates by the same functions.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array
from detjax.models.config import LinearAttentionConfig
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.pages import HybridPages
from detjax.models.taps import Share
from detjax.pallas_kernels.delta_rule.api import delta_rule, gated_rms_norm


class Projected(NamedTuple):
    """What a layer makes of its normalised rows.

    Attributes:
        rows: [M, K, X]: q, k, values, b and a of each head of keys, and zeros.
        z: [M, H, C]: gates of the heads of values.
    """

    rows: jax.Array
    z: jax.Array


def _by_key_head(sizes: LinearAttentionConfig, parts: list[jax.Array]) -> jax.Array:
    """Join columns [..., K * n] of several parts, head of keys by head of keys: [..., K, X]."""
    num_heads = parts[0].shape[-1] // sizes.key_dim
    heads = [part.reshape(*part.shape[:-1], num_heads, -1) for part in parts]
    return jnp.concatenate(heads, axis=-1)


def split_projected(
    sizes: LinearAttentionConfig, projected: Activation[Array, "M O"], tp: int
) -> Projected:
    """Cut this rank's columns: all queries, keys, values, gates, b and a, and padding."""
    num_keys = sizes.num_key_heads // tp
    num_values = num_keys * sizes.group
    ends = list(itertools.accumulate(width // tp for width in sizes.input_widths))
    q, k, v, z, b, a, _ = jnp.split(projected, ends, axis=1)
    rows = _by_key_head(sizes, [q, k, v, b, a])
    padding = sizes.row_width - rows.shape[2]
    return Projected(
        rows=jnp.pad(rows, ((0, 0), (0, 0), (0, padding))),
        z=z.reshape(len(z), num_values, sizes.value_dim),
    )


def filters_of(sizes: LinearAttentionConfig, weights: dict) -> Activation[Array, "K Y X"]:
    """The convolution's numbers, head of keys by head of keys, the oldest token first."""
    parts = [weights[f"conv_{name}"][:, 0].T for name in "qkv"]
    return jnp.moveaxis(_by_key_head(sizes, parts), 0, 1)


def gates_of(sizes: LinearAttentionConfig, weights: dict) -> tuple[jax.Array, jax.Array]:
    """A and step of each head of values, [K, G], head of keys by head of keys."""
    decay, step = (weights[n].reshape(-1, sizes.group) for n in ("linear_decay", "linear_step"))
    return decay, step


def linear_attend(
    ctx: ForwardContext,
    weights: dict,
    projected: Activation[Array, "M O"],
    cache: HybridPages,
    tokens: Tokens,
    layer_idx: int,
) -> tuple[HybridPages, Activation[Array, "M i"]]:
    """Put projected tokens' rows in the cache and read the state behind each.

    Args:
        ctx: The model and its mesh.
        weights: Of the layer.
        projected: By "linear_in".
        cache: Rows and states, of this rank.
        tokens: New tokens and where they stand.
        layer_idx: Of the model.

    Returns:
        The cache, and this rank's heads of values, normalised and gated.
    """
    sizes, config = ctx.config.linear_attention, ctx.config
    assert sizes is not None  # whoever has such a layer
    ctx.taps.see("linear_in", projected, Share.COLUMNS)
    rows, z = split_projected(sizes, projected, ctx.tp)
    out, row_pages, state_pages = delta_rule(
        rows,
        filters_of(sizes, weights),
        gates_of(sizes, weights),
        cache.rows,
        cache.states,
        tokens.table_of("linear"),
        tokens.positions,
        layer=config.cache_index(layer_idx),
        backend=ctx.backend,
    )
    heads = gated_rms_norm(
        out.reshape(-1, sizes.value_dim),
        z.reshape(-1, sizes.value_dim),
        weights["linear_norm"],
        eps=config.rms_norm_eps,
        backend=ctx.backend,
    )
    cache = dataclasses.replace(cache, rows=row_pages, states=state_pages)
    return cache, heads.reshape(len(rows), -1)
