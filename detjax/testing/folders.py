# SPDX-License-Identifier: Apache-2.0
"""Folders in Hugging Face format, of small models with random weights."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from detjax.models.hf_config import config_from_hf
from detjax.models.params import tensor_specs
from detjax.models.weights.files import open_tensors


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer of 256 tokens, one byte each, in order of their characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


SMALL_MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
"""A config.json of a small mixture of experts."""


def write_model_folder(
    folder: Path,
    config: Mapping[str, Any],
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    scale: float = 1.0,
) -> Path:
    """Write config, a tokenizer of bytes and normal weights in bfloat16.

    Args:
        folder: Created if it does not exist.
        config: Content of config.json.
        tokenizer_config: Content of tokenizer_config.json; None writes none.
        scale: Standard deviation of the weights.

    Returns:
        The folder.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    rng, tensors = np.random.default_rng(5), {}
    for spec in jax.tree.leaves(tensor_specs(config_from_hf(config), tp=1, vocab_block=128)):
        for name in spec.hf_names:
            values = scale * rng.standard_normal(spec.hf_shape, np.float32)
            tensors[name] = np.asarray(jnp.asarray(values, jnp.bfloat16))
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_settings(folder: Path, settings: dict[str, Any] | Callable, **parts) -> Path:
    """Give a quantised folder other settings, and each of its matrices other parts.

    Args:
        folder: Of `quantize_folder`.
        settings: What takes the place of `quantization_config`, or what changes it.
        parts: By name, the values of a layer.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if callable(settings):
        settings(config["quantization_config"])
    else:
        config["quantization_config"] = settings
    path.write_text(json.dumps(config))
    with contextlib.ExitStack() as stack:
        tensors = {name: np.array(it.rows) for name, it in open_tensors(folder, stack).items()}
    layers = [name.removesuffix(".weight_scale") for name in tensors if "weight_scale" in name]
    for part, value in parts.items():
        tensors |= {f"{layer}.{part}": np.asarray(value(layer), np.float32) for layer in layers}
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_static(settings: dict[str, Any]) -> None:
    """Say in a `quantization_config` that the checkpoint holds the scales of activations."""
    [group] = settings["config_groups"].values()
    group["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
