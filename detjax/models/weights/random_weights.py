# SPDX-License-Identifier: Apache-2.0
"""Weights drawn on the devices from a seed: no file, no host copy."""

import functools
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from detjax.models.config import ModelConfig
from detjax.models.params import ParamRole, Params, TensorSpec, param_specs, stored_rows
from detjax.models.weights.assemble import assemble
from detjax.models.weights.dtypes import check_dtype


def random_params(
    config: ModelConfig, mesh: Mesh, *, seed: int, dtype: DTypeLike, vocab_block: int
) -> Params:
    """Draw weights on the devices, for benchmarks and tests: no file, no host copy.

    Matrices have mean 0 and variance `1 / fan_in`, gains are 1 plus a little, biases are small.

    Args:
        config: The model.
        mesh: Has the axes "dp" and "tp".
        seed: 0 to 2**32 - 1.
        dtype: bfloat16 or float32.
        vocab_block: As for `param_specs`.

    Raises:
        ValueError: If `seed` is out of range, or `dtype` or the mesh is not supported.

    Numerics:
        Same values on every mesh, by construction: a value is an integer made from threefry bits
        of (seed, tensor name, position in the checkpoint's tensor), times one constant, rounded
        to `dtype`. No sum of floats, no transcendental function.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"{seed=} must be in [0, 2**32)")
    target = check_dtype(dtype)
    specs = param_specs(config, tp=mesh.shape["tp"], vocab_block=vocab_block)
    root = jax.random.key(seed)

    def make(spec: TensorSpec) -> jax.Array:
        names = jnp.asarray([zlib.crc32(name.encode()) for name in spec.hf_names], jnp.uint32)
        keys = jax.vmap(functools.partial(jax.random.fold_in, root))(names)
        draw = _drawer(mesh, spec.unnamed, spec.dtype(target))
        return draw(keys if spec.num_experts else keys[0])

    return assemble(specs, mesh, make)


@functools.cache
def _drawer(mesh: Mesh, spec: TensorSpec, dtype: jnp.dtype) -> Callable[[jax.Array], jax.Array]:
    """`random_tensor` of every tensor of this shape, each rank its own rows."""
    draw = functools.partial(random_tensor, spec=spec, dtype=dtype)
    return jax.jit(draw, out_shardings=NamedSharding(mesh, spec.partition))


def random_tensor(key: jax.Array, *, spec: TensorSpec, dtype: jnp.dtype) -> jax.Array:
    """The sum of the four bytes of each random word, centred: near normal, and an integer.

    Of experts there is one key each.
    """
    draw = functools.partial(jax.random.bits, shape=spec.hf_shape, dtype=jnp.uint32)
    bits = jax.vmap(draw)(key) if spec.num_experts else draw(key)
    total = sum((bits >> jnp.uint32(8 * i)) & jnp.uint32(255) for i in range(1, 4))
    centred = (total + (bits & jnp.uint32(255))).astype(jnp.int32) - jnp.int32(510)
    noise = centred.astype(jnp.float32)  # exact; standard deviation 147.8
    match spec.role:
        case (
            ParamRole.MATRIX
            | ParamRole.TABLE
            | ParamRole.EXPERT
            | ParamRole.PROJECTION
            | ParamRole.FILTER
        ):
            std = math.sqrt(4 * (256**2 - 1) / 12)
            values = noise * jnp.float32(1 / (std * math.sqrt(spec.hf_shape[1])))
        case ParamRole.GAIN:
            values = jnp.float32(1) + noise * jnp.float32(2**-12)  # exact, fused or not
        case ParamRole.BIAS:
            values = noise * jnp.float32(2**-13)
    return stored_rows(values.astype(dtype), spec)  # holds no -0.0: see `saved._rearrange`
