# SPDX-License-Identifier: Apache-2.0
"""What `adapter_config.json` says of an adapter. What is not supported is refused by its name."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from detjax.models.adapters.limits import MAX_RANK
from detjax.models.hf_values import read_object

CONFIG_NAME = "adapter_config.json"

ALL_LINEAR = "all-linear"

_USED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules", "bias",
    "init_lora_weights", "target_parameters",
}  # fmt: skip
_INERT = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    "loftq_config", "eva_config", "lora_ga_config",
}  # fmt: skip
"""Keys that change no product of a trained adapter: they were of its training."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")
"""Values of `init_lora_weights` that replace the weights of the base model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A LoRA adapter as PEFT describes it.

    Attributes:
        rank: `r`, of modules that no pattern names.
        alpha: `lora_alpha`, likewise.
        use_rslora: Whether the scale is `alpha / sqrt(r)` and not `alpha / r`.
        target_modules: A regular expression, or names that modules end with.
        exclude_modules: Likewise, of modules that have no adapter.
        rank_pattern: Ranks by regular expression.
        alpha_pattern: Alphas by regular expression.
        layers: Layers that have adapters; None is all.
        target_parameters: Names that parameters without a linear module end with.
    """

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    layers: tuple[int, ...] | None
    target_parameters: tuple[str, ...]

    def is_target_parameter(self, parameter: str) -> bool:
        """Whether a parameter of the model has an adapter of its own, by PEFT's rules."""
        return matches(self.target_parameters, parameter)

    def is_target(self, module: str) -> bool:
        """Whether a linear module of the model has an adapter, by PEFT's rules."""
        if matches(self.exclude_modules, module):
            return False
        if self.target_modules == ALL_LINEAR:
            return module.rpartition(".")[2] != "lm_head"
        is_target = matches(self.target_modules, module)
        if isinstance(self.target_modules, str) or self.layers is None:
            return is_target
        index = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return is_target and index is not None and int(index[1]) in self.layers

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> np.float32:
        """What multiplies a module's `A x`, rounded once to float32."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return np.float32(alpha / (math.sqrt(rank) if self.use_rslora else rank))


def matches(targets: str | tuple[str, ...], module: str) -> bool:
    """Whether a module's name is one of these or ends with it, or is what an expression says."""
    if isinstance(targets, str):
        return bool(targets) and re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _by_pattern[V](patterns: Mapping[str, V], module: str, default: V) -> V:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_peft_config(folder: Path) -> PeftConfig:
    """Read a folder's `adapter_config.json`.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or asks for what is not supported, naming the key.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG_NAME}; give a folder that PEFT's save_pretrained has written"
        )
    values = read_object(path)
    _refuse_unsupported(path, values)
    read = _Reader(path, values)
    return PeftConfig(
        rank=read.rank("r", values.get("r", 8)),
        alpha=read.number("lora_alpha", values.get("lora_alpha", 8)),
        use_rslora=bool(values.get("use_rslora")),
        target_modules=read.modules("target_modules"),
        exclude_modules=read.modules("exclude_modules"),
        rank_pattern=read.patterns("rank_pattern", read.rank),
        alpha_pattern=read.patterns("alpha_pattern", read.number),
        layers=read.layers(),
        target_parameters=read.names("target_parameters"),
    )


def _refuse_unsupported(path: Path, values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise ValueError(
            f"{path} has peft_type={values.get('peft_type')!r}; adapters of peft_type 'LORA' alone "
            "are supported"
        )
    if values.get("bias", "none") != "none":
        raise ValueError(
            f"{path} has bias={values['bias']!r}, and adapters with biases are not supported; "
            "train with bias='none'"
        )
    init = values.get("init_lora_weights", True)
    if isinstance(init, str) and init.startswith(_CHANGES_BASE):
        raise ValueError(
            f"{path} has init_lora_weights={init!r}, which changes the base model's weights; "
            "convert the adapter with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for name, value in values.items():
        # A key of a later PEFT that says nothing changes nothing.
        if name not in _USED | _INERT and value not in (None, False, [], {}, ""):
            raise ValueError(
                f"{path} has {name}={value!r:.80}, which is not supported; detjax computes "
                "plain LoRA only, W x + scale * B A x"
            )


class _Reader:
    """Values of a configuration with their types checked."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self._path, self._values = path, values

    def _fault(self, name: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self._path} has {name}={value!r:.80}, which is not {wanted}")

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self._fault(name, value, f"a rank from 1 to {MAX_RANK}")
        return value

    def number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise self._fault(name, value, "a finite number")
        return float(value)

    def modules(self, name: str) -> str | tuple[str, ...]:
        value = self._values.get(name) or ()
        if isinstance(value, str):
            self._check_pattern(name, value)
            return value
        return self.names(name, "a text or a list of texts")

    def names(self, name: str, wanted: str = "a list of texts") -> tuple[str, ...]:
        value = self._values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self._fault(name, value, wanted)
        return tuple(value)

    def patterns[V](self, name: str, read: Callable[[str, Any], V]) -> dict[str, V]:
        value = self._values.get(name) or {}
        if not isinstance(value, dict):
            raise self._fault(name, value, "an object")
        for pattern in value:
            self._check_pattern(name, pattern)
        return {pattern: read(f"{name}[{pattern!r}]", one) for pattern, one in value.items()}

    def layers(self) -> tuple[int, ...] | None:
        value = self._values.get("layers_to_transform")
        if self._values.get("layers_pattern") not in (None, "layers", ["layers"], [], ""):
            raise self._fault("layers_pattern", self._values["layers_pattern"], "'layers'")
        if value is None or value == []:
            return None
        indices = [value] if type(value) is int else value
        if not isinstance(indices, list) or not all(type(i) is int for i in indices):
            raise self._fault("layers_to_transform", value, "an index or a list of indices")
        return tuple(indices)

    def _check_pattern(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise self._fault(name, pattern, f"a regular expression ({error})") from error
