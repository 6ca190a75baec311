# SPDX-License-Identifier: Apache-2.0
"""Sizes of gated DeltaNet that the cache follows from."""

STATE_BLOCK = 64
"""Most tokens between two states that are kept: the grid of absolute positions."""


def states_of_page(page_len: int) -> int:
    """How many states lie on a page of so many tokens, one behind each block of the grid.

    Raises:
        ValueError: If the page is no whole number of blocks.
    """
    count = max(1, page_len // STATE_BLOCK)
    if page_len % count or page_len // count > STATE_BLOCK:
        raise ValueError(
            f"a page of {page_len} tokens must be a multiple of {STATE_BLOCK}, or shorter, where "
            "layers have linear attention (attention_block of the profile)"
        )
    return count
