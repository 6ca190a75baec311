# SPDX-License-Identifier: Apache-2.0
"""What the implementations of a router of sigmoids share."""

SMALLEST_SUM = 1e-20
"""Added to the sum of a row's sigmoids, so that sigmoids of 0 have weights of 0."""
