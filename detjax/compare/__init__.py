# SPDX-License-Identifier: Apache-2.0
"""Compare two sets of answers: what differs, and whether scores differ by more than chance."""
