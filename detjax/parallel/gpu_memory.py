# SPDX-License-Identifier: Apache-2.0
"""The share of each GPU's memory that JAX takes when it starts."""

import os
from collections.abc import Sequence

import jax
from jax._src import xla_bridge  # WHY: whether JAX has started has no public name

from detjax.defaults import GPU_MEMORY_UTILIZATION

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NAMES = FRACTION, "XLA_CLIENT_MEM_FRACTION"  # JAX refuses both at once
_OF_JAX = 0.75


def claim_gpu_memory(share: float = GPU_MEMORY_UTILIZATION) -> None:
    """Let JAX take this share of each GPU's memory when it starts.

    What the environment says takes precedence, and a JAX that has started keeps what it has: see
    `claimed_share`.

    Args:
        share: In (0, 1].
    """
    if _given() is None and not xla_bridge.backends_are_initialized():
        os.environ[FRACTION] = f"{share:g}"


def claimed_share() -> float:
    """The share that JAX has taken, or will take when it starts."""
    given = _given()
    return _OF_JAX if given is None else float(given)


def memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that JAX has of the smallest of these devices; None where it does not say, as on a CPU.

    JAX starts here.
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit is not None), default=None)


def _given() -> str | None:
    return next((os.environ[name] for name in _NAMES if os.environ.get(name)), None)
