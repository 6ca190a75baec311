# SPDX-License-Identifier: Apache-2.0
"""Weights in the host's memory while others, or nothing, have their place on the devices."""

import jax
import numpy as np

from detjax.models.params import Params


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
