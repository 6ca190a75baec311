# SPDX-License-Identifier: Apache-2.0
"""Convert between serving weights and float32 masters: bits are moved, and rounded once.

Masters are the tensors of `models.params.tensor_specs`, each in its checkpoint's shape. Neither
a mesh nor a kernel's layout affects them. Tied embeddings are there once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.models.config import ModelConfig
from detjax.models.loading import LoadedModel
from detjax.models.params import (
    ParamSpec,
    TensorSpec,
    by_param,
    by_tensor,
    join,
    param_specs,
    partition_specs,
    separate,
    stored_rows,
    tensor_specs,
)
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.dispatch import OrderedJit, put
from detjax.parallel.mesh import TP_AXIS
from detjax.training.rounding import stored_gain, stored_table


def _bits(array: jax.Array) -> jax.Array:
    """Return an array's elements as unsigned integers.

    # WHY: what is moved or rearranged across devices as a float may lose the sign of a zero.
    """
    words = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return lax.bitcast_convert_type(array, words)


@functools.cache
def _program(function: Callable[..., Any], *facts: Any) -> OrderedJit:
    """A program over arrays for these facts, compiled once for all calls."""
    return OrderedJit(jax.jit(functools.partial(function, *facts), compiler_options=EXACT_OPTIONS))


def _floats(tree: Any) -> Any:
    """The inverse of `_bits`, of a tree."""
    floats = {2: jnp.bfloat16, 4: jnp.float32}
    return jax.tree.map(lambda it: lax.bitcast_convert_type(it, floats[it.dtype.itemsize]), tree)


def move_bits(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Put an array elsewhere."""
    moved = put(_program(_bits)(array), sharding)
    return _program(_floats)(moved)


def why_not_trained(config: ModelConfig, backend: Backend) -> str | None:
    """What of a model has no backward pass on a backend, or None if all has one."""
    is_linear = config.linear_attention is not None
    lacking = {
        "a scale of logits that is no power of two": math.frexp(config.logits_scale)[0] != 0.5,
        # WHY: its kernels write references, which JAX drops where a layer is computed again.
        f"linear attention on {backend.value}": is_linear and backend.platform != "cpu",
    }
    found = [what for what, is_lacking in lacking.items() if is_lacking]
    return " and ".join(found) or None


def master_params(model: LoadedModel) -> dict[str, Any]:
    """Float32 copies of a model's weights; exact.

    Raises:
        ValueError: If the model is split over tp, has what cannot be trained, or weights that lie
            on the devices quantised.
    """
    facts = model.config, model.profile.vocab_block
    return _program(_masters, *facts)(_one_rank(model))


def master_shapes(model: LoadedModel) -> dict[str, Any]:
    """The shapes of `master_params`, which are not computed.

    Raises:
        ValueError: If the model is split over tp, has what cannot be trained, or weights that lie
            on the devices quantised.
    """
    facts = model.config, model.profile.vocab_block
    return jax.eval_shape(functools.partial(_masters, *facts), _one_rank(model))


def _one_rank(model: LoadedModel) -> dict[str, Any]:
    """The weights of a model that is not split."""
    tp = model.mesh.shape[TP_AXIS]
    if (why := why_not_trained(model.config, model.backend)) is not None:
        raise ValueError(
            f"a model of {model.config.family!r} cannot be trained: {why} has no backward pass yet"
        )
    model.refuse_packed("be trained")
    if tp != 1:
        raise ValueError(f"{tp=} must be 1: load the model to be trained on a mesh with tp=1")
    names = param_specs(model.config, tp=1, vocab_block=model.profile.vocab_block)
    return {name: model.params[name] for name in names}


def _masters(config: ModelConfig, vocab_block: int, params: dict[str, Any]) -> dict[str, Any]:
    sizes = {"tp": 1, "vocab_block": vocab_block}
    specs, tensors = (make(config, **sizes) for make in (param_specs, tensor_specs))

    def cut(spec: ParamSpec, stored: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(separate(stored, [tensor.rows_of_rank(1) for tensor in spec.tensors], tp=1))

    stored = by_tensor(jax.tree.map(cut, specs, params))
    if config.tie_word_embeddings:  # the head is what a checkpoint has
        stored["embed"], tensors["embed"] = stored.pop("lm_head"), tensors.pop("lm_head")

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
    facts = model.config, model.profile, model.mesh.shape[TP_AXIS]
    stored = _program(_stored_bits, *facts)(params)
    placed = jax.tree.map(
        lambda bits, partition: put(bits, NamedSharding(model.mesh, partition)),
        stored,
        _partitions(*facts),
    )
    return _program(_floats)(placed)


def _partitions(config: ModelConfig, profile: NumericsProfile, tp: int) -> dict[str, Any]:
    return partition_specs(config, tp=tp, vocab_block=profile.vocab_block)


def _stored_bits(
    config: ModelConfig, profile: NumericsProfile, tp: int, params: dict[str, Any]
) -> dict[str, Any]:
    """Masters, rounded, as a mesh with this tp stores them, as integers."""
    sizes = {"tp": tp, "vocab_block": profile.vocab_block}
    specs, tensors = (make(config, **sizes) for make in (param_specs, tensor_specs))

    dtype = profile.param_dtype

    def rounded_rows(tensor: jax.Array, spec: TensorSpec) -> jax.Array:
        is_sum = spec.offset != 0  # a gain that a file holds less the offset
        rounded = stored_gain(tensor, config, dtype) if is_sum else tensor.astype(spec.dtype(dtype))
        return stored_rows(_bits(rounded), spec)

    def joined(_: ParamSpec, parts: tuple[jax.Array, ...]) -> jax.Array:
        return join(parts, tp=tp)

    rows = jax.tree.map(rounded_rows, {"lm_head": params["embed"], **params}, tensors)
    rows["embed"] = stored_rows(
        _bits(stored_table(params["embed"], config, dtype)), tensors["embed"]
    )
    return jax.tree.map(joined, specs, by_param(rows))
