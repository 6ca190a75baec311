# SPDX-License-Identifier: Apache-2.0
"""A start's programs, lowered and compiled by several processes.

Tracing and lowering a program is seconds of Python, which one process does one program at a time.
A worker is a process that has the shapes of the model and no weights. It compiles the programs that
it was given and keeps them on the disk, under the names that `kept_executables` gives them; the
process that asked reads them there, as a later start would. What a worker does not deliver is
compiled by the process that asked.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from detjax.compilation.kept_programs import keep_programs_of_build, opened_folder
from detjax.engine.config import ProgramSizes
from detjax.engine.running.program_key import AnyKey, ProgramKey
from detjax.engine.running.programs import ProgramCache
from detjax.models.config import ModelConfig
from detjax.models.loading import LoadedModel
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh

MOST_WORKERS = 8
CORES_PER_WORKER = 2
LEAST_PROGRAMS = 12
"""Fewer are compiled sooner than workers have started."""

_NO_MEMORY = "XLA_PYTHON_CLIENT_PREALLOCATE"
_SIMPLE = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Of an array on a mesh."""

    shape: tuple[int, ...]
    dtype: Any
    partition: PartitionSpec

    @classmethod
    def of(cls, array: jax.Array) -> "_Shape":
        """What an array's programs depend on."""
        assert isinstance(array.sharding, NamedSharding)
        return cls(shape=array.shape, dtype=array.dtype, partition=array.sharding.spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What a worker is told.

    Attributes:
        config, profile, backend, partition_specs: Of the model.
        params, rope_tables: Trees of (shape, dtype, partition) of its arrays.
        sizes: Of `ProgramCache`.
        keys: To compile, in this order.
        cache_dir: Where programs are kept.
        settings: JAX's, as they are in the process that asks.
    """

    config: ModelConfig
    profile: NumericsProfile
    backend: Backend
    partition_specs: dict
    params: dict
    rope_tables: tuple
    sizes: ProgramSizes
    keys: tuple[AnyKey, ...]
    cache_dir: str
    settings: dict[str, Any]


def num_workers(model: LoadedModel, programs: ProgramCache, keys: Sequence[AnyKey]) -> int:
    """How many workers would pay; 0 where the process compiles alone.

    Alone on a CPU, whose cores compile what they are given; of several GPUs, whose programs have
    buffers of the mesh; where nothing is kept; and where the first program is kept already.
    """
    is_one_gpu = model.mesh.size == 1 and model.backend.platform == "gpu"
    can_keep = jax.process_count() == 1 and opened_folder() is not None
    if not is_one_gpu or not can_keep or type(programs) is not ProgramCache:
        return 0
    forward = [key for key in keys if isinstance(key, ProgramKey)]
    if len(keys) < LEAST_PROGRAMS or not forward or programs.is_kept(forward[0], model.params):
        return 0
    return min(MOST_WORKERS, (os.cpu_count() or 1) // CORES_PER_WORKER)


class CompileWorkers:
    """Processes that compile; each ends with its last program."""

    def __init__(
        self, model: LoadedModel, programs: ProgramCache, keys: Sequence[AnyKey], count: int
    ):
        """Start `count` of them for these programs, those without a claim left out.

        Raises:
            OSError: If a process cannot be started.
        """
        folder = opened_folder()
        assert folder is not None and jax.config.jax_compilation_cache_dir is not None
        self._ready = {key: threading.Event() for key in keys if _is_shared(key)}
        self._processes: list[subprocess.Popen[bytes]] = []
        for share in divide(list(self._ready), count):
            job = _Job(
                config=model.config,
                profile=model.profile,
                backend=model.backend,
                partition_specs=model.partition_specs,
                params=jax.tree.map(_Shape.of, model.params),
                rope_tables=jax.tree.map(_Shape.of, model.rope_tables),
                sizes=programs.sizes,
                keys=tuple(share),
                cache_dir=os.path.dirname(jax.config.jax_compilation_cache_dir),
                settings=_settings(),
            )
            self._start(job)

    def _start(self, job: _Job) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        thread = threading.Thread(target=self._follow, args=(process, job), daemon=True)
        thread.start()

    def _follow(self, process: subprocess.Popen[bytes], job: _Job) -> None:
        """Hand a worker its job, and note each program that it has kept."""
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                pickle.dump(job, stdin)
            for line in process.stdout:
                self._ready[job.keys[json.loads(line)]].set()
        except (OSError, ValueError):
            process.kill()  # it has ended, or has written something else
        for key in job.keys:  # those that it did not deliver are for who waits
            self._ready[key].set()

    def wait(self, key: AnyKey) -> None:
        """Wait until a worker has kept a program, or will not."""
        if key in self._ready:
            self._ready[key].wait()

    def __enter__(self) -> "CompileWorkers":
        """They run until the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """End those that still run."""
        for process in self._processes:
            process.kill()
            process.wait()


def _is_shared(key: AnyKey) -> bool:
    """Whether a worker may compile it, which knows no draft model and no head.

    XLA tunes programs without a claim by measuring.
    """
    if not isinstance(key, ProgramKey):
        return getattr(key, "mode", "invariant") != "fast"
    return key.mode != "fast" and key.kind != "windows" and not key.leaves_features


def divide(keys: Sequence[AnyKey], count: int) -> Iterator[list[AnyKey]]:
    """Divide programs, those with as many rows to one worker: they share most kernels.

    The largest group goes first, to the worker that has least.
    """
    groups: dict[Any, list[AnyKey]] = defaultdict(list)
    for key in keys:
        kind = key.kind if isinstance(key, ProgramKey) else type(key).__name__
        groups[kind, key.rows].append(key)
    shares: list[list[AnyKey]] = [[] for _ in range(count)]
    costs = [0.0] * count
    for group in sorted(groups.values(), key=_cost, reverse=True):
        least = costs.index(min(costs))
        shares[least] += group
        costs[least] += _cost(group)
    order = {key: i for i, key in enumerate(keys)}
    return (sorted(share, key=order.__getitem__) for share in shares if share)


def _cost(group: Sequence[AnyKey]) -> float:
    """Of a group of programs: its first has all kernels to lower."""
    # WHY: a decode step of new rows takes 3 s of one core, one of another table 1.2, a choice
    # program 1 (2026-11).
    first, more = (3.0, 1.2) if isinstance(group[0], ProgramKey) else (1.0, 0.5)
    return first + more * (len(group) - 1)


def _settings() -> dict[str, Any]:
    return {name: value for name, value in jax.config.values.items() if isinstance(value, _SIMPLE)}


def _abstract_model(job: _Job) -> LoadedModel:
    """The model of a job, as shapes on this process's device."""
    mesh = make_mesh(1, 1, platform=job.backend.platform)

    def placed(of: _Shape) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, of.partition)
        return jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=sharding)

    return LoadedModel(
        config=job.config,
        params=jax.tree.map(placed, job.params),
        partition_specs=job.partition_specs,
        rope_tables=jax.tree.map(placed, job.rope_tables),
        mesh=mesh,
        profile=job.profile,
        backend=job.backend,
        fingerprint="",
        folder=None,
    )


def main() -> None:
    """Compile what standard input says; prints the number of each program that is kept."""
    job: _Job = pickle.load(sys.stdin.buffer)
    given = os.environ.get(_NO_MEMORY)
    os.environ[_NO_MEMORY] = "false"
    for name, value in job.settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    keep_programs_of_build(job.cache_dir)
    model = _abstract_model(job)
    # A name of what is kept has the environment in it, which is that of the process that asks.
    if given is None:
        del os.environ[_NO_MEMORY]
    else:
        os.environ[_NO_MEMORY] = given
    programs = ProgramCache(model, **job.sizes)
    for i, key in enumerate(job.keys):
        programs.get(key, model.params)
        print(i, flush=True)


if __name__ == "__main__":
    main()
