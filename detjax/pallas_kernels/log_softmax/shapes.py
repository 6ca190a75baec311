# SPDX-License-Identifier: Apache-2.0
"""Named vocabulary sizes of real models, for tests and benchmarks."""

VOCABULARIES = {
    "llama3": 128256,
    "qwen3": 151936,
    "llama2": 32000,
    "novels_6m": 4096,
    "stories260k": 512,
}
