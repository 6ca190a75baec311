# SPDX-License-Identifier: Apache-2.0
"""Parameters of a model from the tensors of a checkpoint, and back, on the devices. Moves bits."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from detjax.models.params import EXPERT_NDIM, Params, ParamSpec, TensorSpec, join, separate
from detjax.models.weights.host import is_on_cpu, joined_rows
from detjax.models.weights.packed import join_packed
from detjax.pallas_kernels.linear.quantized import QUANTIZED, AnyMatrix
from detjax.parallel.mesh import TP_AXIS


def made_once(specs: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The specs less a tied "lm_head" that is stored just as "embed": on one rank, no padding."""
    (embed,), (head,) = specs["embed"].tensors, specs["lm_head"].tensors
    is_shared = (head.hf_name, head.shape) == (embed.hf_name, embed.shape)
    is_shared = is_shared and mesh.shape[TP_AXIS] == 1
    return {key: specs[key] for key in specs if key != "lm_head" or not is_shared}


def assemble(
    specs: dict[str, Any],
    mesh: Mesh,
    make: Callable[[TensorSpec], AnyMatrix],
) -> Params:
    """Make every parameter, an "lm_head" that is shared with "embed" only once.

    Args:
        specs: Of `param_specs`.
        mesh: Where.
        make: Gives a tensor as its spec stores it, or as it is quantised. What is joined is
            deleted, so that no more than one parameter is held twice.
    """
    return assemble_params(specs, mesh, functools.partial(assemble_one, mesh=mesh, make=make))


def assemble_params(
    specs: dict[str, Any], mesh: Mesh, make: Callable[[ParamSpec], AnyMatrix]
) -> Params:
    """As `assemble`, where `make` gives a parameter."""
    made = jax.tree.map(make, made_once(specs, mesh))
    return {"lm_head": made["embed"], **made}


def assemble_one(
    spec: ParamSpec, *, mesh: Mesh, make: Callable[[TensorSpec], AnyMatrix]
) -> AnyMatrix:
    """Make one parameter; arguments as `assemble` has them."""
    parts = [make(tensor) for tensor in spec.tensors]
    if len(parts) == 1:
        return parts[0]
    packed = [part for part in parts if isinstance(part, QUANTIZED)]
    plain = [part for part in parts if not isinstance(part, QUANTIZED)]
    if packed:
        joined = join_packed(packed, spec, mesh)
    elif all(part.is_fully_addressable and is_on_cpu(mesh) for part in plain):
        joined = _joined_on_host(plain, spec, mesh)
    else:
        joined = _joiner(mesh, spec.partition)(plain)
    for leaf in jax.tree.leaves(parts):
        leaf.delete()
    return joined


def _joined_on_host(parts: list[jax.Array], spec: ParamSpec, mesh: Mesh) -> jax.Array:
    """`params.join` of arrays of CPU devices that lie alike, each rank its own rows.

    WHY: a program that joins them is traced and compiled for each pair of shapes.
    """
    sharding = NamedSharding(mesh, spec.partition)
    axis = 1 if parts[0].ndim == EXPERT_NDIM else 0
    shards: dict[Any, list[np.ndarray]] = {}
    for part in parts:
        for shard in part.addressable_shards:
            shards.setdefault(shard.device, []).append(np.asarray(shard.data))
    joined = [
        jax.device_put(joined_rows(rows, axis=axis), SingleDeviceSharding(device))
        for device, rows in shards.items()
    ]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, joined)


def dismantle(
    params: Params, specs: dict[str, Any], mesh: Mesh
) -> Iterator[tuple[TensorSpec, jax.Array]]:
    """The tensors that parameters are made of, as their specs store them.

    Args:
        params: What `assemble` made.
        specs: Of `param_specs`.
        mesh: Where they are.
    """
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        if len(spec.tensors) == 1:
            yield spec.tensors[0], array
            continue
        sizes = tuple(tensor.rows_of_rank(mesh.shape[TP_AXIS]) for tensor in spec.tensors)
        cut = _separator(mesh, sizes, spec.partition)
        yield from zip(spec.tensors, cut(array), strict=True)


@functools.cache
def _joiner(mesh: Mesh, partition: PartitionSpec) -> Callable[[list[jax.Array]], jax.Array]:
    """`params.join` of arrays that lie alike, each rank its own rows."""
    local = jax.shard_map(
        functools.partial(join, tp=1),
        mesh=mesh,
        in_specs=(partition,),
        out_specs=partition,
        check_vma=False,
    )
    return jax.jit(local, out_shardings=NamedSharding(mesh, partition))


@functools.cache
def _separator(mesh: Mesh, sizes: tuple[int, ...], partition: PartitionSpec):
    """The inverse of `_joiner`; `sizes` are `TensorSpec.rows_of_rank` of each tensor."""
    local = jax.shard_map(
        functools.partial(separate, sizes=sizes, tp=1),
        mesh=mesh,
        in_specs=(partition,),
        out_specs=partition,
        check_vma=False,
    )
    return jax.jit(local, out_shardings=NamedSharding(mesh, partition))
