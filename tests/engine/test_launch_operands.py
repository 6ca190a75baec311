# SPDX-License-Identifier: Apache-2.0
"""Results of a launch as the host reads them."""

import jax
import numpy as np
import pytest

from detjax.engine.running.launch_operands import extend_live_range

LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


@pytest.mark.parametrize("first", [LEAST, -1, 0, 2, 7, MOST])
@pytest.mark.parametrize("shape", [(2, 3), (2, 5, 3)])
def test_a_result_that_reads_the_page_table_does_not_change(first, shape):
    """Whatever it holds: the bits of logprobs are any integers."""
    result = np.random.default_rng(0).integers(LEAST, MOST, shape, np.int32)
    result.flat[0] = first
    for table in (np.zeros((2, 1), np.int32), np.array([[0, 5, MOST], [1, 2, 3]], np.int32)):
        np.testing.assert_array_equal(jax.jit(extend_live_range)(table, result), result)
