# SPDX-License-Identifier: Apache-2.0
"""How much memory a cache takes, and how large a cache fits beside the weights."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from detjax.engine.config import OWN_DRAFT_WEIGHTS, EngineConfig
from detjax.engine.running.device_arrays import pages_shape
from detjax.models.heads.head import AnyDraftModel
from detjax.models.loading import LoadedModel
from detjax.parallel.mesh import DP_AXIS

ROOM_STEP_BYTES = 2**26
CPU_CACHE_BYTES = 2**30
"""Most that a cache takes of the host's memory where nobody says how much; a quarter of what is
free where that is less."""


def cache_bytes(
    model: LoadedModel, num_pages: int, draft_model: AnyDraftModel | None = None
) -> int:
    """Bytes of a cache of `num_pages` pages, over all devices, and of a draft model's beside it.

    A head's cache is whole on each rank.
    """
    total = 0
    for one in (model,) if draft_model is None else (model, draft_model):
        for pages in jax.tree.leaves(pages_shape(one, num_pages)):
            share = pages.sharding.shard_shape(pages.shape)
            total += math.prod(share) * pages.dtype.itemsize * model.mesh.size
    return total


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
    a_device = cache_bytes(model, num_pages, draft_model) // model.mesh.size
    devices = model.mesh.local_devices
    if devices[0].platform == "cpu":
        wanted, free, where = a_device * len(devices), free_host_bytes(), "this machine"
    else:
        stats = devices[0].memory_stats() or {}
        wanted, where = a_device, "a device"
        free = stats.get("bytes_limit", a_device) - held_bytes(model)[devices[0]]
    if wanted > free:
        raise ValueError(
            f"a cache of {num_pages} pages takes {wanted / 2**30:.1f} GiB, and {where} has "
            f"{free / 2**30:.1f} GiB free; lower --batch-size, --max-tokens or --cache-pages "
            "(batch_size, max_len or num_pages)"
        )


def pages_that_fit(
    model: LoadedModel,
    *,
    gpu_memory_utilization: float,
    draft_weights: str,
    draft_model: AnyDraftModel | None = None,
) -> int:
    """Return how many pages the devices hold beside the weights, a multiple of dp.

    On a GPU: of JAX's share of each GPU's memory (`bytes_limit`: 75 % of the GPU unless the
    environment's XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise), `gpu_memory_utilization` for
    weights and cache together, less other arrays that are there; the rest is for activations and
    compiled programs. On the CPU: a quarter of the free memory, 1 GiB at most. 8-bit drafts are
    counted with the weights. Room is a multiple of 64 MiB where there is as much, so that a second
    start chooses the same number: a program is compiled for one number of pages.

    Args:
        model: Loaded.
        gpu_memory_utilization: In (0, 1].
        draft_weights: As `EngineConfig` has it.
        draft_model: Loaded beside it; each page has a part in its cache.

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
    dp = model.mesh.shape[DP_AXIS]
    # A page of every replica takes as much of each device.
    a_page = cache_bytes(model, dp, draft_model) // model.mesh.size
    num_pages = room // a_page * dp
    if not num_pages:
        raise ValueError(
            f"the weights leave {room / 2**20:.1f} MiB of a device for the cache, "
            f"and a page takes {a_page / 2**20:.1f} MiB; raise gpu_memory_utilization "
            "(--gpu-memory-utilization) or XLA_PYTHON_CLIENT_MEM_FRACTION, or use more devices (tp)"
        )
    return num_pages


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
    return int(limit * gpu_memory_utilization) - max(held)


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
