# SPDX-License-Identifier: Apache-2.0
"""Named sizes of real models, for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One weight matrix [N, K]; `is_row_parallel` says whether its K is a tree of leaves."""

    name: str
    num_outputs: int
    k_len: int
    is_row_parallel: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """The experts of one layer."""

    name: str
    hidden_size: int
    width: int
    num_experts: int
    top_k: int
    renormalise: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """Query heads, key/value heads and channels of one model."""

    num_heads: int
    num_kv_heads: int
    channels: int


LINEAR_SHAPES = tuple(
    LinearShape(name=name, num_outputs=num_outputs, k_len=k_len, is_row_parallel=is_row_parallel)
    for name, num_outputs, k_len, is_row_parallel in (
        ("llama3_8b_qkv", 6144, 4096, False),
        ("llama3_8b_o", 4096, 4096, True),
        ("llama3_8b_gate_up", 28672, 4096, False),
        ("llama3_8b_down", 4096, 14336, True),
        ("qwen3_32b_down", 5120, 25600, True),
        ("llama2_7b_down", 4096, 11008, True),
        ("qwen3_1b7_down", 2048, 6144, True),
        ("stories260k_down", 64, 172, True),
    )
)
MOE_SHAPES = (
    MoeShape(
        name="qwen3_30b_a3b", hidden_size=2048, width=768, num_experts=128, top_k=8,
        renormalise=True,
    ),
    MoeShape(
        name="mixtral_8x7b", hidden_size=4096, width=14336, num_experts=8, top_k=2,
        renormalise=True,
    ),
)  # fmt: skip
LAYOUTS = {
    "llama3_8b": HeadLayout(num_heads=32, num_kv_heads=8, channels=128),
    "llama2_7b": HeadLayout(num_heads=32, num_kv_heads=32, channels=128),
    "phi3_mini": HeadLayout(num_heads=32, num_kv_heads=32, channels=96),
    "qwen2_0b5": HeadLayout(num_heads=14, num_kv_heads=2, channels=64),
    "gpt_oss_20b": HeadLayout(num_heads=64, num_kv_heads=8, channels=64),
    "gemma3_4b": HeadLayout(num_heads=8, num_kv_heads=4, channels=256),
    "qwen3_5_4b": HeadLayout(num_heads=16, num_kv_heads=4, channels=256),
    "novels_6m": HeadLayout(num_heads=8, num_kv_heads=2, channels=64),
    "stories260k": HeadLayout(num_heads=8, num_kv_heads=4, channels=8),
}
HEADS = {
    "llama3_8b_q": (32, 128), "llama3_8b_k": (8, 128), "novels_6m_q": (8, 64),
    "stories260k_k": (4, 8),
}  # fmt: skip
"""(heads, channels) that are rotated."""

NORM_WIDTHS = {
    "llama3_8b": 4096, "qwen3_32b": 5120, "qwen3_head": 128, "novels_6m": 256, "stories260k": 64,
    "odd": 250,
}  # fmt: skip
GATE_WIDTHS = {
    "llama3_8b": 14336, "qwen3_32b": 25600, "llama2_7b": 11008, "novels_6m": 768,
    "stories260k": 172,
}  # fmt: skip
"""Channels of a feed-forward layer."""

TABLES = {"llama3_8b": (128256, 4096), "novels_6m": (4096, 256), "stories260k": (512, 64)}
"""(vocabulary, width) of embeddings."""

VOCABULARIES = {
    "llama3": 128256, "qwen3": 151936, "llama2": 32000, "novels_6m": 4096, "stories260k": 512,
}  # fmt: skip
