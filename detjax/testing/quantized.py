# SPDX-License-Identifier: Apache-2.0
"""Models of random weights whose matrices have 8 or 4 bits, made where they lie."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.models.heads.head import DraftHead
from detjax.models.heads.quantize import matrices_to_quantize
from detjax.models.loading import LoadedModel
from detjax.models.params import MATRICES
from detjax.models.quantization.quantize import RECIPES, Recipe
from detjax.models.weights.packed import MatrixForm, with_packed_specs
from detjax.pallas_kernels.linear.quantized import (
    LARGEST,
    SCALE_LIMITS,
    CodeType,
    QuantizedMatrix,
    W8A8Matrix,
    packed_shape,
)


def quantized_model(model: LoadedModel, scheme: str) -> LoadedModel:
    """A model of one rank with the matrices of its layers as a quantised checkpoint has them.

    Schemes whose activations have 8 bits round the model's own matrices. The others get codes at
    random, and scales that give them the size of the model's. The bfloat16 matrices are given up
    one by one.

    Args:
        model: With plain matrices, on one rank.
        scheme: One of `detjax.models.quantization.quantize.RECIPES`.
    """
    recipe = RECIPES[scheme]
    names = {*MATRICES}
    if recipe.quantizes_activations:
        convert, form = _rounded(recipe, model), MatrixForm.W8A8
        names |= {"expert_gate_up", "expert_down", "shared_gate_up", "shared_down"}
    else:
        convert, form = _drawn(recipe, model), MatrixForm.PACKED
    keys = iter(jax.random.split(jax.random.key(0), len(names) * model.config.num_layers))
    for layer in model.params["layers"]:
        for name in sorted(names & set(layer)):
            layer[name] = convert(layer[name], next(keys))
    # By way of the host, as holes of the bfloat16 matrices would leave no room for a cache.
    shardings = jax.tree.map(lambda x: x.sharding, model.params["layers"])
    layers = jax.device_get(model.params.pop("layers"))
    model.params["layers"] = jax.device_put(layers, shardings)
    specs = with_packed_specs(model.partition_specs, model.params)
    return dataclasses.replace(model, partition_specs=specs, matrix_form=form)


def abstract_quantized_head(head: DraftHead) -> DraftHead:
    """A head of shapes, as `quantize_head` leaves one of arrays with "int8"."""

    def rounded(w: jax.ShapeDtypeStruct) -> W8A8Matrix:
        of_scales = NamedSharding(head.mesh, P())
        return W8A8Matrix(
            values=jax.ShapeDtypeStruct(w.shape, jnp.int8, sharding=w.sharding),
            scales=jax.ShapeDtypeStruct(w.shape[:1], jnp.float32, sharding=of_scales),
        )

    names = matrices_to_quantize(head, "int8")
    return dataclasses.replace(
        head, params=head.params | {name: rounded(head.params[name]) for name in names}
    )


def _rounded(recipe: Recipe, model: LoadedModel):
    dtype = jnp.dtype(jnp.float8_e4m3fn if recipe.is_float else jnp.int8)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=NamedSharding(model.mesh, P()))
    def rounded(w):
        (*experts, n, k), columns = w.shape, recipe.group_size or w.shape[-1]
        shape = (*experts, n // recipe.block_rows, recipe.block_rows, k // columns, columns)
        blocks = w.astype(jnp.float32).reshape(shape)
        scales = jnp.max(jnp.abs(blocks), axis=(-3, -1)) / LARGEST[dtype.name]
        scales = jnp.where(scales == 0, 1, scales)
        values = blocks / scales[..., :, None, :, None]
        values = values if recipe.is_float else jnp.round(values)
        return W8A8Matrix(
            values=values.reshape(w.shape).astype(dtype),
            scales=scales if recipe.group_size else scales[..., 0],
        )

    return lambda w, _key: rounded(w)


def _drawn(recipe: Recipe, model: LoadedModel):
    code_type = CodeType.INT4 if recipe.num_bits == 4 else CodeType.INT8
    size = 2**recipe.num_bits / math.sqrt(12)  # standard deviation of a code

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=NamedSharding(model.mesh, P()))
    def drawn(w, key):
        n, groups = w.shape[0], w.shape[1] // (recipe.group_size or w.shape[1])
        of_codes, of_scales = jax.random.split(key)
        spread = jax.random.uniform(of_scales, (groups, n), minval=0.5, maxval=1.5)
        scales = spread * jnp.std(w.astype(jnp.float32)) / size
        return QuantizedMatrix(
            codes=jax.random.bits(of_codes, packed_shape(w.shape, code_type)).view(jnp.int32),
            scales=jnp.clip(scales, SCALE_LIMITS[0], SCALE_LIMITS[1] / 2).astype(jnp.bfloat16),
            code_type=code_type, group_len=recipe.group_size, has_small_scales=True,
        )  # fmt: skip

    return drawn
