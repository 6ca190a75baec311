# SPDX-License-Identifier: Apache-2.0
"""Two sets of answers: what differs, and whether their scores differ by more than chance."""
