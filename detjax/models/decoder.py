# SPDX-License-Identifier: Apache-2.0
"""The decoder: one function for prefill, decode, verify and scoring.

Whether a call is prefill or decode is only the shape of its tokens; every operation treats its rows
one by one, so the bits of a position do not depend on it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32
from detjax.models.layers import (
    ForwardContext,
    Tokens,
    attention_layer,
    embed_tokens,
    final_rows,
    gated_layer,
    row_parallel_norm,
)
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.linear.api import linear
from detjax.parallel.mesh import TP_AXIS


def check_mesh(config, profile: NumericsProfile, tp: int) -> None:
    """Refuse a tp whose ranks would not own whole subtrees.

    Raises:
        ValueError: Naming the layer, its width and the largest tp that works.
    """
    widths = {
        "o_proj": config.num_heads * config.head_dim,
        "down_proj": config.intermediate_size,
    }
    for layer, k_len in widths.items():
        leaves = tree_reduction(k_len, profile).num_leaves
        if leaves % tp:
            raise ValueError(
                f"tp={tp} does not divide the {leaves} leaves of {layer} (width {k_len}): a rank "
                f"must own whole leaves of 16 or more; use --tp {leaves} or less"
            )


def forward(
    ctx: ForwardContext,
    params: dict,
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    pages: Activation[Array, "L N 2 K P C"],
    tokens: Tokens,
) -> tuple[Activation[Array, "L N 2 K P C"], Activation[Array, "B T D"]]:
    """Run every layer on new tokens and put their keys and values in the cache.

    Call inside `shard_map`; `pages` and `params` are this rank's share.

    Returns:
        The cache, and the final normalised hidden state of each token.

    Numerics:
        Only kernels do arithmetic. A position's bits depend on the tokens at and before it, the
        weights and the profile.
    """
    batch, length = tokens.ids.shape
    flat_positions = jnp.maximum(tokens.positions, 0).reshape(-1)
    cos, sin = (jnp.take(table, flat_positions, axis=0, mode="clip") for table in rope_tables)

    layers, exchange = params["layers"], params.get("exchange")
    residual, x = embed_tokens(ctx, params["embed"], tokens.ids.reshape(-1)), None
    next_gains = [weights["attn_norm"] for weights in layers[1:]] + [params["final_norm"]]
    for layer, (weights, next_gain) in enumerate(zip(layers, next_gains, strict=True)):
        pages, x = attention_layer(ctx, weights, residual, x, cos, sin, pages, tokens, layer)
        residual, x = row_parallel_norm(
            ctx, x, weights["o"], residual, weights.get("o_bias"), weights["mlp_norm"],
            exchange=exchange,
        )  # fmt: skip
        x = gated_layer(ctx, weights, residual, x)
        residual, x = row_parallel_norm(
            ctx, x, weights["down"], residual, None, next_gain, exchange=exchange
        )
    x = final_rows(ctx, residual, x, params["final_norm"])
    return pages, x.reshape(batch, length, -1)


def local_logits(
    ctx: ForwardContext, params: dict, hidden: Activation[Array, "M D"]
) -> Float32[Array, "M v"]:
    """This rank's share of the float32 logits; columns past the vocabulary are -inf."""
    logits = linear(
        hidden, params["lm_head"], out_dtype=jnp.dtype(jnp.float32), backend=ctx.backend
    )
    return mask_padding(ctx, logits)


def mask_padding(ctx: ForwardContext, logits: Float32[Array, "M v"]) -> Float32[Array, "M v"]:
    """Put -inf in the columns of this rank's share that are past the vocabulary."""
    width = logits.shape[1]
    if width * ctx.tp == ctx.config.vocab_size:
        return logits
    token_ids = lax.axis_index(TP_AXIS) * width + jnp.arange(width, dtype=jnp.int32)
    return jnp.where(token_ids < ctx.config.vocab_size, logits, -jnp.inf)


def last_hidden(hidden: Activation[Array, "B T D"], last: jax.Array) -> Activation[Array, "B D"]:
    """The hidden state of token `last[b]` of each sequence."""
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
