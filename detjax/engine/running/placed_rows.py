# SPDX-License-Identifier: Apache-2.0
"""The rows of steps that decode, kept from step to step, on the host and then on the devices.

Until a sequence comes, goes or needs a page, every decode step has the same rows. They are laid out
once: on a small model the host is what a step waits for. From their second step on they stay on the
devices, which needs no transfer and no new address in the CUDA graph.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from detjax.engine.metrics import EngineStats
from detjax.engine.running.device_arrays import BY_ROW
from detjax.engine.running.program_key import ProgramKey


@dataclass(kw_only=True, slots=True)
class DecodeStep:
    """A decode step, or windows, that may be launched many times. `PlacedRows` alone changes it.

    Attributes:
        key: Its program.
        packed: `DecodeOperands` or `WindowsOperands`, int32, on the host.
        inputs: What both follow from.
        was_sent: Whether it has been launched.
        placed: `packed` on the devices; None before the second launch.
    """

    key: ProgramKey
    packed: np.ndarray
    inputs: Hashable
    was_sent: bool = False
    placed: jax.Array | None = None


class PlacedRows:
    """The last step of each name."""

    def __init__(self, mesh: Mesh, stats: EngineStats):
        """Keep no step yet.

        Args:
            mesh: Of the programs.
            stats: Where transfers are counted.
        """
        self._mesh, self._stats = mesh, stats
        self._last: dict[str, DecodeStep] = {}

    def step(
        self, name: str, inputs: Hashable, make: Callable[[], tuple[ProgramKey, np.ndarray]]
    ) -> DecodeStep:
        """Return the last step of a name if it had these inputs, else a new one.

        Args:
            name: The weights that it decodes with, or which of the step's windows it has.
            inputs: What the program and its operands follow from.
            make: Makes the program and the operands, which must not be written over.
        """
        last = self._last.get(name)
        if last is None or last.inputs != inputs:
            key, packed = make()
            last = self._last[name] = DecodeStep(key=key, packed=packed, inputs=inputs)
        return last

    def place(self, step: DecodeStep) -> np.ndarray | jax.Array:
        """Return the operands of a step that is launched now, on the devices from the second time.

        Args:
            step: Of `step`.
        """
        if step.placed is not None:
            return step.placed
        self._stats.decode_transfers += 1
        # Placing is collective where there are several processes.
        if step.was_sent and jax.process_count() == 1:
            step.placed = jax.device_put(step.packed, NamedSharding(self._mesh, BY_ROW))
        step.was_sent = True
        return step.packed if step.placed is None else step.placed
