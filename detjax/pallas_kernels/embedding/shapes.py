# SPDX-License-Identifier: Apache-2.0
"""Named (vocabulary, width) of real tables, for tests and benchmarks."""

TABLES = {"llama3_8b": (128256, 4096), "novels_6m": (4096, 256), "stories260k": (512, 64)}
