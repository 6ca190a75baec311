# SPDX-License-Identifier: Apache-2.0
"""The rows of decode steps, kept on the devices from step to step: integers, and no result."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from detjax.donation import compile_checked
from detjax.serving.launch_operands import DecodeOperands
from detjax.serving.metrics import EngineStats
from detjax.serving.program_key import ProgramKey
from detjax.serving.programs import BY_ROW
from detjax.xla_flags import EXACT_OPTIONS


class PlacedRows:
    """What the last step of each decode program was told, where it lies.

    Until a sequence comes, goes, needs a page or is verified, the next step is told the same, but
    that drafts stand one place further. What stays where it is needs no transfer and no new address
    in the CUDA graph.
    """

    def __init__(self, mesh: Mesh, stats: EngineStats):
        """Nothing is placed yet. Transfers are counted in `stats`."""
        self._mesh, self._stats = mesh, stats
        self._last: dict[ProgramKey, tuple[np.ndarray, jax.Array | None]] = {}

    def place(self, key: ProgramKey, packed: np.ndarray) -> np.ndarray | jax.Array:
        """Return the rows of a step, on the devices if they follow from those of the last one.

        Args:
            key: The decode program that is to run.
            packed: `DecodeOperands`, as the host has them.
        """
        # WHY: taken out first, as its array is given away: an interrupt leaves nothing of it.
        last, placed = self._last.pop(key, (None, None))
        is_same = last is not None and np.array_equal(last, packed)
        follows = (
            is_same
            or last is not None
            and np.array_equal(DecodeOperands.behind_drafts(last), packed)
        )
        # Placing is collective where there are several processes.
        if not follows or jax.process_count() > 1:
            self._stats.decode_transfers += 1
            self._last[key] = packed, None
            return packed
        if placed is None:
            self._stats.decode_transfers += 1
            placed = jax.device_put(packed, NamedSharding(self._mesh, BY_ROW))
        elif not is_same:
            placed = behind_drafts_program(self._mesh, packed.shape)(placed)
        self._last[key] = packed, placed
        return placed


@functools.cache
def behind_drafts_program(mesh: Mesh, shape: tuple[int, int]) -> Callable[[jax.Array], jax.Array]:
    """`DecodeOperands.behind_drafts` in place, for rows of this shape; compiled here once."""
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, BY_ROW))
    jitted = jax.jit(DecodeOperands.behind_drafts, donate_argnums=0, out_shardings=rows.sharding)
    return compile_checked(jitted.lower(rows), EXACT_OPTIONS)
