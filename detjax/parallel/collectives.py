# SPDX-License-Identifier: Apache-2.0
"""Collectives with a fixed order: a butterfly for sums, copies for everything else.

What is added as integers is copied: one rank alone has a word that is not 0.
"""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Activation, Array, Float32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import add_partials


def butterfly_sum(
    partial: Float32[Array, "... M O"], axis_name: str, axis_size: int, *, backend: Backend
) -> Float32[Array, "... M O"]:
    """Add the ranks' subtrees as one perfect binary tree; every rank gets the sum.

    `((r0 + r1) + (r2 + r3)) + ...`, r = rank along `axis_name`. Call inside `shard_map`.

    Args:
        partial: This rank's subtree, from `linear_partial`.
        axis_name: Mesh axis of the ranks.
        axis_size: How many; a power of two.
        backend: Which implementation of the addition runs.

    Raises:
        ValueError: If `axis_size` is not a power of two.

    Numerics:
        log2(axis_size) exchanges with the rank whose index differs in one bit, lowest first, each
        followed by one float32 addition. Addition commutes, so both ranks of a pair get the same
        bits. Rank r owns leaves [r * L / tp, (r + 1) * L / tp), so these are the upper levels of
        the matmul's own tree and the sum has the bits of tp = 1.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Recursive doubling: Thakur, Rabenseifner and Gropp 2005, IJHPCA 19(1).
    """
    if axis_size < 1 or axis_size & (axis_size - 1):
        raise ValueError(f"{axis_size=} must be a power of two")
    distance = 1
    while distance < axis_size:
        pairs = [(rank, rank ^ distance) for rank in range(axis_size)]
        other = lax.ppermute(partial, axis_name, pairs)
        partial = add_partials(partial, other, backend=backend)
        distance *= 2
    return partial


def gather_columns(x: jax.Array, axis_name: str) -> jax.Array:
    """Concatenate the ranks' columns in rank order, on every rank. Copies only."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)


def gather_expert_rows(y: Activation[Array, "M Q D"], axis_name: str) -> Activation[Array, "M Q D"]:
    """Fetch each slot's row from the rank that has its expert. Call inside `shard_map`.

    Args:
        y: From `expert_mlp`: in each slot one rank has a row, and the others all bits zero.
        axis_name: Mesh axis of the ranks.

    Returns:
        Every slot's row, on every rank.

    Numerics:
        Rows are added as integers, of which one alone is not 0: copies, in any order.
    """
    return _from_words(lax.psum(_to_words(y), axis_name), y.dtype)


def scatter_expert_rows(
    y: Activation[Array, "M Q D"], axis_name: str
) -> Activation[Array, "m Q D"]:
    """`gather_expert_rows` of this rank's share of the rows, which must divide over the ranks.

    Numerics:
        As `gather_expert_rows`.
    """
    words = lax.psum_scatter(_to_words(y), axis_name, scatter_dimension=0, tiled=True)
    return _from_words(words, y.dtype)


def _to_words(x: jax.Array) -> jax.Array:
    """Bits as uint32, which NCCL adds; two of bfloat16 in each."""
    if x.dtype.itemsize == 2:
        x = x.reshape(*x.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(x, jnp.uint32)


def _from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The inverse of `_to_words`."""
    x = lax.bitcast_convert_type(words, dtype)
    return x if dtype.itemsize == 4 else x.reshape(*x.shape[:-2], -1)
