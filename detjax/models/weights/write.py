# SPDX-License-Identifier: Apache-2.0
"""A model as a folder in Hugging Face format: `load_params` reads its weights back bit for bit."""

import contextlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from detjax.interpreter_exit import refuse_at_exit
from detjax.models.config import ModelConfig
from detjax.models.hf_config import read_quantization
from detjax.models.params import Params, checkpoint_rows, param_specs
from detjax.models.quantization.expand import expand_tensors
from detjax.models.weights.assemble import dismantle
from detjax.models.weights.files import INDEX_NAME, open_tensors, write_tensors
from detjax.models.weights.host import have_same_bits
from detjax.models.weights.load import INERT_TENSORS
from detjax.models.weights.reading import own_name, readings_by_source, written_tensor

FILE_BYTES = 5 * 10**9
"""Most bytes of a file, unless one tensor has more."""

Named = tuple[str, np.ndarray]


def check_can_write(folder: Path) -> None:
    """Refuse a folder that holds a model, or a part of one.

    Raises:
        ValueError: If it does.
    """
    names = ("config.json", "params", INDEX_NAME)
    found = [name for name in names if (folder / name).exists()]
    found += [path.name for path in folder.glob("*.safetensors")]
    if found:
        raise ValueError(f"{folder} holds {found[0]} already; give another folder")


def write_config(source: Path, folder: Path, dtype: jnp.dtype) -> None:
    """Copy `config.json`, with the dtype of weights that are not quantised."""
    values = json.loads((source / "config.json").read_text(encoding="utf-8-sig"))
    for part in (values, values.get("text_config")):
        if not isinstance(part, dict):
            continue
        part.pop("quantization_config", None)
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = dtype.name
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def write_weights(
    folder: Path,
    params: Params,
    config: ModelConfig,
    mesh: Mesh,
    *,
    vocab_block: int,
    source: Path,
) -> None:
    """Write safetensors under the names and in the shapes of the folder that a model comes from.

    Every process of a mesh takes part; the first one writes.

    Args:
        folder: Made here if need be.
        params: As loaded for `config` on `mesh` with `vocab_block`; other entries are not written.
        config: The model.
        mesh: The mesh of `params`.
        vocab_block: As for `param_specs`.
        source: The folder whose names are used. Tensors of it that the decoder does not read, such
            as those for images, are copied.

    Raises:
        ValueError: If no value in a file is read as one of the weights.
    """
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    dtype = params["embed"].dtype
    own = _decoder_tensors({name: params[name] for name in specs}, specs, mesh, dtype)
    with contextlib.ExitStack() as stack:
        stored = expand_tensors(open_tensors(source, stack), read_quantization(source))
        published = {plain: name for name in stored if (plain := own_name(name, config))}
        others = (
            (name, np.array(stored[name].rows[:]))
            for name in stored
            if own_name(name, config) is None and not INERT_TENSORS.fullmatch(name)
        )
        made = (
            (published.get(name, name), array)
            for name, array in _checkpoint_tensors(own, config, dtype, published.keys())
        )
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _write_files(folder, itertools.chain(made, others))
        for _ in made:  # another process helps to gather
            refuse_at_exit()


def _decoder_tensors(
    params: Params, specs: dict[str, Any], mesh: Mesh, dtype: jnp.dtype
) -> Iterator[Named]:
    """The tensors of the decoder on the host, each of an expert for itself.

    What is float32 among others of `dtype` stays so where `dtype` does not hold it.
    """
    seen: set[str] = set()
    for spec, array in dismantle(params, specs, mesh):
        if spec.hf_name in seen:  # a tied head
            continue
        seen.add(spec.hf_name)
        rows = checkpoint_rows(_on_host(array), spec)
        if spec.is_wide and have_same_bits((narrow := rows.astype(dtype)).astype(rows.dtype), rows):
            rows = narrow
        yield from zip(spec.hf_names, rows if spec.num_experts else [rows], strict=True)


def _on_host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    # WHY: integers, since what is moved between devices as a float may lose the sign of a zero.
    words = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.jit(lambda it: lax.bitcast_convert_type(it, words))(array)
    return np.asarray(multihost_utils.process_allgather(bits, tiled=True)).view(array.dtype)


def _checkpoint_tensors(
    own: Iterable[Named], config: ModelConfig, dtype: jnp.dtype, published: Collection[str]
) -> Iterator[Named]:
    """The tensors of a family's checkpoint, from those of the decoder.

    Some families have two forms of experts; `published` are the names of the one that is wanted.
    """
    by_source = {
        source: found
        for source, found in readings_by_source(config, dtype).items()
        if source in published or found[0].name not in published
    }
    source_of = {reading.name: name for name, found in by_source.items() for reading in found}
    waiting: dict[str, dict[str, np.ndarray]] = {}
    for name, array in own:
        source = source_of.get(name)
        if source is None:
            yield name, array
            continue
        parts = waiting.setdefault(source, {})
        parts[name] = array
        if len(parts) == len(by_source[source]):
            yield source, written_tensor(by_source[source], waiting.pop(source), dtype)
    if waiting:
        raise ValueError(f"{sorted(waiting)} lack tensors that they are made of; report this")


def _write_files(folder: Path, tensors: Iterable[Named]) -> None:
    """Files of `FILE_BYTES` at most, and the index of several."""
    files: list[tuple[Path, list[str]]] = []
    batch: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"part-{len(files) + 1}.safetensors"
        write_tensors(batch, path, metadata={"format": "pt"})
        files.append((path, list(batch)))
        batch.clear()

    for name, array in tensors:
        refuse_at_exit()
        if batch and sum(it.nbytes for it in batch.values()) + array.nbytes > FILE_BYTES:
            flush()
        batch[name] = np.asarray(array, order="C")
        total += array.nbytes
    flush()
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    file_of = {}
    for i, (path, names) in enumerate(files, 1):
        named = path.rename(folder / f"model-{i:05d}-of-{len(files):05d}.safetensors")
        file_of |= dict.fromkeys(names, named.name)
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
