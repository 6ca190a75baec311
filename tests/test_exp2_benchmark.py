# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.kernels.exp2`: its polynomials are exp2, and replace the instruction nowhere else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import exp2
from detjax.pallas_kernels import sm90_rows

SMALLEST = np.float32(2.0**-126)
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def run(op: str, *operands):
    """What a GPU does, on float32."""
    x, *rest = (np.float32(value) for value in operands)
    if op == exp2.SCALE:
        return (x.view(np.int32) << 23).view(np.float32)
    if op == exp2.ADD_EXPONENT:
        return ((x.view(np.int32) << 23) + rest[0].view(np.int32)).view(np.float32)
    if op == "fma.rn.f32":  # a product of float32 is exact in float64
        result = np.float32(x.astype(np.float64) * rest[0] + rest[1])
    elif op == "mul.rn.ftz.f32":
        product = x * rest[0]
        result = np.where(np.abs(product) < SMALLEST, np.float32(0), product)
    else:
        plain = {"max.NaN.f32": np.maximum, "add.rn.f32": np.add, "sub.rn.f32": np.subtract}
        result = plain[op](x, rest[0])
    return np.where(np.isnan(result), NAN, result)


def errors(degree: int) -> tuple[float, float]:
    """The largest errors of results from 2**-126 up, in units of the last place and relative."""
    x = np.linspace(-126, 0, 2**18 + 1).astype(np.float32)
    x = np.concatenate([x, np.linspace(-1, 0, 2**18 + 1).astype(np.float32)])
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(exp2.polynomial(run, x, degree) - exact)
    return (error / np.spacing(exact.astype(np.float32))).max(), (error / exact).max()


def test_degree_5_is_as_accurate_as_the_instruction_and_3_as_a_bfloat16():
    # The instruction is within 2.05 units (docs/reference.md).
    assert errors(5)[0] < 2.05
    # bfloat16 rounds by up to 2**-9.
    assert errors(3)[0] > 1000 and errors(3)[1] < 2.0**-13


@pytest.mark.parametrize("degree", [5, 3])
def test_special_numbers(degree):
    x = np.float32([0.0, -0.0, -1, -126, -127, -1e30, -np.inf])
    found = exp2.polynomial(run, x, degree)
    np.testing.assert_array_equal(found, np.float32([1, 1, 0.5, SMALLEST, 0, 0, 0]))
    between = exp2.polynomial(run, np.linspace(-127, -126, 65)[:-1].astype(np.float32), degree)
    assert (between < SMALLEST).all() and (degree == 3 or not between.any())
    assert np.isnan(exp2.polynomial(run, np.float32([np.nan]), degree)).all() == (degree == 5)


def test_only_ex2_is_replaced_and_only_inside(monkeypatch):
    kept = sm90_rows.instruction
    monkeypatch.setattr(exp2.mgpu.FragmentedArray, "_lift_fast_instr", lambda op: op)
    with exp2.exp2_by(0):
        assert sm90_rows.instruction("ex2.approx.ftz.f32") == "ex2.approx.ftz.f32"
    with exp2.exp2_by(3):
        assert sm90_rows.instruction("add.rn.f32") == "add.rn.f32"
        assert callable(sm90_rows.instruction("ex2.approx.ftz.f32"))
    assert sm90_rows.instruction is kept


def test_times_of_programs_that_run_in_turn(monkeypatch):
    calls = []

    def program(us: float, x):
        calls.extend([("a", us), ("b", 1.0)])
        return jax.block_until_ready(x)

    def kernel_events(run):
        run()
        return calls

    monkeypatch.setattr(exp2, "kernel_events", kernel_events)
    programs = [functools.partial(program, us) for us in (3.0, 4.0, 5.0)]
    assert exp2.times_in_turn(programs, (jnp.zeros(1),)) == [4.0, 5.0, 6.0]
    calls.pop()
    with pytest.raises(RuntimeError, match="kernels in"):
        exp2.times_in_turn(programs[:2], (jnp.zeros(1),))
