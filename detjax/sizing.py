# SPDX-License-Identifier: Apache-2.0
"""Sizes of an engine that nobody has asked for: by the hardware, and by the work if it is known."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from detjax.engine.config import DRAFTS_OF_OTHERS, MOSTLY_USEFUL, EngineConfig, check_context
from detjax.engine.running.launch_times import SEVERAL_WINDOWS, quickest_decode_steps
from detjax.engine.running.memory import enough_local, pages_that_fit
from detjax.engine.scheduling.workload import Workload
from detjax.models.heads.head import AnyDraftModel
from detjax.models.loading import LoadedModel
from detjax.parallel.distributed import least_of_processes
from detjax.parallel.mesh import DP_AXIS

_CPU_CHUNK, _GPU_CHUNK = 64, 512
_LEAST_CHUNK = 64
_PROMPTS_AT_ONCE = 4  # chunks of a large prefill, on a GPU: of so many prompts, or of one
_LONG_PROMPT = int(MOSTLY_USEFUL * _PROMPTS_AT_ONCE * _GPU_CHUNK)  # from which one has it
# WHY: offline work of Llama-3.1-8B shapes: 6,783 generated tokens a second with a streak of 64,
# 6,412 without one (H200, 2026-11).
_PREFILL_STREAK = 64
_CPU_BATCHES = (1, 8)
_GPU_BATCHES = (1, 8, 16, 64, 128, 256)
# WHY: two decode steps of 256 sequences read the weights twice. A model of the schedule with the
# kernels' times says 0.97 of the time of 256 slots for 512 x (512 + 128) tokens, and 0.94 for a
# trace's lengths.
_OFFLINE_BATCH = 512
_OFFLINE_PAGES = 8  # of each of so many sequences: fewer would wait for pages, not for slots


def choose_sizes(
    model: LoadedModel,
    asked: Mapping[str, Any],
    *,
    gpu_memory_utilization: float,
    work: Workload | None = None,
    draft_model: AnyDraftModel | None = None,
) -> EngineConfig:
    """Return what an engine of this model is told at its start.

    `LLM`, the server and the command all size their engines here. The processes of a job call this
    together.

    Args:
        model: Loaded, on its mesh.
        asked: Fields of `EngineConfig`; the others are chosen.
        gpu_memory_utilization: As `LLM` has it.
        draft_model: Loaded beside it, if one makes the drafts.
        work: What the engine will be asked, if that is known: sequences, chunks, lengths and pages
            are no more than it needs.

    Raises:
        ValueError: If a value is out of range, or the cache does not hold `max_len` tokens.
    """
    dp, is_gpu = model.mesh.shape[DP_AXIS], model.backend.platform == "gpu"
    models = (model,) if draft_model is None else (model, draft_model)
    context = min(one.config.max_position_embeddings for one in models)
    # Checked with as many sequences as may be, before anything is divided by what was asked for.
    checked = EngineConfig(**{"max_len": context, "batch_size": 2**16, **asked})

    def fit(local_of: Callable[[int], int]) -> int:
        # Processes of a job may have unlike memory free, and need one number of pages.
        return least_of_processes(
            pages_that_fit(
                model,
                gpu_memory_utilization=gpu_memory_utilization,
                draft_weights=checked.draft_weights,
                draft_model=draft_model,
                local_of=local_of,
            )
        )

    one = dataclasses.replace(checked, batch_size=dp, decode_batches=(), verify_batches=())
    fitting = checked.num_pages or fit(partial(_local_pages, model, asked, one))
    max_len = min(context, fitting // dp * model.profile.attention_block)
    if work is not None:
        # What was rounded up may shrink to what fits; the work itself may not.
        max_len = max(work.longest, min(max_len, work.max_len(context)))
    sizes: dict[str, Any] = {"max_len": max_len, **asked}
    if "batch_size" not in asked:
        # Whoever says how long prompts go first, as a server does, has latencies in mind.
        is_offline = is_gpu and "max_prefill_streak" not in asked
        pages = min(_OFFLINE_PAGES, _pages_of(model, sizes["max_len"]))
        has_room = fitting // dp >= _OFFLINE_BATCH * pages
        batches = _GPU_BATCHES if is_gpu else _CPU_BATCHES
        batches += (_OFFLINE_BATCH,) if is_offline and has_room else ()
        sizes["batch_size"] = dp * _fewest(batches, work, dp)
    sizes["prefill_chunk"] = _chunk(asked, work, is_gpu=is_gpu, max_len=sizes["max_len"])
    if is_gpu:
        longest = sizes["max_len"] if work is None else work.longest_prompt
        has_large = longest >= _LONG_PROMPT and _takes_large_prefills(model)
        sizes = _gpu_shapes(sizes, asked, dp=dp, has_large_prefill=has_large) | sizes
    sizes = {"decode_steps": _decode_steps(model, checked, sizes["batch_size"], work)} | sizes
    config = EngineConfig(**sizes)
    if not checked.num_pages:
        fitting = fit(partial(_local_pages, model, asked, config))
        if "max_len" not in asked:
            most = fitting // dp * model.profile.attention_block
            longest = 1 if work is None else work.longest
            sizes["max_len"] = max(longest, min(sizes["max_len"], most))
        sizes["num_pages"] = _num_pages(model, sizes, fitting, is_gpu=is_gpu, work=work)
    config = EngineConfig(**sizes)
    sizes["num_local_pages"] = _local_pages(model, asked, config, config.num_pages)
    config = EngineConfig(**sizes)
    check_longest(model, config)
    return config


def prefill_streak(num_tokens: int) -> int:
    """`max_prefill_streak` with which a GPU's decode steps have so many prompt tokens between them.

    A step prefills up to 2048 tokens, so fewer have the effect of 2048.
    """
    return max(0, num_tokens // (_PROMPTS_AT_ONCE * _GPU_CHUNK) - 1)


def _fewest(batches: tuple[int, ...], work: Workload | None, dp: int) -> int:
    """Sequences at once on a replica: the most, or fewer that the work has not more than."""
    if work is None:
        return batches[-1]
    wanted = math.ceil(work.num_sequences / dp)
    return next((batch for batch in batches if batch >= wanted), batches[-1])


def _chunk(asked: Mapping[str, Any], work: Workload | None, *, is_gpu: bool, max_len: int) -> int:
    """Tokens of a prefill: no more than the longest prompt needs, rounded up to share programs."""
    longest = max_len if work is None else work.longest_prompt
    enough = max(_LEAST_CHUNK, 1 << (longest - 1).bit_length())
    return min(asked.get("prefill_chunk", _GPU_CHUNK if is_gpu else _CPU_CHUNK), enough)


def _decode_steps(
    model: LoadedModel, asked: EngineConfig, batch_size: int, work: Workload | None
) -> int:
    """Steps of a launch: several of a small model on a GPU, where drafts leave that open."""
    if asked.mode == "dvr" or asked.has_prompt_lookup:
        return 1
    # The longest answer has at least so many tokens.
    most = asked.max_len if work is None else work.longest - work.longest_prompt
    steps = quickest_decode_steps(model, batch_size=batch_size, max_tokens=most)
    has_windows = asked.draft_weights in DRAFTS_OF_OTHERS
    return min(steps, SEVERAL_WINDOWS) if has_windows else steps


def _takes_large_prefills(model: LoadedModel) -> bool:
    """Whether a step may prefill several chunks of one prompt by default.

    # WHY: dense models with full attention have run it on a GPU, in bfloat16 and INT8. Experts,
    windows and linear attention have not.
    """
    config = model.config
    return config.experts is None and not config.local_reach(model.profile.attention_block)


def _gpu_shapes(
    sizes: Mapping[str, Any], asked: Mapping[str, Any], *, dp: int, has_large_prefill: bool
) -> dict[str, Any]:
    """What a GPU has beside the shapes of every engine; maybe a large prefill of one prompt."""
    batch_size, chunk = sizes["batch_size"], sizes["prefill_chunk"]
    shapes: dict[str, Any] = {
        "decode_batches": tuple(n * dp for n in _GPU_BATCHES if n * dp < batch_size),
        "max_prefill_streak": _PREFILL_STREAK,
    }
    if "prefill_chunk" in asked:
        return shapes
    several = batch_size >= _PROMPTS_AT_ONCE * dp
    # WHY, large: 4000 tokens in INT8 take 57.0 ms instead of 65.7, and 512 prompts of 512 tokens
    # as long as without it (8B shapes, H200, 2026-11).
    shapes["prefill_shapes"] = ((_PROMPTS_AT_ONCE, chunk),) * several + (
        (1, _PROMPTS_AT_ONCE * chunk),
    ) * has_large_prefill
    return shapes


def _num_pages(
    model: LoadedModel,
    sizes: Mapping[str, Any],
    fitting: int,
    *,
    is_gpu: bool,
    work: Workload | None,
) -> int:
    """Pages over all replicas: what fits, and no more than can be used where that is known."""
    if is_gpu and work is None:
        return fitting  # prefixes stay in what is left
    a_sequence = _pages_of(model, sizes["max_len"])
    enough = min(fitting, sizes["batch_size"] * a_sequence)
    # WHY: what fits is a courtesy on a CPU; `check_memory` knows what there is.
    return enough if is_gpu or work is None else max(enough, model.mesh.shape[DP_AXIS] * a_sequence)


def check_longest(model: LoadedModel, config: EngineConfig) -> None:
    """Refuse a cache in which a replica cannot hold one sequence of `max_len`.

    Raises:
        ValueError: If it cannot, or `max_len` is longer than the model's context.
    """
    check_context(config, model.config.max_position_embeddings)
    dp = model.mesh.shape[DP_AXIS]
    needed, have = _pages_of(model, config.max_len), config.num_pages // dp
    if config.num_pages and needed > have:
        page_len = model.profile.attention_block
        raise ValueError(
            f"max_len={config.max_len} takes {needed} pages of {page_len} tokens, and a replica "
            f"has {have} (num_pages={config.num_pages}, dp={dp}); lower max_len to "
            f"{have * page_len}, or give the cache {needed * dp} pages, more memory or more devices"
        )


def _local_pages(
    model: LoadedModel, asked: Mapping[str, Any], config: EngineConfig, num_pages: int
) -> int:
    """Pages of local layers: as many as were asked for, or what goes with `num_pages`."""
    if "num_local_pages" in asked:
        return asked["num_local_pages"]
    return enough_local(model, config, num_pages)


def _pages_of(model: LoadedModel, num_tokens: int) -> int:
    return math.ceil(num_tokens / model.profile.attention_block)
