# SPDX-License-Identifier: Apache-2.0
"""The names of the kernel sets. Starts no JAX."""

import enum


class Backend(enum.Enum):
    """The name of an implementation of every operation, of the one specification.

    Attributes:
        platform: The JAX platform whose devices run it.
        gives_bits_of: The name of the backend whose bits it gives: its own, or another's.
    """

    platform: str
    gives_bits_of: str

    def __new__(cls, value: str, platform: str, gives_bits_of: str):
        """A member, whose value is its name alone."""
        member = object.__new__(cls)
        member._value_ = value
        member.platform = platform
        member.gives_bits_of = gives_bits_of
        return member

    # Generic Pallas in fixed blocks, interpreted on a CPU.
    PORTABLE = "portable", "cpu", "portable"
    # Those of sm90 in C++.
    REFERENCE = "reference", "cpu", "sm90"
    # Mosaic GPU for Hopper: TMA, wgmma, warp specialisation.
    SM90 = "sm90", "gpu", "sm90"
