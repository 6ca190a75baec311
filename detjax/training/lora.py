# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) that a trainer trains, and what they are for serving and for PEFT.

Masters are `{"layers": [{"q": {"a": [r, I], "b": [O, r]}, ...}, ...]}`, float32, and of experts
`{"expert_up": {"a": [U, r, I], "b": [U, O, r]}, ...}`. The forward pass of training rounds them
once to the weights' dtype, as an engine gets them.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from detjax.models.adapters.adapter import (
    ADAPTED,
    ADAPTED_EXPERTS,
    PEFT_PREFIX,
    WEIGHTS_NAME,
    BaseModel,
    targeted_modules,
)
from detjax.models.adapters.limits import MAX_RANK
from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.peft_config import (
    ALL_LINEAR,
    CONFIG_NAME,
    PeftConfig,
    matches,
)
from detjax.models.config import ModelConfig
from detjax.models.params import (
    EXPERT_MATRICES,
    MATRICES,
    TENSORS_OF,
    TensorSpec,
    join,
    tensor_specs,
    tensors_in,
)
from detjax.models.weights.files import write_tensors
from detjax.models.weights.reading import readings

TRAINED = tuple(name for matrix in (*MATRICES, *EXPERT_MATRICES) for name in TENSORS_OF[matrix])
"""Tensors of a layer of which an adapter can be trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """What is trained in place of the weights: an adapter of linear modules.

    Attributes:
        rank: r, of every module.
        alpha: The scale s is `alpha / rank`.
        seed: Of the first values.
        target_modules: Names that the modules end with, as PEFT has them. `all-linear` are all that
            may have an adapter, those of experts included.

    Raises:
        ValueError: If a value is out of range.
    """

    rank: int
    alpha: float
    seed: int = 0
    target_modules: str | tuple[str, ...] = ALL_LINEAR

    def __post_init__(self):
        """Check the ranges."""
        if not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"lora_rank={self.rank} must be from 1 to {MAX_RANK}")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora_alpha={self.alpha} must be a positive number")
        names = self.target_modules
        if names != ALL_LINEAR and (isinstance(names, str) or not names):
            raise ValueError(f"target_modules={names!r} must be {ALL_LINEAR!r} or a tuple of names")

    @property
    def scale(self) -> float:
        """s, rounded once to float32."""
        return float(np.float32(self.alpha / self.rank))

    @property
    def peft(self) -> PeftConfig:
        """The same, as PEFT says it."""
        return PeftConfig(
            rank=self.rank, alpha=self.alpha, use_rslora=False, target_modules=self.target_modules,
            exclude_modules=(), rank_pattern={}, alpha_pattern={}, layers=None,
            target_parameters=(),
        )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedMaster:
    """A matrix of frozen weights, or those of a layer's experts, and the masters of its adapter.

    Attributes:
        w: float32 [O, I], of all its tensors one after the other; [U, O, I] of experts.
        parts: Of each tensor, `{"a": [r, I], "b": [O, r]}`, with U as w; None if it has no adapter.
        widths: Rows of each tensor.
        rank: r.
        scale: s.
    """

    w: Any
    parts: tuple
    widths: tuple[int, ...] = field(metadata={"static": True})
    rank: int = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})


def _base_model(config: ModelConfig) -> BaseModel:
    """Its modules, of which those of shared experts have no place for an adapter."""
    return BaseModel(config=config, adapted=TRAINED)


def _untrained(config: ModelConfig) -> dict[str, bool]:
    """Features of a model whose adapters are served and not trained, and whether it has them."""
    layer = tensor_specs(config, tp=1, vocab_block=1)["layers"][0]
    plan = readings(config, jnp.dtype(jnp.bfloat16))
    matrices = [layer[name].hf_name for name in ADAPTED if name in layer]
    return {
        "linear attention": config.linear_attention is not None,
        "rows that the decoder reads in another order": any(name in plan for name in matrices),
    }


def adapted_tensors(config: ModelConfig, lora: LoraConfig) -> list[list[str]]:
    """Of each layer the tensors that get an adapter.

    Raises:
        ValueError: If the model cannot have adapters, or if `target_modules` names no module of it,
            one that has no place for an adapter, or some experts of a layer without the others.
    """
    if what := next((what for what, is_there in _untrained(config).items() if is_there), None):
        raise ValueError(
            f"training of adapters of a model with {what} is not supported; train its weights, "
            "or an adapter with PEFT, which is served"
        )
    where, base = f"target_modules={lora.target_modules!r}", _base_model(config)
    found = targeted_modules(lora.peft, base, where=where)
    names = () if isinstance(lora.target_modules, str) else lora.target_modules
    if unused := [one for one in names if not any(matches((one,), module) for module in found)]:
        raise ValueError(
            f"{where} has {unused[0]!r}, and no linear module of this model ends with it; its "
            f"layers have {', '.join(base.last_names)}"
        )
    layers = tensor_specs(config, tp=1, vocab_block=1)["layers"]
    counts = Counter(part.key for module in found.values() for part in module.parts)
    if config.has_clamped_experts and any(name in ADAPTED_EXPERTS for _, name in counts):
        raise ValueError(
            f"{where} names experts with biases and a clamp, whose adapters are served and not "
            "trained; name modules of attention, such as ('q_proj', 'v_proj', 'o_proj')"
        )
    for (i, name), count in counts.items():
        if count < len(layers[i][name].hf_names):
            raise ValueError(
                f"{where} names {count} of the {layers[i][name].num_experts} experts of layer {i}, "
                "and their adapters are trained together; name all of them or none"
            )
    return [[name for name in TRAINED if (i, name) in counts] for i in range(len(layers))]


def adapts_experts(config: ModelConfig, lora: LoraConfig) -> bool:
    """Whether an adapter is of experts too. Errors are those of `adapted_tensors`."""
    return any(name in ADAPTED_EXPERTS for names in adapted_tensors(config, lora) for name in names)


def adapter_shapes(config: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """The shapes of the masters. Errors are those of `adapted_tensors`."""

    def shapes(spec: TensorSpec) -> dict[str, jax.ShapeDtypeStruct]:
        *lead, num_out, num_in = spec.source_shape
        sides = {"a": (*lead, lora.rank, num_in), "b": (*lead, num_out, lora.rank)}
        return {name: jax.ShapeDtypeStruct(dims, jnp.float32) for name, dims in sides.items()}

    layers = tensor_specs(config, tp=1, vocab_block=1)["layers"]
    pairs = zip(layers, adapted_tensors(config, lora), strict=True)
    return {"layers": [{name: shapes(layer[name]) for name in names} for layer, names in pairs]}


def adapter_partitions(layers: list[dict[str, Any]], masters: dict[str, Any]) -> dict[str, Any]:
    """How the masters lie on ranks that share layers: A by inputs, B by outputs of its matrix.

    Args:
        layers: The partition of each matrix, (out, in).
        masters: Of the adapter, or their shapes.
    """

    def partitions(matrix: P) -> dict[str, P]:
        outputs, inputs = (*matrix, None, None)[:2]
        return {"a": P(None, inputs), "b": P(outputs, None)}

    pairs = zip(layers, masters["layers"], strict=True)
    return {"layers": [{name: partitions(layer[name]) for name in own} for layer, own in pairs]}


def first_adapter(config: ModelConfig, lora: LoraConfig, *, seed: int) -> dict[str, Any]:
    """Masters before the first step: A is normal with variance 1 / I, and B is zero, as in PEFT."""
    layers = []
    for i, layer in enumerate(adapter_shapes(config, lora)["layers"]):
        made = {}
        for name, of in layer.items():
            rng = np.random.default_rng([seed, i, *name.encode()])
            a = rng.standard_normal(of["a"].shape, np.float32) * of["a"].shape[-1] ** -0.5
            made[name] = {"a": jnp.asarray(a), "b": jnp.zeros(of["b"].shape, jnp.float32)}
        layers.append(made)
    return {"layers": layers}


def with_adapter(base: dict[str, Any], masters: dict[str, Any], lora: LoraConfig) -> dict[str, Any]:
    """Return masters of a model whose matrices have the adapter, for `training.forward`."""

    def adapted(weights: dict[str, Any], own: dict[str, Any], name: str) -> AdaptedMaster:
        names = tensors_in(weights, name)
        tensors = [weights[tensor] for tensor in names]
        return AdaptedMaster(
            w=join(tensors, tp=1),
            parts=tuple(own.get(tensor) for tensor in names),
            widths=tuple(tensor.shape[-2] for tensor in tensors),
            rank=lora.rank,
            scale=lora.scale,
        )

    def layer(weights: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        # A layer's experts are one operation, with adapters or without.
        groups = [(name,) for name in MATRICES] + [EXPERT_MATRICES]
        names = [
            name
            for group in groups
            if any(tensor in own for one in group for tensor in TENSORS_OF[one])
            for name in group
        ]
        return weights | {name: adapted(weights, own, name) for name in names}

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
    tensors = {}
    for specs, own in zip(layers, masters["layers"], strict=True):
        for name, one in own.items():
            modules = [hf_name.removesuffix(".weight") for hf_name in specs[name].hf_names]
            for side in "ab":
                values = np.asarray(one[side])
                of_modules = values if specs[name].num_experts else [values]
                for module, matrix in zip(modules, of_modules, strict=True):
                    key = f"{PEFT_PREFIX}{module}.lora_{side.upper()}.weight"
                    tensors[key] = np.ascontiguousarray(matrix)
    targets, exclude = _named_targets(config, lora)
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha,
        "target_modules": targets, "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
    if exclude:
        values["exclude_modules"] = exclude
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")
    write_tensors(tensors, folder / WEIGHTS_NAME)


def _named_targets(config: ModelConfig, lora: LoraConfig) -> tuple[list[str], list[str]]:
    """Names of the modules that have an adapter, and of those that are named alike and have none.

    All are named, as `all-linear` has modules for PEFT that have no place for an adapter here.
    """
    if not isinstance(lora.target_modules, str):
        return sorted(lora.target_modules), []
    base = _base_model(config)
    targets = sorted(base.last_names)
    alike = (name for name in base.without_place if matches(tuple(targets), name))
    return targets, sorted({re.sub(r"model\.layers\.\d+\.", "", name) for name in alike})
