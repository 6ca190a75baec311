# SPDX-License-Identifier: Apache-2.0
"""The processes of a job that run one command together. Only a job imports JAX."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from detjax.cli.arguments import GenerateArgs
from detjax.cli.errors import bad_input
from detjax.parallel.job_spec import find_job
from detjax.parallel.watch import Watch
from detjax.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """Processes that make the same calls, this one among them. One process waits for nobody.

    Attributes:
        count: How many there are.
        watch: Ends all of them if one is lost or differs; None of one process.
    """

    count: int = 1
    watch: Watch | None = None

    def check_same(self, what: str, value: str) -> None:
        """End all processes if a value is not the same in each; as `Watch.check_same`."""
        if self.watch is not None:
            self.watch.check_same(what, value)

    def check_same_model(self, folder: Path) -> None:
        """End all processes if the model's files are not the same in each.

        Raises:
            OSError: If a file cannot be read.
        """
        if self.watch is not None:
            from detjax.models.identity import model_hash

            self.watch.check_same("files of the model", model_hash(folder))

    def working(self) -> AbstractContextManager[None]:
        """Mark the time in which the processes need one another; as `Watch.working`."""
        return contextlib.nullcontext() if self.watch is None else self.watch.working()

    def progress(self) -> None:
        """Tell the others that the work goes on; as `Watch.progress`."""
        if self.watch is not None:
            self.watch.progress()

    def telling(self, progress: Progress) -> Progress:
        """Return `progress` with `self.progress` before each call."""

        def both(what: str, done: int, total: int) -> None:
            self.progress()
            progress(what, done, total)

        return both


def join_processes(args: GenerateArgs) -> Processes:
    """Join the other processes of the job, if these options or a cluster's say that there are any.

    Raises:
        InputError: If the options make no job, or the others cannot be joined.
    """
    with bad_input():
        job = find_job(args.coordinator, args.num_processes, args.process_id)
        if job is None:
            return Processes()
        from detjax.parallel.distributed import start_job

        return Processes(count=job.num_processes, watch=start_job(job))
