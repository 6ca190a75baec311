# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: a state a head in place of keys and values, on a grid of absolute positions."""
