# SPDX-License-Identifier: Apache-2.0
"""Which tokens of which sequences a launch computes, and in what order where one needs another.

Integers alone, from page tables and positions: the same for every layer.
"""

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Array, Int32
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK

FIRST, LAST, NEXT, COUNT, PAGE, BEFORE = range(6)
"""Columns of a plan: positions of the first and the last new token, -1 for none; the sequence to
compute after this one, and how many a CTA that begins here computes, 0 for none; the page of the
last new token and the one before it, so that a step waits for no table."""


def begin_of(first, count) -> jax.Array:
    """Where a sequence begins: at its first new token, if the state of its block is that before it.

    Args:
        first: Position of the first new token, an int32 scalar.
        count: Tokens of the block behind which its state is, a number of any float dtype.
    """
    first = jnp.maximum(first, 0)
    start = lax.div(first, jnp.int32(STATE_BLOCK)) * STATE_BLOCK
    is_there = count.astype(jnp.float32) == (first - start).astype(jnp.float32)
    return jnp.where(is_there & (first > start), first, start)


def plan_sequences(
    page_table: Int32[Array, "B n"], positions: Int32[Array, "B T"], *, page_len: int
) -> Int32[Array, "B 6"]:
    """Say what is new of each sequence, and which sequences follow from each other.

    A sequence that begins with a state on a page that an earlier sequence of this call writes is
    computed behind that one, by the same CTAs.
    """
    batch, num_tokens = positions.shape
    rows = jnp.arange(batch, dtype=jnp.int32)
    first, last = positions[:, 0], jnp.max(positions, axis=1)
    start = jnp.maximum(first, 0) // STATE_BLOCK * STATE_BLOCK
    before = jnp.maximum(start - 1, 0) // page_len
    needed = jnp.take_along_axis(page_table, before[:, None], axis=1)[:, 0]
    # Pages that each sequence writes.
    index = jnp.maximum(first, 0)[:, None] // page_len
    index = index + jnp.arange((num_tokens - 1) // page_len + 2, dtype=jnp.int32)[None]
    is_written = (index * page_len <= last[:, None]) & (last[:, None] >= 0)
    index = jnp.minimum(index, page_table.shape[1] - 1)
    written = jnp.where(is_written, jnp.take_along_axis(page_table, index, axis=1), -1)
    is_before = rows[:, None] < rows[None, :]
    needs = jnp.any(written[:, None, :] == needed[None, :, None], axis=2) & is_before
    needs = needs & (start > 0)[None, :] & (last >= 0)[None, :]
    root = jnp.max(jnp.where(needs, rows[:, None], -1), axis=0)
    root = jnp.where(root >= 0, root, rows)
    for _ in range((batch - 1).bit_length()):
        root = root[root]
    is_same = root[:, None] == root[None, :]
    later = jnp.where(is_same & is_before, rows[None, :], batch)
    count = jnp.where(root == rows, jnp.sum(is_same, axis=1, dtype=jnp.int32), 0)
    of_last = jnp.maximum(last, 0)[:, None] // page_len - jnp.arange(2, dtype=jnp.int32)[None]
    pages = jnp.take_along_axis(page_table, jnp.maximum(of_last, 0), axis=1)
    columns = [first, last, jnp.min(later, axis=1), count]
    return jnp.concatenate([jnp.stack(columns, axis=1), pages], axis=1)
