# SPDX-License-Identifier: Apache-2.0
"""What a decode step takes the device and the host, by a model's size, and what follows."""

import jax

from detjax.engine.config import MOST_STEPS_AHEAD
from detjax.models.loading import LoadedModel

SEVERAL = 8
"""Tokens of a launch where the host is the limit.

Of 135M parameters, 4 and 8 make 1.79 and 1.80 times the tokens a second of 1 for one sequence, 1.78
and 1.81 for 8, 2.09 and 2.32 for 64, 1.79 and 2.12 for 256 (SmolLM2's shapes, H200, 2026-11).
"""

SEVERAL_WINDOWS = 4
"""Windows of drafts likewise: 4 and 8 make 2.04 and 1.99 times the tokens of none."""

# Of a step of 24 layers of 1024 channels, 173 kernels, batch 1, on an H200: the call takes the host
# 750 us and the rest of the engine's step 310; the device takes 674 (docs/log/2026-11-22.md).
_KERNELS_OF_LAYER = 7
_HOST_US, _HOST_US_OF_KERNEL = 310.0, 4.3
_DEVICE_US_OF_KERNEL = 2.5
# Of a model of 8 layers on an H200: results reach the host 0.2 ms after the last kernel, planning
# takes 0.2 and the call of the next step 0.3 to 0.4.
_READ_AND_LAUNCH_US = 800.0
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
    host_us = _HOST_US + _HOST_US_OF_KERNEL * _num_kernels(model)
    return SEVERAL if host_us > _device_us(model, batch_size) else 1


def quickest_steps_ahead(model: LoadedModel, *, decode_steps: int) -> int:
    """How many steps to launch ahead of the one whose results are read. Decides no bit.

    Two on a GPU that has done a step of one sequence before the host has read the results of the
    one before and launched another.

    Args:
        model: On its mesh.
        decode_steps: Most tokens of a sequence in one launch.
    """
    device_us = decode_steps * _device_us(model, 1)
    return (
        MOST_STEPS_AHEAD
        if model.backend.platform == "gpu" and device_us < _READ_AND_LAUNCH_US
        else 1
    )


def _num_kernels(model: LoadedModel) -> int:
    return _KERNELS_OF_LAYER * model.config.num_layers


def _device_us(model: LoadedModel, batch_size: int) -> float:
    """Of a decode step with little in the cache."""
    leaves = jax.tree.leaves(model.params)
    num_bytes = sum(x.dtype.itemsize * x.size for x in leaves) / model.mesh.size
    num_weights = sum(x.size for x in leaves) / model.mesh.size
    us = max(num_bytes / _BYTES_PER_US, 2 * num_weights * batch_size / _FLOP_PER_US)
    return us + _DEVICE_US_OF_KERNEL * _num_kernels(model)
