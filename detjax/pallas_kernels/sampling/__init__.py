# SPDX-License-Identifier: Apache-2.0
"""Noise, scores and nucleus sums."""
