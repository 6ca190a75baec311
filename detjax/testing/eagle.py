# SPDX-License-Identifier: Apache-2.0
"""Small EAGLE-3 heads with random weights, and what they draft, computed in another way."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.defaults import EAGLE3
from detjax.models.config import ModelConfig
from detjax.models.heads.config import HeadConfig
from detjax.models.heads.eagle import joined_params, place_eagle_head, tensor_shapes
from detjax.models.heads.eagle_config import layer_like
from detjax.models.heads.head import DraftHead
from detjax.models.heads.save import save_eagle_head
from detjax.models.loading import LoadedModel


def dummy_eagle(target: ModelConfig, *, draft_vocab_size: int) -> HeadConfig:
    """A head of a model of at least 4 layers, of the model's width and heads."""
    return HeadConfig(
        method=EAGLE3,
        layer=layer_like(target),
        feature_layers=(1, 2, 3),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size,
    )


def dummy_tensors(eagle: HeadConfig, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of a head."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            1 + 0.1 * rng.standard_normal(shape, np.float32)
            if len(shape) == 1
            else rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        )
        for name, shape in tensor_shapes(eagle).items()
    }


def dummy_ids(eagle: HeadConfig) -> np.ndarray:
    """Tokens of a draft vocabulary, spread over that of the model."""
    return np.linspace(0, eagle.layer.vocab_size - 1, eagle.draft_vocab_size).astype(np.int32)


def dummy_head(model: LoadedModel, eagle: HeadConfig, *, seed: int = 0) -> DraftHead:
    """A head with random weights, on the mesh of the model that verifies."""
    return place_eagle_head(eagle, dummy_tensors(eagle, seed=seed), dummy_ids(eagle), model=model)


def abstract_head(model: LoadedModel, eagle: HeadConfig) -> DraftHead:
    """A head as shapes, on the mesh of a model of shapes."""
    dtype, whole = model.profile.param_dtype, NamedSharding(model.mesh, P())
    tensors = {
        name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in tensor_shapes(eagle).items()
    }
    params = jax.eval_shape(joined_params, tensors)
    params["draft_ids"] = jax.ShapeDtypeStruct((eagle.draft_vocab_size,), jnp.int32)
    return DraftHead(
        head_config=eagle,
        params={
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=whole)
            for name, value in params.items()
        },
        shared={"embed": model.partition_specs["embed"]},
        rope_tables=model.rope_tables,
        mesh=model.mesh,
        profile=model.profile,
        backend=model.backend,
        folder=None,
    )


def write_dummy_head(folder: Path, eagle: HeadConfig) -> Path:
    """Write a head with random weights in SGLang's form."""
    save_eagle_head(folder, eagle, dummy_tensors(eagle), dummy_ids(eagle))
    return folder


def reference_drafts(
    eagle: HeadConfig,
    tensors: dict[str, np.ndarray],
    embed: np.ndarray,
    features: np.ndarray,
    tokens: Sequence[int],
    *,
    count: int,
) -> list[int]:
    """Greedy drafts behind `tokens`, of the whole text at once in float64, without a cache.

    Args:
        eagle: What the head is.
        tensors: As `dummy_tensors` gives them, with the rows of `dummy_ids`.
        embed: The model's embedding, [V, D].
        features: Hidden states of all tokens but the last, [S - 1, X].
        tokens: Token ids, S of them.
        count: Drafts.
    """
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    hidden = features.astype(np.float64) @ wide["fc.weight"].T
    text, drafts = list(tokens), []
    for _ in range(count):
        left = _layer(eagle, wide, embed[text[1:]].astype(np.float64), hidden)[-1]
        row = wide["lm_head.weight"] @ _norm(eagle, left, wide["norm.weight"])
        drafts.append(int(dummy_ids(eagle)[np.argmax(row)]))
        text.append(drafts[-1])
        hidden = np.concatenate([hidden, left[None]])
    return drafts


def _layer(eagle: HeadConfig, wide: dict, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """The head's layer of a whole text, [S, D]."""
    weights = {name.removeprefix("midlayer."): value for name, value in wide.items()}
    normed = _norm(eagle, hidden, weights["hidden_norm.weight"])
    embedded = _norm(eagle, embedded, weights["input_layernorm.weight"])
    residual = normed if eagle.norm_before_residual else hidden
    heads = _attention(eagle, weights, np.concatenate([embedded, normed], axis=1))
    residual = residual + heads @ weights["self_attn.o_proj.weight"].T
    rows = _norm(eagle, residual, weights["post_attention_layernorm.weight"])
    gate = rows @ weights["mlp.gate_proj.weight"].T
    up = rows @ weights["mlp.up_proj.weight"].T
    return residual + (gate / (1 + np.exp(-gate)) * up) @ weights["mlp.down_proj.weight"].T


def _attention(eagle: HeadConfig, weights: dict, rows: np.ndarray) -> np.ndarray:
    layer, length = eagle.layer, len(rows)
    q, k, v = (
        (rows @ weights[f"self_attn.{name}_proj.weight"].T).reshape(length, -1, layer.head_dim)
        for name in "qkv"
    )
    q, k = _turned(q, layer.rope.theta), _turned(k, layer.rope.theta)
    group = layer.num_heads // layer.num_kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.einsum("thc,shc->hts", q, k) * layer.head_dim**-0.5
    scores = np.where(np.tri(length, dtype=bool)[None], scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shc->thc", scores, v).reshape(length, -1)


def _turned(x: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(eagle: HeadConfig, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eagle.layer.rms_norm_eps)
    return x / scale * gain
