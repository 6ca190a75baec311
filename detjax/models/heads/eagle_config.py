# SPDX-License-Identifier: Apache-2.0
"""Strict reading of the `config.json` of an EAGLE-3 head, in either published form. No JAX.

SGLang's form is a Llama configuration of one layer with `draft_vocab_size`. That of the library
speculators has the layer under `transformer_layer_config`. Every key must be known, as in
`hf_config`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detjax.defaults import EAGLE3
from detjax.models.config import ModelConfig, RopeConfig
from detjax.models.heads.config import HeadConfig
from detjax.models.hf_config import config_from_hf
from detjax.models.hf_values import flag_of, int_of, read_object

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Of SGLang's form."""

NUM_FEATURES = 3
"""Hidden states of a token that a head reads."""

_SPECULATORS = "speculators_config"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NO_EMBEDDING_KEYS = frozenset({"bos_token_id", "eos_token_id", "tie_word_embeddings"})
_OWN_KEYS = frozenset(
    {"draft_vocab_size", "eagle_config", "norm_before_residual", "target_hidden_size"}
)
_SPECULATORS_KEYS = frozenset(
    {
        "architectures", "auto_map", "draft_vocab_size", "dtype", "embed_requires_grad",
        "has_no_defaults_at_init", "model_type", "norm_before_residual", "speculators_model_type",
        "speculators_version", "target_hidden_size", "tie_word_embeddings", "torch_dtype",
        "transformer_layer_config", "transformers_version", _LAYER_IDS, _SPECULATORS,
    }
)  # fmt: skip


def refuse_head(folder: Path) -> None:
    """Refuse a folder of an EAGLE-3 head where a model is wanted.

    Raises:
        ValueError: If its `config.json` is that of a head, right or wrong.
    """
    path = folder / "config.json"
    if path.is_file() and _is_head(read_object(path)):
        raise ValueError(
            f"{folder} is an EAGLE-3 head, not a model; give it as the model of a "
            "--speculative-config (speculative_config) with the method 'eagle3'"
        )


def check_is_head(folder: Path) -> None:
    """Refuse a folder that is not of an EAGLE-3 head.

    Raises:
        FileNotFoundError: If it has no `config.json`.
        ValueError: If that is of something else.
    """
    values = _read(folder)
    if not _is_head(values):
        raise ValueError(
            f"{folder / 'config.json'}: architectures={values.get('architectures')!r} is no "
            f"EAGLE-3 head: there is neither {ARCHITECTURE!r} nor {_SPECULATORS!r}"
        )


def load_eagle_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Read the `config.json` of a head.

    Args:
        folder: Of the head.
        target: The model that it drafts for.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is of something else, a key or value is not supported, or the head is for
            another model.
    """
    check_is_head(folder)
    try:
        return eagle_config_from_hf(_read(folder), target)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs a head reads where its configuration names none, as published.

    Raises:
        ValueError: If the model is too shallow to have them.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if num_layers < 7:
        raise ValueError(
            f"a model of {num_layers} layers has no layers {layers} that differ; name three in "
            f"{_LAYER_IDS}"
        )
    return layers


def layer_like(target: ModelConfig) -> ModelConfig:
    """Describe the layer of a new head: Llama's, with the sizes of a model's layers."""
    return ModelConfig(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=target.rope.theta),
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        sliding_windows=(None,),
        bos_token_id=None,
        eos_token_ids=(),
    )


def eagle_config_from_hf(values: Mapping[str, Any], target: ModelConfig) -> HeadConfig:
    """Map a parsed `config.json`; arguments and errors as `load_eagle_config` has them."""
    if _SPECULATORS in values:
        return _from_speculators(values, target)
    nested = values.get("eagle_config") or {}
    _refuse_unknown(nested, frozenset({_LAYER_IDS, "use_aux_hidden_state"}), "eagle_config")
    if nested.get("use_aux_hidden_state", True) is not True:
        raise ValueError("use_aux_hidden_state must be true; heads of EAGLE-1 are not supported")
    layer = {key: value for key, value in values.items() if key not in _OWN_KEYS}
    # SGLang counts the layers whose output is read, so its layer i is the input of layer i + 1.
    return _config(values, layer, target, layer_ids=nested.get(_LAYER_IDS), offset=1)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of an EAGLE-3 head")
    return read_object(path)


def _is_head(values: Mapping[str, Any]) -> bool:
    return _SPECULATORS in values or values.get("architectures") == [ARCHITECTURE]


def _from_speculators(values: Mapping[str, Any], target: ModelConfig) -> HeadConfig:
    _refuse_unknown(values, _SPECULATORS_KEYS, "an EAGLE-3 head of speculators")
    algorithm = _object(values, _SPECULATORS).get("algorithm")
    if algorithm != "eagle3":
        raise ValueError(f"{_SPECULATORS} has algorithm={algorithm!r}; it must be 'eagle3'")
    if "norm_before_residual" not in values:
        raise ValueError("norm_before_residual is missing; correct the file")
    layer = _object(values, "transformer_layer_config")
    return _config(values, layer, target, layer_ids=values.get(_LAYER_IDS), offset=0)


def _config(
    values: Mapping[str, Any],
    layer: Mapping[str, Any],
    target: ModelConfig,
    *,
    layer_ids: Any,
    offset: int,
) -> HeadConfig:
    if layer.get("model_type", "llama") != "llama":
        raise ValueError(f"model_type={layer['model_type']!r} must be 'llama'")
    kept = {key: value for key, value in layer.items() if key not in _NO_EMBEDDING_KEYS}
    config = config_from_hf(
        {"num_hidden_layers": 1, **kept, "architectures": ["LlamaForCausalLM"],
         "bos_token_id": None, "eos_token_id": None},
    )  # fmt: skip
    size = values.get("target_hidden_size") or target.hidden_size
    for what, value, expected in (
        ("num_hidden_layers", config.num_layers, 1),
        ("attention_bias", config.qkv_bias, False),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", size, target.hidden_size),
    ):
        if value != expected:
            raise ValueError(f"{what}={value!r} must be {expected!r} for this model")
    full = {"draft_vocab_size": None, "norm_before_residual": False, **values}
    if full["draft_vocab_size"] is None:
        full["draft_vocab_size"] = config.vocab_size
    num_drafted = int_of(full, "draft_vocab_size")
    if num_drafted > config.vocab_size:
        raise ValueError(
            f"draft_vocab_size={num_drafted} must be at most vocab_size={config.vocab_size}"
        )
    return HeadConfig(
        method=EAGLE3,
        # WHY: tables of the model's length. Past its own a head drafts worse, and no bit changes.
        layer=dataclasses.replace(config, max_position_embeddings=target.max_position_embeddings),
        feature_layers=_feature_layers(layer_ids, target.num_layers, offset=offset),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=num_drafted,
        norm_before_residual=flag_of(full, "norm_before_residual"),
    )


def _feature_layers(given: Any, num_layers: int, *, offset: int) -> tuple[int, ...]:
    """Layers whose inputs are read, from the ids of a configuration."""
    if given is None:
        return default_feature_layers(num_layers)
    is_list = isinstance(given, list) and all(type(one) is int for one in given)
    if not is_list or len(given) != NUM_FEATURES:
        raise ValueError(f"{_LAYER_IDS}={given!r} must be a list of {NUM_FEATURES} layers")
    layers = tuple(one + offset for one in given)
    if not all(1 <= layer < num_layers for layer in layers):
        raise ValueError(
            f"{_LAYER_IDS}={given!r} must be from {1 - offset} to {num_layers - 1 - offset}: the "
            f"model has {num_layers} layers, and the output of the last one is not read"
        )
    return layers


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    if not isinstance(found, Mapping):
        raise ValueError(f"{key}={found!r:.80} must be an object")
    return found


def _refuse_unknown(values: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"{unknown[0]}={values[unknown[0]]!r:.80} is not a key that detjax knows of {what}, "
            "and one that it ignored could change what the head computes"
        )
