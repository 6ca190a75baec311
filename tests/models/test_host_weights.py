# SPDX-License-Identifier: Apache-2.0
"""Memory of weights that a CPU device takes as it is."""

import jax
import numpy as np
import pytest

from detjax.models.weights.host import CPU_ALIGNMENT, joined_rows, own_copy
from detjax.testing.bitwise import assert_bitwise_equal


@pytest.mark.parametrize("axis", [0, 1])
def test_joined_rows_are_those_of_numpy(axis):
    rng = np.random.default_rng(axis)
    parts = [rng.integers(0, 2**16, (3, n, 5), np.uint16).view(np.float16) for n in (4, 1, 7)]
    parts = [np.swapaxes(part, 0, 1 - axis) for part in parts]
    joined = joined_rows(parts, axis=axis)
    assert_bitwise_equal(joined, np.concatenate(parts, axis=axis), claim="every row in its place")
    assert joined.ctypes.data % CPU_ALIGNMENT == 0


def test_a_copy_is_taken_as_it_is_and_nobody_else_has_it():
    source = np.arange(1000, dtype=np.float32).reshape(10, 100)[:, 1:]
    copy = own_copy(source)
    held = jax.device_put(copy, jax.devices("cpu")[0])
    assert held.unsafe_buffer_pointer() == copy.ctypes.data
    source[...] = 0
    assert np.asarray(held)[0, 0] == 1
