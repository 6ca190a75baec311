# SPDX-License-Identifier: Apache-2.0
"""Models, sequences and an engine's answers that several files use."""

import dataclasses
import math
from collections.abc import Callable
from functools import cache

import jax
import numpy as np
import pytest

from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.config import Gating, LinearAttentionConfig, NormPlacement
from detjax.models.loading import LoadedModel
from detjax.models.rope import rope_tables
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.testing.dummies import answers, dummy_config, dummy_model
from detjax.training.batch import Scored

CONFIGS = {
    "tied": dataclasses.replace(dummy_config(max_len=640), tie_word_embeddings=True),
    "qk_norm_biases_window": dummy_config(
        num_heads=24, num_kv_heads=3, qk_norm=True, qkv_bias=True, o_bias=True, window=70
    ),
    "experts": dummy_config(intermediate_size=128, experts=(8, 3)),
}
_EXPERTS = CONFIGS["experts"].experts
assert _EXPERTS is not None
CONFIGS["experts_of_all"] = dataclasses.replace(
    CONFIGS["experts"], experts=dataclasses.replace(_EXPERTS, renormalise=False)
)
CONFIGS["shared_expert"] = dataclasses.replace(
    CONFIGS["experts"],
    experts=dataclasses.replace(_EXPERTS, shared_width=64, has_shared_gate=True),
)
CONFIGS["norms_before_and_behind"] = dataclasses.replace(
    dummy_config(num_heads=8, num_kv_heads=4, window=70, qk_norm=True),
    gating=Gating.GEGLU, norms=NormPlacement.BOTH, gain_offset=1.0, attention_softcap=2.0,
    logits_softcap=3.0, tie_word_embeddings=True,
)  # fmt: skip
CONFIGS["norms_behind"] = dataclasses.replace(
    dummy_config(), norms=NormPlacement.AFTER, is_qk_norm_whole=True
)
CONFIGS["clamped_experts"] = dataclasses.replace(
    dummy_config(intermediate_size=128, experts=(8, 3), qkv_bias=True, o_bias=True, window=40),
    experts=dataclasses.replace(
        _EXPERTS, clamp=SwigluClamp(alpha=1.702, limit=1.0), layers=(True, True)
    ),
    has_sinks=True,
)
CONFIGS["hybrid"] = dataclasses.replace(
    dummy_config(intermediate_size=128, qk_norm=True, max_len=640),
    has_output_gate=True,
    linear_attention=LinearAttentionConfig(
        num_key_heads=2,
        num_value_heads=4,
        key_dim=16,
        value_dim=32,
        conv_width=4,
        layers=(True, False),
    ),
)


@pytest.fixture(autouse=True, scope="session")
def all_virtual_devices() -> None:
    """Start JAX with the suite's eight devices, before a command asks for fewer."""
    assert len(jax.devices("cpu")) >= 8


@pytest.fixture(scope="session")
def model_named() -> Callable[..., LoadedModel]:
    """A model by the name of its configuration, on a (dp, tp) mesh."""

    @cache
    def make(name: str, *, tp: int = 1, dp: int = 1, dtype: str = "bfloat16") -> LoadedModel:
        profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
        return dummy_model(CONFIGS[name], dp=dp, tp=tp, profile=profile)

    return make


@pytest.fixture(scope="session")
def completions(model_named) -> Callable[..., list[Completion]]:
    """Sampled answers to prompts around a page (128) and a split (512)."""

    @cache
    def sample(name: str, *, tp: int = 1, dtype: str = "bfloat16") -> list[Completion]:
        rng = np.random.default_rng(3)
        requests = [
            Request(
                prompt_token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
                sampling=SamplingParams(max_tokens=6, temperature=1.0, seed=length),
            )
            for length in (5, 130, 1, 70, 509)
        ]
        model = model_named(name, tp=tp, dtype=dtype)
        return answers(model, requests, batch_size=4, max_len=520)

    return sample


@pytest.fixture(scope="session")
def weighted() -> Callable[..., list[Scored]]:
    """Sequences of given lengths with random tokens and weights."""

    def make(*lengths: int) -> list[Scored]:
        rng = np.random.default_rng(7)
        return [
            Scored(
                token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
                weights=(0.0, *(float(w) for w in rng.standard_normal(length - 1))),
            )
            for length in lengths
        ]

    return make


@pytest.fixture(scope="session")
def plain_logprobs() -> Callable:
    """`plain_logprobs(xp, config, params, ids)`: the model written down once more, plainly.

    With NumPy and float64 it is the reference; with jax.numpy it can be differentiated by JAX.
    """
    return _plain_logprobs


def _plain_logprobs(xp, config, params, ids):
    """Log-probability of ids[1:], each given those before it."""
    length, channels, num_heads = len(ids) - 1, config.head_dim, config.num_heads
    half = channels // 2
    wide = params["embed"].dtype
    ropes = [
        [table[:length, None] for table in rope_tables(rope, head_dim=channels, max_len=length)]
        for rope in config.ropes
    ]
    back = np.arange(length)[:, None] - np.arange(length)[None, :]

    def norm(x, gain):
        mean_square = xp.mean(x * x, axis=-1, keepdims=True)
        return x / xp.sqrt(mean_square + config.rms_norm_eps) * gain[(None,) * (x.ndim - 1)]

    def turn(x, cos, sin):
        a, b = x[..., :half], x[..., half:]
        return xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def bias(weights, name):
        return weights[f"{name}_bias"][None, :] if f"{name}_bias" in weights else 0.0

    def gated(gate, up):
        if config.has_clamped_experts:
            clamp = config.experts.clamp
            gate = xp.minimum(gate, np.asarray(clamp.limit, wide))
            up = xp.clip(up, np.asarray(-clamp.limit, wide), np.asarray(clamp.limit, wide))
            return gate / (1 + xp.exp(-np.asarray(clamp.alpha, wide) * gate)) * (up + 1)
        if config.gating is Gating.GEGLU:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            return gate / 2 * (1 + xp.tanh(inner)) * up
        return gate / (1 + xp.exp(-gate)) * up

    def capped(x, cap):
        return x if cap is None else xp.tanh(x / np.asarray(cap, wide)) * np.asarray(cap, wide)

    def normed(x, weights, name):  # where the model has that norm
        return norm(x, weights[name]) if name in weights else x

    def experts(h, weights):
        p = h @ weights["router"].T + bias(weights, "router")
        if config.has_sigmoid_router:
            p = 1 / (1 + xp.exp(-p))
            order = p + weights["router_correction"][None]
        else:
            order = p = xp.exp(p - xp.max(p, axis=-1, keepdims=True))
        is_chosen = order >= xp.sort(order, axis=-1)[:, -config.experts.top_k, None]
        w = xp.where(is_chosen, p, np.asarray(0, wide))
        if config.experts.renormalise or not config.has_sigmoid_router:
            w = w / xp.sum(w if config.experts.renormalise else p, axis=-1, keepdims=True)
        w = w * np.asarray(config.experts.sigmoid_scale or 1, wide)
        gate, up = (xp.einsum("td,efd->tef", h, weights[f"expert_{n}"]) for n in ("gate", "up"))
        if config.has_clamped_experts:
            of_gate, of_up = xp.split(weights["expert_gate_up_bias"], 2, axis=1)
            gate, up = gate + of_gate[None], up + of_up[None]
        out = xp.einsum("te,tef,edf->td", w, gated(gate, up), weights["expert_down"])
        if config.has_clamped_experts:
            out = out + w @ weights["expert_down_bias"]
        if not config.has_shared_expert:
            return out
        gate, up = (h @ weights[f"shared_{n}"].T for n in ("gate_proj", "up_proj"))
        shared = gated(gate, up) @ weights["shared_down"].T
        if "shared_gate" in weights:
            shared = shared / (1 + xp.exp(-(h @ weights["shared_gate"].T)))
        return out + shared

    def linear_attention(h, weights):
        """All tokens at once: `u = (1 + M)^-1 beta V` and `out = (Q K^T decays) u`.

        `M = beta K K^T decays` without its diagonal, and `decays[t, s] = prod(decay[s + 1 .. t])`,
        0 above the diagonal (Yang et al. 2024, section 3.2).
        """
        sizes = config.linear_attention
        filtered = []
        for name in "qkv":
            rows = h @ weights[f"linear_{name}"].T
            filters = weights[f"conv_{name}"][:, 0].T
            before = xp.concatenate([xp.zeros((len(filters) - 1, rows.shape[1]), wide), rows])
            y = sum(filters[i][None] * before[i : i + length] for i in range(len(filters)))
            y = y / (1 + xp.exp(-y))
            filtered.append(
                y.reshape(length, -1, sizes.value_dim if name == "v" else sizes.key_dim)
            )
        q, k, v = filtered
        q, k = (x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        q = q / np.asarray(sizes.key_dim**0.5, wide)
        q, k = (xp.repeat(x, sizes.group, axis=1) for x in (q, k))
        beta = 1 / (1 + xp.exp(-(h @ weights["linear_b"].T)))
        raw = h @ weights["linear_a"].T + weights["linear_step"][None]
        log_decay = -xp.exp(weights["linear_decay"])[None] * xp.logaddexp(raw, xp.zeros_like(raw))
        total = xp.cumsum(log_decay, axis=0)
        is_before = xp.asarray(back >= 0)[:, :, None]
        between = xp.where(is_before, total[:, None] - total[None], np.asarray(0, wide))
        decays = xp.where(is_before, xp.exp(between), np.asarray(0, wide))
        met = xp.einsum("thc,shc,tsh,th->hts", k, k, decays, beta)
        met = xp.where(xp.asarray(back > 0)[None], met, np.asarray(0, wide))
        written = (v * beta[..., None]).swapaxes(0, 1)
        written = xp.linalg.solve(met + xp.eye(length, dtype=wide)[None], written)
        out = xp.einsum("thc,shc,tsh,hsd->thd", q, k, decays, written)
        gate = (h @ weights["linear_z"].T).reshape(out.shape)
        out = norm(out, weights["linear_norm"]) * gate / (1 + xp.exp(-gate))
        return out.reshape(length, -1) @ weights["linear_o"].T

    def attention(h, weights, window, rope):
        cos, sin = (xp.asarray(table, wide) for table in ropes[rope])
        q, k, v = (h @ weights[name].T + bias(weights, name) for name in "qkv")
        if config.is_qk_norm_whole:
            q, k = norm(q, weights["q_norm_whole"]), norm(k, weights["k_norm_whole"])
        q, k, v = (x.reshape(length, -1, channels) for x in (q, k, v))
        if config.qk_norm:
            q, k = norm(q, weights["q_norm"]), norm(k, weights["k_norm"])
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        group = num_heads // config.num_kv_heads
        k, v = xp.repeat(k, group, axis=1), xp.repeat(v, group, axis=1)
        scores = xp.einsum("thc,shc->hts", q, k) / np.asarray(channels**0.5, wide)
        scores = capped(scores, config.attention_softcap)
        is_seen = (back >= 0) & (back < (window or length))
        scores = xp.where(is_seen[None], scores, np.asarray(-1e30, wide))
        if config.has_sinks:
            sinks = xp.broadcast_to(weights["sinks"][:, None, None], (num_heads, length, 1))
            scores = xp.concatenate([scores, sinks], axis=-1)
        e = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        e = (e / xp.sum(e, axis=-1, keepdims=True))[..., :length]
        out = xp.einsum("hts,shc->thc", e, v).reshape(length, -1)
        if config.has_output_gate:
            out = out / (1 + xp.exp(-(h @ weights["attn_gate"].T)))
        return out @ weights["o"].T + bias(weights, "o")

    x = params["embed"][xp.asarray(ids[:-1])] * np.asarray(config.embedding_scale, wide)
    which = config.layer_ropes or (0,) * config.num_layers
    layers = zip(params["layers"], config.sliding_windows, which, strict=True)
    for weights, window, rope in layers:
        h = normed(x, weights, "attn_norm")
        is_linear = "linear_q" in weights
        out = linear_attention(h, weights) if is_linear else attention(h, weights, window, rope)
        x = x + normed(out, weights, "attn_norm_after")
        h = normed(x, weights, "mlp_norm")
        if "router" in weights:
            x = x + experts(h, weights)
            continue
        out = gated(h @ weights["gate"].T, h @ weights["up"].T) @ weights["down"].T
        x = x + normed(out, weights, "mlp_norm_after")
    logits = norm(x, params["final_norm"]) @ params.get("lm_head", params["embed"]).T
    logits = capped(logits, config.logits_softcap)
    top = xp.max(logits, axis=-1, keepdims=True)
    lse = top + xp.log(xp.sum(xp.exp(logits - top), axis=-1, keepdims=True))
    return xp.take_along_axis(logits - lse, xp.asarray(ids[1:])[:, None], axis=1)[:, 0]
