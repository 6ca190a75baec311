# SPDX-License-Identifier: Apache-2.0
"""The special functions of a Hopper GPU as tables, collected by `benchmarks/hopper_bits.py`."""

from pathlib import Path

import numpy as np

TABLES = Path(__file__).parent / "reference_code" / "special_functions.npz"
FIRST = 0x3F800000
"""Bits of 1.0, from which each table goes on by its steps."""
FUNCTIONS = ("ex2", "rcp", "rsqrt")


def special_function_steps() -> tuple[np.ndarray, ...]:
    """Return by how much each entry of a table differs from the one before it, int8."""
    with np.load(TABLES) as steps:
        return tuple(steps[name] for name in FUNCTIONS)


def special_function_tables() -> tuple[np.ndarray, ...]:
    """Return float32 bits of ex2 on [0, 1), 1/x on [1, 2) and 1/sqrt(x) on [1, 4).

    Returns:
        uint32 arrays of 2**23, 2**23 and 2**24 entries, one for each significand of the input.
    """
    # Sums of integers wrap in 32 bits, so a negative step is a subtraction.
    return tuple(
        np.cumsum(steps, dtype=np.uint32) + np.uint32(FIRST) for steps in special_function_steps()
    )
