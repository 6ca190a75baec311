# SPDX-License-Identifier: Apache-2.0
"""How the products of a mixture of experts are cut into CTAs: by shape and M, for speed alone."""

from dataclasses import dataclass

from detjax.pallas_kernels.moe.sm90_grouped import SPAN, GroupedTiles, fill_stages

MAX_FEW_ROWS = 8
"""Up to here the first product lists its tiles itself: two launches fewer, no rows are copied."""

MAX_FEW_SLOTS = 128
"""Slots that one warpgroup sorts."""

MAX_LATE_ROWS = 4
"""Up to here the next product adds a row's experts to the residual stream; 8 is most.

Qwen3-30B-A3B, a layer with `MAX_ADDED_ROWS` alike: 5.5, 3.1, 1.4 us less at 1, 2, 4 rows, 5.5 more
at 8.
"""

MAX_PLACED_ROWS = 32
"""Tiles of up to so many rows are stored row by row, in order of slot."""

MAX_LONE_ROWS = 16
"""Up to here one warpgroup multiplies; above, one stores while the other multiplies."""

MAX_FLAT_ROWS = 96
"""Rows of an expert, on average, up to which weights are the 64-row operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpTiles:
    """The two products of a layer's experts.

    Attributes:
        gate_up: Tiles of the first.
        down: Tiles of the second, of as many rows.
        is_few: Whether the first product lists its tiles itself.
        by_slot: Whether the second stores rows in order of slot.
    """

    gate_up: GroupedTiles
    down: GroupedTiles
    is_few: bool
    by_slot: bool


def _divisor(length: int, most: int) -> int:
    while length % most:
        most //= 2
    return most


def _flat(cols: int, width: int, num_out: int, *, is_gated: bool) -> GroupedTiles:
    """Weights as the 64-row operand: their copy is all there is to do."""
    is_paired = cols > MAX_LONE_ROWS and num_out % (2 * SPAN) == 0
    is_wide = cols > 48 or (is_gated and is_paired)
    deepest = 64 if is_wide else 128 if is_gated or cols > 16 else 256
    return fill_stages(
        GroupedTiles(
            is_swapped=True, is_gated=is_gated, cols=cols, num_wgs=2 if is_paired else 1,
            k=_divisor(width, deepest), delay=1,
        )
    )  # fmt: skip


def _tall(width: int, num_out: int, *, is_gated: bool) -> GroupedTiles:
    """Rows as the 64-row operand beside up to 256 weights."""
    cols = _divisor(num_out, 128 if is_gated else 256) * (2 if is_gated else 1)
    return fill_stages(
        GroupedTiles(
            is_swapped=False, is_gated=is_gated, cols=cols, num_wgs=2, k=_divisor(width, 64)
        )
    )


def choose_tiles(
    *, num_rows: int, top_k: int, num_experts: int, width: int, hidden: int
) -> MlpTiles:
    """Tiles for `num_rows` rows of `hidden` channels and experts `width` wide.

    `num_experts` are those of all ranks: the rows are spread over all of them, so a rank cuts its
    own as one device cuts all.

    Raises:
        NotImplementedError: If widths are no multiples of 64.
    """
    if width % SPAN or hidden % SPAN:
        raise NotImplementedError(
            f"sm90 experts need widths of multiples of {SPAN}, not {hidden} and {width}; "
            "use portable"
        )
    num_slots = num_rows * top_k
    each = num_slots / num_experts
    is_few = num_rows <= MAX_FEW_ROWS and num_slots <= MAX_FEW_SLOTS
    if not is_few and each > MAX_FLAT_ROWS:
        return MlpTiles(
            gate_up=_tall(hidden, width, is_gated=True),
            down=_tall(width, hidden, is_gated=False),
            is_few=False,
            by_slot=False,
        )
    # Random routing spreads an expert's rows; a second tile reads the weights again.
    cols = 8 if is_few else min(128, -(-int(1.5 * each + 4) // 8) * 8)
    return MlpTiles(
        gate_up=_flat(cols, hidden, width, is_gated=True),
        down=_flat(cols, width, hidden, is_gated=False),
        is_few=is_few,
        by_slot=cols <= MAX_PLACED_ROWS,
    )
