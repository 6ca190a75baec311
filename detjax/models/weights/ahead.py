# SPDX-License-Identifier: Apache-2.0
"""A map by threads that keeps a bounded distance ahead of its reader."""

import collections
import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence


def map_ahead[Item, Result](
    function: Callable[[Item], Result],
    items: Sequence[Item],
    num_threads: int,
    stack: contextlib.ExitStack,
) -> Iterator[Result]:
    """`map` by threads that are at most `num_threads` items ahead, until `stack` closes."""
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(num_threads))
    futures: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    stack.callback(lambda: [future.cancel() for future in futures])
    rest = iter(items)
    futures.extend(pool.submit(function, item) for item in itertools.islice(rest, num_threads))
    while futures:
        result = futures.popleft().result()
        futures.extend(pool.submit(function, item) for item in itertools.islice(rest, 1))
        yield result
