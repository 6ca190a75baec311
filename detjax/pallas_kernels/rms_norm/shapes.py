# SPDX-License-Identifier: Apache-2.0
"""Named row widths of real models, for tests and benchmarks."""

WIDTHS = {
    "llama3_8b": 4096,
    "qwen3_32b": 5120,
    "qwen3_head": 128,
    "novels_6m": 256,
    "stories260k": 64,
    "odd": 250,
}
