# SPDX-License-Identifier: Apache-2.0
"""What an engine's launches computed for one sequence, by position and operation."""

import hashlib
from collections import abc
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from detjax.diverge.canonical import Canonical
from detjax.diverge.recorder import Seen, Tap
from detjax.engine.running.launch_operands import DecodeOperands, PrefillOperands, VerifyOperands
from detjax.engine.running.program_key import ChoiceKey, ProgramKey
from detjax.models.config import CacheKind
from detjax.models.loading import LoadedModel
from detjax.models.pages import CachePages, kv_of

CACHED = ("cached_k", "cached_v")
"""Keys and values as the cache holds them after the launch that wrote them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One position of the sequence, in the launch that computed it.

    Attributes:
        key: The program.
        row: Of the program, over all replicas.
        pages: Physical pages of the sequence, as its row of the page table has them.
        values: Canonical values of this position, [ranks, ...], in the order of the program.
        cache: Keys and values of all positions up to this one, [n, L, 2, K, C]; zeros for layers
            that have none.
        beside: The other rows of the launch, for people.
    """

    key: ProgramKey
    row: int
    pages: tuple[int, ...]
    values: dict[Tap, np.ndarray]
    cache: np.ndarray
    beside: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """The rows of a launch, as the host gave them."""

    count: int
    tables: np.ndarray
    ours: int | None
    replica: int


class Recording:
    """Follows one sequence through the launches of an engine.

    The latest launch that computed a position counts: verification overwrites drafts, and a
    preempted sequence is computed again.

    Attributes:
        digests: For each position, the hash of each tap's value, in order.
        choices: For each position with a chosen token, its id and the bits of its logprob.
        step: The requested position, if it was reached.
    """

    def __init__(
        self, model: LoadedModel, token_ids: abc.Sequence[int], *, num_slots: int,
        num_pages: int, captured: int | None,
    ):  # fmt: skip
        """Begin before the first launch.

        Args:
            model: On its mesh.
            token_ids: Of the prompt and the answer. No other row may have them at these positions.
            num_slots: Of a replica.
            num_pages: Of a replica.
            captured: The position whose values are kept, or None.
        """
        self.digests: dict[int, dict[Tap, bytes]] = {}
        self.choices: dict[int, tuple[int, int]] = {}
        self.step: Step | None = None
        self._canonical, self._config = Canonical(model), model.config
        self._token_ids = np.asarray(token_ids, np.int32)
        self._num_slots, self._num_pages = num_slots, num_pages
        self._page_len = model.profile.attention_block
        self._captured = captured
        self._slot: tuple[int, int] | None = None  # (replica, slot)
        self._last: list[int] = []  # positions of the sequence in the last launch

    def on_launch(
        self, key: ProgramKey, host: abc.Sequence[Any], kv_cache: CachePages, seen: dict[Tap, Seen]
    ) -> None:
        """Keep what a launch computed for the sequence."""
        self._last = []
        rows = self._read(key, np.asarray(host[0]))
        if rows.ours is None:
            return
        values = self._canonical.values(seen)
        positions = values[Tap(None, "positions")][0].reshape(rows.count, -1)
        ours = positions[rows.ours]
        (places,) = np.nonzero(ours >= 0)
        if not len(places):
            return
        pages = rows.tables[rows.ours]
        self._last = [int(ours[i]) for i in places]
        mine = {int(ours[i]): self._of_row(values, rows, positions, int(i)) for i in places}
        cached = self._cached(kv_cache, rows.replica, pages, np.fromiter(mine, np.int32))
        for (position, found), entry in zip(mine.items(), cached, strict=True):
            found = _with_cached(found, entry)
            self.digests[position] = {tap: digest(value) for tap, value in found.items()}
            self._note_choice(position, found)
            if position == self._captured:
                self.step = Step(
                    key=key,
                    row=rows.ours,
                    pages=tuple(int(p) for p in pages[: position // self._page_len + 1]),
                    values=found,
                    cache=self._cached(
                        kv_cache, rows.replica, pages, np.arange(position + 1, dtype=np.int32)
                    ),
                    beside=_describe(values, positions, rows),
                )

    def on_choice(self, key: ChoiceKey, given: np.ndarray, seen: dict[Tap, Seen]) -> None:
        """Keep the choice for the sequence in place of the earlier one."""
        num_rows = len(given)
        places = [(at // key.rows, int(slot)) for at, slot in enumerate(given[:, 0])]
        if not self._last or self._slot not in places:
            return
        row, values = places.index(self._slot), self._canonical.values(seen)
        # A window's choices are of all its tokens, others of the last token of the launch.
        positions = self._last if key.length > 1 else self._last[-1:]
        for i, position in enumerate(positions):
            found = {
                tap: value[:, row * key.length + i]
                for tap, value in values.items()
                if value.shape[1] == num_rows * key.length
            }
            self.digests[position] |= {tap: digest(value) for tap, value in found.items()}
            self._note_choice(position, found)
            if self.step is not None and position == self._captured:
                self.step.values.update(found)

    def _note_choice(self, position: int, found: dict[Tap, np.ndarray]) -> None:
        chosen, logprob = Tap(None, "token_id"), Tap(None, "logprob")
        if chosen in found:
            bits = int(found[logprob].view(np.uint32)[0])
            self.choices[position] = int(found[chosen][0]), bits

    def _of_row(
        self, values: dict[Tap, np.ndarray], rows: _Rows, positions: np.ndarray, place: int
    ) -> dict[Tap, np.ndarray]:
        """Return the values of one token; a row's values belong to its last token."""
        assert rows.ours is not None
        width = positions.shape[1]
        is_last = positions[rows.ours, place] == positions[rows.ours].max()
        found = {}
        for tap, value in values.items():
            is_by_token = value.shape[1] == positions.size
            if is_by_token:
                found[tap] = value[:, rows.ours * width + place]
            elif is_last:
                found[tap] = value[:, rows.ours]
        return found

    def _cached(
        self, kv_cache: CachePages, replica: int, pages: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Return entries [n, L, 2, K, C] of positions of a sequence."""
        page_ids = jnp.asarray(replica * self._num_pages + pages[positions // self._page_len])
        offsets = jnp.asarray(positions % self._page_len)
        found: dict[CacheKind, np.ndarray] = {}
        layers = []
        for layer in range(self._config.num_layers):
            kind = self._config.cache_kind(layer)
            if kind == "linear":
                layers.append(None)
                continue
            if kind not in found:
                found[kind] = np.asarray(_entries(kv_of(kv_cache, kind), page_ids, offsets))
            layers.append(found[kind][:, self._config.cache_index(layer)])
        nothing = np.zeros_like(next(entry for entry in layers if entry is not None))
        entries = np.stack([nothing if entry is None else entry for entry in layers], axis=1)
        return self._canonical.keys_and_values(entries)

    def _read(self, key: ProgramKey, packed: np.ndarray) -> _Rows:
        """Find the sequence among the rows of a launch."""
        if key.kind == "prefill":
            given = PrefillOperands.unpack(packed, table_len=key.table_len, length=key.length)
            ours = self._find_prompt(key, given)
        else:
            unpack = DecodeOperands.unpack
            if key.kind == "verify":
                given = VerifyOperands.unpack(packed, table_len=key.table_len, length=key.length)
            else:
                given = unpack(packed, table_len=key.table_len)
            places = [(at // key.rows, int(slot)) for at, slot in enumerate(given.slot)]
            ours = places.index(self._slot) if self._slot in places else None
        return _Rows(
            count=len(packed),
            tables=given.page_table,
            ours=ours,
            replica=0 if ours is None else ours // key.rows,
        )

    def _find_prompt(self, key: ProgramKey, given: PrefillOperands) -> int | None:
        """Return the row that holds a part of the sequence; also note a row that takes its slot."""
        found = None
        for at, (slot, start, count) in enumerate(
            zip(given.slot, given.start, given.count, strict=True)
        ):
            if not count:
                continue
            want = self._token_ids[start : start + count]
            is_ours = np.array_equal(given.token_ids[at, :count], want)
            place = (at // key.rows, int(slot))
            if is_ours:
                found = at
                self._slot = place if slot < self._num_slots else None
            elif place == self._slot:
                self._slot = None
        return found


@jax.jit
def _entries(kv_cache: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> jax.Array:
    return kv_cache[:, page_ids, :, :, offsets]


def _with_cached(values: dict[Tap, np.ndarray], entry: np.ndarray) -> dict[Tap, np.ndarray]:
    """Insert a position's cache entries after the values of each layer's product."""
    found = {}
    for tap, value in values.items():
        found[tap] = value
        if tap.name == "v" and tap.layer is not None:
            for i, name in enumerate(CACHED):
                found[Tap(tap.layer, name)] = entry[tap.layer, i][None]
    return found


def digest(value: np.ndarray) -> bytes:
    """Hash a value, [ranks, ...]; if all ranks are equal, hash one."""
    copies = [np.ascontiguousarray(copy).tobytes() for copy in value]
    same = copies[:1] if len(set(copies)) == 1 else copies
    return hashlib.blake2b(b"".join(same), digest_size=16).digest()


def _describe(values: dict[Tap, np.ndarray], positions: np.ndarray, rows: _Rows) -> tuple[str, ...]:
    """Return a line for each other row of a launch."""
    ids = values[Tap(None, "ids")][0].reshape(positions.shape)
    lines, num_padding = [], 0
    for at, (row, tokens) in enumerate(zip(positions, ids, strict=True)):
        is_token = row >= 0
        if at == rows.ours:
            continue
        if not is_token.any():
            num_padding += 1
            continue
        first, last = int(row[is_token][0]), int(row[is_token][-1])
        where = f"position {first}" if first == last else f"positions {first} to {last}"
        shown = " ".join(str(int(i)) for i in tokens[is_token][:8])
        lines.append(f"row {at}: {where}, token ids {shown}{' ...' if is_token.sum() > 8 else ''}")
    if num_padding:
        lines.append(f"rows of padding: {num_padding}")
    return tuple(lines)
