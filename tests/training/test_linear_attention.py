# SPDX-License-Identifier: Apache-2.0
"""The operation of gated DeltaNet alone: its gradients in any cut of the sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from detjax.models.layers import ForwardContext
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.training.batch import pack
from detjax.training.gradients import Backward, sums_of
from detjax.training.linear_attention import delta_rule

from .conftest import CONFIGS

LENGTHS = (90, 6, 64)
"""More than a leaf, less, and one."""

CTX = ForwardContext(
    config=CONFIGS["hybrid"], profile=NumericsProfile(), backend=Backend.PORTABLE, tp=1
)


def operands() -> tuple:
    """Rows of each sequence, zeros behind its end; filters and gates; cotangents of the results."""
    sizes, rng = CTX.config.linear_attention, np.random.default_rng(2)
    assert sizes is not None
    batch, length = len(LENGTHS), max(LENGTHS)
    keys, group, mixed = sizes.num_key_heads, sizes.group, 2 * sizes.key_dim + 2 * sizes.value_dim
    is_real = np.arange(length) < np.asarray(LENGTHS)[:, None]
    rows = rng.standard_normal((batch, length, keys, sizes.row_width), np.float32)
    rows[..., mixed + 2 * group :] = 0
    of_out = rng.standard_normal((batch, length, keys * group, sizes.value_dim), np.float32)
    rows, of_out = (x * is_real[:, :, None, None] for x in (rows, of_out))
    filters = rng.standard_normal((keys, sizes.conv_width, mixed), np.float32)
    gates = tuple(rng.standard_normal((keys, group), np.float32) for _ in range(2))
    return jnp.asarray(rows, jnp.bfloat16), filters, gates, of_out


def gradients(weighted, chosen: slice, length: int, backward: Backward) -> tuple:
    """Of some of the sequences, padded to a length: of rows, of filters and of gates."""
    rows, filters, gates, of_out = operands()
    lengths = LENGTHS[chosen]
    batch = pack(weighted(*(n + 1 for n in lengths)), length=length)
    positions = jnp.arange(length)[None]
    positions = jnp.where(positions < jnp.asarray(lengths)[:, None], positions, -1)

    @jax.jit
    def run(rows, filters, gates, of_out, batch):
        sums = sums_of(backward, batch, profile=CTX.profile, backend=CTX.backend)

        def out(rows, filters, gates):
            return delta_rule(CTX, sums, rows, filters, gates, positions)

        return jax.vjp(out, rows, filters, gates)[1](of_out)

    def cut(x):
        own = np.asarray(x)[chosen, : min(length, x.shape[1])]
        return np.pad(own, ((0, 0), (0, length - own.shape[1]), (0, 0), (0, 0)))

    return jax.device_get(run(cut(rows), filters, gates, cut(of_out), batch))


def in_cuts(weighted, backward: Backward) -> list[tuple]:
    """Three sequences at once; two of them, padded to more leaves; and the last alone."""
    cuts = (slice(0, 3), max(LENGTHS)), (slice(0, 2), 200), (slice(2, 3), 64)
    return [gradients(weighted, *cut, backward) for cut in cuts]


@pytest.mark.invariance
def test_gradients_of_linear_attention_are_bitwise_batch_invariant(weighted):
    (of_rows, *whole), (of_first, *first), (of_last, *last) = in_cuts(weighted, Backward.CANONICAL)
    parts = jax.tree.leaves(jax.tree.map(np.add, first, last))
    names = "filters", "A", "step"
    for name, part, want in zip(names, parts, jax.tree.leaves(whole), strict=True):
        assert_bitwise_equal(part, want, claim=f"gradient of {name}")
    assert_bitwise_equal(of_first[:, : max(LENGTHS)], of_rows[:2], claim="rows of two sequences")
    assert_bitwise_equal(of_last[:, :64], of_rows[2:, :64], claim="rows of one sequence")
    assert not of_rows[1, 6:].any()
    rows, _, _, of_out = operands()
    assert_order_sensitive(np.asarray(rows, np.float32)[0, :, 0, :32].T * of_out[0, :, 0, :32].T)


@pytest.mark.control
def test_control_xlas_gradients_of_linear_attention_depend_on_the_cut(weighted):
    """The same sequences and cuts."""
    (_, *whole), (_, *first), (_, *last) = in_cuts(weighted, Backward.XLA)
    parts = jax.tree.map(np.add, first, last)
    for part, want in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert np.linalg.norm(part - want) <= 1e-5 * np.linalg.norm(want)
    assert sum(jax.tree.leaves(jax.tree.map(count_different_bits, parts, whole))) > 0
