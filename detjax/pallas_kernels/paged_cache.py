# SPDX-License-Identifier: Apache-2.0
"""Where tokens lie in the paged cache."""

from typing import NamedTuple

import jax

from detjax.array_types import Array, Cached, Int32


class CachePlace(NamedTuple):
    """Tokens of some sequences in the paged cache of one layer.

    Attributes:
        pages: The cache, a `jax.Ref` where a kernel writes it in place. bfloat16, float32, or
            the bits of float8_e4m3fn as uint8 (`float8_cache`).
        page_table: Page of each block of a sequence; entries past its last block are not read.
        positions: Absolute position of each token; -1 marks padding.
        layer: Which layer's pages: a number, or an int32 scalar where all layers share one kernel.
    """

    pages: Cached[Array, "L N 2 K P C"]
    page_table: Int32[Array, "B n"]
    positions: Int32[Array, "B T"]
    layer: int | jax.Array
