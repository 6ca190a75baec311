# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a training step tells the device's own time from the wall."""

from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks import training


class _Counting:
    """Stands for a trainer: each step takes the state of the one before."""

    def __init__(self) -> None:
        self.states: list[int] = []

    def step(self, state: Any, batches: list) -> tuple[Any, None]:
        assert batches == ["batch"]
        self.states.append(int(state))
        return state + 1, None


def test_device_time_is_that_of_a_step(monkeypatch):
    """Two kernels a step, of 250 and 500 us, as CUPTI would tell them."""
    trainer: Any = _Counting()

    def events(run):
        run()
        return [("a", 250.0), ("b", 500.0)] * len(trainer.states)

    monkeypatch.setattr(training, "kernel_events", events)
    state: Any = jnp.int32(7)
    found = training.device_time(trainer, state, ["batch"], steps=3)  # pyright: ignore[reportArgumentType]
    assert trainer.states == [7, 8, 9]
    assert found == {"device_ms": pytest.approx(0.75), "kernels": 2.0}


def test_arms_are_compared_by_wall_and_by_kernels():
    on_cpu, on_gpu = {"step_s": 2.0}, {"step_s": 2.0, "device_ms": 6.0}
    assert training.over_xla(on_cpu, {"step_s": 1.0}) == {"over_xla": 2.0}
    found = training.over_xla(on_gpu, {"step_s": 1.0, "device_ms": 4.0})
    assert found == {"over_xla": 2.0, "device_over_xla": 1.5}
    assert training.over_xla(on_gpu, {}) == {}
