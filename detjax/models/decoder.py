# SPDX-License-Identifier: Apache-2.0
"""The canonical decoder: one function for prefill, decode, verify and scoring.

Whether a call is prefill or decode is only the shape of its tokens; every operation treats its rows
one by one, so the bits of a position do not depend on it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.adapters.program import with_adapters
from detjax.models.layers import (
    ForwardContext,
    Tokens,
    angles_of,
    attend,
    attend_from,
    embed_tokens,
    final_rows,
    gated_layer,
    mix_experts,
    product_of_stream,
    project,
    rope_rows,
    row_parallel_norm,
    row_parallel_norm_add,
    see_tokens,
    wanted_rows,
)
from detjax.models.linear_attention import linear_attend
from detjax.models.pages import CachePages, kv_of, with_kv
from detjax.models.transformer import Stream, run_layers
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.softcap.api import softcap
from detjax.parallel.exchange import Exchange
from detjax.parallel.mesh import TP_AXIS


def check_mesh(config, profile: NumericsProfile, tp: int) -> None:
    """Refuse a tp whose ranks would not own whole subtrees.

    Raises:
        ValueError: Naming the layer, its width and the largest tp that works.
    """
    widths = {"o_proj": config.num_heads * config.head_dim}
    if (linear := config.linear_attention) is not None:
        widths["out_proj"] = linear.num_value_heads * linear.value_dim
    if config.has_dense_layers:
        widths["down_proj"] = config.intermediate_size
    for layer, k_len in widths.items():
        leaves = tree_reduction(k_len, profile).num_leaves
        if leaves % tp:
            raise ValueError(
                f"tp={tp} does not divide the {leaves} leaves of {layer} (width {k_len}): a rank "
                f"must own whole leaves of 16 or more; use --tp {leaves} or less"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalOps:
    """Kernels whose sums have one order. A norm is left to the product after it where it pays.

    Attributes:
        ctx: The model and its mesh.
        tokens: New tokens and where they stand.
        cos: Cosines of each token's position, [M, R * half]: those of each rotary embedding.
        sin: Likewise.
        exchange: Adds few rows over ranks; None where XLA's collectives do.
        wanted: Which token of each sequence goes through the last layer, int32 [B]; None for all.
    """

    ctx: ForwardContext
    tokens: Tokens
    cos: Any
    sin: Any
    exchange: Exchange | None
    wanted: Any

    def embed(self, table, ids, gain) -> Stream:
        """Leave the first norm to the first product, if there is one."""
        residual = embed_tokens(self.ctx, table, ids)
        return Stream(residual=residual, x=residual if gain is None else None)

    def attend(self, layer_idx: int, weights: dict, stream: Stream, cache):
        """Attend over the cache, the new tokens included. In the last layer from those wanted."""
        if "linear_in" in weights:
            return self._attend_linearly(layer_idx, weights, stream, cache)
        ctx, tokens, wanted = self.ctx, self.tokens, self._wanted_in(layer_idx)
        qkv, stream = project(ctx, weights, stream)
        cos, sin = (angles_of(ctx.config, rows, layer_idx) for rows in (self.cos, self.sin))
        kind = ctx.config.cache_kind(layer_idx)
        operands = ctx, weights, qkv, cos, sin, kv_of(cache, kind), tokens, layer_idx
        if wanted is None:
            kv, heads = attend(*operands)
        else:
            kv, heads = attend_from(*operands, wanted=wanted)
            residual = wanted_rows(ctx, stream.residual, tokens.ids.shape, wanted)
            stream = Stream(residual=residual, x=None)
        return with_kv(cache, kind, kv), heads, stream

    def _wanted_in(self, layer_idx: int):
        """Which token of each sequence goes through a layer; None for all."""
        return self.wanted if layer_idx == self.ctx.config.num_layers - 1 else None

    def _attend_linearly(self, layer_idx: int, weights: dict, stream: Stream, cache):
        """Read the states behind the new tokens. In the last layer of those wanted."""
        ctx, shape, wanted = self.ctx, self.tokens.ids.shape, self._wanted_in(layer_idx)
        projected, stream = product_of_stream(ctx, weights, "linear_in", stream)
        cache, heads = linear_attend(ctx, weights, projected, cache, self.tokens, layer_idx)
        if wanted is None:
            return cache, heads, stream
        rows = (wanted_rows(ctx, x, shape, wanted) for x in (heads, stream.residual))
        heads, residual = rows
        return cache, heads, Stream(residual=residual, x=None)

    def gate(self, weights: dict, stream: Stream) -> tuple[jax.Array, Stream]:
        """Gates and ups in one launch."""
        return gated_layer(self.ctx, weights, stream)

    def add_norm(self, x, w, bias, gain, stream: Stream) -> Stream:
        """A tree of leaves over ranks, then the residual stream, then the norm."""
        return row_parallel_norm(
            self.ctx, x, w, stream.residual, bias, gain, exchange=self.exchange
        )

    def norm_add(self, x, w, bias, gains, stream: Stream) -> Stream:
        """A tree of leaves over ranks, its norm, the residual stream, and the norm of that."""
        return row_parallel_norm_add(
            self.ctx, x, w, stream.residual, bias, gains, exchange=self.exchange
        )

    def mix_experts(self, weights: dict, gain, stream: Stream, cache):
        """Each rank its own experts; rounded rows are exchanged, and added in order of rank."""
        return cache, mix_experts(self.ctx, weights, gain, stream)


def forward(
    ctx: ForwardContext,
    params: dict,
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    pages: CachePages,
    tokens: Tokens,
    *,
    wanted: Int32[Array, " B"] | None = None,
) -> tuple[CachePages, Activation[Array, "B T D"]]:
    """Run every layer on new tokens and put their keys and values in the cache.

    Call inside `shard_map`; `pages` and `params` are this rank's share.

    Args:
        ctx: The model and its mesh.
        params: Weights.
        rope_tables: Cosines and sines by position.
        pages: The cache.
        tokens: New tokens and where they stand.
        wanted: The one token of each sequence whose hidden state is wanted, if all are not. In the
            last layer the others have keys and values alone.

    Returns:
        The cache, and the final normalised hidden state of each token; with `wanted`, T is 1.

    Numerics:
        Only kernels do arithmetic. A position's bits depend on the tokens at and before it, the
        weights and the profile, and not on which tokens are wanted.
    """
    cos, sin = rope_rows(rope_tables, tokens.positions)
    exchange = params.get("exchange")
    see_tokens(ctx, tokens, cos, sin)
    ops = CanonicalOps(ctx=ctx, tokens=tokens, cos=cos, sin=sin, exchange=exchange, wanted=wanted)
    ops = ctx.taps.watch(ops, num_layers=ctx.config.num_layers)
    params = with_adapters(params, tokens.adapters)
    pages, stream = run_layers(ops, params, tokens.ids.reshape(-1), pages)
    x = final_rows(ctx, *stream, params["final_norm"])
    ctx.taps.see("final_norm", x)
    return pages, x.reshape(len(tokens.ids), -1, x.shape[-1])


def local_logits(
    ctx: ForwardContext, params: dict, hidden: Activation[Array, "M D"]
) -> Float32[Array, "M v"]:
    """This rank's share of the float32 logits; columns past the vocabulary are -inf."""
    logits = linear(
        hidden, params["lm_head"], out_dtype=jnp.dtype(jnp.float32), backend=ctx.backend
    )
    if ctx.config.logits_softcap is not None:
        logits = softcap(logits, cap=ctx.config.logits_softcap, backend=ctx.backend)
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
