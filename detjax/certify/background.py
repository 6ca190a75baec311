# SPDX-License-Identifier: Apache-2.0
"""Programs and models that later cases need, made in threads while earlier cases run."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

NUM_THREADS = max(1, (os.cpu_count() or 1) // 2)
"""The other cores run the cases."""


class BackgroundJobs:
    """Jobs whose results later cases need, begun in the order in which they were given.

    They decide no result. A case that needs a result early waits for it, or makes it itself.
    """

    def __init__(self, pool: ThreadPoolExecutor):
        """No job yet."""
        self._pool, self._futures = pool, list[Future]()

    def begin[T](self, *jobs: Callable[[], T]) -> list[Future[T]]:
        """Run jobs when there is a thread for them."""
        begun = [self._pool.submit(job) for job in jobs]
        self._futures += begun
        return begun

    def wait(self) -> None:
        """Until all are done.

        Raises:
            Exception: Of the first that failed.
        """
        for future in self._futures:
            future.result()
        self._futures.clear()


@contextlib.contextmanager
def background_jobs() -> Iterator[BackgroundJobs]:
    """Threads for jobs; at the end those that have not begun never do."""
    pool = ThreadPoolExecutor(max_workers=NUM_THREADS)
    try:
        yield BackgroundJobs(pool)
    finally:
        pool.shutdown(cancel_futures=True)
