# SPDX-License-Identifier: Apache-2.0
"""One tensor of a checkpoint onto the devices, as its spec stores it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from detjax.models.params import TensorSpec
from detjax.models.weights.dtypes import converted


def place_tensor(
    rows: Any, spec: TensorSpec, mesh: Mesh, *, dtype: jnp.dtype, name: str
) -> jax.Array:
    """Put a tensor where its spec says; devices that hold the same shard share one read.

    Args:
        rows: Of shape `spec.hf_shape`. Indexing it with slices gives NumPy arrays; they must stay
            as they are, since a CPU device may hold their very memory.
        spec: Where rows and columns go.
        mesh: Has the axes "dp" and "tp".
        dtype: Of the result.
        name: Of the tensor, and where it comes from, for errors.

    Raises:
        ValueError: If a value cannot be turned into `dtype`.
    """
    read = functools.cache(functools.partial(_read_shard, rows, spec, dtype, name))
    sharding = NamedSharding(mesh, spec.partition)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # jax passes None only for shapes it does not know
        bounds = (i.indices(n) for i, n in zip(index, spec.shape, strict=True))
        return read(tuple((start, stop) for start, stop, _ in bounds))

    array = jax.make_array_from_callback(spec.shape, sharding, shard, dtype)
    return array.block_until_ready()  # bounds what the host holds to one tensor


def _read_shard(
    source: Any,
    spec: TensorSpec,
    dtype: jnp.dtype,
    name: str,
    bounds: tuple[tuple[int, int], ...],
) -> np.ndarray:
    """Stored rows and columns `bounds`, read run by run; rows in no run come last and are zero."""
    (low, high), others = bounds[0], tuple(slice(*b) for b in bounds[1:])
    parts = []
    for run in spec.runs:
        start, stop = max(low, run.start), min(high, run.start + run.num_rows)
        if start < stop:
            shift = run.source - run.start
            rows = source[(slice(start + shift, stop + shift), *others)]
            parts.append(converted(rows, dtype, name=name))
    num_zeros = high - low - sum(len(part) for part in parts)
    if num_zeros:
        parts.append(np.zeros([num_zeros, *(stop - start for start, stop in bounds[1:])], dtype))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
