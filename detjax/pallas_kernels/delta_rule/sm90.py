# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on Hopper: rows to their pages, rows mixed token by token, then the recurrence."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from detjax.pallas_kernels import sm90_rows
from detjax.pallas_kernels.delta_rule.sizes import STATE_BLOCK
from detjax.pallas_kernels.delta_rule.sm90_plan import plan_sequences
from detjax.pallas_kernels.delta_rule.sm90_recurrence import read_states
from detjax.pallas_kernels.delta_rule.sm90_rows import mix_rows, write_rows
from detjax.pallas_kernels.delta_rule.sm90_step import step_states
from detjax.pallas_kernels.rms_norm import sm90 as norm
from detjax.pallas_kernels.swiglu.sm90 import over_decay

DIMS = (32, 64, 128)
"""Channels of a head."""


def _check(gates, row_pages, state_pages) -> None:
    """Refuse other sizes.

    Raises:
        ValueError: If rows have no place behind what is read.
        NotImplementedError: If heads of keys and values differ or have other channels, or pages are
            no whole blocks.
    """
    key_dim, value_dim = state_pages.shape[4:]
    num_read = 2 * key_dim + gates[0].shape[1] * (value_dim + 2)
    if row_pages.shape[5] <= num_read:
        raise ValueError(f"sm90 needs rows of more than {num_read} numbers: one is its own")
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
    *, interpret: bool = False,
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
    # WHY: the layer is an operand, so that all layers share one compiled kernel.
    return _delta_rule(
        rows, filters, gates, row_pages, state_pages, page_table, positions,
        jnp.int32(layer), interpret=interpret,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("interpret",))
def _delta_rule(
    new_rows, filters, gates, row_pages, state_pages, page_table, positions, layer, *, interpret
):
    page_len, num_tokens = row_pages.shape[4], positions.shape[1]
    rows_ref, states_ref = jax.new_ref(row_pages), jax.new_ref(state_pages)
    write_rows(new_rows, rows_ref, page_table, positions, layer, interpret=interpret)
    plan = plan_sequences(page_table, positions, page_len=page_len)
    mixed = mix_rows(
        filters, gates, rows_ref, page_table, plan, layer, num_tokens=num_tokens,
        dim=state_pages.shape[4], interpret=interpret,
    )  # fmt: skip
    operands = mixed, rows_ref, states_ref, page_table, plan, layer
    if num_tokens == 1:
        out = step_states(*operands, interpret=interpret)
    else:
        out = read_states(*operands, num_tokens=num_tokens, interpret=interpret)
    return out, jax.freeze(rows_ref), jax.freeze(states_ref)


def delta_rule_gradient(q, k, v, decay, beta, of_out, lengths) -> tuple[jax.Array, ...]:
    """See `api.delta_rule_gradient`.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("sm90 has no gradient of linear attention; use portable")


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def gated_rms_norm(x, z, gain, *, eps: float, interpret: bool = False) -> jax.Array:
    """See `api.gated_rms_norm`.

    Raises:
        ValueError: If `rms_norm.sm90.row_sum` defines no sum of narrow rows for C.

    Numerics:
        # ORDER: `(x * r) * gain` as `rms_norm` has it, not rounded to the dtype; SwiGLU's gate of z
        # by it.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.
    """
    num_rows, width = x.shape
    form = norm.row_sum(width)
    if form.is_wide:
        raise ValueError(f"sm90 has a gated norm of at most 256 channels, not of {width}")
    tile_rows = sm90_rows.most_rows(sm90_rows.LANES // form.lanes, num_rows)
    tile = sm90_rows.tile_of_rows(
        tile_rows, lanes=form.lanes, vec_len=form.vec_len, is_interpreted=interpret
    )
    part_len = width // form.num_parts
    columns = [pl.ds(p * part_len, part_len) for p in range(form.num_parts)]

    def body(x_gmem, z_gmem, gain_gmem, out_gmem):
        # The last tile starts early instead of ending late: some rows are written twice, alike.
        first = jnp.minimum(lax.axis_index("cta") * tile_rows, num_rows - tile_rows)
        here = pl.ds(first, tile_rows)
        parts = [tile.whole.load(x_gmem.at[here, c]) for c in columns]
        of_z = [tile.whole.load(z_gmem.at[here, c]).astype(jnp.float32) for c in columns]
        gains = [tile.per_col.load(gain_gmem.at[c]) for c in columns]
        normed = norm.narrow_normalise(parts, gains, tile, width=width, eps=eps)
        for c, value, gate in zip(columns, normed, of_z, strict=True):
            gated = tile.whole.mul(value, over_decay(gate, gate, tile.whole))
            out_gmem[here, c] = gated.astype(z.dtype)  # ROUND: once

    return sm90_rows.run_kernel(
        body,
        (x, z, gain),
        out=jax.ShapeDtypeStruct(x.shape, z.dtype),
        grid={"cta": pl.cdiv(num_rows, tile_rows)},
        name="detjax_gated_rms_norm",
        is_interpreted=interpret,
    )
