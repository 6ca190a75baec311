# SPDX-License-Identifier: Apache-2.0
"""Weights onto a mesh: from safetensors, from a seed, and back to safetensors.

Every path follows the description in `models/params.py`, moves bits and rounds at most once (a
float32 checkpoint asked for in bfloat16, or a cast that is asked for by name), so a parameter has
the same bits on every mesh.
"""
