# SPDX-License-Identifier: Apache-2.0
"""One tensor of a checkpoint onto the devices, as its spec stores it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from detjax.models.params import EXPERT_NDIM, ParamSpec, TensorSpec
from detjax.models.weights.dtypes import converted
from detjax.models.weights.host import is_on_cpu, joined_rows, own_copy
from detjax.parallel.mesh import TP_AXIS

_Bounds = tuple[tuple[int, int], ...]
"""First index and the one behind the last, of each axis."""


class ExpertRows:
    """The tensors of a layer's experts as one array with the experts first; indexing it reads."""

    def __init__(self, experts: Sequence[Any]):
        """Keep the experts' tensors, each of which reads what it is indexed with."""
        self._experts = experts

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read some rows and columns of some experts, one after the other into one array."""
        experts, *rest = index
        chosen = self._experts[experts]
        first = chosen[0][tuple(rest)]
        out = np.empty((len(chosen), *first.shape), first.dtype)
        out[0] = first
        for i, expert in enumerate(chosen[1:], 1):
            rows = expert[tuple(rest)]
            if rows.dtype != first.dtype:
                raise ValueError(
                    f"the experts of a layer have different dtypes, {first.dtype.name} and "
                    f"{rows.dtype.name}; convert the checkpoint to one"
                )
            out[i] = rows
        return out


def place_tensor(
    rows: Any, spec: TensorSpec, mesh: Mesh, *, dtype: jnp.dtype, name: str
) -> jax.Array:
    """Put a tensor where its spec says; devices that hold the same shard share one read.

    Args:
        rows: Of shape `spec.source_shape`. Indexing it with slices gives NumPy arrays, which must
            stay as they are until this returns.
        spec: Where rows and columns go.
        mesh: Has the axes "dp" and "tp".
        dtype: Of the result.
        name: Of the tensor, and where it comes from, for errors.

    Raises:
        ValueError: If a value cannot be turned into `dtype`.
    """
    sharding = NamedSharding(mesh, spec.partition)
    on_cpu = is_on_cpu(mesh)

    @functools.cache
    def read(bounds: _Bounds) -> np.ndarray:
        part = read_shard(rows, spec, dtype, name, bounds)
        # WHY: a CPU device may hold the very memory, and that of a mapped file may change.
        return own_copy(part) if on_cpu and not part.flags.owndata else part

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        return read(_bounds(index, spec.shape))

    array = jax.make_array_from_callback(spec.shape, sharding, shard, dtype)
    return array.block_until_ready()  # bounds what the host holds


def place_joined(
    sources: Sequence[Any], param: ParamSpec, mesh: Mesh, *, dtype: jnp.dtype, names: Sequence[str]
) -> jax.Array:
    """`place_tensor` of all tensors of a parameter on CPU devices, joined as they are read.

    WHY: a tensor that is placed first and joined then is copied twice.

    Args:
        sources: Of each tensor, as `place_tensor` has it.
        param: Where they go: each rank's rows of the first, then of the next.
        mesh: As `place_tensor` has it.
        dtype: Of the result.
        names: Of each tensor, for errors.

    Raises:
        ValueError: As `place_tensor`.
    """
    axis = 1 if len(param.shape) == EXPERT_NDIM else 0

    @functools.cache
    def read(bounds: tuple[_Bounds, ...]) -> np.ndarray:
        parts = zip(sources, param.tensors, names, bounds, strict=True)
        return joined_rows(
            [read_shard(rows, spec, dtype, name, own) for rows, spec, name, own in parts], axis=axis
        )

    places = [
        NamedSharding(mesh, spec.partition).addressable_devices_indices_map(spec.shape)
        for spec in param.tensors
    ]
    shards = []
    for device in places[0]:
        bounds = tuple(
            _bounds(place[device], spec.shape)
            for place, spec in zip(places, param.tensors, strict=True)
        )
        shards.append(jax.device_put(read(bounds), SingleDeviceSharding(device)))
    sharding = NamedSharding(mesh, param.partition)
    return jax.make_array_from_single_device_arrays(param.shape, sharding, shards)


def _bounds(index: tuple[slice, ...] | None, shape: Sequence[int]) -> _Bounds:
    assert index is not None  # jax passes None only for shapes it does not know
    found = (i.indices(n) for i, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in found)


def read_shard(
    source: Any,
    spec: TensorSpec,
    dtype: DTypeLike,
    name: str,
    bounds: _Bounds,
) -> np.ndarray:
    """Stored rows and columns `bounds`, read run by run; rows in no run come last and are zero."""
    (low, high), others = bounds[0], tuple(slice(*b) for b in bounds[1:])
    parts = []
    for run in spec.runs:
        start, stop = max(low, run.start), min(high, run.start + run.num_rows)
        if start < stop:
            shift = run.source - run.start
            rows = source[(slice(start + shift, stop + shift), *others)]
            parts.append(converted(rows, jnp.dtype(dtype), name=name))
    num_zeros = high - low - sum(len(part) for part in parts)
    if num_zeros:
        parts.append(np.zeros([num_zeros, *(stop - start for start, stop in bounds[1:])], dtype))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def put_expert(
    experts: jax.Array | None,
    rows: np.ndarray,
    spec: TensorSpec,
    mesh: Mesh,
    *,
    dtype: jnp.dtype,
    name: str,
) -> jax.Array:
    """Put one expert's tensor among those that are on the devices already.

    Args:
        experts: What this gave for another expert of `spec`, and is consumed; None at first.
        rows: Of shape `spec.hf_shape`.
        spec: Of the layer's experts.
        mesh: Has the axes "dp" and "tp".
        dtype: Of the result.
        name: Of the tensor, one of `spec.hf_names`.

    Raises:
        ValueError: If a value cannot be turned into `dtype`.
    """
    if experts is None:
        sharding = NamedSharding(mesh, spec.partition)
        experts = jnp.zeros(spec.shape, dtype, device=sharding)
    whole = NamedSharding(mesh, PartitionSpec())
    one = jax.device_put(converted(rows, dtype, name=repr(name)), whole)
    return _expert_putter(mesh, spec.partition)(experts, one, spec.hf_names.index(name))


@functools.cache
def _expert_putter(mesh: Mesh, partition: PartitionSpec) -> Callable[..., jax.Array]:
    """Write an expert on the rank that has it."""

    def local(experts, one, expert):
        slot = expert - lax.axis_index(TP_AXIS) * experts.shape[0]
        is_here = (slot >= 0) & (slot < experts.shape[0])
        slot = jnp.clip(slot, 0, experts.shape[0] - 1)
        return experts.at[slot].set(jnp.where(is_here, one, experts[slot]))

    in_specs = (partition, PartitionSpec(), PartitionSpec())
    put = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=partition, check_vma=False)
    return jax.jit(put, donate_argnums=0, out_shardings=NamedSharding(mesh, partition))
