# SPDX-License-Identifier: Apache-2.0
"""Weights in the host's memory while others, or nothing, have their place on the devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from detjax.models.params import Params

CPU_ALIGNMENT = 64
"""Of memory that a CPU device takes as it is; XLA copies what lies elsewhere."""


def is_on_cpu(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are CPU devices."""
    return mesh.devices.flat[0].platform == "cpu"


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device takes as it is, with anything in it."""
    count = int(np.prod(shape)) * dtype.itemsize
    held = np.empty(count + CPU_ALIGNMENT, np.uint8)
    first = -held.ctypes.data % CPU_ALIGNMENT
    return held[first : first + count].view(dtype).reshape(shape)


def own_copy(rows: np.ndarray) -> np.ndarray:
    """A copy that nobody else has, for a CPU device to take as it is."""
    copy = _aligned(rows.shape, rows.dtype)
    copy[...] = rows
    return copy


def joined_rows(parts: Sequence[np.ndarray], *, axis: int) -> np.ndarray:
    """`np.concatenate`, for a CPU device to take as it is."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    joined, first = _aligned(shape, parts[0].dtype), 0
    for part in parts:
        last = first + part.shape[axis]
        joined[(slice(None),) * axis + (slice(first, last),)] = part
        first = last
    return joined


def take_to_host(params: Params) -> Params:
    """Copy weights to the host, bit for bit, and free them on their devices.

    Args:
        params: On devices of this process. The arrays are deleted.

    Returns:
        The same tree, in pinned memory of a GPU's host, else of NumPy arrays; one array where the
        tree has one array twice.
    """
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(params)}
    copies = {key: _host_copy(leaf) for key, leaf in leaves.items()}
    jax.block_until_ready(copies)
    host = jax.tree.map(lambda leaf: copies[id(leaf)], params)
    for leaf in leaves.values():
        leaf.delete()
    return host


def _host_copy(leaf: jax.Array) -> jax.Array | np.ndarray:
    """A copy on the host, which may still be on its way there."""
    if next(iter(leaf.devices())).platform == "cpu":
        return np.array(leaf)  # a copy, as NumPy may have the very memory that is freed
    # WHY: NumPy gets 16 GB through pageable memory in 16 to 20 s (H100).
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))


def put_on_devices(host: Params, like: Params) -> Params:
    """Put what `take_to_host` gave where it was.

    Args:
        host: In the host's memory.
        like: The same tree of the arrays that were deleted, whose shardings it gets.
    """
    leaves = zip(jax.tree.leaves(host), jax.tree.leaves(like), strict=True)
    places = {id(values): (values, old.sharding) for values, old in leaves}
    placed = {key: jax.device_put(*place) for key, place in places.items()}
    jax.block_until_ready(placed)
    return jax.tree.map(lambda values: placed[id(values)], host)


def have_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether arrays of one dtype are the same, signs of zeros and NaN included."""
    words = np.dtype(f"u{a.dtype.itemsize}")
    return np.array_equal(a.view(words), b.view(words))
