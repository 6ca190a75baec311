# SPDX-License-Identifier: Apache-2.0
"""Sequences laid out as the rows of a forward pass: packed end to end, or padded to one length."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

PACKED_ROWS = 64
"""Packed rows are rounded up to a multiple of this, to bound the number of programs."""
MAX_WEIGHT = float(np.finfo(np.float32).max)
"""Rows have their weights in float32."""


class Layout(enum.Enum):
    """How sequences become rows. Neither layout changes a bit of a log-probability."""

    PADDED = "padded"  # every sequence takes as many rows as the longest may
    PACKED = "packed"  # one after the other; attention alone pads


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A sequence of tokens, with a weight for the log-probability of each.

    Attributes:
        token_ids: At least two.
        weights: Of `log p(token_ids[i] | token_ids[:i])` in the objective; 0 leaves a token out.
            The first has no log-probability, so its weight must be 0.

    Raises:
        ValueError: If the lengths do not agree, the first weight is not 0, or one is not finite.
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        """Check lengths and weights."""
        if len(self.token_ids) < 2:
            raise ValueError(f"{len(self.token_ids)} tokens have nothing to predict; give two")
        if len(self.token_ids) != len(self.weights):
            raise ValueError(
                f"{len(self.token_ids)} tokens with {len(self.weights)} weights; give one each"
            )
        if self.weights[0] != 0:
            raise ValueError(f"the first token's weight {self.weights[0]} must be 0")
        for i, weight in enumerate(self.weights):
            if not abs(weight) <= MAX_WEIGHT:  # which NaN is not either
                raise ValueError(
                    f"weights[{i}]={weight} must be a finite float32 number: it would make all "
                    "trained weights NaN"
                )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of a forward pass: each is a token that predicts the next one of its sequence.

    Attributes:
        ids: int32 [M].
        targets: The token to predict, int32 [M].
        weights: Of its log-probability, float32 [M]; 0 for padding.
        places: Sequence times `length` plus position, int32 [M]; from `num_sequences * length` on,
            each once, for padding.
        lengths: Rows of each sequence, int32 [B].
        length: Most rows of a sequence.
    """

    ids: Any
    targets: Any
    weights: Any
    places: Any
    lengths: Any
    length: int = field(metadata={"static": True})


def pack(
    sequences: Sequence[Scored],
    *,
    length: int,
    num_sequences: int | None = None,
    num_rows: int | None = None,
    layout: Layout = Layout.PADDED,
) -> Batch:
    """Lay out sequences as rows, on the host.

    Args:
        sequences: In order.
        length: Most rows of a sequence: its tokens less the last, which predicts nothing.
        num_sequences: Room for this many; the rest are empty. None makes room for those given.
        num_rows: Rows in all of a packed layout; None rounds up to a multiple of `PACKED_ROWS`.
        layout: How.

    Raises:
        ValueError: If something does not fit, naming it.
    """
    room = len(sequences) if num_sequences is None else num_sequences
    if len(sequences) > room:
        raise ValueError(f"{len(sequences)} sequences do not fit into {num_sequences=}")
    lengths = np.zeros(room, np.int32)
    for i, sequence in enumerate(sequences):
        lengths[i] = len(sequence.token_ids) - 1
        if lengths[i] > length:
            raise ValueError(f"sequence {i} has {lengths[i]} rows, more than {length=}")
    if layout is Layout.PADDED:
        if num_rows not in (None, room * length):
            raise ValueError(f"{num_rows=} must be {room * length} in a padded layout")
        starts, num_rows = np.arange(room) * length, room * length
    else:
        starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
        num_rows = -(-total // PACKED_ROWS) * PACKED_ROWS if num_rows is None else num_rows
        if total > num_rows:
            raise ValueError(f"{total} tokens do not fit into {num_rows=}")
    rows = {
        "ids": np.zeros(num_rows, np.int32),
        "targets": np.zeros(num_rows, np.int32),
        "weights": np.zeros(num_rows, np.float32),
        "places": np.arange(room * length, room * length + num_rows, dtype=np.int32),
    }
    for i, sequence in enumerate(sequences):
        own = slice(starts[i], starts[i] + lengths[i])
        rows["ids"][own] = sequence.token_ids[:-1]
        rows["targets"][own] = sequence.token_ids[1:]
        rows["weights"][own] = sequence.weights[1:]
        rows["places"][own] = np.arange(lengths[i]) + i * length
    return Batch(**rows, lengths=lengths, length=length)


def by_sequence(batch: Batch, values: np.ndarray) -> list[np.ndarray]:
    """Split values [M] of rows into one array for each sequence: entry i is of token i + 1."""
    places = np.asarray(batch.places)
    found = np.zeros(len(batch.lengths) * batch.length, np.asarray(values).dtype)
    is_real = places < len(found)
    found[places[is_real]] = np.asarray(values)[is_real]
    rows = found.reshape(len(batch.lengths), batch.length)
    return [row[:n] for row, n in zip(rows, np.asarray(batch.lengths), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRun:
    """A power of two of neighbouring sequences of a step: a subtree of the sum over sequences.

    Attributes:
        batch: The sequences as rows.
        first: Index of the first in the list of the step's sequences; a multiple of the size.
        size: How many, those of the subtree that are not there included.
        source: Index of the microbatch that they are from.
        rows: Of each row its place in that microbatch, int64 [M].
        places: Of each of these rows its place in `batch`, int64 [M].
    """

    batch: Batch
    first: int
    size: int
    source: int
    rows: np.ndarray
    places: np.ndarray


def aligned_runs(batches: Sequence[Batch], *, num_shares: int) -> list[list[SequenceRun]]:
    """Cut the sequences of a step into subtrees, and share them out in runs of one power of two.

    A microbatch that is a subtree stays whole. Where one is not, its sequences are cut into the
    largest runs that are.

    Args:
        batches: Microbatches; the list of sequences is theirs, one after the other. Empty
            sequences are behind the others of a microbatch, and do not count.
        num_shares: How many devices there are.

    Returns:
        For each device its runs, in order.
    """
    counts = [_num_sequences(batch) for batch in batches]
    share = 1 << (max(-(-sum(counts) // num_shares), 1) - 1).bit_length()
    runs, start = [[] for _ in range(num_shares)], 0
    for source, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        done, is_last = 0, source == len(batches) - 1
        while done < count:
            first = start + done
            most = min(first & -first if first else share, share)
            room = len(batch.lengths)
            is_whole = done == 0 and (room == count or is_last) and room & (room - 1) == 0
            size = room if is_whole and room <= most else min(most, _power_to(count - done))
            runs[first // share].append(_run(batch, source, done, size, first))
            done += size
        start += count
    return runs


def _power_to(count: int) -> int:
    """The largest power of two that is not more."""
    return 1 << (count.bit_length() - 1)


def _num_sequences(batch: Batch) -> int:
    """Sequences up to the last that is not empty."""
    return int(np.max(np.flatnonzero(np.asarray(batch.lengths)), initial=-1)) + 1


def _run(batch: Batch, source: int, skipped: int, size: int, first: int) -> SequenceRun:
    """`size` sequences of a microbatch; all of them in its own layout, fewer padded."""
    everything = np.arange(len(batch.ids))
    if size == len(batch.lengths):
        return SequenceRun(batch=batch, first=first, size=size, source=source, rows=everything,
                   places=everything)  # fmt: skip
    start, length = skipped * batch.length, batch.length
    places = np.asarray(batch.places)
    rows = np.flatnonzero((places >= start) & (places < start + size * length))
    own = places[rows] - start

    def placed(values: Any) -> np.ndarray:
        out = np.zeros(size * length, np.asarray(values).dtype)
        out[own] = np.asarray(values)[rows]
        return out

    lengths = np.asarray(batch.lengths)[skipped : skipped + size]
    behind = np.arange(size * length, dtype=np.int32)
    is_real = behind % length < np.repeat(lengths, length)
    cut = Batch(
        ids=placed(batch.ids),
        targets=placed(batch.targets),
        weights=placed(batch.weights),
        places=np.where(is_real, behind, behind + size * length).astype(np.int32),
        lengths=lengths,
        length=length,
    )
    return SequenceRun(batch=cut, first=first, size=size, source=source, rows=rows, places=own)
