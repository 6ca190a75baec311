# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens by the products of a forward pass, for backends that add K in order."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from detjax.numerics import Reduction
from detjax.pallas_kernels.fixed_blocks import pad_axis
from detjax.pallas_kernels.gradients.leaves import TOKEN_LEAF

MAX_LEAVES = 8
"""Of one product; the tree goes on above it."""

VOCAB_BLOCK = 128

AT_ONCE = 2**26
"""Elements of float32 that a GPU holds side by side: partial sums of products, or scores."""


def one_by_one(function: Callable, *operands: jax.Array) -> jax.Array:
    """`jax.vmap(function)`, in order."""
    return lax.map(lambda own: function(*own), operands)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardKernels:
    """The operations of a backend that these are made of, as `KernelSet` has them.

    Attributes:
        linear: As there, and the next four.
        linear_partial: As there.
        add_partials: As there.
        block_stats: As there.
        log_sum_exp: As there.
        each: Calls a product for each of several operands: `jax.vmap(product)(*operands)`.
        at_once: Elements of float32 that products are made of at the same time, or those of one.
    """

    linear: Callable
    linear_partial: Callable
    add_partials: Callable
    block_stats: Callable
    log_sum_exp: Callable
    each: Callable = one_by_one
    at_once: int = 1


def token_sum(kernels: ForwardKernels, a, b, lengths) -> jax.Array:
    """See `api.token_sum`: `linear_partial`, whose inputs are tokens, of some leaves each."""
    del lengths  # zeros cost what others do
    batch, length, num_x = a.shape
    num_tokens, num_y = batch * length, b.shape[2]
    share = min(num_tokens, MAX_LEAVES * TOKEN_LEAF)
    reduction = Reduction(num_leaves=share // TOKEN_LEAF, leaf_len=TOKEN_LEAF)

    def transposed(x: jax.Array) -> jax.Array:  # [shares, X, tokens]
        return x.reshape(-1, share, x.shape[2]).swapaxes(1, 2)

    a, b = transposed(a), transposed(pad_axis(b, 2, 128))
    most = max(kernels.at_once // (num_x * b.shape[1]), 1)

    def partial_sum(a, b):
        return kernels.linear_partial(a, b, reduction=reduction)

    def tree(first: int, count: int) -> jax.Array:
        """The sum of a power of two of shares: side by side, then as a tree."""
        if count > most:
            half = count // 2
            return kernels.add_partials(tree(first, half), tree(first + half, half))
        own = slice(first, first + count)
        if count == 1:
            return partial_sum(a[first], b[first])
        sums = kernels.each(partial_sum, a[own], b[own])
        while len(sums) > 1:  # ORDER: additions only, of arrays in memory, so nothing fuses
            sums = sums[0::2] + sums[1::2]
        return sums[0]

    return tree(0, len(a))[:, :num_y]


def expert_token_sum(
    kernels: ForwardKernels, a, b, experts, places, *, num_experts: int, num_places: int
) -> jax.Array:
    """See `api.expert_token_sum`: `token_sum` of one expert's tokens after the other.

    On a tensor core a step of zeros costs what others do. Of 128 experts, 8 a token, 36 steps of
    100 are zeros at random, and of 8 experts, 2 a token, 1 of 100.
    """

    def one(expert):
        own = jnp.where(experts == expert, places, num_places)

        def rows(x: jax.Array) -> jax.Array:
            whole = jnp.zeros((num_places, x.shape[1]), x.dtype)
            return whole.at[own].set(x, mode="drop")[None]

        return token_sum(kernels, rows(a), rows(b), None)

    return lax.map(one, jnp.arange(num_experts, dtype=jnp.int32))


def attention_gradient(
    kernels: ForwardKernels, q, k, v, out, of_out, lengths,
    *, window: int | None, softcap: float | None = None, sinks=None,
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    """See `api.attention_gradient`: the products of some query heads side by side.

    # ORDER: `linear` adds positions in order. lse is that of the log-softmax, over blocks of keys;
    # a sink has the block before them.
    """
    del lengths
    group, num_heads = q.shape[1] // k.shape[1], q.shape[0] * q.shape[1]
    length, channels = q.shape[2:]
    most = max(kernels.at_once // length**2, 1)
    at_once = next(n for n in range(min(most, num_heads), 0, -1) if num_heads % n == 0)

    def some(x: jax.Array) -> jax.Array:
        return x.reshape(-1, at_once, length, channels)

    shared = [some(jnp.repeat(x, group, axis=1)) for x in (k, v)]
    if sinks is not None:
        sinks = jnp.tile(sinks, q.shape[0]).reshape(-1, at_once)
    *found, of_sinks = lax.map(
        lambda heads: _gradient_of_heads(kernels, *heads, window=window, softcap=softcap),
        (some(q), *shared, some(out), some(of_out), sinks),
    )
    if of_sinks is not None:
        of_sinks = of_sinks.reshape(q.shape[:3])
    return *(x.reshape(q.shape) for x in found), of_sinks


def _gradient_of_heads(
    kernels: ForwardKernels, q, k, v, out, of_out, sinks,
    *, window: int | None, softcap: float | None,
) -> tuple[jax.Array | None, ...]:  # fmt: skip
    """Cotangents of queries, keys and values [h, T, C], each head by itself; of sinks [h, T]."""
    num_heads, length, channels = q.shape
    dtype, scale = q.dtype, float(np.float32(channels**-0.5))
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    is_seen = ((back >= 0) & (back < (window or length)))[None]

    def product(x, w):
        def of_head(x, w):
            return kernels.linear(x, w, None, out_dtype=jnp.dtype(jnp.float32))

        return kernels.each(of_head, x, pad_axis(w, 1, 64))

    def scaled(x):
        # ROUND: a product before its sums, which thus fuse with none of them.
        return lax.optimization_barrier(x * scale)

    def turned(x):
        return x.swapaxes(1, 2)

    def rows(x):
        return x.reshape(num_heads * length, x.shape[2])

    s, slope = product(q, k)[:, :, :length] * scale, None
    if softcap is not None:
        tangents = jnp.tanh(s * float(np.float32(1 / softcap)))
        s, slope = tangents * softcap, 1.0 - lax.optimization_barrier(tangents * tangents)
    s = lax.optimization_barrier(jnp.where(is_seen, s, -jnp.inf))
    padded = jnp.pad(rows(s), ((0, 0), (0, -length % VOCAB_BLOCK)), constant_values=-jnp.inf)
    if sinks is not None:
        # SHAPE: in front, where it stays however many keys there are.
        of_rows = jnp.repeat(sinks, length)[:, None]
        of_rows = jnp.pad(of_rows, ((0, 0), (0, VOCAB_BLOCK - 1)), constant_values=-jnp.inf)
        padded = jnp.concatenate([of_rows, padded], axis=1)
    lse = kernels.log_sum_exp(*kernels.block_stats(padded, vocab_block=VOCAB_BLOCK))
    lse = lse.reshape(num_heads, length, 1)
    p = jnp.exp(s - lse)
    delta = row_sums(rows(of_out.astype(jnp.float32) * out.astype(jnp.float32)))
    delta = delta.reshape(num_heads, length, 1)
    of_p = product(of_out, v)[:, :, :length]
    ds = p * (of_p - delta)
    ds, p = (ds if slope is None else ds * slope).astype(dtype), p.astype(dtype)
    of_q, of_k = scaled(product(ds, turned(k))), scaled(product(turned(ds), turned(q)))
    of_v = product(turned(p), turned(of_out))
    of_sinks = None
    if sinks is not None:
        of_sinks = lax.optimization_barrier(jnp.exp(sinks[:, None, None] - lse) * -delta)[:, :, 0]
    return *(x[:, :, :channels] for x in (of_q, of_k, of_v)), of_sinks


def row_sums(x: jax.Array) -> jax.Array:
    """Add the elements of each row, [M, X] to [M, 1].

    # ORDER: a perfect binary tree over columns, zeros up to a power of two.
    """
    width = 1 << (x.shape[1] - 1).bit_length()
    x = jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x
