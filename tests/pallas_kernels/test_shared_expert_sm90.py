# SPDX-License-Identifier: Apache-2.0
"""The expert that every row has, in launches of the others: bits against its own launches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from detjax.pallas_kernels.linear import sm90 as linear_sm90
from detjax.pallas_kernels.linear import sm90_flat_matmul, sm90_w8a8
from detjax.pallas_kernels.linear.joined import JoinedMatrix
from detjax.pallas_kernels.linear.quantized import RowsToQuantize, W8A8Matrix
from detjax.pallas_kernels.moe import portable, sm90, sm90_grouped
from detjax.pallas_kernels.moe.expert_weights import (
    ExpertWeights,
    SharedExpert,
    SharedRows,
    with_shared,
)
from detjax.pallas_kernels.output_gate.sm90 import sigmoid_gate
from detjax.testing.bitwise import (
    assert_bitwise_equal,
    assert_order_sensitive,
    count_different_bits,
)
from detjax.testing.shapes import MoeShape

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
EPS = 1e-6
INTERPRET = plgpu.InterpretGPUParams()
SMALL = MoeShape(name="small", hidden_size=512, width=128, num_experts=8, top_k=2, renormalise=True)
QWEN = MoeShape(
    name="qwen", hidden_size=2048, width=512, num_experts=256, top_k=8, renormalise=True
)
"""The layers of Qwen3.5-35B-A3B."""


@functools.cache
def drawn(seed: int, *shape: int, scale: float = 1.0, dtype=BF16) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values * np.float32(scale), dtype)


@functools.cache
def eight_bits(seed: int, kind: str, *dims: int) -> W8A8Matrix:
    """Weights of 8 bits, with a scale an output or a block of 128 x 128."""
    dtype = jnp.dtype(jnp.int8 if kind == "int8" else jnp.float8_e4m3fn)
    values = jnp.clip(drawn(seed, *dims, scale=20.0).astype(F32), -127, 127)
    values = (jnp.round(values) if kind == "int8" else values).astype(dtype)
    *leading, num_out, num_in = dims
    shape = (num_out // 128, num_in // 128) if kind == "blocks" else (num_out,)
    scales = np.random.default_rng(seed).uniform(0.5, 1.5, (*leading, *shape)) / num_in**0.5 / 20
    return W8A8Matrix(values=values, scales=jnp.asarray(scales, F32))


def mixture(shape: MoeShape, kind: str = "bfloat16") -> tuple[ExpertWeights, SharedExpert]:
    num, width, hidden = shape.num_experts, shape.width, shape.hidden_size

    def matrix(seed: int, *dims: int):
        if kind != "bfloat16":
            return eight_bits(seed, kind, *dims)
        return drawn(seed, *dims, scale=dims[-1] ** -0.5)

    experts = ExpertWeights(matrix(1, num, 2 * width, hidden), matrix(2, num, hidden, width))
    return experts, SharedExpert(matrix(3, 2 * width, hidden), matrix(4, hidden, width))


def shared_alone(x, shared: SharedExpert, interpret) -> jax.Array:
    """What the shared expert gives, by products of its own."""
    if isinstance(shared.gate_up, W8A8Matrix):
        multiply = functools.partial(sm90_w8a8._multiply, out_dtype=BF16, interpret=interpret)
        rows = RowsToQuantize(values=x, coding=shared.gate_up.row_coding)
        hidden = multiply(rows, shared.gate_up, None, None, is_gated=True)
        rows = RowsToQuantize(values=hidden, coding=shared.down.row_coding)
        return multiply(rows, shared.down, None, None)
    product = functools.partial(linear_sm90._multiply_one_leaf, interpret=interpret)
    hidden = product(x, shared.gate_up, None, None, out_dtype=BF16, is_gated=True)
    return product(hidden, shared.down, None, None, out_dtype=BF16)


def apart(shape: MoeShape, kind: str, x, logits, gate, residual, gain, interpret) -> tuple:
    """Every operation in a launch of its own."""
    experts, shared = mixture(shape, kind)
    ids, weights = sm90.route(
        logits, num_experts=shape.num_experts, top_k=shape.top_k, renormalise=True,
        interpret=interpret is not None,
    )  # fmt: skip
    y = sm90.expert_mlp(x, ids, experts, first_expert=0, interpret=interpret)
    rows = shared_alone(x, shared, interpret)
    own_gate = functools.partial(sigmoid_gate, interpret=interpret is not None)
    y, weights = with_shared(y, weights, SharedRows(rows=rows, gate=gate), own_gate)
    return y, *sm90.combine_experts_add_rms_norm(
        y, weights, residual, gain, eps=EPS, interpret=interpret is not None
    )


def together(shape: MoeShape, kind: str, x, logits, residual, gain, interpret, **gate) -> tuple:
    """Experts and the shared one in two launches, then all that is added in one."""
    experts, shared = mixture(shape, kind)
    y, weights = sm90.route_mlp(
        x, logits, experts, top_k=shape.top_k, renormalise=True, shared=shared, interpret=interpret
    )
    rows = SharedRows(rows=y[0], first=shape.top_k, **gate)
    added = sm90.combine_experts_add_rms_norm(
        y, weights, residual, gain, eps=EPS, shared=rows, interpret=interpret is not None
    )
    return y, *added


@pytest.fixture
def one_cta(monkeypatch):
    """Give every tile to one CTA: interpretation runs CTAs side by side on few threads."""
    monkeypatch.setattr(sm90_grouped, "NUM_SMS", 1)
    monkeypatch.setattr(sm90_flat_matmul, "NUM_SMS", 1)


KINDS = ("bfloat16", "int8", "fp8", "blocks")


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_meets_the_shared_expert_in_interpret_mode(kind, num_sms, one_cta, monkeypatch):
    """By one CTA, and by several that quantise the rows of their own turns."""
    monkeypatch.setattr(sm90_grouped, "NUM_SMS", num_sms)
    shape = SMALL if kind == "bfloat16" else dataclasses.replace(SMALL, width=512, num_experts=4)
    check_one_row(shape, kind, INTERPRET)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("top_k", [4, 8, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_meets_the_shared_expert(kind, top_k):
    check_one_row(dataclasses.replace(QWEN, top_k=top_k), kind, None)


def check_one_row(shape: MoeShape, kind: str, interpret) -> None:
    hidden = shape.hidden_size
    x, residual, gain = drawn(5, 1, hidden), drawn(6, 1, hidden, scale=4.0), drawn(7, hidden)
    logits = drawn(8, 1, shape.num_experts + 64, dtype=F32)
    wide = drawn(9, 1, shape.num_experts + 64, dtype=F32)
    for column in (0, shape.num_experts):
        gate = wide[:, column:].astype(BF16)
        want = apart(shape, kind, x, logits, gate, residual, gain, interpret)
        got = together(shape, kind, x, logits, residual, gain, interpret, gate=wide, column=column)
        assert_bitwise_equal(got[0][0, :-1], want[0][0, :-1], claim="rows of experts")
        for a, b in zip(got[1:], want[1:], strict=True):
            assert_bitwise_equal(a, b, claim="one launch for all experts of a row")
    other = together(shape, kind, x, logits, residual, gain, interpret)
    assert count_different_bits(other[1], got[1]) > 0, "without its gate"
    y = got[0]
    assert count_different_bits(y[0, -1], y[0, 0]) > 0, "rows of two experts"


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_shared_row_is_added_in_interpret_mode(num_rows, one_cta):
    check_added(SMALL, num_rows, INTERPRET)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 64, 257, 1000])
def test_a_shared_row_is_added(num_rows):
    check_added(QWEN, num_rows, None)


def check_added(shape: MoeShape, num_rows: int, interpret) -> None:
    """By the norm behind the experts, by the product behind them, and from a sorted order."""
    hidden, top_k = shape.hidden_size, shape.top_k
    y = drawn(11, num_rows, top_k, hidden)
    weights = jnp.abs(drawn(12, num_rows, top_k, dtype=F32))
    rows, gate = drawn(13, num_rows, hidden, scale=2.0), drawn(14, num_rows, 64)
    residual, gain = drawn(15, num_rows, hidden, scale=4.0), drawn(16, hidden)
    w = drawn(17, 192, hidden, scale=hidden**-0.5)
    shared = SharedRows(rows=rows, gate=gate)
    is_interpreted = interpret is not None
    own_gate = functools.partial(sigmoid_gate, interpret=is_interpreted)
    joined = with_shared(y, weights, shared, own_gate)
    terms = np.asarray(joined[0], np.float32)[0] * np.asarray(joined[1])[0, :, None]
    assert_order_sensitive(terms.T.reshape(-1))
    combine = functools.partial(
        sm90.combine_experts_add_rms_norm, eps=EPS, interpret=is_interpreted
    )
    multiply = functools.partial(
        sm90.combine_experts_norm_linear, eps=EPS, out_dtype=BF16, interpret=interpret
    )
    for late in (False, True):
        call = (lambda *a, **o: multiply(*a, w, None, **o)) if late else combine
        want = call(*joined, residual, gain)
        got = call(y, weights, residual, gain, shared=shared)
        for a, b in zip(got, want, strict=True):
            assert_bitwise_equal(a, b, claim=f"a shared row is one more expert, {late=}")
        plain = call(y, weights, residual, gain)
        assert count_different_bits(plain[1], got[1]) > 0, "it has a part in the sum"


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3, 8, 16])
def test_two_matrices_are_one_product_in_interpret_mode(num_rows, one_cta):
    check_two_matrices(SMALL, num_rows, INTERPRET)


@pytest.mark.gpu
@pytest.mark.invariance
@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 8, 9, 16, 17, 64, 72, 128])
def test_two_matrices_are_one_product(num_rows):
    check_two_matrices(QWEN, num_rows, None)


def check_two_matrices(shape: MoeShape, num_rows: int, interpret) -> None:
    """A router and the gate of a shared expert, plain, behind a norm, and behind a sum."""
    hidden, num_out = shape.hidden_size, -(-shape.num_experts // 64) * 64
    router, gate = (drawn(20 + i, n, hidden, scale=0.05) for i, n in enumerate((num_out, 64)))
    x, gain = drawn(22, num_rows, hidden), drawn(23, hidden)
    leaves = drawn(24, 2, num_rows, hidden, dtype=F32)
    assert linear_sm90.joins_matrices(x, router, gate, out_dtype=F32)
    w = JoinedMatrix(first=router, second=gate)
    product = functools.partial(linear_sm90._multiply_one_leaf, interpret=interpret)
    whole = product(x, w, None, None, out_dtype=F32)
    for part, columns in ((router, slice(None, num_out)), (gate, slice(num_out, None))):
        alone = product(x, part, None, None, out_dtype=F32)
        assert_bitwise_equal(whole[:, columns], alone, claim="outputs of a matrix alone")
    rounded = product(x, gate, None, None, out_dtype=BF16)
    assert_bitwise_equal(whole[:, num_out:].astype(BF16), rounded, claim="one rounding")
    options = {"eps": EPS, "out_dtype": F32, "interpret": interpret}
    for sums in (None, leaves):
        if interpret is not None and num_rows > 4:
            continue  # those are operations apart
        own = linear_sm90.combine_norm_linear(sums, x, gain, router, **options)
        both = linear_sm90.combine_norm_linear(sums, x, gain, w, **options)
        assert_bitwise_equal(both[0][:, :num_out], own[0], claim="behind a norm")
        for a, b in zip(both[1:], own[1:], strict=True):
            assert_bitwise_equal(a, b, claim="the rows that are kept")


def test_what_joins_is_one_row_of_experts_as_wide():
    experts, shared = mixture(SMALL)
    assert sm90.joins_experts(1, experts, shared)
    assert not sm90.joins_experts(2, experts, shared)
    assert not portable.joins_experts(1, experts, shared)
    of_8_bits, own = mixture(dataclasses.replace(SMALL, width=512), "int8")
    assert sm90.joins_experts(1, of_8_bits, own)
    scaled = own._replace(down=dataclasses.replace(own.down, row_scale=jnp.float32(1)))
    assert not sm90.joins_experts(1, of_8_bits, scaled), "one scale for all rows"
    assert not sm90.joins_experts(1, of_8_bits, mixture(SMALL)[1])
    wider = SharedExpert(*(jnp.concatenate([w, w], axis=a) for a, w in enumerate(shared)))
    assert not sm90.joins_experts(1, experts, wider)
    many = jnp.zeros((200, SMALL.hidden_size), BF16)
    assert not linear_sm90.joins_matrices(many, many[:128], many[:64], out_dtype=F32)
    few = many[:3].astype(F32)
    assert not linear_sm90.joins_matrices(few, many[:128], many[:64], out_dtype=F32)
