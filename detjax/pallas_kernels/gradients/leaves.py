# SPDX-License-Identifier: Apache-2.0
"""The leaves of sums over tokens."""

TOKEN_LEAF = 64
"""Tokens of a leaf. They are those of one sequence, counted from its first."""

TOKEN_STEP = 16
"""Tokens of one product inside a leaf: the depth of one tensor-core instruction."""
