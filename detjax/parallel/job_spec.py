# SPDX-License-Identifier: Apache-2.0
"""Which process of which job this is: as options say, or SLURM or Kubernetes.

JAX, which knows those two, is imported where one of them has started the process.
"""

import importlib.util
import os
from dataclasses import dataclass

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
    if "SLURM_JOB_ID" not in os.environ:
        return None
    from jax._src import clusters  # WHY: it has no public name in jax 0.11.2

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
    from jax._src import clusters

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
