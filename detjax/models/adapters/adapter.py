# SPDX-License-Identifier: Apache-2.0
"""An adapter in the host's memory: read from a folder and checked against its base model."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from detjax.models.adapters.expert_tensors import (
    TENSORS,
    parameter_module,
    split_parameter,
    wrapped_names,
)
from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.peft_config import ALL_LINEAR, CONFIG_NAME, PeftConfig, read_peft_config
from detjax.models.config import ModelConfig
from detjax.models.params import (
    ADAPTED_MATRICES,
    EXPERT_MATRICES,
    TENSORS_OF,
    TensorSpec,
    tensor_specs,
)
from detjax.models.registry import family_named
from detjax.models.weights.dtypes import check_conversion, converted
from detjax.models.weights.files import StoredTensor, open_file
from detjax.models.weights.reading import Reading, readings

WEIGHTS_NAME = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT's, before the name of a module of the base model."""

ADAPTED = tuple(name for matrix in ADAPTED_MATRICES for name in TENSORS_OF[matrix])
"""Tensors of a layer that may have an adapter, but for those of experts."""

ADAPTED_EXPERTS = tuple(name for matrix in EXPERT_MATRICES for name in TENSORS_OF[matrix])
"""Tensors of a layer's experts that may have one."""

type Key = tuple[int, str]
"""Layer and name of a tensor, as in `Adapter.tensors`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRows:
    """A tensor of the decoder that has rows of a linear module of the base model.

    Attributes:
        key: Of the tensor.
        reading: Which row of the module each of its rows is.
    """

    key: Key
    reading: Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearModule:
    """A linear module of the base model.

    Attributes:
        shape: Outputs and inputs.
        parts: The tensors that are made of its rows.
        expert: Which expert's it is; None if it is of no expert.
    """

    shape: tuple[int, int]
    parts: tuple[ModuleRows, ...]
    expert: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parameter:
    """A parameter of transformers 5 that has the matrices of all experts of a layer.

    Attributes:
        layer: Which layer's.
        specs: Of the tensors whose rows it has, one after the other, by name.
        path: Its name in the base model.
    """

    layer: int
    specs: Mapping[str, TensorSpec]
    path: str


def read_adapter(
    folder: Path, config: ModelConfig, *, dtype: jnp.dtype, max_rank: int, max_expert_rank: int = 0
) -> Adapter:
    """Read a LoRA adapter that PEFT has saved.

    Args:
        folder: With `adapter_config.json` and `adapter_model.safetensors`.
        config: Of the base model.
        dtype: Of the base model's weights, which values are converted to once.
        max_rank: Highest rank that is taken.
        max_expert_rank: Highest rank that is taken of experts; 0 takes no adapters of them.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the adapter is of another model, asks for what is not supported, has a higher
            rank, or a value that is not finite in `dtype`; the message names it.

    Numerics:
        float32 and float16 to bfloat16 round once, to nearest, ties to even.
    """
    peft = read_peft_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS_NAME}; save the adapter with safe_serialization=True"
        )
    ranks = _Ranks(folder=folder, peft=peft, most=max_rank, most_of_experts=max_expert_rank)
    with contextlib.ExitStack() as stack:
        stored = {name: (tensor, f"{name!r} in {path}") for name, tensor in open_file(path, stack)}
        base = BaseModel(config=config, prefix=_prefix_in(config, stored))
        modules = targeted_modules(peft, base, where=str(folder / CONFIG_NAME))
        parameters = _target_parameters(folder, peft, base)
        if not modules and not parameters:
            raise ValueError(
                f"target_modules={peft.target_modules!r} of {folder / CONFIG_NAME} names no linear "
                f"module of this model, whose layers have {', '.join(base.last_names)}; the "
                "adapter is of another model"
            )
        modules = _without_absent_experts(modules, stored)
        _check_names(path, stored, [*modules, *parameters])
        sides = _Sides(stored=stored, dtype=dtype)
        tensors = _of_modules(sides, modules, ranks, config)
        for name, parameter in parameters.items():
            tensors |= _of_parameter(sides, name, parameter, ranks)
    return Adapter.of(tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranks:
    """Ranks of an adapter's modules, and the highest that are taken."""

    folder: Path
    peft: PeftConfig
    most: int
    most_of_experts: int

    def of(self, module: str, is_of_expert: bool) -> int:
        """The rank of a module.

        Raises:
            ValueError: If it is above the highest that is taken.
        """
        rank = self.peft.rank_of(module)
        most = self.most_of_experts if is_of_expert else self.most
        option = "max_expert_lora_rank" if is_of_expert else "max_lora_rank"
        if rank > most:
            raise ValueError(
                f"{self.folder} has adapters{' of experts' * is_of_expert} of rank {rank}, more "
                f"than {option}={most}; raise it (--{option.replace('_', '-')})"
            )
        return rank


def _stacked(found: Mapping[int, LowRank], num_experts: int, where: str) -> LowRank:
    """The adapters of a layer's experts as one, zeros where an expert has none or a lower rank."""
    first, *others = found.values()
    if any(one.scale != first.scale for one in others):
        raise ValueError(
            f"experts of {where} have scales (alpha / r) of {first.scale} and others, and one of a "
            "layer's experts alone is supported; train them with one rank and one alpha"
        )
    rank = max(one.a.shape[0] for one in found.values())
    a = np.zeros((num_experts, rank, first.a.shape[1]), first.a.dtype)
    b = np.zeros((num_experts, first.b.shape[0], rank), first.b.dtype)
    for expert, one in found.items():
        a[expert, : len(one.a)], b[expert, :, : len(one.a)] = one.a, one.b
    return LowRank(a=a, b=b, scale=first.scale)


def _of_modules(
    sides: "_Sides", modules: Mapping[str, LinearModule], ranks: _Ranks, config: ModelConfig
) -> dict[Key, LowRank]:
    """The adapters of modules, as those of the tensors that are made of their rows."""
    tensors: dict[Key, LowRank] = {}
    of_experts: dict[Key, dict[int, LowRank]] = defaultdict(dict)
    for name, module in modules.items():
        rank = ranks.of(name, module.expert is not None)
        num_out, num_in = module.shape
        a, b = sides.read(name, "A", (rank, num_in)), sides.read(name, "B", (num_out, rank))
        for part in module.parts:
            one = LowRank(a=a, b=b[part.reading.order], scale=ranks.peft.scale_of(name))
            if module.expert is None:
                tensors[part.key] = one
            else:
                of_experts[part.key][module.expert] = one
    for (layer, name), found in of_experts.items():
        num_experts = config.experts.num_experts if config.experts else 0
        tensors[layer, name] = _stacked(found, num_experts, f"layer {layer} of {ranks.folder}")
    return tensors


def _of_parameter(
    sides: "_Sides", name: str, parameter: _Parameter, ranks: _Ranks
) -> dict[Key, LowRank]:
    """The adapter of a parameter, as those of the tensors whose rows it has."""
    specs = list(parameter.specs.values())
    num_experts, (rows, num_in) = specs[0].num_experts, specs[0].hf_shape
    rank = ranks.of(parameter.path, True)
    a, b = split_parameter(
        sides.read(name, "A", None), sides.read(name, "B", None),
        num_experts=num_experts, rank=rank, shape=(rows * len(specs), num_in), where=sides.at(name),
    )  # fmt: skip
    scale = ranks.peft.scale_of(parameter.path)
    return {
        (parameter.layer, tensor): LowRank(
            a=a, b=np.ascontiguousarray(b[:, i * rows : (i + 1) * rows]), scale=scale
        )
        for i, tensor in enumerate(parameter.specs)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """The modules of a base model, by the names that an adapter has for them.

    Attributes:
        config: Of the model.
        prefix: What stands before "layers." there.
        adapted: Tensors of a layer that may have an adapter.
    """

    config: ModelConfig
    prefix: str = "model."
    adapted: tuple[str, ...] = (*ADAPTED, *ADAPTED_EXPERTS)

    @property
    def layers(self) -> list[dict[str, TensorSpec]]:
        """The tensors of each layer, as the decoder has them."""
        return tensor_specs(self.config, tp=1, vocab_block=1)["layers"]

    def named(self, module: str) -> str:
        """The adapter's name of a module or a tensor."""
        name = module.removesuffix(".weight")
        return self.prefix + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name

    @property
    def modules(self) -> dict[str, LinearModule]:
        """Each linear module of the layers that may have an adapter."""
        plan, found = readings(self.config, jnp.dtype(jnp.bfloat16)), {}
        for i, layer in enumerate(self.layers):
            for name in self.adapted:
                if name not in layer:
                    continue
                spec = layer[name]
                num_out, num_in = spec.hf_shape
                for expert, hf_name in enumerate(spec.hf_names):
                    reading = plan.get(hf_name) or Reading(
                        name=hf_name, source=hf_name, source_rows=num_out, start=0, num_rows=num_out
                    )
                    if not isinstance(reading, Reading):
                        continue  # one tensor holds all experts, and no module is of one of them
                    module = self.named(reading.source)
                    before = found[module].parts if module in found else ()
                    found[module] = LinearModule(
                        shape=(reading.source_rows, num_in),
                        parts=(*before, ModuleRows(key=(i, name), reading=reading)),
                        expert=expert if spec.num_experts else None,
                    )
        return found

    @property
    def last_names(self) -> list[str]:
        """What modules are called in their layers."""
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.modules))

    @property
    def without_place(self) -> Iterator[str]:
        """`lm_head`, embeddings, routers, and modules of tensors that are not `adapted`."""
        others = [name for name in (*ADAPTED, *ADAPTED_EXPERTS) if name not in self.adapted]
        yield from ("lm_head", self.named("model.embed_tokens"))
        for layer in self.layers:
            for name in (*TENSORS_OF["router"], *others):
                if name in layer:
                    yield from map(self.named, layer[name].hf_names)


_PREFIX = "model."
"""What stands before "layers." in names of the decoder's tensors."""


def _prefix_in(config: ModelConfig, stored: Mapping[str, object]) -> str:
    """What stands before "layers." in an adapter's names of modules.

    It is longer where PEFT had a model that has the decoder among other parts.
    """
    family = family_named(config.family)
    wrapper = None if family is None else family.wrapper
    longer = (
        [] if wrapper is None else [outer for outer, own in wrapper.names.items() if own == _PREFIX]
    )
    begins = (
        outer for outer in longer if any(name.startswith(PEFT_PREFIX + outer) for name in stored)
    )
    return next(begins, _PREFIX)


def targeted_modules(peft: PeftConfig, base: BaseModel, *, where: str) -> dict[str, LinearModule]:
    """The linear modules that have an adapter, by their names in the base model.

    Args:
        peft: Says which.
        base: The base model.
        where: What is at fault if one has no place for an adapter.

    Raises:
        ValueError: If so.
    """
    for module in base.without_place:
        if peft.is_target(module) and peft.target_modules != ALL_LINEAR:
            raise ValueError(
                f"{where} targets {module!r}, and adapters of it are not supported; train without "
                "it"
            )
    return {name: module for name, module in base.modules.items() if peft.is_target(name)}


def _without_absent_experts(
    modules: Mapping[str, LinearModule], stored: Mapping[str, object]
) -> Mapping[str, LinearModule]:
    """The modules, without those of experts if the file has none of them.

    Experts of transformers 5 have no modules, so that a name of theirs in `target_modules` is of
    dense layers alone there.
    """
    experts = [name for name, module in modules.items() if module.expert is not None]
    if any(_side(name, side) in stored for name in experts for side in "AB"):
        return modules
    return {name: module for name, module in modules.items() if module.expert is None}


def _target_parameters(folder: Path, peft: PeftConfig, base: BaseModel) -> dict[str, _Parameter]:
    """The parameters of experts that have an adapter, by what PEFT calls it."""
    targets, matched = {}, set()
    for i, layer in enumerate(base.layers):
        if ADAPTED_EXPERTS[0] not in layer:
            continue
        module = base.named(parameter_module(i))
        paths = {name: f"{module}.{name}" for name in TENSORS}
        chosen = [name for name, path in paths.items() if peft.is_target_parameter(path)]
        for name, wrapped in wrapped_names(module, chosen).items():
            specs = {tensor: layer[tensor] for tensor in TENSORS[name]}
            targets[wrapped] = _Parameter(layer=i, specs=specs, path=paths[name])
            matched |= {it for it in peft.target_parameters if f".{paths[name]}".endswith(f".{it}")}
    if others := [one for one in peft.target_parameters if one not in matched]:
        raise ValueError(
            f"target_parameters of {folder / CONFIG_NAME} has {others[0]!r}, and only "
            "'mlp.experts.gate_up_proj' and 'mlp.experts.down_proj' of a mixture of experts are "
            "supported; train without it"
        )
    return targets


def _side(module: str, side: str) -> str:
    """The name of one side of a module's adapter."""
    return f"{PEFT_PREFIX}{module}.lora_{side}.weight"


def _check_names(path: Path, stored: Mapping[str, object], modules: Sequence[str]) -> None:
    wanted = {_side(module, side) for module in modules for side in "AB"}
    if unknown := [name for name in stored if name not in wanted]:
        raise ValueError(
            f"{path} holds {unknown[0]!r}, which adapter_config.json and this model have no place "
            "for; DoRA, modules_to_save and embeddings are not supported, and an adapter goes with "
            "its own base model alone"
        )
    if missing := sorted(wanted.difference(stored)):
        raise ValueError(
            f"{path} lacks {len(missing)} of {len(wanted)} tensors, such as {missing[0]!r}; the "
            "adapter is of another model, or its two files do not belong together"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sides:
    """The matrices in a file, by `_side`, and what they are converted to."""

    stored: Mapping[str, tuple[StoredTensor, str]]
    dtype: jnp.dtype

    def at(self, module: str) -> str:
        """Where a module's adapter is, for messages."""
        return self.stored[_side(module, "A")][1]

    def read(self, module: str, side: str, shape: tuple[int, int] | None) -> np.ndarray:
        """One side of a module's adapter. A shape of None is not checked here."""
        return _values(*self.stored[_side(module, side)], shape, self.dtype)


def _values(
    tensor: StoredTensor, where: str, shape: tuple[int, int] | None, dtype: jnp.dtype
) -> np.ndarray:
    """A tensor in the weights' dtype."""
    if shape is not None and tensor.shape != shape:
        raise ValueError(
            f"{where} has shape {tensor.shape}, and the base model and adapter_config.json make it "
            f"{shape}; the adapter is of another model"
        )
    # WHY: trainers keep adapters in float32 or float16 beside a model in bfloat16, and the adapter
    # is defined as what they are rounded to.
    check_conversion(where, tensor.dtype, dtype=dtype, can_cast=True)
    values = np.array(converted(tensor.rows[:], dtype, name=where))  # the file may change
    if not np.isfinite(values.astype(np.float32)).all():
        raise ValueError(f"{where} has a value that is not finite; the adapter is damaged")
    return values
