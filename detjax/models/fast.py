# SPDX-License-Identifier: Apache-2.0
"""The same decoder without claims: XLA's products and reductions, whatever is quickest.

The rival of every benchmark, and the draft of speculative decoding. Its bits depend on the batch,
the mesh and the compiler. Weights may be 8-bit (`quantise_params`); activations never are.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array, Cached, Float32, Int32
from detjax.models.config import ExpertConfig, Gating, ModelConfig
from detjax.models.decoder import mask_padding
from detjax.models.layers import (
    ForwardContext,
    Tokens,
    angles_of,
    embed_tokens,
    expert_extras,
    normalise_all_heads,
    place_of,
    qk_gains,
    rope_rows,
    see_projected,
    see_tokens,
    wanted_rows,
)
from detjax.models.linear_attention import linear_attend
from detjax.models.pages import CachePages, kv_of, with_kv
from detjax.models.params import MATRICES
from detjax.models.transformer import Stream, run_layers
from detjax.pallas_kernels.attention.api import rope_attention
from detjax.pallas_kernels.float8_cache import widened
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.quantized import (
    LARGEST,
    QUANTIZED,
    AnyMatrix,
    W8A8Matrix,
    expanded,
)
from detjax.pallas_kernels.moe.sigmoid_router import SMALLEST_SUM
from detjax.pallas_kernels.rope.portable import split_heads, write_pages
from detjax.pallas_kernels.rope.rotation import Rotation, angles_of_keys, angles_of_queries
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.parallel.collectives import gather_columns
from detjax.parallel.dispatch import OrderedJit
from detjax.parallel.mesh import TP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class FastOps:
    """XLA's products, norms and sums; every result is rounded. Attributes as in `CanonicalOps`."""

    ctx: ForwardContext
    tokens: Tokens
    cos: Any
    sin: Any
    wanted: Any

    def embed(self, table, ids, gain) -> Stream:
        """Look up rows and normalise them."""
        return self._normalised(embed_tokens(self.ctx, table, ids), gain)

    def attend(self, layer_idx: int, weights: dict, stream: Stream, cache):
        """Write keys and values, then attend over the cache; or read states of linear attention."""
        if "linear_in" in weights:
            # WHY: the portable kernel is the one algorithm that there is; its rows are XLA's.
            projected = product(stream.x, weights["linear_in"], stream.x.dtype)
            cache, heads = linear_attend(
                self.ctx, weights, projected, cache, self.tokens, layer_idx
            )
        else:
            cache, heads = self._attend(layer_idx, weights, stream, cache)
        if self.wanted is None or layer_idx < self.ctx.config.num_layers - 1:
            return cache, heads, stream
        heads, residual = (
            wanted_rows(self.ctx, rows, self.tokens.ids.shape, self.wanted)
            for rows in (heads, stream.residual)
        )
        return cache, heads, Stream(residual, None)

    def _attend(self, layer_idx: int, weights: dict, stream: Stream, cache):
        cos, sin = (angles_of(self.ctx.config, rows, layer_idx) for rows in (self.cos, self.sin))
        kind = self.ctx.config.cache_kind(layer_idx)
        kv, heads = attention_layer(
            self.ctx, weights, stream.x, cos, sin, kv_of(cache, kind), self.tokens, layer_idx
        )
        return with_kv(cache, kind, kv), heads

    def gate(self, weights: dict, stream: Stream) -> tuple[jax.Array, Stream]:
        """A product, then its gates."""
        gate_up = product(stream.x, weights["gate_up"], stream.x.dtype)
        gated = _geglu if self.ctx.config.gating is Gating.GEGLU else swiglu
        return gated(gate_up), stream

    def add_norm(self, x, w, bias, gain, stream: Stream) -> Stream:
        """A product, a sum over ranks, a sum, a norm."""
        return self._normalised(stream.residual + _row_parallel(self.ctx, x, w, bias), gain)

    def norm_add(self, x, w, bias, gains, stream: Stream) -> Stream:
        """A product, a sum over ranks, a norm, a sum, a norm."""
        product = _row_parallel(self.ctx, x, w, bias)
        added = rms_norm(product, gains.after, self.ctx.config.rms_norm_eps)
        return self._normalised(stream.residual + added, gains.before)

    def mix_experts(self, weights: dict, gain, stream: Stream, cache):
        """Ragged products of the rows sorted by expert, a scatter-add, a sum over ranks, a norm."""
        added = _experts(self.ctx, weights, stream.x)
        return cache, self._normalised(stream.residual + added, gain)

    def _normalised(self, residual, gain) -> Stream:
        if gain is None:
            return Stream(residual, residual)
        return Stream(residual, rms_norm(residual, gain, self.ctx.config.rms_norm_eps))


def forward_fast(
    ctx: ForwardContext,
    params: dict,
    rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
    pages: CachePages,
    tokens: Tokens,
    *,
    wanted: Int32[Array, " B"] | None = None,
) -> tuple[CachePages, Activation[Array, "B T D"]]:
    """Run every layer on new tokens, as `decoder.forward` does, in whatever order is quickest.

    Args:
        ctx: The model and its mesh. On `sm90` queries and keys go through detjax's own kernels,
            the quickest measured; elsewhere everything is XLA.
        params: As for `decoder.forward`; any matrix may be `{"q": 8-bit [N, K], "scale": [N]}`.
        rope_tables: Cosines and sines by position.
        pages: The cache; updated in place where the caller donates it.
        tokens: New tokens and where they stand.
        wanted: The one token of each sequence whose hidden state is wanted, if all are not.

    Returns:
        The cache, and the final normalised hidden state of each token; with `wanted`, T is 1.

    Numerics:
        float32 sums, rounded to the compute dtype after each product. No claim.
    """
    cos, sin = rope_rows(rope_tables, tokens.positions)
    see_tokens(ctx, tokens, cos, sin)
    ops = FastOps(ctx=ctx, tokens=tokens, cos=cos, sin=sin, wanted=wanted)
    ops = ctx.taps.watch(ops, num_layers=ctx.config.num_layers)
    pages, stream = run_layers(ops, params, tokens.ids.reshape(-1), pages)
    ctx.taps.see("final_norm", stream.x)
    return pages, stream.x.reshape(len(tokens.ids), -1, stream.x.shape[-1])


def local_logits_fast(
    ctx: ForwardContext, params: dict, hidden: Activation[Array, "M D"]
) -> Float32[Array, "M v"]:
    """This rank's share of the float32 logits; columns past the vocabulary are -inf. No claim."""
    logits = product(hidden, params["lm_head"], jnp.float32)
    cap = ctx.config.logits_softcap
    return mask_padding(ctx, logits if cap is None else cap * jnp.tanh(logits / cap))


NARROWED = (*MATRICES, "linear_in", "linear_o")
"""Matrices of a layer that `quantise_params` narrows."""


def quantise_params(params: dict, dtype: jnp.dtype) -> dict:
    """Narrow every matrix to 8 bits with one scale an output channel; the rest is shared.

    `scale[n] = max(abs(w[n])) / LARGEST`, `q[n, k] = to_dtype(w[n, k] / scale[n])`

    Args:
        params: The fused tree of a loaded model, on its mesh. Not consumed.
        dtype: int8 or float8_e4m3fn.

    Returns:
        The tree with `{"q": dtype [N, K], "scale": float32 [N]}` for each matrix, sharded as the
        matrix was. Its specs are `quantised_specs`.

    Raises:
        ValueError: If `dtype` is another, or the model has mixtures of experts.
    """
    if any("router" in layer for layer in params["layers"]):
        raise ValueError(
            "8-bit drafts of a mixture of experts are not supported: ragged products take no "
            "8-bit weights; use draft_weights='full'"
        )
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        raise ValueError(f"dtype={name} must be one of {list(LARGEST)}")

    def narrow(w: AnyMatrix) -> dict:
        if isinstance(w, QUANTIZED):
            raise ValueError(
                "8-bit drafts of weights that are quantised already are not supported; use "
                "draft_weights='full', or quantized_weights='expanded'"
            )
        return narrowed(w, name)

    return _replace_matrices(params, narrow)


def narrowed(w: jax.Array, name: str) -> dict[str, jax.Array]:
    """A matrix in 8 bits where it lies, as `quantise_params` has it; not consumed.

    Args:
        w: Of a model loaded on a mesh.
        name: Of the dtype.

    Raises:
        ValueError: If it lies on no mesh.
    """
    if not isinstance(w.sharding, NamedSharding):
        raise ValueError(f"a matrix lies as {w.sharding}; quantise a model loaded on a mesh")
    shardings = jax.tree.map(
        functools.partial(NamedSharding, w.sharding.mesh), _narrow_specs(w.sharding.spec)
    )
    return _narrowing(name, shardings["q"], shardings["scale"])(w)


@functools.cache
def _narrowing(name: str, q: NamedSharding, scale: NamedSharding) -> OrderedJit:
    narrow = functools.partial(_narrow, name=name)
    return OrderedJit(jax.jit(narrow, out_shardings={"q": q, "scale": scale}))


def quantised_specs(specs: dict) -> dict:
    """The tree of `PartitionSpec` of a quantised model, from that of the fused one."""
    return _replace_matrices(specs, _narrow_specs)


def _replace_matrices(tree: dict, narrow) -> dict:
    layers = [
        {name: narrow(leaf) if name in NARROWED else leaf for name, leaf in layer.items()}
        for layer in tree["layers"]
    ]
    return {**tree, "layers": layers, "lm_head": narrow(tree["lm_head"])}


def _narrow_specs(spec: P) -> dict[str, P]:
    return {"q": spec, "scale": P(*tuple(spec)[:1])}


def _narrow(w: Activation[Array, "O I"], name: str) -> dict[str, jax.Array]:
    wide = w.astype(jnp.float32)
    # A row of zeros keeps scale 1, so that nothing divides by zero.
    largest = jnp.max(jnp.abs(wide), axis=1)
    scale = jnp.where(largest > 0, largest / LARGEST[name], 1.0)
    scaled = wide / scale[:, None]
    if name == "int8":
        scaled = jnp.round(scaled)
    return {"q": scaled.astype(name), "scale": scale}


def product(x: Activation[Array, "M i"], w: Any, out_dtype) -> Activation[Array, "M O"]:
    """`x @ w.T` with float32 sums; 8-bit weights are widened to the dtype of `x` on the way."""
    if isinstance(w, dict):
        out = jnp.dot(x, w["q"].astype(x.dtype).T, preferred_element_type=jnp.float32)
        return (out * w["scale"][None]).astype(out_dtype)
    out = jnp.dot(x, expanded(w).astype(x.dtype).T, preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def _row_parallel(ctx: ForwardContext, x: Activation[Array, "M i"], w: Any, bias) -> jax.Array:
    """Multiply by weights that are split over ranks; the sum over all inputs, on every rank."""
    if ctx.tp > 1 and isinstance(w, W8A8Matrix):
        # Ranks own outputs of such weights.
        out = gather_columns(product(gather_columns(x, TP_AXIS), w, x.dtype), TP_AXIS)
    elif ctx.tp > 1:
        out = lax.psum(product(x, w, jnp.float32), TP_AXIS).astype(x.dtype)
    else:
        out = product(x, w, x.dtype)
    return out if bias is None else out + bias.astype(x.dtype)[None]


def ragged_product(
    x: Activation[Array, "M I"], w: Activation[Array, "U O I"], group_sizes: Int32[Array, " U"]
) -> Activation[Array, "M O"]:
    """Each group of rows by its own matrix, with float32 sums; no claim. Zeros past the groups."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = lax.ragged_dot_general(
        x, expanded(w).astype(x.dtype), group_sizes, numbers, preferred_element_type=jnp.float32
    )
    return out.astype(x.dtype)


def scatter_experts(
    y: Activation[Array, "X D"],
    weights: Float32[Array, " X"],
    rows: Int32[Array, " X"],
    num_rows: int,
) -> Float32[Array, "M D"]:
    """Add weighted results of experts to their rows, in whatever order; no claim."""
    out = jnp.zeros((num_rows, y.shape[1]), jnp.float32)
    return out.at[rows].add(y.astype(jnp.float32) * weights[:, None])


def _chosen_experts(
    config: ExpertConfig, weights: dict, logits: Float32[Array, "M U"]
) -> tuple[Float32[Array, "M Q"], Int32[Array, "M Q"]]:
    """Weights and ids of each row's experts."""
    if config.sigmoid_scale:
        scores = jax.nn.sigmoid(logits)
        ranked = scores + weights["router_correction"][None, : config.num_experts]
        _, expert_ids = lax.top_k(ranked, config.top_k)
        chosen = jnp.take_along_axis(scores, expert_ids, axis=1) * config.sigmoid_scale
        total = (jnp.sum(chosen, axis=1, keepdims=True) + SMALLEST_SUM) / config.sigmoid_scale
    else:
        chosen, expert_ids = lax.top_k(jax.nn.softmax(logits, axis=1), config.top_k)
        total = jnp.sum(chosen, axis=1, keepdims=True)
    return chosen / total if config.renormalise else chosen, expert_ids


def _experts(ctx: ForwardContext, weights: dict, x: Activation[Array, "M D"]) -> jax.Array:
    """A mixture of experts; the sum, on every rank."""
    config = ctx.config.experts
    assert config is not None  # whoever has a router
    router = weights["router"]
    logits = product(x.astype(router.dtype), router, jnp.float32)
    if "router_bias" in weights:
        logits = logits + weights["router_bias"].astype(jnp.float32)[None]
    logits = logits[:, : config.num_experts]
    ctx.taps.see("router_logits", logits)
    chosen, expert_ids = _chosen_experts(config, weights, logits)
    ctx.taps.see("expert_ids", expert_ids)
    ctx.taps.see("expert_weights", chosen)
    num_local = weights["expert_down"].shape[0]
    slots = expert_ids.reshape(-1) - lax.axis_index(TP_AXIS) * num_local
    # Slots of other ranks come last, in no group.
    slots = jnp.where((slots >= 0) & (slots < num_local), slots, num_local)
    order = jnp.argsort(slots)
    group_sizes = jnp.bincount(slots, length=num_local + 1)[:num_local].astype(jnp.int32)
    rows = (order // config.top_k).astype(jnp.int32)
    gate_up = ragged_product(x[rows], weights["expert_gate_up"], group_sizes)
    extras = expert_extras(config, weights)
    if extras is None:
        y = ragged_product(swiglu(gate_up), weights["expert_down"], group_sizes)
    else:
        owners = jnp.minimum(slots[order], num_local - 1)
        gated = _clamped_swiglu(gate_up + extras.gate_up_bias[owners].astype(x.dtype), extras.clamp)
        y = ragged_product(gated, weights["expert_down"], group_sizes)
        y = y + extras.down_bias[owners].astype(x.dtype)
    y = jnp.where(slots[order][:, None] < num_local, y, 0)
    out = scatter_experts(y, chosen.reshape(-1)[order], rows, x.shape[0])
    out = (lax.psum(out, TP_AXIS) if ctx.tp > 1 else out).astype(x.dtype)
    return out + _shared_expert(weights, x) if "shared_gate_up" in weights else out


def _shared_expert(weights: dict, x: Activation[Array, "M D"]) -> Activation[Array, "M D"]:
    """What the expert of every row gives, on every rank."""
    h = gather_columns(swiglu(product(x, weights["shared_gate_up"], x.dtype)), TP_AXIS)
    out = gather_columns(product(h, weights["shared_down"], x.dtype), TP_AXIS)
    if "shared_gate" not in weights:
        return out
    gate = product(x, weights["shared_gate"], jnp.float32)[:, :1]
    return (out.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(x.dtype)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Divide each row by its root mean square, in float32; no claim."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    gain = lax.broadcast_to_rank(gain.astype(jnp.float32), x.ndim)
    return (wide * scale * gain).astype(x.dtype)


def swiglu(gate_up: Activation[Array, "M E"]) -> Activation[Array, "M F"]:
    """Gates, then ups: `silu(gate) * up`, in float32; no claim."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _clamped_swiglu(gate_up: Activation[Array, "M E"], clamp: SwigluClamp) -> jax.Array:
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
    return (gate * jax.nn.sigmoid(clamp.alpha * gate) * (up + 1)).astype(gate_up.dtype)


def _geglu(gate_up: Activation[Array, "M E"]) -> Activation[Array, "M F"]:
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.gelu(gate, approximate=True) * up).astype(gate_up.dtype)


def _rope(x: Activation[Array, "M H C"], cos, sin) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def projected_heads(
    ctx: ForwardContext, weights: dict, x: Activation[Array, "M D"]
) -> Activation[Array, "M H C"]:
    """Queries, keys, values and gates of rows, before each head is normalised and turned."""
    qkv = product(x, weights["qkv"], x.dtype)
    if "qkv_bias" in weights:
        qkv = qkv + weights["qkv_bias"].astype(x.dtype)[None]
    see_projected(ctx, qkv)
    if ctx.config.is_qk_norm_whole:
        qkv = normalise_all_heads(ctx, weights, qkv)
    return qkv.reshape(x.shape[0], -1, ctx.config.head_dim)


def _gated_heads(
    config: ModelConfig, heads: Activation[Array, "M i"], qkv: Activation[Array, "M J C"]
) -> Activation[Array, "M i"]:
    """Heads by the sigmoids of their gates, if the model has them."""
    if not config.has_output_gate:
        return heads
    gate = qkv.reshape(len(qkv), -1)[:, -heads.shape[1] :].astype(jnp.float32)
    return (heads.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(heads.dtype)


def attention_layer(
    ctx: ForwardContext,
    weights: dict,
    x: Activation[Array, "M D"],
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Cached[Array, "L N 2 K P C"],
    tokens: Tokens,
    layer: int,
) -> tuple[Cached[Array, "L N 2 K P C"], Activation[Array, "M i"]]:
    """Write keys and values, then attend over the cache."""
    config, eps = ctx.config, ctx.config.rms_norm_eps
    qkv = projected_heads(ctx, weights, x)
    gains = qk_gains(config, weights)
    window = config.sliding_windows[layer]
    place = place_of(config, pages, tokens, layer)
    if KERNELS[ctx.backend].attention_beats_xla and config.attention_softcap is None:
        out, pages = rope_attention(
            qkv, Rotation(cos, sin, gains), place,
            window=window, eps=eps, profile=ctx.profile, backend=ctx.backend,
            sinks=weights.get("sinks"), is_gated=config.has_output_gate,
        )  # fmt: skip
        return pages, out.reshape(x.shape[0], -1)
    q, k, v = split_heads(qkv, (ctx.own_heads, pages.shape[3]))
    if gains is not None:
        q, k = rms_norm(q, gains[0], eps), rms_norm(k, gains[1], eps)
    q, k = (
        _rope(x, of(cos, config.head_dim), of(sin, config.head_dim))
        for x, of in ((q, angles_of_queries), (k, angles_of_keys))
    )
    pages = write_pages(place, k, v)
    q = q.reshape(*tokens.ids.shape, -1, config.head_dim)
    out = _gathered_attention(
        q, pages[place.layer], place.page_table, tokens.positions, window,
        config.attention_softcap, weights.get("sinks"),
    )  # fmt: skip
    return pages, _gated_heads(config, out.reshape(x.shape[0], -1), qkv)


def _gathered_attention(
    q: Activation[Array, "B T H C"],
    pages: Cached[Array, "N 2 K P C"],
    page_table: Int32[Array, "B n"],
    positions: Int32[Array, "B T"],
    window: int | None,
    softcap: float | None,
    sinks: Activation[Array, " H"] | None,
) -> Activation[Array, "B T H C"]:
    """Attention by two products over a copy of each sequence's pages."""
    batch, query_len, num_heads, channels = q.shape
    kv_heads, page_len = pages.shape[2:4]
    gathered = jnp.take(pages, page_table, axis=0, mode="clip")  # [B, n, 2, K, P, C]
    gathered = widened(gathered, q.dtype)
    k, v = gathered[:, :, 0], gathered[:, :, 1]
    key_pos = jnp.arange(page_table.shape[1] * page_len, dtype=jnp.int32)[None]
    is_seen = key_pos[None] <= positions[:, :, None]  # [B, T, S]
    if window is not None:
        is_seen &= key_pos[None] > positions[:, :, None] - window
    # What a freed page still holds must not meet a product, not even with weight 0.
    is_written = key_pos <= jnp.max(positions, axis=1, keepdims=True)
    if window is not None:
        earliest = jnp.min(jnp.where(positions < 0, jnp.max(positions), positions), axis=1)
        is_written &= key_pos > earliest[:, None] - window
    is_written = is_written.reshape(batch, -1, 1, page_len, 1)
    v = jnp.where(is_written, v, 0)
    q = q.reshape(batch, query_len, kv_heads, num_heads // kv_heads, channels)
    scores = jnp.einsum("btkgc,bnkpc->bkgtnp", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(*scores.shape[:4], -1) * channels**-0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    is_seen = is_seen[:, None, None]
    # A row of padding sees nothing; a finite fill keeps it from NaN.
    scores = jnp.where(is_seen, scores, -1e30)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.reshape(*scores.shape[:4], -1, page_len)
    out = jnp.einsum("bkgtnp,bnkpc->btkgc", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch, query_len, num_heads, channels)
