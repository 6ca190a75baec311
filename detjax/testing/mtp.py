# SPDX-License-Identifier: Apache-2.0
"""Heads of multi-token prediction with random weights, and what they draft, computed otherwise.

Names, shapes and formulas here are those that are published, and share no code with the reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from detjax.models.family import MtpLayout
from detjax.models.heads.head import DraftHead
from detjax.models.heads.mtp import check_mtp_head, mtp_specs, place_mtp_head
from detjax.models.heads.mtp_config import mtp_config
from detjax.models.loading import LoadedModel
from detjax.models.params import ParamRole, ParamSpec, TensorSpec
from detjax.models.weights.assemble import assemble_one

Tensors = dict[str, np.ndarray]

MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True,
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 640000, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
"""A small `config.json` with the keys of MiMo-7B."""


@dataclass(frozen=True, slots=True)
class _Published:
    """What the head of one family is called, less ".weight", and what it reads.

    Attributes:
        prefix: How its names begin.
        layer: How those of its layer do.
        beside: Norms of the embedding and the hidden state, the matrix, and the last norm.
        is_hidden_first: Whether the matrix reads the hidden state first.
        reads_normalised: Whether hidden states are those behind the last norm.
        gain: Added to gains.
    """

    prefix: str
    layer: str
    beside: tuple[str, str, str, str]
    is_hidden_first: bool
    reads_normalised: bool
    gain: int


def _published(values: Mapping[str, Any]) -> _Published:
    match values["model_type"]:
        case "mimo":
            prefix = "model.mtp_layers.0."
            names = "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
            return _Published(prefix, prefix, names, True, False, 0)
        case "glm4_moe":
            prefix = f"model.layers.{values['num_hidden_layers']}."
            names = "enorm", "hnorm", "eh_proj", "shared_head.norm"
            return _Published(prefix, prefix, names, False, True, 0)
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    return _Published("mtp.", "mtp.layers.0.", names, False, True, 1)


def mtp_names(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of the head of a model with this `config.json`."""
    width, channels, family = values["hidden_size"], _channels(values), values["model_type"]
    heads, keys = (values[f"num_{n}_heads"] * channels for n in ("attention", "key_value"))
    has_gate = family.startswith("qwen3")  # of each head the queries, then the gate
    rows = {"q": (1 + has_gate) * heads, "k": keys, "v": keys}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
        "self_attn.o_proj.weight": (width, heads),
    }  # fmt: skip
    layer |= {f"self_attn.{n}_proj.weight": (count, width) for n, count in rows.items()}
    if values.get("attention_bias", family == "mimo"):
        layer |= {f"self_attn.{n}_proj.bias": (count,) for n, count in rows.items()}
    if has_gate or values.get("use_qk_norm"):
        layer |= {f"self_attn.{n}_norm.weight": (channels,) for n in "qk"}
    layer |= _mlp_names(values, width)
    published = _published(values)
    embed_norm, hidden_norm, join, last_norm = published.beside
    beside: dict[str, tuple[int, ...]] = {
        embed_norm: (width,),
        hidden_norm: (width,),
        last_norm: (width,),
    }
    beside[join] = (width, 2 * width)
    named = {f"{published.prefix}{name}.weight": shape for name, shape in beside.items()}
    return named | {f"{published.layer}{name}": shape for name, shape in layer.items()}


def _mlp_names(values: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    count = values.get("num_experts", values.get("n_routed_experts"))
    if count is None:
        return _gated_names("mlp", values["intermediate_size"], width)
    own = values["moe_intermediate_size"]
    names: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, width)}
    if values["model_type"] == "glm4_moe":
        names["mlp.gate.e_score_correction_bias"] = (count,)
        shared = own * values["n_shared_experts"]
        names |= _gated_names("mlp.shared_experts", shared, width)
    else:
        names["mlp.shared_expert_gate.weight"] = (1, width)
        shared = values["shared_expert_intermediate_size"]
        names |= _gated_names("mlp.shared_expert", shared, width)
    if values["model_type"].startswith("qwen3_5"):
        stacked = {"gate_up_proj": (count, 2 * own, width), "down_proj": (count, width, own)}
        return names | {f"mlp.experts.{name}": shape for name, shape in stacked.items()}
    for i in range(count):
        names |= _gated_names(f"mlp.experts.{i}", own, width)
    return names


def _gated_names(prefix: str, channels: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (channels, width), "up": (channels, width), "down": (width, channels)}
    return {f"{prefix}.{name}_proj.weight": shape for name, shape in shapes.items()}


def mtp_tensors(values: Mapping[str, Any]) -> Tensors:
    """Random bfloat16 tensors of a head as they are published."""
    rng = np.random.default_rng(0)
    offset = 1 - _published(values).gain  # gains of some are stored less 1

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal(shape, np.float32)
        if "norm" in name:
            return offset + 0.1 * x
        return 0.3 * x if name.endswith("bias") else x * np.float32(shape[-1] ** -0.5)

    return {
        name: drawn(name, shape).astype(jnp.bfloat16) for name, shape in mtp_names(values).items()
    }


def random_mtp_head(model: LoadedModel, layout: MtpLayout) -> DraftHead:
    """A head with random weights beside a model that was read from no folder."""
    head_config = mtp_config(model.config, layout)
    check_mtp_head(head_config, model)

    def make(spec: TensorSpec) -> jax.Array:
        values = np.stack([
            np.random.default_rng([0, *name.encode()]).standard_normal(spec.hf_shape, np.float32)
            for name in spec.hf_names
        ])  # fmt: skip
        values = values if spec.num_experts else values[0]
        if spec.role is ParamRole.GAIN:
            values = 1 + 0.1 * values
        elif spec.role is not ParamRole.BIAS:
            values *= np.float32(spec.hf_shape[-1] ** -0.5)
        dtype, padding = spec.dtype(model.profile.param_dtype), spec.shape[0] - len(values)
        values = np.pad(values, ((0, padding), *[(0, 0)] * (values.ndim - 1)))
        return jax.device_put(values.astype(dtype), NamedSharding(model.mesh, spec.partition))

    specs = mtp_specs(head_config.layer, layout)
    params = {name: assemble_one(spec, mesh=model.mesh, make=make) for name, spec in specs.items()}
    return place_mtp_head(head_config, params, model)


def abstract_mtp_head(model: LoadedModel, layout: MtpLayout) -> DraftHead:
    """A head as shapes, beside a model of shapes."""
    head_config = mtp_config(model.config, layout)

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(model.mesh, spec.partition)
        dtype = spec.tensors[0].dtype(model.profile.param_dtype)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    specs = mtp_specs(head_config.layer, layout)
    return place_mtp_head(head_config, {name: shape(x) for name, x in specs.items()}, model)


# ---------------------------------------------------------------------------------------- reference


def reference_mtp_drafts(
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    states: np.ndarray,
    tokens: Sequence[int],
    *,
    count: int,
) -> list[int]:
    """Greedy drafts behind `tokens`, of the whole text at once in float64, without a cache.

    Args:
        values: The model's `config.json`.
        tensors: As a checkpoint has them: those of the head, and the model's that it uses.
        states: What the model's last layer leaves of all tokens but the last, [S - 1, D].
        tokens: Token ids, S of them.
        count: Drafts.
    """
    wide = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    published = _published(values)
    embed, out = wide["model.embed_tokens.weight"], wide["lm_head.weight"]
    text, drafts, hidden = list(tokens), [], states.astype(np.float64)
    if published.reads_normalised:
        hidden = _norm(values, hidden, wide["model.norm.weight"])
    token_norm, hidden_norm, join, last_norm = (
        wide[f"{published.prefix}{name}.weight"] for name in published.beside
    )
    layer = published.layer
    weights = {n.removeprefix(layer): x for n, x in wide.items() if n.startswith(layer)}
    for _ in range(count):
        both = [_norm(values, embed[text[1:]], token_norm), _norm(values, hidden, hidden_norm)]
        both = both[::-1] if published.is_hidden_first else both
        left = _layer(values, weights, np.concatenate(both, axis=1) @ join.T)[-1]
        row = _norm(values, left, last_norm)
        drafts.append(int(np.argmax(out @ row)))
        text.append(drafts[-1])
        hidden = np.concatenate([hidden, (row if published.reads_normalised else left)[None]])
    return drafts


def _channels(values: Mapping[str, Any]) -> int:
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def _norm(values: Mapping[str, Any], x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + values["rms_norm_eps"])
    return x / root * (_published(values).gain + gain)


def _layer(values: Mapping[str, Any], weights: Tensors, x: np.ndarray) -> np.ndarray:
    rows = _norm(values, x, weights["input_layernorm.weight"])
    x = x + _attention(values, weights, rows)
    rows = _norm(values, x, weights["post_attention_layernorm.weight"])
    if "mlp.gate.weight" not in weights:
        return x + _gated(rows, *(weights[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
    return x + _experts(values, weights, rows)


def _attention(values: Mapping[str, Any], weights: Tensors, rows: np.ndarray) -> np.ndarray:
    length, channels = len(rows), _channels(values)
    heads, keys = values["num_attention_heads"], values["num_key_value_heads"]
    q, k, v = (
        (
            rows @ weights[f"self_attn.{n}_proj.weight"].T
            + weights.get(f"self_attn.{n}_proj.bias", 0)
        )
        for n in "qkv"
    )
    k, v = k.reshape(length, keys, channels), v.reshape(length, keys, channels)
    gate, heads_of = 1.0, q.reshape(length, heads, -1)
    if heads_of.shape[2] > channels:
        heads_of, gate = np.split(heads_of, 2, axis=2)
        gate = (1 / (1 + np.exp(-gate))).reshape(length, -1)
    q = heads_of
    if "self_attn.q_norm.weight" in weights:
        q = _norm(values, q, weights["self_attn.q_norm.weight"])
        k = _norm(values, k, weights["self_attn.k_norm.weight"])
    rope = values.get("rope_parameters", values)
    theta, share = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    q, k = (_turned(one, theta, int(channels * share)) for one in (q, k))
    k, v = (np.repeat(one, heads // keys, axis=1) for one in (k, v))
    scores = np.einsum("thc,shc->hts", q, k) * channels**-0.5
    scores = np.where(np.tri(length, dtype=bool)[None], scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    out = np.einsum("hts,shc->thc", scores, v).reshape(length, -1)
    return (out * gate) @ weights["self_attn.o_proj.weight"].T


def _turned(x: np.ndarray, theta: float, rotated: int) -> np.ndarray:
    """The first `rotated` channels, in halves, by the position of each row."""
    half = rotated // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return np.concatenate([*turned, rest], axis=-1)


def _gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gates = x @ gate.T
    return (gates / (1 + np.exp(-gates)) * (x @ up.T)) @ down.T


def _experts(values: Mapping[str, Any], weights: Tensors, x: np.ndarray) -> np.ndarray:
    """Each row's experts, whose shares add up to 1 or to a factor, and that of every row."""
    logits = x @ weights["mlp.gate.weight"].T
    if (bias := weights.get("mlp.gate.e_score_correction_bias")) is None:
        own = [weights[f"mlp.shared_expert.{n}_proj.weight"] for n in ("gate", "up", "down")]
        gate = 1 / (1 + np.exp(-(x @ weights["mlp.shared_expert_gate.weight"].T)))
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        out, ranked, factor = gate * _gated(x, *own), shares, 1.0
    else:
        own = [weights[f"mlp.shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")]
        shares = 1 / (1 + np.exp(-logits))
        out, ranked = _gated(x, *own), shares + bias
        factor = values["routed_scaling_factor"]
    for i, row in enumerate(x):
        best = np.argsort(-ranked[i])[: values["num_experts_per_tok"]]
        for expert in best:
            one = _gated(row[None], *_expert(weights, expert))[0]
            out[i] += factor * shares[i, expert] / shares[i, best].sum() * one
    return out


def _expert(weights: Tensors, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gates, ups and downs of an expert, which is stored alone or among all."""
    if "mlp.experts.gate_up_proj" in weights:
        gates, ups = np.split(weights["mlp.experts.gate_up_proj"][expert], 2)
        return gates, ups, weights["mlp.experts.down_proj"][expert]
    names = (f"mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))
    gates, ups, downs = (weights[name] for name in names)
    return gates, ups, downs
