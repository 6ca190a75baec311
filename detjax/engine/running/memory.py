# SPDX-License-Identifier: Apache-2.0
"""How much memory a cache takes, and how large a cache fits beside the weights."""

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from detjax.engine.config import (
    DRAFTS_OF_OTHERS,
    OWN_DRAFT_WEIGHTS,
    EngineConfig,
    ReplicaConfig,
)
from detjax.engine.running.device_arrays import pages_shape
from detjax.models.heads.head import AnyDraftModel
from detjax.models.loading import LoadedModel
from detjax.parallel.gpu_memory import FRACTION, claimed_share
from detjax.parallel.mesh import DP_AXIS

ROOM_STEP_BYTES = 2**26
_CACHE_SHARE = 0.9
"""Of a GPU's memory, for weights and cache; the rest is for activations and programs."""
_PREFIX_SHARE = 8
"""For how many pages there is one of local layers for prefixes, at least."""
CPU_CACHE_BYTES = 2**30
"""Most that a cache takes of the host's memory where nobody says how much; a quarter of what is
free where that is less."""


def no_local_pages(num_pages: int) -> int:
    """Give local layers the pages of the others."""
    return 0


def cache_bytes(
    model: LoadedModel,
    num_pages: int,
    draft_model: AnyDraftModel | None = None,
    *,
    num_local_pages: int = 0,
) -> int:
    """Bytes of a cache of `num_pages` pages, over all devices, and of a draft model's beside it.

    `num_local_pages` are those of local layers; 0 gives them as many as the others. A head's cache
    is whole on each rank.
    """
    total = 0
    for one in (model,) if draft_model is None else (model, draft_model):
        for pages in jax.tree.leaves(pages_shape(one, num_pages, num_local_pages)):
            share = pages.sharding.shard_shape(pages.shape)
            total += math.prod(share) * pages.dtype.itemsize * model.mesh.size
    return total


def local_reach(model: LoadedModel) -> int:
    """How many tokens back local layers of a model read; 0 where none are local."""
    config = model.config
    return config.local_reach(model.profile.attention_block) if config.has_local_layers else 0


def least_local(model: LoadedModel, config: EngineConfig) -> int:
    """Pages of local layers that an engine must have, over all replicas; 0 without such layers."""
    if not (reach := local_reach(model)):
        return 0
    dp, page_len = model.mesh.shape[DP_AXIS], model.profile.attention_block
    replica = ReplicaConfig.of(
        config, dp=dp, page_len=page_len, steps_beat_xla=False, local_reach=reach
    )
    return dp * replica.least_local_pages(config.steps_ahead)


def enough_local(model: LoadedModel, config: EngineConfig, num_pages: int) -> int:
    """Pages of local layers that go with `num_pages`, over all replicas.

    0, which gives these layers the pages of the others, where it is no fewer or not possible.
    """
    least, dp = least_local(model, config), model.mesh.shape[DP_AXIS]
    if config.draft_weights in DRAFTS_OF_OTHERS:
        return 0
    return least and with_prefixes(least, num_pages, *page_bytes(model), dp=dp)


def with_prefixes(least: int, num_pages: int, of_others: int, of_local: int, *, dp: int) -> int:
    """Local pages for running sequences and for prefixes; 0 if they are no fewer than the others.

    A prefix is found where the pages that its last token reads are still there. For an eighth of
    all pages there is such a page, or for so many that these take the bytes of the others.

    Args:
        least: What running sequences need.
        num_pages: Of the others.
        of_others: Bytes of a page.
        of_local: Bytes of a local page.
        dp: Replicas, each with as many.
    """
    share = max(_PREFIX_SHARE, -(-of_local // of_others))
    wanted = least + num_pages // share // dp * dp
    return wanted if wanted < num_pages else 0


def page_bytes(model: LoadedModel, draft_model: AnyDraftModel | None = None) -> tuple[int, int]:
    """Bytes of a page of every replica on a device: of other layers, and of local ones."""
    dp, size = model.mesh.shape[DP_AXIS], model.mesh.size
    both = cache_bytes(model, dp, draft_model, num_local_pages=dp)
    of_others = cache_bytes(model, 2 * dp, draft_model, num_local_pages=dp) - both
    return of_others // size, (both - of_others) // size


def check_local_pages(model: LoadedModel, config: EngineConfig) -> None:
    """Refuse a number of local pages that does not go with the model or the sizes.

    Raises:
        ValueError: If it does not.
    """
    asked, least = config.num_local_pages, least_local(model, config)
    if not asked:
        return
    if not least:
        raise ValueError(
            f"num_local_pages={asked} is for models of which some layers have a sliding window or "
            "linear attention, and others read all tokens; leave it out (0)"
        )
    if config.draft_weights in DRAFTS_OF_OTHERS:
        raise ValueError(
            f"num_local_pages={asked} does not go with draft_weights={config.draft_weights!r}: a "
            "draft model reads the pages of the others; leave it out (0)"
        )
    if asked < least:
        raise ValueError(
            f"num_local_pages={asked} must be at least {least} for batch_size="
            f"{config.batch_size} and these prefills, or 0"
        )


def check_memory(
    model: LoadedModel, config: EngineConfig, draft_model: AnyDraftModel | None = None
) -> None:
    """Refuse a cache that is larger than what is free, before anything is allocated for it.

    Args:
        model: Loaded.
        config: Of the engine.
        draft_model: Loaded beside it, with a cache of its own.

    Raises:
        ValueError: If it is.
    """
    a_sequence = math.ceil(config.max_len / model.profile.attention_block)
    num_pages = config.num_pages or config.batch_size * a_sequence
    a_device = (
        cache_bytes(model, num_pages, draft_model, num_local_pages=config.num_local_pages)
        // model.mesh.size
    )
    devices = model.mesh.local_devices
    if devices[0].platform == "cpu":
        wanted, free, where = a_device * len(devices), free_host_bytes(), "this machine"
    else:
        stats = devices[0].memory_stats() or {}
        wanted, where = a_device, "a device"
        free = stats.get("bytes_limit", a_device) - held_bytes(model)[devices[0]]
        if "bytes_limit" in stats and (largest := largest_buffer(stats)) < min(free, wanted):
            free, where = largest, "a region that XLA_PYTHON_CLIENT_PREALLOCATE=false leaves"
    if wanted > free:
        raise ValueError(
            f"a cache of {num_pages} pages takes {wanted / 2**30:.1f} GiB, and {where} has "
            f"{free / 2**30:.1f} GiB free; lower --batch-size, --max-len, --max-tokens or "
            "--cache-pages (batch_size, max_len or num_pages)"
        )


def pages_that_fit(
    model: LoadedModel,
    *,
    gpu_memory_utilization: float,
    draft_weights: str,
    draft_model: AnyDraftModel | None = None,
    local_of: Callable[[int], int] = no_local_pages,
) -> int:
    """Return how many pages the devices hold beside the weights, a multiple of dp.

    On a GPU: nine tenths of `gpu_memory_utilization`, or of JAX's share of the GPU (`bytes_limit`)
    if that is less, for weights and cache together, less other arrays that are there; the tenth is
    for activations and compiled programs. It is no more than `largest_buffer`. On the CPU: a
    quarter of the free memory, 1 GiB at most. 8-bit drafts are counted with the weights. Room is a
    multiple of 64 MiB where there is as much, so that a second start chooses the same number: a
    program is compiled for one number of pages.

    Args:
        model: Loaded.
        gpu_memory_utilization: Share of each GPU's memory, in (0, 1].
        draft_weights: As `EngineConfig` has it.
        draft_model: Loaded beside it; each page has a part in its cache.
        local_of: From pages to pages of local layers beside them, both over all replicas; 0 gives
            local layers as many as the others.

    Raises:
        ValueError: If the weights leave no room for a page a replica.
    """
    devices = model.mesh.local_devices
    taken = sum(leaf.addressable_shards[0].data.nbytes for leaf in _distinct(model.params))
    drafts = taken // 2 if draft_weights in OWN_DRAFT_WEIGHTS[1:] else 0
    if devices[0].platform == "cpu":
        room = min(CPU_CACHE_BYTES, free_host_bytes() // 4) // len(devices)
    else:
        stats = [device.memory_stats() or {} for device in devices]
        held = held_bytes(model)
        room = gpu_room(
            stats,
            [held[device] for device in devices],
            gpu_memory_utilization=gpu_memory_utilization,
        )
    room = max(0, room - drafts)
    room -= room % ROOM_STEP_BYTES if room > ROOM_STEP_BYTES else 0
    num_pages = pages_in(room, model, draft_model, local_of=local_of)
    if not num_pages:
        a_page = cache_bytes(model, model.mesh.shape[DP_AXIS], draft_model) // model.mesh.size
        raise ValueError(
            f"the weights leave {room / 2**20:.1f} MiB of a device for the cache, "
            f"and a page takes {a_page / 2**20:.1f} MiB; {_more_room(devices[0].platform)}"
        )
    return num_pages


def pages_in(
    room: int,
    model: LoadedModel,
    draft_model: AnyDraftModel | None = None,
    *,
    local_of: Callable[[int], int] = no_local_pages,
) -> int:
    """How many pages take at most `room` bytes of each device; as `pages_that_fit` otherwise."""
    dp = model.mesh.shape[DP_AXIS]
    # A page of every replica takes as much of each device.
    a_page = cache_bytes(model, dp, draft_model) // model.mesh.size
    num_pages = room // a_page * dp
    if not local_of(num_pages):
        return num_pages

    def fits(count: int) -> bool:
        num_local = local_of(count * dp)
        size = cache_bytes(model, count * dp, draft_model, num_local_pages=num_local)
        return size // model.mesh.size <= room

    # At most: if local layers took nothing. The first count that does not fit, less one.
    most = room // page_bytes(model, draft_model)[0] + 1
    counts = range(num_pages // dp + 1, most + 1)
    return dp * (counts.start + bisect_left(counts, True, key=lambda n: not fits(n)) - 1)


def held_bytes(model: LoadedModel) -> Mapping[jax.Device, int]:
    """Bytes of all arrays that this process holds on each device, once the weights are in place.

    What JAX says is in use counts buffers of copies that have just ended too: 20 GB of them in one
    start of an 8B model and none in the next.
    """
    jax.block_until_ready(model.params)
    buffers: dict[tuple[jax.Device, int], int] = {}  # by address: several arrays may share one
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.data.nbytes:
                place = shard.device, shard.data.unsafe_buffer_pointer()
                buffers[place] = shard.data.nbytes
    devices = model.mesh.local_devices
    return {
        device: sum(size for (where, _), size in buffers.items() if where == device)
        for device in devices
    }


def gpu_room(
    stats: Sequence[Mapping[str, int]], held: Sequence[int], *, gpu_memory_utilization: float
) -> int:
    """Bytes that a cache may take of each GPU; negative if there is no room.

    Args:
        stats: `memory_stats()` of each.
        held: Bytes that are taken of each.
        gpu_memory_utilization: As `pages_that_fit` has it.

    Raises:
        ValueError: If JAX does not know how much memory there is.
    """
    if not all("bytes_limit" in its for its in stats):
        raise ValueError(
            "JAX does not say how much memory the GPU has, as with XLA_PYTHON_CLIENT_ALLOCATOR="
            "platform; unset that, or give num_pages (--cache-pages)"
        )
    limit = min(its["bytes_limit"] for its in stats)
    asked = gpu_memory_utilization / claimed_share()  # of `limit`
    usable = int(limit * min(1.0, asked) * _CACHE_SHARE)
    return min(usable - max(held), *map(largest_buffer, stats))


def _more_room(platform: str) -> str:
    """What gives a cache more room."""
    if platform == "cpu":
        return "free memory of the host, or use a smaller model"
    return (
        f"JAX has {claimed_share():.0%} of the GPU: raise gpu_memory_utilization "
        f"(--gpu-memory-utilization) in a new process, or {FRACTION} if it is set, or use more "
        "devices (tp)"
    )


def largest_buffer(stats: Mapping[str, int]) -> int:
    """Bytes of the largest buffer that JAX's allocator may still give, of a device's statistics.

    With XLA_PYTHON_CLIENT_PREALLOCATE=false the allocator takes memory region by region, the next
    twice as large, and no buffer may lie in two. Beside weights of 16 GiB, in a region of 32, 126
    GiB have no room for a cache of 98.
    """
    limit = stats["bytes_limit"]
    taken = stats.get("pool_bytes", limit)
    if taken >= limit:
        return limit  # one region: what nobody holds is free
    return max(limit - taken, stats.get("largest_free_block_bytes", 0))


def _distinct(params: dict) -> list[jax.Array]:
    """Arrays of a tree, each once: tied embeddings are one array under two names."""
    return list({id(leaf): leaf for leaf in jax.tree.leaves(params)}.values())


def free_host_bytes() -> int:
    """Memory that can be had without swapping, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError, IndexError):
        return sys.maxsize
