# SPDX-License-Identifier: Apache-2.0
"""Causal attention of new tokens over the paged cache: prefill, decode and verify in one."""

from detjax.array_types import Activation, Array, Cached, Int32
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.rotation import Rotation, check_tokens, num_gated_heads


def attention(
    q: Activation[Array, "B T H C"],
    place: CachePlace,
    *,
    window: int | None,
    profile: NumericsProfile,
    backend: Backend,
    softcap: float | None = None,
    sinks: Activation[Array, " H"] | None = None,
) -> Activation[Array, "B T H C"]:
    """Attend from each query to the keys at and before its position.

    `out[b, t, h] = softmax(q[b, t, h] . k[j] / sqrt(C) for j seen) . v[j]`, where key j is seen if
    `positions[b, t] - window < j <= positions[b, t]`, and h reads key/value head `h // G`.

    Args:
        q: Queries after rotary embedding; any T from 1 to a whole prompt.
        place: Of the queries in the cache, where keys and values of these tokens already are. The
            output of padding is 0.
        window: How many tokens back a query sees, itself included; None sees all.
        profile: Gives the split's length. A page is one block.
        backend: Which implementation runs.
        softcap: Bounds scores: softmax takes `cap * tanh(score / cap)`. None does not.
        sinks: A score of each query head, not scaled, that takes part in the softmax beside the
            keys and has no value: `exp(sink)` joins the denominator. None has none.

    Raises:
        ValueError: If a page is not one block of the profile, or query heads do not divide.
        NotImplementedError: If the backend does not do it.

    Numerics:
        For each query row: blocks of `profile.attention_block` keys at fixed absolute positions;
        online softmax inside a split of `profile.attention_split` keys, in float32 with exp2; the
        splits are merged left to right by one recurrence. A block in which a row sees nothing
        leaves the row's bits alone, so which other rows share the tile does not matter. The
        weights are rounded to the compute dtype for the product with V, their sum is not; one
        rounding at the end; an exact zero is +0. A sink is merged as one more split, the last, of
        maximum `sink * log2(e)`, sum 1 and output 0.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant. Holds while keys and values are finite.

    Reference:
        Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; tiled as in Dao et al. 2022,
        arXiv:2205.14135. Splits of fixed length rather than fixed count.
    """
    _check_queries(q, place.pages, place.page_table, place.positions)
    _check(place.pages, q.shape[2], profile)
    return KERNELS[backend].attention(
        q, place, window=window, profile=profile, softcap=softcap, sinks=sinks
    )


def _check_queries(
    q: Activation[Array, "B T H C"],
    pages: Cached[Array, "L N 2 K P C"],
    page_table: Int32[Array, "B n"],
    positions: Int32[Array, "B T"],
) -> None:
    """Refuse queries of other tokens than `positions`, or of other channels than the cache."""
    if q.shape[:2] != positions.shape or len(page_table) != len(positions):
        raise ValueError(
            f"{q.shape=} and {page_table.shape=} must have a row for each of {positions.shape=}"
        )
    if q.shape[3] != pages.shape[5]:
        raise ValueError(f"{q.shape=} and {pages.shape=} must have the same channels")


def rope_attention(
    qkv: Activation[Array, "M J C"],
    rotation: Rotation,
    place: CachePlace,
    *,
    window: int | None,
    eps: float,
    profile: NumericsProfile,
    backend: Backend,
    prefetch: Activation[Array, "O I"] | None = None,
    sinks: Activation[Array, " H"] | None = None,
    is_gated: bool = False,
) -> tuple[Activation[Array, "B T H C"], Cached[Array, "L N 2 K P C"]]:
    """Put new tokens in the cache and attend from them: `rope_into_cache`, then `attention`.

    With gates `sigmoid_gate` follows. On `sm90` a decode step does all in one launch where it can.

    Args:
        qkv: Heads of queries, then keys, then values, of B T tokens: J = H + 2 K. With gates
            J = 2 H + 2 K, and those of the query heads are the last.
        rotation: Angles of these tokens, and gains of the norms of queries and keys.
        place: Of these tokens in the cache, which is updated in place where the caller donates it.
            No other sequence may read the page that a new token is put in. A sequence's tokens are
            neighbours, with padding behind them. Of padding nothing is written, and its output is
            0.
        window: How many tokens back a query sees, itself included; None sees all.
        eps: Of the norms.
        profile: Gives the split's length. A page is one block.
        backend: Which implementation runs.
        prefetch: Weights that the next product reads. `sm90` asks them into the L2 cache where few
            rows leave the memory idle; it changes no bit.
        sinks: As in `attention`.
        is_gated: Whether there are gates, by whose sigmoids what each query head sees is
            multiplied.

    Returns:
        What each query sees, gated if it is, and the cache.

    Raises:
        ValueError: If a page is not one block of the profile, query heads do not divide, or
            tokens are not as many as positions, or gates not as many as query heads.

    Numerics:
        The bits of the operations, one after the other.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant. Holds while keys and values are finite.

    Reference:
        Those of `rope_into_cache`, `attention` and `sigmoid_gate`.
    """
    check_tokens(qkv, *rotation, *place[:3])
    _check(place.pages, num_gated_heads(qkv, place.pages, is_gated), profile)
    return KERNELS[backend].rope_attention(
        qkv, rotation, place,
        window=window, eps=eps, profile=profile, prefetch=prefetch, sinks=sinks, is_gated=is_gated,
    )  # fmt: skip


def _check(pages, num_heads: int, profile: NumericsProfile) -> None:
    if pages.shape[4] != profile.attention_block:
        raise ValueError(
            f"a page of {pages.shape[4]} tokens must be one block of {profile.attention_block=}"
        )
    if num_heads % pages.shape[3]:
        raise ValueError(f"{num_heads} query heads must be a multiple of {pages.shape[3]} kv heads")
