# SPDX-License-Identifier: Apache-2.0
"""Several processes as one job: how it starts, who speaks, and how it ends.

JAX's multi-controller runtime is the distributed engine: every process runs the same program on the
same requests, and owns a part of the mesh. Process 0 alone talks to users.
"""

import atexit
import functools
import itertools
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.distributed import global_state  # WHY: its barrier has no public name
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from detjax.compilation.source import source_hash
from detjax.parallel.job_spec import JOIN_S, JobSpec
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.parallel.watch import STALL_S, Watch, bind_address, connect


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


def connect_devices(mesh: Mesh) -> None:
    """Wait until all processes of the job have this mesh, and let its devices connect.

    In one process, and on GPUs: nothing.

    # WHY: Gloo connects the devices of a CPU where they first need one another, and gives each
    # process 30 s to come there (jaxlib 0.11.2: "GetKeyValue() timed out"). One that compiles the
    # first program while the machine has other work may take longer, and the job was lost. Here
    # all come at once; a later collective waits as long as the watch does.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    client = global_state.client
    assert client is not None
    client.wait_at_barrier(f"detjax {next(_MESHES)}", timeout_in_ms=int(STALL_S * 1000))
    axes = (DP_AXIS, TP_AXIS, (DP_AXIS, TP_AXIS))

    def gather(x: jax.Array) -> list[jax.Array]:
        return [lax.all_gather(x, axis) for axis in axes]

    place = PartitionSpec((DP_AXIS, TP_AXIS))
    zeros = jax.jit(
        lambda: jnp.zeros(mesh.size, jnp.int32), out_shardings=NamedSharding(mesh, place)
    )()
    gathered = jax.shard_map(gather, mesh=mesh, in_specs=place, out_specs=place, check_vma=False)
    jax.block_until_ready(jax.jit(gathered)(zeros))
    least_of_processes(0)


_MESHES = itertools.count()


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
