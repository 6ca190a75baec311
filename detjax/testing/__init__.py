# SPDX-License-Identifier: Apache-2.0
"""Assertions about bits, order-sensitive probes, meshes, small models and rules on programs."""

from detjax.testing.bitwise import assert_bitwise_equal as assert_bitwise_equal
from detjax.testing.bitwise import assert_order_sensitive as assert_order_sensitive
from detjax.testing.bitwise import assert_within_ulp as assert_within_ulp
from detjax.testing.bitwise import count_different_bits as count_different_bits
from detjax.testing.bitwise import raw_bits as raw_bits
from detjax.testing.bitwise import wide as wide
from detjax.testing.jaxpr_rules import (
    float_arithmetic_outside_kernels as float_arithmetic_outside_kernels,
)
