# SPDX-License-Identifier: Apache-2.0
"""The forms of the ranks' sum: the same bits, whichever runs. The kernel itself needs GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from detjax.models.config import ModelConfig
from detjax.models.decoder import check_mesh
from detjax.models.layers import ForwardContext, row_parallel_norm
from detjax.models.transformer import Stream
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear_partial
from detjax.pallas_kernels.rms_norm.api import add_rms_norm
from detjax.parallel.collectives import butterfly_sum
from detjax.parallel.exchange import (
    MAX_EXCHANGED_ROWS,
    adds_tiles,
    exchange_shapes,
    is_scattered,
    scatter_add_rms_norm,
    why_no_exchange,
)
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_config

PROFILE = NumericsProfile()
EPS = 1e-5
WIDTH = 64
WHOLE = P()
K_LEN = 8 * 48
SIZES = ((K_LEN, 8), (K_LEN, 200), (25600, 16))
"""(K, rows): shares of 1 to 200 rows. 25600 is down_proj of Qwen3-32B, 3200 columns a rank of 8."""


def normal(seed: int, *shape: int, dtype=jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values * scale, dtype)


def operands(k_len: int, num_rows: int, dtype=jnp.bfloat16):
    """x, w, residual, bias and gain; the last three in `dtype`."""
    x, w = normal(1, num_rows, k_len), normal(2, WIDTH, k_len, scale=k_len**-0.5)
    rest = (
        normal(seed, *dims, WIDTH, dtype=dtype)
        for seed, dims in ((3, (num_rows,)), (4, ()), (5, ()))
    )
    return x, w, *rest


def on_ranks(tp: int, finish, x, w, residual, bias, gain, *, residual_out=WHOLE):
    """Each rank's subtree, then `finish(partial, residual, bias, gain)`."""
    reduction = tree_reduction(x.shape[1], PROFILE)

    def rank(x, w, *rest):
        partial = linear_partial(x, w, reduction=reduction, backend=Backend.PORTABLE)
        return finish(partial, *rest)

    columns = P(None, "tp")
    step = jax.shard_map(
        rank,
        mesh=make_mesh(1, tp),
        in_specs=(columns, columns, P(), P(), P()),
        out_specs=(residual_out, P()),
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(step)(x, w, residual, bias, gain))


def butterfly(tp: int):
    def finish(partial, residual, bias, gain):
        total = butterfly_sum(partial, "tp", tp, backend=Backend.PORTABLE)
        return add_rms_norm(total, residual, bias, gain, eps=EPS, backend=Backend.PORTABLE)

    return finish


def scatter(tp: int):
    def finish(partial, residual, bias, gain):
        return scatter_add_rms_norm(
            partial, residual, bias, gain, "tp", tp, eps=EPS, backend=Backend.PORTABLE
        )

    return finish


@functools.cache
def one_rank(k_len: int, num_rows: int):
    return on_ranks(1, butterfly(1), *operands(k_len, num_rows))


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("k_len", "num_rows"), SIZES)
@pytest.mark.parametrize("tp", quick_and_slow((4,), (1, 2, 8)))
def test_scatter_add_rms_norm_is_bitwise_mesh_invariant(tp, k_len, num_rows):
    """The shares of all ranks together are the butterfly's rows, and those of one rank."""
    args = operands(k_len, num_rows)
    x, w = (np.asarray(a, np.float32) for a in args[:2])
    assert_order_sensitive(x[0] * w)
    one = one_rank(k_len, num_rows)
    several = on_ranks(tp, butterfly(tp), *args)
    shared = on_ranks(tp, scatter(tp), *args, residual_out=P("tp"))
    for name, a, b, c in zip(("residual stream", "output"), one, several, shared, strict=True):
        assert_bitwise_equal(b, a, claim=f"{name}, K={k_len}: {tp} ranks have the bits of one")
        assert_bitwise_equal(c, a, claim=f"{name}, K={k_len}: scatter has them too")


@pytest.mark.slow
@pytest.mark.invariance
def test_scatter_takes_a_share_of_the_residual_stream_as_well():
    """What one layer leaves on a rank, the next one takes."""
    args = operands(K_LEN, 200)

    def twice(finish):
        def both(partial, residual, bias, gain):
            residual, _ = finish(partial, residual, bias, gain)
            return finish(partial, residual, bias, gain)

        return both

    want = on_ranks(1, twice(butterfly(1)), *args)
    got = on_ranks(4, twice(scatter(4)), *args, residual_out=P("tp"))
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b, claim="a chain of two layers, rows shared out")


def norm_on_ranks(tp: int, x, w, residual, gain):
    """`row_parallel_norm` as a layer calls it; the residual stream's shares put together."""
    config = dummy_config(hidden_size=WIDTH, intermediate_size=x.shape[1])
    ctx = ForwardContext(config=config, profile=PROFILE, backend=Backend.PORTABLE, tp=tp)
    is_shared = tp > 1 and is_scattered(x.shape[0], tp)
    step = jax.shard_map(
        lambda x, w, residual, gain: row_parallel_norm(ctx, x, w, residual, None, gain),
        mesh=make_mesh(1, tp),
        in_specs=(P(None, "tp"), P(None, "tp"), P(), P()),
        out_specs=Stream(residual=P("tp") if is_shared else P(), x=P()),
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(step)(x, w, residual, gain))


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("tp", quick_and_slow((8,), (2,)))
def test_the_choice_by_rows_is_bitwise_batch_invariant(tp):
    """A row has the same bits on either side of the size at which the form changes."""
    many = 2 * MAX_EXCHANGED_ROWS
    x, w, residual, _, gain = operands(K_LEN, many)
    want = norm_on_ranks(1, x, w, residual, gain)
    counts = (1, MAX_EXCHANGED_ROWS, MAX_EXCHANGED_ROWS + 1, MAX_EXCHANGED_ROWS + 8, many)
    assert [is_scattered(n, tp) for n in counts] == [False, False, False, True, True]
    for count in counts:
        got = norm_on_ranks(tp, x[:count], w, residual[:count], gain)
        for name, a, b in zip(("residual stream", "output"), got, want, strict=True):
            assert_bitwise_equal(a, b[:count], claim=f"{name} of {count} rows on {tp} ranks")


@pytest.mark.control
def test_control_psum_and_rounded_partials_are_not_mesh_invariant():
    """One sum a rank added by psum, and partials rounded before they are added."""
    args = operands(K_LEN, 64, jnp.float32)  # a rounding to bfloat16 would hide most differences
    want = on_ranks(1, butterfly(1), *args)

    def one_sum_a_rank(x, w, residual, bias, gain):
        total = jax.lax.psum(jnp.dot(x, w.T, preferred_element_type=jnp.float32), "tp")
        return add_rms_norm(total, residual, bias, gain, eps=EPS, backend=Backend.PORTABLE)

    columns = P(None, "tp")
    step = jax.shard_map(
        one_sum_a_rank,
        mesh=make_mesh(1, 4),
        in_specs=(columns, columns, P(), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    summed = jax.tree.map(np.asarray, jax.jit(step)(*args))

    def rounded(partial, residual, bias, gain):
        partial = partial.astype(jnp.bfloat16).astype(jnp.float32)
        return butterfly(2)(partial, residual, bias, gain)

    assert count_different_bits(summed[0], want[0]) > 0
    # Of two ranks psum has no other order; what changes bits there is the rounding before it.
    assert count_different_bits(on_ranks(2, rounded, *args)[0], want[0]) > 0


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="6 rows do not divide over 4 ranks"):
        on_ranks(4, scatter(4), *operands(K_LEN, 6), residual_out=P("tp"))


@pytest.mark.parametrize(
    ("intermediate_size", "tp", "message"),
    [
        (25600, 16, "tp=16 does not divide the 8 leaves of o_proj"),
        (172, 2, r"tp=2 does not divide the 1 leaves of down_proj \(width 172\)"),
        (16 * 2 * 3, 4, "tp=4 does not divide the 2 leaves of down_proj"),
    ],
)
def test_tp_must_divide_the_leaves(intermediate_size, tp, message):
    config: ModelConfig = dummy_config(intermediate_size=intermediate_size)
    with pytest.raises(ValueError, match=message):
        check_mesh(config, PROFILE, tp)


@pytest.mark.parametrize(
    ("tp", "width", "backend", "reason"),
    [
        (1, 4096, Backend.SM90, "one rank has nobody to exchange with"),
        (2, 4096, Backend.PORTABLE, "the portable backend exchanges through XLA's collectives"),
        (2, 256, Backend.SM90, "256 channels are not a row of whole warpgroups"),
    ],
)
def test_why_there_is_no_exchange_kernel(tp, width, backend, reason):
    assert why_no_exchange(make_mesh(1, tp), width=width, backend=backend) == reason


@pytest.mark.parametrize(
    ("tp", "vocab", "dtype", "has_tiles", "has_choices"),
    [
        (2, 1024, jnp.bfloat16, True, True),
        (2, None, jnp.bfloat16, True, False),
        (2, 1000, jnp.bfloat16, True, False),  # no whole blocks
        (2, 1 << 24, jnp.bfloat16, True, False),  # tokens are not exact in float32
        (4, 1024, jnp.bfloat16, True, True),
        (8, 1024, jnp.bfloat16, False, False),  # no eight GPUs have run it
    ],
)
def test_what_ranks_exchange_themselves(tp, vocab, dtype, has_tiles, has_choices):
    found = exchange_shapes(
        make_mesh(1, tp), width=1024, dtype=jnp.dtype(dtype), backend=Backend.SM90,
        padded_vocab=vocab,
    )  # fmt: skip
    assert found.rows.slots.shape == (1, tp, 2, 128, tp - 1, 1024)
    assert (found.tiles is not None) == has_tiles
    assert (found.choices is not None) == has_choices


@pytest.mark.parametrize(
    ("num_rows", "width", "dtype", "is_taken"),
    [
        (1, 4096, jnp.bfloat16, True),
        (64, 8192, jnp.bfloat16, True),
        (65, 4096, jnp.bfloat16, False),
        (1, 4096, jnp.float32, False),
        (1, 16384, jnp.bfloat16, False),  # 256 CTAs, of which some would not be resident
    ],
)
def test_which_products_add_the_ranks_sums(num_rows, width, dtype, is_taken):
    exchange = exchange_shapes(
        make_mesh(1, 2), width=width, dtype=jnp.dtype(dtype), backend=Backend.SM90
    )
    x, w = jax.ShapeDtypeStruct((num_rows, 2048), dtype), jax.ShapeDtypeStruct((width, 2048), dtype)
    assert adds_tiles(exchange, x, w, backend=Backend.SM90) == is_taken
    none = dataclasses.replace(exchange, tiles=None)
    assert not adds_tiles(none, x, w, backend=Backend.SM90)
    assert not adds_tiles(None, x, w, backend=Backend.SM90)


def test_the_exchange_kernel_takes_real_widths():
    for width in (1024, 2048, 3584, 4096, 5120, 8192):
        assert why_no_exchange(make_mesh(1, 8), width=width, backend=Backend.SM90) is None
