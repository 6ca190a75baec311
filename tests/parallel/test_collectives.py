# SPDX-License-Identifier: Apache-2.0
"""Rows of experts travel between ranks as they are: every bit pattern, also of NaN and -0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from detjax.parallel.collectives import gather_expert_rows, scatter_expert_rows
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal

NUM_ROWS, TOP_K, WIDTH = 8, 3, 32


def slots(tp: int, dtype):
    """Rows [M, Q, D] of any bits, and what each rank has of them, [tp, M, Q, D]."""
    rng = np.random.default_rng(3)
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    words = rng.integers(0, np.iinfo(unsigned).max, (NUM_ROWS, TOP_K, WIDTH), unsigned)
    words[0, 0] = 1 << (8 * unsigned.itemsize - 1)  # -0
    owner = rng.integers(0, tp, (NUM_ROWS, TOP_K))
    own = np.stack([np.where(owner[..., None] == rank, words, 0) for rank in range(tp)])
    return words.view(dtype), own.view(dtype)


def on_ranks(tp: int, collective, own, out_specs):
    mesh = make_mesh(1, tp)
    run = jax.shard_map(
        lambda y: collective(y[0], "tp"),
        mesh=mesh, in_specs=P("tp"), out_specs=out_specs, check_vma=False,
    )  # fmt: skip
    return np.asarray(jax.jit(run)(own))


@pytest.mark.invariance
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_rows_of_experts_arrive_with_every_bit(tp, dtype):
    rows, own = slots(tp, np.dtype(dtype))
    whole = on_ranks(tp, gather_expert_rows, own, P())
    assert_bitwise_equal(whole, rows, claim=f"{tp} ranks: every slot's row")
    shares = on_ranks(tp, scatter_expert_rows, own, P("tp"))
    assert_bitwise_equal(shares, rows, claim=f"{tp} ranks: the shares together")


@pytest.mark.control
def test_control_a_sum_of_floats_changes_bits():
    rows, own = slots(2, np.dtype(jnp.float32))
    added = on_ranks(2, lax.psum, own, P())
    assert (added.view(np.uint32) != rows.view(np.uint32)).any()
