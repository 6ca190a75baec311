# SPDX-License-Identifier: Apache-2.0
"""What a self-check needs of the cache: something in it from the start, and what a page holds.

Integers alone: no bit of any answer comes from here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array, Int32, UInt32
from detjax.models.loading import LoadedModel
from detjax.parallel.distributed import gather_replicas
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.serving.programs import PAGES_SPEC, pages_shape


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Spread every bit over all: two rounds of multiply and shift."""
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13)):
        x = x * np.uint32(factor)
        x = x ^ (x >> np.uint32(shift))
    return x


def _indices(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """A number for each element, from its index on every axis."""
    total = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        total = _mix(total + lax.broadcasted_iota(jnp.uint32, shape, axis) + np.uint32(axis))
    return total


def filled_pages(model: LoadedModel, num_pages: int) -> Activation[Array, "L N 2 K P C"]:
    """Allocate the cache with random bits of finite numbers, so that which page is read shows.

    Magnitudes are from 0.5 to 1 for keys and from 2 to 4 for values, with random signs. What nobody
    has written meets no answer, so nothing depends on them.
    """
    shape = pages_shape(model, num_pages)
    return jax.jit(partial(_random_pages, shape.shape, shape.dtype), out_shardings=shape.sharding)()


def _random_pages(shape: tuple[int, ...], dtype) -> Activation[Array, "L N 2 K P C"]:
    bits = _indices(shape)
    is_value = lax.broadcasted_iota(jnp.uint32, shape, 2)
    # Sign, 8 bits of exponent, mantissa: alike in float32 and bfloat16, which is its upper half.
    exponent = jnp.where(is_value == 1, np.uint32(0x40000000), np.uint32(0x3F000000))
    bits = (bits & np.uint32(0x807FFFFF)) | exponent
    if jnp.dtype(dtype).itemsize == 4:
        return lax.bitcast_convert_type(bits, dtype)
    return lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), dtype)


def checksums(
    mesh: Mesh, cache: Activation[Array, "L N 2 K P C"], pages: np.ndarray
) -> UInt32[np.ndarray, " B"]:
    """A number for the content of each page, over all layers, heads and ranks.

    Args:
        mesh: Of the model.
        cache: Of the engine; only read.
        pages: int32 [B], of all replicas, each as its replica counts them.

    Numerics:
        A sum of uint32 modulo 2**32: it has no order.
    """
    return np.asarray(_checksums(cache, pages, mesh=mesh))


@partial(jax.jit, static_argnames="mesh")
def _checksums(cache, pages, *, mesh: Mesh):
    def local(cache, pages: Int32[Array, " b"]):
        held = cache[:, pages]
        width = 8 * held.dtype.itemsize
        bits = lax.bitcast_convert_type(held, f"uint{width}").astype(jnp.uint32)
        place = _indices((len(cache), 1, *cache.shape[2:])) + _mix(
            lax.axis_index(TP_AXIS).astype(jnp.uint32)
        )
        total = _mix(bits + place).sum(axis=(0, 2, 3, 4, 5), dtype=jnp.uint32)
        ranks = lax.all_gather(total, TP_AXIS)
        return gather_replicas(_mix(ranks).sum(axis=0, dtype=jnp.uint32))

    specs = PAGES_SPEC, P(DP_AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(
        cache, pages
    )
