# SPDX-License-Identifier: Apache-2.0
"""Named (heads, channels) of real models, for tests and benchmarks."""

HEADS = {
    "llama3_8b_q": (32, 128),
    "llama3_8b_k": (8, 128),
    "novels_6m_q": (8, 64),
    "stories260k_k": (4, 8),
}
