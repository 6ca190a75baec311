# SPDX-License-Identifier: Apache-2.0
"""A layer of gated DeltaNet, on this rank's heads. No arithmetic of its own.

A rank has whole heads of keys, with the heads of values that share them. Training arranges rows,
filters and gates by the same functions.
"""

import dataclasses

import jax

from detjax.array_types import Activation, Array
from detjax.models.config import LinearAttentionConfig
from detjax.models.layers import ForwardContext, Tokens, prefetched
from detjax.models.pages import HybridPages
from detjax.models.taps import Share
from detjax.pallas_kernels.delta_rule.api import delta_rule
from detjax.pallas_kernels.delta_rule.operands import Filters, OutputNorm, ProjectedRows


def projected_rows(
    sizes: LinearAttentionConfig, columns: Activation[Array, "M O"], tp: int
) -> ProjectedRows:
    """Columns of "linear_in" of this rank: queries, keys, values, gates, b, a, and padding."""
    return ProjectedRows(
        columns=columns,
        num_heads=sizes.num_key_heads // tp,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        group=sizes.group,
        width=sizes.row_width,
    )


def filters_of(weights: dict) -> Filters:
    """The convolution's numbers."""
    return Filters(*(weights[f"conv_{name}"] for name in "qkv"))


def gates_of(sizes: LinearAttentionConfig, weights: dict) -> tuple[jax.Array, jax.Array]:
    """A and step of each head of values, [K, G], head of keys by head of keys."""
    decay, step = (weights[n].reshape(-1, sizes.group) for n in ("linear_decay", "linear_step"))
    return decay, step


def _behind(weights: dict) -> tuple:
    """Matrices of the next products whose rows are known before any token is routed."""
    found = (prefetched(weights.get(name)) for name in ("linear_o", "shared_gate_up"))
    return tuple(w for w in found if w is not None)


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
    heads, row_pages, state_pages = delta_rule(
        projected_rows(sizes, projected, ctx.tp),
        filters_of(weights),
        gates_of(sizes, weights),
        cache.rows,
        cache.states,
        tokens.table_of("linear"),
        tokens.positions,
        layer=config.cache_index(layer_idx),
        backend=ctx.backend,
        norm=OutputNorm(
            gain=weights["linear_norm"], eps=config.rms_norm_eps, prefetch=_behind(weights)
        ),
    )
    return dataclasses.replace(cache, rows=row_pages, states=state_pages), heads
