# SPDX-License-Identifier: Apache-2.0
"""The special functions of a Hopper GPU as tables, collected by `benchmarks/hopper_bits.py`."""

from pathlib import Path

import numpy as np

TABLES = Path(__file__).parent / "reference_code" / "special_functions.npz"
FIRST = {"ex2": 0x3F800000, "rcp": 0x3F800000, "rsqrt": 0x3F800000}
"""Bits of the first entry of each table: 1.0."""


def special_function_tables() -> tuple[np.ndarray, ...]:
    """Return float32 bits of ex2 on [0, 1), 1/x on [1, 2) and 1/sqrt(x) on [1, 4).

    Returns:
        uint32 arrays of 2**23, 2**23 and 2**24 entries, one for each significand of the input. The
        file has the difference of each entry from the one before it.
    """
    with np.load(TABLES) as steps:
        return tuple(
            (np.cumsum(steps[name], dtype=np.int64) + first).astype(np.uint32)
            for name, first in FIRST.items()
        )
