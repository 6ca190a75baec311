# SPDX-License-Identifier: Apache-2.0
"""What may be asked for adapters. Imports no JAX: commands check it before that starts."""

from detjax.defaults import MAX_LORA_RANK, MAX_LORAS

MAX_RANK = 128
"""Highest rank of an adapter."""


def check_adapter_sizes(
    *, is_enabled: bool, max_loras: int, max_lora_rank: int, max_expert_lora_rank: int
) -> None:
    """Refuse sizes out of range, and sizes of adapters that nobody has enabled.

    Raises:
        ValueError: Naming the option.
    """
    if max_loras < 1:
        raise ValueError(f"max_loras={max_loras} must be at least 1")
    if not 1 <= max_lora_rank <= MAX_RANK:
        raise ValueError(f"max_lora_rank={max_lora_rank} must be from 1 to {MAX_RANK}")
    if not 0 <= max_expert_lora_rank <= MAX_RANK:
        raise ValueError(
            f"max_expert_lora_rank={max_expert_lora_rank} must be from 0 to {MAX_RANK}"
        )
    given = {
        "max_loras": (max_loras, MAX_LORAS),
        "max_lora_rank": (max_lora_rank, MAX_LORA_RANK),
        "max_expert_lora_rank": (max_expert_lora_rank, 0),
    }
    others = [f"{name}={value}" for name, (value, default) in given.items() if value != default]
    if others and not is_enabled:
        one = "is a size" if len(others) == 1 else "are sizes"
        raise ValueError(f"{', '.join(others)} {one} of adapters; set enable_lora, too")
