# SPDX-License-Identifier: Apache-2.0
"""The blocks every family shares. They run inside `shard_map`, on this rank's share of the heads.

No arithmetic of their own: kernels, collectives and indexing.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.config import ModelConfig
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention.api import attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.embedding.api import embed
from detjax.pallas_kernels.linear.api import linear, linear_partial
from detjax.pallas_kernels.rms_norm.api import add_rms_norm, rms_norm
from detjax.pallas_kernels.rope.api import rope
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.parallel.collectives import butterfly_sum, gather_columns
from detjax.parallel.mesh import TP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a layer needs to know besides its weights: all static, none of it batch-shaped."""

    config: ModelConfig
    profile: NumericsProfile
    backend: Backend
    tp: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """New tokens of a batch, padded to one length. Leaves are arrays, or what JAX puts for them.

    Attributes:
        ids: Token ids, int32 [B, T].
        positions: Absolute position of each, int32 [B, T]; -1 marks padding.
        page_table: Cache page of each block of a sequence, int32 [B, n].
    """

    ids: Any
    positions: Any
    page_table: Any


def embed_tokens(recipe: Recipe, table, ids: Int32[Array, " M"]) -> Activation[Array, "M D"]:
    """Look up this rank's channels and gather the rest."""
    dtype = recipe.profile.activation_dtype
    rows = embed(table, ids, out_dtype=dtype, backend=recipe.backend)
    return gather_columns(rows, TP_AXIS)


def write_kv(
    pages: Activation[Array, "L N 2 K P C"],
    k: Activation[Array, "B T K C"],
    v: Activation[Array, "B T K C"],
    tokens: Tokens,
    layer: int,
) -> Activation[Array, "L N 2 K P C"]:
    """Put keys and values of new tokens in their pages; padding is dropped."""
    page_len = pages.shape[4]
    positions = tokens.positions.reshape(-1)
    blocks = jnp.maximum(tokens.positions, 0) // page_len
    page_ids = jnp.take_along_axis(tokens.page_table, blocks, axis=1).reshape(-1)
    page_ids = jnp.where(positions >= 0, page_ids, pages.shape[1])
    offsets = jnp.maximum(positions, 0) % page_len
    kv = jnp.stack([k, v], axis=2).reshape(positions.shape[0], 2, *k.shape[2:])
    return pages.at[layer, page_ids, :, :, offsets].set(kv, mode="drop")


def attention_layer(
    recipe: Recipe,
    weights: dict,
    x: Activation[Array, "M D"],
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Activation[Array, "L N 2 K P C"],
    tokens: Tokens,
    layer: int,
) -> tuple[Activation[Array, "L N 2 K P C"], Float32[Array, "M D"]]:
    """Attend over the cache, the new tokens included. Returns the cache and the unrounded sum."""
    config, profile, backend = recipe.config, recipe.profile, recipe.backend
    batch, length = tokens.ids.shape
    dtype, channels = x.dtype, config.head_dim

    def normed(rows, gain):
        flat = rows.reshape(-1, channels)
        return rms_norm(flat, gain, eps=config.rms_norm_eps, backend=backend).reshape(rows.shape)

    qkv = linear(x, weights["qkv"], weights.get("qkv_bias"), out_dtype=dtype, backend=backend)
    num_kv = pages.shape[3]
    num_q = qkv.shape[1] // channels - 2 * num_kv
    qkv = qkv.reshape(qkv.shape[0], -1, channels)
    q, k, v = jnp.split(qkv, [num_q, num_q + num_kv], axis=1)
    if config.qk_norm:
        q, k = normed(q, weights["q_norm"]), normed(k, weights["k_norm"])
    q, k = (rope(rows, cos, sin, backend=backend) for rows in (q, k))
    q, k, v = (rows.reshape(batch, length, -1, channels) for rows in (q, k, v))
    pages = write_kv(pages, k, v, tokens, layer)
    out = attention(
        q,
        pages,
        tokens.page_table,
        tokens.positions,
        layer=layer,
        window=config.sliding_windows[layer],
        profile=profile,
        backend=backend,
    )
    k_len = config.num_heads * channels
    partial = row_parallel(recipe, out.reshape(batch * length, -1), weights["o"], k_len)
    return pages, partial


def mlp_layer(recipe: Recipe, weights: dict, x: Activation[Array, "M D"]) -> Float32[Array, "M D"]:
    """The gated feed-forward layer. Returns the unrounded sum."""
    gate_up = linear(x, weights["gate_up"], out_dtype=x.dtype, backend=recipe.backend)
    hidden = swiglu(gate_up, backend=recipe.backend)
    return row_parallel(recipe, hidden, weights["down"], recipe.config.intermediate_size)


def row_parallel(
    recipe: Recipe, x: Activation[Array, "M k"], w: Activation[Array, "D k"], k_len: int
) -> Float32[Array, "M D"]:
    """Multiply by weights whose inputs are split over ranks, and add the ranks' subtrees."""
    reduction = tree_reduction(k_len, recipe.profile)
    partial = linear_partial(x, w, reduction=reduction, backend=recipe.backend)
    return butterfly_sum(partial, TP_AXIS, recipe.tp, backend=recipe.backend)


def add_and_norm(recipe: Recipe, partial, residual, bias, gain):
    """Add a layer's sum to the residual stream and normalise for the next layer."""
    return add_rms_norm(
        partial, residual, bias, gain, eps=recipe.config.rms_norm_eps, backend=recipe.backend
    )
