# SPDX-License-Identifier: Apache-2.0
"""Probes as the rows of a program: its operands, and slots that no sequence has."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detjax.engine.config import ReplicaConfig
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import Slots
from detjax.engine.running.launch_operands import (
    DecodeOperands,
    PrefillOperands,
    VerifyOperands,
    WindowsOperands,
)
from detjax.engine.running.program_key import ProgramKey
from detjax.engine.sampling.sampling import IDLE_ROW, SamplingRows
from detjax.engine.self_check.probes import Placement

_MOST_COMPANY_PAGES = 4
"""Pages of the longest row beside the probes: company costs time, and its length shows nothing."""


def scratch_slots(config: ReplicaConfig) -> tuple[Slots, SamplingRows]:
    """Slots for a launch that commits nothing."""
    count = config.num_replicas * config.num_slots
    window = np.zeros((count, config.verify_window), np.int32)
    slots = Slots.without_drafts(window, np.zeros(count, np.int32))
    return slots, SamplingRows.pack([IDLE_ROW] * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Probes in one launch.

    Attributes:
        probes: Indices into those of the placement.
        rows: Of the program on each replica, one a probe, in ascending order.
    """

    probes: tuple[int, ...]
    rows: tuple[int, ...]


def make_groups(probes: Sequence[int], num_rows: int) -> list[Group]:
    """Spread probes over the rows of a program, from the first to the last; as few as will do."""
    groups = []
    for first in range(0, len(probes), num_rows):
        some = tuple(probes[first : first + num_rows])
        rows = np.linspace(num_rows - 1, 0, len(some)).round().astype(int)
        groups.append(Group(probes=some, rows=tuple(rows.tolist())))
    return groups


class RowMaker:
    """Lays out launches of one placement."""

    def __init__(self, config: ReplicaConfig, placement: Placement, *, vocab_size: int):
        """For an engine of `config`."""
        self._config, self._placement, self._vocab_size = config, placement, vocab_size

    def slots(
        self, key: ProgramKey, group: Group, ids: Sequence[Sequence[int]]
    ) -> tuple[Slots, SamplingRows]:
        """Slots whose newest tokens are `ids[i]` for probe i of the group, and company's."""
        dp, num_slots = self._config.num_replicas, self._config.num_slots
        window = np.zeros((dp, num_slots, self._config.verify_window), np.int32)
        start = np.zeros((dp, num_slots), np.int32)
        sampling = [IDLE_ROW] * num_slots
        for probe, row, tokens in zip(group.probes, group.rows, ids, strict=True):
            slot = self._slot(row)
            window[:, slot, : len(tokens)] = tokens
            start[:, slot] = self._placement.probes[probe].position
            sampling[slot] = self._placement.probes[probe].sampling
        for row, position, _ in self._company(key, group):
            slot = self._slot(row)
            window[:, slot, 0] = position % self._vocab_size
            start[:, slot] = position
            sampling[slot] = (SamplingParams(temperature=1.0, seed=row, noise="common"), row)
        slots = Slots.without_drafts(window.reshape(dp * num_slots, -1), start.reshape(-1))
        return slots, SamplingRows.pack(sampling * dp)

    def decode(self, key: ProgramKey, group: Group) -> np.ndarray:
        """Operands of a decode step of `key.length` tokens a row."""
        dp, num_rows = self._config.num_replicas, key.rows
        operands = DecodeOperands.padding(
            dp * num_rows,
            no_slot=self._config.num_slots,
            table_len=key.table_len,
            num_tables=self._config.num_tables,
        )
        for at, row, tables in self._rows(key, group):
            operands.slot[at], operands.count[at] = self._slot(row), key.length
            _put(operands, at, tables)
        return operands.pack()

    def windows(self, key: ProgramKey, group: Group) -> np.ndarray:
        """Operands of `key.windows` windows a row, as many tokens as they commit."""
        operands = WindowsOperands.padding(
            self._config.num_replicas * key.rows,
            no_slot=self._config.num_slots,
            table_len=key.table_len,
            num_tables=self._config.num_tables,
        )
        operands.most_tokens[:] = key.windows * key.length
        for at, row, tables in self._rows(key, group):
            operands.slot[at], operands.count[at] = self._slot(row), key.windows
            _put(operands, at, tables)
        return operands.pack()

    def verify(self, key: ProgramKey, group: Group, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Operands of a verification; every other probe's drafts are given, else in its slot."""
        operands = VerifyOperands.padding(
            self._config.num_replicas * key.rows,
            no_slot=self._config.num_slots,
            table_len=key.table_len,
            length=key.length,
            num_tables=self._config.num_tables,
        )
        of_row = dict(zip(group.rows, zip(group.probes, ids, strict=True), strict=True))
        for at, row, tables in self._rows(key, group):
            operands.slot[at] = self._slot(row)
            _put(operands, at, tables)
            if row in of_row:
                probe, tokens = of_row[row]
                operands.num_drafts[at] = len(tokens) - 1
                if probe % 2:
                    operands.is_given[at] = 1
                    operands.token_ids[at, 1 : len(tokens)] = tokens[1:]
        return operands.pack()

    def prefill(
        self, key: ProgramKey, chunks: Sequence[tuple[int, int, int, Sequence[int]]]
    ) -> tuple[np.ndarray, SamplingRows]:
        """Operands of a prefill of (row, probe, offset behind its position, token ids).

        Raises:
            ValueError: If tokens lie behind the end of the program's page tables, where a kernel
                would write at an address that is none.
        """
        dp, no_slot = self._config.num_replicas, self._config.num_slots
        operands = PrefillOperands.padding(
            dp * key.rows,
            no_slot=no_slot,
            table_len=key.table_len,
            length=key.length,
            num_tables=self._config.num_tables,
        )
        sampling = [IDLE_ROW] * key.rows
        for row, probe, offset, ids in chunks:
            sampling[row] = self._placement.probes[probe].sampling
            start = self._placement.probes[probe].position + offset
            if start + len(ids) > key.table_len * self._config.page_len:
                raise ValueError(
                    f"tokens from {start} to {start + len(ids) - 1} lie behind the "
                    f"{key.table_len} pages of {key.name}"
                )
            for replica in range(dp):
                at = replica * key.rows + row
                # A choice program finds a row's sampling by its slot.
                operands.slot[at] = min(row, no_slot)
                operands.start[at] = start
                operands.count[at] = len(ids)
                operands.token_ids[at, : len(ids)] = ids
                places = self._placement.places
                _put(operands, at, [its.tables[replica, probe, : key.table_len] for its in places])
        return operands.pack(), SamplingRows.pack(sampling * dp)

    def drafts(self, slots: Slots, group: Group) -> np.ndarray:
        """What is in the windows of a group's slots, [dp, g, W]."""
        window = np.asarray(slots.window)
        window = window.reshape(self._config.num_replicas, self._config.num_slots, -1)
        return window[:, [self._slot(row) for row in group.rows]]

    def _slot(self, row: int) -> int:
        """Another than the row's number, so that they are told apart."""
        return self._config.num_slots - 1 - row

    def _rows(self, key: ProgramKey, group: Group):
        """(row over all replicas, row of the replica, its page tables) of probes and company."""
        places = self._placement.places
        for replica in range(self._config.num_replicas):
            for probe, row in zip(group.probes, group.rows, strict=True):
                tables = [its.tables[replica, probe, : key.table_len] for its in places]
                yield replica * key.rows + row, row, tables
            for row, _, spare in self._company(key, group):
                pages = [its.spare[replica, spare] for its in places]
                tables = [np.full(key.table_len, page, np.int32) for page in pages]
                yield replica * key.rows + row, row, tables

    def _company(self, key: ProgramKey, group: Group):
        """(row, position, which spare page) of short rows beside the probes, each on its own page.

        Before it they read that page again: nobody looks at what they give.
        """
        page_len, others = self._config.page_len, sorted(set(range(key.rows)) - set(group.rows))
        room = page_len - max(key.windows * key.length, 2)
        if room < 1:
            return
        for i, row in enumerate(others[: self._placement.spare.shape[1]]):
            page = i % min(key.table_len, _MOST_COMPANY_PAGES)
            yield row, page * page_len + (37 * row) % room, i


def _put(
    operands: DecodeOperands | PrefillOperands | VerifyOperands | WindowsOperands, at: int, tables
) -> None:
    """Fill in the page tables of a row."""
    for whole, of_row in zip(operands.tables, tables, strict=True):
        whole[at] = of_row
