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

    Until a sequence comes, goes or needs a page, the next step is told the same, but that drafts
    stand one place further. What stays where it is needs no transfer and no new address in the CUDA
    graph. Where sequences draft, windows open and close all the time: rows that the host sends then
    take the place of those before, so that the address stays at least.
    """

    def __init__(self, mesh: Mesh, stats: EngineStats, *, has_drafts: bool):
        """Nothing is placed yet.

        Args:
            mesh: Of the programs.
            stats: Where transfers are counted.
            has_drafts: Whether rows may be drafts.
        """
        self._mesh, self._stats, self._has_drafts = mesh, stats, has_drafts
        self._last: dict[ProgramKey, tuple[np.ndarray, jax.Array | None]] = {}

    def place(self, key: ProgramKey, packed: np.ndarray) -> np.ndarray | jax.Array:
        """Return the rows of a step, on the devices if they are, or will be, told more than once.

        What it returned before for this program may be written over.

        Args:
            key: The decode program that is to run.
            packed: `DecodeOperands`, as the host has them.
        """
        # WHY: taken out first, as its array is given away: an interrupt leaves nothing of it.
        last, placed = self._last.pop(key, (None, None))
        is_same = last is not None and np.array_equal(last, packed)
        is_behind = self._has_drafts and not is_same and last is not None
        is_behind = is_behind and np.array_equal(DecodeOperands.behind_drafts(last), packed)
        is_new = not (is_same or is_behind)
        self._stats.decode_transfers += is_new or placed is None
        # Placing is collective where there are several processes.
        if is_new and not self._has_drafts or jax.process_count() > 1:
            self._last[key] = packed, None
            return packed
        if placed is None:
            placed = jax.device_put(packed, NamedSharding(self._mesh, BY_ROW))
        elif is_behind:
            placed = row_programs(self._mesh, packed.shape)[0](placed)
        elif is_new:
            placed = row_programs(self._mesh, packed.shape)[1](placed, packed)
        self._last[key] = packed, placed
        return placed


@functools.cache
def row_programs(
    mesh: Mesh, shape: tuple[int, int]
) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array, np.ndarray], jax.Array]]:
    """`DecodeOperands.behind_drafts`, and other rows in the place of these; compiled here once.

    Both are in place, for rows of this shape over all replicas.
    """
    sharding = NamedSharding(mesh, BY_ROW)
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    options = {"donate_argnums": 0, "out_shardings": sharding}
    behind = jax.jit(DecodeOperands.behind_drafts, **options).lower(rows)
    replaced = jax.jit(lambda old, new: old.at[:].set(new), **options).lower(rows, rows)
    return compile_checked(behind, EXACT_OPTIONS), compile_checked(replaced, EXACT_OPTIONS)
