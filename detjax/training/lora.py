# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) that a trainer trains, and what they are for serving and for PEFT.

Masters are `{"layers": [{"q": {"a": [r, I], "b": [O, r]}, ...}, ...]}`, float32. The forward pass
of training rounds them once to the weights' dtype, as an engine gets them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from detjax.models.adapters.adapter import ADAPTED, PEFT_PREFIX, WEIGHTS_NAME, why_unproven
from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.peft_config import CONFIG_NAME, MAX_RANK
from detjax.models.config import ModelConfig
from detjax.models.params import MATRICES, TENSORS_OF, tensor_specs


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """What is trained in place of the weights: an adapter of every linear module.

    Attributes:
        rank: r.
        alpha: The scale s is `alpha / rank`.
        seed: Of the first values.

    Raises:
        ValueError: If a value is out of range.
    """

    rank: int
    alpha: float
    seed: int = 0

    def __post_init__(self):
        """Check the ranges."""
        if not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"lora_rank={self.rank} must be from 1 to {MAX_RANK}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora_alpha={self.alpha} must be a positive number")

    @property
    def scale(self) -> float:
        """s, rounded once to float32."""
        return float(np.float32(self.alpha / self.rank))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedMaster:
    """A matrix of frozen weights and the masters of its adapter.

    Attributes:
        w: float32 [O, I], of all its tensors one after the other.
        parts: Of each tensor, `{"a": [r, I], "b": [O, r]}`.
        scale: s.
    """

    w: Any
    parts: tuple
    scale: float = field(metadata={"static": True})


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """The shapes of the masters.

    Raises:
        ValueError: If the model cannot have adapters.
    """
    if what := why_unproven(config):
        raise ValueError(
            f"training of adapters of a model with {what} is not supported; train its weights, or "
            "an adapter with PEFT, which is served"
        )
    if config.experts is not None:
        raise ValueError(
            "training of adapters of a model with mixtures of experts is not supported; train its "
            "weights, or an adapter with PEFT, which is served"
        )

    def shapes(num_out: int, num_in: int) -> dict[str, jax.ShapeDtypeStruct]:
        sides = {"a": (lora.rank, num_in), "b": (num_out, lora.rank)}
        return {name: jax.ShapeDtypeStruct(dims, jnp.float32) for name, dims in sides.items()}

    layers = tensor_specs(config, tp=1, vocab_block=1)["layers"]
    return {
        "layers": [
            {name: shapes(*of.hf_shape) for name, of in layer.items() if name in ADAPTED}
            for layer in layers
        ]
    }


def adapter_partitions(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """How the masters lie on ranks that share layers: A by inputs, B by outputs of its matrix.

    Args:
        layers: The partition of each matrix, (out, in).
    """

    def partitions(matrix: P) -> dict[str, P]:
        outputs, inputs = (*matrix, None, None)[:2]
        return {"a": P(None, inputs), "b": P(outputs, None)}

    return {
        "layers": [
            {name: partitions(matrix) for name, matrix in layer.items() if name in ADAPTED}
            for layer in layers
        ]
    }


def first_adapter(config: ModelConfig, lora: LoraConfig, *, seed: int) -> dict[str, Any]:
    """Masters before the first step: A is normal with variance 1 / I, and B is zero, as in PEFT."""
    layers = []
    for i, layer in enumerate(adapter_shapes(config, lora)["layers"]):
        made = {}
        for name, of in layer.items():
            rng = np.random.default_rng([seed, i, *name.encode()])
            a = rng.standard_normal(of["a"].shape, np.float32) * of["a"].shape[1] ** -0.5
            made[name] = {"a": jnp.asarray(a), "b": jnp.zeros(of["b"].shape, jnp.float32)}
        layers.append(made)
    return {"layers": layers}


def with_adapter(base: dict[str, Any], masters: dict[str, Any], lora: LoraConfig) -> dict[str, Any]:
    """Return masters of a model whose matrices have the adapter, for `training.forward`."""

    def layer(weights: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        adapted = {
            name: AdaptedMaster(
                w=jnp.concatenate([weights[tensor] for tensor in TENSORS_OF[name]]),
                parts=tuple(own[tensor] for tensor in TENSORS_OF[name]),
                scale=lora.scale,
            )
            for name in MATRICES
        }
        return weights | adapted

    layers = [layer(*pair) for pair in zip(base["layers"], masters["layers"], strict=True)]
    return {**base, "layers": layers}


def served_adapter(masters: dict[str, Any], lora: LoraConfig, *, dtype: jnp.dtype) -> Adapter:
    """Return the adapter that an engine serves: masters rounded once, to nearest even."""
    tensors = {
        (i, name): LowRank(
            a=np.asarray(own["a"]).astype(dtype),
            b=np.asarray(own["b"]).astype(dtype),
            scale=np.float32(lora.scale),
        )
        for i, layer in enumerate(masters["layers"])
        for name, own in layer.items()
    }
    return Adapter.of(tensors)


def merged(base: dict[str, Any], masters: dict[str, Any], lora: LoraConfig) -> dict[str, Any]:
    """Return masters with the adapter added to the weights: what detjax does not serve.

    The control of experiments. Rounded to bfloat16 they compute other bits than the trainer.
    """

    def layer(weights: Mapping[str, jax.Array], own: Mapping[str, Any]) -> dict[str, jax.Array]:
        added = {
            # WHY: on the host, as a trainer's masters may lie on other devices than the weights.
            name: weights[name]
            + jnp.asarray(np.float32(lora.scale) * (np.asarray(one["b"]) @ np.asarray(one["a"])))
            for name, one in own.items()
        }
        return {**weights, **added}

    layers = [layer(*pair) for pair in zip(base["layers"], masters["layers"], strict=True)]
    return {**base, "layers": layers}


def write_adapter(
    folder: Path, masters: dict[str, Any], lora: LoraConfig, config: ModelConfig
) -> None:
    """Write masters as a folder that PEFT, vLLM and `LLM` read, in float32.

    Args:
        folder: Created if it does not exist.
        masters: Of a trainer's state.
        lora: As they were trained.
        config: Of the base model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers = tensor_specs(config, tp=1, vocab_block=1)["layers"]
    tensors, names = {}, set()
    for specs, own in zip(layers, masters["layers"], strict=True):
        for name, one in own.items():
            module = specs[name].hf_name.removesuffix(".weight")
            names.add(module.rpartition(".")[2])
            for side in "ab":
                key = f"{PEFT_PREFIX}{module}.lora_{side.upper()}.weight"
                tensors[key] = np.asarray(one[side])
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha,
        "target_modules": sorted(names), "bias": "none", "lora_dropout": 0.0,
        "inference_mode": True,
    }  # fmt: skip
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS_NAME)
