# SPDX-License-Identifier: Apache-2.0
"""Several processes as one job: how it starts, who speaks, and how it ends.

JAX's multi-controller runtime is the distributed engine: every process runs the same program on the
same requests, and owns a part of the mesh. Process 0 alone talks to users.
"""

import atexit
import functools
import importlib.util
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import clusters  # WHY: it has no public name in jax 0.11.2
from jax.experimental import multihost_utils

from detjax.parallel.mesh import DP_AXIS
from detjax.parallel.watch import Watch, bind_address, connect
from detjax.source import source_hash

JOIN_S = 300.0
"""How long processes wait for one another at the start."""

_OPTIONS = ("--coordinator", "--num-processes", "--process-id")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """Which process of which job this is.

    Attributes:
        coordinator: HOST:PORT of process 0; any free port of its machine.
        num_processes: Of the job.
        process_id: Of this process, from 0.
        local_gpus: Visible GPUs that this process drives; empty is all of them.

    Raises:
        ValueError: If the numbers make no job, or the coordinator is not HOST:PORT.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_gpus: tuple[int, ...] = ()

    def __post_init__(self):
        """Check what can be checked before anybody is called."""
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process-id {self.process_id} must be at least 0 and less than "
                f"--num-processes {self.num_processes}"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--coordinator {self.coordinator} must be HOST:PORT, such as n1:9000")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_job(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> JobSpec | None:
    """The job of these options, or without them of SLURM or Kubernetes; None is one process.

    Raises:
        ValueError: If only some of the options are given, or they make no job.
    """
    if coordinator is not None and num_processes is not None and process_id is not None:
        job = JobSpec(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
        return job if num_processes > 1 else None
    given = zip(_OPTIONS, (coordinator, num_processes, process_id), strict=True)
    missing = [name for name, value in given if value is None]
    if len(missing) < len(_OPTIONS):
        raise ValueError(f"{' and '.join(missing)} must be given too, or all three left out")
    job = _slurm_job() or _kubernetes_job()
    return job if job is not None and job.num_processes > 1 else None


def _slurm_job() -> JobSpec | None:
    """One task a machine drives all its GPUs; of several tasks each drives one."""
    slurm = clusters.SlurmCluster
    if not slurm.is_env_present():
        return None
    num_tasks = slurm.get_process_count()
    is_alone = num_tasks == int(os.environ.get("SLURM_STEP_NUM_NODES", num_tasks))
    # srun --gpus-per-task has shown each task its own GPUs only.
    is_bound = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    local_task = slurm.get_local_process_id() or 0
    return JobSpec(
        coordinator=slurm.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT")),
        num_processes=num_tasks,
        process_id=slurm.get_process_id(),
        local_gpus=() if is_alone or is_bound else (local_task,),
    )


def _kubernetes_job() -> JobSpec | None:
    """An indexed job, if the package `kubernetes` is there to ask for its size and its service."""
    if "JOB_COMPLETION_INDEX" not in os.environ or importlib.util.find_spec("kubernetes") is None:
        return None
    kubernetes = clusters.K8sCluster
    if not kubernetes.is_env_present():
        return None
    return JobSpec(
        coordinator=kubernetes.get_coordinator_address(
            int(JOIN_S), os.environ.get("JAX_COORDINATOR_PORT")
        ),
        num_processes=kubernetes.get_process_count(),
        process_id=kubernetes.get_process_id(),
    )


def start_job(
    job: JobSpec, *, join_s: float = JOIN_S, end: Callable[[int], Any] = os._exit
) -> Watch:
    """Join the job's other processes; call before anything else touches JAX's devices.

    From here on only process 0 writes to standard output and error. What libraries in C write to
    standard output goes to standard error.

    Args:
        job: Which process of which job this is.
        join_s: How long to wait for the others.
        end: Called with an exit code, from a thread, once the job has ended for `Watch.why_ended`;
            it must end this process soon.

    Returns:
        What ends the job if one of its processes is lost. It takes leave when this one ends.

    Raises:
        TimeoutError: If not all processes come in time, naming those that are missing.
        ValueError: If two have one id, or they were started with other numbers of processes.
    """
    host, port = job.address
    watch, runtime_port = connect(
        job.process_id,
        job.num_processes,
        host=host,
        port=port,
        join_s=join_s,
        announcement=str(_free_port()),
        say=functools.partial(print, file=sys.stderr, flush=True),
        end=end,
    )
    watch.check_same("code of detjax", source_hash())
    _redirect_output(is_speaker=job.process_id == 0)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # WHY: it would swallow SIGTERM
    bind = bind_address(host)
    jax.distributed.initialize(
        f"{job.coordinator.rpartition(':')[0]}:{runtime_port}",
        job.num_processes,
        job.process_id,
        local_device_ids=list(job.local_gpus),
        cluster_detection_method="deactivate",
        coordinator_bind_address=bind and f"{bind}:{runtime_port}",
    )
    atexit.register(watch.leave)
    return watch


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _redirect_output(*, is_speaker: bool) -> None:
    """Keep standard output for Python, and silence all but process 0."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)  # WHY: gloo and NCCL write to standard output, where completions go
    if is_speaker:
        sys.stdout = os.fdopen(own, "w", encoding="utf-8", errors="replace")
    else:
        os.close(own)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")


def least_of_processes(value: int) -> int:
    """The least of what the processes of the job say; all must ask, and at the same time."""
    if jax.process_count() == 1:
        return value
    return int(np.min(multihost_utils.process_allgather(np.int32(value))))


def gather_replicas(x: jax.Array) -> jax.Array:
    """Concatenate the replicas' rows, on every rank. Inside `shard_map`; copies only.

    A process can read the results of its own devices alone.
    """
    return lax.all_gather(x, DP_AXIS, axis=0, tiled=True)
