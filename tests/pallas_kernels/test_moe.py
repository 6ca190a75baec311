# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: what is chosen, in which order it is added, and that no row meets another.

The claims of each kernel are proven in tests/invariance/test_kernel_claims.py.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from detjax.models.fast import ragged_product, scatter_experts
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear, linear_swiglu
from detjax.pallas_kernels.moe.api import combine_experts_add_rms_norm, expert_mlp, route
from detjax.pallas_kernels.moe.expert_weights import ClampedExperts, ExpertWeights
from detjax.pallas_kernels.moe.portable import exp_below
from detjax.pallas_kernels.rms_norm.api import rms_norm
from detjax.pallas_kernels.swiglu.api import swiglu
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.testing import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
    wide,
)
from detjax.testing.cases import quick_and_slow

ON = {"backend": Backend.PORTABLE}
F32, BF16 = jnp.dtype(jnp.float32), ml_dtypes.bfloat16
NUM_EXPERTS, TOP_K, D, F = 8, 3, 64, 48
MANY = 257


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(wide(np.random.default_rng(seed), shape, 0.7))


def bf16(seed: int, *shape: int) -> jax.Array:
    return draw(seed, *shape).astype(jnp.bfloat16)


ROUTER, W_GATE_UP = bf16(1, NUM_EXPERTS, D), bf16(2, NUM_EXPERTS, 2 * F, D)
W_DOWN, GAIN = bf16(3, NUM_EXPERTS, D, F), bf16(4, D)
EXPERTS = ExpertWeights(W_GATE_UP, W_DOWN)
X, RESIDUAL = bf16(5, MANY, D), bf16(6, MANY, D)


def logits_of(x: jax.Array) -> jax.Array:
    return linear(x, ROUTER, out_dtype=F32, **ON)


@jax.jit
def experts_of(x: jax.Array, ids: jax.Array) -> jax.Array:
    return expert_mlp(x, ids, EXPERTS, first_expert=0, **ON)


@jax.jit
def mixture(x: jax.Array, residual: jax.Array) -> jax.Array:
    """A whole mixture of experts: the new residual stream and its normalised rows."""
    ids, weights = route(logits_of(x), num_experts=NUM_EXPERTS, top_k=TOP_K, renormalise=True, **ON)
    y = expert_mlp(x, ids, EXPERTS, first_expert=0, **ON)
    added = combine_experts_add_rms_norm(y, weights, residual, GAIN, eps=1e-5, **ON)
    return jnp.stack(added, axis=1)


# --------------------------------------------------------------------------------------- routing


def left_to_right(terms: np.ndarray) -> np.ndarray:
    total = np.zeros(len(terms), np.float32)
    for column in terms.T:
        total = total + column
    return total


def tree(terms: np.ndarray) -> np.ndarray:
    while terms.shape[1] > 1:
        terms = terms[:, 0::2] + terms[:, 1::2]
    return terms[:, 0]


@pytest.mark.parametrize("num_experts", quick_and_slow([24], [8, 128, 160]))
def test_weights_are_added_and_divided_as_specified(num_experts):
    """From the exponentials on, against IEEE arithmetic on the host; the other order differs."""
    logits = draw(7, 33, num_experts)
    order = np.argsort(-np.asarray(logits), axis=1, kind="stable")[:, :TOP_K]
    p = np.asarray(exp_below(logits, jnp.max(logits, axis=1, keepdims=True)))
    exact = np.exp(np.asarray(logits, np.float64) - np.asarray(logits).max(axis=1)[:, None])
    # The difference x rounds once, which moves exp(x) by exp(x) * |x| * 2**-24, at most 2**-24 / e;
    # `exp_below` itself is within two ulp, and its results are at most 1.
    assert np.abs(p[:, :num_experts] - exact).max() < 3 * 2.0**-24
    assert not p[:, num_experts:].any()
    chosen = np.take_along_axis(p, order, axis=1)
    sums = {True: left_to_right(chosen), False: tree(p)}
    assert count_different_bits(sums[False], left_to_right(p)) > 0
    for renormalise, total in sums.items():
        ids, weights = route(
            logits, num_experts=num_experts, top_k=TOP_K, renormalise=renormalise, **ON
        )
        assert_bitwise_equal(ids, order.astype(np.int32), claim="greatest logits first")
        assert_bitwise_equal(
            weights, chosen / total[:, None], claim=f"weights, {renormalise=}: one division each"
        )


def test_ties_go_to_the_lower_expert():
    """Among those chosen, at the edge of the choice, and where zeros differ in sign."""
    logits = np.full((5, NUM_EXPERTS), -1.0, np.float32)
    logits[0, [6, 2]] = 3.0
    logits[1] = 0.5
    logits[2, [1, 4, 5, 7]] = [2.0, 1.0, 1.0, 1.0]
    logits[3, [0, 3, 5]] = [-0.0, 0.0, -0.0]
    logits[4] = -np.inf
    logits[4, 5] = 1.0
    ids, weights = route(
        jnp.asarray(logits), num_experts=NUM_EXPERTS, top_k=TOP_K, renormalise=True, **ON
    )
    assert np.asarray(ids).tolist() == [[2, 6, 0], [0, 1, 2], [1, 4, 5], [0, 3, 5], [5, 0, 1]]
    assert (np.asarray(weights)[1] == np.float32(1) / np.float32(3)).all()
    assert np.asarray(weights)[4].tolist() == [1, 0, 0]


def test_top_k_must_be_possible():
    for top_k in (0, NUM_EXPERTS + 1):
        with pytest.raises(ValueError, match=f"top_k={top_k} must be from 1 to the 8 experts"):
            route(logits_of(X[:1]), num_experts=NUM_EXPERTS, top_k=top_k, renormalise=True, **ON)
    with pytest.raises(ValueError, match=r"a column for each of num_experts=9"):
        route(logits_of(X[:1]), num_experts=9, top_k=2, renormalise=True, **ON)


def test_shapes_of_experts_must_agree():
    ids = jnp.zeros((1, TOP_K), jnp.int32)
    with pytest.raises(ValueError, match=r"must be \[M, D\], \[u, 2 F, D\] and \[u, D, F\]"):
        expert_mlp(X[:1], ids, EXPERTS._replace(gate_up=W_GATE_UP[:, :-2]), first_expert=0, **ON)
    with pytest.raises(ValueError, match="must have as many rows of up as of gate"):
        odd = ExpertWeights(W_GATE_UP[:, :-1], W_DOWN[..., :-1])
        expert_mlp(X[:1], ids, odd, first_expert=0, **ON)


# --------------------------------------------------------------------------------------- experts


def by_hand(x: jax.Array) -> np.ndarray:
    """Every row through every expert, one expert after the other."""
    return np.stack(
        [
            np.asarray(linear(linear_swiglu(x, w_gate_up, **ON), w_down, out_dtype=x.dtype, **ON))
            for w_gate_up, w_down in zip(W_GATE_UP, W_DOWN, strict=True)
        ],
        axis=1,
    )


def chosen(rows: np.ndarray, ids) -> np.ndarray:
    return np.take_along_axis(rows, np.asarray(ids)[:, :, None], axis=1)


@pytest.mark.slow
def test_an_expert_with_biases_has_the_bits_of_a_dense_layer_with_them():
    """Each row and expert alone: products with biases, and the gate between them."""
    x, ids = bf16(1, 5, D), jnp.asarray([[0, 2, 1], [3, 7, 0], [2, 1, 4], [5, 6, 7], [1, 0, 6]])
    w_gate_up, w_down = bf16(2, NUM_EXPERTS, 2 * F, D), bf16(3, NUM_EXPERTS, D, F)
    clamp = SwigluClamp(alpha=1.702, limit=1.0)
    extras = ClampedExperts(
        gate_up_bias=bf16(4, NUM_EXPERTS, 2 * F), down_bias=bf16(5, NUM_EXPERTS, D), clamp=clamp
    )
    y = expert_mlp(x, ids, ExpertWeights(w_gate_up, w_down, extras), first_expert=0, **ON)
    for row in range(len(x)):
        for rank, expert in enumerate(np.asarray(ids[row])):
            one = x[row : row + 1]
            gate_up = linear(
                one, w_gate_up[expert], extras.gate_up_bias[expert], out_dtype=one.dtype, **ON
            )
            hidden = swiglu(gate_up, clamp=clamp, **ON)
            bias = extras.down_bias[expert]
            want = linear(hidden, w_down[expert], bias, out_dtype=one.dtype, **ON)
            assert_bitwise_equal(y[row, rank], want[0], claim=f"row {row}, expert {expert}")


def test_biases_of_other_shapes_are_refused():
    w_gate_up, w_down = bf16(2, NUM_EXPERTS, 2 * F, D), bf16(3, NUM_EXPERTS, D, F)
    extras = ClampedExperts(
        gate_up_bias=bf16(4, NUM_EXPERTS, F), down_bias=bf16(5, NUM_EXPERTS, D),
        clamp=SwigluClamp(alpha=1.0, limit=1.0),
    )  # fmt: skip
    with pytest.raises(ValueError, match="must be one a row"):
        expert_mlp(
            bf16(1, 1, D),
            jnp.zeros((1, 1), jnp.int32),
            ExpertWeights(w_gate_up, w_down, extras),
            first_expert=0,
            **ON,
        )


@pytest.mark.slow
@pytest.mark.invariance
def test_an_expert_has_the_bits_of_a_dense_layer():
    """Whatever its load: all rows, none, one more than a tile; in any slot."""
    x, rng = X[:37], np.random.default_rng(8)
    assert_order_sensitive(np.asarray(x[0], np.float32) * np.asarray(W_GATE_UP[0], np.float32))
    want = by_hand(x)
    mixed = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (37, 1)), axis=1)[:, :TOP_K]
    crowded = np.stack([np.full(37, 5), np.where(np.arange(37) < 17, 2, 7), mixed[:, 2]], axis=1)
    for name, ids in {
        "mixed": mixed,
        "expert 5 has all rows, 2 has 17, 7 has 20": crowded,
        "one expert in every slot, the others none": np.full((37, TOP_K), 3),
    }.items():
        got = experts_of(x, jnp.asarray(ids, jnp.int32))
        assert_bitwise_equal(got, chosen(want, ids), claim=name)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_rank_gives_zero_bits_where_it_has_no_expert():
    """And its own experts' rows as they are, where the first of them is a traced value too."""
    x, ids = X[:17], jnp.asarray(np.random.default_rng(9).integers(0, NUM_EXPERTS, (17, TOP_K)))
    ids = ids.astype(jnp.int32)
    want = chosen(by_hand(x), ids)
    for first, count in ((0, 2), (2, 5), (7, 1)):
        own = slice(first, first + count)
        some = ExpertWeights(W_GATE_UP[own], W_DOWN[own])
        got = expert_mlp(x, ids, some, first_expert=jnp.int32(first), **ON)
        is_here = (np.asarray(ids) >= first) & (np.asarray(ids) < first + count)
        assert is_here.any() and not is_here.all()
        kept = np.where(is_here[:, :, None], want.view(np.uint16), np.uint16(0))
        assert_bitwise_equal(np.asarray(got).view(np.uint16), kept, claim=f"experts {own}")


def fused_sum(y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """One rounding a rank: a product of 24 and 8 bits is exact in float64, and so is the sum."""
    total = np.zeros((len(y), y.shape[2]), np.float32)
    for rank in range(y.shape[1]):
        product = weights[:, rank, None].astype(np.float64) * y[:, rank].astype(np.float64)
        total = (product + total).astype(np.float32)
    return total


def test_experts_are_added_in_order_of_rank_by_fused_multiply_adds():
    """On a processor with a fused multiply-add; a rounded product differs, and so does an order."""
    y, weights = bf16(10, 37, TOP_K, D), jnp.abs(draw(11, 37, TOP_K))
    total, out = combine_experts_add_rms_norm(y, weights, RESIDUAL[:37], GAIN, eps=1e-5, **ON)
    wide_y, w = np.asarray(y, np.float32), np.asarray(weights)
    want = (np.asarray(RESIDUAL[:37], np.float32) + fused_sum(wide_y, w)).astype(BF16)
    assert_bitwise_equal(total, want, claim="the residual stream")
    assert_bitwise_equal(out, rms_norm(total, GAIN, eps=1e-5, **ON), claim="its normalised rows")
    zero = jnp.zeros((37, D), jnp.float32)
    in_float32, _ = combine_experts_add_rms_norm(
        y.astype(F32), weights, zero, GAIN.astype(F32), eps=1e-5, **ON
    )
    assert_bitwise_equal(in_float32, fused_sum(wide_y, w), claim="the sum itself")
    assert count_different_bits(fused_sum(wide_y[:, ::-1], w[:, ::-1]), in_float32) > 0
    rounded = left_to_right((w[:, :, None] * wide_y).transpose(0, 2, 1).reshape(-1, TOP_K))
    assert count_different_bits(rounded.reshape(37, D), in_float32) > 0


# -------------------------------------------------------------------------------- rows and others


def derangement(count: int, seed: int) -> np.ndarray:
    """An order in which no row stays in its place."""
    order = np.random.default_rng(seed).permutation(count)
    return order[np.argsort(np.roll(order, 1))]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("count", quick_and_slow([33], [2, 64, 200]))
def test_deranged_rows_have_deranged_bits(count):
    """No row stays in its place, and each takes its bits along (vLLM's test)."""
    order = derangement(count, count)
    assert sorted(order) == list(range(count)) and (order != np.arange(count)).all()
    want = np.asarray(mixture(X[:count], RESIDUAL[:count]))
    got = mixture(X[:count][order], RESIDUAL[:count][order])
    assert_bitwise_equal(got, want[order], claim=f"{count} rows, none in its place")


EDGES = (1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 257)


@pytest.mark.invariance
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param(EDGES, marks=pytest.mark.slow, id="edges"),
        pytest.param(range(1, MANY + 1), marks=(pytest.mark.slow, pytest.mark.nightly), id="all"),
    ],
)
def test_a_mixture_is_bitwise_batch_invariant_at_every_size(counts):
    most = max(counts)
    want = np.asarray(mixture(X[:most], RESIDUAL[:most]))
    for count in counts:
        got = mixture(X[:count], RESIDUAL[:count])
        assert_bitwise_equal(got, want[:count], claim=f"the first {count} of {most} rows")


@pytest.mark.slow
@pytest.mark.invariance
def test_nan_stays_in_its_row():
    """In a row that shares every expert's tile with others; its ids are in range."""
    want = np.asarray(mixture(X[:33], RESIDUAL[:33]))
    for row in (0, 8, 32):
        broken = X[:33].at[row, 3].set(jnp.nan)
        ids, _ = route(
            logits_of(broken), num_experts=NUM_EXPERTS, top_k=TOP_K, renormalise=True, **ON
        )
        assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < NUM_EXPERTS)).all()
        got = np.asarray(mixture(broken, RESIDUAL[:33]))
        assert np.isnan(got[row].astype(np.float32)).any()
        others = np.arange(33) != row
        assert_bitwise_equal(got[others], want[others], claim=f"NaN in row {row}")


# ---------------------------------------------------------------------------------------- controls


def by_expert(ids: np.ndarray) -> tuple[np.ndarray, jax.Array]:
    """Slots sorted by expert, and how many each has."""
    slots = ids.reshape(-1)
    sizes = jnp.asarray(np.bincount(slots, minlength=NUM_EXPERTS), jnp.int32)
    return np.argsort(slots, kind="stable"), sizes


@pytest.mark.control
def test_control_ragged_dot_is_not_batch_invariant():
    """XLA's ragged product on the same rows and experts: some bits depend on who else is there.

    In float32, as the sums of few bfloat16 terms seldom change when they are rounded.
    """
    x = draw(12, 70, 256)
    w, ids = draw(13, NUM_EXPERTS, 64, 256), np.asarray(draw(14, 70, 1) > 0, np.int32)

    @jax.jit
    def product(x, sizes):
        return ragged_product(x, w, sizes)

    def rows(count):
        order, sizes = by_expert(ids[:count])
        out = np.empty((count, 64), np.float32)
        out[order] = product(x[:count][order], sizes)
        return out

    whole = rows(70)
    assert any(count_different_bits(rows(m), whole[:m]) for m in (1, 2, 3, 5, 7, 8, 16, 33))


@pytest.mark.control
def test_control_a_combine_by_scatter_add_depends_on_where_experts_are():
    """It adds in the order of slots, by expert: ranks that add their own first change bits."""
    y, weights = bf16(15, 37, TOP_K, D), jnp.abs(draw(16, 37, TOP_K))
    ids = np.random.default_rng(17).permuted(np.tile(np.arange(NUM_EXPERTS), (37, 1)), axis=1)
    ids = ids[:, :TOP_K]

    def scattered(first: int, last: int) -> np.ndarray:
        order, _ = by_expert(ids)
        mine = order[(ids.reshape(-1)[order] >= first) & (ids.reshape(-1)[order] < last)]
        flat = y.reshape(-1, D)[mine], weights.reshape(-1)[mine], jnp.asarray(mine // TOP_K)
        return np.asarray(scatter_experts(*flat, 37))

    one, two = scattered(0, 8), scattered(0, 4) + scattered(4, 8)
    assert np.abs(one - two).max() < 1e-4 * np.abs(one).max()
    assert count_different_bits(one, two) > 0
    zero = jnp.zeros((37, D), jnp.float32)
    ours, _ = combine_experts_add_rms_norm(
        y.astype(F32), weights, zero, GAIN.astype(F32), eps=1e-5, **ON
    )
    assert count_different_bits(one, ours) > 0
