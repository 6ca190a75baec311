# SPDX-License-Identifier: Apache-2.0
"""Writing an EAGLE-3 head as a folder in SGLang's form, which `load_eagle_head` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from detjax.models.config import RopeKind
from detjax.models.heads.config import HeadConfig
from detjax.models.heads.eagle_config import ARCHITECTURE
from detjax.models.weights.files import write_tensors


def save_eagle_head(
    folder: Path, eagle: HeadConfig, tensors: Mapping[str, np.ndarray], ids: np.ndarray
) -> None:
    """Write `config.json` and `model.safetensors`.

    Args:
        folder: Made here if need be.
        eagle: What the head is.
        tensors: With the names and shapes of `tensor_shapes`.
        ids: Token of each row of `lm_head`, ascending.

    Raises:
        ValueError: If the head's rotary embedding is scaled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen = np.zeros(eagle.layer.vocab_size, np.bool_)
    seen[ids] = True
    maps = {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": seen}
    write_tensors({**tensors, **maps}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_values(eagle), indent=2) + "\n")


def hf_values(eagle: HeadConfig) -> dict[str, Any]:
    """The `config.json` of a head."""
    layer = eagle.layer
    if layer.rope.kind is not RopeKind.DEFAULT:
        raise ValueError(f"rope of kind {layer.rope.kind.value!r} must be 'default' in a new head")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": eagle.draft_vocab_size,
        "hidden_size": layer.hidden_size,
        "target_hidden_size": eagle.target_hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "max_position_embeddings": layer.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": eagle.norm_before_residual,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in eagle.feature_layers],
        },
    }
