# SPDX-License-Identifier: Apache-2.0
"""The engine's programs with operands of the caller, for tests and benchmarks of a step."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import BY_ROW, Slots
from detjax.engine.running.launch_operands import DecodeOperands, PrefillOperands
from detjax.engine.running.program_key import ProgramKey, ProgramKind
from detjax.engine.running.programs import ProgramCache
from detjax.engine.sampling.sampling import SamplingRows
from detjax.models.forward_paths import KernelMode
from detjax.models.loading import LoadedModel


def programs_for(model: LoadedModel, *, num_pages: int, num_slots: int) -> ProgramCache:
    """Programs for one size of cache, without drafts."""
    return ProgramCache(model, num_pages=num_pages, num_slots=num_slots, window_len=1)


def plain_key(
    kind: ProgramKind,
    *,
    rows: int,
    table_len: int,
    length: int = 1,
    mode: KernelMode = "invariant",
    weights: str = "full",
    logit_rows: int = 0,
    leaves_hidden: bool = False,
    leaves_features: bool = False,
    windows: int = 1,
) -> ProgramKey:
    """Return the key of a plain program."""
    return ProgramKey(
        kind=kind,
        rows=rows,
        length=length,
        table_len=table_len,
        mode=mode,
        weights=weights,
        logit_rows=logit_rows,
        leaves_hidden=leaves_hidden,
        leaves_features=leaves_features,
        windows=windows,
    )


def operands_for(
    model: LoadedModel,
    key: ProgramKey,
    *,
    ids: np.ndarray,
    start: np.ndarray,
    table: np.ndarray,
    sampling: Sequence[tuple[SamplingParams, int]],
) -> tuple:
    """Return operands after the cache that make a prefill or decode step run these tokens.

    B counts the rows of all replicas.

    Args:
        model: On its mesh.
        key: Row i of a replica has its slot i, of as many slots as rows.
        ids: int32 [B, T], T = `key.length`.
        start: int32 [B], position of the first token of each row.
        table: int32 [B, n], n = `key.table_len`; pages as their replica counts them.
        sampling: (parameters, sequence index) of each row.

    Returns:
        (slots, sampling, *host arrays).
    """
    count, length = ids.shape
    slot, start = np.arange(count, dtype=np.int32) % key.rows, np.asarray(start, np.int32)
    rows = SamplingRows.pack(list(sampling))
    window = np.zeros((count, 1), np.int32)
    if key.kind == "decode":
        window[:, 0] = ids[:, 0]
        slots = Slots.without_drafts(window, start)
        decode = DecodeOperands(
            slot=slot,
            is_draft=np.zeros(count, np.int32),
            count=np.ones(count, np.int32),
            page_table=table,
        )
        operands = slots, rows, decode.pack()
    else:
        slots = Slots.without_drafts(window, np.zeros(count, np.int32))
        prefill = PrefillOperands(
            slot=slot,
            start=start,
            count=np.full(count, length, np.int32),
            page_table=table,
            token_ids=ids,
        )
        operands = slots, rows, prefill.pack(), rows
    return jax.device_put(operands, NamedSharding(model.mesh, BY_ROW))


def launches(operands: tuple, count: int) -> list[tuple]:
    """Return operands as `operands_for` does, for `count` launches.

    Each launch has slots and sampling parameters of its own, since it writes in place.
    """
    slots, sampling, *host = operands
    return [(*jax.tree.map(jnp.copy, (slots, sampling)), *host) for _ in range(count)]
