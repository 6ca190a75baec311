# SPDX-License-Identifier: Apache-2.0
"""The compiled step: one donated cache, updated in place."""

import re

import jax
import numpy as np
import pytest

from detjax.serving.request import SamplingParams
from detjax.serving.sampling import SamplingRows
from detjax.serving.steps import StepShape, compile_step, empty_pages, pages_shape
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
