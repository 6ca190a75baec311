# SPDX-License-Identifier: Apache-2.0
"""BLAKE3's compression function and tree, on whole arrays of nodes at once.

O'Connor, Aumasson, Neves, Wilcox-O'Hearn: BLAKE3, 2021. The functions take NumPy's and JAX's
arrays of uint32, and what a Pallas kernel holds. The library `blake3` hashes bytes of the host.
This is for bytes that lie on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

CHUNK_BYTES = 1024
BLOCK_BYTES = 64
UNIT_CHUNKS = 256
UNIT_BYTES = UNIT_CHUNKS * CHUNK_BYTES
"""The subtree that a GPU hashes whole."""
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8

IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
    0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
"""The chaining value of a chunk's first block, and of every parent."""

_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_NUM_ROUNDS = 7


def compress(
    chaining: Sequence[Any], words: Sequence[Any], counter: Any, flags: Any, like: Any
) -> list:
    """Compress a block of 64 bytes of each node, and return its chaining value.

    Args:
        chaining: 8 arrays of uint32.
        words: 16 arrays: the block, little-endian.
        counter: Which chunk of its input a node is, below 2**32; zeros for parents.
        flags: `CHUNK_START` and so on.
        like: Makes a constant into an array of this kind: `like(0x40)`.

    Returns:
        8 arrays of uint32.
    """
    state = [*chaining, *map(like, IV[:4]), counter, like(0), like(BLOCK_BYTES), flags]
    words = list(words)
    for _ in range(_NUM_ROUNDS):
        for i in range(4):
            _mix(state, i, 4 + i, 8 + i, 12 + i, words[2 * i], words[2 * i + 1])
        for i in range(4):
            columns = (i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
            _mix(state, *columns, words[8 + 2 * i], words[9 + 2 * i])
        words = [words[source] for source in _PERMUTATION]
    return [state[i] ^ state[8 + i] for i in range(8)]


def _mix(state: list, a: int, b: int, c: int, d: int, x: Any, y: Any) -> None:
    for word, first, second in ((x, 16, 12), (y, 8, 7)):
        state[a] = state[a] + state[b] + word
        state[d] = _rotate(state[d] ^ state[a], first)
        state[c] = state[c] + state[d]
        state[b] = _rotate(state[b] ^ state[c], second)


def _rotate(x: Any, bits: int) -> Any:
    return (x >> bits) | (x << (32 - bits))


def roots(leaves: Sequence[np.ndarray]) -> list[bytes]:
    """The hashes of inputs of which the chaining values of equal, whole subtrees are known.

    Args:
        leaves: Of each input, uint32 [n, 8] with n > 1: subtrees of equal power-of-two size, left
            to right.

    Returns:
        The 32 bytes of each.
    """
    levels = [np.ascontiguousarray(nodes, np.uint32) for nodes in leaves]
    while any(len(nodes) > 1 for nodes in levels):
        joined = [nodes[: len(nodes) // 2 * 2].reshape(-1, 16) for nodes in levels]
        flags = [
            np.full(len(pairs), PARENT | (ROOT if len(nodes) == 2 else 0), np.uint32)
            for nodes, pairs in zip(levels, joined, strict=True)
        ]
        parents = _parents(np.concatenate(joined), np.concatenate(flags))
        parts = np.split(parents, np.cumsum([len(pairs) for pairs in joined])[:-1])
        # A node without a partner waits for the next level, as in the paper's tree.
        levels = [
            np.concatenate((part, nodes[2 * len(part) :]))
            for nodes, part in zip(levels, parts, strict=True)
        ]
    return [nodes.astype("<u4").tobytes() for nodes in levels]


def _parents(pairs: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Uint32 [n, 8] from pairs of nodes [n, 16]."""

    def like(value: int) -> np.ndarray:
        return np.full(len(pairs), value, np.uint32)

    made = compress([like(v) for v in IV], list(pairs.T), like(0), flags, like)
    return np.stack(made, axis=1)
