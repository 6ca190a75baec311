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
from detjax.models.adapters.adapter import check_can_adapt
from detjax.models.adapters.low_rank import Adapter, LowRank
from detjax.models.adapters.peft_config import MAX_RANK
from detjax.models.adapters.program import ADAPTERS, LAYERS, SLOTS
from detjax.models.loading import LoadedModel
from detjax.models.params import MATRICES, TENSORS_OF, ParamSpec, TensorSpec, param_specs
from detjax.models.weights.packed import MatrixForm
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.lora.adapted import (
    RANK_BLOCK,
    STACK_BLOCK,
    AdapterStack,
)
from detjax.parallel.dispatch import OrderedJit
from detjax.parallel.mesh import DP_AXIS, TP_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSizes:
    """How many adapters are on the devices at once, with vLLM's names. They change no bit.

    Attributes:
        max_loras: Adapters of one batch. There may be a few more slots, to fill whole blocks.
        max_lora_rank: Highest rank of an adapter, up to 128.

    Raises:
        ValueError: If a value is out of range.
    """

    max_loras: int = MAX_LORAS
    max_lora_rank: int = MAX_LORA_RANK

    def __post_init__(self):
        """Check the ranges."""
        if self.max_loras < 1:
            raise ValueError(f"max_loras={self.max_loras} must be at least 1 (--max-loras)")
        if not 1 <= self.max_lora_rank <= MAX_RANK:
            raise ValueError(
                f"max_lora_rank={self.max_lora_rank} must be from 1 to {MAX_RANK} (--max-lora-rank)"
            )

    @classmethod
    def of(cls, is_enabled: bool, **given: int) -> "AdapterSizes | None":
        """Return the sizes if adapters are wanted at all.

        Raises:
            ValueError: If they are not, and a size is given that is not the default.
        """
        sizes = cls(**given)
        if not is_enabled and sizes != cls():
            raise ValueError(
                f"max_loras={sizes.max_loras} and max_lora_rank={sizes.max_lora_rank} are of "
                "adapters; give enable_lora=True (--enable-lora) as well"
            )
        return sizes if is_enabled else None

    @property
    def rank(self) -> int:
        """Ranks of a slot: a power of two of at least `RANK_BLOCK`."""
        return max(RANK_BLOCK, 1 << (self.max_lora_rank - 1).bit_length())

    @property
    def num_slots(self) -> int:
        """Slots: `max_loras`, rounded up to whole blocks of columns."""
        a_block = max(1, STACK_BLOCK // self.rank)
        return -(-self.max_loras // a_block) * a_block


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
    check_can_adapt(model.config)
    if jax.process_count() > 1:
        raise ValueError(
            "adapters in a job of several processes are not supported; leave enable_lora out"
        )
    if model.matrix_form is MatrixForm.W8A8:
        raise ValueError(
            "adapters with quantized_weights='w8a8' are not supported; use 'auto' or 'expanded'"
        )
    _check_numerics(model)
    shapes, specs = _stack_shapes(model, sizes), _stack_specs(model)
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


def _check_numerics(model: LoadedModel) -> None:
    """Refuse kernels that do not add adapters to activations of the model's dtype."""
    compute = model.profile.compute_dtype
    if compute not in KERNELS[model.backend].adapted_dtypes:
        raise ValueError(
            f"adapters with compute {compute} on backend {model.backend.value} are not supported; "
            "use bfloat16, or backend portable"
        )


def _matrix_specs(model: LoadedModel) -> list[dict[str, ParamSpec]]:
    """Of each layer the matrices that may have adapters."""
    specs = param_specs(
        model.config, tp=model.mesh.shape[TP_AXIS], vocab_block=model.profile.vocab_block
    )
    return [{name: layer[name] for name in MATRICES} for layer in specs["layers"]]


def _axes(spec: ParamSpec) -> tuple[Any, Any]:
    """Mesh axes of a matrix's outputs and inputs."""
    outputs, inputs = (*spec.partition, None, None)[:2]
    return outputs, inputs


def _specs_of(spec: ParamSpec) -> AdapterStack:
    outputs, inputs = _axes(spec)
    return AdapterStack(a=P(None, inputs), b=P(outputs, None), scales=P())


def _stack_specs(model: LoadedModel) -> list[dict[str, AdapterStack]]:
    return [
        {name: _specs_of(spec) for name, spec in layer.items()} for layer in _matrix_specs(model)
    ]


def _stack_shapes(model: LoadedModel, sizes: AdapterSizes) -> list[dict[str, AdapterStack]]:
    """Shapes, dtypes and shardings of the stacks."""

    def shapes(spec: ParamSpec) -> AdapterStack:
        parts, (num_out, num_in) = len(spec.tensors), spec.shape
        columns = parts * sizes.num_slots * sizes.rank
        specs, dtype = _specs_of(spec), model.profile.param_dtype

        def shape(dims: tuple[int, int], dtype: Any, partition: P) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(model.mesh, partition)
            return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

        return AdapterStack(
            a=shape((columns, num_in), dtype, specs.a),
            b=shape((num_out, columns), dtype, specs.b),
            scales=shape((parts, sizes.num_slots), jnp.float32, specs.scales),
        )

    return [{name: shapes(spec) for name, spec in layer.items()} for layer in _matrix_specs(model)]


def num_adapter_slots(model: LoadedModel) -> int:
    """Slots for adapters on the devices; 0 of a model without room for adapters."""
    if ADAPTERS not in model.params:
        return 0
    return model.params[ADAPTERS][LAYERS][0][MATRICES[0]].scales.shape[1]


def slot_rank(model: LoadedModel) -> int:
    """Highest rank that a slot holds."""
    return model.params[ADAPTERS][LAYERS][0][MATRICES[0]].rank


# --------------------------------------------------------------------------------- into a slot


def install_adapter(model: LoadedModel, adapter: Adapter, slot: int) -> None:
    """Put an adapter into a slot, in place of the one in it. Programs called before keep theirs.

    Args:
        model: Of `open_adapters`.
        adapter: Of a rank of at most `slot_rank`.
        slot: Which.
    """
    lora = model.params[ADAPTERS]
    rank, tp = slot_rank(model), model.mesh.shape[TP_AXIS]
    layers = []
    for i, (stacks, specs) in enumerate(zip(lora[LAYERS], _matrix_specs(model), strict=True)):
        installed = {}
        for name, spec in specs.items():
            ranks = [adapter.tensors.get((i, tensor)) for tensor in TENSORS_OF[name]]
            new = _packed(ranks, spec, rank=rank, tp=tp, dtype=model.profile.param_dtype)
            installed[name] = _installer(model.mesh, _axes(spec))(
                stacks[name], _placed(new, model.mesh, _axes(spec)), np.int32(slot)
            )
        layers.append(installed)
    # A new dict: launches that are under way have the old one.
    model.params[ADAPTERS] = {**lora, LAYERS: layers}


def _packed(
    ranks: Sequence[LowRank | None], spec: ParamSpec, *, rank: int, tp: int, dtype: jnp.dtype
) -> AdapterStack:
    """One slot of a stack, on the host: a [parts, rank, I], b [O, parts, rank], scales [parts]."""
    parts, (num_out, num_in) = len(spec.tensors), spec.shape
    a, scales = np.zeros((parts, rank, num_in), dtype), np.zeros(parts, np.float32)
    columns = []
    for part, (one, tensor) in enumerate(zip(ranks, spec.tensors, strict=True)):
        column = np.zeros((tensor.shape[0], parts, rank), dtype)
        if one is not None:
            num_ranks = one.a.shape[0]
            a[part, :num_ranks], scales[part] = one.a, one.scale
            column[:, part, :num_ranks] = _stored_rows(one.b, tensor)
        columns.append(column)
    return AdapterStack(a=a, b=_joined(columns, tp).reshape(num_out, parts, rank), scales=scales)


def _stored_rows(b: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Rows as the matrix has them: some key/value heads repeated."""
    return np.concatenate([b[run.source : run.source + run.num_rows] for run in spec.runs])


def _joined(parts: Sequence[np.ndarray], tp: int) -> np.ndarray:
    """As `params.join` has it: each rank's rows of the first tensor, then of the next."""
    return np.concatenate([part.reshape(tp, -1, *part.shape[1:]) for part in parts], axis=1)


def _placed(new: AdapterStack, mesh: Mesh, axes: tuple[Any, Any]) -> AdapterStack:
    """Put one slot of a stack on the devices, split as the stack is."""
    outputs, inputs = axes
    places = AdapterStack(a=P(None, None, inputs), b=P(outputs, None, None), scales=P())
    return jax.tree.map(
        lambda array, place: jax.device_put(array, NamedSharding(mesh, place)), new, places
    )


@functools.cache
def _installer(mesh: Mesh, axes: tuple[Any, Any]) -> Callable[..., AdapterStack]:
    """Write one slot of a stack, into new arrays."""
    outputs, inputs = axes

    def install(stack: AdapterStack, new: AdapterStack, slot: Int32[Array, ""]) -> AdapterStack:
        parts, num_slots = stack.scales.shape
        a = stack.a.reshape(parts, num_slots, stack.rank, -1).at[:, slot].set(new.a)
        b = stack.b.reshape(-1, parts, num_slots, stack.rank).at[:, :, slot].set(new.b)
        return AdapterStack(
            a=a.reshape(stack.a.shape),
            b=b.reshape(stack.b.shape),
            scales=stack.scales.at[:, slot].set(new.scales),
        )

    places = AdapterStack(a=P(None, inputs), b=P(outputs, None), scales=P())
    shardings = jax.tree.map(lambda place: NamedSharding(mesh, place), places)
    return OrderedJit(jax.jit(install, out_shardings=shardings))
