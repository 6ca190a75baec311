# SPDX-License-Identifier: Apache-2.0
"""Random low-rank adapters of small models, and folders of them as PEFT saves them."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from detjax.models.adapters.adapter import ADAPTED
from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.peft_config import CONFIG_NAME
from detjax.models.config import ModelConfig
from detjax.models.params import tensor_specs

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(
    config: ModelConfig, *, seed: int, rank: int = 8, scale: float = 2.0, dtype: Any = jnp.bfloat16
) -> Adapter:
    """Return an adapter of every linear layer, large enough to change most tokens."""
    rng, tensors = np.random.default_rng(seed), {}
    for i, layer in enumerate(tensor_specs(config, tp=1, vocab_block=1)["layers"]):
        for name in ADAPTED:
            num_out, num_in = layer[name].hf_shape
            a = rng.standard_normal((rank, num_in), np.float32) * num_in**-0.5
            b = rng.standard_normal((num_out, rank), np.float32) * rank**-0.5
            tensors[i, name] = LowRank(
                a=a.astype(dtype), b=b.astype(dtype), scale=np.float32(scale)
            )
    return Adapter.of(tensors)


def write_adapter_folder(
    folder: Path, config: ModelConfig, *, seed: int, rank: int = 8, **changed: Any
) -> Path:
    """Write a random adapter as PEFT saves it: float32, alpha twice the rank.

    Args:
        folder: Created if it does not exist.
        config: Of the base model.
        seed: As `random_adapter` has it.
        rank: Of every adapter.
        changed: Keys of adapter_config.json.

    Returns:
        The folder.
    """
    folder.mkdir(exist_ok=True)
    values = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS),
        "bias": "none", **changed,
    }  # fmt: skip
    (folder / CONFIG_NAME).write_text(json.dumps(values))
    specs = tensor_specs(config, tp=1, vocab_block=1)["layers"]
    tensors = {}
    for (i, name), one in random_adapter(config, seed=seed, rank=rank).tensors.items():
        module = "base_model.model." + specs[i][name].hf_name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = np.asarray(one.a, np.float32)
        tensors[f"{module}.lora_B.weight"] = np.asarray(one.b, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
