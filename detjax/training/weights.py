# SPDX-License-Identifier: Apache-2.0
"""Between the weights that serve and the float32 masters that are trained. Moves bits, rounds once.

Masters stand under the names of `models.params`, unfused, each in its checkpoint's shape, so that
neither a mesh nor a kernel's layout shows in them; tied embeddings stand there once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from detjax.models.fusion import FUSED
from detjax.models.loading import LoadedModel
from detjax.models.params import ParamSpec, param_specs, stored_rows
from detjax.parallel.mesh import TP_AXIS


def _bits(array: jax.Array) -> jax.Array:
    """An array's elements as unsigned integers.

    # WHY: what is moved or rearranged across devices as a float may lose the sign of a zero.
    """
    words = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return lax.bitcast_convert_type(array, words)


def move_bits(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Put an array elsewhere."""
    return lax.bitcast_convert_type(jax.device_put(_bits(array), sharding), array.dtype)


def master_params(model: LoadedModel) -> dict[str, Any]:
    """Float32 copies of a model's weights; exact.

    Raises:
        ValueError: If the model is split over tp.
    """
    tp = model.mesh.shape[TP_AXIS]
    if tp != 1:
        raise ValueError(f"{tp=} must be 1: load the model to be trained on a mesh with tp=1")
    specs = param_specs(model.config, tp=1, vocab_block=model.profile.vocab_block)
    stored = {**model.params, "layers": [_unfuse(*pair) for pair in _layers(model, specs)]}
    if model.config.tie_word_embeddings:
        del stored["lm_head"], specs["lm_head"]

    def master(tensor: jax.Array, spec: ParamSpec) -> jax.Array:
        return tensor[: spec.hf_shape[0]].astype(jnp.float32)

    return jax.tree.map(master, stored, specs)


def _layers(model: LoadedModel, specs: dict[str, Any]):
    return zip(model.params["layers"], specs["layers"], strict=True)


def _unfuse(layer: dict[str, Any], specs: dict[str, ParamSpec]) -> dict[str, Any]:
    """Cut fused projections apart."""
    found = {name: leaf for name, leaf in layer.items() if name not in FUSED}
    for name, group in FUSED.items():
        if name in layer:
            rows = [specs[member].shape[0] for member in group]
            bounds = [sum(rows[:i]) for i in range(1, len(rows))]
            found |= dict(zip(group, jnp.split(layer[name], bounds), strict=True))
    return found


def serving_params(params: dict[str, Any], model: LoadedModel) -> dict[str, Any]:
    """Masters as a model's mesh, dtype and kernels want them.

    Args:
        params: Masters of this model.
        model: Says what is wanted; its own weights are neither read nor changed. What this returns
            is what `Engine.load_weights` and `LoadedModel.replace_weights` take.

    Numerics:
        One rounding to the profile's weight dtype, to nearest, ties to even: what the training
        forward does to its masters. The rest moves bits, as integers.
    """
    profile, tp = model.profile, model.mesh.shape[TP_AXIS]
    specs = param_specs(model.config, tp=tp, vocab_block=profile.vocab_block)

    def rounded_rows(tensor: jax.Array, spec: ParamSpec) -> jax.Array:
        return stored_rows(_bits(tensor.astype(profile.param_dtype)), spec)

    def place(bits: jax.Array, partition: PartitionSpec) -> jax.Array:
        placed = jax.device_put(bits, NamedSharding(model.mesh, partition))
        return lax.bitcast_convert_type(placed, profile.param_dtype)

    rows = jax.tree.map(rounded_rows, {"lm_head": params["embed"], **params}, specs)
    fused = {**rows, "layers": [_fuse(layer, tp) for layer in rows["layers"]]}
    partitions = {name: model.partition_specs[name] for name in fused}
    return jax.tree.map(place, fused, partitions)


def _fuse(layer: dict[str, Any], tp: int) -> dict[str, Any]:
    """Join projections that are stored as one matrix: rank by rank, each rank's rows in order."""
    members = {name for group in FUSED.values() for name in group}
    found = {name: leaf for name, leaf in layer.items() if name not in members}
    for name, group in FUSED.items():
        if group[0] in layer:
            by_rank = [layer[m].reshape(tp, -1, *layer[m].shape[1:]) for m in group]
            joined = jnp.concatenate(by_rank, axis=1)
            found[name] = joined.reshape(-1, *joined.shape[2:])
    return found
