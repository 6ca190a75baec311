# SPDX-License-Identifier: Apache-2.0
"""A head that drafts from hidden states: its weights, and its pass over tokens.

No claim: what it drafts is verified.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from detjax.array_types import Activation, Array, Cached, Float32, Int32
from detjax.defaults import EAGLE3
from detjax.models.abstract import why_unsupported
from detjax.models.config import ModelConfig
from detjax.models.decoder import CanonicalOps, local_logits
from detjax.models.fast import FastOps, local_logits_fast, product, projected_heads, rms_norm
from detjax.models.heads.config import HeadConfig
from detjax.models.layers import (
    ForwardContext,
    Tokens,
    added_rows,
    angles_of,
    embed_tokens,
    project,
    qk_gains,
    rope_rows,
)
from detjax.models.loading import LoadedModel
from detjax.models.params import MATRICES, Params
from detjax.models.transformer import DecoderOps, Stream, decoder_layer
from detjax.models.weights.host import put_on_devices, take_to_host
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.api import linear, norm_linear
from detjax.pallas_kernels.linear.quantized import BLOCK, W8A8Matrix
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.parallel.collectives import gather_columns
from detjax.parallel.mesh import TP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHead:
    """A head on the mesh of the model that it drafts for. Every rank has all of it.

    Attributes:
        head_config: What it is.
        params: Its weights: those of its layer, the gains `embed_norm`, `hidden_norm` and
            `last_norm`, and a matrix: `fc` makes one hidden state of several, `join` one row of a
            hidden state and an embedding. With a vocabulary of its own `lm_head` and `draft_ids`,
            the token of each of its rows. Matrices may be `W8A8Matrix` (`quantize_head`).
        shared: Weights of the model that it uses, and how they lie on the mesh.
        rope_tables: Cosines and sines by position.
        mesh: Where.
        profile: As the model's.
        backend: As the model's.
        folder: Where it was read; None for random weights.
    """

    head_config: HeadConfig
    params: Params
    shared: Mapping[str, Any]
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]]
    mesh: Mesh
    profile: NumericsProfile
    backend: Backend
    folder: Path | None

    @property
    def config(self) -> ModelConfig:
        """Its decoder layer."""
        return self.head_config.layer

    @property
    def num_kv_slots(self) -> int:
        """Key/value heads in its cache."""
        return self.config.num_kv_heads

    @property
    def partition_specs(self) -> dict[str, Any]:
        """How `params_beside` lie on the mesh."""
        return {**self.shared, **jax.tree.map(lambda leaf: leaf.sharding.spec, self.params)}

    def params_beside(self, target: Params) -> Params:
        """The weights of its programs: its own, and those of the model that it uses."""
        return {name: target[name] for name in self.shared} | self.params

    def take_weights_to_host(self) -> Params:
        """Free the weights on the devices; their copy on the host, for `put_weights_back`."""
        return take_to_host(self.params)

    def put_weights_back(self, host: Params) -> None:
        """Put the weights where they were."""
        self.params.update(put_on_devices(host, self.params))


AnyDraftModel = LoadedModel | DraftHead
"""What drafts for a model with weights of its own."""


def check_head(head_config: HeadConfig, model: LoadedModel) -> None:
    """Refuse a head that cannot run beside a model.

    Raises:
        ValueError: If the kernels refuse its layer.
    """
    name, backend = head_config.name, model.backend
    # Every rank runs all of it.
    refused = why_unsupported(head_config.layer, model.profile, backend, 1)
    if refused is not None:
        raise ValueError(f"backend {backend.value} cannot run {name}: {refused}")


# ------------------------------------------------------------------------------------------ passes


def read_features(
    ctx: ForwardContext,
    head_config: HeadConfig,
    params: Params,
    features: Activation[Array, "M X"],
) -> Activation[Array, "M D"]:
    """Make the hidden state that the head reads of what the model leaves of each token."""
    if head_config.method == EAGLE3:
        return _product(ctx, features, params["fc"], features.dtype)
    if not head_config.hands_normalised:
        return features
    return rms_norm(features, params["final_norm"], head_config.layer.rms_norm_eps)


def write_keys(
    ctx: ForwardContext,
    head_config: HeadConfig,
    params: Params,
    tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    pages: Cached[Array, "L N 2 K P C"],
    tokens: Tokens,
    hidden: Activation[Array, "M D"],
) -> Cached[Array, "L N 2 K P C"]:
    """Put the head's keys and values of tokens into its cache; arguments as `head_pass`'s."""
    stream = _layer_stream(ctx, head_config, params, tokens, hidden)
    cos, sin = (angles_of(ctx.config, x, 0) for x in rope_rows(tables, tokens.positions))
    if _runs_kernels(ctx, params):
        qkv, _ = project(ctx, params, stream)
    else:
        qkv = projected_heads(ctx, params, stream.x)
    _, pages = rope_into_cache(
        qkv.reshape(len(qkv), -1, ctx.config.head_dim),
        Rotation(cos, sin, qk_gains(ctx.config, params)),
        CachePlace(pages, tokens.page_table, tokens.positions, layer=0),
        num_heads=ctx.own_heads,
        eps=ctx.config.rms_norm_eps,
        backend=ctx.backend,
    )
    return pages


def head_pass(
    ctx: ForwardContext,
    head_config: HeadConfig,
    params: Params,
    tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    pages: Cached[Array, "L N 2 K P C"],
    tokens: Tokens,
    hidden: Activation[Array, "M D"],
    wanted: Int32[Array, " B"],
) -> tuple[Cached[Array, "L N 2 K P C"], Stream, Activation[Array, "B D"]]:
    """Run the head on tokens, each with the hidden state of the token before it.

    Args:
        ctx: The head's layer.
        head_config: What the head is.
        params: Its weights.
        tables: Cosines and sines by position.
        pages: Its cache.
        tokens: Each at the position of the token before it, whose hidden state it is given with.
        hidden: As `read_features` gives it, or this pass of the draft before.
        wanted: Which token of each sequence something is drafted from.

    Returns:
        The cache, and of the wanted tokens the stream that `draft_logits` takes and the hidden
        state for the next pass.
    """
    stream = _layer_stream(ctx, head_config, params, tokens, hidden)
    cos, sin = rope_rows(tables, tokens.positions)
    # WHY: of one token each, new entries and attention are one launch.
    some = None if tokens.ids.shape[1] == 1 else wanted
    common: dict = {"ctx": ctx, "tokens": tokens, "cos": cos, "sin": sin, "wanted": some}
    ops: DecoderOps = FastOps(**common)
    if _runs_kernels(ctx, params):
        ops = CanonicalOps(**common, exchange=None)
    pages, stream = decoder_layer(ops, 0, params, params["last_norm"], pages, stream)
    if "draft_ids" not in params:  # the model's matrix reads rows, and a mixture may leave none
        stream = added_rows(ctx, stream, params["last_norm"])
    return pages, stream, stream.x if head_config.hands_normalised else stream.residual


def draft_logits(ctx: ForwardContext, params: Params, stream: Stream) -> Float32[Array, "B X"]:
    """Float32 logits of `draft_ids`, or of the model's whole vocabulary."""
    if "draft_ids" not in params:
        ranks = dataclasses.replace(ctx, tp=lax.axis_size(TP_AXIS))
        of_rank = local_logits if _runs_kernels(ctx, params) else local_logits_fast
        return gather_columns(of_rank(ranks, params, stream.x), TP_AXIS)
    w, gain, dtype = params["lm_head"], params["last_norm"], jnp.dtype(jnp.float32)
    if stream.x is None and _takes(ctx, w):
        eps = ctx.config.rms_norm_eps
        return norm_linear(stream.residual, gain, w, eps=eps, out_dtype=dtype, backend=ctx.backend)
    return _product(ctx, added_rows(ctx, stream, gain).x, w, dtype)


def _runs_kernels(ctx: ForwardContext, params: Params) -> bool:
    """Whether the layer runs by the engine's own kernels, not XLA's.

    These alone multiply 8-bit rows, and on some backends steps of models are quicker by them.
    """
    has_bytes = any(isinstance(params.get(name), W8A8Matrix) for name in MATRICES)
    return has_bytes or KERNELS[ctx.backend].steps_beat_xla


def _takes(ctx: ForwardContext, w: Any) -> bool:
    """Whether the kernels multiply by a matrix beside the layer: that of any vocabulary may not."""
    if isinstance(w, W8A8Matrix):
        return True  # those that they refuse are not rounded
    return KERNELS[ctx.backend].steps_beat_xla and w.shape[0] % BLOCK == 0


def _product(
    ctx: ForwardContext, x: Activation[Array, "M I"], w: Any, dtype: jnp.dtype
) -> Activation[Array, "M O"]:
    """`x @ w.T` by the engine's kernels if they take the matrix, else as XLA does it."""
    if _takes(ctx, w):
        return linear(x, w, out_dtype=dtype, backend=ctx.backend)
    return product(x, w, dtype)


def _layer_stream(
    ctx: ForwardContext,
    head_config: HeadConfig,
    params: Params,
    tokens: Tokens,
    hidden: Activation[Array, "M D"],
) -> Stream:
    """What the layer adds to, and the rows that it projects, of embeddings and hidden states."""
    eps = ctx.config.rms_norm_eps
    embedded = embed_tokens(ctx, params["embed"], tokens.ids.reshape(-1))
    gains = jnp.stack([params["embed_norm"], params["hidden_norm"]])
    normed = rms_norm(jnp.stack([embedded, hidden], axis=1), gains, eps)
    both = normed.reshape(len(normed), -1)
    if head_config.method == EAGLE3:
        return Stream(normed[:, 1] if head_config.norm_before_residual else hidden, both)
    joined = _product(ctx, both, params["join"], both.dtype)
    if _runs_kernels(ctx, params):  # which normalise and quantise in one launch
        return Stream(joined, None)
    return Stream(joined, rms_norm(joined, params["attn_norm"], eps))
