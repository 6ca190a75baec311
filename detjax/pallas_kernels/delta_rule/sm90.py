# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper: one launch for a token a sequence, three and a norm for more."""

import functools

import jax
import jax.numpy as jnp

from detjax.pallas_kernels.delta_rule.operands import (
    Filters,
    OutputNorm,
    ProjectedRows,
    normalised,
)
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.delta_rule.sm90_gated_norm import gated_rms_norm as gated_rms_norm
from detjax.pallas_kernels.delta_rule.sm90_plan import plan_sequences
from detjax.pallas_kernels.delta_rule.sm90_recurrence import read_states
from detjax.pallas_kernels.delta_rule.sm90_rows import mix_rows, write_rows
from detjax.pallas_kernels.delta_rule.sm90_step import step_states

DIMS = (32, 64, 128)
"""Channels of a head."""

STEP_WIDTHS = (2, 4)
"""Tokens that the convolution of a step in one launch reads: a thread loads their numbers whole."""


def _check(gates, row_pages, state_pages) -> None:
    """Refuse other sizes.

    Raises:
        ValueError: If rows have no place behind what is read.
        NotImplementedError: If heads of keys and values differ or have other channels, or pages are
            no whole blocks.
    """
    key_dim, value_dim = state_pages.shape[4:]
    num_numbers = 2 * key_dim + gates[0].shape[1] * (value_dim + 3)
    if row_pages.shape[5] < num_numbers:
        raise ValueError(
            f"sm90 needs rows of {num_numbers} numbers, not {row_pages.shape[5]}: one a head of "
            "values is its own"
        )
    if key_dim != value_dim or key_dim not in DIMS:
        raise NotImplementedError(
            f"sm90 has linear attention with as many channels of keys as of values, one of {DIMS}, "
            f"not {key_dim} and {value_dim}; use portable"
        )
    if row_pages.shape[4] != STATE_BLOCK * state_pages.shape[2]:
        raise NotImplementedError(
            f"sm90 has pages of whole blocks of {STATE_BLOCK} tokens, not of {row_pages.shape[4]}; "
            "use portable"
        )


def delta_rule(
    rows, filters, gates, row_pages, state_pages, page_table, positions, layer: int,
    norm: OutputNorm | None = None, *, interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """See `api.delta_rule`.

    Raises:
        NotImplementedError: Of sizes that it does not have.

    Numerics:
        # ORDER: that of `sm90_rows.mixed`, `inverse_lengths` and `gates_of`, then of
        # `sm90_recurrence`: `r = decay dot(S, k)`, `S = fma(k, (v - r) beta, S decay)`,
        # `o = dot(S, q)`, where what is not an fma is rounded.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant.
    """
    _check(gates, row_pages, state_pages)
    of_layer = rows, filters, gates
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    of_cache = row_pages, state_pages, page_table, positions, jnp.int32(layer)
    is_step = positions.shape[1] == 1 and isinstance(rows, ProjectedRows)
    has_vectors = isinstance(filters, Filters) and filters.q.shape[2] in STEP_WIDTHS
    if norm is not None and is_step and has_vectors:
        return _step(of_layer, norm, *of_cache, interpret=interpret)
    out, row_pages, state_pages = _delta_rule(of_layer, *of_cache, interpret=interpret)
    if norm is not None:
        out = normalised(functools.partial(gated_rms_norm, interpret=interpret), out, rows, norm)
    return out, row_pages, state_pages


@functools.partial(jax.jit, static_argnames=("interpret",))
def _step(of_layer, norm, row_pages, state_pages, page_table, positions, layer, *, interpret):
    rows_ref, states_ref = jax.new_ref(row_pages), jax.new_ref(state_pages)
    plan = plan_sequences(page_table, positions, page_len=row_pages.shape[4])
    out = step_states(*of_layer, norm, rows_ref, states_ref, plan, layer, interpret=interpret)
    return out, jax.freeze(rows_ref), jax.freeze(states_ref)


@functools.partial(jax.jit, static_argnames=("interpret",))
def _delta_rule(of_layer, row_pages, state_pages, page_table, positions, layer, *, interpret):
    (new_rows, filters, gates), num_tokens = of_layer, positions.shape[1]
    rows_ref, states_ref = jax.new_ref(row_pages), jax.new_ref(state_pages)
    write_rows(new_rows, rows_ref, page_table, positions, layer, interpret=interpret)
    plan = plan_sequences(page_table, positions, page_len=row_pages.shape[4])
    mixed = mix_rows(
        filters, gates, rows_ref, page_table, plan, layer, num_tokens=num_tokens,
        dim=state_pages.shape[4], interpret=interpret,
    )  # fmt: skip
    out = read_states(
        mixed, rows_ref, states_ref, page_table, plan, layer, num_tokens=num_tokens,
        interpret=interpret,
    )  # fmt: skip
    return out, jax.freeze(rows_ref), jax.freeze(states_ref)


def delta_rule_gradient(q, k, v, decay, beta, of_out, lengths) -> tuple[jax.Array, ...]:
    """See `api.delta_rule_gradient`.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("sm90 has no gradient of linear attention; use portable")
