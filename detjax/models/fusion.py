# SPDX-License-Identifier: Apache-2.0
"""Projections that read the same activations, stored as one matrix: fewer and fuller launches.

Each output column of a linear layer has its own sum, so which matrix it stands in cannot change its
bits. A rank's share is its rows of q, then of k, then of v (and of gate, then of up), so fusing
needs no communication.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from detjax.models.params import ROWS, SHARDED_BIAS, Params

FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
}


def _fuse_layer(layer: dict[str, Any], join: Callable[[str, list], Any]) -> dict[str, Any]:
    """Replace the members of each fused group by what `join` makes of them."""
    members = {name for group in FUSED.values() for name in group}
    fused = {name: leaf for name, leaf in layer.items() if name not in members}
    for name, group in FUSED.items():
        if group[0] in layer:
            fused[name] = join(name, [layer[member] for member in group])
    return fused


def fused_partition_specs(specs: dict[str, Any]) -> dict[str, Any]:
    """The tree of `PartitionSpec` of a fused model."""

    def join(name: str, _: list) -> Any:
        return SHARDED_BIAS if name.endswith("_bias") else ROWS

    return {**specs, "layers": [_fuse_layer(layer, join) for layer in specs["layers"]]}


def fuse_projections_abstractly(shapes: Params) -> Params:
    """The shapes that `fuse_projections` makes of unfused ones."""

    def join(_: str, group: list) -> Any:
        return jax.eval_shape(lambda *members: jnp.concatenate(members), *group)

    return {**shapes, "layers": [_fuse_layer(layer, join) for layer in shapes["layers"]]}


def fuse_projections(params: Params, specs: dict[str, Any], mesh: Mesh) -> Params:
    """Fuse every layer, one at a time, on the devices. Moves bits only.

    Args:
        params: As loaded; what is fused is deleted, so one layer at most is held twice.
        specs: The partition specs of `params`.
        mesh: Where they are.
    """
    (layer_specs,) = {str(layer): layer for layer in specs["layers"]}.values()
    fused_specs = _fuse_layer(layer_specs, lambda name, group: group[0])

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(layer_specs,), out_specs=fused_specs, check_vma=False
    )
    def fuse(layer: dict[str, Any]) -> dict[str, Any]:
        return _fuse_layer(layer, lambda _, group: jnp.concatenate(group))

    layers = []
    for layer in params["layers"]:
        layers.append(fuse(layer))
        for name in layer.keys() - layers[-1].keys():
            layer[name].delete()
    return {**params, "layers": layers}
