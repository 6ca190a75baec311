# SPDX-License-Identifier: Apache-2.0
"""Whether there is memory for what is asked. Imports JAX."""

import math
import sys
from pathlib import Path

from detjax.cli.model import EngineShape
from detjax.models.loading import LoadedModel
from detjax.serving.programs import pages_shape


def check_memory(model: LoadedModel, shape: EngineShape) -> None:
    """Refuse a cache that is larger than what is free, before anything is allocated for it.

    Raises:
        ValueError: If it is.
    """
    a_sample = math.ceil(shape.max_len / model.profile.attention_block)
    pages = pages_shape(model, shape.num_pages or shape.batch_size * a_sample)
    a_device = math.prod(pages.shape) * pages.dtype.itemsize // model.mesh.size
    devices = model.mesh.local_devices
    if devices[0].platform == "cpu":
        wanted, free, where = a_device * len(devices), _free_host_bytes(), "this machine"
    else:
        stats = devices[0].memory_stats() or {}
        wanted, where = a_device, "a device"
        free = stats.get("bytes_limit", a_device) - stats.get("bytes_in_use", 0)
    if wanted > free:
        raise ValueError(
            f"a cache of {pages.shape[1]} pages takes {wanted / 2**30:.1f} GiB, and {where} has "
            f"{free / 2**30:.1f} GiB free; lower --batch-size, --max-tokens or --cache-pages"
        )


def _free_host_bytes() -> int:
    """Memory that can be had without swapping, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError, IndexError):
        return sys.maxsize
