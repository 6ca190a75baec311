# SPDX-License-Identifier: Apache-2.0
"""float32 to bfloat16 and to float8_e4m3fn, to nearest, ties to even, by integer operations.

WHY: NumPy holds Python's lock while it converts to a dtype of ml_dtypes, so threads would wait for
each other; they do not here. The bits are those of ml_dtypes.
"""

import ml_dtypes
import numpy as np

_NORMAL = np.float32(2.0**-6)
"""The least normal float8_e4m3fn."""

_REBIAS = (127 - 7) << 3
"""What an exponent of float32 has more than one of float8_e4m3fn, above 3 bits of fraction."""


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16. `values` is overwritten; a NaN must be a quiet one."""
    words = values.view(np.uint32)
    words += np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
    words >>= np.uint32(16)
    return words.astype(np.uint16).view(ml_dtypes.bfloat16)


def to_float8(values: np.ndarray) -> np.ndarray:
    """Round float32 of magnitude at most 448 to float8_e4m3fn. NaN is not allowed."""
    magnitude = np.abs(values)
    words = magnitude.view(np.uint32)
    normal = words + (np.uint32(0x7FFFF) + ((words >> np.uint32(20)) & np.uint32(1)))
    normal = (normal >> np.uint32(20)) - np.uint32(_REBIAS)
    subnormal = np.rint(magnitude * np.float32(2.0**9)).astype(np.uint32)
    code = np.where(magnitude < _NORMAL, subnormal, normal).astype(np.uint8)
    code |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return code.view(ml_dtypes.float8_e4m3fn)
