# SPDX-License-Identifier: Apache-2.0
"""Replicas of a trainer: single devices, or ranks that share each layer as those of a server do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.compilation.donation import CheckedJit
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.models.config import ModelConfig
from detjax.models.params import tensor_specs
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.training.gradients import Backward
from detjax.training.lora import adapter_partitions


def why_layers_not_shared(
    config: ModelConfig, profile: NumericsProfile, tp: int, backward: Backward
) -> str | None:
    """Why ranks cannot share the layers of a model in training, or None if they can."""
    if tp == 1:
        return None
    why = _why_not_split(config, profile, tp, backward)
    return why and f"{tp=}: {why}; give another tp, or leave out shares_layers (--trainer-tp)"


def _why_not_split(
    config: ModelConfig, profile: NumericsProfile, tp: int, backward: Backward
) -> str | None:
    if backward is Backward.XLA:
        return "XLA's backward pass has no order over ranks that share layers"
    if config.experts is not None:
        return "ranks do not share mixtures of experts in training yet"
    if config.linear_attention is not None:
        return "ranks do not share layers of linear attention in training yet"
    if config.is_qk_norm_whole:
        return "ranks do not share a norm over all heads in training yet"
    if config.num_kv_heads % tp:
        return f"ranks cannot share num_kv_heads={config.num_kv_heads} in training"
    widths = {
        "num_heads * head_dim": config.num_heads * config.head_dim,
        "num_kv_heads * head_dim": config.num_kv_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    for name, width in widths.items():
        leaves = tree_reduction(width, profile).num_leaves
        if leaves % tp:
            return f"ranks cannot share the {leaves} leaves of {name}={width}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Who computes sequences together, and what each has of the masters meanwhile.

    Attributes:
        mesh: Of all devices: replicas, and the ranks of each.
        weights: How masters of all weights lie on the ranks of a replica.
        specs: How those lie that are trained: the weights, or an adapter.
    """

    mesh: Mesh
    weights: Any
    specs: Any

    @property
    def tp(self) -> int:
        """Ranks of a replica."""
        return self.mesh.shape[TP_AXIS]

    @property
    def meshes(self) -> list[Mesh]:
        """That of each replica."""
        return [
            Mesh(row[None], self.mesh.axis_names, axis_types=self.mesh.axis_types)
            for row in self.mesh.devices
        ]

    def own_part(self, whole: jax.Array, spec: P) -> jax.Array:
        """A rank's part of an array. Call inside `shard_map`. Copies only."""
        axis = _split_axis(spec)
        if axis is None:
            return whole
        size = whole.shape[axis] // self.tp
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(TP_AXIS) * size, size, axis)

    def whole(self, part: jax.Array, spec: P) -> jax.Array:
        """The inverse of `own_part`."""
        axis = _split_axis(spec)
        return part if axis is None else lax.all_gather(part, TP_AXIS, axis=axis, tiled=True)

    def programs(self, gradient: Callable, *, fixed: Any, specs: Any) -> list[CheckedJit]:
        """`gradient(masters, fixed, batch)` for each replica; `specs` are of its first result.

        A replica of one device runs it as it is, and all of them the same.
        """

        def program(function: Callable) -> CheckedJit:
            return CheckedJit(function, donate_argnums=(), options=EXACT_OPTIONS)

        if self.tp == 1:
            return [program(gradient)] * len(self.meshes)
        return [
            program(
                jax.shard_map(
                    gradient,
                    mesh=mesh,
                    in_specs=(self.specs, fixed, P()),
                    out_specs=(specs, P()),
                    check_vma=False,
                )  # fmt: skip
            )
            for mesh in self.meshes
        ]

    def each(self, tree: Any, specs: Any) -> list[Any]:
        """What each replica holds of arrays of all devices, as arrays of its own devices."""
        if len(self.mesh.devices) == 1:
            return [tree]  # WHY: not the same arrays anew, which costs the host time for each leaf

        def arrays(mesh: Mesh) -> Any:
            def own(leaf: jax.Array, spec: P) -> jax.Array:
                shards = _in_order(leaf, mesh)
                if self.tp == 1:
                    return shards[0]
                sharding = NamedSharding(mesh, spec)
                return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

            return jax.tree.map(own, tree, specs)

        return [arrays(mesh) for mesh in self.meshes]

    def joined(self, trees: list[Any], specs: Any) -> Any:
        """One array of all replicas' for each leaf, along its first axis: the same buffers."""
        meshes = self.meshes

        def join(spec: P, *parts: jax.Array) -> jax.Array:
            pairs = zip(parts, meshes, strict=True)
            shards = [shard for part, mesh in pairs for shard in _in_order(part, mesh)]
            first, *rest = parts[0].shape
            sharding = NamedSharding(self.mesh, joined_spec(spec))
            shape = (len(parts) * first, *rest)
            return jax.make_array_from_single_device_arrays(shape, sharding, shards)

        return jax.tree.map(join, specs, *trees)


def replicas_of(
    mesh: Mesh, config: ModelConfig, weights: Any, adapter: Any, *, shares_layers: bool
) -> Replicas:
    """The rows of a mesh, or its single devices, which have whole masters.

    Args:
        mesh: Of all devices.
        config: Of the model.
        weights: Masters of all weights, or their shapes.
        adapter: Masters of the adapter that is trained; None if the weights are.
        shares_layers: Whether the ranks of a row compute together.
    """
    if shares_layers:
        split = _layer_partitions(config, weights, tp=mesh.shape[TP_AXIS])
        of_adapter = None if adapter is None else adapter_partitions(split["layers"], adapter)
    else:
        devices = mesh.devices.reshape(-1, 1)
        mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        split, of_adapter = jax.tree.map(lambda _: P(), (weights, adapter))
    return Replicas(mesh=mesh, weights=split, specs=split if of_adapter is None else of_adapter)


def joined_spec(spec: P) -> P:
    """How `Replicas.joined` lies on the devices, of what lies so on those of each replica."""
    first, *rest = spec or (None,)
    return P(DP_AXIS if first is None else (DP_AXIS, first), *rest)


def _in_order(array: jax.Array, mesh: Mesh) -> list[jax.Array]:
    """What each device of a mesh holds, in the mesh's order."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in mesh.devices.flat]


def _split_axis(spec: P) -> int | None:
    """Which axis of an array ranks share."""
    return next((axis for axis, name in enumerate(spec) if name == TP_AXIS), None)


def _layer_partitions(config: ModelConfig, masters: Any, *, tp: int) -> Any:
    """Matrices of layers are split as those of serving; tables and gains are whole on each rank."""
    tensors = tensor_specs(config, tp=tp, vocab_block=1)["layers"]
    whole = {name: P() for name in masters if name != "layers"}
    return whole | {"layers": jax.tree.map(lambda spec: spec.partition, tensors)}
