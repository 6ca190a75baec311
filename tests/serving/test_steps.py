# SPDX-License-Identifier: Apache-2.0
"""The compiled steps: one donated cache, updated in place, and no arithmetic but the kernels'."""

import re

import jax
import numpy as np
import pytest

from detjax.serving.request import SamplingParams
from detjax.serving.sampling import SamplingRows
from detjax.serving.steps import (
    CompiledSteps,
    EngineStep,
    StepShape,
    StepSizes,
    compile_step,
    empty_pages,
    pages_shape,
)
from detjax.testing import float_arithmetic_outside_kernels
from detjax.testing.dummies import batch_of, dummy_config, dummy_model


def _copies_of(hlo: str, shape: tuple[int, ...]) -> list[str]:
    text = ",".join(map(str, shape))
    return [line for line in hlo.splitlines() if re.search(rf"= \w+\[{text}\]\S* copy\(", line)]


@pytest.mark.parametrize("length", [1, 32], ids=["decode", "prefill"])
def test_step_does_not_copy_the_cache(length):
    model = dummy_model(dummy_config())
    shape = StepShape(
        batch=2, length=length, table_len=2, num_pages=5, num_top=0, with_filters=False
    )
    compiled = compile_step(model, shape)
    pages = pages_shape(model, 5)
    assert _copies_of(compiled.as_text(), pages.shape) == []
    assert "input_output_alias" in compiled.as_text()
    cache = empty_pages(model, 5)
    table = np.asarray([[0, 1], [2, 3]], np.int32)
    tokens = batch_of([([5] * length, 0), ([6] * length, 0)], table)
    rows = SamplingRows.pack([(SamplingParams(), 0)] * 2)
    new, _ = compiled(model.params, model.rope_tables, cache, tokens, rows)
    assert cache.is_deleted()
    assert np.asarray(new[:, 4]).any() == False  # noqa: E712  page 4 is nobody's
    assert np.asarray(new[:, 0, :, :, :length]).any()


@pytest.mark.control
def test_control_a_read_of_the_old_cache_is_seen_as_a_copy():
    shape = (3, 5, 7)

    def step(cache):
        new = cache.at[0].set(1.0)
        return new, cache.sum()

    compiled = jax.jit(step, donate_argnums=0).lower(jax.ShapeDtypeStruct(shape, "float32"))
    assert _copies_of(compiled.compile().as_text(), shape)


def engine_step(kind, *, mode="invariant") -> EngineStep:
    length = {"prefill": 8, "decode": 1, "verify": 4}[kind]
    return EngineStep(
        kind=kind, rows=2, length=length, mode=mode, weights="full", num_top=2, with_filters=True
    )


@pytest.mark.parametrize("kind", ["prefill", "decode", "verify"])
def test_engine_steps_do_no_arithmetic_outside_kernels(kind):
    model = dummy_model(dummy_config(), tp=2)
    sizes = StepSizes(num_pages=6, num_slots=3, table_len=2, window_len=4)
    steps = CompiledSteps(model, sizes)
    step = engine_step(kind)
    operands = steps.operands(step, model.params)
    function = steps.function(step)
    assert float_arithmetic_outside_kernels(function, *operands) == []

    def control(*args):
        return function(*args)[1].sampling.temperature * 2.0

    assert float_arithmetic_outside_kernels(control, *operands) != []


def test_the_verify_step_does_not_copy_the_cache():
    model = dummy_model(dummy_config())
    steps = CompiledSteps(model, StepSizes(num_pages=7, num_slots=3, table_len=2, window_len=4))
    compiled = steps.get(engine_step("verify"), model.params)
    assert _copies_of(compiled.as_text(), pages_shape(model, 7).shape) == []
    assert "input_output_alias" in compiled.as_text()
