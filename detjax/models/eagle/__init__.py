# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads: one decoder layer that drafts from the hidden states of a larger model."""
