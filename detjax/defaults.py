# SPDX-License-Identifier: Apache-2.0
"""Values of options that several layers have. Imports nothing: commands read them before JAX."""

AUTO = "auto"
"""Chosen by the hardware, the model or its folder."""

NO_CAST = "none"
"""The weight cast of a model whose weights were read as they are, or as its profile stores them."""

EAGLE3, MTP = HEADS = ("eagle3", "mtp")
"""Heads that draft from hidden states of the model: of a folder of their own, and in the model's.

The names are those of vLLM's `speculative_config`.
"""

HEAD_QUANTIZATIONS = ("int8",)
"""What the matrices of a head may be rounded to when it is loaded."""

GPU_MEMORY_UTILIZATION = 0.9
"""Share of each GPU's memory that JAX takes; nine tenths of it are for weights and cache.

WHY: the processes that compile beside it have contexts of their own on the GPU.
"""
MAX_LORAS, MAX_LORA_RANK = 8, 16
"""Adapters that may run at once, and their highest rank."""

FP8_CACHE = "fp8_e4m3"
KV_CACHE_DTYPES = (AUTO, FP8_CACHE)
"""What keys and values are stored in: as they are computed, or as float8_e4m3fn."""


def kv_cache_dtype_of(name: str) -> str:
    """One of `KV_CACHE_DTYPES` by vLLM's names, of which "fp8" is another of "fp8_e4m3".

    Raises:
        ValueError: For another name.
    """
    found = FP8_CACHE if name == "fp8" else name
    if found not in KV_CACHE_DTYPES:
        names = ", ".join(repr(known) for known in (*KV_CACHE_DTYPES, "fp8"))
        raise ValueError(f"kv_cache_dtype={name!r} must be one of {names}")
    return found


def check_cache_dtype(kv_cache_dtype: str, compute_dtype: str) -> None:
    """Refuse a cache of 8 bits beside activations of another dtype than bfloat16.

    Raises:
        ValueError: If they do not go together.
    """
    if kv_cache_dtype == FP8_CACHE and compute_dtype != "bfloat16":
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} does not go with activations of {compute_dtype}; "
            "use kv_cache_dtype='auto', or dtype='bfloat16'"
        )
