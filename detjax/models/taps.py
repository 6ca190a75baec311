# SPDX-License-Identifier: Apache-2.0
"""Where the result of each operation can be seen while a program is traced.

A tap adds no instruction: it is shown an array that the program computes in any case. Where nobody
looks (`NoTaps`, the default of `ForwardContext`) a program lowers to the same text as without.
Where an operation is one kernel, what lies inside cannot be seen: the tap is the kernel's result.
"""

import enum
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from detjax.models.transformer import AfterGains, DecoderOps, Stream
from detjax.parallel.mesh import TP_AXIS


class Share(enum.Enum):
    """How the ranks of "tp" share a value; its rows are always split over "dp"."""

    WHOLE = "whole"  # every rank has all of it, and should have the same bits
    COLUMNS = "columns"  # each rank has some columns
    ROWS = "rows"  # each rank has some rows
    TERMS = "terms"  # each rank has a term of a sum


@runtime_checkable
class Taps(Protocol):
    """Who sees the results of operations, in their order."""

    def watch(self, ops: DecoderOps, *, num_layers: int) -> DecoderOps:
        """The operations to run in place of `ops`: they must give the same."""
        ...

    def see(self, name: str, value: jax.Array, share: Share = Share.WHOLE) -> None:
        """Look at the result of an operation.

        Args:
            name: What it is; the layer is known from `watch`.
            value: A row a token, or a row a sequence.
            share: How ranks share it.
        """
        ...


class NoTaps:
    """Nobody looks."""

    def watch(self, ops: DecoderOps, *, num_layers: int) -> DecoderOps:
        """The operations as they are."""
        return ops

    def see(self, name: str, value: jax.Array, share: Share = Share.WHOLE) -> None:
        """Do nothing."""


NO_TAPS = NoTaps()


@runtime_checkable
class SetLayer(Protocol):
    """Called with the place of the next operations in the decoder."""

    def __call__(self, layer_idx: int | None, prefix: str = "") -> None:
        """Set the layer, or None behind the last one; names of results in it get `prefix`."""
        ...


class WatchedOps:
    """The operations of a decoder, whose results are shown to `taps` as they come.

    In a layer: `attention`, the heads' results; `o_residual`, the residual stream behind o;
    `mlp_norm`, its normalised rows where there are any; `gated`, the channels of the feed-forward
    layer; `down_residual`, the residual stream behind down, or behind a mixture of experts. That
    has no `gated`, but `router_logits`, `expert_ids`, `expert_weights` and, where a rank has them
    all, `experts`, a row's experts in order of rank. The normalised rows that go to the next layer
    are that layer's `attn_norm`.
    """

    def __init__(self, ops: DecoderOps, taps: Taps, set_layer: SetLayer, *, num_layers: int):
        """Begin before the first layer.

        Args:
            ops: What is done.
            taps: Who looks.
            set_layer: Called before each part of the decoder.
            num_layers: Of the model.
        """
        self._ops, self._taps, self._set_layer = ops, taps, set_layer
        self._num_layers, self._layer_idx, self._is_mlp = num_layers, 0, False
        self._num_rows = 0

    def embed(self, table: jax.Array, ids: jax.Array, gain: jax.Array | None) -> Stream:
        """As the operations watched do."""
        stream = self._ops.embed(table, ids, gain)
        self._taps.see("embed", stream.residual)
        self._set_layer(0)
        self._see_norm("attn_norm", stream)
        return stream

    def attend(
        self, layer_idx: int, weights: dict[str, Any], stream: Stream, cache: Any
    ) -> tuple[Any, jax.Array, Stream]:
        """As the operations watched do."""
        self._layer_idx, self._is_mlp = layer_idx, False
        cache, heads, stream = self._ops.attend(layer_idx, weights, stream, cache)
        self._num_rows = len(heads)
        self._taps.see("attention", heads, Share.COLUMNS)
        return cache, heads, stream

    def gate(self, weights: dict[str, Any], stream: Stream) -> tuple[jax.Array, Stream]:
        """As the operations watched do."""
        channels, stream = self._ops.gate(weights, stream)
        self._taps.see("gated", channels, Share.COLUMNS)
        self._is_mlp = True
        return channels, stream

    def add_norm(
        self, x: jax.Array, w: Any, bias: jax.Array | None, gain: jax.Array, stream: Stream
    ) -> Stream:
        """As the operations watched do."""
        self._set_layer(self._layer_idx, "down_" if self._is_mlp else "o_")
        return self._see_stream(self._ops.add_norm(x, w, bias, gain, stream))

    def norm_add(
        self, x: jax.Array, w: Any, bias: jax.Array | None, gains: AfterGains, stream: Stream
    ) -> Stream:
        """As the operations watched do."""
        self._set_layer(self._layer_idx, "down_" if self._is_mlp else "o_")
        return self._see_stream(self._ops.norm_add(x, w, bias, gains, stream))

    def _see_stream(self, stream: Stream) -> Stream:
        """Show what follows o, down or a mixture of experts."""
        is_scattered = len(stream.residual) != self._num_rows
        self._taps.see("residual", stream.residual, Share.ROWS if is_scattered else Share.WHOLE)
        next_idx = self._layer_idx + self._is_mlp
        if next_idx == self._num_layers:
            self._set_layer(None)
            return stream
        self._set_layer(next_idx)
        self._see_norm("attn_norm" if self._is_mlp else "mlp_norm", stream)
        return stream

    def mix_experts(
        self, weights: dict[str, Any], gain: jax.Array, stream: Stream, cache: Any
    ) -> tuple[Any, Stream]:
        """As the operations watched do."""
        self._is_mlp = True
        cache, stream = self._ops.mix_experts(weights, gain, stream, cache)
        self._set_layer(self._layer_idx, "down_")
        return cache, self._see_stream(stream)

    def _see_norm(self, name: str, stream: Stream) -> None:
        if stream.x is not None:
            self._taps.see(name, stream.x)


class FeatureTaps:
    """Keeps the input residual streams of some layers while one program is traced.

    Where ranks have rows of a stream each, they are gathered: copies. Where a mixture of experts is
    fewer operations without taps, each is one of its own here: the bits are the same.
    """

    def __init__(self, layers: Sequence[int]):
        """Keep those of these layers, each from 1 on."""
        self._layers = layers
        self._place: tuple[int | None, str] = None, ""
        self._found: dict[int, jax.Array] = {}

    def watch(self, ops: DecoderOps, *, num_layers: int) -> DecoderOps:
        """See the results of `ops`."""
        return WatchedOps(ops, self, self._set_layer, num_layers=num_layers)

    def see(self, name: str, value: jax.Array, share: Share = Share.WHOLE) -> None:
        """Keep what a layer leaves to one of those wanted.

        Raises:
            NotImplementedError: If ranks share it.
        """
        layer_idx, prefix = self._place
        if name != "residual" or prefix != "down_" or layer_idx is None:
            return
        if layer_idx + 1 in self._layers:
            if share is Share.ROWS:
                value = lax.all_gather(value, TP_AXIS, axis=0, tiled=True)
            elif share is not Share.WHOLE:
                raise NotImplementedError(f"a residual stream that ranks share by {share.value}")
            self._found[layer_idx + 1] = value

    def features(self) -> jax.Array:
        """Return the streams of each token side by side, in the order of the layers, [M, X]."""
        return jnp.concatenate([self._found[layer] for layer in self._layers], axis=1)

    def _set_layer(self, layer_idx: int | None, prefix: str = "") -> None:
        self._place = layer_idx, prefix
