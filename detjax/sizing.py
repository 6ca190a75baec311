# SPDX-License-Identifier: Apache-2.0
"""Sizes of an engine that nobody has asked for: batches, chunks and the cache, by the hardware."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from detjax.models.loading import LoadedModel
from detjax.parallel.distributed import least_of_processes
from detjax.parallel.mesh import DP_AXIS
from detjax.serving.config import EngineConfig
from detjax.serving.memory import pages_that_fit

GPU_MEMORY_UTILIZATION = 0.9

_CPU_SIZES: dict[str, Any] = {"batch_size": 8, "prefill_chunk": 64}
# WHY: offline work of Llama-3.1-8B shapes: 6,783 generated tokens a second with a streak of 64,
# 6,412 without one (H200, 2026-11).
_GPU_SIZES: dict[str, Any] = {
    "batch_size": 256,
    "prefill_chunk": 512,
    "prefill_shapes": ((4, 512),),
    "max_prefill_streak": 64,
}
_GPU_DECODE_BATCHES = (1, 8, 16, 64, 128, 256)
# WHY: two decode steps of 256 sequences read the weights twice. A model of the schedule with the
# kernels' times says 0.97 of the time of 256 slots for 512 x (512 + 128) tokens, and 0.94 for a
# trace's lengths.
_OFFLINE_BATCH = 512
_OFFLINE_PAGES = 8  # of each of so many sequences: fewer would wait for pages, not for slots


def choose_sizes(
    model: LoadedModel, asked: Mapping[str, Any], *, gpu_memory_utilization: float
) -> EngineConfig:
    """Return what an engine of this model is told at its start.

    Args:
        model: Loaded, on its mesh.
        asked: Fields of `EngineConfig`; the others are chosen by the hardware.
        gpu_memory_utilization: As `LLM` has it.

    Raises:
        ValueError: If a value is out of range, or the cache does not hold `max_len` tokens.
    """
    dp, page_len = model.mesh.shape[DP_AXIS], model.profile.attention_block
    context = model.config.max_position_embeddings
    is_gpu = model.backend.platform == "gpu"
    sizes = dict(_GPU_SIZES if is_gpu else _CPU_SIZES)
    sizes["batch_size"] *= dp
    if "prefill_chunk" in asked:
        sizes.pop("prefill_shapes", None)
    # Checked with a cache of any size, before anything is divided by what was asked for.
    config = EngineConfig(**{"max_len": context, **sizes, **asked})
    # Processes of a job may have unlike memory free, and need one number of pages.
    fitting = config.num_pages or least_of_processes(
        pages_that_fit(
            model,
            gpu_memory_utilization=gpu_memory_utilization,
            draft_weights=config.draft_weights,
        )
    )
    # Whoever says how long prompts go first, as a server does, has latencies in mind.
    is_offline = is_gpu and not {"batch_size", "max_prefill_streak"} & asked.keys()
    if is_offline and fitting // dp >= _OFFLINE_BATCH * _OFFLINE_PAGES:
        config = dataclasses.replace(config, batch_size=_OFFLINE_BATCH * dp)
    max_len = asked.get("max_len", min(context, fitting // dp * page_len))
    num_pages = fitting
    if not is_gpu and not config.num_pages:
        num_pages = min(fitting, config.batch_size * math.ceil(max_len / page_len))
    decode_batches = config.decode_batches
    if is_gpu and "decode_batches" not in asked:
        batches = (batch * dp for batch in _GPU_DECODE_BATCHES)
        decode_batches = tuple(batch for batch in batches if batch < config.batch_size)
    config = dataclasses.replace(
        config, max_len=max_len, num_pages=num_pages, decode_batches=decode_batches
    )
    check_longest(model, config)
    return config


def size_cache(
    model: LoadedModel,
    config: EngineConfig,
    *,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
) -> EngineConfig:
    """Return `config` with a cache that fits, where it does not say how large.

    The cache that holds `batch_size` sequences of `max_len` where there is room for it, else as
    many pages as there is room for. No bit depends on it.

    Raises:
        ValueError: If not even one sequence of `max_len` fits on a replica.
    """
    if config.num_pages:
        return config
    fitting = pages_that_fit(
        model,
        gpu_memory_utilization=gpu_memory_utilization,
        draft_weights=config.draft_weights,
    )
    enough = config.batch_size * _pages_of(model, config.max_len)
    sized = dataclasses.replace(config, num_pages=min(fitting, enough))
    check_longest(model, sized)
    return sized


def check_longest(model: LoadedModel, config: EngineConfig) -> None:
    """Refuse a cache in which a replica cannot hold one sequence of `max_len`.

    Raises:
        ValueError: If it cannot.
    """
    dp = model.mesh.shape[DP_AXIS]
    needed, have = _pages_of(model, config.max_len), config.num_pages // dp
    if config.num_pages and needed > have:
        page_len = model.profile.attention_block
        raise ValueError(
            f"max_len={config.max_len} takes {needed} pages of {page_len} tokens, and a replica "
            f"has {have} (num_pages={config.num_pages}, dp={dp}); lower max_len (--max-tokens) to "
            f"{have * page_len}, or give the cache {needed * dp} pages (--cache-pages), more "
            "memory or more devices"
        )


def _pages_of(model: LoadedModel, num_tokens: int) -> int:
    return math.ceil(num_tokens / model.profile.attention_block)
