# SPDX-License-Identifier: Apache-2.0
"""The order of operations in a decoder, written once for serving, drafts and training.

What an operation is, and how it rounds, says the object that gives it: `decoder.CanonicalOps`,
`fast.FastOps`, `training.forward.TrainingOps`. Operations are cut where all three agree: a product
whose inputs are split over ranks comes with the residual stream and the norm after it, and whether
that norm is made at once or left to the product that reads it is an operation's own affair. So does
a mixture of experts, from its router on.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from detjax.array_types import Array, Int32


class Stream(NamedTuple):
    """What a layer hands to the next.

    Attributes:
        residual: The residual stream, [M, D]; where rows are scattered, this rank's own. Or what it
            is the sum of, where whoever reads it adds it up (`layers.UnaddedExperts`,
            `layers.UnaddedSubtrees`).
        x: Its normalised rows, [M, D], or None where the product that reads them normalises.
    """

    residual: Any
    x: Any


class AfterGains(NamedTuple):
    """Gains of a layer that normalises the results of its operations.

    Attributes:
        after: Of the norm of a result, [D].
        before: Of the norm of the stream behind it, [D], or None where what follows reads the
            stream itself.
    """

    after: Any
    before: Any


@runtime_checkable
class DecoderOps(Protocol):
    """The operations of a decoder. They know the tokens, the mesh and the numerics.

    A cache is whatever they make of it: pages of keys and values, what routers counted, or None.
    """

    def embed(self, table: jax.Array, ids: jax.Array, gain: jax.Array | None) -> Stream:
        """Look up a row a token, and normalise it for the first layer; None does not."""
        ...

    def attend(
        self, layer_idx: int, weights: dict[str, Any], stream: Stream, cache: Any
    ) -> tuple[Any, jax.Array, Stream]:
        """Project to heads, rotate, cache and attend; or the same of linear attention.

        Returns the cache, the heads' results, and the stream of their rows: all of them, or in the
        last layer those whose result is wanted.
        """
        ...

    def gate(self, weights: dict[str, Any], stream: Stream) -> tuple[jax.Array, Stream]:
        """The feed-forward layer up to its last product: gated channels, and the stream."""
        ...

    def add_norm(
        self, x: jax.Array, w: Any, bias: jax.Array | None, gain: jax.Array, stream: Stream
    ) -> Stream:
        """Multiply by `w`, whose inputs may be split over ranks, add the stream, normalise."""
        ...

    def norm_add(
        self, x: jax.Array, w: Any, bias: jax.Array | None, gains: AfterGains, stream: Stream
    ) -> Stream:
        """Multiply by `w`, normalise the product, add it to the stream, and normalise that."""
        ...

    def mix_experts(
        self, weights: dict[str, Any], gain: jax.Array, stream: Stream, cache: Any
    ) -> tuple[Any, Stream]:
        """Route each row to its experts, add their results to the stream, normalise."""
        ...


def run_layers(
    ops: DecoderOps,
    params: dict[str, Any],
    ids: Int32[Array, " M"],
    cache: Any,
    *,
    remat: bool = False,
) -> tuple[Any, Stream]:
    """Run every layer on tokens.

    Args:
        ops: What is done.
        params: Weights under the names that `ops` reads; a gain of layer i + 1 is read in layer i.
        ids: Token ids.
        cache: Handed from layer to layer.
        remat: Keep one stream a layer for a backward pass and compute the rest again.

    Returns:
        The cache, and the stream normalised with the gain of "final_norm".
    """
    layer_pass = partial(decoder_layer, ops)
    if remat:
        layer_pass = jax.checkpoint(layer_pass, static_argnums=0)
    layers = params["layers"]
    gains = [weights.get("attn_norm") for weights in layers] + [params["final_norm"]]
    stream = ops.embed(params["embed"], ids, gains[0])
    for layer_idx, weights in enumerate(layers):
        cache, stream = layer_pass(layer_idx, weights, gains[layer_idx + 1], cache, stream)
    return cache, stream


def decoder_layer(
    ops: DecoderOps,
    layer_idx: int,
    weights: dict[str, Any],
    next_gain: Any,
    cache: Any,
    stream: Stream,
) -> tuple[Any, Stream]:
    """One layer; `next_gain` normalises for the layer after it, or is None."""
    cache, heads, stream = ops.attend(layer_idx, weights, stream, cache)
    o, o_bias = weights["linear_o" if "linear_o" in weights else "o"], weights.get("o_bias")
    if "attn_norm_after" in weights:
        gains = AfterGains(weights["attn_norm_after"], weights.get("mlp_norm"))
        stream = ops.norm_add(heads, o, o_bias, gains, stream)
    else:
        stream = ops.add_norm(heads, o, o_bias, weights["mlp_norm"], stream)
    if "router" in weights:
        return ops.mix_experts(weights, next_gain, stream, cache)
    channels, stream = ops.gate(weights, stream)
    if "mlp_norm_after" in weights:
        gains = AfterGains(weights["mlp_norm_after"], next_gain)
        return cache, ops.norm_add(channels, weights["down"], None, gains, stream)
    return cache, ops.add_norm(channels, weights["down"], None, next_gain, stream)
