# SPDX-License-Identifier: Apache-2.0
"""The engine's programs with operands of one's own, for tests and benchmarks of a single step."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from detjax.models.loading import LoadedModel
from detjax.models.paths import Kernels
from detjax.serving.programs import (
    BY_ROW,
    ProgramCache,
    ProgramKey,
    ProgramKind,
    ProgramSizes,
    Slots,
)
from detjax.serving.request import SamplingParams
from detjax.serving.sampling import SamplingRows


def steps_of(model: LoadedModel, *, num_pages: int, num_slots: int) -> ProgramCache:
    """Programs for one size of cache, without drafts."""
    return ProgramCache(model, ProgramSizes(num_pages=num_pages, num_slots=num_slots, window_len=1))


def plain_step(
    kind: ProgramKind,
    *,
    rows: int,
    table_len: int,
    length: int = 1,
    mode: Kernels = "invariant",
    weights: str = "full",
    num_top: int = 0,
    with_filters: bool = False,
) -> ProgramKey:
    """A step of which little need be said."""
    return ProgramKey(
        kind=kind,
        rows=rows,
        length=length,
        table_len=table_len,
        mode=mode,
        weights=weights,
        num_top=num_top,
        with_filters=with_filters,
    )


def step_operands(
    model: LoadedModel,
    step: ProgramKey,
    *,
    ids: np.ndarray,
    start: np.ndarray,
    table: np.ndarray,
    sampling: Sequence[tuple[SamplingParams, int]],
) -> tuple:
    """Operands behind the cache that make a prefill or decode step run these tokens, on device.

    B counts the rows of all replicas.

    Args:
        model: On its mesh.
        step: Row i of a replica has its slot i, of as many slots as rows.
        ids: int32 [B, T], T = `step.length`.
        start: int32 [B], position of the first token of each row.
        table: int32 [B, n], n = `step.table_len`; pages as their replica counts them.
        sampling: (parameters, sample index) of each row.

    Returns:
        (slots, sampling, *host arrays).
    """
    count = len(ids)
    host = step.layout.padding(count, no_slot=step.rows)
    step.layout.head(host)[:, 0] = np.arange(count) % step.rows
    step.layout.table(host)[...] = table
    rows = SamplingRows.pack(list(sampling))
    window = np.zeros((count, 1), np.int32)
    if step.kind == "decode":
        window[:, 0] = ids[:, 0]
        step.layout.head(host)[:, 1:] = -1, 1  # committed, one token
        slots = Slots(window=window, start=np.asarray(start, np.int32))
        operands = slots, rows, host
    else:
        step.layout.head(host)[:, 1], step.layout.head(host)[:, 2] = start, ids.shape[1]
        step.layout.ids(host)[...] = ids
        slots = Slots(window=window, start=np.zeros(count, np.int32))
        operands = slots, rows, host, rows
    return jax.device_put(operands, NamedSharding(model.mesh, BY_ROW))
