# SPDX-License-Identifier: Apache-2.0
"""Quantise a bfloat16 folder by rounding to nearest, in compressed-tensors' published format.

Nothing is calibrated: a scale is a row's or a group's largest magnitude over half the range of its
codes, and a code is the nearest one. What a calibrated method (GPTQ, AWQ) gains in quality, this
does not have; its formats are the same, and are read by the same code.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from detjax.models.config import ModelConfig
from detjax.models.hf_config import load_config, read_quantization
from detjax.models.identity import copy_text_files
from detjax.models.params import SHARED_TENSORS, ParamRole, TensorSpec, tensor_specs
from detjax.models.quantization.expand import WORD_BITS
from detjax.models.quantization.rounding import to_float8
from detjax.models.weights.ahead import map_ahead
from detjax.models.weights.files import (
    INDEX_NAME,
    SINGLE_NAME,
    StoredTensor,
    open_tensors,
    write_tensors,
)
from detjax.models.weights.load import check_params
from detjax.models.weights.reading import ExpertReading, own_name, readings
from detjax.progress import Progress

GROUP_SIZES = 32, 64, 128
"""Input channels that may share a scale; published checkpoints have these."""

FLOAT8_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a quantisation makes of every matrix of a layer; lm_head and embeddings stay.

    Attributes:
        format: compressed-tensors' name.
        num_bits: Of a weight.
        is_float: Whether a weight is float8_e4m3fn.
        group_size: Input channels that share a scale; 0 is all of them.
        block_rows: Output channels that share one.
        quantizes_activations: Whether the checkpoint asks for activations of the same kind, with a
            scale for each token, and each group of channels if weights have groups.
    """

    format: str
    num_bits: int
    is_float: bool
    group_size: int = 0
    block_rows: int = 1
    quantizes_activations: bool = True

    @property
    def half_range(self) -> float:
        """Half of what the codes span: 448, 127.5 or 7.5."""
        return FLOAT8_MAX if self.is_float else (2**self.num_bits - 1) / 2


RECIPES = {
    "fp8-dynamic": Recipe(format="float-quantized", num_bits=8, is_float=True),
    "fp8-block": Recipe(
        format="float-quantized", num_bits=8, is_float=True, group_size=128, block_rows=128
    ),
    "int8-w8a8": Recipe(format="int-quantized", num_bits=8, is_float=False),
    "int8-w8a16": Recipe(
        format="pack-quantized", num_bits=8, is_float=False, quantizes_activations=False
    ),
    "int4-w4a16": Recipe(
        format="pack-quantized",
        num_bits=4,
        is_float=False,
        group_size=128,
        quantizes_activations=False,
    ),
}
"""By the names that vLLM's and llm-compressor's pages use."""


def quantize_folder(folder: Path, out: Path, recipe: Recipe, *, progress: Progress) -> None:
    """Write a quantised copy of a Hugging Face folder.

    Args:
        folder: Holds config.json and safetensors in bfloat16, float16 or float32.
        out: Made here; must not exist, or be empty.
        recipe: One of `RECIPES`.
        progress: Called after each tensor.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the folder is quantised already, its model is not supported, its tensors are
            not those of its config.json, a matrix has a value that is not finite, or `out` is not
            empty. Nothing is written then but whole
            files of `out`.
    """
    config = load_config(folder)
    if read_quantization(folder) is not None:
        raise ValueError(f"{folder} is quantised already; give the folder that it was made from")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder; give another one")
    matrices = _matrix_names(folder, config)
    # Any dtype of a checkpoint can become float32: its names and shapes are what is checked.
    check_params(folder, config, tp=1, dtype="float32", vocab_block=1)
    if recipe.group_size and (odd := _columns_of_no_group(config, recipe.group_size)):
        sizes = GROUP_SIZES if recipe.block_rows == 1 else ()
        fitting = [size for size in sizes if not _columns_of_no_group(config, size)]
        smaller = f"a group size of {fitting[-1]}, " if fitting else ""
        raise ValueError(
            f"{odd} input channels are not whole groups of {recipe.group_size}; use {smaller}"
            "int8-w8a8, int8-w8a16 or fp8-dynamic"
        )
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(folder, stack)
        _write_files(out, tensors, matrices, recipe, progress)
    copy_text_files(folder, out)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    values["quantization_config"] = {**_settings(recipe), "ignore": _unquantized(tensors, matrices)}
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_files(
    out: Path,
    tensors: dict[str, StoredTensor],
    matrices: set[str],
    recipe: Recipe,
    progress: Progress,
) -> None:
    """A file for each file that was read, and an index unless it is the one that needs none."""
    by_file: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.file.name, []).append(name)
    file_of: dict[str, str] = {}
    done = 0
    for file, names in sorted(by_file.items()):
        made: dict[str, np.ndarray] = {}

        def parts(name: str) -> dict[str, np.ndarray]:
            rows = tensors[name].rows[:]
            if name in matrices:
                return quantize_matrix(name, np.asarray(rows), recipe)
            return {name: np.array(rows)}

        with contextlib.ExitStack() as stack:
            for name, found in zip(
                names, map_ahead(parts, names, os.cpu_count() or 1, stack), strict=True
            ):
                made |= found
                done += 1
                progress(name, done, len(tensors))
        write_tensors(made, out / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(made, file)
    if [*by_file] != [SINGLE_NAME]:
        index = {"metadata": {}, "weight_map": file_of}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def quantize_matrix(name: str, weight: np.ndarray, recipe: Recipe) -> dict[str, np.ndarray]:
    """The tensors of one quantised matrix.

    Args:
        name: Of the matrix, such as "model.layers.0.mlp.down_proj.weight".
        weight: `(output, input channels)`, bfloat16, float16 or float32.
        recipe: How.

    Returns:
        Codes and scales under compressed-tensors' names.

    Raises:
        ValueError: If a value is not finite.

    Numerics:
        scale = bfloat16(max |w| / half range), 1 where a row is zero; code = w / scale in float32,
        to the nearest, ties to even, clipped to the codes' range.
    """
    layer, (n, k) = name.removesuffix(".weight"), weight.shape
    values = weight.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{name!r} holds a value that is not finite; nothing can be its scale")
    groups = values.reshape(n, -1, recipe.group_size or k)
    starts = np.arange(0, n, recipe.block_rows)
    peaks = np.maximum.reduceat(np.abs(groups).max(axis=2), starts, axis=0)
    scale = (peaks / recipe.half_range).astype(ml_dtypes.bfloat16)
    scale[scale == 0] = 1
    of_rows = scale.astype(np.float32).repeat(recipe.block_rows, axis=0)[:n]
    ratio = (groups / of_rows[..., None]).reshape(n, k)
    if recipe.is_float:
        codes = to_float8(np.clip(ratio, -FLOAT8_MAX, FLOAT8_MAX))
        return {name: codes, f"{layer}.weight_scale": scale}
    most = 2 ** (recipe.num_bits - 1)
    codes = np.clip(np.rint(ratio), -most, most - 1).astype(np.int8)
    if recipe.format == "int-quantized":
        return {name: codes, f"{layer}.weight_scale": scale}
    return {
        f"{layer}.weight_packed": pack(codes.astype(np.int16) + most, recipe.num_bits),
        f"{layer}.weight_scale": scale,
        f"{layer}.weight_shape": np.array([n, k], np.int64),
    }


def pack(codes: np.ndarray, num_bits: int) -> np.ndarray:
    """Unsigned codes `(rows, columns)` as int32 words along the columns, the first code lowest."""
    per_word = WORD_BITS // num_bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), np.uint32)
    padded[:, :columns] = codes
    parts = padded.reshape(rows, -1, per_word) << (np.arange(per_word, dtype=np.uint32) * num_bits)
    return np.bitwise_or.reduce(parts, axis=2).view(np.int32)


def _matrix_names(folder: Path, config: ModelConfig) -> set[str]:
    """Names in a folder of the matrices of layers: with experts, without routers and their gates.

    Raises:
        ValueError: If one tensor holds all experts of a layer.
    """
    own = {name for spec in _matrix_specs(config) for name in spec.hf_names}
    plan = readings(config, "bfloat16")
    sources = own | {plan[name].source for name in own if name in plan}
    stacked = {it.source for it in plan.values() if isinstance(it, ExpertReading)}
    with contextlib.ExitStack() as stack:
        published = {name: own_name(name, config) for name in open_tensors(folder, stack)}
    if found := sorted(stacked & set(published.values())):
        raise ValueError(
            f"{found[0]!r} holds all experts of a layer, and one tensor has one kind of scales "
            "here; give a folder with a tensor for each expert"
        )
    return {name for name, plain in published.items() if plain in sources}


def _matrix_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    for layer in tensor_specs(config, tp=1, vocab_block=1)["layers"]:
        for name, spec in layer.items():
            if spec.role is ParamRole.MATRIX or spec.num_experts or name in SHARED_TENSORS:
                yield spec


def _unquantized(tensors: Mapping[str, StoredTensor], matrices: set[str]) -> list[str]:
    """Modules with a matrix that stays as it is, under the names that other servers read."""
    kept = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and name not in matrices
    ]
    return sorted({"lm_head", *kept} - {name for name in kept if name.endswith("embed_tokens")})


def _columns_of_no_group(config: ModelConfig, group_size: int) -> int:
    """Input channels of a matrix that are not whole groups; 0 if all are."""
    sizes = {spec.hf_shape[1] for spec in _matrix_specs(config)}
    return next((size for size in sorted(sizes) if size % group_size), 0)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """`quantization_config`."""
    kind = "float" if recipe.is_float else "int"
    common = {"num_bits": recipe.num_bits, "type": kind, "symmetric": True}
    activations = {**common, "strategy": "token", "dynamic": True}
    weights = {
        **common,
        "strategy": "group" if recipe.group_size else "channel",
        "group_size": recipe.group_size or None,
        "dynamic": False,
    }
    if recipe.block_rows > 1:
        activations |= {"strategy": "group", "group_size": recipe.group_size}
        shape = [recipe.block_rows, recipe.group_size]
        weights |= {"strategy": "block", "group_size": None, "block_structure": shape}
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.format,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if recipe.quantizes_activations else None,
                "output_activations": None,
            }
        },
    }
