# SPDX-License-Identifier: Apache-2.0
"""Where keys and values of new tokens are written."""

import jax.numpy as jnp
import numpy as np

from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.portable import write_pages


def test_new_tokens_are_written_to_their_pages_and_no_others_are_touched():
    """Padding, and a position behind the last page of the table, write nothing."""
    pages = np.full((2, 5, 2, 1, 4, 3), 7, np.float32)  # layers, pages, K and V, heads, page, C
    page_table = np.asarray([[4, 2], [1, 3]], np.int32)
    positions = np.asarray([[3, 4, 8], [-1, 0, 7]], np.int32)
    k = np.arange(18, dtype=np.float32).reshape(6, 1, 3)
    place = CachePlace(jnp.asarray(pages), jnp.asarray(page_table), jnp.asarray(positions), 1)
    want = pages.copy()
    for token, page, offset in ((0, 4, 3), (1, 2, 0), (4, 1, 0), (5, 3, 3)):
        want[1, page, 0, 0, offset], want[1, page, 1, 0, offset] = k[token, 0], k[token, 0] + 100
    written = np.asarray(write_pages(place, jnp.asarray(k), jnp.asarray(k + 100)))
    assert (written == want).all()
