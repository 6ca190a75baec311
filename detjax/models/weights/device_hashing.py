# SPDX-License-Identifier: Apache-2.0
"""BLAKE3 of arrays where they lie: on a Hopper GPU, at the speed of its memory.

Copied to the host, the weights of an 8B model take ten seconds to hash. Here a window of an array
becomes words, one chunk of 1 KiB a column; a thread hashes a chunk, and then a pair of nodes, level
by level, up to a unit of 256 KiB. The host joins the units of a tensor.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from detjax.models.weights import blake3
from detjax.models.weights.blake3 import UNIT_CHUNKS
from detjax.pallas_kernels import sm90_rows as rows

WINDOW_UNITS = 128
"""Units of a call. A call needs 32 MiB of memory beside the array, and all arrays one program."""

_WORDS = blake3.CHUNK_BYTES // 4
_BLOCK_WORDS = blake3.BLOCK_BYTES // 4


def hash_units(
    array: jax.Array,
    firsts: np.ndarray,
    *,
    window_units: int = WINDOW_UNITS,
    interpret: bool = False,
) -> np.ndarray:
    """The chaining value of every unit of an array's bytes, row-major and little-endian.

    Args:
        array: On one GPU, of whole units.
        firsts: int [units]: which unit of its own tensor each is.
        window_units: Of one call; changes no bit.
        interpret: Run the kernel's operations on the CPU.

    Returns:
        uint32 [units, 8].
    """
    num_units = len(firsts)
    width = min(window_units, num_units)
    found = []
    for begin in range(0, num_units, window_units):
        start = min(begin, num_units - width)
        words = window_of(array, np.int32(start), num_units=num_units, window_units=window_units)
        first_chunks = np.zeros(window_units, np.uint32)
        first_chunks[:width] = firsts[start : start + width] * UNIT_CHUNKS
        made = hash_window(words, first_chunks, interpret=interpret)
        found.append((begin - start, width, made))
    return np.concatenate([np.asarray(made).T[skip:end] for skip, end, made in found])


@functools.partial(jax.jit, static_argnames=("num_units", "window_units"))
def window_of(
    array: jax.Array, start: jax.Array, *, num_units: int, window_units: int
) -> jax.Array:
    """Words of the units from `start` on: uint32 [words of a chunk, chunks]; behind the end, 0."""
    per_word = 4 // array.dtype.itemsize
    width = min(window_units, num_units)
    units = lax.dynamic_slice_in_dim(array.reshape(num_units, -1), start, width)
    parts = units.reshape(width * UNIT_CHUNKS, _WORDS, *((per_word,) if per_word > 1 else ()))
    words = lax.bitcast_convert_type(parts, jnp.uint32)
    return jnp.pad(words, ((0, (window_units - width) * UNIT_CHUNKS), (0, 0))).T


@functools.partial(jax.jit, static_argnames=("interpret",))
def hash_window(words: jax.Array, first_chunks: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Chaining values of a window's units: uint32 [8, units].

    Args:
        words: uint32 [256, chunks], one chunk a column.
        first_chunks: uint32 [units]: which chunk of its tensor a unit begins with.
        interpret: Run the kernel's operations on the CPU.
    """
    counters = first_chunks[:, None] + jnp.arange(UNIT_CHUNKS, dtype=jnp.uint32)[None]
    nodes = _compress(words, counters.reshape(-1), is_parent=False, interpret=interpret)

    def level(_, nodes):
        pairs = jnp.concatenate([nodes[:, 0::2], nodes[:, 1::2]])
        counters = jnp.zeros(pairs.shape[1], jnp.uint32)
        parents = _compress(pairs, counters, is_parent=True, interpret=interpret)
        # Every level is as wide as the first, so that one kernel serves all; the rest is not read.
        return jnp.pad(parents, ((0, 0), (0, parents.shape[1])))

    return lax.fori_loop(0, UNIT_CHUNKS.bit_length() - 1, level, nodes)[:, : len(first_chunks)]


def _compress(
    words: jax.Array, counters: jax.Array, *, is_parent: bool, interpret: bool
) -> jax.Array:
    """Chaining values, uint32 [8, n], of n nodes: chunks, or parents of 16 words.

    A thread is a node. It reads a word of each block where its neighbours read theirs.
    """
    num_blocks = len(words) // _BLOCK_WORDS
    math = rows.strided(rows.LANES, 1, interpret)

    def like(value) -> jax.Array:
        return math.full((rows.LANES,), value, jnp.uint32)

    def body(words_gmem, counters_gmem, out_gmem):
        here = pl.ds(lax.axis_index("nodes") * rows.LANES, rows.LANES)
        counter = math.load(counters_gmem.at[here])

        def block(i, chaining):
            taken = [math.load(words_gmem.at[i * _BLOCK_WORDS + j, here]) for j in range(16)]
            ends = jnp.where(i == 0, blake3.CHUNK_START, 0) | jnp.where(
                i == num_blocks - 1, blake3.CHUNK_END, 0
            )
            flags = like(blake3.PARENT if is_parent else ends)
            return tuple(blake3.compress(chaining, taken, counter, flags, like))

        made = lax.fori_loop(0, num_blocks, block, tuple(map(like, blake3.IV)))
        for i, value in enumerate(made):
            out_gmem[i, here] = value

    return rows.run_kernel(
        body,
        (words, counters),
        out=jax.ShapeDtypeStruct((8, words.shape[1]), jnp.uint32),
        grid={"nodes": words.shape[1] // rows.LANES},
        name="detjax_blake3_parents" if is_parent else "detjax_blake3_chunks",
        is_interpreted=interpret,
    )
