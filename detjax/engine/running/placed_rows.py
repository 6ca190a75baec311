# SPDX-License-Identifier: Apache-2.0
"""The rows of decode steps, kept on the devices from step to step: integers, and no result."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from detjax.engine.metrics import EngineStats
from detjax.engine.running.device_arrays import BY_ROW
from detjax.engine.running.program_key import ProgramKey


class PlacedRows:
    """What the last step of each decode program was told, where it lies.

    Until a sequence comes, goes or needs a page, the next step is told the same. What stays where
    it is needs no transfer and no new address in the CUDA graph.
    """

    def __init__(self, mesh: Mesh, stats: EngineStats):
        """Nothing is placed yet.

        Args:
            mesh: Of the programs.
            stats: Where transfers are counted.
        """
        self._mesh, self._stats = mesh, stats
        self._last: dict[ProgramKey, tuple[np.ndarray, jax.Array | None]] = {}

    def place(self, key: ProgramKey, packed: np.ndarray) -> np.ndarray | jax.Array:
        """Return the rows of a step, on the devices if they are told a second time.

        Args:
            key: The decode program that is to run.
            packed: `DecodeOperands`, as the host has them. They must not be written over.
        """
        last, placed = self._last.get(key, (None, None))
        is_same = last is packed or last is not None and np.array_equal(last, packed)
        if is_same and placed is not None:
            return placed
        self._stats.decode_transfers += 1
        # Placing is collective where there are several processes.
        if is_same and jax.process_count() == 1:
            placed = jax.device_put(packed, NamedSharding(self._mesh, BY_ROW))
        else:
            placed = None
        self._last[key] = packed, placed
        return packed if placed is None else placed
