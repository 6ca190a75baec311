# SPDX-License-Identifier: Apache-2.0
"""Adapters on the devices: a fixed number of slots, filled while programs run.

`adapters.program` says how `params` hold them. The base weights are those of the model without
adapters.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Int32
from detjax.defaults import MAX_LORA_RANK, MAX_LORAS
from detjax.models.adapters.limits import check_adapter_sizes
from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.program import ADAPTERS, LAYERS, SLOTS
from detjax.models.loading import LoadedModel
from detjax.models.params import (
    ADAPTED_MATRICES,
    EXPERT_MATRICES,
    TENSORS_OF,
    ParamSpec,
    param_specs,
    stored_rows,
)
from detjax.models.weights.packed import MatrixForm
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.lora.adapted import (
    RANK_BLOCK,
    STACK_BLOCK,
    AdapterStack,
)
from detjax.parallel.dispatch import OrderedJit
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

MATRIX_NDIM = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSizes:
    """How many adapters are on the devices at once, with vLLM's names. They change no bit.

    Attributes:
        max_loras: Adapters of one batch. There may be a few more slots, to fill whole blocks.
        max_lora_rank: Highest rank of an adapter, up to 128.
        max_expert_lora_rank: Highest rank of an adapter of experts, up to 128. 0 is no room for
            them: a mixture's layers are then those of a model without adapters.

    Raises:
        ValueError: If a value is out of range.
    """

    max_loras: int = MAX_LORAS
    max_lora_rank: int = MAX_LORA_RANK
    max_expert_lora_rank: int = 0

    def __post_init__(self):
        """Check the ranges."""
        check_adapter_sizes(is_enabled=True, **dataclasses.asdict(self))

    @classmethod
    def of(cls, is_enabled: bool, **given: int) -> "AdapterSizes | None":
        """Return the sizes if adapters are wanted at all.

        Raises:
            ValueError: As `check_adapter_sizes` says.
        """
        check_adapter_sizes(is_enabled=is_enabled, **given)
        return cls(**given) if is_enabled else None

    @property
    def rank(self) -> int:
        """Ranks of a slot: a power of two of at least `RANK_BLOCK`."""
        return _whole_rank(self.max_lora_rank)

    @property
    def expert_rank(self) -> int:
        """Ranks of a slot in the matrices of experts, likewise; 0 if there is no room."""
        return _whole_rank(self.max_expert_lora_rank) if self.max_expert_lora_rank else 0

    @property
    def num_slots(self) -> int:
        """Slots: `max_loras`, rounded up to whole blocks of columns."""
        lowest = min(self.rank, self.expert_rank or self.rank)
        a_block = max(1, STACK_BLOCK // lowest)
        return -(-self.max_loras // a_block) * a_block


def _whole_rank(most: int) -> int:
    """The power of two of at least `RANK_BLOCK` that holds a rank."""
    return max(RANK_BLOCK, 1 << (most - 1).bit_length())


def open_adapters(model: LoadedModel, sizes: AdapterSizes | None) -> LoadedModel:
    """Give a model room for adapters, for one engine.

    Args:
        model: Loaded. It shares its weights with the result.
        sizes: Of the room; None is no room.

    Returns:
        The model with empty slots on its devices, or the model itself if there is no room.

    Raises:
        ValueError: If the model, its numerics or its kernels do not go with adapters.
    """
    if sizes is None:
        return model
    if jax.process_count() > 1:
        raise ValueError(
            "adapters in a job of several processes are not supported; leave enable_lora out"
        )
    if model.matrix_form is MatrixForm.W8A8:
        raise ValueError(
            "adapters with quantized_weights='w8a8' are not supported; use 'auto' or 'expanded'"
        )
    _check_kernels(model)
    _check_experts(model, sizes)
    shapes = _stack_shapes(model, sizes)
    specs = jax.tree.map(lambda one: one.sharding.spec, shapes)
    make = jax.jit(
        lambda: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes),
        out_shardings=jax.tree.map(lambda one: one.sharding, shapes),
    )
    return dataclasses.replace(
        model,
        params={**model.params, ADAPTERS: {LAYERS: make()}},
        partition_specs={
            **model.partition_specs, ADAPTERS: {LAYERS: specs, SLOTS: P(DP_AXIS)},
        },
    )  # fmt: skip


def share_adapters(model: LoadedModel) -> LoadedModel:
    """Give another engine slots of its own on the same weights; a model without is returned."""
    if ADAPTERS not in model.params:
        return model
    layers = model.params[ADAPTERS][LAYERS]
    return dataclasses.replace(model, params={**model.params, ADAPTERS: {LAYERS: layers}})


def _check_kernels(model: LoadedModel) -> None:
    """Refuse kernels that do not add adapters to such a model's activations."""
    compute = model.profile.compute_dtype
    if compute not in KERNELS[model.backend].adapted_dtypes:
        raise ValueError(
            f"adapters with compute {compute} on backend {model.backend.value} are not supported; "
            "use bfloat16, or backend portable"
        )


def _check_experts(model: LoadedModel, sizes: AdapterSizes) -> None:
    """Refuse room for adapters of experts that there are not, or that cannot have them."""
    if not sizes.max_expert_lora_rank:
        return
    if model.config.experts is None:
        raise ValueError(
            f"max_expert_lora_rank={sizes.max_expert_lora_rank} is of experts, and this model has "
            "none; leave it out (--max-expert-lora-rank)"
        )
    if model.config.has_clamped_experts:
        raise ValueError(
            "adapters of experts with biases and a clamp are not supported; use "
            "max_expert_lora_rank=0 (--max-expert-lora-rank)"
        )
    if why := KERNELS[model.backend].why_no_expert_adapters:
        raise ValueError(
            f"adapters of experts on backend {model.backend.value} are not supported: {why}; use "
            "max_expert_lora_rank=0, or backend 'reference' or 'portable'"
        )


def _matrix_specs(model: LoadedModel) -> list[dict[str, ParamSpec]]:
    """Of each layer the matrices that may have adapters."""
    specs = param_specs(
        model.config, tp=model.mesh.shape[TP_AXIS], vocab_block=model.profile.vocab_block
    )
    names = (*ADAPTED_MATRICES, *EXPERT_MATRICES)
    return [{name: layer[name] for name in names if name in layer} for layer in specs["layers"]]


def _axes(spec: ParamSpec) -> tuple[Any, Any, Any]:
    """Mesh axes of a matrix's experts, outputs and inputs; None for experts if it is one matrix."""
    *experts, outputs, inputs = (*spec.partition, None, None)[: len(spec.shape)]
    return (experts[0] if experts else None), outputs, inputs


def _partitions(spec: ParamSpec) -> AdapterStack:
    """How the stack of a matrix is split."""
    experts, outputs, inputs = _axes(spec)
    lead = (experts,) * (len(spec.shape) - MATRIX_NDIM)
    return AdapterStack(a=P(*lead, None, inputs), b=P(*lead, outputs, None), scales=P())


def _stack_shapes(model: LoadedModel, sizes: AdapterSizes) -> list[dict[str, AdapterStack]]:
    """Shapes, dtypes and shardings of the stacks."""

    def shapes(name: str, spec: ParamSpec) -> AdapterStack:
        parts, (*lead, num_out, num_in) = len(spec.tensors), spec.shape
        rank = sizes.expert_rank if name in EXPERT_MATRICES else sizes.rank
        columns = parts * sizes.num_slots * rank
        specs, dtype = _partitions(spec), model.profile.param_dtype

        def shape(dims: Sequence[int], dtype: Any, partition: P) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(model.mesh, partition)
            return jax.ShapeDtypeStruct(tuple(dims), dtype, sharding=sharding)

        return AdapterStack(
            a=shape((*lead, columns, num_in), dtype, specs.a),
            b=shape((*lead, num_out, columns), dtype, specs.b),
            scales=shape((parts, sizes.num_slots), jnp.float32, specs.scales),
        )

    return [
        {
            name: shapes(name, spec)
            for name, spec in layer.items()
            if sizes.expert_rank or name not in EXPERT_MATRICES
        }
        for layer in _matrix_specs(model)
    ]


def num_adapter_slots(model: LoadedModel) -> int:
    """Slots for adapters on the devices; 0 of a model without room for adapters."""
    if ADAPTERS not in model.params:
        return 0
    return _a_stack(model).scales.shape[1]


def slot_rank(model: LoadedModel) -> int:
    """Highest rank that a slot holds."""
    return _a_stack(model).rank


def _a_stack(model: LoadedModel) -> AdapterStack:
    """One of the stacks that are of no expert."""
    first = model.params[ADAPTERS][LAYERS][0]
    return next(first[name] for name in ADAPTED_MATRICES if name in first)


def expert_slot_rank(model: LoadedModel) -> int:
    """Highest rank that a slot holds of experts; 0 if it has no room for them."""
    layers = model.params[ADAPTERS][LAYERS]
    ranks = (layer[EXPERT_MATRICES[0]].rank for layer in layers if EXPERT_MATRICES[0] in layer)
    return next(ranks, 0)


# --------------------------------------------------------------------------------- into a slot


def install_adapter(model: LoadedModel, adapter: Adapter, slot: int) -> None:
    """Put an adapter into a slot, in place of the one in it. Programs called before keep theirs.

    Args:
        model: Of `open_adapters`.
        adapter: Of a rank of at most `slot_rank`.
        slot: Which.
    """
    lora = model.params[ADAPTERS]
    tp, dtype = model.mesh.shape[TP_AXIS], model.profile.param_dtype
    layers = []
    for i, (stacks, specs) in enumerate(zip(lora[LAYERS], _matrix_specs(model), strict=True)):
        installed = {}
        for name, stack in stacks.items():
            spec = specs[name]
            names = TENSORS_OF[name][: len(spec.tensors)]
            ranks = [adapter.tensors.get((i, tensor)) for tensor in names]
            new = _packed(ranks, spec, rank=stack.rank, tp=tp, dtype=dtype)
            partitions = _partitions(spec)
            installed[name] = _installer(model.mesh, partitions)(
                stack, _placed(new, model.mesh, partitions), np.int32(slot)
            )
        layers.append(installed)
    # A new dict: launches that are under way have the old one.
    model.params[ADAPTERS] = {**lora, LAYERS: layers}


def _packed(
    ranks: Sequence[LowRank | None], spec: ParamSpec, *, rank: int, tp: int, dtype: jnp.dtype
) -> AdapterStack:
    """One slot of a stack, on the host: a [parts, rank, I], b [O, parts, rank], scales [parts].

    Of experts a and b have a first axis, one of each.
    """
    parts, (*lead, num_out, num_in) = len(spec.tensors), spec.shape
    a, scales = np.zeros((*lead, parts, rank, num_in), dtype), np.zeros(parts, np.float32)
    columns = []
    for part, (one, tensor) in enumerate(zip(ranks, spec.tensors, strict=True)):
        column = np.zeros((*tensor.shape[:-1], parts, rank), dtype)
        if one is not None:
            num_ranks = one.a.shape[-2]
            a[..., part, :num_ranks, :], scales[part] = one.a, one.scale
            column[..., part, :num_ranks] = stored_rows(one.b, tensor)
        columns.append(column)
    b = np.concatenate(columns, axis=1) if lead else _joined(columns, tp)
    return AdapterStack(a=a, b=b.reshape(*lead, num_out, parts, rank), scales=scales)


def _joined(parts: Sequence[np.ndarray], tp: int) -> np.ndarray:
    """As `params.join` has it: each rank's rows of the first tensor, then of the next."""
    return np.concatenate([part.reshape(tp, -1, *part.shape[1:]) for part in parts], axis=1)


def _placed(new: AdapterStack, mesh: Mesh, partitions: AdapterStack) -> AdapterStack:
    """Put one slot of a stack on the devices, split as the stack is."""
    *lead, _, inputs = partitions.a
    outputs = partitions.b[-2]
    places = AdapterStack(
        a=P(*lead, None, None, inputs), b=P(*lead, outputs, None, None), scales=P()
    )
    return jax.tree.map(
        lambda array, place: jax.device_put(array, NamedSharding(mesh, place)), new, places
    )


@functools.cache
def _installer(mesh: Mesh, partitions: AdapterStack) -> Callable[..., AdapterStack]:
    """Write one slot of a stack, into new arrays."""

    def install(stack: AdapterStack, new: AdapterStack, slot: Int32[Array, ""]) -> AdapterStack:
        slots = *stack.scales.shape, stack.rank
        a = stack.a.reshape(*stack.a.shape[:-2], *slots, stack.a.shape[-1])
        b = stack.b.reshape(*stack.b.shape[:-1], *slots)
        return AdapterStack(
            a=a.at[..., slot, :, :].set(new.a).reshape(stack.a.shape),
            b=b.at[..., slot, :].set(new.b).reshape(stack.b.shape),
            scales=stack.scales.at[:, slot].set(new.scales),
        )

    shardings = jax.tree.map(lambda place: NamedSharding(mesh, place), partitions)
    return OrderedJit(jax.jit(install, out_shardings=shardings))
