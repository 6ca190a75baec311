# SPDX-License-Identifier: Apache-2.0
"""Heads that draft from the hidden states of a larger model: EAGLE-3 and multi-token prediction."""
