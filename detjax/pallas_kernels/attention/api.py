# SPDX-License-Identifier: Apache-2.0
"""Causal attention of new tokens over the paged cache: prefill, decode and verify in one."""

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Int32
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.attention import portable, sm90
from detjax.pallas_kernels.backend import Backend


def attention(
    q: Activation[Array, "B T H C"],
    pages: Activation[Array, "L N 2 K P C"],
    page_table: Int32[Array, "B n"],
    positions: Int32[Array, "B T"],
    *,
    layer: int,
    window: int | None,
    profile: NumericsProfile,
    backend: Backend,
) -> Activation[Array, "B T H C"]:
    """Attend from each query to the keys at and before its position.

    `out[b, t, h] = softmax(q[b, t, h] . k[j] / sqrt(C) for j seen) . v[j]`, where key j is seen if
    `positions[b, t] - window < j <= positions[b, t]`, and h reads key/value head `h // G`.

    Args:
        q: Queries after rotary embedding; any T from 1 to a whole prompt.
        pages: The cache. Keys and values of these tokens are already in it.
        page_table: Page of each block of a sequence; entries past its last block are not read.
        positions: Absolute position of each query; -1 marks padding, whose output is 0.
        layer: Which layer's pages.
        window: How many tokens back a query sees, itself included; None sees all.
        profile: Gives the split's length. A page is one block.
        backend: Which implementation runs.

    Raises:
        ValueError: If a page is not one block of the profile, or query heads do not divide.

    Numerics:
        For each query row: blocks of `profile.attention_block` keys at fixed absolute positions;
        online softmax inside a split of `profile.attention_split` keys, in float32 with exp2; the
        splits are merged left to right by one recurrence. A block in which a row sees nothing
        leaves the row's bits alone, so which other rows share the tile does not matter. The
        weights are rounded to the compute dtype for the product with V, their sum is not; one
        rounding at the end; an exact zero is +0.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant. Holds while keys and values are finite.

    Reference:
        Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; tiled as in Dao et al. 2022,
        arXiv:2205.14135. Splits of fixed length rather than fixed count.
    """
    if pages.shape[4] != profile.attention_block:
        raise ValueError(
            f"a page of {pages.shape[4]} tokens must be one block of {profile.attention_block=}"
        )
    if q.shape[2] % pages.shape[3]:
        raise ValueError(
            f"{q.shape[2]} query heads must be a multiple of {pages.shape[3]} kv heads"
        )
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    run = sm90.attention if backend is Backend.SM90 else portable.attention
    return run(q, pages, page_table, positions, jnp.int32(layer), window=window, profile=profile)
