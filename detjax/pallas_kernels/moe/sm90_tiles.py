# SPDX-License-Identifier: Apache-2.0
"""How the products of a mixture of experts are cut into CTAs: by shape and M, for speed alone."""

import dataclasses
from dataclasses import dataclass

from detjax.pallas_kernels.linear.tiles import FLOAT8_COLS, QUANTIZED_VALUES, OperandType
from detjax.pallas_kernels.sm90_hardware import SMEM_BYTES, SPAN

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

SCALE_ALIGNMENT = 4
"""Scales of rows are copied from a multiple of so many rows on: of 16 bytes, which TMA asks for."""

_OTHER_BYTES = 3072
"""Shared memory for barriers and alignment."""

_LIST_BYTES = 4096
"""Shared memory for the list of few rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedTiles:
    """How a grouped product is cut into CTAs. Free: no field changes the order of a sum.

    Attributes:
        is_swapped: Whether weights are the 64-row wgmma operand, so that rows may be few.
        is_gated: Whether half of the weights are gates and half their ups.
        cols: N of wgmma: rows of an expert if swapped, else weights.
        num_wgs: Compute warpgroups; each has 64 weights (128 if gated) if swapped, else 64 rows.
        k: Depth of a stage of the ring.
        stages: Stages in shared memory.
        delay: Stages whose products may still run when the next is issued.
        operands: What rows and weights are.
        held: Channels of the up to 8 rows that every CTA quantises, and holds whole in shared
            memory; 0 for rows that stream beside the weights.
    """

    is_swapped: bool
    is_gated: bool
    cols: int
    num_wgs: int
    k: int
    stages: int = 0
    delay: int = 0
    operands: OperandType = OperandType.BFLOAT16
    held: int = 0

    def __post_init__(self):
        """Refuse what wgmma or TMA cannot do."""
        if self.held and not (self.cols == 8 and self.is_swapped and self.num_wgs == 1):
            raise ValueError(f"{self.held=} is of rows that one warpgroup multiplies, not {self}")
        if self.cols % 8 or not 8 <= self.cols <= 256:
            raise ValueError(f"{self.cols=} must be a multiple of 8 in 8..256")
        if not self.is_swapped and self.out_cols % SPAN:
            raise ValueError(f"{self.cols=} must leave outputs in sixty-fours")
        if self.num_wgs not in (1, 2):
            raise ValueError(f"{self.num_wgs=} must be 1 or 2")
        if self.k % self.span:
            raise ValueError(f"{self.k=} must be a multiple of {self.span}")
        if self.operands is OperandType.INT8 and self.cols > 24 and self.cols % 16:
            raise ValueError(f"{self.cols=} of int8 must be 8, 16, 24 or a multiple of 16")

    @property
    def span(self) -> int:
        """Channels of the operands that are one swizzle span."""
        return 2 * SPAN // self.operands.num_bytes

    @property
    def scale_rows(self) -> int:
        """Scales of a chunk of the rows in shared memory, of which TMA fills whole 128 bytes.

        They begin up to three rows early.
        """
        return -(-(self.tile_rows + SCALE_ALIGNMENT - 1) // 32) * 32

    @property
    def wg_rows(self) -> int:
        """Rows of a warpgroup's accumulator."""
        return 128 if self.is_swapped and self.is_gated else 64

    @property
    def tile_rows(self) -> int:
        """Most rows of an expert in a tile."""
        return self.cols if self.is_swapped else 64 * self.num_wgs

    @property
    def cta_weights(self) -> int:
        """Weights of a tile, gates and ups."""
        return self.wg_rows * self.num_wgs if self.is_swapped else self.cols

    @property
    def out_cols(self) -> int:
        """Outputs of a tile, of each row."""
        return self.cta_weights // 2 if self.is_gated else self.cta_weights

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        t = self.operands
        if self.held:
            return t.num_bytes * self.k * self.cta_weights
        scales = t.scale_bytes * (self.k // self.span) * self.scale_rows
        return t.num_bytes * self.k * (self.tile_rows + self.cta_weights) + scales

    @property
    def held_bytes(self) -> int:
        """Shared memory of rows that are held: 8-bit values, and at most a scale for each 128."""
        return 8 * (self.held + self.held // 32) + 128 if self.held else 0

    @property
    def staged_bytes(self) -> int:
        """Shared memory of the outputs that wait for their store."""
        return 2 * (self.cols * self.out_cols if self.is_swapped else self.num_wgs * 2 * 64 * SPAN)


def fill_stages(tiles: GroupedTiles, most: int = 12) -> GroupedTiles:
    """As many stages as fit."""
    room = SMEM_BYTES - tiles.staged_bytes - tiles.held_bytes - _OTHER_BYTES
    room -= _LIST_BYTES if tiles.is_swapped else 0
    return dataclasses.replace(tiles, stages=min(most, room // tiles.stage_bytes))


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


def _flat(
    cols: int, width: int, num_out: int, *, is_gated: bool, operands: OperandType,
    lone_rows: int = MAX_LONE_ROWS, is_held: bool = False,
) -> GroupedTiles:  # fmt: skip
    """Weights as the 64-row operand: their copy is all there is to do."""
    is_paired = cols > lone_rows and num_out % (2 * SPAN) == 0
    is_wide = cols > 48 or (is_gated and is_paired)
    deepest = 64 if is_wide else 128 if is_gated or cols > 16 else 256
    deepest = min(256, deepest * 2 // operands.num_bytes)
    return fill_stages(
        GroupedTiles(
            is_swapped=True, is_gated=is_gated, cols=cols, num_wgs=2 if is_paired else 1,
            k=_divisor(width, deepest), delay=1, operands=operands, held=width if is_held else 0,
        )
    )  # fmt: skip


def _holds(num_rows: int, width: int, operands: OperandType) -> bool:
    """Whether a product of few rows quantises them itself."""
    is_few = num_rows <= 8 and num_rows * width <= QUANTIZED_VALUES
    return operands.num_bytes == 1 and is_few and width >= 512


def _tall(width: int, num_out: int, *, is_gated: bool, operands: OperandType) -> GroupedTiles:
    """Rows as the 64-row operand beside up to 256 weights."""
    # WHY: the chunks of float8 are in registers beside their sum.
    most = FLOAT8_COLS if operands.is_float8 else 256
    cols = _divisor(num_out, most // 2 if is_gated else most) * (2 if is_gated else 1)
    return fill_stages(
        GroupedTiles(
            is_swapped=False, is_gated=is_gated, cols=cols, num_wgs=2,
            k=_divisor(width, 128 // operands.num_bytes), operands=operands,
        )
    )  # fmt: skip


def choose_tiles(
    *, num_rows: int, top_k: int, num_experts: int, width: int, hidden: int,
    operands: OperandType = OperandType.BFLOAT16,
) -> MlpTiles:  # fmt: skip
    """Tiles for `num_rows` rows of `hidden` channels and experts `width` wide.

    `num_experts` are those of all ranks: the rows are spread over all of them, so a rank cuts its
    own as one device cuts all.

    Raises:
        NotImplementedError: If widths are no multiples of 64, or of 128 of 8 bits.
    """
    unit = 2 * SPAN // operands.num_bytes
    if width % unit or hidden % unit:
        raise NotImplementedError(
            f"sm90 experts need widths of multiples of {unit}, not {hidden} and {width}; "
            "use portable"
        )
    num_slots = num_rows * top_k
    each = num_slots / num_experts
    is_few = num_rows <= MAX_FEW_ROWS and num_slots <= MAX_FEW_SLOTS
    is_float8 = operands.is_float8
    if not is_few and each > (MAX_FLAT_ROWS // 2 if is_float8 else MAX_FLAT_ROWS):
        return MlpTiles(
            gate_up=_tall(hidden, width, is_gated=True, operands=operands),
            down=_tall(width, hidden, is_gated=False, operands=operands),
            is_few=False,
            by_slot=False,
        )
    # Random routing spreads an expert's rows; a second tile reads the weights again.
    most = FLOAT8_COLS // 2 if is_float8 else 128
    # The second product of float8 by blocks, of one warpgroup and of two, an H200: 27.8 and 23.6 us
    # at 8 rows, 71.2 and 55.5 at 64. One row was not measured.
    lone_rows = 0 if operands.num_bytes == 1 and num_rows > 1 else MAX_LONE_ROWS
    cols = 8 if is_few else min(most, -(-int(1.5 * each + 4) // 8) * 8)
    if operands is OperandType.INT8 and cols > 24:  # widths that wgmma has
        cols = -(-cols // 16) * 16
    return MlpTiles(
        gate_up=_flat(
            cols,
            hidden,
            width,
            is_gated=True,
            operands=operands,
            is_held=is_few and _holds(num_rows, hidden, operands),
        ),
        down=_flat(
            cols,
            width,
            hidden,
            is_gated=False,
            operands=operands,
            lone_rows=lone_rows,
            # WHY, one row: the rows of more would be of many tiles. A CTA holds those of its turns.
            is_held=num_rows == 1 and is_few and _holds(min(top_k, 8), width, operands),
        ),
        is_few=is_few,
        by_slot=cols <= MAX_PLACED_ROWS,
    )
