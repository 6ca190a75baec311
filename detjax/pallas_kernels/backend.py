# SPDX-License-Identifier: Apache-2.0
"""The names of the kernel sets. Starts no JAX."""

import enum


class Backend(enum.Enum):
    """The name of an implementation of every operation, of the one specification.

    Attributes:
        platform: The JAX platform whose devices run it.
        mma: The tensor core whose function its products follow (docs/reference.md). Backends of one
            such function give the same bits on every machine. Empty: the bits are those of a build.
    """

    platform: str
    mma: str

    def __new__(cls, value: str, platform: str, mma: str):
        """A member, whose value is its name alone."""
        member = object.__new__(cls)
        member._value_ = value
        member.platform = platform
        member.mma = mma
        return member

    def gives_bits_of(self, other: "Backend") -> bool:
        """Whether the two are one, or follow one function."""
        return self is other or (self.mma != "" and self.mma == other.mma)

    # Generic Pallas in fixed blocks, interpreted on a CPU.
    PORTABLE = "portable", "cpu", ""
    # Those of sm90 in C++.
    REFERENCE = "reference", "cpu", "hopper"
    # Mosaic GPU for Hopper: TMA, wgmma, warp specialisation.
    SM90 = "sm90", "gpu", "hopper"
