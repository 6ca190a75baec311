# SPDX-License-Identifier: Apache-2.0
"""The special functions of a Hopper GPU as tables, collected by `benchmarks/hopper_bits.py`."""

import contextlib
import logging
import os
import tempfile
from pathlib import Path

import numpy as np

LOG = logging.getLogger(__name__)
STEPS = Path(__file__).parent / "reference_code" / "special_functions.npz"
FIRST = 0x3F800000
"""Bits of 1.0, from which each table goes on by its steps."""
FUNCTIONS = ("ex2", "rcp", "rsqrt")
DIGEST = "9288fb29f08a29910a0672636efb1ae0faba50618ec05127538f52965b8430af"
"""BLAKE3 of the tables, one after the other."""


def special_function_tables() -> tuple[np.ndarray, ...]:
    """Return float32 bits of ex2 on [0, 1), 1/x on [1, 2) and 1/sqrt(x) on [1, 4).

    Returns:
        uint32 arrays of 2**23, 2**23 and 2**24 entries, one for each significand of the input.
    """
    with np.load(STEPS) as steps:
        # Sums of integers wrap in 32 bits, so a negative step is a subtraction.
        return tuple(
            np.cumsum(steps[name], dtype=np.uint32) + np.uint32(FIRST) for name in FUNCTIONS
        )


def _are_whole(tables: np.ndarray) -> bool:
    import blake3  # WHY: not a constant of this module, whose version `loaded_code_hash` would need

    return blake3.blake3(memoryview(tables).cast("B")).hexdigest() == DIGEST


def mapped_tables(folder: Path) -> np.ndarray:
    """Return the tables, one after the other, from a file of `folder`, which is made if need be.

    WHY: 0.04 s of CPU time with the digest, and 0.6 s from the steps. Processes share the memory.

    Raises:
        ValueError: If the steps in the package are not those that a GPU gave.
    """
    path = folder / f"tables-{DIGEST[:16]}.bin"
    with contextlib.suppress(OSError, ValueError):  # it is not there, or has no bytes
        if _are_whole(tables := np.memmap(path, np.uint32, "r")):
            return tables
    tables = np.concatenate(special_function_tables())
    if not _are_whole(tables):
        raise ValueError(f"{STEPS} has other tables than those of {DIGEST}: detjax is not whole")
    try:
        _write(path, tables)
    except OSError as error:
        LOG.warning("%s is not kept (%s), so every start makes it again", path, error.strerror)
    return tables


def _write(path: Path, tables: np.ndarray) -> None:
    """Write a file that is whole as soon as it has its name."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            tables.tofile(file)
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
