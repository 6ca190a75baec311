# SPDX-License-Identifier: Apache-2.0
"""Random low-rank adapters of small models, and folders of them as PEFT saves them."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from detjax.models.adapters.adapter import ADAPTED, ADAPTED_EXPERTS, PEFT_PREFIX
from detjax.models.adapters.expert_tensors import TENSORS, parameter_module, wrapped_names
from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.peft_config import CONFIG_NAME
from detjax.models.config import ModelConfig
from detjax.models.params import tensor_specs


def random_adapter(
    config: ModelConfig, *, seed: int, rank: int = 8, expert_rank: int = 0
) -> Adapter:
    """Return a bfloat16 adapter of every linear layer, large enough to change most tokens.

    Args:
        config: Of the base model.
        seed: Of the values.
        rank: Of the adapters of matrices that are of no expert.
        expert_rank: Of those of experts; 0 is none of them.
    """
    rng, tensors = np.random.default_rng(seed), {}
    names = (*ADAPTED, *(ADAPTED_EXPERTS if expert_rank else ()))
    for i, layer in enumerate(tensor_specs(config, tp=1, vocab_block=1)["layers"]):
        for name in names:
            if name not in layer:
                continue
            (num_out, num_in), lead = layer[name].hf_shape, layer[name].shape[:-2]
            own = expert_rank if lead else rank
            a = rng.standard_normal((*lead, own, num_in), np.float32) * num_in**-0.5
            b = rng.standard_normal((*lead, num_out, own), np.float32) * own**-0.5
            tensors[i, name] = LowRank(
                a=a.astype(jnp.bfloat16), b=b.astype(jnp.bfloat16), scale=np.float32(2)
            )
    return Adapter.of(tensors)


def write_adapter_folder(
    folder: Path,
    config: ModelConfig,
    *,
    seed: int,
    rank: int = 8,
    has_experts: bool = False,
    is_fused: bool = False,
    **changed: Any,
) -> Path:
    """Write a random adapter as PEFT saves it: float32, alpha twice the rank.

    Args:
        folder: Created if it does not exist.
        config: Of the base model.
        seed: As `random_adapter` has it.
        rank: Of every adapter.
        has_experts: Whether it is of the experts too.
        is_fused: Whether their adapters are of the parameters of transformers 5, else of each
            expert's modules. Gates and ups have an A each, so ranks of the parameter are twice as
            many.
        changed: Keys of adapter_config.json.

    Returns:
        The folder.
    """
    folder.mkdir(exist_ok=True)
    adapter = random_adapter(config, seed=seed, rank=rank, expert_rank=rank if has_experts else 0)
    specs = tensor_specs(config, tp=1, vocab_block=1)["layers"]
    tensors, fused = {}, {}
    for (i, name), one in adapter.tensors.items():
        many = one.is_of_experts
        if many and is_fused:
            fused[i, name] = one
            continue
        for a, b, hf_name in zip(
            one.a if many else [one.a], one.b if many else [one.b], specs[i][name].hf_names,
            strict=True,
        ):  # fmt: skip
            tensors |= _sides(hf_name.removesuffix(".weight"), a, b)
    for i in {layer for layer, _ in fused}:
        wrapped = wrapped_names(parameter_module(i), list(TENSORS))
        for parameter, names in TENSORS.items():
            tensors |= _sides(wrapped[parameter], *_fused([fused[i, name] for name in names]))
    values = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": _targets(tensors),
        "bias": "none",
    }  # fmt: skip
    if fused:
        values |= {
            "target_parameters": [f"mlp.experts.{name}" for name in TENSORS],
            "rank_pattern": {"experts.gate_up_proj": 2 * rank},
            "alpha_pattern": {"experts.gate_up_proj": 4 * rank},
        }
    (folder / CONFIG_NAME).write_text(json.dumps(values | changed))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _targets(tensors: dict[str, np.ndarray]) -> list[str]:
    """Last names of the linear modules, as PEFT's users give them."""
    modules = (name.rpartition(".lora_")[0] for name in tensors)
    lasts = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    return [name for name in lasts if name not in ("experts", "base_layer")]


def _sides(module: str, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Both sides of a module, float32, by their names in the file."""
    return {
        f"{PEFT_PREFIX}{module}.lora_{side}.weight": np.ascontiguousarray(values, np.float32)
        for side, values in (("A", a), ("B", b))
    }


def _fused(ones: list[LowRank]) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a parameter whose rows are those of several tensors, as PEFT lays them out."""
    a = np.concatenate([one.a for one in ones], axis=1)
    b = np.zeros((len(a), sum(one.b.shape[1] for one in ones), a.shape[1]), a.dtype)
    row = column = 0
    for one in ones:
        _, rows, rank = one.b.shape
        b[:, row : row + rows, column : column + rank] = one.b
        row, column = row + rows, column + rank
    return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
