# SPDX-License-Identifier: Apache-2.0
"""Named head layouts of real models, for tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """Query heads, key/value heads and channels of one model."""

    num_heads: int
    num_kv_heads: int
    channels: int


LAYOUTS = {
    "llama3_8b": HeadLayout(num_heads=32, num_kv_heads=8, channels=128),
    "llama2_7b": HeadLayout(num_heads=32, num_kv_heads=32, channels=128),
    "phi3_mini": HeadLayout(num_heads=32, num_kv_heads=32, channels=96),
    "qwen2_0b5": HeadLayout(num_heads=14, num_kv_heads=2, channels=64),
    "novels_6m": HeadLayout(num_heads=8, num_kv_heads=2, channels=64),
    "stories260k": HeadLayout(num_heads=8, num_kv_heads=4, channels=8),
}
