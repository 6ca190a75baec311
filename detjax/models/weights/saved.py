# SPDX-License-Identifier: Apache-2.0
"""Weights to and from orbax checkpoints, which say what they are of and hash their bytes."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from detjax.defaults import NO_CAST
from detjax.models.config import ModelConfig
from detjax.models.identity import SAVED_WEIGHTS_FILE, folder_hash
from detjax.models.params import (
    Params,
    TensorSpec,
    checkpoint_rows,
    param_specs,
    stored_rows,
)
from detjax.models.weights.assemble import assemble, dismantle
from detjax.models.weights.dtypes import check_dtype
from detjax.models.weights.files import CHECKPOINT_ARRAYS
from detjax.parallel.mesh import TP_AXIS

CHECKPOINT_FORMAT = 2
CHECKPOINT_HASH = "arrays_sha256"


def find_saved_cast(folder: Path, *, cast_weights: str = NO_CAST) -> str:
    """How the weights that `save_params` wrote had been cast as they were read.

    Raises:
        FileNotFoundError: If `folder` holds no finished checkpoint.
        ValueError: If it is damaged, or `cast_weights` asks for a cast.
    """
    if cast_weights != NO_CAST:
        raise ValueError(
            f"--cast-weights {cast_weights} has nothing to convert: {folder} holds saved weights, "
            "which are restored as they are; leave it out"
        )
    return _read_facts(folder)["weight_cast"]


def check_can_save(folder: Path) -> None:
    """Refuse a folder that holds saved weights, or part of them.

    Raises:
        ValueError: If it does.
    """
    names = (CHECKPOINT_ARRAYS, SAVED_WEIGHTS_FILE)
    if found := [name for name in names if (folder / name).exists()]:
        raise ValueError(f"{folder} holds {found[0]} already; remove it or give another folder")


def save_params(
    folder: Path,
    params: Params,
    config: ModelConfig,
    mesh: Mesh,
    *,
    vocab_block: int,
    weight_cast: str = NO_CAST,
) -> None:
    """Write `params` as an orbax checkpoint that any mesh can restore.

    Tensors are stored under their Hugging Face names and in their shapes: key/value heads once,
    no padding, tied embeddings once; those of a layer's experts as one array. `detjax_params.json`
    beside them says which model and dtype, and is written last.

    Args:
        folder: Made here; must not hold a checkpoint yet.
        params: As loaded for `config` on `mesh` with `vocab_block`; other entries are not saved.
        config: The model.
        mesh: The mesh of `params`.
        vocab_block: As for `param_specs`.
        weight_cast: Of the model that the weights are of, so that it is not lost.

    Raises:
        ValueError: If `folder` holds a checkpoint.
    """
    folder = folder.absolute()
    check_can_save(folder)
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    tensors = {}
    for spec, array in dismantle({name: params[name] for name in specs}, specs, mesh):
        if _saved_name(spec) not in tensors:
            sharding = NamedSharding(mesh, _checkpoint_partition(spec))
            is_plain = not spec.is_rearranged
            tensors[_saved_name(spec)] = (
                array if is_plain else _rearrange(checkpoint_rows, array, spec, sharding)
            )
    import orbax.checkpoint as ocp  # WHY: most starts read no checkpoint, and it takes 0.2 s

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / CHECKPOINT_ARRAYS, tensors)
    if jax.process_index() == 0:
        facts = _checkpoint_facts(config, params["embed"].dtype, weight_cast)
        facts[CHECKPOINT_HASH] = folder_hash(folder / CHECKPOINT_ARRAYS)
        (folder / SAVED_WEIGHTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def restore_params(
    folder: Path,
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    vocab_block: int,
) -> Params:
    """Read what `save_params` wrote, onto any mesh that the model fits: the same bits.

    Nothing is converted here. How the weights that were saved had been read, `find_saved_cast`
    says, and must be given to `place_model`, whose fingerprint holds it.

    Raises:
        FileNotFoundError: If `folder` holds no finished checkpoint.
        ValueError: If it is of another model, dtype or format, or a byte of it has changed;
            the message names what differs.
    """
    folder, target = folder.absolute(), check_dtype(dtype)
    _check_facts(folder, _checkpoint_facts(config, target, find_saved_cast(folder)))
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    abstract = {}
    wanted = [tensor for spec in jax.tree.leaves(specs) for tensor in spec.tensors]
    for spec in wanted:  # "embed" comes first, so a tied tensor lies as it asks
        sharding = NamedSharding(mesh, _checkpoint_partition(spec))
        own = spec.dtype(target)
        tensor = jax.ShapeDtypeStruct(spec.source_shape, own, sharding=sharding)
        abstract.setdefault(_saved_name(spec), tensor)
    import orbax.checkpoint as ocp  # WHY: most starts read no checkpoint, and it takes 0.2 s

    with ocp.StandardCheckpointer() as checkpointer:
        tensors = checkpointer.restore(folder / CHECKPOINT_ARRAYS, abstract)

    def place(spec: TensorSpec) -> jax.Array:
        tensor, sharding = tensors[_saved_name(spec)], NamedSharding(mesh, spec.partition)
        is_in_place = not spec.is_rearranged and tensor.sharding == sharding
        return tensor if is_in_place else _rearrange(stored_rows, tensor, spec, sharding)

    return assemble(specs, mesh, place)


def _saved_name(spec: TensorSpec) -> str:
    """A tensor's name in the checkpoint; experts are one tensor."""
    return spec.hf_name.format("all")


def _checkpoint_partition(spec: TensorSpec) -> PartitionSpec:
    """How a tensor in the checkpoint's shape is split: its rows may not divide by tp."""
    if not spec.is_rearranged:
        return spec.partition
    return PartitionSpec(None, TP_AXIS) if len(spec.hf_shape) == 2 else PartitionSpec()


def _rearrange(
    rows: Callable[[jax.Array, TensorSpec], jax.Array],
    array: jax.Array,
    spec: TensorSpec,
    sharding: NamedSharding,
) -> jax.Array:
    """Apply `stored_rows` or `checkpoint_rows` from one sharding to another, as integers.

    The partitioner may move rows by adding shards that are masked to 0; as floats that turns -0.0
    into 0.0 (measured on 8 CPU devices, jax 0.11.2). The casts are programs of their own, so
    nothing moves while it is a float.
    """
    words = lax.bitcast_convert_type(array, {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize])
    words = _rearrange_words(words, rows=rows, spec=spec.unnamed, sharding=sharding)
    moved = lax.bitcast_convert_type(words, array.dtype)
    return jax.device_put(moved, sharding)  # spells the sharding as asked; moves nothing


@functools.partial(jax.jit, static_argnames=("rows", "spec", "sharding"))
def _rearrange_words(
    words: jax.Array,
    *,
    rows: Callable[[jax.Array, TensorSpec], jax.Array],
    spec: TensorSpec,
    sharding: NamedSharding,
) -> jax.Array:
    return lax.with_sharding_constraint(rows(words, spec), sharding)


def _checkpoint_facts(config: ModelConfig, dtype: jnp.dtype, weight_cast: str) -> dict[str, Any]:
    """What `detjax_params.json` says, as JSON gives it back."""
    facts = {
        "format": CHECKPOINT_FORMAT,
        "dtype": jnp.dtype(dtype).name,
        "weight_cast": weight_cast,
        "config": config.facts(),
    }
    return json.loads(json.dumps(facts))


def _read_facts(folder: Path) -> dict[str, Any]:
    """What `detjax_params.json` says."""
    path = folder / SAVED_WEIGHTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no finished checkpoint")
    try:
        found = dict(json.loads(path.read_text()))
        return {
            **found,
            "config": dict(found["config"]),
            "weight_cast": str(found["weight_cast"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); save the checkpoint again") from error


def _check_facts(folder: Path, expected: dict[str, Any]) -> None:
    """The checkpoint must be finished, and be of this model, dtype and format."""
    path, found = folder / SAVED_WEIGHTS_FILE, _read_facts(folder)
    expected_hash = found.pop(CHECKPOINT_HASH, None)
    found_flat, expected_flat = _flat(found), _flat(expected)
    for key in sorted(found_flat.keys() | expected_flat.keys()):
        if found_flat.get(key) != expected_flat.get(key):
            raise ValueError(
                f"{path} has {key}={found_flat.get(key)!r} but {expected_flat.get(key)!r} is asked "
                "for; restore with the model it was saved from, or load the weights again"
            )
    if folder_hash(folder / CHECKPOINT_ARRAYS) != expected_hash:
        raise ValueError(
            f"{folder / CHECKPOINT_ARRAYS} is damaged: its bytes are not those that were saved; "
            "copy it again, or load the weights again"
        )


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with the config's fields beside the others."""
    return {**facts, **facts["config"], "config": None}
