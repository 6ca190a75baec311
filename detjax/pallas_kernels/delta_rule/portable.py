# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet, one token of one head of keys after the other."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels.delta_rule.operands import OutputNorm, arranged, normalised
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.fixed_blocks import ROWS, pad_axis, round_to, run_blocks

NORM_EPS = 1e-6
"""Added to the square of a query's or key's length, in every model of this kind."""


def write_rows(pages, rows, page_table, positions, layer) -> jax.Array:
    """Put rows [M, K, X] of new tokens in their pages; padding is dropped."""
    page_len = pages.shape[4]
    flat = positions.reshape(-1)
    blocks = jnp.maximum(positions, 0) // page_len
    page_ids = jnp.take_along_axis(page_table, blocks, axis=1).reshape(-1)
    page_ids = jnp.where(flat >= 0, page_ids, pages.shape[1])
    offsets = jnp.maximum(flat, 0) % page_len
    return pages.at[layer, page_ids, 0, :, offsets].set(rows, mode="drop")


class _Head(NamedTuple):
    """A head of keys and the values that share it.

    Attributes:
        filters: [W, Y] float32, the oldest token first.
        decay: [G, 1] float32, A of each head of values.
        step: [G, 1] float32.
        load: The row at a position, [1, X] float32; zeros before the first.
        key_dim: Channels of a key.
        dtype: What the convolution is rounded to.
    """

    filters: jax.Array
    decay: jax.Array
    step: jax.Array
    load: Callable[[jax.Array], jax.Array]
    key_dim: int
    dtype: jnp.dtype

    def advance(self, position, state):
        """The state behind a token, [G, c, C], and what the token reads from it, [G, C]."""
        (width, num_mixed), dim = self.filters.shape, self.key_dim
        group, _, value_dim = state.shape
        # ORDER: ((f0 x0 + f1 x1) + f2 x2) + f3 x3, the oldest token first.
        rows = [self.load(position - (width - 1) + i) for i in range(width)]
        mixed = jnp.zeros((1, num_mixed), jnp.float32)
        for i, row in enumerate(rows):
            mixed = mixed + self.filters[i : i + 1] * row[:, :num_mixed]
        gates = rows[-1][:, num_mixed : num_mixed + 2 * group].reshape(2, group)
        mixed = round_to(mixed / (1.0 + jnp.exp(-mixed)), self.dtype)  # ROUND: once
        q, k = mixed[:, :dim], mixed[:, dim : 2 * dim]
        # ORDER: one fixed-shape sum of squares each; rsqrt, not 1/sqrt.
        q = q * lax.rsqrt(jnp.sum(q * q, axis=1, keepdims=True) + NORM_EPS) * dim**-0.5
        k = k * lax.rsqrt(jnp.sum(k * k, axis=1, keepdims=True) + NORM_EPS)
        q, k = (x.reshape(1, dim, 1) for x in (q, k))
        v = mixed[:, 2 * dim :].reshape(group, value_dim)
        beta = 1.0 / (1.0 + jnp.exp(-gates[0].reshape(group, 1)))
        raw = gates[1].reshape(group, 1) + self.step
        softplus = jnp.maximum(raw, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(raw)))
        decay = jnp.exp(-(jnp.exp(self.decay) * softplus))
        state = state * decay.reshape(group, 1, 1)
        # ORDER: one fixed-shape sum over the channels of a key, here and in the result.
        found = jnp.sum(state * k, axis=1)
        state = state + k * ((v - found) * beta).reshape(group, 1, value_dim)
        return state, jnp.sum(state * q, axis=1)


def delta_rule(
    rows, filters, gates, row_pages, state_pages, page_table, positions, layer: int,
    norm: OutputNorm | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """See `api.delta_rule`."""
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    out, row_pages, state_pages = _delta_rule(
        *arranged(rows, filters), gates, row_pages, state_pages, page_table, positions,
        jnp.int32(layer),
    )  # fmt: skip
    if norm is not None:
        out = normalised(gated_rms_norm, out, rows, norm)
    return out, row_pages, state_pages


@jax.jit
def _delta_rule(rows, filters, gates, row_pages, state_pages, page_table, positions, layer):
    row_pages = write_rows(row_pages, rows, page_table, positions, layer)
    batch, num_tokens = positions.shape
    num_keys, group = gates[0].shape
    operands = (
        row_pages, filters, *gates, page_table, positions, layer.reshape(1), state_pages,
    )  # fmt: skip
    # SHAPE: the bound is hidden from the compiler; the sequences run in order.
    hidden = lax.optimization_barrier(jnp.int32(batch))
    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    out_shape = (batch, num_tokens, num_keys * group, state_pages.shape[5])
    state_pages, out = pl.pallas_call(
        _read_states,
        name="portable_delta_rule",
        grid=(hidden, num_keys),
        in_specs=[everywhere] * len(operands),
        out_specs=[everywhere, everywhere],
        out_shape=[
            jax.ShapeDtypeStruct(state_pages.shape, state_pages.dtype),
            jax.ShapeDtypeStruct(out_shape, jnp.float32),
        ],
        input_output_aliases={len(operands) - 1: 0},
        interpret=True,
    )(*operands)
    out = jnp.where(positions.reshape(batch, num_tokens, 1, 1) >= 0, out, 0.0)
    return out.reshape(-1, *out_shape[2:]), row_pages, state_pages


def _read_states(
    rows_ref, filters_ref, decay_ref, step_ref, table_ref, positions_ref, layer_ref, _, states_ref,
    out_ref,
) -> None:  # fmt: skip
    """All blocks with new tokens of one sequence and one head of keys.

    `states_ref` is the result that has the operand's place: a sequence finds what earlier ones of
    this call have written.
    """
    group, page_len, num_states = decay_ref.shape[1], rows_ref.shape[4], states_ref.shape[2]
    seq, head, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    heads, block_len = pl.ds(head * group, group), page_len // num_states
    tokens = positions_ref[seq, :]
    first, last = tokens[0], jnp.max(tokens)

    def load(position):
        place = jnp.maximum(position, 0)
        page = table_ref[seq, place // page_len]
        row = rows_ref[layer, page, 0, head, pl.ds(place % page_len, 1), :]
        return jnp.where(position >= 0, row.astype(jnp.float32), 0.0)

    own = _Head(
        filters=filters_ref[head, :, :].astype(jnp.float32), load=load,
        decay=decay_ref[head, :].reshape(group, 1), step=step_ref[head, :].reshape(group, 1),
        key_dim=states_ref.shape[4], dtype=rows_ref.dtype,
    )  # fmt: skip

    def read_token(position, state):
        state, out = own.advance(position, state)
        # What the block had before the first new token is written over by that.
        out_ref[seq, jnp.maximum(position - first, 0), heads, :] = out
        return state

    def block_step(block, carry):
        before = jnp.maximum(block - 1, 0)
        page, at = table_ref[seq, before // num_states], before % num_states
        state = jnp.where(block > 0, states_ref[layer, page, at, heads, :, :], 0.0)
        start = block * block_len
        stop = jnp.minimum(start + block_len, last + 1)
        state = lax.fori_loop(start, stop, read_token, state)
        # Of a block that has more tokens to come nobody reads it.
        page, at = table_ref[seq, block // num_states], block % num_states
        states_ref[layer, page, at, heads, :, :] = state
        return carry

    # A row of padding alone has first = last = -1, and no block.
    blocks = jnp.maximum(first, 0) // block_len, last // block_len + 1
    lax.fori_loop(*blocks, block_step, 0)


@jax.jit
def delta_rule_gradient(q, k, v, decay, beta, of_out, lengths) -> tuple[jax.Array, ...]:
    """See `api.delta_rule_gradient`."""
    (batch, num_rows, num_keys, _), num_heads = q.shape, v.shape[2]
    # SHAPE: whole blocks, and two at least; of one the compiler knows the index.
    length = max(-(-num_rows // STATE_BLOCK), 2) * STATE_BLOCK
    shapes = [x.shape for x in (q, k, v, decay, beta)]

    def by_head(x):
        """[B K, T, ...], all heads of values of a head of keys in a row."""
        x = jnp.moveaxis(x.reshape(batch, num_rows, num_keys, -1), 2, 1)
        return pad_axis(x.reshape(batch * num_keys, num_rows, -1), 1, length)

    heads = [by_head(x) for x in (q, k, v, decay, beta, of_out)]
    found = run_blocks(
        partial(_walk_back, num_keys, num_heads // num_keys),
        *heads,
        lengths,
        name="delta_rule_gradient",
        grid=(batch * num_keys,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in heads[:5]],
        out_specs=[pl.BlockSpec((1, *x.shape[1:]), lambda head: (head, 0, 0)) for x in heads[:5]],
    )

    def by_token(x, shape):
        x = x[:, :num_rows].reshape(batch, num_keys, num_rows, -1)
        return jnp.moveaxis(x, 1, 2).reshape(shape)

    return tuple(map(by_token, found, shapes))


class _Token(NamedTuple):
    """What the recurrence reads of a token: q and k [1, c, 1], v [G, C], gates [G, 1]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array

    def advance(self, before):
        """The state behind it; the decayed state, what it lacked, and what was written."""
        scaled = before * self.decay[:, :, None]
        # ORDER: one fixed-shape sum over the channels of a key.
        lack = self.v - jnp.sum(scaled * self.k, axis=1)
        written = lack * self.beta
        return scaled + self.k * written[:, None], scaled, lack, written

    def pull(self, before, of_state, of_out):
        """Cotangents of the state before it, and of what it reads.

        # ORDER: fixed-shape sums over channels, or over all of a group's channels at once.
        """
        state, scaled, lack, written = self.advance(before)
        of_out, of_q = of_out[:, None], jnp.sum(state * of_out[:, None], axis=(0, 2))
        of_state = of_state + self.q * of_out
        of_written = jnp.sum(of_state * self.k, axis=1)
        of_v = of_written * self.beta
        of_beta = jnp.sum(of_written * lack, axis=1)
        of_k = jnp.sum(of_state * written[:, None] - scaled * of_v[:, None], axis=(0, 2))
        of_scaled = of_state - self.k * of_v[:, None]
        of_decay = jnp.sum(of_scaled * before, axis=(1, 2))
        return of_scaled * self.decay[:, :, None], (of_q, of_k, of_v, of_decay, of_beta)


def _walk_back(num_keys: int, group: int, *refs) -> None:
    """All tokens of one sequence and one head of keys: forward by blocks, then back."""
    *operands, of_out_ref, lengths_ref = refs[:7]
    results, head = refs[7:], pl.program_id(0)
    dim, value_dim = operands[0].shape[2], operands[2].shape[2] // group
    shapes = ((1, dim, 1), (1, dim, 1), (group, value_dim), (group, 1), (group, 1))
    num_tokens = lengths_ref[head // num_keys]
    num_blocks = (num_tokens + STATE_BLOCK - 1) // STATE_BLOCK
    zeros = jnp.zeros((group, dim, value_dim), jnp.float32)

    def token(t) -> _Token:
        rows = (ref[head, pl.ds(t, 1), :] for ref in operands)
        return _Token(*(row.reshape(shape) for row, shape in zip(rows, shapes, strict=True)))

    def tokens_of(block):
        start = block * STATE_BLOCK
        return start, jnp.minimum(start + STATE_BLOCK, num_tokens)

    def keep(block, carry):
        """The state before each block."""
        state, kept = carry
        kept = lax.dynamic_update_index_in_dim(kept, state, block, 0)
        return lax.fori_loop(*tokens_of(block), lambda t, s: token(t).advance(s)[0], state), kept

    def walk(i, of_state):
        """A block: its states forward, then its tokens back."""
        block = num_blocks - 1 - i
        start, stop = tokens_of(block)

        def keep_token(t, carry):
            state, kept = carry
            kept = lax.dynamic_update_index_in_dim(kept, state, t - start, 0)
            return token(t).advance(state)[0], kept

        def back(j, of_state):
            t = stop - 1 - j
            before = lax.dynamic_index_in_dim(states, t - start, keepdims=False)
            of_out = of_out_ref[head, pl.ds(t, 1), :].reshape(group, value_dim)
            of_state, found = token(t).pull(before, of_state, of_out)
            for ref, part in zip(results, found, strict=True):
                ref[0, pl.ds(t, 1), :] = part.reshape(1, -1)
            return of_state

        first = lax.dynamic_index_in_dim(firsts, block, keepdims=False)
        empty = jnp.zeros((STATE_BLOCK, *zeros.shape), jnp.float32)
        _, states = lax.fori_loop(start, stop, keep_token, (first, empty))
        return lax.fori_loop(0, stop - start, back, of_state)

    for ref in results:
        ref[...] = jnp.zeros(ref.shape, jnp.float32)
    empty = jnp.zeros((operands[0].shape[1] // STATE_BLOCK, *zeros.shape), jnp.float32)
    _, firsts = lax.fori_loop(0, num_blocks, keep, (zeros, empty))
    lax.fori_loop(0, num_blocks, walk, zeros)


@partial(jax.jit, static_argnames=("eps",))
def gated_rms_norm(x, z, gain, *, eps: float) -> jax.Array:
    """See `api.gated_rms_norm`."""
    num_rows, width = x.shape
    x, z = pad_axis(x, 0, ROWS), pad_axis(z, 0, ROWS)

    def body(x_ref, z_ref, gain_ref, out_ref):
        rows = pl.ds(pl.program_id(0) * ROWS, ROWS)
        v, gate = x_ref[rows, :], z_ref[rows, :].astype(jnp.float32)
        # ORDER: one fixed-shape row sum; rsqrt, not 1/sqrt.
        mean_square = jnp.sum(v * v, axis=1, keepdims=True) / width
        normed = v * lax.rsqrt(mean_square + eps) * gain_ref[...][None, :]
        out_ref[...] = (normed * (gate / (1.0 + jnp.exp(-gate)))).astype(out_ref.dtype)

    out = run_blocks(
        body,
        x,
        z,
        gain,
        name="gated_rms_norm",
        grid=(x.shape[0] // ROWS,),
        out_shape=jax.ShapeDtypeStruct(x.shape, z.dtype),
        out_specs=pl.BlockSpec((ROWS, width), lambda m: (m, 0)),
    )
    return out[:num_rows]
