# SPDX-License-Identifier: Apache-2.0
"""Memory in which the ranks of a tp group leave words for one another."""

from typing import NamedTuple

from detjax.array_types import Array, Int32, UInt32


class Mailbox(NamedTuple):
    """One rank's, of R regions: arrays, or inside a kernel their references.

    Attributes:
        peers: [tp - 1, 2]; addresses (low, high word) of the other ranks' slots by XOR distance
            from 1.
        slots: [2, R, tp - 1, words of a region]; written by its peers.
        parities: [R]; which of its two slots the next exchange of a region uses.
    """

    peers: UInt32[Array, "..."]
    slots: UInt32[Array, "..."]
    parities: Int32[Array, "..."]
