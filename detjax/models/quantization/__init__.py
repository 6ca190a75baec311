# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: which formats are read, and how one becomes the bfloat16 it stands for."""
