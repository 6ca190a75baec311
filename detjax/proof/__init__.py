# SPDX-License-Identifier: Apache-2.0
"""Receipts: what made an answer, as one line, and how to run and check it again."""
