# SPDX-License-Identifier: Apache-2.0
"""What will be wanted, made in threads while cases run."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

NUM_THREADS = max(1, (os.cpu_count() or 1) // 2)
"""Cases run beside them, and wait for what they need."""


class Ahead:
    """Jobs that somebody will want the results of, begun in the order in which they were given.

    They decide no result: what a case needs and is not there yet is made by the case, or waited
    for.
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
def working_ahead() -> Iterator[Ahead]:
    """Threads for jobs; at the end those that have not begun never do."""
    pool = ThreadPoolExecutor(max_workers=NUM_THREADS)
    try:
        yield Ahead(pool)
    finally:
        pool.shutdown(cancel_futures=True)
