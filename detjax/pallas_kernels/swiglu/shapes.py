# SPDX-License-Identifier: Apache-2.0
"""Named feed-forward widths of real models, for tests and benchmarks."""

WIDTHS = {
    "llama3_8b": 14336,
    "qwen3_32b": 25600,
    "llama2_7b": 11008,
    "novels_6m": 768,
    "stories260k": 172,
}
