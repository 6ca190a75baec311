# SPDX-License-Identifier: Apache-2.0
"""Named weight shapes (N, K) of real models, for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One weight matrix; `is_row_parallel` says whether its K is a tree of leaves."""

    name: str
    num_outputs: int
    k_len: int
    is_row_parallel: bool


SHAPES = (
    LinearShape(name="llama3_8b_qkv", num_outputs=6144, k_len=4096, is_row_parallel=False),
    LinearShape(name="llama3_8b_o", num_outputs=4096, k_len=4096, is_row_parallel=True),
    LinearShape(name="llama3_8b_gate_up", num_outputs=28672, k_len=4096, is_row_parallel=False),
    LinearShape(name="llama3_8b_down", num_outputs=4096, k_len=14336, is_row_parallel=True),
    LinearShape(name="qwen3_32b_down", num_outputs=5120, k_len=25600, is_row_parallel=True),
    LinearShape(name="llama2_7b_down", num_outputs=4096, k_len=11008, is_row_parallel=True),
    LinearShape(name="qwen3_1b7_down", num_outputs=2048, k_len=6144, is_row_parallel=True),
    LinearShape(name="stories260k_down", num_outputs=64, k_len=172, is_row_parallel=True),
)
