# SPDX-License-Identifier: Apache-2.0
"""An adapter in the host's memory: read from a folder and checked against its base model."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.peft_config import CONFIG_NAME, PeftConfig, read_peft_config
from detjax.models.config import Gating, ModelConfig, NormPlacement
from detjax.models.params import MATRICES, TENSORS_OF, TensorSpec, tensor_specs
from detjax.models.weights.dtypes import check_conversion, converted
from detjax.models.weights.files import StoredTensor, open_file

WEIGHTS_NAME = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT's, before the name of a module of the base model."""

ADAPTED = tuple(name for matrix in MATRICES for name in TENSORS_OF[matrix])
"""Tensors of a layer that may have an adapter."""


def check_can_adapt(config: ModelConfig) -> None:
    """Refuse a model whose layers cannot have adapters.

    Raises:
        ValueError: Naming what the model has.
    """
    layer = tensor_specs(config, tp=1, vocab_block=1)["layers"][0]
    names = [layer[name].hf_name for name in ADAPTED if name in layer]
    ropes = (config.rope, *config.other_ropes)
    unsupported = {
        "mixtures of experts": config.experts is not None,
        "norms behind its products": config.norms is not NormPlacement.BEFORE,
        "linear attention": config.linear_attention is not None,
        "gates by GELU": config.gating is not Gating.SWIGLU,
        "rotary pairs of neighbouring channels": any(rope.is_interleaved for rope in ropes),
        "several projections in one tensor": len(set(names)) < len(names),
    }
    for what, is_there in unsupported.items():
        if is_there:
            raise ValueError(
                f"adapters of a model with {what} are not supported; leave enable_lora out"
            )


def read_adapter(folder: Path, config: ModelConfig, *, dtype: jnp.dtype, max_rank: int) -> Adapter:
    """Read a LoRA adapter that PEFT has saved.

    Args:
        folder: With `adapter_config.json` and `adapter_model.safetensors`.
        config: Of the base model.
        dtype: Of the base model's weights, which values are converted to once.
        max_rank: Highest rank that is taken.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the adapter is of another model, asks for what is not supported, has a higher
            rank, or a value that is not finite in `dtype`; the message names it.

    Numerics:
        float32 to bfloat16 rounds once, to nearest, ties to even. float16 is refused with bfloat16.
    """
    check_can_adapt(config)
    peft = read_peft_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS_NAME}; save the adapter with safe_serialization=True"
        )
    modules = dict(_modules(config))
    targets = _targets(folder, peft, modules)
    with contextlib.ExitStack() as stack:
        stored = {name: (tensor, f"{name!r} in {path}") for name, tensor in open_file(path, stack)}
        wanted = {
            f"{PEFT_PREFIX}{module}.lora_{side}.weight": (module, side)
            for module in targets
            for side in "AB"
        }
        _check_names(path, stored, wanted)
        tensors = {}
        for module in targets:
            key, spec = modules[module]
            rank = peft.rank_of(module)
            if rank > max_rank:
                raise ValueError(
                    f"{folder} has adapters of rank {rank}, more than max_lora_rank={max_rank}; "
                    "raise it (--max-lora-rank)"
                )
            num_out, num_in = spec.hf_shape
            a, b = (
                _values(*stored[f"{PEFT_PREFIX}{module}.lora_{side}.weight"], shape, dtype)
                for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank)))
            )
            tensors[key] = LowRank(a=a, b=b, scale=peft.scale_of(module))
    return Adapter.of(tensors)


def _modules(config: ModelConfig) -> Iterator[tuple[str, tuple[tuple[int, str], TensorSpec]]]:
    """Each linear module of the layers: name in the base model, key of an `Adapter`, shape."""
    for i, layer in enumerate(tensor_specs(config, tp=1, vocab_block=1)["layers"]):
        for name in ADAPTED:
            yield layer[name].hf_name.removesuffix(".weight"), ((i, name), layer[name])


def _targets(folder: Path, peft: PeftConfig, modules: Mapping[str, object]) -> list[str]:
    """The modules that have an adapter."""
    for module in ("lm_head", "model.embed_tokens"):
        if peft.is_target(module) and peft.target_modules != "all-linear":
            raise ValueError(
                f"{folder / CONFIG_NAME} targets {module!r}, and adapters of it are not supported; "
                "train without it"
            )
    targets = [module for module in modules if peft.is_target(module)]
    if not targets:
        raise ValueError(
            f"target_modules={peft.target_modules!r} of {folder / CONFIG_NAME} names no linear "
            f"module of this model, whose layers have {', '.join(_last_names(modules))}; the "
            "adapter is of another model"
        )
    return targets


def _last_names(modules: Mapping[str, object]) -> list[str]:
    return list(dict.fromkeys(module.rpartition(".")[2] for module in modules))


def _check_names(path: Path, stored: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    if unknown := [name for name in stored if name not in wanted]:
        raise ValueError(
            f"{path} holds {unknown[0]!r}, which adapter_config.json and this model have no place "
            "for; DoRA, modules_to_save and embeddings are not supported, and an adapter goes with "
            "its own base model alone"
        )
    if missing := [name for name in wanted if name not in stored]:
        raise ValueError(
            f"{path} lacks {len(missing)} of {len(wanted)} tensors, such as {missing[0]!r}; the "
            "adapter is of another model, or its two files do not belong together"
        )


def _values(
    tensor: StoredTensor, where: str, shape: tuple[int, int], dtype: jnp.dtype
) -> np.ndarray:
    """A tensor in the weights' dtype."""
    if tensor.shape != shape:
        raise ValueError(
            f"{where} has shape {tensor.shape}, and the base model and adapter_config.json make it "
            f"{shape}; the adapter is of another model"
        )
    if tensor.dtype == "F16" and dtype == jnp.bfloat16:
        raise ValueError(
            f"{where} is float16, whose 11 significant bits do not fit the 8 of bfloat16; save the "
            "adapter in float32, which is rounded once, or in bfloat16"
        )
    check_conversion(where, tensor.dtype, dtype=dtype, can_cast=False)
    values = np.array(converted(tensor.rows[:], dtype, name=where))  # the file may change
    if not np.isfinite(values.astype(np.float32)).all():
        raise ValueError(f"{where} has a value that is not finite; the adapter is damaged")
    return values
