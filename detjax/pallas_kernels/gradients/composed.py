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


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardKernels:
    """The operations of a backend that these are made of, as `KernelSet` has them."""

    linear: Callable
    linear_partial: Callable
    add_partials: Callable
    block_stats: Callable
    log_sum_exp: Callable


def token_sum(kernels: ForwardKernels, a, b, lengths) -> jax.Array:
    """See `api.token_sum`: `linear_partial`, whose inputs are tokens."""
    del lengths  # zeros cost what others do
    batch, length, num_x = a.shape
    num_tokens, num_y = batch * length, b.shape[2]
    a = a.reshape(num_tokens, num_x).T
    b = pad_axis(b.reshape(num_tokens, num_y), 1, 128).T
    share = min(num_tokens, MAX_LEAVES * TOKEN_LEAF)
    reduction = Reduction(num_leaves=share // TOKEN_LEAF, leaf_len=TOKEN_LEAF)

    def tree(first: int, count: int) -> jax.Array:
        if count == share:
            columns = slice(first, first + count)
            return kernels.linear_partial(a[:, columns], b[:, columns], reduction=reduction)
        half = count // 2
        return kernels.add_partials(tree(first, half), tree(first + half, half))

    return tree(0, num_tokens)[:, :num_y]


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
    kernels: ForwardKernels, q, k, v, out, of_out, lengths, *, window: int | None
) -> tuple[jax.Array, ...]:
    """See `api.attention_gradient`: the products of one query head after the other.

    # ORDER: `linear` adds positions in order. lse is that of the log-softmax, over blocks of keys.
    """
    del lengths
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    length, channels = q.shape[2:]
    scale = float(np.float32(channels**-0.5))
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    is_seen = (back >= 0) & (back < (window or length))

    def product(x, w):
        w = pad_axis(w, 0, 64)
        return kernels.linear(x, w, None, out_dtype=jnp.dtype(jnp.float32))

    def one(operands):
        q, k, v, out, of_out = operands
        s = jnp.where(is_seen, product(q, k)[:, :length] * scale, -jnp.inf)
        padded = jnp.pad(s, ((0, 0), (0, -length % VOCAB_BLOCK)), constant_values=-jnp.inf)
        lse = kernels.log_sum_exp(*kernels.block_stats(padded, vocab_block=VOCAB_BLOCK))
        p = jnp.exp(s - lse[:, None])
        delta = row_sums(of_out.astype(jnp.float32) * out.astype(jnp.float32))
        ds = (p * (product(of_out, v)[:, :length] - delta)).astype(dtype)
        p = p.astype(dtype)
        of_q, of_k = product(ds, k.T) * scale, product(ds.T, q.T) * scale
        return tuple(x[:, :channels] for x in (of_q, of_k, product(p.T, of_out.T)))

    heads = [x.reshape(-1, length, channels) for x in (q, out, of_out)]
    shared = [jnp.repeat(x, group, axis=1).reshape(-1, length, channels) for x in (k, v)]
    found = lax.map(one, (heads[0], *shared, *heads[1:]))
    return tuple(x.reshape(q.shape) for x in found)


def row_sums(x: jax.Array) -> jax.Array:
    """Add the elements of each row, [M, X] to [M, 1].

    # ORDER: a perfect binary tree over columns, zeros up to a power of two.
    """
    width = 1 << (x.shape[1] - 1).bit_length()
    x = jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x
