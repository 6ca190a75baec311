# SPDX-License-Identifier: Apache-2.0
"""Adapters on the devices of an engine: what lies in their slots.

The scheduler decides which adapter is in which slot. Here it is put there, before the first step
that reads it. Programs that were launched before keep the arrays that they were given.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding

from detjax.engine.config import ReplicaConfig
from detjax.engine.requests.sequence import Sequence
from detjax.engine.running.device_arrays import BY_ROW
from detjax.models.adapters.low_rank import Adapter
from detjax.models.adapters.program import ADAPTERS, SLOTS
from detjax.models.adapters.stack import install_adapter
from detjax.models.loading import LoadedModel


class ResidentAdapters:
    """What lies in the slots of the devices, and which sequence reads which."""

    def __init__(self, model: LoadedModel, config: ReplicaConfig):
        """Begin with empty slots.

        Args:
            model: On its mesh; with room for adapters or without.
            config: Of each replica.

        Raises:
            ValueError: If another engine fills the slots of this model.
        """
        self._model = model
        self._in_slot: dict[int, str] = {}
        self._of_sequences = np.full((config.num_replicas, config.num_slots), -1, np.int32)
        self._placed: jax.Array | None = None
        if ADAPTERS not in model.params:
            return
        if SLOTS in model.params[ADAPTERS]:
            raise ValueError(
                "another engine fills the slots for adapters of this model; give each engine a "
                "model of its own by share_adapters"
            )
        model.params[ADAPTERS] = {**model.params[ADAPTERS], SLOTS: self._place()}

    def _place(self) -> jax.Array:
        sharding = NamedSharding(self._model.mesh, BY_ROW)
        # WHY: a copy, as a CPU device may hold the very memory, which changes.
        return jax.device_put(self._of_sequences.flatten(), sharding)

    def compile(self) -> None:
        """Compile what puts an adapter into a slot, so that no request waits for it."""
        if ADAPTERS in self._model.params and not self._in_slot:
            install_adapter(self._model, Adapter.of({}), slot=0)  # which is empty as it is

    def bring(self, seq: Sequence) -> None:
        """Put the adapter of an admitted sequence into its slot, if it is not there already."""
        if seq.adapter is not None and self._in_slot.get(seq.adapter_slot) != seq.adapter.sha256:
            # WHY: forgotten first, so that an interrupt leaves no slot with a wrong name.
            self._in_slot.pop(seq.adapter_slot, None)
            install_adapter(self._model, seq.adapter, seq.adapter_slot)
            self._in_slot[seq.adapter_slot] = seq.adapter.sha256
        at = seq.replica, seq.slot
        if self._of_sequences[at] != seq.adapter_slot:
            self._of_sequences[at] = seq.adapter_slot
            self._placed = None

    def in_params(self, params: dict) -> dict:
        """Return weights as a launch takes them now: later changes do not reach it."""
        if ADAPTERS not in params:
            return params
        if self._placed is None:
            self._placed = self._place()
        return {**params, ADAPTERS: {**params[ADAPTERS], SLOTS: self._placed}}
