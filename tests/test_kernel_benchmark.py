# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.kernels`: each case can be traced at its sizes; other bits take its time away."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import run
from benchmarks.kernels.cases import SUBJECTS, Kernel, Rival

COUNTS = (1, 64, 2048)


def operands_of(kernel: Kernel, num_rows: int):
    """Shapes of one call's operands; nothing is drawn."""
    calls = jax.eval_shape(lambda: kernel.draw(max(kernel.counts)))
    return jax.eval_shape(lambda *some: kernel.first_rows(some, num_rows), *calls[0])


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_case_and_its_rivals_can_be_traced(subject):
    kernels = [kernel for kernel in SUBJECTS[subject](COUNTS) if kernel.counts]
    assert kernels
    for kernel in kernels:
        for num_rows in kernel.counts:
            operands = operands_of(kernel, num_rows)
            out = jax.tree.leaves(jax.eval_shape(kernel.run, *operands))
            assert {one.shape[kernel.out_axis] for one in out} <= {num_rows}, kernel.facts(num_rows)
            assert kernel.floor_us(num_rows) > 0
            for name, rival in kernel.rivals.items():
                if name != "cudnn":  # which lowers for GPUs alone
                    jax.eval_shape(lambda *some, r=rival: r.run(*r.prepare(*some)), *operands)


def small(ours) -> Kernel:
    return Kernel(
        subject="linear", facts=lambda m: {"shape": "o", "m": m}, counts=(1, 4),
        draw=lambda most: [(jnp.arange(most, dtype=jnp.float32), jnp.ones(3))], axes=(0, None),
        run=ours, num_bytes=lambda m: 4.3e6 * m,
        rivals={"jnp": Rival(run=ours), "none": Rival(run=lambda x: x)},
    )  # fmt: skip


@pytest.fixture
def times(monkeypatch):
    """Every call takes 2 microseconds."""

    def device_us(compiled, calls, *, only=""):
        assert jax.tree.leaves(compiled(*calls[0]))
        return 2.0

    monkeypatch.setattr(run, "device_us", device_us)
    monkeypatch.setattr(run, "EXACT_OPTIONS", {})


def test_a_row_has_times_limit_and_ratio(times):
    _, row = run.measured(small(lambda x, gain: 2 * x))
    assert (row["m"], row["us"], row["share"], row["jnp_us"]) == (1, 2.0, 0.5, 2.0)
    assert row["different_bits"] == 0 and "none_us" not in row and "TypeError" in row["none_failed"]
    found = run.with_ratios(row, 2e12, {("o", 1): {"torch_us": 1.0}}, "")
    assert found["ratio"] == 0.5 and "us 0.50 of limit  jnp 2.0  torch 1.0" in run.line(found)


def test_bits_that_depend_on_the_batch_take_the_time_away(times):
    whole, alone = run.measured(small(lambda x, gain: x + x.shape[0]))
    assert whole["us"] == 2.0 and alone["different_bits"] == 1 and "us" not in alone
    assert "NO TIME bits differ" in run.line(alone)


def test_a_failure_is_told_in_its_row(times):
    def fails(x, gain):
        raise ValueError("too wide")

    rows = list(run.measured(small(fails)))
    assert [row["failed"] for row in rows] == ["ValueError: too wide"] * 2
