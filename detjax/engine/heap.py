# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector and what lives long.

Compiled programs leave half a million objects. A full collection walks them all and finds nothing:
0.24 s beside the programs of an 8B model (docs/log/2026-11-23.md), while every stream waits.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_depth = 0


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Collect nothing until the end, for work that makes much and leaves little in cycles.

    Importing JAX takes a tenth less of its 1.1 s (two cores of an AMD EPYC, 2026-11-27).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Let the collector leave alone what lives now, until the end; newer garbage is collected.

    Garbage in cycles that is there already stays until then. It may be nested, and used by several
    threads: the first to come freezes, and the last to leave thaws the heap.
    """
    global _depth
    with _lock:
        # WHY: not inside another, or an engine that is done within that would keep its cache.
        if not _depth:
            gc.freeze()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                gc.unfreeze()
