# SPDX-License-Identifier: Apache-2.0
"""The names of the kernel sets. Starts no JAX."""

import enum


class Backend(enum.Enum):
    """The name of an implementation of every operation, of the one specification.

    Attributes:
        platform: The JAX platform whose devices run it.
    """

    platform: str

    def __new__(cls, value: str, platform: str):
        """A member, whose value is its name alone."""
        member = object.__new__(cls)
        member._value_ = value
        member.platform = platform
        return member

    PORTABLE = "portable", "cpu"  # generic Pallas in fixed blocks, interpreted on CPU
    REFERENCE = "reference", "cpu"  # the bits of sm90, in C++
    SM90 = "sm90", "gpu"  # Mosaic GPU for Hopper: TMA, wgmma, warp specialisation
