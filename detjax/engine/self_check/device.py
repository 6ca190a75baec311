# SPDX-License-Identifier: Apache-2.0
"""What a self-check needs of the cache: something in it from the start, and what a page holds.

Integers alone: no bit of any answer comes from here.
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Cached, Int32, UInt32
from detjax.compilation.kept_executables import Executable, compile_or_read
from detjax.engine.running.device_arrays import PAGES_SPEC, pages_shape
from detjax.models.loading import LoadedModel
from detjax.models.pages import CachePages, by_pages
from detjax.parallel.distributed import gather_replicas
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

PIECE = 8
"""Pages of a replica that a launch reads: how many are wanted is not known when it is compiled."""


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


def filled_pages(model: LoadedModel, num_pages: int, num_local_pages: int = 0) -> CachePages:
    """Allocate the cache with random bits of finite numbers, so that which page is read shows.

    Magnitudes are from 0.5 to 1 for keys and from 2 to 4 for values, with random signs. What nobody
    has written meets no answer, so nothing depends on them.
    """
    shapes = pages_shape(model, num_pages, num_local_pages)
    return jax.tree.map(lambda shape: _filler(shape, model.mesh)(), shapes)


@functools.cache
def _filler(shape: jax.ShapeDtypeStruct, mesh: Mesh) -> Callable[[], jax.Array]:
    """Compiled once for all engines of these sizes."""
    fill = jax.jit(partial(_random_pages, shape.shape, shape.dtype), out_shardings=shape.sharding)
    return compile_or_read(fill.lower, _executable("fill", mesh, shape))


def _executable(what: str, mesh: Mesh, *operands: jax.ShapeDtypeStruct) -> Executable:
    """What a program of this module is made from."""
    return Executable(
        options={}, operands=operands, devices=tuple(mesh.devices.flat), root=__name__,
        traced_from=(what, repr(mesh)),
    )  # fmt: skip


def _random_pages(shape: tuple[int, ...], dtype) -> Cached[Array, "L N X K P C"]:
    bits = _indices(shape)
    is_value = lax.broadcasted_iota(jnp.uint32, shape, 2)
    # Sign, 8 bits of exponent, mantissa: alike in float32 and bfloat16, which is its upper half.
    exponent = jnp.where(is_value == 1, np.uint32(0x40000000), np.uint32(0x3F000000))
    if jnp.dtype(dtype) == jnp.uint8:  # of float8_e4m3fn: 4 bits of exponent, 3 of mantissa
        exponent = jnp.where(is_value == 1, np.uint32(0x40), np.uint32(0x30))
        return ((bits >> np.uint32(24)) & np.uint32(0x87) | exponent).astype(jnp.uint8)
    bits = (bits & np.uint32(0x807FFFFF)) | exponent
    if jnp.dtype(dtype).itemsize == 4:
        return lax.bitcast_convert_type(bits, dtype)
    return lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), dtype)


def checksums(
    mesh: Mesh, cache: CachePages, pages: np.ndarray, local_pages: np.ndarray | None = None
) -> list[list[UInt32[Array, " B"]]]:
    """A number for the content of each page, over all layers, heads and ranks.

    Args:
        mesh: Of the model.
        cache: Of the engine; only read.
        pages: int32 [dp, n], each as its replica counts them.
        local_pages: The same of local layers; None where they have the pages of the others.

    Returns:
        Of `PIECE` pages of every replica at a time, of each array of the cache; `join_checksums`
        makes [dp, n] of them. The device may still be at it.

    Numerics:
        A sum of uint32 modulo 2**32: it has no order.
    """
    of_all = _pieces(pages)
    of_local = of_all if local_pages is None else _pieces(local_pages)
    programs = [
        (checksum_program(mesh, array.shape, array.dtype), array, is_local)
        for array, is_local in by_pages(cache)
    ]
    return [
        [program(array, local if is_local else piece) for program, array, is_local in programs]
        for piece, local in zip(of_all, of_local, strict=True)
    ]


def _pieces(pages: np.ndarray) -> list[np.ndarray]:
    """`PIECE` pages of every replica at a time, the last ones again where there are fewer."""
    count = -(-pages.shape[1] // PIECE) * PIECE
    padded = np.pad(pages, ((0, 0), (0, count - pages.shape[1])), mode="edge")
    return [padded[:, first : first + PIECE].reshape(-1) for first in range(0, count, PIECE)]


def join_checksums(
    pieces: Sequence[Sequence[UInt32[Array, " B"]]], shape: tuple[int, ...]
) -> UInt32[np.ndarray, "R ..."]:
    """What `checksums` has given, for pages of this shape; waits for the device."""
    totals = [sum(np.asarray(x) for x in arrays) for arrays in pieces]
    joined = np.concatenate([np.reshape(x, (shape[0], PIECE)) for x in totals], axis=1)
    return joined[:, : math.prod(shape[1:])].reshape(shape)


@functools.cache
def checksum_program(mesh: Mesh, shape: tuple[int, ...], dtype) -> Callable[..., jax.Array]:
    """The program of `checksums` for a cache of this shape over all devices, compiled here once."""

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
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    of_cache, of_pages = (NamedSharding(mesh, spec) for spec in specs)
    cache = jax.ShapeDtypeStruct(shape, dtype, sharding=of_cache)
    num_read = mesh.shape[DP_AXIS] * PIECE
    pages = jax.ShapeDtypeStruct((num_read,), jnp.int32, sharding=of_pages)
    program = _executable("checksums", mesh, cache, pages)
    return compile_or_read(lambda: jax.jit(function).lower(cache, pages), program)
