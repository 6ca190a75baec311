# SPDX-License-Identifier: Apache-2.0
"""Whether the host or the device is the limit of a decode step, by a model's size."""

import jax

from detjax.models.loading import LoadedModel

SEVERAL = 8
"""Tokens of a launch where the host is the limit."""

# Of a step of 24 layers of 1024 channels, 173 kernels, batch 1, on an H200: the call takes the host
# 750 us and the rest of the engine's step 310; the device takes 674 (docs/log.md).
_KERNELS_OF_LAYER = 7
_HOST_US, _HOST_US_OF_KERNEL = 310.0, 4.3
_DEVICE_US_OF_KERNEL = 2.5
_BYTES_PER_US, _FLOP_PER_US = 4.3e6, 4e8


def quickest_decode_steps(model: LoadedModel, *, batch_size: int, max_tokens: int) -> int:
    """How many tokens one launch should decode of each sequence: `SEVERAL` or 1. Decides no bit.

    Several on a GPU where the host takes longer for a step than the device, and where answers are
    so long that what is computed behind their ends matters little.

    Args:
        model: On its mesh.
        batch_size: Sequences that run at once, over all replicas.
        max_tokens: Of an answer.
    """
    if model.backend.platform != "gpu" or max_tokens < 16 * SEVERAL:
        return 1
    leaves = jax.tree.leaves(model.params)
    num_bytes = sum(x.dtype.itemsize * x.size for x in leaves) / model.mesh.size
    num_weights = sum(x.size for x in leaves) / model.mesh.size
    num_kernels = _KERNELS_OF_LAYER * model.config.num_layers
    host_us = _HOST_US + _HOST_US_OF_KERNEL * num_kernels
    device_us = _DEVICE_US_OF_KERNEL * num_kernels
    device_us += max(num_bytes / _BYTES_PER_US, 2 * num_weights * batch_size / _FLOP_PER_US)
    return SEVERAL if host_us > device_us else 1
