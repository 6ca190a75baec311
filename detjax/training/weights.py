# SPDX-License-Identifier: Apache-2.0
"""Convert between serving weights and float32 masters: bits are moved, and rounded once.

Masters are the tensors of `models.params.tensor_specs`, each in its checkpoint's shape. Neither
a mesh nor a kernel's layout affects them. Tied embeddings are there once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from detjax.models.loading import LoadedModel
from detjax.models.params import (
    ParamSpec,
    TensorSpec,
    by_param,
    by_tensor,
    join,
    param_specs,
    separate,
    stored_rows,
    tensor_specs,
)
from detjax.parallel.mesh import TP_AXIS


def _bits(array: jax.Array) -> jax.Array:
    """Return an array's elements as unsigned integers.

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
    sizes = {"tp": 1, "vocab_block": model.profile.vocab_block}
    specs, tensors = (make(model.config, **sizes) for make in (param_specs, tensor_specs))

    def cut(spec: ParamSpec, stored: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(separate(stored, [tensor.rows_of_rank(1) for tensor in spec.tensors], tp=1))

    stored = by_tensor(jax.tree.map(cut, specs, {name: model.params[name] for name in specs}))
    if model.config.tie_word_embeddings:
        del stored["lm_head"], tensors["lm_head"]

    def master(tensor: jax.Array, spec: TensorSpec) -> jax.Array:
        return tensor[: spec.source_shape[0]].astype(jnp.float32)

    return jax.tree.map(master, stored, tensors)


def serving_params(params: dict[str, Any], model: LoadedModel) -> dict[str, Any]:
    """Convert masters to a model's mesh, dtype and kernel layout.

    Args:
        params: Masters of this model.
        model: Gives mesh, dtype and layout; its own weights are neither read nor changed. The
            result is for `Engine.load_weights` and `LoadedModel.replace_weights`.

    Numerics:
        One rounding to the profile's weight dtype, to nearest, ties to even: what the training
        forward does to its masters. The rest moves bits, as integers.
    """
    profile, tp = model.profile, model.mesh.shape[TP_AXIS]
    sizes = {"tp": tp, "vocab_block": profile.vocab_block}
    specs, tensors = (make(model.config, **sizes) for make in (param_specs, tensor_specs))

    def rounded_rows(tensor: jax.Array, spec: TensorSpec) -> jax.Array:
        return stored_rows(_bits(tensor.astype(profile.param_dtype)), spec)

    def place(spec: ParamSpec, parts: tuple[jax.Array, ...]) -> jax.Array:
        placed = jax.device_put(join(parts, tp=tp), NamedSharding(model.mesh, spec.partition))
        return lax.bitcast_convert_type(placed, profile.param_dtype)

    rows = jax.tree.map(rounded_rows, {"lm_head": params["embed"], **params}, tensors)
    return jax.tree.map(place, specs, by_param(rows))
