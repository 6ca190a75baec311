# SPDX-License-Identifier: Apache-2.0
"""What a launch is given by the host, and what it gives back: one int32 array each way.

The host fills in an operand record by name and packs it, the device unpacks it by name. Columns, a
row each: page table, that of local layers where they have their own, token ids, then three numbers.
Results go the other way.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from detjax.array_types import Array, Int32
from detjax.engine.sampling.sampling import Choice

_ALIGNMENT = 64
"""Columns.

# WHY: parts begin at multiples of 64 columns, so that a part of a single row is an operand of a
# kernel as it lies: XLA may pass its address, which has to be a multiple of 256 bytes.
"""


_TABLES = "page_table", "local_table"


def _aligned(num_columns: int) -> int:
    return -(-num_columns // _ALIGNMENT) * _ALIGNMENT


def _num_columns(table_len: int, num_ids: int, num_tables: int) -> int:
    return num_tables * _aligned(table_len) + _aligned(num_ids) + 3


def _tables(count: int, table_len: int, num_tables: int) -> dict[str, np.ndarray]:
    """Empty page tables of a record: one, or two where local layers have their own."""
    return {name: np.zeros((count, table_len), np.int32) for name in _TABLES[:num_tables]}


def _pack(tables: list[np.ndarray], token_ids: np.ndarray, *numbers: np.ndarray) -> np.ndarray:
    (count, table_len), num_ids = tables[0].shape, token_ids.shape[1]
    packed = np.zeros((count, _num_columns(table_len, num_ids, len(tables))), np.int32)
    for i, table in enumerate(tables):
        first = i * _aligned(table_len)
        packed[:, first : first + table_len] = table
    ids_at = len(tables) * _aligned(table_len)
    packed[:, ids_at : ids_at + num_ids] = token_ids
    for i, column in enumerate(numbers, start=packed.shape[1] - 3):
        packed[:, i] = column
    return packed


def _unpack_numbers(packed) -> tuple[Any, Any, Any]:
    first, second, third = packed[:, packed.shape[1] - 3 :].T
    return first, second, third


def _unpack_tables(packed, table_len: int, num_ids: int) -> dict[str, Any]:
    """The page tables of packed operands; how many there are follows from the columns."""
    num_tables = (packed.shape[1] - 3 - _aligned(num_ids)) // _aligned(table_len)
    starts = [i * _aligned(table_len) for i in range(num_tables)]
    return {
        name: packed[:, first : first + table_len]
        for name, first in zip(_TABLES, starts, strict=False)
    }


def _unpack_ids(packed, num_ids: int):
    ids_at = packed.shape[1] - 3 - _aligned(num_ids)
    return packed[:, ids_at : ids_at + num_ids]


class _WithTables:
    """An operand record's page tables.

    Attributes:
        page_table: [B, n].
        local_table: [B, n], of local layers; None where they have the pages of the others.
    """

    __slots__ = ()
    page_table: Any
    local_table: Any

    @staticmethod
    def num_columns(*, table_len: int, length: int, num_tables: int = 1) -> int:
        """Columns of the packed array."""
        return _num_columns(table_len, length, num_tables)

    @property
    def tables(self) -> list[Any]:
        """One, or two where local layers have their own."""
        both = self.page_table, self.local_table
        return [table for table in both if table is not None]

    @classmethod
    def _numbers(cls) -> list[str]:
        """Names of the fields that have one number a row, where no field has token ids."""
        return [name for name in cls.__slots__ if name not in _TABLES]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOperands(_WithTables):
    """A chunk of a prompt in each row. All int32; NumPy arrays on the host.

    Attributes:
        slot: [B]; `unwanted_slot` where the token chosen after the chunk is not wanted.
        start: [B], position of the first token.
        count: [B], tokens; 0 is padding.
        page_table: [B, n].
        local_table: As `_WithTables` has it.
        token_ids: [B, T]; -1 is padding.
    """

    slot: Any
    start: Any
    count: Any
    page_table: Any
    token_ids: Any
    local_table: Any = None

    @classmethod
    def padding(
        cls, num_rows: int, *, no_slot: int, table_len: int, length: int, num_tables: int = 1
    ) -> "PrefillOperands":
        """Make rows of padding, to be filled in: no slot, no page, no token."""
        return cls(
            slot=np.full(num_rows, no_slot, np.int32),
            start=np.zeros(num_rows, np.int32),
            count=np.zeros(num_rows, np.int32),
            token_ids=np.full((num_rows, length), -1, np.int32),
            **_tables(num_rows, table_len, num_tables),
        )

    def pack(self) -> np.ndarray:
        """Lay the record out as one int32 array."""
        return _pack(self.tables, self.token_ids, self.slot, self.start, self.count)

    @classmethod
    def unpack(cls, packed, *, table_len: int, length: int) -> "PrefillOperands":
        """Find the record in a packed array, on the host or the device."""
        slot, start, count = _unpack_numbers(packed)
        return cls(
            slot=slot,
            start=start,
            count=count,
            token_ids=_unpack_ids(packed, length),
            **_unpack_tables(packed, table_len, length),
        )


class _WithoutIds(_WithTables):
    """An operand record of three numbers a row, `slot` first, and no token ids."""

    __slots__ = ()

    @staticmethod
    def num_columns(*, table_len: int, length: int, num_tables: int = 1) -> int:
        """Columns of the packed array, whatever the length."""
        return _num_columns(table_len, 0, num_tables)

    @classmethod
    def padding[T: _WithTables](
        cls: type[T], num_rows: int, *, no_slot: int, table_len: int, num_tables: int = 1
    ) -> T:
        """Make rows of padding, to be filled in: no slot, no page, nothing to do."""
        numbers = {name: np.zeros(num_rows, np.int32) for name in cls._numbers()}
        numbers["slot"][:] = no_slot
        return cls(**numbers, **_tables(num_rows, table_len, num_tables))

    def pack(self) -> np.ndarray:
        """Lay the record out as one int32 array."""
        no_ids = self.page_table[:, :0]
        return _pack(self.tables, no_ids, *(getattr(self, name) for name in self._numbers()))

    @classmethod
    def unpack[T: _WithTables](cls: type[T], packed, *, table_len: int) -> T:
        """Find the record in a packed array, on the host or the device."""
        numbers = dict(zip(cls._numbers(), _unpack_numbers(packed), strict=True))
        return cls(**numbers, **_unpack_tables(packed, table_len, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOperands(_WithoutIds):
    """Tokens to decode for each row, from its slot. All int32; NumPy arrays on the host.

    Attributes:
        slot: [B]; out of range for padding.
        is_draft: [B], 1 if the tokens go behind the drafts of the slot's window, 0 if they are
            committed. How many drafts there are is in the slot, so that rows stay as they are.
        count: [B], tokens wanted of a launch of several.
        page_table: [B, n].
        local_table: As `_WithTables` has it.
    """

    slot: Any
    is_draft: Any
    count: Any
    page_table: Any
    local_table: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsOperands(_WithoutIds):
    """Windows that a launch drafts and verifies for each row, one after the other. All int32.

    Attributes:
        slot: [B]; out of range for padding.
        most_tokens: [B], that they may commit; behind these a row is padding.
        count: [B], windows.
        page_table: [B, n].
        local_table: As `_WithTables` has it.
    """

    slot: Any
    most_tokens: Any
    count: Any
    page_table: Any
    local_table: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOperands(_WithTables):
    """A window in each row. All int32; NumPy arrays on the host.

    Attributes:
        slot: [B]; out of range for padding.
        num_drafts: [B], drafts of the window.
        is_given: [B], 1 where the drafts are `token_ids`, 0 where they are in the slot.
        page_table: [B, n].
        local_table: As `_WithTables` has it.
        token_ids: [B, W]; the first column is not read, since the committed token is in the slot.
    """

    slot: Any
    num_drafts: Any
    is_given: Any
    page_table: Any
    token_ids: Any
    local_table: Any = None

    @classmethod
    def padding(
        cls, num_rows: int, *, no_slot: int, table_len: int, length: int, num_tables: int = 1
    ) -> "VerifyOperands":
        """Make rows of padding, to be filled in: no slot, no page, no draft."""
        return cls(
            slot=np.full(num_rows, no_slot, np.int32),
            num_drafts=np.zeros(num_rows, np.int32),
            is_given=np.zeros(num_rows, np.int32),
            token_ids=np.zeros((num_rows, length), np.int32),
            **_tables(num_rows, table_len, num_tables),
        )

    def pack(self) -> np.ndarray:
        """Lay the record out as one int32 array."""
        return _pack(self.tables, self.token_ids, self.slot, self.num_drafts, self.is_given)

    @classmethod
    def unpack(cls, packed, *, table_len: int, length: int) -> "VerifyOperands":
        """Find the record in a packed array, on the host or the device."""
        slot, num_drafts, is_given = _unpack_numbers(packed)
        return cls(
            slot=slot,
            num_drafts=num_drafts,
            is_given=is_given,
            token_ids=_unpack_ids(packed, length),
            **_unpack_tables(packed, table_len, length),
        )


def unwanted_slot(slot: int, num_slots: int) -> int:
    """Name a slot whose sequence a row has, so that nothing is written to it: out of range."""
    return num_slots + 1 + slot


def sequence_slot(slot, num_slots: int) -> Int32[Array, " B"]:
    """The slot of a row's sequence, also where it is an `unwanted_slot`."""
    return jnp.where(slot > num_slots, slot - num_slots - 1, slot)


def slot_of(packed: np.ndarray) -> np.ndarray:
    """Read the slots of packed operands of any kind, int32 [B]."""
    return packed[:, -3]


# ---------------------------------------------------------------------------------------- results


def pack_choice(choice: Choice) -> Int32[Array, "B n"]:
    """Lay a choice out as one array for the host to read: token ids, and the bits of logprobs."""
    as_int = lax.bitcast_convert_type
    return jnp.concatenate(
        [
            choice.token_ids[:, None],
            as_int(choice.logprobs, jnp.int32)[:, None],
            choice.top_ids,
            as_int(choice.top_logprobs, jnp.int32),
        ],
        axis=1,
    )


def unpack_choice(packed: np.ndarray, num_top: int) -> Choice:
    """Read the choices of a prefill, a decode or a verify step on the host; any leading axes."""
    top_logprobs = np.ascontiguousarray(packed[..., 2 + num_top : 2 + 2 * num_top])
    return Choice(
        token_ids=packed[..., 0],
        logprobs=packed[..., 1].view(np.float32),
        top_ids=packed[..., 2 : 2 + num_top],
        top_logprobs=top_logprobs.view(np.float32),
    )


def pack_verified(
    choice: Choice, num_accepted: Int32[Array, " B"], *, length: int
) -> Int32[Array, "B T X"]:
    """Lay out the choices of whole windows, and how many of each are committed.

    Those are the accepted drafts and the choice behind them.
    """
    shape = len(num_accepted), length
    num_committed = jnp.broadcast_to(num_accepted[:, None] + 1, shape)[..., None]
    return jnp.concatenate([pack_choice(choice).reshape(*shape, -1), num_committed], axis=-1)


def extend_live_range(
    table: Int32[Array, "B n"], result: Int32[Array, "B ..."]
) -> Int32[Array, "B ..."]:
    """Return a result, until which the page table is live: XLA gives the two no common buffer.

    # WHY: a result has a new address in every step. Attention of each layer reads the table, so in
    a common buffer the CUDA graph of a step would be given as many new addresses every time. An
    entry is a page's number and never the least integer, so the result does not change.
    """
    entry = table[0, jnp.clip(result.reshape(-1)[0], 0, table.shape[1] - 1)]
    return jnp.where(entry == jnp.iinfo(jnp.int32).min, 0, result)


def unpack_num_committed[A: (np.ndarray, jax.Array)](packed: A) -> A:
    """Read how many tokens each window of a verify step commits, int32 [B]."""
    return packed[:, 0, -1]
