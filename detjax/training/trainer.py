# SPDX-License-Identifier: Apache-2.0
"""A training step over sharded state: every replica computes whole sequences.

Masters and optimizer state are cut over all devices of a mesh. A step gathers the masters, which
copies bits. Each replica, a device or the ranks that share its layers, computes the gradients of a
run of sequences, some at a time. Gradients of sequences are added as one tree over the step's list
of sequences, of which a replica has a subtree, and each device updates its share. Where replicas
are single devices, all arithmetic except the upper levels of that tree runs in programs for one
device, which are the same for every mesh.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Array, Float32
from detjax.compilation.donation import CheckedJit
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.interpreter_exit import finishes_before_exit
from detjax.models.layers import ForwardContext
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.dispatch import OrderedJit
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.training.batch import Batch, SequenceRun, aligned_runs
from detjax.training.extras import optax
from detjax.training.forward import token_logprobs, token_logprobs_and_balance
from detjax.training.gradients import Backward
from detjax.training.lora import (
    LoraConfig,
    adapter_shapes,
    adapts_experts,
    first_adapter,
    with_adapter,
)
from detjax.training.rounding import by_use, of_uses
from detjax.training.sharing import joined_spec, replicas_of, why_layers_not_shared
from detjax.training.update import global_norm, update_in_blocks, why_not_elementwise
from detjax.training.weights import master_params, master_shapes, move_bits

DEVICES = (DP_AXIS, TP_AXIS)
"""Both axes of the mesh as one: masters and optimizer state are cut over all devices."""

ADD_COLS = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What a step changes. Leaves are arrays, or JAX's placeholders for them.

    Attributes:
        params: Float32 masters (`weights.master_params`).
        opt_state: Of the optimizer.
        step: Updates made, int32; also the version of the weights.
    """

    params: Any
    opt_state: Any
    step: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The results of a step before it changed the weights.

    Attributes:
        logprobs: Of each row's target, float32 [N, M].
        entropy: Of each row's distribution, float32 [N, M], in nats.
        gradient_norm: Of all masters together, before clipping.
    """

    logprobs: np.ndarray
    entropy: np.ndarray
    gradient_norm: float


def state_partition(shape: tuple[int, ...], num_devices: int) -> P:
    """Cut the first axis that divides over all devices; hold the array whole if none does."""
    for axis, size in enumerate(shape):
        if size % num_devices == 0:
            return P(*[None] * axis, DEVICES)
    return P()


class Trainer:
    """Makes and advances the state of one model on one mesh."""

    def __init__(
        self,
        model: LoadedModel,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh,
        clip_norm: float,
        remat: bool = True,
        balance_weight: float = 0.0,
        lora: LoraConfig | None = None,
        backward: Backward = Backward.CANONICAL,
        shares_layers: bool = False,
    ):
        """Describe the state.

        Args:
            model: Says what is trained, and gives the first weights; on a mesh with tp = 1.
            optimizer: Elementwise, since each device runs it on its own share.
            mesh: Over whose devices state and sequences are spread.
            clip_norm: Longest gradient that is applied as it is; longer ones are scaled to it.
            remat: Keep one activation a layer and compute the rest again. Changes no bit of a
                log-probability.
            balance_weight: Of the auxiliary loss that spreads rows over a model's experts, in each
                microbatch (`forward.token_logprobs_and_balance`); 0 leaves it out.
            lora: The adapter that is trained while the weights stay; None trains the weights.
            backward: The order of sums of the backward pass.
            shares_layers: Whether the ranks of tp share the matrices of each layer while they
                compute, as a server's do; else each computes sequences of its own. Changes no bit.

        Raises:
            ValueError: If the model is split over tp, `clip_norm` is not positive, or
                `balance_weight` is negative, or positive for a model without experts or with a
                canonical backward pass; if the devices are no power of two, the optimizer is not
                elementwise, ranks cannot share the layers, or the model cannot have the adapter.
        """
        tp = mesh.shape[TP_AXIS] if shares_layers else 1
        _check_training(model, balance_weight=balance_weight, lora=lora, backward=backward, tp=tp)
        if not clip_norm > 0:
            raise ValueError(f"{clip_norm=} must be positive; float('inf') never clips")
        if mesh.size & (mesh.size - 1):
            raise ValueError(f"{mesh.size} devices must be a power of two")
        if reason := why_not_elementwise(optimizer):
            raise ValueError(reason)
        self._balance_weight, self._backward = balance_weight, backward
        self._model, self._optimizer = model, optimizer
        self._clip_norm, self._remat = clip_norm, remat
        self._lora = lora
        masters = self._trained_shapes()
        replicas = replicas_of(
            mesh, model.config, master_shapes(model), None if lora is None else masters,
            shares_layers=tp > 1,
        )  # fmt: skip
        self._replicas, self._mesh = replicas, replicas.mesh
        self.specs = _state_specs(masters, optimizer, mesh.size)
        fixed = tuple(model.rope_tables), None if lora is None else master_params(model)
        self._fixed_specs = (P(), P()), None if lora is None else replicas.weights
        fixed = jax.tree.map(
            lambda t, spec: move_bits(t, NamedSharding(self._mesh, spec)), fixed, self._fixed_specs
        )
        self._fixed = replicas.each(fixed, self._fixed_specs)
        self._make_programs()

    def _make_programs(self) -> None:
        """Of a step; nothing is compiled yet."""
        replicas, parts = self._replicas, self._replicas.specs
        on_mesh = partial(jax.shard_map, mesh=self._mesh, check_vma=False)
        gather = on_mesh(self._local_gather, in_specs=(self.specs.params,), out_specs=parts)
        joined = jax.tree.map(joined_spec, self._used(parts))
        reduce = on_mesh(self._local_reduce, in_specs=(joined,), out_specs=P())
        self._gather, self._reduce = OrderedJit(jax.jit(gather)), OrderedJit(jax.jit(reduce))
        self._gradients = replicas.programs(
            self._microbatch_gradient, fixed=self._fixed_specs, specs=self._used(parts)
        )
        self._add = CheckedJit(
            partial(jax.tree.map, jnp.add), donate_argnums=0, options=EXACT_OPTIONS
        )
        self._norm = jax.jit(global_norm, compiler_options=EXACT_OPTIONS)
        dtype = self._model.profile.param_dtype
        tie = partial(of_uses, config=self._model.config, dtype=dtype)
        self._tie = jax.jit(tie, compiler_options=EXACT_OPTIONS)
        # WHY: the state of one device goes through as it is, and has one sharding in every step.
        self._update = CheckedJit(
            self._update_share, donate_argnums=0, options=EXACT_OPTIONS,
            out_shardings=self.shardings() if self._mesh.size == 1 else None,
        )  # fmt: skip
        self._ranks = [
            jax.device_put(np.int32(rank), device)
            for rank, device in enumerate(self._mesh.devices.flat)
        ]

    @finishes_before_exit
    def init(self) -> TrainState:
        """Return the state before the first step: the model's weights, exactly."""
        shardings = self.shardings()
        params = jax.tree.map(move_bits, self._first_params(), shardings.params)
        make = OrderedJit(jax.jit(self._optimizer.init, out_shardings=shardings.opt_state))
        step = jax.device_put(jnp.int32(0), shardings.step)
        return TrainState(params=params, opt_state=make(params), step=step)

    def _first_params(self) -> dict:
        """What is trained, before the first step."""
        if self._lora is None:
            return master_params(self._model)
        first = first_adapter(self._model.config, self._lora, seed=self._lora.seed)
        return jax.device_put(first, NamedSharding(self._model.mesh, P()))

    def _trained_shapes(self) -> dict:
        """Shapes of what is trained."""
        if self._lora is None:
            return master_shapes(self._model)
        return adapter_shapes(self._model.config, self._lora)

    def shapes(self) -> TrainState:
        """Return the shape and dtype of each leaf of the state; nothing is computed."""
        params = self._trained_shapes()
        opt_state = jax.eval_shape(self._optimizer.init, params)
        step = jax.ShapeDtypeStruct((), jnp.int32)
        return TrainState(params=params, opt_state=opt_state, step=step)

    def shardings(self) -> TrainState:
        """The sharding of each leaf of the state."""
        return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), self.specs)

    @finishes_before_exit
    def step(self, state: TrainState, batches: list[Batch]) -> tuple[TrainState, StepOutput]:
        """Make one update that raises `sum(weights * logprobs)` over all microbatches.

        Args:
            state: Donated: its arrays are gone afterwards.
            batches: Microbatches of one shape. The list of sequences is theirs, in order.

        Raises:
            ValueError: If there is no microbatch, or one has a token id that is not in the
                vocabulary.

        Numerics:
            Each sequence has a gradient of its own. They are added as the perfect binary tree over
            the list of sequences, ((s0 + s1) + (s2 + s3)) + ..., in float32; what is not there is
            left out. A microbatch, a device and a step of accumulation hold subtrees.
            Claims: run-invariant, batch-invariant, mesh-invariant. With a canonical backward the
            update depends on the list of sequences and on nothing that is cut from it; with XLA's
            also on which sequences share a microbatch.
        """
        self._check_batches(batches)
        total, found = self._total_gradient(state.params, batches)
        state, norm = self._updated(state, total)
        # WHY last: whoever reads waits, and the devices have all their programs by then.
        logprobs, entropy = _rows_of(found, batches)
        output = StepOutput(logprobs=logprobs, entropy=entropy, gradient_norm=float(norm))
        return state, output

    def _total_gradient(
        self, masters: dict, batches: list[Batch]
    ) -> tuple[dict, list[tuple[SequenceRun, Any]]]:
        """The gradient of all sequences, whole on each device; logprobs and entropy of each run.

        WHY: apart from the update, so that whole masters and each replica's sums are freed before.
        """
        specs, is_alone = self._replicas.specs, self._mesh.size == 1
        whole = masters if is_alone else self._gather(masters)
        params = self._replicas.each(whole, specs)
        runs = aligned_runs(batches, num_shares=len(params))
        sums = [SubtreeSums(self._add) for _ in params]
        values: list[tuple[SequenceRun, Any]] = []
        for turn in itertools.zip_longest(*runs):  # so that devices work side by side
            replicas = zip(self._gradients, params, self._fixed, sums, turn, strict=True)
            for gradient_of, own, fixed, total, run in replicas:
                if run is not None:
                    batch = jax.device_put(run.batch, fixed[0][0].sharding)
                    gradient, found = gradient_of(own, fixed, batch)
                    total.add(gradient, size=run.size)
                    values.append((run, found))
        totals = [
            _zeros_like(self._used(own)) if total.is_empty else total.total()
            for own, total in zip(params, sums, strict=True)
        ]
        if is_alone:
            return totals[0], values
        return self._reduce(self._replicas.joined(totals, self._used(specs))), values

    def _check_batches(self, batches: list[Batch]) -> None:
        if not batches:
            raise ValueError(f"{batches=} must have at least one microbatch, which `pack` makes")
        vocab_size = self._model.config.vocab_size
        for i, batch in enumerate(batches):
            ids = np.concatenate([np.asarray(batch.ids), np.asarray(batch.targets)])
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise ValueError(
                    f"microbatch {i} has token ids from {ids.min()} to {ids.max()}; the model's "
                    f"vocabulary is 0 to {vocab_size - 1}"
                )

    def _used(self, tree: dict) -> dict:
        """A tree over masters as one over their uses (`rounding.by_use`): layouts, and shapes."""
        if self._lora is None and self._model.config.tie_word_embeddings:
            return tree | {"lm_head": tree["embed"]}
        return tree

    def _tied(self, total: dict) -> dict:
        """The gradient of masters, of that of their uses: two uses are added once, at the end."""
        if self._lora is None and self._model.config.tie_word_embeddings:
            total = dict(total)
            return total | {"embed": self._tie(total["embed"], total.pop("lm_head"))}
        return total

    def _local_gather(self, params: dict) -> dict:
        """Gather on every device what it has while it computes, by copies only."""

        def gather(share: jax.Array, spec: P, own: P) -> jax.Array:
            axis = _cut_axis(spec)
            if axis is not None:
                share = lax.all_gather(share, DEVICES, axis=axis, tiled=True)
            return self._replicas.own_part(share, own)

        return jax.tree.map(gather, params, self.specs.params, self._replicas.specs)

    def _microbatch_gradient(self, params: dict, fixed, batch: Batch):
        """Return the gradient of the loss, and (logprobs, entropy) of the rows."""
        (tables, frozen), lora, model = fixed, self._lora, self._model
        ctx = ForwardContext(
            config=model.config, profile=model.profile, backend=model.backend,
            tp=self._replicas.tp,
        )  # fmt: skip

        def balanced_loss(params):
            values, balance = token_logprobs_and_balance(
                ctx, params, tables, batch, remat=self._remat
            )
            total = -jnp.sum(batch.weights * values[0])
            return total + self._balance_weight * balance, values

        if lora is None:
            params = by_use(params, model.config, model.profile.param_dtype)
        if self._balance_weight:
            return jax.grad(balanced_loss, has_aux=True)(params)

        def loss(params):
            if lora is not None:
                params = with_adapter(frozen, params, lora)
            values = token_logprobs(
                ctx, params, tables, batch, remat=self._remat, backward=self._backward
            )
            return -jnp.sum(batch.weights * values[0]), values

        return jax.grad(loss, has_aux=True)(params)

    def _local_reduce(self, gradients: dict) -> dict:
        """Add the levels of the tree above the replicas, neighbours first."""

        def add_all(own: Float32[Array, "..."], spec: P) -> Float32[Array, "..."]:
            total = jnp.pad(own.reshape(-1), (0, -own.size % ADD_COLS)).reshape(-1, ADD_COLS)
            size = self._mesh.shape[DP_AXIS]
            total = butterfly_sum(total, DP_AXIS, size, backend=self._model.backend)
            return self._replicas.whole(total.reshape(-1)[: own.size].reshape(own.shape), spec)

        return jax.tree.map(add_all, gradients, self._used(self._replicas.specs))

    def _updated(self, state: TrainState, total: dict) -> tuple[TrainState, jax.Array]:
        """Update every device's share from the whole gradient."""
        totals = [self._tied(one) for one in _by_device(self._mesh, total)]
        states = _by_device(self._mesh, state)
        norm = self._norm(totals[0])
        parts = []
        for own, gradient, rank in zip(states, totals, self._ranks, strict=True):
            norm_here = jax.device_put(norm, rank.sharding)
            parts.append(self._update(own, gradient, rank, norm_here))
        return self._assembled(parts), norm

    def _update_share(self, state: TrainState, total: dict, rank, norm) -> TrainState:
        """The update of one device's share of the state."""
        scale = jnp.minimum(1.0, self._clip_norm / jnp.maximum(norm, 1e-30))

        def own_part(whole: jax.Array, share: jax.Array, spec: P) -> jax.Array:
            axis = _cut_axis(spec)
            if axis is None:
                return whole * scale
            start, size = rank * share.shape[axis], share.shape[axis]
            return lax.dynamic_slice_in_dim(whole, start, size, axis) * scale

        gradient = jax.tree.map(own_part, total, state.params, self.specs.params)
        opt_state, params = update_in_blocks(
            self._optimizer, gradient, state.opt_state, state.params, backend=self._model.backend
        )
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1)

    def _assembled(self, parts: list[TrainState]) -> TrainState:
        """The inverse of `_by_device` for states."""
        if self._mesh.size == 1:
            return parts[0]

        def join(sharding: NamedSharding, *shares: jax.Array) -> jax.Array:
            axis, shape = _cut_axis(sharding.spec), list(shares[0].shape)
            if axis is not None:
                shape[axis] *= self._mesh.size
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(shares))

        return jax.tree.map(join, self.shardings(), *parts)


def _check_training(
    model: LoadedModel,
    *,
    balance_weight: float,
    lora: LoraConfig | None,
    backward: Backward,
    tp: int,
) -> None:
    """Refuse what has no gradients, or none of the order that is asked for.

    Raises:
        ValueError: If so.
    """
    if lora is not None and not isinstance(lora, LoraConfig):
        raise ValueError(f"{lora=} must be a LoraConfig, such as LoraConfig(rank=8, alpha=16.0)")
    if lora is not None and balance_weight:
        raise ValueError(f"{balance_weight=} does not go with an adapter; leave one out")
    why = KERNELS[model.backend].why_no_expert_adapters
    if why and lora is not None and adapts_experts(model.config, lora):
        raise ValueError(
            f"training of adapters of experts on backend {model.backend.value} is not supported: "
            f"{why}; name attention alone in target_modules, or use backend 'reference' or "
            "'portable'"
        )
    if not balance_weight >= 0 or (balance_weight and model.config.experts is None):
        raise ValueError(
            f"{balance_weight=} must be 0, or positive where the model has mixtures of experts"
        )
    if backward is Backward.CANONICAL and balance_weight:
        raise ValueError(
            f"{balance_weight=} has no canonical backward pass, as the balance depends on the "
            "rows that share a microbatch; give backward=Backward.XLA, or leave it out"
        )
    if why := why_layers_not_shared(model.config, model.profile, tp, backward):
        raise ValueError(why)


class SubtreeSums:
    """Adds subtrees as they come, in order, each a power of two of sequences: a binary counter."""

    def __init__(self, add: Callable[[Any, Any], Any]):
        """`add(left, right)` may destroy `left`."""
        self._add = add
        self._subtrees: list[tuple[int, Any]] = []  # (size, sum), largest first

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._subtrees

    def add(self, gradient: Any, *, size: int) -> None:
        """Take the next subtree; all before it are a multiple of its size."""
        while self._subtrees and self._subtrees[-1][0] == size:
            gradient = self._add(self._subtrees.pop()[1], gradient)
            size *= 2
        self._subtrees.append((size, gradient))

    def total(self) -> Any:
        """The sum; subtrees that are not there are left out."""
        (_, total) = self._subtrees.pop()
        while self._subtrees:
            total = self._add(self._subtrees.pop()[1], total)
        return total


def _state_specs(
    params: dict, optimizer: optax.GradientTransformation, num_devices: int
) -> TrainState:
    """Return how each leaf of a state with such parameters is cut over the devices."""
    specs = jax.tree.map(lambda x: state_partition(x.shape, num_devices), params)
    opt_specs = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        jax.eval_shape(optimizer.init, params),
        specs,
        transform_non_params=lambda _: P(),
    )
    return TrainState(params=specs, opt_state=opt_specs, step=P())


def _rows_of(
    found: list[tuple[SequenceRun, Any]], batches: list[Batch]
) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and entropy of each row of the batches, of those of runs; waits for them."""
    logprobs, entropy = (np.zeros((len(batches), len(batches[0].ids)), np.float32) for _ in "ab")
    for run, values in found:
        for rows, of_run in zip((logprobs, entropy), values, strict=True):
            rows[run.source, run.rows] = np.asarray(of_run)[run.places]
    return logprobs, entropy


def _zeros_like(tree: Any) -> Any:
    """Zeros, where the arrays of a tree are."""
    return jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), tree)


def _cut_axis(spec: P) -> int | None:
    """Return which axis of an array is cut over the devices."""
    return next((axis for axis, names in enumerate(spec) if names == DEVICES), None)


def _by_device(mesh: Mesh, tree: Any) -> list[Any]:
    """Return what each device of the mesh holds, as arrays of that device alone."""
    if mesh.size == 1:
        return [tree]
    leaves, structure = jax.tree.flatten(tree)
    by_device = [{s.device: s.data for s in leaf.addressable_shards} for leaf in leaves]
    return [
        jax.tree.unflatten(structure, [shards[device] for shards in by_device])
        for device in mesh.devices.flat
    ]
