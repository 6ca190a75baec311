# SPDX-License-Identifier: Apache-2.0
"""Answers that anyone can check later: what made them, receipts, and how to run them again."""
