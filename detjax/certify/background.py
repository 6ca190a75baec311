# SPDX-License-Identifier: Apache-2.0
"""Compute results that later cases need, in threads while cases run."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

NUM_THREADS = max(1, (os.cpu_count() or 1) // 2)
"""The other cores run the cases."""


class BackgroundJobs:
    """Jobs whose results will be needed, begun in the order in which they were given.

    They decide no result: a case computes or waits for what it needs and is not there yet.
    """

    def __init__(self, pool: ThreadPoolExecutor):
        """Begin without a job."""
        self._pool, self._futures = pool, list[Future]()

    def begin[T](self, *jobs: Callable[[], T]) -> list[Future[T]]:
        """Run jobs when there is a thread for them."""
        begun = [self._pool.submit(job) for job in jobs]
        self._futures += begun
        return begun

    def wait(self) -> None:
        """Wait until all are done.

        Raises:
            Exception: That of the first job that failed.
        """
        for future in self._futures:
            future.result()
        self._futures.clear()


@contextlib.contextmanager
def background_jobs() -> Iterator[BackgroundJobs]:
    """Provide threads for jobs; jobs that have not begun at the end are dropped."""
    pool = ThreadPoolExecutor(max_workers=NUM_THREADS)
    try:
        yield BackgroundJobs(pool)
    finally:
        pool.shutdown(cancel_futures=True)
