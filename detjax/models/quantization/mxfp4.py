# SPDX-License-Identifier: Apache-2.0
"""Experts in MXFP4, as gpt-oss is published, as the bfloat16 tensors that they stand for.

32 neighbouring inputs of an output share an exponent of two (E8M0, one byte), and each has 4 bits
(E2M1): a sign and one of `MAGNITUDES`. A byte holds two, the first in its lower half. The product
has at most 2 significant bits, so it is exact in bfloat16.

Reference:
    OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from detjax.models.weights.files import StoredTensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
BLOCK_BYTES = BLOCK // 2
EXPONENT_BIAS = 127
MAX_EXPONENT = 252
"""The greatest stored exponent at which every weight is finite in bfloat16."""

BYTES_AT_ONCE = 2**17
"""Of codes that are expanded at once: with their indices, what lies in a core's cache."""


def _pairs() -> np.ndarray:
    """Two bfloat16 in a word, by stored exponent and by byte, [256 * 256]."""
    values = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
    exponents = np.arange(256, dtype=np.int32) - EXPONENT_BIAS
    with np.errstate(over="ignore"):  # of exponents that are refused
        scaled = np.ldexp(values[None], exponents[:, None])
        halves = scaled.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    codes = np.arange(256)
    return (halves[:, codes & 15] | halves[:, codes >> 4] << np.uint32(16)).reshape(-1)


PAIRS = _pairs()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Rows:
    """Experts (expert, inputs, outputs); indexing one gives bfloat16 of some inputs and outputs.

    Attributes:
        name: For errors.
        blocks: Codes as the file has them, uint8 [U, O, blocks, 16].
        exponents: As the file has them, uint8 [U, O, blocks].
    """

    name: str
    blocks: np.ndarray
    exponents: np.ndarray

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, inputs and outputs."""
        num_experts, num_outputs, num_blocks = self.exponents.shape
        return num_experts, num_blocks * BLOCK, num_outputs

    def __getitem__(self, index: tuple[int, slice, slice]) -> np.ndarray:
        """Expand some inputs and outputs of one expert.

        Raises:
            ValueError: If a weight is no finite number in bfloat16.
        """
        expert, inputs, outputs = index
        left, right, _ = inputs.indices(self.shape[1])
        low, high = left // BLOCK, -(-right // BLOCK)
        codes = self.blocks[expert, outputs, low:high]
        exponents = self.exponents[expert, outputs, low:high]
        if exponents.size and exponents.max() > MAX_EXPONENT:
            raise ValueError(
                f"{self.name} has an exponent of {exponents.max()}, whose weights are not all "
                f"finite in bfloat16; those up to {MAX_EXPONENT} are: download the file again"
            )
        num_outputs, num_blocks = exponents.shape
        words = np.empty((num_outputs, num_blocks, BLOCK_BYTES), np.uint32)
        step = max(1, BYTES_AT_ONCE // max(1, num_blocks * BLOCK_BYTES))
        for at in range(0, num_outputs, step):
            part = slice(at, at + step)
            which = exponents[part, :, None].astype(np.intp) << 8 | codes[part]
            np.take(PAIRS, which, out=words[part], mode="clip")
        values = words.reshape(num_outputs, -1).view(ml_dtypes.bfloat16)
        return values[:, left - low * BLOCK : right - low * BLOCK].T


def expand_mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with each `X_blocks` and `X_scales` replaced by what they stand for, "X".

    Args:
        tensors: Of `open_tensors`.

    Raises:
        ValueError: If nothing is in MXFP4, or a part is missing or of a wrong shape or dtype.
    """
    found = dict(tensors)
    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    if not names:
        raise ValueError(
            "config.json says mxfp4, but no tensor is named *_blocks; config.json and the weights "
            "are of different models"
        )
    for name in names:
        blocks, exponents = found.pop(f"{name}_blocks"), found.pop(f"{name}_scales", None)
        if exponents is None:
            raise ValueError(f"{blocks.file} has '{name}_blocks', but no '{name}_scales'")
        if name in found:
            raise ValueError(f"{blocks.file} has {name!r} in MXFP4, and another {name!r}; keep one")
        _check_parts(name, blocks, exponents)
        rows = Mxfp4Rows(
            name=f"'{name}_scales' in {exponents.file}",
            blocks=blocks.rows,
            exponents=exponents.rows,
        )
        found[name] = StoredTensor(file=blocks.file, rows=rows, shape=rows.shape, dtype="BF16")
    return found


def _check_parts(name: str, blocks: StoredTensor, exponents: StoredTensor) -> None:
    """Refuse parts that do not go together."""
    wanted: tuple[tuple[str, StoredTensor, Any], ...] = (
        ("blocks", blocks, (*exponents.shape, BLOCK_BYTES)),
        ("scales", exponents, exponents.shape[:3]),
    )
    for suffix, part, shape in wanted:
        if part.dtype != "U8" or part.shape != shape or len(exponents.shape) != 3:
            raise ValueError(
                f"'{name}_{suffix}' in {part.file} is {part.dtype}{part.shape}; MXFP4 has U8 of "
                f"[experts, outputs, blocks, {BLOCK_BYTES}], and of scales the first three of these"
            )
