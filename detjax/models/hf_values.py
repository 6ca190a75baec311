# SPDX-License-Identifier: Apache-2.0
"""JSON files of a model's folder, and their values, each of its type and in its range."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LARGEST: Mapping[str, int] = {
    "head_dim": 2**13,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "max_position_embeddings": 2**60,
    "moe_intermediate_size": 2**24,
    "n_routed_experts": 2**16,
    "n_shared_experts": 2**10,
    "num_attention_heads": 2**14,
    "num_experts": 2**16,
    "num_hidden_layers": 2**13,
    "num_key_value_heads": 2**14,
    "num_local_experts": 2**16,
    "num_mtp_layers": 2**13,
    "num_nextn_predict_layers": 2**13,
    "original_max_position_embeddings": 2**60,
    "shared_expert_intermediate_size": 2**24,
    "sliding_window": 2**30,
    "vocab_size": 2**28,
}
"""Sizes above these are a mistake, and would take memory or minutes before weights are read."""

LARGEST_NUMBER = 1e300


def read_object(path: Path, *, max_bytes: int = 2**24) -> dict[str, Any]:
    """A JSON file that holds one object. It may begin with the mark that Windows writes.

    Raises:
        ValueError: If it holds something else, or is too large.
    """
    if path.stat().st_size > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes; it is no configuration")
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def int_of(values: Mapping[str, Any], key: str, *, minimum: int = 1) -> int:
    """A whole number, at least `minimum` and at most what `LARGEST` has."""
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{key}={value!r:.80} must be an integer of at least {minimum}")
    if value > LARGEST.get(key, value):
        raise ValueError(f"{key}={value} must be at most {LARGEST[key]}; correct the file")
    return value


def number_of(values: Mapping[str, Any], key: str, *, minimum: float | None = None) -> float:
    """A finite number above 0, or from `minimum` on."""
    value = values[key]
    bound = "above 0" if minimum is None else f"of at least {minimum}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (
        is_number
        and value < LARGEST_NUMBER
        and (value > 0 if minimum is None else value >= minimum)
    ):
        raise ValueError(f"{key}={value!r:.80} must be a finite number {bound}")
    return float(value)


def flag_of(values: Mapping[str, Any], key: str) -> bool:
    """True or false."""
    value = values[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return value
