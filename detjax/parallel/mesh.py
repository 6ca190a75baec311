# SPDX-License-Identifier: Apache-2.0
"""The device mesh: `dp` replicas of a `tp`-way tensor-parallel group."""

import jax
import numpy as np
from jax.sharding import Mesh

DP_AXIS = "dp"
TP_AXIS = "tp"

MAX_VIRTUAL_DEVICES = 1024
"""Each takes threads and memory of the host from the start."""


def configure_virtual_devices(count: int) -> None:
    """Let the CPU appear as `count` devices; call before anything else touches JAX's devices.

    Where JAX has already started and has found GPUs, the CPU stays as it is: `make_mesh` counts
    the devices of the platform that will run.

    Raises:
        ValueError: If JAX has already started with fewer devices, and without a GPU.
    """
    if not 1 <= count <= MAX_VIRTUAL_DEVICES:
        raise ValueError(f"{count=} devices must be in [1, {MAX_VIRTUAL_DEVICES}]")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and len(jax.devices("cpu")) < count:
            raise ValueError(
                f"dp * tp needs {count} devices, but JAX has already started with "
                f"{len(jax.devices('cpu'))} on the CPU; in a new process open the model before "
                "anything else uses JAX, or begin with "
                f"jax.config.update('jax_num_cpu_devices', {count})"
            ) from error


def devices_of_process(num_devices: int, num_processes: int) -> int:
    """How many of the mesh's devices each process has: equally many.

    Raises:
        ValueError: If they do not divide.
    """
    share, rest = divmod(num_devices, num_processes)
    if rest or not share:
        raise ValueError(
            f"dp * tp = {num_devices} devices do not divide over {num_processes} processes; "
            "change dp, tp or the number of processes"
        )
    return share


def make_mesh(dp: int, tp: int, *, platform: str = "cpu") -> Mesh:
    """Arrange the first `dp * tp` devices of a platform as (dp, tp); neighbours share a tp group.

    Of several processes every one must own devices of the mesh, all of its own; a tp group stays
    inside a process where it fits.

    Args:
        dp: Replicas.
        tp: Ranks of a tensor-parallel group.
        platform: `Backend.platform` of the backend that will run.

    Raises:
        ValueError: If a size is not positive, tp is not a power of two, or devices are missing, or
            left over in a job of several processes.
    """
    if dp < 1 or tp < 1:
        raise ValueError(f"{dp=} and {tp=} must be at least 1")
    if tp & (tp - 1):
        raise ValueError(f"{tp=} must be a power of two: the ranks are leaves of a binary tree")
    devices = jax.devices(platform)
    if len(devices) < dp * tp:
        fix = "call configure_virtual_devices first" if platform == "cpu" else (
            "let JAX see more GPUs (CUDA_VISIBLE_DEVICES)"
        )  # fmt: skip
        raise ValueError(
            f"{dp=} times {tp=} needs {dp * tp} devices, there are {len(devices)}; lower one of "
            f"them, or {fix}"
        )
    num_processes = jax.process_count()
    if num_processes > 1 and len(devices) != dp * tp:
        raise ValueError(
            f"{dp=} times {tp=} needs {dp * tp} devices, and the {num_processes} processes have "
            f"{len(devices)}; use all, or let each process see fewer"
        )
    return Mesh(np.asarray(devices[: dp * tp]).reshape(dp, tp), (DP_AXIS, TP_AXIS))
