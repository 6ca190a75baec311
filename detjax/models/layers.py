# SPDX-License-Identifier: Apache-2.0
"""The blocks every family shares. They run inside `shard_map`, on this rank's share of the heads.

No arithmetic of their own: kernels, collectives and indexing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Cached, Float32, Int32
from detjax.models.config import CacheKind, ExpertConfig, Gating, ModelConfig
from detjax.models.params import kv_layout
from detjax.models.taps import NO_TAPS, NoTaps, Share, Taps
from detjax.models.transformer import AfterGains, Stream
from detjax.numerics import NumericsProfile, Reduction, tree_reduction
from detjax.pallas_kernels.attention.api import attention, rope_attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.embedding.api import embed
from detjax.pallas_kernels.geglu.api import geglu
from detjax.pallas_kernels.linear.api import (
    combine_norm_linear,
    defers_norm,
    defers_sum,
    joins_matrices,
    linear,
    linear_add,
    linear_add_rms_norm,
    linear_leaf_sums,
    linear_partial,
    linear_swiglu,
    norm_linear,
    norm_linear_swiglu,
)
from detjax.pallas_kernels.linear.joined import JoinedMatrix
from detjax.pallas_kernels.linear.quantized import QuantizedMatrix, W8A8Matrix
from detjax.pallas_kernels.lora.adapted import AdaptedMatrix, LowRankRows
from detjax.pallas_kernels.lora.api import (
    expert_lora_add,
    lora_add,
    lora_hidden,
    lora_linear,
    lora_linear_add_rms_norm,
    lora_linear_swiglu,
    lora_project,
)
from detjax.pallas_kernels.moe.api import (
    combine_experts_add_rms_norm,
    combine_experts_norm_linear,
    defers_experts,
    expert_linear,
    expert_mlp,
    joins_experts,
    route,
    route_by_sigmoid,
    route_mlp,
    route_mlp_add_rms_norm,
)
from detjax.pallas_kernels.moe.expert_weights import (
    ClampedExperts,
    ExpertWeights,
    SharedExpert,
    SharedRows,
    shared_values,
    with_shared,
)
from detjax.pallas_kernels.output_gate.api import sigmoid_gate
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rms_norm.api import add_rms_norm, combine_add_rms_norm, rms_norm
from detjax.pallas_kernels.rope.api import rope_into_cache
from detjax.pallas_kernels.rope.portable import split_heads
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.parallel.collectives import butterfly_sum, gather_columns, gather_expert_rows
from detjax.parallel.exchange import (
    Exchange,
    adds_tiles,
    exchange_add_rms_norm,
    is_scattered,
    linear_exchange_add_rms_norm,
    scatter_add_rms_norm,
    scatter_experts_add_rms_norm,
)
from detjax.parallel.mesh import TP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """What a layer needs to know besides its weights: all static, none of it batch-shaped."""

    config: ModelConfig
    profile: NumericsProfile
    backend: Backend
    tp: int
    taps: Taps = NO_TAPS

    @property
    def own_heads(self) -> int:
        """This rank's query heads."""
        return self.config.num_heads // self.tp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """New tokens of a batch, padded to one length. Leaves are arrays, or what JAX puts for them.

    Attributes:
        ids: Token ids, int32 [B, T].
        positions: Absolute position of each, int32 [B, T]; -1 marks padding.
        page_table: Cache page of each block of a sequence, int32 [B, n].
        local_table: The same of local layers; None where they have the pages of the others. An
            entry before what they read may be of any page.
        adapters: Slot of each sequence's adapter, int32 [B], -1 where it has none; None in a
            program without adapters.
    """

    ids: Any
    positions: Any
    page_table: Any
    adapters: Any = None
    local_table: Any = None

    def table_of(self, kind: CacheKind) -> Any:
        """The page table of the layers that have a part of the cache."""
        return self.page_table if kind == "kv" or self.local_table is None else self.local_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class UnaddedSubtrees:
    """The residual stream where the next product adds what the last one left of its tree.

    Attributes:
        leaf_sums: float32 [L, M, D].
        residual: The stream before that product, [M, D].
    """

    leaf_sums: Any
    residual: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class UnaddedExperts:
    """The residual stream where the next product adds a mixture's experts.

    Attributes:
        y: Rows of experts, [M, Q, D].
        weights: float32 [M, Q].
        residual: The stream before the mixture, [M, D].
        shared: `SharedRows` of the expert that every row has; None without one.
    """

    y: Any
    weights: Any
    residual: Any
    shared: Any = None


def embed_tokens(ctx: ForwardContext, table, ids: Int32[Array, " M"]) -> Activation[Array, "M D"]:
    """Look up this rank's channels and gather the rest."""
    dtype = ctx.profile.activation_dtype
    rows = embed(table, ids, out_dtype=dtype, backend=ctx.backend)
    return gather_columns(rows, TP_AXIS)


def rope_rows(
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    positions: Int32[Array, "B T"],
) -> tuple[Float32[Array, "M half"], Float32[Array, "M half"]]:
    """Cosines and sines of each token's position; those of position 0 for padding."""
    flat = jnp.maximum(positions, 0).reshape(-1)
    cos, sin = (jnp.take(table, flat, axis=0, mode="clip") for table in rope_tables)
    return cos, sin


def angles_of(
    config: ModelConfig, rows: Float32[Array, "M X"], layer: int
) -> Float32[Array, "M half"]:
    """The cosines or sines of a layer, from those of all rotary embeddings of the model.

    Those of queries stand behind those of keys where they differ.
    """
    if not config.layer_ropes:
        return rows
    half = config.head_dim // 2
    start = config.layer_ropes[layer] * half
    return rows[:, start : start + half]


def see_tokens(ctx: ForwardContext, tokens: Tokens, cos, sin) -> None:
    """Show the taps which tokens run, and the rows of the rotary tables."""
    ctx.taps.see("ids", tokens.ids)
    ctx.taps.see("positions", tokens.positions)
    ctx.taps.see("cos", cos)
    ctx.taps.see("sin", sin)


def project(
    ctx: ForwardContext, weights: dict, stream: Stream
) -> tuple[Activation[Array, "M o"], Stream]:
    """Queries, keys, values and gates, if there are any, and the stream with its residual added."""
    qkv, stream = product_of_stream(ctx, weights, "qkv", stream)
    see_projected(ctx, qkv)
    if ctx.config.is_qk_norm_whole:
        qkv = normalise_all_heads(ctx, weights, qkv)
    return qkv, stream


def see_projected(ctx: ForwardContext, qkv: Activation[Array, "M o"]) -> None:
    """Let the taps see queries, keys and values, and gates apart."""
    num_gates = ctx.own_heads * ctx.config.head_dim if ctx.config.has_output_gate else 0
    end = qkv.shape[1] - num_gates
    ctx.taps.see("qkv", qkv[:, :end], Share.COLUMNS)
    if num_gates:
        ctx.taps.see("attn_gate", qkv[:, end:], Share.COLUMNS)


def product_of_stream(
    ctx: ForwardContext, weights: dict, name: str, stream: Stream
) -> tuple[Activation[Array, "M o"], Stream]:
    """The normalised rows by a matrix, and the stream with its residual added up.

    The stream has its normalised rows only where a launch had made them.
    """
    residual, x = stream
    w, bias = weights[name], weights.get(f"{name}_bias")
    gain, eps = weights.get("attn_norm"), ctx.config.rms_norm_eps
    options: dict = {"out_dtype": ctx.profile.activation_dtype, "backend": ctx.backend}
    if isinstance(w, AdaptedMatrix):
        stream = added_rows(ctx, stream, gain)
        return adapted_linear(ctx, stream.x, w, bias), stream
    if x is not None:
        return linear(x, w, bias, **options), stream
    assert gain is not None  # rows that are still to be normalised have one
    if isinstance(residual, UnaddedSubtrees):
        return _add_norm_product(ctx, residual, gain, w, bias)
    if not isinstance(residual, UnaddedExperts):
        return norm_linear(residual, gain, w, bias, eps=eps, **options), stream
    out, total = combine_experts_norm_linear(
        residual.y, residual.weights, residual.residual, gain, w, bias,
        eps=eps, shared=residual.shared, **options,
    )  # fmt: skip
    return out, Stream(residual=total, x=None)


def _add_norm_product(
    ctx: ForwardContext,
    subtrees: UnaddedSubtrees,
    gain: Activation[Array, " D"],
    w: Any,
    bias: Activation[Array, " o"] | None,
    *,
    is_gated: bool = False,
) -> tuple[Activation[Array, "M X"], Stream]:
    """The rest of a tree, the norm of the stream and a product, and the stream added up."""
    out, total, x = combine_norm_linear(
        subtrees.leaf_sums, subtrees.residual, gain, w, bias, eps=ctx.config.rms_norm_eps,
        out_dtype=ctx.profile.activation_dtype, is_gated=is_gated, backend=ctx.backend,
    )  # fmt: skip
    return out, Stream(residual=total, x=x)


def normalise_all_heads(
    ctx: ForwardContext, weights: dict, qkv: Activation[Array, "M o"]
) -> Activation[Array, "M o"]:
    """Normalise the queries of a token over all heads of all ranks, and its keys over all heads."""
    config, tp, channels = ctx.config, ctx.tp, ctx.config.head_dim
    layout = kv_layout(config.num_heads, config.num_kv_heads, tp)
    counts = ctx.own_heads, layout.num_slots // tp
    q, k, v = split_heads(qkv.reshape(len(qkv), -1, channels), counts)

    def normalised(own: jax.Array, gain: jax.Array, heads: Sequence[int]) -> jax.Array:
        """`heads`: the head that each slot of all ranks holds."""
        rows = own.reshape(len(own), -1)
        if tp > 1:
            slots = gather_columns(rows, TP_AXIS).reshape(len(own), -1, channels)
            firsts = jnp.array([heads.index(head) for head in range(heads[-1] + 1)])
            rows = jnp.take(slots, firsts, axis=1).reshape(len(own), -1)
        rows = rms_norm(rows, gain, eps=config.rms_norm_eps, backend=ctx.backend)
        if tp == 1:
            return rows.reshape(own.shape)
        slots = jnp.take(rows.reshape(len(own), -1, channels), jnp.array(heads), axis=1)
        start = lax.axis_index(TP_AXIS) * own.shape[1]
        return lax.dynamic_slice_in_dim(slots, start, own.shape[1], axis=1)

    q = normalised(q, weights["q_norm_whole"], range(config.num_heads))
    k = normalised(k, weights["k_norm_whole"], layout.heads)
    return jnp.concatenate([q, k, v], axis=1).reshape(qkv.shape)


def attend(
    ctx: ForwardContext,
    weights: dict,
    qkv: Activation[Array, "M o"],
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Cached[Array, "L N 2 K P C"],
    tokens: Tokens,
    layer: int,
) -> tuple[Cached[Array, "L N 2 K P C"], Activation[Array, "M i"]]:
    """Attention of projected tokens. Returns the cache and this rank's heads, gated if they are."""
    config = ctx.config
    if config.attention_softcap is not None:
        return attend_from(ctx, weights, qkv, cos, sin, pages, tokens, layer, wanted=None)
    batch, length = tokens.ids.shape
    out, pages = rope_attention(
        qkv.reshape(batch * length, -1, config.head_dim),
        Rotation(cos, sin, qk_gains(config, weights)),
        place_of(config, pages, tokens, layer),
        window=config.sliding_windows[layer],
        eps=config.rms_norm_eps,
        profile=ctx.profile,
        backend=ctx.backend,
        prefetch=prefetched(weights["o"]),
        sinks=weights.get("sinks"),
        is_gated=config.has_output_gate,
    )
    return pages, out.reshape(batch * length, -1)


def place_of(
    config: ModelConfig, pages: Cached[Array, "L N 2 K P C"], tokens: Tokens, layer: int
) -> CachePlace:
    """Where new tokens of a layer lie, in the part of the cache that it has."""
    table = tokens.table_of(config.cache_kind(layer))
    return CachePlace(pages, table, tokens.positions, config.cache_index(layer))


def qk_gains(config: ModelConfig, weights: dict) -> tuple[jax.Array, jax.Array] | None:
    """Gains of the norms of each head of queries and keys, if the model has them."""
    return (weights["q_norm"], weights["k_norm"]) if config.qk_norm else None


def prefetched(w: Any) -> jax.Array | None:
    """What a launch may bring into the cache of the GPU for a product behind it."""
    w = w.base if isinstance(w, AdaptedMatrix) else w
    # WHY: weights of 8 bits gain nothing: 3.2 ms a step at batch 8, and 2.9 without (8B, H200).
    return w if isinstance(w, jax.Array) else None


def attend_from(
    ctx: ForwardContext,
    weights: dict,
    qkv: Activation[Array, "M o"],
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Cached[Array, "L N 2 K P C"],
    tokens: Tokens,
    layer: int,
    *,
    wanted: Int32[Array, " B"] | None,
) -> tuple[Cached[Array, "L N 2 K P C"], Activation[Array, "R i"]]:
    """`attend` from one token of each sequence; the others leave their keys and values.

    None wants all.
    """
    config = ctx.config
    q, pages = rope_into_cache(
        qkv.reshape(tokens.ids.size, -1, config.head_dim),
        Rotation(cos, sin, qk_gains(config, weights)),
        place_of(config, pages, tokens, layer),
        num_heads=ctx.own_heads,
        eps=config.rms_norm_eps,
        backend=ctx.backend,
    )
    q, positions = q.reshape(*tokens.ids.shape, *q.shape[1:]), tokens.positions
    if wanted is not None:
        q = jnp.take_along_axis(q, wanted[:, None, None, None], axis=1)
        positions = jnp.take_along_axis(positions, wanted[:, None], axis=1)
    out = attention(
        q,
        place_of(config, pages, tokens, layer)._replace(positions=positions),
        window=config.sliding_windows[layer],
        softcap=config.attention_softcap,
        sinks=weights.get("sinks"),
        profile=ctx.profile,
        backend=ctx.backend,
    )
    heads = out.reshape(positions.size, -1)
    if config.has_output_gate:
        gates = qkv if wanted is None else wanted_rows(ctx, qkv, tokens.ids.shape, wanted)
        heads = sigmoid_gate(heads, gates, backend=ctx.backend)
    return pages, heads


def wanted_rows(
    ctx: ForwardContext,
    residual: Activation[Array, "m D"],
    shape: tuple[int, int],
    wanted: Int32[Array, " B"],
) -> Activation[Array, "B D"]:
    """The residual stream of one token of each sequence, on every rank. Copies only.

    Args:
        ctx: The mesh.
        residual: Of all tokens, or this rank's share of them.
        shape: Sequences, and tokens of each.
        wanted: Which token of each.
    """
    batch, length = shape
    row = jnp.arange(batch, dtype=jnp.int32) * length + wanted
    share = len(residual)
    if share == batch * length:
        return jnp.take(residual, row, axis=0, mode="clip")
    # Each rank sends what it has at these places of its share; the owner's is taken.
    rows = lax.all_gather(jnp.take(residual, row % share, axis=0, mode="clip"), TP_AXIS)
    return rows[row // share, jnp.arange(batch)]


def gated_layer(
    ctx: ForwardContext, weights: dict, stream: Stream
) -> tuple[Activation[Array, "M f"], Stream]:
    """The feed-forward layer up to its row-parallel product, and the stream added up."""
    w, gain, backend = weights["gate_up"], weights.get("mlp_norm"), ctx.backend
    if ctx.config.gating is Gating.GEGLU or isinstance(w, AdaptedMatrix):
        stream = added_rows(ctx, stream, gain)
        return _gated_rows(ctx, w, stream.x), stream
    if stream.x is not None:
        return linear_swiglu(stream.x, w, backend=backend), stream
    assert gain is not None  # rows that are still to be normalised have one
    if isinstance(stream.residual, UnaddedSubtrees):
        return _add_norm_product(ctx, stream.residual, gain, w, None, is_gated=True)
    eps = ctx.config.rms_norm_eps
    return norm_linear_swiglu(stream.residual, gain, w, eps=eps, backend=backend), stream


def _gated_rows(ctx: ForwardContext, w: Any, x: Activation[Array, "M D"]) -> jax.Array:
    """`gated_layer` of normalised rows, with adapters or a gate that no product applies."""
    if ctx.config.gating is Gating.GEGLU:
        if isinstance(w, AdaptedMatrix):
            return geglu(adapted_linear(ctx, x, w, None), backend=ctx.backend)
        return geglu(linear(x, w, out_dtype=x.dtype, backend=ctx.backend), backend=ctx.backend)
    return lora_linear_swiglu(x, w.base, _adapter_rows(ctx, x, w), backend=ctx.backend)


def may_fuse(ctx: ForwardContext) -> bool:
    """Whether a layer may be fewer operations: all of it is here, and nobody looks between them."""
    return ctx.tp == 1 and isinstance(ctx.taps, NoTaps)


def expert_extras(config: ExpertConfig, weights: dict) -> ClampedExperts | None:
    """Biases and clamp of this rank's experts, if they have them."""
    if config.clamp is None:
        return None
    return ClampedExperts(
        gate_up_bias=weights["expert_gate_up_bias"],
        down_bias=weights["expert_down_bias"],
        clamp=config.clamp,
    )


def _own_expert_weights(config: ExpertConfig, weights: dict) -> ExpertWeights:
    """Those of this rank's experts."""
    return ExpertWeights(
        weights["expert_gate_up"], weights["expert_down"], expert_extras(config, weights)
    )


def mix_experts(
    ctx: ForwardContext, weights: dict, gain: Activation[Array, " D"], stream: Stream
) -> Stream:
    """A mixture of experts, the residual stream and the norm after it.

    Args:
        ctx: The model and its mesh.
        weights: Of the layer; this rank's experts, and the whole router.
        gain: Of the norm after it.
        stream: As the layer's attention leaves it.

    Numerics:
        `moe.api`, one operation after the other: a row's bits depend on neither mesh nor batch.
        Where rows are many each rank adds its own of the residual stream (`parallel.exchange`).
    """
    config, backend, tp = ctx.config.experts, ctx.backend, ctx.tp
    assert config is not None  # whoever has a router
    eps = ctx.config.rms_norm_eps
    logits, residual, x = _router_product(ctx, weights, stream)
    if may_fuse(ctx) and not isinstance(weights["expert_down"], AdaptedMatrix):
        return _fused_experts(ctx, config, weights, gain, residual, x, logits)
    ctx.taps.see("router_logits", logits[:, : config.num_experts])
    shared = _shared_rows(ctx, weights, x, logits)
    y, expert_weights = _own_experts(ctx, config, weights, x, logits)
    y, expert_weights = _with_shared(ctx, y, expert_weights, shared)
    # The products of adapters that follow take every row of the residual stream.
    has_adapters = any(isinstance(w, AdaptedMatrix) for w in weights.values())
    if tp > 1 and is_scattered(x.shape[0], tp) and not has_adapters:
        added = scatter_experts_add_rms_norm(
            y, expert_weights, residual, gain, TP_AXIS, tp, eps=eps, backend=backend
        )
        return Stream(*added)
    if tp > 1:
        y = gather_expert_rows(y, TP_AXIS)
    ctx.taps.see("experts", y.reshape(y.shape[0], -1))
    added = combine_experts_add_rms_norm(
        y, expert_weights, residual, gain, eps=eps, backend=backend
    )
    return Stream(*added)


def _router_product(
    ctx: ForwardContext, weights: dict, stream: Stream
) -> tuple[Float32[Array, "M O"], Activation[Array, "m D"], Activation[Array, "M D"]]:
    """Logits of all experts, the residual stream added up, and its normalised rows.

    Where it costs a launch less, the gate of a shared expert is in columns behind the router's.
    """
    residual, backend, w = stream.residual, ctx.backend, weights["router"]
    eps, f32 = ctx.config.rms_norm_eps, jnp.dtype(jnp.float32)
    bias, gate = weights.get("router_bias"), weights.get("shared_gate")
    leaf_sums = None
    if isinstance(residual, UnaddedSubtrees):
        leaf_sums, residual = residual.leaf_sums, residual.residual
    if isinstance(gate, jax.Array) and bias is None and may_fuse(ctx):
        rows = residual if stream.x is None else stream.x
        if joins_matrices(rows, w, gate, out_dtype=f32, backend=backend):
            w = JoinedMatrix(first=w, second=gate)
    if leaf_sums is not None or (stream.x is None and bias is None):
        return combine_norm_linear(
            leaf_sums, residual, weights["mlp_norm"], w, eps=eps, out_dtype=f32, backend=backend
        )
    x = final_rows(ctx, residual, stream.x, weights["mlp_norm"])
    return linear(x, w, bias, out_dtype=f32, backend=backend), residual, x


def _fused_experts(
    ctx: ForwardContext,
    config: ExpertConfig,
    weights: dict,
    gain: Activation[Array, " D"],
    residual: Activation[Array, "M D"],
    x: Activation[Array, "M D"],
    logits: Float32[Array, "M O"],
) -> Stream:
    """The rest of `mix_experts` in fewer launches, of the same bits.

    # WHY, not always: where somebody looks, each result must be there.
    """
    backend, eps, top_k = ctx.backend, ctx.config.rms_norm_eps, config.top_k
    is_sigmoid, experts = ctx.config.has_sigmoid_router, _own_expert_weights(config, weights)
    routing: dict = {"top_k": top_k, "renormalise": config.renormalise, "backend": backend}
    is_late = defers_experts(*x.shape, backend=backend)
    joined = None
    if is_late and not is_sigmoid:
        joined = _joined_expert(ctx, weights, experts, len(x))
    shared = None if joined else _shared_rows(ctx, weights, x, logits)
    if not is_late and not is_sigmoid:
        added = route_mlp_add_rms_norm(
            x, logits, experts, residual, gain, eps=eps, shared=shared, **routing
        )
        return Stream(*added)
    if is_sigmoid:
        y, expert_weights = _own_experts(ctx, config, weights, x, logits)
    else:
        y, expert_weights = route_mlp(x, logits, experts, shared=joined, **routing)
    if joined:
        gate = _shared_gate(ctx, weights, x, logits)
        shared = SharedRows(rows=y.reshape(-1, y.shape[-1]), first=top_k, **gate)
    if is_late:
        late = UnaddedExperts(y=y, weights=expert_weights, residual=residual, shared=shared)
        return Stream(residual=late, x=None)
    added = combine_experts_add_rms_norm(
        y, expert_weights, residual, gain, eps=eps, shared=shared, backend=backend
    )
    return Stream(*added)


def _joined_expert(
    ctx: ForwardContext, weights: dict, experts: ExpertWeights, num_rows: int
) -> SharedExpert | None:
    """The expert that every row has, if those of a row multiply it too; else None."""
    if "shared_gate_up" not in weights:
        return None
    shared = SharedExpert(weights["shared_gate_up"], weights["shared_down"])
    if any(isinstance(w, AdaptedMatrix) for w in shared):
        return None
    return shared if joins_experts(num_rows, experts, shared, backend=ctx.backend) else None


def _shared_gate(
    ctx: ForwardContext, weights: dict, x: Activation[Array, "M D"], logits: Float32[Array, "M O"]
) -> dict:
    """The gate of a shared expert as `SharedRows` has it: of the router's product, or its own."""
    if "shared_gate" not in weights:
        return {}
    w, num_router = weights["shared_gate"], len(weights["router"])
    if logits.shape[1] > num_router:
        return {"gate": logits, "column": num_router}
    if isinstance(w, AdaptedMatrix):
        gate = adapted_linear(ctx, x, w, None)
    else:
        gate = linear(x, w, out_dtype=x.dtype, backend=ctx.backend)
    ctx.taps.see("shared_gate", gate[:, :1])
    return {"gate": gate}


def _shared_rows(
    ctx: ForwardContext, weights: dict, x: Activation[Array, "M D"], logits: Float32[Array, "M O"]
) -> SharedRows | None:
    """What the expert of every row gives, on every rank; None if there is none.

    A rank computes its channels, then its outputs, and what ranks exchange are copies. So the last
    product has one leaf, as those of other experts.
    """
    if "shared_gate_up" not in weights:
        return None
    backend, gate_up = ctx.backend, weights["shared_gate_up"]

    def product(x: jax.Array, w: Any) -> jax.Array:
        if isinstance(w, AdaptedMatrix):
            return adapted_linear(ctx, x, w, None)
        return linear(x, w, out_dtype=x.dtype, backend=backend)

    if isinstance(gate_up, AdaptedMatrix):
        h = swiglu(product(x, gate_up), backend=backend)
    else:
        h = linear_swiglu(x, gate_up, backend=backend)
    rows = gather_columns(product(gather_columns(h, TP_AXIS), weights["shared_down"]), TP_AXIS)
    return SharedRows(rows=rows, **_shared_gate(ctx, weights, x, logits))


def _with_shared(
    ctx: ForwardContext,
    y: Activation[Array, "M Q D"],
    expert_weights: Float32[Array, "M Q"],
    shared: SharedRows | None,
) -> tuple[Activation[Array, "M X D"], Float32[Array, "M X"]]:
    """Rows of experts with that of the shared one, which comes last, from rank 0."""
    if shared is None:
        return y, expert_weights
    rows = shared_values(shared, len(y), partial(sigmoid_gate, backend=ctx.backend))
    ctx.taps.see("shared_expert", rows)
    if ctx.tp > 1:
        rows = jnp.where(lax.axis_index(TP_AXIS) == 0, rows, jnp.zeros_like(rows))
    own = partial(sigmoid_gate, backend=ctx.backend)
    return with_shared(y, expert_weights, SharedRows(rows=rows), own)


def _own_experts(
    ctx: ForwardContext, config: ExpertConfig, weights: dict, x: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What this rank's experts give for each row, and each row's weights of its experts."""
    options: dict = {
        "num_experts": config.num_experts, "top_k": config.top_k,
        "renormalise": config.renormalise, "backend": ctx.backend,
    }  # fmt: skip
    if ctx.config.has_sigmoid_router:
        correction, scale = weights["router_correction"], config.sigmoid_scale
        expert_ids, expert_weights = route_by_sigmoid(logits, correction, scale=scale, **options)
    else:
        expert_ids, expert_weights = route(logits, **options)
    ctx.taps.see("expert_ids", expert_ids)
    ctx.taps.see("expert_weights", expert_weights)
    first_expert, down = 0, weights["expert_down"]
    is_adapted = isinstance(down, AdaptedMatrix)
    if ctx.tp > 1:
        num_local = (down.base if is_adapted else down).shape[0]
        first_expert = lax.axis_index(TP_AXIS) * num_local
    if is_adapted:
        gate_up = weights["expert_gate_up"]
        y = adapted_expert_mlp(ctx, x, expert_ids - first_expert, gate_up, down)
        return y, expert_weights
    y = expert_mlp(
        x,
        expert_ids,
        _own_expert_weights(config, weights),
        first_expert=first_expert,
        num_ranks=ctx.tp,
        backend=ctx.backend,
    )
    return y, expert_weights


def adapted_expert_mlp(
    ctx: ForwardContext,
    x: Activation[Array, "M D"],
    expert_ids: Int32[Array, "M Q"],
    gate_up: AdaptedMatrix,
    down: AdaptedMatrix,
) -> Activation[Array, "M Q D"]:
    """`expert_mlp` with each row's adapter; ids are counted from this rank's first expert on."""
    experts = expert_ids.reshape(-1)
    h = swiglu(adapted_expert_linear(ctx, x, experts, gate_up), backend=ctx.backend)
    y = adapted_expert_linear(ctx, h, experts, down)
    return y.reshape(*expert_ids.shape, -1)


def adapted_expert_linear(
    ctx: ForwardContext, x: Activation[Array, "M I"], experts: Int32[Array, " S"], w: AdaptedMatrix
) -> Activation[Array, "S O"]:
    """Rows by the matrices of their experts, with each row's adapter of that expert.

    `out = round(base(x) + B round(s A x))`, where K of A is one leaf, as that of the base.
    """
    options: dict = {"backend": ctx.backend, "out_dtype": jnp.dtype(jnp.float32)}
    base = expert_linear(x, experts, w.base, **options)
    sums = expert_linear(x, experts, w.stack.a, **options)
    dtype = ctx.profile.activation_dtype
    slots = jnp.repeat(w.slots, len(experts) // len(w.slots))
    h = lora_hidden(sums[None], slots, w.stack.scales, out_dtype=dtype, backend=ctx.backend)
    return expert_lora_add(base, h, experts, w.stack.b, out_dtype=dtype, backend=ctx.backend)


def added_rows(ctx: ForwardContext, stream: Stream, gain: Activation[Array, " D"] | None) -> Stream:
    """The stream, added up, and its normalised rows; `gain` is of those that are still to be."""
    residual, x = stream
    options: dict = {"eps": ctx.config.rms_norm_eps, "backend": ctx.backend}
    if x is not None:
        return stream
    assert gain is not None  # rows that are still to be normalised have one
    if isinstance(residual, UnaddedExperts):
        added = combine_experts_add_rms_norm(
            residual.y, residual.weights, residual.residual, gain, shared=residual.shared, **options
        )
        return Stream(*added)
    if isinstance(residual, UnaddedSubtrees):
        leaf_sums, before = residual.leaf_sums, residual.residual
        return Stream(*combine_add_rms_norm(leaf_sums, before, None, gain, **options))
    return Stream(residual=residual, x=rms_norm(residual, gain, **options))


def final_rows(
    ctx: ForwardContext,
    residual: Activation[Array, "m D"] | UnaddedExperts | UnaddedSubtrees,
    x: Activation[Array, "M D"] | None,
    gain: Activation[Array, " D"] | None,
) -> Activation[Array, "M D"]:
    """The normalised rows that lm_head or a router takes; both as in `Stream`."""
    return added_rows(ctx, Stream(residual, x), gain).x


def parts_in_columns(partial: Float32[Array, "... M D"]) -> Float32[Array, "M X"]:
    """A row a token, for taps: the parts of a sum, if it has any, side by side."""
    if partial.ndim == 2:
        return partial
    return jnp.moveaxis(partial, 0, 1).reshape(partial.shape[1], -1)


def adapted_linear(
    ctx: ForwardContext,
    x: Activation[Array, "M I"],
    w: AdaptedMatrix,
    bias: Activation[Array, " o"] | None,
) -> Activation[Array, "M o"]:
    """A product whose outputs are split over ranks, with each row's adapter.

    `out = round((base(x) + bias) + B round(s A x))`; every rank has A, and its rows of B.
    """
    adapters, dtype = _adapter_rows(ctx, x, w), ctx.profile.activation_dtype
    return lora_linear(x, w.base, bias, adapters, out_dtype=dtype, backend=ctx.backend)


def _adapter_rows(
    ctx: ForwardContext, x: Activation[Array, "M I"], w: AdaptedMatrix
) -> LowRankRows:
    """`round(s A x)`, each row by its adapter, and B; with all of I."""
    h = lora_project(
        x, w.stack.a, _row_slots(w, x.shape[0]), w.stack.scales,
        reduction=tree_reduction(x.shape[1], ctx.profile),
        out_dtype=ctx.profile.activation_dtype, backend=ctx.backend,
    )  # fmt: skip
    return LowRankRows(h=h, b=w.stack.b)


def _row_slots(w: AdaptedMatrix, num_rows: int) -> Int32[Array, " M"]:
    """The slot of each row's adapter.

    A sequence has all its rows here, or in the last layer the one that is wanted.
    """
    return jnp.repeat(w.slots, num_rows // w.slots.shape[0])


def _adapted_row_parallel(
    ctx: ForwardContext,
    x: Activation[Array, "M i"],
    w: AdaptedMatrix,
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
) -> Stream:
    """`row_parallel_norm` with each row's adapter: `total = round(residual + ((tree + p) + bias))`.

    p is `B round(s tree(A x))`. Each rank has its columns of A, and all of B. Ranks add both trees
    by a butterfly, so every rank has every row of the residual stream.
    """
    reduction, eps = tree_reduction(x.shape[1] * ctx.tp, ctx.profile), ctx.config.rms_norm_eps
    if ctx.tp == 1 and isinstance(ctx.taps, NoTaps):
        added = lora_linear_add_rms_norm(
            x, w.base, _adapter_rows(ctx, x, w), residual, bias, gain,
            reduction=reduction, eps=eps, backend=ctx.backend,
        )  # fmt: skip
        return Stream(*added)

    def whole_sum(matrix: Any) -> jax.Array:
        partial = linear_partial(x, matrix, reduction=reduction, backend=ctx.backend)
        return butterfly_sum(partial, TP_AXIS, ctx.tp, backend=ctx.backend)

    float32 = jnp.dtype(jnp.float32)
    h = lora_hidden(
        whole_sum(w.stack.a)[None], _row_slots(w, x.shape[0]), w.stack.scales,
        out_dtype=ctx.profile.activation_dtype, backend=ctx.backend,
    )  # fmt: skip
    total = lora_add(whole_sum(w.base), h, w.stack.b, out_dtype=float32, backend=ctx.backend)
    ctx.taps.see("sum", parts_in_columns(total))
    return Stream(*add_rms_norm(total, residual, bias, gain, eps=eps, backend=ctx.backend))


def _add_own_outputs(
    ctx: ForwardContext,
    x: Activation[Array, "M i"],
    w: W8A8Matrix,
    residual: Activation[Array, "R D"],
    bias: Activation[Array, " D"] | None,
    reduction: Reduction,
) -> Activation[Array, "M D"]:
    """A product of which each rank computes its share of the outputs, from whole rows.

    WHY: a row's greatest value, and the order of a sum of float8, are of all of K. All that ranks
    exchange are copies, so the bits are those of one rank.
    """
    x = gather_columns(x, TP_AXIS)
    if residual.shape[0] != x.shape[0]:
        residual = lax.all_gather(residual, TP_AXIS, axis=0, tiled=True)
    share = w.shape[0]
    first = lax.axis_index(TP_AXIS) * share
    own = lax.dynamic_slice_in_dim(residual, first, share, axis=1)
    own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, first, share)
    total = linear_add(x, w, own, own_bias, reduction=reduction, backend=ctx.backend)
    return gather_columns(total, TP_AXIS)


def _may_defer_sums(ctx: ForwardContext, w: Any) -> bool:
    """Whether what follows `row_parallel_norm` may finish its sum, as far as the model decides.

    That is a router without a bias, or in a model without experts the product after a product of
    codes: CTAs share its tree where those of a product of bfloat16 do not.
    """
    if not may_fuse(ctx):
        return False
    config = ctx.config
    if config.experts is None:
        return isinstance(w, QuantizedMatrix)
    # No bias there, and no float32 weights.
    has_plain_router = not (config.has_clamped_experts or config.has_sigmoid_router)
    return has_plain_router and all(config.experts.layers)


def row_parallel_norm(
    ctx: ForwardContext,
    x: Activation[Array, "M i"],
    w: Activation[Array, "D i"] | QuantizedMatrix | W8A8Matrix | AdaptedMatrix,
    residual: Activation[Array, "R D"],
    bias: Activation[Array, " D"] | None,
    gain: Activation[Array, " D"],
    *,
    exchange: Exchange | None = None,
    may_scatter: bool = True,
) -> Stream:
    """Multiply by weights whose inputs are split over ranks, add to the residual stream, normalise.

    Returns the new residual stream and its normalised rows: None where the next product normalises
    them in its own launch (few rows). One rank does it in one operation; several add their subtrees
    in between or in the product, in the form that suits the number of rows (see
    `parallel.exchange`; without `exchange` through XLA's collectives). Where rows are many, each
    rank keeps its own of the residual stream if it may. The bits are the same. Ranks own outputs of
    8-bit weights that multiply 8-bit activations, not inputs.
    """
    if isinstance(w, AdaptedMatrix):
        return _adapted_row_parallel(ctx, x, w, residual, bias, gain)
    reduction = tree_reduction(x.shape[1] * ctx.tp, ctx.profile)
    eps, backend = ctx.config.rms_norm_eps, ctx.backend
    if ctx.tp > 1 and isinstance(w, W8A8Matrix):
        return Stream(residual=_add_own_outputs(ctx, x, w, residual, bias, reduction), x=None)
    if ctx.tp == 1 and defers_norm(x, w, reduction=reduction, backend=backend):
        # WHY: two launches a layer fewer. More rows would not fit beside the streaming weights, and
        # there the kernel that adds the CTAs' subtrees normalises as well.
        residual = linear_add(x, w, residual, bias, reduction=reduction, backend=backend)
        return Stream(residual=residual, x=None)
    may_defer = bias is None and _may_defer_sums(ctx, w)
    if may_defer and defers_sum(x, w, reduction=reduction, backend=backend):
        # WHY: a launch fewer, as the product after it adds and normalises as well.
        leaf_sums = linear_leaf_sums(x, w, reduction=reduction, backend=backend)
        return Stream(residual=UnaddedSubtrees(leaf_sums=leaf_sums, residual=residual), x=None)
    if ctx.tp == 1:
        added = linear_add_rms_norm(
            x, w, residual, bias, gain, reduction=reduction, eps=eps, backend=backend
        )
        return Stream(*added)
    if exchange is not None and adds_tiles(exchange, x, w, backend=backend):
        # WHY: a launch less a sum (docs/parallel.md has the times of both).
        added = linear_exchange_add_rms_norm(
            exchange, x, w, residual, bias, gain, reduction=reduction, eps=eps, backend=backend
        )
        return Stream(*added)
    if exchange is not None and x.shape[0] <= exchange.max_rows:
        leaf_sums = linear_leaf_sums(x, w, reduction=reduction, backend=backend)
        added = exchange_add_rms_norm(
            exchange, leaf_sums, residual, bias, gain, eps=eps, backend=backend
        )
        return Stream(*added)
    partial = linear_partial(x, w, reduction=reduction, backend=backend)
    ctx.taps.see("partial", parts_in_columns(partial), Share.TERMS)
    if may_scatter and is_scattered(x.shape[0], ctx.tp):
        added = scatter_add_rms_norm(
            partial, residual, bias, gain, TP_AXIS, ctx.tp, eps=eps, backend=backend
        )
        return Stream(*added)
    partial = butterfly_sum(partial, TP_AXIS, ctx.tp, backend=backend)
    ctx.taps.see("sum", parts_in_columns(partial))
    return Stream(*add_rms_norm(partial, residual, bias, gain, eps=eps, backend=backend))


def row_parallel_norm_add(
    ctx: ForwardContext,
    x: Activation[Array, "M i"],
    w: Activation[Array, "D i"] | QuantizedMatrix | W8A8Matrix | AdaptedMatrix,
    residual: Activation[Array, "M D"],
    bias: Activation[Array, " D"] | None,
    gains: AfterGains,
    *,
    exchange: Exchange | None = None,
) -> Stream:
    """Multiply, normalise the product, add it to the residual stream, and normalise that.

    The product is `row_parallel_norm` with a residual stream of zeros, so every form of it does.
    Each rank has all rows of the residual stream.
    """
    zeros = jnp.zeros_like(residual)
    product = row_parallel_norm(
        ctx, x, w, zeros, bias, gains.after, exchange=exchange, may_scatter=False
    )
    normed = final_rows(ctx, *product, gains.after)
    # WHY: where what follows reads the stream itself, a norm that nobody reads costs no launch.
    total, out = add_rms_norm(
        normed.astype(jnp.float32),
        residual,
        None,
        gains.after if gains.before is None else gains.before,
        eps=ctx.config.rms_norm_eps,
        backend=ctx.backend,
    )
    return Stream(residual=total, x=total if gains.before is None else out)
