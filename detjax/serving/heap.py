# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector and what lives long.

Compiled programs leave millions of objects: a full collection walks them all and finds nothing. It
takes a quarter of a second beside the programs of an 8B model, and every stream waits for it.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Let the collector leave alone what lives now, until the end; newer garbage is collected.

    Garbage in cycles that is there already stays until then. Where the heap is frozen already
    (`gc.freeze`, or this around it) nothing happens.
    """
    if gc.get_freeze_count():
        yield
        return
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()
