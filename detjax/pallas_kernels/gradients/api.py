# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens in a backward pass: of weights as a tree over leaves, of attention in order.

Tokens are in sequences of T rows each, T a power of two of leaves of `TOKEN_LEAF`. Rows from a
sequence's end on are zeros. They change no bit, so T is free.
"""

import functools
import operator

import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.gradients.leaves import TOKEN_LEAF
from detjax.pallas_kernels.kernel_table import KERNELS


def token_sum(
    a: Activation[Array, "B T X"],
    b: Activation[Array, "B T Y"],
    lengths: Int32[Array, " B"],
    *,
    backend: Backend,
) -> Float32[Array, "X Y"]:
    """Multiply two rows of each token, and add all tokens: the gradient of a weight matrix.

    `out[x, y] = tree(sum_{t in leaf}(a[t, x] * b[t, y]) for leaf in the leaves of all sequences)`

    Args:
        a: Rows of the one factor.
        b: Of the other.
        lengths: Rows of each sequence that are not zeros.
        backend: Which implementation runs.

    Raises:
        ValueError: If B or the number of leaves of a sequence is no power of two.

    Numerics:
        A leaf is summed in order from zero, 16 tokens at a time, in float32. Leaves are added as
        the perfect binary tree ((l0 + l1) + (l2 + l3)) + ..., those of a sequence first. No sum is
        -0, so leaves of zeros change no bit. The tree of B sequences is a subtree of that of more.
        Claims: run-invariant, batch-invariant. Bits depend on (dtypes, build).
    """
    leaves, rest = divmod(a.shape[1], TOKEN_LEAF)
    if rest or not _is_power(leaves) or not _is_power(a.shape[0]):
        raise ValueError(
            f"{a.shape=} must be a power of two of sequences, each a power of two of leaves of "
            f"{TOKEN_LEAF} rows"
        )
    return KERNELS[backend].token_sum(a, b, lengths)


def _is_power(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def expert_token_sum(
    a: Activation[Array, "S X"],
    b: Activation[Array, "S Y"],
    experts: Int32[Array, " S"],
    places: Int32[Array, " S"],
    *,
    num_experts: int,
    num_places: int,
    backend: Backend,
) -> Float32[Array, "U X Y"]:
    """Multiply two rows of each pair of a token and an expert, and add those of each expert.

    `out[e] = token_sum(a_e, b_e)`, where row `places[s]` of `a_e` and `b_e` is row s of `a` and
    `b`, if `experts[s] == e`, and the others are zeros.

    Args:
        a: Rows of the one factor.
        b: Of the other.
        experts: The expert of each pair.
        places: Of its token: sequence times T plus position, as `token_sum` has its rows. From
            `num_places` on the pair is padding. No expert has a place twice.
        num_experts: U.
        num_places: Sequences times T.
        backend: Which implementation runs.

    Raises:
        ValueError: If `num_places` is no power of two of leaves.

    Numerics:
        The bits of `token_sum`: a token that an expert does not have is a zero at its place, so no
        other token's route moves it. 16 places in which an expert has no token cost nothing.
        Claims: run-invariant, batch-invariant. Bits depend on (dtypes, build).
    """
    if num_places % TOKEN_LEAF or not _is_power(num_places // TOKEN_LEAF):
        raise ValueError(f"{num_places=} must be a power of two of leaves of {TOKEN_LEAF} rows")
    return KERNELS[backend].expert_token_sum(
        a, b, experts, places, num_experts=num_experts, num_places=num_places
    )


def attention_gradient(
    q: Activation[Array, "B H T C"],
    k: Activation[Array, "B K T C"],
    v: Activation[Array, "B K T C"],
    out: Activation[Array, "B H T C"],
    of_out: Activation[Array, "B H T C"],
    lengths: Int32[Array, " B"],
    *,
    window: int | None,
    softcap: float | None = None,
    sinks: Float32[Array, " H"] | None = None,
    backend: Backend,
) -> tuple[
    Float32[Array, "B H T C"],
    Float32[Array, "B K T C"],
    Float32[Array, "B K T C"],
    Float32[Array, "B H T"] | None,
]:
    """The cotangents of queries, keys and values of causal attention within each sequence.

    `s = q k / sqrt(C)`, `p = exp(s - lse)`, `ds = round(p (of_out v - sum(of_out * out)))`;
    `of_q = sum_j(ds k[j]) / sqrt(C)`, `of_k = sum_i(ds q[i]) / sqrt(C)`,
    `of_v = sum_i(round(p) of_out[i])`

    With a cap, `t = tanh(q k / sqrt(C) / cap)`, `s = cap t`, and ds has the factor `1 - t t` before
    its rounding. A sink takes part in lse, and each query gives it
    `exp(sink - lse) (-sum(of_out * out))`.

    Args:
        q: Rotated queries.
        k: Rotated keys.
        v: Values.
        out: Results of the attention.
        of_out: Their cotangents.
        lengths: Tokens of each sequence.
        window: How many tokens back a query sees, itself included; None sees all.
        softcap: Of scores; None has none.
        sinks: A score of each query head, without a value; None has none.
        backend: Which implementation runs.

    Returns:
        Those of queries, of keys, of values, and what each query gives to its head's sink.

    Numerics:
        Scores are computed again. Sums over keys and over queries run in order of position, from
        zero, in float32; zeros behind a sequence's end change no bit. The query heads of one
        key/value head are added left to right. In lse a sink comes before the first key.
        Claims: run-invariant, batch-invariant. Bits depend on (C, dtypes, build).

    Reference:
        Dao 2023, arXiv:2307.08691, algorithm 2. There dQ is added atomically.
    """
    of_q, of_k, of_v, of_sinks = KERNELS[backend].attention_gradient(
        q, k, v, out, of_out, lengths, window=window, softcap=softcap, sinks=sinks
    )
    shape = (*k.shape[:2], -1, *k.shape[2:])

    def over_group(of_heads):
        # ORDER: ((h0 + h1) + h2) + ..., additions only, of arrays in memory.
        heads = jnp.moveaxis(of_heads.reshape(shape), 2, 0)
        return functools.reduce(operator.add, list(heads))

    return of_q, over_group(of_k), over_group(of_v), of_sinks
