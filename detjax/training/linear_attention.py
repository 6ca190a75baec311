# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on whole sequences, with gradients, in the manner of `training.operations`."""

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.config import LinearAttentionConfig
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.delta_rule.api import delta_rule as delta_rule_kernel
from detjax.pallas_kernels.delta_rule.api import delta_rule_gradient
from detjax.pallas_kernels.delta_rule.api import gated_rms_norm as gated_rms_norm_kernel
from detjax.pallas_kernels.delta_rule.sizes import states_of_page
from detjax.training.formulas import (
    DeltaInputs,
    plain_delta_inputs,
    plain_delta_rule,
    plain_gated_rms_norm,
)
from detjax.training.gradients import CanonicalSums, GradientSums, with_gradient

Gates = tuple[Float32[Array, "K G"], Float32[Array, "K G"]]


class _Shared(NamedTuple):
    """What all tokens share, float32: filters [K, W, O], A and step [K, G]."""

    filters: Any
    decay: Any
    step: Any


class _Tokens(NamedTuple):
    """What `plain_delta_inputs` reads of each token, float32.

    Attributes:
        windows: [..., W, K, O], the oldest first.
        b: [..., K, G].
        a: [..., K, G].
    """

    windows: Any
    b: Any
    a: Any


def delta_rule(
    ctx: ForwardContext,
    sums: GradientSums,
    rows: Activation[Array, "B T K X"],
    filters: Float32[Array, "K Y O"],
    gates: Gates,
    positions: Int32[Array, "B T"],
) -> Float32[Array, "B T H C"]:
    """Read each token's state within its whole sequence: `delta_rule.api.delta_rule`.

    Args:
        ctx: The model and the numerics.
        sums: Of the backward pass.
        rows: q, k, values, b and a of each head of keys, and zeros.
        filters: Masters of the convolution's numbers.
        gates: Masters of A and step.
        positions: `t` for token t of a sequence, -1 from its end on.
    """
    profile, sizes = ctx.profile, ctx.config.linear_attention
    assert sizes is not None  # whoever has such a layer

    def kernel(rows, filters, gates, positions):
        batch, length, num_keys, width = rows.shape
        page_len = profile.attention_block
        num_blocks = -(-length // page_len)
        num_pages, num_heads = batch * num_blocks, num_keys * sizes.group
        state = (states_of_page(page_len), num_heads, sizes.key_dim, sizes.value_dim)
        out, _, _ = delta_rule_kernel(
            rows.reshape(-1, num_keys, width),
            filters.astype(profile.param_dtype),
            gates,
            jnp.zeros((1, num_pages, 1, num_keys, page_len, width), rows.dtype),
            jnp.zeros((1, num_pages, *state), jnp.float32),
            jnp.arange(num_pages, dtype=jnp.int32).reshape(batch, num_blocks),
            positions,
            layer=0,
            backend=ctx.backend,
        )
        return out.reshape(batch, length, *out.shape[1:])

    def gradient(args, _, cotangent):
        rows, filters, gates, _ = args
        stored = filters.astype(profile.param_dtype).astype(jnp.float32)
        shared = _Shared(stored, *gates)
        if isinstance(sums, CanonicalSums):
            of_rows, of_shared = _canonical(sizes, sums, rows, shared, cotangent)
        else:
            of_rows, of_shared = _by_jax(sizes, rows, shared, cotangent)
        return of_rows, of_shared.filters, of_shared[1:], None

    return with_gradient(kernel, gradient)(rows, filters, gates, positions)


def gated_rms_norm(
    ctx: ForwardContext,
    sums: GradientSums,
    x: Float32[Array, "M H C"],
    z: Activation[Array, "M H C"],
    gain: Float32[Array, " C"],
) -> Activation[Array, "M H C"]:
    """Normalise heads and gate them: `delta_rule.api.gated_rms_norm`. The gain stays float32."""
    eps = ctx.config.rms_norm_eps

    def kernel(x, z, gain):
        x, gate = (it.reshape(-1, it.shape[2]) for it in (x, z))
        out = gated_rms_norm_kernel(x, gate, gain, eps=eps, backend=ctx.backend)
        return out.reshape(z.shape)

    def formula(x, z, gain):
        return plain_gated_rms_norm(x, z, gain[None, None], eps)

    def gradient(args, _, cotangent):
        of_rows, (of_gain,) = sums.of_formula(formula, args[:2], args[2:], cotangent)
        return *of_rows, of_gain

    return with_gradient(kernel, gradient)(x, z, gain)


def _tokens_of(sizes: LinearAttentionConfig, rows: jax.Array) -> _Tokens:
    """Cut rows [B, T, K, X], and give each token those before it. Copies only."""
    mixed, b, a, _ = jnp.split(rows.astype(jnp.float32), _ends(sizes), axis=-1)
    back = sizes.conv_width - 1
    before = jnp.pad(mixed, ((0, 0), (back, 0), (0, 0), (0, 0)))
    length = rows.shape[1]
    windows = [before[:, i : i + length] for i in range(sizes.conv_width)]
    return _Tokens(jnp.stack(windows, axis=2), b, a)


def _ends(sizes: LinearAttentionConfig) -> list[int]:
    """Where the parts of a row end: what the convolution takes, b, and a."""
    num_mixed = 2 * sizes.key_dim + sizes.group * sizes.value_dim
    return [num_mixed + i * sizes.group for i in range(3)]


def _of_rows(sizes: LinearAttentionConfig, of_tokens: _Tokens, rows: jax.Array) -> jax.Array:
    """The transpose of `_tokens_of`.

    # ORDER: what a row gives to its own token, then to the next one, and so on: additions only, of
    arrays in memory.
    # ROUND: once, to the rows' dtype.
    """
    last = sizes.conv_width - 1
    after = jnp.pad(of_tokens.windows, ((0, 0), (0, last), (0, 0), (0, 0), (0, 0)))
    length = of_tokens.b.shape[1]
    parts = [after[:, i : i + length, last - i] for i in range(sizes.conv_width)]
    of_mixed = functools.reduce(operator.add, parts)
    joined = jnp.concatenate([of_mixed, of_tokens.b, of_tokens.a], axis=-1)
    # WHY: a zero has no sign, so places behind a sequence's end change nothing.
    joined = jnp.where(joined == 0, 0.0, joined)[: rows.shape[0], : rows.shape[1]]
    widths = ((0, 0), (0, 0), (0, 0), (0, rows.shape[-1] - joined.shape[-1]))
    return jnp.pad(joined, widths).astype(rows.dtype)


def _inputs(sizes: LinearAttentionConfig, dtype: jnp.dtype) -> Callable[..., DeltaInputs]:
    """`plain_delta_inputs` of these sizes."""
    return partial(plain_delta_inputs, key_dim=sizes.key_dim, dtype=dtype)


def _by_jax(
    sizes: LinearAttentionConfig, rows: jax.Array, shared: _Shared, of_out: jax.Array
) -> tuple[jax.Array, _Shared]:
    """The derivative of the formula of all sequences, by JAX."""
    formula = jax.vmap(_inputs(sizes, rows.dtype), in_axes=(0, 0, 0, None, None, None))

    def run(rows, shared):
        inputs = formula(*_tokens_of(sizes, rows), *shared)
        return jax.vmap(plain_delta_rule)(inputs).reshape(of_out.shape)

    return jax.vjp(run, rows, shared)[1](of_out)


def _canonical(
    sizes: LinearAttentionConfig,
    sums: CanonicalSums,
    rows: jax.Array,
    shared: _Shared,
    of_out: jax.Array,
) -> tuple[jax.Array, _Shared]:
    """Tokens in leaves; then each sequence and head by itself; then tokens in leaves again."""
    own, formula = sums.leaves, _inputs(sizes, rows.dtype)
    tokens, cotangents = jax.tree.map(own.padded, (_tokens_of(sizes, rows), of_out))
    leaves = tuple(map(own.cut_padded, tokens))
    inputs = sums.by_leaf(lambda *tokens: formula(*tokens, *shared), *leaves)

    def in_sequences(x):
        return x.reshape(own.batch, own.length, *x.shape[2:])

    q, k, *of_values = map(in_sequences, inputs)
    v, decay, beta = (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in of_values)
    operands = q, k, v, decay, beta, cotangents, own.lengths
    found = delta_rule_gradient(*operands, backend=sums.backend)
    of_inputs = (x.reshape(like.shape) for x, like in zip(found, inputs, strict=True))
    of_leaves, of_shared = sums.of_leaves(formula, leaves, tuple(shared), DeltaInputs(*of_inputs))
    of_tokens = _Tokens(*map(in_sequences, of_leaves))
    return _of_rows(sizes, of_tokens, rows), _Shared(*of_shared)
